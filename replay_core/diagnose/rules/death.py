"""How a run ended: an exception, a CUDA error, a collective that never came back, a signal; or that it only waits."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from replay_core.diagnose.by_itself import advice, by_itself, not_divisible, setting_too_large
from replay_core.diagnose.chains import earlier, heads
from replay_core.diagnose.ends import GUESSES, SIGKILL, follows, of_the_last_run, said, tells, waited_in_vain, weight
from replay_core.diagnose.failure_texts import failure_of, in_short
from replay_core.diagnose.finding import Evidence, Finding, finding, info, listed, shown, warning
from replay_core.diagnose.hangs import LINES, LONG, MANY, as_many_before, bare, in_words, waited_until
from replay_core.diagnose.log_steps import steps_of
from replay_core.diagnose.misfits import Misfit, misfit
from replay_core.diagnose.raised import Raised, raised, unknown, with_code
from replay_core.diagnose.rule import rule
from replay_core.diagnose.signals import Point, RunLog, Told
from replay_core.diagnose.with_values import with_values
from replay_core.dumps.log_events import DEATHS, GOES_ON, KEPT, LAST_ERROR, PROGRESS, UNTOLD
from replay_core.dumps.metrics import PLANNED
from replay_core.dumps.told_lines import key_of
from replay_core.regexes import regex

#: What a rank's watchdog waited for in vain, and what torch says of the rank's queue.
_WAITED = regex(r"WorkNCCL\((?=[^)]*OpType=(?P<op>\w+))(?=[^)]*SeqNum=(?P<number>\d+))")
_RANK = regex(r"\bRank (\d+)\]")
_MILLISECONDS = regex(r"ran for (\d+) (?:milliseconds|ms)")
#: What an engine that has died says of itself, and where its own frames lie.
_ENGINE = regex(r"EngineDeadError|EngineCore|vllm/v1/engine/|sglang/srt/managers/")
_ENGINE_DEAD = regex(r"EngineDeadError|EngineCore encountered")
_NAMES_IT = regex(r"No space left on device|Errno 28\b|ENOSPC|Disk quota exceeded|torch\.Size\(\[0\]\)")
#: The one guess that it makes alone.
_POD = regex(r"may have exceeded K8s pod memory limit")
_WHOSE = regex(r"^\s*class_name: (?:\S+\.)?(\w+)")
#: What a rank says of a peer that is gone.
_GONE = regex(r"remote process exited|[Cc]onnection (?:closed|reset)|ncclRemoteError")
#: What waits is no death: an engine's worker that does not answer, a stack that stands in a collective.
_HUNG = regex(r"shared memory broadcast block|watchdog_timeout|^\s*\w+ \(\S+:\d+\)$")
_BY_HAND = regex(r"KeyboardInterrupt|SIGINT|signal: 2\b|Received 2 ")
#: torchrun's agent, and others, of the terminal's end; its table of ranks that failed.
_HUNG_UP = regex(r"SIGHUP|Received 1 death|signal: 1\b|Signal 1 ")
_OF_RANK = regex(r"^\s*rank\s+: (\d+) \(local_rank")
#: What a script ends with by itself (an exception, sys.exit) is no crash of native code.
_BY_ITSELF = regex(r"\(exitcode: [12]\)")
_ITS_CODE = regex(r"^\s*exitcode\s+: (-?\d+)")
_CORRUPT = regex(
    r"free or corruption|free\(\)|munmap_chunk|corrupted |malloc\(\)|Floating point|Illegal instr|signal 11\b|SIGSEGV"
    r"|Segmentation|code(?: =|:)? (?:139|-11)\b"
)
#: Why Slurm cancelled a job, in its own words.
_SCHEDULED = regex(r"CANCELLED AT \S+ DUE TO (TIME LIMIT|PREEMPTION|NODE FAIL\w*|JOB REQUEUE)")
_SIGTERM = regex(r"SIGTERM|exitcode: -15|signal: 15\b|Terminated|Received 15 |CANCELLED")


@rule("L06", "the run died", link="dump", scope="signals",
      needs=("|".join(f"event:{kind}" for kind in (*DEATHS, LAST_ERROR)),), explains=("L26",),
      source="Python's and torch's own messages, torchrun's agent; Megatron-LM#1207, LLaMA-Factory#163")  # fmt: skip
def died(log: RunLog) -> Iterator[Finding]:
    """A traceback, a CUDA error, NCCL's watchdog or a signal after which no metric is logged: error, of the first
    such line that is a cause: what tells of another process's end (an actor that is gone, a collective waited for
    in vain, a launcher's signal) is none while any other line tells more. Of a chain it is the innermost that was
    the direct cause, or the last where handling one failed (`diagnose/chains.py`); what a `try` printed is none
    beside what reached the top, and Ray's driver names the class. What known texts mean is a table
    (`diagnose/failure_texts.py`); of others the frames tell what the run was doing (`diagnose/raised.py`). Behind
    the training's end it says so. After a CUDA error, the watchdog or a signal it is an error even where metrics
    follow: that is another start of the run; worth knowing where the run says that it starts that engine (or worker)
    again, and its steps go on. A traceback that more metrics follow, or steps of the bar, was caught:
    info; and so was one that a logger or a line of the program's own announces, where its process goes on. A log that
    ends
    with a line of error, and no exception, is an error where no metric came, else a warning. Out of memory is
    D36's. Of a run that is ended from outside after it only waited (lines of one kind, 5 and more over 15 minutes and
    over 3 times its longest step; without a clock 20, and 3 times as many as between steps before) the hang is told
    first, and the end as its end. A run that a scheduler ends 3 times and more, and that begins again before all of
    these ends and comes no further, makes no progress: an error.
    """
    last = _last_work(log)
    logged = {(one.point.path, int(said(one))) for one in log.events(GOES_ON)}
    # Lines of several ranks are kept by rank; the first of them all is the cause.
    files = list(dict.fromkeys(one.point.path for one in log.events(*DEATHS)))
    told = sorted(log.events(*DEATHS), key=lambda one: (files.index(one.point.path), one.point.line or 0))
    at_the_end = [
        one for one in told
        if (one.point.line or 0) > last.get(one.point.path, 0) and (one.point.path, one.point.line) not in logged
    ]  # fmt: skip
    if (continued := [one for one in at_the_end if _is_continued(one, log)]) and len(continued) == len(at_the_end):
        yield _in_parts(continued)
        return
    # Tasks that are cancelled, and nothing else, are those of a program that closes.
    if all(_CANCELLED.match(one.text) for one in at_the_end) or _closes(at_the_end, log):
        at_the_end = []
    if (again := _again_and_again(told, at_the_end) or _without_progress(told, log)) is not None:
        yield again
        return
    at_the_end = of_the_last_run(at_the_end, log)
    ends = heads(at_the_end, weight)
    if ends and all(map(follows, ends)):
        # What another process has logged, and went on waiting for its own end, is why these ended.
        before = [one for one in told if (one.point.path, one.point.line) in logged and one.kind == "traceback"]
        ends = [*(one for one in before if _is_why(one, last)), *ends]
    ends = _without_what_follows_a_wait(ends)
    causes = [one for one in ends if not follows(one)] or ends
    if causes and not any(one.kind.startswith("oom") for one in causes if not waited_in_vain(one)):
        stated = " ".join(one.text for one in log.events("main_failed"))
        dead = _dead(_told_elsewhere(ends, log), went_on=False, counted=log.is_counted, every=at_the_end, stated=stated)
        dead = _of_numbers_before(dead, ends, log) or _of_a_hang(dead, causes, log) or dead
        dead = _behind_a_silence(dead, log)
        yield _behind_its_end(_without_a_checkpoint(_which_engine(dead, causes, log), log), log)
        return
    if not causes and (refused := log.events(LAST_ERROR)) and not log.events("finished", "succeeded"):
        yield _refused(refused[-1], log)
        return
    if causes:
        return  # a rank that ran out of memory is why the others waited
    before = [one for one in told if one not in at_the_end]
    fatal = [one for one in before if one.kind in ("nccl", "cuda_error", "killed")]
    if fatal and _are_engines(fatal, log):
        yield _restarted(fatal, log)
    elif fatal and (lost := _lost_engines(fatal, log)) is not None:
        yield lost
    elif fatal and not (all(map(_is_preempted, fatal)) and last):
        yield _dead(fatal, went_on=True, counted=log.is_counted)
    caught = [one for one in before if one.kind == "traceback"]
    if caught and not fatal and (lost := _lost_engines(caught, log)) is not None:
        yield lost
    elif caught and not fatal:
        yield info(
            f"an exception at line {caught[0].point.line}, and the run went on: {_words(caught[0])}",
            caught[0].point.where(),
            shown("exceptions", len(caught), "0", f"from line {caught[0].point.line}"),
            *_frame(caught[0]),
            cause="the trainer caught it, or another process of the run raised it",
            next_step="look at what was skipped in that step",
            steps=steps_of(one.point for one in caught),
        )


def _is_continued(end: Told, log: RunLog) -> bool:
    """Whether a job that its time limit ended is gone on with in another file, from a step behind its first one, and
    came further there.
    """
    found = _SCHEDULED.search(end.text)
    if found is None or log.is_counted:
        return False
    points = max((each.points for name in ("reward", "loss", "pg_loss") for each in log.all(name)), key=len, default=())
    here = [p.step for p in points if p.path == end.point.path and p.step is not None]
    others = [p.step for p in points if p.path != end.point.path and p.step is not None]
    behind = [step for step in others if here and step > max(here)]
    return bool(behind) and min(behind) - max(here) <= _GOES_ON_WITHIN


#: Steps between the last one of a job and the first that the next one logs, as it logs every tenth.
_GOES_ON_WITHIN = 10


def _in_parts(ends: list[Told]) -> Finding:
    return info(
        f"the scheduler ended a job at line {ends[0].point.line}, and another one went on from its checkpoint: "
        f"{said(ends[0])[:160]}",
        ends[0].point.where(),
        shown("such ends", len(ends), None, "log"),
        cause="the run takes more time than one job has, and is made in parts",
        next_step="nothing, where figures go on as they were",
        steps=steps_of(one.point for one in ends),
    )


#: Lines behind a worker's end in which the trainer says that it starts its engine again.
_SOON = 100


def _are_engines(fatal: list[Told], log: RunLog) -> bool:
    """Whether what died were engines or workers that the run itself has started again, and it went on with its next
    step.
    """
    again = [one.point for one in log.events("engine_again")]
    first = min(one.point.line or 0 for one in fatal)
    rewards: Sequence[Point] = max((each.points for each in log.all("reward")), key=len, default=())
    # Of steps that are taken anew the log keeps the later ones.
    behind = [p.step or 0 for p in rewards if (p.line or 0) > first]
    return (
        all(
            (_GONE_UNTOLD.search(one.text) or _ENGINE.search(one.text))
            and any(p.path == one.point.path and 0 < (p.line or 0) - (one.point.line or 0) <= _SOON for p in again)
            for one in fatal
        )
        and bool(behind)
        and min(behind) > max(one.point.step or 0 for one in fatal)
        and not any((one.point.line or 0) > first for one in log.events("started"))
    )


def _restarted(fatal: list[Told], log: RunLog) -> Finding:
    again = log.events("engine_again")
    steps = [_step_before(one.point, log) for one in fatal]
    what = "an inference engine" if any("engine" in one.text.lower() for one in again) else "a worker process of Ray"
    return info(
        f"{what} died at line {fatal[0].point.line}, was started again, and the run went on: {_words(fatal[0])}",
        replace(fatal[0].point.where(), step=steps[0]),
        shown("line", again[-1].text.splitlines()[0][:200], None, f"line {again[-1].point.line}"),
        shown("lines that tell of its end", len(fatal), "0", "log"),
        cause="one of several engines or workers ended; what it was at work on was sent to it again, or lost",
        next_step="its own log at that time; where it happens often, its memory (dmesg | grep -i oom)",
        steps=dict.fromkeys(steps),
    )


#: What a death is of that is an engine's or its server's: its own names, frames and schedulers.
_OF_ENGINE = regex(
    r"EngineDeadError|EngineCore|vllm/v1/|vllm/(?:engine|worker|executor)/|sglang/srt/|Scheduler hit an exception"
    r"|SGLangEngine|SGLangHttpServer|vLLMHttpServer|AsyncLLM|(?i:\b(?:rollout|inference|generation|sglang|vllm)[ _-]?"
    r"(?:engine|server|worker|replica)s?\b)"
)
#: Of an exception alone, which a request may raise as well: that the engine itself ends.
_IS_DEAD = regex(
    r"EngineDeadError|EngineCore encountered|Scheduler hit an exception|SGLang scheduler .{0,40}(?:died|dead)"
)
#: Lines around an engine's end in which a monitor tells that it is gone; and steps before and behind it that tell how
#: much longer the rollout takes.
_NEAR_IT, _STEPS_BESIDE = 30, 3


def _lost_engines(told: list[Told], log: RunLog) -> Finding | None:
    """Engines that died while the trainer's steps went on, none of which was started again."""
    gone = [one for one in log.events("told_running") if key_of(one.text) == _SILENT]
    ends = sorted(told, key=lambda one: one.point.line or 0)
    whose = [
        one for one in ends
        if (_OF_ENGINE if one.kind != "traceback" else _IS_DEAD).search(one.text)
        or any(
            p.point.path == one.point.path and 0 <= (p.point.line or 0) - (one.point.line or 0) <= _NEAR_IT
            for p in gone
        )
    ]  # fmt: skip
    if not whose or len(whose) < len(ends) or not _goes_on_behind(ends[-1], log):
        return None
    again = [one.point.line or 0 for one in log.events("engine_again")]
    apart = [
        one for before, one in pairwise([None, *whose])
        if one is not None and (before is None or (one.point.line or 0) - (before.point.line or 0) > APART)
    ]  # fmt: skip
    left = [one for one in apart if not any(line > (one.point.line or 0) for line in again)]
    if not left:
        return None
    number = dict.fromkeys(found[1] for one in gone if (found := _NUMBER.search(one.text)) is not None)
    steps = [_step_before(one.point, log) for one in left]
    dead = _dead([left[0]], went_on=False, counted=log.is_counted)
    what = dead.claim.partition(": ")[2]
    engines = (
        f"engines {', '.join(number)}" if len(number) == len(left) > 1 else f"engine {next(iter(number))}"
        if len(number) == len(left) == 1
        else f"{len(left)} inference engines" if len(left) > 1 else "an inference engine"
    )  # fmt: skip
    behind = f", after step{'s' if len(set(steps)) > 1 else ''} {', '.join(str(one) for one in dict.fromkeys(steps))}"
    slower = _slower_since(log, steps)
    return replace(
        dead,
        severity="error",
        link="",
        claim=f"{engines} died at line{'s' if len(left) > 1 else ''} "
        f"{', '.join(str(one.point.line) for one in left)}{behind if None not in steps else ''}, and "
        f"{'were' if len(left) > 1 else 'was'} not started again: the run goes on with fewer"
        + ("" if slower is None else f", and {slower[0]} goes from {slower[1]:.3g} s to {slower[2]:.3g} s")
        + f": {what}",
        evidence=(
            *dead.evidence,
            *(
                [shown("which engine", gone[0].text.splitlines()[0][:160], None, f"line {gone[0].point.line}")]
                if gone
                else []
            ),
            shown("engines that were started again", 0, f"{len(left)}", "log"),
        ),
        cause=f"{dead.cause}. What it was at work on was sent to another one or lost; the engines that are left have "
        "all the work, so that rollouts take longer",
        next_step="the engine's own log at that time (CUDA_LAUNCH_BLOCKING=1, dmesg for Xid); have it started again "
        "(a fault-tolerance switch of the trainer), or restart the run from its last checkpoint",
        steps=tuple(one for one in dict.fromkeys(steps) if one is not None),
    )


