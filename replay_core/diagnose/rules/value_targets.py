"""Value targets, recomputed: the returns that rewards and values give, and mistakes that make others."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from replay_core import pages
from replay_core.diagnose.algorithm import stated_number
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.columns import Column
from replay_core.diagnose.finding import Finding, error, info, share, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import Skip, given, rule, skip_if
from replay_core.records import TensorRef

#: What a recomputed target may leave of the recorded one, by the precision it was stored in.
CLOSE = {"bfloat16": 2e-2, "float16": 4e-3}
#: How far a fitted gamma or lambda may lie from the one that is stated.
SETTING = 2e-3
#: Tokens that two unknowns are solved from; steps before a critic that explains nothing is more than new.
FEWEST, LEARNT = 8, 6
#: A gamma that is solved for and is smaller says that nothing after a token counts: GAE it is not.
LEAST = 0.05
#: Below these, tokens a few places before the reward hardly see it: no recipe for language models comes near.
LEAST_GAMMA, LEAST_LAMBDA = 0.9, 0.5
#: How near a factor of GAE's delta is to a whole number that it is called.
NEAR = 0.02
#: A factor that is none.
NOTHING = 1e-3
#: Of the responses, how many end with a value of one and the same size.
MOSTLY = 0.9
#: What is said of values that are other rows', while the returns are their own rows'.
VALUES_MOVED = "values are in the wrong rows"
#: Rows before returns of another are no chance.
SEVERAL_ROWS = 4


def _dense(batch: StepBatch, column: Column) -> Array:
    """The column's counted tokens as rows [B, T], zeros after each."""
    trained_N = given(batch.trained_N)
    counts_B = batch.flat.count(trained_N)
    values_BT = np.zeros((len(batch), max(int(counts_B.max(initial=0)), 1)))
    values_BT[np.arange(values_BT.shape[1]) < counts_B[:, None]] = np.nan_to_num(column.values_N[trained_N])
    return values_BT


class _Fit(Struct, frozen=True):
    """GAE solved for its two settings, and what is left at the last tokens [B] of responses."""

    gamma: float
    lam: float
    left_B: Array

    def words(self) -> str:
        return f"gamma {self.gamma:.4g}, lambda {self.lam:.4g}"


class _Rows(Struct, frozen=True):
    """Counted tokens as rows [B, T], and how close is close."""

    values_BT: Array
    returns_BT: Array
    mask_BT: Array
    close: float

    @property
    def last_B(self) -> Array:
        last_B: Array = np.maximum(self.mask_BT.sum(1).astype(np.int64) - 1, 0)
        return last_B

    @property
    def tells_nothing(self) -> bool:
        """Whether returns are 0, to the rounding of values and advantages that add up, or all values one number."""
        nothing = 1e-6 * max(1.0, float(np.abs(self.values_BT).max()))
        return not np.abs(self.returns_BT).max() > nothing or not np.ptp(self.values_BT[self.mask_BT != 0]) > 0

    @property
    def is_of_values_alone(self) -> bool:
        """Whether returns are the values, to rounding."""
        left = float((np.abs(self.returns_BT - self.values_BT) * self.mask_BT).max())
        return left <= 1e-6 * max(1.0, float(np.abs(self.returns_BT).max()))

    def at_last(self, some_BT: Array) -> Array:
        return some_BT[np.arange(len(some_BT)), self.last_B]

    def solved(self, rewards_BT: Array, values_BT: Array, advantages_BT: Array) -> _Fit | None:
        """A_t = r_t + gamma V_(t+1) - V_t + gamma lambda A_(t+1) is linear in gamma and gamma lambda: least squares
        over all but the last tokens. None where that leaves more than is close, or does not say both.
        """
        inner_BT = (self.mask_BT[:, :-1] * self.mask_BT[:, 1:]) != 0
        next_v, next_a = values_BT[:, 1:][inner_BT], advantages_BT[:, 1:][inner_BT]
        y = (advantages_BT - rewards_BT + values_BT)[:, :-1][inner_BT]
        x = np.stack([next_v, next_a], 1)
        if len(y) < FEWEST:
            return None
        if (found := _exact(x, y, self.close)) is None:
            return None
        gamma, product = found
        left_B = self.at_last(advantages_BT - rewards_BT + values_BT)
        return _Fit(gamma, product / gamma if abs(gamma) > 1e-3 else float("nan"), left_B[self.mask_BT.any(1)])


def _exact(x: Array, y: Array, close: float, least: float = 1e-3) -> list[float] | None:
    """The coefficients of x that make y, every one of it; None where they do not, or x does not tell them apart."""
    found, _, rank, sizes = np.linalg.lstsq(x, y, rcond=None)
    is_told = rank == x.shape[1] and sizes[-1] >= least * sizes[0]
    return [float(one) for one in found] if is_told and np.abs(x @ found - y).max() <= close else None


