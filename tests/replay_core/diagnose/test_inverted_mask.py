"""A loss mask whose ones and zeros are swapped, of a conversation with a tool."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import causes, look


@pytest.mark.parametrize("inverted", [True, False])
def test_a_mask_of_the_tools_tokens_is_named_before_what_follows_from_it(inverted: bool, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(2)
    ids_BS = torch.randint(10, 90, (6, 16), generator=draw)
    response_BS = torch.ones(6, 16, dtype=torch.int64)
    response_BS[:, :3] = 0
    tool_BS = torch.zeros_like(response_BS)
    tool_BS[:, 7:9] = 1
    sampled_BS = response_BS - tool_BS
    logp_BT = -3 * torch.rand(6, 15, generator=draw) - 0.1
    recorder = Recorder(tmp_path / "run")
    with recorder.step(0) as write:
        write(
            "forward_data", input_ids=ids_BS, attention_mask=torch.ones_like(ids_BS), response_mask=response_BS,
            loss_mask=tool_BS if inverted else sampled_BS, log_probs=logp_BT,
            rollout_log_probs=logp_BT * sampled_BS[:, 1:], response_length=torch.full((6,), 13), micro=0,
        )  # fmt: skip
    recorder.close()
    found = causes(look(tmp_path / "run"))
    assert (bool(found) and found[0].claim.startswith("the mask is inverted")) == inverted, found
