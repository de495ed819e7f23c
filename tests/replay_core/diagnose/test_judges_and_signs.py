"""Logs of a judge that is out for some steps and of values with the sign turned, turns that a mask leaves out, and a
critic of which the bias alone learns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of
from tests.replay_core.diagnose.logs import diagnosed, verl


def _wavering(size: int = 18, mean: float = 0.6) -> list[float]:
    return [float(one) for one in np.random.default_rng(3).normal(mean, 0.08, size)]


def test_a_judge_that_is_out_for_some_steps_is_named(tmp_path: Path) -> None:
    rewards = _wavering()
    rewards[7:10] = [0.0] * 3
    found = of(diagnosed(tmp_path, verl([{"critic/score/mean": one} for one in rewards])), "L17")
    assert found is not None
    assert (found.severity, found.steps) == ("warning", (8, 9, 10))
    assert "exactly 0 in steps 8 to 10 and in no other" in found.claim


@pytest.mark.parametrize("rare", [[0.0, 0.0], [0.0]])
def test_rewards_that_are_rare_are_no_outage(tmp_path: Path, rare: list[float]) -> None:
    rewards = [0.02 * (n % 3) + 0.01 * (n % 2) for n in range(18)]
    rewards[6 : 6 + len(rare)] = rare
    assert of(diagnosed(tmp_path, verl([{"critic/score/mean": one} for one in rewards])), "L17") is None


@pytest.mark.parametrize(("sign", "named"), [(-1, True), (1, False)])
def test_values_of_the_other_sign_are_named(sign: int, named: bool, tmp_path: Path) -> None:
    steps = [
        {"critic/score/mean": one, "critic/returns/mean": one, "critic/values/mean": sign * 0.8 * one,
         "critic/vf_explained_var": -1.2 if named else 0.2, "critic/vf_loss": 0.4}
        for one in _wavering()
    ]  # fmt: skip
    found = of(diagnosed(tmp_path, verl(steps)), "D45")
    assert (found is not None and "have the sign of the returns turned" in found.claim) == named


def _turns(path: Path, *, last_alone: bool) -> Path:
    rng = np.random.default_rng(1)
    with Recorder(path) as recorder:
        for step in range(2):
            ids = torch.tensor(rng.integers(5, 50, (8, 12)))
            mask = np.zeros((8, 12), dtype=np.int64)
            mask[:, 4:7] = 1
            mask[:, 9:] = 1
            rollout = torch.tensor(np.where(mask[:, 1:], -rng.random((8, 11)) - 0.1, 0.0)).float()
            counted = mask.copy()
            if last_alone:
                counted[:, :9] = 0
            with recorder.step(step) as record:
                record("trajectory", input_ids=ids, attention_mask=torch.ones_like(ids), rollout_log_probs=rollout,
                       loss_mask=torch.tensor(counted), response_mask=torch.tensor(mask))  # fmt: skip
    return path


@pytest.mark.parametrize("last_alone", [True, False])
def test_earlier_turns_that_do_not_count_are_named(last_alone: bool, tmp_path: Path) -> None:
    found = of(look(_turns(tmp_path / "dump", last_alone=last_alone), "D109"), "D109")
    assert (found is not None and found.claim.startswith("only the last turn of a response is trained")) == last_alone


def _rows_of_turns(path: Path, *, gap: int, every_turn: bool) -> Path:
    """Trajectories of two turns, with a row for each turn that has all before it, or the last row alone."""
    with Recorder(path) as recorder:
        torch.manual_seed(0)
        for step in range(2):
            ids, mask, rollout = [], [], []
            for _ in range(4):
                tokens, logs = torch.randint(10, 90, (14,)), -torch.rand(14) - 0.1
                logs[:3] = logs[8 : 8 + gap] = 0
                for first, end in [(3, 8), (8 + gap, 14)] if every_turn else [(8 + gap, 14)]:
                    inside = torch.arange(14) < end
                    ids.append(tokens * inside)
                    mask.append((torch.arange(14) >= first) & inside)
                    rollout.append(logs * inside)
            held = torch.stack(ids)
            attention = (held > 0).long()
            response = attention.clone()
            response[:, :3] = 0
            with recorder.step(step) as record:
                record("trajectory", input_ids=held, attention_mask=attention, response_mask=response,
                       loss_mask=torch.stack(mask).long(), rollout_log_probs=torch.stack(rollout)[:, 1:])  # fmt: skip
    return path


@pytest.mark.parametrize(("gap", "every_turn", "named"), [(3, True, False), (1, False, False), (3, False, True)])
def test_turns_that_count_in_rows_of_their_own_are_not_left_out(
    gap: int, every_turn: bool, named: bool, tmp_path: Path
) -> None:
    path = _rows_of_turns(tmp_path / "dump", gap=gap, every_turn=every_turn)
    assert (of(look(path, "D109"), "D109") is not None) == named


@pytest.mark.parametrize(("moves", "words"), [(0.02, "only its bias learns"), (0.0, "it is never updated")])
def test_a_critic_of_one_number_is_said_to_move_where_it_does(moves: float, words: str, tmp_path: Path) -> None:
    rng, mask = np.random.default_rng(2), torch.zeros(8, 12, dtype=torch.long)
    mask[:, 4:] = 1
    with Recorder(tmp_path / "dump") as recorder:
        for step in range(4):
            fields: dict[str, Any] = {
                "input_ids": torch.tensor(rng.integers(5, 50, (8, 12))), "attention_mask": torch.ones_like(mask),
                "response_mask": mask, "values": torch.full((8, 11), 0.1 + moves * step),
                "returns": torch.tensor(rng.random((8, 11))).float(),
            }  # fmt: skip
            with recorder.step(step) as record:
                record("trajectory", **fields)
    found = of(look(tmp_path / "dump", "D45"), "D45")
    assert found is not None
    assert words in found.claim


@pytest.mark.parametrize(("logged", "steps", "nearer"), [(False, 12, False), (True, 8, False), (True, 12, True)])
def test_a_critic_that_begins_on_the_other_side_is_not_turned(
    logged: bool, steps: int, nearer: bool, tmp_path: Path
) -> None:
    rows: list[dict[str, float | None]] = [
        {"critic/values/mean": -0.6 + (0.04 * n if nearer else 0), "critic/returns/mean": 0.3 + 0.01 * (n % 3),
         "critic/vf_explained_var": -1.0 if logged else None}
        for n in range(steps)
    ]  # fmt: skip
    found = of(diagnosed(tmp_path, verl(rows)), "D45")
    assert found is None or "sign" not in found.claim


def test_a_leap_from_rewards_that_are_mostly_0_is_named(tmp_path: Path) -> None:
    means = [0.0, 0.0, 0.01, 0.0, 0.0, 0.0, *[1 + 0.01 * n for n in range(6)]]
    found = of(diagnosed(tmp_path, verl([
        {"critic/score/mean": one, "critic/score/max": 2 * one, "critic/score/min": 0.0} for one in means
    ])), "L19")  # fmt: skip
    assert found is not None
    assert "goes from 0.02 to" in found.claim
