"""What experts made of some tokens and stands at others: told by rows that are right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from replay_core.compare.judging import experts_returned
from replay_core.records import TensorRef
from tests.replay_core.compare.ranks.in_memory import as_ref, cut
from tests.replay_core.compare.ranks.recorded import random

TOKENS, WIDTH, EXPERTS = 24, 16, 4


class Layer:
    """A layer of four experts, two on each of two ranks, that have half of the tokens each; `chosen` of a token."""

    def __init__(self, chosen: int) -> None:
        generator = torch.Generator().manual_seed(chosen)
        scores_TE = torch.rand(TOKENS, EXPERTS, generator=generator)
        gates_TK, self.picked_TK = scores_TE.softmax(1).topk(chosen, 1)
        self.gates_TK = gates_TK / gates_TK.sum(1, keepdim=True)
        weights = [random(WIDTH, WIDTH, seed=10 + expert) for expert in range(EXPERTS)]
        x_TD = random(TOKENS, WIDTH, seed=3)
        self.tokens = [(self.picked_TK == expert).any(1).nonzero()[:, 0] for expert in range(EXPERTS)]
        self.rows = [x_TD[tokens] @ weights[expert] for expert, tokens in enumerate(self.tokens)]

    def output(self, rows: list[Tensor]) -> Tensor:
        made_TD = torch.zeros(TOKENS, WIDTH)
        for expert, (tokens, own) in enumerate(zip(self.tokens, rows, strict=True)):
            gate_N = (self.gates_TK * (self.picked_TK == expert)).sum(1)[tokens]
            made_TD = made_TD.index_add(0, tokens, gate_N[:, None] * own)
        return made_TD

    def experts(self) -> list[tuple[int, TensorRef]]:
        return [(expert // 2, as_ref(own)) for expert, own in enumerate(self.rows)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chosen", [1, 2])
def test_rows_that_one_ranks_experts_put_back_in_another_order_are_told(chosen: int, dtype: torch.dtype) -> None:
    layer = Layer(chosen)
    moved = [own if expert < 2 else own.roll(1, 0) for expert, own in enumerate(layer.rows)]
    whole, wrong = (layer.output(rows).to(dtype) for rows in (layer.rows, moved))
    held = cut(wrong.chunk(2), 0)
    fault = experts_returned.of_returned("moe.output", as_ref(whole), as_ref(wrong), held, layer.experts())
    assert fault is not None
    assert (fault.kind, fault.ranks) == ("returned", (1,))


def test_rows_of_all_ranks_that_one_rank_put_at_other_tokens_are_its_own() -> None:
    layer = Layer(1)
    moved = []
    for tokens, own in zip(layer.tokens, layer.rows, strict=True):
        mine = (tokens >= TOKENS // 2).nonzero()[:, 0]
        order = torch.arange(len(tokens))
        order[mine] = mine.roll(1)
        moved.append(own[order])
    whole, wrong = layer.output(layer.rows), layer.output(moved)
    fault = experts_returned.of_returned(
        "moe.output", as_ref(whole), as_ref(wrong), cut(wrong.chunk(2), 0), layer.experts()
    )
    assert fault is not None
    assert fault.ranks == (1,)
    assert "stands at others on rank 1" in fault.sentence


@pytest.mark.parametrize("times", [0.0, 0.5, 1.5])
def test_gates_of_both_experts_that_are_others_move_no_rows(times: float) -> None:
    """Both of a token's experts on one rank, their gates adding up to one: what is off is along their difference."""
    layer = Layer(2)
    layer.picked_TK = (
        layer.picked_TK // 2 * 0
        + torch.tensor([[0, 1]]).expand_as(layer.picked_TK)
        + 2 * (torch.arange(TOKENS)[:, None] % 2)
    )
    layer.tokens = [(layer.picked_TK == expert).any(1).nonzero()[:, 0] for expert in range(EXPERTS)]
    layer.rows = [random(len(tokens), WIDTH, seed=30 + expert) for expert, tokens in enumerate(layer.tokens)]
    whole, right = layer.output(layer.rows), layer.gates_TK
    layer.gates_TK = right.flip(1) if not times else (right.log() / times).softmax(1)
    wrong = layer.output(layer.rows)
    held = cut(wrong.chunk(2), 0)
    assert experts_returned.of_returned("moe.output", as_ref(whole), as_ref(wrong), held, layer.experts()) is None


@pytest.mark.parametrize("case", ["noise", "another gate", "an expert left out", "not finite"])
def test_what_other_rows_do_not_make_is_not_explained(case: str) -> None:
    layer = Layer(2)
    whole = layer.output(layer.rows)
    wrong = {
        "noise": whole + 0.1 * random(TOKENS, WIDTH, seed=9), "another gate": whole * 1.3,
        "an expert left out": layer.output([*layer.rows[:3], 0 * layer.rows[3]]), "not finite": whole * torch.nan,
    }[case]  # fmt: skip
    held = cut(wrong.chunk(2), 0)
    assert experts_returned.of_returned("moe.output", as_ref(whole), as_ref(wrong), held, layer.experts()) is None
