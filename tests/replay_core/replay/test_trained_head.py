"""Log-probabilities as the trainer made them, to the last bit: its library is the oracle."""

from __future__ import annotations

import pytest
import torch

from replay_core.replay.trained_head import of_next_tokens


def drawn() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [B, T, V] and ids [B, T]."""
    chance = torch.Generator().manual_seed(4)
    return torch.randn(3, 40, 97, generator=chance) * 6, torch.randint(0, 97, (3, 40), generator=chance)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_rows_log_probabilities_are_those_of_trls_selective_log_softmax():
    selective = pytest.importorskip("trl.trainer.utils", reason="TRL is not installed").selective_log_softmax
    logits_BTV, next_BT = drawn()
    made_BT = of_next_tokens("rows")(logits_BTV.numpy(), next_BT.numpy())
    assert (made_BT == selective(logits_BTV, next_BT).numpy()).all()


def test_whole_logits_make_other_last_bits_than_rows():
    logits_BTV, next_BT = drawn()
    whole_BT, rows_BT = (of_next_tokens(said)(logits_BTV.numpy(), next_BT.numpy()) for said in ("whole", "rows"))
    expected_BT = torch.log_softmax(logits_BTV, -1).gather(-1, next_BT[..., None])[..., 0]
    assert (whole_BT == expected_BT.numpy()).all()
    assert (whole_BT != rows_BT).any()
    assert abs(whole_BT - rows_BT).max() < 1e-5
