"""Gradients that are rounded otherwise are told from gradients that are wrong, by those of a finer dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core import workbench
from replay_core.compare import compare_runs
from replay_core.compare.judging import limits
from replay_core.dumps import open_run
from replay_core.export.outcome import exit_code
from replay_core.recorder import Recorder
from replay_core.replay import attention
from replay_core.replay.flags import Flags
from replay_core.replay.gradient_noise import HeldGradient, of_gradients, of_the_cell
from tests.builders import Here

NAME = "grad.layers.0.self_attn.q_proj.weight"


def dumped(path: Path, gradient: torch.Tensor) -> Any:
    with Recorder(path) as recorder, recorder.step(0) as record:
        record("gradient", {NAME: gradient}, micro=0)
    return open_run(path)


def held(tmp_path: Path, alone_RC: torch.Tensor, own_RC: torch.Tensor, true_RC: torch.Tensor) -> bool:
    true, alone, own = (dumped(tmp_path / str(n), one) for n, one in enumerate((true_RC, alone_RC, own_RC)))
    (found,) = of_gradients(true, alone, own, [NAME], half=True)
    return found.is_rounding


def test_what_is_as_far_from_the_truth_as_each_row_alone_is_rounded(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    true_RC = torch.randn(64, 32, generator=random)
    true_RC[5] *= 1e-3  # next to nothing is left of its terms
    noise = [0.01 * torch.randn(64, 32, generator=random) for _ in range(2)]
    assert held(tmp_path / "rounded", true_RC + noise[0], true_RC + noise[1], true_RC)
    assert not held(tmp_path / "all", true_RC + noise[0], true_RC + 5 * noise[1], true_RC)
    run = dumped(tmp_path / "odd", true_RC)
    (absent,) = of_gradients(run, run, run, ["grad.another.weight"], half=True)
    assert not absent.is_rounding, "what a dump does not hold was not looked at"
    noise[1][7] *= 8
    assert not held(tmp_path / "row", true_RC + noise[0], true_RC + noise[1], true_RC)


def test_a_wrong_gradient_is_no_rounding_however_much_noise_there_is(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    true_RC = torch.randn(200, 64, generator=random)
    true_RC[150:] = 0  # tokens that nobody used
    noise = [0.2 * torch.randn(200, 64, generator=random) * (true_RC != 0) for _ in range(2)]
    alone_RC, own_RC = true_RC + noise[0], true_RC + noise[1]
    assert held(tmp_path / "rounded", alone_RC, own_RC, true_RC)
    for number, factor in enumerate((0.5, 0.8, 1.2, 1.5)):
        assert not held(tmp_path / f"times{number}", alone_RC, factor * own_RC, true_RC), factor
    padded_RC = own_RC.clone()
    padded_RC[199] = 0.1 * torch.randn(64, generator=random)
    assert not held(tmp_path / "padding", alone_RC, padded_RC, true_RC), "a row of its own where nobody has one"
    lost_RC = own_RC.clone()
    true_RC[7] *= 1e-3
    lost_RC[7] = 0
    assert not held(tmp_path / "lost", alone_RC, lost_RC, true_RC)


def summed(tmp_path: Path, true_C: torch.Tensor, own_C: torch.Tensor, finer_C: torch.Tensor) -> HeldGradient:
    true, alone, own, finer = (
        dumped(tmp_path / str(n), one) for n, one in enumerate((true_C, 1.01 * true_C, own_C, finer_C))
    )
    found = of_gradients(true, alone, own, [NAME], half=True)
    of_the_cell(true, finer, found, half=True)
    return found[0]


def test_a_sum_over_tokens_that_is_right_in_the_finer_dtype_is_rounded(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    true_C, noise_C = (torch.randn(512, generator=random) for _ in range(2))
    own_C, near_C = true_C + 0.07 * noise_C, true_C + 1e-5 * noise_C
    rounded = summed(tmp_path / "rounded", true_C, own_C, near_C)
    assert rounded.is_rounding
    assert rounded.finer == pytest.approx(1e-5, rel=0.1)
    assert not summed(tmp_path / "wrong", true_C, own_C, true_C + 0.01 * noise_C).is_rounding, "wrong in both dtypes"
    assert not summed(tmp_path / "far", true_C, true_C + 0.3 * noise_C, near_C).is_rounding


def test_a_matrix_that_another_kernel_rounds_further_is_rounded_if_it_is_right_in_the_finer_dtype(
    tmp_path: Path,
) -> None:
    random = torch.Generator().manual_seed(0)
    true_RC, noise_RC = (torch.randn(64, 32, generator=random) for _ in range(2))
    near_RC = true_RC + 1e-5 * noise_RC
    assert summed(tmp_path / "rounded", true_RC, true_RC + 0.05 * noise_RC, near_RC).is_rounding
    assert not summed(tmp_path / "far", true_RC, true_RC + 0.2 * noise_RC, near_RC).is_rounding
    assert not summed(tmp_path / "wrong", true_RC, true_RC + 0.05 * noise_RC, true_RC + 0.01 * noise_RC).is_rounding
    assert not summed(tmp_path / "times", true_RC, 1.05 * true_RC, near_RC).is_rounding, "noise has no direction"
    standing_RC = true_RC + 0.02 * noise_RC
    standing_RC[7] += 0.4 * noise_RC[7]
    assert not summed(tmp_path / "row", true_RC, standing_RC, near_RC).is_rounding, "nor does it choose a row"
    lost_RC = true_RC + 0.05 * noise_RC
    lost_RC[3] = 0
    assert not summed(tmp_path / "lost", true_RC, lost_RC, near_RC).is_rounding


def test_where_each_row_alone_has_a_row_that_stands_out_so_may_a_cell(tmp_path: Path) -> None:
    """Of a mixture in bfloat16: a token near a tie is sent elsewhere, in both, and it need not be the same token."""
    random = torch.Generator().manual_seed(0)
    true_RC, noise_RC, other_RC = (torch.randn(64, 32, generator=random) for _ in range(3))
    alone_RC, own_RC = true_RC + 0.01 * noise_RC, true_RC + 0.01 * other_RC
    alone_RC[9] += 0.5 * noise_RC[9]
    own_RC[7] += 0.6 * other_RC[7]
    near_RC, wrong_RC = true_RC + 1e-5 * noise_RC, true_RC + 0.05 * noise_RC

    def rounded(name: str, finer_RC: torch.Tensor, alone_RC: torch.Tensor = alone_RC) -> bool:
        given = (true_RC, alone_RC, own_RC, finer_RC)
        true, alone, own, finer = (dumped(tmp_path / f"{name}{n}", one) for n, one in enumerate(given))
        found = of_gradients(true, alone, own, [NAME], half=True)
        of_the_cell(true, finer, found, half=True)
        return found[0].is_rounding

    assert rounded("sent", near_RC)
    assert not rounded("wrong", wrong_RC), "wrong in both dtypes"
    assert not rounded("chosen", near_RC, true_RC + 0.06 * noise_RC), "nobody else has such a row"


class _Wrong(torch.autograd.Function):
    """Passes values on, and a part of their gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 0.7 * gradients[0]


