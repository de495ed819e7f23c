"""What a supervised loss is divided by: made again of the log-probabilities of the tokens that count."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

import numpy as np
from msgspec import Struct

from replay_core import pages
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, error, finding, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import rule, skip_if
from replay_core.diagnose.rules.pair_rows import micro_batches
from replay_core.diagnose.two_sides import sides_of
from replay_core.errors import RldbgError
from replay_core.records import Record, TensorRef
from replay_core.samples.batch import IGNORED

#: Micro-batches that have to agree, how nearly, and how much longer one of an update is than another.
FEWEST, NEAR, UNEVEN = 3, 2e-4, 1.5
#: What a loss of demonstrations has no part of.
_OTHERS = frozenset({"advantages", "reward", "token_rewards", "teacher_logprobs", "returns", "ref_logprobs"})
_LOSSES = ("lm_loss", "ce_loss", "cross_entropy_loss", "nll_loss", "sft_loss", "loss")
_ITEMS = ("num_items_in_batch", "global_tokens", "global_num_tokens", "num_tokens_in_batch", "global_batch_tokens")


class _Said(Struct, frozen=True):
    """A micro-batch of demonstrations: the sum of its tokens' losses, its logged loss, and what might divide it."""

    record: Record
    name: str
    loss: float
    total: float
    counted: int
    labelled: int
    """Tokens that count, and first ones of rows that do: no loss is of them, though trainers count them as items."""
    attended: int
    slots: int
    items: float | None

    @property
    def divisor(self) -> float:
        return self.total / self.loss


@rule("D168", "a supervised loss is divided by other tokens than count", link="reduction", scope="case", lasts=True,
      explains=("L08", "L14"),
      source="transformers#34191: a mean of means over micro-batches; masked tokens in the divisor")  # fmt: skip
def divided(case: Case) -> Finding | None:
    """The loss of demonstrations (labels or a mask, no advantages, rewards, pairs or teacher), made again of recorded
    log-probabilities in 3 micro-batches and more, to 2e-4: what their sum is divided by. An error where that is all
    tokens that are attended to, or every slot of the rows, and not those that count (times the micro-batches of an
    update, where each is a share). A warning where each micro-batch is a mean over its own tokens, the number of all of
    the update's (`num_items_in_batch`) is recorded beside it, and one of an update has 1.5 times the tokens of another:
    tokens of short ones weigh more.
    """
    every = [one for records in micro_batches(case) if (one := _said(records)) is not None]
    skip_if(len(every) < FEWEST, f"needs labels, log-probabilities and losses of {FEWEST} supervised micro-batches")
    skip_if(bool(case.algorithm.number("label_smoothing", "label_smoothing_factor")), "labels are smoothed")
    by_update: dict[tuple[int | None, int | None], list[_Said]] = defaultdict(list)
    for one in every:
        by_update[one.record.key.step, one.record.key.rank].append(one)
    micros = {id(one): float(len(of)) for of in by_update.values() for one in of}
    stated = case.algorithm.number("gradient_accumulation_steps", "accumulation_steps") or 1.0

    def made_by(divisors: list[float]) -> bool:
        return all(abs(one.divisor - by) <= NEAR * by for one, by in zip(every, divisors, strict=True))

    shares = {times: [times] * len(every) for times in (1.0, stated)}
    shares[-1.0] = [micros[id(one)] for one in every]
    whole = {key: sum(one.counted for one in of) for key, of in by_update.items()}
    if made_by([float(whole[one.record.key.step, one.record.key.rank]) for one in every]):
        return None
    items = {key: sum(one.labelled for one in of) for key, of in by_update.items()}
    if made_by([float(items[one.record.key.step, one.record.key.rank]) for one in every]):
        return None
    if all(one.items for one in every) and made_by([float(one.items or 1.0) for one in every]):
        return None
    own = next((by for by in shares.values() if made_by([n * one.counted for n, one in zip(by, every, strict=True)])),
               None)  # fmt: skip
    if own is None and any(
        made_by([n * one.labelled for n, one in zip(by, every, strict=True)]) for by in shares.values()
    ):
        return None
    first = every[0]
    evidence = [
        shown("loss", first.loss, f"{first.total / max(first.counted, 1):.6g}, over the tokens that count",
              first.record.path.name),
        shown("what its tokens' losses are divided by", first.divisor, f"{first.counted}, those that count"),
    ]  # fmt: skip
    steps = list(dict.fromkeys(one.record.key.step for one in every))
    if own is None:
        for what, each in (
            ("all tokens that are attended to", [one.attended for one in every]),
            ("every slot of its rows", [one.slots for one in every]),
        ):
            if max(abs(a - one.counted) for a, one in zip(each, every, strict=True)) == 0:
                continue
            if any(made_by([n * a for n, a in zip(by, each, strict=True)]) for by in shares.values()):
                return error(
                    f"the loss of demonstrations is divided by {what}, and not by those that count: it is "
                    f"{median(one.counted / a for one, a in zip(every, each, strict=True)):.2g} of what it says",
                    Where.of(first.record, first.name),
                    *evidence,
                    shown("micro-batches that agree", len(every)),
                    cause="the sum over labels that count is divided by a number of tokens that includes prompts or "
                    "padding: the size of an update depends on how much of a row is masked",
                    steps=steps,
                )  # fmt: skip
        return None
    uneven = [
        of for of in by_update.values()
        if len(of) > 1 and max(one.counted for one in of) >= UNEVEN * max(min(one.counted for one in of), 1)
        and all(one.items for one in of)
    ]  # fmt: skip
    if not uneven or any(one.items == one.counted for of in uneven for one in of):
        return None
    few, many = (pick(uneven[0], key=lambda one: one.counted) for pick in (min, max))
    return finding(
        "warning",
        "each micro-batch's loss is the mean over its own tokens, and the number of the whole update's is recorded "
        f"beside it: a token of a micro-batch of {few.counted} weighs {many.counted / max(few.counted, 1):.3g} times "
        f"as much as one of {many.counted}",
        Where.of(first.record, first.name),
        *evidence,
        shown("tokens of the update, as recorded", first.items),
        shown("updates with uneven micro-batches", len(uneven)),
        cause="the mean of means over an accumulation is no mean over its tokens: num_items_in_batch does not reach "
        "the loss (a model or a compute_loss of one's own that takes no such argument)",
        next_step="divide each micro-batch's sum by the tokens of the whole update",
        steps=steps,
    )


