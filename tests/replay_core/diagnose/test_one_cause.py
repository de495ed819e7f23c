"""Where a log or single rows can tell which of several causes it was, that one is said; where they cannot, none is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from replay_core.diagnose.finding import Finding
from replay_core.dumps import open_run
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import healthy, look, of, seen
from tests.replay_core.diagnose.logs import Metrics, diagnosed, diagnosed_path, trl, verl

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.27 GiB. GPU 0 has a total capacity of 79.1 GiB\n"


@pytest.mark.parametrize(
    ("memory", "longer", "leaks"), [(2.0, 0.0, True), (0.0, 0.0, False), (2.0, 30.0, False)], ids=str
)
def test_memory_that_a_leak_has_used_up_is_no_long_micro_batch(
    memory: float, longer: float, leaks: bool, tmp_path: Path
) -> None:
    steps: list[Metrics] = [
        {"perf/max_memory_allocated_gb": 36.0 + memory * n + 0.01 * (n % 3),
         "response_length/mean": 800.0 + longer * n + 3 * (n % 2)} for n in range(20)
    ]  # fmt: skip
    finding = of(diagnosed(tmp_path, verl(steps) + OOM), "D36")
    assert finding is not None
    assert ("a leak" in finding.claim) is leaks


@pytest.mark.parametrize(("kl", "severity"), [(0.8, "error"), (0.0006, "warning")])
def test_a_rate_that_leaps_is_an_error_where_the_policy_breaks_with_it(
    kl: float, severity: str, tmp_path: Path
) -> None:
    steps: list[Metrics] = [
        {"learning_rate": 1e-6 if n < 8 else 6e-5, "kl": 0.0005 if n < 9 else kl} for n in range(16)
    ]
    finding = of(diagnosed(tmp_path, trl(steps)), "L22")
    assert finding is not None
    assert finding.severity == severity
    assert ("it breaks the policy" in finding.claim) is (severity == "error")


@pytest.mark.parametrize(("rows", "single"), [(1, True), (16, False)])
def test_nan_of_single_rows_is_not_the_weights(rows: int, single: bool, tmp_path: Path) -> None:
    batch = healthy()
    batch["old_log_probs"][:rows] = np.nan
    finding = of(seen(tmp_path, batch, "D21"), "D21")
    assert finding is not None
    assert ("it is not the weights" in finding.cause) is single


def _skipped(folder: Path, moves: bool) -> Finding:
    """Gradients that are infinite from step 2 on; where weights move all the same, NaN is what they come to."""
    draw = np.random.default_rng(0)
    with Recorder(folder) as recorder:
        for step in range(5):
            broken = step >= 2
            with recorder.step(step) as record:
                logprobs = -draw.random((4, 6)).astype(np.float32)
                if moves and step > 2:
                    logprobs[:] = np.nan
                record("forward_data", micro=0, input_ids=torch.from_numpy(draw.integers(3, 20, (4, 6))),
                       log_probs=torch.from_numpy(logprobs))  # fmt: skip
                grad = np.full((2, 2), np.inf if broken else 0.1, np.float32)
                record("gradient", {"grad": {"head.weight": torch.from_numpy(grad)}}, micro=0)
    finding = of(look(folder, "D21"), "D21")
    assert finding is not None
    return finding


def test_updates_that_are_skipped_since_gradients_overflow_are_said_to_be(tmp_path: Path) -> None:
    assert "no update since is made, in 3 steps" in _skipped(tmp_path / "skipped", moves=False).claim
    assert "no update" not in _skipped(tmp_path / "made", moves=True).claim


@pytest.mark.parametrize(("name", "opens"), [("wandb.jsonl", True), ("notes.jsonl", False)])
def test_a_folder_with_a_log_under_a_name_of_its_own_opens(name: str, opens: bool, tmp_path: Path) -> None:
    rows = [{"step": n, **({"train/loss": 0.1 / (n + 1)} if opens else {}), "x": n} for n in range(6)]
    (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if opens:
        run = open_run(tmp_path)
        assert (run.dialect, len(run.records)) == ("metrics", 6)
    else:
        assert "metrics" not in _opened(tmp_path)


def _opened(folder: Path) -> str:
    try:
        return open_run(folder).dialect
    except Exception as error:  # what nobody knows is refused
        return type(error).__name__


@pytest.mark.parametrize(("raw", "expected"), [(True, "info"), (False, "warning")])
def test_advantages_that_are_the_rewards_are_not_cut_off_at_0(raw: bool, expected: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    with Recorder(tmp_path, flags={"dtype": "float32"}) as recorder:
        for step in range(6):
            rewards = (draw.integers(0, 4, 12) * 2.0).astype(np.float32)
            rewards[:2] = 0.0, 6.0
            advantage = rewards if raw else np.maximum(rewards - rewards.mean(), 0)
            with recorder.step(step) as record:
                mask = torch.ones(12, 5)
                record("trajectory", input_ids=torch.from_numpy(draw.integers(3, 30, (12, 5))),
                       attention_mask=mask.long(), response_mask=mask.long(), rewards=torch.from_numpy(rewards),
                       group_id=torch.arange(12) // 4,
                       advantages=torch.from_numpy(advantage)[:, None] * mask)  # fmt: skip
                record("training_metrics", {"adv_max": float(advantage.max()), "adv_min": float(advantage.min())})
    finding = of(diagnosed_path(tmp_path), "D73")
    assert finding is not None
    assert finding.severity == expected
