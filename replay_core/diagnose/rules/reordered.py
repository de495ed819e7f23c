"""Rewards in another order than their samples: the order is looked for in which answers explain them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import comb, log

import numpy as np
from msgspec import Struct

from replay_core.diagnose.advantage_variants import orders
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, finding, share, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import rule, skip_if

#: Log of the chance that equal answers agree in an order that is wrong: alone, and beside what similar ones show.
SURE, LIKELY = -14.0, -5.0
#: How far below what a shuffle leaves (in its standard deviations) answers that are alike have to be apart in another
#: order, and may be as recorded.
FITS, AS_RECORDED = -6.0, -2.0
#: Shuffles that tell the spread, responses of a group that are compared, and numbers in all.
SHUFFLES, GROUP, MOST = 60, 64, 1 << 22
#: Groups whose rewards differ before anything is looked for, and the share of equal answers that have to disagree.
FEWEST, DISAGREE = 6, 0.2


class _Samples(Struct, frozen=True):
    """One step: rewards, the group of each, its answer, and what it may have been sorted by [B]."""

    batch: StepBatch
    reward_B: Array
    group_B: Array
    answers: list[Sequence[object]]
    sizes: dict[str, Array]
    sample_B: Array
    """Which sample of the batch each of them is."""

    def groups(self) -> Iterator[Array]:
        by = np.argsort(self.group_B, kind="stable")
        for rows in np.split(by, np.flatnonzero(np.diff(self.group_B[by])) + 1):
            if 1 < len(rows) <= GROUP:
                yield rows


class _Judged(Struct, frozen=True):
    """How well answers explain rewards in one order: log of the chance that so many equal answers agree, how many do
    not, and all of them.
    """

    chance: float
    against: int
    pairs: int


@rule("D130", "rewards are in another order than their samples", link="rewards", scope="case", lasts=True,
      explains=("D04", "D56", "D100", "D123", "L08", "L17"),
      source="samples sorted by length for the judge, rewards gathered from workers, and never put back")  # fmt: skip
def reordered(case: Case) -> Finding | None:
    """Rewards beside the answers of their groups, as recorded and in the orders that trainers make: sorted by length
    (of the response, of prompt and response, of the prompt), dealt out over ranks or put together again, turned,
    moved on. In the right order equal answers to one prompt have one reward, and similar ones (by what they begin and
    end with) rewards that are nearer than a shuffle within groups leaves them.

    An error where as recorded a fifth and more of the equal answers disagree, and in one other order, the same in all
    steps, none does, by a chance of e^-14 at the most. A warning at e^-5, where similar answers tell it, too: 6
    standard deviations below a shuffle in that order, and not 2 as recorded. Groups whose rewards are all equal tell
    nothing; a judge that wavers agrees in no order.
    """
    steps = [one for batch in case.batches() for one in [_samples(batch.once)] if one is not None]
    mixed = [rows for one in steps for rows in one.groups() if np.ptp(one.reward_B[rows]) > 1e-6]
    skip_if(len(mixed) < FEWEST, f"needs {FEWEST} groups whose rewards differ, and their answers")
    if sum(one.reward_B.size for one in steps) * SHUFFLES > MOST:
        steps = steps[: max(1, MOST // SHUFFLES // max(one.reward_B.size for one in steps))]
    alike = [_alike(one) for one in steps]
    own = _judged(alike, [one.reward_B for one in steps])
    as_recorded: float | None = None
    if not own.pairs or own.against < max(2, DISAGREE * own.pairs):
        return None
    found: list[tuple[_Judged, str]] = []
    for name in _names(steps):
        moved = [_in_order(one, name) for one in steps]
        told = _judged(alike, moved)
        if told.against or told.chance > LIKELY:
            continue
        if told.chance > SURE:
            if as_recorded is None:
                as_recorded = _fit(alike, [one.reward_B for one in steps])
            if as_recorded < AS_RECORDED or _fit(alike, moved) > FITS:
                continue
        found.append((told, name))
    if not found:
        return None
    best, name = min(found, key=lambda one: one[0].chance)
    one = steps[0]
    apart = np.abs(_in_order(one, name) - one.reward_B)
    place: Where = one.batch.laid.where(one.batch.columns.reward_name, sample=int(one.sample_B[apart.argmax()]))
    how = name.removesuffix(_INVERSE)
    return finding(
        "error" if best.chance <= SURE else "warning",
        f"rewards belong to other samples: they stand in another order than the samples ({how}), and put back in "
        "order they follow the answers",
        place,
        shown("equal answers to one prompt with different rewards, as recorded", share(own.against, own.pairs), "0"),
        shown("of such answers, once rewards are put back in order", share(best.against, best.pairs)),
        shown("log of the chance of that", best.chance, f"> {LIKELY:g}"),
        shown("rewards of the first step that change", share(int((apart > 1e-6).sum()), len(apart))),
        cause="samples are sorted, or dealt out, before they are scored, and their scores are not put back in the "
        "batch's order: answers are paid what others earned, and advantages are noise",
        next_step="score ten answers by hand, and compare them with the recorded rewards row by row; index scores by "
        "sample, not by place",
        steps=sorted({each.batch.step for each in steps if each.batch.step is not None}),
    )


_INVERSE = ", the other way round"
_SORTED = {"": "in order of the {}, shortest first", "-": "in order of the {}, longest first",
           "~": "in order of the {}, longest first, and of equal ones the last first"}  # fmt: skip


def _names(steps: list[_Samples]) -> list[str]:
    """Every order that all steps have, and that changes something."""
    each = [set(_orders(one)) for one in steps]
    return [name for name in _orders(steps[0]) if all(name in one for one in each)]


def _orders(one: _Samples) -> dict[str, Array]:
    """Orders [B] by name: what each place's reward belongs to."""
    rows, found = np.arange(len(one.reward_B)), dict[str, Array]()
    for what, size_B in one.sizes.items():
        for sign, words in _SORTED.items():
            by = np.argsort(-size_B if sign == "-" else size_B, kind="stable")
            found[words.format(what)] = by[::-1] if sign == "~" else by
    found |= dict(orders(len(rows), int(np.unique(one.group_B).size)))
    return found | {f"{name}{_INVERSE}": np.argsort(order) for name, order in found.items()}


