"""What a finding says to do next: each command runs as it is printed, and shows what it promises."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.diagnose import forms
from benchmarks.diagnose.trainer import Recipe, train
from replay_core import workbench
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Diagnosis, Where
from replay_core.dumps import open_run
from replay_core.errors import ModelError
from tests.replay_core.diagnose.batches import healthy, save
from tests.replay_core.diagnose.logs import diagnosed_path
from tui_debugger.commands.group import cli

DATA = Path(__file__).resolve().parents[2] / "data"
#: What only the reader has: a log holds no dump, a dump of a trainer no checkpoint.
THEIRS = re.compile(r"\b(?:YOUR COMMAND|DUMP|RUN|rldbg-dump|HF_DIR|POLICY|INITIAL|REFERENCE)\b")


def commands(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """(what is shown, command line) of every next line that needs nothing but the dump, each once."""
    found: dict[str, str] = {}
    for finding in diagnosis.findings:
        line = finding.next_step.split("   #")[0]
        for command in re.split(r"[;,] (?:then )?(?=rldbg )", line):
            if command.startswith("rldbg ") and not THEIRS.search(command):
                tensor = finding.where.tensor if " show " in command else None
                found[command] = finding.id if "--explain" in command else tensor or ""
    return [(shown, command) for command, shown in found.items()]


def run_each(path: Path) -> int:
    every = commands(diagnosed_path(path))
    for shown, command in every:
        answer = CliRunner().invoke(cli, shlex.split(command)[1:])
        assert answer.exit_code in (0, 1), f"{command}\n{answer.output}"
        assert not answer.output.startswith("error"), f"{command}\n{answer.output}"
        assert shown in answer.output, f"{command}\n{answer.output}"
    return len(every)


@pytest.mark.parametrize(
    "path",
    [
        "faults/nan_inf", "faults/zero_std_all_groups", "faults/packing_contaminated", "faults/temperature_mismatch",
        "verl", "slime/train_data", "tensordict", "areal", "nexrl", "native", "trl", "openrlhf", "prime_rl",
    ],
)  # fmt: skip
def test_every_next_line_of_a_genuine_file_runs_as_it_is_printed(path: str) -> None:
    run_each(DATA / path)


def test_the_next_line_of_a_folder_of_ones_own_files_runs_as_it_is_printed(tmp_path: Path) -> None:
    fields = healthy()
    fields["advantages"] = fields["advantages"] * 0
    for step in range(2):
        save(tmp_path, fields, f"step_{step:04d}.pt")
    assert run_each(tmp_path) > 0


def test_the_lines_that_were_run_are_many() -> None:
    """A test of no lines would pass."""
    assert sum(len(commands(diagnosed_path(DATA / path))) for path in ("faults/nan_inf", "tensordict", "verl")) >= 5


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "recipe"),
    [
        ("native", {"fault": "loss-turned"}),
        ("native", {"fault": "mask-shifted"}),
        ("verl", {"fault": "zero-advantages"}),
        ("slime", {"fault": "retokenised"}),
        ("TRL", {"fault": "end-untrained"}),
    ],
)
def test_every_next_line_of_a_trained_fault_runs_as_it_is_printed(
    form: str, recipe: dict[str, str], tmp_path: Path
) -> None:
    run = train(Recipe("run", steps=3, kept=3, warm=0, prompts=4, **recipe))  # type: ignore[arg-type]
    assert run_each(forms.DUMPS[form](run, tmp_path / form))


def test_weights_that_the_dump_notes_stand_in_the_line(tmp_path: Path) -> None:
    """POLICY and INITIAL are for the reader to fill in only where the dump names none."""
    run = open_run(DATA / "faults" / "temperature_mismatch")
    (batch,) = Case(run).batches()
    line = "--model POLICY --model INITIAL"
    assert batch.laid.replay_command(Where(), line).endswith(line)
    run.models = {0: "weights/first", (batch.step or 0): "weights/mine"}
    (batch,) = Case(run).batches()
    assert batch.laid.replay_command(Where(), line).endswith("--model weights/mine --model weights/first")


def test_weights_that_are_not_there_are_refused_before_any_child_starts(tmp_path: Path) -> None:
    path = DATA / "faults" / "temperature_mismatch"

    def runner(*_: object) -> None:
        raise AssertionError("a child was started")

    plan = {"dump": str(path), "model": str(tmp_path / "nowhere")}
    with pytest.raises(ModelError, match="not a directory"):
        workbench.replay(plan, tmp_path / "out", runner, matrix=[])  # type: ignore[arg-type]
