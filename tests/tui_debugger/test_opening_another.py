"""Opening something else from the screen: nothing of the former run goes with it, and a wrong path costs nothing."""

from __future__ import annotations

import pytest

from tests.tui_debugger.driving import A, B, opened, press, screen, toasts
from tests.tui_debugger.scripted import ScriptedEngine
from tui_debugger.panes.start import StartList


@pytest.mark.long
async def test_a_path_that_is_no_dump_leaves_what_is_open_as_it_is() -> None:
    async with opened(A, B) as (app, pilot):
        before = screen(app).splitlines()[:4]
        await press(app, pilot, "o", *"/runs/mistyped", "enter")
        assert any("/runs/mistyped" in toast for toast in toasts(app)), toasts(app)
        app.clear_notifications()
        await press(app, pilot)
        assert screen(app).splitlines()[:4] == before
    async with opened(A) as (app, pilot):
        await press(app, pilot, "o", *"/runs/mistyped", "enter")
        assert "ERROR" not in screen(app).splitlines()[1]
        assert app.session.state.opened.a_path == A


@pytest.mark.long
async def test_where_nothing_could_be_opened_the_first_screen_is_still_there() -> None:
    async with opened(size=(80, 24)) as (app, pilot):
        await press(app, pilot, "o", *"/runs/mistyped", "enter")
        assert "ERROR" in screen(app).splitlines()[1]
        assert app.screen.query_one(StartList).display
        await press(app, pilot, "o", *str(A), "enter")
        assert not app.screen.query_one(StartList).display
        assert "ERROR" not in screen(app).splitlines()[1]


@pytest.mark.long
async def test_a_replay_after_the_demo_is_of_the_run_that_is_open() -> None:
    engine = ScriptedEngine()
    async with opened(B, engine=engine, replay={"dump": A, "model": "checkpoint"}) as (app, pilot):
        await press(app, pilot, "m", "r", "escape", "o", *str(A), "enter")
        state = app.session.state
        assert (state.replay.matrix.document, state.replay.matrix.cells, state.replay.cells) == (None, [], [])
        await press(app, pilot, "o", *str(B), "enter", "M", *"random:llama-tiny", "enter", "r")
        assert engine.last("replay").params["plan"]["dump"] == str(B)
