"""Bugs, harmless changes and architectures that came after the rules: nothing was fitted to them before they ran.

Strengths and places are drawn by the case's own seed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn import functional

from benchmarks import harmless as usual
from benchmarks import planted
from benchmarks.harmless import Harmless, in_parts, linears, rms_norms
from benchmarks.planted import Bug, Where, any_linear, at, changed_attention, set_weight, with_branch
from benchmarks.zoo import Running, Tensor, around

BUGS: list[Bug] = []
HARMLESS: list[Harmless] = []
bug = partial(planted.bug, among=BUGS)
harmless = partial(usual.harmless, among=HARMLESS)


def linear(running: Running, change: Any, *parts: str) -> Where | None:
    """One of the block's linears with its weight changed by change(weight, chance)."""
    module = any_linear(running, *parts)
    if module is None:
        return None
    before = module.weight.detach().clone()
    set_weight(module, change(before.float(), running.random))
    return None if torch.equal(before, module.weight) else at(running, module)


# Weights.


@bug("keys and values have each other's weights", "swap", "weights of", "permut", "order")
def keys_for_values(running: Running) -> Where | None:
    key, value = running.part("k"), running.part("v")
    if key is None or value is None or key.weight.shape != value.weight.shape:
        return None
    first = key.weight.detach().clone()
    set_weight(key, value.weight.detach())
    set_weight(value, first)
    return at(running, key, value)


@bug("a block's linear is that of the block beside it", "weights of")
def other_block(running: Running) -> Where | None:
    module = any_linear(running, "q", "o", "down")
    if module is None:
        return None
    name, number = running.name(module), running.layer
    # The first of deepseek is dense: its MLP is another.
    other = number + 1 if number + 1 < len(running.base.layers) else number - 1
    theirs = dict(running.base.named_modules()).get(
        name.removeprefix("gpt_neox.").replace(f"layers.{number}.", f"layers.{other}.")
    )
    if theirs is None or theirs.weight.shape != module.weight.shape:
        return None
    set_weight(module, theirs.weight)
    return at(running, module)


@bug("the columns of two heads of the output projection change places")
def swapped_columns(running: Running) -> Where | None:
    def change(weight: Tensor, _chance: Any) -> Tensor:
        heads = weight.unflatten(1, (4, -1))
        return heads[:, [0, 2, 1, 3]].flatten(1)

    return linear(running, change, "o")


@bug("weights decayed once too often", "factor", "scale", "times", "gain")
def decayed(running: Running) -> Where | None:
    return linear(running, lambda weight, chance: weight * (1 - chance.choice((0.003, 0.01, 0.03))))


@bug("an adapter was merged at half its strength", "adapter", "low rank", "lora")
def half_adapter(running: Running) -> Where | None:
    module = any_linear(running)
    if module is None:
        return None
    set_weight(module, module.weight.float() - 0.5 * running.adapter[running.weight(module)])
    return at(running, module)


@bug("weights went through int4, in groups of 16", "int4", "grid", "quanti")
def int4_groups(running: Running) -> Where | None:
    def change(weight: Tensor, _chance: Any) -> Tensor:
        groups = weight.unflatten(1, (-1, 16))
        scale = groups.abs().amax(-1, keepdim=True) / 7
        return ((groups / scale).round() * scale).flatten(1)

    return linear(running, change)


@bug("weights went through float8 e5m2", "float8", "fp8", "grid", "quanti")
def e5m2(running: Running) -> Where | None:
    return linear(running, lambda weight, _chance: weight.to(torch.float8_e5m2).float())


@bug("weights are the mean of two steps", "step 0", "older", "way to")
def averaged(running: Running) -> Where | None:
    module = any_linear(running)
    if module is None:
        return None
    before = module.weight.detach().clone()
    set_weight(module, 0.5 * (before.float() + running.older[running.weight(module)].float()))
    return None if torch.equal(before, module.weight) else at(running, module)


@bug("one weight has a bit flipped")
def flipped_bit(running: Running) -> Where | None:
    def change(weight: Tensor, chance: Any) -> Tensor:
        row, column = chance.randrange(weight.shape[0]), chance.randrange(weight.shape[1])
        weight[row, column] += 4 * weight.std()
        return weight

    return linear(running, change)


@bug("an input channel of a linear is not read")
def unread_channel(running: Running) -> Where | None:
    def change(weight: Tensor, chance: Any) -> Tensor:
        weight[:, chance.randrange(weight.shape[1])] = 0
        return weight

    return linear(running, change)


@bug("a fifth of a linear's rows were not updated", "step 0", "older")
def partly_stale(running: Running) -> Where | None:
    module = any_linear(running)
    if module is None:
        return None
    before = module.weight.detach().clone()
    rows = len(before) // 5
    with torch.no_grad():
        module.weight[-rows:] = running.older[running.weight(module)][-rows:]
    return None if torch.equal(before, module.weight) else at(running, module)


