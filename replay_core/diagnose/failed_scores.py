"""How often a judge failed, step by step: lines of a reward function, sandbox or judge that failed or timed out.

Ray prints one of many alike, with how often the others were said: `[repeated 69x across cluster]`. What fails in a step
is told above its line of metrics.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, median

from msgspec import Struct

from replay_core.diagnose.signals import Point, RunLog, Series, Told
from replay_core.regexes import regex

_REPEATED = regex(r"\[repeated (\d{1,9})x across cluster\]")
#: How many samples a line says that a judge failed on; one where it does not say.
_SAMPLES = regex(
    r"(?i)\b(\d{1,7})(?: ?/ ?\d{1,7}| (?:out )?of \d{1,7})? (?:samples?|responses?|completions?|rollouts?|rewards?)\b"
)
#: Steps of a run that tell; steps on either side of a leap; how many times as many fail behind it, at the least, and in
#: what share of its samples; what part of its reward is lost with it.
STEPS, BESIDE, TIMES, MANY, LOSES = 12, 3, 4.0, 0.1, 0.25
#: Share of samples, in the whole run and in a step, of which a run is none the worse; and lines a step, where the size
#: of a step is not known.
FEW, FEW_OF_STEP, FEW_LINES = 0.03, 0.12, 2.0
#: What either half of the run has of them, of so many and more.
EVENLY, EVENLY_OF = 0.15, 5


class FailedScores(Struct, frozen=True):
    """What failed in each step, in order; samples of a step, where they are known."""

    points: tuple[Point, ...]
    counts: tuple[int, ...]
    samples: float | None

    @property
    def steps(self) -> list[int]:
        """The steps in which any failed."""
        return [p.step for p, count in zip(self.points, self.counts, strict=True) if count and p.step is not None]

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def are_few(self) -> bool:
        """Whether few fail, evenly through the run; of a run of unknown size nobody can tell."""
        if self.samples is None:
            return False
        each = len(self.counts)
        half = sum(self.counts[: each // 2])
        if self.total > EVENLY_OF and not EVENLY * self.total <= half <= (1 - EVENLY) * self.total:
            return False
        # A step of few samples has one of them more by chance.
        return self.total <= FEW * self.samples * each and max(self.counts) <= max(FEW_OF_STEP * self.samples, 3)


class Outage(Struct, frozen=True):
    """Since which step far more fail: what did before and does since, in a step; and the reward on either side."""

    since: Point
    before: float
    after: float
    reward_before: float
    reward_after: float
    steps: list[int]


def count_of(one: Told) -> int:
    """How many samples a line tells of."""
    own = int(found[1]) if (found := _SAMPLES.search(one.text)) else 1
    return own * (int(again[1]) if (again := _REPEATED.search(one.text)) else 1)


def failed_scores(lines: Sequence[Told], log: RunLog) -> FailedScores | None:
    """What failed by step; None where the log has too few numbered steps, or lines, to tell."""
    points = [p for p in _steps(log) if p.line]
    if len(points) < STEPS or not lines or log.is_counted:
        return None
    ends = [p.line or 0 for p in points]
    counts: Counter[int] = Counter()
    for one in lines:
        if one.point.path == points[0].path:
            counts[bisect_right(ends, one.point.line or 0)] += count_of(one)
    return FailedScores(tuple(points), tuple(counts[at] for at in range(len(points))), samples_of(log))


def _steps(log: RunLog) -> Sequence[Point]:
    return max((each.points for name in ("reward", "loss", "pg_loss") for each in log.all(name)), key=len, default=())


def samples_of(log: RunLog) -> float | None:
    """Samples of a step, as the run states or logs them."""
    for series in log.all("batch_count"):
        if series.finite:
            return median(series.finite)
    of_prompt = log.algorithm.number("rollout_n", "n_samples_per_prompt", "num_generations_per_prompt", "group_size")
    prompts = log.algorithm.number("num_prompts_per_step", "rollout_batch_size", "train_batch_size")
    return prompts * of_prompt if prompts and of_prompt else None


def outage(failed: FailedScores, log: RunLog) -> Outage | None:
    """The step from which on far more fail than before, while the reward loses a part of what it was."""
    reward: Series | None = log.get("reward")
    if reward is None:
        return None
    paid = {p.step: p.value for p in reward.points}
    counts, points = failed.counts, failed.points
    best: tuple[float, int] | None = None
    for at in range(BESIDE, len(counts) - BESIDE + 1):
        before, after = fmean(counts[:at]), fmean(counts[at : at + BESIDE])
        leaps = counts[at] - counts[at - 1]
        many = MANY * failed.samples if failed.samples else max(FEW_LINES * 2, TIMES * before)
        if after >= max(TIMES * before, many) and leaps > 0 and (best is None or leaps > best[0]):
            best = leaps, at
    if best is None:
        return None
    at = best[1]
    # It lasts for as long as at least half as many fail.
    level = fmean(counts[at : at + BESIDE]) / 2
    until = next((end for end in range(at + 1, len(counts) - 1) if max(counts[end : end + 2]) < level), len(counts))
    was = [paid[p.step] for p in points[max(0, at - 10) : at] if p.step in paid]
    now = [paid[p.step] for p in points[at:until] if p.step in paid]
    if not was or not now:
        return None
    return Outage(
        points[at], fmean(counts[:at]), fmean(counts[at:until]), fmean(was), fmean(now),
        [p.step for p in points[at:until] if p.step is not None],
    )  # fmt: skip
