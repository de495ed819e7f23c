"""Keys: the bindings textual gets, and which keys a terminal cannot send."""

from __future__ import annotations

import re

from textual.binding import Binding

from tui_debugger.actions import ACTIONS

#: Keys that arrive as another key inside tmux as it comes: backspace, tab, enter, a letter, `ctrl+_`.
_ALIASED = {"ctrl+h", "ctrl+i", "ctrl+m", "ctrl+j", "ctrl+slash", "alt+enter", "ctrl+enter", "shift+enter"}
#: Prefix keys of tmux and screen: swallowed before the app sees them.
_PREFIXES = {"ctrl+b", "ctrl+a"}
_SAFE = re.compile(
    r"[a-zA-Z0-9]|f([1-9]|1[0-2])|ctrl\+[a-z]|(shift\+|ctrl\+)?(up|down|left|right)|home|end|pageup|pagedown"
    r"|enter|escape|space|tab|shift\+tab|backspace|delete"
    r"|slash|question_mark|colon|at|left_square_bracket|right_square_bracket|comma|full_stop|minus|plus"
    r"|less_than_sign|greater_than_sign"
)


def is_deliverable(key: str) -> bool:
    """Whether a key reaches an app that runs in tmux, over SSH, on any terminal."""
    return key not in _ALIASED | _PREFIXES and _SAFE.fullmatch(key) is not None


def bindings() -> list[Binding]:
    """The debugger screen's bindings, made from the actions."""
    return [
        Binding(",".join(action.keys), action.call, action.help, show=False, id=f"{action.id}.{action.argument or ''}")
        for action in ACTIONS
    ]
