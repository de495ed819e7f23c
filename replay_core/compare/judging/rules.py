"""The table of rules: what makes two tensors differ, asked in this order. The first that is past its limit decides.

A rule looks at the figures of a pair and says how far something is off, or None where it does not apply. A value past
the limit is a divergence; below every limit a pair is CLOSE. A rule that *clears* ends the asking with CLOSE where its
value is within; one that *settles*, either way. Rules of *shape* see structure that size does not show (a factor, one
row); those *by row* read rows and columns, and what they saw is kept with the figures, so judging again reads nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from msgspec import Struct

from replay_core.compare.judging import elementwise, limits, sample, structure
from replay_core.compare.judging.columns import column_gain
from replay_core.compare.judging.structure import Seen
from replay_core.compare.judging.verdict import Context, Decision, Verdict
from replay_core.measure.figures import PairFigures

if TYPE_CHECKING:
    from replay_core.compare.judging.tolerance import Limits

Look = Callable[[PairFigures, "Limits"], Seen | None]

NUMBER, LOGPROB, SCALAR, POSITIONS = ("number",), ("logprob",), ("scalar",), ("positions",)
EVERY = (*NUMBER, *LOGPROB, *SCALAR, *POSITIONS)


class Bound(Struct, frozen=True):
    """One rule: what it sees, up to which limit, and how it says so.

    what: its statistic, in the words of docs/tolerances.md, with the unit. forms: `Context.form` of the tensors it is
    asked of. look: the statistic. limit: the number of the table, by dtype, column and what came before the tensor.
    says: the sentence where it decides, from (seen, limit, pair, held to); without it, what was seen.
    close: the sentence of CLOSE, of the rule that stands for all of its form. suspect: the value from which CLOSE is so
    only just. on_rest: also asked of the figures without massive channels.
    """

    id: str
    what: str
    forms: tuple[str, ...]
    look: Look
    limit: Callable[[Context], float]
    says: Callable[[Seen, float, PairFigures, Limits], str] | None = None
    close: Callable[[Seen, float, PairFigures, Limits], str] | None = None
    suspect: Callable[[Context], float] | None = None
    clears: bool = False
    settles: bool = False
    shape: bool = False
    by_row: bool = False
    on_rest: bool = True
    verdict: Verdict = Verdict.DIFF

    def seen(self, pair: PairFigures, held: Limits) -> Seen | None:
        """What the rule sees of a pair; of its rows, what it saw before they were let go."""
        if not self.by_row:
            return self.look(pair, held)
        if self.id not in pair.kept:
            pair.kept[self.id] = self.look(pair, held)
        found: Seen | None = pair.kept[self.id]
        return found


class RuleAnswer(Struct):
    """What one rule says of one pair. `limit` is None where the rule is switched off."""

    rule: Bound
    seen: Seen
    limit: float | None
    suspect: float
    pair: PairFigures
    held: Limits

    @property
    def is_past(self) -> bool:
        return self.limit is not None and self.seen.value > self.limit

    @property
    def decision(self) -> Decision:
        return Decision(self.rule.id, self.seen.value, math.inf if self.limit is None else self.limit)

    def sentence(self, *, close: bool = False) -> str:
        """Why the pair is what it is."""
        words = (self.rule.close if close else None) or self.rule.says
        return words(self.seen, self.decision.limit, self.pair, self.held) if words else self.seen.text


def answers(pair: PairFigures, held: Limits, *, rest: bool = False) -> Iterable[RuleAnswer]:
    """What every rule of the tensor's form says, in the order of the table. `rest`: of figures without channels."""
    for rule in _OF_FORM[held.context.form]:
        if rule.on_rest or not rest:
            seen = rule.seen(pair, held)
            if seen is not None:
                yield RuleAnswer(rule, seen, held.limit(rule), held.suspect(rule), pair, held)


def keep(pair: PairFigures, held: Limits) -> None:
    """Read off the rows all that a later judgement can ask for, and let them go."""
    for rule in _OF_FORM[held.context.form]:
        if rule.by_row:
            for one in (pair, pair.rest):
                if one is not None:
                    rule.seen(one, held)
    pair.forget_rows()


