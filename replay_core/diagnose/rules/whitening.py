"""From rewards to returns to advantages, token by token: the discount and the normalisation that made them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from replay_core.diagnose.advantage_variants import held_together
from replay_core.diagnose.algorithm import demands_whitening, stated_number, whitening
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.columns import Column
from replay_core.diagnose.finding import Evidence, Finding, finding, info, share, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import given, rule, skip_if

#: What a line may leave of advantages or returns, in shares of their largest, by the precision they are stored in.
EXACT = {"bfloat16": 2e-2, "float16": 5e-3}
#: How near a solved discount is to the stated one, a std to 1, a mean to 0, a factor to 1.
SETTING, UNIT, CENTRED, ONE = 2e-3, 2e-2, 2e-2, 2e-3
#: Tokens that tell; those of a response, and responses, before their own mean and std are no chance.
FEWEST, OF_A_ROW, ROWS = 12, 4, 4
#: Steps whose returns are solved for.
STEPS = 2
_GAMMA = ("gamma", "discount")


class _StepMade(Struct, frozen=True):
    """What one step's advantages are made of: `base` [K] at the tokens that count, and how they follow it."""

    batch: StepBatch
    how: str
    claim: str
    gamma: float | None
    mean: float
    std: float
    has_critic: bool
    tokens: int
    source: str


@rule("D107", "returns or advantages are made otherwise than stated", link="advantages", scope="case", lasts=True,
      explains=("D52", "D28", "L08", "L10", "D45"),
      source="REINFORCE++ 2501.03262; verl core_algos masked_whiten, OpenRLHF: returns with gamma, whitened over the "
      "tokens of the batch")  # fmt: skip
def otherwise_than_stated(case: Case) -> Finding | None:
    """Advantages that change from token to token, in 2 steps and more. Without a critic returns (or the advantages
    themselves, which are a line of them) are solved for their discount over all tokens: R(t) = r(t) + gamma R(t+1),
    exact to 1e-3. An error where gamma is stated and another. Then advantages are held against returns (less values,
    with a critic): they as they are, centred, divided by the std, whitened over the tokens that count, over each
    response's, each rank's or each micro-batch's alone, and each of these with one factor on one sign. An error
    where they are stated to be whitened and are not, or REINFORCE++ is and no switch says that it is off or done
    later in the loss; a warning where `adv_estimator` is GAE and none does (verl, OpenRLHF and SkyRL whiten what
    they record); a warning where they are whitened response by response, or one sign has a factor; where ranks or
    micro-batches are whitened on their own, a warning if an estimator is stated, else worth knowing. Silent where
    none of these makes them.
    """
    told = [one for batch in case.batches() for one in [_told(batch)] if one is not None]
    skip_if(len(told) < STEPS, f"needs advantages of tokens and what they are made of, in {STEPS} steps")
    first = told[0]
    algorithm = first.batch.laid.algorithm
    stated = stated_number(first.batch.laid.stated, *_GAMMA)
    gammas = [one.gamma for one in told if one.gamma is not None]
    place = first.batch.laid.where("returns" if first.batch.has("returns") else "advantages", sample=0)
    steps = [one.batch.step for one in told]
    if gammas and 2 * len(gammas) >= len(told) and max(gammas) - min(gammas) < SETTING:
        gamma = float(np.median(gammas))
        if stated is not None and abs(gamma - stated) > SETTING:
            return finding(
                "error",
                f"returns are discounted with gamma {gamma:.4g}, and the run states {stated:g}",
                place,
                shown("gamma that solves them", round(gamma, 4), f"{stated:g}", first.source),
                shown("steps it solves", share(len(gammas), len(told))), shown("tokens of the first", first.tokens),
                cause="the setting does not reach the returns: a default or another algorithm's gamma stands in its "
                "place; rewards at the end hardly reach the first tokens"
                if gamma < stated
                else "the setting does not reach the returns: nothing is discounted as it should be",
                steps=steps,
            )  # fmt: skip
    hows = Counter(one.how for one in told)
    how, count = hows.most_common(1)[0]
    if count < STEPS or 3 * count < 2 * len(told):
        return None
    one = next(each for each in told if each.how == how)
    told_of = [
        shown("mean of advantages over tokens that count", one.mean, None, one.source),
        shown("std", one.std, "1"), shown("steps that are so", share(count, len(told))),
    ]  # fmt: skip
    of_these = [each.batch.step for each in told if each.how == how]
    if how in ("raw", "centred", "scaled"):
        return _not_whitened(one, how, told_of, of_these)
    if how in ("", "whole"):
        return None
    severity = "warning"
    if how in ("rank", "micro-batch"):
        severity = "warning" if algorithm.names_an_estimator and how == "rank" else "info"
    return finding(
        "info" if severity == "info" else "error" if how == "response" and algorithm.names_an_estimator else "warning",
        one.claim, one.batch.laid.where("advantages", sample=0), *told_of,
        cause=_CAUSES[how.split(":")[0]], steps=of_these,
    )  # fmt: skip


