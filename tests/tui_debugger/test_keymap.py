"""Every action has a method, every key reaches an app in tmux, none means two things."""

from __future__ import annotations

from tests.tui_debugger.scripted import ScriptedEngine
from tui_debugger import keymap
from tui_debugger.actions import ACTIONS, PANES, for_bar, of_screen
from tui_debugger.app import RldbgApp
from tui_debugger.screens.matrix import MatrixScreen
from tui_debugger.screens.parity import ParityScreen
from tui_debugger.screens.trends import TrendsScreen

SCREENS = ("debugger", "matrix", "trends", "parity")


def test_every_action_is_done_by_somebody_its_screen_asks() -> None:
    stage = RldbgApp(engine=ScriptedEngine()).debugger.stage
    for screen in (stage.screen, MatrixScreen(stage), TrendsScreen(stage), ParityScreen(stage)):
        listed = of_screen(screen.KEYS_OF)
        assert listed
        undone = [one.id for one in listed if not any(hasattr(doer, f"do_{one.id}") for doer in screen.doers())]
        assert not undone, f"{screen.KEYS_OF}: nobody does {undone}"


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
