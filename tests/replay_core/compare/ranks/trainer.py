"""A tiny language model trained in parallel with plain torch.distributed, and faults planted in how it is.

    trainer.py MODE WEIGHTS [--fault NAME] [--key value ...]

Run by torchrun, or alone. Modes: one, tp, sp, cp (chunks of the sequence, keys and values gathered), dp, ep, pp (two
stages, a tied head), fsdp (fully_shard), dtensor (torch's own tensor parallelism). `pretrain` makes WEIGHTS.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

parser = argparse.ArgumentParser()
parser.add_argument("mode")
parser.add_argument("weights")
parser.add_argument("--fault", default="")
parser.add_argument("--family", default="gated", choices=["gated", "plain"])
for name, value in {
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "vocab": 64,
    "seq": 16,
    "batch": 4,
    "experts": 0,
    "at": 1,
    "seed": 0,
    "dp": 1,
}.items():
    parser.add_argument(f"--{name}", type=int, default=value)
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--clip", type=float, default=0.0)
parser.add_argument("--zigzag", action="store_true")
parser.add_argument("--tied", action="store_true")
option = parser.parse_args()
MODE, FAULT = option.mode, option.fault
RANK, WORLD = 0, 1
if MODE not in ("one", "pretrain"):
    dist.init_process_group("gloo")
    RANK, WORLD = dist.get_rank(), dist.get_world_size()
#: Ranks that follow each other are a group; with --dp the groups have samples of their own.
DP, GROUP, ACROSS = 0, None, None
if option.dp > 1:
    WORLD //= option.dp
    groups = [dist.new_group([*range(number * WORLD, (number + 1) * WORLD)]) for number in range(option.dp)]
    across = [dist.new_group([*range(number, WORLD * option.dp, WORLD)]) for number in range(WORLD)]
    DP, RANK = divmod(RANK, WORLD)
    GROUP, ACROSS = groups[DP], across[RANK]
LAST = WORLD - 1
IS_TP = MODE in ("tp", "sp")


def summed(x: Tensor) -> Tensor:
    if WORLD > 1:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=GROUP)
    return x


def gathered(x: Tensor, dim: int) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(WORLD)]
    dist.all_gather(parts, x.contiguous(), group=GROUP)
    return torch.cat(parts, dim)


def cut(x: Tensor, dim: int, rank: int | None = None) -> Tensor:
    return x.chunk(WORLD, dim)[RANK if rank is None else rank]


class Enter(torch.autograd.Function):
    """Into a tensor-parallel region: nothing forward, a sum backward."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return summed(grad)


class Leave(torch.autograd.Function):
    """Out of one: a sum forward, nothing backward."""

    @staticmethod
    def forward(_: Any, x: Tensor, lost: bool) -> Tensor:
        return summed(x * 0 if lost else x)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Gather(torch.autograd.Function):
    """Slices of a dimension put together; backward the ranks' gradients are summed and cut again."""

    @staticmethod
    def forward(context: Any, x: Tensor, dim: int) -> Tensor:
        context.dim = dim
        return gathered(x, dim)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:
        return cut(summed(grad), context.dim), None


class Scatter(torch.autograd.Function):
    """A sum over the ranks, of which each keeps its slice; backward the slices are put together."""

    @staticmethod
    def forward(context: Any, x: Tensor, dim: int) -> Tensor:
        context.dim = dim
        return cut(summed(x), dim)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gathered(grad, context.dim), None


class Slice(torch.autograd.Function):
    """One's slice of what all hold; backward the slices are put together."""

    @staticmethod
    def forward(context: Any, x: Tensor, dim: int) -> Tensor:
        context.dim = dim
        return cut(x, dim)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gathered(grad, context.dim), None


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(option.hidden))
        if option.family == "plain":
            self.bias = nn.Parameter(torch.zeros(option.hidden))

    def forward(self, x: Tensor) -> Tensor:
        if option.family == "plain":
            return nn.functional.layer_norm(x, (option.hidden,), self.weight, self.bias)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def turned(x: Tensor, positions: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angle = positions[:, None, :, None] * (100.0 ** (-torch.arange(half) / half))
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)


