"""Actions of the debugger screen that begin with a question: which dump, model, step, place, filter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from textual.screen import Screen

from replay_core.errors import RldbgError
from tui_debugger import format as fmt
from tui_debugger.answer import NEXT, NO_DUMP
from tui_debugger.screens.ask import AskScreen
from tui_debugger.session import Session
from tui_debugger.state import Part, Scope
from tui_debugger.tolerance import Tolerance

if TYPE_CHECKING:
    from tui_debugger.screens.debugger import DebuggerScreen


class Watching(Screen[None]):
    """A screen on top of the debugger's that shows the same state, and is told when it changed."""

    def redraw(self) -> None:
        raise NotImplementedError


class Asking(Screen[None]):
    """What is asked in one line, and done with the answer."""

    session: Session

    def redraw(self, *parts: Part) -> None:
        raise NotImplementedError

    def say(self, text: str, severity: Any = "information") -> None:
        self.app.notify(text, severity=severity, markup=False)

    def _ask(
        self, question: str, hint: str, then: Callable[[str], None], value: str = "", *, path: bool = False
    ) -> None:
        def answered(text: str | None) -> None:
            if text is not None:
                then(text)

        self.app.push_screen(AskScreen(question, hint, value, is_path=path), answered)

    def work(self, work: Coroutine[Any, Any, Any], group: str) -> None:
        # Looking never cancels: the session keeps the latest look. Of jobs the newer wins.
        self.run_worker(quietly(work), group=group, exclusive=group == "job")

    def action_compare(self) -> None:
        if self.session.state.a is None and self.session.state.busy is None:
            self.say(f"{NO_DUMP}: o opens one, c then compares it")
            return

        def go(text: str) -> None:
            self.work(self.session.comparing.compare_with(Path(text).expanduser()), "job")

        value = str(self.session.state.b_path or "")
        self._ask("Compare with", "a dump: directory or file", go, value, path=True)

    def action_open_dump(self) -> None:
        def go(text: str) -> None:
            self.work(self.session.opening.open_another(Path(text).expanduser()), "job")

        self._ask("Open", "a dump (directory or file), or a saved document (.json)", go, path=True)

    def action_model(self) -> None:
        def go(text: str) -> None:
            self.session.state.model = text
            self.redraw(Part.FLAGS)

        hint = "a directory, a cached hub id, or random:llama-tiny"
        self._ask("Model to replay with", hint, go, self.session.state.model or "", path=True)

    def action_at(self) -> None:
        if self.session.state.inspected is None:
            self.say("no tensor is selected: there are no values to go to")
            return

        def go(text: str) -> None:
            text = text.replace("[", "").replace("]", "").replace(" ", "")
            if ":" in text:
                self.work(self.session.looking.inspect(part=text), "inspect")
                return
            try:
                at = [int(part) for part in text.split(",")]
            except ValueError:
                self.say(f"not an index: {text} (expected e.g. 0,12 or 0:4,:8)", "error")
                return
            self.work(self.session.looking.inspect(at), "inspect")

        self._ask("Values from index", "one number per dimension (0,12), or a slice of any rank (0:4,:8)", go)

    def action_tolerance(self) -> None:
        session = self.session
        if session.state.comparison is None and session.state.busy is None:
            self.say(NEXT if session.state.a is not None else f"{NO_DUMP}: o opens one")
            return

        def go(text: str) -> None:
            try:
                tolerance = Tolerance.parse(text)
            except RldbgError as error:
                self.say(fmt.error_line(error), "error")
                return
            self._judge_by(tolerance)

        hint = "1e-3 (atol), 1e-3 1e-2 (atol rtol), rtol=1e-2, exact, table, or a file of rules (.toml). Reads nothing."
        self._ask("Judge by", hint, go, session.state.tolerance.typed, path=True)

    def action_loosen(self, factor: str) -> None:
        tolerance = (self.session.comparing.judging_by or self.session.state.tolerance).scaled(float(factor))
        if tolerance is None:
            self.say("R sets a tolerance first: + and - then make it ten times looser or tighter")
            return
        self._judge_by(tolerance)

    def _judge_by(self, tolerance: Tolerance) -> None:
        busy = self.session.state.busy
        if busy is not None and self.session.comparing.judging_by is None:
            self.say(f"{busy} · ctrl+c cancels")
            return
        # Now, not once the worker begins: of keys that are read together each goes on from the one before.
        self.session.comparing.judging_by = tolerance
        self.work(self.session.comparing.judge_by(tolerance), "judge")

    def action_parity(self) -> None:
        state = self.session.state
        if state.parity.document is None and not state.parity.runs:
            if state.a_path is None or state.snapshot is not None:
                self.say("open the dumps of two critics first: o, then c")
                return
            b = state.b_path or state.a_path
            request = {"recorded": True, "a": str(state.a_path), "b": str(b)}
            self.work(self.session.parities.run(request), "job")
            return
        self.show_parity()

    def show_parity(self) -> None:
        from tui_debugger.screens.parity import ParityScreen  # nobody waits for it who never opens it

        if not isinstance(self.app.screen, ParityScreen):
            self.app.push_screen(ParityScreen(cast("DebuggerScreen", self)))

    def action_step(self) -> None:
        state = self.session.state
        steps = state.a["steps"] if state.a else []
        if not steps:
            self.say("the run has no steps" if state.a else f"{NO_DUMP}: o opens one")
            return

        def go(text: str) -> None:
            if not text.isdigit() or int(text) not in steps:
                self.say(f"there is no step {text}: {steps[0]} to {steps[-1]}", "error")
                return
            self.go_to_step(int(text))

        self._ask("Go to step", f"{steps[0]} to {steps[-1]}, {len(steps):,} of them", go)

    def go_to_step(self, step: int) -> bool:
        """Compare a step of a pair, or show the first record of a run's; False where there is none."""
        state = self.session.state
        records = state.a["records"] if state.a else []
        index = next((i for i, record in enumerate(records) if record["key"]["step"] == step), None)
        if index is None:
            return False
        if state.b is not None:
            self.work(self.session.comparing.compare(Scope(step)), "job")
        else:
            self.work(self.session.looking.show_record(index), "look")
        return True


async def quietly(work: Coroutine[Any, Any, Any]) -> None:
    """Do the work; being cancelled is no error."""
    try:
        await work
    except asyncio.CancelledError:
        return
