"""`rldbg diagnose` as a shell sees it: text, documents, exit codes, errors."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from replay_core.errors import RequestError, SelectionError
from tests.fixtures import FIXTURES
from tui_debugger.command_table import COMMANDS
from tui_debugger.commands.diagnose import command
from tui_debugger.reports.diagnosis import diagnosis_report, headline

LEAK = FIXTURES / "faults" / "packing_contaminated"


def run(*arguments: object, fails: type[Exception] | None = None) -> tuple[int | None, str]:
    answer = CliRunner().invoke(command, [str(argument) for argument in arguments], standalone_mode=False)
    if fails is not None:
        assert isinstance(answer.exception, fails), answer.output
        return None, str(answer.exception)
    assert answer.exception is None, answer.output
    return answer.return_value, answer.output


def test_the_worst_finding_comes_first_with_its_numbers_cause_and_next_step() -> None:
    code, text = run(LEAK)
    lines = text.splitlines()
    assert code == 1
    assert lines[0].startswith("1 error; first D16: the first sample of every pack agrees")
    first = text[text.index("ERROR") :]
    assert "samples that agree = 0, 4, 8, 12" in first
    assert "cause: samples are packed without" in first
    assert "next:  rldbg replay " in first
    assert text.index("ERROR") < text.index("INFO")
    assert "checked" in text
    assert "D29: needs kl" in text


def test_a_healthy_batch_is_0_and_says_what_it_looked_at() -> None:
    code, text = run(FIXTURES / "faults" / "healthy")
    assert code == 0
    assert text.startswith("no warning and no error in")


@pytest.mark.parametrize(("fail_on", "code"), [("error", 1), ("never", 0), ("info", 1)])
def test_the_severity_that_fails_can_be_chosen(fail_on: str, code: int) -> None:
    assert run(LEAK, "--fail-on", fail_on)[0] == code


def test_json_is_the_document_and_nothing_else(tmp_path: Path) -> None:
    code, text = run(LEAK, "--json", "--output", tmp_path / "diagnosis.json")
    document = json.loads(text[text.index("{") :])
    assert code == 1
    assert document["kind"] == "diagnosis"
    assert document["findings"][0]["id"] == "D16"
    assert json.loads((tmp_path / "diagnosis.json").read_text()) == document


def test_one_rule_can_be_asked_for() -> None:
    code, text = run(LEAK, "--rule", "D08", "--rule", "d10")
    assert code == 0
    assert "checked 2 rules: D08 D10" in text


def test_a_dump_and_its_log_are_one_run() -> None:
    notes = FIXTURES / "grpo_notes"
    code, text = run(notes / "captured_1da2900_normal.pt", notes / "train_1da2900_normal.log")
    assert code == 1
    assert "logits/mask lengths disagree: masked-position count 0 while masks exist" in text


def test_a_rule_is_explained_without_a_dump() -> None:
    code, text = run("--explain", "D08")
    assert code == 0
    assert "Correlation of trainer and rollout at lags -1, 0, 1" in text


def test_an_unknown_rule_and_no_path_are_wrong_requests(tmp_path: Path) -> None:
    assert "D00" in run("--explain", "D00", fails=RequestError)[1]
    assert "D00" in run("--rule", "D00", tmp_path, fails=RequestError)[1]
    answer = CliRunner().invoke(command, [], standalone_mode=False)
    assert "needs a dump or a log" in str(answer.exception)


def test_a_step_that_is_not_there_names_those_that_are() -> None:
    assert "step 9" in run(LEAK, "--step", "9", fails=SelectionError)[1]


@pytest.mark.parametrize("folder", ["packing_contaminated", "temperature_mismatch", "zero_std_all_groups", "nan_inf"])
def test_every_next_step_is_a_command_that_exists(folder: str) -> None:
    from importlib import import_module

    import click

    document = json.loads(run(FIXTURES / "faults" / folder, "--json")[1])
    for finding in document["findings"]:
        words = shlex.split(finding["next_step"], comments=True)
        assert words[0] == "rldbg"
        assert words[1] in COMMANDS
        known: click.Command = import_module(COMMANDS[words[1]]).command
        options = {name for parameter in known.params for name in parameter.opts}
        assert {word for word in words[2:] if word.startswith("--")} <= options, finding["next_step"]


def test_the_command_to_look_at_the_place_works() -> None:
    from tui_debugger.commands.show import command as show

    document = json.loads(run(FIXTURES / "faults" / "nan_inf", "--json")[1])
    words = shlex.split(document["findings"][0]["next_step"], comments=True)
    assert words[:2] == ["rldbg", "show"]
    answer = CliRunner().invoke(show, words[2:], standalone_mode=False)
    assert answer.exception is None, answer.output
    assert "inf" in answer.output


def _finding(number: int, **changes: Any) -> dict[str, Any]:
    base = {"id": f"D{number:02}", "severity": "error", "claim": f"claim {number}", "evidence": [], "cause": f"why "
    f"{number}",
            "next_step": f"rldbg ls {number}", "steps": [3, 4], "looked": 5, "echo_of": None}  # fmt: skip
    return {**base, **changes}


def test_one_line_says_what_since_when_and_how_sure_and_the_next_what_to_do() -> None:
    counts = {"error": 1, "warning": 0, "info": 0, "echoes": 0}
    document = _document(findings=[_finding(1)], counts=counts, steps=[1, 2, 3, 4, 5])
    first, second = diagnosis_report(document).splitlines()[:2]
    assert first == "1 error; first D01: claim 1, since step 3 (2 of 5 steps)"
    assert second == "next: rldbg ls 1"


def test_three_findings_are_spelled_out_and_the_others_are_a_line_each() -> None:
    counts = {"error": 5, "warning": 0, "info": 0, "echoes": 0}
    document = _document(findings=[_finding(n) for n in range(1, 6)], counts=counts)
    text = diagnosis_report(document)
    assert [n for n in range(1, 6) if f"cause: why {n}" in text] == [1, 2, 3]
    assert "  ERROR   D05  claim 5  [step 3, 4: 2 of 5]" in text
    assert "cause: why 5" in diagnosis_report(document, show_all=True)


def _document(**changes: Any) -> Any:
    counts = {"error": 0, "warning": 0, "info": 0, "echoes": 0}
    base = {"path": "run", "dialect": "native", "counts": counts, "findings": [], "checked": ["D01"], "skipped": [],
            "notes": [], "series": [], "steps": [1]}  # fmt: skip
    return {**base, **changes}


def test_nothing_looked_at_is_said_first() -> None:
    assert headline(_document(checked=[])) == "nothing could be looked at: no rule found what it needs"


def test_echoes_are_named_with_their_cause_and_spelled_out_on_request() -> None:
    finding = {"id": "D09", "severity": "error", "claim": "they part", "evidence": [], "cause": "c",
               "next_step": "rldbg ls run", "steps": [1, 2, 3, 4, 5, 6], "echo_of": "D08"}  # fmt: skip
    document = _document(findings=[finding])
    assert "downstream: D09 of D08" in diagnosis_report(document)
    # What an echo claims may name the cause better than what it is an echo of; its cause and next step are folded.
    assert "they part" in diagnosis_report(document)
    assert "rldbg ls run" not in diagnosis_report(document)
    quiet = _document(findings=[{**finding, "severity": "info"}])
    assert "they part" not in diagnosis_report(quiet)
    assert "they part  [step 1, 2, 3, 4, 5 and 1 more]" in diagnosis_report(document, show_all=True)
