"""Single weights of a model, recorded step by step: those that no gradient reaches, and an optimizer that forgot."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from replay_core import pages
from replay_core.budget import stored_bytes
from replay_core.diagnose.algorithm import settings_of, stated_by
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, finding, listed, share, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import rule, skip_if
from replay_core.diagnose.rules.step_counters import begins_on_purpose
from replay_core.diagnose.rules.weights import refs_by_step
from replay_core.records import Record
from replay_core.regexes import regex

#: Steps whose gradients are 0 before it is no chance; and bytes of all that is read.
STEPS, MOST = 3, 1 << 28
#: What a batch may leave without a gradient: experts that no token chose, towers of what it has none of, places that no
#: row is as long as, drafts that a run trains only when asked to, and the bias of a choice of experts, which has none.
_SELDOM = regex(
    r"vision|visual|image|audio|mm_|projector|expert|position_embed|wpe|pos_emb|(?:^|[._])mtp(?:[._]|$)|eagle|"
    r"correction_bias",
    re.IGNORECASE,
)
_ROUTER = regex(r"router|gate\.weight|gating|mlp\.gate(?![a-z_])", re.IGNORECASE)
#: Settings of a run that leaves some alone on purpose.
_FREEZES = regex(r"freeze|frozen", re.IGNORECASE)
#: How near the middle one the sizes of a first update's steps lie, and the share of them that do; in others at most.
NEAR, ALL, OTHERS = 0.05, 0.95, 0.6
#: Numbers that moved before their sizes tell, how often a number's rounding a step is, and steps beside it.
NUMBERS, ROUNDED, BESIDE = 32, 20.0, 2


def _of_stage(case: Case, stage: str) -> dict[int, list[Record]]:
    """The policy's records of a stage by step; empty where they are too large to be read."""
    found: dict[int, list[Record]] = {}
    for record in case.records():
        key = record.key
        if key.stage == stage and key.step is not None and key.role != "critic":
            found.setdefault(key.step, []).append(record)
    paths = {record.path for each in found.values() for record in each}
    return found if sum(map(stored_bytes, paths)) <= 2 * MOST else {}


@rule("D151", "no gradient reaches some of the weights", link="gradient", scope="case", lasts=True,
      explains=("D57",),
      source="Megatron-LM routing replay (ISEEKYAN#79): scores gathered after the top-k; trl#6700")  # fmt: skip
def unreached(case: Case) -> Finding | None:
    """Recorded gradients that are exactly 0, to the last number, in every step (3 and more) while at least half of the
    others are not: a warning; worth knowing where all of them are of what a batch may have nothing of (experts, image
    towers, tables of positions, drafts), or the run states that it freezes some. Of none where all are 0 (D23 says so).
    """
    by_step = _of_stage(case, "gradient")
    skip_if(len(by_step) < STEPS, f"needs the gradients of {STEPS} steps: rldbg record --gradients .")
    heard: dict[str, list[bool]] = {}
    holder: dict[str, Where] = {}
    for records in by_step.values():
        for record in records:
            for ref in record.tensors():
                if ref.is_text or not ref.is_readable or not ref.shape:
                    continue
                heard.setdefault(ref.name, []).append(bool(np.asarray(pages.array(ref)).any()))
                holder.setdefault(ref.name, Where.of(record, ref.name))
    still = sorted(name for name, each in heard.items() if len(each) >= STEPS and not any(each))
    moved = sorted(name for name, each in heard.items() if any(each))
    if not still or len(still) > len(moved):
        return None
    told = [name for name in still if not _SELDOM.search(name)]
    routers = [name for name in told if _ROUTER.search(name)]
    first = (routers or told or still)[0]
    frozen = [
        name for name, values in settings_of(stated_by(case.run)).items()
        if _FREEZES.search(name) and any(value and str(value).lower() not in ("false", "none", "0") for value in values)
    ]  # fmt: skip
    what = (
        "the router has" if routers and len(routers) == len(told) else f"{share(len(still), len(heard))} weights have"
    )
    return finding(
        "warning" if told and not frozen else "info",
        f"{what} no gradient: it is exactly 0 in all {len(by_step)} steps, and "
        + ("the experts' are not" if routers and any("expert" in name for name in moved) else "the others' are not"),
        holder[first],
        shown("gradients that are 0 throughout", listed(still, 4), "none"),
        shown("gradients that are not", listed(moved, 4)),
        *([shown("stated", ", ".join(frozen))] if frozen else []),
        cause=(
            "routing is taken from elsewhere (replay) or its weights are gathered where they were zeroed (after the "
            "top-k), are rounded, detached, or one alone is left and normalised to 1: experts learn, and nothing "
            "learns to choose them"
            if routers
            else "these weights take no part in the loss: a branch that is detached or multiplied by 0, a layer whose "
            "output is overwritten, inputs that require no gradient under gradient checkpointing, or a hook that "
            "zeroes them"
        ),
        steps=sorted(by_step),
    )  # fmt: skip


