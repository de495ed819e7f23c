"""What a loss is made of: the loss of a token, and the terms beside the policy's, recomputed from what is recorded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations, pairwise
from statistics import median

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from replay_core.diagnose import trends
from replay_core.diagnose.algorithm import Algorithm, is_clipped, kl_weight
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.columns import Column
from replay_core.diagnose.entropy_term import fitted_bonus
from replay_core.diagnose.finding import Evidence, Finding, Where, error, finding, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import Skip, given, rule, skip_if
from replay_core.diagnose.rules.figures import together
from replay_core.diagnose.rules.ratio import ratios
from replay_core.diagnose.signals import RunLog, Series
from replay_core.diagnose.surrogates import DUAL, RANGES, by_sequence, surrogates, weighing
from replay_core.objectives import policy_loss

#: Relative agreement of what is recomputed; and terms smaller than this beside the loss are its rounding.
CLOSE, FLOOR = 1e-3, 1e-6
FEWEST = 8
#: What a term that makes the rest of a loss leaves of it: what printed digits do.
EXACTLY = 0.01
#: A range that is stated below is no clip range: an epsilon of the optimizer goes by the same word.
LEAST_RANGE = 1e-4


def _clip_range(batch: StepBatch) -> tuple[float, float] | None:
    """(low, high) that the dump states, else None. An epsilon of the optimizer goes by the same word."""
    stated = batch.laid.flags.get("loss")
    low, high = (stated.get(name) for name in ("clip_low", "clip_high")) if isinstance(stated, dict) else (None, None)
    if isinstance(low, (int, float)) and isinstance(high, (int, float)):
        return float(low), float(high)
    found = batch.laid.algorithm.clip_range
    return found if found is not None and min(found) >= LEAST_RANGE else None


def _times_as_wide(range_: tuple[float, float], stated: tuple[float, float]) -> str:
    """`: 3 times as wide`, where both sides are off by one factor; else nothing."""
    times = [made / meant for made, meant in zip(range_, stated, strict=True) if meant > 0]
    return f": {times[0]:.3g} times as wide" if len(times) == 2 and abs(times[0] - times[1]) < 1e-2 * times[0] else ""


class _Way(Struct, frozen=True):
    """One right way to make the loss of tokens [K]: its objective, its clip range (None: none), whether importance
    weights stand in it, and whether a dual clip does.
    """

    values_N: Array
    objective: str
    clip: tuple[float, float] | None = None
    weighted: bool = False


#: What stands in the place of an objective, in words.
_OBJECTIVES = {
    "token": "PPO's, of each token's own ratio", "sequence": "GSPO's, of one ratio for each response",
    "weights": "CISPO's, a weight on the log-probability", "plain": "REINFORCE's, without a ratio",
    "bounded": "the bounded ratio times the advantage",
}  # fmt: skip


class _Made(Struct, frozen=True):
    """What the loss of a token may be made of [K], and what the run states of it."""

    a_N: Array
    ratio_kinds: tuple[Array, Array]
    logp_N: Array | None
    w_N: Array | None
    """Importance weights: recorded, or made of what the run states."""
    other_w: tuple[Array, ...]
    """Other weights that may be meant by what it states."""
    is_recorded: bool
    ranges: tuple[tuple[float, float], ...]
    algorithm: Algorithm

    def ways(self) -> Iterator[_Way]:
        """Every right way, without importance weights and with them."""
        weights = [] if self.w_N is None else [self.w_N, *self.other_w]
        each: list[Array | None] = [*weights, None] if self.algorithm.is_weighed else [None, *weights]
        for way in self._bare():
            for w_N in each:
                values_N = way.values_N if w_N is None else way.values_N * w_N
                yield replace(way, values_N=values_N, weighted=w_N is not None)

    def _bare(self) -> Iterator[_Way]:
        a_N, logp_N = self.a_N, self.logp_N
        if self.algorithm.is_of_weights:
            # CISPO's bounded ratio, and nothing that it weighs.
            for _, high in self.ranges:
                yield _Way(-np.minimum(self.ratio_kinds[0], 1 + high) * a_N, "bounded")
        for kind, r_N in zip(("token", "sequence"), self.ratio_kinds, strict=True):
            for low, high in self.ranges:
                plain_N = policy_loss.clipped(r_N, a_N, clip_low=low, clip_high=high)
                yield _Way(plain_N, kind, (low, high))
                yield _Way(np.where(a_N < 0, np.minimum(plain_N, -DUAL * a_N), plain_N), kind, (low, high))
                if logp_N is not None:
                    yield _Way(-r_N.clip(1 - low, 1 + high) * a_N * logp_N, "weights", (low, high))
                    # CISPO's weight is bounded above alone, where its lower bound is none (verl: clip_ratio_low 1).
                    yield _Way(-np.minimum(r_N, 1 + high) * a_N * logp_N, "weights", (low, high))
            yield _Way(-a_N * r_N, kind)
        yield _Way(-a_N, "plain")
        if logp_N is not None:
            yield _Way(-a_N * logp_N, "weights")

    @property
    def _objective(self) -> str:
        """The objective that is stated; empty where any may be meant."""
        if self.algorithm.is_of_weights:
            return "weights" if self.logp_N is not None else ""
        return "sequence" if self.algorithm.is_by_sequence else ""

    def is_unlike(self, way: _Way, loss_N: Array, close: float, stated: tuple[float, float] | None) -> bool:
        """Whether it is made otherwise than the run states, and that makes a difference to these tokens."""
        return self._odd(way, loss_N, close, stated) != ""

    def _odd(self, way: _Way, loss_N: Array, close: float, stated: tuple[float, float] | None) -> str:
        r_N = self.ratio_kinds[way.objective == "sequence"]
        if self._objective and way.objective != self._objective and way.objective != "plain":
            # Of ratios that are all 1 a token's and a response's are one.
            alike = self._objective == "sequence" and not self._tell_apart(close)
            if not alike:
                return "objective"
        if self.w_N is not None and self.algorithm.is_weighed is True and not way.weighted:
            apart_N = np.abs(loss_N * (self.w_N - 1)) > 3 * close
            if apart_N.sum() >= FEWEST:
                return "weights"
        if stated and way.objective in ("token", "sequence"):
            if way.clip is None and _tells(r_N, self.a_N, stated, None):
                return "unclipped"
            if way.clip is not None and way.clip != stated and _tells(r_N, self.a_N, stated, way.clip):
                return "clip"
        return ""

    def _tell_apart(self, close: float) -> bool:
        token_N, sequence_N = self.ratio_kinds
        return int((np.abs(self.a_N * (token_N - sequence_N)) > 3 * close).sum()) >= FEWEST

    def told(
        self, way: _Way, loss_N: Array, close: float, stated: tuple[float, float] | None, place: Where,
        evidence: list[Evidence],
    ) -> Finding:  # fmt: skip
        """What is said of a way that is not the stated one."""
        odd = self._odd(way, loss_N, close, stated)
        low, high = way.clip or (0.0, 0.0)
        if odd == "objective":
            name = "CISPO" if self._objective == "weights" else "a ratio for each response (GSPO)"
            holds = ": no log-probability stands in it" if self._objective == "weights" else ""
            return finding(
                "warning" if self._objective == "weights" else "error",
                f"the loss of a token is {_OBJECTIVES[way.objective]}{holds}, and the run states {name}",
                place, *evidence, link="loss",
                cause="another policy loss is chosen than is configured: a default stands in its place, or the name is "
                "not known where the loss is picked",
            )  # fmt: skip
        if odd == "weights":
            assert self.w_N is not None
            # Weights that nobody recorded may multiply what is recorded here later.
            return weights_left_out(
                "every token's loss is made without its weight", place,
                *evidence, shown("largest weight", float(self.w_N.max())),
                shown("smallest weight", float(self.w_N.min())),
                is_recorded=self.is_recorded, link="ratio",
            )  # fmt: skip
        assert stated is not None
        if odd == "unclipped":
            return finding(
                "error" if is_clipped(self.algorithm) else "info",
                f"the loss is not clipped, and the run states a range of 1 - {stated[0]:g} to 1 + {stated[1]:g}",
                place, *evidence, link="ratio",
                cause="the clipped loss is computed and not used, or the range is ignored"
                if is_clipped(self.algorithm)
                else "right where the loss that is stated is not clipped: the range is a default it leaves alone",
            )  # fmt: skip
        return error(
            f"the loss is clipped at 1 - {low:g} and 1 + {high:g}, and the run states {stated[0]:g} and {stated[1]:g}"
            + _times_as_wide((low, high), stated),
            place, *evidence, link="ratio",
            cause="the clip range that is configured does not reach the loss, or another one is logged",
        )  # fmt: skip


def weights_left_out(
    what: str, place: Where, *evidence: Evidence, is_recorded: bool = True, is_stated: bool = True, link: str = ""
) -> Finding:
    """What is said of a loss, of tokens (D50) or of a micro-batch (D28), that importance weights have no part in."""
    known = " and ".join(["recorded"] * is_recorded + ["stated"] * is_stated)
    return finding(
        "error" if is_recorded and is_stated else "warning",
        f"importance weights (TIS) are {known}, and not applied to the loss: {what}",
        place, *evidence, link=link,
        cause="the weights are computed and do not reach the policy loss: what engine and trainer disagree by is not "
        "corrected",
        next_step="multiply each token's loss by its weight before it is reduced",
    )  # fmt: skip


@rule("D50", "the loss of a token is made wrongly", link="loss", scope="batch",
      needs=("token_loss", "advantages", "mask"), lasts=True,
      explains=("D28", "L08", "L10", "D24", "L16", "D09", "D23", "L01", "D02", "D46"),
      source="arXiv 1707.06347 equation 7; 2503.14476 (two ranges), 1912.09729 (dual clip), 2507.18071, "
      "2506.13585")  # fmt: skip
def token_loss(batch: StepBatch) -> Finding | None:
    """Recomputes the recorded loss of every token from advantage and ratio: clipped at the stated range or a published
    one, with a dual clip, not clipped, a sequence's ratio (GSPO), CISPO, REINFORCE, each with the importance weights or
    without. Where one agrees to 1e-3 all is well, unless the range that agrees is not the stated one. Where none does,
    an error if a known mistake agrees: the ratio upside down, the smaller of the two losses instead of the larger, the
    advantage of the token before or after, or of another sample, or averaged over the slots of a padded row.
    Skipped where nothing agrees (other terms are in it).

    Where the run states importance weights and none are recorded, they are made of its log-probabilities: a loss that
    holds them twice, upside down, with their mask turned around, or none of them. An error where the loss of every
    token is exactly 0 although its advantage and its ratio are not: something multiplies it by 0.
    """
    recorded, advantages = given(batch.columns.of("token_loss")), given(batch.columns.of("advantages"))
    ratio_N, known_N, source = ratios(batch)
    both_N = given(batch.trained_N) & recorded.said_N & advantages.said_N & known_N
    both_N &= np.isfinite(recorded.values_N) & np.isfinite(advantages.values_N) & np.isfinite(ratio_N)
    skip_if(both_N.sum() < FEWEST, "too few tokens have a loss, an advantage and a ratio")
    if not np.abs(recorded.values_N[both_N]).max() > FLOOR:
        if (nothing := _nothing_of_any(batch, recorded, both_N, advantages.values_N, ratio_N)) is not None:
            return nothing
        raise Skip("every loss is 0, and so is every advantage")
    loss_N, a_N = recorded.values_N[both_N], advantages.values_N[both_N]
    weights = batch.columns.of("is_weights")
    w_N = None if weights is None else np.where(weights.said_N, weights.values_N, 1.0)[both_N]
    logprobs = batch.columns.of("policy_logprobs")
    logp_N = None if logprobs is None else logprobs.values_N[both_N]
    close = CLOSE * float(np.abs(loss_N).max()) + FLOOR

    def agrees(values_N: Array) -> bool:
        return bool((np.abs(loss_N - values_N) <= close).all())

    ratio_kinds = (ratio_N[both_N], by_sequence(batch, ratio_N, both_N)[both_N])
    stated = _clip_range(batch)
    place = batch.laid.where("token_loss", at=both_N)
    evidence = [shown("tokens recomputed", int(both_N.sum()), None, source), shown("agree to", close)]
    scaled = [(by * stated[0], by * stated[1]) for by in _FACTORS] if stated else []
    ranges = (*([stated] if stated else []), *RANGES)
    stated_w = weighing(batch)
    own_w = [] if stated_w is None or stated_w.is_recorded else [each_N[both_N] for each_N in stated_w.right]
    first_N = own_w[0] if own_w and w_N is None else w_N
    made = _Made(a_N, ratio_kinds, logp_N, first_N, tuple(own_w[1:]), w_N is not None, ranges, batch.laid.algorithm)
    agreed = None
    for way in made.ways():
        if not agrees(way.values_N):
            continue
        if not made.is_unlike(way, loss_N, close, stated):
            return None
        agreed = agreed or way
    if agreed is not None:
        return made.told(agreed, loss_N, close, stated, place, evidence)
    cut = (one for one in scaled if agrees(policy_loss.clipped(ratio_kinds[0], a_N, clip_low=one[0], clip_high=one[1])))
    if (range_ := _solved_range(loss_N, a_N, ratio_kinds[0], close) or next(cut, None)) is not None:
        low, high = range_
        if stated or not all(USUAL[0] <= each <= USUAL[1] for each in range_):
            told = (
                f", and the run states {stated[0]:g} and {stated[1]:g}{_times_as_wide(range_, stated)}"
                if stated
                else ", where recipes have 0.1 to 0.4"
            )
            return finding(
                "error" if stated else "warning",
                f"the loss is clipped at 1 - {low:.4g} and 1 + {high:.4g}{told}",
                place, *evidence, link="ratio",
                cause="the clip range that is configured does not reach the loss, or another one is logged: so wide a "
                "range cuts nothing off, so narrow a one nearly every token",
            )  # fmt: skip
        return None
    for one in surrogates(batch):
        # Where importance weights are recorded each way stands with them, too.
        if one.mistake and agrees(one.values_N[both_N]):
            severity = one.severity(batch.laid.algorithm)
            how = "otherwise" if severity == "info" else "wrongly"
            return finding(
                severity, f"the loss of a token is made {how}: {one.mistake}", place,
                *evidence, link=one.link,
                cause=one.cause,
            )  # fmt: skip
    if (padded := _over_padding(batch, both_N, loss_N, a_N, ratio_kinds, ranges)) is not None:
        width, objective = padded
        return error(
            f"the loss of a token is its advantage times the share of its row that is no padding: advantages are "
            f"averaged over all {width} slots of a response",
            place, *evidence, shown("slots of a row", width, "the tokens that count"), shown("objective", objective),
            cause="a sequence's advantage (GSPO) is the mean of its tokens' over the padded row: zeros of padding "
            "count, "
            "and short answers weigh less than long ones",
        )  # fmt: skip
    if (times := _times(loss_N, a_N, ratio_kinds, ranges)) is not None:
        return warning(
            f"the loss of a token is {times:.4g} times what it should be", place, *evidence, 
            cause="a factor too many in the loss of a token: the advantage is multiplied in twice as a number, a world "
            "size, a weight that is not recorded",
        )  # fmt: skip
    raise Skip("no known loss agrees, and no known mistake: other terms are in it, or another range")


def _over_padding(
    batch: StepBatch, both_N: Array, loss_N: Array, a_N: Array, kinds: tuple[Array, ...],
    ranges: tuple[tuple[float, float], ...],
) -> tuple[int, str] | None:  # fmt: skip
    """How many slots a row has, where every token's loss is made with its advantage times the share of them that count,
    and the objective that makes it; None where it is not, or all rows have as many.
    """
    width = batch.laid.widths.get("the response")
    counts_N = np.repeat(batch.flat.count(given(batch.trained_N)), batch.flat.lengths_B)[both_N]
    if width is None or len(set(counts_N.tolist())) < 3 or counts_N.max() > width:
        return None
    close = CLOSE * float(np.abs(loss_N).max()) + FLOOR
    shared_N = a_N * counts_N / width
    for name, r_N in zip(("token", "sequence"), kinds, strict=True):
        for low, high in ranges:
            made_N = policy_loss.clipped(r_N, shared_N, clip_low=low, clip_high=high)
            if (np.abs(loss_N - made_N) <= close).all():
                return width, _OBJECTIVES[name]
    return None


def _nothing_of_any(batch: StepBatch, recorded: Column, both_N: Array, a_N: Array, ratio_N: Array) -> Finding | None:
    """Losses of exactly 0 on tokens whose advantage and ratio are not: no detached graph makes these."""
    told_N = both_N & (np.abs(a_N) > MOVING) & (ratio_N > MOVING)
    if told_N.sum() < FEWEST or (recorded.values_N[told_N] != 0).any():
        return None
    weights = weighing(batch)
    inside = weights is not None and weights.mask_N is not None and bool(weights.mask_N[told_N].all())
    own = weights is not None and weights.is_recorded and not weights.right[0][told_N].any()
    figures = [
        shown("tokens whose loss is exactly 0", int(told_N.sum()), "0", recorded.source),
        shown("largest |advantage| among them", float(np.abs(a_N[told_N]).max())),
    ]
    if inside and weights is not None:
        bound = batch.laid.algorithm.weight_bounds[1] or 1.0
        far = float(np.abs(np.expm1(weights.logs_N[told_N])).max())
        figures += [shown("largest |trainer over rollout - 1| among them", far, f"kept within {1 / bound:.3g} to "
                          f"{bound:g}, as the run states")]  # fmt: skip
    return error(
        "the importance mask rejects every token, and all of them lie within its bounds: it is turned around, or never "
        "filled"
        if inside
        else "importance weights are 0 on every token: the loss of each is exactly 0"
        if own
        else "the loss of every token is exactly 0, although its advantage and its ratio are not: something multiplies "
        "it by 0",
        batch.laid.where("token_loss", at=told_N),
        *figures,
        link="ratio" if inside or own else "loss",
        cause="the condition of the mask (rejection, MIS, IcePop) is negated: what is to be kept has weight 0, and "
        "what is to be rejected would be trained on; or the mask is never filled and 0 throughout"
        if inside
        else "the weights are never filled, their mask rejects all, or its condition is negated"
        if own
        else "a mask or a weight that is 0 everywhere (an importance mask, a rejection, a coefficient of 0) stands in "
        "the loss; not a detached graph and not frozen weights, which leave the loss itself as it is",
    )


#: An advantage, and a ratio, that are no rounding of 0.
MOVING = 1e-6


#: What a stated range is multiplied by on its way, where one side of it alone cuts anything off.
_FACTORS = (2.0, 3.0, 0.5, 5.0, 10.0, 0.1, 4.0, 1 / 3)
#: Clip ranges that recipes have, GSPO's aside.
USUAL = (0.05, 0.6)


def _solved_range(loss_N: Array, a_N: Array, r_N: Array, close: float) -> tuple[float, float] | None:
    """(low, high) of the clipped loss, read off the tokens that are cut: their ratio in the loss is one number above
    and one below 1. None where no range makes every token's loss, or only one side is ever cut.
    """
    cut_N = (np.abs(loss_N + a_N * r_N) > close) & (np.abs(a_N) > 1e-3 * float(np.abs(a_N).max()))
    bounds = []
    for side_N in (cut_N & (a_N < 0), cut_N & (a_N > 0)):
        if not side_N.any():
            return None
        bounds.append(float(np.median(-loss_N[side_N] / a_N[side_N])))
    low, high = 1 - bounds[0], bounds[1] - 1
    if min(low, high) <= 0:
        return None
    made_N = policy_loss.clipped(r_N, a_N, clip_low=low, clip_high=high)
    return (low, high) if bool((np.abs(loss_N - made_N) <= close).all()) else None


def _times(
    loss_N: Array, a_N: Array, kinds: tuple[Array, ...], ranges: tuple[tuple[float, float], ...]
) -> float | None:
    """The whole number (or one over it) that the clipped loss is multiplied by on every token."""
    for r_N in kinds:
        for low, high in ranges:
            plain_N = policy_loss.clipped(r_N, a_N, clip_low=low, clip_high=high)
            size = float(plain_N @ plain_N)
            times = float(plain_N @ loss_N) / size if size > 0 else 0.0
            whole = min(abs(times - round(times)), abs(1 / times - round(1 / times)) if times > 0 else 1.0)
            close = CLOSE * float(np.abs(loss_N).max()) + FLOOR
            if times > 0.01 and whole < 1e-3 and (np.abs(loss_N - times * plain_N) <= close).all():
                return times
    return None


def _tells(r_N: Array, a_N: Array, stated: tuple[float, float], other: tuple[float, float] | None) -> bool:
    """Whether the batch has a token that the two ranges (None: no clipping) treat differently, by more than "
    "rounding."""
    mine_N = policy_loss.clipped(r_N, a_N, clip_low=stated[0], clip_high=stated[1])
    theirs_N = -a_N * r_N if other is None else policy_loss.clipped(r_N, a_N, clip_low=other[0], clip_high=other[1])
    return bool((np.abs(mine_N - theirs_N) > 3 * CLOSE * np.abs(mine_N).max() + FLOOR).any())


