"""What the screen gives back to the terminal around it: the shell under it, and the mouse."""

from __future__ import annotations

from tui_debugger import terminal
from tui_debugger.screens.stage import Stage


class Leaving:
    """The actions suspend and mouse."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def do_suspend(self) -> None:
        self._stage.screen.app.action_suspend_process()

    def do_mouse(self) -> None:
        has_it = terminal.toggle_mouse(self._stage.screen.app)
        self._stage.say(f"the mouse is {'the screen' if has_it else 'the terminal'}'s", seconds=3)
