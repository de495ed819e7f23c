"""The command line helps: misspelt words, its own help, completion, closed streams, places that cannot be written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.dumps import open_run
from replay_core.errors import ExitCode, missing_library
from replay_core.executors.in_process import unexpected
from replay_core.jobs import Job
from replay_core.replay.flags import FLAGS
from tests.builders import save_file, write_dump
from tui_debugger.cli import run
from tui_debugger.command_table import COMMANDS, HIDDEN
from tui_debugger.commands.help import _CODES, _VERDICTS, TOPICS
from tui_debugger.reports.run import ROWS

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: Any) -> tuple[int, str, str]:
        code = run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert "internal error" not in err
        return code, out, err

    return call


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dump(tmp_path_factory.mktemp("parent") / "run", {"loss": {"loss": 1.0, "x": torch.ones(2)}})


@pytest.mark.parametrize(("typed", "meant"), [("compair", "compare"), ("diagnoze", "diagnose"), ("repaly", "replay")])
def test_a_misspelt_command_is_told_what_was_meant(typed: str, meant: str, said: Any) -> None:
    code, out, err = said(typed, "a", "b")
    assert (code, out) == (ExitCode.BAD_REQUEST, "")
    assert f"did you mean {meant}?" in err


def test_a_path_that_is_called_nearly_like_a_command_is_a_path(
    said: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_dump(tmp_path / "compar", {"loss": {"loss": 1.0}})
    assert "did you mean" not in said("compar")[2]


@pytest.mark.parametrize("command", ["compare", "ls", "replay", "diagnose"])
def test_an_error_points_to_the_help_of_its_own_command(command: str, said: Any) -> None:
    code, _, err = said(command, "--nope")
    assert code == ExitCode.BAD_REQUEST
    assert f"hint: rldbg {command} --help" in err


def test_the_help_of_a_replay_has_sections_and_examples_that_exist(said: Any) -> None:
    code, out, _ = said("replay", "--help")
    assert code == 0
    titles = re.findall(r"^([A-Z][\w ]+):$", out, re.MULTILINE)
    assert titles[0] == "What is replayed"
    assert titles[-2:] == ["Other", "Examples"]
    settings = out.partition("Under which settings:")[2].partition("With gradients:")[0]
    for name, flag in FLAGS.items():
        assert (flag.option or "--" + name.replace("_", "-")) in settings
    known = set(re.findall(r"--[a-z][\w-]+", out.partition("Examples:")[0]))
    assert set(re.findall(r"--[a-z][\w-]+", out.partition("Examples:")[2])) <= known


def test_every_command_topic_and_rule_is_explained(said: Any) -> None:
    listed = said("help")[1]
    for name in COMMANDS:
        assert (name in HIDDEN) or f"  {name} " in listed
        assert said("help", name)[1].startswith(f"Usage: rldbg {name}")
    for topic in TOPICS:
        assert said("help", topic)[1].startswith(f"{topic}: ")
        assert topic in listed
    assert said("help", "d16")[1].startswith("D16  ")
    code, _, err = said("help", "nothing")
    assert code == ExitCode.BAD_REQUEST
    assert "exit-codes" in err


def test_topics_say_what_the_readme_says() -> None:
    codes = re.findall(r"^\| (\d+) \|", README.partition("## Exit codes")[2].partition("##")[0], re.MULTILINE)
    assert [int(code) for code in _CODES] == [int(code) for code in codes] == sorted(int(code) for code in ExitCode)
    assert dict(re.findall(r"^\| `([A-Z]+)` \| (.+) \|$", README, re.MULTILINE)) == _VERDICTS


@pytest.mark.long
def test_bash_completes_commands_options_and_paths(dump: Path, tmp_path: Path) -> None:
    (tmp_path / "rldbg").write_text(f'#!/bin/sh\nexec {sys.executable} -m tui_debugger "$@"\n')
    (tmp_path / "rldbg").chmod(0o755)
    script = """
    source <(rldbg completion bash) 2>/dev/null
    ask() { COMPREPLY=(); COMP_WORDS=(rldbg "$@"); COMP_CWORD=$#; _rldbg_completion rldbg; echo "${COMPREPLY[@]}"; }
    ask comp; ask compare --tol
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, env=environment)
    commands, options = ran.stdout.splitlines()
    assert "compare" in commands.split()
    assert options.split() == ["--tolerance"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script_of_their_own(shell: str, said: Any) -> None:
    code, out, _ = said("completion", shell)
    assert code == 0
    assert f"{shell}_complete" in out


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("rldbg 0<&-", ExitCode.BAD_REQUEST),
        ("rldbg diagnose - 0<&-", ExitCode.BAD_BYTES),
        ("rldbg info 0<&-", ExitCode.AGREES),
        ("rldbg ls nowhere 2>&-", ExitCode.BAD_REQUEST),
    ],
)
def test_a_closed_stream_is_nobody_and_no_fault_of_ours(command: str, code: int) -> None:
    script = command.replace("rldbg", f"{sys.executable} -m tui_debugger", 1)
    ran = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert ran.returncode == code, ran.stderr
    assert "internal error" not in ran.stderr
    assert "rldbg-" not in ran.stderr  # a log that came by standard input is called -, not the file it was put into


