"""`rldbg DIR` of units: what many workers have found so far, filled while they work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widgets import Static

from replay_core.errors import RldbgError
from tui_debugger import format as fmt
from tui_debugger import paths
from tui_debugger.actions import FIND, LOOK, MOVE, Action
from tui_debugger.reports.gathering import counts_line, is_over, unit_word, verdict
from tui_debugger.screens.help import HelpScreen
from tui_debugger.screens.keyed import PatientScreen
from tui_debugger.screens.logview import LogScreen
from tui_debugger.widgets.paint import paint, write_border
from tui_debugger.widgets.rows import Rows

if TYPE_CHECKING:
    from replay_core.documents.gathering import GatheringDocument, UnitEntry

#: Seconds between two looks, and how many times what a look took: a slow disk is not asked all the time.
_AGAIN_S, _AGAIN_TIMES = 1.0, 5.0
_TOKENS = {
    "agrees": "same", "disagrees": "diff", "not ruled": "missing", "failed": "missing", "crashed": "missing",
    "running": "strong", "left": "muted", "measured": "muted",
}  # fmt: skip
_KEYS = "enter opens · n N next without agreement · ? help · q leaves"
_SCREEN = ("units",)
#: What `?` lists.
_ACTIONS = (
    Action("open", ("enter",), "open", "open the unit's document, or how it stands; leaving leads back", FIND,
           screens=_SCREEN),
    Action("notable", ("n", "N"), "next", "next unit that disagrees, failed or crashed; N the one before", FIND,
           screens=_SCREEN),
    Action("move", ("j", "k", "g", "G"), "move", "down, up, first, last; space and ctrl+u by half a page", MOVE,
           screens=_SCREEN),
    Action("leave", ("q", "escape"), "leave", "leave; workers go on, and rldbg gather has the exit code", LOOK,
           screens=_SCREEN),
)  # fmt: skip


class _UnitRows(Rows):
    def __init__(self) -> None:
        super().__init__(id="units", empty="Looking …")
        self.units: list[UnitEntry] = []
        self.first: str | None = None

    def heading(self, width: int) -> Text:
        return Text(f" {'unit':<{self._room(width)}}  {'':<9}  what it came to")

    def is_marked(self, row: int) -> bool:
        return self.units[row]["id"] == self.first

    def line(self, row: int, width: int) -> Text:
        one, room = self.units[row], self._room(width)
        word = unit_word(one)
        text = Text(f" {fmt.safe(one['label']):<{room}}  ")
        text.append(f"{word:<9}", paint(self, _TOKENS[word]))
        return text.append(f"  {fmt.safe(one['said'])}")

    def _room(self, width: int) -> int:
        return min(width // 3, max((len(one["label"]) for one in self.units), default=4))


class UnitsScreen(PatientScreen[None]):
    """The units of a directory, looked at again until every one has ended.

    Args:
        look: what the directory has come to now; called in a thread.
        leave: called with the document of a unit that is to be opened, or None to end.
    """

    CSS_PATH = paths.styles_dir() / "units.tcss"

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,escape", "leave", show=False),
        Binding("question_mark,f1", "help", show=False),
        Binding("j", "move('step', 1)", show=False),
        Binding("k", "move('step', -1)", show=False),
        Binding("g", "move('edge', 'top')", show=False),
        Binding("G", "move('edge', 'end')", show=False),
        Binding("ctrl+d,space", "move('half_page', 1)", show=False),
        Binding("ctrl+u", "move('half_page', -1)", show=False),
        Binding("n", "notable(1)", show=False),
        Binding("N", "notable(-1)", show=False),
    ]

    def __init__(
        self, look: Callable[[], GatheringDocument], leave: Callable[[str | None], None], at: str | None = None
    ) -> None:
        """`at`: the document of the unit that the cursor begins on."""
        super().__init__()
        self._look, self._leave, self._at = look, leave, at
        self.document: GatheringDocument | None = None

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static("", markup=False, id="units-answer")
            yield _UnitRows()

    def on_mount(self) -> None:
        self.query_one(_UnitRows).focus()
        self.run_worker(self._watch())

    async def _watch(self) -> None:
        while True:
            began = time.monotonic()
            try:
                doc = await asyncio.to_thread(self._look)
            except RldbgError as error:  # a plan that is being written anew, a disk that is gone for a while
                self.query_one("#units-answer", Static).update(Text(fmt.safe(error.in_one_line)))
            else:
                self._take(doc)
                if is_over(doc):
                    return
            await asyncio.sleep(max(_AGAIN_S, _AGAIN_TIMES * (time.monotonic() - began)))

    def _take(self, doc: GatheringDocument) -> None:
        rows = self.query_one(_UnitRows)
        here = rows.units[rows.cursor]["id"] if rows.units else None
        self.document, rows.units = doc, doc["units"]
        rows.first = doc["first"]["id"] if doc["first"] is not None else None
        if here is None:
            wanted = (place for place, one in enumerate(rows.units) if self._at and one["file"] == self._at)
        else:
            wanted = (place for place, one in enumerate(rows.units) if one["id"] == here)
        rows.empty = "No unit."
        rows.set_count(len(rows.units), next(wanted, rows.cursor))
        self.query_one("#units-answer", Static).update(self._answer(doc))
        write_border(rows, title=fmt.safe(doc["directory"]), subtitle=_KEYS)

    def _answer(self, doc: GatheringDocument) -> Text:
        part = f" (part {doc['shard']})" if doc["shard"] else ""
        text = Text(end="")
        text.append(f" {verdict(doc)} ", paint(self, "first" if doc["agrees"] is False else "strong"))
        text.append(f" rldbg {doc['command']}{part}: {counts_line(doc)}")
        first = doc["first"]
        text.append("\n ")
        if first is not None:
            so_far = "" if is_over(doc) else " so far"
            text.append(fmt.safe(f"first{so_far}: {first['label']}: {first['said']}"))
        else:
            text.append("no unit that is done disagrees" if doc["counts"]["done"] else "no unit is done yet")
        # What a count of units does not say: steps of one side alone, stale answers, what could not be read.
        said = [f"only {side} has {len(steps)} steps" for side, steps in
                (("a", doc["one_sided"]["a"]), ("b", doc["one_sided"]["b"])) if steps]  # fmt: skip
        said += [*doc["notes"], *(f"problem: {one['where']}: {one['what']}" for one in doc["problems"])]
        return text.append("\n " + fmt.safe(" · ".join(said)) if said else "")

    @on(Rows.Chosen)
    def _open(self, event: Rows.Chosen) -> None:
        rows = self.query_one(_UnitRows)
        one = rows.units[event.row]
        if one["state"] == "done" and one["file"] is not None:
            self._leave(one["file"])
            return
        self.app.push_screen(LogScreen(None, _told(one)))

    def action_move(self, name: str, argument: int | str) -> None:
        getattr(self.query_one(_UnitRows), f"action_{name}")(argument)

    def action_notable(self, direction: int) -> None:
        """Go to the next unit that disagrees or has no answer though it was begun, round the end."""
        rows = self.query_one(_UnitRows)
        count = len(rows.units)
        for steps in range(1, count + 1):
            row = (rows.cursor + direction * steps) % count
            if unit_word(rows.units[row]) in ("disagrees", "not ruled", "failed", "crashed"):
                rows.move_cursor(row)
                return
        self.app.notify("no unit disagrees, failed or crashed", markup=False)

    def action_help(self) -> None:
        self.app.push_screen(HelpScreen(_ACTIONS, "units"))

    def action_leave(self) -> None:
        self._leave(None)


def _told(one: UnitEntry) -> list[str]:
    """A unit without a document: how it stands, and its error in its parts."""
    lines = [f"{one['label']}: {unit_word(one)}", one["said"]]
    if one["tries"]:
        lines.append(f"tries: {one['tries']}")
    if one["error"] is not None:
        parts = ("type", "message", "file", "tensor", "expected", "found", "hint")
        lines += [f"{part}: {one['error'][part]}" for part in parts if one["error"][part]]  # type: ignore[literal-required]
    return [line for line in lines if line]
