"""docs/tolerances.md lists the rules as they are."""

from __future__ import annotations

from pathlib import Path

from benchmarks.tolerances import limits_section
from replay_core.compare.judging.rules import BY_ID

PAGE = (Path(__file__).parents[2] / "docs/tolerances.md").read_text(encoding="utf-8")


def test_the_page_has_every_rule_and_limit():
    assert limits_section() in PAGE, "run: make tolerances"


def test_what_was_measured_is_of_rules_that_there_are_and_no_labelled_pair_was_called_wrongly():
    measured = PAGE.partition("## Measured")[2]
    ids = {line.split("`")[1] for line in measured.splitlines() if line.startswith("| `")}
    assert ids <= set(BY_ID)
    assert len(ids) > len(BY_ID) / 2
    assert "called wrongly: none." in measured
