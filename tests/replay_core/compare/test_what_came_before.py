"""What was seen of a micro-batch before a tensor decides what the tensor is held to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.compare import Comparison, compare_runs, load_tolerances
from replay_core.compare.judging.tolerance import DEFAULT, Tolerances
from replay_core.compare.judging.verdict import Verdict
from replay_core.dumps import open_run
from replay_core.recorder import Recorder
from tests.builders import compare_paths, row_of, write_pair

BF16 = torch.bfloat16
NORM, PROJECTION = "layers.0.input_layernorm.output", "layers.0.self_attn.q_proj.output"


def tensor(seed: int, off: float = 0.0, dtype: torch.dtype = BF16) -> torch.Tensor:
    values_TH = torch.randn(96, 128, generator=torch.Generator().manual_seed(seed))
    noise_TH = torch.randn(96, 128, generator=torch.Generator().manual_seed(seed + 50))
    return (values_TH + off * noise_TH).to(dtype)


def logprobs(off: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    said_BT, noise_BT = -3 * torch.rand(4, 64, generator=generator), torch.randn(4, 64, generator=generator)
    return said_BT + off * noise_BT


def compared(
    tmp_path: Path,
    a: dict[str, dict[str, object]],
    b: dict[str, dict[str, object]],
    tolerances: Tolerances = DEFAULT,
    **o: object,
) -> Comparison:
    return compare_paths(*write_pair(tmp_path, a, b, **o), tolerances=tolerances)


def test_a_projection_of_an_equal_norm_is_one_rounding_off_and_no_more(tmp_path: Path) -> None:
    for off, verdict in ((0.004, Verdict.CLOSE), (0.009, Verdict.DIFF)):
        a = {"modules": {NORM: tensor(0), PROJECTION: tensor(1)}}
        b = {"modules": {NORM: tensor(0), PROJECTION: tensor(1, off)}}
        row = row_of(compared(tmp_path / str(off), a, b), PROJECTION)
        assert row.verdict is verdict
        assert "bfloat16 local" in row.reason


def test_a_projection_of_a_norm_that_differs_is_judged_end_to_end(tmp_path: Path) -> None:
    a = {"modules": {NORM: tensor(0), PROJECTION: tensor(1)}}
    b = {"modules": {NORM: tensor(0, 0.005), PROJECTION: tensor(1, 0.009)}}
    row = row_of(compared(tmp_path, a, b), PROJECTION)
    assert row.verdict is Verdict.CLOSE
    assert "end-to-end" in row.reason


def judged(tmp_path: Path, *offs: float, **options: Any) -> list[Verdict]:
    """The verdicts of tensors, each computed from the one before, that are off by so much."""
    a = {"modules": {f"layers.{place}.mlp.output": tensor(place) for place in range(len(offs))}}
    b = {"modules": {f"layers.{place}.mlp.output": tensor(place, off) for place, off in enumerate(offs)}}
    return [row.verdict for row in compared(tmp_path, a, b, **options).tensors]


@pytest.mark.parametrize(
    ("offs", "last"),
    [
        ((0.0, 0.13), Verdict.DIFF),
        ((0.045, 0.08, 0.13), Verdict.CLOSE),
        ((0.045, 0.08, 0.25), Verdict.DIFF),
        ((0.045, 0.09, 0.6), Verdict.DIFF),
    ],
)
def test_noise_that_grows_on_the_way_widens_what_follows_and_only_to_its_cap(
    offs: tuple[float, ...], last: Verdict, tmp_path: Path
) -> None:
    assert judged(tmp_path, *offs)[-1] is last


@pytest.mark.parametrize("before", [0.0, 0.01, 0.022, 0.04])
def test_a_suspect_jump_is_no_noise_that_hides_what_follows(before: float, tmp_path: Path) -> None:
    """Of models at std .02 and .06 noise is .022; a fault of 9.5 % let the 18 % after it pass for more of it."""
    assert judged(tmp_path, before, 0.095, 0.18)[-2:] == [Verdict.CLOSE, Verdict.DIFF]


def test_what_only_the_users_own_limits_accept_is_no_noise(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text('[[tolerance]]\nname = "layers.1.*"\nreason = "experts in fp8"\nrel_l2 = 0.5\n')
    tolerances = load_tolerances(file)
    assert judged(tmp_path, 0.04, 0.15, 0.13) == [Verdict.CLOSE, Verdict.DIFF, Verdict.DIFF]
    found = judged(tmp_path / "file", 0.04, 0.15, 0.13, tolerances=tolerances)
    assert found == [Verdict.CLOSE, Verdict.CLOSE, Verdict.DIFF]


def test_stricter_limits_of_the_user_leave_noise_what_it_is(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text('[[tolerance]]\nname = "layers.1.*"\nreason = "exact here"\nexact = true\n')
    found = judged(tmp_path / "file", 0.045, 0.08, 0.13, tolerances=load_tolerances(file))
    assert found == [Verdict.CLOSE, Verdict.DIFF, Verdict.CLOSE]


def test_noise_of_logprobs_widens_the_gradients_after_them(tmp_path: Path) -> None:
    grad = "grad.layers.0.mlp.up_proj.weight"
    for off, verdict in ((0.001, Verdict.DIFF), (0.05, Verdict.CLOSE)):
        a = {"forward_data": {"log_probs": logprobs(0)}, "gradient": {grad: tensor(1)}}
        b = {"forward_data": {"log_probs": logprobs(off)}, "gradient": {grad: tensor(1, 0.1)}}
        assert row_of(compared(tmp_path / str(off), a, b), grad).verdict is verdict


def test_a_loss_may_be_off_by_what_the_noise_of_its_tokens_leaves_of_a_mean(tmp_path: Path) -> None:
    for off, verdict in ((0.0, Verdict.DIFF), (0.01, Verdict.CLOSE)):
        a = {"forward_data": {"log_probs": logprobs(0)}, "loss": {"loss": torch.tensor(0.1)}}
        b = {"forward_data": {"log_probs": logprobs(off)}, "loss": {"loss": torch.tensor(0.1015)}}
        assert row_of(compared(tmp_path / str(off), a, b), "loss").verdict is verdict


@pytest.mark.parametrize(("off", "verdict"), [(0.005, Verdict.CLOSE), (1e-5, Verdict.DIFF)])
def test_entropy_is_of_the_precision_its_logprobs_show(off: float, verdict: Verdict, tmp_path: Path) -> None:
    a = {"forward_data": {"log_probs": logprobs(0), "entropy": 2 - logprobs(0)}}
    b = {"forward_data": {"log_probs": logprobs(off), "entropy": 2 - logprobs(0.005)}}
    assert row_of(compared(tmp_path, a, b), "entropy").verdict is verdict


@pytest.mark.parametrize("flags", [{"dtype": "fp32"}, {"dtype": "torch.float32"}, {"effective": {"dtype": "float32"}}])
def test_a_run_that_says_it_computed_in_fp32_is_held_to_it(flags: dict[str, object], tmp_path: Path) -> None:
    a, b = ({"forward_data": {"log_probs": logprobs(off)}} for off in (0.0, 0.005))
    assert row_of(compared(tmp_path / "unsaid", a, b), "policy_logprobs").verdict is Verdict.CLOSE
    assert row_of(compared(tmp_path / "said", a, b, flags=flags), "policy_logprobs").verdict is Verdict.DIFF


@pytest.mark.parametrize(("noise", "off", "verdict"), [
    (0.04, 0.1, Verdict.CLOSE), (0.005, 0.1, Verdict.DIFF), (0.04, 0.16, Verdict.DIFF),
])  # fmt: skip
def test_a_gradient_of_a_step_is_held_to_the_noise_of_its_micro_batches(
    noise: float, off: float, verdict: Verdict, tmp_path: Path
) -> None:
    """It belongs to none of them, and is made of them all."""
    dumps = []
    for which, by in (("a", 0.0), ("b", 1.0)):
        with Recorder(tmp_path / which, flags={"dtype": "bfloat16"}).step(0) as record:
            for micro in range(2):
                record("modules", {"layers.0.output": tensor(micro, by * noise * (1 - micro))}, micro=micro)
            record("gradient", {"grad.layers.0.w": tensor(5, by * off, torch.float32)})
        dumps.append(open_run(tmp_path / which))
    a, b = dumps
    assert row_of(compare_runs(a, b), "grad.layers.0.w").verdict is verdict


@pytest.mark.parametrize(("size", "off", "verdict"), [
    (0.12, 1.4, Verdict.CLOSE), (0.12, 3.0, Verdict.DIFF), (1.5, 17.0, Verdict.DIFF),
])  # fmt: skip
def test_a_light_row_of_a_gradient_rounds_as_its_terms_do(
    size: float, off: float, verdict: Verdict, tmp_path: Path
) -> None:
    """What it is off by is held against what heavier rows are. size: of the row, off: what it is off by, in theirs."""
    a, b = tensor(1, dtype=torch.float32), tensor(1, 0.05, torch.float32)
    a[3] *= size
    b[3] = a[3] + off * 0.05 * torch.randn(128, generator=torch.Generator().manual_seed(9))
    one, other = ({"modules": {"layers.0.output": tensor(0)}, "gradient": {"grad.w": of}} for of in (a, b))
    row = row_of(compared(tmp_path, one, other), "grad.w")
    assert row.verdict is verdict, row.reason
