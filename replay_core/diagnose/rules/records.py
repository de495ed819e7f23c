"""What the dump itself lacks, or has twice: the same, other in padding only, other by a cast, or other."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import combinations

import numpy as np

from replay_core import pages
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.columns import Column
from replay_core.diagnose.finding import Finding, Where, error, finding, info, share, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import rule, skip_if
from replay_core.diagnose.sheets import Sheet
from replay_core.dtypes import EPS, coarsest
from replay_core.dumps.completeness import MORE, every_hole
from replay_core.naming import MEANINGS
from replay_core.records import Problem

#: Tensors whose second copy has to be the first: computed once, then handed on.
_COPIED = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages", "values", "returns")
#: Casting leaves at most half of an eps, and arithmetic a little more.
A_CAST = 0.51


def _copies(batch: StepBatch) -> list[tuple[Column, Column, Array]]:
    """Two records of one tensor, and the tokens that both say something of and that are not bitwise one number.

    Samples of equal tokens are left out: which of them is which, two records need not agree on.
    """
    assert MEANINGS.keys() >= set(_COPIED)
    pairs = [pair for name in _COPIED for pair in combinations(list(batch.columns.every(name)), 2)]
    skip_if(not pairs, "no tensor is recorded twice in the step; rldbg compare takes two dumps")
    alone_N = ~np.repeat(_twin_B(batch), batch.flat.lengths_B)
    return [
        (a, b, a.said_N & b.said_N & alone_N & (a.values_N != b.values_N)
         & ~(np.isnan(a.values_N) & np.isnan(b.values_N)))
        for a, b in pairs
    ]  # fmt: skip


def _is_cast(a: Column, b: Column, apart_N: Array) -> bool:
    """Whether the differences are what rounding to the narrower of the two dtypes leaves."""
    limit = A_CAST * EPS[coarsest(a.dtype, b.dtype)]
    x, y = a.values_N[apart_N], b.values_N[apart_N]
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return False
    return bool((np.abs(x - y) <= limit * np.maximum(np.abs(x), np.abs(y)) + 1e-12).all())


#: Decimals that a text keeps of a number.
_DECIMALS = range(3, 9)


def _is_rounded(a: Column, b: Column, apart_N: Array) -> bool:
    """Whether the differences are what is lost where one of the two was written as text, to so many decimals."""
    x, y = a.values_N[apart_N], b.values_N[apart_N]
    largest, rounding = float(np.abs(x - y).max()), EPS[coarsest(a.dtype, b.dtype)]

    def is_of(side: Array, decimals: int) -> bool:
        return bool((np.abs(side - np.round(side, decimals)) <= rounding * np.abs(side) + 1e-12).all())

    return any(
        largest <= 0.51 * 10.0**-decimals + rounding * float(np.abs(x).max())
        and (is_of(x, decimals) or is_of(y, decimals))
        for decimals in _DECIMALS
    )


@rule("D35", "a tensor recorded twice is not the same twice", link="dump", scope="batch", lasts=True,
      explains=("D04", "D07", "D14", "D18", "D19", "D28", "D50", "D81"),
      source="slime and verl determinism guides")  # fmt: skip
def not_the_same(batch: StepBatch) -> Finding | None:
    """Copies of rollout, old and reference log-probabilities, advantages, values and returns within one step, on the
    same tokens: any difference on a token that counts beyond a cast, or the rounding of a text, is a warning. An error
    where advantages or masks that the update's micro-batches hold differ from the batch's in 6 rows and more, and are
    those of the row the same number of rows on in all of these.
    """
    if (others := _of_other_rows(batch)) is not None:
        return others
    for a, b, apart_N in _copies(batch):
        counted_N = apart_N if batch.trained_N is None else apart_N & batch.trained_N
        # What is not finite in one of them is D21's.
        counted_N = counted_N & np.isfinite(a.values_N) & np.isfinite(b.values_N)
        if not counted_N.any() or _is_cast(a, b, counted_N) or _is_rounded(a, b, counted_N):
            continue
        largest = float(np.abs(a.values_N - b.values_N)[counted_N].max())
        both_N = a.said_N & b.said_N & ~np.repeat(_twin_B(batch), batch.flat.lengths_B)
        return warning(
            f"{a.name} is recorded twice and differs on {int(counted_N.sum())} tokens that count",
            batch.laid.where(a.name, at=counted_N),
            shown("largest difference", largest, "0", f"{a.source} and {b.source}"),
            shown("tokens in both", int(both_N.sum())),
            cause="it was computed twice (dropout, atomics, another micro-batch), or changed between the two records",
        )
    return None


#: Rows that are another's, of 3 values and more, before a number of rows between them is no chance.
ROWS, VALUES = 6, 3


def _of_other_rows(batch: StepBatch) -> Finding | None:
    """Advantages or masks of the update that are those of other rows of the batch, all as many rows away."""
    for sheet, places in batch.columns.sheets:
        parts = sheet.parts
        if any(part.held.record.key.micro is None for part in parts) or None in places:
            continue
        # In the update's order, which is not the batch's where it was shuffled.
        order = np.argsort(np.array(places), kind="stable")
        for name in ("advantages", "response_mask", "loss_mask", "old_logprobs", "ref_logprobs", "rollout_logprobs"):
            whole = next((one for one, at in batch.columns.sheets if one is not sheet and one.refs(name)
                          and at == list(range(len(batch)))), None)  # fmt: skip
            due, had = (None if each is None else _row_figures(each, name) for each in (whole, sheet))
            if due is None or had is None or len(due) != len(had) or len(order) != len(had):
                continue
            due, had = due[order], had[np.array(places)[order]]
            off = np.flatnonzero(~np.isclose(due, had, atol=1e-6))
            if off.size < ROWS or np.unique(np.round(had[off], 6)).size < VALUES:
                continue
            for by in sorted(range(-(len(due) // 2), len(due) // 2 + 1), key=abs):
                if by and np.allclose(had[off], due[(off + by) % len(due)], atol=1e-6):
                    return _of_rows(batch, name, by, off, parts[0].held.record.path.name)
            if (
                "mask" not in name
                and (found := _in_another_order(batch, sheet, name, due, had, off, order)) is not None
            ):
                return found
    return None


def _in_another_order(
    batch: StepBatch, sheet: Sheet, name: str, due: Array, had: Array, off: Array, order: Array
) -> Finding | None:
    """Rows of the update that are the batch's in another order, each of them another's."""
    if not np.allclose(np.sort(had[off]), np.sort(due[off]), atol=1e-5):
        return None
    micro = np.array([sheet.index[place][0] for place in range(len(sheet))])[
        np.array(next(places for one, places in batch.columns.sheets if one is sheet))[order]
    ]
    own = all(
        np.allclose(np.sort(had[off][micro[off] == one]), np.sort(due[off][micro[off] == one]), atol=1e-5)
        for one in np.unique(micro[off])
    )
    words = {"advantages": "advantages", "old_logprobs": "old log-probabilities",
             "ref_logprobs": "reference log-probabilities",
             "rollout_logprobs": "rollout log-probabilities"}  # fmt: skip
    return error(
        f"{words[name]} of the update belong to other samples: {share(off.size, len(batch))} rows have those of "
        "another " + ("row of their micro-batch" if own else "row of the batch"),
        batch.laid.where(name, sample=0),
        shown("rows that differ between batch and update", int(off.size), "0",
              sheet.parts[0].held.record.path.name),
        shown("of them those that are another row's of the batch", int(off.size)),
        cause="rows were put in another order (sorted by length, shuffled, dealt out to micro-batches) and this tensor "
        "was not put in it with them, or was twice: each row is trained with what belongs to another",
    )  # fmt: skip


def _row_figures(sheet: Sheet, name: str) -> Array | None:
    """A number of each row [B] of a sheet: how many entries of a mask are set, or the largest advantage by size; None
    of tensors that are no rows.
    """
    found = []
    for part, ref in zip(sheet.parts, sheet.refs(name) or (), strict=False):
        if ref.rows is not None or not ref.shape or ref.shape[0] != len(part) or not ref.numel:
            return None
        rows_BX = np.nan_to_num(pages.array(ref).astype(np.float64)).reshape(len(part), -1)
        if "logprobs" in name:
            found.append(rows_BX.sum(1))
        elif "mask" in name:
            found.append((rows_BX != 0).sum(1).astype(np.float64))
        else:
            found.append(rows_BX[np.arange(len(part)), np.abs(rows_BX).argmax(1)])
    return np.concatenate(found) if len(found) == len(sheet.parts) else None


def _of_rows(batch: StepBatch, name: str, by: int, off: Array, source: str) -> Finding:
    sizes = sorted({len(rows) for rows in batch.laid.rows_by_micro().values()})
    away = f"{abs(by)} row{'s' * (abs(by) > 1)} {'after' if by > 0 else 'before'}"
    whole = " (a micro-batch away)" if sizes == [abs(by)] and abs(by) > 1 else ""
    noun = "advantages" if name == "advantages" else "the mask"
    return error(
        f"{noun} of the update belong{'' if name == 'advantages' else 's'} to other samples: in "
        f"{share(off.size, len(batch))} rows {'they are those' if name == 'advantages' else 'it is that'} of the row "
        f"{away}{whole}",
        batch.laid.where(name, sample=0),
        shown("rows that differ between batch and update", int(off.size), "0", source),
        shown(f"of them those of the row {away}", int(off.size)),
        cause="a micro-batch or mini-batch takes its tokens from one place and this tensor from another: an index that "
        "counts within the mini-batch where it has to count in the batch, or that is one ahead",
    )


@rule("D38", "two copies differ in padding only", link="dump", scope="batch", source="docs/evidence.md#critics")
def only_padding(batch: StepBatch) -> Finding | None:
    """Copies of one tensor that are the same on every token that counts and not elsewhere: info, it is no bug."""
    skip_if(batch.trained_N is None, "needs a mask")
    for a, b, apart_N in _copies(batch):
        if apart_N.any() and not (apart_N & batch.trained_N).any():
            return info(
                f"copies of {a.name} differ on {int(apart_N.sum())} tokens, none of which counts",
                batch.laid.where(a.name, at=apart_N),
                shown("tokens that count and differ", 0, None, f"{a.source} and {b.source}"),
                cause="padding or prompt is filled in differently; nothing reads it",
            )
    return None


@rule("D40", "two copies differ by a cast", link="dump", scope="batch", source="sglang comparator, diff after downcast")
def only_cast(batch: StepBatch) -> Finding | None:
    """Copies of one tensor in two dtypes that agree to the rounding of the narrower: info, noise and no bug."""
    for a, b, apart_N in _copies(batch):
        counted_N = apart_N if batch.trained_N is None else apart_N & batch.trained_N
        if counted_N.any() and _is_cast(a, b, counted_N):
            largest = float(np.abs(a.values_N - b.values_N)[counted_N].max())
            return info(
                f"copies of {a.name} differ by rounding alone ({a.dtype} and {b.dtype})",
                batch.laid.where(a.name, at=counted_N),
                shown("largest difference", largest, None, f"{a.source} and {b.source}"),
                cause="one of them was stored in the narrower dtype",
            )
    return None


def _twin_B(batch: StepBatch) -> Array:
    """Which samples have the same tokens as another one [B]."""
    if not batch.spine.has_tokens:
        return np.zeros(len(batch), dtype=bool)
    keys = [batch.spine.tokens(sample).tobytes() for sample in range(len(batch))]
    counts = Counter(keys)
    return np.array([counts[key] > 1 for key in keys], dtype=bool)


#: What a reader of a dump says when records are gone.
_LOST = (
    "missing",
    "nothing of rank",
    "holes in",
    "overwrit",
    "cannot be read",
    "truncated",
    "cut short",
    "still being written",
)


@rule("D39", "records are missing or overwritten", link="dump", scope="case",
      source="slime#1519, slime#1922; NexRL: micro-batch names restart with every mini-batch")  # fmt: skip
def incomplete(case: Case) -> Finding | None:
    """Ranks and micro-batches that other steps or ranks have and this one lacks, records that cannot be read, and
    records that carry a later mini-batch or epoch under a name that every mini-batch writes to. Any is a warning;
    info where steps and micro-batches were inferred by the reader. A rank that has fewer micro-batches than another
    lacks none where those of the step hold every sample of its batch (as micro-batches of a number of tokens do).
    """
    lost = _left(case, [problem for problem in case.run.problems if any(word in problem.what for word in _LOST)])
    said = tuple(f"{problem.where.rpartition('/')[2]}:" for problem in lost)
    unreadable = [what for what in case.unreadable if not what.startswith(said)]
    count = len(lost) + len(unreadable)
    if count:
        first = lost[0].what if lost else unreadable[0]
        # A grid that was inferred from time stamps may have other holes than the run had.
        inferred = not unreadable and any("inferred" in note and "micro" in note for note in case.run.notes)
        return finding(
            "info" if inferred else "warning",
            f"the dump is not whole: {first}" + (f" (and {count - 1} more)" if count > 1 else ""),
            Where(path=lost[0].where if lost else str(case.run.path)),
            shown("holes and unreadable records", count, "0", str(case.run.path)),
            cause="a rank died, a disk was full, the dump is still being written, or ranks share a file name",
            next_step=f"rldbg ls {case.run.path}",
        )
    return _overwritten(case)


def _left(case: Case, lost: list[Problem]) -> list[Problem]:
    """Problems without micro-batches that a rank never had: the others of the step hold all of its samples."""
    holes = [each for each in lost if each.key is not None and _OF_A_MICRO in each.what]
    if not holes:
        return lost
    whole = {batch.step for batch in case.batches() if _is_whole(batch)}
    others = [each for each in lost if each not in holes and not each.what.endswith(MORE)]
    every = every_hole((record.key for record in case.run.records), lost[0].where)
    left = [each for each in every if each.key is None or _OF_A_MICRO not in each.what or each.key.step not in whole]
    told = {each.what for each in others}
    return [*others, *(each for each in left if each.what not in told)]


_OF_A_MICRO = ": micro "


def _is_whole(batch: StepBatch) -> bool:
    """Whether the micro-batches of a step hold every sample of its batch, which is recorded beside them."""
    by_kind: dict[bool, set[int]] = {False: set(), True: set()}
    for sheet, places in batch.columns.sheets:
        kinds = {part.held.record.key.micro is not None for part in sheet.parts}
        if len(kinds) == 1:
            by_kind[kinds.pop()] |= {at for at, place in enumerate(places) if place is not None}
    return len(batch) > 0 and all(len(found) == len(batch) for found in by_kind.values())


def _overwritten(case: Case) -> Finding | None:
    """Micro-batch 0 of a later mini-batch, with none of the first: the first one was written over."""
    later: dict[tuple[int | None, int | None], list[int]] = defaultdict(list)
    for record in case.records():
        if record.key.stage != "loss":
            continue
        number = record.key.minibatch
        if number is None and (record.names is None or "extra_info.batch_idx" in record.names):
            ref = record.get("extra_info.batch_idx")
            value = getattr(ref.source, "value", None) if ref is not None else None
            number = value if isinstance(value, int) else None
        if number is not None:
            later[record.key.step, record.key.rank].append(number)
    lost = {key: numbers for key, numbers in later.items() if min(numbers) > 0}
    if not lost:
        return None
    (step, rank), numbers = next(iter(lost.items()))
    return warning(
        f"mini-batches before {min(numbers)} are missing: they were written over",
        Where(step=step, rank=rank, path=str(case.run.path)),
        shown("first mini-batch that is left", min(numbers), "0", str(case.run.path)),
        shown("steps and ranks of which this holds", len(lost)),
        cause="micro-batches are numbered within their mini-batch, and the file name says no mini-batch",
        next_step=f"rldbg ls {case.run.path}",
    )