_CAUSES = {
    "response": "mean and std are taken along a row, not over the batch: every response's advantages add up to 0, and "
    "whether it was good or bad is lost",
    "rank": "statistics are not reduced over all ranks: one return has another advantage on another rank",
    "micro-batch": "statistics are taken in the loop over micro-batches: right where that is meant (CleanRL), noisier "
    "than those of the batch",
    "side": "a weight on one sign alone: advantages no longer add up to 0, and every token is pushed one way; right "
    "only where it is meant",
}


def _not_whitened(one: _StepMade, how: str, evidence: list[Evidence], steps: list[int | None]) -> Finding | None:
    algorithm = one.batch.laid.algorithm
    told = whitening(algorithm)
    is_gae = one.has_critic and algorithm.estimator == "gae"
    # Already of mean 0 and std 1, whitening would change nothing.
    if told == "off" or (abs(one.mean) < CENTRED and abs(one.std - 1) < UNIT):
        return None
    made = "returns - values" if one.has_critic else "the returns"
    words = {
        "raw": f"they are {made} as they are", "centred": f"only the mean is subtracted from {made}",
        "scaled": f"{made} are divided by their std, and no mean is subtracted",
    }[how]  # fmt: skip
    sure = demands_whitening(algorithm)
    likely = is_gae and not told and algorithm.value("adv_estimator", "advantage_estimator") is not None
    place = one.batch.laid.where("advantages", sample=0)
    if not sure and not likely:
        if told == "later" or is_gae or not algorithm.estimator:
            return info(
                f"advantages are not whitened: {words}", place, *evidence,
                cause="right where that is meant, or where they are normalised later, in the loss (CleanRL)",
                steps=steps,
            )  # fmt: skip
        return None
    name = "that they are" if told else "REINFORCE++" if sure else "GAE"
    return finding(
        "error" if sure else "warning",
        f"advantages are not whitened over the batch, and the run states {name}: {words} (std {one.std:.3g})",
        place, *evidence,
        cause="the global normalisation (mean and std over the tokens that count) does not reach the advantages: "
        "their size goes with the rewards', and so does every update"
        + ("" if sure else "; verl, OpenRLHF and SkyRL whiten GAE's advantages by default"),
        steps=steps,
    )  # fmt: skip


def _told(batch: StepBatch) -> _StepMade | None:
    column, trained_N = batch.columns.of("advantages"), batch.trained_N
    if column is None or trained_N is None or batch.advantage_B is not None:
        return None
    counted_N = trained_N & column.said_N & np.isfinite(column.values_N)
    if counted_N.sum() < FEWEST or not np.ptp(column.values_N[counted_N]) > 0:
        return None
    values, returns = batch.columns.of("values"), batch.columns.of("returns")
    gamma: float | None = None
    if values is not None:
        if returns is None:
            return None
        counted_N &= values.said_N & returns.said_N
        base_N = returns.values_N - values.values_N
    else:
        # Trainers without a critic may record the advantages under both names.
        own = returns is not None and float(np.abs(returns.values_N - column.values_N)[counted_N].max()) > 1e-6
        of = given(returns) if own else column
        counted_N &= of.said_N
        gamma = _solved(batch, of, counted_N, free=not own)
        if gamma is None:
            return None if own else _in_parts(batch, column, counted_N)
        base_N = of.values_N if own else _to_come(batch, counted_N, gamma)
    a_K, x_K = column.values_N[counted_N], base_N[counted_N]
    if len(a_K) < FEWEST or not np.isfinite(x_K).all() or not np.ptp(x_K) > 0:
        return None
    how, claim = _made(batch, a_K, x_K, counted_N, EXACT.get(column.dtype, 1e-3))
    return _StepMade(
        batch, how, claim, gamma, float(a_K.mean()), float(a_K.std()), values is not None, len(a_K), column.source
    )


