"""Labels that are not the tokens that a model is to say next."""

from __future__ import annotations

import numpy as np

from replay_core import pages
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, error, share, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import rule, skip_if
from replay_core.records import Record

#: What a label that does not count is; labels and records that tell, and the share that one shift explains.
IGNORED, LABELS, RECORDS, NEARLY_ALL = -100, 32, 2, 0.98
#: How many places later than its slot the token lies that a label is: its own place (the loss shifts), or the next.
RIGHT, TRIED = (0, 1), (-2, -1, 2, 3)


@rule("D142", "labels are of other tokens than those to be said next", link="masks", scope="case", lasts=True,
      explains=("D28", "L08", "L09"),
      source="open-instruct#1549, torchtune#2613: labels that are shifted twice")  # fmt: skip
def misplaced(case: Case) -> Finding | None:
    """Recorded labels (target ids) beside the token ids of the same record, where both are padded rows of one width or
    one packed row: those that count (not -100, 32 and more, in 2 records and more) are the ids of their own place,
    which the loss shifts, or of the next one. An error where in all records that tell they are neither (less than half
    are), and the ids of another place, one before or two and three after it, in .98 of them.
    """
    told: list[tuple[Record, int, int, int]] = []
    looked = 0
    for record in case.records():
        found = {ref.canonical or ref.name: ref for ref in record.tensors() if not ref.is_text and ref.is_readable}
        ids, labels = found.get("input_ids"), found.get("labels") or found.get("target_ids")
        if ids is None or labels is None or ids.shape != labels.shape or len(ids.shape) not in (1, 2):
            continue
        ids_BS = np.atleast_2d(pages.array(ids)).astype(np.int64)
        labels_BS = np.atleast_2d(pages.array(labels)).astype(np.int64)
        by, count = _shift(ids_BS, labels_BS)
        if count < LABELS:
            continue
        looked += 1
        if by is not None:
            told.append((record, by, count, len(ids_BS)))
    skip_if(not looked, f"needs token ids and {LABELS} labels of the same shape in one record")
    if len(told) < RECORDS or len(told) < looked or len({by for _, by, *_ in told}) > 1:
        return None
    record, by, count, _ = told[0]
    name = next(ref.name for ref in record.tensors() if ref.canonical in ("labels", "target_ids"))
    where = f"{by} places after it" if by > 0 else f"{'the place' if by == -1 else f'{-by} places'} before it"
    return error(
        f"labels are shifted {'twice' if by == 2 else 'the wrong way' if by < 0 else f'by {by} places'}: each is the "
        f"token {where}, and neither the one of its place nor the next",
        Where.of(record, name),
        shown("labels that count", count),
        shown("records that show it", share(len(told), looked)),
        cause="labels are shifted where they are made (a collator, a sequence-parallel adapter, a packed row) and once "
        "more before or in the loss: the model learns to skip a token"
        if by > 1
        else "labels are shifted against the direction in which logits are: the model learns to repeat what it reads",
        next_step="rldbg diagnose --explain D142   # then compare labels with input_ids of one row",
        steps=sorted({each.key.step for each, *_ in told if each.key.step is not None}),
    )


def _shift(ids_BS: Array, labels_BS: Array) -> tuple[int | None, int]:
    """(by how many places labels are off, where that is neither 0 nor 1, labels that count)."""
    counts_BS = (labels_BS != IGNORED) & (labels_BS >= 0)
    count = int(counts_BS.sum())
    if count < LABELS:
        return None, count

    def agree(by: int) -> float:
        moved_BS = np.full_like(ids_BS, -1)
        if by >= 0:
            moved_BS[:, : ids_BS.shape[1] - by] = ids_BS[:, by:]
        else:
            moved_BS[:, -by:] = ids_BS[:, :by]
        return float((moved_BS == labels_BS)[counts_BS].mean())

    if max(map(agree, RIGHT)) >= 0.5:
        return None, count
    return next((by for by in TRIED if agree(by) >= NEARLY_ALL), None), count
