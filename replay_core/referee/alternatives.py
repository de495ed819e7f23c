"""What a module may have done instead of its own work: its hypotheses, by what the module is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from replay_core.referee import attending, changes
from replay_core.referee.arithmetic import TrueTensor
from replay_core.referee.hypotheses import Hypothesis
from replay_core.referee.shadow import Claim, Shadow
from replay_core.referee.weights import Checkpoint

#: Epsilons, rotary bases and window factors that models and engines use.
EPSILONS = ("variance_epsilon", "eps", "epsilon")
_USED_EPSILONS = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-12, 0.0)
_BASES = (1e4, 1e5, 2.5e5, 5e5, 1e6, 5e6, 1e7)
_FACTORS = (0.5, 2.0, 4.0, 8.0)
_RANKS = (2, 4, 8)


def alternatives(shadow: Shadow, claim: Claim, others: Sequence[Checkpoint]) -> Iterator[Hypothesis]:
    """Everything that is tried on the owner of a claim. `others`: weights that the side may have run with."""
    if claim.kind == "logprobs":
        yield from _logprobs(shadow, claim)
        return
    module = shadow.module(claim.owner)
    for other in others:
        # Rounded as the side rounded its own.
        values = {
            part: value
            for part, parameter in module.named_parameters(recurse=False)
            if (value := other.like(f"{claim.owner}.{part}", parameter)) is not None
        }
        if any(not torch.equal(value, getattr(module, part)) for part, value in values.items()):
            yield Hypothesis(other.name, changes.parameters(values))
            # Between the two: an average, a sync that was cut short.
            for part in (0.5, 0.1, 0.01):
                mixed = {key: torch.lerp(getattr(module, key).float(), value.float(), part).to(value.dtype)
                         for key, value in values.items()}  # fmt: skip
                yield Hypothesis(f"{part:g} of the way to {other.name}", changes.parameters(mixed))
    yield from _neighbours(shadow, module, claim)
    for setting in EPSILONS:
        value = getattr(module, setting, None)
        if isinstance(value, float):
            for one in dict.fromkeys((*_USED_EPSILONS, value * 10, value / 10)):
                if one != value:
                    yield Hypothesis(f"{setting} {one:g} instead of {value:g}", changes.attribute(setting, one))
    if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
        yield from _rotary(module)
    if claim.kind == "norm":
        yield from _norm(module)
    if isinstance(module, torch.nn.Linear):
        yield from _linear(module, claim)
    if claim.kind == "attention":
        yield from attending.alternatives(shadow, module)
    if claim.kind == "router":
        yield from _router(module)
    if claim.kind == "experts":
        yield from _experts(module)
    yield from _settings(module)
    yield from _children(module, claim)
    if claim.kind in ("norm", "attention", "router", "mlp", "rope", "logprobs") and claim.dtype != torch.float32:
        short = str(claim.dtype).removeprefix("torch.")
        yield Hypothesis(f"computed in {short} within, in half precision", changes.nothing(), coarse=claim.dtype)


def _neighbours(shadow: Shadow, module: Any, claim: Claim) -> Iterator[Hypothesis]:
    """The weights of another module of the same shape: beside it, or the same of the layer before or behind."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim == 0 or "." not in claim.owner:
        return
    parts = claim.owner.split(".")
    names = [".".join([*parts[:-1], child]) for child, _ in shadow.module(".".join(parts[:-1])).named_children()]
    number = next((at for at, part in enumerate(parts) if part.isdecimal()), None)
    if number is not None:
        names += [".".join([*parts[:number], str(int(parts[number]) + by), *parts[number + 1 :]]) for by in (-1, 1)]
    for name in names:
        other: Any = shadow.find(name)
        theirs = getattr(other, "weight", None)
        if name != claim.owner and isinstance(theirs, torch.Tensor) and theirs.shape == weight.shape:
            values = {"weight": theirs}
            if module._parameters.get("bias") is not None and other._parameters.get("bias") is not None:
                values["bias"] = other.bias
            yield Hypothesis(f"the weights of {name}, swapped", changes.parameters(values))


