"""Masks of whole sequences that hold parts of them."""

from __future__ import annotations

import numpy as np

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, share, shown, warning
from replay_core.diagnose.rule import rule, skip_if
from replay_core.regexes import regex

#: How masks of sequences are called.
_OF_SEQUENCES = regex(r"(?i)(?:^|\.|_)(?:opsm|seq(?:uence)?(?:_level)?|off_?policy_seq\w*)_?(?:rejection_?)?mask$")
#: Sequences that are cut in two, and steps with such, before it is how they are made.
FEWEST, STEPS = 4, 2


@rule("D136", "a mask of sequences rejects tokens by their advantage", link="masks", scope="case", lasts=True,
      explains=("D28", "L08"),
      source="slime#1917: off-policy sequence masking by the sign of each token's advantage")  # fmt: skip
def of_tokens(case: Case) -> Finding | None:
    """A recorded mask that is named one of sequences (opsm_mask, seq_mask), over the tokens that count: a warning where
    it is 0 on a part of a response in 4 of them and more, of 2 steps and more, and there exactly where the token's
    advantage is negative.
    """
    split = rejected = 0
    first: Where | None = None
    named = ""
    steps: list[int | None] = []
    left = 0
    for batch in case.batches():
        found = _named(batch)
        advantages, trained_N = batch.columns.of("advantages"), batch.trained_N
        if found is None or advantages is None or trained_N is None:
            continue
        named = found
        mask = batch.columns.of(named)
        assert mask is not None
        counted_N = trained_N & mask.said_N & advantages.said_N
        out_N = counted_N & (mask.values_N == 0)
        some_B = batch.flat.count(out_N)
        parts_B = (some_B > 0) & (some_B < batch.flat.count(counted_N))
        signs_B = batch.flat.count(out_N != (counted_N & (advantages.values_N < 0))) == 0
        rejected += int((some_B > 0).sum())
        if (parts_B & ~signs_B).any():
            return None
        split += int(parts_B.sum())
        left += int((counted_N & ~out_N & np.repeat(parts_B, batch.flat.lengths_B)).sum())
        if parts_B.any():
            first = first or batch.laid.where(named, at=out_N & np.repeat(parts_B, batch.flat.lengths_B))
            steps.append(batch.step)
    skip_if(not named, "no mask of sequences is recorded beside advantages")
    if split < FEWEST or len(steps) < STEPS:
        return None
    return warning(
        f"a mask of sequences keeps the tokens with a positive advantage of rejected ones: {named} is 0 on a part of "
        f"{share(split, rejected)} of them, exactly where the advantage is negative",
        first,
        shown("tokens of these sequences that are kept", left, "0", named),
        shown("sequences that are rejected whole", rejected - split, str(rejected)),
        cause="the condition (too far off the policy, and a negative advantage) is taken token by token: half of a "
        "sequence that is off stays in the loss, and only what speaks against it is gone. Take one sign for a sequence",
        next_step="reduce the advantage to one number of the sequence (its mean, its outcome's) before the comparison",
        steps=steps,
    )


def _named(batch: StepBatch) -> str | None:
    names = sorted({name for sheet, _ in batch.columns.sheets for name in sheet.names() if _OF_SEQUENCES.search(name)})
    return next((name for name in names if batch.columns.of(name) is not None), None)
