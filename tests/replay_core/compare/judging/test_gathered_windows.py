"""A window of keys that is counted along the keys as ranks of context parallelism gather them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from replay_core.compare.parallel import parallel
from tests.builders import there
from tests.replay_core.compare.ranks.recorded import Step, compared, random

SEQ, HEADS, WIDTH, WINDOW = 16, 2, 8, 5
HIDDEN = HEADS * WIDTH
EVERY = torch.arange(SEQ)
QUARTERS = EVERY.chunk(4)
ZIGZAG = [torch.cat((QUARTERS[0], QUARTERS[3])), torch.cat((QUARTERS[1], QUARTERS[2]))]


def attention(q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
    q, k, v = (x.unflatten(-1, (HEADS, WIDTH)) for x in (q, k, v))
    scores = torch.einsum("bqhd,bshd->bhqs", q, k) / math.sqrt(WIDTH)
    return torch.einsum("bhqs,bshd->bqhd", scores.masked_fill(~sees, -torch.inf).softmax(-1), v).flatten(2)


def behind(at: Tensor) -> Tensor:
    return at[:, None] - at[None]


def seen(at: Tensor) -> Tensor:
    """Earlier keys in a window that is counted by these places."""
    return (behind(EVERY) >= 0) & (behind(at).abs() < WINDOW)


def faults(folder: Path, sees: Tensor) -> list[Any]:
    q, k, v, weight = (random(2, SEQ, HIDDEN, seed=seed) for seed in range(4))
    weight, ids = weight[0, :HIDDEN], torch.arange(2 * SEQ).reshape(2, SEQ)

    def step(at: Tensor, made: Tensor) -> Step:
        values = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": made @ weight.T}
        return {
            "batch_inputs": {"input_ids": ids[:, at]},
            "modules": {f"layers.0.self_attn.{name}.output": x[:, at].contiguous() for name, x in values.items()},
            "param": {"param.layers.0.self_attn.o_proj.weight": weight},
        }

    right, made = (attention(q, k, v, mask) for mask in (seen(EVERY), sees))
    found = compared(folder, step(EVERY, right), *(step(at, made) for at in ZIGZAG))
    many = parallel(found.tensors, found.together)
    return [one.fault for one in there(many).faults]


def test_a_window_along_gathered_keys_is_told(tmp_path: Path) -> None:
    buffer = torch.empty_like(EVERY)
    buffer[torch.cat(ZIGZAG)] = EVERY
    (fault,) = faults(tmp_path, seen(buffer))
    assert (fault.kind, fault.ranks) == ("window", (0, 1))
    assert f"in a window of {WINDOW} keys that is counted where they lie in the turn of the ranks" in fault.sentence


def test_a_window_along_the_sequence_is_no_fault(tmp_path: Path) -> None:
    assert not faults(tmp_path, seen(EVERY))


@pytest.mark.parametrize("wide", [3, 9])
def test_another_window_is_not_one_along_gathered_keys(wide: int, tmp_path: Path) -> None:
    sees = (behind(EVERY) >= 0) & (behind(EVERY) < wide)
    assert "window" not in {fault.kind for fault in faults(tmp_path, sees)}
