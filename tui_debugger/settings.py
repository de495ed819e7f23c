"""What the user set once, in `config.toml`: keys, theme, mouse, ASCII. A bad line is a sentence, never a crash.

[screen]
theme = "rldbg-light"
mouse = false
ascii = true

[keys]
first = "f5"
"flag.attention" = ["a", "f6"]
"""

from __future__ import annotations

import difflib
import os
import sys
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from tui_debugger import paths

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

_SCREEN: dict[str, type] = {"theme": str, "mouse": bool, "ascii": bool}


class UserSettings(Struct, eq=False):
    theme: str | None = None
    mouse: bool = True
    ascii: bool = False
    keys: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Action name -> its keys, in place of the default ones."""
    problems: list[str] = field(default_factory=list)


def config_file() -> Path:
    """`$RLDBG_CONFIG`, else config.toml in the configuration folder."""
    named = os.environ.get("RLDBG_CONFIG")
    return Path(named) if named else paths.config_dir() / "config.toml"


def read_settings(path: Path | None = None) -> UserSettings:
    """The user's settings; the defaults where there are none. What cannot be used is in `problems`."""
    path = path or config_file()
    settings = UserSettings(mouse=not os.environ.get("RLDBG_NO_MOUSE"))
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return settings
    except (OSError, ValueError, RecursionError) as error:
        settings.problems.append(f"{path}: {error}")
        return settings
    for section, content in table.items():
        if section not in ("screen", "keys") or not isinstance(content, dict):
            settings.problems.append(f"{path}: {section}: no such table (one of [screen], [keys])")
            continue
        for name, value in content.items():
            problem = _set(settings, name, value) if section == "screen" else _key(settings, name, value)
            if problem:
                settings.problems.append(f"{path}: {section}.{name}: {problem}")
    return settings


def _set(settings: UserSettings, name: str, value: object) -> str | None:
    kind = _SCREEN.get(name)
    if kind is None:
        return f"no such setting{nearest(name, _SCREEN)}"
    if not isinstance(value, kind):
        return f"expected {'true or false' if kind is bool else 'a text'}, found {value!r}"
    setattr(settings, name, value)
    return None


def _key(settings: UserSettings, name: str, value: object) -> str | None:
    keys = [value] if isinstance(value, str) else value
    if not isinstance(keys, list) or not keys or not all(isinstance(key, str) for key in keys):
        return f"expected a key or a list of keys, found {value!r}"
    settings.keys[name] = tuple(keys)
    return None


def nearest(word: str, choices: Any) -> str:
    """`; did you mean X?`, or nothing."""
    near = difflib.get_close_matches(word, list(choices), n=1)
    return f"; did you mean {near[0]}?" if near else ""
