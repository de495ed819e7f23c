"""Settings that a run states as a text: the repr of a configuration object, JSON, and the command line.

Nothing is evaluated: a text is cut at its commas. What is not plainly a table of settings says nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from replay_core.regexes import regex

#: Longer texts are no configuration; how deep tables lie in each other; fewer settings than that are a sentence.
_LONGEST, _DEEPEST, _FEWEST = 1 << 16, 8, 2
_CALL = regex(r"[A-Za-z_][\w.]*\(")
_NAME = regex(r"[A-Za-z_][\w./-]*$")
_NUMBER = regex(r"[+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?$")
#: `--eps-clip=0.2`, `+actor.clip_ratio=0.2`, `algorithm.gamma=1`.
_OPTION = regex(r"(?:--?|\+{1,2}|~)?([A-Za-z_][\w./-]*)(?:=(.*))?$", re.DOTALL)
_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None, "null": None}
_OPENING, _CLOSING = "([{", ")]}"


def told_in_texts(flags: Mapping[str, Any], facts: Mapping[str, Any], command: Any) -> dict[str, Any]:
    """Settings of the texts among these, and of the command line, that nothing else states: what a trainer noted goes
    before how it was called.
    """
    known = {last for table in (flags, facts) for _, last, _ in _leaves(table)}
    opened = {
        path: table for source in (flags, facts) for path, _, value in _leaves(source)
        if (table := opened_text(value)) is not None
    }  # fmt: skip
    found: dict[str, Any] = {}
    for more in (opened, of_command(command) if isinstance(command, list) else {}):
        new = [one for one in _leaves(more) if one[1] not in known]
        known |= {last for _, last, _ in new}
        found |= {path: value for path, _, value in new}
    return found


def opened_text(value: Any) -> dict[str, Any] | None:
    """The table of settings that a text is; None of any other text."""
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST or value.rstrip()[-1:] not in _CLOSING:
        return None
    return _table(value.strip(), _DEEPEST)


def _table(text: str, deep: int) -> dict[str, Any] | None:
    if not deep:
        return None
    if text[0] == "{":
        try:
            read = json.loads(text)
            return read if isinstance(read, dict) and len(read) >= _FEWEST else None
        except (ValueError, RecursionError):
            inside, sign = text[1:-1], ":"
    elif (call := _CALL.match(text)) is not None and text[-1] == ")":
        inside, sign = text[call.end() : -1], "="
    else:
        return None
    found: dict[str, Any] = {}
    for piece in _pieces(inside):
        name, parted, said = piece.partition(sign)
        name = name.strip().strip("'\"")
        if not parted or not _NAME.match(name):
            return None
        found[name] = _value(said.strip(), deep - 1)
    return found if len(found) >= _FEWEST else None


def _pieces(text: str) -> Iterator[str]:
    """The text between the commas that lie in no bracket and no quotes."""
    begin, deep, quote = 0, 0, ""
    for at, sign in enumerate(text):
        if quote:
            quote = "" if sign == quote and text[at - 1] != "\\" else quote
        elif sign in "'\"":
            quote = sign
        elif sign in _OPENING:
            deep += 1
        elif sign in _CLOSING:
            deep -= 1
        elif sign == "," and not deep:
            yield text[begin:at]
            begin = at + 1
    if text[begin:].strip():
        yield text[begin:]


def _value(text: str, deep: int = _DEEPEST) -> Any:
    """A number, a switch, a list of these or a table; else the text itself."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _NUMBER.match(text):
        plain = text.replace("_", "")
        return int(plain) if plain.lstrip("+-").isdecimal() and len(plain) < 20 else float(plain)
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    if deep and text[:1] + text[-1:] in ("[]", "()"):
        return [_value(piece.strip(), deep - 1) for piece in _pieces(text[1:-1])]
    if text[-1:] in ("}", ")") and (table := _table(text, deep)) is not None:
        return table
    return text


def of_command(command: Sequence[Any]) -> dict[str, Any]:
    """The settings of a command line: `--name value`, `--name=value`, `--switch`, and `table.name=value`."""
    words = [word for word in command[1:] if isinstance(word, str) and len(word) <= _LONGEST]
    found: dict[str, Any] = {}
    taken = False
    for at, word in enumerate(words):
        option = None if taken else _OPTION.match(word)
        taken = False
        if option is None or (option[2] is None and not word.startswith("--")):
            continue
        if option[2] is not None:
            found[option[1]] = _value(option[2].strip())
            continue
        follows = words[at + 1] if at + 1 < len(words) else "--"
        # A number below 0 is a value, too.
        taken = not follows.startswith("-") or _NUMBER.match(follows) is not None
        switch = not option[1].lower().startswith(("no-", "no_"))
        name = option[1] if switch or taken else option[1][3:]
        found[name] = _value(follows) if taken else switch
    return found


def _leaves(table: Mapping[str, Any], before: str = "", deep: int = _DEEPEST) -> Iterator[tuple[str, str, Any]]:
    """Every value that is no table: its path, the last part of that as Python would write it, and the value."""
    for name, value in table.items():
        path = f"{before}{name}"
        if not isinstance(value, Mapping):
            yield path, re.split(r"[./]", path.lower())[-1].replace("-", "_"), value
        elif deep:
            yield from _leaves(value, f"{path}.", deep - 1)
