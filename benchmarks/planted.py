"""Bugs that are planted into a model that runs: wrong weights, patched forwards, attention that does something else.

Every bug says in which module it is, and what an answer would call it. They share nothing with what rldbg judges by: a
bug is a change of how a model runs, never of a tensor that was recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from benchmarks.harmless import coarse_frequencies
from benchmarks.zoo import LENGTHS, Attending, Running, Tensor, around, batches


@dataclass(frozen=True)
class Where:
    """Where a bug shows first.

    modules: the modules an answer may name. tensors: the recorded tensors that may be the first to differ (beginnings
    of names); what the modules return, where none is given.
    """

    modules: tuple[str, ...]
    tensors: tuple[str, ...] = ()

    def first(self) -> tuple[str, ...]:
        return self.tensors or tuple(f"{module}.output" for module in self.modules)


Plant = Callable[[Running], Where | None]


@dataclass(frozen=True)
class Bug:
    """One kind of bug. plant: changes a model, and says where; None where the architecture has no such thing.

    called: words of which an answer should hold one; none where no answer is expected to name the cause.
    """

    name: str
    plant: Plant
    called: tuple[str, ...] = ()


BUGS: list[Bug] = []


def bug(name: str, *called: str, among: list[Bug] = BUGS) -> Callable[[Plant], Plant]:
    def keep(plant: Plant) -> Plant:
        among.append(Bug(name, plant, called))
        return plant

    return keep


def at(running: Running, *modules: Any) -> Where:
    return Where(tuple(running.name(module) for module in modules if module is not None))


def inside_attention(running: Running) -> Where:
    """What an attention computes between its projections shows first in what goes into the last of them."""
    attention, out = running.part("attention"), running.part("o")
    name, last = running.name(attention), running.name(out)
    return Where((name, last), (f"{last}.inputs", f"{name}.output"))


def any_linear(running: Running, *parts: str) -> Any | None:
    """One of the block's linears, by chance."""
    found = [module for part in (parts or ("q", "k", "v", "o", "gate", "up", "down"))
             if (module := running.part(part)) is not None]  # fmt: skip
    return running.random.choice(found) if found else None


def set_weight(module: Any, weight: Tensor) -> None:
    with torch.no_grad():
        module.weight.copy_(weight.to(module.weight.dtype))


# Weights that are not the ones they should be.


@bug("one linear has the weights of the step before", "older", "stale", "checkpoint", "step 0")
def stale_linear(running: Running) -> Where | None:
    module = any_linear(running)
    if module is None:
        return None
    set_weight(module, running.older[running.weight(module)])
    return at(running, module)


@bug("one linear is a hundredth of a step old", "older", "stale", "checkpoint", "step 0")
def barely_stale_linear(running: Running) -> Where | None:
    module = any_linear(running)
    if module is None:
        return None
    now, before = module.weight.float(), running.older[running.weight(module)].float()
    set_weight(module, now + 0.01 * (before - now))
    if torch.equal(module.weight.float(), now):
        return None
    return at(running, module)


@bug("a whole block has the weights of the step before", "older", "stale", "checkpoint", "step 0")
def stale_block(running: Running) -> Where | None:
    prefix = running.name(running.block)
    with torch.no_grad():
        for name, weight in running.block.named_parameters():
            full = next(key for key in running.older if key.endswith(f"{prefix}.{name}"))
            weight.copy_(running.older[full])
    linears = [running.part(part) for part in ("q", "k", "v")]
    return at(running, running.part("norm"), *[one for one in linears if one is not None])


@bug("an adapter was not merged", "adapter", "low rank", "lora")
def no_adapter(running: Running) -> Where | None:
    module = any_linear(running)
    if module is None:
        return None
    set_weight(module, module.weight.float() - running.adapter[running.weight(module)])
    return at(running, module)


