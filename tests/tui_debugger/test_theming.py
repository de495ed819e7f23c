"""Themes load, a bad one is one sentence, and they are found wherever the package is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from textual.color import Color

from tests.tui_debugger.driving import A, B, opened, screen, toasts
from tui_debugger import paths, theming

SHIPPED = ("colour-blind", "high-contrast", "mono", "rldbg-dark", "rldbg-light", "terminal")


def test_the_shipped_themes_load_without_a_complaint() -> None:
    themes, problems = theming.load_themes()
    assert problems == []
    assert set(SHIPPED) <= {theme.name for theme in themes}
    for theme in themes:
        assert set(theming.TOKENS) <= set(theme.variables)


@pytest.mark.parametrize("name", SHIPPED)
async def test_every_theme_draws_the_screen(name: str) -> None:
    async with opened(A, B, theme=name) as (app, _):
        assert app.theme == name
        assert toasts(app) == []
        assert "DIFF  first at" in screen(app)


def _luminance(colour: str) -> float:
    parts = [part / 255 for part in Color.parse(colour).rgb]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, other: str) -> float:
    """WCAG 2.2: 1 is invisible, 21 is black on white; text needs 4.5."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


#: A word on what it is drawn on. Words of verdicts stand on the panes, on the cursor line, and on the bars.
GROUNDS = ("background", "panel", "block-cursor-background", "block-cursor-blurred-background")


@pytest.mark.parametrize("name", [name for name in SHIPPED if name != "terminal"])
def test_every_word_can_be_read_on_what_it_stands_on(name: str) -> None:
    theme = next(theme for theme in theming.load_themes()[0] if theme.name == name)
    colours: dict[str, Any] = {
        "background": theme.background,
        "panel": theme.panel,
        "foreground": theme.foreground,
        **theme.variables,
    }
    words = [token for token in theming.TOKENS if token != "on-first"] + ["foreground"]
    faint = {
        f"{word} on {ground}": round(ratio, 1)
        for ground in GROUNDS
        for word in words
        if (ratio := _contrast(str(colours[word]), str(colours[ground]))) < (4.5 if ground == "background" else 3)
    }
    assert faint == {}
    assert _contrast(colours["on-first"], colours["first"]) >= 4.5
    assert _contrast(colours["block-cursor-foreground"], colours["block-cursor-background"]) >= 4.5


#: xterm's own palette, which most terminals start from.
XTERM = {
    "ansi_red": "#cd0000", "ansi_green": "#00cd00", "ansi_yellow": "#cdcd00", "ansi_blue": "#0000ee",
    "ansi_magenta": "#cd00cd", "ansi_cyan": "#00cdcd", "ansi_bright_black": "#7f7f7f", "ansi_bright_red": "#ff0000",
    "ansi_bright_blue": "#5c5cff", "ansi_bright_white": "#ffffff", "ansi_default": "#e5e5e5",
}  # fmt: skip


def test_the_sixteen_colours_of_a_terminal_can_be_read_on_black() -> None:
    theme = next(theme for theme in theming.load_themes()[0] if theme.name == "terminal")
    colours = {**theme.variables, "primary": theme.primary}
    words = [token for token in theming.TOKENS if token != "on-first"] + ["border", "primary"]
    faint = {word: round(ratio, 1) for word in words if (ratio := _contrast(XTERM[str(colours[word])], "#000000")) < 3}
    assert faint == {}


async def test_the_answer_of_a_terminal_with_sixteen_colours_is_not_red_on_red() -> None:
    async with opened(A, B, theme="terminal") as (app, _):
        assert app.query_one("#headline").styles.background.ansi == -1


def test_colour_blind_eyes_tell_agreement_from_divergence_by_lightness_or_blue() -> None:
    theme = next(theme for theme in theming.load_themes()[0] if theme.name == "colour-blind")
    for bad in ("first", "diff", "nan", "shape"):
        same, other = (Color.parse(theme.variables[token]).rgb for token in ("same", bad))
        # Protan and deutan eyes keep the blue axis: agreement is blue, divergence is not.
        assert same[2] - other[2] > 30 or same[0] - other[0] < -80


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


async def test_an_unknown_or_broken_theme_is_one_message_and_the_default() -> None:
    folder = paths.private_dir(paths.config_dir() / "themes")
    (folder / "broken.toml").write_text("primary = 'nocolour'")

    async with opened(A, theme="nosuch") as (app, _):
        assert app.theme == theming.DEFAULT
        assert len(toasts(app)) == 1
        assert "nosuch" in toasts(app)[0]
        assert "broken.toml" in toasts(app)[0]


def test_a_users_theme_wins_over_a_shipped_one() -> None:
    folder = paths.private_dir(paths.config_dir() / "themes")
    (folder / "mine.toml").write_text("name = 'rldbg-dark'\nprimary = '#123456'")
    themes, _ = theming.load_themes()
    assert next(theme for theme in themes if theme.name == "rldbg-dark").primary == "#123456"


async def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    async with opened(A, B) as (app, _):
        colours = {
            segment.style.color.get_truecolor()
            for strip in app.screen._compositor.render_strips()
            for segment in app._filters[-1].apply(list(strip), app.screen.background_colors[1])
            if segment.style is not None and segment.style.color is not None
        }
        assert all(max(colour) - min(colour) <= 1 for colour in colours)
