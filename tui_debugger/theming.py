"""Themes are TOML files: textual's own theme fields, and a `[variables]` table.

The words a debugger colours have tokens of their own, so a style sheet says `$diff` and never a
number: see `TOKENS`. A theme that cannot be read is one sentence, and the screen keeps the default.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from textual.color import Color, ColorParseError
from textual.theme import Theme

from tui_debugger import paths

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

DEFAULT = "rldbg-dark"

#: Colours with a meaning of ours, and what stands for one where a theme is silent.
TOKENS: dict[str, str] = {
    "first": "#ff5c7a",
    "on-first": "#14080c",
    "diff": "#ff8f6b",
    "nan": "#ff6bd6",
    "shape": "#ffb454",
    "missing": "#e0c35c",
    "close": "#6fb7d6",
    "same": "#6fae7f",
    "padding": "#8b93a7",
    "muted": "#8b93a7",
    "key": "#8ab4ff",
}

_FIELDS = {field.name for field in dataclasses.fields(Theme)} - {"variables"}
_COLOURS = _FIELDS - {"name", "dark", "ansi", "luminosity_spread", "text_alpha"}


class ThemeError(ValueError):
    """A theme file that cannot be used; the text names file, key and what was expected."""


def read_theme(path: Path) -> Theme:
    """The theme of one file.

    Raises:
        ThemeError: the file is no TOML, or names a field or colour that does not exist.
    """
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ThemeError(f"{path}: {error}") from None
    variables = table.pop("variables", {})
    if not isinstance(variables, dict):
        raise ThemeError(f"{path}: variables: expected a table, found {variables!r}")
    table.setdefault("name", path.stem)
    table.setdefault("primary", TOKENS["key"])
    for key, value in table.items():
        if key not in _FIELDS:
            raise ThemeError(f"{path}: {key}: no such field (one of {', '.join(sorted(_FIELDS))})")
        if key in _COLOURS:
            _check_colour(path, key, value)
    for key, value in variables.items():
        if not isinstance(value, str):
            raise ThemeError(f"{path}: variables.{key}: expected a string, found {value!r}")
        if key in TOKENS:
            _check_colour(path, f"variables.{key}", value)
    # Textual's own style sheet asks an ansi theme for these two.
    ansi = {"ansi-background": "ansi_default", "ansi-foreground": "ansi_default"} if table.get("ansi") else {}
    return Theme(**table, variables={**TOKENS, **ansi, **variables})


def _check_colour(path: Path, key: str, value: object) -> None:
    try:
        Color.parse(str(value))
    except ColorParseError:
        raise ThemeError(f"{path}: {key}: expected a colour such as #ff8800 or ansi_red, found {value!r}") from None


def find_theme(name: str, folders: Iterable[Path] | None = None) -> Theme | None:
    """The theme of the file that bears its name, in the last folder that has one; None where it cannot be used.

    A file may name its theme otherwise than itself: `load_themes` finds that.
    """
    if Path(name).name != name:
        return None
    for folder in reversed([*(paths.theme_dirs() if folders is None else folders)]):
        path = folder / f"{name}.toml"
        if path.is_file():
            try:
                theme = read_theme(path)
            except ThemeError:
                return None
            return theme if theme.name == name else None
    return None


def load_themes(folders: Iterable[Path] | None = None) -> tuple[list[Theme], list[str]]:
    """Every theme found, and one sentence for each that could not be used. A later folder wins."""
    themes: dict[str, Theme] = {}
    problems = []
    for folder in paths.theme_dirs() if folders is None else folders:
        for path in sorted(folder.glob("*.toml")):
            try:
                theme = read_theme(path)
            except ThemeError as error:
                problems.append(str(error))
            else:
                themes[theme.name] = theme
    if DEFAULT not in themes:
        themes[DEFAULT] = Theme(name=DEFAULT, primary=TOKENS["key"], variables=dict(TOKENS))
    return list(themes.values()), problems
