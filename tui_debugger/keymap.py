"""Keys: the bindings textual gets, the user's own keys, and which keys a terminal cannot send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from textual.binding import Binding
from textual.keys import _character_to_key

from replay_core.regexes import regex
from tui_debugger.actions import ACTIONS, Action, of_screen
from tui_debugger.settings import nearest

#: Keys that arrive as another key inside tmux as it comes: backspace, tab, enter, a letter, `ctrl+_`.
_ALIASED = {"ctrl+h", "ctrl+i", "ctrl+m", "ctrl+j", "ctrl+slash", "alt+enter", "ctrl+enter", "shift+enter"}
#: Prefix keys of tmux and screen: swallowed before the app sees them.
_PREFIXES = {"ctrl+b", "ctrl+a"}
_SAFE = regex(
    r"[a-zA-Z0-9]|f([1-9]|1[0-2])|ctrl\+[a-z]|(shift\+|ctrl\+)?(up|down|left|right)|home|end|pageup|pagedown"
    r"|enter|escape|space|tab|shift\+tab|backspace|delete"
    r"|slash|question_mark|colon|at|left_square_bracket|right_square_bracket|comma|full_stop|minus|plus"
    r"|less_than_sign|greater_than_sign|equals_sign"
)
#: Nobody may lose the way out, or the keys that move.
_FIXED = ("quit", "cancel", "back", "palette", "help")


def is_deliverable(key: str) -> bool:
    """Whether a key reaches an app that runs in tmux, over SSH, on any terminal."""
    return key not in _ALIASED | _PREFIXES and _SAFE.fullmatch(key) is not None


def remapped(table: Mapping[str, Sequence[str]]) -> tuple[tuple[Action, ...], list[str]]:
    """The actions with the user's keys, and a sentence for each that cannot be used.

    A key the user gives to one action is taken from the one that had it.
    """
    known = {action.name: action for action in ACTIONS}
    problems, wanted = [], {}
    for name, keys in table.items():
        spelt = tuple(_character_to_key(key) if len(key) == 1 else key for key in keys)
        bad = [key for key in spelt if not is_deliverable(key)]
        if name not in known:
            problems.append(f"keys.{name}: no such action{nearest(name, known)}")
        elif bad:
            problems.append(f"keys.{name}: a terminal or tmux does not deliver {', '.join(bad)}")
        else:
            wanted[name] = spelt
    taken = {key: name for name, keys in wanted.items() for key in keys}
    result = []
    for action in ACTIONS:
        keys = wanted.get(action.name) or tuple(
            key for key in action.keys if key not in taken or not _meet(action, known[taken[key]])
        )
        if not keys:
            problems.append(f"keys: {action.name} is left without a key: the palette (:) still has it")
            if action.id in _FIXED:
                keys = action.keys
        result.append(action._replace(keys=keys))
    return tuple(result), problems


def _meet(one: Action, other: Action) -> bool:
    """Whether both can be asked for at the same place."""
    return bool(set(one.screens) & set(other.screens)) and (one.pane is None or other.pane in (None, one.pane))


def bindings(screen: str, actions: Sequence[Action] = ACTIONS) -> list[Binding]:
    """A screen's bindings, made from the actions."""
    return [
        Binding(",".join(action.keys), action.call, action.help, show=False, id=action.name)
        for action in of_screen(screen, actions)
        if action.keys
    ]