_NEEDED = ("values", "returns", "mask", "token_rewards|token_scores|reward")


@rule("D44", "value targets are not what rewards and values give", link="advantages", scope="batch",
      needs=_NEEDED, explains=("D45", "D52", "D63"), lasts=True,
      source="arXiv 1506.02438 equation 16; verl compute_gae_advantage_return")  # fmt: skip
def targets(batch: StepBatch) -> Iterator[Finding]:
    """GAE is linear in gamma and gamma lambda: both are solved for, over the tokens that count, and must leave less
    than 1e-3 of the returns (2e-2 in bf16). Solved, they are named (info; a warning where none are stated and gamma is
    below .9 or lambda below .5); an error where they are not the stated ones, lie outside 0 to 1, or at the last tokens
    more is left than the reward explains (the value after the end, the next sample's, a reward that is missing). Two
    and more that are said to be cut off, have a reward, and go on with their last value: a warning. Not solved, it is
    an error that a known mistake can be: returns that are advantages, rewards, the values, off by one token, made
    without the next value or with another's, or by a recursion that runs forwards in time. Else it is skipped (a lambda
    for every response, rewards shaped after they were recorded).
    """
    values, returns = given(batch.columns.of("values")), given(batch.columns.of("returns"))
    rows, rewards_BT = _rows(batch)
    values_BT, returns_BT = rows.values_BT, rows.returns_BT
    place = batch.laid.where("returns", sample=0)
    if rows.is_of_values_alone and rewards_BT.any():
        left = float((np.abs(returns_BT - values_BT) * rows.mask_BT).max())
        yield error(
            "value targets are the old values themselves: returns equal values on every token, and the critic learns "
            "nothing",
            place,
            shown("largest |returns - values|", left, "> 0", returns.source),
            shown("largest |reward of a token|", float(np.abs(rewards_BT).max())),
            cause="the critic is taught what it said: advantages are not added to the values, or the wrong tensor is "
            "handed to its loss",
        )
        return
    skip_if(rows.tells_nothing, "returns are 0, or all values are one number")
    fit = rows.solved(rewards_BT, values_BT, returns_BT - values_BT)
    if fit is not None and abs(fit.gamma) > LEAST:
        yield from _solved(batch, rows, fit, rewards_BT)
        return
    found = next(_mistakes(batch, rows, rewards_BT), None)
    if found is None and (over := _over_observations(batch, values, returns, _close(values, returns))) is not None:
        yield error(
            "GAE runs over tokens that the policy did not sample: tool output stands between its steps",
            place,
            shown("over the whole response it is solved by", over.words(), None, returns.source),
            shown("over the tokens that count", "nothing solves it"),
            cause="returns are added up over every token of the response, observations included: each of them takes "
            "its part of gamma and lambda, and its value is one that no action of the policy led to",
        )
        return
    if found is None:
        raise Skip("no GAE agrees, and no known mistake: a lambda of its own for every response, or shaped rewards")
    claim, setting = found
    if claim.startswith(VALUES_MOVED):
        yield error(
            claim,
            batch.laid.where("values", sample=0),
            shown("agree to", rows.close, None, values.source),
            shown("setting that agrees with the values moved", setting),
            shown("returns at the last tokens", "their own rows' rewards"),
            cause="values were rolled, shuffled or gathered in another order after GAE was made of them: advantages "
            "and returns are right, and the critic's loss, its clip and all that compares with old values are not",
        )
        return
    yield error(
        f"value targets are wrong: {claim}",
        place,
        shown("agree to", rows.close, None, returns.source),
        shown("setting that agrees with the mistake", setting),
        cause="the critic is taught another target than the return",
    )


def is_of_gae(batch: StepBatch) -> bool:
    """Whether GAE makes the returns of the values as they are recorded, each at its own token, to the last one."""
    if not all(any(map(batch.has, need.split("|"))) for need in _NEEDED):
        return False
    rows, rewards_BT = _rows(batch)
    if rows.tells_nothing or rows.is_of_values_alone:
        return False
    fit = rows.solved(rewards_BT, rows.values_BT, rows.returns_BT - rows.values_BT)
    return fit is not None and abs(fit.gamma) > LEAST and not _ends_off(batch, rows, fit).any()