def _logprobs(shadow: Shadow, claim: Claim) -> Iterator[Hypothesis]:
    own, logits = shadow.scoring, shadow.logits
    yield Hypothesis(
        f"log-probabilities at temperature {{value:.3g}} times {shadow.temperature:g}", changes.nothing(),
        value=lambda x: changes.attribute("scoring", lambda z, at, ids: own(z, at * (1 + x), ids)),
    )  # fmt: skip
    for what, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        coarse = changes.attribute("scoring", lambda z, at, ids, dtype=dtype: own(changes.plainly(
            lambda x: x.to(dtype).double(), z.float()), at, ids))  # fmt: skip
        yield Hypothesis(f"logits in {what}, half precision", coarse)
    if logits is None:
        return
    with _disable_current_modes():
        # Every cut of the vocabulary at once: the normaliser over its first n tokens.
        whole = torch.logcumsumexp((logits.true if isinstance(logits, TrueTensor) else logits.double()), -1)
        short = whole[:, -1:] - whole
        apart = (claim.recorded - claim.truth)[:, 0]
        left = (apart[:, None] - short).square().sum(0)
        cut = int(left.argmin()) + 1
    if cut < whole.shape[-1]:
        yield Hypothesis(
            f"the vocabulary from token {cut} on is missing from the normaliser's sum",
            changes.attribute("scoring", lambda z, at, ids: own(z, at, ids, cut)),
        )


def _times(what: str) -> Callable[[float], str]:
    """What leaving out `what` alpha times is called."""

    def said(alpha: float) -> str:
        factor = 1 - alpha
        if abs(factor) < 0.02:
            return f"{what} left out"
        if abs(factor - round(factor)) < 0.02 and factor > 1:
            return f"{what} added {'twice' if round(factor) == 2 else f'{round(factor)} times'}"
        return f"{what} scaled by a factor of {factor:.3g}"

    return said


def _rotary(module: Any) -> Iterator[Hypothesis]:
    held = {name: value for name, value in module.named_buffers(recurse=False) if name.endswith("inv_freq")}
    for dtype in (torch.bfloat16, torch.float16):
        yield Hypothesis(
            f"rotary frequencies in {str(dtype).removeprefix('torch.')}",
            changes.buffers({name: value.to(dtype).float() for name, value in held.items()}), harmless=True,
        )  # fmt: skip
    frequencies = max(held.values(), key=lambda value: value.numel())
    own = float((frequencies[0] / frequencies[-1]) ** (len(frequencies) / max(1, len(frequencies) - 1)))
    for base in dict.fromkeys((*_BASES, *(float(f"{own * factor:.3g}") for factor in (0.01, 0.1, 10, 50, 100)))):
        made = {}
        for name, value in held.items():
            head = 2 * value.numel()
            made[name] = 1.0 / base ** (torch.arange(0, head, 2, dtype=torch.float32) / head)
        yield Hypothesis(f"rotary base (theta) {base:g} instead of {own:.3g}", changes.buffers(made))
    for factor in _FACTORS:
        made = {name: value / factor for name, value in held.items()}
        yield Hypothesis(f"rotary positions divided by {factor:g}", changes.buffers(made))
    for by in (1, -1):
        yield Hypothesis(f"rotary positions {by:+d}", changes.forward(_at_positions(by)))
    if isinstance(getattr(module, "attention_scaling", None), float):
        yield Hypothesis("rotary scaling 1", changes.attribute("attention_scaling", 1.0))


def _at_positions(by: int) -> Callable[..., Any]:
    def run(own: Any, x: Any, position_ids: Any, *args: Any, **kwargs: Any) -> Any:
        return own(x, position_ids + by, *args, **kwargs)

    return run


def _norm(module: Any) -> Iterator[Hypothesis]:
    if isinstance(getattr(module, "weight", None), torch.Tensor):
        weight = module.weight
        for plain in (torch.ones_like(weight), torch.zeros_like(weight)):
            yield Hypothesis("the norm's weight left out", changes.parameters({"weight": plain}))
        yield Hypothesis("1 + weight instead of weight", changes.parameters({"weight": weight + 1}))
        yield Hypothesis("weight instead of 1 + weight", changes.parameters({"weight": weight - 1}))
    yield Hypothesis("the norm skipped, an identity", changes.forward(lambda _own, x, *_: x))
    if not isinstance(module, torch.nn.LayerNorm):
        yield Hypothesis(
            "the mean subtracted, as LayerNorm does", changes.forward(lambda own, x: own(x - x.mean(-1, keepdim=True)))
        )


