"""What is on the screen first, and what a key draws."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tui_debugger.driving import A, B, opened, press, rest, screen, until
from tui_debugger.app import RldbgApp
from tui_debugger.panes.tensors import TensorRows, TensorsPane
from tui_debugger.screens.debugger import DebuggerScreen
from tui_debugger.screens.keyed import FRAMES_PER_S
from tui_debugger.widgets.paint import write_border


@pytest.fixture(autouse=True)
def _unpainted() -> None:
    """Here paints are what is looked at: they are made."""


async def test_the_steps_are_painted_before_the_other_panes_are_mounted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    display, mount = RldbgApp._display, DebuggerScreen.mount_rest

    def displayed(self: RldbgApp, screen: Any, renderable: Any) -> None:
        if renderable is not None and not self._batch_count:
            seen.append("paint")
        display(self, screen, renderable)

    async def mounted(self: DebuggerScreen) -> None:
        seen.append("the rest")
        await mount(self)

    monkeypatch.setattr(RldbgApp, "_display", displayed)
    monkeypatch.setattr(DebuggerScreen, "mount_rest", mounted)

    async with opened(A):
        pass
    assert seen.count("the rest") == 1
    assert seen.index("paint") < seen.index("the rest")


async def test_leaving_before_every_pane_is_mounted_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    mount = DebuggerScreen.mount_rest

    async def left(self: DebuggerScreen) -> None:
        self.app.exit(return_code=0)
        await mount(self)

    monkeypatch.setattr(DebuggerScreen, "mount_rest", left)

    app = RldbgApp(A)
    async with app.run_test() as pilot:
        await pilot.pause(0.1)
    assert app.return_code == 0
    assert app._exception is None


@pytest.mark.long
@pytest.mark.parametrize(("name", "shows"), [("matrix", "8 cells"), ("trends", "signal"), ("parity", "Measures")])
async def test_news_that_comes_before_a_screen_is_composed_is_drawn_once_it_is(name: str, shows: str) -> None:
    async with opened(A, B) as (app, pilot):
        await press(app, pilot, "P", "escape")  # its numbers are there
        assert app.screen is app.debugger
        app.debugger.action_do(name)
        on_top = app.screen
        assert on_top is not app.debugger
        assert not on_top.is_mounted
        app.debugger._redraw_stale()
        await until(pilot, lambda: on_top.is_mounted, f"the {name} screen")
        await rest(app, pilot)
        assert shows in screen(app)
    assert app._exception is None


@pytest.mark.long
async def test_a_step_of_the_cursor_draws_the_line_it_left_and_the_one_it_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = set()
    line = TensorRows.line

    def noted(self: TensorRows, row: int, width: int) -> Any:
        drawn.add(row)
        return line(self, row, width)

    async with opened(A, B) as (app, pilot):
        rows = app.debugger.query_one(TensorRows)
        monkeypatch.setattr(TensorRows, "line", noted)
        before = rows.cursor
        await press(app, pilot, "j")
        after = rows.cursor
    assert after == before + 1
    assert drawn == {before, after}


@pytest.mark.long
async def test_the_first_frame_of_a_narrow_screen_is_laid_out_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    laid_out: list[frozenset[str]] = []
    mounted = DebuggerScreen.on_mount

    def on_mount(screen: DebuggerScreen) -> None:
        laid_out.append(screen.classes)
        mounted(screen)

    monkeypatch.setattr(DebuggerScreen, "on_mount", on_mount)
    for width in (80, 160):
        async with opened(size=(width, 24)):
            pass
    assert ["-narrow" in classes for classes in laid_out] == [True, False]


async def test_a_key_waits_for_a_frame_of_4_ms_and_not_of_17() -> None:
    async with opened(A, B) as (app, _):
        assert app.screen._update_timer._interval == pytest.approx(1 / FRAMES_PER_S)


async def test_a_count_on_a_border_draws_the_line_and_no_other() -> None:
    async with opened(A, B) as (app, pilot):
        pane = app.screen.query_one(TensorsPane)
        await rest(app, pilot)
        pane._exchange_repaint_regions()
        write_border(pane, subtitle="4,321 of them")
        regions = set(pane._exchange_repaint_regions())
        assert {(region.y, region.height) for region in regions} == {(pane.outer_size.height - 1, 1)}
        await until(pilot, lambda: "4,321 of them" in screen(app))