class Attention(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, width = number, option.hidden
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(width, width, bias=False))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, option.hidden // option.heads)).transpose(1, 2)

        q, k, v = (heads(made(x)) for made in (self.q_proj, self.k_proj, self.v_proj))
        q, k, of_keys = turned(q, positions), turned(k, positions), positions
        if MODE == "cp":
            k, v = Gather.apply(k, 2), Gather.apply(v, 2)
            of_keys = gathered(positions, 1)
            if FAULT == "cp_keys_order" and self.number == option.at:
                of_keys = torch.cat(of_keys.chunk(WORLD, 1)[::-1], 1)
        allowed = of_keys[:, None, None, :] <= positions[:, None, :, None]
        scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        y = scores.masked_fill(~allowed, -1e9).softmax(-1) @ v
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        wide = 2 * option.hidden
        if option.family == "gated":
            self.gate_proj = nn.Linear(option.hidden, wide, bias=False)
        self.up_proj, self.down_proj = (
            nn.Linear(option.hidden, wide, bias=False),
            nn.Linear(wide, option.hidden, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(
            silu(self.gate_proj(x)) * self.up_proj(x) if option.family == "gated" else gelu(self.up_proj(x))
        )


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(option.hidden, option.experts, bias=False)
        mine = self._mine() if MODE == "ep" else range(option.experts)
        self.experts = nn.ModuleDict({str(number): MLP() for number in mine})

    @staticmethod
    def _mine() -> list[int]:
        each = option.experts // WORLD
        return list(range(RANK * each, (RANK + 1) * each))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).topk(2, -1)
        x = Enter.apply(x) if MODE == "ep" else x
        weight = Enter.apply(weight) if MODE == "ep" else weight
        y = torch.zeros_like(x)
        for number, expert in self.experts.items():
            said = int(number)
            if FAULT == "ep_router":
                said = (said + option.experts // WORLD) % option.experts
            y = y + expert(x) * (weight * (chosen == said)).sum(-1, keepdim=True)
        self.part = y
        return Leave.apply(y, FAULT == "ep_missing" and RANK == LAST) if MODE == "ep" else y


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.input_layernorm, self.self_attn = Norm(), Attention(number)
        self.post_attention_layernorm, self.mlp = Norm(), Experts() if option.experts else MLP()

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + dropped(
            self._out(self.self_attn(self._in(self.input_layernorm(x)), positions), "attn"), 2 * self.number
        )
        if option.experts:
            y = self.mlp(self.post_attention_layernorm(x))
            self.part = self.mlp.part
            return x + y
        self.part = self.mlp(self._in(self.post_attention_layernorm(x)))
        return x + dropped(self._out(self.part, "mlp"), 2 * self.number + 1)

    def _in(self, x: Tensor) -> Tensor:
        if FAULT == "unsummed_input_gradient" and self.number == option.at:
            return x
        return Gather.apply(x, 1) if MODE == "sp" else Enter.apply(x) if MODE == "tp" else x

    def _out(self, x: Tensor, part: str) -> Tensor:
        here = self.number == option.at and part == "mlp"
        if FAULT == "unreduced" and here:
            return x
        lost = FAULT == "forward_missing" and here and RANK == LAST
        return Scatter.apply(x, 1) if MODE == "sp" else Leave.apply(x, lost) if MODE == "tp" else x


def dropped(x: Tensor, site: int) -> Tensor:
    """Masks of a whole batch, of which a rank takes what is its own."""
    if not option.dropout:
        return x
    wanted = 1000 + site
    if FAULT == "dropout_differs":
        wanted += 77 * RANK
    whole = (
        torch.rand((option.batch, option.seq, option.hidden), generator=torch.Generator().manual_seed(wanted))
        >= option.dropout
    )
    mine = 0 if FAULT == "dropout_equal" else RANK
    if MODE in ("dp", "fsdp"):
        whole = cut(whole, 0, mine)
    if MODE in ("cp", "sp"):
        whole = whole[:, places(mine)]
    return x * whole / (1 - option.dropout)


def places(rank: int) -> Tensor:
    """Which tokens of a sequence are a rank's."""
    whole = torch.arange(option.seq)
    if MODE == "cp" and option.zigzag:
        chunks = whole.chunk(2 * WORLD)
        return torch.cat((chunks[rank], chunks[2 * WORLD - 1 - rank]))
    return cut(whole, 0, rank)


class Model(nn.Module):
    """A pipeline's first rank has the embedding and the first layers, the second the others and the head."""

    def __init__(self) -> None:
        super().__init__()
        half = option.layers // 2
        mine = range(option.layers) if MODE != "pp" else range(half) if RANK == 0 else range(half, option.layers)
        self.layers = nn.ModuleDict({str(number): Layer(number) for number in mine})
        if MODE != "pp" or RANK == 0:
            self.embed_tokens = nn.Embedding(option.vocab, option.hidden)
        if MODE != "pp" or RANK == 1:
            self.norm, self.lm_head = Norm(), nn.Linear(option.hidden, option.vocab, bias=False)
        if option.tied and MODE != "pp":
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self, position_ids: Tensor, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None,
        target_ids: Tensor | None = None, advantages: Tensor | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        x = inputs_embeds if input_ids is None else self.embed_tokens(input_ids)
        x = Slice.apply(x, 1) if MODE == "sp" else x
        hidden, parts = {}, {}
        if input_ids is not None:
            x = hidden["embedded"] = dropped(x, 99)
        for number, layer in self.layers.items():
            x = hidden[number] = layer(x, position_ids)
            parts[number] = layer.part
        made: dict[str, Any] = {"mlp_parts": parts, "hidden_states": hidden}
        if target_ids is None or advantages is None:
            return made
        x = self.norm(x)
        x = Gather.apply(x, 1) if MODE == "sp" else Enter.apply(x) if MODE == "tp" else x
        logits = self.lm_head(x)
        logprobs = self._logprobs(logits, target_ids)
        return made | {"logits": logits, "logprobs": logprobs, "loss": self._loss(logprobs, advantages)}

    @staticmethod
    def _logprobs(logits: Tensor, targets: Tensor) -> Tensor:
        if not IS_TP:
            return logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        start = RANK * logits.shape[-1]
        local = (targets - start).clamp(0, logits.shape[-1] - 1)
        own = (targets >= start) & (targets < start + logits.shape[-1])
        most = logits.detach().amax(-1)
        if FAULT != "vocab_without_max":
            dist.all_reduce(most, dist.ReduceOp.MAX, group=GROUP)
        total = (logits - most[..., None]).exp().sum(-1)
        total = total if FAULT == "vocab_local_sum" else Leave.apply(total, False)
        chosen = torch.where(own, logits.gather(-1, local[..., None])[..., 0] - most, 0.0)
        return Leave.apply(chosen, False) - total.log()

    @staticmethod
    def _loss(logprobs: Tensor, advantages: Tensor) -> Tensor:
        return -(logprobs * advantages).sum() / (
            option.batch * option.seq / (WORLD if MODE in ("dp", "fsdp") else option.dp)
        )


#: Along which dimension a tensor-parallel rank holds a slice.
CUT = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 0, "up_proj": 0, "down_proj": 1, "lm_head": 0}


def loaded(model: Model) -> None:
    state = torch.load(option.weights)
    for name, weight in dict(model.named_parameters()).items():
        kind = name.split(".")[-2]
        value = state["embed_tokens.weight" if option.tied and name == "lm_head.weight" else name]
        if FAULT == "ep_experts" and MODE == "ep" and ".experts." in name:
            parts = name.split(".")
            number = parts.index("experts") + 1
            parts[number] = str((int(parts[number]) + option.experts // WORLD) % option.experts)
            value = state[".".join(parts)]
        if IS_TP and kind in CUT:
            swapped = FAULT == "shard_order" and kind == "o_proj" and f"layers.{option.at}." in name
            value = cut(value, CUT[kind], (WORLD - 1 - RANK) if swapped else RANK).clone()
        weight.data = value


def batch(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(100 + step + 1000 * option.seed)
    half = torch.randint(2, option.vocab, (option.batch, option.seq // 2 + 1), generator=draw)
    tokens = torch.cat((half, half), 1)[:, : option.seq + 1]
    # Every sample has tokens of its own, so that what it alone teaches can be told.
    whole = {
        "input_ids": tokens[:, :-1], "position_ids": torch.arange(option.seq).repeat(option.batch, 1),
        "target_ids": tokens[:, 1:], "advantages": torch.rand((option.batch, option.seq), generator=draw) + 0.25,
    }  # fmt: skip
    if option.dp > 1:
        whole = {name: x.chunk(option.dp)[DP] for name, x in whole.items()}
    if MODE in ("dp", "fsdp"):
        return {name: cut(x, 0, 0 if FAULT == "dp_same_data" else RANK) for name, x in whole.items()}
    if MODE != "cp":
        return whole
    at = places(RANK)
    if FAULT == "cp_boundary" and RANK == LAST:
        at = (at - 1).clamp(0)
    if FAULT == "cp_order":
        at = places(WORLD - 1 - RANK)
    given = {name: x[:, at] for name, x in whole.items()}
    if FAULT == "cp_order":
        given["position_ids"] = places(RANK).repeat(option.batch, 1)
    if FAULT == "cp_positions":
        given["position_ids"] = torch.arange(at.numel()).repeat(option.batch, 1)
    return given


def reduce_gradients(model: Model, step: int) -> None:
    if MODE in ("one", "fsdp", "dtensor", "pretrain", "ep", "pp"):
        return
    for name, weight in model.named_parameters():
        kind = name.split(".")[-2]
        is_norm = "norm" in kind
        if IS_TP and (kind in CUT or MODE == "tp" or not is_norm):
            if FAULT == "double_sum" and is_norm and f"layers.{option.at}." in name:
                weight.grad = summed(weight.grad)
            continue
        here = f"layers.{option.at}." in name
        if FAULT == "norm_unsummed" and is_norm and (here or "layers" not in name):
            continue
        grad = weight.grad
        if FAULT == "one_missing" and RANK == LAST:
            grad = grad * 0
        if FAULT == "one_apart" and RANK == LAST and here:
            dist.all_reduce(grad * 0)
            continue
        grad = summed(grad)
        if FAULT == "double_sum" and here and is_norm:
            grad = summed(grad)
        if MODE == "dp" and FAULT != "sum_for_mean":
            grad = grad / WORLD
        if MODE == "cp" and FAULT == "mean_for_sum":
            grad = grad / WORLD
        weight.grad = grad


def clip(model: Model) -> None:
    if not option.clip:
        return
    total = torch.zeros(())
    for name, weight in model.named_parameters():
        grad = weight.grad.full_tensor() if hasattr(weight.grad, "full_tensor") else weight.grad
        square = grad.square().sum()
        if IS_TP and name.split(".")[-2] in CUT and FAULT != "clip_local":
            square = summed(square)
        total = total + square
    factor = option.clip / total.sqrt().clamp(min=option.clip)
    for weight in model.parameters():
        weight.grad = weight.grad * factor


def backward(model: Any, given: dict[str, Tensor]) -> None:
    if MODE != "pp":
        model(**given)["loss"].backward()
        return
    shape = (option.batch // option.dp, option.seq, option.hidden)
    first, second = DP * WORLD, DP * WORLD + 1
    if RANK == 0:
        last = list(model(given["position_ids"], given["input_ids"])["hidden_states"].values())[-1]
        dist.send(last.detach().contiguous(), second)
        grad = torch.empty(shape)
        dist.recv(grad, second)
        last.backward(grad)
        weight = model.embed_tokens.weight
    else:
        handed = torch.empty(shape)
        dist.recv(handed, first)
        handed.requires_grad_()
        rest = {name: given[name] for name in ("position_ids", "target_ids", "advantages")}
        model(inputs_embeds=handed, **rest)["loss"].backward()
        dist.send(handed.grad, first)
        weight = model.lm_head.weight
    if option.tied and FAULT != "tied_unsummed":
        weight.grad = summed(weight.grad)


def main() -> None:
    torch.manual_seed(option.seed)
    model: Any = Model()
    if MODE == "pretrain":
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        for step in range(80):
            model(**batch(step + 10)).get("loss").backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.save(model.state_dict(), option.weights)
        return
    loaded(model)
    if MODE == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in model.layers.values():
            fully_shard(layer)
        fully_shard(model)
    if MODE == "dtensor":
        model = by_torch(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        backward(model, batch(step))
        reduce_gradients(model, step)
        if option.dp > 1 and FAULT != "dp_unreduced":
            for weight in model.parameters():
                dist.all_reduce(weight.grad, group=ACROSS)
                weight.grad /= option.dp
        clip(model)
        if FAULT == "no_update" and RANK == LAST and step == 0:
            for weight in model.parameters():
                weight.grad = weight.grad * 0
        optimizer.step()
        optimizer.zero_grad()
    if dist.is_initialized():
        dist.destroy_process_group()


def by_torch(model: Model) -> Model:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    for name, _ in model.named_modules():
        kind = name.rpartition(".")[2]
        if kind in CUT and kind != "lm_head":
            plan[name] = RowwiseParallel() if CUT[kind] else ColwiseParallel()
    return parallelize_module(model, init_device_mesh("cpu", (WORLD,)), plan)


main()