#: Discounts that recipes have, where none is solved for: parts that are whitened on their own are no one line.
_GAMMAS = (1.0, 0.99, 0.995, 0.999, 0.98, 0.97, 0.95, 0.9)


def _in_parts(batch: StepBatch, column: Column, counted_N: Array) -> _StepMade | None:
    """Advantages that are whitened part by part, or have a factor on one sign, of the reward to come by the stated
    discount or a common one; the discount is then not solved for.
    """
    stated = stated_number(batch.laid.stated, *_GAMMA)
    if _rewards_N(batch) is None:
        return None
    a_K = column.values_N[counted_N]
    for gamma in _GAMMAS if stated is None else (stated, *(one for one in _GAMMAS if one != stated)):
        x_K = _to_come(batch, counted_N, gamma)[counted_N]
        if not np.ptp(x_K) > 0:
            continue
        how, claim = _made(batch, a_K, x_K, counted_N, EXACT.get(column.dtype, 1e-3))
        if claim:
            return _StepMade(
                batch, how, claim, None, float(a_K.mean()), float(a_K.std()), False, len(a_K), column.source
            )  # fmt: skip
    return None


def _rewards_N(batch: StepBatch) -> Array | None:
    """The reward of every token; a sample's at its last token that counts where none of tokens is recorded."""
    told = batch.columns.of("token_rewards")
    trained_N = given(batch.trained_N)
    if told is None and (scores := batch.columns.of("token_scores")) is not None:
        told = scores
    if told is not None:
        return np.where(told.said_N, np.nan_to_num(told.values_N), 0.0)
    if batch.reward_B is None:
        return None
    rewards_N = np.zeros(trained_N.size)
    last_B = batch.flat.last(trained_N)
    rewards_N[(batch.flat.starts_B + last_B)[last_B >= 0]] = batch.reward_B[last_B >= 0]
    return rewards_N


def _solved(batch: StepBatch, column: Column, counted_N: Array, *, free: bool) -> float | None:
    """Gamma of y(t) = g r(t) + gamma y(t+1) + k over tokens that are followed by one that counts, exact. `free`: g and
    k, too, are solved for, as of what was whitened.
    """
    rewards_N = _rewards_N(batch)
    at = np.flatnonzero(counted_N)
    if rewards_N is None or len(at) < FEWEST:
        return None
    rows = batch.flat.sample_N[at]
    inner = np.flatnonzero(rows[1:] == rows[:-1])
    y, following, r = column.values_N[at[inner]], column.values_N[at[inner + 1]], rewards_N[at[inner]]
    if len(y) < FEWEST:
        return None
    close = EXACT.get(column.dtype, 1e-3) * max(float(np.abs(y).max()), 1e-9)
    if not free:
        size = float(following @ following)
        gamma = float(following @ (y - r)) / size if size > 0 else 0.0
        return gamma if np.abs(y - r - gamma * following).max() <= close and 0.05 < gamma < 1.05 else None
    columns = [following, np.ones(len(y)), *([r] if np.ptp(r) > 0 else [])]
    x = np.stack([one / max(float(np.abs(one).max()), 1e-12) for one in columns], 1)
    found, _, rank, sizes = np.linalg.lstsq(x, y, rcond=None)
    if rank < x.shape[1] or sizes[-1] < 1e-3 * sizes[0] or np.abs(x @ found - y).max() > close:
        return None
    gamma = float(found[0]) / max(float(np.abs(following).max()), 1e-12)
    return gamma if 0.05 < gamma < 1.05 else None


def _to_come(batch: StepBatch, counted_N: Array, gamma: float) -> Array:
    """The discounted reward to come of every token that counts [N]."""
    rewards_N, at = given(_rewards_N(batch)), np.flatnonzero(counted_N)
    rows, sizes = np.unique(batch.flat.sample_N[at], return_counts=True)
    out_N = np.zeros(counted_N.size)
    if not len(at):
        return out_N
    # One column from the end at a time, of all responses: the last token of each stands in column 0.
    back_K = np.repeat(np.cumsum(sizes), sizes) - 1 - np.arange(len(at))
    row_K = np.repeat(np.arange(len(rows)), sizes)
    grid = np.zeros((int(sizes.max()), len(rows)))
    grid[back_K, row_K] = rewards_N[at]
    for column in range(1, len(grid)):
        grid[column] += gamma * grid[column - 1]
    out_N[at] = grid[back_K, row_K]
    return out_N


