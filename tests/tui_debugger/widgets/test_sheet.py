"""A sheet's text can become longer and shorter without the screen being laid out for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from rich.text import Text
from textual.app import App, ComposeResult
from textual.pilot import Pilot

from tui_debugger.widgets.sheet import TextSheet


class SheetApp(App[None]):
    CSS = "TextSheet { height: 10; overflow-x: hidden; overflow-y: scroll; scrollbar-size-vertical: 1; }"

    def compose(self) -> ComposeResult:
        yield TextSheet("nothing yet", id="sheet")


@asynccontextmanager
async def shown() -> AsyncIterator[tuple[TextSheet, Pilot[None]]]:
    app = SheetApp()
    async with app.run_test(size=(30, 12)) as pilot:
        yield app.query_one(TextSheet), pilot


def lines(count: int) -> Text:
    return Text("\n".join(f"line {number}" for number in range(count)))


def on_screen(sheet: TextSheet) -> list[str]:
    return [sheet.render_line(y).text.rstrip() for y in range(sheet.size.height)]


async def test_a_longer_text_lays_out_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with shown() as (sheet, pilot):
        await pilot.pause()
        laid: list[object] = []
        monkeypatch.setattr(sheet.screen, "_refresh_layout", lambda **how: laid.append(how))
        for count in (3, 50, 4, 9):
            sheet.put(lines(count))
            await pilot.pause()
            assert on_screen(sheet)[: min(count, 10)] == [f"line {number}" for number in range(min(count, 10))]
        assert laid == []


async def test_it_scrolls_to_its_last_line_and_no_further() -> None:
    async with shown() as (sheet, pilot):
        sheet.put(lines(50))
        sheet.focus()
        await pilot.press("end")
        await pilot.pause()
        assert on_screen(sheet)[-1] == "line 49"


async def test_what_becomes_shorter_than_where_it_was_scrolled_to_is_seen() -> None:
    async with shown() as (sheet, pilot):
        sheet.put(lines(50))
        sheet.scroll_end(animate=False)
        await pilot.pause()
        sheet.put(lines(12))
        await pilot.pause()
        assert on_screen(sheet) == [f"line {number}" for number in range(2, 12)]


async def test_a_line_wider_than_the_sheet_is_wrapped_and_none_of_it_lost() -> None:
    async with shown() as (sheet, pilot):
        words = [f"word{number}" for number in range(20)]
        sheet.put(Text(" ".join(words)))
        await pilot.pause()
        assert " ".join(filter(None, on_screen(sheet))).split() == words


async def test_its_thumb_tells_how_long_it_is() -> None:
    async with shown() as (sheet, pilot):
        for count in (40, 20):
            sheet.put(lines(count))
            await pilot.pause()
            bar = sheet.vertical_scrollbar
            assert (bar.window_size, bar.window_virtual_size) == (10, count)


async def test_the_same_words_in_another_style_are_drawn_anew() -> None:
    async with shown() as (sheet, pilot):
        sheet.put(Text("nothing yet", style="red"))
        await pilot.pause()
        style = next(iter(sheet.render_line(0))).style
        assert style is not None
        assert style.color is not None
        assert style.color.name == "red"
