"""Micro-batches of as many tokens each: the mean of one is a simple share of the step's, and no factor too many."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of


def recorded(path: Path, times: float, off: float, steps: int = 4) -> Path:
    """Two micro-batches a step of 3 x 5 response tokens; the policy loss is the mean over its own, `times` it.

    off: the share by which every second one is off: what a clip range leaves of a loss that is made again.
    """
    recorder = Recorder(path, flags={"algorithm": "gspo", "loss_agg_mode": "token-mean"})
    draw = torch.Generator().manual_seed(3)
    for step in range(steps):
        with recorder.step(step) as write:
            for micro in range(2):
                ids_BT = torch.randint(1, 9, (3, 8), generator=draw)
                mask_BT = torch.ones(3, 8, dtype=torch.long)
                mask_BT[:, :3] = 0
                logp_BT = -torch.rand(3, 8, generator=draw) - 0.5
                advantages_B = torch.randn(3, generator=draw)
                write(
                    "forward_data", input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT), response_mask=mask_BT,
                    log_probs=logp_BT, old_log_probs=logp_BT, micro=micro,
                    advantages=advantages_B[:, None].expand(3, 8).clone(),
                )  # fmt: skip
                mean = -float(advantages_B.mean())
                write("loss", pg_loss=times * mean * (1 + off * micro), micro=micro)
    recorder.close()
    return path


@pytest.mark.parametrize(("times", "severity"), [(1.0, None), (8.0, "error")])
def test_a_mean_of_half_a_step_is_no_factor_and_a_factor_is(times: float, severity: str | None, tmp_path: Path) -> None:
    found = of(look(recorded(tmp_path / "run", times, off=3e-4), "D28"), "D28")
    if severity is None:
        assert found is None or found.severity != "error", found.claim
    else:
        assert found is not None
        assert found.severity == severity
        assert "times what it should be" in found.claim
