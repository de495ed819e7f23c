"""Whose part of a row-parallel sum is off, and how."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from replay_core.compare.judging import row_parallel_otherwise
from tests.replay_core.compare.ranks.in_memory import alike, as_ref, cut
from tests.replay_core.compare.ranks.recorded import random

WIDTH, HIDDEN = 24, 16
SILU, GELU = functional.silu, functional.gelu


def parts(activation=SILU, seed=0):
    gate, up = random(2, 8, WIDTH, seed=seed), random(2, 8, WIDTH, seed=seed + 1)
    weight, bias = random(HIDDEN, WIDTH, seed=seed + 2), random(HIDDEN, seed=seed + 3)
    each = zip(gate.chunk(2, -1), up.chunk(2, -1), weight.chunk(2, 1), strict=True)
    return gate, up, weight, bias, [(activation(g) * u) @ w.T for g, u, w in each]


def asked(there, here, gate, up, weight, bias, *, is_fused=False, dtype=torch.float32):
    if is_fused:
        both = [torch.cat(own, -1) for own in zip(gate.chunk(2, -1), up.chunk(2, -1), strict=True)]
        slices = [cut(both, 2, "model.layers.0.mlp.linear_fc1.output")]
        name = "layers.0.mlp.linear_fc2.output"
    else:
        named = (("gate_proj", gate), ("up_proj", up))
        slices = [cut(x.chunk(2, -1), 2, f"model.layers.0.mlp.{one}.output") for one, x in named]
        name = "layers.0.mlp.down_proj.output"
    here = here.to(dtype)
    return row_parallel_otherwise.of_parts(
        name, as_ref(there.to(dtype)), alike(here, here), slices, weight.double().numpy(), bias.double().numpy()
    )


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [0, 10])
def test_parts_that_are_off(is_fused, dtype, seed):
    gate, up, weight, bias, right = parts(seed=seed)
    wrong = parts(GELU, seed)[-1]
    there = right[0] + right[1] + bias
    for kind, here in (
        ("missing", right[0] + bias), ("twice", right[0] + 2 * right[1] + bias),
        ("scaled part", right[0] + 0.5 * right[1] + bias), ("another activation", right[0] + wrong[1] + bias),
    ):  # fmt: skip
        fault = asked(there, here, gate, up, weight, bias, is_fused=is_fused, dtype=dtype)
        assert fault is not None
        assert (fault.kind, fault.ranks) == (kind, (1,))


def test_nothing_is_said_of_what_no_part_makes():
    gate, up, weight, bias, right = parts()
    there = right[0] + right[1] + bias
    assert asked(there, there + 0.3 * random(2, 8, HIDDEN, seed=7), gate, up, weight, bias) is None
    assert asked(there, there, gate, up, weight, bias) is None
    assert asked(random(2, 8, HIDDEN, seed=8), right[0], gate, up, weight, bias) is None