def _rows(batch: StepBatch) -> tuple[_Rows, Array]:
    """Counted values and returns as rows, and the reward of each of their tokens [B, T]."""
    values, returns = given(batch.columns.of("values")), given(batch.columns.of("returns"))
    counts_B = batch.flat.count(given(batch.trained_N))
    mask_BT = (np.arange(max(int(counts_B.max(initial=0)), 1)) < counts_B[:, None]).astype(np.float64)
    values_BT, returns_BT = _dense(batch, values), _dense(batch, returns)
    told = batch.columns.of("token_rewards") or batch.columns.of("token_scores")
    rewards_BT = _dense(batch, told) if told is not None else _at_the_end(batch, mask_BT)
    close = _close(values, returns)
    return _Rows(values_BT, returns_BT, mask_BT, close * max(1.0, float(np.abs(returns_BT).max()))), rewards_BT


def _close(values: Column, returns: Column) -> float:
    return max(CLOSE.get(column.dtype, 1e-3) for column in (values, returns))


def _ends_off(batch: StepBatch, rows: _Rows, fit: _Fit) -> Array:
    """Of samples with counted tokens, those not cut off at whose last token the reward is not all there is."""
    off_B: Array = np.abs(fit.left_B) > rows.close
    cut_B = batch.truncated_flag_B
    return off_B if cut_B is None else off_B & ~cut_B[rows.mask_BT.any(1)]


def _over_observations(batch: StepBatch, values: Column, returns: Column, close: float) -> _Fit | None:
    """GAE solved over all tokens of responses, where the mask has gaps inside them; None where that solves nothing."""
    trained_N, response_N = given(batch.trained_N), batch.response_N
    if response_N is None or not (response_N & ~trained_N).any():
        return None
    used_N = response_N & values.said_N & returns.said_N
    counts_B = batch.flat.count(used_N)
    mask_BT = (np.arange(max(int(counts_B.max(initial=0)), 1)) < counts_B[:, None]).astype(np.float64)
    each = []
    told = batch.columns.of("token_rewards") or batch.columns.of("token_scores")
    for column in (values, returns, told):
        some_BT = np.zeros(mask_BT.shape)
        if column is not None:
            some_BT[mask_BT != 0] = np.nan_to_num(np.where(column.said_N, column.values_N, 0.0)[used_N])
        each.append(some_BT)
    values_BT, returns_BT, rewards_BT = each
    if told is None:
        rewards_BT = _at_the_end(batch, mask_BT)
    rows = _Rows(values_BT, returns_BT, mask_BT, close * max(1.0, float(np.abs(returns_BT).max())))
    fit = rows.solved(rewards_BT, values_BT, returns_BT - values_BT)
    if fit is not None and 0.05 < fit.gamma < 1.01 and -0.01 < fit.lam < 1.01:
        return fit
    counted_BT = np.zeros(mask_BT.shape)
    counted_BT[mask_BT != 0] = trained_N[used_N]
    return _across_gaps(rows, counted_BT != 0, rewards_BT)


def _across_gaps(rows: _Rows, counted_BT: Array, rewards_BT: Array) -> _Fit | None:
    """GAE over all tokens of responses, whose returns are recorded (or masked) on those that count alone: solved over
    neighbours that both count, and made anew over the gaps between them.
    """
    advantages_BT = rows.returns_BT - rows.values_BT
    both_BT = counted_BT[:, :-1] & counted_BT[:, 1:]
    y = (advantages_BT - rewards_BT + rows.values_BT)[:, :-1][both_BT]
    x = np.stack([rows.values_BT[:, 1:][both_BT], advantages_BT[:, 1:][both_BT]], 1)
    if len(y) < FEWEST or (found := _exact(x, y, rows.close)) is None or not 0.05 < found[0] < 1.01:
        return None
    gamma, lam = found[0], found[1] / found[0]
    made_B, next_B = np.zeros(len(rewards_BT)), np.zeros(len(rewards_BT))
    left_BT = np.zeros(rewards_BT.shape)
    for at in range(rewards_BT.shape[1] - 1, -1, -1):
        inside_B = rows.mask_BT[:, at] != 0
        delta_B = rewards_BT[:, at] + gamma * next_B - rows.values_BT[:, at]
        made_B = np.where(inside_B, delta_B + gamma * lam * made_B, made_B)
        next_B = np.where(inside_B, rows.values_BT[:, at], next_B)
        left_BT[:, at] = np.where(counted_BT[:, at], made_B - advantages_BT[:, at], 0.0)
    # Tokens right before a gap are those that tell.
    before_BT = counted_BT[:, :-1] & ~counted_BT[:, 1:] & (rows.mask_BT[:, 1:] != 0)
    fits = np.abs(left_BT).max() <= rows.close and -0.01 < lam < 1.01 and before_BT.sum() >= SEVERAL_ROWS
    return _Fit(gamma, lam, np.zeros(len(rewards_BT))) if fits else None


