"""config.toml: what is used, and that a bad line is a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tui_debugger.driving import A, B, opened, press, screen, toasts
from tui_debugger import keymap, paths
from tui_debugger.settings import read_settings


def _written(text: str) -> Path:
    path = paths.private_dir(paths.config_dir()) / "config.toml"
    path.write_text(text)
    return path


def test_without_a_file_the_defaults_hold() -> None:
    settings = read_settings()
    assert (settings.theme, settings.mouse, settings.ascii, settings.keys, settings.problems) == (
        None, True, False, {}, []
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[keys", "config.toml"),
        ("[colours]\nx = 1", "colours"),
        ("[screen]\ntheem = 'mono'", "did you mean theme?"),
        ("[screen]\nmouse = 'no'", "screen.mouse: expected true or false"),
        ("[keys]\nfirst = 3", "keys.first: expected a key"),
    ],
)
def test_a_bad_line_names_itself(text: str, said: str) -> None:
    (problem,) = read_settings(_written(text)).problems
    assert said in problem


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"frist": ("f5",)}, "did you mean first?"),
        ({"first": ("ctrl+i",)}, "does not deliver ctrl+i"),
        ({"first": ("ctrl+b",)}, "does not deliver ctrl+b"),
    ],
)
def test_a_key_no_terminal_sends_is_refused(keys: dict[str, tuple[str, ...]], said: str) -> None:
    actions, problems = keymap.remapped(keys)
    assert said in problems[0]
    assert next(action for action in actions if action.id == "first").keys == ("d",)


def test_a_users_key_is_taken_from_the_action_that_had_it() -> None:
    actions, problems = keymap.remapped({"filter": ("r",)})
    by_name = {action.name: action for action in actions}
    assert by_name["filter"].keys == ("r",)
    assert by_name["replay"].keys == ()
    assert by_name["run_matrix"].keys == ("r",)  # another screen
    assert "replay is left without a key" in problems[0]


@pytest.mark.long
async def test_a_users_keys_work_and_the_key_bar_says_so() -> None:
    _written("[keys]\nfirst = 'f5'\n[screen]\ntheme = 'mono'\n")

    async with opened(A, B) as (app, pilot):
        assert app.theme == "mono"
        assert " f5 first" in screen(app).splitlines()[-1]
        await press(app, pilot, "G")
        assert app.session.state.tensors.row is not None
        assert not app.session.state.tensors.row.is_first
        await press(app, pilot, "d")
        assert not app.session.state.tensors.row.is_first
        await press(app, pilot, "f5")
        assert app.session.state.tensors.row.is_first


async def test_a_bad_file_is_one_message_and_the_screen_opens() -> None:
    _written("[keys]\nfrist = 'f5'\n[screen]\ntheme = 'nosuch'\n")

    async with opened(A) as (app, _):
        assert len(toasts(app)) == 1
        assert "frist" in toasts(app)[0]
        assert "nosuch" in toasts(app)[0]
