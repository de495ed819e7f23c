"""Trajectories of several turns whose row ends before they did: what was scored is more than what is trained on."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Evidence, Finding, finding, share, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import rule, skip_if

#: Rows that end at the limit, the share of all, and rows that end by themselves; steps with such.
FEWEST, SHARE, ENDED, STEPS = 8, 0.1, 12, 2
#: What says how many turns a trajectory had.
_TURNS = ("num_turns", "__num_turns__", "n_turns", "turns", "num_steps")
#: The share of cut rows that has to say so.
MOST = 0.5


class _CutRows(Struct, frozen=True):
    """A step's rows [B]: of several turns and cut at the limit, those that end by themselves, and turns in each."""

    batch: StepBatch
    cut_B: Array
    ended_B: Array
    turns_B: Array


def _rows(batch: StepBatch, limit: int) -> _CutRows | None:
    tokens_N, response_N, trained_N, eos = batch.tokens_N, batch.response_N, batch.trained_N, batch.eos_id
    if tokens_N is None or response_N is None or trained_N is None or eos is None:
        return None
    turns = []
    for span in batch.flat.spans:
        at = np.flatnonzero(trained_N[span])
        turns.append(int((np.diff(at) > 1).sum()) + bool(at.size))
    turns_B, sizes_B = np.array(turns), batch.flat.count(response_N)
    last_B = tokens_N[np.maximum(batch.flat.starts_B + batch.flat.lengths_B - 1, 0)]
    ended_B = (last_B == eos) & (turns_B > 0)
    return _CutRows(batch, (sizes_B == limit) & (last_B != eos) & (turns_B > 1), ended_B, turns_B)


@rule("D137", "trajectories are cut after they were scored", link="tokens", scope="case", lasts=True,
      explains=("D20", "L08"), source="rllm#575: the merged response is cut at the limit of one turn")  # fmt: skip
def cut_after_scoring(case: Case) -> Finding | None:
    """Rows of several turns (a gap in the mask) that end without an end token at the longest response of the run, 8 and
    more, a tenth of all, in 2 steps and more, beside 12 and more that end by themselves. A warning where the dump says
    of half of them that they were not cut off, or counts more turns for them than the row holds, while the others'
    count is the row's. Worth knowing where their mean reward is not below that of the rows that end.
    """
    longest = 0
    for batch in case.batches():
        if batch.response_N is not None and len(batch):
            longest = max(longest, int(batch.flat.count(batch.response_N).max(initial=0)))
    steps = [one for batch in case.batches() if (one := _rows(batch, longest)) is not None]
    skip_if(not steps, "needs masks and an end token of responses")
    cut, ended = sum(int(one.cut_B.sum()) for one in steps), sum(int(one.ended_B.sum()) for one in steps)
    total = sum(len(one.cut_B) for one in steps)
    shows = [one for one in steps if one.cut_B.any()]
    if cut < max(FEWEST, SHARE * total) or ended < ENDED or len(shows) < STEPS:
        return None
    evidence = _said_whole(steps, cut) or _lost_turns(steps)
    earns = _earns(steps)
    if evidence is None and earns is None:
        return None
    one = shows[0]
    return finding(
        "info" if evidence is None else "warning",
        f"trajectories are cut at {longest} tokens after they were scored: {share(cut, total)} rows of several turns "
        "end there without an end"
        + (", and earn as much as those that end" if earns is not None else ""),
        one.batch.laid.where("input_ids", sample=one.cut_B),
        *([] if evidence is None else [evidence]), *([] if earns is None else [earns]),
        shown("rows that end by themselves", ended),
        cause="the limit of one turn (max_response_length) is taken for the whole trajectory where its turns are put "
        "together: the last turns, with the action that was rewarded, are never trained"
        if evidence is not None
        else "what is paid for may lie behind the cut (a limit of one turn that cuts trajectories), or before it",
        next_step="compare one such row with the environment's own record; give trajectories a limit of their own",
        steps=[each.batch.step for each in shows],
    )  # fmt: skip


def _said_whole(steps: list[_CutRows], cut: int) -> Evidence | None:
    """Rows at the limit that the dump says were not cut off."""
    whole = 0
    for one in steps:
        flag_B = one.batch.truncated_flag_B
        if flag_B is None:
            return None
        whole += int((one.cut_B & ~flag_B).sum())
    return shown("of them, those that the dump says ended", share(whole, cut), "none") if whole >= MOST * cut else None


def _lost_turns(steps: list[_CutRows]) -> Evidence | None:
    """Turns that are recorded beside the rows, and lie behind their end."""
    counts = [one.batch.columns.per_sample(*_TURNS) for one in steps]
    if any(count_B is None for count_B in counts):
        return None
    apart = [count_B - one.turns_B for one, count_B in zip(steps, counts, strict=True) if count_B is not None]
    off = np.concatenate([each[one.cut_B] for one, each in zip(steps, apart, strict=True)])
    own = np.concatenate([each[one.ended_B] for one, each in zip(steps, apart, strict=True)])
    if np.ptp(own) > 0 or (off > own[0]).mean() < MOST:
        return None
    return shown("turns that are recorded and not in such a row, mean", float(off.mean() - own[0]), "0")


def _earns(steps: list[_CutRows]) -> Evidence | None:
    """What cut rows earn, where that is not less than what the others do."""
    cut: list[float] = []
    ended: list[float] = []
    for one in steps:
        reward_B = one.batch.reward_B
        if reward_B is None or not np.isfinite(reward_B).all():
            return None
        cut, ended = cut + reward_B[one.cut_B].tolist(), ended + reward_B[one.ended_B].tolist()
    if not np.ptp(cut + ended) > 0 or max(cut) < max(ended) or np.mean(cut) < np.mean(ended):
        return None
    return shown("mean reward of those cut, and of those that end", f"{np.mean(cut):.3g}, {np.mean(ended):.3g}")
