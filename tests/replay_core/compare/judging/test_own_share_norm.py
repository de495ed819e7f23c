"""A norm whose statistic each rank takes of its own share of the channels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from replay_core.compare.judging import own_share_norm
from replay_core.compare.parallel import parallel
from tests.builders import there
from tests.replay_core.compare.ranks.in_memory import as_ref, cut
from tests.replay_core.compare.ranks.recorded import Step, compared, random

NAME = "layers.0.self_attn.q_norm.output"
X, WEIGHT, BIAS = random(2, 12, 32), 1 + random(32, seed=1) / 5, random(32, seed=2) / 5


def rms(x: Tensor, weight: Tensor, *, by: float = 1.0) -> Tensor:
    return weight * x * (by * x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias)


def halves(*values: Tensor) -> list[tuple[Tensor, ...]]:
    return list(zip(*(value.chunk(2, -1) for value in values), strict=True))


OF_OWN = {
    "mean square is over one of 2 shares": [rms(*own) for own in halves(X, WEIGHT)],
    "mean square (the sum over the rank's channels by the number of all)": [
        rms(*own, by=0.5) for own in halves(X, WEIGHT)
    ],
}


@pytest.mark.parametrize("said", OF_OWN)
def test_the_mean_square_of_a_ranks_own_channels_is_told(said: str) -> None:
    held = cut(OF_OWN[said], 2)
    fault = own_share_norm.of_own_shares(NAME, as_ref(rms(X, WEIGHT)), held, [cut(X.chunk(2, -1), 2)], (0, 1))
    assert fault is not None
    assert (fault.kind, fault.ranks) == ("own statistic", (0, 1))
    assert said in fault.sentence


def test_the_mean_and_variance_of_a_ranks_own_channels_are_told() -> None:
    held = cut([layer(*own) for own in halves(X, WEIGHT, BIAS)], 2)
    given = [cut(X.chunk(2, -1), 2, "q_proj.output")]
    fault = own_share_norm.of_own_shares(NAME, as_ref(layer(X, WEIGHT, BIAS)), held, given, (0, 1))
    assert fault is not None
    assert "its mean and variance is over one of 2 shares of q_proj.output" in fault.sentence


@pytest.mark.parametrize("wrong", [
    rms(X, WEIGHT) * (1 + random(2, 12, 1, seed=3) / 5), rms(X + 1, WEIGHT), rms(X, WEIGHT * 1.2),
])  # fmt: skip
def test_rows_that_are_off_by_other_factors_are_not_explained(wrong: Tensor) -> None:
    held = cut(wrong.chunk(2, -1), 2)
    given = [cut(X.chunk(2, -1), 2)]
    assert own_share_norm.of_own_shares(NAME, as_ref(rms(X, WEIGHT)), held, given, (0, 1)) is None


def test_ranks_of_two_replicas_that_hold_two_shares_each_are_all_named(tmp_path: Path) -> None:
    ids = torch.arange(24).reshape(2, 12)

    def of(rows: slice, columns: slice, output: Tensor) -> Step:
        return {
            "batch_inputs": {"input_ids": ids[rows]},
            "modules": {
                "layers.0.self_attn.q_proj.output": X[rows, :, columns].contiguous(), NAME: output.contiguous(),
            },
        }  # fmt: skip

    every = slice(None)
    ranks = [
        of(slice(sample, sample + 1), slice(at, at + 16), own[sample : sample + 1])
        for sample in (0, 1) for at, own in zip((0, 16), OF_OWN["mean square is over one of 2 shares"], strict=True)
    ]  # fmt: skip
    found = compared(tmp_path, of(every, every, rms(X, WEIGHT)), *ranks)
    (fault, *_) = [one.fault for one in there(parallel(found.tensors, found.together)).faults]
    assert (fault.kind, fault.ranks) == ("own statistic", (0, 1, 2, 3))
