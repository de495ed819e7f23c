from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from replay_core.dumps import open_run
from replay_core.errors import RequestError
from replay_core.pages import array
from replay_core.recorder import Recorder
from replay_core.recorder.formats import FORMATS
from replay_core.rollouts import RolloutReplay

FIELDS = {
    "input_ids": torch.arange(6).reshape(2, 3),
    "big": torch.tensor([2**62, -(2**63)]),
    "log_probs": torch.tensor([[0.1, float("nan")], [float("inf"), -float("inf")]]),
    "half": torch.tensor([1.5, -2.25], dtype=torch.float16),
    "hidden": torch.tensor([1.0, 3.140625], dtype=torch.bfloat16),
    "mask": torch.tensor([True, False, True]),
    "empty": torch.zeros(0, 4),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "nested": {"inner": torch.tensor([7], dtype=torch.int8), "note": "text", "ratio": 0.1},
    "samples": [{"tokens": [1, 2, 3], "reward": 0.5}, {"tokens": [4], "reward": float("nan")}],
    "ragged": [torch.tensor([1.0]), torch.tensor([2.0, 3.0])],
}


def recorded(directory: Path, form: str) -> Path:
    with Recorder(directory, format=form).step(3, rank=1) as record:
        path = record("forward_data", FIELDS, micro=2, epoch=1, minibatch=4)
    assert path is not None
    return path


@pytest.mark.parametrize("form", FORMATS)
def test_a_reader_gets_the_same_fields_whatever_the_form(form: str, tmp_path: Path) -> None:
    assert recorded(tmp_path, form).name == f"step_000003_rank1_micro2.{form}"
    (record,) = open_run(tmp_path).records
    assert (record.key.step, record.key.rank, record.key.micro) == (3, 1, 2)
    assert (record.key.epoch, record.key.minibatch) == (1, 4)
    found = {ref.name: ref for ref in record.tensors()}
    names = ["input_ids", "big", "log_probs", "half", "hidden", "mask", "empty", "scalar"]
    assert list(found) == [
        *names,
        *("nested.inner", "nested.note", "nested.ratio", "samples.tokens", "samples.reward", "ragged"),
    ]
    for name in names:
        expected = FIELDS[name]
        assert isinstance(expected, torch.Tensor)
        ref = found[name]
        assert (ref.dtype, ref.shape) == (str(expected.dtype).removeprefix("torch."), tuple(expected.shape))
        np.testing.assert_array_equal(array(ref).astype("float64"), expected.double().numpy())
    assert array(found["big"]).tolist() == [2**62, -(2**63)]
    np.testing.assert_array_equal(array(found["samples.reward"]), [0.5, np.nan])
    assert found["samples.tokens"].rows == (3, 1)
    assert (found["ragged"].dtype, found["ragged"].rows) == ("float32", (1, 2))
    assert array(found["ragged"]).tolist() == [1.0, 2.0, 3.0]


def test_the_index_names_fields_as_the_reader_does(tmp_path: Path) -> None:
    recorded(tmp_path, "pt")
    (record,) = open_run(tmp_path).records
    assert record.names == tuple(ref.name for ref in record.tensors())


def test_a_jsonl_record_is_one_line_of_strict_json(tmp_path: Path) -> None:
    text = recorded(tmp_path, "jsonl").read_text()
    assert text.count("\n") == 1

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    content = json.loads(text, parse_constant=refuse)
    assert content["log_probs"][1] == ["inf", "-inf"]
    assert content["input_ids"] == [[0, 1, 2], [3, 4, 5]]


def test_a_safetensors_record_opens_with_the_formats_own_reader(tmp_path: Path) -> None:
    tensors = load_file(recorded(tmp_path, "safetensors"))
    assert torch.equal(tensors["input_ids"], FIELDS["input_ids"])  # type: ignore[arg-type]
    assert torch.equal(tensors["nested.inner"], torch.tensor([7], dtype=torch.int8))


def test_a_pt_record_opens_with_torch_alone(tmp_path: Path) -> None:
    content = torch.load(recorded(tmp_path, "pt"), weights_only=True)
    assert content["micro_idx"] == 2
    assert content["nested"]["note"] == "text"


@pytest.mark.parametrize(("form", "value"), [("jsonl", torch.ones(1, dtype=torch.complex64)), ("safetensors", 1j)])
def test_what_a_form_cannot_hold_is_refused_by_name_and_leaves_no_file(
    form: str, value: object, tmp_path: Path
) -> None:
    with Recorder(tmp_path, format=form).step(0) as record, pytest.raises(RequestError, match="complex") as refusal:
        record("loss", spectrum=value)
    assert refusal.value.tensor == "spectrum"
    assert not list(tmp_path.rglob("step_*"))


def test_a_damaged_line_is_the_files_fault(tmp_path: Path) -> None:
    path = recorded(tmp_path, "jsonl")
    path.write_text(path.read_text()[:-40])
    (record,) = open_run(tmp_path).records
    with pytest.raises(Exception, match="not the line of JSON") as fault:
        record.tensors()
    assert fault.value.exit_code == 3  # type: ignore[attr-defined]


def test_a_trainer_without_msgspec_reads_the_lines_it_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Recorder(tmp_path, format="jsonl").step(0) as record:
        record("trajectory", input_ids=torch.arange(6).reshape(2, 3), odd=float("nan"))
    monkeypatch.setitem(sys.modules, "msgspec", None)
    batch = RolloutReplay(tmp_path).batch(0)
    assert batch is not None
    assert batch["input_ids"].tolist() == [[0, 1, 2], [3, 4, 5]]


#: What `pip install rldbg` brings and `--no-deps` does not: a trainer's environment may lack all of it.
DEPENDENCIES = (
    "msgspec",
    "ml_dtypes",
    "platformdirs",
    "tokenizers",
    "textual",
    "rich",
    "click",
    "tomli",
    "safetensors",
)


@pytest.mark.long
@pytest.mark.parametrize("dump_format", ["pt", "jsonl"])
def test_a_trainer_records_where_rldbg_was_installed_without_its_dependencies(dump_format: str, tmp_path: Path) -> None:
    script = f"""
import sys
sys.modules.update(dict.fromkeys({DEPENDENCIES!r}))
import torch
from replay_core.recorder import Recorder
with Recorder({str(tmp_path / "dump")!r}, format={dump_format!r}) as recorder, recorder.step(0) as record:
    record("forward_data", log_probs=torch.full((2, 3), -0.5, dtype=torch.bfloat16), texts=["a", "b"], micro=0)
    record("loss", loss=float("nan"), metrics={{"kl": 0.5}}, micro=0)
"""
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")
    run = open_run(tmp_path / "dump")
    assert not run.problems
    (logprobs,) = (ref for ref in run.select(stage="forward_data")[0].tensors() if ref.name == "log_probs")
    assert array(logprobs).astype(float).tolist() == [[-0.5] * 3] * 2