def _goes_on_behind(end: Told, log: RunLog) -> bool:
    """Whether the trainer's steps are counted on behind an end, and nothing tells of another start of the program."""
    line = end.point.line or 0
    points = max((each.points for name in ("reward", "loss", "pg_loss") for each in log.all(name)), key=len, default=())
    own = [p for p in points if p.path == end.point.path and p.step is not None]
    behind = [p.step for p in own if (p.line or 0) > line and p.step is not None]
    before = [p.step for p in own if (p.line or 0) < line and p.step is not None]
    if not behind or any((one.point.line or 0) > line for one in log.events("started", "begins")):
        return False
    # A run that is started again from a checkpoint takes some of its steps anew: of these the log keeps the later ones.
    if min(behind) <= (end.point.step or 0) and not log.is_counted:
        return False
    return not before or min(behind) - max(before) == min(
        (b - a for a, b in pairwise(sorted({*before, *behind}))), default=1
    )


def _slower_since(log: RunLog, steps: Sequence[int | None]) -> tuple[str, float, float] | None:
    """The rollout's time (or a step's) before the first engine died and since the last, where that is a fifth more."""
    known = [one for one in steps if one is not None]
    rollout = [one for one in log.all("phase_seconds") if _ROLLOUT.search(one.name)]
    for series in (*rollout, *log.all("step_seconds")):
        before = [p.value for p in series.points if p.step is not None and known and p.step <= known[0]]
        since = [p.value for p in series.points if p.step is not None and known and p.step > known[-1]]
        if min(len(before), len(since)) >= _STEPS_BESIDE and median(since) > 1.2 * median(before) > 0:
            return series.name, median(before), median(since)
    return None


_ROLLOUT = regex(r"(?i)rollout|gen(?:erat|$)|sampl")


def _step_before(point: Point, log: RunLog) -> int | None:
    """The step whose rewards were told last before it: the bar of a phase counts steps of its own."""
    rewards: Sequence[Point] = max((each.points for each in log.all("reward")), key=len, default=())
    before = [each.step for each in rewards if each.path == point.path and (each.line or 0) < (point.line or 0)]
    return before[-1] if before else point.step


#: What a launcher says as it ends its own processes behind the last step.
_ENDS_ITS_OWN = regex(r"^(?:Received|Caught|Got)(?: signal)?:? SIGTERM\b(?!.{0,40}(?:fail|error))")
#: Lines behind the training's end in which it does.
_NEAR = 10


