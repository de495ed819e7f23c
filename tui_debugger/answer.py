"""What the top of the screen says: the one answer that what is open, compared and diagnosed comes to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tui_debugger import format as fmt
from tui_debugger.cells import label, recording_parts
from tui_debugger.state import State

#: What can be done with a dump of which nothing is compared yet.
NEXT = "nothing compared yet: c another dump, r a replay, m all flags"

NO_DUMP = "no dump is open"


def answer_of(state: State) -> fmt.Answer:
    """What the top of the screen says now."""
    if state.tensors.early:
        return fmt.first_answer(state.tensors.early, running=_running(state))
    if state.tensors.comparison and not state.job.busy and not state.tensors.shows_record:
        answer = fmt.comparison_answer(state.tensors.comparison)
        if not state.tolerance.is_table:
            answer.facts.append(f"judged by {state.tolerance}")
        saved: object = state.opened.saved
        if state.tensors.comparison is saved:
            only = ", ".join(f"{part} {value}" for part, value in state.tensors.comparison["selection"].items())
            answer.notes[0] = f"saved {state.tensors.comparison['created']} · {answer.notes[0]}"
            if only:
                answer.facts.append(f"only {only}")
        return _of_every_step(_of_replay(answer, state), state)
    if state.job.busy:
        busy = state.job.busy
        far = [busy.how_far] if busy.how_far else []
        below = None if state.tensors.shows_record or state.tensors.live else state.tensors.comparison
        beside = f"below: {fmt.comparison_answer(below).sentence}" if below and busy.is_replay else _done_so_far(state)
        return fmt.Answer("RUN", "muted", busy.what, far, [busy.how_long, beside])
    if state.job.trouble:
        return fmt.Answer(
            "ERROR", "missing", state.job.trouble, [], [state.job.trouble_help, "the log pane (4) has all of it"], True
        )
    if state.job.cancelled:
        notes = [_done_so_far(state), "nothing was changed: below stands what was there before"]
        return fmt.Answer("CANCELLED", "missing", state.job.cancelled, [], notes)
    if state.opened.a is None:
        if state.opened.a_path is not None:
            return fmt.Answer("RLDBG", "muted", f"opening {state.opened.a_path}", [], [])
        return fmt.Answer(
            "RLDBG", "muted", NO_DUMP, [], ["Two runs of one micro-batch should agree: where do they part?"]
        )
    ruled = state.opened.ruled.get(state.opened.scope)
    if ruled is not None and ruled["ruling"] is not None:
        return fmt.ruling_answer(ruled, [f"{ruled['a']['computation']} · {run_line(state.opened.a)}"])
    wrong = state.opened.health.answer()
    if wrong is not None:
        document, saved = state.opened.health.document, state.opened.saved
        if document is saved and document is not None:
            wrong.facts.append(f"saved {document['created']}")
        return wrong
    if not state.tensors.comparison and (met := state.findings()):
        name = Path(met[0]["where"]).name
        facts = [name] if name not in met[0]["claim"] and met[0]["where"] != str(state.opened.a["path"]) else []
        facts.append(f"and {fmt.plural(len(met) - 1, 'problem')} more (7)" if len(met) > 1 else "7 lists it")
        notes = [state.opened.health.note(), "" if state.opened.is_log else NEXT]
        return fmt.Answer("WARN", "missing", met[0]["claim"], facts, [note for note in notes if note], is_claim=True)
    if state.opened.is_log:
        return state.opened.health.clean() or fmt.Answer(
            "READY", "muted", state.opened.health.note() or "read", [], [run_line(state.opened.a)]
        )
    keys, notes = NEXT, [run_line(state.opened.a)]
    if state.tensors.comparison:
        keys = f"{state.opened.scope}: press r to replay it, v to go back to the comparison"
    note = state.opened.health.note()
    if note and state.opened.health.document is not None:
        return fmt.Answer("READY", "muted", note, [keys], notes)
    if note:
        notes[0] = f"{note} · {notes[0]}"
    return fmt.Answer("READY", "muted", keys, [], notes)


def _of_replay(answer: fmt.Answer, state: State) -> fmt.Answer:
    """With what the replay says beyond the tensors of its cell: samples that are off and why, the padded batch beside
    it, the recording. Limits of the user's own judge the tensors, and those alone."""
    shown = state.cell
    if shown is None or not state.tolerance.is_table:
        return answer
    found = [said_of(shown)]
    if shown in state.replay.cells and state.replay.document is not None:
        beside = [cell for cell in state.replay.cells if cell["part"] == "control" and cell is not shown]
        found += [f"{label(cell)} as well: {said}" for cell in beside if (said := said_of(cell))]
        found.append(recording_parts(state.replay.document))
    found = [fmt.safe(said) for said in found if said]
    if answer.token == "first" or not found:
        # Why it differs is what a replay is asked for: how many tensors do comes behind it, where there is room.
        return replace(answer, notes=[*found, *answer.notes])
    return fmt.Answer("DIFF", "first", found[0], answer.facts, [*answer.notes, *found[1:]], is_claim=True)