@bug("the head is tied to the embedding, and should not be")
def tied_head(running: Running) -> Where | None:
    head, embedding = running.model.get_output_embeddings(), running.model.get_input_embeddings()
    if head.weight is embedding.weight:
        return None
    set_weight(head, embedding.weight)
    return at(running, head)


@bug("the head went through float8", "float8", "fp8", "grid", "quanti")
def float8_head(running: Running) -> Where | None:
    head = running.model.get_output_embeddings()
    if head.weight is running.model.get_input_embeddings().weight:
        return None
    set_weight(head, head.weight.float().to(torch.float8_e4m3fn).float())
    return at(running, head)


@bug("the embedding's upper half is off by one row", "row", "shift", "embed")
def shifted_embedding(running: Running) -> Where | None:
    module = running.model.get_input_embeddings()
    around(module, lambda run, ids: run(ids + ((ids >= 128) & (ids < 255)).long()))
    return at(running, module)


# Norms.


@bug("a norm divides by one channel fewer", "factor", "times", "scale", "gain")
def unbiased(running: Running) -> Where | None:
    module = any_linear(running, "norm", "second_norm")
    if module is None or not hasattr(module, "variance_epsilon"):
        return None

    def divided(run: Any, x: Tensor) -> Tensor:
        wide = x.float()
        count = x.shape[-1]
        normed = wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) / (count - 1) + module.variance_epsilon)
        out: Tensor = module.weight * normed.to(x.dtype)
        return out

    around(module, divided)
    return at(running, module)


@bug("a LayerNorm's bias is missing", "bias", "offset")
def no_norm_bias(running: Running) -> Where | None:
    module = any_linear(running, "norm", "second_norm")
    if module is None or getattr(module, "bias", None) is None:
        return None
    with torch.no_grad():
        module.bias.zero_()
    return at(running, module)


@bug("the last norm has a block's weights", "weights of")
def other_norm(running: Running) -> Where | None:
    module, other = planted.final_norm(running), running.part("second_norm") or running.part("norm")
    if other is None or other.weight.shape != module.weight.shape:
        return None
    set_weight(module, other.weight)
    return at(running, module)


# Attention.


@bug("one head is scaled differently", "scal", "head")
def one_head(running: Running) -> Where | None:
    factor = running.random.choice((1.05, 0.9))
    return changed_attention(running, lambda how: setattr(how, "see", lambda q, k, v: (
        torch.cat([q[:, :1] * factor, q[:, 1:]], 1), k, v)))  # fmt: skip


@bug("a sink takes part in the softmax", "sink", "softmax")
def sink(running: Running) -> Where | None:
    def with_sink(scores: Tensor) -> Tensor:
        wide = scores.float()
        more = torch.cat([wide, torch.zeros_like(wide[..., :1])], -1)
        return more.softmax(-1)[..., :-1]

    return changed_attention(running, lambda how: setattr(how, "softmax", with_sink))


@bug("scores are biased by distance", "bias", "position", "alibi")
def distance(running: Running) -> Where | None:
    slope = running.random.choice((0.003, 0.01))

    def slanted(scores: Tensor) -> Tensor:
        places = torch.arange(scores.shape[-1])
        return (scores.float() - slope * (places[:, None] - places[None]).abs()).softmax(-1)

    return changed_attention(running, lambda how: setattr(how, "softmax", slanted))


@bug("nobody sees the first token", "mask", "key", "first")
def no_first(running: Running) -> Where | None:
    if running.layout != "right":
        return None

    def without(mask: Tensor | None, query: Tensor) -> Tensor | None:
        if mask is None:
            return None
        closed = mask.clone()
        closed[..., 1:, 0] = torch.finfo(mask.dtype).min
        return closed

    return changed_attention(running, lambda how: setattr(how, "mask", without))


@bug("one head's values are one token late", "shift", "token", "head", "cache")
def late_values(running: Running) -> Where | None:
    return changed_attention(running, lambda how: setattr(how, "see", lambda q, k, v: (
        q, k, torch.cat([v[:, :1].roll(1, 2), v[:, 1:]], 1))))  # fmt: skip


