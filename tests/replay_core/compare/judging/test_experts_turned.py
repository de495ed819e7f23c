"""Rows of all experts in one tensor, really computed by a layer of experts that goes through its tokens in two ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from replay_core.compare import Comparison
from tests.builders import there
from tests.replay_core.compare.ranks.recorded import compared

TOKENS, HIDDEN, EXPERTS, CHOSEN = 24, 16, 4, 2
ROWS, BLOCK, BEHIND = "layers.0.mlp.experts.output", "layers.0.mlp.output", "layers.1.mlp.output"


class Experts(nn.Module):
    """Each token goes to two experts; rows stand as they are computed: expert by expert, or token by token."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS))

    def forward(self, x_NH: Tensor, *, by_token: bool, swapped: int) -> tuple[Tensor, Tensor]:
        """The experts' rows, and what they come to. swapped: so many rows go back to their neighbour's token."""
        gate_NK, chosen_NK = self.router(x_NH).softmax(-1).topk(CHOSEN, -1)
        chosen_R, token_R = chosen_NK.reshape(-1), torch.arange(len(x_NH)).repeat_interleave(CHOSEN)
        gate_R = gate_NK.reshape(-1)
        order = torch.arange(len(chosen_R)) if by_token else torch.argsort(chosen_R, stable=True)
        rows_RH = torch.stack([self.experts[int(chosen_R[at])](x_NH[token_R[at]]) for at in order])
        back_R = token_R[order].clone()
        if swapped:
            back_R[:swapped] = back_R[:swapped].roll(1)
        return rows_RH, torch.zeros_like(x_NH).index_add(0, back_R, rows_RH * gate_R[order][:, None])


def _recorded(*, by_token: bool, swapped: int = 0, follows: bool = True, noise: float = 0.0) -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        layers = [Experts(), Experts()]
        x_NH, said = torch.randn(TOKENS, HIDDEN), {}
        for number, layer in enumerate(layers):
            rows_RH, out_NH = layer(x_NH, by_token=by_token, swapped=0 if number else swapped)
            x_NH = x_NH + out_NH
            said[f"layers.{number}.mlp.experts.output"] = rows_RH + noise * torch.randn_like(rows_RH)
            if follows:
                said[f"layers.{number}.mlp.output"] = out_NH.reshape(2, -1, HIDDEN)
    ids = torch.arange(TOKENS).reshape(2, -1)
    return {"batch_inputs": {"input_ids": ids}, "modules": said}


def _of(found: Comparison, name: str) -> str:
    (row,) = (row for row in [*found.tensors, *found.skipped] if row.name == name)
    return "skipped" if row.skipped is not None else row.verdict.value


def test_rows_in_another_order_are_not_compared_where_what_is_made_of_them_agrees(tmp_path: Path) -> None:
    found = compared(tmp_path, _recorded(by_token=False), _recorded(by_token=True))
    assert _of(found, ROWS) == "skipped"
    assert _of(found, BLOCK) in ("SAME", "CLOSE")
    assert found.first is None
    assert found.agrees is None
    why = there(found.skipped[0].skipped)
    assert "in another order" in why
    assert BLOCK in why


@pytest.mark.parametrize("swapped", [3, 12])
def test_rows_that_go_back_to_other_tokens_stay_a_difference(swapped: int, tmp_path: Path) -> None:
    found = compared(tmp_path, _recorded(by_token=False), _recorded(by_token=True, swapped=swapped))
    assert _of(found, ROWS) == "DIFF"
    assert _of(found, BLOCK) == "DIFF"
    assert found.agrees is False


@pytest.mark.parametrize(
    "other", [{"follows": False}, {"noise": 0.01}], ids=["nothing that follows is recorded", "other rows"]
)
def test_rows_of_which_nothing_else_tells_stay_a_difference(other: dict[str, Any], tmp_path: Path) -> None:
    found = compared(tmp_path, _recorded(by_token=False), _recorded(by_token=True, **other))
    assert _of(found, ROWS) == "DIFF"
    assert there(found.first).name == ROWS


def test_ranks_that_trade_tokens_have_the_rows_in_another_order(tmp_path: Path) -> None:
    """Each rank has one sample, and the rows that its two experts computed of the tokens of both."""
    one, other = _recorded(by_token=False), _recorded(by_token=True)
    ranks = []
    for rank in (0, 1):
        own = slice(rank * TOKENS, (rank + 1) * TOKENS)
        modules = {
            name: value[own] if name.endswith("experts.output") else value[rank : rank + 1]
            for name, value in other["modules"].items()
        }
        ranks.append({"batch_inputs": {"input_ids": other["batch_inputs"]["input_ids"][rank : rank + 1]},
                      "modules": modules})  # fmt: skip
    found = compared(tmp_path, one, *ranks)
    assert _of(found, ROWS) == "skipped"
    assert _of(found, BEHIND) in ("SAME", "CLOSE")
    assert found.first is None
