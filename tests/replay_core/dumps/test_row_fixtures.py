"""Genuine files whose rows are samples: dialect, records, and the tensors that training turns on."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest

from replay_core import pages
from replay_core.dumps import open_run
from replay_core.errors import BudgetError
from replay_core.measure.lag import detect_lag
from replay_core.records import Record, Run
from replay_core.samples.batch import Array, Batch, by_sample
from tests.fixtures import FIXTURES

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Expected:
    """What opening a fixture answers. `tensors`: canonical name -> shape, of the first record of `stage`."""

    path: str
    dialect: str
    stages: dict[str, int]
    stage: str
    tensors: dict[str, Shape]
    rows: dict[str, Shape] = field(default_factory=dict)


PACK = (38, 38, 31, 25)
TABLE = [
    Expected(
        "prime_rl/token_exports",
        "prime_rl",
        {"forward_data": 4},
        "forward_data",
        {"input_ids": (132,), "loss_mask": (132,), "rollout_logprobs": (132,), "policy_logprobs": (132,),
         "entropy": (132,), "advantages": (132,), "sample_id": (4,)},
        {"input_ids": PACK, "policy_logprobs": PACK},
    ),
    Expected(
        "prime_rl/rollouts",
        "prime_rl",
        {"batch_inputs": 4},
        "batch_inputs",
        {"input_ids": (132,), "loss_mask": (132,), "rollout_logprobs": (132,), "sample_lengths": (4,)},
        {"input_ids": PACK},
    ),
    Expected("prime_rl", "prime_rl", {"forward_data": 4, "batch_inputs": 4}, "forward_data", {"input_ids": (132,)}),
    Expected(
        "nemo_rl",
        "nemo_rl",
        {"batch_inputs": 1},
        "batch_inputs",
        {"input_ids": (16, 38), "loss_mask": (16, 38), "rollout_logprobs": (16, 38), "old_logprobs": (16, 38),
         "advantages": (16, 38), "reward": (16,), "sample_lengths": (16,), "sample_mask": (16,)},
    ),
    Expected(
        "open_instruct/toy_run_rollouts_000000.jsonl",
        "open_instruct",
        {"trajectory": 1},
        "trajectory",
        {"prompt_ids": (276,), "response_ids": (244,), "rollout_logprobs": (244,), "reward": (16,), "group_id": (16,)},
        {"response_ids": (20, 20, 13, 7, 20, 14, 13, 20, 20, 12, 16, 20, 20, 9, 11, 9)},
    ),
    Expected("torchtitan", "torchtitan", {"trajectory": 1}, "trajectory",
             {"group_id": (6,), "reward": (6,), "advantages": (6,)}),
    Expected("verl/rollout_data_dir", "verl", {"trajectory": 1}, "trajectory",
             {"prompt_text": (16,), "response_text": (16,), "reward": (16,)}),
    Expected("trl/base/run", "trl", {"trajectory": 3}, "trajectory",
             {"prompt_text": (8,), "response_text": (8,), "advantages": (8,)}),
    Expected("verl/metrics_step1.json", "metrics", {"training_metrics": 1}, "training_metrics",
             {"metrics.rollout_corr/kl": ()}),
    Expected("trl/base/trainer_state.json", "metrics", {"training_metrics": 3}, "training_metrics",
             {"loss": (), "grad_norm": ()}),
    Expected("grpo_notes/train_1da2900_normal.log", "log", {"loss": 16, "optimizer": 4}, "loss",
             {"pg_loss": (), "kl_loss": (), "metrics.rewards_std": (), "metrics.num_masked": ()}),
    Expected("grpo_notes/train_547c4bf_normal.log", "log", {"loss": 16, "optimizer": 4}, "loss",
             {"pg_loss": (), "metrics.masks_in_X": ()}),
    Expected("grpo_notes/metrics_547c4bf_normal.json", "metrics", {"training_metrics": 4}, "training_metrics",
             {"loss": (), "pg_loss": ()}),
    Expected(
        "nexrl/seedtime/jsonl",
        "nexrl",
        {"trajectory": 2, "prepared_trajectories": 2, "old_log_probs": 2, "forward_data": 4, "loss": 4},
        "trajectory",
        {"input_ids": (87,), "loss_mask": (87,), "rollout_logprobs": (87,), "reward": (8,), "group_id": (8,)},
    ),
]  # fmt: skip


@pytest.mark.parametrize("expected", TABLE, ids=lambda expected: expected.path)
def test_a_genuine_dump_opens_with_dialect_records_and_canonical_tensors(expected: Expected) -> None:
    if expected.path.startswith("trl/base/run"):
        pytest.importorskip("pyarrow")
    run = open_run(FIXTURES / expected.path)
    assert run.dialect == expected.dialect
    assert Counter(record.key.stage for record in run.records) == expected.stages
    record = first(run, expected.stage)
    found = {ref.canonical: ref for ref in record.tensors()}
    assert {name: found[name].shape for name in expected.tensors} == expected.tensors
    assert {name: found[name].rows for name in expected.rows} == expected.rows
    for ref in record.tensors():
        assert pages.array(ref).shape == ref.shape, ref.name
    assert [problem for problem in run.problems if "second record" not in problem.what] == []


def first(run: Run, stage: str) -> Record:
    return next(record for record in run.records if record.key.stage == stage)


def test_a_bare_nan_in_nexrls_json_is_a_nan() -> None:
    run = open_run(FIXTURES / "nexrl/seedtime/jsonl")
    (loss,) = (r.get("loss") for r in run.records if (r.key.step, r.key.micro, r.key.stage) == (2, 1, "loss"))
    assert loss is not None
    assert np.isnan(pages.array(loss)).all()


def test_sentinels_are_known_as_such() -> None:
    export = first(open_run(FIXTURES / "prime_rl/token_exports"), "forward_data")
    assert "0.0 on the prompt" in str(getattr(export.get("inference_logprobs"), "sentinel", None))
    assert "not finite" in str(getattr(export.get("rl_weights"), "sentinel", None))
    shard = open_run(FIXTURES / "open_instruct/toy_run_rollouts_000000.jsonl").records[0]
    assert "1.0" in str(getattr(shard.get("logprobs"), "sentinel", None))


def test_a_folder_of_completions_and_metrics_is_one_run() -> None:
    pytest.importorskip("pyarrow")
    run = open_run(FIXTURES / "trl/base/run", FIXTURES / "trl/base/trainer_state.json")
    assert run.steps() == [1, 2, 3]
    assert {record.key.stage for record in run.records} == {"trajectory", "training_metrics"}
    assert run.dialect == "trl + metrics"


def rollout(path: str, stage: str) -> tuple[list[Array], list[Array]]:
    """Token ids and rollout logprobs of the 16 samples, in order."""
    ids: list[Array] = []
    logprobs: list[Array] = []
    # Ranks take consecutive parts of a batch.
    for record in sorted(open_run(FIXTURES / path).records, key=lambda record: record.key.rank or 0):
        if record.key.stage == stage and record.key.role != "eval":
            batch = Batch(record, record.tensors())
            ref = record.get("rollout_logprobs")
            values = by_sample(batch, ref) if ref is not None else None
            tokens = batch.contents
            if tokens is None or values is None:
                continue
            ids += tokens
            logprobs += values
    return ids, logprobs


SAME_ROLLOUT = [
    ("prime_rl/token_exports", "forward_data"),
    ("prime_rl/rollouts", "batch_inputs"),
    ("open_instruct/toy_run_rollouts_000000.jsonl", "trajectory"),
    ("open_instruct/packed_sequences.pt", "batch_inputs"),
    ("verl/train_batch_step1.dp", "batch_inputs"),
    ("slime", "trajectory"),
    ("slime", "batch_inputs"),
    ("skyrl", "batch_inputs"),
]


@pytest.mark.parametrize(("path", "stage"), SAME_ROLLOUT)
def test_one_rollout_in_many_frameworks_has_the_same_tokens_sample_by_sample(path: str, stage: str) -> None:
    expected_ids, expected_logprobs = rollout("nemo_rl", "batch_inputs")
    assert [row.size for row in expected_ids] == [38, 38, 31, 25, 37, 31, 30, 37, 37, 29, 33, 37, 37, 26, 28, 26]
    ids, logprobs = rollout(path, stage)
    for sample, (a, b) in enumerate(zip(expected_ids, ids, strict=True)):
        assert a.tolist() == b.tolist(), sample
    for a, b in zip(expected_logprobs, logprobs, strict=True):
        said = np.isfinite(b) & (b != 0) & (a != 0)
        assert said.sum() >= 7
        # SkyRL keeps them in bfloat16.
        np.testing.assert_allclose(a[said], b[said], atol=0.04)


def test_the_alignment_of_rollout_and_trainer_logprobs_is_detected() -> None:
    run = open_run(FIXTURES / "prime_rl/token_exports")
    batch = Batch(run.records[0], run.records[0].tensors())
    rows = [by_sample(batch, ref) for name in ("inference_logprobs", "trainer_logprobs")
            for ref in batch.held.fields() if ref.name == name]  # fmt: skip
    a, b = ([row[18:] for row in side or []] for side in rows)
    assert detect_lag(a, b).lag == 0
    assert detect_lag(a, b).settled
    shifted = [np.roll(row, -1)[:-1] for row in b]
    assert detect_lag(a, shifted).lag == -1


def test_a_token_export_without_its_marker_is_not_complete(tmp_path: Path) -> None:
    target = tmp_path / "token_exports" / "step_3"
    target.mkdir(parents=True)
    (target / "rank_0.jsonl").symlink_to(FIXTURES / "prime_rl/token_exports/step_0/rank_0.jsonl")
    run = open_run(tmp_path)
    assert [record.key.step for record in run.records] == [3, 3, 3, 3]
    assert "STABLE" in run.problems[0].what


@pytest.mark.long
def test_a_file_of_thousands_of_micro_batches_opens_where_its_bytes_are_as_many(tmp_path: Path) -> None:
    def written(name: str, count: int, tokens: int) -> Path:
        one = [[1] * tokens, [True] * tokens, [0.5] * tokens, [-0.5] * tokens, list(range(tokens))]
        file = tmp_path / name / "rollouts/step_1/rank_0.bin"
        file.parent.mkdir(parents=True)
        file.write_bytes(msgspec.msgpack.encode([one] * count))
        return tmp_path / name

    run = open_run(written("healthy", 2000, 120))
    assert len(run.records) == 2000
    assert run.records[1999].tensors()[0].shape == (120,)
    refused = open_run(written("hostile", 5000, 2))
    assert len(refused.records) == 1
    assert "more micro-batches than its bytes may cost" in refused.problems[0].what
    with pytest.raises(BudgetError):
        refused.records[0].tensors()
