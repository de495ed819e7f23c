"""The command that a document says it comes from says the same again."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.tui_debugger.handout.documents import genuine
from tui_debugger.cli import run
from tui_debugger.command_table import COMMANDS
from tui_debugger.handout.reproduce import command_of

DATA = Path(__file__).parents[2] / "data"
A, B = str(DATA / "nexrl/self_hosted_fp32"), str(DATA / "nexrl/self_hosted_bf16")


def _same(document: Any) -> Any:
    return {name: value for name, value in document.items() if name != "created"}


@pytest.mark.parametrize(
    "words",
    [
        ["compare", A, B, "--step", "0", "--atol", "0.5", "--rtol", "0"],
        ["compare", A, B, "--exact", "--name", "*logprobs*"],
        ["diagnose", str(DATA / "faults/packing_contaminated")],
        ["ls", A],
        ["show", A, "--step", "0", "--stage", "old_log_probs"],
        ["show", A, "--step", "0", "--stage", "old_log_probs", "--tensor", "old_log_probs"],
        ["mismatch", str(DATA / "faults/temperature_mismatch")],
        ["parity", "--recorded", str(DATA / "roll_critic/bf16_init0.01")],
        ["samples", str(DATA / "slime"), "--by", "reward", "--search", "plus", "--sample", "2", "--sample", "3"],
    ],
    ids=lambda words: " ".join(word for word in words if not word.startswith("/")),
)
def test_it_says_the_same_again(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run([*words, "--json"])
    document = json.loads(capsys.readouterr().out)
    again = shlex.split(command_of(document))
    assert again[0] == "rldbg"
    run([*again[1:], "--json"])
    assert _same(json.loads(capsys.readouterr().out)) == _same(document)


@pytest.mark.long
def test_what_workers_found_is_gathered_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", A, B, "--shard", "1/2", "--out", str(tmp_path / "units")]) == 1
    capsys.readouterr()
    run(["gather", str(tmp_path / "units"), "--json"])
    document = json.loads(capsys.readouterr().out)
    again = shlex.split(command_of(document))
    assert again == ["rldbg", "gather", str(tmp_path / "units")]
    run([*again[1:], "--json"])
    assert _same(json.loads(capsys.readouterr().out)) == _same(document)


def test_every_command_that_a_page_names_is_a_command() -> None:
    for name, document in genuine().items():
        assert shlex.split(command_of(document))[1] in COMMANDS, name
