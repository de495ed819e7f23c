"""Keys that a slow link delivers together act in the order in which they were pressed."""

from __future__ import annotations

import pytest
from textual import events
from textual.widgets import Input

from tests.tui_debugger.driving import A, B, opened, press, rest
from tui_debugger.app import RldbgApp


def _together(app: RldbgApp, *keys: str) -> None:
    """All at once, as they stand in one packet."""
    for key in keys:
        app.post_message(events.Key(key, key if len(key) == 1 else None))


@pytest.mark.long
@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (("1", "2", "backspace", "3"), "13"),
        (("1", "2", "ctrl+u", "3"), "3"),
        (("1", "2", "left", "3"), "132"),
        (("1", "2", "home", "3"), "312"),
    ],
)
async def test_a_key_that_edits_does_not_lag_behind_letters(keys: tuple[str, ...], line: str) -> None:
    async with opened(A, B) as (app, pilot):
        await press(app, pilot, "R")
        _together(app, *keys)
        await rest(app, pilot)
        assert app.screen.query_one(Input).value == line


async def test_a_corrected_tolerance_is_the_one_in_force() -> None:
    async with opened(A, B) as (app, pilot):
        await press(app, pilot, "R")
        _together(app, "1", "4", "backspace", "3", "enter")
        await rest(app, pilot)
        assert app.session.state.tolerance.atol == 13


async def test_escape_still_leaves_a_filter() -> None:
    async with opened(A, B) as (app, pilot):
        await press(app, pilot, "slash", "m", "l", "p")
        assert app.session.state.tensors.filter == "mlp"
        await press(app, pilot, "escape")
        assert app.session.state.tensors.filter == ""
