"""A log that only ends: how far its run was, and whether anything tells that it is over."""

from __future__ import annotations

from msgspec import Struct

from replay_core.diagnose.ends import said
from replay_core.diagnose.finding import Finding, Where, finding, info, shown
from replay_core.diagnose.rule import Skip, rule, skip_if
from replay_core.diagnose.rules.death import died
from replay_core.diagnose.signals import RunLog
from replay_core.dumps.log_events import PROGRESS
from replay_core.dumps.metrics import PLANNED

#: Steps short of its end, and the share of them, that a run which ended well may be: its last bar is not drawn.
SHORT, SHARE = 1, 0.03
#: Starts without a step that are no first minutes of a run.
STARTS = 2


class _Far(Struct, frozen=True):
    """Step `at` of `of`, where it is told, and what stands behind."""

    at: int
    of: int
    where: Where
    starts: int = 0
    over: str = ""
    over_line: int | None = None
    stood: int = 0
    """Seconds for which other lines go on."""

    @property
    def words(self) -> str:
        share = self.at / self.of
        return f"step {self.at:,} of {self.of:,} ({share:.0%})" if share >= 0.01 or not self.at else (
            f"step {self.at:,} of {self.of:,} ({share:.2%})")  # fmt: skip


@rule("L42", "the log ends before its run does", link="dump", scope="signals",
      source="tqdm's bars; transformers' and verl's counts of steps; Slurm, the kernel's OOM killer")  # fmt: skip
def unfinished(log: RunLog) -> Finding | None:
    """The last bar or counter of steps (of several bars the one that ran longest), or the last logged step and the
    total that the log states, is more than a step and 3 % short of the end, and no line tells of an error or of
    training's end: worth knowing, as a run that still goes on and a part that was copied look alike. A warning where a
    later line tells that the process has ended all the same (a tracker's summary, a shell's prompt, an exit code),
    where other lines go on by their clocks for half an hour and 20 steps' time, or where training was begun twice and
    more and no step was taken. A checkpoint's state ends where it was saved: silent. A program's log (its lines have
    clocks) that tells of no step and of no error is said to.
    """
    far = _far(log)
    if far is None:
        raise Skip("the log does not tell how many steps the run is to take, or how far it came")
    if not far.of:
        return info(
            f"the log tells of no step of training and of no error: it ends at line {far.over_line} with "
            f"{far.over[:100]!r}",
            far.where,
            shown("last line", far.over, None, f"line {far.over_line}"),
            cause="it was cut there, is another process's log (metrics and errors stand in another file), or the "
            "program still prepares, hangs, or was ended from outside before its first step",
            next_step="is it alive (ps, nvidia-smi)? py-spy dump --pid PID shows where it stands; else dmesg -T | grep "
            "-i oom, and the launcher's and the other ranks' logs",
        )
    # Lines of metrics that name no step were logged all the same: how many steps each is of is not told.
    skip_if(not far.at and log.is_counted and any(log.last_lines().values()), "the logged steps have no numbers")
    if far.of - far.at <= max(SHORT, SHARE * far.of) or log.events("finished", "succeeded"):
        return None
    if log.events("oom", "oom_host", "stalled") or _is_dead(log):
        return None
    # L26 says it of a bar that stands at 0 in a log without a metric.
    if not far.at and log.events("begins") and not any(log.last_lines().values()) and far.starts < STARTS:
        return None
    in_vain = far.starts >= STARTS and not any(log.last_lines().values()) and not far.at
    if in_vain:
        claim = f"training was begun {far.starts} times, and no step of {far.of:,} was ever logged"
    elif far.over:
        claim = f"the process ended at {far.words}, and no line says why"
    elif far.stood:
        claim = (
            f"the run stands at {far.words}: other lines go on for {far.stood / 60:.0f} minutes, and no step is taken"
        )
    elif not far.at:
        claim = f"the text ends before the first step of {far.of:,}, and nothing says why"
    else:
        claim = f"the text ends at {far.words}, and nothing says why"
    return finding(
        "warning" if far.over or in_vain or far.stood else "info",
        claim,
        far.where,
        shown("last step", far.at, f"about {far.of}", f"line {far.where.line}" if far.where.line else "log"),
        *([shown("a later line", far.over, None, f"line {far.over_line}")] if far.over else []),
        *([shown("minutes without a step", round(far.stood / 60, 1), None, "the lines' clocks")] if far.stood else []),
        *([shown("starts of training", far.starts, "1", "log")] if in_vain else []),
        cause="a hang: a rank that waits for a collective, an engine, judge or environment that does not answer, a "
        "data worker that is stuck; what goes on are other processes' lines"
        if far.stood and not far.over
        else ("each attempt was given up or died without a word: " if in_vain else "")
        + (
            "the process was ended from outside, which writes nothing into this text (the kernel's OOM killer, a "
            "preemption, the walltime, a closed terminal, somebody who stopped it), or its error went to another file"
        )
        + ("" if far.over or in_vain else "; or the run still goes on, hangs, or only a part of its log was copied"),
        next_step="is it alive (ps, nvidia-smi)? else dmesg -T | grep -i oom; sacct -j JOB "
        "--format=State,ExitCode,MaxRSS; the logs of the other ranks and the launcher's stderr; then resume from the "
        "last checkpoint",
    )


def _is_dead(log: RunLog) -> bool:
    """Whether L06 tells what the run died of."""
    told = died(log)
    return any(one.severity != "info" for one in ([told] if isinstance(told, Finding) else told or ()))


def _far(log: RunLog) -> _Far | None:
    told = log.events(PROGRESS)
    if told:
        one = told[-1]
        at, _, of = said(one).partition("/")
        facts = dict(
            line.split(" ", 1) for line in one.text.splitlines()[1:] if line.startswith(("starts ", "over ", "stood "))
        )
        over = int(facts["over"]) if "over" in facts else None
        return _Far(int(at), int(of), one.point.where(), int(facts.get("starts", 0)),
                    one.text.splitlines()[-1] if over is not None else "", over,
                    int(facts.get("stood", 0)))  # fmt: skip
    planned = log.algorithm.number(PLANNED)
    # transformers' state lies in every checkpoint: that it ends there is how it was made.
    if planned is None or log.is_counted or any(path.endswith(".json") for path in log.paths):
        return None
    last = max((series.last for series in log.signals()), key=lambda p: -1 if p.step is None else p.step, default=None)
    if last is None or last.step is None or last.step > planned:
        return None
    return _Far(last.step, int(planned), last.where())