def _closes(ends: list[Told], log: RunLog) -> bool:
    """Whether all that is told behind the training's own end is that its processes are asked to end."""
    over = {one.point.path: one.point.line or 0 for one in log.events("finished")}
    return bool(ends) and all(
        one.kind == "killed"
        and _ENDS_ITS_OWN.search(one.text) is not None
        and 0 < (one.point.line or 0) - over.get(one.point.path, 1 << 60) <= _NEAR
        for one in ends
    )


#: How Ray tells that a worker is gone, and does not know why.
_GONE_UNTOLD = regex(r"A worker died or was killed while executing|Worker exit type: SYSTEM_ERROR|ActorDiedError")


#: What Slurm says as it ends a step whose first task has failed: it gives no reason, and the others are killed.
_STEP_ENDED = regex(r"^slurmstepd: error: .*CANCELLED AT \S+(?! DUE TO)(?:\s|$)|^srun: error: \S+ tasks? [-\d,]+: ")


def _without_what_follows_a_wait(ends: list[Told]) -> list[Told]:
    """The ends, without a worker that is gone for no reason behind a watchdog's line, or a step that Slurm ends there:
    the watchdog takes the process down. A rank that others wait for died before their time was up, and is told before.
    """
    waits = {one.point.path: one.point.line or 0 for one in reversed(ends) if waited_in_vain(one)}
    return [
        one for one in ends
        if not (
            (_GONE_UNTOLD.search(one.text) or _STEP_ENDED.search(said(one)))
            and (one.point.line or 0) > waits.get(one.point.path, 1 << 60)
        )
    ]  # fmt: skip


def _is_why(one: Told, last: dict[str | None, int]) -> bool:
    """Whether an exception that was only logged, behind the last work, tells why others ended."""
    return (one.point.line or 0) > last.get(one.point.path, 0) and weight(one) < 2


_CANCELLED = regex(r"^(?:\w+\.)*CancelledError\b|^RuntimeError: (?:Event loop is closed|cannot schedule new futures)")


def _last_work(log: RunLog) -> dict[str | None, int]:
    """By file, the last line that logs a value, or on which the bar of steps went on before its last rise."""
    found = log.last_lines()
    for one in log.events("finished", "succeeded"):
        found[one.point.path] = max(found.get(one.point.path, 0), one.point.line or 0)
    for one in log.events(PROGRESS):
        rose = next((line[5:] for line in one.text.splitlines()[1:] if line.startswith("rose ")), "0")
        found[one.point.path] = max(found.get(one.point.path, 0), int(rose))
    return found


#: So many crashes of native code are a habit of the run, and lines between two of them before they are two.
CRASHES, APART = 3, 20
_NATIVE = regex(
    r"SIGSEGV|Segmentation|signal 11\b|exitcode: -11|SIGABRT|exitcode: -6\b|Aborted|SIGBUS|Bus error|Illegal instr"
)


def _again_and_again(told: list[Told], ends: list[Told]) -> Finding | None:
    """Of a run that native code ends again and again, and that is started again each time: that it does."""
    killed = [one for one in told if one.kind == "killed" and _NATIVE.search(one.text)]
    lines = [one.point.line or 0 for one in killed]
    apart = [
        one for one, before in zip(killed, [-APART, *lines], strict=False) if (one.point.line or 0) - before >= APART
    ]
    if len(apart) < CRASHES or not any(one in ends for one in killed):
        return None
    again = _dead([apart[-1]], went_on=False, counted=False)
    how = "of a segmentation fault" if _CORRUPT.search(apart[-1].text) else "by an abort of native code"
    return replace(
        again,
        claim=f"the run dies again and again {how}, {len(apart)} times, and is started again each time; last at line "
        f"{apart[-1].point.line}: {_words(apart[-1])}",
        evidence=(*again.evidence, shown("crashes of native code", len(apart), "0", "log")),
        cause="native code crashes at no fixed step: a compiled package of another torch, CUDA or libc (flash-attn, "
        "bitsandbytes, a data or tracker library with threads of its own), memory that runs out, or a GPU that fails",
        next_step="python -X faulthandler names the call; look whether the stack is the same each time; dmesg for "
        "Xid and "
        "oom; without the last package that was added",
    )


#: Ends from outside that are a habit, and by what share and how many steps a later start may come further than those
#: before, and be no further.
_ENDED_OFTEN, _FURTHER, _A_STEP = 3, 0.05, 1


def _without_progress(told: list[Told], log: RunLog) -> Finding | None:
    """Of a run that a scheduler ends again and again, and that takes the same steps anew each time: that it does."""
    ended = sorted((one for one in told if _is_preempted(one)), key=lambda one: one.point.line or 0)
    ended = [
        one for before, one in pairwise([None, *ended])
        if one is not None and (before is None or (one.point.line or 0) - (before.point.line or 0) >= APART)
    ]  # fmt: skip
    steps = [one.point.step for one in ended if one.point.step is not None]
    if log.is_counted or len({one.point.path for one in ended}) != 1 or not _ENDED_OFTEN <= len(steps) == len(ended):
        return None
    longest = max(
        (one.points for signal in ("reward", "loss", "pg_loss") for one in log.all(signal)), key=len, default=()
    )
    since = [p.step for p in longest if p.step is not None and (p.line or 0) > (ended[-2].point.line or 0)]
    if not since or min(since) > min(steps) or max(steps[-2:]) > (1 + _FURTHER) * max(steps[:-2]) + _A_STEP:
        return None
    planned = log.algorithm.number(PLANNED)
    again, last = min(since), ended[-1]
    return replace(
        _dead([last], went_on=False, counted=False),
        claim=f"the run makes no progress: it was ended {len(ended)} times from outside, after steps "
        f"{', '.join(map(str, steps))}, and starts again at step {again}, so that it repeats the same steps and never "
        f"comes past step {max(p.step or 0 for p in longest)}" + (f" of {planned:g}" if planned else ""),
        evidence=(
            shown("ends from outside", len(ended), "0", f"lines {', '.join(str(one.point.line) for one in ended)}"),
            shown("the last of them", said(last)[:200], None, f"line {last.point.line}"),
            shown("first step after the last start", again, f"> {max(steps[:-1])}", "log"),
        ),
        cause=f"checkpoints are further apart than the ends: what was done behind step {again - 1} is lost each time "
        "(a preemption, a time limit), and the newest checkpoint stays the same",
        next_step="save more often than the job is ended (save_freq), or at SIGTERM; ask for a longer time or for "
        "machines that are not taken away",
        steps=steps_of(p for p in longest if p.step is not None and p.step >= again),
    )


#: What sampling from probabilities that are no numbers ends in, where a kernel checks them.
_SAMPLING = regex(r"device-side assert|probability tensor contains|invalid multinomial|[Pp]robabilities contain NaN")
_NUMBERS = ("grad_norm", "loss", "pg_loss", "kl", "entropy", "policy_kl")


def _of_numbers_before(dead: Finding, ends: list[Told], log: RunLog) -> Finding | None:
    """The end again, where an assertion on the GPU follows a step whose metrics are not finite: the weights are not,
    and what is drawn from their probabilities is none. None of any other end.
    """
    if not any(_SAMPLING.search(one.text) for one in ends):
        return None
    bad = []
    for series in (each for name in _NUMBERS for each in log.all(name)[:1]):
        points = series.points[-3:]
        if points and not math.isfinite(points[-1].value):
            bad.append((series, next(p for p in points if not math.isfinite(p.value))))
    if not bad:
        return None
    first, point = min(bad, key=lambda each: -1 if each[1].step is None else each[1].step)
    names = ", ".join(series.name for series, _ in bad)
    return replace(
        dead,
        claim=f"{names} {'is' if len(bad) == 1 else 'are'} not finite at step {point.step}, and the run died of it at "
        f"line {dead.where.line}: {_words(next(one for one in ends if _SAMPLING.search(one.text)))}",
        evidence=(first.shown_at(point, "a finite number"), *dead.evidence),
        cause="an update with a gradient that is not finite made the weights NaN, and sampling from their "
        "probabilities "
        "fails an assertion of the GPU's kernel: the crash is what follows, no index out of range; gradients that are "
        "not clipped (max_grad_norm), a learning rate too high, a ratio or KL that overflows, 0/0 in a group without a "
        "spread",
        next_step="clip the gradient (max_grad_norm=1), skip steps whose norm is not finite; rldbg record -- YOUR "
        "COMMAND from a checkpoint before that step names the first tensor",
    )


_NUMBER = regex(r"(?i)engine ?#?(\d{1,4})\b")
#: What lines tell of an engine that answers no more, by the key of the table of lines.
_SILENT = "running.engine"