def _solved(batch: StepBatch, rows: _Rows, fit: _Fit, rewards_BT: Array) -> Iterator[Finding]:
    place = batch.laid.where("returns", sample=0)
    heard_B = rows.mask_BT.any(1)
    last_v, last_r = (rows.at_last(each)[heard_B] for each in (rows.values_BT, rewards_BT))
    evidence = [shown("gamma that solves it", round(fit.gamma, 4)), shown("lambda that solves it", round(fit.lam, 4)),
                shown("agree to", rows.close)]  # fmt: skip
    off_B = np.abs(fit.left_B) > rows.close
    ended_B = _ends_off(batch, rows, fit)
    if ended_B.any():
        after = (fit.left_B - fit.gamma * last_v)[ended_B]
        full = (fit.left_B - last_v)[ended_B]
        evidence.append(shown("last tokens off", share(int(ended_B.sum()), int(heard_B.sum())), "none"))
        if ended_B.sum() >= 3 and min(np.abs(after).max(), np.abs(full).max()) <= rows.close:
            yield error(
                "GAE bootstraps from the value at the last token, as if the response went on after its end",
                place,
                *evidence,
                cause="the value after the end of a response is 0: the terminal value is not masked out",
            )
        elif ended_B.sum() >= 3 and np.abs((fit.left_B + last_r)[ended_B]).max() <= rows.close and last_r.any():
            yield error(
                "the reward does not reach the returns: at the last token they hold none of it",
                place,
                *evidence,
                cause="the reward lies at another token than the last that counts (padding), or is dropped",
            )
        elif ended_B.sum() >= 3 and np.ptp(fit.left_B[ended_B]) <= rows.close and ended_B.mean() > MOSTLY:
            after_end = float(np.median(fit.left_B)) / fit.gamma
            yield error(
                f"GAE bootstraps from a value of {after_end:.4g} after the end of every response",
                place,
                *evidence,
                cause="the value after the end of a response is 0: the recursion begins with another number (a tensor "
                "of ones, the value of padding)",
            )
        elif _leaks(batch, rows, off_B, np.asarray(heard_B)) or _is_over_padding(batch, fit, rows.close):
            yield error(
                "GAE leaks from padding: at the last token of responses that end before the row does, it takes the "
                "critic's value behind the end",
                place,
                *evidence,
                cause="GAE runs over every column of the padded row, without the mask: values after the end of the "
                "response are not 0, and reach advantages and returns",
            )
        elif _runs_on(rows, fit):
            yield error(
                "GAE runs on from one sample into the next",
                place,
                *evidence,
                cause="value and advantage are not reset at the end of a response (rows are flattened, or packed)",
            )
        else:
            raise Skip("GAE agrees, but not at the last tokens: rewards or values there are others than recorded")
        return
    # A return that stops at the limit may go on with a value, or be scored there; both count the rest twice.
    cut_B = off_B & ~ended_B
    # (A KL in the rewards leaves a little of them everywhere.)
    twice_B = cut_B & (np.abs(last_r) > 0.1 * np.abs(rewards_BT).max())
    if cut_B.any():
        evidence.append(shown("responses cut off, whose returns go on with a value", int(cut_B.sum())))
    if (
        twice_B.sum() >= 2
        and np.minimum(*(np.abs(fit.left_B - by * last_v) for by in (1, fit.gamma)))[twice_B].max() <= rows.close
    ):
        yield warning(
            f"GAE goes on with the last value in {int(twice_B.sum())} responses that were cut off, and they have their "
            "reward too: the returns of truncated responses are bootstrapped",
            place,
            *evidence,
            shown("reward at their last tokens, mean", float(last_r[twice_B].mean())),
            cause="a response that was cut off is scored as it stands, so nothing is earned after it: a value there "
            "counts what it is worth twice. Time limits are bootstrapped where the episode goes on without a reward",
            next_step="set the value after the end to 0 for truncated responses too",
        )
    stated = [(name, stated_number(batch.laid.stated, *names)) for name, names in _SETTINGS]
    wrong = [(name, value) for (name, value), had in zip(stated, (fit.gamma, fit.lam), strict=True)
             if value is not None and abs(value - had) > SETTING]  # fmt: skip
    odd = not (0 < fit.gamma < 1 + SETTING and -SETTING < fit.lam < 1 + SETTING)
    (_, gamma), (_, lam) = stated
    is_swapped = gamma is not None and lam is not None and abs(gamma - fit.lam) + abs(lam - fit.gamma) < 2 * SETTING
    if wrong and is_swapped:
        yield error(
            f"gamma and lambda are swapped in GAE: it was made with {fit.words()}",
            place,
            *evidence,
            *(shown(f"{name} that is stated", value) for name, value in stated),
            cause="the two are handed over in the wrong order",
        )
    elif wrong or odd:
        yield error(
            f"GAE was made with {fit.words()}"
            + (f", and the run states {' and '.join(f'{name} {value:g}' for name, value in wrong)}" if wrong else ""),
            place,
            *evidence,
            *(shown(f"{name} that is stated", value) for name, value in wrong),
            cause="the settings that are configured do not reach GAE, or a factor stands at the wrong place in it",
        )
    elif (gamma is None and fit.gamma < LEAST_GAMMA - SETTING) or (lam is None and fit.lam < LEAST_LAMBDA):
        yield warning(
            f"GAE was made with {fit.words()}: recipes for language models have gamma 1 and lambda 0.95 to 1",
            place,
            *evidence,
            cause="the reward stands at the end of the response, and so small a "
            + ("gamma" if fit.gamma < LEAST_GAMMA else "lambda")
            + " hides it from all but the last tokens; the run does not state which it was meant to have",
        )
    elif fit.gamma < 0.98 and abs(fit.lam - 1) <= SETTING and gamma is None:
        yield warning(
            f"GAE was made with {fit.words()}: a token {round(1 / (1 - fit.gamma)) * 2} places before the reward "
            "hardly sees it",
            place,
            *evidence,
            cause="gamma and lambda are swapped: recipes for language models have gamma 1 and lambda below it",
        )
    else:
        yield info(
            f"returns are GAE's, {fit.words()}",
            place,
            *evidence,
            cause="the settings that were solved for and agree"
            + ("; what follows the last token of those cut off is a value" if cut_B.any() else "; nothing is wrong"),
            next_step="rldbg diagnose --explain D44",
        )


