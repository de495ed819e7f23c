"""A loss next to 0 that is a sum over a constant: rounding hides which, and nothing is wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of

SAMPLES, LONGEST = 30, 12


@pytest.mark.parametrize(("size", "says"), [(2e-5, None), (2e-3, "token-sum over a constant, 360")])
def test_a_sum_over_a_constant(size: float, says: str | None, tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    mask_BT = (np.arange(7) < draw.integers(3, 8, SAMPLES)[:, None]).astype(np.int64)
    logprobs_BT = -draw.exponential(0.5, mask_BT.shape).astype(np.float32)
    advantages_B = draw.normal(size=SAMPLES)
    made = -(advantages_B[:, None] * mask_BT).sum()
    advantages_B += (made + size * SAMPLES * LONGEST) / mask_BT.sum()  # so that the loss is -size
    loss = -float((advantages_B[:, None] * mask_BT).sum()) / (SAMPLES * LONGEST)
    flags = {"loss_type": "dr_grpo", "max_completion_length": LONGEST, "scale_rewards": "none", "beta": 0.0}
    recorder = Recorder(tmp_path / "run", flags=flags)
    for step in range(2):
        with recorder.step(step) as record:
            record("forward_data", micro=0, completion_ids=draw.integers(3, 30, mask_BT.shape), completion_mask=mask_BT,
                   old_per_token_logps=logprobs_BT, per_token_logps=logprobs_BT,
                   advantages=advantages_B.astype(np.float32))  # fmt: skip
            record("loss", micro=0, pg_loss=np.float32(loss))
    found = of(look(tmp_path / "run", "D28"), "D28")
    assert (None if found is None else (found.severity, found.claim)) == (says and ("info", f"pg_loss is {says}"))
