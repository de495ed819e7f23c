"""How old the weights were that sampled a batch."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np

from replay_core.diagnose import trends
from replay_core.diagnose.algorithm import Algorithm
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.compared import distance
from replay_core.diagnose.finding import Finding, Where, error, finding, info, share, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.gap import BADLY
from replay_core.diagnose.log_steps import steps_of
from replay_core.diagnose.rule import Skip, given, rule, skip_if
from replay_core.diagnose.signals import Point, RunLog, Series

#: prime-rl's default max_off_policy_steps, where the dump names no limit of its own.
LAG = 8
_LIMITS = ("max_staleness", "max_head_offpolicyness", "max_off_policy_steps")


def versions(batch: StepBatch) -> tuple[Array, Array] | None:
    """The oldest and the newest weight version of each sample [B], or None where none is recorded."""
    column = batch.columns.of("weight_version")
    if column is not None and batch.flat.lengths_B.sum():
        known_N = column.said_N & (column.values_N >= 0)
        return batch.flat.extremes(column.values_N, known_N) if known_N.any() else None
    low, high = batch.columns.per_sample("min_global_steps"), batch.columns.per_sample("max_global_steps")
    if low is not None and high is not None:
        return low, high
    texts = batch.columns.texts("weight_version")
    if texts is None:
        return _of_records(batch)
    lows, highs = [], []
    for text in texts:
        numbers = _numbers(text)
        lows.append(min(numbers, default=np.nan))
        highs.append(max(numbers, default=np.nan))
    return np.array(lows, dtype=np.float64), np.array(highs, dtype=np.float64)


def _of_records(batch: StepBatch) -> tuple[Array, Array] | None:
    """One version for all samples of a record: its rank's, or the one that every record of the step has."""
    told = batch.columns.scalars("weight_version")
    by_rank = {scalar.record.key.rank: scalar.value for scalar in told if scalar.value >= 0}
    if not told or len(by_rank) > len({scalar.record.key.rank for scalar in told}):
        return None
    keys = batch.laid.keys_of("input_ids")
    common = next(iter(by_rank.values())) if len(set(by_rank.values())) == 1 else np.nan
    each_B = np.array([by_rank.get(None if key is None else key.rank, common) for key in keys], dtype=np.float64)
    return each_B, each_B