_SETTINGS = (("gamma", ("gamma", "discount")), ("lambda", ("lam", "lambda", "lambd", "gae_lambda")))


def _leaks(batch: StepBatch, rows: _Rows, off_B: Array, heard_B: Array) -> bool:
    """Whether nearly all responses with padding behind them are off at their last token, and no full row is."""
    width = batch.laid.widths.get("the response", rows.mask_BT.shape[1])
    full_B = rows.mask_BT.sum(1)[heard_B] >= width
    short_B = ~full_B
    return bool(short_B.sum() >= FEWEST and full_B.any() and off_B[short_B].mean() > 0.9 and not off_B[full_B].any())


def _is_over_padding(batch: StepBatch, fit: _Fit, close: float) -> bool:
    """Whether the recursion over whole padded rows, with what the critic is recorded to say of padding, gives the
    returns of every token that counts.
    """
    sheets = [sheet for sheet, _ in batch.columns.sheets]

    def of(*names: str) -> list[TensorRef] | None:
        """The first of these that any file of the step holds: what is made of the batch may lie in several."""
        return next((refs for name in names for sheet in sheets if (refs := sheet.refs(name))), None)

    told, mask = of("token_rewards", "token_scores"), of("response_mask", "loss_mask")
    values, returns = of("values"), of("returns")
    if told and mask and values and returns and len({len(told), len(mask), len(values), len(returns)}) == 1:
        for refs in zip(values, returns, told, mask, strict=True):
            values_BT, returns_BT, rewards_BT, mask_BT = (pages.array(ref).astype(np.float64) for ref in refs)
            if mask_BT.ndim == 2 and mask_BT.shape[1] == values_BT.shape[1] + 1:
                mask_BT = mask_BT[:, 1:]  # of tokens, beside what is said of the next one
            if any(one.ndim != 2 or one.shape != values_BT.shape for one in (returns_BT, rewards_BT, mask_BT)):
                return False
            advantage_B, next_B, made_BT = np.zeros(len(values_BT)), np.zeros(len(values_BT)), np.zeros(values_BT.shape)
            for at in range(values_BT.shape[1] - 1, -1, -1):
                delta_B = rewards_BT[:, at] + fit.gamma * next_B - values_BT[:, at]
                advantage_B = delta_B + fit.gamma * fit.lam * advantage_B
                next_B = values_BT[:, at]
                made_BT[:, at] = advantage_B + next_B
            if not bool((np.abs(made_BT - returns_BT) * (mask_BT != 0) <= close).all()):
                return False
        return True
    return False


def _runs_on(rows: _Rows, fit: _Fit) -> bool:
    """Whether what is left at the last token of a row is what the next row begins with."""
    advantages_BT = rows.returns_BT - rows.values_BT
    expected = fit.gamma * (rows.values_BT[1:, 0] + fit.lam * advantages_BT[1:, 0])
    return len(fit.left_B) == len(rows.values_BT) > 2 and bool((np.abs(fit.left_B[:-1] - expected) <= rows.close).all())


