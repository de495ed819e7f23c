"""What a reward falls with: responses that are cut ever more often, turns and calls of tools that go away."""

from __future__ import annotations

from statistics import median

from replay_core.diagnose import trends
from replay_core.diagnose.signals import RunLog, Series

#: How much more of the responses is cut, and the part of the fall that it has to explain.
CUT, EXPLAINED = 0.25, 0.5
#: What is left of turns or calls that go away, and the fewest turns before: an answer is one, most often two.
LEFT, TURNS = 0.6, 2.5


def falls_with(log: RunLog, before: float, now: float) -> tuple[str, str] | None:
    """What goes along with a reward that falls from `before` to `now`, and why it does, in words; None of most."""
    if not 0 <= now < before:
        return None
    return _cut(log, before, now) or _without_tools(log)


def _ends(series: Series | None) -> tuple[float, float] | None:
    """The level of the first third and that of the last quarter, of 12 values and more."""
    values = [] if series is None else series.finite
    if len(values) < 12:
        return None
    return median(values[: len(values) // 3]), median(values[-(len(values) // 4) :])


def _cut(log: RunLog, before: float, now: float) -> tuple[str, str] | None:
    series = log.get("truncated")
    ends = _ends(series)
    if series is None or ends is None or not 0 <= ends[0] < ends[1] <= 1 or not trends.rises(series.finite):
        return None
    begun, cut = ends
    if cut - begun < CUT or before * (cut - begun) / (1 - begun) < EXPLAINED * (before - now):
        return None
    return (
        f"ever more responses are cut at the token limit with it ({series.name} {begun:.2g} to {cut:.2g})",
        "an answer that is cut earns nothing: answers grow into the limit (length pays, a policy that no longer ends "
        "them, a limit that is too small), and that is the fall; advantages that are made wrongly come after it",
    )


def _without_tools(log: RunLog) -> tuple[str, str] | None:
    for name, fewest in (("tool_calls", 0.2), ("turns", TURNS)):
        series = log.get(name)
        ends = _ends(series)
        if series is None or ends is None or ends[0] < fewest or ends[1] > LEFT * ends[0]:
            continue
        if trends.drift(series.finite) < -trends.DRIFT_Z:
            return (
                f"the policy calls its tools ever less with it ({series.name} {ends[0]:.3g} to {ends[1]:.3g})",
                "calls do not pay, or are not noticed: they fail, their results are masked or cut, turns cost reward, "
                "or the format of calls is lost; without them the answers get worse",
            )
    return None
