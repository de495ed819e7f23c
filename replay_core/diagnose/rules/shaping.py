"""Rewards that are shaped before they become advantages, and advantages that come from returns: recomputed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from replay_core.diagnose.algorithm import adapts_kl_in_rewards, kl_in_rewards_estimator
from replay_core.diagnose.algorithm import kl_in_rewards as kl_in_rewards_coefficient
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.columns import Column
from replay_core.diagnose.finding import Finding, error, share, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import Skip, given, rule, skip_if
from replay_core.objectives import kl
from replay_core.regexes import regex

#: How far a weight of the KL may lie from the stated one, and from step to step: an adaptive controller moves it.
OFF, MOVES = 0.05, 0.02
#: What a recomputed penalty may leave of the recorded one (rms), and how alike two series are that only whitening
#: tells apart.
LEFT, ALIKE = 1e-2, 0.999
#: A discounted reward to come looks like its neighbour: from this correlation on it is not said which of them it is.
TOLD_APART = 0.98
FEWEST = 16
_GAMMAS = (1.0, 0.99, 0.995, 0.999, 0.95, 0.9)


@rule("D51", "the KL penalty in the rewards is turned around", link="rewards", scope="batch",
      needs=("token_rewards|returns", "token_scores|reward", "trainer_logprobs", "ref_logprobs", "mask"),
      explains=("L08", "L10"), lasts=True,
      source="verl apply_kl_penalty: token_level_rewards = token_level_scores - beta KL(old, ref)")  # fmt: skip
def kl_in_rewards(batch: StepBatch) -> Iterator[Finding]:
    """Fits token rewards - token scores (without them: token rewards of all but the last token) = -beta KL over the
    tokens that count, for k1, k2, k3 and |log ratio| of policy and reference. Where none are recorded and there is no
    critic, a token's reward is what its return has more than the next one's. Where one leaves less than a hundredth
    of it (rms): a negative beta is an error, the policy is paid for leaving its reference. Skipped where nothing is
    penalised, or no estimator fits.
    """
    rewards, scores = batch.columns.of("token_rewards") or _of_returns(batch), batch.columns.of("token_scores")
    policy, ref = given(batch.trainer), given(batch.columns.of("ref_logprobs"))
    both_N = batch.pair(policy, ref) & rewards.said_N
    if scores is None:
        # A response's reward lies at its last token: the others hold what is penalised, and nothing else.
        scored_N, both_N = np.zeros(both_N.size), both_N & _before_last_N(batch)
    else:
        both_N, scored_N = both_N & scores.said_N, scores.values_N
    y = (rewards.values_N - scored_N)[both_N]
    if both_N.sum() < FEWEST or not np.abs(y).max(initial=0.0) > 1e-7 or not np.isfinite(y).all():
        raise Skip("token rewards are the token scores: nothing is penalised")
    for name, estimate in kl.ESTIMATORS.items():
        x = estimate(policy.values_N[both_N], ref.values_N[both_N])
        beta = _weight(x, y)
        if beta is None:
            continue
        if beta < 0:
            yield error(
                f"the KL penalty in the rewards has the wrong sign: rewards are scores + {-beta:.3g} x {name}",
                batch.laid.where(rewards.name, at=both_N),
                shown(
                    "beta that explains them",
                    beta,
                    "> 0",
                    rewards.source if scores is None else f"{rewards.source} - {scores.source}",
                ),
                shown("tokens compared", int(both_N.sum())),
                cause="policy and reference are swapped in the penalty, or it is added: the policy is paid for "
                "leaving its reference",
            )
        return
    raise Skip("rewards and scores differ by no KL estimator of the recorded log-probabilities")


def _penalised(batch: StepBatch) -> tuple[Column, Array, Array] | None:
    """Rewards of tokens, what they are of it before a penalty [N], and where both are known."""
    rewards, scores = batch.columns.of("token_rewards"), batch.columns.of("token_scores")
    if rewards is not None:
        return None if scores is None else (rewards, scores.values_N, rewards.said_N & scores.said_N)
    if not batch.has("returns") or batch.has("values"):
        return None
    rewards = _of_returns(batch)
    return rewards, np.zeros(rewards.values_N.size), rewards.said_N & _before_last_N(batch)


def _before_last_N(batch: StepBatch) -> Array:
    """Tokens that count, but for each response's last, which has the response's reward."""
    before_N: Array = given(batch.trained_N).copy()
    last_B = batch.flat.last(before_N)
    before_N[(batch.flat.starts_B + last_B)[last_B >= 0]] = False
    return before_N


def _of_returns(batch: StepBatch) -> Column:
    """Rewards of tokens as the returns hold them: each has its own, and gamma times the next token's return."""
    returns, trained_N = given(batch.columns.of("returns")), given(batch.trained_N)
    skip_if(batch.has("values"), "returns of a critic hold its values")
    gamma = batch.laid.algorithm.number("gamma")
    here_N = np.where(returns.said_N & trained_N, np.nan_to_num(returns.values_N), 0.0)
    next_N = np.append(here_N[1:], 0.0)
    next_N[batch.flat.starts_B + batch.flat.lengths_B - 1] = 0.0
    own_N = here_N - (1.0 if gamma is None else gamma) * next_N
    return Column(returns.name, own_N, returns.said_N, returns.source, returns.dtype, returns.ref)


