"""What the actions of the debugger's screen share: its session, and how to say, ask, work and show something."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from textual.screen import Screen

from tui_debugger.screens.pane_layout import PaneLayout
from tui_debugger.session import Session
from tui_debugger.state import Part

if TYPE_CHECKING:
    from tui_debugger.screens.debugger import DebuggerScreen


class Stage:
    """Given to every object that has actions: the debugger's screen as they see it."""

    def __init__(self, screen: DebuggerScreen, session: Session) -> None:
        self.screen, self.session, self.state = screen, session, session.state
        self.panes = PaneLayout(screen, session.state)

    def redraw(self, *parts: Part) -> None:
        """Have parts of the state drawn soon."""
        self.screen.redraw(*parts)

    def say(self, text: str, severity: Any = "information", seconds: float | None = None) -> None:
        self.screen.app.notify(text, severity=severity, markup=False, timeout=seconds)

    def ask(
        self,
        question: str,
        hint: str,
        then: Callable[[str], None],
        value: str = "",
        *,
        path: bool = False,
        known: Sequence[str] = (),
    ) -> None:
        """Ask for a line; `then` is called with it, unless the user leaves the question. `known`: words it may be."""
        from tui_debugger.screens.ask import AskScreen  # no first paint waits for it

        def answered(text: str | None) -> None:
            if text is not None:
                then(text)

        self.screen.app.push_screen(AskScreen(question, hint, value, is_path=path, known=known), answered)

    def work(self, work: Coroutine[Any, Any, Any], group: str) -> None:
        """Do it while the keys go on. Looking never cancels: its flow keeps the latest look. Of the others the newer
        wins, but over a replay nothing does: a comparison is made beside it, whatever else is asked for waits."""
        busy = self.state.job.busy
        if group in ("job", "compare"):
            if busy is None or not busy.is_replay:
                self.cancel("job", "compare")
            elif group == "job":
                work.close()
                self.say(f"{busy} · ctrl+c cancels")
                return
        self.screen.run_worker(
            _quietly(work), group=group, exclusive=group in ("job", "compare", "steps", "diagnose", "follow")
        )

    def cancel(self, *groups: str) -> None:
        for group in groups:
            self.screen.workers.cancel_group(self.screen, group)

    def put_on_top(self, screen: Screen[Any]) -> None:
        self.screen.app.push_screen(screen)

    def come_to_front(self) -> None:
        """Leave what lies on top of the panes; esc leads back to it."""
        while (top := self.screen.app.screen) is not self.screen:
            self.state.trail = getattr(top, "KEYS_OF", "") or self.state.trail
            self.screen.app.pop_screen()
        self.redraw(Part.ANSWER)

    def go_back(self) -> bool:
        """Open the screen again that was left for what is looked at; False where there is none."""
        name, self.state.trail = self.state.trail, ""
        if name:
            self.screen.action_do(name)
        return bool(name)


async def _quietly(work: Coroutine[Any, Any, Any]) -> None:
    """Do the work; being cancelled is no error."""
    try:
        await work
    except asyncio.CancelledError:
        return
