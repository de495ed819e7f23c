"""A labelled set of faults: what is harmless must not be called a divergence, what is wrong must be.

The tests write every one to disk as a trainer would record it and compare them as any two dumps are; the benchmark
shows the same to other tools.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from replay_core.compare.judging.verdict import Verdict

BATCH, WIDTH, HIDDEN = 4, 64, 128
PARAM = "param.layers.5.mlp.up_proj.weight"
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
    """One row in a hundred is 5 % too large (docs/evidence.md#other-tools)."""
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


def noisy_rows(dtype: torch.dtype, wrong: Callable[[Tensor], Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """One ulp of noise everywhere, and one row in a hundred wrong besides."""
    a = hidden(dtype, rows=8, width=256)
    b = one_ulp(a).view(-1, HIDDEN)
    b[::100] = wrong(b[::100].float()).to(dtype)
    return module(a, b.view(a.shape))


def five_percent_noise(rows: Tensor) -> Tensor:
    """Off by 5 % of their norm, in no direction."""
    return rows * (1 + 0.05 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(9)))


def massive_channel(
    b: Callable[[Tensor], Tensor], *, rows: int = 8, channel: int = 17
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One channel is 300 times the others, as in the residual stream of real models. `b` changes a copy."""
    a = hidden(BF16, rows=rows, width=64)
    a[..., channel] = (300 + torch.rand(a.shape[:-1], generator=torch.Generator().manual_seed(4))).to(BF16)
    return module(a, b(a.clone()))


def others_scaled(values: Tensor, factor: float) -> Tensor:
    """All but the massive channel times a factor."""
    kept = values[..., 17].clone()
    values = (values.float() * factor).to(values.dtype)
    values[..., 17] = kept
    return values


def massive_ulp(values: Tensor) -> Tensor:
    """The massive channel rounded to its other neighbour, in every row alike."""
    values[..., 17] = (values[..., 17].view(torch.int16) + 1).view(BF16)
    return values


def one_column(values: Tensor) -> Tensor:
    values[..., 5] = (values[..., 5].float() * 1.1).to(values.dtype)
    return values


def swapped_among_massive(values: Tensor) -> Tensor:
    values[2, [7, 8]] = values[2, [8, 7]]
    values[..., 17] = 300.0
    return values


def bf16_entropy(noise: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """A bf16 model whose run does not say so: module outputs in bf16, entropy in fp32 with bf16's noise."""
    generator = torch.Generator().manual_seed(8)
    entropy = 1 + torch.rand(BATCH, WIDTH, generator=generator)
    other = entropy * (1 + noise * torch.randn(BATCH, WIDTH, generator=generator))
    return {MLP: hidden(BF16), "entropy": entropy}, {MLP: one_ulp(hidden(BF16)), "entropy": other}


def params(change: Callable[[Tensor], Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """bf16 weights rounded from fp32 ones, and from what `change` makes of these."""
    weight = gradient(0.02)
    return {PARAM: weight.to(BF16)}, {PARAM: change(weight).to(BF16)}


def last_bits() -> tuple[dict[str, Any], dict[str, Any]]:
    a, _ = params(torch.clone)
    return a, {PARAM: one_ulp(a[PARAM])}


def through_int8(weight: Tensor) -> Tensor:
    largest = weight.abs().amax(-1, keepdim=True)
    return (weight / largest * 127).round() * largest / 127


def an_update(weight: Tensor, lr: float = 1e-5) -> Tensor:
    """As Adam does it: every element by the learning rate."""
    return weight + lr * torch.randn(weight.shape, generator=torch.Generator().manual_seed(12)).sign()


def noisy_channel(factor: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """End-to-end noise of a kernel change, 1.5 %, and one channel times a factor besides."""
    a = hidden()
    b = a + 0.015 * torch.randn(a.shape, generator=torch.Generator().manual_seed(13))
    b[..., 5] *= factor
    return module(a.to(BF16), b.to(BF16))


def sample_among_noise(by: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Noise of .02 nats in every sample, and one of them wrong besides."""
    generator = torch.Generator().manual_seed(14)
    other = logprobs() + 0.02 * torch.randn(BATCH, WIDTH, generator=generator)
    other[3] += by * torch.randn(WIDTH, generator=generator)
    return logs(logprobs(), other)


def ids(dtype: torch.dtype, off: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """Token ids, on one side stored as floats."""
    stored = changed(batch()["input_ids"], (2, 40), batch()["input_ids"][2, 40] + off).to(dtype)
    return batch(), {**batch(), "input_ids": stored}


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
    Fault("a cast to bf16 stored as fp32", MLP, lambda: module(hidden(), hidden(BF16).float()), Verdict.CLOSE),
    Fault("one ulp of bf16 noise stored as fp32", MLP,
          lambda: module(hidden(BF16).float(), one_ulp(hidden(BF16)).float()), Verdict.CLOSE),
    Fault("a massive channel rounded the other way in every row", MLP, lambda: massive_channel(massive_ulp),
          Verdict.CLOSE, batch=False),
    Fault("one ulp of noise beside a massive channel", MLP, lambda: massive_channel(one_ulp), Verdict.CLOSE,
          batch=False),
    Fault("entropy of a bf16 model that does not say so", "entropy", lambda: bf16_entropy(4e-3), Verdict.CLOSE),
    *(Fault(f"token ids stored as {dtype}", "input_ids", lambda d=dtype: ids(d), Verdict.SAME, batch=False)
      for dtype in (F32, torch.float64, torch.int32)),
    Fault("a gradient of 1e-30 where the other is zero", GRAD,
          lambda: grads(torch.zeros(128, 64), gradient(1e-30)), Verdict.CLOSE),
    Fault("a gradient of zeros on both sides", GRAD, lambda: grads(gradient(0.0), gradient(0.0)), Verdict.SAME),
    Fault("last bits of bf16 weights", PARAM, last_bits, Verdict.CLOSE),
    Fault("1.5 % of noise in bf16", MLP, lambda: noisy_channel(1.0), Verdict.CLOSE),
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
    *(Fault(f"1 % of the rows 5 % too large among noise, {dtype}", MLP,
            lambda d=dtype: noisy_rows(d, lambda rows: rows * 1.05), Verdict.DIFF, batch=False)
      for dtype in (F32, BF16, F16)),
    *(Fault(f"1 % of the rows off by 5 % of their norm among noise, {dtype}", MLP,
            lambda d=dtype: noisy_rows(d, five_percent_noise), Verdict.DIFF, batch=False)
      for dtype in (F32, BF16, F16)),
    Fault("computed in bf16, stored as fp32, against fp32", MLP,
          lambda: module(hidden(), one_ulp(hidden(BF16)).float()), Verdict.DIFF),
    Fault("one column 10 % too large", MLP, lambda: module(hidden(BF16, rows=8), one_column(hidden(BF16, rows=8))),
          Verdict.DIFF, batch=False),
    Fault("all but a massive channel times 1.02", MLP, lambda: massive_channel(lambda v: others_scaled(v, 1.02)),
          Verdict.DIFF, batch=False),
    Fault("all but a massive channel times 1.3", MLP, lambda: massive_channel(lambda v: others_scaled(v, 1.3)),
          Verdict.DIFF, batch=False),
    Fault("all with a massive channel times 1.01", MLP,
          lambda: massive_channel(lambda v: (v.float() * 1.01).to(BF16)), Verdict.DIFF, batch=False),
    Fault("two rows swapped beside a massive channel", MLP, lambda: massive_channel(swapped_among_massive),
          Verdict.DIFF, batch=False),
    Fault("entropy of a bf16 model off by a third", "entropy", lambda: bf16_entropy(0.3), Verdict.DIFF),
    *(Fault(f"a token id one too high, stored as {dtype}", "input_ids", lambda d=dtype: ids(d, 1), Verdict.DIFF,
            batch=False) for dtype in (F32, torch.float64)),
    Fault("half of a 1e-30 gradient zeroed", GRAD,
          lambda: grads(gradient(1e-30), changed(gradient(1e-30), slice(64, None), 0.0)), Verdict.DIFF),
    Fault("a gradient of 1e-6 where the other is zero", GRAD,
          lambda: grads(torch.zeros(128, 64), gradient(1e-6)), Verdict.DIFF),
    Fault("bf16 weights that went through int8", PARAM, lambda: params(through_int8), Verdict.DIFF),
    Fault("bf16 weights stale by one update of 1e-5", PARAM, lambda: params(an_update), Verdict.DIFF),
    Fault("one channel 4 % too large among noise", MLP, lambda: noisy_channel(1.04), Verdict.DIFF),
    Fault("one sample's logprobs wrong among noise", LOGPROBS, lambda: sample_among_noise(0.15), Verdict.DIFF),
    Fault("a leak into the second sample of a pack", MLP, leak, Verdict.DIFF, batch=False),
]  # fmt: skip