#: What a number is rounded by, in shares of it, by the precision it is stored in.
ROUNDED = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
_PENALTIES = {"k1": kl.k1, "k3": kl.k3, "k2": kl.k2, "|log r|": kl.absolute}


def _weight(x: Array, y: Array) -> float | None:
    """Beta of y = -beta x; None where that leaves a hundredth of y and more."""
    size = float(x @ x)
    if not size > 0:
        return None
    beta = -float(x @ y) / size
    left = float(np.sqrt(((y + beta * x) ** 2).mean()))
    return beta if left <= LEFT * float(np.sqrt((y * y).mean())) else None


#: A share of what the stated weight would take that is nothing beside it.
NOTHING = 1e-2


def _is_none(batch: StepBatch, rewards: Column, y: Array, both_N: Array, stated: float) -> bool:
    """Whether rewards are scores by far nearer than the stated weight leaves them, at the tokens where even the
    smallest estimator's penalty is told from the rounding of the reward.
    """
    policy, ref = given(batch.trainer), given(batch.columns.of("ref_logprobs"))
    p, r = policy.values_N[both_N], ref.values_N[both_N]
    least = stated * np.min([np.abs(estimate(p, r)) for estimate in _PENALTIES.values()], axis=0)
    rounding = ROUNDED.get(rewards.dtype, 1e-7) * np.abs(rewards.values_N[both_N])
    tells = NOTHING * least > rounding
    return bool(tells.sum() >= FEWEST and np.abs(y)[tells].sum() <= NOTHING * least[tells].sum())


@rule("D51", "the KL penalty in the rewards is not the stated one", link="rewards", scope="case",
      explains=("L08", "L10", "D107"), lasts=True,
      source="verl apply_kl_penalty (kl_ctrl, kl_penalty), OpenRLHF init_kl_coef")  # fmt: skip
