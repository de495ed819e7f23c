"""The top of the screen: which dumps, and the answer before anything else."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual import events

from replay_core.errors import RldbgError
from replay_core.replay.flags import Flags, settings_asked
from tui_debugger import format as fmt
from tui_debugger.answer import answer_of
from tui_debugger.state import State
from tui_debugger.widgets.fixed import Fixed
from tui_debugger.widgets.paint import paint, verdict_token

if TYPE_CHECKING:
    from replay_core.documents.comparison import ComparisonDocument

#: Lines of the answer.
_LINES = 3


class TitleLine(Fixed):
    """`rldbg  A ↔ B · step 0 · flags that differ`"""

    def __init__(self) -> None:
        super().__init__(id="title")
        self._state = State()

    def show(self, state: State) -> None:
        self._state = state
        self._draw()

    def on_resize(self, _event: events.Resize) -> None:
        self._draw()

    def _draw(self) -> None:
        state, width = self._state, self.size.width
        text = Text(" rldbg ", style=paint(self, "strong"), no_wrap=True, overflow="ellipsis", end="")
        if state.trail:
            text.append(f" {state.trail} ›", paint(self, "key"))
        names, tail = self._names(), str(state.opened.scope)
        judged = self._judged()
        if state.opened.live_run is not None:
            tail = f"{tail} · {state.opened.live_run}" if tail else str(state.opened.live_run)
        whole = width - text.cell_len - 1 - len(tail) - len(judged) - 5 * len(names)
        # A short name leaves its room to the long one.
        spare = max(0, whole // max(1, len(names)) - min((len(name) for _, name in names), default=0))
        room = max(12, whole // max(1, len(names)) + (spare if len(names) > 1 else 0))
        for i, (letter, name) in enumerate(names):
            text.append(" ↔ " if i else " ", paint(self, "muted"))
            text.append(f"{letter} ", paint(self, "key"))
            text.append(fmt.middle(fmt.safe(name), room))
        if tail:
            text.append(" · ", paint(self, "muted"))
            text.append(tail)
        if judged:
            text.append(judged, paint(self, "muted" if state.tolerance.is_table else "missing"))
        self.put(text)

    def _judged(self) -> str:
        """Which tolerance is in force: words, and a colour where it is not the table's."""
        state = self._state
        if state.tolerance.is_table:
            shown = None if state.tensors.shows_record else state.tensors.comparison
            # An older document does not say what it was judged by.
            saved: object = state.opened.saved
            has = shown is not None and (shown is not saved or "tolerance" in shown)
            return " · judged by the table" if has else ""
        return f" · JUDGED BY {state.tolerance}"

    def _names(self) -> list[tuple[str, str]]:
        state = self._state
        compared = None if state.tensors.shows_record else state.tensors.comparison
        if compared and (labels := _settings(compared)):
            return [("A", labels[0]), ("B", labels[1])]
        if state.opened.b_path is not None:
            names = [str(state.opened.a_path), str(state.opened.b_path)]
            common = os.path.commonpath(names) if all(map(os.path.isabs, names)) else ""
            shown = [os.path.relpath(name, common) if len(common) > 1 else name for name in names]
            if "." in shown:
                shown = [os.path.basename(name) for name in names]
            return [("A", shown[0]), ("B", shown[1])]
        others = "".join(f" + {os.path.basename(os.path.normpath(path))}" for path in state.opened.more)
        return [("A", f"{state.opened.a_path}{others}")] if state.opened.a_path else []


def _settings(comparison: ComparisonDocument) -> tuple[str, str] | None:
    """What tells the two sides of a replay apart: `rows alone`, `packed, no block mask`."""
    labels = []
    for side in (comparison["a"], comparison["b"]):
        asked = settings_asked(side["flags"])
        if not asked:
            return None
        try:
            labels.append(Flags.from_mapping(asked).label().split(", "))
        except RldbgError:  # a dump of another rldbg, with flags of its own
            return None
    a, b = (", ".join(part for part in label if part not in other) for label, other in (labels, labels[::-1]))
    return (a or "the same", b or "the same") if a or b else None


class Headline(Fixed):
    """Three lines: the word and the tensor; where, both values, origin; counts and why."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"headline--badge"}

    def __init__(self) -> None:
        super().__init__(id="headline", classes="-muted")
        self._answer = fmt.Answer("RLDBG", "muted", "")

    def show(self, state: State) -> None:
        self._answer = answer_of(state)
        self.set_classes(f"-{self._answer.token}")
        self._draw()

    def on_resize(self, _event: events.Resize) -> None:
        self._draw()

    def _draw(self) -> None:
        answer, width = self._answer, max(20, self.content_size.width or self.size.width - 2)
        badge = f" {answer.word} "
        indent = " " * (len(badge) + 1)
        text = Text(no_wrap=True, overflow="ellipsis", end="")
        text.append(badge, self.get_component_rich_style("headline--badge"))
        text.append(" ")
        is_place = answer.token == "first" and not answer.is_claim
        if is_place:
            text.append("first at ")
        room = width - text.cell_len
        said = [fmt.safe(fact) for fact in answer.facts]
        facts, where = " · ".join(said), fmt.safe(answer.where)
        notes = [fmt.safe(note) for note in answer.notes if note]
        if answer.is_claim:
            self.put(self._claim(text, where, said, notes, indent, width))
            return
        text.append(fmt.middle(where, room) if is_place else where, paint(self, "strong"))
        if facts and len(where) + len(facts) + 3 <= room:
            text.append(f" · {facts}")
        elif facts:
            text.append(f"\n{indent}{fitting(said, width - len(indent))}")
            notes = [" · ".join(notes)]
        for note in notes:
            text.append(f"\n{indent}")
            self._note(text, note)
        self.put(text)

    def _claim(self, text: Text, claim: str, facts: list[str], notes: list[str], indent: str, width: int) -> Text:
        """A sentence on up to two lines with as many facts behind it as fit, and the notes on what lines are left."""
        room = width - len(indent)
        lines = _cut(claim, room, _LINES - 1)
        strong = paint(self, "strong")
        text.append(lines[0], strong)
        for line in lines[1:]:
            text.append(f"\n{indent}{line}", strong)
        while facts and len(lines[-1]) + 3 + len(" · ".join(facts)) > room:
            facts = facts[:-1]
        if facts:
            text.append(f" · {' · '.join(facts)}")
        for line in _cut(" · ".join(notes), room, _LINES - len(lines)):
            text.append(f"\n{indent}")
            self._note(text, line)
        return text

    def _note(self, text: Text, note: str) -> None:
        # A blank behind the last word would not fit where the line is as long as the screen is wide.
        for i, word in enumerate(note.split(" ")):
            text.append(" " if i else "")
            text.append(word, paint(self, verdict_token(word) if word in fmt.VERDICTS else "muted"))


def _cut(text: str, width: int, count: int) -> list[str]:
    """The text in at most `count` lines; what is left out of the last is a …."""
    lines = fmt.wrapped(text, width)
    if len(lines) <= count:
        return lines
    return [*lines[: count - 1], fmt.end(" ".join(lines[count - 1 :]), width)]


def fitting(facts: list[str], width: int) -> str:
    """As many facts as fit; the first (the record's key) is dropped before any other."""
    for skipped in range(len(facts)):
        line = " · ".join(facts[skipped:])
        if len(line) <= width:
            return line
        if skipped == 1:
            break
    return " · ".join(facts[1:])