class _Update(Struct, frozen=True):
    """What one step of the optimizer did: the sizes of its steps, and the record after it."""

    step: int
    where: Where
    alike: float
    """Share of the numbers that moved whose step has the middle size."""
    size: float


def _updates(case: Case) -> Iterator[_Update]:
    """The updates between two steps that follow each other, of float32 weights: recorded, or as checkpoints."""
    by_step = {
        step: [(Where.of(record, ref.name), ref) for record in records for ref in record.tensors()]
        for step, records in _of_stage(case, "param").items()
    }
    if not by_step:
        by_step = {step: [(Where(step=step), ref) for ref in refs] for step, refs in refs_by_step(case).items()}
    before: dict[str, Array] = {}
    last: int | None = None
    for step in sorted(by_step):
        now: dict[str, Array] = {}
        place = Where()
        for there, ref in by_step[step]:
            if ref.is_readable and ref.dtype == "float32" and len(ref.shape) and not ref.is_text:
                now[ref.name] = np.asarray(pages.array(ref), dtype=np.float64).reshape(-1)
                place = place if place.tensor else there
        if last == step - 1:
            sizes = []
            for name in before.keys() & now.keys():
                if before[name].size == now[name].size:
                    moved = np.abs(now[name] - before[name])
                    rounding = np.abs(before[name]) * 2.0**-23
                    sizes.append(moved[(moved > ROUNDED * rounding) & (moved > 0)])
            every = np.concatenate(sizes) if sizes else np.zeros(0)
            if every.size >= NUMBERS:
                middle = float(np.median(every))
                yield _Update(last, place, float((np.abs(every - middle) <= NEAR * middle).mean()), middle)
        before, last = now, step


@rule("D150", "the optimizer begins anew", link="optimizer", scope="case",
      explains=("L02", "L08"),
      source="NeMo-Automodel#763, open-r1#450: weights are loaded on resume, and Adam's moments are not")  # fmt: skip
def forgot(case: Case) -> Finding | None:
    """Float32 weights of steps that follow each other, recorded or as checkpoints: the first step of Adam moves every
    number by one and the same size (the learning rate), whatever its gradient; with moments of earlier gradients no
    step does. A warning where an update that is not the dump's first moves 95 % of the numbers (32 and more) by its
    middle size, to a twentieth, and the update before it and the one after it 60 % at most. Lion and signSGD do so in
    every step, and are not told. Worth knowing of a run that states that it resets its optimizer.
    """
    every = list(_updates(case))
    skip_if(len(every) < BESIDE + 1, "needs the float32 weights of four steps that follow each other")
    fresh = [
        at for at in range(1, len(every))
        if every[at].alike >= ALL and every[at - 1].alike <= OTHERS
        and every[at - 1].step == every[at].step - 1
        and (at + 1 == len(every) or every[at + 1].alike < ALL)
    ]  # fmt: skip
    if not fresh or 3 * len(fresh) > len(every):
        return None
    # Where every other step begins anew, it is what the run does.
    at = fresh[0]
    one, before = every[at], every[at - 1]
    return finding(
        "info" if begins_on_purpose(case) else "warning",
        f"Adam's moments begin anew at step {one.step}: its update moves {one.alike:.0%} of all numbers by one size "
        f"({one.size:.3g}), as a first step does, and the update before it {before.alike:.0%}",
        one.where,
        shown("numbers whose step has the middle size", one.alike, f"<= {OTHERS:g}",
              f"weights of step {one.step} and {one.step + 1}"),
        shown("in the update before", before.alike),
        shown("size of the step", one.size, None),
        shown("of the step before, middle", before.size),
        shown("steps that begin anew", listed(every[each].step for each in fresh)),
        cause="the optimizer was made anew and its state was not loaded: a resume that restores the weights alone, a "
        "checkpoint without the optimizer (save_only_model), or an optimizer that is built again after an offload; the "
        "first updates are as large as the rate allows, in the direction of single batches",
        next_step="save and load optimizer.state_dict() with the weights, or warm the rate up again after a resume",
        steps=[every[each].step for each in fresh],
    )  # fmt: skip