def kl_in_rewards_stated(case: Case) -> Finding | None:
    """Token rewards less token scores (or, of returns without a critic, what each has more than the next token's, but
    for the last), in 2 steps and more, as -beta KL of policy and reference over the tokens that count: an error where
    beta is one number in all of them (to 2 %) and more than 5 % off the coefficient that the run states for a KL in its
    rewards; and where the run states an estimator (k1, k2, k3, |log r|) and another alone
    makes them; or where nothing is subtracted at all; and where a KL is, and the run states that none is
    (`use_kl_in_reward`). Silent where the controller is adaptive: by its type, and without
    one by its target.
    """
    algorithm = case.algorithm
    stated, named = kl_in_rewards_coefficient(algorithm), kl_in_rewards_estimator(algorithm)
    is_off = algorithm.is_on("use_kl_in_reward") is False
    if is_off:
        stated = 0.0
    if stated is None:
        raise Skip("needs a run that states a KL in its rewards, and its coefficient, or that there is none")
    skip_if(adapts_kl_in_rewards(algorithm), "the weight of the KL is adaptive")
    found: list[tuple[StepBatch, str, float]] = []
    looked, none = 0, 0
    for batch in case.batches():
        policy, ref = batch.trainer, batch.columns.of("ref_logprobs")
        if policy is None or ref is None or batch.trained_N is None:
            continue
        penalised = _penalised(batch)
        if penalised is None:
            continue
        rewards, scored_N, said_N = penalised
        both_N = batch.pair(policy, ref) & said_N
        y = (rewards.values_N - scored_N)[both_N]
        apart = float(np.abs(policy.values_N - ref.values_N)[both_N].max(initial=0.0))
        # Before the first update policy and reference are one.
        if both_N.sum() < FEWEST or apart < APART or not np.isfinite(y).all():
            continue
        looked += 1
        if not np.abs(y).max() > 0 or (stated and _is_none(batch, rewards, y, both_N, stated)):
            none += 1
            continue
        every = {
            name: beta for name, estimate in _PENALTIES.items()
            if (beta := _weight(estimate(policy.values_N[both_N], ref.values_N[both_N]), y)) is not None
        }  # fmt: skip
        if every:
            name = named if named in every else next(iter(every))
            found.append((batch, name, every[name]))
    skip_if(looked < 2, "needs token rewards, token scores and a policy that has left its reference, in 2 steps")
    if none == looked and stated:
        return error(
            f"no KL is subtracted from the rewards, and the run states a coefficient of {stated:g}",
            None, shown("steps whose token rewards are the token scores", share(none, looked), "0"),
            cause="the penalty is computed and not applied, or the scores are handed on in the rewards' place: nothing "
            "holds the policy near its reference",
        )  # fmt: skip
    betas = [beta for _, _, beta in found]
    if len(found) < 2 or 3 * len(found) < 2 * looked or min(betas) <= 0:
        return None
    beta, batch = float(np.median(betas)), found[0][0]
    place = batch.laid.where("token_rewards" if batch.has("token_rewards") else "returns", sample=0)
    steps = [each.step for each, _, _ in found]
    if is_off:
        twice = algorithm.is_on("use_kl_loss") is True
        return error(
            f"a KL is subtracted from the rewards, {beta:.3g} times {found[0][1]} of each token, and the run states "
            "that none is" + (": with the one in the loss it counts twice" if twice else ""),
            place, shown("beta that explains the rewards", beta, "0"),
            shown("steps", share(len(found), looked)),
            cause="the penalty is applied whatever its switch says (use_kl_in_reward), or the switch does not reach "
            "it: advantages hold what was meant for the loss alone"
            if twice
            else "the penalty is applied whatever its switch says (use_kl_in_reward), or the switch does not reach it",
            steps=steps,
        )  # fmt: skip
    if max(betas) - min(betas) > MOVES * beta:
        return None
    told = [shown("beta that explains the rewards", beta, f"{stated:g}"), shown("estimator that does", found[0][1]),
            shown("steps", share(len(found), looked))]  # fmt: skip
    if abs(beta - stated) > OFF * stated:
        times = f", {beta / stated:.3g} times as much" if stated else ""
        return error(
            f"the KL penalty in the rewards weighs {beta:.3g}, and the run states {stated:g}{times}",
            place, *told,
            cause="the coefficient that is configured does not reach the rewards, is scaled on its way or applied "
            "twice: the policy is held at its reference harder (or more loosely) than is meant",
            steps=steps,
        )  # fmt: skip
    other = found[0][1]
    if named and other != named and all(name == other for _, name, _ in found):
        return error(
            f"the KL penalty in the rewards is {other}, and the run states {named}",
            place, *told,
            cause="the estimator that is configured does not reach the rewards: another one, or a default, stands in "
            "its place",
            steps=steps,
        )  # fmt: skip
    return None


