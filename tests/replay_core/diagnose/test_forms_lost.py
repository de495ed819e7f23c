"""A form of answer that is lost while the answers are right, in a table whose columns are steps."""

from __future__ import annotations

from pathlib import Path

from tests.replay_core.diagnose.logs import diagnosed, worrying


def table(strict: str, flexible: str) -> str:
    return (
        "| Metric | Base | Step 20 | Step 40 | Step 60 | Step 80 | Step 100 |\n|---|---|---|---|---|---|---|\n"
        f"| gsm8k strict | {strict} |\n| gsm8k flex | {flexible} |\n"
    )


HOLDS = "68.3% | 68.2% | 68.9% | 68.4% | 68.2% | 67.9%"


def test_a_form_that_is_lost_is_told_with_the_answers_that_are_not(tmp_path: Path) -> None:
    text = table("69.9% | 69.9% | 68.7% | **69.3%** | 46.8% | 45.9%", HOLDS)
    (found,) = worrying(diagnosed(tmp_path, text))
    assert found.id == "L41"
    assert found.claim.startswith("the form is lost and the answers are not: gsm8k strict falls from 0.699 to 0.463")
    assert "gsm8k flex stays at 0.68" in found.claim


def test_a_table_of_what_holds_is_quiet(tmp_path: Path) -> None:
    assert worrying(diagnosed(tmp_path, table("69.9% | 69.9% | 68.7% | 69.3% | 68.8% | 68.9%", HOLDS))) == []


def test_nor_is_one_where_answers_go_with_their_form(tmp_path: Path) -> None:
    falls = "68.3% | 68.2% | 60.9% | 50.4% | 42.2% | 40.9%"
    found = worrying(diagnosed(tmp_path, table(falls, falls)))
    assert "the form is lost" not in " ".join(one.claim for one in found)
