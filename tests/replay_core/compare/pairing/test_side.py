"""One run's part of a computation: its tensors by their names."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from replay_core.compare.pairing.micro_batch_pair import Side
from replay_core.dumps import open_run
from tests.builders import compare_fields, row_of, write_dump


def test_a_tensor_is_found_by_its_name_and_by_its_end_after_the_tensors_were_renamed_too(tmp_path: Path):
    fields = {"a.weight": np.zeros(2), "b.weight": np.ones(3), "c": np.ones(4)}
    side = Side(list(open_run(write_dump(tmp_path, {"modules": fields})).records))
    side.load()
    assert [ref.shape for _, ref in side.named("c")] == [(4,)]
    assert [ref.shape for _, ref in side.ending("a.weight", "b.weight")] == [(2,), (3,)]
    assert side.named("d") == []
    side.tensors = {("d", stage): held for (name, stage), held in side.tensors.items() if name == "c"}
    found = side.find("d")
    assert found is not None
    assert found.shape == (4,)
    assert side.ending("weight") == []


def test_advantages_that_one_run_moved_by_a_token_differ_though_only_the_others_fill_the_mask(tmp_path: Path):
    """Log-probabilities are of the next token in both: alone, what fills no mask would be taken to be so, too."""
    generator = np.random.default_rng(0)
    ids = generator.integers(1, 50, (4, 8))
    mask, logprobs = np.zeros((4, 8), np.int64), -generator.random((4, 8)).astype(np.float32)
    mask[:, 3:], logprobs[:, -1] = 1, 0
    fields = {"input_ids": ids, "attention_mask": np.ones_like(ids), "response_mask": mask, "log_probs": logprobs}
    advantages = np.array([1, -1, 0.5, -0.5], np.float32)[:, None] * mask.astype(np.float32)
    moved = {**fields, "advantages": np.roll(advantages, -1, 1)}
    compared = compare_fields(tmp_path, {**fields, "advantages": advantages}, moved, stage="forward_data")
    assert row_of(compared, "advantages").verdict.name == "DIFF"