#: Nats that the policy has left its reference by, before a penalty is told from rounding.
APART = 1e-3


@rule("D52", "advantages are not what returns and values give", link="advantages", scope="batch",
      needs=("advantages", "mask", "returns|token_rewards|token_scores|rewards"),
      explains=("L08", "D24", "D04", "D02"), lasts=True,
      source="arXiv 1506.02438: returns = advantages + values; REINFORCE: the reward to come")  # fmt: skip
def of_returns(batch: StepBatch) -> Finding | None:
    """Advantages that change from token to token, held against returns - values, and without a critic against the
    discounted reward to come (gamma 1 to .9): whitening leaves a correlation of 1. Where that is above 0.999 all is
    well. Below, an error if they are an exact line (to 1e-3 of their spread) of what a mistake gives: the sign, values
    not subtracted, added, or alone, the token before or after, another row's, a sum along the response, its mean,
    absolute values, signs, squares, one side, the first or last token alone. Without a critic a mistake has to
    correlate to 0.999, and what is expected to less than 0.98. Skipped where none does (decoupled lambdas, clipped
    advantages).
    """
    advantages, trained_N = given(batch.columns.of("advantages")), given(batch.trained_N)
    values, returns = batch.columns.of("values"), batch.columns.of("returns")
    # A critic that is stated and recorded is in the advantages: one for all of a response leaves it out.
    of_critic = values is not None and returns is not None and batch.laid.algorithm.estimator == "gae"
    skip_if(batch.advantage_B is not None and not of_critic, "one advantage for all of a response (D04)")
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
        expected, mistakes = list(_to_come(batch)), [
            (
                f"they are the {what} so far, added up from the response's first token on",
                "the sum runs the wrong way (a cumulative sum without the flip before and after it): a token is "
                "credited with what came before it, and the reward at the end reaches the last token alone",
                so_far_N,
            )
            for what, so_far_N in _so_far(batch)
        ]  # fmt: skip
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
        return _whitened_over_padding(batch, max(expected, key=alike), counted_N)
    if values is not None and returns is not None:
        solved = next(_lines_of(batch, advantages, values.values_N, returns.values_N, counted_N), None)
        if solved is not None:
            what, cause, left = solved
            return error(
                f"advantages are not what returns and values give: {what}",
                batch.laid.where("advantages", at=counted_N),
                shown("correlation with returns - values", right, "> 0.999", advantages.source),
                shown("share of their spread that the mistake leaves unexplained", left, "0"),
                shown("tokens compared", int(counted_N.sum())),
                cause=cause,
            )
    skip_if(right > TOLD_APART, "they follow what is expected so closely that a mistake cannot be told from it")
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
            return error(
                f"advantages are not what returns and values give: {what}"
                if values is not None and returns is not None
                else f"advantages are not the reward to come: {what}",
                batch.laid.where("advantages", at=counted_N),
                shown("correlation with what is right", right, "> 0.999", advantages.source),
                shown("correlation with the mistake", r),
                shown("tokens compared", int(counted_N.sum())),
                cause=cause,
            )
    raise Skip("they are no whitened returns - values, nor a known mistake of them")


#: What a line of the mistake may leave of the advantages (rms, in shares of their spread), by precision.
EXACT = {"bfloat16": 2e-2, "float16": 5e-3}


