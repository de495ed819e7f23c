"""Errors that have a shape, below every limit by size: an update, a quantisation, a sample alone, a column's factor."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from replay_core.compare import TensorVerdict
from replay_core.compare.judging import structure
from replay_core.compare.judging.verdict import Verdict
from replay_core.measure.pair import figures
from replay_core.measure.quantile import median, quantile
from tests.builders import compare_fields, row_of

BF16, F32 = torch.bfloat16, torch.float32


def weight(dtype: torch.dtype, std: float = 0.02) -> torch.Tensor:
    return (std * torch.randn(96, 128, generator=torch.Generator().manual_seed(0))).to(dtype)


def through_int8(values: torch.Tensor, *, by_row: bool) -> torch.Tensor:
    numbers = values.float()
    largest = numbers.abs().amax(-1, keepdim=True) if by_row else numbers.abs().amax()
    return ((numbers / largest * 127).round() * largest / 127).to(values.dtype)


def updated(dtype: torch.dtype, lr: float, steps: int) -> torch.Tensor:
    """As Adam does it to fp32 weights: by the learning rate, one way or the other."""
    way = torch.randn(96, 128, generator=torch.Generator().manual_seed(1)).sign()
    return (weight(F32) + steps * lr * way).to(dtype)


def verdict_of_param(tmp_path: Path, a: torch.Tensor, b: torch.Tensor) -> tuple[Verdict, str]:
    row = row_of(
        compare_fields(tmp_path, {"param.w.weight": a}, {"param.w.weight": b}, stage="param"), "param.w.weight"
    )
    return row.verdict, row.reason


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_weights_that_went_through_int8_are_other_weights(dtype: torch.dtype, by_row: bool, tmp_path: Path) -> None:
    verdict, reason = verdict_of_param(tmp_path, weight(dtype), through_int8(weight(dtype), by_row=by_row))
    assert verdict is Verdict.DIFF
    assert "an update or a quantisation" in reason or "relative L2" in reason


@pytest.mark.parametrize(("lr", "steps"), [(1e-6, 8), (1e-5, 1), (1e-5, 4), (1e-4, 1)])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_weights_stale_by_an_update_are_other_weights(
    dtype: torch.dtype, lr: float, steps: int, tmp_path: Path
) -> None:
    assert verdict_of_param(tmp_path, updated(dtype, lr, steps), weight(dtype))[0] is Verdict.DIFF


def test_an_update_below_a_rounding_is_close_and_says_that_it_cannot_be_excluded(tmp_path: Path) -> None:
    verdict, reason = verdict_of_param(tmp_path, updated(BF16, 1e-7, 1), weight(BF16))
    assert verdict is Verdict.CLOSE
    assert "an update smaller than that cannot be excluded" in reason


def test_an_update_of_another_kernel_is_noise(tmp_path: Path) -> None:
    other = weight(F32).clone()
    other.view(-1)[[5, 700]] += 4e-6  # the sign of a gradient that is next to nothing
    assert verdict_of_param(tmp_path / "a", weight(F32), other)[0] is Verdict.CLOSE
    bits = weight(BF16).view(torch.int16) + torch.randint(-1, 2, (96, 128), generator=torch.Generator().manual_seed(2))
    assert verdict_of_param(tmp_path / "b", weight(BF16), bits.to(torch.int16).view(BF16))[0] is Verdict.CLOSE


def logprobs(change: object = None, *, noise: float = 0.02) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids_BT = torch.randint(1, 99, (6, 40), generator=generator)
    said_BT = -4 * torch.rand(6, 40, generator=generator)
    if change is not None:
        said_BT = said_BT + noise * torch.randn(6, 40, generator=generator)
        said_BT = change(said_BT)  # type: ignore[operator]
    ones_BT = torch.ones_like(ids_BT)
    return {"input_ids": ids_BT, "attention_mask": ones_BT, "response_mask": ones_BT, "policy_logprobs": said_BT}


@pytest.fixture(params=["ids and masks beside them", "nothing beside them"])
def row_of_logprobs(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., TensorVerdict]:
    """The row of log probabilities; where nothing stands beside them, a row is a sample all the same."""

    def row(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], folder: str = "pair") -> TensorVerdict:
        if request.param == "nothing beside them":
            a, b = ({"policy_logprobs": fields["policy_logprobs"]} for fields in (a, b))
        return row_of(compare_fields(tmp_path / folder, a, b), "policy_logprobs")

    return row


def one_sample(by: float) -> object:
    def change(said_BT: torch.Tensor) -> torch.Tensor:
        said_BT[2] += by * torch.randn(40, generator=torch.Generator().manual_seed(4))
        return said_BT

    return change


@pytest.mark.parametrize(("noise", "by"), [(0.02, 0.15), (0.004, 0.03)])
def test_a_sample_whose_logprobs_are_wrong_stands_out_from_noise(
    noise: float, by: float, row_of_logprobs: Callable[..., TensorVerdict]
) -> None:
    even = row_of_logprobs(logprobs(), logprobs(lambda x: x, noise=noise), "even")
    alone = row_of_logprobs(logprobs(), logprobs(one_sample(by), noise=noise), "alone")
    assert even.verdict is Verdict.CLOSE
    assert alone.verdict is Verdict.DIFF
    assert alone.reason.startswith("sample 2 stands out: off by ")


def test_one_token_stands_out_from_the_greatest_difference_of_other_samples(
    row_of_logprobs: Callable[..., TensorVerdict],
) -> None:
    def change(said_BT: torch.Tensor) -> torch.Tensor:
        said_BT[4, 7] -= 0.2
        return said_BT

    row = row_of_logprobs(logprobs(), logprobs(change, noise=0.003))
    assert row.verdict is Verdict.DIFF
    assert "sample 4 stands out" in row.reason


def test_a_sample_of_certain_tokens_does_not_make_the_others_stand_out(
    row_of_logprobs: Callable[..., TensorVerdict],
) -> None:
    a = logprobs()
    a["policy_logprobs"][:5] /= 1000  # p = .998: what moves logits moves these by a thousandth
    b = copy.deepcopy(a)
    doubt_BT = 1 - a["policy_logprobs"].exp()
    b["policy_logprobs"] += 0.03 * doubt_BT * torch.randn(6, 40, generator=torch.Generator().manual_seed(5))
    assert row_of_logprobs(a, b).verdict is Verdict.CLOSE


def test_one_sample_that_alone_was_padded_otherwise_has_noise_alone(
    row_of_logprobs: Callable[..., TensorVerdict],
) -> None:
    a, b = logprobs(), logprobs()
    b["policy_logprobs"][3] += 0.01 * torch.randn(40, generator=torch.Generator().manual_seed(6))
    assert row_of_logprobs(a, b).verdict is Verdict.CLOSE


def test_zeros_of_padding_do_not_make_the_longest_sample_stand_out(tmp_path: Path) -> None:
    """Nothing says which tokens are padding: what is 0 on both sides takes no part."""
    there_BT = torch.arange(40) < torch.tensor([[40], [9], [9], [9], [9], [9]])
    a, b = ({"policy_logprobs": logprobs(x)["policy_logprobs"] * there_BT} for x in (None, lambda x: x))
    assert row_of(compare_fields(tmp_path, a, b), "policy_logprobs").verdict is Verdict.CLOSE


@pytest.mark.parametrize(
    ("dtype", "factor", "said"),
    [(F32, 1.0003, "1.0003"), (F32, 1 - 3e-4, "0.9997"), (torch.float64, 1 + 8e-9, "1 + 8e-09"), (F32, -8e-8, "0")],
)
def test_a_factor_is_told_in_digits_that_never_read_1(
    dtype: torch.dtype, factor: float, said: str, tmp_path: Path
) -> None:
    a = torch.randn(64, 32, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    few, whole = a.clone(), a * factor
    few[::5] *= factor
    for b, sentence in ((few, f"of 64 rows are a times a factor: {said}"), (whole, f"b is a times {said}: ")):
        pair = ({"layers.0.mlp.output": values.to(dtype)} for values in (a, b))
        row = row_of(compare_fields(tmp_path / said / sentence[:2], *pair), "layers.0.mlp.output")
        assert row.verdict is Verdict.DIFF
        assert sentence in row.reason


@pytest.mark.parametrize("factor", [1.025, 1.057, 0.96])
def test_a_channel_that_is_a_times_a_factor_is_seen_below_the_noise(factor: float, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(7)
    a_TH = torch.randn(160, 96, generator=generator)
    b_TH = a_TH + 0.015 * torch.randn(160, 96, generator=generator)
    fault_TH = b_TH.clone()
    fault_TH[:, 5] *= factor
    name = "layers.3.mlp.output"
    a, noise, fault = ({name: one.to(BF16)} for one in (a_TH, b_TH, fault_TH))
    assert row_of(compare_fields(tmp_path / "noise", a, noise), name).verdict is Verdict.CLOSE
    row = row_of(compare_fields(tmp_path / "fault", a, fault), name)
    assert row.verdict is Verdict.DIFF
    assert "1 of 96 columns are a times a factor" in row.reason


def test_what_attention_averages_has_no_factor_though_its_tokens_are_alike(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(8)
    alike_TH = torch.randn(4, 1, 96, generator=generator).expand(4, 40, 96).reshape(160, 96)
    off_TH = torch.randn(4, 1, 96, generator=generator).expand(4, 40, 96).reshape(160, 96)
    a, b = ({"layers.3.self_attn.output": one.to(BF16)} for one in (alike_TH, alike_TH + 0.03 * off_TH))
    assert row_of(compare_fields(tmp_path, a, b), "layers.3.self_attn.output").verdict is Verdict.CLOSE


def test_a_row_of_a_gradient_may_have_the_error_of_its_one_token(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(9)
    a_RC = torch.randn(64, 96, generator=generator)
    b_RC = a_RC * (1 + 0.015 * torch.randn(64, 96, generator=generator))
    b_RC[3] = a_RC[3] * 1.07
    a, b = ({"grad.layers.1.mlp.up_proj.weight": one.to(BF16)} for one in (a_RC, b_RC))
    assert row_of(compare_fields(tmp_path / "a", a, b), "grad.layers.1.mlp.up_proj.weight").verdict is Verdict.CLOSE
    b["grad.layers.1.mlp.up_proj.weight"][3] *= 1.4
    assert row_of(compare_fields(tmp_path / "b", a, b), "grad.layers.1.mlp.up_proj.weight").verdict is Verdict.DIFF


@pytest.mark.parametrize("size", [1, 2, 3, 8, 101, 256])
def test_quantiles_are_numpys(size: int) -> None:
    values = np.random.default_rng(size).standard_normal(size) ** 3
    values[0] = np.inf
    assert median(values) == np.median(values)
    values[0] = 1.0
    for share in (0.0, 0.5, 0.98, 1.0):
        assert quantile(values, share) == pytest.approx(np.quantile(values, share), rel=1e-12)


def test_a_slight_row_of_a_gradient_rounds_as_its_terms_do():
    noise = np.random.default_rng(0)
    a_RC = noise.standard_normal((64, 32))
    a_RC[5] *= 0.01
    d_RC = 0.006 * noise.standard_normal((64, 32))
    pair = figures([(a_RC, a_RC + d_RC)])
    assert structure.worst_row(pair) > 0.4, "of an activation it is what it is"
    assert structure.worst_row(pair, is_gradient=True) < 0.02
    d_RC[5] *= 8
    assert structure.worst_row(figures([(a_RC, a_RC + d_RC)]), is_gradient=True) > 1.0, "further off than the others"
    alone_RC = np.zeros_like(a_RC)
    alone_RC[5] = d_RC[5]
    assert structure.worst_row(figures([(a_RC, a_RC + alone_RC)]), is_gradient=True) > 1.0, "or the only one off"


def test_a_slight_row_of_a_gradient_that_is_gone_or_there_twice_is_off_however_large_the_noise_is():
    noise = np.random.default_rng(0)
    a_RC = noise.standard_normal((64, 32))
    a_RC[5] *= 0.03
    d_RC = 0.02 * noise.standard_normal((64, 32))
    assert structure.worst_row(figures([(a_RC, a_RC + d_RC)]), is_gradient=True) < 0.1
    for times in (0.0, 2.0):
        b_RC = a_RC + d_RC
        b_RC[5] = times * a_RC[5]
        assert structure.worst_row(figures([(a_RC, b_RC)]), is_gradient=True) == pytest.approx(1.0), times