@bug("an adapter was merged twice", "adapter", "low rank", "lora")
def adapter_twice(running: Running) -> Where | None:
    module = any_linear(running)
    if module is None:
        return None
    set_weight(module, module.weight.float() + running.adapter[running.weight(module)])
    return at(running, module)


@bug("weights went through int8, row by row", "int8", "grid", "quanti")
def through_int8(running: Running) -> Where | None:
    module = any_linear(running)
    if module is None:
        return None
    weight = module.weight.float()
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    set_weight(module, (weight / scale).round() * scale)
    return at(running, module)


@bug("weights went through fp8", "fp8", "grid", "quanti")
def through_fp8(running: Running) -> Where | None:
    module = any_linear(running)
    if module is None:
        return None
    weight = module.weight.float()
    scale = weight.abs().max() / 448
    set_weight(module, (weight / scale).to(torch.float8_e4m3fn).float() * scale)
    return at(running, module)


@bug("one channel of a linear is dead")
def dead_channel(running: Running) -> Where | None:
    module = any_linear(running)
    if module is None:
        return None
    with torch.no_grad():
        module.weight[5] = 0
    return at(running, module)


@bug("four channels of a linear are 2 % too large")
def scaled_channels(running: Running) -> Where | None:
    module = any_linear(running)
    if module is None:
        return None
    with torch.no_grad():
        module.weight[[2, 3, 11, 17]] *= 1.02
    return at(running, module)


@bug("a linear is 1 % too large", "factor", "gain", "scale", "times")
def scaled_linear(running: Running) -> Where | None:
    module = any_linear(running)
    if module is None:
        return None
    set_weight(module, module.weight.float() * 1.01)
    return at(running, module)


@bug("the heads of the query projection are permuted", "permut", "head", "order")
def permuted_heads(running: Running) -> Where | None:
    module = running.part("q")
    if module is None:
        return None
    heads = module.weight.view(4, -1, module.weight.shape[1])
    set_weight(module, heads[[1, 0, 3, 2]].reshape(module.weight.shape))
    return at(running, module)


@bug("gate and up of an MLP are the other way round", "swap", "permut", "order", "gate")
def swapped_gate(running: Running) -> Where | None:
    gate, up = running.part("gate"), running.part("up")
    if gate is None or up is None:
        return None
    first = gate.weight.detach().clone()
    set_weight(gate, up.weight.detach())
    set_weight(up, first)
    return at(running, gate)


@bug("the bias of a linear is missing", "bias")
def no_bias(running: Running) -> Where | None:
    found = [one for part in ("q", "k", "v", "o", "up", "down")
             if (one := running.part(part)) is not None and one.bias is not None]  # fmt: skip
    if not found:
        return None
    module = running.random.choice(found)
    with torch.no_grad():
        module.bias.zero_()
    return at(running, module)


@bug("one rank's partial sum is missing", "partial", "rank", "shard", "sum")
def missing_partial(running: Running) -> Where | None:
    module = any_linear(running, "o", "down")
    if module is None:
        return None
    width = module.weight.shape[1] // 4

    def partial(_run: Any, x: Tensor) -> Tensor:
        return functional.linear(x[..., width:], module.weight[:, width:], module.bias)

    around(module, partial)
    return at(running, module)


@bug("one rank's partial sum is added twice", "partial", "rank", "shard", "sum")
def doubled_partial(running: Running) -> Where | None:
    module = any_linear(running, "o", "down")
    if module is None:
        return None
    width = module.weight.shape[1] // 4

    def doubled(run: Any, x: Tensor) -> Tensor:
        out: Tensor = run(x)
        return out + functional.linear(x[..., :width], module.weight[:, :width])

    around(module, doubled)
    return at(running, module)


@bug("the bias is added by every rank", "bias")
def doubled_bias(running: Running) -> Where | None:
    found = [one for part in ("o", "down", "q")
             if (one := running.part(part)) is not None and one.bias is not None]  # fmt: skip
    if not found:
        return None
    module = running.random.choice(found)
    with torch.no_grad():
        module.bias.mul_(2)
    return at(running, module)


