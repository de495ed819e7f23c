"""Calls of tools and turns of an agent over the steps of a run: calls that fail or end, turns at their limit."""

from __future__ import annotations

from replay_core.diagnose import trends
from replay_core.diagnose.finding import Finding, finding, info, shown, warning
from replay_core.diagnose.rule import rule, skip_if
from replay_core.diagnose.rules.lost_samples import falls
from replay_core.diagnose.signals import RunLog, Series

#: The share of calls that fail: worth knowing, and a warning; calls by response below which there are none to fail.
FAIL, FAIL_BAD, NO_CALLS = 0.3, 0.5, 0.01


def _parts(series: Series) -> tuple[list[float], float, float]:
    """Its values, and their level in the first and the last quarter."""
    values = series.finite
    last = max(3, len(values) // 4)
    return values, trends.level(values[:last]), trends.level(values, last)


@rule("L82", "calls of tools fail", link="tokens", scope="signals", needs=("tool_failures",),
      lasts=True, source="TRL: tools/failure_frequency; open-instruct: tools/aggregate/failure_rate")  # fmt: skip
def calls_fail(log: RunLog) -> Finding | None:
    """The share of calls of tools that fail, over 8 steps and more: .5 and more in the last quarter a warning, .3 worth
    knowing; worth knowing at most where it falls by more than chance: the policy learns to call them. Not where none is
    called.
    """
    calls = log.get("tool_calls")
    for series in log.all("tool_failures"):
        values, begun, now = _parts(series)
        if len(values) < trends.MIN_STEPS or not all(0 <= value <= 1 for value in values) or now < FAIL:
            continue
        if calls is not None and calls.finite and _parts(calls)[2] < NO_CALLS:
            continue
        learns = trends.drift(values) < -trends.DRIFT_Z
        grows = begun <= 0.5 * now and trends.rises(values)
        return finding(
            "warning" if now >= FAIL_BAD and not learns else "info",
            f"{now:.0%} of the calls of tools fail: {series.name} is {now:.3g}"
            + (f", and was {begun:.2g} at first" if grows else ""),
            series.last.where(series.name),
            series.shown(now, f"< {FAIL:g}"),
            *([] if calls is None or not calls.finite else [calls.shown(trends.level(calls.finite))]),
            cause="the tool's service is down, overloaded or out of its quota, or the calls cannot be read (names, "
            "arguments, a format that the template and the parser do not share): the policy learns that tools are of "
            "no use, and what it is taught is to do without",
            next_step="read ten calls beside what came back; call the tool by hand with the arguments of one",
            steps=series.steps(over=FAIL),
        )
    skip_if(not log.has("tool_failures"), "needs the share of calls that fail")
    return None


#: Calls by response before an end of them, and what is left of them then.
CALLED, LEFT = 0.2, 0.15
#: How near to the limit turns are, how far from it they were, the share of the steps whose longest is that limit.
AT_LIMIT, FAR, PINNED = 0.9, 0.7, 0.8


@rule("L83", "tools are called no more, or turns run into their limit", link="tokens", scope="signals",
      needs=("tool_calls|turns|turns_at_limit",), explains=("D37",),
      source="TRL: tools/call_frequency; verl: num_turns; NeMo-RL: max_turns_reached_rate")  # fmt: skip
def turns(log: RunLog) -> Finding | None:
    """Calls of tools by response that go from .2 and more to .15 of it and less, by more than chance, in 8 steps
    and more; or turns that go to the fewest there are, and the longest are as short. Turns whose mean comes to .9 of
    the longest, which is one number in four of five steps and thus a limit, from below .7 of it; or a share of
    samples at that limit that doubles to .5 and more. Worth knowing: an agent may learn to do without, or to go on. A
    warning where the reward or an evaluation falls meanwhile.
    """
    found = _none_called(log) or _fewest_turns(log) or _at_the_limit(log)
    if found is None:
        return None
    claim, series, now, begun, cause, next_step = found
    return (warning if falls(log) else info)(
        claim,
        series.ended,
        series.shown(now, f"about {begun:.3g}"),
        shown("Mann-Kendall z", trends.drift(series.finite)),
        cause=cause,
        next_step=next_step,
    )


_Found = tuple[str, Series, float, float, str, str]
_GIVES_UP = (
    "the policy has learnt that calls do not pay: they fail, what they give back is masked or cut, turns cost reward, "
    "or answers are scored as well without; or the calls are not recognised any more (a format the parser does "
    "not know)"
)
_READ = "read ten responses of the last steps: are there calls that were not parsed? grade one with and without calls"


def _none_called(log: RunLog) -> _Found | None:
    for series in log.all("tool_calls"):
        values, begun, _ = _parts(series)
        now = trends.level(values, min(10, max(3, len(values) // 4)))
        if len(values) < trends.MIN_STEPS or begun < CALLED or now > LEFT * begun:
            continue
        if trends.drift(values) < -trends.DRIFT_Z and max(values[-3:]) <= 2 * LEFT * begun:
            claim = f"tools are called no more: {series.name} goes from {begun:.3g} to {now:.3g} calls"
            return claim, series, now, begun, _GIVES_UP, _READ
    return None


def _fewest_turns(log: RunLog) -> _Found | None:
    series, longest, shortest = log.get("turns"), log.get("turns_max"), log.get("turns_min")
    if series is None or longest is None or shortest is None or not shortest.finite:
        return None
    values, begun, now = _parts(series)
    least = min(shortest.finite)
    if len(values) < trends.MIN_STEPS or least <= 0 or begun < 1.5 * least or now > 1.02 * least:
        return None
    if _parts(longest)[2] > least or trends.drift(values) >= -trends.DRIFT_Z:
        return None
    claim = (
        f"no tool is called any more: turns go from {begun:.3g} to {now:.3g} ({series.name}), the fewest there are, in "
        "every sample"
    )
    return claim, series, now, begun, _GIVES_UP, _READ


def _at_the_limit(log: RunLog) -> _Found | None:
    cause = (
        "agents go on without an end: what would end an episode (a submit call, an answer) is not written or not seen, "
        "tools give nothing back that helps, or more turns pay; what is cut at the limit is scored as it stands"
    )
    for series in log.all("turns_at_limit"):
        values, begun, now = _parts(series)
        if len(values) >= trends.MIN_STEPS and 0.5 <= now <= 1 and begun <= 0.5 * now and trends.rises(values):
            claim = f"{now:.0%} of the samples end at the limit of turns: {series.name} was {begun:.2g} at first"
            return claim, series, now, begun, cause, "read the last turns of ten such samples; raise the limit of turns"
    turns, longest = log.get("turns"), log.get("turns_max")
    if turns is None or longest is None or not longest.finite:
        return None
    values, begun, now = _parts(turns)
    limit = max(longest.finite)
    if len(values) < trends.MIN_STEPS or limit < 4 or not FAR * limit > begun or not AT_LIMIT * limit <= now <= limit:
        return None
    if sum(value == limit for value in longest.finite) < PINNED * len(longest.finite) or not trends.rises(values):
        return None
    claim = f"turns run into their limit: {turns.name} goes from {begun:.3g} to {now:.3g}, of {limit:g} at most"
    return claim, turns, now, begun, cause, "read the last turns of ten samples; raise the limit of turns"


#: How many times its first level the time in tools comes to, seconds more, a rise beyond doubt; of a step.
LONGER, SECONDS, SURELY, SLOWER = 3.0, 5.0, 4.0, 1.5
#: And how many times as far as the calls it has to grow, where these are logged.
BY_CALL = 2.0


@rule("L89", "tools take ever longer", link="time", scope="signals", needs=("tool_seconds",), lasts=True,
      source="verl: agent_loop/tool_calls; open-instruct: tools/aggregate/avg_runtime")  # fmt: skip
def slow_tools(log: RunLog) -> Finding | None:
    """The mean time of a sample in calls of tools, in the last quarter of 12 steps and more 3 times that of the first
    and 5 seconds more, by far more than chance (z over 4): worth knowing, as more calls may be made. A warning where
    steps get half as long again meanwhile, and the time grows twice as far as the calls (or turns), where these are
    logged.
    """
    for series in log.all("tool_seconds"):
        values, begun, now = _parts(series)
        if len(values) < 12 or not begun > 0 or now < max(LONGER * begun, begun + SECONDS):
            continue
        if trends.drift(values) < SURELY:
            continue
        whole, calls = log.get("step_seconds"), log.get("tool_calls") or log.get("turns")
        parts = _parts(whole) if whole is not None and len(whole.finite) >= trends.MIN_STEPS else None
        more = _parts(calls) if calls is not None and len(calls.finite) >= trends.MIN_STEPS else None
        # More calls are more time: the service is slower where a call takes longer.
        by_call = now / begun if more is None or not more[1] > 0 else (now / begun) / (more[2] / more[1])
        slower = parts is not None and parts[2] >= SLOWER * parts[1] > 0 and by_call >= BY_CALL
        return finding(
            "warning" if slower else "info",
            f"calls of tools take ever longer: {series.name} goes from {begun:.3g} to {now:.3g} s"
            + (f", and a step from {parts[1]:.3g} to {parts[2]:.3g} s" if slower and parts is not None else ""),
            series.ended,
            series.shown(now, f"about {begun:.3g}"),
            *([] if calls is None or more is None else [calls.shown(more[2], f"was {more[1]:.3g}")]),
            cause="more calls are made, or each takes longer: a service that is overloaded or limits its rate, "
            "sandboxes that are not ended, time-outs and retries",
            next_step="time one call alone, early and late; count sandboxes and connections that are open",
        )
    return None
