"""Turns of a response that the loss leaves out, beside what the engine sampled."""

from __future__ import annotations

import numpy as np

from replay_core.diagnose.batch import StepBatch, mask_name
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, finding, share, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import rule, skip_if
from replay_core.diagnose.trajectories import beginnings_N

_STATED = ("last_turn_only", "train_last_turn_only", "train_on_last_turn", "only_last_turn", "mask_history",
           "train_on_last_turn_only", "loss_on_last_turn")  # fmt: skip
#: Responses of several turns that tell, and the share of them that have to be so.
FEWEST, MOSTLY = 4, 0.95


@rule("D109", "turns that the engine sampled are not trained", link="masks", scope="case", lasts=True,
      explains=("D19", "D41", "L08", "L09"),
      source="slime and verl agent loops: loss_mask 1 on all that the policy wrote, 0 on tool output")  # fmt: skip
def left_out(case: Case) -> Finding | None:
    """Responses in which tokens the engine sampled (a rollout log-probability other than 0) stand on both sides of 2
    and more it did not (tool output): a warning where in 95 % of them (4 and more) no token before the last such gap
    counts, all after it do, and that is so in every step; worth knowing where the run states it. Tokens that count in
    another row that begins alike (a row for each turn of a trajectory) are not left out.
    """
    turns = alone = tokens = kept = 0
    first: tuple[StepBatch, int] | None = None
    steps: list[int | None] = []
    for batch in case.batches():
        rollout, trained_N, response_N = batch.columns.of("rollout_logprobs"), batch.trained_N, batch.response_N
        if rollout is None or trained_N is None or response_N is None:
            continue
        sampled_N = response_N & rollout.said_N & (rollout.values_N != 0)
        here = 0
        keys_N = beginnings_N(batch)
        elsewhere_N = sampled_N & ~trained_N & np.isin(keys_N, keys_N[trained_N])
        for span in batch.flat.spans:
            early_T = _before_the_last_gap(sampled_N[span], (response_N & ~sampled_N)[span])
            # Of a trajectory with a row for each turn, what came before counts in the rows of its own turns.
            if early_T is None or not (early_T & ~elsewhere_N[span]).any():
                continue
            turns += 1
            counted_T = trained_N[span]
            early_T &= ~elsewhere_N[span]
            late_T = sampled_N[span] & ~early_T & ~elsewhere_N[span]
            if not counted_T[early_T].any() and counted_T[late_T].all():
                alone, here = alone + 1, here + 1
                tokens, kept = tokens + int(early_T.sum()), kept + int(late_T.sum())
                first = first or (batch, int(span.start + np.flatnonzero(early_T)[0]))
        steps += [batch.step] * bool(here)
    skip_if(turns < FEWEST, f"needs {FEWEST} responses of several turns, and the engine's log-probabilities")
    if first is None or alone < MOSTLY * turns:
        return None
    batch, at = first
    stated = case.algorithm.value(*_STATED)
    return finding(
        "info" if stated not in (None, False) else "warning",
        f"only the last turn of a response is trained: {tokens} tokens of earlier turns, which the engine sampled, do "
        f"not count in {share(alone, turns)} responses of several turns",
        batch.laid.where(mask_name(batch), at=at),
        shown("sampled tokens before the last tool output that do not count", tokens, "0"),
        shown("sampled tokens after it that do", kept),
        shown("responses of several turns", turns),
        cause="the mask is made of the last message alone (a search for the last turn, a mask that is made anew at "
        "each turn instead of added to): how the policy calls its tools is never trained",
        steps=steps,
    )  # fmt: skip


#: Tokens in a row that the engine did not sample before they are tool output: one alone may be of probability 1.
GAP = 2


def _before_the_last_gap(sampled_T: Array, other_T: Array) -> Array | None:
    """Sampled tokens before the last gap of tokens that were not; None where there are none on one of its sides."""
    at = np.flatnonzero(sampled_T)
    if len(at) < 2:
        return None
    inside = np.flatnonzero(other_T)
    inside = inside[(inside > at[0]) & (inside < at[-1])]
    runs = np.split(inside, np.flatnonzero(np.diff(inside) > 1) + 1)
    gaps = [run for run in runs if len(run) >= GAP]
    if not gaps:
        return None
    early_T: Array = sampled_T & (np.arange(len(sampled_T)) < gaps[-1][-1])
    return early_T
