from __future__ import annotations

from pathlib import Path

import pytest

from replay_core.diagnose.catalogue import explained, page
from replay_core.diagnose.engine import rules
from replay_core.errors import RequestError

PAGE = Path(__file__).resolve().parents[3] / "docs" / "diagnostics.md"


def test_the_page_is_as_the_rules_are() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: make docs"


def test_a_rule_says_what_it_looks_at_and_where_it_comes_from() -> None:
    text = explained("d16")
    assert "the first sample of every pack agrees" in text
    assert "source" in text


def test_an_unknown_rule_names_those_there_are() -> None:
    with pytest.raises(RequestError, match="D00"):
        explained("D00")


def test_every_rule_stands_on_the_page() -> None:
    text = page()
    assert all(f"## {rule.id} {rule.title}" in text for rule in rules())