def _linear(module: torch.nn.Linear, claim: Claim) -> Iterator[Hypothesis]:
    weight = module.weight
    rows, columns = weight.shape
    if module.bias is not None:
        without = changes.parameters({"bias": torch.zeros_like(module.bias)})
        yield Hypothesis("the bias", without, sized=_times("the bias"))
    for ranks in _RANKS:
        if columns % ranks == 0 and columns // ranks >= 4:
            for way in ("one after the other", "in pairs", "in float32"):
                name = f"{ranks} ranks' sums, each rounded, added {way}"
                ends = ("last",) if module.bias is None else ("last", "first", "with the sum")
                yield from (Hypothesis(name, changes.partial_sums(ranks, way, end), harmless=True) for end in ends)
    for ranks in _RANKS:
        part = columns // ranks
        if columns % ranks:
            continue
        for rank in range(ranks):
            kept = weight.clone()
            kept[:, rank * part : (rank + 1) * part] = 0
            what = f"the partial sum of rank {rank} of {ranks}"
            yield Hypothesis(what, changes.parameters({"weight": kept}), sized=_times(what))
    for what, made in (
        ("int8, a scale per row", integer_grid(weight, 127, per_row=True)),
        ("int8, one scale", integer_grid(weight, 127, per_row=False)),
        ("int4, a scale per row", integer_grid(weight, 7, per_row=True)),
        ("float8 (e4m3, fp8), a scale per row", float8_grid(weight, True)),
        ("float8 (e4m3, fp8), one scale", float8_grid(weight, False)),
        ("float8 (e4m3, fp8), no scale", weight.float().clamp(-448, 448).to(torch.float8_e4m3fn).to(weight.dtype)),
        ("bfloat16", weight.to(torch.bfloat16).to(weight.dtype)),
    ):
        yield Hypothesis(f"weights in {what}", changes.parameters({"weight": made}))
    for what, grid in (
        ("int8, a scale per token", _int8_rows),
        ("float8 (e4m3, fp8), a scale per token", _float8_rows),
    ):
        yield Hypothesis(f"inputs in {what}", changes.forward(_with_inputs(grid)))
    if claim.dtype == torch.float32:
        yield Hypothesis("computed in bfloat16", changes.nothing(), coarse=torch.bfloat16)
    if rows == columns:
        yield Hypothesis("the weight transposed", changes.parameters({"weight": weight.T.contiguous()}))


