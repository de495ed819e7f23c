"""Clipping that is given a part of the parameters: its norm is that part's, and the rest moves by all of its gradient.
The model is trained by torch, and clipped by torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of

BOUND = 0.05


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(8, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.up_proj = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moved: torch.Tensor = x + torch.tanh(self.up_proj(self.norm(x + self.q_proj(x))))
        return moved


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(12, 8)
        self.layers = torch.nn.ModuleList([_Block(), _Block()])
        self.lm_head = torch.nn.Linear(8, 12, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.lm_head(x)
        return logits


def _trained(
    path: Path, clipped: Callable[[str], bool], kept: Callable[[str], bool] = lambda name: True, *, adam: bool = False,
    after: bool = False, beside: bool = False, tied: bool = False, flags: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Train a model, of which the chosen parameters are clipped; the gradients of those that are kept are recorded."""
    torch.manual_seed(0)
    model = _Model()
    if tied:
        model.lm_head.weight = model.embed_tokens.weight
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), lr=0.01) if adam else torch.optim.SGD(model.parameters(), lr=0.5)
    )
    draw = torch.Generator().manual_seed(1)
    with Recorder(path, flags={"max_grad_norm": BOUND} if flags is None else flags) as recorder:
        for step in range(6):
            ids = torch.randint(0, 12, (16, 5), generator=draw)
            weights = {name: value.detach().clone() for name, value in model.named_parameters()}
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(ids).reshape(-1, 12), ids.roll(1, 1).reshape(-1)).backward()
            before = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
            parts = [
                [value for name, value in model.named_parameters() if clipped(name) == one] for one in (True, False)
            ]
            norm = torch.nn.utils.clip_grad_norm_(parts[0], BOUND)
            logged = {"grad_norm": float(norm)}
            if beside:
                logged["rest_norm"] = float(torch.nn.utils.clip_grad_norm_(parts[1], BOUND))
            held = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
            if tied:
                before["lm_head.weight"] = before["embed_tokens.weight"].clone()
            with recorder.step(step) as record:
                record("param", weights)
                record("gradient", {name: value for name, value in (held if after else before).items() if kept(name)})
                record("training_metrics", logged)
            optimizer.step()


def _in_layers(name: str) -> bool:
    return name.startswith("layers.")


def _of_q(name: str) -> bool:
    return "q_proj" in name


def test_a_norm_over_some_kinds_of_weights_is_told_and_proved_by_what_moves(tmp_path: Path) -> None:
    _trained(tmp_path / "d", lambda name: "_proj" in name)
    found = of(look(tmp_path / "d", "D163"), "D163")
    assert found is not None
    assert found.severity == "error"
    assert "MLPs and attention alone, 8 of 14" in found.claim


@pytest.mark.parametrize(("clipped", "what"), [(_in_layers, "layers"), (_of_q, "attention"), (
    lambda name: not name.startswith("layers.1."), "all but layer 1")])  # fmt: skip
def test_parts_are_called_by_what_they_are(clipped: Callable[[str], bool], what: str, tmp_path: Path) -> None:
    _trained(tmp_path / "d", clipped, adam=True)
    found = of(look(tmp_path / "d", "D163"), "D163")
    assert found is not None
    assert (found.severity, list(found.steps)) == ("warning", [*range(6)])
    assert what in found.claim or "MLPs and attention and norms" in found.claim


def test_gradients_may_be_recorded_after_clipping(tmp_path: Path) -> None:
    _trained(tmp_path / "d", lambda name: "_proj" in name, adam=True, after=True)
    found = of(look(tmp_path / "d", "D163"), "D163")
    assert found is not None
    assert found.severity == "error"


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("adam", [False, True])
def test_a_norm_over_all_is_nothing(after: bool, adam: bool, tmp_path: Path) -> None:
    _trained(tmp_path / "d", lambda name: True, after=after, adam=adam)
    assert of(look(tmp_path / "d", "D163"), "D163") is None


def test_gradients_that_are_recorded_in_part_say_nothing(tmp_path: Path) -> None:
    _trained(tmp_path / "whole", lambda name: True, _of_q)
    _trained(tmp_path / "part", _of_q, _in_layers)
    assert of(look(tmp_path / "whole", "D163"), "D163") is None
    assert of(look(tmp_path / "part", "D163"), "D163") is None


def test_tied_weights_that_are_recorded_under_both_names_count_once(tmp_path: Path) -> None:
    _trained(tmp_path / "d", lambda name: True, tied=True)
    assert of(look(tmp_path / "d", "D163"), "D163") is None


def test_parts_that_are_each_clipped_by_themselves_are_nothing(tmp_path: Path) -> None:
    _trained(tmp_path / "d", _in_layers, beside=True)
    assert of(look(tmp_path / "d", "D163"), "D163") is None


def test_a_norm_that_nothing_is_clipped_by_is_worth_knowing_alone(tmp_path: Path) -> None:
    _trained(tmp_path / "d", _in_layers, flags={"max_grad_norm": 0})
    found = of(look(tmp_path / "d", "D163"), "D163")
    assert found is not None
    assert found.severity == "info"


def test_a_value_head_that_is_clipped_by_itself_is_worth_knowing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, head = _Model(), torch.nn.Linear(12, 1, bias=False)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=0.01)
    with Recorder(tmp_path / "d", flags={"max_grad_norm": BOUND}) as recorder:
        for step in range(6):
            optimizer.zero_grad()
            logits = model(torch.randint(0, 12, (16, 5)))
            values = head(logits.detach()).squeeze(-1)
            (logits.log_softmax(-1)[..., 3].mean() + (values - 2).square().mean()).backward()
            named = [*model.named_parameters(), ("v_head.weight", head.weight)]
            gradients = {f"grad.{name}": value.grad.clone() for name, value in named if value.grad is not None}
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), BOUND)
            torch.nn.utils.clip_grad_norm_(head.parameters(), BOUND)
            optimizer.step()
            with recorder.step(step) as record:
                record("gradient", gradients)
                record("optimizer", grad_norm=norm)
    found = of(look(tmp_path / "d", "D163"), "D163")
    assert found is not None
    assert found.severity == "info"
    assert "are not clipped" not in found.claim
