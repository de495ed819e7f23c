"""A teacher beside the policy: whose log-probabilities it has, and which way it pulls."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import numpy as np
from msgspec import Struct

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.columns import Column
from replay_core.diagnose.finding import Finding, Where, error, finding, listed, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import given, rule, skip_if
from replay_core.diagnose.softmax import stated_temperature
from replay_core.measure.lag import Lag, detect_lag

#: Tokens of a step, and steps, before they tell; a single step tells of its rows where it has so many.
TOKENS, STEPS, ROWS = 32, 2, 8
#: Nats: what a teacher gives no token of a fluent answer less than, and how near its usual rows are to the policy.
IMPROBABLE, USUAL = -4.0, 2.0
#: Tokens of a row before all of them being improbable is no chance.
OF_A_ROW = 4
#: How near a temperature is to the stated one, and the steps' to each other; what of the difference it may leave; the
#: correlation that two models of one text have at least, where a temperature is all that parts them.
NEAR, ONE, LEFT, RELATED = 0.2, 0.1, 0.5, 0.9
#: Two models of one text: their correlation where they face each other, and where they do not, at the most.
FACING, TURNED_AWAY = 0.5, 0.2
#: How well advantages have to be the policy over its teacher, and how much these have to differ, nats.
EXACT, DIFFER = 1e-3, 1e-3
#: How far off 1 a temperature is, before what it makes is no teacher's own.
OTHER = 0.25


class _Taught(Struct, frozen=True):
    """A step's teacher beside the policy, over the tokens that count and that both say."""

    batch: StepBatch
    teacher: Column
    policy: Column
    both_N: Array

    @property
    def d(self) -> Array:
        """teacher - policy, nats."""
        return self.teacher.values_N[self.both_N] - self.policy.values_N[self.both_N]

    @property
    def where(self) -> Where:
        return self.batch.laid.where("teacher_logprobs", at=self.both_N)

    def lag(self) -> Lag:
        """Which shift of the teacher faces the policy, over whole responses."""
        batch = self.batch
        inside_N = batch.response_N if batch.response_N is not None else self.both_N
        spans = batch.flat.spans
        ours, theirs = ([one.values_N[span][inside_N[span]] for span in spans] for one in (self.policy, self.teacher))
        return detect_lag(ours, theirs)


def _every(case: Case) -> list[_Taught]:
    found = []
    for batch in case.batches():
        teacher, policy = batch.columns.of("teacher_logprobs"), batch.trainer or batch.columns.of("rollout_logprobs")
        if teacher is None or policy is None:
            continue
        both_N = batch.pair(teacher, policy)
        if both_N.sum() >= TOKENS:
            found.append(_Taught(batch, teacher, policy, both_N))
    return found


def _steps(of: list[_Taught]) -> list[int | None]:
    return [one.batch.step for one in of]


@rule("D146", "a teacher's log-probabilities are not of these tokens", link="ref", scope="case", lasts=True,
      explains=("D15", "D49", "L08"),
      source="ms-swift#8436, atropos#464, miles#1345, slime#2085, vllm#53488")  # fmt: skip
def whose(case: Case) -> Iterator[Finding]:
    """Recorded log-probabilities of a teacher beside the policy's (old, else the rollout's), on tokens that count (32
    of a step and more).

    Shifted: the correlation of the two is above .5 at a lag of one token, and under .2 where they should face each
    other, and at any other, in all steps that tell (2 and more): an error. A teacher is another model: it need not
    agree well with the policy, and it agrees less while it is learnt from wrongly.

    Broken in some rows: a teacher that finds every token of a row improbable (under -4 nats, 4 tokens and more), while
    its other rows, half of the step and more, are within 2 nats a token of the policy: 3 rows and more of the run, a
    warning. A teacher may find an answer bad; it does not find each of its tokens bad.

    At another temperature: one temperature that explains half of the difference at a correlation above .9, the same in
    all steps of a run that is recorded from its beginning (2 and more, to a tenth), and that makes the stated
    temperature, which is a quarter off 1 and more, or its inverse (to a fifth: of a distribution one number is known):
    a warning. A larger teacher is surer of itself: one that fits no temperature that is stated is not told.
    """
    every = _every(case)
    skip_if(not every, "needs a teacher's log-probabilities beside the policy's")
    if (moved := _shifted(every)) is not None:
        yield moved
        return
    if (broken := _broken(every)) is not None:
        yield broken
    if case.begins and (hot := _tempered(every)) is not None:
        yield hot