def _with_inputs(grid: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    return lambda own, x: own(changes.plainly(grid, x))


def _int8_rows(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
    return (x / scale).round() * scale


def _float8_rows(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 448
    return (x / scale).float().to(torch.float8_e4m3fn).double() * scale


def _router(module: Any) -> Iterator[Hypothesis]:
    bias = module._buffers.get("e_score_correction_bias")
    if bias is not None:
        without = changes.buffers({"e_score_correction_bias": torch.zeros_like(bias)})
        yield Hypothesis("the correction bias of the router left out", without)

    def fewer(own: Any, *args: Any, **kwargs: Any) -> Any:
        logits, weights, *rest = own(*args, **kwargs)
        kept = weights.scatter(-1, weights.argmin(-1, keepdim=True), 0.0)
        return (logits, kept * (weights.sum(-1, keepdim=True) / kept.sum(-1, keepdim=True)), *rest)

    def raw(scores: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
        def run(own: Any, *args: Any, **kwargs: Any) -> Any:
            logits, weights, index, *rest = own(*args, **kwargs)
            factor = getattr(module, "routed_scaling_factor", 1.0)
            return (logits, (scores(logits.float()).gather(-1, index) * factor).to(weights.dtype), index, *rest)

        return run

    yield Hypothesis("the router takes one expert fewer (top k - 1)", changes.forward(fewer))
    for what, scores in (("softmax", lambda one: one.softmax(-1)), ("sigmoid", torch.sigmoid)):
        yield Hypothesis(
            f"the router's {what} scores not normalised over the chosen experts", changes.forward(raw(scores))
        )


def _experts(module: Any) -> Iterator[Hypothesis]:
    def slot(at: int) -> Callable[..., Any]:
        def run(own: Any, hidden: Any, index: Any, weights: Any, *args: Any) -> Any:
            kept = weights.clone()
            kept[..., at] = 0
            return own(hidden, index, kept, *args)

        return run

    most = int(getattr(getattr(module, "config", None), "num_experts_per_tok", 0) or 8)
    for at in range(most):
        yield Hypothesis(f"the expert of choice {at} left out, dropped", changes.forward(slot(at)))
    stacks = {name: value for name, value in module._parameters.items() if value is not None and value.ndim == 3}
    count = min((len(value) for value in stacks.values()), default=0)
    if 1 < count <= 16:
        for one in range(count):
            for other in range(one):
                order = list(range(count))
                order[one], order[other] = other, one
                made = {name: value[order] for name, value in stacks.items()}
                yield Hypothesis(f"experts {other} and {one} swapped", changes.parameters(made))


def _settings(module: Any) -> Iterator[Hypothesis]:
    """Numbers and switches that a module keeps, at what they are where somebody forgot them."""
    for setting, values in _FORGOTTEN.items():
        value = getattr(module, setting, None)
        if isinstance(value, (int, float, bool)) or (value is None and hasattr(module, setting)):
            for one in values:
                made = one(value) if callable(one) else one
                if made != value and not (value is None and made is not None and setting != "sliding_window"):
                    said = f"{setting} {_said(made)} instead of {_said(value)}"
                    yield Hypothesis(said, changes.attribute(setting, made))
    head = getattr(module, "head_dim", None)
    scaling = getattr(module, "scaling", None)
    if isinstance(scaling, float):
        for made in (1.0, *((head**-0.5, float(head) ** -1) if isinstance(head, int) else ())):
            if made != scaling:
                said = f"not scaled: scaling {made:g} instead of {scaling:g}"
                yield Hypothesis(said, changes.attribute("scaling", made))
        yield Hypothesis(
            f"scaling {{value:.3g}} times its {scaling:.4g}", changes.nothing(),
            value=lambda x: changes.attribute("scaling", scaling * (1 + x)),
        )  # fmt: skip
    choices = (torch.nn.SiLU(), torch.nn.GELU(), torch.nn.GELU(approximate="tanh"), torch.nn.ReLU())
    for setting in ("act_fn", "act", "activation_fn"):
        if isinstance(getattr(module, setting, None), torch.nn.Module):
            yield from (Hypothesis(f"activation {one}", changes.attribute(setting, one)) for one in choices)
    if "activation" in type(module).__module__ or type(module).__module__.endswith("modules.activation"):
        yield from (
            Hypothesis(f"activation {one}", changes.forward(lambda _own, x, one=one: one(x))) for one in choices
        )


_FORGOTTEN: dict[str, tuple[Any, ...]] = {
    "routed_scaling_factor": (1.0,),
    "norm_topk_prob": (lambda value: not value,),
    "top_k": (lambda value: value + 1, lambda value: max(1, value - 1)),
    "attn_logit_softcapping": (None, 30.0, 50.0),
    "final_logit_softcapping": (None,),
    "softmax_scale": (1.0,),
}


def _children(module: Any, claim: Claim) -> Iterator[Hypothesis]:
    """Parts of a sum: what a child of a composite adds, left out, twice, or by a factor."""
    if claim.kind in ("linear", "norm", "embedding", "rope", "attention", "logprobs"):
        return
    for name, _ in module.named_children():
        what = f"{claim.owner}.{name}'s part"
        yield Hypothesis(what, changes.output_times(name, 0.0), sized=_times(what))


def _said(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def integer_grid(weight: torch.Tensor, steps: int, *, per_row: bool) -> torch.Tensor:
    """A matrix on a symmetric integer grid of so many steps a side (127: int8), a scale per row or one of all."""
    scale = (weight.float().abs().amax(1, keepdim=True) if per_row else weight.float().abs().max()) / steps
    scale = scale.clamp(min=1e-30)
    return ((weight.float() / scale).round().clamp(-steps, steps) * scale).to(weight.dtype)


def float8_grid(weight: torch.Tensor, per_row: bool) -> torch.Tensor:
    """A matrix in float8 e4m3, scaled so that its largest value is 448: a scale per row, or one of all."""
    scale = (weight.float().abs().amax(1, keepdim=True) if per_row else weight.float().abs().max()) / 448.0
    scale = scale.clamp(min=1e-30)
    return ((weight.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(weight.dtype)
