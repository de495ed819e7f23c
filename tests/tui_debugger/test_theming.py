"""Themes load, a bad one is one sentence, and they are found wherever the package is installed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.tui_debugger.driving import A, B, opened, screen, toasts
from tui_debugger import paths, theming

SHIPPED = ("high-contrast", "mono", "rldbg-dark", "rldbg-light", "terminal")


def test_the_shipped_themes_load_without_a_complaint() -> None:
    themes, problems = theming.load_themes()
    assert problems == []
    assert set(SHIPPED) <= {theme.name for theme in themes}
    for theme in themes:
        assert set(theming.TOKENS) <= set(theme.variables)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_theme_draws_the_screen(name: str) -> None:
    async def run() -> None:
        async with opened(A, B, theme=name) as (app, _):
            assert app.theme == name
            assert toasts(app) == []
            assert "DIFF  first at" in screen(app)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name = 'x'\nprimary = 'nocolour'", "primary"),
        ("name = 'x'\ncolour = '#fff'", "colour"),
        ("[variables]\ndiff = 'nocolour'", "variables.diff"),
        ("variables = 3", "variables"),
        ("name = ", "bad.toml"),
        ("name = '\xe9'".encode("latin-1").decode("latin-1"), ""),
    ],
)
def test_a_bad_theme_names_its_file_and_key(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "bad.toml").write_text(text)
    themes, problems = theming.load_themes([tmp_path])
    assert theming.DEFAULT in {theme.name for theme in themes}
    if said:
        assert len(problems) == 1
        assert "bad.toml" in problems[0]
        assert said in problems[0]


def test_an_unknown_or_broken_theme_is_one_message_and_the_default() -> None:
    folder = paths.private_dir(paths.config_dir() / "themes")
    (folder / "broken.toml").write_text("primary = 'nocolour'")

    async def run() -> None:
        async with opened(A, theme="nosuch") as (app, _):
            assert app.theme == theming.DEFAULT
            assert len(toasts(app)) == 1
            assert "nosuch" in toasts(app)[0]
            assert "broken.toml" in toasts(app)[0]

    asyncio.run(run())


def test_a_users_theme_wins_over_a_shipped_one() -> None:
    folder = paths.private_dir(paths.config_dir() / "themes")
    (folder / "mine.toml").write_text("name = 'rldbg-dark'\nprimary = '#123456'")
    themes, _ = theming.load_themes()
    assert next(theme for theme in themes if theme.name == "rldbg-dark").primary == "#123456"


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    async def run() -> None:
        async with opened(A, B) as (app, _):
            colours = {
                segment.style.color.get_truecolor()
                for strip in app.screen._compositor.render_strips()
                for segment in app._filters[-1].apply(list(strip), app.screen.background_colors[1])
                if segment.style is not None and segment.style.color is not None
            }
            assert all(max(colour) - min(colour) <= 1 for colour in colours)

    asyncio.run(run())