def _which_engine(dead: Finding, causes: list[Told], log: RunLog) -> Finding:
    """The end again, with the number of the engine that answered no more behind it, and whether it was started again:
    where what died is an engine's.
    """
    if not any(_ENGINE.search(one.text) for one in causes):
        return dead
    path, line = dead.where.path, dead.where.line or 0
    lost = [
        one for one in log.events("told_running")
        if one.point.path == path and abs((one.point.line or 0) - line) <= _SOON and key_of(one.text) == _SILENT
    ]  # fmt: skip
    found = _NUMBER.search(lost[0].text) if lost else None
    if found is None:
        return dead
    again = any((one.point.line or 0) > (lost[0].point.line or 0) for one in log.events("engine_again"))
    said_so = f"engine {found[1]}" + ("" if again else ", and it was not started again")
    return replace(
        dead,
        claim=f"{dead.claim} ({said_so})",
        evidence=(*dead.evidence, shown("which engine", lost[0].text[:160], None, f"line {lost[0].point.line}")),
    )


_RESUME = "resume from the last checkpoint"
#: What trainers call the steps from one checkpoint to the next; and torchtune's epochs.
_SAVES = ("save_freq", "save_steps", "save_interval", "save_every_n_steps", "ckpt_interval", "checkpoint_interval",
          "save_period")  # fmt: skip
_SAVES_EPOCHS = "save_every_n_epochs"


def _without_a_checkpoint(dead: Finding, log: RunLog) -> Finding:
    """The end again, without the advice to go on from a checkpoint where the run's settings say that none was due."""
    if _RESUME not in dead.next_step:
        return dead
    every, epochs = log.algorithm.number(*_SAVES), log.algorithm.number(_SAVES_EPOCHS)
    steps = [p.step for one in log.signals() for p in (one.points[0], one.points[-1]) if p.step is not None]
    begun_anew = log.is_counted or min(steps, default=0) > 1
    if every is not None and not begun_anew and (every <= 0 or max(steps, default=0) < every):
        why = f"{next(name for name in _SAVES if log.algorithm.number(name) is not None)} = {every:g}"
    elif epochs is not None and epochs >= 1 and not begun_anew:
        why = f"{_SAVES_EPOCHS} = {epochs:g}: only as an epoch ends, and within the first there is none"
    else:
        return dead
    return replace(
        dead,
        next_step=dead.next_step.replace(
            f"or save often enough to go on: {_RESUME}",
            f"and save more often: by the run's settings no checkpoint may be there to go on from ({why})",
        ).replace(
            _RESUME, f"look first whether there is a checkpoint: by the run's settings there may be none ({why})"
        ),
    )


#: Lines of a traceback and what stands beside it, within which a silence ends where it is what came before.
_NEXT = 100
#: How many times the longest step a silence is before it is none of a step's own.
_SILENT_TIMES = 3.0


def _behind_a_silence(dead: Finding, log: RunLog) -> Finding:
    """The end again, with how long the log was silent before it: 15 minutes and more, and 3 times its longest step."""
    for one in log.events(PROGRESS):
        told = next((line.split()[1:] for line in one.text.splitlines()[1:] if line.startswith("silent ")), [])
        if len(told) != 3 or one.point.path != dead.where.path or dead.where.line is None:
            continue
        seconds, begins, ends = map(int, told)
        step = log.get("step_seconds")
        longest = max(step.finite if step is not None else [], default=0.0)
        if seconds >= max(LONG, _SILENT_TIMES * longest) and 0 <= dead.where.line - ends <= _NEXT:
            claim = f"{dead.claim.rstrip('.')}, after {in_words(seconds)} without a line"
            return replace(dead, claim=claim, evidence=(
                *dead.evidence, shown("silence before it", in_words(seconds), None, f"lines {begins} and {ends}"),
            ))  # fmt: skip
    return dead


def _of_a_hang(dead: Finding, causes: list[Told], log: RunLog) -> Finding | None:
    """The end again, where the run was ended from outside after it had long come no further: the hang is what failed,
    and that somebody or the scheduler ended it is how that ended.
    """
    one = causes[0]
    if not (_SIGTERM.search(one.text) or _BY_HAND.search(one.text) or _HUNG_UP.search(one.text)):
        return None
    wait = waited_until(one, log)
    if wait is None:
        return None
    first, last = wait.lines[0].point, wait.lines[-1].point
    step = "before the first logged step" if first.step is None or log.is_counted else f"after step {first.step}"
    return replace(
        dead,
        severity="error",
        claim=f"the run hung {step}: it only waited{wait.how_long} (lines {first.line} to {last.line}, "
        f"{wait.words[:120]!r}), and was then ended from outside at line {one.point.line}: {_words(one)}",
        where=first.where(),
        evidence=(
            shown("line", wait.words[:200], None, f"line {first.line}"),
            *([shown("beside it", wait.beside, None, "log")] if wait.beside else []),
            *([shown("seconds without a step", wait.seconds, f"< {LONG:g}")] if wait.seconds is not None else []),
            shown("how it ended", said(one)[:200], None, f"line {one.point.line}"),
        ),
        cause="the trainer waits for samples that never come: generation made fewer than a step needs and starts no "
        "more (a worker that ended or is stuck, requests that never return, samples that were lost or dropped as too "
        "old while a limit on those in flight still counts them)"
        if wait.is_for_samples
        else "a hang or a deadlock: what it waits for has ended or never comes, and nothing times out; the end from "
        "outside is no cause",
        next_step="at the next hang, before it is ended: py-spy dump --pid PID of the trainer and of every rollout "
        "worker shows where each stands; look at the last line of each worker's own log",
    )


def _told_elsewhere(ends: list[Told], log: RunLog) -> list[Told]:
    """The ends, or where only a traceback without its exception is one, what known text stands before or behind it."""
    if any(UNTOLD not in one.text for one in ends):
        return ends
    beside = [one for one in log.events("waiting", "notice") if (known := failure_of(said(one))) and not known.general]
    return [replace(beside[-1], text="\n".join([said(beside[-1]), *ends[0].text.splitlines()[1:]]))] if beside else ends


def _is_preempted(one: Told) -> bool:
    """Whether a scheduler ended it: a run that goes on from its checkpoint after that is as it should be."""
    text = one.text
    # A launcher ends its processes because one of them failed.
    return (
        one.kind == "killed"
        and _SIGTERM.search(text) is not None
        and SIGKILL.search(text) is None
        and "Sending process" not in text
    )


def _refused(one: Told, log: RunLog) -> Finding:
    """A log that ends with a line of error: the program, or the script around it, has given up there."""
    known, begun = failure_of(said(one)), bool(log.last_lines())
    return finding(
        "warning" if begun else "error",
        f"the log ends with an error at line {one.point.line}"
        + ("" if begun else ", and no step was taken")
        + f": {f'{in_short(known.cause)}: ' if known is not None else ''}{_words(one)}",
        one.point.where(),
        shown("line", said(one)[:200], None, f"line {one.point.line}"),
        link="dump",
        cause=known.cause
        if known is not None
        else "the program, or the script that starts it, checked something and stopped: the line says what is missing",
        next_step=known.next_step
        if known is not None
        else "do by hand what the line says (start the server, give the file or the setting), then start the run again",
        steps=steps_of([one.point]),
    )


def _behind_its_end(dead: Finding, log: RunLog) -> Finding:
    """The end again, where the training was over before it: what is lost is what came after."""
    path, line = dead.where.path, dead.where.line or 0
    over = [one for one in log.events("finished") if one.point.path == path and (one.point.line or 0) < line]
    starts = [one.point.line or 0 for one in log.events("started") if one.point.path == path]
    if not over or any((over[-1].point.line or 0) < at < line for at in starts):
        return dead
    done = over[-1]
    _, _, what = dead.claim.partition(": ")
    return replace(
        dead,
        claim=f"the training had finished (line {done.point.line}), and the job failed after it at line {line}: {what}",
        evidence=(*dead.evidence, shown("line of its end", said(done)[:160], None, f"line {done.point.line}")),
        next_step=f"look whether the last checkpoint is whole: the training need not be run again; {dead.next_step}",
    )


