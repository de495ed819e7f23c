"""A list draws the lines that changed or came into sight, and no other."""

from __future__ import annotations

from rich.text import Text
from textual.app import App, ComposeResult
from textual.pilot import Pilot
from textual.widgets import Static

from tui_debugger.widgets.paint import write_border
from tui_debugger.widgets.rows import Rows


class _Numbers(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[int] = []
        self.word = "row"

    def line(self, row: int, width: int) -> Text:
        self.drawn.append(row)
        return Text(f"{self.word} {row}{'  <' if row == self.cursor else ''}")


class _App(App[None]):
    CSS = "_Numbers { height: 1fr; overflow-x: hidden; scrollbar-size-vertical: 1; }"

    def compose(self) -> ComposeResult:
        yield _Numbers()

    @property
    def numbers(self) -> _Numbers:
        return self.query_one(_Numbers)

    def screen_text(self) -> list[str]:
        return [strip.text.rstrip() for strip in self.screen._compositor.render_strips()]


async def _filled(app: _App, pilot: Pilot[None], count: int = 100_000) -> _Numbers:
    app.numbers.set_count(count)
    app.numbers.focus()
    await pilot.pause()
    app.screen_text()
    app.numbers.drawn.clear()
    return app.numbers


async def test_a_list_that_scrolls_draws_the_line_that_comes() -> None:
    app = _App()
    async with app.run_test(size=(40, 12)) as pilot:
        numbers = await _filled(app, pilot)
        numbers.move_cursor(10)
        await pilot.pause()
        shown = app.screen_text()
        assert shown[-1].startswith("row 10  <")
        numbers.drawn.clear()
        await pilot.press("down")
        await pilot.pause()
        shown = app.screen_text()
        assert shown[-1].startswith("row 11  <")
        assert shown[-2].rstrip(" ▁▂▃▄▅▆▇") == "row 10"
        assert set(numbers.drawn) == {10, 11}


async def test_what_is_said_anew_is_drawn_anew() -> None:
    app = _App()
    async with app.run_test(size=(40, 12)) as pilot:
        numbers = await _filled(app, pilot)
        numbers.word = "line"
        numbers.refresh()
        await pilot.pause()
        assert all(text.startswith("line") for text in app.screen_text()[1:])
        app.theme = "textual-light"
        numbers.drawn.clear()
        await pilot.pause()
        app.screen_text()
        assert set(range(1, 11)) <= set(numbers.drawn)


async def test_a_list_that_grows_keeps_what_is_drawn_and_lays_out_nothing() -> None:
    app = _App()
    async with app.run_test(size=(40, 12)) as pilot:
        numbers = await _filled(app, pilot, 5_000)
        layouts: list[object] = []
        app.screen.screen_layout_refresh_signal.subscribe(app.screen, layouts.append)
        numbers.grow(6_000, numbers.cursor)
        await pilot.pause()
        assert not layouts
        assert not set(numbers.drawn) - {0}
        await pilot.press("end")
        await pilot.pause()
        assert app.screen_text()[-1].startswith("row 5999  <")


async def test_a_short_list_that_grows_shows_what_came() -> None:
    app = _App()
    async with app.run_test(size=(40, 12)) as pilot:
        numbers = await _filled(app, pilot, 3)
        for count in (5, 40):
            numbers.grow(count, 0)
            await pilot.pause()
            shown = [text for text in app.screen_text() if text.startswith("row")]
            assert len(shown) == min(count, 11)
        assert numbers.show_vertical_scrollbar


async def test_a_border_says_a_text_as_it_is_and_is_drawn_once() -> None:
    app = _App()
    async with app.run_test(size=(40, 12)) as pilot:
        said = "bad escape [/bold] at [0"
        pane = Static("x")
        await app.mount(pane)
        write_border(pane, said, "under")
        first = pane._border_title
        assert str(first) == said
        write_border(pane, said, "under")
        assert pane._border_title is first
        await pilot.pause()
