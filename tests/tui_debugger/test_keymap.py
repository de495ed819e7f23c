"""Every action has a method, every key reaches an app in tmux, none means two things."""

from __future__ import annotations

from tui_debugger import keymap
from tui_debugger.actions import ACTIONS, PANES, for_bar, of_screen
from tui_debugger.screens.debugger import DebuggerScreen
from tui_debugger.screens.matrix import MatrixScreen
from tui_debugger.screens.trends import TrendsScreen

SCREENS = {"debugger": DebuggerScreen, "matrix": MatrixScreen, "trends": TrendsScreen}


def test_every_action_is_a_method_of_its_screens() -> None:
    for name, screen in SCREENS.items():
        listed = of_screen(name)
        assert listed
        assert [action.id for action in listed if not hasattr(screen, f"action_{action.id}")] == []


def test_every_key_is_deliverable() -> None:
    assert [key for action in ACTIONS for key in action.keys if not keymap.is_deliverable(key)] == []


def test_the_known_bad_keys_are_refused() -> None:
    bad = (
        "ctrl+h",
        "ctrl+i",
        "ctrl+m",
        "ctrl+j",
        "alt+1",
        "alt+enter",
        "ctrl+shift+p",
        "ctrl+slash",
        "ctrl+b",
        "ctrl+enter",
    )
    assert [key for key in bad if keymap.is_deliverable(key)] == []


def test_no_key_means_two_things() -> None:
    for name in SCREENS:
        keys = [(key, action.pane) for action in of_screen(name) for key in action.keys]
        assert len(keys) == len(set(keys))
        anywhere = [key for key, pane in keys if pane is None]
        assert not set(anywhere) & {key for key, pane in keys if pane is not None}


def test_the_bar_always_offers_help_and_quit() -> None:
    for pane in (*PANES, "start", "matrix", "trends"):
        assert {"help", "quit"} <= {action.id for action in for_bar(pane)}


def test_the_bar_offers_no_divergence_where_nothing_is_compared() -> None:
    for pane in PANES:
        alone = [action.id for action in for_bar(pane, compared=False)]
        assert not {"first", "diverging", "strip", "tolerance"} & set(alone)
        assert alone.index("compare") < alone.index("replay")
    assert for_bar("flags", compared=False)[0].label == "change"
