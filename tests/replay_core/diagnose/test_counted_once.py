"""What every epoch of a trainer holds counts once; a formula that fits some steps is not that of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay_core.diagnose.finding import Where, info
from replay_core.diagnose.merging import merged
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of

END = 2


def _trained(folder: Path, *, epochs: int, fault: str = "", steps: int = 3, rare: bool = False) -> Path:
    """Four groups of four answers, two of them with a right one; every epoch passes all of them, in another order."""
    with Recorder(folder) as recorder:
        for step in range(steps):
            draw = np.random.default_rng(step)
            ids_BS = draw.integers(10, 30, (16, 12))
            ids_BS[:, :3] = np.repeat(np.arange(4), 4)[:, None] + 3
            ids_BS[:, -1] = END
            mask_BS = np.ones((16, 12), np.int64)
            mask_BS[:, :3] = 0
            engine_BS = np.where(mask_BS, -draw.gamma(2.0, size=(16, 12)), 0.0)
            trainer_BS = engine_BS.copy()
            if fault == "tool":
                # Three tokens amid each answer are an environment's, and count.
                engine_BS[:, 6:9] = 0
                trainer_BS[:, 6:9] = -3.0
            if fault == "end":
                mask_BS[:, -1] = 0
            rewards_B = np.zeros(16)
            rewards_B[[0, 5] if step % 2 == 0 or not rare else [0, 1, 5]] = 1
            advantages_B = np.zeros(16)
            for group in range(4):
                own = rewards_B[4 * group : 4 * group + 4]
                mean = sum(own) / 4
                std = (sum((one - mean) ** 2 for one in own) / 3) ** 0.5
                advantages_B[4 * group : 4 * group + 4] = (own - mean) / (std + 1e-4)
            with recorder.step(step) as record:
                micro = 0
                for epoch in range(epochs):
                    for rows in np.split(np.random.default_rng(9 * step + epoch).permutation(16), 2):
                        fields: dict[str, Any] = {
                            "input_ids": ids_BS[rows], "attention_mask": np.ones((8, 12), np.int64),
                            "response_mask": mask_BS[rows, 1:], "group_ids": rows // 4,
                            "rewards": rewards_B[rows].astype(np.float32),
                            "prompts": ids_BS[rows, :3], "responses": ids_BS[rows, 3:],
                            "truncated": np.zeros(8, bool),
                            "advantages": (advantages_B[rows, None] * mask_BS[rows, 1:]).astype(np.float32),
                            "rollout_log_probs": engine_BS[rows, 1:].astype(np.float32),
                            "old_log_probs": trainer_BS[rows, 1:].astype(np.float32),
                        }  # fmt: skip
                        record("forward_data", fields, micro=micro, epoch=epoch, minibatch=micro % 2)
                        micro += 1
    return folder


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_tokens_and_samples_of_several_epochs_count_once(epochs: int, tmp_path: Path) -> None:
    found = of(look(_trained(tmp_path / "d", epochs=epochs, fault="tool"), "D41"), "D41")
    assert found is not None
    assert found.claim.startswith("48 tokens are in the loss")
    assert "16 of 16" in {str(one.value) for one in found.evidence}


@pytest.mark.parametrize("epochs", [1, 2])
def test_ends_of_several_epochs_count_once(epochs: int, tmp_path: Path) -> None:
    found = of(look(_trained(tmp_path / "d", epochs=epochs, fault="end"), "D19"), "D19")
    assert found is not None
    assert "is in 16 responses" in found.claim


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("rare", [False, True])
def test_the_formula_is_that_of_each_sample_once(epochs: int, rare: bool, tmp_path: Path) -> None:
    """In groups that stand there twice the std is another, and a bound makes some other formula fit."""
    found = of(look(_trained(tmp_path / "d", epochs=epochs, rare=rare), "D04"), "D04")
    assert found is not None
    assert found.severity == "info"
    assert "(r - group mean) / (group std + 0.0001), std over n - 1" in found.claim
    assert len(found.steps) == 3


def test_the_formula_of_most_steps_is_named() -> None:
    def one(claim: str, step: int) -> Any:
        return info(claim, Where(step=step), cause="agrees; nothing is wrong", steps=[step])

    (found,) = merged([one("GPG", 0), one("GRPO", 1), one("GRPO", 2), one("GPG", 3), one("GRPO", 4)])
    assert found.claim == "GRPO"
    assert found.steps == (0, 1, 2, 3, 4)