@bug("keys of the cache went through int8", "int8", "cache", "quanti")
def int8_keys(running: Running) -> Where | None:
    def narrow(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scale = k.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
        return q, (k / scale).round() * scale, v

    return changed_attention(running, lambda how: setattr(how, "see", narrow))


# MLPs, sums, ends.


def in_activation(running: Running, change: Any) -> Where | None:
    module, mlp, down = running.part("act"), running.part("mlp"), running.part("down")
    if module is None or mlp is None or down is None:
        return None
    around(module, change)
    names = tuple(map(running.name, (module, mlp)))
    return Where(names, (f"{names[0]}.output", f"{running.name(down)}.inputs"))


@bug("an activation is clamped", "clamp", "activation")
def clamped(running: Running) -> Where | None:
    most = running.random.choice((0.3, 0.1))
    return in_activation(running, lambda run, x: run(x).clamp(max=most))


@bug("an activation is the quick approximation", "activation", "gelu", "silu", "sigmoid")
def quick(running: Running) -> Where | None:
    return in_activation(running, lambda _run, x: x * torch.sigmoid(1.702 * x))


@bug("dropout was left on", "drop", "element", "zero")
def dropout(running: Running) -> Where | None:
    down = running.part("down")
    if down is None:
        return None

    def dropping(run: Any, x: Tensor) -> Tensor:
        out: Tensor = run(x)
        kept = torch.rand(out.shape, generator=torch.Generator().manual_seed(1)) > 0.05
        return out * kept / 0.95

    around(down, dropping)
    return at(running, down)


@bug("a residual sum is 2 % too small", "residual", "scal", "factor", "times")
def smaller_sum(running: Running) -> Where | None:
    return with_branch(running, lambda out, _branch: (out.float() * 0.98).to(out.dtype))


@bug("the last branch is added twice", "twice", "residual", "factor")
def branch_twice(running: Running) -> Where | None:
    return with_branch(running, lambda out, branch: out + branch)


@bug("log probabilities are renormalised over the 50 likeliest", "top", "vocab", "normal")
def top_k(running: Running) -> Where | None:
    missing: list[Tensor] = []

    def seen(logits: Tensor) -> Tensor:
        wide = logits.float()
        short = wide.topk(50, -1).values.logsumexp(-1)
        missing.append(functional.pad((wide.logsumexp(-1) - short)[:, :-1], (0, 1)))
        return logits

    running.head = seen
    running.after = lambda logprobs: torch.where(logprobs == 0, logprobs, logprobs + missing.pop())
    return planted.LOGPROBS


@bug("one token of the vocabulary has a logit too large", "vocab", "bias", "normal")
def biased_logit(running: Running) -> Where | None:
    def biased(logits: Tensor) -> Tensor:
        changed = logits.clone()
        changed[..., 2] += 3
        return changed

    running.head = biased
    return planted.LOGPROBS


@bug("routed experts' weights are squared", "rout", "weight", "scal", "factor")
def squared_router(running: Running) -> Where | None:
    router = running.part("router")
    if router is None or running.part("experts") is None:
        return None

    def squared(run: Any, hidden: Tensor) -> Any:
        logits, weights, index = run(hidden)
        return logits, weights * weights, index

    around(router, squared)
    return at(running, router)


@bug("an expert is another's copy", "expert")
def copied_expert(running: Running) -> Where | None:
    where, experts = planted.in_experts(running), running.part("experts")
    if where is None or experts is None:
        return None
    with torch.no_grad():
        for weight in (experts.gate_up_proj, experts.down_proj):
            weight[2] = weight[5]
    return where


# What is right all the same.


@harmless("autocast to bfloat16 over weights in fp32")
def autocast(running: Running) -> bool:
    if next(running.model.parameters()).dtype != torch.float32 or hasattr(running.model.config, "num_experts_per_tok"):
        return False
    run = running.model.forward

    def cast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return run(*args, **kwargs)

    running.model.forward = cast
    return True


@harmless("sums of products in blocks of 16")
def blocked(running: Running) -> bool:
    for module in linears(running):

        def blocks(_run: Any, x: Tensor, module: Any = module) -> Tensor:
            width, total = module.weight.shape[1], None
            for start in range(0, width, 16):
                part = x[..., start : start + 16].float() @ module.weight[:, start : start + 16].float().T
                total = part if total is None else total + part
            assert total is not None
            return (total if module.bias is None else total + module.bias.float()).to(x.dtype)

        around(module, blocks)
    return True


@harmless("norms by a division instead of rsqrt, rounded once")
def divided_norms(running: Running) -> bool:
    for module in rms_norms(running):

        def once(_run: Any, x: Tensor, module: Any = module) -> Tensor:
            wide = x.float()
            normed = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + module.variance_epsilon)
            return (module.weight.float() * normed).to(x.dtype)

        around(module, once)
    return bool(rms_norms(running))


@harmless("activations in fp32, rounded once")
def wide_activation(running: Running) -> bool:
    found = False
    for block in running.base.layers:
        mlp = getattr(block, "mlp", None)
        act = next((one for name in ("act_fn", "act", "activation_fn") if (one := getattr(mlp, name, None))), None)
        if isinstance(act, torch.nn.Module):
            found = True
            around(act, lambda run, x: run(x.double()).to(x.dtype))
    return found


@harmless("the last token's row alone in a wider batch, left padding, sdpa")
def wide_left(running: Running) -> bool:
    running.layout = "left"
    return usual.sdpa(running) or True


@harmless("four ranks, packed, attention in blocks")
def packed_ranks(running: Running) -> bool:
    running.layout = "packed"
    usual.flash(running)
    return in_parts(running, 4, None)


@harmless("products, norms and attention in fp64, rounded once")
def exact(running: Running) -> bool:
    usual.exact_linears(running)
    divided_norms(running)
    return usual.attention_fp32(running)
