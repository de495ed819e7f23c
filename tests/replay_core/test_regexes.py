"""Every regular expression of the product compiles, and none does before it is used."""

from __future__ import annotations

import importlib
import pkgutil
import re

import pytest

from replay_core import regexes
from replay_core.regexes import regex


def test_it_is_what_compiling_gives() -> None:
    later, now = regex(r"(?P<step>\d+)", re.IGNORECASE), re.compile(r"(?P<step>\d+)", re.IGNORECASE)
    found = later.search("step 12")
    assert found is not None
    assert found["step"] == "12"
    assert later.fullmatch("x") is None
    assert later.sub("n", "1 2") == "n n"
    assert (later.pattern, later.flags, later.groupindex) == (now.pattern, now.flags, now.groupindex)


def test_nothing_is_compiled_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(re, "compile", lambda text, flags=0: compiled.append(text))
    expression = regex("a(b")
    assert compiled == []
    with pytest.raises(AttributeError):
        _ = expression.no_such_method  # type: ignore[attr-defined]
    assert compiled == []


@pytest.mark.parametrize("room", ["replay_core", "tui_debugger"])
def test_every_expression_of_the_product_compiles(room: str) -> None:
    package = importlib.import_module(room)
    count = 0
    for module in pkgutil.walk_packages(package.__path__, f"{room}."):
        if module.name.endswith("__main__"):
            continue
        loaded = importlib.import_module(module.name)
        for value in vars(loaded).values():
            if isinstance(value, regexes._Later):
                assert re.compile(value.pattern, value._flags)
                count += 1
    assert count > 5
