"""An answer handed out from the command line: a page, a comment, JUnit XML, beside the report or in its place."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest

from replay_core import workbench
from tui_debugger.cli import run
from tui_debugger.command_table import COMMANDS
from tui_debugger.commands import typed_command

DATA = Path(__file__).parents[2] / "data"
A, B = str(DATA / "nexrl/self_hosted_fp32"), str(DATA / "nexrl/self_hosted_bf16")


def test_every_command_that_makes_a_document_hands_it_out():
    makers = 0
    for name, module in COMMANDS.items():
        names = {option.name for option in import_module(module).command.params}
        if "as_json" in names:
            makers += 1
            assert {"html", "markdown", "junit", "output"} <= names, name
    assert makers >= 10


def test_all_forms_of_one_answer_are_written_and_the_report_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / f"x.{name}" for name in ("html", "markdown", "junit", "output")}
    words = [word for name, file in files.items() for word in (f"--{name}", str(file))]
    assert run(["compare", A, B, *words]) == 1
    said = capsys.readouterr()
    assert said.out.startswith("DIFF  first diverging tensor")
    assert said.err.count("wrote ") == 4
    document = json.loads(files["output"].read_text())
    assert workbench.reopen(files["html"]) == document
    for name in ("html", "markdown"):
        assert f"rldbg compare {A} {B}\n" in files[name].read_text().replace("</pre>", "\n"), name
    assert 'failures="0"' not in files["junit"].read_text()


@pytest.mark.long
def test_a_comment_without_a_file_is_printed_in_place_of_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", A, B, "--markdown"]) == 1
    assert capsys.readouterr().out.startswith("### DIFF: first diverging tensor")
    assert run(["compare", A, B, "--junit", "-"]) == 1
    assert capsys.readouterr().out.startswith("<?xml")


@pytest.mark.parametrize("both", [("--json", "--markdown"), ("--markdown", "--html", "-"), ("--junit=-", "--json")])
def test_two_forms_do_not_mix_on_standard_output(capsys: pytest.CaptureFixture[str], both: tuple[str, ...]) -> None:
    assert run(["compare", "/nowhere", "/nothing", *both]) == 2
    assert "both want standard output" in capsys.readouterr().err


def test_a_file_that_is_there_is_not_written_over_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "x.html"
    there.write_text("mine")
    assert run(["compare", "/nowhere", "/nothing", "--html", str(there)]) == 2
    assert "the file is there already" in capsys.readouterr().err
    assert run(["compare", A, A, "--html", str(there), "--force"]) == 0
    assert there.read_text().startswith("<!doctype html>")


def test_a_page_is_compared_again_as_its_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.html"
    assert run(["compare", A, B, "--html", str(file)]) == 1
    first = capsys.readouterr().out
    assert run(["compare", str(file)]) == 1
    assert capsys.readouterr().out == first


def test_the_command_typed_is_without_where_its_answer_went():
    words = ["compare", "a b", "c", "--html", "x.html", "--markdown", "--step", "3", "--json", "--output=y", "--force"]
    assert typed_command(words) == "rldbg compare 'a b' c --step 3"
    assert typed_command(["ls", "--markdown", "-", "RUN"]) == "rldbg ls RUN"
