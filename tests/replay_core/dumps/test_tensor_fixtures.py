"""Genuine files of tensors against the frameworks' own layouts: names, shapes, values; one rollout in many files."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from replay_core import pages
from replay_core.dumps import open_run
from replay_core.records import Record, TensorRef
from replay_core.workbench import show_record
from tests.fixtures import FIXTURES
from tests.replay_core.dumps.expectations import FOLDERS, TABLE, Expected


def record_of(path: str, stage: str, role: str | None = None) -> Record:
    return next(
        record
        for record in open_run(FIXTURES / path).records
        if record.key.stage == stage and (record.key.role == role if role else record.key.role != "eval")
    )


def fields_of(record: Record) -> dict[str, TensorRef]:
    return {ref.canonical or ref.name: ref for ref in reversed(record.tensors())}


@pytest.mark.parametrize("expected", TABLE, ids=lambda expected: expected.path)
def test_a_fixture_opens_as_its_framework_wrote_it(expected: Expected) -> None:
    run = open_run(FIXTURES / expected.path)
    assert run.dialect == expected.dialect
    assert Counter(record.key.stage for record in run.records) == expected.stages
    assert run.problems == []
    found = fields_of(record_of(expected.path, expected.stage))
    assert {name: (found[name].shape, found[name].alignment) for name in expected.tensors} == expected.tensors
    assert {name: found[name].rows for name in expected.rows} == expected.rows
    assert {name: found[name].pad for name in expected.pads} == expected.pads
    for record in run.records:
        names = [ref.name for ref in record.tensors()]
        assert len(set(names)) == len(names)
        for ref in record.tensors():
            assert pages.array(ref).shape == ref.shape, ref.name


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_whole_folder_of_fixtures_is_counted(folder: str) -> None:
    dialect, count = FOLDERS[folder]
    run = open_run(FIXTURES / folder)
    assert dialect in run.dialect.split(" + ")
    assert len(run.records) == count


def load(path: str) -> Any:
    return torch.load(FIXTURES / path, weights_only=True)


def equal(ref: TensorRef, values: Any) -> bool:
    values = values.float().numpy() if getattr(values, "dtype", None) == torch.bfloat16 else np.asarray(values)
    read = pages.array(ref)
    read = read.astype(np.float32) if ref.dtype == "bfloat16" else read
    return read.shape == values.shape and bool(np.array_equal(read, values, equal_nan=read.dtype.kind == "f"))


def test_areals_groups_are_the_rows_of_one_column() -> None:
    groups = load("areal/single_controller_rollout/step_000000.pt")
    found = fields_of(record_of("areal/single_controller_rollout", "trajectory"))
    for field, canonical in {"input_ids": "input_ids", "logprobs": "rollout_logprobs", "rewards": "reward"}.items():
        assert equal(found[canonical], torch.cat([group[field].flatten() for group in groups]))


def test_slimes_samples_are_the_rows_of_one_column() -> None:
    samples = load("slime/train_data/0.pt")["samples"]
    found = fields_of(record_of("slime", "batch_inputs"))
    for field, canonical in {"tokens": "input_ids", "log_probs": "old_logprobs", "loss_masks": "response_mask"}.items():
        assert equal(found[canonical], torch.cat([sample[field] for sample in samples]))
        assert found[canonical].rows == tuple(len(sample[field]) for sample in samples)


def test_packs_are_the_rows_of_one_column() -> None:
    packed = load("open_instruct/packed_sequences.pt")
    found = fields_of(record_of("open_instruct/packed_sequences.pt", "batch_inputs"))
    assert equal(found["input_ids"], torch.cat(packed["query_responses"]))
    assert equal(found["rollout_logprobs"], torch.cat(packed["vllm_logprobs"]))


def test_trls_prompt_and_completion_stand_side_by_side() -> None:
    inputs = load("trl/base/compute_loss_step000001_micro2.pt")["inputs"]
    found = fields_of(record_of("trl/base/compute_loss_step000001_micro2.pt", "batch_inputs"))
    assert equal(found["input_ids"], torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1))
    assert equal(found["attention_mask"], torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1))


def test_a_critics_values_keep_their_strides() -> None:
    file = "roll_critic/bf16_init0.01/stale_deepspeed.pt"
    assert equal(fields_of(record_of(file, "values"))["values"], load(file)["values"])


def test_a_dumped_module_tensor_is_the_files_value() -> None:
    folder = FIXTURES / "sglang_dumper/baseline_sdpa_fp32"
    (file,) = folder.glob("step=1___rank=0___*name=non_intrusive__layers.0.self_attn.q_proj.output___*")
    records = open_run(folder).records
    found = fields_of(next(record for record in records if record.key.step == 1))
    assert equal(found["layers.0.self_attn.q_proj.output"], torch.load(file, weights_only=True)["value"].detach())


class _Any:
    """Stands for SkyRL's classes, so that the standard unpickler gives the state it would rebuild from."""

    def __init__(self, *state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Any if module.startswith(("skyrl", "torch")) else super().find_class(module, name)


def test_skyrls_bytes_are_the_arrays_they_say() -> None:
    path = FIXTURES / "skyrl/dumped_data/global_step_1_training_input.pkl"
    with open(path, "rb") as file:
        batch = _Unpickler(file).load().state[1]["batch_dict"]
    found = {ref.name: ref for ref in open_run(path).records[0].tensors()}
    for field in ("sequences", "attention_mask", "loss_mask", "action_log_probs", "advantages"):
        stored = batch[field]
        assert equal(found[field], np.frombuffer(stored["data"], stored["dtype"]).reshape(stored["shape"]))


# One rollout, four files.


def rows(ref: TensorRef) -> list[np.ndarray[Any, Any]]:
    values = pages.array(ref)
    return np.split(values, np.cumsum(ref.rows)[:-1]) if ref.rows else list(values)


def tokens_of(path: str, stage: str) -> list[list[int]]:
    """Token ids sample by sample: padding taken away by mask, packs cut at their samples' lengths."""
    found = fields_of(record_of(path, stage))
    ids = found["input_ids"]
    if "sample_lengths" in found:
        lengths = pages.array(found["sample_lengths"])
        return [part.tolist() for part in np.split(pages.array(ids), np.cumsum(lengths)[:-1])]
    if ids.rows is not None:
        return [row.tolist() for row in rows(ids)]
    mask = pages.array(found["attention_mask"]).astype(bool)
    return [row[valid].tolist() for row, valid in zip(pages.array(ids), mask, strict=True)]


ROLLOUT = [
    ("slime/rollout_data", "trajectory"),
    ("slime/train_data", "batch_inputs"),
    ("verl/train_batch_step1.dp", "batch_inputs"),
    ("verl/rollout_dump", "batch_inputs"),
    ("skyrl", "batch_inputs"),
    ("open_instruct/packed_sequences.pt", "batch_inputs"),
]


@pytest.mark.parametrize(("path", "stage"), ROLLOUT)
def test_one_rollout_has_equal_tokens_in_every_framework(path: str, stage: str) -> None:
    expected = [sample["tokens"] for sample in load("slime/rollout_data/0.pt")["samples"]]
    assert tokens_of(path, stage) == expected


def responses_of(path: str, stage: str, name: str) -> list[np.ndarray[Any, Any]]:
    found = fields_of(record_of(path, stage))
    ref = found[name]
    if ref.rows is not None and ref.alignment == "response":
        return rows(ref)
    mask = pages.array(found["response_mask"]).astype(bool)
    if ref.rows is not None:
        flat = pages.array(ref)[mask]
        counts = [len(sample["loss_mask"]) for sample in load("slime/rollout_data/0.pt")["samples"]]
        return np.split(flat, np.cumsum(counts)[:-1])
    return [row[valid] for row, valid in zip(pages.array(ref), mask, strict=True)]


@pytest.mark.parametrize(("path", "stage"), ROLLOUT)
def test_one_rollout_has_equal_rollout_logprobs_in_every_framework(path: str, stage: str) -> None:
    expected = [sample["rollout_log_probs"] for sample in load("slime/rollout_data/0.pt")["samples"]]
    found = responses_of(path, stage, "rollout_logprobs")
    assert [len(row) for row in found] == [len(row) for row in expected]
    # SkyRL keeps them in bf16.
    tolerance = 2**-8 if path == "skyrl" else 1e-6
    for row, values in zip(found, expected, strict=True):
        np.testing.assert_allclose(row.astype(np.float64), values, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("expected", TABLE, ids=lambda expected: expected.path)
def test_show_says_what_the_table_expects(expected: Expected) -> None:
    """`rldbg show --json` of the record the table describes: canonical names, shapes and alignments as a document."""
    run = open_run(FIXTURES / expected.path)
    keys = {record.key for record in run.records if record.key.stage == expected.stage}
    first = next(record for record in run.records if record.key in keys)
    doc = json.loads(json.dumps(show_record(FIXTURES / expected.path, first.key, stats=True), allow_nan=False))
    found = {field["canonical"]: field for field in doc["fields"]}
    assert {
        name: (tuple(found[name]["shape"]), found[name]["alignment"]) for name in expected.tensors if name in found
    } == expected.tensors
    for name in expected.tensors:
        is_text = found[name]["dtype"] == "text"
        assert is_text or found[name]["shape"] == [] or found[name]["stats"]["numel"] > 0, name
