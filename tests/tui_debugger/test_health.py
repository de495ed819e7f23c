"""A diagnosis on the screen: worst first, what is downstream folded, what is skipped said, marks that are no colour."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.tui_debugger.scripted import document
from tui_debugger.health import MARKS, SEVERITIES, Health, in_steps, lines, worse


def finding(id: str, severity: str = "error", steps: tuple[int, ...] = (), echo_of: str | None = None) -> Any:
    where = dict.fromkeys(("step", "micro", "rank", "role", "stage", "tensor", "sample", "position", "line", "path"))
    return {
        "id": id, "severity": severity, "claim": f"{id} is wrong", "evidence": [], "cause": "a cause",
        "next_step": "rldbg ls RUN", "link": "loss", "source": "a source", "where": where, "steps": list(steps),
        "echo_of": echo_of,
    }  # fmt: skip


def diagnosis(*findings: Any, steps: tuple[int, ...] = (0, 1, 2)) -> Any:
    skipped = [
        {"id": "D30", "why": "no routing"},
        {"id": "D31", "why": "no versions"},
        {"id": "D32", "why": "no routing"},
    ]
    return {
        "kind": "diagnosis", "path": "/run", "dialect": "native", "steps": list(steps), "findings": list(findings),
        "checked": ["D01", "D08"], "skipped": skipped, "notes": [], "series": [],
    }  # fmt: skip


def test_findings_stand_worst_first_with_what_is_downstream_folded_under_them() -> None:
    health = Health(
        diagnosis(finding("D20", "info"), finding("D08"), finding("L01", "warning"), finding("D09", echo_of="D08"))
    )
    listed = lines(health, [])
    assert [(line.kind, line.severity) for line in listed[:4]] == [
        ("finding", "error"), ("downstream", "info"), ("finding", "warning"), ("finding", "info"),
    ]  # fmt: skip
    assert listed[1].text == "1 downstream of it: D09"
    opened = lines(health, [], {"D08"})
    assert [line.text for line in opened[:3]] == ["D08 D08 is wrong", "1 downstream of it: D09", "D09 D09 is wrong"]


def test_a_problem_met_while_reading_stands_among_the_warnings() -> None:
    problem = {"severity": "warning", "claim": "the file ends early", "where": "/run/a.pt"}
    listed = lines(Health(diagnosis(finding("D08"), finding("D04", "info"))), [problem])
    assert [line.kind for line in listed] == ["finding", "problem", "finding", "skipped"]


def test_what_was_skipped_is_counted_and_says_why_when_opened() -> None:
    health = Health(diagnosis())
    assert lines(health, [])[-1].text == "3 rules skipped, 2 looked"
    assert [line.text for line in lines(health, [], {"skipped"})[-2:]] == ["D30 D32: no routing", "D31: no versions"]


def test_clean_is_said_only_where_rules_looked() -> None:
    assert lines(Health(diagnosis()), [])[0].kind == "clean"
    nothing = diagnosis()
    nothing["checked"] = []
    assert all(line.kind != "clean" for line in lines(Health(nothing), []))
    assert "nothing could be diagnosed" in Health(nothing).note()
    assert Health(nothing).clean() is None
    assert Health(nothing).at_steps() == {}
    assert lines(Health(), []) == []
    assert Health().note() == ""
    problem = {"severity": "warning", "claim": "the file ends early", "where": "/run/a.pt"}
    assert all(line.kind != "clean" for line in lines(Health(diagnosis()), [problem]))


def test_every_step_gets_the_worst_severity_found_there() -> None:
    health = Health(
        diagnosis(finding("D08", "error", (1,)), finding("L01", "warning", (0, 1)), finding("D04", "info", (2,)))
    )
    assert health.at_steps() == {0: ("warning", 1), 1: ("error", 2), 2: ("", 0)}
    echo = finding("D09", "error", (2,), echo_of="D08")
    assert Health(diagnosis(finding("D08", "error", (1,)), echo)).at_steps()[2] == ("", 0)


def test_marks_tell_severities_apart_without_colour() -> None:
    words = [word for word, _ in MARKS.values()]
    assert len(set(words)) == len(words)
    assert {word[-1] for severity, (word, _) in MARKS.items() if severity} == {"E", "W"}


def test_the_answer_is_the_worst_finding_and_how_many_there_are_besides() -> None:
    answer = Health(diagnosis(finding("L01", "warning"), finding("D08", "error", (3,)))).answer()
    assert answer is not None
    assert (answer.word, answer.token, answer.where) == ("ERROR", "first", "D08 D08 is wrong")
    assert answer.facts == ["step 3", "and 1 warning more (7)"]
    assert answer.sentence.startswith("ERROR D08 D08 is wrong")
    assert Health(diagnosis(finding("D04", "info"))).answer() is None


@given(st.sets(st.integers(0, 40), min_size=1))
def test_steps_in_words_name_the_first(steps: set[int]) -> None:
    assert str(min(steps)) in in_steps(sorted(steps))


@given(st.sampled_from(("", *SEVERITIES)), st.sampled_from(("", *SEVERITIES)))
def test_worse_is_the_same_either_way(one: str, other: str) -> None:
    assert worse(one, other) == worse(other, one)
    assert worse(one, "") == one


def test_a_genuine_diagnosis_has_a_line_for_every_finding() -> None:
    for name in ("diagnosis", "diagnosis_shifted", "diagnosis_log"):
        genuine = document(name)
        health = Health(copy.deepcopy(genuine))
        opened = {one["id"] for one in genuine["findings"]} | {"skipped"}
        shown = [line.finding["id"] for line in lines(health, [], opened) if line.finding is not None]
        assert sorted(shown) == sorted(one["id"] for one in genuine["findings"])