def _lines_of(
    batch: StepBatch, column: Column, values_N: Array, returns_N: Array, counted_N: Array
) -> Iterator[tuple[str, str, float]]:
    """(what, cause, share left) of every mistake that advantages are an exact line of, on the tokens that count.

    Whitening is a line: any factor and offset are allowed, and what is left must be rounding.
    """
    at = np.flatnonzero(counted_N)
    a_K, rows = column.values_N[at], batch.flat.sample_N[at]
    d_K = (returns_N - values_N)[at]
    limit = EXACT.get(column.dtype, 1e-3)
    first = np.flatnonzero(np.diff(rows, prepend=rows[0] - 1))
    sizes = np.diff([*first, len(rows)])
    place = np.arange(len(rows)) - np.repeat(first, sizes)
    back = np.repeat(sizes, sizes) - 1 - place
    mean_K = np.repeat(np.add.reduceat(d_K, first) / sizes, sizes)
    shift = "a roll or a slice is off by one"

    def beside(by: int) -> Array:
        moved_K = np.roll(d_K, by)
        return np.where(np.roll(rows, by) == rows, moved_K, np.nan)

    def of_row(order: Array, by: int) -> Array:
        """The same place of the row `by` rows before, in one of the orders that rows are stored in."""
        rank_B = np.argsort(order)
        held = np.argsort(rank_B[rows[first]])
        number = np.argsort(held)
        other = held[(np.repeat(number, sizes) - by) % len(first)]
        inside = place < sizes[other]
        return np.where(inside, d_K[np.where(inside, first[other] + place, 0)], np.nan)

    groups = 0 if batch.group_B is None else len(batch) // max(int(batch.group_B.max()) + 1, 1)
    words = {1: "the row before", -1: "the row after"}
    moved = [
        (f"each row has those of {words.get(by, 'another row')}",
         "rows were reordered (shuffled, sorted, gathered) and advantages were not, or the other way round",
         of_row(order, by))
        for order in batch.laid.orders for by in sorted({1, -1, groups, -groups} - {0})
    ]  # fmt: skip
    family: list[tuple[str, str, Array]] = [
        ("values are not subtracted: they are the returns", "the baseline is left out", returns_N[at]),
        ("values are added to the returns, not subtracted", "the sign of the baseline is turned",
         (returns_N + values_N)[at]),
        ("they are the values", "another tensor stands in their place", values_N[at]),
        ("each token has the one of the token before", shift, beside(1)),
        ("each token has the one of the token after", shift, beside(-1)),
        *moved,
        ("each response has one number, the mean over its tokens",
         "what differs from token to token is averaged over the response: the critic's part is lost", mean_K),
        *(one for base_K in (d_K, d_K - d_K.mean()) for one in _made_of(base_K, place, back, first, sizes)),
    ]  # fmt: skip
    for what, cause, f_K in [("", "", d_K), *family]:
        known = np.isfinite(f_K)
        x, y = f_K[known], a_K[known]
        if known.sum() < max(FEWEST, 0.4 * len(a_K)) or not np.ptp(x) > 0 or not np.ptp(y) > 0:
            continue
        gain = float((x - x.mean()) @ (y - y.mean())) / float((x - x.mean()) @ (x - x.mean()))
        left = float((y - y.mean() - gain * (x - x.mean())).std()) / float(y.std())
        if left > limit:
            continue
        if gain < 0 and not what:
            yield "the sign is wrong", "the sign is turned twice, or not at all: what is rewarded is avoided", left
        elif what:
            yield what + (", with the sign turned" if gain < 0 else ""), cause, left
        return


def _made_of(d_K: Array, place: Array, back: Array, first: Array, sizes: Array) -> Iterator[tuple[str, str, Array]]:
    """What is no line of advantages but made of them, raw or whitened."""
    total = np.cumsum(d_K) - np.repeat(np.cumsum(d_K)[first] - d_K[first], sizes)
    yield "they are added up along the response", "a cumulative sum is taken once too often", total
    yield (
        "no advantage keeps its sign: they are absolute values",
        "an absolute value (or a square and its root) is taken",
        np.abs(d_K),
    )
    wrong = "they are masked by the wrong mask"
    yield "only the last token of each response has one", wrong, np.where(back == 0, d_K, 0.0)
    yield "only the first token of each response has one", wrong, np.where(place == 0, d_K, 0.0)
    yield "only positive ones are kept", "a clamp (max with 0): what is bad is never pushed down", np.maximum(d_K, 0)
    yield "only negative ones are kept", "a clamp (min with 0): what is good is never pushed up", np.minimum(d_K, 0)
    yield "only their signs are left", "a sign (or a comparison) is taken", np.sign(d_K)
    yield "they are squared", "they are multiplied by themselves", d_K * np.abs(d_K)


