from __future__ import annotations

from typing import Any

import pytest

from replay_core.errors import ExitCode
from replay_core.export.outcome import exit_code


def comparison(unreadable: int = 0, **counts: int) -> Any:
    every = dict.fromkeys(("SAME", "CLOSE", "DIFF", "NAN", "SHAPE", "MISSING", "PADDING", "skipped"), 0) | counts
    return {"kind": "comparison", "counts": every, "coverage": {"records_unreadable": unreadable}, "others": []}


@pytest.mark.parametrize("word", ["SAME", "CLOSE", "PADDING"])
def test_agreement_is_0(word: str):
    assert exit_code(comparison(**{word: 3})) == ExitCode.AGREES


@pytest.mark.parametrize("word", ["DIFF", "NAN", "SHAPE", "MISSING", "skipped"])
def test_one_of_these_is_1(word: str):
    assert exit_code(comparison(SAME=100, **{word: 1})) == ExitCode.DIVERGES


def test_missing_may_be_allowed_and_a_difference_may_not():
    assert exit_code(comparison(MISSING=1, SAME=1), allow_missing=True) == ExitCode.AGREES
    assert exit_code(comparison(MISSING=1, SHAPE=1), allow_missing=True) == ExitCode.DIVERGES


def test_an_unreadable_record_goes_before_everything():
    assert exit_code(comparison(1, DIFF=3), allow_missing=True) == ExitCode.BAD_BYTES


def cell(outcome: str = "ran", agrees: bool | None = True, asked: bool = True) -> Any:
    return {
        "outcome": outcome,
        "asked": asked,
        "agreement": {"agrees": agrees, "first_divergence": None, "counts": None},
        "recorded": [],
        "recorded_training": None,
    }


@pytest.mark.parametrize(
    ("cells", "code"),
    [
        ([cell(agrees=None), cell()], ExitCode.AGREES),
        ([cell(agrees=None), cell(), cell(agrees=False)], ExitCode.DIVERGES),
        ([cell(agrees=None), cell("crashed", None), cell(agrees=False)], ExitCode.CELL_FAILED),
        ([cell(agrees=None), cell("failed", None)], ExitCode.CELL_FAILED),
        ([cell(agrees=None), cell(asked=False), cell("unavailable", None)], ExitCode.CELL_FAILED),
        ([cell(agrees=None), cell(), cell("unavailable", None)], ExitCode.AGREES),
    ],
)
def test_exit_codes_of_replays(cells: list[Any], code: ExitCode):
    document: Any = {"kind": "replay", "baseline": 0, "cells": cells, "ranking": None}
    assert exit_code(document) == code


def test_a_run_with_an_unreadable_record_is_3():
    assert exit_code({"kind": "run", "unreadable": 1}) == ExitCode.BAD_BYTES
    assert exit_code({"kind": "run", "unreadable": 0}) == ExitCode.AGREES


def diagnosis(*severities: str, checked: int = 3) -> Any:
    findings = [{"severity": severity, "echo_of": None} for severity in severities]
    return {"kind": "diagnosis", "findings": findings, "checked": ["D01"] * checked}


@pytest.mark.parametrize(
    ("severity", "fail_on", "code"),
    [
        ("info", "warning", 0), ("warning", "warning", 1), ("error", "warning", 1), ("warning", "error", 0),
        ("error", "error", 1), ("info", "info", 1), ("error", "never", 0),
    ],
)  # fmt: skip
def test_a_finding_fails_from_the_severity_asked_for(severity: str, fail_on: str, code: int):
    assert exit_code(diagnosis(severity), fail_on=fail_on) == code


def test_a_diagnosis_that_looked_at_nothing_is_no_clean_bill():
    assert exit_code(diagnosis()) == ExitCode.AGREES
    assert exit_code(diagnosis(checked=0)) == ExitCode.BAD_BYTES


def test_an_echo_decides_no_exit_code() -> None:
    def diagnosis(*findings: tuple[str, str | None]) -> Any:
        found = [{"severity": severity, "echo_of": echo} for severity, echo in findings]
        return {"kind": "diagnosis", "findings": found, "checked": ["D01"]}

    assert exit_code(diagnosis(("error", None), ("error", "D01"))) == ExitCode.DIVERGES
    assert exit_code(diagnosis(("info", None), ("warning", "D01"))) == ExitCode.AGREES
