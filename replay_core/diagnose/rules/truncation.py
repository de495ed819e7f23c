"""Rollout log-probabilities of what top-p, top-k or a ban leaves of the distribution."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from replay_core.diagnose.algorithm import is_truncated
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.compared import BOTH, figures_of, worst_of
from replay_core.diagnose.finding import Finding, finding, shown
from replay_core.diagnose.gap import Gap, gap
from replay_core.diagnose.rule import rule


@rule("D11", "rollout log-probabilities are renormalised over top-p or top-k", link="rollout_logprobs", scope="batch",
      needs=BOTH,
      explains=("L10", "D09", "D12", "D14", "D20", "D24", "D26"), lasts=True,
      source="verl#6240, trl#6789, ms-swift#8442, vllm#42259")  # fmt: skip
def renormalised(batch: StepBatch) -> Iterator[Finding]:
    """The rollout gives more to over 90 % of its own tokens, by 0.005 nats and more on average, with no change of
    slope: what is left of the distribution after top-p or top-k was normalised again. An error where the run states
    that neither is used, or no response ends; worth knowing where it states one (the engine says what it sampled from,
    and ratios to it hold the part that was cut off); else a warning.
    """
    between = gap(batch)
    if not between.is_truncated:
        return
    place = batch.laid.where("rollout_logprobs", at=worst_of(between))
    kept = float(np.exp(between.d.mean()))
    endless = _never_ends(batch, between)
    stated = is_truncated(batch.laid.algorithm)
    yield finding(
        "error" if endless or stated is False else "warning" if stated is None else "info",
        (
            "no response ends: all are cut off at the length limit, and the engine gives their tokens more than the "
            "trainer: it may not write the end token (EOS), and what is left is renormalised"
            if endless
            else "rollout log-probabilities are renormalised over top-p or top-k: "
            f"{between.one_sided:.0%} of the tokens have more of it than the trainer gives them"
        ),
        place,
        evidence=[
            shown("share of tokens with rollout > trainer", between.one_sided, "about 0.5"),
            shown("mean rollout - trainer", -float(between.d.mean()), "0"),
            shown("probability kept, geometric mean", kept),
            shown("probability kept, least (1 % of the tokens)", float(np.exp(np.quantile(between.d, 0.01)))),
            shown("slope of rollout on trainer", between.slope, "0.9 to 1.1"),
            *figures_of(between),
        ],
        cause="ignore_eos, a min_tokens as large as the limit, or a logit bias bans the end token in the engine: its "
        "log-probabilities are of what is left, the trainer's of the whole"
        if endless
        else "the engine returns log-probabilities of what is left of the distribution, the trainer of the whole: "
        "top-p, top-k or min-p, or tokens that it may not write: an end before min_tokens, a grammar, banned words",
        next_step=batch.laid.mismatch_command() + "   # then set logprobs_mode=raw, or top_p=1 and top_k=-1",
    )


def _never_ends(batch: StepBatch, between: Gap) -> bool:
    """Whether all responses have one length, the limit, where the trainer would end them: at some places it gives the
    token that was written less than half of what the engine does. (What top-p keeps is most of a distribution.)
    """
    counts_B = batch.flat.count(between.both_N)
    cut_B = batch.truncated_flag_B
    if len(counts_B) < 4 or counts_B.min() < 4 or counts_B.min() != counts_B.max():
        return False
    kept = np.exp(between.d)
    ends = float((kept < 0.5).mean())
    return (cut_B is None or bool(cut_B.all())) and ends > 0.02
