"""Judges one pair from its figures: SAME, CLOSE, DIFF, NAN or PADDING, by which rule, and one sentence why.

Pure: figures in, verdict out, nothing is read. The sentence speaks like torch.testing.assert_close.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from replay_core.compare.judging.rules import BY_ID, EXPLAINING, SPEAKERS, RuleAnswer, answers, mismatched
from replay_core.compare.judging.tolerance import DEFAULT, Limits, Tolerances
from replay_core.compare.judging.verdict import Context, Decision, Judgement, Verdict
from replay_core.measure.figures import PairFigures

if TYPE_CHECKING:
    from replay_core.documents.comparison import RuleEntry


def judge(
    counted: PairFigures, whole: PairFigures | None, context: Context, tolerances: Tolerances = DEFAULT
) -> Judgement:
    """Verdict of a pair. `counted`: over the tokens that count; `whole`: over every element, where masked apart."""
    found = _held_to(counted, whole, context, tolerances)
    nans = of_nans(counted)
    return replace(found, reason=found.reason + nans) if nans else found


def of_nans(figures: PairFigures) -> str:
    """What a sentence ends in where numbers are NaN on both sides alike: they are no difference, and worth knowing."""
    nans = figures.nans_of_both
    if not nans:
        return ""
    if nans == figures.compared:
        return "; NaN on both sides" if nans == 1 else "; every one is NaN on both sides"
    return f"; NaN at the same {f'{nans:,} places' if nans > 1 else 'place'} of both"


def _held_to(counted: PairFigures, whole: PairFigures | None, context: Context, tolerances: Tolerances) -> Judgement:
    held = tolerances.of(context)
    found = _judged(counted, whole, held)
    if not held.given:
        by_the_table = held.elementwise is None and not context.bitwise_only
        if context.explained is not None and found.verdict is Verdict.DIFF and by_the_table:
            return Judgement(Verdict.CLOSE, context.explained)
        return found
    if found.rule is not None and (found.verdict is Verdict.DIFF or found.rule.id in ("elementwise", "exact")):
        decided: str | None = found.rule.id
    else:
        # What was accepted: the rule that would have decided otherwise.
        by_table = _judged(counted, whole, DEFAULT.of(context))
        decided = by_table.rule.id if by_table.rule and by_table.verdict is not found.verdict else None
    reason = held.reason_of(decided) if decided else None
    return replace(found, reason=f"{found.reason}; {reason}") if reason else found


def asked(counted: PairFigures, context: Context, tolerances: Tolerances = DEFAULT) -> list[RuleEntry]:
    """Every rule that was asked of a pair: id, value, limit (null: switched off). Apart from massive channels, too."""
    held = tolerances.of(context)
    if not counted.mismatched:
        return []
    worst: dict[str, RuleAnswer] = {}
    for part, rest in ((counted, False), (counted.rest, True)):
        for answer in answers(part, held, rest=rest) if part is not None else ():
            known = worst.get(answer.rule.id)
            if known is None or answer.seen.value > known.seen.value:
                worst[answer.rule.id] = answer
    return [{"id": id, "value": one.seen.value, "limit": one.limit} for id, one in worst.items()]


def _judged(counted: PairFigures, whole: PairFigures | None, held: Limits) -> Judgement:
    if not counted.mismatched:
        if whole is None or not whole.mismatched or held.context.form == "positions":
            return Judgement(Verdict.SAME, f"equal in all {counted.compared:,} elements compared")
        return _padding(whole, held.context)
    found = _over(counted, held)
    # What a module leaves in padding is nobody's; of what is trained on, people average over it.
    averaged = held.context.meaning.kind not in ("activation", "positions")
    if found.verdict is not Verdict.CLOSE or whole is None or not averaged:
        return found
    outside = _over(whole, held)
    if not outside.verdict.diverges:
        return found
    if not _is_worse_outside(counted, whole):
        return replace(found, reason=f"{found.reason}; with padding {outside.reason}", suspect=True)
    reason = f"differs only in padding: with it {outside.reason}; without it {found.reason}"
    return replace(found, verdict=Verdict.PADDING, reason=reason, rule=outside.rule)


def _padding(whole: PairFigures, context: Context) -> Judgement:
    if context.bitwise_only:
        return Judgement(Verdict.DIFF, f"{mismatched(whole)}, all in padding; bitwise equality was asked for")
    if context.meaning.kind == "mask":
        # Where a mask is on in padding, it is in a loss's sum and in its denominator.
        return Judgement(Verdict.DIFF, f"{mismatched(whole)}, all in padding: one side's mask counts padding")
    reason = f"differs only in padding: {mismatched(whole)}, none of them in a token that counts"
    if whole.nonfinite_mismatched:
        reason += "; NaN there turns into NaN gradients where backward multiplies it by 0"
    return Judgement(Verdict.PADDING, reason)


def _is_worse_outside(counted: PairFigures, whole: PairFigures) -> bool:
    """Whether padding is off more than the tokens that count are, element by element."""
    if whole.nonfinite_mismatched or whole.max_abs > counted.max_abs:
        return True
    d2, number = whole.total.d2 - counted.total.d2, whole.total.count - counted.total.count
    return number > 0 and counted.total.count > 0 and d2 / number > 4 * counted.total.d2 / counted.total.count


def _over(pair: PairFigures, held: Limits) -> Judgement:
    """The table, asked of a pair that differs."""
    suspect, speaker = False, None
    for answer in answers(pair, held):
        rule = answer.rule
        if rule.id == "cast":
            continue  # asked of what diverges
        if rule.clears:
            if answer.limit is not None and not answer.is_past:
                return Judgement(Verdict.CLOSE, answer.sentence(), rule=answer.decision)
            continue
        suspect |= answer.limit is not None and answer.seen.value > answer.suspect
        if answer.is_past:
            return _diverging(answer, pair, held)
        if rule.settles and answer.limit is not None:
            return Judgement(Verdict.CLOSE, answer.sentence(close=True), suspect, rule=answer.decision)
        if rule.id == SPEAKERS.get(held.context.form):
            speaker = answer
    if held.context.form == "number" and pair.rest is not None and pair.rest.total.d2 > 0:
        # A channel that outweighs all others hides them; what is left is held to the same limits.
        for answer in answers(pair.rest, held, rest=True):
            if answer.is_past and not answer.rule.clears:
                some = ", ".join(map(str, pair.massive[:4])) + (", ..." if len(pair.massive) > 4 else "")
                apart = f"apart from {len(pair.massive)} channels that outweigh all others ({some}): "
                return _diverging(answer, pair.rest, held, apart)
    if speaker is None:
        return Judgement(Verdict.CLOSE, f"{mismatched(pair)}; no rule that is on finds it too much", suspect)
    return Judgement(Verdict.CLOSE, speaker.sentence(close=True), suspect, rule=speaker.decision)


def _diverging(answer: RuleAnswer, pair: PairFigures, held: Limits, before: str = "") -> Judgement:
    """What is past a limit, unless it is a cast."""
    reason = answer.sentence()
    if answer.rule.id == "rel_l2" and not answer.seen.text:
        # Where the size has a shape, that is said first.
        shapes = (one for one in answers(pair, held) if one.rule.id in EXPLAINING and one.is_past)
        if (shape := next(iter(shapes), None)) is not None:
            reason = f"{shape.sentence()}; {reason}"
    row_limit = answer.seen.row_limit if answer.rule.id != "worst_row" else answer.limit
    found = Judgement(answer.rule.verdict, before + reason, row_limit=row_limit, rule=answer.decision)
    cast = BY_ID["cast"].seen(pair, held)
    allowed = held.limit(BY_ID["cast"])
    if cast is None or allowed is None or found.verdict is not Verdict.DIFF or answer.rule.settles or held.is_exact:
        return found
    # A cast is harmless: equal after rounding to the narrower dtype is CLOSE. More than a cast was computed in it.
    if cast.value <= allowed:
        assert held.context.rounded is not None  # the cast was seen in it
        said = held.context.rounded.said or f"equal after rounding to {cast.text}"
        return Judgement(Verdict.CLOSE, said, rule=Decision("cast", cast.value, allowed))
    more = f"more than a cast: {cast.value:,} elements differ after rounding to {cast.text} too"
    return replace(found, reason=f"{found.reason}; {more}")
