"""Files of no framework: settings in them, and folders beside each other that hold other things of one step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay_core.diagnose.case import Case
from replay_core.dumps import open_run
from tests.replay_core.diagnose.batches import look, of


def _npz(folder: Path, steps: int = 3, **said: Any) -> Path:
    folder.mkdir()
    for step in range(steps):
        fields = {name: value[step] if isinstance(value, list) else value for name, value in said.items()}
        np.savez(folder / f"step_{step}.npz", input_ids=np.arange(12).reshape(3, 4), lr=0.1 * step, **fields)
    return folder


def test_words_and_settings_of_every_file_are_taken_as_stated(tmp_path: Path) -> None:
    run = open_run(_npz(tmp_path / "d", loss_mode="gspo", clip_ratio_low=0.003))
    algorithm = Case(run).algorithm
    assert algorithm.is_by_sequence
    assert algorithm.number("clip_ratio_low") == 0.003


def test_what_changes_from_file_to_file_is_no_setting(tmp_path: Path) -> None:
    algorithm = Case(open_run(_npz(tmp_path / "d", loss_mode=["gspo", "gspo", "grpo"], temperature=[1.0, 0.9, 0.8])))
    assert not algorithm.algorithm.is_by_sequence
    assert algorithm.algorithm.number("temperature") is None
    assert algorithm.algorithm.number("lr") is None


def _two_folders(root: Path, retokenised: bool) -> Path:
    """What an engine gave back, and what was trained on, by the ids of samples."""
    draw = np.random.default_rng(2)
    for name in ("rollouts", "train"):
        (root / name).mkdir(parents=True)
    for step in range(3):
        rolled, trained = [], []
        for sample in range(8):
            prompt, answer = draw.integers(5, 40, 4).tolist(), draw.integers(5, 40, 6).tolist()
            logprobs = np.round(-draw.random(6), 6).tolist()
            told = {"step": step, "id": f"{step}-{sample}", "reward": float(sample % 2)}
            rolled.append({**told, "prompt_token_ids": prompt, "output_token_ids": answer, "output_logprobs": logprobs})
            if retokenised and sample % 2:
                answer = [7, *answer[1:]]
            trained.append({**told, "input_ids": prompt + answer, "loss_mask": [0] * 4 + [1] * 6,
                            "rollout_logprobs": logprobs, "logprobs": logprobs, "advantage": 0.5})  # fmt: skip
        for name, rows in (("rollouts", rolled), ("train", trained)):
            (root / name / f"step_{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


@pytest.mark.parametrize("retokenised", [True, False])
def test_rollouts_and_what_is_trained_on_in_two_folders_are_two_stages(retokenised: bool, tmp_path: Path) -> None:
    root = _two_folders(tmp_path / "d", retokenised)
    found = of(look(root, "D27"), "D27")
    assert (found is not None) == retokenised
    if found is not None:
        assert "4 of 8 samples have other token ids in" in found.claim
        assert "rollouts/" in found.claim
        assert "train/" in found.claim
    batch = next(Case(open_run(root)).batches())
    assert batch.columns.of("policy_logprobs") is not None
    assert batch.trained_N is not None


@pytest.mark.parametrize("still", [True, False])
def test_weights_and_gradients_in_a_folder_of_their_own(still: bool, tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    _npz(tmp_path / "batches")
    (tmp_path / "train_state").mkdir()
    for step in range(3):
        fields: dict[str, Any] = {}
        for name in ("emb.weight", "layers.0.weight", "layers.1.weight", "layers.2.weight"):
            moves = 0 if still and name == "emb.weight" else 0.01 * step
            fields[f"param.{name}"] = np.full((8, 8), 1.0 + moves, dtype=np.float32)
            fields[f"grad.{name}"] = draw.normal(size=(8, 8)).astype(np.float32)
        np.savez(tmp_path / "train_state" / f"step_{step}.npz", **fields)
    found = of(look(tmp_path, "D57"), "D57")
    assert (found is not None) == still
    if found is not None:
        assert "have gradients and never change" in found.claim