def _mistakes(batch: StepBatch, rows: _Rows, rewards_BT: Array) -> Iterator[tuple[str, str]]:
    """What is wrong, and the setting with which it agrees."""
    values_BT, returns_BT, mask_BT = rows.values_BT, rows.returns_BT, rows.mask_BT

    def solved(values_BT: Array, advantages_BT: Array, rewards_BT: Array = rewards_BT) -> _Fit | None:
        fit = rows.solved(rewards_BT, values_BT * mask_BT, advantages_BT * mask_BT)
        return fit if fit is not None and -0.01 < fit.gamma < 1.01 and -0.01 < fit.lam < 1.01 else None

    scores, told = batch.columns.of("token_scores"), batch.columns.of("token_rewards")
    if scores is not None and told is not None:
        scores_BT = _dense(batch, scores)
        apart = float((np.abs(scores_BT - rewards_BT) * mask_BT).max())
        if apart > rows.close and (fit := solved(values_BT, returns_BT - values_BT, scores_BT)):
            yield (
                "they are made of the token scores, not of the token rewards: what was taken off (a KL penalty) is in "
                "the rewards, and reaches neither returns nor advantages",
                f"{fit.words()}, of the scores",
            )
    made = batch.columns.of("advantages")
    if made is not None and batch.advantage_B is None:
        white_BT = _dense(batch, made)
        inside = white_BT[mask_BT != 0]
        whitened = abs(float(inside.mean())) < 1e-2 and abs(float(inside.std()) - 1) < 2e-2
        if whitened and bool((np.abs(returns_BT - values_BT - white_BT) * mask_BT <= rows.close).all()):
            yield "returns are made from whitened advantages, not from the raw ones", "returns = whitened + values"
    # Where nothing is paid, or answers are one token, there is nothing to add up.
    paid_B = (np.abs(rewards_BT) * mask_BT > rows.close).any(1) & ((mask_BT != 0).sum(1) > 1)
    if paid_B.any() and bool((np.abs(returns_BT - rewards_BT) * mask_BT <= rows.close).all()):
        yield "returns are the rewards: nothing is added up over the response", "the token's own reward"
    if fit := solved(values_BT, returns_BT):
        yield "returns are the advantages: values are not added", fit.words()
    # What stands at a place is about its neighbour: the two are held together over all but the outermost columns.
    head, tail = (slice(None), slice(None, -1)), (slice(None), slice(1, None))
    for here, there, word in ((head, tail, "before"), (tail, head, "after")):
        both_BT = mask_BT[here] * mask_BT[there]
        inner = _Rows(values_BT[here], returns_BT[there], both_BT, rows.close)
        if fit := inner.solved(rewards_BT[here], values_BT[here], returns_BT[there] - values_BT[here]):
            yield f"returns are off by one token: each has the one of the token {word}", fit.words()
    for by, word in ((1, "before"), (-1, "after")):
        if fit := solved(np.roll(values_BT, by, 1), returns_BT - np.roll(values_BT, by, 1)):
            yield f"values are off by one token: each has the one of the token {word}", fit.words()
    for shifted_BT, word in ((_moved(values_BT, -1), "after"), (_moved(values_BT, 1), "before")):
        if fit := solved(shifted_BT, returns_BT - values_BT):
            yield f"GAE is made of values that are off by one token: each has the one of the token {word}", fit.words()
    if (scaled := _scaled(rows, rewards_BT)) is not None:
        times, plus = scaled
        if fit := solved(values_BT, (returns_BT - plus) / times - values_BT):
            yield f"returns are normalised: {times:.4g} x GAE's {plus:+.4g}, and values are not", fit.words()
    if fit := solved(values_BT, returns_BT - values_BT, -rewards_BT):
        yield "the reward has the wrong sign in them", fit.words()
    if batch.reward_B is not None:
        spread_BT = mask_BT * batch.reward_B[:, None]
        if fit := solved(values_BT, returns_BT - values_BT, spread_BT):
            yield "every token has the whole reward of its response", fit.words()
    # Without the next value only the advantage's own factor is left.
    inner_BT = (mask_BT[:, :-1] * mask_BT[:, 1:]) != 0
    a_BT = returns_BT - values_BT
    y, x = (a_BT - rewards_BT + values_BT)[:, :-1][inner_BT], a_BT[:, 1:][inner_BT]
    if x.size >= FEWEST and (size := float(x @ x)) > 0 and np.abs(y - x * (float(x @ y) / size)).max() <= rows.close:
        factor = float(x @ y) / size
        if abs(factor) < NOTHING:
            yield (
                "returns are each token's own reward: nothing of what comes after it is added up",
                f"gamma lambda {factor:.4g}",
            )
        yield "GAE is made without the next value: V(t+1) is missing from every delta", f"gamma lambda {factor:.4g}"
    yield from _other_recursion(rows, rewards_BT)
    yield from _other_delta(rows, rewards_BT)
    yield from _other_rows(batch, rows, rewards_BT)


