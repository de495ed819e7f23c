"""Genuine dumps are recognised, every record is found, and what was inferred is said."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from replay_core.dumps import open_run
from replay_core.errors import NotADumpError, RldbgError
from replay_core.records import RecordKey
from tests.builders import save_file, write_dump, write_nexrl
from tests.fixtures import FIXTURES


@pytest.mark.parametrize("run", ["self_hosted_fp32", "self_hosted_bf16", "seedtime/pt"])
def test_every_file_of_a_genuine_nexrl_dump_is_a_record(run: str):
    path = FIXTURES / "nexrl" / run
    opened = open_run(path)
    assert opened.dialect == "nexrl"
    assert {record.path for record in opened.records} == set(path.rglob("step_*"))
    assert all(record.tensors() for record in opened.records)
    assert len({record.key for record in opened.records}) == len(opened.records)


def test_genuine_openrlhf_inputs_get_steps_micros_and_roles_and_that_is_said():
    opened = open_run(FIXTURES / "openrlhf")
    assert opened.dialect == "openrlhf"
    assert "inferred" in opened.notes[0]
    assert len(opened.records) == len(list((FIXTURES / "openrlhf" / "input_dumps").glob("*.pkl")))
    assert {record.key.rank for record in opened.records} >= {0, 1}
    assert Counter(record.key for record in opened.records).most_common(1)[0][1] == 1


def test_a_native_dump_opens_from_its_files_alone(tmp_path: Path):
    dump = write_dump(tmp_path / "dump", {"forward_data": {"log_probs": torch.ones(2, 3)}, "loss": {"loss": 1.0}})
    with_index = {(record.key, record.path) for record in open_run(dump).records}
    (dump / "index_rank0.jsonl").unlink()
    assert {(record.key, record.path) for record in open_run(dump).records} == with_index


def test_a_record_the_index_lists_and_the_disk_has_not_is_a_problem(tmp_path: Path):
    dump = write_dump(tmp_path / "dump", {"forward_data": {"x": 1}, "loss": {"loss": 1.0}})
    next((dump / "loss").glob("*.pt")).unlink()
    opened = open_run(dump)
    assert len(opened.records) == 1
    assert "file is gone" in opened.problems[0].what


def test_a_half_written_index_line_is_a_problem_and_loses_nothing(tmp_path: Path):
    dump = write_dump(tmp_path / "dump", {"forward_data": {"x": 1}, "loss": {"loss": 1.0}})
    index = dump / "index_rank0.jsonl"
    index.write_bytes(index.read_bytes()[:-20])
    opened = open_run(dump)
    assert {record.key.stage for record in opened.records} == {"forward_data", "loss"}
    assert "unreadable index line" in opened.problems[0].what


def test_a_writers_temporary_file_is_no_record(tmp_path: Path):
    dump = write_dump(tmp_path / "dump", {"loss": {"loss": 1.0}})
    (dump / "loss" / ".step_000001_rank0_micro0.pt.77.tmp").write_bytes(b"half")
    assert len(open_run(dump).records) == 1


@pytest.mark.parametrize("nested", ["whole", "sequences of one row"])
def test_nexrl_logprobs_and_masks_speak_of_the_next_token(nested: str, tmp_path: Path):
    content = {"log_probs": torch.ones(2, 3), "response_mask": torch.ones(2, 3), "step": 0}
    record = open_run(write_nexrl(tmp_path, "forward_data", content)).records[0]
    assert record.key == RecordKey(0, 0, 0, "actor", "forward_data")
    found = {ref.canonical: ref.alignment for ref in record.tensors()}
    assert found["policy_logprobs"] == found["response_mask"] == "next"


def test_a_single_file_of_tensors_is_a_run_of_one_record(tmp_path: Path):
    opened = open_run(save_file(tmp_path / "any.name", {"model.layers.0.mlp.output": torch.ones(2)}))
    assert (opened.dialect, len(opened.records)) == ("file", 1)
    assert opened.records[0].get("layers.0.mlp.output") is not None
    assert opened.records[0].get("model.layers.0.mlp.output") is not None


@pytest.mark.parametrize("name", ["step_000000.txt", "notes.md"])
def test_a_folder_without_a_dumps_files_is_none(name: str, tmp_path: Path):
    save_file(tmp_path / "forward_data" / name, {"x": 1})
    with pytest.raises(NotADumpError, match="no dialect"):
        open_run(tmp_path)


def test_a_path_that_is_not_there_is_an_error_of_its_own(tmp_path: Path):
    with pytest.raises(RldbgError, match="no such file"):
        open_run(tmp_path / "gone")
