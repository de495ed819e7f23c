"""The gradient of a key's bias is what rounding leaves: no difference there, in the bias, nor in what is put out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from replay_core.compare import Comparison, compare_runs
from replay_core.compare.first_adam import FirstAdam
from replay_core.dumps import open_run
from replay_core.recorder import Recorder

WIDTH, WORDS, LENGTH, RATE = 32, 64, 12, 2e-3


class Attention(nn.Module):
    """Without rotation, as GPT-2's: softmax does not see what is added to every key."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (
            made(x_BTD).unflatten(-1, (4, -1)).transpose(1, 2) for made in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -1e9)
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.self_attn, self.lm_head = Attention(), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        return self.lm_head(x + self.self_attn(self.norm(x)))


def _trained(folder: Path, *, halves: bool, fault: str = "") -> Path:
    """Three steps of AdamW; halves: each gradient is the mean of those of two halves of the batch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Model()
        batches = torch.randint(1, WORDS, (3, 4, LENGTH))
    own = dict(model.named_parameters())
    bias = own["self_attn.k_proj.bias"]
    others = [one for one in own.values() if one is not bias]
    rate = {"frozen": 0.0, "twice the rate": 2 * RATE}.get(fault, RATE)
    made = torch.optim.AdamW([{"params": others}, {"params": [bias], "lr": rate}], lr=RATE, weight_decay=0.0)
    if fault == "output":
        model.self_attn.k_proj.register_forward_hook(lambda _module, _given, y: y * 1.0003)
    with Recorder(folder) as recorder:
        for number, ids in enumerate(batches):
            model.zero_grad()
            with recorder.step(number) as step:
                with step.modules(model):
                    model(ids)
                model.zero_grad()
                for rows in ids.split(2) if halves else [ids]:
                    loss = nn.functional.cross_entropy(model(rows)[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
                    (loss * 100 * len(rows) / 4).backward()
                if fault == "halved":
                    gradient = own["self_attn.v_proj.bias"].grad
                    assert gradient is not None
                    gradient.div_(2)
                step.gradients(model)
                made.step()
                if fault == "scaled":
                    bias.data.mul_(1.05)
                step.params(model)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _trained(tmp_path_factory.mktemp("whole") / "dump", halves=False)


def _compared(a: Path, b: Path) -> Comparison:
    return compare_runs(open_run(a), open_run(b))


def test_a_bias_that_the_loss_does_not_see_is_no_difference_anywhere(whole: Path, tmp_path: Path):
    compared = _compared(whole, _trained(tmp_path / "b", halves=True))
    rows = {(row.key.step, row.name): row for row in compared.tensors}
    gradient, after = rows[0, "grad.self_attn.k_proj.bias"], rows[0, "param.self_attn.k_proj.bias"]
    out = rows[1, "self_attn.k_proj.output"]
    assert compared.first is None, (compared.first.name, compared.first.reason)
    assert gradient.figures is not None
    assert gradient.figures.total.rel_l2 > 0.1, "both are noise of their own"
    assert "a sum that cancels" in gradient.reason
    assert "an Adam's first step" in after.reason
    assert "what its bias is" in out.reason


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("frozen", "param.self_attn.k_proj.bias"),
        ("twice the rate", "param.self_attn.k_proj.bias"),
        ("scaled", "param.self_attn.k_proj.bias"),
        ("halved", "grad.self_attn.v_proj.bias"),
        ("output", "self_attn.k_proj.output"),
    ],
)
def test_what_is_wrong_with_a_bias_is_found(fault: str, name: str, whole: Path, tmp_path: Path):
    first = _compared(whole, _trained(tmp_path / "b", halves=True, fault=fault)).first
    assert first is not None
    assert (first.key.step, first.name) == (0, name)


def _steps(rate_a: float, rate_b: float, eps: float) -> FirstAdam | None:
    draw = np.random.default_rng(0)
    a, b = draw.normal(size=(2, 24)) * 1e-9
    off = rate_a * a / (np.abs(a) + eps) - rate_b * b / (np.abs(b) + eps)
    return FirstAdam.of(off, a, b, np.full(24, 1e-9))


@pytest.mark.parametrize("rates", [(1e-3, 1e-3), (1e-3, 2e-3), (1e-3, 0.0)])
def test_two_rates_and_an_epsilon_are_read_off_a_first_step(rates: tuple[float, float]):
    found = _steps(*rates, 1e-8)
    assert found is not None
    assert (found.rate_a, found.rate_b) == pytest.approx(rates, rel=0.02, abs=1e-5)


def test_weights_that_no_first_step_makes_are_none():
    draw = np.random.default_rng(1)
    a, b = draw.normal(size=(2, 24)) * 1e-9
    assert FirstAdam.of(draw.normal(size=24) * 1e-3, a, b, np.full(24, 1e-9)) is None
