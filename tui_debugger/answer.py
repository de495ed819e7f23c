"""What the top of the screen says: the one answer that what is open, compared and diagnosed comes to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tui_debugger import format as fmt
from tui_debugger.state import State

#: What can be done with a dump of which nothing is compared yet.
NEXT = "nothing compared yet: c another dump, r a replay, m all flags"


def answer_of(state: State) -> fmt.Answer:
    """What the top of the screen says now."""
    if state.early:
        return fmt.first_answer(state.early, running=str(state.busy or "the comparison still runs"))
    if state.comparison and not state.busy and not state.shows_record:
        answer = fmt.comparison_answer(state.comparison)
        if not state.tolerance.is_table:
            answer.facts.append(f"judged by {state.tolerance}")
        if state.snapshot is not None:
            answer.notes[0] = f"saved {state.comparison.get('created', '')} · {answer.notes[0]}"
        if len(state.step_verdicts) > 1 and answer.token != "first":
            answer.facts.append(f"{len(state.step_verdicts)} steps compared: none diverges")
        return answer
    if state.busy:
        return fmt.Answer("RUN", "muted", str(state.busy), [], [_done_so_far(state), "ctrl+c cancels"])
    if state.trouble:
        return fmt.Answer("ERROR", "missing", state.trouble, [], [state.trouble_help, "the log pane (4) has all of it"])
    if state.a is None:
        if state.a_path is not None:
            return fmt.Answer("RLDBG", "muted", f"opening {state.a_path}", [], [])
        return fmt.Answer(
            "RLDBG", "muted", "no dump open", [], ["Two runs of one micro-batch should agree: where do they part?"]
        )
    wrong = state.health.answer()
    if wrong is not None:
        if state.snapshot is not None and state.health.document is not None:
            wrong.facts.append(f"saved {state.health.document.get('created', '')}")
        return wrong
    if state.is_log:
        return state.health.clean() or fmt.Answer(
            "READY", "muted", state.health.note() or "read", [], [run_line(state.a)]
        )
    keys, notes = NEXT, [run_line(state.a)]
    if state.comparison:
        keys = f"{state.scope}: press r to replay it, v to go back to the comparison"
    note = state.health.note()
    if note and state.health.document is not None:
        return fmt.Answer("READY", "muted", note, [keys], notes)
    if note:
        notes[0] = f"{note} · {notes[0]}"
    return fmt.Answer("READY", "muted", keys, [], notes)


def _done_so_far(state: State) -> str:
    return " · ".join(f"{what} {fmt.seconds(took)}" for what, took in state.phases[-5:])


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def run_line(document: Mapping[str, Any]) -> str:
    """One line about an opened run."""
    records = document.get("records") or []
    steps = [step for step in document.get("steps") or [] if step is not None]
    counted = plural(len(steps), "step") if steps else "no step named"
    parts = [f"{document.get('dialect')} dump", counted, plural(len(records), "record")]
    problems = document.get("problems") or []
    if problems:
        parts.append(f"{plural(len(problems), 'problem')} (7): {problems[0].get('what', '')}")
    notes = document.get("notes") or []
    if notes and not problems:
        parts.append(str(notes[0]))
    return " · ".join(parts)