@bug("a linear cuts digits off instead of rounding", "trunc")
def truncating(running: Running) -> Where | None:
    module = any_linear(running)
    if module is None or module.weight.dtype != torch.bfloat16:
        return None

    def cut(_run: Any, x: Tensor) -> Tensor:
        exact = functional.linear(
            x.float(), module.weight.float(), None if module.bias is None else module.bias.float()
        )
        return (exact.view(torch.int32) & -65536).view(torch.float32).to(x.dtype)

    around(module, cut)
    return at(running, module)


@bug("a linear's inputs went through int8")
def inputs_through_int8(running: Running) -> Where | None:
    module = any_linear(running)
    if module is None:
        return None

    def quantised(run: Any, x: Tensor) -> Tensor:
        scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-9) / 127
        out: Tensor = run((x / scale).round() * scale)
        return out

    around(module, quantised)
    return at(running, module)


@bug("one token of a linear's output is its neighbour's")
def stale_token(running: Running) -> Where | None:
    module = any_linear(running)
    if module is None:
        return None

    def stale(run: Any, x: Tensor) -> Tensor:
        out = run(x).clone()
        if out.shape[-2] > 6:
            flat = out.view(-1, out.shape[-2], out.shape[-1])
            flat[0, 5] = flat[0, 4]
        return out

    around(module, stale)
    return at(running, module) if running.layout in ("right", "packed", "wide") else None


# Norms.


def with_eps(running: Running, eps: float) -> Where | None:
    module = any_linear(running, "norm", "second_norm")
    if module is None:
        return None
    for name in ("variance_epsilon", "eps"):
        if hasattr(module, name):
            setattr(module, name, eps)
    return at(running, module)


@bug("a norm's eps is 1e-3", "eps")
def large_eps(running: Running) -> Where | None:
    return with_eps(running, 1e-3)


@bug("a norm's eps is ten times the configured one", "eps")
def other_eps(running: Running) -> Where | None:
    module = running.part("norm")
    now = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    return None if now is None else with_eps(running, 10 * now)


@bug("a norm has the weights of the step before", "older", "stale", "checkpoint", "step 0")
def stale_norm(running: Running) -> Where | None:
    module = any_linear(running, "norm", "second_norm")
    if module is None:
        return None
    before = module.weight.detach().clone()
    set_weight(module, running.older[running.weight(module)])
    return None if torch.equal(before, module.weight) else at(running, module)


@bug("a norm's weight is left out", "weight")
def norm_without_weight(running: Running) -> Where | None:
    module = running.part("second_norm")
    if module is None:
        return None
    zero_centred = "Gemma" in type(module).__name__
    with torch.no_grad():
        module.weight.fill_(0.0 if zero_centred else 1.0)
    return at(running, module)


@bug("a norm is computed in half precision", "half", "bf16", "precision", "cast", "round")
def norm_in_half(running: Running) -> Where | None:
    module = running.part("norm")
    if module is None or module.weight.dtype == torch.float32 or not hasattr(module, "variance_epsilon"):
        return None

    def half(_run: Any, x: Tensor) -> Tensor:
        mean = (x * x).mean(-1, keepdim=True)
        out: Tensor = module.weight * (x * torch.rsqrt(mean + module.variance_epsilon))
        return out

    around(module, half)
    return at(running, module)


@bug("a norm subtracts the mean as well", "mean", "layernorm")
def centred_norm(running: Running) -> Where | None:
    module = running.part("norm")
    if module is None or isinstance(module, torch.nn.LayerNorm):
        return None

    def centred(run: Any, x: Tensor) -> Tensor:
        out: Tensor = run(x - x.mean(-1, keepdim=True))
        return out

    around(module, centred)
    return at(running, module)