# ---- the terms of the whole loss


#: Of the difference of loss and pg_loss, the share (rms) that terms may leave: logged means weigh micro-batches alike,
#: losses weigh tokens. And the share a term must have of it before its sign is judged.
LEFT, HEARD = 0.1, 0.2
#: A weight of the KL that no recipe comes near.
LARGEST_BETA = 2.0


def _makes_it(loss: Series, pg: Series, term: Series) -> bool:
    """Whether what the policy's part leaves of a loss is this term times one coefficient, but for rounding."""
    rows = _aligned(loss, pg, term)
    if len(rows) < FEWEST or max(abs(row[2]) for row in rows) < 1e-9:
        return False
    fitted = _fitted([[row[2] for row in rows]], [row[0] - row[1] for row in rows])
    return fitted is not None and fitted[0] < EXACTLY


def _fitted(columns: list[list[float]], y: list[float]) -> tuple[float, list[float]] | None:
    """(share left, coefficients) of least squares: normal equations, no numpy. None where columns are alike."""
    n = len(columns)
    rows = [
        [sum(a * b for a, b in zip(columns[i], columns[j], strict=True)) for j in range(n)]
        + [sum(a * b for a, b in zip(columns[i], y, strict=True))]
        for i in range(n)
    ]
    for i in range(n):
        pivot = max(range(i, n), key=lambda k: abs(rows[k][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        if abs(rows[i][i]) < 1e-14:
            return None
        for k in range(n):
            if k != i:
                factor = rows[k][i] / rows[i][i]
                rows[k] = [a - factor * b for a, b in zip(rows[k], rows[i], strict=True)]
    found = [rows[i][n] / rows[i][i] for i in range(n)]
    left = [sum(c * col[k] for c, col in zip(found, columns, strict=True)) - y[k] for k in range(len(y))]
    return _rms(left) / _rms(y), found


def _rms(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


def _aligned(*every: Series) -> list[tuple[float, ...]]:
    """The values of the steps that all of these have, where all are finite."""
    return [values for _, values in together(*every)]


@rule("D49", "a term of the loss has the wrong sign or weight", link="loss", scope="signals",
      needs=("loss", "kl|entropy|value_loss"), lasts=True,
      explains=("D01", "D20", "D25", "D74", "L02", "L08", "L09", "L10", "D15"),
      source="loss = pg_loss + beta KL - c entropy + v value_loss: verl dp_actor, TRL, OpenRLHF")  # fmt: skip
def terms(log: RunLog) -> Finding | None:
    """Solves loss - pg_loss = beta KL - c entropy + v value_loss over 8 steps and more. Where the logged terms leave
    less than a tenth of it (rms), the fewest terms that do: a negative beta, c or v is an error (the KL drives away
    from the reference, entropy is pressed down, the critic unlearns); an entropy term 5 times the policy's loss while
    the entropy rises a warning, and so is a KL that weighs over 2, or over 3 times what the run states. Where no
    pg_loss is logged: a loss that falls along a line as the KL rises (r < -.975 over 10 steps and more, a KL over .1)
    is an error; and so is one that is a line of the entropy (r beyond .975, of the changes beyond .9) with a
    coefficient beyond .1: a bonus that outweighs all else, or of the wrong sign (in a log of rewards, advantages, a
    KL or lengths: a loss of demonstrations goes with the entropy). So is one that is the entropy times a coefficient
    over 0 and the KL times another, but for a twentieth (rms, 16 steps and more), where its changes from step to step
    have the same coefficient (to .35) and leave less than a half. Skipped where they do not make it
    (other estimators, other means).
    """
    loss, pg = given(log.get("loss")), log.get("pg_loss")
    # Some log the whole loss under both names.
    if pg is None or all(abs(a - b) <= 1e-5 for a, b in _aligned(loss, pg)):
        return _against_one(log, loss)
    best: tuple[float, dict[str, Series], dict[str, float]] | None = None
    # Of a loss that is the entropy times a coefficient, a KL that grows with it fits as well: it is a term where it
    # makes the rest of the loss exactly.
    has_none = fitted_bonus(log) is not None and not any(_makes_it(loss, pg, kl) for kl in log.all("kl")[:2])
    kinds = ("entropy", "value_loss") if has_none else ("kl", "entropy", "value_loss")
    named = [(kind, series) for kind in kinds for series in log.all(kind)[:2]]
    for count in (1, 2, 3):
        for chosen in combinations(named, count):
            if len({kind for kind, _ in chosen}) < count:
                continue
            rows = _aligned(loss, pg, *(series for _, series in chosen))
            if len(rows) < 4 + 4 * count:
                continue
            y = [row[0] - row[1] for row in rows]
            columns = [[row[2 + k] for row in rows] for k in range(count)]
            if max(map(abs, y)) < 1e-5 or any(max(map(abs, col)) < 1e-9 for col in columns):
                continue
            fitted = _fitted(columns, y)
            if fitted is None or fitted[0] > LEFT or (best is not None and fitted[0] >= best[0]):
                continue
            heard = {
                kind: weight if abs(weight) * _rms(column) > HEARD * _rms(y) else 0.0
                for (kind, _), weight, column in zip(chosen, fitted[1], columns, strict=True)
            }
            best = fitted[0], dict(chosen), heard
        if best is not None:
            return _judged(log, pg, *best[1:])
    raise Skip("the logged terms do not make the difference of loss and pg_loss, or there is none")


#: A line that one term makes of a loss: correlation of the values, and of their changes from step to step.
LINE, CHANGES = 0.975, 0.9
#: What only a run that is paid logs.
_OF_REWARDS = (
    "reward", "reward_std", "advantage_max", "advantage_mean", "kl", "policy_kl", "clip_fraction",
    "ratio_mean", "value_loss", "response_length",
)  # fmt: skip
#: The least coefficient of an entropy that is told: recipes use 0 to .01.
BONUS = 0.1


#: Of a loss that is all terms: the share (rms) that they may leave, of its changes from step to step as well; how near
#: the coefficient of the changes is; and steps.
ALL_TERMS, OF_CHANGES, SAME_COEFFICIENT, TERM_STEPS = 0.05, 0.5, 0.35, 16


def _presses_entropy(log: RunLog, loss: Series) -> Finding | None:
    """A loss that is the entropy times a coefficient over 0, and a KL times another: the policy's part is next to 0 on
    policy, so that its terms are all that is seen of it.
    """
    entropy, kl = log.get("entropy"), log.get("kl")
    if entropy is None or not any(map(log.has, _OF_REWARDS)):
        return None
    terms = [entropy, *([kl] if kl is not None and any(kl.finite) else [])]
    rows = _aligned(loss, *terms)
    if len(rows) < TERM_STEPS or max(map(abs, entropy.finite)) < FLOOR:
        return None
    y, columns = [row[0] for row in rows], [[row[1 + k] for row in rows] for k in range(len(terms))]
    if max(map(abs, y)) < FLOOR or (fitted := _fitted(columns, y)) is None:
        return None
    steps = [[b - a for a, b in pairwise(each)] for each in (y, *columns)]
    moved = None if max(map(abs, steps[0])) < FLOOR else _fitted(steps[1:], steps[0])
    if moved is None or fitted[0] > ALL_TERMS or moved[0] > OF_CHANGES:
        return None
    weight, of_changes = fitted[1][0], moved[1][0]
    heard = weight * _rms(columns[0]) > 2 * HEARD * _rms(y)
    if weight <= 0 or not heard or abs(of_changes - weight) > SAME_COEFFICIENT * weight:
        return None
    return error(
        f"the entropy term has the wrong sign: {loss.name} is {weight:.2g} times {entropy.name}"
        + (f" and {fitted[1][1]:.2g} times {terms[1].name}" if len(terms) > 1 else "")
        + ", which presses the entropy down",
        entropy.ended,
        shown("coefficient of the entropy", weight, "-0.01 to 0"),
        shown("the same of changes from step to step", of_changes),
        shown("share of the loss that is left (rms)", fitted[0], f"< {ALL_TERMS:g}"),
        shown("steps compared", len(rows)),
        cause="the sign of the term is turned where the loss is summed up",
        next_step="rldbg diagnose --explain D49   # then look at the line that adds up the loss",
    )


def _against_one(log: RunLog, loss: Series) -> Finding | None:
    """A loss that is a line of one of its terms: -mean(A) of centred advantages is small beside the term of a KL that
    runs away, or of an entropy with a large coefficient. A loss that rises with the KL is what a KL term makes of it.
    """
    if (pressed := _presses_entropy(log, loss)) is not None:
        return pressed
    looked = False
    for kind, most in (("kl", 0.1), ("entropy", 0.0)):
        # The loss of demonstrations is the entropy's bound, and both fall as they are learnt.
        if kind == "entropy" and not any(map(log.has, _OF_REWARDS)):
            continue
        term = log.get(kind)
        rows = _aligned(loss, term) if term is not None else []
        if term is None or len(rows) < 10 or max(abs(x) for _, x in rows) < most:
            continue
        looked = True
        y, x = [row[0] for row in rows], [row[1] for row in rows]
        r, slope = trends.line(x, y)
        told = [
            shown(f"correlation of loss and {kind}", r, "> 0" if kind == "kl" else "about 0"),
            shown("coefficient", slope, "> 0" if kind == "kl" else "-0.01 to 0"),
            shown("steps compared", len(rows)),
        ]
        changes = trends.line([b - a for a, b in pairwise(x)], [b - a for a, b in pairwise(y)])[0]
        if kind == "kl" and r < -LINE:
            claim = f"the KL term is subtracted from the loss: {loss.name} falls as {term.name} rises (coefficient "
            claim += f"{slope:.3g})"
            cause = "the sign of the KL term is turned where the loss is summed up: leaving the reference is rewarded"
        elif kind == "entropy" and r < -LINE and changes < -CHANGES and slope < -BONUS:
            claim = f"the entropy bonus outweighs the policy's loss: {loss.name} is a line of {term.name} (coefficient "
            claim += f"{-slope:.3g})"
            cause = f"the entropy coefficient is {-slope:.3g}: recipes use 0 to 0.01, and the policy becomes noise"
        elif kind == "entropy" and r > LINE and changes > CHANGES and slope > BONUS:
            claim = "the entropy term has the wrong sign: added to the loss, it presses the entropy down (coefficient "
            claim += f"{slope:.3g})"
            cause = "the sign of the term is turned where the loss is summed up"
        else:
            continue
        return error(
            claim, term.ended, *told, cause=cause,
            next_step="rldbg diagnose --explain D49   # then look at the line that adds up the loss",
        )  # fmt: skip
    skip_if(not looked, "needs pg_loss; without it a KL of 10 steps that grows over 0.1, or an entropy")
    return None


@rule("L23", "the KL is counted twice", link="loss", scope="signals", explains=("L08",),
      source="verl: use_kl_in_reward and use_kl_loss are two places for one penalty")  # fmt: skip
def kl_twice(log: RunLog) -> Finding | None:
    """The head of the log states that the KL is subtracted from the rewards and is a term of the loss, each with a
    coefficient over 0: a warning. Skipped where it does not state both.
    """
    in_reward, in_loss = log.algorithm.is_on("use_kl_in_reward"), log.algorithm.is_on("use_kl_loss")
    skip_if(in_reward is None or in_loss is None, "needs a head that states use_kl_in_reward and use_kl_loss")
    weights = log.algorithm.number("kl_coef"), log.algorithm.number("kl_loss_coef")
    if not (in_reward and in_loss) or 0 in weights:
        return None
    return warning(
        "the KL is counted twice: in the rewards and in the loss", None,
        shown("use_kl_in_reward", True), shown("use_kl_loss", True),
        *(shown(name, weight) for name, weight in zip(("kl_coef", "kl_loss_coef"), weights, strict=True)
        if weight is not None),
        cause="both settings are on: the policy is held to its reference by two penalties, and their weights add up",
        next_step="rldbg diagnose --explain L23   # then turn one of the two off",
    )  # fmt: skip


#: How many times the policy's loss a KL term may come to before it is what is trained on.
OUTWEIGHS = 3.0


@rule("L27", "the KL outweighs the policy's loss", link="loss", scope="signals",
      needs=("kl_coefficient", "kl", "pg_loss", "reward"),
      source="recipes weigh the KL 0.001 to 0.1; an adaptive controller begins at 0.2")  # fmt: skip
def pinned(log: RunLog) -> Finding | None:
    """The logged coefficient of the KL is over 2, its product with the KL over 3 times the size of the policy's loss
    (medians of the last half), and the reward does not rise in 12 steps and more: a warning.
    """
    weight, kl, pg, reward = (given(log.get(name)) for name in ("kl_coefficient", "kl", "pg_loss", "reward"))
    rows = _aligned(weight, kl, pg)
    skip_if(len(rows) < 12, "needs the coefficient, the KL and pg_loss of 12 steps")
    late = rows[len(rows) // 2 :]
    term, loss = median(abs(row[0] * row[1]) for row in late), median(abs(row[2]) for row in late)
    if min(row[0] for row in late) <= LARGEST_BETA or term <= OUTWEIGHS * loss or trends.rises(reward.finite):
        return None
    return warning(
        f"the KL coefficient is too large ({weight.last.value:.3g}): its term outweighs the policy's loss "
        f"{term / max(loss, 1e-12):.2g} times, and the reward does not rise",
        weight.place,
        weight.shown(weight.last.value, f"<= {LARGEST_BETA:g}"), shown("coefficient x KL", term),
        shown("|pg_loss|", loss),
        cause="the policy is held at its reference: what is learnt is to stay there, not what is rewarded",
        next_step="lower the coefficient to 0.1 or less; look at KL and reward",
        steps=weight.steps(over=LARGEST_BETA),
    )  # fmt: skip


def _judged(log: RunLog, pg: Series, series: dict[str, Series], weights: dict[str, float]) -> Finding | None:
    wrong = {
        "kl": ("the KL term is subtracted from the loss: the policy is driven away from its reference", -1),
        "entropy": ("the entropy term has the wrong sign: added to the loss, it presses the entropy down", 1),
        "value_loss": ("the value loss is subtracted: the critic unlearns", -1),
    }
    told = [shown(f"coefficient of {series[kind].name}", weight) for kind, weight in weights.items()]
    for kind, weight in weights.items():
        claim, side = wrong[kind]
        if weight * side > FLOOR:
            return error(
                f"{claim} (coefficient {weight:.3g})",
                series[kind],
                *told,
                cause="the sign of the term is turned where the loss is summed up",
                next_step="rldbg diagnose --explain D49   # then look at the line that adds up the loss",
            )
    beta = weights.get("kl", 0.0)
    stated = kl_weight(log.algorithm)
    if beta > LARGEST_BETA or (stated and beta > 3 * stated):
        return warning(
            f"the KL term weighs {beta:.3g} in the loss"
            + (f", and the run states {stated:g}" if stated else ": recipes use 0.001 to 0.1"),
            series["kl"],
            *told,
            cause="the coefficient is far too large, or applied twice: what is learnt is to stay at the reference",
            next_step="rldbg diagnose --explain D49   # then look at the line that adds up the loss",
        )
    weight = weights.get("entropy", 0.0)
    if not weight:
        return None
    share = abs(weight) * trends.level(series["entropy"].finite, 3) / max(median(map(abs, pg.finite)), 1e-9)
    if share > 5 and trends.rises(series["entropy"].finite):
        return warning(
            f"the entropy bonus outweighs the policy's loss {share:.2g} times, and the entropy rises",
            series["entropy"].ended,
            *told,
            shown("entropy term / median |pg_loss|", share, "< 5"),
            cause=f"the entropy coefficient is {abs(weight):.3g}: recipes use 0 to 0.01",
            next_step="lower the entropy coefficient; look at reward and response length at the same steps",
        )
    return None