def _numbers(text: str) -> list[float]:
    """`["0", "1"]` or `3` as numbers; what is no number is left out."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    found = []
    for one in value if isinstance(value, list) else [value]:
        try:
            found.append(float(one))
        except (TypeError, ValueError):
            continue
    return found


@rule("D31", "samples of old weights", link="rollout_logprobs", scope="batch",
      source="AReaL versions; prime-rl max_off_policy_steps (8)")  # fmt: skip
def old_weights(batch: StepBatch) -> Finding | None:
    """Newest weight version of the batch - oldest version of each sample. More than the limit the dump states (else
    8) is a warning; any lag, or samples that span versions, is worth saying (info): asynchronous trainers run so
    on purpose.
    """
    found = versions(batch)
    if found is None or np.isnan(found[1]).all():
        raise Skip("no weight versions are recorded")
    low_B, high_B = found
    lag_B = np.nanmax(high_B) - low_B
    mixed = int(np.nansum(high_B > low_B))
    lag = float(np.nanmax(lag_B))
    if lag <= 0:
        return None
    stated = batch.laid.algorithm.number(*_LIMITS)
    limit = LAG if stated is None else stated
    return finding(
        "warning" if lag > limit else "info",
        f"samples are up to {lag:g} weight versions old",
        batch.laid.where("weight_version", sample=int(np.nanargmax(lag_B))),
        shown("largest lag", lag, f"<= {limit:g}" + ("" if stated is not None else " (no limit is in the dump)")),
        shown("samples that span versions", share(mixed, len(batch)), None, f"weight versions of {batch.name}"),
        cause="asynchronous rollouts: the queue is longer than the trainer is fast"
        if lag > limit
        else "asynchronous rollouts",
        next_step=batch.laid.mismatch_command()
        if batch.has("rollout_logprobs") and batch.trainer is not None
        else None,
    )


@rule("D31", "samples of old weights", link="rollout_logprobs", scope="case", lasts=True,
      explains=("D09", "D12", "D14", "D24"),
      source="AReaL versions; prime-rl max_off_policy_steps (8)")  # fmt: skip
def behind(case: Case) -> Finding | None:
    """How far the newest weight version of a step's samples lies behind the step, less what the nearest step has (one
    trainer counts versions from 0, another from 1): more than the limit that is stated, else 8, is a warning; worth
    knowing where engine and trainer are no further apart in such steps than in those within it (2 and more), and nearer
    where samples are fresh. A warning, too, in 8 steps and more, where it rises as chance does not, to 4 and more and
    three times its first quarter (median of the last 3). So are
    2 and more, where engine and trainer are over .1 nats per token apart in most of those steps, and in steps whose
    samples are fresh by a quarter of it at most, and nothing is recorded or stated that corrects for it (importance
    weights, proximal log-probabilities, a decoupled loss, a limit on the age): the age is what parts them. So are
    samples of one version behind, in 3 steps and more, all but the fresh ones, whose distance does not grow meanwhile:
    the ratio to log-probabilities that the trainer recomputed is 1 and holds nothing back.
    """
    found: list[tuple[float, Where, int]] = []
    distances: dict[int, float] = {}
    corrected = False
    limit: float | None = None
    for batch in case.batches():
        known = versions(batch)
        if known is None or batch.step is None or np.isnan(known[1]).all():
            continue
        limit = limit if limit is not None else batch.laid.algorithm.number(*_LIMITS)
        sample = int(np.nanargmin(known[0]))
        place = batch.laid.where("weight_version", sample=sample)
        found.append((batch.step - float(np.nanmin(known[0])), place, batch.step))
        corrected = corrected or batch.has("is_weights") or _corrects(batch.laid.algorithm) or _is_proximal(batch)
        if (mean := distance(batch)) is not None:
            distances[batch.step] = mean
    skip_if(len(found) < 2, "needs weight versions of two steps")
    nearest = max(0.0, min(one[0] for one in found))
    worst = max(found, key=lambda one: one[0])
    lag = worst[0] - nearest
    allowed = LAG if limit is None else limit
    if (older := _grows_old([(step, by - nearest) for by, _, step in found], worst[1])) is not None:
        return older
    if lag <= allowed:
        if not corrected:
            return _parted_by_age({step: by - nearest for by, _, step in found}, distances, worst[1])
        return None
    past = [step for behind_by, _, step in found if behind_by - nearest > allowed]
    if _is_no_age(past, {step: by - nearest for by, _, step in found}, distances):
        return info(
            f"weight versions fall up to {lag:g} behind the steps, and samples are no older for it: engine and trainer "
            "are no further apart",
            worst[1],
            shown("versions behind", lag),
            shown("steps past the limit", share(len(past), len(found))),
            cause="versions are counted by something else than the steps are (synchronisations, recorded steps), or "
            "stand still while weights do not",
            steps=past,
        )
    return warning(
        f"samples are up to {lag:g} weight versions behind the step that trains on them"
        + (f", and the run allows {limit:g}" if limit is not None else ""),
        worst[1],
        shown("versions behind", lag, f"<= {allowed:g}"),
        shown("steps past it", share(len(past), len(found))),
        cause="stale samples: the queue between engine and trainer has no limit, what is too old is not dropped, or "
        "new weights do not reach the engine",
        next_step="limit the queue (max_off_policy_steps, max_staleness) and drop what is older",
        steps=past,
    )


def _grows_old(ages: list[tuple[int, float]], where: Where) -> Finding | None:
    """Samples that are ever older, whatever weighs them: a pipeline fills in its first steps, and stays so."""
    values = [age for _, age in sorted(ages)]
    if len(values) < trends.MIN_STEPS or not trends.rises(values):
        return None
    begun, now = max(values[: len(values) // 4]), trends.level(values, 3)
    if now < max(QUEUED, OLDER * begun) or now > LAG:
        return None
    return warning(
        f"samples get ever older: their weight versions are {begun:.3g} behind the step at first, {now:.3g} at last",
        where,
        shown("versions behind, by step", ", ".join(f"{value:g}" for value in values[:12]), "as in the first steps"),
        shown("Mann-Kendall z", trends.drift(values)),
        cause="the engine makes more than the trainer takes, and the oldest are taken first (a queue without a limit), "
        "or new weights reach it ever later",
        next_step="limit the queue (max_off_policy_steps, max_staleness) and drop what is older",
        steps=[step for step, age in ages if age >= QUEUED],
    )


def _corrects(algorithm: Algorithm) -> bool:
    """Whether the run states that samples are of older weights on purpose, or that its loss corrects for it."""
    switches = ("use_decoupled_loss", "decoupled_loss", "is_async", "async_training", "async_mode", "one_step_off")
    return algorithm.is_off_policy or any(algorithm.is_on(name) is True for name in switches)


def _is_proximal(batch: StepBatch) -> bool:
    """Whether the old log-probabilities are called proximal ones (AReaL's prox_logp): a loss that has both them and the
    engine's is a decoupled one, which weighs each token by their ratio.
    """
    refs = (ref for record in batch.columns.records for ref in record.tensors() if ref.canonical == "old_logprobs")
    return any(ref.name.rpartition(".")[2].startswith("prox") for ref in refs)


#: How far apart samples past the limit may be, as a multiple of those within it; those within it that are needed.
ALIKE, WITHIN = 1.5, 2


def _is_no_age(past: list[int], lags: dict[int, float], apart: dict[int, float]) -> bool:
    """Whether engine and trainer are no further apart (`apart`, by step) in samples past the limit than in younger
    ones, and nearer in fresh ones: what is older by its version is then not older by its weights.
    """
    old = [apart[step] for step in past if step in apart]
    young = [apart[step] for step in apart if step not in past and lags[step] > 0]
    fresh = [apart[step] for step in apart if lags[step] <= 0]
    if not old or not fresh or len(young) < WITHIN:
        return False
    usual = float(np.median(young))
    return float(np.median(fresh)) < FRESH * usual and float(np.median(old)) <= ALIKE * usual


#: Steps of one age before it is that of a pipeline; how far their distances may go up meanwhile, where age is why.
ONE_AGE, LEVEL = 3, 1.5


def _stands_at(age: int, lags: dict[int, float], apart: dict[int, float]) -> bool:
    """Whether all steps but the first ones are of this age, 3 and more, and samples are no further apart later on:
    what grows with the steps is no age that stands (old weights in the engine, D12).
    """
    of_age = [apart[step] for step in sorted(apart) if lags[step] == age]
    half = len(of_age) // 2
    if len(of_age) < ONE_AGE or any(lags[step] not in (0, age) for step in apart):
        return False
    return float(np.median(of_age[half:])) <= LEVEL * float(np.median(of_age[:half]))


#: Versions behind that no pipeline of one step makes; of the distance of old samples, what fresh ones may have.
OLD, FRESH = 2, 0.25


def _parted_by_age(lags: dict[int, float], apart: dict[int, float], where: Where) -> Finding | None:
    """Steps with their age in versions, and mean |trainer - rollout|: whether the old ones are apart, and fresh ones
    are not.
    """
    least = OLD
    if not any(by >= OLD for by in lags.values()) and _stands_at(1, lags, apart):
        least = 1
    old = [step for step in apart if lags[step] >= least]
    fresh = [apart[step] for step in apart if lags[step] <= 0]
    if not old or not fresh:
        return None
    there, here = float(np.median([apart[step] for step in old])), float(np.median(fresh))
    far = [step for step in old if apart[step] > BADLY]
    if 2 * len(far) <= len(old) or here > FRESH * there:
        return None
    age = max(lags[step] for step in old)
    return warning(
        f"samples are {f'up to {age:g} weight versions' if least > 1 else 'one weight version'} old, and nothing "
        "corrects for it: engine and trainer are "
        f"{there:.2g} nats per token apart where they are",
        where,
        shown(f"mean |trainer - rollout| of steps {least} versions behind and more, nats", there, f"< {BADLY:g}"),
        shown("of steps whose samples are fresh", here),
        shown("versions behind, at most", age, f"< {least}"),
        shown("steps", share(len(far), len(apart))),
        cause="stale samples: weights reach the engine late, or the queue between engine and trainer is long, and the "
        "trainer takes the samples for its own: no importance weights (truncated, TIS) are recorded, and no limit is "
        "stated",
        next_step="sync the engine in every step, limit the queue (max_staleness), or weigh the samples (TIS)",
        steps=far,
    )


#: Updates that samples may come to be old before it is no pipeline that fills; how much older, beside its beginning.
QUEUED, OLDER = 4.0, 3.0
#: What bounds the age in updates, in trainers' own words. prime-rl's max_async_level bounds how far the engine is
#: behind, and no rollout that goes on over several updates.
_BOUNDS = ("max_head_offpolicyness", "max_off_policy_steps", "max_staleness_steps", "max_staleness",
           "max_trajectory_age_steps", "max_trajectory_age")  # fmt: skip
#: A batch that waits for the next update is one older than what a bound counts; steps past it, and their share, that
#: are no slip.
_SLIP, _PAST, _OFTEN = 1.0, 3, 0.2
#: A bound of so many updates is none: it is how a bound is switched off.
_NONE = 100.0
#: How far the age may grow otherwise than by one a step where no update reaches the engine.
STANDS = 0.05


def age_of(log: RunLog) -> Series | None:
    """How many updates old the samples of a step are: those of the weights, or of the samples themselves."""
    return log.get("weight_lag") or log.get("sample_age")


@rule("D31", "samples get ever older", link="rollout_logprobs", scope="signals", needs=("weight_lag|sample_age",),
      explains=("D09", "D12", "D24", "D25", "L08", "L09", "L10"), lasts=True,
      source="prime-rl max_off_policy_steps (8), AReaL max_head_offpolicyness")  # fmt: skip
def ever_older(log: RunLog) -> Finding | None:
    """The logged age of the weights that sampled a step's batch, in updates: its last 3 steps at 4 and more, three
    times its first quarter and more, and a rise that chance does not explain, in 8 steps and more: a warning, an error
    past 8. A
    pipeline that fills has its age within the first quarter of the steps, and keeps it. Where the run states a bound,
    that takes the place of 8, and ages more than one past it in 3 steps and a fifth of all are a warning. An age that
    grows by one in each of the last 8 steps is that of an engine which no update reaches, since the first step of that
    climb.
    """
    series = given(age_of(log))
    values = series.finite
    if len(values) < trends.MIN_STEPS:
        raise Skip(f"needs the age of the weights at {trends.MIN_STEPS} steps")
    stands, climb = _stands(series), _climb(series)
    begun, now = max(values[: len(values) // 4]), trends.level(values, 3)
    bounds = {name: log.algorithm.number(name) for name in _BOUNDS}
    bound, stated = next(((n, value) for n, value in bounds.items() if value is not None and value < _NONE), ("", None))
    allowed = LAG if stated is None else stated + _SLIP
    said = "" if now <= allowed or stated is None else f", though {bound} is {stated:g}"
    if stated is None and now > LAG and len([value for value in values if value > LAG]) >= 3 and now < OLDER * begun:
        return error(
            f"samples are {now:.3g} updates old: {series.name} is past {LAG:g}, and they are far off-policy",
            series.between(over=LAG),
            series.shown(now, f"<= {LAG:g}"),
            shown("steps past it", len(series.steps(over=LAG))),
            cause="stale samples: the queue between engine and trainer has no limit, what is too old is not dropped, "
            "or new weights do not reach the engine",
            next_step="limit the queue (max_off_policy_steps, max_staleness) and drop what is older",
        )
    if now < QUEUED or now < OLDER * begun or not trends.rises(values):
        return None if stated is None else _past(series, bound, stated)
    since = stated if said and stated is not None else max(QUEUED, OLDER * begun) - 1e-9
    return finding(
        # What disagrees with the trainer by then is what such samples do.
        "error" if now > max(LAG, allowed) else "warning",
        f"samples get ever older: {series.name} goes from {begun:.3g} to {now:.3g} updates{said}"
        + (", by one in each step: what is trained on is of weights that stand still" if stands else ""),
        series.of(climb).place if stands else series.first(over=since),
        series.shown(now, f"<= {stated:g}" if said else f"< {max(QUEUED, OLDER * begun):.3g}"),
        shown("Mann-Kendall z", trends.drift(values)),
        cause="the sync of weights into the engine stopped (it failed, or an adapter is not delivered): its version "
        "stands still while the trainer goes on; or the queue before the trainer grows by a step in each step, and the "
        "oldest are taken first. The engine's own version tells which"
        if stands
        else "the engine makes more than the trainer takes, and the oldest are taken first (a queue without a limit), "
        "or new weights reach it ever later: the policy is trained on what stale weights sampled",
        next_step="look for what the engine says of its last weight update"
        if stands
        else "limit the queue (max_off_policy_steps, max_staleness) and drop what is older",
        steps=[point.step for point in climb] if stands else series.steps(over=since if said else QUEUED),
    )


def _past(series: Series, bound: str, stated: float) -> Finding | None:
    """That samples are older than what the run allows, in more than a few steps."""
    past = series.between(over=stated + _SLIP)
    if len(past.points) < _PAST or len(past.points) < _OFTEN * len(series.points):
        return None
    most = max(point.value for point in past.points)
    return warning(
        f"samples are up to {most:.3g} updates old, though {bound} is {stated:g}: {series.name} is past it in "
        f"{len(past.points)} of {len(series.points)} steps",
        past,
        series.shown(most, f"<= {stated:g}"),
        shown("steps past it", len(past.points)),
        cause="the bound does not hold: it is counted in something else (batches that wait, requests in flight, not "
        "the updates since a sample began), it reaches another process than the one that hands out samples, or what is "
        "too old is counted and not dropped",
        next_step=f"look where {bound} is read, and whether samples past it are dropped or only logged",
        steps=steps_of(past.points),
    )


def _climb(series: Series) -> list[Point]:
    """The last points, from the first on that is older by a step than the one before it, as each after it is."""
    points = [point for point in series.points if point.step is not None and math.isfinite(point.value)]
    at = len(points) - 1
    while at > 0 and abs((points[at].value - points[at - 1].value) - _apart(points[at - 1], points[at])) < (
        STANDS * _apart(points[at - 1], points[at])
    ):
        at -= 1
    return points[at + 1 :]


def _apart(a: Point, b: Point) -> int:
    return (b.step or 0) - (a.step or 0)


def _stands(series: Series) -> bool:
    """Whether the age has grown by one a step over the last 8 steps."""
    last = [point for point in series.points if point.step is not None][-trends.MIN_STEPS :]
    if len(last) < trends.MIN_STEPS:
        return False
    return all(
        abs((b.value - a.value) - ((b.step or 0) - (a.step or 0))) < STANDS * ((b.step or 0) - (a.step or 0))
        for a, b in pairwise(last)
    )
