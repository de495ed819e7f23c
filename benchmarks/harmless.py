"""What engines and trainers do differently and rightly: other kernels, orders of sums, fusions, layouts, dtypes.

Each is a change of how a model runs; every output is one that a correct implementation could give.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from benchmarks.zoo import LAYERS, Running, Tensor, around

Change = Callable[[Running], bool]


@dataclass(frozen=True)
class Harmless:
    """One kind of change. apply: makes it; False where the architecture has no such thing.

    other: the dtype that side B runs in instead, if it runs in another.
    """

    name: str
    apply: Change
    other: str | None = None


HARMLESS: list[Harmless] = []


def harmless(name: str, other: str | None = None, *, among: list[Harmless] = HARMLESS) -> Callable[[Change], Change]:
    def keep(apply: Change) -> Change:
        among.append(Harmless(name, apply, other))
        return apply

    return keep


def linears(running: Running, *endings: str) -> list[Any]:
    """Linears of all blocks, those whose name ends so if endings are given."""
    return [
        module for name, module in running.model.named_modules()
        if isinstance(module, torch.nn.Linear) and ".layers." in name and (not endings or name.endswith(endings))
    ]  # fmt: skip


def rms_norms(running: Running) -> list[Any]:
    """Norms that round before they are weighed, as Llama's."""
    return [module for module in running.model.modules() if hasattr(module, "variance_epsilon")]


_ROW_PARALLEL = ("o_proj", "down_proj", "dense", "dense_4h_to_h")


def in_parts(running: Running, parts: int, dtype: torch.dtype | None) -> bool:
    """Row-parallel linears as `parts` ranks compute them: each its part, rounded, summed one after the other.

    dtype: of the sum; None is the storage dtype, rounded after every addition.
    """
    for module in linears(running, *_ROW_PARALLEL):
        width = module.weight.shape[1] // parts

        def ranks(_run: Any, x: Tensor, module: Any = module, width: int = width) -> Tensor:
            total: Tensor | None = None
            for rank in range(parts):
                some = slice(rank * width, None if rank == parts - 1 else (rank + 1) * width)
                part = functional.linear(x[..., some], module.weight[:, some])
                part = part if dtype is None else part.to(dtype)
                total = part if total is None else total + part
            assert total is not None
            total = total if module.bias is None else total + module.bias.to(total.dtype)
            return total.to(x.dtype)

        around(module, ranks)
    return True


@harmless("run again")
def again(running: Running) -> bool:
    return True


@harmless("sdpa instead of eager")
def sdpa(running: Running) -> bool:
    if getattr(running.model.config, "attn_logit_softcapping", None):
        return False  # which sdpa cannot do
    running.attention = running.model.config._attn_implementation = "sdpa"
    return True


@harmless("eight columns more padding")
def wide(running: Running) -> bool:
    running.layout = "wide"
    return True


@harmless("padding on the left")
def left(running: Running) -> bool:
    running.layout = "left"
    return True


@harmless("packed, with sdpa")
def packed(running: Running) -> bool:
    running.layout = "packed"
    return sdpa(running) or True


@harmless("packed, with eager attention")
def packed_eager(running: Running) -> bool:
    running.layout = "packed"
    return True


@harmless("every sample in a micro-batch of its own")
def alone(running: Running) -> bool:
    running.layout = "alone"
    return True


@harmless("samples in another order")
def shuffled(running: Running) -> bool:
    running.layout = "shuffled"
    return sdpa(running) or True


@harmless("two ranks' sums in the storage dtype")
def two_ranks(running: Running) -> bool:
    return in_parts(running, 2, None)


@harmless("four ranks' sums in the storage dtype")
def four_ranks(running: Running) -> bool:
    return in_parts(running, 4, None)


@harmless("eight ranks' sums in the storage dtype")
def eight_ranks(running: Running) -> bool:
    return in_parts(running, 8, None)


@harmless("four ranks' sums in fp32")
def four_ranks_fp32(running: Running) -> bool:
    return in_parts(running, 4, torch.float32)


@harmless("sums of products in another order")
def other_order(running: Running) -> bool:
    for module in linears(running):

        def reversed_(_run: Any, x: Tensor, module: Any = module) -> Tensor:
            return functional.linear(x.flip(-1), module.weight.flip(-1), module.bias)

        around(module, reversed_)
    return True


@harmless("products summed in fp64")
def exact_linears(running: Running) -> bool:
    for module in linears(running):

        def exact(_run: Any, x: Tensor, module: Any = module) -> Tensor:
            bias = None if module.bias is None else module.bias.double()
            return functional.linear(x.double(), module.weight.double(), bias).to(x.dtype)

        around(module, exact)
    return True


@harmless("norms round after the weight")
def norm_cast_after(running: Running) -> bool:
    for module in rms_norms(running):

        def once(_run: Any, x: Tensor, module: Any = module) -> Tensor:
            wide = x.float()
            normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
            return (normed * module.weight.float()).to(x.dtype)

        around(module, once)
    return bool(rms_norms(running))


@harmless("attention without rounding inside")
def attention_fp32(running: Running) -> bool:
    for number in range(LAYERS):
        running.attend(number).kernel = "fp32"
    return True


@harmless("attention in blocks of keys")
def flash(running: Running) -> bool:
    for number in range(LAYERS):
        running.attend(number).kernel = "flash"
    return True