def _wrong_backward(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query, key, _Wrong.apply(value), mask, **options)


@pytest.fixture(scope="module")
def near_uniform(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GRPO micro-batch of a bfloat16 model that attends to everything alike: of queries and keys little is left."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.02,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    ids_BS = torch.randint(4, 255, (6, 96))
    mask_BS = torch.ones_like(ids_BS)
    for row in range(6):
        mask_BS[row, : 9 * row] = 0
    response_BS = mask_BS.clone()
    response_BS[:, :60] = 0
    path = tmp_path_factory.mktemp("near") / "dump"
    with Recorder(path) as recorder:
        recorder.checkpoint(0, model)
        with recorder.step(0) as record:
            advantages_BT = torch.randn(6, 1).expand(6, 95) * response_BS[:, 1:]
            record(
                "forward_data", micro=0, input_ids=ids_BS, attention_mask=mask_BS, response_mask=response_BS,
                advantages=advantages_BT, temperature=1.0,
            )  # fmt: skip
    return path


def _backward(dump: Path, out: Path, flags: str) -> Any:
    plan = {"dump": str(dump), "step": 0, "rank": 0, "micro": 0, "model": "checkpoint", "backward": True}
    asked = {**plan, "loss": "grpo,reduction=token_mean", "flags": Flags.parse(f"threads=1 {flags}").to_mapping()}
    return workbench.replay(asked, out, Here())


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "packing", "finer"),
    [
        pytest.param("bfloat16", "off", "float32", marks=pytest.mark.slow),
        ("bfloat16", "on", "float32"),
        ("float32", "on", "float64"),
    ],
)
def test_healthy_gradients_agree_however_little_is_left_of_them(
    near_uniform: Path, tmp_path: Path, dtype: str, packing: str, finer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A table that allows next to nothing, as any does for some model: what a finer dtype says decides.
    monkeypatch.setitem(limits.WORST_ROW["gradient"], dtype, 0.01 if dtype == "bfloat16" else 1e-7)
    monkeypatch.setitem(limits.REL_L2["gradient"], dtype, 0.002 if dtype == "bfloat16" else 1e-8)
    doc = _backward(near_uniform, tmp_path / "out", f"dtype={dtype} packing={packing}")
    causes = [cell["cause"] for cell in doc["cells"][1:]]
    assert all(cause["kind"] == "rounding" for cause in causes)
    # Where a CPU's own products in bfloat16 take the forward apart as well, the forward is what is said.
    of_gradients = f"about as far from the gradient in {finer} as that of each row alone is"
    assert any(said in causes[0]["sentence"] for said in (of_gradients, "in float64 it is what each row alone is"))
    assert exit_code(doc) == 0, causes


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "finer"), [
    pytest.param("bfloat16", "float32", marks=pytest.mark.slow), ("float32", "float64")
])  # fmt: skip
def test_a_backward_that_is_wrong_behind_a_right_forward_disagrees(
    near_uniform: Path, tmp_path: Path, dtype: str, finer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register("wrong_backward", _wrong_backward)
    ALL_MASK_ATTENTION_FUNCTIONS.register("wrong_backward", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    monkeypatch.setitem(attention._IMPLEMENTATIONS, "fa2", "wrong_backward")
    monkeypatch.setattr(attention, "need", lambda _flags: None)
    doc = _backward(near_uniform, tmp_path / "out", f"dtype={dtype} attention=fa2")
    cell = doc["cells"][-1]
    assert cell["agreement"]["agrees"] is False
    # Some CPUs' products in bfloat16 take a log-probability apart before it, by rounding.
    parted = compare_runs(open_run(doc["cells"][0]["dump"]), open_run(cell["dump"])).tensors
    first = next(row.name for row in parted if row.verdict.diverges and row.name.startswith("grad."))
    assert "v_proj" in first
    assert cell["cause"]["kind"] == "maths"
    assert f"behind a forward that is right, further from the gradient in {finer}" in cell["cause"]["sentence"]
    assert exit_code(doc) == 1


def _coarse_sum(module: torch.nn.LayerNorm, scale: float) -> None:
    """Let a norm sum its bias' gradient token by token in the dtype it computes in, times `scale`."""

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, normed: torch.Tensor, bias_C: torch.Tensor) -> torch.Tensor:
            return normed.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            grads_NC = gradients[0].reshape(-1, gradients[0].shape[-1])
            total_C = torch.zeros_like(grads_NC[0])
            for grad_C in grads_NC:
                total_C = total_C + grad_C
            return gradients[0], total_C * scale

    def forward(given: torch.Tensor) -> torch.Tensor:
        bias_C = module.bias.detach()
        normed = torch.nn.functional.layer_norm(given, module.normalized_shape, module.weight, bias_C, module.eps)
        return Sum.apply(normed, module.bias)

    module.forward = forward  # type: ignore[method-assign]


@pytest.mark.long
@pytest.mark.parametrize(("scale", "code"), [(1.0, 0), (1.05, 1)])
def test_a_bias_summed_token_by_token_in_a_half_is_rounding_unless_float32_is_off_too(
    tmp_path: Path, scale: float, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=128)
    model = GPT2LMHeadModel(config).to(torch.bfloat16)
    built = GPT2LMHeadModel.__init__

    def init(self: Any, *args: Any, **named: Any) -> None:
        built(self, *args, **named)
        norm = self.transformer.h[1].ln_1
        right = norm.forward
        _coarse_sum(norm, scale)
        coarse = norm.forward
        # Each row alone computes as it should: only a batch is summed so.
        norm.forward = lambda given: coarse(given) if given.shape[0] * given.shape[1] > 72 else right(given)

    ids_BS, mask_BS = torch.randint(4, 255, (5, 72)), torch.ones(5, 72, dtype=torch.long)
    mask_BS[0, :9] = 0
    response_BS = mask_BS.clone()
    response_BS[:, :36] = 0
    with Recorder(tmp_path / "dump") as recorder:
        recorder.checkpoint(0, model)
        with recorder.step(0) as record:
            advantages_BT = (torch.rand(5, 1) + 0.5).expand(5, 71) * response_BS[:, 1:]
            record(
                "forward_data", micro=0, input_ids=ids_BS, attention_mask=mask_BS, response_mask=response_BS,
                advantages=advantages_BT, temperature=1.0,
            )  # fmt: skip
    monkeypatch.setattr(GPT2LMHeadModel, "__init__", init)
    doc = _backward(tmp_path / "dump", tmp_path / "out", "dtype=bfloat16 packing=off")
    cell = doc["cells"][-1]
    assert exit_code(doc) == code, cell["cause"]["sentence"]
    assert "grad.transformer.h.1.ln_1.bias" in cell["cause"]["sentence"]
    if code == 0:
        assert cell["cause"]["kind"] == "rounding"
        assert "and this cell in float32 is not" in cell["cause"]["sentence"]
