"""The gradient of a key's bias is what rounding leaves: no difference there, in the bias, nor in what is put out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from replay_core.compare import Comparison, compare_runs
from replay_core.compare.first_adam import FirstAdam
from replay_core.compare.judging.tensors import TensorVerdict
from replay_core.compare.judging.verdict import Verdict
from replay_core.dumps import open_run
from replay_core.recorder import Recorder
from tests.replay_core.compare.bias_models import LENGTH, RATE, WORDS, Model


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


def _gradients(folder: Path, weight_OI: Tensor, bias_O: Tensor) -> Path:
    with Recorder(folder) as recorder, recorder.step(0) as step:
        step("gradient", **{"grad.l.weight": weight_OI.bfloat16(), "grad.l.bias": bias_O.bfloat16()})
    return folder


#: What a run has for a bias' gradient, of the terms dy: [T, O].
_WRONG = {
    "zero": lambda dy_TO: 0 * dy_TO.sum(0),
    "half the tokens": lambda dy_TO: dy_TO[: len(dy_TO) // 2].sum(0),
    "halved": lambda dy_TO: dy_TO.sum(0) / 2,
    "another step's": lambda dy_TO: torch.randn(dy_TO.shape, generator=_draw(3)).sum(0) * 1e-3,
    "other channels'": lambda dy_TO: dy_TO.sum(0).roll(1),
    "the other way": lambda dy_TO: -dy_TO.sum(0),
}


def _draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _pair(
    folder: Path, *, rms: float, wrong: str = "", outputs: int = 64, mean: float = 0.0, left: float = 1.0
) -> dict[str, TensorVerdict]:
    """Gradients of y = W x + b, x of this rms, W's off by 4 % of noise; rows by name.

    left: the part of the bias' sum that does not cancel.
    """
    x_TI = torch.randn(256, 64, generator=_draw(1)) * rms
    dy_TO = torch.randn(256, outputs, generator=_draw(2)) * 1e-3 + mean
    dy_TO -= (1 - left) * dy_TO.mean(0)
    a_OI = dy_TO.T @ x_TI
    b_OI = a_OI + torch.randn(a_OI.shape, generator=_draw(4)) * 0.04 * a_OI.std()
    # What is stored of the terms is rounded, in each run another way.
    one_TO, other_TO = (dy_TO * (1 + torch.randn(dy_TO.shape, generator=_draw(seed)) * 2**-9) for seed in (5, 6))
    made = _WRONG[wrong] if wrong else lambda dy_TO: dy_TO.sum(0)
    a = _gradients(folder / "a", a_OI, one_TO.sum(0))
    b = _gradients(folder / "b", b_OI, made(other_TO))
    return {row.name: row for row in _compared(a, b).tensors}


@pytest.mark.parametrize("rms", [1.0, 10.0, 30.0])
@pytest.mark.parametrize("wrong", _WRONG)
def test_a_bias_that_cancels_nothing_is_not_excused_by_large_inputs(wrong: str, rms: float, tmp_path: Path):
    rows = _pair(tmp_path, rms=rms, wrong=wrong)
    assert rows["grad.l.weight"].verdict is Verdict.CLOSE
    assert rows["grad.l.bias"].verdict is Verdict.DIFF, rows["grad.l.bias"].reason


@pytest.mark.parametrize("wrong", ["zero", "half the tokens", "halved", "the other way"])
def test_a_value_heads_one_bias_is_not_excused_by_large_inputs(wrong: str, tmp_path: Path):
    rows = _pair(tmp_path, rms=30.0, wrong=wrong, outputs=1, mean=3e-4)
    assert rows["grad.l.weight"].verdict is Verdict.CLOSE
    assert rows["grad.l.bias"].verdict is Verdict.DIFF, rows["grad.l.bias"].reason


@pytest.mark.parametrize("rms", [1.0, 30.0])
def test_what_cancels_is_noise_in_both_and_0_in_one_is_not(rms: float, tmp_path: Path):
    noise = _pair(tmp_path / "noise", rms=rms, left=0.0)["grad.l.bias"]
    assert noise.verdict is Verdict.CLOSE
    assert "a sum that cancels:" in noise.reason
    zero = _pair(tmp_path / "zero", rms=rms, left=0.0, wrong="zero")["grad.l.bias"]
    assert zero.verdict is Verdict.DIFF


def test_a_sum_that_cancels_in_part_may_be_off_by_little_of_itself(tmp_path: Path):
    found = _pair(tmp_path, rms=1.0, left=0.03)["grad.l.bias"]
    assert found.verdict is Verdict.CLOSE
    assert "in part" in found.reason