def _in_order(one: _Samples, name: str) -> Array:
    """The rewards, each given to the sample that it belongs to if this is the order they are in."""
    moved_B = np.empty_like(one.reward_B)
    moved_B[_orders(one)[name]] = one.reward_B
    return moved_B


def _samples(batch: StepBatch) -> _Samples | None:
    reward_B, group_B = batch.reward_B, batch.group_B
    if reward_B is None or group_B is None or not np.isfinite(reward_B).all() or len(reward_B) < 4:
        return None
    tokens_N, response_N, texts = batch.tokens_N, batch.response_N, batch.columns.texts("response_text")
    answers: list[Sequence[object]]
    sizes: dict[str, Array] = {}
    if tokens_N is not None and response_N is not None:
        answers = [tokens_N[span][response_N[span]].tolist() for span in batch.flat.spans]
        whole_B = np.asarray(batch.flat.lengths_B, dtype=np.int64)
        own_B = np.array([len(answer) for answer in answers])
        sizes = {"length of the response": own_B, "length of prompt and response": whole_B,
                 "length of the prompt": whole_B - own_B}  # fmt: skip
    elif texts is not None:
        answers = [text.split() for text in texts]
    else:
        return None
    if texts is not None:
        sizes["length of the text"] = np.array([len(text) for text in texts])
    # A later pass over the batch may have shuffled its rows: rewards came back in the order of the whole batch.
    by = _rows(batch)
    return _Samples(
        batch, reward_B[by], np.asarray(group_B)[by], [answers[row] for row in by],
        {what: size_B[by] for what, size_B in sizes.items()}, by,
    )  # fmt: skip


def _rows(batch: StepBatch) -> Array:
    """Samples in the order of the record that holds most of them at once, as it was collected."""
    best: tuple[int, Array] | None = None
    for sheet, places in batch.columns.sheets:
        if None in places or len(set(places)) != len(batch) or sheet.refs("rewards") is None is sheet.refs("input_ids"):
            continue
        if best is None or len(sheet.parts) < best[0]:
            best = len(sheet.parts), np.argsort(np.array(places, dtype=np.int64), kind="stable")
    return np.arange(len(batch)) if best is None else best[1]


def _alike(one: _Samples) -> list[tuple[Array, Array, list[Array]]]:
    """Each group's rows [K], how alike any two of their answers are [K, K], and the rows whose answers are equal."""
    found = []
    for rows in one.groups():
        answers = [one.answers[row] for row in rows]
        near = np.zeros((len(rows), len(rows)))
        same: dict[tuple[object, ...], list[int]] = {}
        for at, answer in enumerate(answers):
            same.setdefault(tuple(answer), []).append(at)
            for other in range(at):
                near[at, other] = near[other, at] = _likeness(answer, answers[other])
        found.append((rows, near, [np.array(each) for each in same.values() if len(each) > 1]))
    return found


def _likeness(a: Sequence[object], b: Sequence[object]) -> float:
    """The share of the longer answer that both begin and end with."""
    if a == b:
        return 1.0
    short, long = min(len(a), len(b)), max(len(a), len(b), 1)
    begins = next((at for at in range(short) if a[at] != b[at]), short)
    ends = next((at for at in range(short - begins) if a[-1 - at] != b[-1 - at]), short - begins)
    return (begins + ends) / long


_Alike = list[list[tuple[Array, Array, list[Array]]]]


def _judged(alike: _Alike, rewards: list[Array]) -> _Judged:
    chance, against, pairs = 0.0, 0, 0
    for reward_B, groups in zip(rewards, alike, strict=True):
        for rows, _, equal in groups:
            values = np.round(reward_B[rows], 6)
            if not np.ptp(values) > 0:
                continue
            _, counts = np.unique(values, return_counts=True)
            for each in equal:
                pairs += 1
                against += bool(np.ptp(values[each]) > 0)
                agreeing = sum(comb(int(count), len(each)) for count in counts) / comb(len(values), len(each))
                chance += log(agreeing) if agreeing > 0 else 0.0
    return _Judged(chance, against, pairs)


def _fit(alike: _Alike, rewards: list[Array]) -> float:
    """How far similar answers are apart, in standard deviations of what a shuffle within groups leaves them."""
    draw = np.random.default_rng(0)
    apart, mean, variance = 0.0, 0.0, 0.0
    for reward_B, groups in zip(rewards, alike, strict=True):
        for rows, near, _ in groups:
            values = reward_B[rows]
            if not np.ptp(values) > 1e-6 or not near.any():
                continue
            far = np.abs(values[:, None] - values[None])
            order = draw.permuted(np.tile(np.arange(len(rows)), (SHUFFLES, 1)), axis=1)
            shuffled = (near * far[order[:, :, None], order[:, None, :]]).sum((1, 2))
            apart, mean, variance = (
                apart + float((near * far).sum()), mean + float(shuffled.mean()), variance + float(shuffled.var()),
            )  # fmt: skip
    return (apart - mean) / variance**0.5 if variance > 0 else 0.0