def _other_recursion(rows: _Rows, rewards_BT: Array) -> Iterator[tuple[str, str]]:
    """A_t - r_t + V_t = gamma v + gamma lambda a, where v is no V_(t+1) or a no A_(t+1): the recursion runs the other
    way, or takes its next value from another place. Gamma and lambda are solved for, and it has to be exact.
    """
    values_BT, mask_BT = rows.values_BT, rows.mask_BT
    a_BT = (rows.returns_BT - values_BT) * mask_BT
    next_v, next_a, last_v, last_a = (_moved(each, by) for by in (-1, 1) for each in (values_BT, a_BT))
    behind_BT = mask_BT * _moved(mask_BT, -1)
    early_BT = _moved(rewards_BT, -1)
    # The first token begins what runs forwards, the last one what runs backwards.
    for what, due_BT, x_v, x_a, told_BT in (
        ("GAE runs forwards in time: a token's advantage is made of the one before it, not of the one after it",
         rewards_BT, next_v, last_a, mask_BT),
        ("GAE runs forwards in time: advantage and value of the token before stand where those of the token after are "
         "due", rewards_BT, last_v, last_a, mask_BT),
        ("GAE takes its advantage to come from the token before", rewards_BT, next_v, last_a, behind_BT),
        ("GAE's next value is the one two tokens on", rewards_BT, _moved(values_BT, -2), next_a, behind_BT),
        ("GAE's next value is the one of the token before", rewards_BT, last_v, next_a, behind_BT),
        ("the reward is paid one token early", early_BT, next_v, next_a, behind_BT),
        *(
            (f"GAE's next value is another row's: the one of the row {word}", rewards_BT, np.roll(next_v, by, 0),
             next_a, behind_BT * np.roll(behind_BT, by, 0))
            for by, word in ((1, "before"), (-1, "after")) if len(values_BT) >= SEVERAL_ROWS
        ),
    ):  # fmt: skip
        inside = told_BT != 0
        y, x = (a_BT - due_BT + values_BT)[inside], np.stack([x_v[inside], x_a[inside]], 1)
        if len(y) < 2 * FEWEST or not np.ptp(y) > 10 * rows.close:
            continue
        gamma, product = _exact(x, y, rows.close, 1e-2) or (0.0, 0.0)
        if 0.05 < gamma < 1.01 and -0.01 < product / gamma < 1.01:
            yield what, f"gamma {gamma:.4g}, lambda {product / gamma:.4g}"


def _other_delta(rows: _Rows, rewards_BT: Array) -> Iterator[tuple[str, str]]:
    """A_t - r_t = a V_t + b V_(t+1) + c A_(t+1), solved over all but the last tokens: where it is exact, and a is not
    -1 or b no gamma.
    """
    inner_BT = (rows.mask_BT[:, :-1] * rows.mask_BT[:, 1:]) != 0
    a_BT = rows.returns_BT - rows.values_BT
    y = (a_BT - rewards_BT)[:, :-1][inner_BT]
    x = np.stack([rows.values_BT[:, :-1][inner_BT], rows.values_BT[:, 1:][inner_BT], a_BT[:, 1:][inner_BT]], 1)
    if len(y) < 2 * FEWEST or not np.ptp(y) > 10 * rows.close:
        return
    if (found := _exact(x, y, rows.close)) is None:
        return
    own, following, carried = found
    said = f"A(t) - r(t) = {own:.3g} V(t) {following:+.3g} V(t+1) {carried:+.3g} A(t+1)"
    if abs(own - 1) < NEAR and following < -0.05:
        yield "the values have the wrong sign in GAE's delta: V(t) is added and V(t+1) subtracted", said
    elif abs(following) < NEAR and -0.3 < own < NEAR:
        yield "GAE bootstraps from a token's own value: V(t) stands where V(t+1) is due, and the critic drops out", said
    elif not (abs(own + 1) < NEAR and 0.05 < following < 1.02):
        yield "GAE's delta is no r(t) + gamma V(t+1) - V(t)", said