def mismatched(pair: PairFigures) -> str:
    share = 100 * pair.mismatched / pair.compared
    return f"mismatched elements: {pair.mismatched:,} / {pair.compared:,} ({share:.1f}%)"


def _none(context: Context) -> float:
    return 0.0


def _is_gradient(held: Limits) -> bool:
    return held.context.column == "gradient"


# What must be equal.


def _nan(pair: PairFigures, held: Limits) -> Seen:
    if pair.nonfinite is None:
        return Seen(0.0)
    return Seen(
        pair.nonfinite_mismatched,
        f"{pair.nonfinite_mismatched:,} of {pair.compared:,} elements are NaN or infinite on one side only "
        f"({pair.nonfinite.a:g} against {pair.nonfinite.b:g})",
    )


def _exact(pair: PairFigures, held: Limits) -> Seen | None:
    if not held.is_exact:
        return None
    why = "they must be equal" if held.context.exact else "bitwise equality was asked for"
    return Seen(pair.mismatched, f"{mismatched(pair)}; {why}")


def _positions(pair: PairFigures, held: Limits) -> Seen:
    if held.context.shift is not None:
        return Seen(0.0, held.context.shift)
    return Seen(pair.mismatched, f"positions differ at {pair.mismatched:,} of {pair.compared:,} tokens")


def _elementwise(pair: PairFigures, held: Limits) -> Seen | None:
    return None if held.elementwise is None else Seen(*elementwise.beyond(pair, *held.elementwise))


# Numbers, by size.


def _greatest(pair: PairFigures, held: Limits) -> Seen:
    return Seen(pair.max_abs)


def _beside_zeros(pair: PairFigures, held: Limits) -> Seen | None:
    is_one_zero = _is_gradient(held) and (pair.total.a2 == 0.0 or pair.total.b2 == 0.0)
    return Seen(pair.max_abs) if is_one_zero else None


def _below(what: str) -> Callable[[Seen, float, PairFigures, Limits], str]:
    return lambda seen, limit, pair, held: f"greatest absolute difference {seen.value:.3g}: below {limit:.3g}, {what}"


def _rel_l2(pair: PairFigures, held: Limits) -> Seen:
    if pair.total.d2 < limits.UNSUMMABLE:
        return Seen(pair.max_rel, "too small to be squared", held.of("worst_row"))
    if math.isinf(pair.total.d2) and math.isfinite(pair.max_abs):
        return Seen(pair.max_rel, "too large to be squared", held.of("worst_row"))
    return Seen(pair.total.rel_l2, row_limit=held.of("worst_row"))


def _rel_l2_limit(context: Context) -> float:
    limit = limits.REL_L2[context.column][context.row]
    if context.is_projection and context.row in limits.PROJECTION:
        return min(limit, limits.PROJECTION[context.row][0])
    return context.widened("rel_l2", limit)


def _rel_l2_suspect(context: Context) -> float:
    suspect = limits.SUSPECT[context.column][context.row]
    is_one = context.is_projection and context.row in limits.PROJECTION
    return min(suspect, limits.PROJECTION[context.row][1]) if is_one else suspect


def _rel_l2_says(seen: Seen, limit: float, pair: PairFigures, held: Limits) -> str:
    if seen.text:
        return f"relative difference {seen.value:.3g} (up to {limit:.3g} allowed); {seen.text}"
    return f"relative L2 {seen.value:.3g} (up to {limit:.3g} allowed, {held.column}); {mismatched(pair)}"


def _rel_l2_close(seen: Seen, limit: float, pair: PairFigures, held: Limits) -> str:
    reason = f"relative L2 {pair.total.rel_l2:.2g} (up to {limit:.3g} allowed, {held.column})"
    if seen.value > held.suspect(BY_ID["rel_l2"]):
        reason += ", above the noise expected"
    if held.context.meaning.kind == "param" and held.context.rounded is None:
        # No forward ran between two stored numbers: what differs was written by another computation.
        reason += "; stored numbers are as a rule bitwise equal: an update smaller than that cannot be excluded"
    return reason


