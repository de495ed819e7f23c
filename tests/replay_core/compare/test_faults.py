"""A labelled set of faults: what is harmless must not be called a divergence, what is wrong must be.

Every fault is written to disk as a trainer would record it, and compared as any two dumps are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.compare.verdict import Verdict
from tests.builders import compare_paths, row_of, write_pair

BATCH, WIDTH, HIDDEN = 4, 64, 128
MLP, GRAD, LOGPROBS = "layers.5.mlp.output", "grad.layers.5.mlp.up_proj.weight", "policy_logprobs"
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

Tensor = torch.Tensor


@dataclass(frozen=True)
class Fault:
    """Two recordings of one micro-batch, and what must be said of the tensor that was touched."""

    name: str
    tensor: str
    make: Callable[[], tuple[dict[str, Any], dict[str, Any]]]
    says: Verdict
    batch: bool = True

    def __str__(self) -> str:
        return self.name


def batch() -> dict[str, Tensor]:
    """Four samples, left and right padded."""
    mask_BS = torch.ones(BATCH, WIDTH, dtype=torch.long)
    mask_BS[0, :5] = 0
    mask_BS[1, 50:] = 0
    ids_BS = torch.randint(0, 1000, (BATCH, WIDTH), generator=torch.Generator().manual_seed(7))
    return {"input_ids": ids_BS, "attention_mask": mask_BS}


def hidden(dtype: torch.dtype = F32, *, rows: int = BATCH, width: int = WIDTH, size: int = HIDDEN) -> Tensor:
    generator = torch.Generator().manual_seed(rows * width + size)
    return torch.randn(rows, width, size, generator=generator).to(dtype)


def logprobs() -> Tensor:
    return -torch.rand(BATCH, WIDTH, generator=torch.Generator().manual_seed(3)).exp() * 0.8


def gradient(scale: float, dtype: torch.dtype = F32) -> Tensor:
    return (torch.randn(128, 64, generator=torch.Generator().manual_seed(5)) * scale).to(dtype)


def one_ulp(values: Tensor) -> Tensor:
    """Every other element moved to a neighbour, up or down by chance."""
    generator = torch.Generator().manual_seed(11)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    step = torch.randint(-1, 2, values.shape, generator=generator).to(bits)
    moved = (values.view(bits) + step).view(values.dtype)
    return torch.where(torch.isfinite(values) & (values != 0), moved, values)


def changed(values: Tensor, index: Any, new: Any) -> Tensor:
    copy = values.clone()
    copy[index] = new
    return copy


def module(a: Tensor, b: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    return {MLP: a}, {MLP: b}


def logs(a: Tensor, b: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"log_probs": a}, {"log_probs": b}


def grads(a: Tensor, b: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    return {GRAD: a}, {GRAD: b}


def few_scaled_rows(dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Any]]:
    """One row in a hundred is 5 % too large (compare.md section 0, point 3)."""
    a = hidden(dtype, rows=8, width=256)
    flat = a.clone().view(-1, HIDDEN)
    flat[::100] = (flat[::100].float() * 1.05).to(dtype)
    return module(a, flat.view(a.shape))


def masked_attention(dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Any]]:
    a = hidden(dtype)
    a[:, :, ::3] = -math.inf
    return module(a, one_ulp(a))


def massive_activation() -> tuple[dict[str, Any], dict[str, Any]]:
    """One element outweighs the rest, as at the first token of real models, and rounds by more than their rms."""
    a = changed(hidden(BF16), (2, 0, 7), 2000.0)
    return module(a, changed(a, (2, 0, 7), 2008.0))


def packed_and_padded() -> tuple[dict[str, Any], dict[str, Any]]:
    a, padded = hidden(), batch()
    valid = padded["attention_mask"].bool()
    bounds = torch.nn.functional.pad(valid.sum(1).cumsum(0), (1, 0))
    pack = {"input_ids": padded["input_ids"][valid][None], "cu_seqlens": bounds, MLP: a[valid][None]}
    return {**padded, MLP: a}, pack


def leak() -> tuple[dict[str, Any], dict[str, Any]]:
    """A pack whose second sample saw the first: worst at its first token, fading after it."""
    a, b = packed_and_padded()
    first = int(b["cu_seqlens"][1])
    fade = torch.exp(-torch.arange(40) / 8.0)[:, None]
    b[MLP][0, first : first + 40] += fade * torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(1))
    return a, b


def reordered() -> tuple[dict[str, Any], dict[str, Any]]:
    fields = {f"layers.{layer}.mlp.output": hidden() + layer for layer in range(3, 7)}
    return fields, dict(reversed(fields.items()))


def padding_only(fill: float) -> tuple[dict[str, Any], dict[str, Any]]:
    return module(hidden(), changed(hidden(), (0, slice(0, 5)), fill))


HARMLESS = [
    *(Fault(f"one ulp of noise, {dtype}", MLP, lambda d=dtype: module(hidden(d), one_ulp(hidden(d))), Verdict.CLOSE)
      for dtype in (F32, BF16, F16)),
    Fault("NaN at the same places", MLP,
          lambda: module(changed(hidden(), (1, 2, 3), math.nan), changed(one_ulp(hidden()), (1, 2, 3), math.nan)),
          Verdict.CLOSE),
    *(Fault(f"-inf masks on both sides, {dtype}", MLP, lambda d=dtype: masked_attention(d), Verdict.CLOSE)
      for dtype in (F32, BF16)),
    Fault("denormals instead of zeros", MLP,
          lambda: module(torch.zeros(BATCH, WIDTH, HIDDEN), changed(torch.zeros(BATCH, WIDTH, HIDDEN), (0, 9), 1e-42)),
          Verdict.CLOSE),
    Fault("noise of denormals", MLP, lambda: module(hidden() * 1e-42, one_ulp(hidden() * 1e-42)), Verdict.CLOSE),
    Fault("0 and -0", MLP,
          lambda: module(changed(hidden(), (slice(None), 3), 0.0), changed(hidden(), (slice(None), 3), -0.0)),
          Verdict.SAME),
    Fault("a leading axis of length 1", MLP, lambda: module(hidden(), hidden()[None]), Verdict.SAME),
    Fault("a cast to bf16", MLP, lambda: module(hidden(), hidden().bfloat16()), Verdict.CLOSE),
    Fault("a cast to fp16", MLP, lambda: module(hidden(), hidden().half()), Verdict.CLOSE),
    Fault("a cast to bf16 of a tensor with NaN", MLP,
          lambda: module(changed(hidden(), (1, 2, 3), math.nan), changed(hidden(), (1, 2, 3), math.nan).bfloat16()),
          Verdict.CLOSE),
    Fault("bf16 stored as fp32", MLP, lambda: module(hidden(BF16), hidden(BF16).float()), Verdict.SAME),
    Fault("a massive activation off by one ulp", MLP, massive_activation, Verdict.CLOSE),
    Fault("the same samples padded and packed", MLP, packed_and_padded, Verdict.SAME, batch=False),
    Fault("fields in another order", "layers.3.mlp.output", reordered, Verdict.SAME),
    Fault("garbage in padding", MLP, lambda: padding_only(9.0), Verdict.PADDING),
    Fault("NaN in padding", MLP, lambda: padding_only(math.nan), Verdict.PADDING),
    Fault("bf16 noise of logprobs", LOGPROBS,
          lambda: logs(logprobs(), logprobs() + 0.02 * torch.randn(BATCH, WIDTH, generator=torch.Generator())),
          Verdict.CLOSE),
]  # fmt: skip

REAL = [
    Fault("a token id one too high", "input_ids",
          lambda: (batch(), {**batch(), "input_ids": changed(batch()["input_ids"], (2, 40), 1001)}),
          Verdict.DIFF, batch=False),
    Fault("a flipped attention mask bit", "attention_mask",
          lambda: (batch(), {**batch(), "attention_mask": changed(batch()["attention_mask"], (1, 49), 0)}),
          Verdict.DIFF, batch=False),
    Fault("a flipped loss mask bit", "loss_mask",
          lambda: ({"loss_mask": torch.ones(BATCH, WIDTH, dtype=torch.bool)},
                   {"loss_mask": changed(torch.ones(BATCH, WIDTH, dtype=torch.bool), (2, 9), False)}), Verdict.DIFF),
    *(Fault(f"one wrong row, {dtype}", MLP, lambda d=dtype: module(hidden(d), changed(hidden(d), (2, 7), 0.5)),
            Verdict.DIFF) for dtype in (F32, BF16)),
    *(Fault(f"one outlier, {dtype}", MLP, lambda d=dtype: module(hidden(d), changed(hidden(d), (2, 7, 3), 8.0)),
            Verdict.DIFF) for dtype in (F32, BF16)),
    *(Fault(f"everything times 1.01, {dtype}", MLP,
            lambda d=dtype: module(hidden(d), (hidden(d).float() * 1.01).to(d)), Verdict.DIFF)
      for dtype in (F32, BF16)),
    *(Fault(f"everything plus 0.02, {dtype}", MLP,
            lambda d=dtype: module(hidden(d), (hidden(d).float() + 0.02).to(d)), Verdict.DIFF)
      for dtype in (F32, BF16)),
    *(Fault(f"half of a 1e-6 gradient zeroed, {dtype}", GRAD,
            lambda d=dtype: grads(gradient(1e-6, d), changed(gradient(1e-6, d), slice(64, None), 0.0)), Verdict.DIFF)
      for dtype in (F32, BF16)),
    Fault("a gradient with its sign flipped", GRAD, lambda: grads(gradient(1e-8), -gradient(1e-8)), Verdict.DIFF),
    *(Fault(f"two rows swapped, {dtype}", MLP,
            lambda d=dtype: module(hidden(d), changed(hidden(d), (2, [7, 8]), hidden(d)[2, [8, 7]])), Verdict.DIFF)
      for dtype in (F32, BF16)),
    Fault("a NaN appears", MLP, lambda: module(hidden(), changed(hidden(), (1, 2, 3), math.nan)), Verdict.NAN),
    Fault("a NaN goes away", MLP, lambda: module(changed(hidden(), (1, 2, 3), math.nan), hidden()), Verdict.NAN),
    Fault("an infinity of the other sign", MLP,
          lambda: module(changed(hidden(), (0, 6, 0), math.inf), changed(hidden(), (0, 6, 0), -math.inf)), Verdict.NAN),
    Fault("2**24 against 2**24 + 1", "counter",
          lambda: ({"counter": torch.tensor([2**24, 5])}, {"counter": torch.tensor([2**24 + 1, 5])}), Verdict.DIFF),
    Fault("2**53 against 2**53 + 1", "counter",
          lambda: ({"counter": torch.tensor([2**53, 5])}, {"counter": torch.tensor([2**53 + 1, 5])}), Verdict.DIFF),
    Fault("logprobs shifted by one token", LOGPROBS, lambda: logs(logprobs(), logprobs().roll(1, 1)), Verdict.DIFF),
    Fault("one wrong sample of hidden states", MLP,
          lambda: module(hidden(), changed(hidden(), 2, hidden()[1])), Verdict.DIFF),
    Fault("one wrong sample of logprobs", LOGPROBS,
          lambda: logs(logprobs(), changed(logprobs(), 2, logprobs()[3].flip(0))), Verdict.DIFF),
    Fault("logprobs of another temperature", LOGPROBS, lambda: logs(logprobs(), logprobs() * 1.05), Verdict.DIFF),
    Fault("a tensor missing in b", "layers.6.mlp.output",
          lambda: ({MLP: hidden(), "layers.6.mlp.output": hidden()}, {MLP: hidden()}), Verdict.MISSING),
    Fault("a tensor missing in a", "layers.6.mlp.output",
          lambda: ({MLP: hidden()}, {MLP: hidden(), "layers.6.mlp.output": hidden()}), Verdict.MISSING),
    Fault("rows one token longer", MLP, lambda: module(hidden(), hidden(width=WIDTH + 1)), Verdict.SHAPE),
    Fault("ids one column short of their mask", "input_ids",
          lambda: (batch(), {**batch(), "input_ids": batch()["input_ids"][:, :-1]}), Verdict.SHAPE, batch=False),
    *(Fault(f"1 % of the rows 5 % too large, {dtype}", MLP, lambda d=dtype: few_scaled_rows(d), Verdict.DIFF,
            batch=False) for dtype in (F32, BF16, F16)),
    Fault("a leak into the second sample of a pack", MLP, leak, Verdict.DIFF, batch=False),
]  # fmt: skip


def compared(fault: Fault, directory: Path) -> tuple[Any, Any]:
    a, b = fault.make()
    around = {"batch_inputs": batch()} if fault.batch else {}
    comparison = compare_paths(*write_pair(directory, {**around, "modules": a}, {**around, "modules": b}))
    return comparison, row_of(comparison, fault.tensor)


@pytest.mark.parametrize("fault", HARMLESS, ids=str)
def test_harmless_differences_are_no_divergence(fault: Fault, tmp_path: Path):
    comparison, row = compared(fault, tmp_path)
    assert row.verdict is fault.says, row.reason
    assert comparison.first is None
    assert all(comparison.counts[word] == 0 for word in ("DIFF", "NAN", "SHAPE", "MISSING", "skipped"))


@pytest.mark.parametrize("fault", REAL, ids=str)
def test_real_faults_are_found(fault: Fault, tmp_path: Path):
    comparison, row = compared(fault, tmp_path)
    assert row.verdict is fault.says, row.reason
    if fault.says is not Verdict.MISSING and "mask" not in fault.tensor:
        assert comparison.first is row


def test_a_leak_is_placed_at_the_first_token_of_the_second_sample(tmp_path: Path):
    comparison, row = compared(next(fault for fault in REAL if "leak" in fault.name), tmp_path)
    assert comparison.first is row
    assert row.token == (1, 0)
    sample, position, rel_l2 = row.worst_token
    assert (sample, rel_l2 > 0.5) == (1, True)
    assert position < 8


def test_eager_against_sdpa_in_bf16_is_noise_from_end_to_end(tmp_path: Path):
    """A real model, ragged pads on both sides: every module output, logprobs and entropy."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.06,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(BF16).eval()
    inputs = batch()
    recorded = []
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        outputs = forward(model, **inputs)
        recorded.append({"batch_inputs": inputs, **outputs})
    comparison = compare_paths(*write_pair(tmp_path, *recorded, flags={"effective": {"dtype": "bfloat16"}}))
    assert comparison.first is None, comparison.first
    assert comparison.counts["CLOSE"] > 40


def forward(model: Any, input_ids: Tensor, attention_mask: Tensor) -> dict[str, dict[str, Tensor]]:
    """Outputs of all leaf modules, logprobs and entropy of one forward."""
    outputs: dict[str, Tensor] = {}
    hooks = [
        part.register_forward_hook(lambda _part, _inputs, out, name=name: outputs.update({f"{name}.output": out}))
        for name, part in model.named_modules()
        if not list(part.children()) and isinstance(part, torch.nn.Linear) and name != "lm_head"
    ]
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(input_ids, attention_mask=attention_mask, position_ids=positions, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    logp = torch.log_softmax(logits.float(), -1)
    chosen = logp[:, :-1].gather(2, input_ids[:, 1:, None])[..., 0]
    entropy = -(logp.exp() * logp).sum(-1)
    return {"modules": outputs, "forward_data": {"log_probs": chosen, "entropy": entropy[:, :-1]}}