def _dead(
    ends: list[Told], *, went_on: bool, counted: bool, every: list[Told] | None = None, stated: str = ""
) -> Finding:
    """`every`: what else of it is told, beside the ends that a cause is looked for in. `stated`: the run's settings."""
    told, every = every or ends, ends
    # Of what one failure writes, the line that names a cause: a writer that fails half-way hides a full disk, the head
    # of a list of weights that do not fit the empty one.
    one = next((each for each in every if _NAMES_IT.search(each.text)), None) or min(every, key=tells)
    # Of several processes that say the same, the lines of one may be torn apart by another's: one has its frames.
    if one.kind == "traceback" and not raised(one).frames:
        one = next((each for each in every if said(each) == said(one) and raised(each).frames), one)
    # NCCL's watchdog also tells of a kernel that failed, which is no wait.
    where = raised(one)
    failed = "CUDA error" in one.text
    hang = _hang(every) if one.kind == "nccl" and not failed else None
    cause, next_step = _blamed(one) if hang is None else (hang.cause, _WHO_IS_MISSING)
    if cause in (_UNCAUGHT, (unknown(one, where) or (_UNCAUGHT,))[0]) and any(
        _ENGINE.search(each.text) for each in every
    ):
        cause = "the inference engine died (vLLM's EngineCore, a scheduler of SGLang), and generation with it"
    by_hand, untold = _BY_HAND.search(one.text) is not None, UNTOLD in one.text
    # Lines without a number are counted: that count is no step.
    step = (
        "before the first logged step"
        if one.point.step is None
        else f"after line {one.point.step + 1} of metrics"
        if counted
        else f"after step {one.point.step}"
    )
    if (bar := _AT.search(one.text)) is not None:
        step += f", at {bar[1]} of its bar"
    if one.kind == "traceback" and (judge := _judge(one)) is not None:
        (cause, next_step), short = judge, in_short(judge[0])
    elif one.kind == "traceback" and (together := with_code(one, where)) is not None:
        short, cause, next_step = together
    elif (
        one.kind == "traceback"
        and (
            told_of := setting_too_large(said(one)) or with_values(one, where, stated) or _by_itself(one, where, stated)
        )
        is not None
    ):
        short, cause, next_step = told_of.short, told_of.cause, told_of.next_step
    elif cause == _KEY and any(_SYNCS.search(each.text) for each in every):
        short, cause, next_step = _UNKNOWN_WEIGHT
    elif _LOADS.search(one.text) and _unlike(one) and any(_SYNCS.search(each.text) for each in told):
        short, cause, next_step = _UNFIT_WEIGHT
    else:
        short, cause, next_step = _in_code(one, cause, next_step)
        if short == _DIVIDES and (numbers := not_divisible(said(one), stated)):
            short = f"{short}: {numbers}"
        if (unknown(one, where) == (cause, next_step) or cause == _MISFITS) and (own_words := advice(said(one))):
            next_step = f"as it says: {own_words[:200].rstrip('.')}; {next_step}"
    if one.kind == "traceback" and where.frames and not by_hand:
        # What is not known of, or only how it failed, is told by what the run was doing.
        if unknown(one, where) == (cause, next_step):
            short = where.words
        elif where.doing and (known := failure_of(said(one))) is not None and known.general and known.cause == cause:
            short += f" ({where.doing})"
    is_told = one.kind not in ("cuda_error", "traceback") or "engine" in f"{short} {cause}"
    if not is_told and any(_ENGINE_DEAD.search(each.text) for each in told):
        short, cause = f"{short} (in the inference engine)", f"{cause}; the inference engine died of it"
    whose = dict.fromkeys(found[1] for each in every if (found := _WHOSE.search(each.text)))
    what = hang.claim if hang is not None else _stands(every) or ("" if cause == _UNCAUGHT else short)
    if one.kind != "killed" and "ChildFailedError" in one.text and (who := _ranks_of(every)):
        what = f"{what} ({who})"
    if GUESSES.search(one.text) and whose:
        what = f"{what} ({', '.join(whose)})"
    words = what if hang is not None else f"{what}: {_words(one)}" if what and not untold else _words(one)
    if (untold or said(one) == "AssertionError") and (code := _last_frame(one)[1]):
        words += f", in `{code[:100]}`"
    hung = hang is not None or _HUNG.search(one.text) is not None
    how = "was stopped by hand" if by_hand else "hung" if hung else "did not begin" if _not_begun(one) else "died"
    return finding(
        "warning" if by_hand or untold else "error",
        f"the run {how} at line {one.point.line}, {step}{', and was started again' if went_on else ''}: {words}",
        one.point.where(),
        shown("line", one.text.splitlines()[0][:200], None, f"line {one.point.line}"),
        *_frame(one),
        *(shown(f"{rank} waited in", what) for rank, what in (hang.waits if hang else ())),
        *_beside(one, told),
        shown("lines that tell of an end", len(told), "0", "log"),
        # What else is wrong may be its cause.
        link="time" if untold or by_hand else "",
        cause=cause,
        next_step=next_step,
        steps=steps_of([one.point]),
    )


_NOT_BEGUN = regex(r"\bFailedScheduling\b|ImagePull|Failed to pull image|Job supervisor actor")


def _not_begun(one: Told) -> bool:
    """Whether its job was never placed on a node: none of it has run."""
    return one.point.step is None and _NOT_BEGUN.search(one.text) is not None


#: Rows of the table that take a name or a type for what it need not be: what the text tells by itself goes before them.
_TAKEN = regex(
    r"^\w*(?:Trainer|Config)\b|unexpected keyword|'\w+' object has no attribute|not implemented for|CUDA (?:is )?|GPU"
    r"|out of bounds|expected (?:scalar|dtype)|Unauthorized|Forbidden|401|403|non-empty"
    r"|expanded size"
)


def _by_itself(one: Told, where: Raised, stated: str) -> Misfit | None:
    """What its words tell by themselves, where the table has no particular row for them."""
    told, known = by_itself(one, where, stated), failure_of(said(one))
    vague = known is None or known.general or (known.cause == _MISFITS and misfit(one.text) is None)
    return told if vague or _TAKEN.search(said(one)) else None


class _Hang(Struct, frozen=True):
    """Which ranks waited in which collective, in words."""

    claim: str
    cause: str
    waits: tuple[tuple[str, str], ...]


_WHO_IS_MISSING = (
    "the first error of a rank that did not wait is the cause; TORCH_NCCL_TRACE_BUFFER_SIZE=2000 "
    "TORCH_NCCL_DUMP_ON_TIMEOUT=1 writes what every rank was doing; raise the timeout only where a step is that long"
)


def _are_a_node(ranks: list[int], every: int) -> bool:
    """Whether these ranks are those of one node of several, whose log may lie elsewhere."""
    size = len(ranks)
    return size > 1 and ranks[-1] - ranks[0] == size - 1 and ranks[0] % size == 0 and every % size == 0


def _hang(every: list[Told]) -> _Hang | None:
    """What the watchdogs tell: each rank's collective and its number in the rank's queue."""
    ranks: dict[tuple[str, int], list[int]] = {}
    longest = 0.0
    for one in every:
        waited, rank = _WAITED.search(one.text), _rank(one)
        if waited is None:
            continue
        known = ranks.setdefault((waited["op"], int(waited["number"])), [])
        if rank is not None and rank not in known:
            known.append(rank)
        if took := _MILLISECONDS.search(one.text):
            longest = max(longest, int(took[1]) / 1000)
    if not ranks:
        return None
    waits = tuple((_these(found), f"{op}, its collective {number}") for (op, number), found in ranks.items())
    (op, number), found = min(ranks.items(), key=lambda each: each[0][1])
    who = _these(sorted({rank for some in ranks.values() for rank in some}))
    if len(ranks) == 1:
        missing = sorted(set(range(max(found, default=0))) - set(found))
        if missing and 3 * len(missing) <= len(found) and not _are_a_node(missing, max(found) + 1):
            are = "is the one rank" if len(missing) == 1 else "are the ranks"
            return _Hang(
                f"{who} waited {longest:.0f} s in {op} (collective {number}), and {_these(missing)} did not join",
                f"{_these(missing)} {are} below {max(found)} that did not wait: it never came to {op} (it stalled, "
                "died before, took another path, as a batch it skips, or called another collective), or its log is not "
                "here; a step that a launcher or scheduler cancels behind it is its end, and no cause",
                waits,
            )
        return _Hang(
            f"{who} waited {longest:.0f} s in {op} (collective {number}) for the others",
            f"a rank that is not among them never came to {op}: it stalled, died before, or called another collective; "
            "where every rank is among them, the network",
            waits,
        )
    if len({op for op, _ in ranks}) > 1 and len({number for _, number in ranks}) == 1:
        apart = "; ".join(f"{_these(some)} called {each}" for (each, _), some in ranks.items())
        return _Hang(
            f"ranks called different collectives at the same place ({number}): {apart}",
            "the ranks took different paths: a branch on data of the rank, another number of micro-batches",
            waits,
        )
    # Numbers count the collectives of one process group: of another operation they may be another group's.
    where = "behind" if len({op for op, _ in ranks}) == 1 else "elsewhere"
    are = "are" if len(found) > 1 else "is"
    return _Hang(
        f"{who} waited up to {longest:.0f} s; {_these(found)} {are} {where}, in {op} (collective {number})",
        f"{_these(found)} stalled, or did less than the others (fewer micro-batches, a longer sequence); collectives "
        "of different process groups are counted apart",
        waits,
    )


#: A line of a stack that a hanging process stands in, as py-spy writes it: function (file:line).
_STANDS = regex(r"^\s*(\w+) \((\S+):\d+\)$")
#: Where an engine copies what it is sent into its own tensors, and the two shapes that do not fit.
_LOADS = regex(r"weight_loader|load_weights?\b|update_weights?_from|update_parameter")
_SIZES = regex(r"torch\.Size\(.*torch\.Size\(|size of tensor a \(|shape mismatch|expected shape")
#: An assertion in the engine's own code that two tensors are of one size, which has no words.
_ASSERTS = regex(r"^assert .*(?:\.size\(|\.shape\b|\.numel\()")
_UNFIT_WEIGHT = (
    "the trainer's weights do not fit the engine's: a tensor that is sent has another shape",
    "the update of the engine's weights failed: engine and trainer hold different models or configurations (another "
    "checkpoint, number of heads, padded vocabulary, tensor-parallel size); what was sent before it is in the engine, "
    "whose weights are of two models now",
    "compare the configuration that the engine was started with (model_path) with the trainer's own; then the shape of "
    "the tensor that is named",
)
_SYNCS = regex(r"update_named_param|update_weight|sync_weight|_to_vllm|_to_sglang|broadcast_(?:to|param|weight)"
    r"|weight_sync|load_weights|full_tensor")  # fmt: skip