def _worst_row(pair: PairFigures, held: Limits) -> Seen:
    return Seen(structure.worst_row(pair, is_gradient=_is_gradient(held)))


def _worst_row_says(seen: Seen, limit: float, pair: PairFigures, held: Limits) -> str:
    return (
        f"one row is off by {seen.value:.3g} of its own norm (up to {limit:.3g} allowed, {held.column}), "
        f"the tensor as a whole only by {pair.total.rel_l2:.2g}"
    )


def _outlier(pair: PairFigures, held: Limits) -> Seen:
    # What exceeds the element's own allowance: a massive activation rounds by more than the tensor's rms.
    size = BY_ID["rel_l2"]
    share = held.limit(size)
    excess = pair.max_abs - (size.limit(held.context) if share is None else share) * pair.at_greatest
    return Seen(excess / pair.total.rms_a if pair.total.rms_a else float("inf"))


def _by_table(id: str, table: limits.Table) -> Callable[[Context], float]:
    return lambda context: context.widened(id, table[context.column][context.row])


# Numbers and log probabilities, by the shape of the error.


def _gain(pair: PairFigures, held: Limits) -> Seen | None:
    is_one = not _is_gradient(held) or pair.total.gain_share >= limits.GRADIENT_GAIN_SHARE
    return structure.gain(pair) if is_one else None


def _gradient_gain(pair: PairFigures, held: Limits) -> Seen | None:
    is_one = _is_gradient(held) and pair.total.gain_share < limits.GRADIENT_GAIN_SHARE
    return structure.gain(pair) if is_one else None


def _gradient_gain_limit(context: Context) -> float:
    of_rounding = limits.GRADIENT_GAIN_ROUNDINGS * limits.GAIN_FLOOR[context.row]
    return max(of_rounding, limits.GRADIENT_GAIN_NOISE * context.noise)


def _gain_floor(context: Context) -> float:
    return limits.GAIN_FLOOR[context.row]


def _row_gain_floor(context: Context) -> float:
    return limits.ROW_GAIN_FLOOR[context.row]


def _times(context: Context) -> float:
    return limits.STANDING_OUT_GRADIENT if context.column == "gradient" else limits.STANDING_OUT


def _updated(pair: PairFigures, held: Limits) -> Seen | None:
    return structure.updated(pair, held.context.row) if held.context.meaning.kind == "param" else None


# Log probabilities, and scalars.


def _computed(table: dict[str, tuple[float, float]], place: int) -> Callable[[Context], float]:
    return lambda context: table[context.computed][place]


def _nats(label: str, unit: str) -> Callable[[Seen, float, PairFigures, Limits], str]:
    return lambda seen, limit, pair, held: (
        f"{label} {seen.value:.4g}{unit} (up to {limit:g} allowed); {mismatched(pair)}"
    )


def _sample_mean(pair: PairFigures, held: Limits) -> Seen | None:
    worst = held.context.worst_sample
    return None if worst is None else Seen(worst[1], f"sample {worst[0]} has mean exp|d| {worst[1]:.4g}")


def _of_sample(id: str) -> Look:
    return lambda pair, held: pair.kept.get(id) or sample.by_token(pair).get(id)


def _scalar_floor(context: Context) -> float:
    noise = limits.SCALAR_ERRORS * context.mean_error if context.meaning.kind == "loss" else 0.0
    return max(limits.SCALAR_FLOOR, noise)


def _small_scalar(pair: PairFigures, held: Limits) -> Seen | None:
    is_noise = _scalar_floor(held.context) > limits.SCALAR_FLOOR
    # Of numbers that are 0 but for the noise of their terms, what part of them parts them says nothing.
    size = pair.max_abs / pair.max_rel if pair.max_rel else 0.0
    is_nothing = size <= limits.SCALAR_NOTHING * held.context.mean_error
    is_far = pair.max_rel >= limits.SCALAR_RELATIVE and not is_nothing
    return None if is_noise and is_far else Seen(pair.max_abs)