def _made(batch: StepBatch, a_K: Array, x_K: Array, counted_N: Array, exact: float) -> tuple[str, str]:
    """How advantages follow what they are made of: a word, and what is said of it; nothing where it is not known."""
    close = exact * max(float(np.abs(a_K).max()), 1e-12)
    mean, std = float(x_K.mean()), float(x_K.std())

    def agrees(values_K: Array) -> bool:
        return bool((np.abs(a_K - values_K) <= close).all())

    if not std > 0:
        return "", ""
    forms = [("raw", x_K), ("centred", x_K - mean), ("scaled", x_K / std), ("whole", (x_K - mean) / std)]
    for how, values_K in forms:
        # A std over n or n - 1, an epsilon beside it: a factor that is nearly 1.
        gain = float(values_K @ a_K) / max(float(values_K @ values_K), 1e-30)
        if abs(gain - 1) <= (UNIT if how in ("scaled", "whole") else ONE) and agrees(gain * values_K):
            return how, ""
    rows_K = batch.flat.sample_N[counted_N]
    for how, part_K in (("response", rows_K), *_parts(batch, rows_K)):
        if (claim := _of_parts(a_K, x_K, part_K, close, how)) is not None:
            return how, claim
    for how, values_K in (forms[3], forms[0]):
        for word, side_K in (("negative", values_K < -close), ("positive", values_K > close)):
            if side_K.sum() < FEWEST or (~side_K).sum() < FEWEST:
                continue
            v, a = values_K[side_K], a_K[side_K]
            other, rest = values_K[~side_K], a_K[~side_K]
            factor = float(v @ a) / float(v @ v)
            gain = float(other @ rest) / max(float(other @ other), 1e-30)
            if not 0.01 < factor < 100 or abs(gain - 1) > UNIT or abs(factor / gain - 1) < 2 * UNIT:
                continue
            if agrees(np.where(side_K, factor, gain) * values_K):
                made = "whitened" if how == "whole" else "what returns and values give"
                return f"side: {word}", (
                    f"{word} advantages are {factor / gain:.4g} times what they should be; the others are right "
                    f"({made})"
                )
    return "", ""


def _parts(batch: StepBatch, rows_K: Array) -> Iterator[tuple[str, Array]]:
    for whose, part_B in held_together(batch):
        yield ("rank" if "rank" in whose else "micro-batch"), part_B[rows_K]


def _of_parts(a_K: Array, x_K: Array, part_K: Array, close: float, how: str) -> str | None:
    """What is said where each part's advantages are whitened with its own mean and std."""
    least = ROWS if how == "response" else 2
    # A batch may have thousands of parts: the sums of all are made at once.
    _, number_K, sizes_P = np.unique(part_K, return_inverse=True, return_counts=True)

    def sums(values_K: Array) -> Array:
        return np.bincount(number_K, weights=values_K, minlength=len(sizes_P))

    mean_P = sums(x_K) / sizes_P
    white_K = x_K - mean_P[number_K]
    std_P = np.sqrt(sums(white_K * white_K) / sizes_P)
    largest_P = np.zeros(len(sizes_P))
    np.maximum.at(largest_P, number_K, np.abs(x_K))
    tells_P = (sizes_P >= OF_A_ROW) & (std_P > 1e-6 * np.maximum(largest_P, 1e-12))
    if tells_P.sum() < least:
        return None
    white_K /= np.where(tells_P, std_P, 1.0)[number_K]
    gain_P = sums(white_K * a_K) / np.maximum(sums(white_K * white_K), 1e-30)
    # Of a few tokens n and n - 1 are far apart.
    within_P = (gain_P >= np.sqrt((sizes_P - 1) / sizes_P) - UNIT) & (gain_P <= 1 + UNIT)
    if not within_P[tells_P].all() or (np.abs(a_K - gain_P[number_K] * white_K) > 2 * close)[tells_P[number_K]].any():
        return None
    words = {"response": "response by response", "rank": "rank by rank", "micro-batch": "in each micro-batch alone"}
    return (
        f"advantages are whitened {words[how]}: mean and std are those of each {how}'s own tokens, not of the batch's"
    )
