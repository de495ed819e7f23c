"""Screens whose keys are the actions of `actions.py`: each is done by the first object that has a `do_<id>`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from textual import screen as textual_screen
from textual.screen import Screen, ScreenResultType

from tui_debugger import keymap, terminal
from tui_debugger.actions import Action
from tui_debugger.state import Part

if TYPE_CHECKING:
    from tui_debugger.screens.stage import Stage


#: Frames a second at most, unless TEXTUAL_FPS says otherwise. What a job sends is drawn at a pace of its own: this only
#: says how long a key waits after the frame before its own, and textual's 60 are up to 17 ms.
FRAMES_PER_S = 240

if "TEXTUAL_FPS" not in os.environ:
    setattr(textual_screen, "UPDATE_PERIOD", 1 / FRAMES_PER_S)  # noqa: B010  (Final to a type checker)


class PatientScreen(Screen[ScreenResultType]):
    """Draws nothing while the terminal is behind.

    Over a slow link every frame that waits is older than what the keys have done since: the next one drawn holds it
    all.
    """

    def _on_timer_update(self) -> None:
        # Textual asks again at its own pace, and a full queue would stop the keys.
        if not terminal.is_behind(self.app):
            super()._on_timer_update()


class KeyedScreen(PatientScreen[None]):
    """Binds the keys of one screen, and routes what they ask for."""

    KEYS_OF: ClassVar[str]

    def __init__(self, actions: tuple[Action, ...]) -> None:
        super().__init__()
        self.actions = actions
        for binding in keymap.bindings(self.KEYS_OF, actions):
            for key in binding.key.split(","):
                self._bindings.bind(key, binding.action, binding.description, show=False)

    def doers(self) -> Iterable[object]:
        """Who may have a `do_<id>` for an action, the first asked first."""
        return (self,)

    def action_do(self, id: str, *arguments: str) -> None:
        """Do one of the actions."""
        for doer in self.doers():
            do = getattr(doer, f"do_{id}", None)
            if do is not None:
                do(*arguments)
                return

    def do_theme(self) -> None:
        from tui_debugger.screens.themes import ThemeScreen  # textual's OptionList: 5 ms

        self.app.push_screen(ThemeScreen())

    def do_palette(self) -> None:
        self.app.action_command_palette()

    def do_help(self) -> None:
        from tui_debugger.screens.help import HelpScreen  # rich.table: 10 ms

        self.app.push_screen(HelpScreen(self.actions, self.KEYS_OF))


class Overlay(KeyedScreen):
    """A screen on top of the debugger's that shows the same state, and is told when it changed.

    An action that it does not do itself is the debugger's.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage.screen.actions)
        self.stage = stage

    def doers(self) -> Iterable[object]:
        return (self, *self.stage.screen.parts)

    def redraw(self) -> None:
        """Draw the state anew. News that comes before the screen is composed is drawn when it is mounted; when the app
        leaves, nobody looks any more."""
        if self.is_mounted and self.is_attached:
            self._draw_state()

    def _draw_state(self) -> None:
        """Put the state into the widgets, which are there."""

    def do_back(self) -> None:
        self.stage.state.trail = ""
        self.stage.redraw(Part.ANSWER)
        self.app.pop_screen()