def _whitened_over_padding(batch: StepBatch, expected_N: Array, counted_N: Array) -> Finding | None:
    """Advantages whose mean and std were taken over every slot of the padded rows: a line through returns - values that
    is not centred over the tokens that count, and is over all slots with zeros in the padding.
    """
    column = given(batch.columns.of("advantages"))
    if column.ref.rows is not None or len(column.ref.shape) != 2:
        return None
    x, a = expected_N[counted_N], column.values_N[counted_N]
    slope = float(((x - x.mean()) * (a - a.mean())).sum() / ((x - x.mean()) ** 2).sum())
    if abs(float(a.mean())) < 0.02 or not slope > 0:
        return None
    centre = float(x.mean() - a.mean() / slope)
    # Rows as wide as they are stored, or as the response alone: what centres them tells.
    longest = int(batch.flat.count(counted_N).max(initial=1))
    widths = range(longest, column.ref.shape[1] + 1)
    slots = min((len(batch) * width for width in widths), key=lambda slots: abs(float(x.sum()) / slots - centre),
                default=0)  # fmt: skip
    if slots <= len(x):
        return None
    mean = float(x.sum()) / slots
    spread = float(np.sqrt((x * x).sum() / slots - mean * mean))
    if abs(centre - mean) < 1e-3 * spread + 1e-5 and abs(slope * spread - 1) < 1e-2:
        return error(
            "advantages are whitened over padding too: their mean over the tokens that count is "
            f"{float(a.mean()):.3g}, not 0",
            batch.laid.where("advantages", at=counted_N),
            shown("mean over tokens that count", float(a.mean()), "0", column.source),
            shown("what was subtracted", centre, f"{float(x.mean()):.4g}"),
            shown("mean over every slot of the rows", mean),
            cause="mean and std are taken over the whole tensor, without the mask: zeros of the padding pull the mean "
            "to 0 and the std down",
        )
    return None


def _to_come(batch: StepBatch) -> Iterator[Array]:
    """The discounted reward to come of every token [N], by gamma; from token rewards, else the sample's at its end."""
    told = batch.columns.of("token_rewards") or batch.columns.of("token_scores")
    trained_N, sample_N = given(batch.trained_N), batch.flat.sample_N
    rewards_N = np.zeros(trained_N.size)
    if told is not None:
        rewards_N = np.where(told.said_N, np.nan_to_num(told.values_N), 0.0)
    elif batch.reward_B is not None:
        last_B = batch.flat.last(trained_N)
        rewards_N[(batch.flat.starts_B + last_B)[last_B >= 0]] = batch.reward_B[last_B >= 0]
    at = np.flatnonzero(trained_N)[::-1]
    for gamma in _GAMMAS:
        out_N, coming, sample = np.zeros(trained_N.size), 0.0, -1
        for place in at:
            coming = rewards_N[place] + gamma * (coming if sample_N[place] == sample else 0.0)
            sample = sample_N[place]
            out_N[place] = coming
        yield out_N


def _so_far(batch: StepBatch) -> Iterator[tuple[str, Array]]:
    """The rewards up to every token that counts [N], where several tokens of a response have one."""
    told, trained_N = batch.columns.of("token_rewards"), given(batch.trained_N)
    if told is None:
        return
    rewards_N = np.where(trained_N & told.said_N, np.nan_to_num(told.values_N), 0.0)
    total_N = np.cumsum(rewards_N)
    before_B = (total_N - rewards_N)[np.minimum(batch.flat.starts_B, len(total_N) - 1)]
    yield "rewards", total_N - before_B[batch.flat.sample_N]