@bug("the norm of the queries is skipped", "norm", "identity")
def no_q_norm(running: Running) -> Where | None:
    module = running.part("q_norm")
    if module is None:
        return None
    around(module, lambda _run, x: x)
    return at(running, module)


@bug("a norm takes its mean over one half of the channels")
def half_norm(running: Running) -> Where | None:
    module = any_linear(running, "norm", "second_norm")
    if module is None:
        return None

    def halved(run: Any, x: Tensor) -> Tensor:
        whole = x.float().pow(2).mean(-1, keepdim=True)
        part = x[..., : x.shape[-1] // 2].float().pow(2).mean(-1, keepdim=True)
        out: Tensor = run(x)
        return (out.float() * torch.sqrt(whole / part)).to(out.dtype)

    around(module, halved)
    return at(running, module)


# Attention.


def changed_attention(running: Running, change: Callable[[Attending], None]) -> Where:
    change(running.attend())
    return inside_attention(running)


@bug("attention is scaled 2 % too much", "scal")
def attention_scale(running: Running) -> Where | None:
    return changed_attention(running, lambda how: setattr(how, "scale", 1.02))


@bug("attention is not scaled", "scal")
def attention_unscaled(running: Running) -> Where | None:
    attention = running.part("attention")
    assert attention is not None
    return changed_attention(running, lambda how: setattr(how, "scale", 1 / attention.scaling))


@bug("attention sees the next token", "mask", "causal", "future")
def sees_next(running: Running) -> Where | None:
    def open_(mask: Tensor | None, query: Tensor) -> Tensor | None:
        if mask is None:
            return None
        rolled = mask.clone()
        rolled[..., :-1, :] = torch.maximum(mask[..., :-1, :], mask[..., 1:, :])
        return rolled

    return changed_attention(running, lambda how: setattr(how, "mask", open_))


@bug("a sample of a pack sees the last token of the one before", "mask", "leak", "pack", "segment")
def leak(running: Running) -> Where | None:
    if running.layout not in ("packed", "right"):
        return None
    running.layout = "packed"
    begin = LENGTHS[0]

    def leaking(mask: Tensor | None, query: Tensor) -> Tensor | None:
        if mask is None:
            return None
        opened = mask.clone()
        opened[..., begin : begin + LENGTHS[1], begin - 1] = 0
        return opened

    return changed_attention(running, lambda how: setattr(how, "mask", leaking))


@bug("padding on the left is attended to", "mask", "padding")
def attends_padding(running: Running) -> Where | None:
    if running.layout not in ("right", "left"):
        return None
    running.layout = "left"

    def causal_only(mask: Tensor | None, query: Tensor) -> Tensor | None:
        if mask is None:
            return None
        length = query.shape[2]
        barred = torch.full((length, length), torch.finfo(mask.dtype).min, dtype=mask.dtype).triu(1)
        return barred.expand(mask.shape)

    return changed_attention(running, lambda how: setattr(how, "mask", causal_only))


def has_window(running: Running) -> bool:
    attention = running.part("attention")
    own = getattr(attention, "sliding_window", None)
    return own is not None or (running.model.config.model_type == "mistral")


@bug("the sliding window is one token too long", "window")
def longer_window(running: Running) -> Where | None:
    if not has_window(running):
        return None
    window = running.model.config.sliding_window

    def longer(mask: Tensor | None, query: Tensor) -> Tensor | None:
        if mask is None:
            return None
        opened = mask.clone()
        length = query.shape[2]
        row = torch.arange(window, length)
        # Only within a sample: the token before is seen, and sees that key.
        one = torch.minimum(mask[..., row, row - 1], mask[..., row - 1, row - window])
        opened[..., row, row - window] = torch.maximum(mask[..., row, row - window], one)
        return opened

    return changed_attention(running, lambda how: setattr(how, "mask", longer))


@bug("the sliding window is ignored", "window")
def no_window(running: Running) -> Where | None:
    if not has_window(running) or running.layout != "right":
        return None

    def wide(mask: Tensor | None, query: Tensor) -> Tensor | None:
        if mask is None:
            return None
        length = query.shape[2]
        return torch.full((length, length), torch.finfo(mask.dtype).min, dtype=mask.dtype).triu(1).expand(mask.shape)

    return changed_attention(running, lambda how: setattr(how, "mask", wide))


@bug("the softcap of attention is left out", "softcap", "cap")
def no_softcap(running: Running) -> Where | None:
    if (
        getattr(running.model.config, "attn_logit_softcapping", None) is None
        or running.model.config.model_type != "gemma2"
    ):
        return None
    return changed_attention(running, lambda how: setattr(how, "softcap", False))


@bug("softmax is computed in half precision", "half", "bf16", "precision", "softmax", "round")
def softmax_in_half(running: Running) -> Where | None:
    dtype = next(running.model.parameters()).dtype
    if dtype == torch.float32 or running.attend().kernel == "flash":  # which has no softmax of its own
        return None

    def in_half(scores: Tensor) -> Tensor:
        # torch.softmax would widen within.
        each = torch.exp((scores - scores.amax(-1, keepdim=True)).to(dtype))
        return each / each.sum(-1, keepdim=True)

    return changed_attention(running, lambda how: setattr(how, "softmax", in_half))


@bug("keys and values are shared by the wrong heads", "head", "group", "permut", "order")
def interleaved_groups(running: Running) -> Where | None:
    config = running.model.config
    if getattr(config, "num_key_value_heads", config.num_attention_heads) == config.num_attention_heads:
        return None
    return changed_attention(running, lambda how: setattr(how, "interleaved", True))


@bug("the first keys of every sample are another prefix's", "cache", "prefix", "key", "stale")
def stale_prefix(running: Running) -> Where | None:
    if running.layout != "right":
        return None

    def stale(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, v = k.clone(), v.clone()
        k[..., :3, :], v[..., :3, :] = k[..., :3, :].roll(1, 0), v[..., :3, :].roll(1, 0)
        return q, k, v

    return changed_attention(running, lambda how: setattr(how, "see", stale))


@bug("the last key of long rows is dropped", "mask", "key")
def dropped_key(running: Running) -> Where | None:
    def dropping(mask: Tensor | None, query: Tensor) -> Tensor | None:
        if mask is None:
            return None
        closed = mask.clone()
        row = torch.arange(16, query.shape[2])
        closed[..., row, row] = torch.finfo(mask.dtype).min
        return closed

    return changed_attention(running, lambda how: setattr(how, "mask", dropping))


@bug("keys and values went through fp8", "fp8", "cache", "quanti")
def fp8_cache(running: Running) -> Where | None:
    def narrow(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q, *((one.to(torch.float8_e4m3fn).to(one.dtype)) for one in (k, v))  # type: ignore[return-value]

    return changed_attention(running, lambda how: setattr(how, "see", narrow))


# Positions.


def with_tables(running: Running, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Where:
    """One attention rotates by other tables than those that went into it."""
    attention = running.part("attention")
    assert attention is not None

    def turned(run: Any, *args: Any, **kwargs: Any) -> Any:
        cos, sin = kwargs.pop("position_embeddings")
        return run(*args, position_embeddings=change(cos, sin), **kwargs)

    around(attention, turned)
    return inside_attention(running)


@bug("rope's theta is fifty times the configured one", "theta", "rope")
def other_theta(running: Running) -> Where | None:
    rotary = running.base.rotary_emb
    found = [name for name, _ in rotary.named_buffers() if name.endswith("inv_freq") and "original" not in name]
    for name in found:
        frequencies = getattr(rotary, name)
        share = torch.arange(frequencies.numel()) / frequencies.numel()
        frequencies.mul_(50.0**-share)
    return at(running, rotary) if found else None


@bug("positions go on by one from token 8", "position", "rope")
def shifted_positions(running: Running) -> Where | None:
    rotary = running.base.rotary_emb

    def shifted(run: Any, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        return run(x, position_ids + (position_ids >= 8), *args, **kwargs)

    around(rotary, shifted)
    return at(running, rotary)


@bug("one attention rotates in the other layout", "rope", "rotat", "interleav")
def other_rotation(running: Running) -> Where | None:
    def turned(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        half = cos.shape[-1] // 2
        return tuple(one[..., :half].repeat_interleave(2, -1) for one in (cos, sin))  # type: ignore[return-value]

    return with_tables(running, turned)


@bug("one attention rotates backwards", "rope", "rotat", "sign")
def backwards(running: Running) -> Where | None:
    return with_tables(running, lambda cos, sin: (cos, -sin))


@bug("rope's tables went through bf16", "rope", "bf16", "precision", "table", "round")
def coarse_tables(running: Running) -> Where | None:
    if next(running.model.parameters()).dtype == torch.bfloat16:
        return None  # what `harmless.py` has: at so few tokens it is less than a unit of the last place of the table
    return at(running, running.base.rotary_emb) if coarse_frequencies(running) else None


# What stands between modules, MLPs, ends.


def in_block(running: Running) -> Where:
    """A sum of the block shows in what it returns, or in what goes into what follows."""
    name, number = running.name(running.block), running.layer
    blocks = running.base.layers
    after = running.name(blocks[number + 1]) if number + 1 < len(blocks) else "norm"
    others = ("norm", "final_layer_norm", "final_layernorm", "gpt_neox.final_layer_norm")
    return Where((name,), (f"{name}.output", f"{after}.", *(f"{other}.inputs" for other in others)))


def last_branch(running: Running) -> Any | None:
    """What is added last in the block."""
    return getattr(running.block, "post_feedforward_layernorm", None) or running.part("mlp")


def with_branch(running: Running, change: Callable[[Tensor, Tensor], Tensor]) -> Where | None:
    """The block's output from (output, what was added last)."""
    branch, kept = last_branch(running), {}
    if branch is None:
        return None

    def keeping(run: Any, *args: Any, **kwargs: Any) -> Any:
        kept["branch"] = run(*args, **kwargs)
        return kept["branch"]

    def changed(run: Any, *args: Any, **kwargs: Any) -> Any:
        out = run(*args, **kwargs)
        first = out[0] if isinstance(out, tuple) else out
        new = change(first, kept["branch"])
        return (new, *out[1:]) if isinstance(out, tuple) else new

    around(branch, keeping)
    around(running.block, changed)
    return in_block(running)


@bug("the residual of one sample is lost", "residual")
def lost_residual(running: Running) -> Where | None:
    def lost(out: Tensor, branch: Tensor) -> Tensor:
        new = out.clone()
        new[0, 3:9] = branch[0, 3:9]
        return new

    return with_branch(running, lost)


@bug("the last branch of a block is added at nine tenths", "residual", "scal", "factor")
def weaker_branch(running: Running) -> Where | None:
    return with_branch(running, lambda out, branch: (out.float() - 0.1 * branch.float()).to(out.dtype))


@bug("the residual went through fp8", "fp8", "residual", "quanti")
def fp8_residual(running: Running) -> Where | None:
    def narrow(out: Tensor, branch: Tensor) -> Tensor:
        scale = out.abs().max() / 448
        return ((out / scale).to(torch.float8_e4m3fn).to(out.dtype)) * scale

    return with_branch(running, narrow)


@bug("an MLP's activation is another one", "activation", "gelu", "silu")
def other_activation(running: Running) -> Where | None:
    module, mlp, down = running.part("act"), running.part("mlp"), running.part("down")
    if module is None or mlp is None or down is None:
        return None
    is_silu = "SiLU" in type(module).__name__
    around(module, lambda _run, x: functional.gelu(x) if is_silu else functional.silu(x))
    return Where(
        tuple(map(running.name, (module, mlp))), (f"{running.name(module)}.output", f"{running.name(down)}.inputs")
    )


@bug("gelu is the other approximation", "activation", "gelu", "tanh")
def other_gelu(running: Running) -> Where | None:
    module, mlp, down = running.part("act"), running.part("mlp"), running.part("down")
    if module is None or mlp is None or down is None or "SiLU" in type(module).__name__:
        return None
    is_tanh = "tanh" in type(module).__name__.lower()
    around(module, lambda _run, x: functional.gelu(x, approximate="none" if is_tanh else "tanh"))
    return Where(
        tuple(map(running.name, (module, mlp))), (f"{running.name(module)}.output", f"{running.name(down)}.inputs")
    )


@bug("an embedding has a stale row", "older", "stale", "row", "embed")
def stale_embedding(running: Running) -> Where | None:
    module = running.model.get_input_embeddings()
    row = int(next(batches("right"))["input_ids"][0, 7])
    with torch.no_grad():
        module.weight[row] = module.weight[row + 1]
    return at(running, module)


@bug("the embedding is not scaled", "scal", "embed")
def unscaled_embedding(running: Running) -> Where | None:
    module = running.model.get_input_embeddings()
    if not hasattr(module, "embed_scale"):
        return None
    module.embed_scale.fill_(1.0)
    return at(running, module)


def final_norm(running: Running) -> Any:
    names = ("norm", "final_layer_norm", "final_layernorm")
    return next(found for name in names if (found := getattr(running.base, name, None)) is not None)


@bug("the last norm is skipped", "norm", "identity")
def no_final_norm(running: Running) -> Where | None:
    module = final_norm(running)
    around(module, lambda _run, x: x)
    return at(running, module)


@bug("the head has the weights of the step before", "older", "stale", "checkpoint", "step 0")
def stale_head(running: Running) -> Where | None:
    module = running.model.get_output_embeddings()
    name = running.weight(module)
    if name not in running.older:
        return None
    set_weight(module, running.older[name])
    return at(running, module)


@bug("the head's rows are permuted", "permut", "vocab", "order", "row")
def permuted_head(running: Running) -> Where | None:
    module = running.model.get_output_embeddings()

    def rolled(run: Any, x: Tensor) -> Tensor:
        out = run(x).clone()
        out[..., 128:] = out[..., 128:].roll(1, -1)
        return out

    around(module, rolled)
    return at(running, module)


LOGPROBS = Where(("policy_logprobs", "logprobs"), ("policy_logprobs",))


@bug("log probabilities are taken at another temperature", "temperature", "scal")
def temperature(running: Running) -> Where | None:
    running.head = lambda logits: logits / 0.95
    return LOGPROBS


@bug("a part of the vocabulary is missing from the normaliser", "vocab", "normal", "sum")
def short_normaliser(running: Running) -> Where | None:
    missing: list[Tensor] = []

    def seen(logits: Tensor) -> Tensor:
        wide = logits.float()
        missing.append(functional.pad((wide.logsumexp(-1) - wide[..., :-16].logsumexp(-1))[:, :-1], (0, 1)))
        return logits

    running.head = seen
    running.after = lambda logprobs: torch.where(logprobs == 0, logprobs, logprobs + missing.pop())
    return LOGPROBS


@bug("log probabilities are one token late", "shift", "token")
def late_logprobs(running: Running) -> Where | None:
    # Rolled as a whole they would be right, and laid out as other trainers lay them out: at the token they are about.
    running.after = lambda logprobs: torch.where(logprobs != 0, logprobs.roll(1, 1), 0.0)
    return LOGPROBS


# Experts.


def in_experts(running: Running) -> Where | None:
    experts, mlp = running.part("experts"), running.part("mlp")
    if experts is None or mlp is None:
        return None
    name = running.name(experts)
    return Where((name, running.name(mlp)), (f"{name}.output", f"{name}.act_fn", f"{running.name(mlp)}.output"))


@bug("two experts are swapped", "permut", "expert", "swap")
def swapped_experts(running: Running) -> Where | None:
    where, experts = in_experts(running), running.part("experts")
    if where is None or experts is None:
        return None
    with torch.no_grad():
        for weight in (experts.gate_up_proj, experts.down_proj):
            weight[[1, 4]] = weight[[4, 1]]
    return where


@bug("an expert has the weights of the step before", "older", "stale", "expert", "step 0")
def stale_expert(running: Running) -> Where | None:
    where, experts = in_experts(running), running.part("experts")
    if where is None or experts is None:
        return None
    with torch.no_grad():
        for which in ("gate_up_proj", "down_proj"):
            getattr(experts, which)[3] = running.older[running.weight(experts, which)][3]
    return where


@bug("an expert's part is left out for some tokens", "drop", "capacity", "expert")
def dropped_tokens(running: Running) -> Where | None:
    where, experts = in_experts(running), running.part("experts")
    if where is None or experts is None:
        return None

    def dropping(run: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        kept = weights.clone()
        kept[::7, 0] = 0
        out: Tensor = run(hidden, index, kept)
        return out

    around(experts, dropping)
    return where


@bug("the experts' weights do not sum to one", "rout", "normal", "scal", "factor")
def unnormalised_router(running: Running) -> Where | None:
    router = running.part("router")
    if router is None or running.part("experts") is None:
        return None

    def raw(run: Any, hidden: Tensor) -> Any:
        logits, weights, index = run(hidden)
        scores = logits.float().sigmoid() if hasattr(router, "routed_scaling_factor") else logits.float().softmax(-1)
        factor = getattr(router, "routed_scaling_factor", 1.0)
        return logits, (scores.gather(1, index) * factor).to(weights.dtype), index

    around(router, raw)
    return at(running, router)


@bug("the routed part is not scaled", "scal", "factor", "rout")
def unscaled_routing(running: Running) -> Where | None:
    router = running.part("router")
    if router is None or not hasattr(router, "routed_scaling_factor"):
        return None
    router.routed_scaling_factor = 1.0
    return at(running, router)


@bug("the router's correction bias is missing", "bias", "correction", "rout")
def no_correction(running: Running) -> Where | None:
    router = running.part("router")
    if router is None or not hasattr(router, "e_score_correction_bias"):
        return None
    router.e_score_correction_bias.zero_()
    return at(running, router)


@bug("the router takes one expert fewer", "top", "rout", "expert")
def fewer_experts(running: Running) -> Where | None:
    router = running.part("router")
    if router is None or running.part("experts") is None:
        return None

    def fewer(run: Any, hidden: Tensor) -> Any:
        logits, weights, index = run(hidden)
        least = weights.argmin(-1, keepdim=True)
        rest = weights.scatter(-1, least, 0.0)
        return logits, (rest * (weights.sum(-1, keepdim=True) / rest.sum(-1, keepdim=True))).to(weights.dtype), index

    around(router, fewer)
    return at(running, router)


@bug("the router has the weights of the step before", "older", "stale", "checkpoint", "step 0")
def stale_router(running: Running) -> Where | None:
    router = running.part("router")
    if router is None or running.part("experts") is None:
        return None
    set_weight(router, running.older[running.weight(router)])
    return at(running, router)


@bug("the shared expert is left out", "shared", "expert")
def no_shared(running: Running) -> Where | None:
    shared, mlp = running.part("shared"), running.part("mlp")
    if shared is None or mlp is None:
        return None

    def alone(run: Any, hidden: Tensor) -> Tensor:
        _, weights, index = mlp.gate(hidden)
        out: Tensor = mlp.experts(hidden.view(-1, hidden.shape[-1]), index, weights).view(hidden.shape)
        mlp.shared_experts(hidden)
        return out

    around(mlp, alone)
    return Where((running.name(mlp),), (f"{running.name(mlp)}.output",))