def _small_scalar_says(seen: Seen, limit: float, pair: PairFigures, held: Limits) -> str:
    is_noise = limit > limits.SCALAR_FLOOR and limit == _scalar_floor(held.context)
    because = ": what the noise of the log probabilities leaves of a mean" if is_noise else ""
    return f"absolute difference {seen.value:.3g} (up to {limit:.3g} allowed{because})"


def _scalar_says(seen: Seen, limit: float, pair: PairFigures, held: Limits) -> str:
    times = 1 + pair.total.gain
    whole = round(times if abs(times) >= 1 else 1 / times) if math.isfinite(times) and times else 0
    exact = float(whole if abs(times) >= 1 else 1 / whole) if whole else 0.0
    said = f"relative difference {seen.value:.3g} (up to {limit:g} allowed), absolute {pair.max_abs:.3g}"
    if not exact or exact == 1 or abs(times / exact - 1) > limits.SCALAR[1] or abs(whole) > limits.MOST_TIMES:
        return said
    # What an accumulation, a world or a sign leaves out: the first thing to look for.
    word = f"{whole}" if abs(times) >= 1 else f"{'-' if whole < 0 else ''}1/{abs(whole)}"
    return f"{said}: b is {word} times a"


def _cast(pair: PairFigures, held: Limits) -> Seen | None:
    rounded = held.context.rounded
    return None if rounded is None else Seen(rounded.unequal, rounded.dtype)