def _shifted(every: list[_Taught]) -> Finding | None:
    told = [(one, lag, by) for one in every if (by := _faces(lag := one.lag())) is not None]
    if len(told) < STEPS or len({by for *_, by in told}) > 1 or told[0][2] == 0:
        return None
    (first, lag, by), steps = told[0], [one for one, *_ in told]
    side = "before" if by > 0 else "after"
    return error(
        f"the teacher's log-probabilities are shifted by {by:+d} token against the policy's: each token is "
        f"distilled towards what the teacher gives the token {side}",
        first.where,
        *(
            shown(f"correlation at lag {at:+d}", value, "the largest" if at == 0 else None)
            for at, value in lag.correlations.items()
        ),
        shown("tokens compared", int(first.both_N.sum()), None, f"{first.teacher.source}; {first.policy.source}"),
        shown("steps that agree", len(told)),
        cause="the teacher's logits, or its labels, are not moved by one: logits at a place are of the next token; one "
        "side gathers at labels[1:], the other at labels",
        steps=_steps(steps),
    )


def _faces(lag: Lag) -> int | None:
    """The one lag at which the two go together; None where none does, or several do."""
    known = {by: value for by, value in lag.correlations.items() if np.isfinite(value)}
    best = max(known, key=lambda by: known[by], default=0)
    others = [value for by, value in known.items() if by != best]
    tells = bool(others) and known[best] > FACING and max(others) < TURNED_AWAY
    return best if tells else None


def _improbable_B(one: _Taught) -> Array:
    """Whether the teacher finds every token of a row improbable."""
    _, high_B = one.batch.flat.extremes(one.teacher.values_N, one.both_N)
    many_B = one.batch.flat.count(one.both_N) >= OF_A_ROW
    found_B: Array = many_B & (np.nan_to_num(high_B) < IMPROBABLE)
    return found_B


def _broken(every: list[_Taught]) -> Finding | None:
    rows, heard, found = 0, 0, []
    for one in every:
        flat, bad_B = one.batch.flat, _improbable_B(one)
        d_N = np.where(one.both_N, np.abs(one.teacher.values_N - one.policy.values_N), 0.0)
        apart_B = flat.mean(np.nan_to_num(d_N), one.both_N)
        heard_B = ~np.isnan(apart_B)
        heard += int(heard_B.sum())
        usual = apart_B[heard_B & ~bad_B]
        if bad_B.any() and 2 * bad_B.sum() <= heard_B.sum() and median(usual) < USUAL and not _is_sure(one, bad_B):
            rows += int(bad_B.sum())
            found.append((one, bad_B, float(median(usual))))
    if rows < 3:
        return None
    one, bad_B, usual_apart = found[0]
    mean_B = one.batch.flat.mean(np.nan_to_num(one.teacher.values_N), one.both_N)
    return warning(
        f"in {rows} of {heard} rows the teacher finds every token improbable ({-float(np.mean(mean_B[bad_B])):.1f} "
        f"nats on average), in the others it is within {usual_apart:.2g} nats of the policy: its numbers are broken "
        "there",
        one.batch.laid.where("teacher_logprobs", sample=bad_B),
        shown("rows", listed(np.flatnonzero(bad_B).tolist()), None, one.teacher.source),
        shown("the teacher's mean in these rows", float(np.mean(mean_B[bad_B])), f"> {IMPROBABLE:g}"),
        shown("in the others", float(np.nanmean(mean_B[~bad_B]))),
        cause="the server that scores returned numbers of other tokens for these requests (prompt_logprobs with "
        "speculative decoding, a chunked prefill, a prefix cache), rows were matched to other answers, or the text was "
        "tokenized otherwise",
        next_step="score one of these rows alone, or with a plain forward of the teacher, and compare",
        steps=_steps([each for each, *_ in found]),
    )


def _is_sure(one: _Taught, bad_B: Array) -> bool:
    """Whether the policy finds these rows improbable itself: nothing is wrong with the teacher then."""
    mean_B = one.batch.flat.mean(np.nan_to_num(one.policy.values_N), one.both_N)
    return bool(np.median(mean_B[bad_B]) < IMPROBABLE / 2)


def _gain(one: _Taught) -> tuple[float, float] | None:
    """The temperature that makes the teacher's numbers of the policy's, and what of the difference it leaves."""
    x = np.minimum(one.policy.values_N[one.both_N], -1e-7)
    y = one.teacher.values_N[one.both_N]
    if x.std() == 0 or y.std() == 0 or np.corrcoef(x, y)[0, 1] < RELATED:
        return None
    before = float(np.sqrt(((y - x) ** 2).mean()))
    if before < DIFFER:
        return None
    rest = np.log(-np.expm1(x))
    fits = []
    for t in np.geomspace(0.2, 5.0, 161):
        # Two candidates hold what the sampled token leaves; of many the scale alone is known.
        two = x / t - np.logaddexp(x / t, rest / t)
        line = x.mean() / t + (x - x.mean()) / t
        offset = float((y - line).mean())
        left = min(np.sqrt(((two - y) ** 2).mean()), np.sqrt(((line + offset - y) ** 2).mean()))
        fits.append((float(left) / before, float(t)))
    residual, found = min(fits)
    return found, residual


