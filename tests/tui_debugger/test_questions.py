"""Questions that complete, a log that can be searched, a help page that can be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tui_debugger.driving import A, B, opened, press, screen
from tui_debugger.screens.ask import completions
from tui_debugger.screens.logview import LogScreen
from tui_debugger.widgets.rows import Rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("run-a/step_0", "run-b", ".hidden"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "run.log").touch()
    return tmp_path


def test_a_path_completes_to_what_lies_there(folder: Path) -> None:
    assert completions(f"{folder}/run") == [f"{folder}/{name}" for name in ("run-a/", "run-b/", "run.log")]
    assert f"{folder}/.hidden/" not in completions(f"{folder}/")
    assert completions(f"{folder}/.h") == [f"{folder}/.hidden/"]
    assert completions(f"{folder}/nothing") == []
    assert completions("random:ll", ["random:llama-tiny"]) == ["random:llama-tiny"]


@pytest.mark.long
async def test_tab_completes_a_path_and_lists_what_it_may_become(folder: Path) -> None:
    async with opened(A, size=(80, 24)) as (app, pilot):
        await press(app, pilot, "c", *f"{folder}/r", "tab")
        assert app.screen.query_one("LineInput").value == f"{folder}/run"  # type: ignore[attr-defined]
        assert all(name in screen(app) for name in ("run-a/", "run-b/", "run.log"))
        await press(app, pilot, "-", "a", "tab")
        assert app.screen.query_one("LineInput").value == f"{folder}/run-a/"  # type: ignore[attr-defined]
        await press(app, pilot, "escape", "5", "M", "ctrl+u", *"ran", "tab")
        assert app.screen.query_one("LineInput").value.startswith("random:")  # type: ignore[attr-defined]


@pytest.mark.long
async def test_a_log_finds_filters_and_wraps() -> None:
    lines = [f"step {n} loss {n / 7:.4f} " + "x" * 100 for n in range(50)] + ["CUDA error: out of memory"]
    async with opened(A, size=(80, 24)) as (app, pilot):
        app.push_screen(LogScreen(None, lines))
        await press(app, pilot, "g", "slash", *"step 4[0-9]", "enter")
        assert "step 40 " in screen(app)
        await press(app, pilot, "n", "N", "N")
        assert "from the end again" in screen(app)
        rows = app.screen.query_one("#log-lines", Rows)
        assert rows.cursor == 49
        await press(app, pilot, "n")
        assert "from the top again" in screen(app)
        assert rows.cursor == 40
        await press(app, pilot, "slash", *"CUDA", "enter", "n")
        assert "CUDA: this line alone has it" in screen(app)
        await press(app, pilot, "slash", *"zzz", "enter")
        assert "zzz: no line has it" in screen(app)
        await press(app, pilot, "ampersand", *"error", "enter")
        assert "1 of 51 lines with error" in screen(app)
        assert "out of memory" in screen(app)
        assert "step 40 " not in screen(app)
        await press(app, pilot, "escape", "w", "g")
        assert screen(app).count("xxxx") > 12
        assert "step 0 " in screen(app)
        assert "step 10 " not in screen(app), "a line that wraps takes two rows"
        await press(app, pilot, "slash", *"([", "enter")
        assert "is no regular expression" in screen(app)


@pytest.mark.long
async def test_help_has_the_keys_of_the_screen_that_is_open_and_searches_them() -> None:
    async with opened(A, B, size=(80, 24)) as (app, pilot):
        await press(app, pilot, "m", "question_mark")
        assert "Help · the keys of Matrix" in screen(app)
        assert "choose the axes of the matrix" in screen(app)
        await press(app, pilot, "escape", "escape", "question_mark", "slash", *"clipboard", "enter")
        assert "heat strip" not in screen(app)
        await press(app, pilot, "slash", *"diverging", "enter")
        assert "go to the first diverging tensor" in screen(app)
        assert "heat strip" not in screen(app)