def _unlike(one: Told) -> bool:
    """Whether it tells of two tensors that are not of one shape, in words or by the assertion that failed."""
    bare = said(one).startswith("AssertionError") and _ASSERTS.search(_last_frame(one)[1]) is not None
    return bare or _SIZES.search(said(one)) is not None


def _stands(every: list[Told]) -> str:
    """Where hanging processes stand, in words; empty where no stack tells."""
    frames = [found for one in every if (found := _STANDS.search(one.text.splitlines()[0]))]
    syncs = [found for found in frames if _SYNCS.search(found[1])]
    calls = list(dict.fromkeys(found[1] for found in frames if found not in syncs))
    if not frames:
        return ""
    where = " inside the weight synchronisation from trainer to engine" if syncs else ""
    if len(calls) > 1:
        return f"processes wait in different collectives ({', '.join(calls)}){where}: a deadlock"
    return f"a process waits in {(calls or [frames[0][1]])[0]}{where}"


def _ranks_of(every: list[Told]) -> str:
    """The ranks of torchrun's table of failures, with their exit codes."""
    ranks = [found[1] for one in every if (found := _OF_RANK.search(one.text))]
    codes = [found[1] for one in every if (found := _ITS_CODE.search(one.text))]
    return ", ".join(f"rank {rank} with exit code {code}" for rank, code in zip(ranks[:4], codes[:4], strict=False))


def _rank(one: Told) -> int | None:
    found = _RANK.search(one.text)
    return int(found[1]) if found else one.point.rank


def _these(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed(sorted(ranks))}" if ranks else "a rank"


_AT = regex(r"^.{0,400}\b(\d+/\d+) \[[\d:]+<[\d:?]+, [^\]]{0,40}(?:it/s|s/it)\]")
_BAR = regex(r"^.{0,400}?(?:it/s|s/it)[^\]]{0,200}\]\s*(?=\S)")


#: A path of many folders, and its last two names.
_PATH = regex(r"(?<![\w.:/])/(?:[^\s/'\":]{1,80}/){3,30}([^\s/'\":]{1,80}/[^\s/'\":]{1,80})")


def _words(one: Told) -> str:
    first, *more = one.text.splitlines()
    first = _BAR.sub("", first)
    # "Error(s) in loading state_dict for Model:" says what on the lines below.
    below = next((line.strip() for line in more if line.strip() and not line.lstrip().startswith("File ")), "")
    text = f"{first} {below}" if first.rstrip().endswith(":") and below else first
    # Which fields of a configuration are wrong is what there is to say.
    text, most = text.removeprefix("pydantic_core._pydantic_core."), 240 if "validation error" in text else 120
    if len(text) > most:
        text = _PATH.sub(lambda path: f".../{path[1]}", text)  # what is wrong with it stands behind it
    return text if len(text) <= most else text[: most - 3] + "..."


def _frame(one: Told) -> list[Evidence]:
    frame, code = _last_frame(one)
    line = f"line {one.point.line}"
    return [shown(name, text[:160], None, line) for name, text in (("last frame", frame), ("code", code)) if text]


def _last_frame(one: Told) -> tuple[str, str]:
    """The last frame's file, and its line of code; empty where there is none."""
    frames = one.text.splitlines()[1:]
    last = next((at for at in reversed(range(len(frames))) if frames[at].startswith("File ")), None)
    return ("", "") if last is None else (frames[last], " ".join(frames[last + 1 : last + 2]))


_SHAPES, _DIVIDES = "shapes do not fit", "numbers do not divide"
#: What the table says of a name, an argument or a module that is not there.
_MISFITS = known.cause if (known := failure_of("has no attribute")) is not None else ""
_PARALLEL = regex(r"initialize_model_parallel|DeviceMesh|init_device_mesh|arange\(world_size\)")
#: What the table says of a bare KeyError, and what it means where weights are sent.
_KEY = known.cause if (known := failure_of("KeyError")) is not None else ""
_UNKNOWN_WEIGHT = (
    "the engine does not know the name of a weight that is sent to it",
    "weights that were sent to the engine are not named as its model's: names of an adapter (LoRA) or a wrapper "
    "(base_model.model, _fsdp_wrapped_module), fused against split projections, or a model the engine lays otherwise",
    "compare the names: rldbg weights; merge the adapter before the weights are sent",
)
#: No sequence is as long, and vocabularies are.
_VOCABULARY = 30000
_OF_NONE = regex(r"'NoneType' object has no attribute '(\w+)'")
_BARE = regex(r"^(?:\w+\.)*AssertionError[\W\d]*$")
#: A file that is not there, where a program was to be started; and what the frames say of which.
_ABSENT = regex(r"^FileNotFoundError|RayTaskError\(FileNotFoundError\)")
_STARTS = regex(r"subprocess_exec|create_subprocess|subprocess\.py|_execute_child|Popen")
_PROGRAMS = regex(r"(docker[_ ]compose|docker|podman|apptainer|singularity|kubectl|git|nvcc|ninja|gcc|node|npm|ffmpeg"
    r"|lean|"
                  r"lake|bwrap|firejail|java|tmux|rsync|ssh|nsjail|conda)(?=[_\W])")  # fmt: skip
_VIEWED = regex(r"shape '\[([\d, -]+)\]' is invalid for input of size ([1-9]\d*)")
_TWO_SIZES = regex(r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)")


def _misfit_of(shape: str, there: int) -> str:
    """How a shape and the numbers that it is to hold misfit, in words."""
    counts = [int(each) for each in re.findall(r"-?\d+", shape)]
    holds = math.prod(each for each in counts if each != -1)
    if -1 in counts and holds > 0:
        return f"[{shape}] takes a multiple of {holds:,} numbers, and {there:,} is no multiple of {holds:,}"
    part = ""
    if 0 < holds != there:
        part = f", {there / holds:g} times as many" if there > holds else f", {holds / there:g} times fewer"
    return f"[{shape}] holds {holds:,} numbers, and there are {there:,}{part}"


def _in_code(one: Told, cause: str, next_step: str) -> tuple[str, str, str]:
    """The cause in a few words and whole, and the next step, with what the last line of code and sizes tell of them."""
    short, code, asked = in_short(cause), _last_frame(one)[1], _OF_NONE.search(one.text)
    if cause == _MISFITS and (told := misfit(one.text)) is not None:
        return told.short, told.cause, told.next_step
    if asked and (named := re.search(rf"(\w+(?:\.\w+)*)\.{asked[1]}\b", code or one.text.partition(", in ")[2])):
        short = f"{named[1]} is None where its {asked[1]} is asked for"
        if "logits" in named[1]:
            cause = (
                f"the model returned no logits (fused kernels or a chunked loss leave them out, another head): {cause}"
            )
    elif _BARE.search(said(one)) and code.startswith("assert "):
        if (known := failure_of(code)) is not None and not known.general:
            return in_short(known.cause), known.cause, known.next_step
        short = f"a condition of the code does not hold, `{code[:100]}`"
        if "%" in code and (numbers := not_divisible(said(one), "")):
            short = f"{_DIVIDES}: {numbers}, in `{code[:100]}`"
    elif _ABSENT.search(said(one)) and _STARTS.search(one.text):
        called = _PROGRAMS.search(one.text)
        program = called[1].replace("_", " ").strip() if called else ""
        return (
            f"a program that is to be started is not installed there{f' ({program})' if program else ''}",
            "a subprocess is to be started and its program is not found on this node, or not in the PATH of the worker"
            + (f": {program}, by the function that starts it" if program else "")
            + " (a tool's sandbox, a compiler, a container's command)",
            f"which {program.split()[0] if program else 'PROGRAM'} on the node that failed, in the worker's own "
            "environment; install it in the image, or choose an environment that does not need it",
        )
    elif short == _SHAPES and _PARALLEL.search(one.text):
        return (
            "the parallel sizes do not make the number of processes",
            "tensor, pipeline and data parallel sizes are not the world size: the engine takes the trainer's process "
            "group (its WORLD_SIZE, or a group that is there already) for its own, or a size does not divide it",
            "give the engine processes (and RANK, WORLD_SIZE) of its own, or the external launcher's form; compare TP "
            "x PP x DP with the world size",
        )
    elif short == _SHAPES and (viewed := _VIEWED.search(one.text)) is not None:
        short += f": {_misfit_of(viewed[1], int(viewed[2]))}"
        short += f" (in `{code[:100]}`)" if code else ""
    elif short == _SHAPES:
        sizes = _TWO_SIZES.search(one.text)
        small, large = sorted(map(int, sizes.groups())) if sizes else (0, 0)
        if small >= _VOCABULARY and large < 1.1 * small:
            return (
                f"two vocabularies of {large} and {small}",
                "the model's vocabulary and the tokenizer's (or another model's, such as the reference or the teacher) "
                f"are of two sizes: padded embeddings or added tokens; {cause}",
                "cut the logits to the smaller of both, or resize_token_embeddings of both to one size",
            )
        short += (f" in `{code[:100]}`" if code else "") + (f" ({large} against {small})" if small > 1 else "")
        if small > 1 and large == small + 1:
            cause = (
                "they differ by one: one of them is shifted by a token (log-probabilities are of the next token, of a "
                f"sequence without its first) and the other is not; or {cause}"
            )
        elif small > 1 and large % small == 0:
            cause = (
                f"{large} is {large // small} times {small}, so that one of them was gathered over ranks or repeated "
                f"per generation, and the other was not; or {cause}"
            )
        elif small > 1 and large > 2 * small:
            cause = f"one is over other tokens than the other (a whole or packed row against its response); or {cause}"
    return short, cause, next_step


