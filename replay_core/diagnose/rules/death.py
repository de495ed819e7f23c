"""How a run ended: an exception, a CUDA error, a collective that never came back, a signal."""

from __future__ import annotations

from collections.abc import Iterator

from replay_core.diagnose.finding import Evidence, Finding
from replay_core.diagnose.log_steps import steps_of
from replay_core.diagnose.rule import rule
from replay_core.diagnose.signals import RunLog, Told
from replay_core.diagnose.stating import finding, shown
from replay_core.dumps.log_events import DEATHS
from replay_core.regexes import regex

_COLLECTIVE = regex(r"OpType=(\w+)")
_INDEX = regex(r"device-side assert|index out of|indexSelect|srcIndex")
_BY_HAND = regex(r"KeyboardInterrupt|SIGINT|signal: 2\b")
_SIGKILL = regex(r"SIGKILL|exitcode: -9|signal: 9\b|Killed|Received 9 ")
_SIGTERM = regex(r"SIGTERM|exitcode: -15|signal: 15\b|Terminated|Received 15 |CANCELLED")


@rule("L06", "the run died", link="dump", scope="signals",
      needs=("|".join(f"event:{kind}" for kind in DEATHS),),
      source="Python's and torch's own messages, torchrun's agent; Megatron-LM#1207, LLaMA-Factory#163")  # fmt: skip
def died(log: RunLog) -> Iterator[Finding]:
    """A traceback, a CUDA error, NCCL's watchdog or a signal after which no metric is logged: error, of the first such
    line, which the later ones follow from. After a CUDA error, the watchdog or a signal it is an error even where
    metrics follow: that is another start of the run. A traceback that more metrics follow was caught: info. Out of
    memory is D36's.
    """
    last = log.last_lines()
    told = log.events(*DEATHS)
    at_the_end = [one for one in told if (one.point.line or 0) > last.get(one.point.path, 0)]
    if at_the_end and not at_the_end[0].kind.startswith("oom"):
        yield _dead(at_the_end[0], len(at_the_end), went_on=False)
        return
    before = [one for one in told if one not in at_the_end]
    fatal = [one for one in before if one.kind in ("nccl", "cuda_error", "killed")]
    if fatal:
        yield _dead(fatal[0], len(fatal), went_on=True)
    caught = [one for one in before if one.kind == "traceback"]
    if caught and not fatal:
        yield finding(
            "info",
            f"an exception at line {caught[0].point.line}, and the run went on: {_words(caught[0])}",
            caught[0].point.where(),
            evidence=[shown("exceptions", len(caught), "0", f"from line {caught[0].point.line}"), *_frame(caught[0])],
            cause="the trainer caught it, or another process of the run raised it",
            next_step="look at what was skipped in that step",
            steps=steps_of(one.point for one in caught),
        )


def _dead(one: Told, lines: int, *, went_on: bool) -> Finding:
    cause, next_step = _blamed(one)
    by_hand = _BY_HAND.search(one.text) is not None
    step = "before the first logged step" if one.point.step is None else f"after step {one.point.step}"
    return finding(
        "warning" if by_hand else "error",
        f"the run {'was stopped by hand' if by_hand else 'died'} at line {one.point.line}, {step}"
        f"{', and was started again' if went_on else ''}: {_words(one)}",
        one.point.where(),
        evidence=[
            shown("line", one.text.splitlines()[0][:200], None, f"line {one.point.line}"),
            *_frame(one),
            shown("lines that tell of an end", lines, "0", "log"),
        ],
        cause=cause,
        next_step=next_step,
        steps=steps_of([one.point]),
    )


def _words(one: Told) -> str:
    text = one.text.splitlines()[0]
    return text if len(text) <= 120 else text[:117] + "..."


def _frame(one: Told) -> list[Evidence]:
    frame = next((text for text in reversed(one.text.splitlines()[1:]) if text.startswith("File ")), None)
    return [shown("last frame", frame[:160], None, f"line {one.point.line}")] if frame else []


def _blamed(one: Told) -> tuple[str, str]:
    """Cause and next step."""
    if one.kind == "nccl":
        found = _COLLECTIVE.search(one.text)
        what = (
            f"{found.group(1)} was never joined by every rank"
            if found
            else "a collective was never joined by every rank"
        )
        return (
            f"{what}: a rank stalled, died before, or called another collective",
            "the first error of any other rank is the cause; TORCH_NCCL_TRACE_BUFFER_SIZE=2000 "
            "TORCH_NCCL_DUMP_ON_TIMEOUT=1 names the rank that is missing; or raise the timeout, where the step is long",
        )
    if one.kind == "cuda_error":
        index = (
            "an index out of range (a token id or label beyond the vocabulary), or " if _INDEX.search(one.text) else ""
        )
        return (
            f"{index}a kernel failed; kernels run later than the line that names them",
            "CUDA_LAUNCH_BLOCKING=1 names the true line; compute-sanitizer the access",
        )
    if one.kind == "killed":
        if _SIGKILL.search(one.text):
            return (
                "killed from outside: most often by the kernel, out of host memory",
                "dmesg | grep -i oom; watch host memory",
            )
        if _SIGTERM.search(one.text):
            return (
                "ended from outside: the scheduler's limit or a preemption, or a launcher after another rank failed",
                "the first error of any other rank; else the scheduler's own record of the job",
            )
        return "native code crashed, or the launcher saw a process fail", "the log of the process that failed first"
    return (
        "an exception that nobody caught",
        "the frames above the line; rldbg record -- YOUR COMMAND keeps the steps that lead there",
    )
