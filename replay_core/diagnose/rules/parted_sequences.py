"""Masks that keep or reject whole sequences, and do not."""

from __future__ import annotations

import numpy as np

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.finding import Finding, error, share, shown
from replay_core.diagnose.rule import given, rule, skip_if
from replay_core.regexes import regex

#: What masks of whole sequences are called.
_OF_SEQUENCES = regex(r"(?i)opsm|seq(?:uence)?[_-]?(?:level[_-]?)?(?:mask|reject|filter)")
#: Sequences that are parted, and the share of their tokens that has to go by the sign.
SEQUENCES, SHARE = 3, 0.98


@rule("D157", "a mask of sequences parts them by the sign of the advantage", link="ratio", scope="batch", lasts=True,
      needs=("advantages", "mask"), explains=("D28", "D50"),
      source="slime#1917: off-policy sequence masking rejects tokens with a negative advantage alone")  # fmt: skip
def parts_sequences(batch: StepBatch) -> Finding | None:
    """A recorded mask of sequences (its name says so: opsm_mask, seq_mask) that is 0 on some tokens that count and not
    on others of 3 sequences and more, where those at 0 are those with a negative advantage (98 %): an error. A mask of
    sequences has one value for each.
    """
    names = sorted({name for sheet, _ in batch.columns.sheets for name in sheet.names() if _OF_SEQUENCES.search(name)})
    advantages = given(batch.columns.of("advantages"))
    columns = [column for name in names if (column := batch.columns.of(name)) is not None]
    skip_if(not columns, "no mask of sequences is recorded")
    for column in columns:
        known_N = given(batch.trained_N) & column.said_N & advantages.said_N & np.isfinite(advantages.values_N)
        kept_N = known_N & (column.values_N != 0)
        kept_B, known_B = batch.flat.count(kept_N), batch.flat.count(known_N)
        parted_B = (kept_B > 0) & (kept_B < known_B)
        inside_N = known_N & np.repeat(parted_B, batch.flat.lengths_B)
        if parted_B.sum() < SEQUENCES:
            continue
        by_sign = float(((advantages.values_N < 0) == ~kept_N)[inside_N].mean())
        if by_sign < SHARE:
            continue
        return error(
            f"a mask of sequences keeps a part of {int(parted_B.sum())} of them: it is 0 where a token's advantage is "
            "negative, and 1 on the others",
            batch.laid.where(column.name, at=inside_N & ~kept_N),
            shown("sequences that are parted", share(int(parted_B.sum()), int((known_B > 0).sum())), "none"),
            shown("their tokens that go by the sign", by_sign, None, column.source),
            cause="the condition takes the sign of each token's advantage, where the sequence's is meant: of what is "
            "too far off-policy the tokens with a positive advantage are trained on all the same",
            next_step="take one advantage for a sequence (its mean over tokens that count) in the condition",
        )
    return None
