"""Where turns begin in the mask: with the policy's first token, or with the template's last."""

from __future__ import annotations

import numpy as np

from replay_core.diagnose.batch import StepBatch, mask_name
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, share, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import rule, skip_if

#: Later turns that tell, and steps that they are of.
TURNS, STEPS = 12, 2


@rule("D138", "the template's tokens count at the beginning of later turns", link="masks", scope="case", lasts=True,
      explains=("D41", "L08"), source="codescout#60: a hand-made mask that opens at the role's name")  # fmt: skip
def opens_early(case: Case) -> Finding | None:
    """The first token that counts behind a gap in a response's mask (2 tokens and more), of 12 later turns and more in
    2 steps and more: a warning where it is one and the same id in all of them, every prompt ends with that id, no
    response begins with it, and no engine gives it a number. What a template puts before an answer stands at the end of
    the prompt; a policy that begins each turn alike begins its first one so, too.
    """
    ids: set[int] = set()
    turns = lone = 0
    first: Where | None = None
    steps: list[int | None] = []
    for batch in case.batches():
        found = _later(batch)
        if found is None:
            continue
        at_N, begins = found
        tokens_N = batch.tokens_N
        assert tokens_N is not None
        rollout = batch.columns.of("rollout_logprobs")
        ids |= set(tokens_N[at_N].tolist())
        turns += len(at_N)
        lone += int(np.isin(tokens_N[at_N], begins).sum())
        if rollout is not None and (rollout.said_N & (rollout.values_N != 0))[at_N].any():
            return None
        first = first or batch.laid.where(mask_name(batch), at=int(at_N[0]))
        steps.append(batch.step)
    skip_if(turns < TURNS or len(steps) < STEPS, f"needs {TURNS} turns behind tool output, in {STEPS} steps")
    if len(ids) != 1 or lone or not _ends_prompts(case, min(ids)):
        return None
    return warning(
        f"the first token that counts in each later turn is the template's: token {min(ids)} in all {turns}, which "
        "ends every prompt",
        first,
        shown("later turns whose first counted token it is", share(turns, turns), "none"),
        shown("responses that begin with it", 0),
        cause="the mask opens at the role's name (or one token early), and counts what the template writes before an "
        "answer: the policy is taught to write it, and ratios there are of tokens that no engine sampled",
        next_step="print the tokens around one such border with their mask",
        steps=steps,
    )


def _later(batch: StepBatch) -> tuple[Array, Array] | None:
    """Where the first counted token behind each gap is [K], and the ids that responses begin with."""
    tokens_N, trained_N, response_N = batch.tokens_N, batch.trained_N, batch.response_N
    if tokens_N is None or trained_N is None or response_N is None:
        return None
    found: list[int] = []
    begins: list[int] = []
    for span in batch.flat.spans:
        at = span.start + np.flatnonzero(trained_N[span])
        if not at.size:
            continue
        begins.append(int(tokens_N[at[0]]))
        found += at[1:][np.diff(at) > 2].tolist()
    return (np.array(found), np.array(begins)) if found else None


def _ends_prompts(case: Case, id: int) -> bool:
    """Whether every prompt ends with that token."""
    for batch in case.batches():
        tokens_N, response_N = batch.tokens_N, batch.response_N
        if tokens_N is None or response_N is None:
            return False
        heads_B = batch.flat.first(response_N)
        if (heads_B < 1).any() or (tokens_N[batch.flat.starts_B + heads_B - 1] != id).any():
            return False
    return True