def _other_rows(batch: StepBatch, rows: _Rows, rewards_BT: Array) -> Iterator[tuple[str, str]]:
    """GAE solved with the values, or the returns, of another row."""
    total = len(rows.values_BT)
    groups = 0 if batch.group_B is None else int(batch.group_B.max()) + 1
    by_group = {total // groups, -(total // groups)} if groups and total % groups == 0 else set()
    shifts = (1, -1, *sorted(by_group - {0, 1, -1}))
    if total < SEVERAL_ROWS:
        return
    # Whole deltas of another row's values, or of them in another order of the batch.
    a_BT = rows.returns_BT - rows.values_BT
    orders = [("the row before", np.roll(np.arange(total), 1)), ("the row after", np.roll(np.arange(total), -1))]
    orders += [(f"the row {abs(by)} away", np.roll(np.arange(total), by)) for by in shifts[2:]]
    orders += [("the rows from last to first", np.arange(total)[::-1])]
    for whose, order_B in orders:
        both_BT = np.cumprod(rows.mask_BT * rows.mask_BT[order_B], axis=1)
        inner = _Rows(rows.values_BT[order_B] * both_BT, rows.returns_BT, both_BT, rows.close)
        fit = inner.solved(rewards_BT, inner.values_BT, a_BT)
        if fit is not None and 0.05 < fit.gamma < 1.01 and -0.01 < fit.lam < 1.01:
            yield f"GAE takes the values of other rows: those of {whose}", fit.words()
            return
    heard_B = rows.mask_BT.any(1)
    ends_B, due_B = (rows.at_last(each)[heard_B] for each in (rows.returns_BT, rewards_BT))
    # At its last token a return is the reward there: where that is its own row's, it is the values that were moved.
    if np.ptp(due_B) > 10 * rows.close and np.abs(ends_B - due_B).max() <= rows.close:
        for whose, order_B in orders:
            both_BT = np.cumprod(rows.mask_BT * rows.mask_BT[order_B], axis=1)
            values_BT = rows.values_BT[order_B] * both_BT
            inner = _Rows(values_BT, rows.returns_BT, both_BT, rows.close)
            fit = inner.solved(rewards_BT, values_BT, rows.returns_BT - values_BT)
            if fit is not None and 0.05 < fit.gamma < 1.01 and -0.01 < fit.lam < 1 - 1e-2:
                yield f"{VALUES_MOVED}: returns are GAE's with the values that are recorded in {whose}", fit.words()
                return
    for by in shifts:
        moved_BT = np.roll(rows.returns_BT, -by, 0)
        # A return that was moved into a longer row's padding is lost, and one that was moved into a shorter one cut.
        both_BT = rows.mask_BT * np.roll(rows.mask_BT, -by, 0)
        both_BT = np.cumprod(both_BT, axis=1)
        inner = _Rows(rows.values_BT * both_BT, moved_BT * both_BT, both_BT, rows.close)
        fit = inner.solved(rewards_BT * both_BT, inner.values_BT, (moved_BT - rows.values_BT) * both_BT)
        if fit is not None and 0.05 < fit.gamma < 1.01 and -0.01 < fit.lam < 1.01:
            whose = "the sample before" if by == 1 else "the sample after" if by == -1 else f"{abs(by)} samples away"
            yield f"returns are in the wrong rows: each sample has those of {whose}", fit.words()
            return


def _moved(values_BT: Array, by: int) -> Array:
    """The values [B, T] moved along their rows, and 0 where none is."""
    moved_BT = np.zeros_like(values_BT)
    here, there = (slice(by, None), slice(None, -by)) if by > 0 else (slice(None, by), slice(-by, None))
    moved_BT[:, here] = values_BT[:, there]
    return moved_BT


def _scaled(rows: _Rows, rewards_BT: Array) -> tuple[float, float] | None:
    """Factor and offset of the returns at last tokens over the rewards there, which they are equal to: where a line
    goes through all of them, and it is not that one.
    """
    heard_B = rows.mask_BT.any(1)
    had, due = rows.at_last(rows.returns_BT)[heard_B], rows.at_last(rewards_BT)[heard_B]
    if len(due) < FEWEST or not np.ptp(due) > 1e-6:
        return None
    times, plus = (float(each) for each in np.polyfit(due, had, 1))
    off = abs(times - 1) > 1e-2 or abs(plus) > 1e-2
    return (times, plus) if off and times > 1e-3 and np.abs(times * due + plus - had).max() <= rows.close else None


def _at_the_end(batch: StepBatch, mask_BT: Array) -> Array:
    """Each sample's reward on its last counted token."""
    reward_B = given(batch.reward_B)
    rewards_BT = np.zeros(mask_BT.shape)
    counts_B = mask_BT.sum(1).astype(np.int64)
    heard = np.flatnonzero(counts_B)
    rewards_BT[heard, counts_B[heard] - 1] = reward_B[heard]
    return rewards_BT