def _tempered(every: list[_Taught]) -> Finding | None:
    told = [(one, *gain) for one in every if (gain := _gain(one)) is not None and gain[1] < LEFT]
    if len(told) < STEPS or len(told) < len(every):
        return None
    gains = [gain for _, gain, _ in told]
    middle = median(gains)
    stated = stated_temperature(told[0][0].batch)
    if stated is None or abs(stated - 1) < OTHER or max(gains) > (1 + ONE) * min(gains):
        return None
    as_stated = abs(middle / stated - 1) < NEAR
    if abs(middle - 1) < OTHER or (not as_stated and abs(middle * stated - 1) >= NEAR):
        return None
    one, _, residual = told[0]
    other = "the policy's is divided by it and the teacher's is not"
    if as_stated:
        other = "the teacher's is divided by it and the policy's is not"
    return warning(
        f"the teacher's log-probabilities are at another temperature than the policy's: {middle:.2f} explains their "
        f"difference, and {stated:g} is stated: {other}",
        one.where,
        shown("temperature that explains it", middle, "1", one.teacher.source),
        shown("temperature that is stated", stated),
        shown("part of the difference that is left", residual),
        shown("steps that agree", len(told)),
        cause="one of the two divides its logits by the sampling temperature: the policy is taught to be as sharp (or "
        "as flat) as the temperature makes it, not what the teacher knows",
        next_step="score the teacher at the temperature that the policy's log-probabilities are taken at",
        steps=_steps([each for each, *_ in told]),
    )


@rule("D147", "advantages drive the policy away from its teacher", link="advantages", scope="case", lasts=True,
      explains=("D15", "D49", "L08", "L09"),
      source="on-policy distillation: the advantage is log teacher - log policy; torchforge#527, trl#4935")  # fmt: skip
def away(case: Case) -> Finding | None:
    """Advantages that are, token by token, a positive number times (log policy - log teacher), to a thousandth of their
    size, cut off or not, less one mean or not, in all steps that tell (2 and more): an error where distillation is
    stated, else a warning. The reverse KL's gradient raises what the teacher gives more.
    """
    told: list[tuple[_Taught, float, float]] = []
    for one in _every(case):
        column = one.batch.columns.of("advantages")
        if column is None:
            continue
        known_N = one.both_N & column.said_N & np.isfinite(column.values_N)
        a = column.values_N[known_N]
        d = (one.teacher.values_N - one.policy.values_N)[known_N]
        if len(a) < TOKENS or np.ptp(a) < DIFFER or np.ptp(d) < DIFFER:
            continue
        fit = _factor(a, d)
        if fit is None:
            return None
        told.append((one, *fit))
    skip_if(not told, "needs advantages of tokens beside a teacher's log-probabilities")
    if len(told) < STEPS or any(factor >= 0 for _, factor, _ in told):
        return None
    one, factor, left = told[0]
    return finding(
        "error" if one.batch.laid.algorithm.is_distilled else "warning",
        "advantages are the policy over its teacher: what the teacher finds more probable is pushed down, and the "
        "policy is driven away from it",
        one.batch.laid.where("advantages", at=one.both_N),
        shown("advantage over (log teacher - log policy)", factor, "> 0",
              given(one.batch.columns.of("advantages")).source),
        shown("part of it that is left", left, f"< {EXACT:g}"),
        shown("steps that agree", len(told)),
        cause="the sign is turned: log policy - log teacher is the penalty (the reverse KL), the advantage is minus it",
        next_step="take log teacher - log policy as the advantage (or subtract the KL from the reward)",
        steps=_steps([each for each, *_ in told]),
    )  # fmt: skip


def _factor(a: Array, d: Array) -> tuple[float, float] | None:
    """What times teacher - policy the advantages are, and the share of them that it leaves; None where it does not."""
    # What is cut off at a bound stands at it.
    inside = (a > a.min()) & (a < a.max())
    if inside.sum() < TOKENS:
        return None
    x, y = d[inside], a[inside]
    if float(np.std(x)) < DIFFER:
        return None
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
    left = y - y.mean() - slope * (x - x.mean())
    share = float(np.sqrt((left * left).mean()) / max(float(y.std()), 1e-12))
    return (slope, share) if share < EXACT else None