_UNCAUGHT = "an exception that nobody caught"
#: Frames of a reward function: its file or its name. A library's checks of its own arguments are none.
_LIBRARY = regex(r"/(?:vllm|sglang|torch|transformers|ray|pydantic\w*|omegaconf|deepspeed|accelerate)/")
_JUDGE = regex(
    r"(?i)File \"[^\"]*(?:reward|verifier|grader|judge|scor(?:e|er|ing))(?:\w*|s?(?:_\w+)?/\w+)\.py\""
    r"|, in \w*(?:compute_score|reward|verify|judge|grade_|score_)\w*$"
)
_NAMED = regex(r"(?i)\b\w*(?:reward|compute_score|verify|judge|grade)\w*\(\) (?:missing|got an unexpected|takes)")
#: Where verl chooses a reward by the data's source.
_CHOOSES = regex(r"reward_score/__init__\.py\"|, in _(?:default_compute|select_rm)_score")
_LACKS = regex(r"^KeyError\b|missing \d+ required (?:positional|keyword)")
_GIVEN = regex(r"unexpected keyword argument|takes \d+ positional")
_RAISED = regex(r"^(?:[\w.]*\.)?(?:Index|Type|Attribute|Value|ZeroDivision|Recursion|JSONDecode|Parse|Syntax)Error")
#: What a trainer says of rewards that it cannot put into a tensor.
_RETURNED = regex(r"must be real number, not|expanded size of the tensor|too many dimensions|not iterable|no len\(\)")
_GATHERS = regex(r", in _?(?:calculate|compute|gather|get|score)\w*reward\w*$")
#: A list where a text is meant, and the other way round.
_LISTS = regex(
    r"can only concatenate (?:list \(not \"?str|str \(not \"?list)|expected str.{0,20}(?:list|dict)"
    r"|(?:list|dict)' object has no attribute '(?:strip|split|lower|replace|startswith|find|encode)'"
    r"|expected string or bytes-like object, got '(?:list|dict)"
)
#: Words of failures that have a cause of their own wherever they are raised.
_ELSEWHERE = regex(
    r"(?i)timed? ?-?out|connect|memory|CUDA|network|http|signal|pickle|No module|import|rate limit|size of tensor"
)


def _judge(one: Told) -> tuple[str, str] | None:
    """Cause and next step of an exception that the reward function raises on what it is given; None of any other."""
    first, *frames = one.text.splitlines()
    own = [frame for frame in frames if frame.startswith("File ")]
    # What parses an answer raises below the function that asks it to.
    if own and not _LIBRARY.search(own[-1]) and (caller := raised(one).own) is not None:
        own = [f'File "{caller.file}", line {caller.line}, in {caller.function}']
    called = _NAMED.search(first) is not None
    if not called and (not own or not _JUDGE.search(own[-1]) or _LIBRARY.search(own[-1]) or _ELSEWHERE.search(first)):
        return None
    if first.strip() == "NotImplementedError" and own and _CHOOSES.search(own[-1]):
        return (
            "no reward function for the sample's data_source: it is empty or none that the built-in rewards know",
            "set data_source in the data set to a known name, or custom_reward_function.path and .name to a function "
            "of your own",
        )
    if _LACKS.search(first):
        return (
            "the reward function needs what the sample does not have: a column of the data set (or a key of its "
            "extra_info) that is missing or named otherwise",
            "print one sample's keys; rename the column, or read it by .get and say so where it is missing",
        )
    if _GIVEN.search(first):
        return (
            "the reward function is called with arguments that it does not take: every column of the data set, and "
            "what this version of the trainer adds, comes as a keyword",
            "let it take **kwargs; compare its signature with the version's documentation",
        )
    if own and _GATHERS.search(own[-1]) and _RETURNED.search(first):
        return (
            "the reward function does not return one number for each response: None, a list of another length, or "
            "lists in it",
            "call it by hand on one batch, and print what it returns; a branch without a return gives None",
        )
    if _LISTS.search(first):
        return (
            "the reward function is handed lists where it expects texts: a prompt or a response comes as messages "
            "(role "
            "and content) or tokens",
            "print the types of what the frame puts together; take the content of the last message, or apply the chat "
            "template first",
        )
    if not _RAISED.search(first) or "trainer" in own[-1]:
        return None
    return (
        "the reward function raises on a response or a sample: a form of answer it does not expect",
        "call it by hand on the sample that it fails on; catch it, count it, and do not score it 0 in silence",
    )


def _beside(one: Told, told: list[Told]) -> Iterator[Evidence]:
    """The exceptions it is joined to, and the run's own code where a library raised it."""
    where = raised(one)
    if where.own is not None and where.own is not where.last:
        yield shown("called by", f"{where.own.place}: {where.own.code}"[:160], None, f"line {one.point.line}")
    others = dict.fromkeys(_words(other) for other in earlier(one, told))
    for words in list(others)[:2]:
        if words != _words(one):
            yield shown("of the same chain", words[:160], None, "log")


def _blamed(one: Told) -> tuple[str, str]:
    """Cause and next step."""
    if waited_in_vain(one) and not (known := failure_of(said(one)) if _GONE.search(one.text) else None):
        return (
            "a collective was never joined by every rank: one stalled, died before, or called another",
            _WHO_IS_MISSING,
        )
    if (known := failure_of(said(one))) is not None and one.kind != "killed":
        return known.cause, known.next_step
    if one.kind in ("cuda_error", "nccl"):
        return (
            "a kernel failed; kernels run later than the line that names them",
            "CUDA_LAUNCH_BLOCKING=1 names the true line; compute-sanitizer the access",
        )
    if one.kind == "killed":
        if _POD.search(one.text):
            return (
                "the worker may have exceeded the memory limit of its Kubernetes pod, as Ray says: out of host memory",
                "kubectl describe pod (OOMKilled); raise resources.limits.memory, or keep less on the host (offload, "
                "data workers, Ray's object store)",
            )
        if (found := _SCHEDULED.search(one.text)) is not None:
            why = found[1].replace("_", " ").lower()
            return (
                f"the scheduler ended the job: {why}" + (", its time is over" if "time" in why else ""),
                "ask for more time (--time), or save often enough to go on: resume from the last checkpoint"
                if "time" in why
                else "resume from the last checkpoint; the scheduler's record of the job (sacct -j JOB) says more",
            )
        if GUESSES.search(one.text):
            return (
                "a worker process of Ray ended without a word: Ray does not know why, and lists what it may have been "
                "(the kernel's OOM killer for host memory, ray stop, a crash in native code)",
                "its own log (/tmp/ray/session_latest/logs/worker-*PID*.err) and the lines before; dmesg | grep -i oom",
            )
        if SIGKILL.search(one.text):
            return (
                "killed by SIGKILL from outside, most often by the kernel: out of host memory",
                "dmesg | grep -i oom; watch host memory",
            )
        if _CORRUPT.search(one.text):
            return (
                "native code crashed: memory of its heap was overwritten or freed twice, or it uses instructions that "
                "this processor lacks; a compiled package of another torch, CUDA or libc, most often",
                "python -X faulthandler names the call; reinstall the package it names against this torch; without "
                "tcmalloc or jemalloc preloaded",
            )
        if _BY_HAND.search(one.text):
            return "interrupted by hand (SIGINT, Ctrl-C)", "nothing is wrong, if it was you; else who sent the signal"
        if _HUNG_UP.search(one.text):
            return (
                "the terminal was closed (SIGHUP), and the run with it: a connection that broke, a session that ended",
                "start it under nohup, tmux, screen or setsid",
            )
        if _SIGTERM.search(one.text):
            return (
                "ended from outside: the scheduler's limit or a preemption, or a launcher after another rank failed",
                "the first error of any other rank; else the scheduler's own record of the job",
            )
        if _OF_RANK.search(one.text) or _ITS_CODE.search(one.text) or _BY_ITSELF.search(one.text):
            return "the launcher saw a process fail and ended the others", "the log of the process that failed first"
        return "native code crashed, or the launcher saw a process fail", "the log of the process that failed first"
    if (known := failure_of("\n".join(one.text.splitlines()[-12:]))) is not None:
        return known.cause, known.next_step  # its frames tell
    return unknown(one, raised(one)) or (
        _UNCAUGHT,
        "the frames above the line; rldbg record -- YOUR COMMAND keeps the steps that lead there",
    )


