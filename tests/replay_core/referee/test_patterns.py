"""What in a wrong product is wrong is said by its simplest description."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from replay_core.referee.figures import Yardstick
from replay_core.referee.patterns import pattern
from replay_core.referee.shadow import Claim

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(48, 96, generator=GENERATOR).to(torch.bfloat16).double()
WEIGHT = (torch.randn(64, 96, generator=GENERATOR) * torch.logspace(-1, 1, 64)[:, None]).to(torch.bfloat16).double()
THIN = torch.randn(64, 2, generator=GENERATOR).double() @ torch.randn(2, 96, generator=GENERATOR).double()


def _moved(rows: Tensor, by: int) -> Tensor:
    return torch.cat([rows[by:], rows[:by]])


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: X @ WEIGHT.T * 1.02, "all of it times 1.02"),
        (lambda: X @ WEIGHT.reshape(4, 16, 96)[[1, 0, 3, 2]].reshape(64, 96).T, "blocks of 16 in the order 1, 0, 3, 2"),
        (lambda: X @ (WEIGHT + THIN).T, "a difference of low rank, 2"),
        (lambda: _moved(X @ WEIGHT.T, 1), "what the token +1 from it should have"),
        (lambda: X @ (WEIGHT * (1 + 0.5 * (torch.arange(64) == 7)[:, None])).T, "channel 7: times 1.5"),
        (
            lambda: (X @ WEIGHT.T).index_fill(0, torch.tensor([5, 9]), 0.0),
            "2 tokens of sample 0, first token 5 of sample 0: times 0",
        ),
    ],
    ids=["factor", "heads", "low rank", "shift", "channel", "tokens"],
)
def test_the_simplest_description_that_leaves_noise_is_said(made: Callable[[], Tensor], said: str):
    truth = X @ WEIGHT.T
    recorded = made().to(torch.bfloat16).double()
    claim = Claim("q_proj.output", "q_proj", False, "linear", torch.bfloat16, recorded, truth, True)
    found = pattern(Yardstick(claim, []), [(0, position) for position in range(48)])
    assert found is not None
    assert said in found.words


def test_noise_has_no_pattern_of_more_than_itself():
    truth = X @ WEIGHT.T
    right = truth.to(torch.bfloat16).double()
    claim = Claim("q_proj.output", "q_proj", False, "linear", torch.bfloat16, right, truth, True)
    assert Yardstick(claim, []).figures().excess < 1


def test_what_takes_away_one_channel_of_hardly_any_noise_explains_nothing_of_the_others():
    weight = WEIGHT * torch.where(torch.arange(64) == 7, 1e-4, 1.0)[:, None]
    truth = X @ weight.T
    size = torch.where(torch.arange(64) == 7, 0.1 * truth.std(), 0.5 * truth.abs())
    error = size * torch.randn(truth.shape, generator=GENERATOR).double()
    recorded = (truth + error).to(torch.bfloat16).double()
    claim = Claim("q_proj.output", "q_proj", False, "linear", torch.bfloat16, recorded, truth, True)
    yard = Yardstick(claim, [])
    alone = yard.figures(torch.where(torch.arange(64) == 7, error, 0.0))
    assert alone.left < 0.01 * yard.figures().left, "in units of noise that channel is nearly all there is"
    assert not yard.figures().is_explained_by(alone)
