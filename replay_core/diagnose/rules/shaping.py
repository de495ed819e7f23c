"""Rewards that are shaped before they become advantages, and advantages that come from returns: recomputed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.finding import Finding
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import Skip, given, rule
from replay_core.diagnose.stating import finding, shown
from replay_core.objectives import kl

#: What a recomputed penalty may leave of the recorded one (rms), and how alike two series are that only whitening
#: tells apart.
LEFT, ALIKE = 1e-2, 0.999
#: A discounted reward to come looks like its neighbour: from this correlation on it is not said which of them it is.
TOLD_APART = 0.98
FEWEST = 16
_GAMMAS = (1.0, 0.99, 0.995, 0.999, 0.95, 0.9)


@rule("D51", "the KL penalty in the rewards is turned around", link="rewards", scope="batch",
      needs=("token_rewards", "token_scores|reward", "trainer_logprobs", "ref_logprobs", "mask"),
      explains=("L08", "L10"), lasts=True,
      source="verl apply_kl_penalty: token_level_rewards = token_level_scores - beta KL(old, ref)")  # fmt: skip
def kl_in_rewards(batch: StepBatch) -> Iterator[Finding]:
    """Fits token rewards - token scores (without them: token rewards of all but the last token) = -beta KL over the
    tokens that count, for k1, k2, k3 and |log ratio| of policy and reference. Where one leaves less than a hundredth
    of it (rms): a negative beta is an error, the policy is paid for leaving its reference. Skipped where nothing is
    penalised, or no estimator fits.
    """
    rewards, scores = given(batch.columns.of("token_rewards")), batch.columns.of("token_scores")
    policy, ref = given(batch.trainer), given(batch.columns.of("ref_logprobs"))
    both_N = batch.pair(policy, ref) & rewards.said_N
    if scores is None:
        # A response's reward lies at its last token: the others hold what is penalised, and nothing else.
        trained_N, scored_N = given(batch.trained_N), np.zeros(both_N.size)
        last_B = np.full(len(batch), -1, dtype=np.int64)
        np.maximum.at(last_B, batch.flat.sample_N[trained_N], np.flatnonzero(trained_N))
        both_N[last_B[last_B >= 0]] = False
    else:
        both_N, scored_N = both_N & scores.said_N, scores.values_N
    y = (rewards.values_N - scored_N)[both_N]
    if both_N.sum() < FEWEST or not np.abs(y).max(initial=0.0) > 1e-7 or not np.isfinite(y).all():
        raise Skip("token rewards are the token scores: nothing is penalised")
    for name, estimate in (("k1", kl.k1), ("k3", kl.k3), ("k2", kl.k2), ("|log ratio|", kl.absolute)):
        x = estimate(policy.values_N[both_N], ref.values_N[both_N])
        size = float(x @ x)
        if not size > 0:
            continue
        beta = -float(x @ y) / size
        if float(np.sqrt(((y + beta * x) ** 2).mean())) > LEFT * float(np.sqrt((y * y).mean())):
            continue
        if beta < 0:
            yield finding(
                "error",
                f"the KL penalty in the rewards has the wrong sign: rewards are scores + {-beta:.3g} x {name}",
                batch.laid.where("token_rewards", at=int(np.flatnonzero(both_N)[0])),
                evidence=[
                    shown(
                        "beta that explains them",
                        beta,
                        "> 0",
                        rewards.source if scores is None else f"{rewards.source} - {scores.source}",
                    ),
                    shown("tokens compared", int(both_N.sum())),
                ],
                cause="policy and reference are swapped in the penalty, or it is added: the policy is paid for "
                "leaving its reference",
            )
        return
    raise Skip("rewards and scores differ by no KL estimator of the recorded log-probabilities")


@rule("D52", "advantages are not what returns and values give", link="advantages", scope="batch",
      needs=("advantages", "mask", "returns|token_rewards|token_scores|rewards"),
      explains=("L08", "D24"), lasts=True,
      source="arXiv 1506.02438: returns = advantages + values; REINFORCE: the reward to come")  # fmt: skip
def of_returns(batch: StepBatch) -> Iterator[Finding]:
    """Advantages that change from token to token, held against returns - values, and without a critic against the
    discounted reward to come (gamma 1 to .9): whitening leaves a correlation of 1. Where that is above 0.999 all is
    well. Below, an error if a known mistake has it: the sign, the values not subtracted, the token before or after,
    another sample's. Skipped where none does (decoupled lambdas, clipped advantages), and where what is expected
    correlates to 0.98 and more: neighbours are then too much alike to be told apart.
    """
    advantages, trained_N = given(batch.columns.of("advantages")), given(batch.trained_N)
    if batch.advantage_B is not None:
        raise Skip("one advantage for all of a response (D04)")
    values, returns = batch.columns.of("values"), batch.columns.of("returns")
    counted_N = trained_N & advantages.said_N & np.isfinite(advantages.values_N)
    if values is not None and returns is not None:
        counted_N &= values.said_N & returns.said_N
        expected = [returns.values_N - values.values_N]
        mistakes = [
            ("values are not subtracted: they are the returns", "the baseline is left out", returns.values_N),
            (
                "values are added to the returns, not subtracted",
                "the sign of the baseline is turned",
                returns.values_N + values.values_N,
            ),
        ]
    else:
        expected, mistakes = list(_to_come(batch)), []
    if counted_N.sum() < FEWEST or not np.ptp(advantages.values_N[counted_N]) > 0:
        raise Skip("too few advantages, or all are one number")
    a_N = advantages.values_N

    def alike(other_N: Array) -> float:
        # Beside a token that does not count, a shift has nothing to take.
        both_N = counted_N & np.isfinite(other_N)
        a, b = a_N[both_N], other_N[both_N]
        return float(np.corrcoef(a, b)[0, 1]) if len(b) >= FEWEST and np.ptp(a) > 0 and np.ptp(b) > 0 else 0.0

    right = max(map(alike, expected))
    if right > ALIKE:
        if values is not None and returns is not None:
            yield from _whitened_over_padding(batch, expected[0], counted_N)
        return
    if right > TOLD_APART:
        raise Skip("they follow what is expected so closely that a mistake cannot be told from it")
    for one_N in expected:
        inside_N = np.where(counted_N, one_N, np.nan)
        mistakes += [
            ("the sign is wrong", "the sign is turned twice, or not at all: what is rewarded is avoided", -one_N),
            ("each token has the one of the token before", "a roll or a slice is off by one", np.roll(inside_N, 1)),
            ("each token has the one of the token after", "a roll or a slice is off by one", np.roll(inside_N, -1)),
        ]
    for what, cause, other_N in mistakes:
        r = alike(other_N)
        if r > ALIKE:
            yield finding(
                "error",
                f"advantages are not what returns and values give: {what}"
                if values is not None and returns is not None
                else f"advantages are not the reward to come: {what}",
                batch.laid.where("advantages", at=int(np.flatnonzero(counted_N)[0])),
                evidence=[
                    shown("correlation with what is right", right, "> 0.999", advantages.source),
                    shown("correlation with the mistake", r),
                    shown("tokens compared", int(counted_N.sum())),
                ],
                cause=cause,
            )
            return
    raise Skip("they are no whitened returns - values, nor a known mistake of them")


def _whitened_over_padding(batch: StepBatch, expected_N: Array, counted_N: Array) -> Iterator[Finding]:
    """Advantages whose mean and std were taken over every slot of the padded rows: a line through returns - values that
    is not centred over the tokens that count, and is over all slots with zeros in the padding.
    """
    column = given(batch.columns.of("advantages"))
    if column.ref.rows is not None or len(column.ref.shape) != 2:
        return
    x, a = expected_N[counted_N], column.values_N[counted_N]
    slope = float(((x - x.mean()) * (a - a.mean())).sum() / ((x - x.mean()) ** 2).sum())
    if abs(float(a.mean())) < 0.02 or not slope > 0:
        return
    centre = float(x.mean() - a.mean() / slope)
    # Rows as wide as they are stored, or as the response alone: what centres them tells.
    longest = int(batch.flat.count(counted_N).max(initial=1))
    widths = range(longest, column.ref.shape[1] + 1)
    slots = min((len(batch) * width for width in widths), key=lambda slots: abs(float(x.sum()) / slots - centre),
                default=0)  # fmt: skip
    if slots <= len(x):
        return
    mean = float(x.sum()) / slots
    spread = float(np.sqrt((x * x).sum() / slots - mean * mean))
    if abs(centre - mean) < 1e-3 * spread + 1e-5 and abs(slope * spread - 1) < 1e-2:
        yield finding(
            "error",
            "advantages are whitened over padding too: their mean over the tokens that count is "
            f"{float(a.mean()):.3g}, not 0",
            batch.laid.where("advantages", at=int(np.flatnonzero(counted_N)[0])),
            evidence=[
                shown("mean over tokens that count", float(a.mean()), "0", column.source),
                shown("what was subtracted", centre, f"{float(x.mean()):.4g}"),
                shown("mean over every slot of the rows", mean),
            ],
            cause="mean and std are taken over the whole tensor, without the mask: zeros of the padding pull the mean "
            "to 0 and the std down",
        )


def _to_come(batch: StepBatch) -> Iterator[Array]:
    """The discounted reward to come of every token [N], by gamma; from token rewards, else the sample's at its end."""
    told = batch.columns.of("token_rewards") or batch.columns.of("token_scores")
    trained_N, sample_N = given(batch.trained_N), batch.flat.sample_N
    rewards_N = np.zeros(trained_N.size)
    if told is not None:
        rewards_N = np.where(told.said_N, np.nan_to_num(told.values_N), 0.0)
    elif batch.reward_B is not None:
        last_B = np.full(len(batch), -1, dtype=np.int64)
        np.maximum.at(last_B, sample_N[trained_N], np.flatnonzero(trained_N))
        rewards_N[last_B[last_B >= 0]] = batch.reward_B[last_B >= 0]
    at = np.flatnonzero(trained_N)[::-1]
    for gamma in _GAMMAS:
        out_N, coming, sample = np.zeros(trained_N.size), 0.0, -1
        for place in at:
            coming = rewards_N[place] + gamma * (coming if sample_N[place] == sample else 0.0)
            sample = sample_N[place]
            out_N[place] = coming
        yield out_N
