"""What nodes, drivers, stores and schedulers say behind the steps of a run, or before its first; and the same lines in
runs that go on.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.replay_core.diagnose.logs import diagnosed, only, trl, verl, worrying
from tests.replay_core.diagnose.said_on_nodes import BEFORE, GONE_ON, ON_NODES


@pytest.mark.parametrize(("text", "words"), ON_NODES)
def test_what_ends_a_run_is_named(tmp_path: Path, text: str, words: str) -> None:
    first = diagnosed(tmp_path, verl([{}] * 8) + text).findings[0]
    assert first.severity in ("error", "warning")
    assert re.search(words, f"{first.claim} {first.cause}"), first.claim
    assert first.next_step


@pytest.mark.parametrize("text", GONE_ON)
def test_what_a_run_goes_on_after_worries_nobody(tmp_path: Path, text: str) -> None:
    assert not worrying(diagnosed(tmp_path, verl([{}] * 4) + text + verl([{}] * 8, 5)))


@pytest.mark.parametrize("text", BEFORE)
def test_what_is_said_before_the_first_step_worries_nobody(tmp_path: Path, text: str) -> None:
    assert not worrying(diagnosed(tmp_path, text + verl([{}] * 8)))


_CALL = "ERROR:2026-03-02 10:10:55,1:Failed to decode tool call: Expecting ',' delimiter: line 1 column 40 (char 39)\n"


def test_calls_of_tools_that_cannot_be_read_worry_where_they_grow(tmp_path: Path) -> None:
    few = "".join(trl([{}], n) + _CALL * 2 for n in range(1, 25))
    found = only(diagnosed(tmp_path, few), "L72")
    assert (found.severity, found.claim.startswith("some calls of tools cannot be read")) == ("info", True)
    more = "".join(trl([{}], n) + _CALL * max(0, n - 10) for n in range(1, 25))
    found = only(diagnosed(tmp_path, more), "L72")
    assert (found.severity, found.claim.startswith("ever more calls")) == ("warning", True)