@harmless("gate, up and product fused, rounded once")
def fused_mlp(running: Running) -> bool:
    found = False
    for module in running.model.modules():
        if all(hasattr(module, name) for name in ("gate_proj", "up_proj", "act_fn")) and not hasattr(module, "gate"):
            found = True

            def fused(_run: Any, x: Tensor, module: Any = module) -> Tensor:
                gate = functional.linear(x.float(), module.gate_proj.weight.float())
                up = functional.linear(x.float(), module.up_proj.weight.float())
                out: Tensor = module.down_proj((module.act_fn.forward(gate) * up).to(x.dtype))
                return out

            around(module, fused)
    return found


def coarse_frequencies(running: Running) -> bool:
    """Rotary frequencies rounded to bfloat16."""
    rotary = running.base.rotary_emb
    found = [name for name, _ in rotary.named_buffers() if name.endswith("inv_freq") and "original" not in name]
    for name in found:
        frequencies = getattr(rotary, name)
        frequencies.copy_(frequencies.to(torch.bfloat16).float())
    return bool(found)


@harmless("rotary frequencies in bfloat16, as model.to() makes them")
def cast_frequencies(running: Running) -> bool:
    """Of 40 tokens; at thousands they are radians off, and a fault."""
    return next(running.model.parameters()).dtype == torch.bfloat16 and coarse_frequencies(running)


@harmless("rotation in fp32")
def rope_fp32(running: Running) -> bool:
    """The tables are handed on in fp32, the rotated queries and keys cast back."""
    if next(running.model.parameters()).dtype == torch.float32:
        return False
    for number, block in enumerate(running.base.layers):
        attention = getattr(block, "self_attn", None) or block.attention
        dtype = next(running.model.parameters()).dtype

        def turned(run: Any, *args: Any, **kwargs: Any) -> Any:
            cos, sin = kwargs.pop("position_embeddings")
            return run(*args, position_embeddings=(cos.float(), sin.float()), **kwargs)

        def cast(q: Tensor, k: Tensor, v: Tensor, dtype: Any = dtype) -> tuple[Tensor, Tensor, Tensor]:
            return q.to(dtype), k.to(dtype), v.to(dtype)

        around(attention, turned)
        running.attend(number).see = cast
    return True


@harmless("the head in fp32")
def head_fp32(running: Running) -> bool:
    module = running.model.get_output_embeddings()

    def wide(_run: Any, x: Tensor) -> Tensor:
        return functional.linear(x.float(), module.weight.float())

    around(module, wide)
    return True


@harmless("queries, keys and values from one product")
def fused_qkv(running: Running) -> bool:
    found = False
    for block in running.base.layers:
        attention = getattr(block, "self_attn", None)
        parts = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj")]
        if any(part is None for part in parts):
            continue
        found = True
        start = 0
        for part in parts:
            assert part is not None
            some = slice(start, start + part.weight.shape[0])
            start = some.stop

            def cut(_run: Any, x: Tensor, some: slice = some, parts: list[Any] = parts) -> Tensor:
                # Put together when it runs: a bug that is planted afterwards is in it.
                weight = torch.cat([part.weight for part in parts])
                bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
                return functional.linear(x, weight, bias)[..., some].contiguous()

            around(part, cut)
    return found


@harmless("the router in fp32")
def router_fp32(running: Running) -> bool:
    found = False
    for block in running.base.layers:
        router = getattr(getattr(block, "mlp", None), "gate", None)
        if router is None or hasattr(router, "routed_scaling_factor") or not hasattr(router, "top_k"):
            continue
        found = True

        def wide(_run: Any, hidden: Tensor, router: Any = router) -> Any:
            logits = functional.linear(hidden.float(), router.weight.float())
            weights, index = logits.softmax(-1).topk(router.top_k, dim=-1)
            if getattr(router, "norm_topk_prob", True):
                weights = weights / weights.sum(-1, keepdim=True)
            return logits.to(hidden.dtype), weights.to(hidden.dtype), index

        around(router, wide)
    return found


@harmless("experts all at once")
def batched_experts(running: Running) -> bool:
    found = False
    for block in running.base.layers:
        experts = getattr(getattr(block, "mlp", None), "experts", None)
        if experts is None:
            continue
        found = True

        def dense(_run: Any, hidden: Tensor, index: Tensor, weights: Tensor, experts: Any = experts) -> Tensor:
            gate, up = torch.einsum("th,eih->eti", hidden, experts.gate_up_proj).chunk(2, dim=-1)
            each = torch.einsum("eti,ehi->eth", experts.act_fn(gate) * up, experts.down_proj)
            chosen = each[index.T, torch.arange(hidden.shape[0])]
            out: Tensor = (chosen.float() * weights.T[..., None].float()).sum(0).to(hidden.dtype)
            return out

        around(experts, dense)
    return found


@harmless("the same weights in fp32", other="float32")
def in_fp32(running: Running) -> bool:
    return True


@harmless("an engine: packed, blocks of keys, two ranks, fused norms and MLP")
def engine(running: Running) -> bool:
    running.layout = "packed"
    fused_mlp(running)
    flash(running)
    norm_cast_after(running)
    return two_ranks(running)


@harmless("another engine: left padding, fp32 attention, fused qkv, exact sums, fp32 head")
def other_engine(running: Running) -> bool:
    running.layout = "left"
    exact_linears(running)
    fused_qkv(running)
    attention_fp32(running)
    return head_fp32(running)
