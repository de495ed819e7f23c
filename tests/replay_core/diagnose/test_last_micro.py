"""Gradients of several micro-batches by autograd, cleared before each of them or once an update."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from replay_core.diagnose.finding import Finding
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of

VOCABULARY, WIDTH, PROMPT = 60, 8, 3


class _Model(nn.Module):
    def __init__(self, tied: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens, self.mix = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight
        self.to(dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lm_head(torch.tanh(self.mix(self.embed_tokens(ids))))
        return out.float()


def _scored(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    every: torch.Tensor = model(ids[:, :-1]).log_softmax(-1)
    return every.gather(-1, ids[:, 1:, None])[..., 0]


def _run(
    folder: Path, cleared: str, *, tied: bool = False, keyed: bool = True, each: bool = False, still: bool = False,
    ppo: bool = True, dtype: torch.dtype = torch.float32, one: bool = False,
) -> Finding | None:  # fmt: skip
    """cleared: update (once before it), or micro (before each backward). keyed: mini-batches are named; each: the
    gradient of every micro-batch is recorded; still: the first micro-batches have no advantage; one: each step is one
    update, and its gradient is recorded once.
    """
    torch.manual_seed(3)
    model = _Model(tied, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    recorder = Recorder(folder)
    for step in range(3):
        begun = copy.deepcopy(model).requires_grad_(False)
        with recorder.step(step) as record:
            for micro in range(4):
                key: dict[str, Any] = {"micro": micro, **({"epoch": 0, "minibatch": micro // 2} if keyed else {})}
                ids = torch.randint(1, VOCABULARY, (3, 9))
                mask = torch.ones_like(ids)
                mask[:, :PROMPT] = 0
                a = torch.randn(3)[:, None] * mask[:, 1:] * (0 if still and micro % 2 == 0 else 1)
                scores = _scored(model, ids)
                record("forward_data", **key, input_ids=ids, attention_mask=torch.ones_like(ids), response_mask=mask,
                       log_probs=scores.detach(), old_log_probs=_scored(begun, ids),
                       **({"advantages": a} if ppo else {}))  # fmt: skip
                if cleared == "micro" or micro % (4 if one else 2) == 0:
                    optimizer.zero_grad()
                (-(scores * (a if ppo else mask[:, 1:])).sum()).backward()
                if (micro == 3 if one else micro % 2) or each:
                    grads = {f"grad.{name}": one.grad.clone() for name, one in model.named_parameters()
                             if one.grad is not None}  # fmt: skip
                    record("gradient", **key, **grads)
                if micro == 3 if one else micro % 2:
                    optimizer.step()
    return of(look(folder, "D139"), "D139")


@pytest.mark.parametrize("ppo", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_of_its_last_micro_batch_is_told(ppo: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    found = _run(tmp_path / "d", "micro", ppo=ppo, dtype=dtype)
    assert found is not None
    assert found.severity == "error"
    assert "the last of 2 micro-batches alone" in found.claim
    assert [*found.steps] == [0, 1, 2]


@pytest.mark.parametrize("ppo", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_an_update_of_all_of_them_is_nothing(ppo: bool, dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    assert _run(tmp_path / "d", "update", ppo=ppo, dtype=dtype, tied=tied) is None


def test_rows_that_teach_nothing_have_no_gradient_and_tell_nothing(tmp_path: Path) -> None:
    assert _run(tmp_path / "d", "update", still=True) is None


@pytest.mark.parametrize(("keyed", "each"), [(False, False), (True, True)])
def test_what_cannot_tell_says_nothing(keyed: bool, each: bool, tmp_path: Path) -> None:
    assert _run(tmp_path / "d", "micro", keyed=keyed, each=each) is None


def test_a_tied_head_hides_nothing(tmp_path: Path) -> None:
    assert _run(tmp_path / "micro", "micro", tied=True) is not None
    assert _run(tmp_path / "update", "update", tied=True) is None


@pytest.mark.parametrize(("cleared", "is_told"), [("micro", True), ("update", False)])
def test_a_step_of_one_update_needs_no_name_of_its_mini_batch(cleared: str, is_told: bool, tmp_path: Path) -> None:
    found = _run(tmp_path / "d", cleared, keyed=False, one=True)
    assert (found is not None) == is_told


def _tied_demonstrations(folder: Path, cleared: str, *, tied: bool = True) -> Finding | None:
    """Labels of a supervised run, over a vocabulary of which each micro-batch holds a small part."""
    torch.manual_seed(5)
    table, mix = torch.randn(300, 16), torch.randn(16, 16) * 0.3
    head = table if tied else torch.randn(300, 16)
    with Recorder(folder) as recorder:
        for step in range(3):
            table, head = table.detach().requires_grad_(), head.detach().requires_grad_()
            head = table if tied else head
            with recorder.step(step) as record:
                for micro in range(3):
                    ids = torch.randint(1, 300, (2, 12))
                    if cleared == "micro":
                        table.grad = None
                    every = (torch.tanh(table[ids[:, :-1]] @ mix) @ head.T).log_softmax(-1)
                    own = every.gather(-1, ids[:, 1:, None])[..., 0]
                    (-own.mean() / 3).backward()
                    record("forward_data", micro=micro, input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids,
                           log_probs=own.detach())  # fmt: skip
                assert table.grad is not None
                record("gradient", **{"grad.embed_tokens.weight": table.grad.clone()})
    return of(look(folder, "D139"), "D139")


@pytest.mark.parametrize("tied", [True, False])
def test_tied_heads_and_demonstrations_tell_a_gradient_of_the_last_micro_batch(tied: bool, tmp_path: Path) -> None:
    found = _tied_demonstrations(tmp_path / "micro", "micro", tied=tied)
    assert found is not None
    assert found.severity == "error"
    assert _tied_demonstrations(tmp_path / "update", "update", tied=tied) is None


@pytest.mark.parametrize(("how", "says"), [("cleared", True), ("summed", False), ("sums recorded", False)])
def test_gradients_of_micro_batches_recorded_beside_the_update(how: str, says: bool, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(5)
    with Recorder(tmp_path / "d") as recorder:
        for step in range(4):
            each = torch.randn(4, VOCABULARY, WIDTH, generator=draw)
            said = each.cumsum(0) if how == "sums recorded" else each
            with recorder.step(step) as record:
                for micro in range(4):
                    record("tensors", {"micro_grad_lm_head": said[micro]}, micro=micro)
                record("gradient", {"lm_head.weight": each[-1] if how == "cleared" else each.sum(0)})
    found = of(look(tmp_path / "d", "D139"), "D139")
    assert (found is not None) == says
    if found is not None:
        assert found.claim.startswith("gradients are those of the last of 4 micro-batches alone: lm_head.weight's")
