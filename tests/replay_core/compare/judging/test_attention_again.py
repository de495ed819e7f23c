"""What one rank of context parallelism made of keys and values, told by making attention again."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from replay_core.compare.parallel import parallel
from tests.builders import there
from tests.replay_core.compare.ranks.recorded import compared, random

SEQ, HEADS, SHARED, WIDTH, RANKS = 16, 4, 2, 8, 4
HIDDEN = HEADS * WIDTH
EACH = SEQ // RANKS


def turned(x: Tensor, at: Tensor) -> Tensor:
    """Rotary positions, of heads [B, S, head, width]."""
    turn = at[:, None] * 10000.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH)
    cos, sin = turn.cos()[:, None], turn.sin()[:, None]
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def attention(q: Tensor, k: Tensor, v: Tensor, sees: Tensor, at: Tensor | None = None) -> Tensor:
    at = torch.arange(SEQ) if at is None else at
    q, k, v = (x.unflatten(-1, (-1, WIDTH)) for x in (q, k, v))
    q, k = turned(q, at), turned(k, at)
    k, v = (x.repeat_interleave(HEADS // SHARED, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bshd->bhqs", q, k) / math.sqrt(WIDTH)
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    return torch.einsum("bhqs,bshd->bqhd", weights, v).flatten(2)


CAUSAL = torch.arange(SEQ)[:, None] >= torch.arange(SEQ)


def without(rank: int) -> Tensor:
    sees = CAUSAL.clone()
    sees[:, rank * EACH : (rank + 1) * EACH] = False
    return sees


def of_steps(wrong: Callable[..., Tensor], rank: int, folder: Path) -> list[Any]:
    q, k, v = random(2, SEQ, HIDDEN), random(2, SEQ, HIDDEN // 2, seed=1), random(2, SEQ, HIDDEN // 2, seed=2)
    weight, ids = random(HIDDEN, HIDDEN, seed=3), torch.arange(2 * SEQ).reshape(2, SEQ)
    right = attention(q, k, v, CAUSAL)

    def of(rows: slice, made: Tensor) -> dict[str, Any]:
        values = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": made @ weight.T}
        return {
            "batch_inputs": {"input_ids": ids[:, rows]},
            "modules": {f"layers.0.self_attn.{name}.output": x[:, rows].contiguous() for name, x in values.items()},
            "param": {"param.layers.0.self_attn.o_proj.weight": weight},
        }  # fmt: skip

    off = wrong(q, k, v)
    ranks = [of(slice(one * EACH, (one + 1) * EACH), off if one == rank else right) for one in range(RANKS)]
    found = compared(folder, of(slice(0, SEQ), right), *ranks)
    return [one.fault for one in there(parallel(found.tensors, found.together)).faults]


@pytest.mark.parametrize(("wrong", "kind", "said"), [
    (lambda q, k, v: attention(q, k, v, without(1)), "missing keys", "without the keys of rank 1 (tokens 4 to 7)"),
    (
        lambda q, k, v: attention(q, k, v, CAUSAL, torch.arange(SEQ) % EACH), "own positions",
        "turned by positions that begin at 0 on each rank",
    ),
    (lambda q, k, v: attention(q, k, v, torch.ones_like(CAUSAL)), "later keys", "where every token sees all keys"),
])  # fmt: skip
def test_what_a_rank_saw_is_said_with_the_keys(
    wrong: Callable[..., Tensor], kind: str, said: str, tmp_path: Path
) -> None:
    (fault, *others) = of_steps(wrong, 2, tmp_path)
    assert (fault.kind, fault.ranks) == (kind, (2,)), fault
    assert said in fault.sentence
    assert all(one.kind == "apart" for one in others)


def test_attention_that_nothing_made_is_not_explained(tmp_path: Path) -> None:
    faults = of_steps(lambda q, k, v: random(2, SEQ, HIDDEN, seed=9), 2, tmp_path)
    assert {one.kind for one in faults} == {"apart"}