@pytest.mark.parametrize("command", [["demo", "--text"], ["replay", "DUMP", "--model", "random:llama-tiny"]])
def test_a_cache_that_cannot_be_written_is_named(
    command: list[str], said: Any, dump: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    code, _, err = said(*(str(dump) if word == "DUMP" else word for word in command))
    assert code == ExitCode.BAD_REQUEST
    assert "/proc/nowhere/rldbg/replays" in err
    assert "XDG_CACHE_HOME" in err


def test_output_neither_writes_over_a_file_nor_makes_its_folder_unless_it_is_told(
    said: Any, dump: Path, tmp_path: Path
) -> None:
    place = tmp_path / "new" / "answer.json"
    code, out, err = said("ls", dump, "--output", place)
    assert (code, out) == (ExitCode.BAD_REQUEST, "")
    assert "mkdir -p" in err
    assert not place.parent.exists()
    assert said("ls", dump, "--force", "--output", place)[0] == 0
    before = place.read_bytes()
    code, _, err = said("ls", dump, "--output", place)
    assert code == ExitCode.BAD_REQUEST
    assert "--force" in err
    assert place.read_bytes() == before
    assert said("ls", dump, "--output", place, "--force", "--names")[0] == 0
    assert place.read_bytes() != before


def test_ls_prints_the_first_records_and_counts_the_rest(said: Any, tmp_path: Path) -> None:
    for step in range(ROWS + 7):
        save_file(tmp_path / f"step_{step}.pt", {"loss": 1.0})
    out = said("ls", tmp_path)[1]
    assert len(out.splitlines()) < ROWS + 20
    assert "... and 7 more records (--all lists every one" in out
    assert f"step_{ROWS + 6}.pt" not in out
    assert f"step_{ROWS + 6}.pt" in said("ls", tmp_path, "--all")[1]


def test_the_parent_of_a_dump_is_that_dump_and_what_lies_beside_it(dump: Path, tmp_path: Path) -> None:
    """Not its records by their names, its checkpoints as weights and its logs as logs of another run."""
    write_dump(tmp_path / "work" / "run", {"loss": {"loss": 1.0}, "forward_data": {"log_probs": torch.ones(2)}})
    save_file(tmp_path / "work" / "run" / "checkpoints" / "step_000000" / "pytorch_model.bin", {"w": torch.ones(2)})
    run = open_run(tmp_path / "work")
    assert run.dialect == "native"
    assert [record.key.stage for record in run.records] == ["forward_data", "loss"]
    assert run.problems == []
    (tmp_path / "work" / "train.log").write_text("step:0 - actor/pg_loss:0.5\n")
    assert open_run(tmp_path / "work").dialect == "native + log"
    write_dump(tmp_path / "work" / "again", {"loss": {"loss": 1.0}, "forward_data": {"log_probs": torch.ones(2)}})
    (tmp_path / "work" / "train.log").unlink()
    assert ["holds 2 runs" in problem.what for problem in open_run(tmp_path / "work").problems] == [True]


def test_what_needs_torch_says_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of the extra's libraries was asked for first."""
    gone = ModuleNotFoundError("No module named 'psutil'", name="psutil")
    assert str(missing_library(gone, "x")).startswith("x needs psutil")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    told = unexpected(Job("demo_train", {}), gone)
    assert told.exit_code == ExitCode.CELL_FAILED
    assert told.message == "the demo needs torch"
    assert told.hint == "pip install 'rldbg[replay]'"