_CLOCK = regex(r"\b(\d{1,2}):(\d{2}):(\d{2})\b")
#: A wait's limit, as it tells it, and what share of it is no short wait.
_LIMIT = regex(r"(\d+) ?s\w* out of (\d+)")
HALF = 0.5
_ELAPSED = regex(r"\[([\d:]+)(?:<|, )\?")
_FOR = regex(r"(?<!out of )\b(\d{2,7}(?:\.\d+)?)\s?(s|sec|secs|seconds|min|mins|minutes|h|hours)\b")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@rule("L26", "the run waits and goes no further", link="time", scope="signals",
      needs=("event:waiting|event:stalled|event:phase|event:begins|event:succeeded|event:debugger",),
      source="prime-rl#2912: an orchestrator that waits for a policy after the trainer has finished")  # fmt: skip
def waits(log: RunLog) -> Iterator[Finding]:
    """Lines that tell of waiting (the same words, 5 and more) after the last metric, over 15 minutes and more by their
    clock or by what they say, or 20 and more without one (and 3 times as many as between steps before): a warning. Of a
    wait that tells its limit half of it is enough; one for a server that is not up is worth knowing from the first line
    on, where no metric came. So is a bar of data preparation (Map, Filter) that stands at 0 after 10 minutes and more.
    A phase that slime's timers began and did not end, in a log without an end of the run, is worth knowing; so is a bar
    of steps that stands at 0 in a log metric. A job that succeeded in a log without a metric is a warning; and so is a
    debugger that waits for somebody.
    """
    last = log.last_lines()
    yield from _stands_at_0(log)
    yield from _in_debugger(log)
    yield from _begun(log)
    over = log.events("succeeded")
    if over and not last:
        yield warning(
            "the job ended well, and the log holds no step of training",
            over[-1].point.where(),
            shown("line", over[-1].text[:160], None, f"line {over[-1].point.line}"),
            link="dump",
            cause="no update took place: fewer samples than one training batch needs (a rollout batch that is not "
            "filled, prompts that are filtered, drop_last), or 0 steps; or the metrics went elsewhere",
            next_step="compare the number of prompts with the rollout and training batch sizes; look whether a "
            "checkpoint differs from the model it began with",
        )
    after = [one for one in log.events("waiting") if (one.point.line or 0) > last.get(one.point.path, 0)]
    by_words: dict[str, list[Told]] = {}
    for one in after:
        by_words.setdefault(bare(one), []).append(one)
    if not by_words:
        return
    same = max(by_words.values(), key=len)
    waited = _elapsed([one.text for one in same])
    first = same[-1]
    used = [int(found[1]) / int(found[2]) for one in same if (found := _LIMIT.search(one.text)) and int(found[2])]
    late = max(used, default=0.0) >= HALF
    if used and not late:
        return  # it has only begun to wait
    # As many came between steps that were taken: the log may end at any time of such a wait.
    often = waited is None and len(same) <= 3 * as_many_before(same, log)
    few = len(same) < LINES or often or (len(same) < MANY if waited is None else waited < LONG)
    known = failure_of(said(first))
    if few and not late and (known is None or known.general or last):
        return
    first = same[0]
    words = _CLOCK.sub("", first.text.splitlines()[0]).strip()[:120]
    how_long = "" if waited is None else f" for {in_words(waited)}"
    yield finding(
        "info" if few and not late else "warning",
        f"the run only waits{how_long}{'' if known is None else f', as {in_short(known.cause)}'}: "
        f"{'over ' if len(after) >= KEPT else ''}{len(same)} "
        f"line{'s say' if len(same) > 1 else ' says'} so and no metric follows: {words!r}",
        first.point.where(),
        shown("lines that say the same", len(same), f"< {LINES}", f"from line {first.point.line}"),
        shown("seconds between the first and the last", waited, f"< {LONG:g}"),
        cause=known.cause
        if known is not None
        else "a hang or a deadlock: what it waits for has ended or never comes (a trainer that has finished or died, "
        "a worker that is stuck, a message that was lost), and nothing times out",
        next_step=known.next_step
        if known is not None
        else "look at the other process: py-spy dump --pid PID on both sides shows where each stands",
    )


_TIMED = regex(r"\bTimer (\w+) (start|end)\b")


def _begun(log: RunLog) -> Iterator[Finding]:
    """The phase that has begun last and not ended, where the log holds one and no end of the run."""
    if log.events(*DEATHS):
        return
    bars, last = log.events("begins"), log.last_lines()
    moved = any(not one.text.startswith("0/") for one in log.events(PROGRESS))
    if bars and not any(last.values()) and not log.events("waiting", "stalled") and not moved:
        yield info(
            "the log ends before the first step: the bar of its steps stands at 0",
            bars[-1].point.where(),
            shown("line", bars[-1].text.splitlines()[0][-160:], None, f"line {bars[-1].point.line}"),
            cause="the log was cut there; or the first step hangs: a rank that waits for a collective, an inference "
            "server or judge that does not answer, a kernel that is compiled, a generation without an end",
            next_step="look whether the GPUs work (nvidia-smi); py-spy dump --pid PID of every rank shows where each "
            "stands; a batch of 1 and few tokens tells whether it is slow or stuck",
        )
    open_: dict[str, Told] = {}
    for told in log.events("phase"):
        if found := _TIMED.search(told.text):
            if found[2] == "start":
                open_[found[1]] = told
            else:
                open_.pop(found[1], None)
    if not open_:
        return
    phase, told = list(open_.items())[-1]
    yield info(
        f"the log ends inside {phase}: it began at line {told.point.line} and has no end",
        told.point.where(),
        shown("line", told.text[:160], None, f"line {told.point.line}"),
        cause=f"the log was cut there; or {phase} hangs: a rank that waits for a collective (a pipeline or context "
        "parallel size that does not fit, another number of micro-batches from rank to rank), a kernel that is "
        "compiled, "
        "a network that does not answer",
        next_step="look whether the GPUs work (nvidia-smi); py-spy dump --pid PID of every rank shows where each "
        "stands",
    )


def _stands_at_0(log: RunLog) -> Iterator[Finding]:
    """A bar of the data at 0, and no metric behind it."""
    last = log.last_lines()
    bars = [one for one in log.events("stalled") if (one.point.line or 0) > last.get(one.point.path, 0)]
    if not bars:
        return
    bar, since = bars[-1], _ELAPSED.search(bars[-1].text)
    forked = any("just got forked" in one.text for one in log.events("notice"))
    yield warning(
        f"the data workers hang: {bar.text.split(':')[0].strip()} stands at 0 after {since[1] if since else 'minutes'}"
        + (", behind a fork of a tokenizer that had used its threads" if forked else ""),
        bar.point.where(),
        shown("line", bar.text[:160], None, f"line {bar.point.line}"),
        cause=("a forked worker waits for a lock of the tokenizer's threads, which the fork did not take along (or for "
               "another lock that was held: a logger's, OpenMP's)" if forked else
               "a worker never began: a lock that was held when it was forked, a file or network that does not "
               "answer, or a function that takes as long for its first batch"),
        next_step="TOKENIZERS_PARALLELISM=false before the first import, num_proc=1 to see whether it is the fork; "
        "py-spy dump --pid PID of a worker shows where it stands",
    )  # fmt: skip


_STANDS_AT = regex(r"> \S+\.py\(\d+\)")


def _in_debugger(log: RunLog) -> Iterator[Finding]:
    """A debugger that waits for somebody, as the last thing the log tells of."""
    last = _last_work(log)
    held = [
        one for one in log.events("debugger") if (one.point.line or 0) > last.get(one.point.path, 0)
    ]  # fmt: skip
    if not held or log.events("finished", "succeeded"):
        return
    after = [one for one in log.events(*DEATHS) if (one.point.line or 0) > (held[-1].point.line or 0)]
    if after:
        return
    # pdb tells at which line of which file it stands; its prompt alone tells nothing.
    first = next((one for one in held if _STANDS_AT.search(one.text)), None) or next(
        one for one in held if one.text == held[-1].text
    )
    yield warning(
        f"the run waits in a debugger since line {first.point.line}, and nothing follows: "
        f"{first.text.splitlines()[0][:140]!r}",
        first.point.where(),
        shown("line", first.text.splitlines()[0][:200], None, f"line {first.point.line}"),
        shown("lines of a debugger", len(held), "0", "log"),
        cause="a breakpoint is in the code (breakpoint(), pdb.set_trace(), ray.util.pdb), or a post-mortem debugger is "
        "switched on (RAY_DEBUG, RAY_PDB, RAY_DEBUG_POST_MORTEM) and an exception has stopped a worker: it waits for "
        "somebody to attach, and every other process waits for it",
        next_step="attach (ray debug, or the port it names) and look where it stands; take the breakpoint out, unset "
        "RAY_DEBUG and RAY_DEBUG_POST_MORTEM, PYTHONBREAKPOINT=0 for a run without a terminal",
    )


def _elapsed(texts: list[str]) -> float | None:
    """Seconds from the first line to the last, by the clock at their beginning, or the longest wait that they tell."""
    clocks = [int(m[1]) * 3600 + int(m[2]) * 60 + int(m[3]) for text in texts if (m := _CLOCK.search(text[:60]))]
    told = [float(m[1]) * _SECONDS[m[2][0]] for text in texts for m in _FOR.finditer(text)]
    spans = [sum((b - a) % 86400 for a, b in pairwise(clocks))] if len(clocks) > 1 else []
    return max([*map(float, spans), *told], default=None)