RULES: tuple[Bound, ...] = (
    Bound("nan", "elements that are NaN or infinite on one side only", EVERY, _nan, _none, verdict=Verdict.NAN,
         on_rest=False),
    Bound("exact", "elements that differ, of ids, masks and integers, and of all where bitwise equality was asked for",
         EVERY, _exact, _none, on_rest=False),
    Bound("positions", "positions that differ by more than one constant per sample", POSITIONS, _positions, _none,
         settles=True, close=lambda seen, limit, pair, held: seen.text, suspect=lambda context: -1.0),
    Bound("elementwise", "elements past |d| <= atol + rtol |a|, where a person gave these", EVERY, _elementwise, _none,
         settles=True, on_rest=False),
    Bound("vanishing", "greatest |d|: what is smaller is no number that every kernel keeps", NUMBER, _greatest,
         lambda context: limits.VANISHING.get(context.row, 0.0), _below("the smallest normal number"), clears=True,
         on_rest=False),
    Bound("vanishing_gradient", "greatest |d| of a gradient beside zeros", NUMBER, _beside_zeros,
         lambda context: limits.VANISHING_GRADIENT, _below("the square of which an optimizer cannot hold"),
         clears=True, on_rest=False),
    Bound("rel_l2", "relative L2: ||d|| / ||a||", NUMBER, _rel_l2, _rel_l2_limit, _rel_l2_says, _rel_l2_close,
         _rel_l2_suspect),
    Bound("worst_row", "relative L2 of the worst row", NUMBER, _worst_row, _by_table("worst_row", limits.WORST_ROW),
         _worst_row_says, by_row=True),
    Bound("outlier", "greatest |d| past rel_l2's share of its own |a|, in rms of a", NUMBER, _outlier,
         _by_table("outlier", limits.OUTLIER),
         lambda seen, limit, pair, held: f"greatest absolute difference is {seen.value:.3g} rms of the tensor (up to "
         f"{limit:.3g} allowed)"),
    Bound("max_abs", "greatest |d| of log probabilities, in nats", LOGPROB, _greatest, _computed(limits.MAX_ABS, 0),
         _nats("greatest absolute difference", " nats"),
         lambda seen, limit, pair, held: f"greatest absolute difference {seen.value:.3g} nats (up to {limit:g} "
         "allowed)", _computed(limits.MAX_ABS, 1)),
    Bound("mean_exp_abs", "mean exp|d| of log probabilities", LOGPROB, lambda pair, held: Seen(pair.total.mean_exp_abs),
         _computed(limits.MEAN_EXP_ABS, 0), _nats("mean exp|d|", ""), suspect=_computed(limits.MEAN_EXP_ABS, 1)),
    Bound("k3", "k3 of log probabilities, in nats", LOGPROB, lambda pair, held: Seen(pair.total.k3),
         _computed(limits.K3, 0), _nats("k3", " nats"), suspect=_computed(limits.K3, 1)),
    Bound("sample_mean_exp_abs", "mean exp|d| over the tokens of the worst sample", LOGPROB, _sample_mean,
         _computed(limits.MEAN_EXP_ABS, 0),
         lambda seen, limit, pair, held: f"{seen.text} (up to {limit:g} allowed); {mismatched(pair)}"),
    Bound("gain", "|beta| where one factor, b = (1 + beta) a, explains half of the difference (of a gradient, .95)",
         (*NUMBER, *LOGPROB), _gain, _gain_floor, shape=True),
    Bound("gradient_gain", "|beta| of a gradient, where a factor explains half of the difference", NUMBER,
         _gradient_gain, _gradient_gain_limit, shape=True),
    Bound("bias", "|c| in rms of a where one constant, b = a + c, explains half of the difference",
         (*NUMBER, *LOGPROB), lambda pair, held: structure.bias(pair), _gain_floor, shape=True),
    Bound("row_gain", "|beta| of rows, or samples, that are each a times a factor", (*NUMBER, *LOGPROB),
         lambda pair, held: structure.row_gain(pair, held.context.row, not _is_gradient(held)), _row_gain_floor,
         shape=True, by_row=True),
    Bound("row_bias", "|c| in rms of rows, or samples, that are each a plus a constant", (*NUMBER, *LOGPROB),
         lambda pair, held: structure.row_bias(pair, held.context.row, not _is_gradient(held)), _row_gain_floor,
         shape=True, by_row=True),
    Bound("standing_row", "how many times further off than the typical row the worst one is", NUMBER,
         lambda pair, held: structure.standing_row(pair, held.context.row, _times(held.context)), _times,
         shape=True, by_row=True),
    Bound("standing_column", "how many times further off than the typical column the worst one is", NUMBER,
         lambda pair, held: structure.standing_column(pair, held.context.row, _times(held.context)), _times,
         shape=True, by_row=True),
    Bound("column_gain", "how many times the typical column's factor that of the worst one is", NUMBER,
         lambda pair, held: column_gain(pair, held.context.row), lambda context: limits.COLUMN_GAIN,
         shape=True, by_row=True),
    Bound("updated", "greatest |d| of stored numbers in roundings, where most are off alike", NUMBER, _updated,
         lambda context: limits.MOST_ROUNDINGS, shape=True, on_rest=False),
    Bound("sample", "how many times further off than the typical sample the worst one is, its tokens by 1 - p", LOGPROB,
         _of_sample("sample"), lambda context: limits.SAMPLE_STANDING_OUT, shape=True, by_row=True),
    Bound("token", "how many times the greatest token of all other samples a sample's worst one is off", LOGPROB,
         _of_sample("token"), lambda context: limits.TOKEN_STANDING_OUT, shape=True, by_row=True),
    Bound("scalar_floor", "|d| of a number that the trainer reduced", SCALAR, _small_scalar, _scalar_floor,
         _small_scalar_says, clears=True),
    Bound("scalar", "relative difference of a number that the trainer reduced", SCALAR,
         lambda pair, held: Seen(pair.max_rel), lambda context: limits.SCALAR[0],
         _scalar_says, suspect=lambda context: limits.SCALAR[1]),
    Bound("cast", "elements of two dtypes that differ after rounding to the narrower: none clears a divergence",
         (*NUMBER, *LOGPROB, *SCALAR), _cast, _none, clears=True, on_rest=False),
)  # fmt: skip
BY_ID = {rule.id: rule for rule in RULES}
_OF_FORM = {form: tuple(rule for rule in RULES if form in rule.forms) for form in EVERY}
#: Of each form, the rule that says how far a tensor as a whole may be off: looser, it silences the rules of shape.
HEADS = {"number": "rel_l2", "logprob": "max_abs"}
#: Rules that say what shape a difference has that is too large as well.
EXPLAINING = ("gain", "gradient_gain", "bias", "row_gain", "row_bias")
#: The rule whose sentence a CLOSE of each form has.
SPEAKERS = {**HEADS, "scalar": "scalar"}