def said_of(cell: Mapping[str, Any]) -> str:
    """Why a cell disagrees with each row alone, where the samples tell; empty where it does not disagree."""
    agreement, cause = cell["agreement"], cell.get("cause")
    if agreement["agrees"] is not False:
        return ""
    if cause:
        return str(cause["sentence"])
    off = ", ".join(map(str, agreement["off"]))
    return f"samples {off} are off, each held to its row alone" if off else ""


def _of_every_step(answer: fmt.Answer, state: State) -> fmt.Answer:
    """The answer of the step shown as one of all that were compared: never better than the worst of them, and no word
    for those that were not compared."""
    steps, scope = state.opened.steps, str(state.opened.scope)
    if not (told := steps.progress()):
        return answer
    words, apart = Counter(steps.verdicts.values()), [str(step) for step in steps.diverging]
    if answer.token == "first":
        return replace(answer, notes=[f"{told} · {scope}: {answer.notes[0]}", *answer.notes[1:]])
    if apart:
        answer.facts.append(f"but step {', '.join(apart[:3])}{' and more' if len(apart) > 3 else ''} diverges")
        return replace(answer, where=f"{scope}: {answer.where}", notes=[told, *answer.notes])
    lacking = words["PARTLY"] + words["NONE"]
    answer.facts.append(f"{told}{f', but {lacking} only partly compared' if lacking else ''}")
    lacking += sum(step not in steps.verdicts for step in (*steps.asked, *steps.alone))
    if not lacking:
        if words["CLOSE"] and answer.word == "SAME":
            return replace(answer, word="CLOSE", token="close", where="everything SAME or CLOSE")
        return answer
    if answer.word == "PARTLY":
        return answer
    # What the step shown comes to is in the notes, as counts.
    return replace(answer, word="PARTLY", token="missing", where="no divergence, but not everything was compared")


def _running(state: State) -> str:
    return f"{state.job.busy.how_long} · {state.job.busy}" if state.job.busy else "the comparison still runs"


def _done_so_far(state: State) -> str:
    return " · ".join(f"{what} {fmt.seconds(took)}" for what, took in state.job.phases[-5:])


def run_line(document: Mapping[str, Any]) -> str:
    """One line about an opened run."""
    records = document.get("records") or []
    steps = [step for step in document.get("steps") or [] if step is not None]
    counted = fmt.plural(len(steps), "step") if steps else "no step named"
    parts = [f"{document.get('dialect')} dump", counted, fmt.plural(len(records), "record")]
    problems = document.get("problems") or []
    if problems:
        parts.append(f"{fmt.plural(len(problems), 'problem')} (7): {problems[0].get('what', '')}")
    notes = document.get("notes") or []
    if notes and not problems:
        parts.append(str(notes[0]))
    return " · ".join(parts)