def _said(records: list[Record]) -> _Said | None:
    refs: dict[str, tuple[Record, TensorRef]] = {}
    for record in records:
        if record.key.stage in ("gradient", "param", "optimizer", "training_metrics", "modules"):
            continue
        try:
            for ref in record.tensors():
                if not ref.is_text and ref.is_readable:
                    refs.setdefault(ref.canonical or ref.name, (record, ref))
        except RldbgError:
            return None
    if _OTHERS & refs.keys() or any(sides_of(name) for name in refs):
        return None
    holder = next(((name, refs[name]) for name in _LOSSES if name in refs and refs[name][1].numel == 1), None)
    logps = next((refs[name][1] for name in ("policy_logprobs", "rollout_logprobs") if name in refs), None)
    ids = refs["input_ids"][1] if "input_ids" in refs else None
    if holder is None or logps is None or ids is None or ids.rows is not None or len(ids.shape) != 2:
        return None
    counts_BS = _counts(refs, ids.shape)
    if counts_BS is None or logps.rows is not None or len(logps.shape) != 2 or logps.shape[0] != ids.shape[0]:
        return None
    values = np.asarray(pages.array(logps), dtype=np.float64)
    if values.shape[1] != ids.shape[1] - 1:
        return None
    counts = counts_BS[:, 1:]
    total = -float(np.where(counts, values, 0.0).sum())
    attention = refs.get("attention_mask")
    attended = int((pages.array(attention[1]) != 0).sum()) if attention is not None else ids.numel
    _, (record, ref) = holder
    loss = float(np.asarray(pages.array(ref)).reshape(-1)[0])
    items = next((float(np.asarray(pages.array(refs[each][1])).reshape(-1)[0]) for each in _ITEMS
                  if each in refs and refs[each][1].numel == 1), None)  # fmt: skip
    if not counts.any() or not np.isfinite([loss, total]).all() or loss <= 0 or total <= 0:
        return None
    return _Said(record, ref.name, loss, total, int(counts.sum()), int(counts_BS.sum()), attended, ids.numel, items)


def _counts(refs: dict[str, tuple[Record, TensorRef]], shape: tuple[int, ...]) -> Array | None:
    for name in ("labels", "loss_mask", "response_mask"):
        if name in refs and refs[name][1].shape == shape:
            values = np.asarray(pages.array(refs[name][1]))
            counts: Array = values != IGNORED if name == "labels" else values != 0
            return counts
    return None
