"""References, and what an update is given, of other rows; and what is no fault: one response to a prompt, ReMax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of

ROWS, PROMPT, ANSWER = 32, 3, 8


def _record(folder: Path, how: str, *, steps: int = 3) -> None:
    """Rows whose reference is the policy of the first step; `shuffled` over the batch, or within micro-batches."""
    draw = np.random.default_rng(0)
    with Recorder(folder) as recorder:
        for step in range(steps):
            ids_BS = draw.integers(3, 40, (ROWS, PROMPT + ANSWER))
            mask_BS = np.zeros((ROWS, PROMPT + ANSWER), np.int64)
            mask_BS[:, PROMPT:] = np.arange(ANSWER) < draw.integers(4, ANSWER + 1, ROWS)[:, None]
            whole = mask_BS.copy()
            whole[:, :PROMPT] = 1
            policy_BT = (-draw.gamma(1.5, size=(ROWS, ANSWER)) * mask_BS[:, PROMPT:]).astype(np.float32)
            ref_BT = (policy_BT + 0.01 * step * mask_BS[:, PROMPT:]).astype(np.float32)
            if how == "batch":
                ref_BT = ref_BT[draw.permutation(ROWS)]
            fields = {"input_ids": ids_BS, "attention_mask": whole, "response_mask": mask_BS[:, PROMPT:]}
            with recorder.step(step) as record:
                record("trajectory", {**fields, "rollout_log_probs": policy_BT, "old_log_probs": policy_BT,
                                      "ref_log_prob": ref_BT})  # fmt: skip
                for micro, part in enumerate(np.split(np.arange(ROWS), 4)):
                    other = part[draw.permutation(len(part))] if how == "micro" else part
                    record("forward_data", {**{name: value[part] for name, value in fields.items()},
                                            "old_log_probs": policy_BT[part], "log_probs": policy_BT[part],
                                            "ref_log_prob": ref_BT[other]}, micro=micro)  # fmt: skip


@pytest.mark.parametrize(
    ("how", "rule", "says"),
    [("batch", "D15", "in the wrong rows"), ("micro", "D35", "another row of their micro-batch"), ("", "", "")],
)
def test_references_of_other_rows(how: str, rule: str, says: str, tmp_path: Path) -> None:
    _record(tmp_path / "d", how)
    told = look(tmp_path / "d", "D15", "D35")
    if not how:
        assert not [one for one in told.findings if one.severity != "info"]
        return
    found = of(told, rule)
    assert found is not None
    assert found.severity == "error"
    assert says in found.claim


@pytest.mark.parametrize(("moves", "says"), [(True, "the reference is the policy itself"), (False, "not trained")])
def test_checkpoints_tell_why_policy_and_reference_are_one(moves: bool, says: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    weight = torch.zeros(4, 4)
    with Recorder(tmp_path / "d", flags={"lora_r": 4}) as recorder:
        for step in range(5):
            place = tmp_path / "d" / "checkpoints" / f"step_{step:06d}"
            place.mkdir(parents=True)
            save_file({"weight": weight + 0.01 * step * moves}, place / "model.safetensors")
            recorder.note_model(step, str(place.relative_to(tmp_path / "d")))
            ids_BS = draw.integers(3, 40, (8, PROMPT + ANSWER))
            mask_BS = np.concatenate([np.zeros((8, PROMPT)), np.ones((8, ANSWER))], axis=1).astype(np.int64)
            policy_BT = -draw.gamma(1.5, size=(8, ANSWER)).astype(np.float32)
            with recorder.step(step) as record:
                record("trajectory", {
                    "input_ids": ids_BS, "attention_mask": np.ones_like(ids_BS), "response_mask": mask_BS[:, PROMPT:],
                    "old_log_probs": policy_BT, "ref_log_prob": policy_BT,
                    "advantages": draw.normal(0, 1, (8, ANSWER)).astype(np.float32)})  # fmt: skip
    found = of(look(tmp_path / "d", "D46"), "D46")
    assert found is not None
    assert says in found.claim


def _groups(folder: Path, fields: Any, flags: dict[str, Any], group_B: np.ndarray) -> None:
    draw = np.random.default_rng(1)
    with Recorder(folder, flags=flags) as recorder:
        for step in range(3):
            rows = len(group_B)
            ids_BS = draw.integers(3, 40, (rows, PROMPT + ANSWER))
            ids_BS[:, :PROMPT] = 3 + group_B[:, None] + np.arange(PROMPT)
            mask_BS = np.ones((rows, PROMPT + ANSWER), np.int64)
            with recorder.step(step) as record:
                record("trajectory", {
                    "input_ids": ids_BS, "attention_mask": mask_BS, "response_mask": mask_BS[:, PROMPT:],
                    "group_ids": group_B, **fields(draw, rows)})  # fmt: skip


@pytest.mark.parametrize(("stated", "says"), [(1, False), (4, True)])
def test_two_equal_prompts_of_one_response_each_are_no_broken_group(stated: int, says: bool, tmp_path: Path) -> None:
    group_B = np.array([*range(20), 4])
    flags = {"n_samples_per_prompt": stated, "advantage_estimator": "reinforce", "lambd": 1.0, "init_kl_coef": 0.01}
    _groups(tmp_path / "d", lambda draw, rows: {"rewards": draw.random(rows).astype(np.float32)}, flags, group_B)
    found = of(look(tmp_path / "d", "D05"), "D05")
    assert (found is not None and found.severity == "warning") == says


@pytest.mark.parametrize("name", ["reward_baseline", "greedy_reward", "baseline", "rb", ""])
def test_a_greedy_baseline_is_known_by_its_names(name: str, tmp_path: Path) -> None:
    group_B = np.repeat(np.arange(6), 4)

    def fields(draw: Any, rows: int) -> dict[str, Any]:
        reward_B = draw.random(rows).astype(np.float32)
        baseline_B = draw.random(6).astype(np.float32)[group_B]
        return {"rewards": reward_B, "advantages": reward_B - baseline_B, **({name: baseline_B} if name else {})}

    _groups(tmp_path / "d", fields, {"advantage_estimator": "remax", "n_samples_per_prompt": 4}, group_B)
    told = look(tmp_path / "d", "D04", "D127")
    assert not [one for one in told.findings if one.severity != "info"]
    found = of(told, "D04")
    assert not name or (found is not None and "ReMax" in found.claim)


@pytest.mark.parametrize("stays", [True, False])
def test_an_epoch_that_is_a_step_of_its_own_is_an_epoch(stays: bool, tmp_path: Path) -> None:
    """Two passes over each batch, each a step of its own; the batch itself is recorded with another mask."""
    draw = np.random.default_rng(2)
    with Recorder(tmp_path / "d", flags={"num_iterations": 2}) as recorder:
        for step in range(8):
            if step % 2 == 0 or not stays:
                ids_BS = draw.integers(3, 40, (8, PROMPT + ANSWER))
            mask_BS = np.ones_like(ids_BS)
            cut_BS = mask_BS.copy()
            cut_BS[:, -1] = 0
            with recorder.step(step) as record:
                if step % 2 == 0:
                    record("trajectory", input_ids=ids_BS, attention_mask=cut_BS, response_mask=cut_BS[:, PROMPT:])
                record("forward_data", input_ids=ids_BS, attention_mask=mask_BS, response_mask=mask_BS[:, PROMPT:],
                       epoch=step % 2 if stays else 0, micro=0)  # fmt: skip
    found = of(look(tmp_path / "d", "D124"), "D124")
    assert (found is not None) != stays
