"""`rldbg parity` as a stranger types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from replay_core.errors import ExitCode
from tests.builders import write_dump
from tests.replay_core.documents.test_schema import validate
from tests.replay_core.parity.conftest import needs_megatron, write_config
from tui_debugger.cli import run


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Values of two critics whose heads differ by a bias; the last columns are padding, where they share nothing."""
    draw = torch.Generator().manual_seed(0)
    mask_BS = torch.ones(4, 17, dtype=torch.long)
    mask_BS[:, 12:] = 0
    ids_BS = torch.randint(1, 99, (4, 17), generator=draw) * mask_BS
    values_BT = torch.randn(4, 16, generator=draw)
    other_BT = values_BT + 0.07
    other_BT[:, 12:] = torch.randn(4, 4, generator=draw)
    fields = {"input_ids": ids_BS, "attention_mask": mask_BS, "response_mask": mask_BS}
    return (
        write_dump(tmp_path / "a", {"values": {**fields, "values": values_BT, "backend": "deepspeed"}}),
        write_dump(tmp_path / "b", {"values": {**fields, "values": other_BT, "backend": "megatron"}}),
    )


def test_the_cause_comes_first_and_both_figures_stand_side_by_side(
    pair: tuple[Path, Path], capfd: pytest.CaptureFixture[str]
):
    code = run(["parity", "--recorded", *map(str, pair)])
    out = capfd.readouterr().out
    assert code == ExitCode.DIVERGES
    assert out.splitlines()[0].startswith("DISAGREES  cause: offset")
    assert "also padding" in out
    header = next(line for line in out.splitlines() if line.strip().startswith("measure"))
    assert header.split() == ["measure", "response", "valid", "unmasked"]
    pearson = next(line for line in out.splitlines() if line.strip().startswith("Pearson"))
    assert pearson.split()[1] == "1"
    assert float(pearson.split()[3]) < 0.9


def test_json_is_the_document_alone_and_output_writes_it(
    pair: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    file = tmp_path / "parity.json"
    run(["parity", "--recorded", *map(str, pair), "--json", "--output", str(file), "--threshold", "0.05"])
    document = json.loads(capfd.readouterr().out)
    validate(document)
    assert document == json.loads(file.read_text())
    assert document["threshold"] == 0.05
    assert document["eval"]["masked"]["nearly_identical"] == 0.0


@pytest.mark.long
def test_reading_recorded_values_needs_no_torch(pair: tuple[Path, Path]):
    code = (
        "import sys; from tui_debugger.cli import run; "
        f"run(['parity', '--recorded', {str(pair[0])!r}, {str(pair[1])!r}]); "
        "assert not {'torch', 'transformers', 'megatron'} & set(sys.modules), sorted(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["parity", "one.yaml"], "two configurations"),
        (["parity", "--recorded"], "needs the dumps"),
        (["parity", "--recorded", "a", "--data", "random"], "recorded values have theirs"),
        (["parity", "no.yaml", "neither.yaml"], "cannot be read"),
    ],
)
def test_a_wrong_request_is_refused(arguments: list[str], says: str, capfd: pytest.CaptureFixture[str]):
    assert run(arguments) == ExitCode.BAD_REQUEST
    assert says in capfd.readouterr().err


@pytest.mark.slow
@needs_megatron
def test_two_configurations_run_each_in_a_child_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    a = write_config(tmp_path, "a", "torch")
    b = write_config(tmp_path, "b", "megatron", model={"value_head_scale": 1.5})
    out = tmp_path / "out"
    code = run(["parity", str(a), str(b), "--data", "padded", "--steps", "1", "--out", str(out)])
    said = capfd.readouterr()
    assert code == ExitCode.DIVERGES, said.err
    assert "cause: scale" in said.out
    assert "drift per training step" in said.out
    assert (out / "critic_output_torch.log").is_file()
    assert run(["compare", str(out / "a"), str(out / "b")]) == ExitCode.DIVERGES
    capfd.readouterr()
    assert run(["parity", str(a), str(b), "--out", str(out)]) == ExitCode.BAD_REQUEST
    assert "holds a parity run already" in capfd.readouterr().err