#: How a penalty on long answers is called, and the words of its settings.
_OVERLONG = regex(r"(?i)over_?long|too_?long|over_?length")
LIMIT_WORDS = ("max_response_length", "max_completion_length", "max_tokens", "max_new_tokens", "generate_max_len")
BUFFER_WORDS = ("overlong_buffer_len", "overlong_buffer.len", "overlong_buffer", "soft_overlong_cache",
                "soft_cache_length", "soft_punish_cache")  # fmt: skip
_FACTOR = ("overlong_penalty_factor", "overlong_buffer.penalty_factor", "penalty_factor")
#: Lengths that tell, and the share of samples whose penalty is that of their length.
LENGTHS, OF_LENGTH = 3, 0.95


@rule("D105", "a penalty on long answers falls on short ones", link="rewards", scope="case", lasts=True,
      explains=("L08", "L09", "D20", "D104"),
      source="DAPO section 3.3 (soft overlong punishment): (L_max - L_cache - |y|) / L_cache")  # fmt: skip
def overlong_turned(case: Case) -> Finding | None:
    """A recorded penalty on overlong answers (16 samples and more, of 3 lengths and more, none above 0), one number of
    a response's length: an error where it is never larger for a longer response, and smaller for the shortest. Shown
    beside what a stated limit, buffer and factor make of it.
    """
    lengths: list[float] = []
    penalties: list[float] = []
    first: StepBatch | None = None
    named = ""
    steps: list[int] = []
    for batch in case.batches():
        response_N = batch.response_N if batch.response_N is not None else batch.trained_N
        names = sorted({name for sheet, _ in batch.columns.sheets for name in sheet.names() if _OVERLONG.search(name)})
        each = next(((name, told) for name in names if (told := batch.columns.per_sample(name)) is not None), None)
        if response_N is None or each is None or not np.isfinite(each[1]).all():
            continue
        named, first = each[0], first or batch
        lengths += batch.flat.count(response_N).tolist()
        penalties += each[1].tolist()
        steps += [] if batch.step is None else [batch.step]
    if first is None or len(lengths) < FEWEST:
        raise Skip(f"needs a recorded penalty on overlong answers, of {FEWEST} responses")
    length_B, penalty_B = np.array(lengths), np.array(penalties)
    sizes = np.unique(length_B)
    by_length = np.array([np.median(penalty_B[length_B == size]) for size in sizes])
    own = np.abs(penalty_B - by_length[np.searchsorted(sizes, length_B)]) <= 1e-4
    skip_if(
        len(sizes) < LENGTHS or own.mean() < OF_LENGTH or penalty_B.max() > 1e-6,
        f"needs a penalty that a response's length makes, of {LENGTHS} lengths",
    )
    if (np.diff(by_length) < -1e-6).any() or by_length[-1] - by_length[0] < 1e-6:
        return None
    number = case.algorithm.number
    limit, buffer, factor = number(*LIMIT_WORDS), number(*BUFFER_WORDS), number(*_FACTOR)

    def meant(size: float) -> str | None:
        if not limit or not buffer:
            return None
        return f"{min(0.0, max(-1.0, (limit - buffer - size) / buffer)) * (1.0 if factor is None else factor):.3g}"

    return error(
        f"the penalty on long answers falls on short ones: {named} is {by_length[0]:.3g} at {sizes[0]:g} tokens and "
        f"{by_length[-1]:.3g} at {sizes[-1]:g}",
        first.laid.where(named, sample=int(np.argmin(penalty_B[: len(first)]))),
        *(shown(f"penalty at {size:g} tokens", float(value), meant(float(size)), named)
          for size, value in ((sizes[0], by_length[0]), (sizes[-1], by_length[-1]))),
        shown("samples", len(lengths)), shown("different lengths", len(sizes)),
        cause="the difference of length and limit is taken the wrong way round: short answers are punished, and what "
        "runs to the limit is not; responses grow until they are cut",
        steps=steps,
    )  # fmt: skip
