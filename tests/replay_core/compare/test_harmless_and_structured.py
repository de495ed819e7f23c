"""Where noise ends and structure begins: kernels that only round otherwise, and small faults that have a shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.compare import compare_runs
from replay_core.compare.judging.verdict import Verdict
from replay_core.dumps import open_run
from tests.builders import compare_fields, row_of, save_file

BATCH, TOKENS, VOCAB = 4, 48, 512


def computed(model: Any, attention: str, seed: int) -> dict[str, Any]:
    """Every module's input and output, log probabilities and gradients of one batch."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([TOKENS, TOKENS - 8, TOKENS - 19, TOKENS // 3])
    mask_BT = (torch.arange(TOKENS) < lengths[:, None]).long()
    ids_BT = torch.randint(1, VOCAB, (BATCH, TOKENS), generator=generator) * mask_BT
    seen: dict[str, Any] = {"input_ids": ids_BT, "attention_mask": mask_BT}

    def hook(name: str) -> Any:
        def keep(_module: Any, given: Any, named: Any, output: Any) -> None:
            taken = given[0] if given else named.get("hidden_states")
            if taken is not None:
                seen[f"{name}.inputs.0"] = taken.detach().clone()
            seen[f"{name}.output"] = (output[0] if isinstance(output, tuple) else output).detach().clone()

        return keep

    named = [(name, module) for name, module in model.model.named_modules() if name and "rotary" not in name]
    hooks = [module.register_forward_hook(hook(name), with_kwargs=True) for name, module in named]
    model.set_attn_implementation(attention)
    model.zero_grad()
    positions_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)
    logits_BTV = model(input_ids=ids_BT, attention_mask=mask_BT, position_ids=positions_BT, use_cache=False).logits
    logprobs_BT = logits_BTV[:, :-1].float().log_softmax(-1).gather(-1, ids_BT[:, 1:, None])[..., 0]
    (-(logprobs_BT * mask_BT[:, 1:]).sum() / mask_BT[:, 1:].sum()).backward()
    for one in hooks:
        one.remove()
    seen["policy_logprobs"] = torch.nn.functional.pad(logprobs_BT.detach(), (0, 1))
    seen |= {f"grad.{name}": weight.grad.clone() for name, weight in model.named_parameters()}
    return seen


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize(("std", "layers"), [(0.02, 2), (0.06, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_another_attention_kernel_is_harmless_to_the_last_gradient(
    dtype: torch.dtype, std: float, layers: int, seed: int, tmp_path: Path
) -> None:
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, initializer_range=std,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(dtype)
    paths = [save_file(tmp_path / f"{kernel}.pt", computed(model, kernel, seed)) for kernel in ("eager", "sdpa")]
    compared = compare_runs(open_run(paths[0]), open_run(paths[1]))
    assert [(row.name, row.reason) for row in compared.tensors if row.verdict.diverges] == []
    assert sum(row.figures is not None and row.figures.mismatched > 0 for row in compared.tensors) > 20


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    ids_BT = torch.randint(1, 100, (BATCH, TOKENS))
    mask_BT = (torch.arange(TOKENS) < torch.tensor([48, 40, 44, 47])[:, None]).long()
    return {"input_ids": ids_BT * mask_BT, "attention_mask": mask_BT, "response_mask": mask_BT}


@pytest.mark.parametrize("change", [lambda row: row * 1.05, lambda row: row - 0.05])
@pytest.mark.parametrize("name", ["policy_logprobs", "values"])
def test_one_sample_scaled_or_shifted_among_noise_is_a_divergence(name: str, change: Any, tmp_path: Path) -> None:
    said_BT = -torch.rand(BATCH, TOKENS) * 4
    other_BT = said_BT + 0.002 * torch.randn(BATCH, TOKENS)
    noise = row_of(compare_fields(tmp_path / "noise", {**batch(), name: said_BT}, {**batch(), name: other_BT}), name)
    other_BT[1] = change(other_BT[1])
    fault = row_of(compare_fields(tmp_path / "fault", {**batch(), name: said_BT}, {**batch(), name: other_BT}), name)
    assert fault.verdict is Verdict.DIFF
    if name == "policy_logprobs":  # 2e-3 is noise in nats and none in a value of fp32
        assert noise.verdict is Verdict.CLOSE
        assert "1 of 4 samples are a " in fault.reason


def test_what_tokens_that_count_show_too_is_not_said_to_live_in_padding(tmp_path: Path) -> None:
    said_BT = -torch.rand(BATCH, TOKENS)
    other_BT = said_BT.clone()
    other_BT[:, 30:] -= 0.05
    compared = compare_fields(
        tmp_path, {**batch(), "policy_logprobs": said_BT}, {**batch(), "policy_logprobs": other_BT}
    )
    assert row_of(compared, "policy_logprobs").verdict is not Verdict.PADDING


@pytest.mark.parametrize("e", [0.03, 0.06])
def test_tokens_that_are_each_off_by_a_constant_are_a_divergence(e: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    hidden_TH = torch.randn(64, 96)
    noisy_TH = hidden_TH * (1 + 0.008 * torch.randn(64, 96))
    shifted_TH = noisy_TH + e * torch.randn(64, 1)
    a, noise, fault = ({"norm.output": one.to(torch.bfloat16)} for one in (hidden_TH, noisy_TH, shifted_TH))
    assert row_of(compare_fields(tmp_path / "noise", a, noise), "norm.output").verdict is Verdict.CLOSE
    row = row_of(compare_fields(tmp_path / "fault", a, fault), "norm.output")
    assert row.verdict is Verdict.DIFF
    assert "rows are a plus a constant" in row.reason


def test_weights_that_went_through_fp8_are_other_weights_and_flipped_last_bits_are_not(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight = (0.02 * torch.randn(128, 96)).to(torch.bfloat16)
    flipped = (weight.view(torch.int16) ^ 1).view(torch.bfloat16)
    through = weight.to(torch.float8_e4m3fn).to(torch.bfloat16)
    a, last_bits, fault = ({"param.w": one} for one in (weight, flipped, through))
    assert row_of(compare_fields(tmp_path / "bits", a, last_bits), "param.w").verdict is Verdict.CLOSE
    assert row_of(compare_fields(tmp_path / "fp8", a, fault), "param.w").verdict is Verdict.DIFF


def test_elements_of_a_vector_do_not_stand_out_as_columns(tmp_path: Path) -> None:
    torch.manual_seed(0)
    vector = torch.randn(64)
    vector[7] = 1e-3
    noisy = vector + 0.01 * torch.randn(64)
    a, b = ({"grad.norm.weight": one.to(torch.bfloat16)} for one in (vector, noisy))
    assert row_of(compare_fields(tmp_path, a, b), "grad.norm.weight").verdict is Verdict.CLOSE
