"""The first number that is none, in order of computation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from replay_core import pages
from replay_core.diagnose.batch import Batch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where
from replay_core.diagnose.rule import Skip, rule
from replay_core.diagnose.stating import finding, look_at, shown
from replay_core.documents.diagnosis import Link
from replay_core.errors import RldbgError
from replay_core.naming import Phase, canonical, meaning
from replay_core.records import Record, TensorRef

#: What is no computed number: masks of attention hold -inf on purpose, positions and ids are whole numbers.
_EXPECTED = ("mask", "ids", "positions", "layout", "note")
_FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class _Bad:
    """A tensor with numbers that are none, where it first has one, and how many."""

    order: tuple[int, int, int]
    name: str
    where: Where
    nan: int
    inf: int
    counts: bool
    """Whether any of them is on a token that counts, or is not about tokens at all."""


@rule("D21", "numbers that are not finite", link="dump", scope="case",
      source="verl#1197 #2626; miles and TRL hide them (nan_to_num, ratio 1), prime-rl writes null")  # fmt: skip
def not_finite(case: Case) -> Iterator[Finding]:
    """Every floating tensor in order of computation (rollout, rewards, old, reference, advantages, modules, losses,
    gradients, norm, parameters): the first NaN or infinity on a token that counts is an error and is where to
    look; later ones follow from it. One only outside the mask is worth saying (info). Sentinels a framework writes
    for "none" do not count.
    """
    bad: list[_Bad] = []
    placed: set[tuple[str, str]] = set()
    for batch in case.batches():
        bad += _in_batch(batch, placed)
    looked = bool(placed)
    for number, record in enumerate(case.records()):
        looked = looked or _has_numbers(record)
        bad += _in_record(record, number, placed)
        record.release()
    if not looked:
        raise Skip("there is no floating number in it")
    counting = sorted((one for one in bad if one.counts), key=lambda one: one.order)
    if counting:
        yield _first(counting)
    elif bad:
        first = min(bad, key=lambda one: one.order)
        yield finding(
            "D21",
            "info",
            f"{first.name} is not finite, on tokens that do not count",
            evidence=[shown("NaN", first.nan), shown("infinite", first.inf)],
            cause="values outside the mask are never used; a product with the mask would still keep NaN x 0 = NaN",
            next_step=look_at(first.where),
            where=first.where,
            scope="case",
        )


#: The link of the chain that a phase of the computation belongs to.
_LINKS: dict[Phase, Link] = {
    Phase.ROLLOUT_TOKENS: "tokens", Phase.MASKS: "masks", Phase.REWARDS: "rewards", Phase.VALUES: "advantages",
    Phase.ROLLOUT_LOGPROBS: "rollout_logprobs", Phase.OLD_LOGPROBS: "logprobs", Phase.REF_LOGPROBS: "ref",
    Phase.ADVANTAGES: "advantages", Phase.MODULES: "logprobs", Phase.LOGPROBS: "logprobs", Phase.ENTROPY: "logprobs",
    Phase.RATIO: "ratio", Phase.LOSSES: "loss", Phase.GRADIENTS: "gradient", Phase.GRAD_NORM: "gradient",
    Phase.PARAMS: "optimizer",
}  # fmt: skip


def _first(counting: list[_Bad]) -> Finding:
    first = counting[0]
    phase = meaning(canonical(first.name)).phase
    what = "NaN" if first.nan and not first.inf else "infinite" if first.inf and not first.nan else "NaN and infinite"
    later = list(dict.fromkeys(one.name for one in counting[1:] if one.name != first.name))
    stated = finding(
        "D21",
        "error",
        f"{first.name} is the first tensor that is not finite ({what}), at step {first.where.step}"
        if first.where.step is not None
        else f"{first.name} is the first tensor that is not finite ({what})",
        evidence=[
            shown("NaN", first.nan, "0", first.where.path),
            shown("infinite", first.inf, "0"),
            *([shown("not finite after it", ", ".join(later[:6]))] if later else []),
        ],
        cause=_CAUSES.get(phase, "an overflow, a division by zero, or a row with nothing to attend to"),
        next_step=look_at(first.where),
        where=first.where,
        steps=() if first.where.step is None else (first.where.step,),
        scope="case",
    )
    return replace(stated, link=_LINKS.get(phase, stated.link))


_CAUSES = {
    Phase.REWARDS: "the reward function returned it: a failed parse, a division by an empty length",
    Phase.ROLLOUT_LOGPROBS: "the engine gave a sampled token probability 0: filtered logits, or "
    "weights that are already NaN",
    Phase.OLD_LOGPROBS: "-inf: a token the trainer's own distribution excludes (filtered or masked "
    "logits); NaN: its weights",
    Phase.REF_LOGPROBS: "-inf: a token the reference excludes; NaN: its weights or an empty attention row",
    Phase.ADVANTAGES: "0 / 0 in the normalisation, or rewards that are already not finite",
    Phase.MODULES: "an overflow in this module, or a row of attention with nothing to attend to",
    Phase.GRADIENTS: "finite in the forward, not in the backward: a log or a sqrt at 0, an overflow in fp16",
    Phase.PARAMS: "an update with a gradient that was not finite",
}


def _in_batch(batch: Batch, placed: set[tuple[str, str]]) -> Iterator[_Bad]:
    """Tensors about tokens: whether a bad value counts depends on the mask."""
    step = -1 if batch.step is None else batch.step
    trained_N = batch.trained_N
    for sheet, _ in batch.sheets:
        for name in sorted(sheet.names()):
            known = meaning(name)
            if known.alignment not in ("next", "full") or known.kind in _EXPECTED:
                continue
            for column in batch.columns(name):
                for part in sheet.parts:
                    placed.add((str(part.record.path), name))
                    placed.update((str(record.path), name) for record in part.siblings)
                bad_N = column.said_N & ~np.isfinite(column.values_N)
                if not bad_N.any() or ("null" in (column.ref.sentinel or "") and known.phase == Phase.UNKNOWN):
                    continue
                counted_N = bad_N if trained_N is None else bad_N & trained_N
                shown_N = counted_N if counted_N.any() else bad_N
                place = batch.where(name, at=int(np.flatnonzero(shown_N)[0]))
                nan = int(np.isnan(column.values_N[shown_N]).sum())
                yield _Bad((step, known.phase, 0), name, place, nan, int(shown_N.sum()) - nan, bool(counted_N.any()))


def _in_record(record: Record, number: int, placed: set[tuple[str, str]]) -> list[_Bad]:
    """Everything else a record holds: rewards, losses, modules, gradients, parameters."""
    found: list[_Bad] = []
    if record.key.stage == "training_metrics":
        return found  # what was logged of the step follows from its tensors, and has a rule of its own
    try:
        fields = record.tensors()
    except RldbgError:
        return found
    for place, ref in enumerate(fields):
        name = ref.canonical or ref.name
        known = meaning(name)
        if ref.is_text or not ref.is_readable or ref.dtype not in _FLOATS or known.kind in _EXPECTED:
            continue
        if ref.line is not None or (str(record.path), name) in placed or "null" in (ref.sentinel or ""):
            continue
        if known.alignment in ("next", "full") and known.phase != Phase.MODULES:
            continue  # about tokens, and of samples that no batch could place: which count is not known
        nan, inf, at = _count(ref)
        if nan or inf:
            key = record.key
            where = Where(
                step=key.step, micro=key.micro, rank=key.rank, role=key.role, stage=key.stage, tensor=ref.name,
                sample=at if ref.shape and ref.shape[0] > 1 else None, path=str(record.path),
            )  # fmt: skip
            order = (-1 if key.step is None else key.step, known.phase, number * 100000 + place)
            found.append(_Bad(order, name, where, nan, inf, known.phase != Phase.UNKNOWN))
    return found


def _has_numbers(record: Record) -> bool:
    try:
        return any(ref.dtype in _FLOATS and ref.is_readable for ref in record.tensors())
    except RldbgError:
        return False


def _count(ref: TensorRef) -> tuple[int, int, int]:
    """NaN, infinities, and the first row of one; read piece by piece."""
    nan = inf = 0
    first = -1
    for start, values in pages.flat_chunks(ref):
        real = values.astype(np.float32) if ref.dtype == "bfloat16" else values
        finite = np.isfinite(real)
        if finite.all():
            continue
        missing = int(np.isnan(real).sum())
        nan, inf = nan + missing, inf + int((~finite).sum()) - missing
        if first < 0:
            first = start + int(np.flatnonzero(~finite)[0])
    row = max(1, ref.numel // max(1, ref.shape[0] if ref.shape else 1))
    return nan, inf, first // row
