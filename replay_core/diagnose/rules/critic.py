"""The critic: are its targets what rewards and values give, and does it come any nearer to them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np

from replay_core import pages
from replay_core.diagnose import trends
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.columns import Column
from replay_core.diagnose.finding import Finding, Where
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import Skip, given, rule
from replay_core.diagnose.signals import RunLog, Series
from replay_core.diagnose.stated import stated_number
from replay_core.diagnose.stating import finding, share, shown
from replay_core.records import Record, TensorRef

#: What a recomputed target may leave of the recorded one, by the precision it was stored in.
CLOSE = {"bfloat16": 2e-2, "float16": 4e-3}
#: How far a fitted gamma or lambda may lie from the one that is stated.
SETTING = 2e-3
#: Tokens that two unknowns are solved from; steps before a critic that explains nothing is more than new.
FEWEST, LEARNT = 8, 6
#: Below these, tokens a few places before the reward hardly see it: no recipe for language models comes near.
LEAST_GAMMA, LEAST_LAMBDA = 0.95, 0.5
#: How near a factor of GAE's delta is to a whole number that it is called.
NEAR = 0.02
#: Rows before returns of another are no chance.
SEVERAL_ROWS = 4
#: Of what a critic was off at first, the share it is still off by when it has learnt nothing.
NO_NEARER = 0.8
#: How many times its beginning a value loss comes to when the critic diverges.
EXPLODED = 10.0


def _dense(batch: StepBatch, column: Column) -> Array:
    """The column's counted tokens as rows [B, T], zeros after each."""
    trained_N = given(batch.trained_N)
    counts_B = batch.flat.count(trained_N)
    values_BT = np.zeros((len(batch), max(int(counts_B.max(initial=0)), 1)))
    values_BT[np.arange(values_BT.shape[1]) < counts_B[:, None]] = np.nan_to_num(column.values_N[trained_N])
    return values_BT


@dataclass(frozen=True, slots=True)
class _Fit:
    """GAE solved for its two settings, and what is left at the last tokens [B] of responses."""

    gamma: float
    lam: float
    left_B: Array

    def words(self) -> str:
        return f"gamma {self.gamma:.4g}, lambda {self.lam:.4g}"


@dataclass(frozen=True, slots=True)
class _Rows:
    """Counted tokens as rows [B, T], and how close is close."""

    values_BT: Array
    returns_BT: Array
    mask_BT: Array
    close: float

    @property
    def last_B(self) -> Array:
        last_B: Array = np.maximum(self.mask_BT.sum(1).astype(np.int64) - 1, 0)
        return last_B

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
        found, _, rank, sizes = np.linalg.lstsq(x, y, rcond=None)
        if rank < 2 or sizes[1] < 1e-3 * sizes[0] or np.abs(x @ found - y).max() > self.close:
            return None
        gamma, product = float(found[0]), float(found[1])
        left_B = self.at_last(advantages_BT - rewards_BT + values_BT)
        return _Fit(gamma, product / gamma if abs(gamma) > 1e-3 else float("nan"), left_B[self.mask_BT.any(1)])


@rule("D44", "value targets are not what rewards and values give", link="advantages", scope="batch",
      needs=("values", "returns", "mask", "token_rewards|token_scores|reward"),
      explains=("D45", "D52"), lasts=True,
      source="arXiv 1506.02438 equation 16; verl compute_gae_advantage_return")  # fmt: skip
def targets(batch: StepBatch) -> Iterator[Finding]:
    """GAE is linear in gamma and gamma lambda: both are solved for, over the tokens that count, and must leave less
    than 1e-3 of the returns (2e-2 in bf16). Solved, they are named (info; a warning where none are
    stated and gamma is below .95 or lambda below .5); an error where they are not the stated
    ones, lie outside 0 to 1, or at the last tokens more is left than the reward explains (the value after the end,
    the next sample's, a reward that is missing). Not solved, it is an error that a known mistake can be: returns that
    are advantages, rewards, off by one token, made without the next value or with another's, or by a recursion that
    runs forwards in time. Else it is skipped (a lambda for every
    response, rewards shaped after they were recorded).
    """
    values, returns = given(batch.columns.of("values")), given(batch.columns.of("returns"))
    counts_B = batch.flat.count(given(batch.trained_N))
    width = max(int(counts_B.max(initial=0)), 1)
    mask_BT = (np.arange(width) < counts_B[:, None]).astype(np.float64)
    values_BT, returns_BT = _dense(batch, values), _dense(batch, returns)
    if not np.abs(returns_BT).max() > 0 or not np.ptp(values_BT[mask_BT != 0]) > 0:
        raise Skip("returns are 0, or all values are one number")
    close = max(CLOSE.get(column.dtype, 1e-3) for column in (values, returns))
    rows = _Rows(values_BT, returns_BT, mask_BT, close * max(1.0, float(np.abs(returns_BT).max())))
    told = batch.columns.of("token_rewards") or batch.columns.of("token_scores")
    rewards_BT = _dense(batch, told) if told is not None else _at_the_end(batch, mask_BT)
    place = batch.laid.where("returns", sample=0)
    fit = rows.solved(rewards_BT, values_BT, returns_BT - values_BT)
    if fit is not None and abs(fit.gamma) > 0.05:
        yield from _solved(batch, rows, fit, rewards_BT)
        return
    found = next(_mistakes(batch, rows, rewards_BT), None)
    if found is None and (over := _over_observations(batch, values, returns, close)) is not None:
        yield finding(
            "error",
            "GAE runs over tokens that the policy did not sample: tool output stands between its steps",
            place,
            evidence=[shown("over the whole response it is solved by", over.words(), None, returns.source),
                      shown("over the tokens that count", "nothing solves it")],
            cause="returns are added up over every token of the response, observations included: each of them takes "
            "its part of gamma and lambda, and its value is one that no action of the policy led to",
        )  # fmt: skip
        return
    if found is None:
        raise Skip("no GAE agrees, and no known mistake: a lambda of its own for every response, or shaped rewards")
    claim, setting = found
    yield finding(
        "error",
        f"value targets are wrong: {claim}",
        place,
        evidence=[
            shown("agree to", rows.close, None, returns.source),
            shown("setting that agrees with the mistake", setting),
        ],
        cause="the critic is taught another target than the return",
    )


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
    return fit if fit is not None and 0.05 < fit.gamma < 1.01 and -0.01 < fit.lam < 1.01 else None


def _solved(batch: StepBatch, rows: _Rows, fit: _Fit, rewards_BT: Array) -> Iterator[Finding]:
    place = batch.laid.where("returns", sample=0)
    heard_B = rows.mask_BT.any(1)
    last_v, last_r = (rows.at_last(each)[heard_B] for each in (rows.values_BT, rewards_BT))
    evidence = [shown("gamma that solves it", round(fit.gamma, 4)), shown("lambda that solves it", round(fit.lam, 4)),
                shown("agree to", rows.close)]  # fmt: skip
    off_B = np.abs(fit.left_B) > rows.close
    cut_B = batch.truncated_flag_B
    ended_B = off_B & (~cut_B[heard_B] if cut_B is not None else True)
    if ended_B.any():
        after = (fit.left_B - fit.gamma * last_v)[ended_B]
        full = (fit.left_B - last_v)[ended_B]
        evidence.append(shown("last tokens off", share(int(ended_B.sum()), int(heard_B.sum())), "none"))
        if ended_B.sum() >= 3 and min(np.abs(after).max(), np.abs(full).max()) <= rows.close:
            yield finding(
                "error",
                "GAE bootstraps from the value at the last token, as if the response went on after its end",
                place,
                evidence=evidence,
                cause="the value after the end of a response is 0: the terminal value is not masked out",
            )
        elif ended_B.sum() >= 3 and np.abs((fit.left_B + last_r)[ended_B]).max() <= rows.close and last_r.any():
            yield finding(
                "error",
                "the reward does not reach the returns: at the last token they hold none of it",
                place,
                evidence=evidence,
                cause="the reward lies at another token than the last that counts (padding), or is dropped",
            )
        elif _leaks(batch, rows, off_B, np.asarray(heard_B)) or _is_over_padding(batch, fit, rows.close):
            yield finding(
                "error",
                "GAE leaks from padding: at the last token of responses that end before the row does, it takes the "
                "critic's value behind the end",
                place,
                evidence=evidence,
                cause="GAE runs over every column of the padded row, without the mask: values after the end of the "
                "response are not 0, and reach advantages and returns",
            )
        elif _runs_on(rows, fit):
            yield finding(
                "error",
                "GAE runs on from one sample into the next",
                place,
                evidence=evidence,
                cause="value and advantage are not reset at the end of a response (rows are flattened, or packed)",
            )
        else:
            raise Skip("GAE agrees, but not at the last tokens: rewards or values there are others than recorded")
        return
    stated = [(name, stated_number(batch.laid.stated, *names)) for name, names in _SETTINGS]
    wrong = [(name, value) for (name, value), had in zip(stated, (fit.gamma, fit.lam), strict=True)
             if value is not None and abs(value - had) > SETTING]  # fmt: skip
    odd = not (0 < fit.gamma < 1 + SETTING and -SETTING < fit.lam < 1 + SETTING)
    (_, gamma), (_, lam) = stated
    is_swapped = gamma is not None and lam is not None and abs(gamma - fit.lam) + abs(lam - fit.gamma) < 2 * SETTING
    if wrong and is_swapped:
        yield finding(
            "error",
            f"gamma and lambda are swapped in GAE: it was made with {fit.words()}",
            place,
            evidence=[*evidence, *(shown(f"{name} that is stated", value) for name, value in stated)],
            cause="the two are handed over in the wrong order",
        )
    elif wrong or odd:
        yield finding(
            "error",
            f"GAE was made with {fit.words()}"
            + (f", and the run states {' and '.join(f'{name} {value:g}' for name, value in wrong)}" if wrong else ""),
            place,
            evidence=[*evidence, *(shown(f"{name} that is stated", value) for name, value in wrong)],
            cause="the settings that are configured do not reach GAE, or a factor stands at the wrong place in it",
        )
    elif (gamma is None and fit.gamma < LEAST_GAMMA) or (lam is None and fit.lam < LEAST_LAMBDA):
        yield finding(
            "warning",
            f"GAE was made with {fit.words()}: recipes for language models have gamma 1 and lambda 0.95 to 1",
            place,
            evidence=evidence,
            cause="the reward stands at the end of the response, and so small a "
            + ("gamma" if fit.gamma < LEAST_GAMMA else "lambda")
            + " hides it from all but the last tokens; the run does not state which it was meant to have",
        )
    elif fit.gamma < 0.98 and abs(fit.lam - 1) <= SETTING and gamma is None:
        yield finding(
            "warning",
            f"GAE was made with {fit.words()}: a token {round(1 / (1 - fit.gamma)) * 2} places before the reward "
            f"hardly "
            "sees it",
            place,
            evidence=evidence,
            cause="gamma and lambda are swapped: recipes for language models have gamma 1 and lambda below it",
        )
    else:
        yield finding(
            "info",
            f"returns are GAE's, {fit.words()}",
            place,
            evidence=evidence,
            cause="the settings that were solved for and agree; nothing is wrong",
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
    for sheet, _ in batch.columns.sheets:
        told = sheet.refs("token_rewards") or sheet.refs("token_scores")
        mask = sheet.refs("response_mask") or sheet.refs("loss_mask")
        values, returns = sheet.refs("values"), sheet.refs("returns")
        if not (told and mask and values and returns):
            continue
        for refs in zip(values, returns, told, mask, strict=True):
            if any(len(ref.shape) != 2 or ref.shape != refs[0].shape for ref in refs):
                return False
            values_BT, returns_BT, rewards_BT, mask_BT = (pages.array(ref).astype(np.float64) for ref in refs)
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

    made = batch.columns.of("advantages")
    if made is not None and batch.advantage_B is None:
        white_BT = _dense(batch, made)
        inside = white_BT[mask_BT != 0]
        whitened = abs(float(inside.mean())) < 1e-2 and abs(float(inside.std()) - 1) < 2e-2
        if whitened and bool((np.abs(returns_BT - values_BT - white_BT) * mask_BT <= rows.close).all()):
            yield "returns are made from whitened advantages, not from the raw ones", "returns = whitened + values"
    if bool((np.abs(returns_BT - rewards_BT) * mask_BT <= rows.close).all()):
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
        found, _, rank, sizes = np.linalg.lstsq(x, y, rcond=None)
        if rank < 2 or sizes[1] < 1e-2 * sizes[0] or np.abs(x @ found - y).max() > rows.close:
            continue
        gamma, product = (float(one) for one in found)
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
    found, _, rank, sizes = np.linalg.lstsq(x, y, rcond=None)
    if rank < 3 or sizes[2] < 1e-3 * sizes[0] or np.abs(x @ found - y).max() > rows.close:
        return
    own, following, carried = (float(one) for one in found)
    said = f"A(t) - r(t) = {own:.3g} V(t) {following:+.3g} V(t+1) {carried:+.3g} A(t+1)"
    if abs(own - 1) < NEAR and following < -0.05:
        yield "the values have the wrong sign in GAE's delta: V(t) is added and V(t+1) subtracted", said
    elif abs(following) < NEAR and -0.3 < own < NEAR:
        yield "GAE bootstraps from a token's own value: V(t) stands where V(t+1) is due, and the critic drops out", said
    elif not (abs(own + 1) < NEAR and 0.05 < following < 1.02):
        yield "GAE's delta is no r(t) + gamma V(t+1) - V(t)", said


def _other_rows(batch: StepBatch, rows: _Rows, rewards_BT: Array) -> Iterator[tuple[str, str]]:
    """GAE solved with the returns of another row."""
    total = len(rows.values_BT)
    groups = 0 if batch.group_B is None else int(batch.group_B.max()) + 1
    by_group = {total // groups, -(total // groups)} if groups and total % groups == 0 else set()
    for by in (1, -1, *sorted(by_group - {0, 1, -1})):
        if total < SEVERAL_ROWS:
            return
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


@rule("D53", "rewards lie on tokens that do not count", link="rewards", scope="batch",
      needs=("mask", "token_rewards|token_scores", "advantages|returns"),
      explains=("D44", "D45", "D52", "L08"), lasts=True,
      source="verl: the score is put at the response's last valid token, found by the attention mask")  # fmt: skip
def off_the_tokens(batch: StepBatch) -> Iterator[Finding]:
    """Samples whose token rewards, over the whole row, hold more than over the tokens that count, while advantages are
    made token by token: a quarter of them and more is an error; so is a reward on the first token of every
    response, and, where a critic's values are recorded, one reward before the last token of every response. Where one
    advantage stands for a response it is made of the row's sum: a warning there, of rewards that lie in the padding.
    """
    name = "token_rewards" if batch.columns.ref("token_rewards") is not None else "token_scores"
    column, whole_B = batch.columns.of(name), batch.summed(name)
    spread = _on_every_token(batch) or _on_the_first_token(batch)
    if spread is None and batch.columns.ref("values") is not None:
        spread = _before_the_last_token(batch)
    if spread is not None:
        yield spread
        return
    if whole_B is None:
        raise Skip("token rewards are no rows")
    trained_N = given(batch.trained_N)
    # One advantage for all of a response is made of the row's sum: what lies on a token is in it, masked or not.
    summed = batch.advantage_B is not None and batch.columns.ref("values") is None
    told_N = np.zeros(trained_N.size, dtype=bool) if column is None else column.said_N & (trained_N | summed)
    inside_B = batch.flat.sum(np.where(told_N, given(column).values_N if column is not None else 0.0, 0.0))
    heard_B = (np.abs(whole_B) > 1e-6) & (batch.flat.count(trained_N) > 0)
    lost_B = heard_B & (np.abs(whole_B - inside_B) > 0.5 * np.abs(whole_B))
    if lost_B.sum() < 2 or lost_B.sum() < 0.25 * heard_B.sum():
        return
    if summed and not _in_one_column(batch, name, lost_B):
        raise Skip("one advantage for all of a response: it is made of the row's sum")
    sample = int(np.flatnonzero(lost_B)[0])
    yield finding(
        "warning" if summed else "error",
        f"the reward of {share(int(lost_B.sum()), int(heard_B.sum()))} samples lies "
        + ("in the padding behind its response, on no token of it" if summed else
           "on a token that does not count: padding, or outside of the mask"),
        batch.laid.where(name, sample=sample),
        evidence=[
            shown("reward on counted tokens of the first such sample", float(inside_B[sample]),
                  f"{whole_B[sample]:.4g}", f"{name} of {batch.name}"),
            shown("samples", int(lost_B.sum()), "0"),
        ],
        cause="the score is put at the last position of the row instead of the response's last token: "
        + ("one advantage for a response is made of the row's sum and has it, anything made token by token has not"
           if summed else "returns and advantages never see it"),
    )  # fmt: skip


def _in_one_column(batch: StepBatch, name: str, lost_B: Array) -> bool:
    """Whether rewards off the tokens all lie in one column of the rows, as where the last one is taken for the end."""
    refs = next((refs for sheet, _ in batch.columns.sheets if (refs := sheet.refs(name))), [])
    grids = [pages.array(ref) for ref in refs if ref.rows is None and len(ref.shape) == 2]
    if len(grids) != 1 or len(grids[0]) != len(lost_B):
        return False
    return np.unique(np.nonzero(grids[0][lost_B])[1]).size == 1


def _on_every_token(batch: StepBatch) -> Finding | None:
    """The same reward on every token of a response, in all responses that have one: nothing gives a token a score."""
    name = next((each for each in ("token_scores", "token_rewards") if batch.columns.ref(each) is not None), "")
    column = batch.columns.of(name) if name else None
    if column is None:
        return None
    counted_N = given(batch.trained_N) & column.said_N & np.isfinite(column.values_N)
    low_B, high_B = batch.flat.extremes(column.values_N, counted_N)
    heard_B = (batch.flat.count(counted_N) > 1) & (np.nan_to_num(np.abs(high_B)) > 1e-6)
    if heard_B.sum() < FEWEST or not (high_B == low_B)[heard_B].all() or np.unique(high_B[heard_B]).size < 2:
        return None
    sample = int(np.flatnonzero(heard_B)[0])
    tokens = int(batch.flat.count(counted_N)[sample])
    return finding(
        "error",
        f"the reward stands on every token of a response, in all {int(heard_B.sum())} that have one: long answers "
        "collect more",
        batch.laid.where(name, sample=sample),
        evidence=[
            shown("reward of a token of the first such sample", float(high_B[sample]), None, f"{name} of {batch.name}"),
            shown("its tokens", tokens, "1 with a reward"),
            shown("what its response collects", float(high_B[sample]) * tokens, f"{high_B[sample]:.4g}"),
        ],
        cause="an outcome reward is put on all tokens instead of on the last one: returns add it up token by token",
    )


def _paid(batch: StepBatch) -> tuple[str, Array, Array] | None:
    """(the column of rewards by token, its tokens that count, those of them that have a reward)."""
    name = next((each for each in ("token_scores", "token_rewards") if batch.columns.ref(each) is not None), "")
    column = batch.columns.of(name) if name else None
    if column is None:
        return None
    counted_N = given(batch.trained_N) & column.said_N
    paid_N = counted_N & (np.abs(np.nan_to_num(column.values_N)) > 1e-6)
    return name, counted_N, paid_N


def _before_the_last_token(batch: StepBatch) -> Finding | None:
    """One reward for each response, before the last token that counts, in all of three tokens and more."""
    paid = _paid(batch)
    if paid is None:
        return None
    name, counted_N, paid_N = paid
    counts_B, ones_B = batch.flat.count(counted_N), batch.flat.count(paid_N)
    heard_B = (counts_B > 2) & (ones_B > 0)
    if heard_B.sum() < FEWEST or (ones_B[heard_B] != 1).any():
        return None
    places_N = np.cumsum(counted_N) - np.repeat(
        np.cumsum(counts_B) - counts_B, batch.flat.lengths_B
    )  # of the tokens that count, which one
    place_B = batch.flat.sum(np.where(paid_N, places_N, 0))
    if (place_B[heard_B] >= counts_B[heard_B]).any():
        return None
    sample = int(np.flatnonzero(heard_B)[0])
    return finding(
        "error",
        f"the reward stands before the last token of its response, in all {int(heard_B.sum())} that have one",
        batch.laid.where(name, sample=sample),
        evidence=[
            shown("token of the first such sample that has it", int(place_B[sample]), f"{int(counts_B[sample])}"),
            shown("responses", int(heard_B.sum()), "0"),
        ],
        cause="an outcome's reward is put at another place than the end (a length that counts the prompt, or words, or "
        "half of the row): tokens behind it are taught nothing",
    )


def _on_the_first_token(batch: StepBatch) -> Finding | None:
    """One reward for each response, on its first token, in all of several tokens."""
    paid = _paid(batch)
    if paid is None:
        return None
    name, counted_N, paid_N = paid
    heard_B = (batch.flat.count(counted_N) > 1) & (batch.flat.count(paid_N) > 0)
    first_B = batch.flat.first(paid_N) == batch.flat.first(counted_N)
    if heard_B.sum() < FEWEST or not (first_B & (batch.flat.count(paid_N) == 1))[heard_B].all():
        return None
    sample = int(np.flatnonzero(heard_B)[0])
    return finding(
        "error",
        f"the reward stands on the first token of a response, in all {int(heard_B.sum())} that have one: the tokens "
        "that earned it come after it",
        batch.laid.where(name, sample=sample),
        evidence=[shown("responses with their reward on the first token", share(int(heard_B.sum()),
                  int(heard_B.sum())), "none", f"{name} of {batch.name}")],
        cause="an index from the wrong end (0 for -1): returns of all later tokens are 0, and nothing but the first "
        "token is taught",
    )  # fmt: skip


_NOTHING = (
    "the critic is not updated (its optimizer, its learning rate, its parameters), or it is taught wrong targets; in "
    "the first steps of a new critic this is normal"
)


@dataclass(frozen=True, slots=True)
class _StepLearnt:
    """What one step tells of a critic: explained variance, mean squared error, the spread of its values."""

    step: int
    explained: float
    error: float
    spread: float
    off: float
    """Mean value - mean return, in standard deviations of the returns."""
    value: float
    deviation: float
    """Mean of the values, and their standard deviation, in the same unit."""


def _no_nearer(explained: list[float], errors: list[float]) -> bool:
    """Whether a critic explains nothing in its later half and comes no nearer: its error stays what it was; or, where
    no error is known, what it says is worse than nothing by half the variance, and stays so.
    """
    half = len(explained) // 2
    now = median(explained[half:])
    still = bool(errors) and median(errors[half:]) >= NO_NEARER * median(errors[: max(half // 2, 2)])
    begun = median(explained[: max(half // 2, 2)])
    return (now <= 0.02 and still) or (not errors and now < -0.5 and now < 0.7 * begun)


def _had_a_way(found: list[_StepLearnt]) -> bool:
    """Whether the critic began off the mean of its returns, by half of their standard deviation: what it then comes no
    nearer to is there to be learnt. Or else its values stand: rewards by chance leave nothing to learn, and it moves.
    """
    begun = median(abs(one.off) for one in found[: max(len(found) // 4, 2)])
    means, deviations = [one.value for one in found], [one.deviation for one in found]
    stands = max(means) - min(means) < 0.25 and max(deviations) < 2 * min(deviations)
    return begun > 0.5 or stands


@rule("D45", "the critic explains nothing", link="advantages", scope="case",
      source="PPO's explained variance: 1 - Var(returns - values) / Var(returns)")  # fmt: skip
def explains_nothing(case: Case) -> Iterator[Finding]:
    """Values that are one number for every token of 3 steps and more: a warning. Else explained variance and mean
    squared error of the returns by the values, over tokens that count, in 6 steps and more: a warning where the
    variance it explains stays within .02 of 0 while the error does not fall below .8 of what it was in the first
    steps, or is below -.5 and does not rise. A critic that knows nothing but the mean is at 0 and has come nearer.
    Silent where it began within half a standard deviation of its returns' mean, and its values move.
    """
    found: list[_StepLearnt] = []
    where, known = None, False
    for batch in case.batches():
        values, returns = batch.columns.of("values"), batch.columns.of("returns")
        # What lies beside a step's samples (a critic's own records) is a batch of its own, and need not hold both.
        if values is None or returns is None or batch.step is None or batch.trained_N is None:
            continue
        known = True
        both_N = batch.trained_N & values.said_N & returns.said_N
        v, r = values.values_N[both_N], returns.values_N[both_N]
        if both_N.sum() > FEWEST and float(r.var()) > 1e-9:
            explained = 1 - float((r - v).var()) / float(r.var())
            unit = float(r.std())
            found.append(_StepLearnt(
                batch.step, explained, float(((r - v) ** 2).mean()), float(np.ptp(v)), float(v.mean() - r.mean()) /
                unit, float(v.mean()) / unit, float(v.std()) / unit,
            ))  # fmt: skip
            where = batch.laid.where("values", sample=0)
    if not known:
        raise Skip("no values and returns are recorded")
    constant = [one for one in found if not one.spread > 0]
    if len(found) >= 3 and len(constant) == len(found):
        yield finding(
            "warning",
            f"the critic gives every token one number in all {len(found)} steps: it is never updated",
            where,
            evidence=[shown("largest - smallest value of a step", 0.0, "> 0"), shown("steps", len(found))],
            cause=_NOTHING,
            steps=[one.step for one in constant],
        )
        return
    if len(found) < LEARNT:
        raise Skip(f"needs values and returns of {LEARNT} steps")
    if _no_nearer([one.explained for one in found], [one.error for one in found]) and _had_a_way(found):
        later = found[len(found) // 2 :]
        yield finding(
            "warning",
            f"the critic explains nothing of its returns after {len(found)} steps, and comes no nearer to them",
            where,
            evidence=[
                shown("explained variance, later half", median(one.explained for one in later), "> 0"),
                shown("mean squared error, later half", median(one.error for one in later)),
                shown("mean squared error, first step", found[0].error),
            ],
            cause=_NOTHING,
            steps=[one.step for one in later],
        )


#: Steps after which a critic that moves has had its time; what its mean has moved by, in shares of its error.
SETTLED, MOVED = 24, 0.25


def _moves(means: list[float], loss: Series | None) -> bool:
    """Whether the mean of the values goes a way that is large beside the error that is left: the critic is updated.

    The value loss is a half of the squared error, or all of it: the larger root is taken.
    """
    if len(means) < 2:
        return False
    left = math.sqrt(2 * max(median(loss.finite), 0.0)) if loss is not None and loss.finite else 0.0
    return left > 0 and max(means) - min(means) > MOVED * left


@rule("D45", "the critic explains nothing", link="trend", scope="signals",
      needs=("explained_variance|value_mean|value_loss",), source="PPO's explained variance")  # fmt: skip
def never_learns(log: RunLog) -> Iterator[Finding]:
    """The mean value the same number in every one of 5 steps and more, while returns change or a value loss is
    logged: a warning. Else explained variance and value loss of 10 steps, judged as of a dump: a warning of 24 steps
    and more, or where the mean value stands; info where the critic's values move, as a new one's do.
    """
    values = log.get("value_mean")
    # A trainer without a critic may log a 0 for its values.
    returns, loss = log.get("return_mean"), log.get("value_loss")
    moving = (returns is not None and len(set(returns.finite)) > 2) or (loss is not None and any(loss.finite))
    if values is not None and len(values.finite) >= 5 and len(set(values.finite)) == 1 and moving:
        yield finding(
            "warning",
            f"{values.name} is {values.finite[0]:.4g} in all {len(values.finite)} steps: the critic is never updated",
            values.points[0].where(values.name),
            evidence=[values.shown(values.finite[0], "another number in every step")],
            cause=_NOTHING,
            next_step="print the critic's learning rate and the norm of its gradient after a step",
            steps=values.steps(),
        )
        return
    if loss is not None and len(loss.finite) >= 8 and trends.rises(loss.finite):
        begun, now = median(loss.finite[:3]), median(loss.finite[-3:])
        if begun > 0 and now > EXPLODED * begun:
            yield finding(
                "warning",
                f"the value loss explodes: {loss.name} goes from {begun:.3g} to {now:.3g}",
                loss.first(over=EXPLODED * begun),
                evidence=[loss.shown(now, f"< {EXPLODED:g} x {begun:.3g}")],
                cause="the critic diverges: its learning rate is too high, its targets grow with its own values, or "
                "returns are not clipped or scaled",
                next_step="lower the critic's learning rate; look at values and returns of the same steps",
                steps=loss.steps(over=EXPLODED * begun),
            )
            return
    series = log.get("explained_variance")
    if series is None or len(series.finite) < 10:
        raise Skip("needs the explained variance of 10 steps")
    if _no_nearer(series.finite, loss.finite if loss is not None else []):
        now = trends.level(series.finite)
        early = len(series.finite) < SETTLED and values is not None and _moves(values.finite, loss)
        yield finding(
            "info" if early else "warning",
            f"the critic explains nothing of its returns and comes no nearer to them: {series.name} is {now:.2g}",
            series.last.where(series.name),
            evidence=[
                series.shown(now, "> 0"),
                *([loss.shown(trends.level(loss.finite), f"was {loss.finite[0]:.3g}")] if loss else []),
            ],
            cause=_NOTHING,
            next_step="rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump --rule D44",
            steps=series.steps(),
        )


@rule("D62", "the critic's loss is averaged over padding", link="reduction", scope="case",
      explains=("D45",), lasts=True,
      source="the critic's loss of verl, OpenRLHF, AReaL and ROLL is a mean over the tokens of the mask")  # fmt: skip
def value_loss_made(case: Case) -> Iterator[Finding]:
    """The logged loss of a critic's micro-batch beside means of (V - R)^2 of its values and returns: over the tokens of
    the mask, response by response, halved or not. Clipping only makes a loss larger. An error where every loss of 4
    micro-batches and more is below all of these (by 2 %) and none is below the sum divided by every slot of the rows.
    """
    below, above, looked = 0, 0, 0
    worst: tuple[float, float, float, Record] | None = None
    for record in case.records():
        parts = _valued(record)
        if parts is None:
            continue
        logged, error_BT, mask_BT = parts
        looked += 1
        kept = np.where(mask_BT != 0, error_BT, 0.0)
        total, tokens = float(kept.sum()), float((mask_BT != 0).sum())
        least = 0.5 * min(total / max(tokens, 1.0), float(np.mean(kept.sum(1) / np.maximum(mask_BT.sum(1), 1e-9))))
        floor = 0.5 * total / mask_BT.size
        if logged < 0.98 * least:
            below += 1
            above += logged >= 0.999 * floor
            if worst is None or logged / least < worst[0] / worst[1]:
                worst = logged, least, floor, record
    if looked < 4:
        raise Skip("needs values, returns, mask and loss of a critic's micro-batches")
    if below < 0.9 * looked or above < below or worst is None:
        return
    logged, least, floor, record = worst
    yield finding(
        "error",
        "the critic's loss is averaged over padding too: it is smaller than the mean over the tokens that count",
        Where(step=record.key.step, micro=record.key.micro, role=record.key.role, stage=record.key.stage,
              tensor="loss", path=str(record.path)),
        evidence=[
            shown("logged", logged, f">= {least:.6g}", record.path.name),
            shown("half the mean over tokens that count", least),
            shown("half the sum over every slot", floor),
            shown("micro-batches below it", share(below, looked)),
        ],
        cause="the mean is taken over every column of the padded rows (no mask): padding, whose error is small, "
        "dilutes the loss",
    )  # fmt: skip


#: Ranges that values are clipped at, beside the stated one: none, what recipes have, and 0.
_VALUE_RANGES = (math.inf, 0.2, 0.5, 0.0)
_VALUE_CLIPS = ("cliprange_value", "vf_clip", "value_clip", "value_clip_range", "vf_clip_param", "clip_range_vf",
                "eps_clip_value", "cliprange_vf", "vclip")  # fmt: skip


@rule("D91", "the critic's loss is clipped at another range than stated", link="loss", scope="case", lasts=True,
      explains=("D45", "D71"),
      source="verl cliprange_value: values move by that much in a batch's updates, at most")  # fmt: skip
def clipped_elsewhere(case: Case) -> Iterator[Finding]:
    """The logged loss of a critic's micro-batches, made of its new values, the values recorded before the updates and
    the returns: max((V - R)^2, (clip(V, old +- c) - R)^2), halved, a mean over the tokens of the mask. An error where
    the run states a range, no loss that tells is made with it, and all are made with another: none, .2, .5, or 0.
    """
    stated = stated_number(case.run.facts, *_VALUE_CLIPS) or stated_number(case.run.flags or {}, *_VALUE_CLIPS)
    if stated is None or not stated > 0:
        raise Skip("the run states no range that values are clipped at")
    ranges = (stated, *(each for each in _VALUE_RANGES if each != stated))
    made = dict.fromkeys(ranges, 0)
    told, where = 0, None
    for batch in case.batches():
        for logged, new, old, due in _value_losses(batch):
            each = {}
            for c in ranges:
                cut = old + np.clip(new - old, -c, c)
                each[c] = float(np.maximum((new - due) ** 2, (cut - due) ** 2).mean())
            for half in (0.5, 1.0):
                fits = [c for c, value in each.items() if abs(half * value - logged) <= 1e-3 * abs(logged) + 1e-6]
                if fits and len(fits) < len({round(value, 9) for value in each.values()}) + len(fits) - 1:
                    told += 1
                    for c in fits:
                        made[c] += 1
                    where = where or batch.laid.where("values", sample=0)
                    break
    if told < 3:
        raise Skip("needs losses of 3 micro-batches of a critic that tell one range from another, and their values")
    found = max((c for c in ranges if c != stated), key=lambda c: made[c])
    if made[stated] or made[found] < told:
        return
    how = "not clipped" if math.isinf(found) else f"clipped at {found:g}"
    yield finding(
        "error",
        f"the critic's loss is {how}, and the run states a value clip range of {stated:g}"
        + (": values are held where they are" if found == 0 else ""),
        where,
        evidence=[shown("micro-batches whose loss it makes", made[found]),
                  shown("of these, those that the stated range makes", made[stated], str(told))],
        cause="the range that is configured does not reach the loss: another setting or a default stands in its place",
    )  # fmt: skip


def _value_losses(batch: StepBatch) -> Iterator[tuple[float, Array, Array, Array]]:
    """(logged loss, new values, values before the updates, returns) of a critic's micro-batches, over tokens that
    count.
    """
    if batch.tokens_N is None or batch.trained_N is None:
        return
    old, returns = batch.columns.of("values"), batch.columns.of("returns")
    if old is None or returns is None:
        return
    learnt = {
        (record.key.rank, record.key.micro): record for record in batch.columns.every_record
        if record.key.role == "critic" and record.key.stage == "loss" and record.key.micro is not None
    }  # fmt: skip
    for sheet, places in batch.columns.sheets if learnt else ():
        sample_of = {sheet.index[place]: sample for sample, place in enumerate(places) if place is not None}
        for number, part in enumerate(sheet.parts):
            key = part.held.record.key
            record = learnt.pop((key.rank, key.micro), None) if key.micro is not None else None
            found = None if record is None else _of_micro(record)
            if found is None:
                continue
            loss, *refs = found
            new, due = (part.values(ref) for ref in refs)
            samples = [sample_of.get((number, row)) for row in range(len(part))]
            if new is None or due is None or None in samples:
                continue
            each: list[Array] = []
            for row, sample in enumerate(samples):
                here = slice(int(part.starts[row]), int(part.starts[row] + part.lengths[row]))
                there = slice(int(batch.flat.starts_B[sample]), int(batch.flat.starts_B[sample] + part.lengths[row]))
                kept = batch.trained_N[there]
                each.append(np.stack([new.values_N[here][kept], old.values_N[there][kept], due.values_N[here][kept]]))
            rows = np.concatenate(each, axis=1)
            if rows.shape[1] and np.isfinite(rows).all():
                yield loss, *rows


def _of_micro(record: Record) -> tuple[float, TensorRef, TensorRef] | None:
    """The loss, values and returns that a critic's micro-batch recorded; None where one of them is missing."""
    found = {ref.canonical or ref.name: ref for ref in record.tensors() if not ref.is_text and ref.is_readable}
    loss = next((found[name] for name in ("loss", "value_loss", "vf_loss", "critic_loss") if name in found), None)
    values, returns = found.get("values"), found.get("returns")
    if loss is None or values is None or returns is None or loss.numel != 1:
        return None
    return float(pages.array(loss).reshape(-1)[0]), values, returns


def _valued(record: Record) -> tuple[float, Array, Array] | None:
    """(logged loss, squared error [B, T], mask [B, T]) of a critic's micro-batch."""
    if record.key.stage in ("training_metrics", "param", "gradient") or record.key.role != "critic":
        return None
    found = {ref.canonical or ref.name: ref for ref in record.tensors() if not ref.is_text and ref.is_readable}
    mask = found.get("response_mask") or found.get("loss_mask")
    loss = next((found[name] for name in ("loss", "value_loss", "vf_loss", "critic_loss") if name in found), None)
    values, returns = found.get("values"), found.get("returns")
    if mask is None or loss is None or values is None or returns is None or loss.numel != 1:
        return None
    if len({tuple(one.shape) for one in (mask, values, returns)}) != 1 or len(mask.shape) != 2:
        return None
    v, r, m = (pages.array(one).astype(np.float64) for one in (values, returns, mask))
    return float(pages.array(loss).reshape(-1)[0]), (v - r) ** 2, m


#: How far the critic's mean may lie from its returns', in multiples of the largest return, before it has overshot.
OVERSHOT = 2.0


@rule("D63", "the critic overshoots its returns", link="optimizer", scope="signals",
      needs=("value_mean", "return_mean"),
      explains=("D45", "L10", "L08", "L09", "L02", "D20", "D24", "D25"),
      source="a critic's mean lies within the range of its returns")  # fmt: skip
def overshoots(log: RunLog) -> Iterator[Finding]:
    """|mean value - mean return| over twice the largest |mean return| in two steps and more, none of them the first,
    and more than in the first step: a warning, an error in half of the steps. A critic that is loaded may begin far
    off, and comes nearer.
    """
    values, returns = given(log.get("value_mean")), given(log.get("return_mean"))
    by_step = {point.step: point.value for point in returns.points}
    apart = [
        (point, abs(point.value - by_step[point.step])) for point in values.points
        if math.isfinite(point.value) and math.isfinite(by_step.get(point.step, math.nan))
    ]  # fmt: skip
    if len(apart) < 4:
        raise Skip("needs values and returns of 4 steps")
    size = max(abs(by_step[point.step]) for point, _ in apart)
    bad = [(point, off) for point, off in apart[1:] if size > 0 and off > OVERSHOT * size and off > apart[0][1]]
    if len(bad) < 2:
        return
    worst, _ = max(bad, key=lambda each: each[1])
    yield finding(
        "error" if 2 * len(bad) >= len(apart) else "warning",
        f"the critic's values explode past their targets: {values.name} is {worst.value:.3g} at step {worst.step}, and "
        f"returns are {by_step[worst.step]:.3g}",
        worst.where(values.name),
        evidence=[
            values.shown_at(worst, f"within {OVERSHOT * size:.3g} of the return"),
            shown("in the first step", apart[0][1]),
            shown("steps", share(len(bad), len(apart))),
        ],
        cause="the critic's learning rate is too high: its values explode past their targets and swing back; or it is "
        "taught other targets than the returns that are logged (another scale or unit)",
        next_step="lower the critic's learning rate ten times; look at its loss and gradient norm",
        steps=[point.step for point, _ in bad if point.step is not None],
    )  # fmt: skip


@rule("D84", "the critic's loss is negative", link="loss", scope="case",
      source="arXiv 1707.06347 equation 9: a mean of squares")  # fmt: skip
def negative_in_dump(case: Case) -> Iterator[Finding]:
    """Losses of the critic's micro-batches (4 and more) below -1e-4 in half of them and more: an error."""
    found = [
        (value, record) for record in case.records()
        if record.key.stage not in ("training_metrics", "param", "gradient")
        for value in [_value_loss(record)] if value is not None
    ]  # fmt: skip
    if len(found) < 4:
        raise Skip("needs the critic's loss of 4 micro-batches")
    below = [(value, record) for value, record in found if value < -1e-4]
    if 2 * len(below) < len(found):
        return
    value, record = min(below, key=lambda one: one[0])
    yield finding(
        "error",
        f"the value loss has the wrong sign: it comes to {value:.3g}, and a mean of squares is never negative",
        Where(step=record.key.step, micro=record.key.micro, role=record.key.role, stage=record.key.stage,
              path=str(record.path)),
        evidence=[shown("the critic's loss", value, ">= 0", record.path.name),
                  shown("micro-batches below 0", share(len(below), len(found)))],
        cause="the critic's loss is negated: an optimizer drives its values away from their returns",
        next_step="look at the line that makes the value loss",
        steps=sorted({record.key.step for _, record in below if record.key.step is not None}),
    )  # fmt: skip


def _value_loss(record: Record) -> float | None:
    """The critic's loss that a record holds; None of others."""
    names = ("value_loss", "vf_loss", "critic_loss", *(("loss",) if record.key.role == "critic" else ()))
    for ref in record.tensors():
        if (ref.canonical or ref.name) in names and ref.numel == 1 and not ref.is_text and ref.is_readable:
            return float(pages.array(ref).reshape(-1)[0])
    return None


@rule("D84", "the critic's loss is negative", link="loss", scope="signals", needs=("value_loss",), lasts=True,
      explains=("D45", "D63", "L02", "L08", "L09", "L10", "L16", "D24", "D25", "D20"),
      source="arXiv 1707.06347 equation 9: a mean of squares")  # fmt: skip
def negative(log: RunLog) -> Iterator[Finding]:
    """The value loss below -1e-4 in 3 steps and more and half of all: an error. A mean of squares cannot be."""
    series = given(log.get("value_loss"))
    below = [point for point in series.points if point.value < -1e-4]
    if len(below) < 3 or 2 * len(below) < len(series.points):
        return
    worst = min(below, key=lambda point: point.value)
    yield finding(
        "error",
        f"the value loss has the wrong sign: {series.name} is {below[0].value:.3g} at first and comes to "
        f"{worst.value:.3g}, and a mean of squares is never negative",
        worst.where(series.name),
        evidence=[series.shown_at(worst, ">= 0"), shown("steps below 0", share(len(below), len(series.points)))],
        cause="the critic's loss is negated: an optimizer drives its values away from their returns",
        next_step="look at the line that makes the value loss",
        steps=[point.step for point in below if point.step is not None],
    )


#: How many times the square of all that values and returns span a mean of squares may come to.
BEYOND = 4.0


@rule("D90", "the critic's loss is larger than values and returns allow", link="loss", scope="signals",
      needs=("value_loss", "value_mean|value_max", "return_mean|return_max"), lasts=True,
      explains=("D45", "D63", "L02", "L08", "L09", "L10", "D20", "D24", "D25"),
      source="(V - R)^2 lies below (|V| + |R|)^2")  # fmt: skip
def beyond_its_values(log: RunLog) -> Iterator[Finding]:
    """The value loss over 4 times (largest |value| + largest |return|)^2 of the step (over 100 times that of their
    means, where no largest is logged) in the first 3 steps that tell: an error. Later ones may be an update further.
    """
    loss = given(log.get("value_loss"))
    bounds: dict[int | None, float] = {}
    exact = log.has("value_max") and log.has("return_max")
    for names in (
        (("value_max", "value_min"), ("return_max", "return_min")) if exact else (("value_mean",), ("return_mean",))
    ):
        largest: dict[int | None, float] = {}
        for series in (one for name in names for one in log.all(name)[:1]):
            for point in series.points:
                largest[point.step] = max(largest.get(point.step, 0.0), abs(point.value))
        bounds = {
            step: bounds.get(step, 0.0) + value for step, value in largest.items() if not bounds or step in bounds
        }
    limit = BEYOND if exact else 25 * BEYOND
    told = [
        (point, limit * bounds[point.step] ** 2) for point in loss.points
        if math.isfinite(point.value) and math.isfinite(bounds.get(point.step, math.nan)) and bounds[point.step] > 1e-3
    ][:3]  # fmt: skip
    if len(told) < 3:
        raise Skip("needs the value loss beside values and returns of 3 steps")
    if any(point.value <= most for point, most in told):
        return
    first, most = told[0]
    yield finding(
        "error",
        f"the critic is taught other targets than its returns: {loss.name} is {first.value:.4g} at first, and no "
        f"difference of the logged values and returns is that large",
        first.where(loss.name),
        evidence=[loss.shown_at(first, f"<= {most:.3g}"), shown("largest |value| + |return|" if exact else
                  "|mean value| + |mean return|", math.sqrt(most / limit))],
        cause="targets in another scale or unit than the returns (multiplied, not normalised back), another tensor in "
        "their place, or a sum over tokens for a mean",
        next_step="rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump --rule D44",
        steps=[point.step for point, _ in told if point.step is not None],
    )  # fmt: skip
