"""What may have been done instead: a change of one module, under which its inputs give its outputs.

A hypothesis is a change of the running module (its weight, a setting, a buffer). The module is run again on its
recorded inputs with the change in place, and what was recorded is held against that truth with the same noise. It
explains the error if noise is left. Ranked by what is left, never by how far a change points the right way: a wrong one
points there too when the error is large.

Some changes are kernels' own and harmless: sums over ranks rounded between, rotary frequencies kept in the model's
dtype. They are recipes: what they explain is no bug, and is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from replay_core.referee.arithmetic import TrueTensor
from replay_core.referee.figures import ErrorFigures, figures
from replay_core.referee.shadow import Claim, Shadow

#: Epsilons, rotary bases and window factors that models and engines use.
_EPSILONS = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-12, 0.0)
_BASES = (1e4, 1e5, 2.5e5, 5e5, 1e6, 5e6, 1e7)
_FACTORS = (0.5, 2.0, 4.0, 8.0)
_RANKS = (2, 4, 8)
#: Of a right recipe at most this share of elements is not bitwise what was recorded, a fifth of what any other leaves.
_UNEQUAL = 0.03
#: A harmless recipe changes a tensor by at most so much of its size; beyond, it is a fault of precision: frequencies in
#: bfloat16 turn whole radians at position 1000.
HARMLESS = 0.02


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A change of a module: `change(module)` makes it for as long as it is open. harmless: a kernel's own way."""

    name: str
    change: Callable[[Any], Any]
    harmless: bool = False


@dataclass(frozen=True, slots=True)
class Tried:
    """A hypothesis and what it leaves of the error."""

    hypothesis: Hypothesis
    before: ErrorFigures
    after: ErrorFigures

    @property
    def explains(self) -> bool:
        after, before = self.after, self.before
        if (
            self.hypothesis.harmless
            and after.unequal_once <= _UNEQUAL
            and after.unequal_once * 5 <= before.unequal_once
        ):
            # A partial sum beside a half is rounded up by one kernel and down by another: rare, and never far.
            return after.largest <= 2.0
        return after.excess < 1 and after.excess < 0.5 * before.excess


def tried(
    shadow: Shadow,
    claim: Claim,
    noises: list[torch.Tensor],
    before: ErrorFigures,
    others: Mapping[str, Any],
    *,
    only_harmless: bool = False,
) -> list[Tried]:
    """Every hypothesis of the claim's owner, the one that leaves least first. `others`: name -> state dict of other
    weights that the side may have run with."""
    module = shadow.module(claim.owner)
    found = []
    for one in hypotheses(module, claim, others):
        if only_harmless and not one.harmless:
            continue
        try:
            moved = shadow.again(claim, one.change(module))
        except (RuntimeError, TypeError, ValueError, IndexError):
            continue  # A change that the module's own code does not run with is none that was made.
        if moved is not None and moved.shape == claim.truth.shape and moved.isfinite().all():
            found.append(Tried(one, before, figures(claim, noises, truth=claim.truth + moved)))
    return sorted(found, key=lambda one: one.after.excess)


def hypotheses(module: Any, claim: Claim, others: Mapping[str, Any]) -> Iterator[Hypothesis]:
    """What may have been done instead of a module's own work."""
    for name, state in others.items():
        own = {f"{claim.owner}.{part}": part for part, _ in module.named_parameters(recurse=False)}
        # Rounded as the side rounded its own.
        values = {
            part: value.to(getattr(module, part).dtype)
            for path, part in own.items()
            if (value := _like(state, path)) is not None
        }
        if any(not torch.equal(value, getattr(module, part)) for part, value in values.items()):
            yield Hypothesis(name, _parameters(values))
    for setting in ("variance_epsilon", "eps", "epsilon"):
        value = getattr(module, setting, None)
        if isinstance(value, float):
            yield from (Hypothesis(f"{setting} {one:g} instead of {value:g}", _attribute(setting, one))
                        for one in _EPSILONS if one != value)  # fmt: skip
    if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
        yield from _rotary(module)
    if claim.kind == "norm" and isinstance(getattr(module, "weight", None), torch.Tensor):
        weight = module.weight
        yield Hypothesis("the weight left out", _parameters({"weight": torch.ones_like(weight)}))
        yield Hypothesis("1 + weight instead of weight", _parameters({"weight": weight + 1}))
        yield Hypothesis("weight instead of 1 + weight", _parameters({"weight": weight - 1}))
    if isinstance(module, torch.nn.Linear):
        yield from _linear(module)
    yield from _settings(module)


def _rotary(module: Any) -> Iterator[Hypothesis]:
    held = {name: value for name, value in module.named_buffers(recurse=False) if name.endswith("inv_freq")}
    for dtype in (torch.bfloat16, torch.float16):
        yield Hypothesis(
            f"rotary frequencies in {str(dtype).removeprefix('torch.')}",
            _buffers({name: value.to(dtype).float() for name, value in held.items()}), harmless=True,
        )  # fmt: skip
    for base in _BASES:
        made = {}
        for name, value in held.items():
            head = 2 * value.numel()
            made[name] = 1.0 / base ** (torch.arange(0, head, 2, dtype=torch.float32) / head)
        yield Hypothesis(f"rotary base {base:g}", _buffers(made))
    for factor in _FACTORS:
        made = {name: value / factor for name, value in held.items()}
        yield Hypothesis(f"rotary positions divided by {factor:g}", _buffers(made))
    if isinstance(getattr(module, "attention_scaling", None), float):
        yield Hypothesis("rotary scaling 1", _attribute("attention_scaling", 1.0))


def _linear(module: torch.nn.Linear) -> Iterator[Hypothesis]:
    weight = module.weight
    rows, columns = weight.shape
    if module.bias is not None:
        yield Hypothesis("the bias left out", _parameters({"bias": torch.zeros_like(module.bias)}))
        yield Hypothesis("the bias added twice", _parameters({"bias": module.bias * 2}))
    for ranks in _RANKS:
        if columns % ranks == 0 and columns // ranks >= 4:
            for way in ("one after the other", "in pairs", "in float32"):
                name = f"{ranks} ranks' sums, each rounded, added {way}"
                yield Hypothesis(name, _partial_sums(ranks, way, "last"), harmless=True)
                if module.bias is not None:
                    yield Hypothesis(name, _partial_sums(ranks, way, "first"), harmless=True)
                    yield Hypothesis(name, _partial_sums(ranks, way, "with the sum"), harmless=True)
    for ranks in (2, 4):
        part = columns // ranks
        if columns % ranks:
            continue
        for rank in range(ranks):
            kept = weight.clone()
            kept[:, rank * part : (rank + 1) * part] = 0
            yield Hypothesis(f"the sum of rank {rank} of {ranks} left out", _parameters({"weight": kept}))
    yield Hypothesis("weights in int8, a scale per row", _parameters({"weight": _grid(weight, 127, per_row=True)}))
    yield Hypothesis("weights in int8, one scale", _parameters({"weight": _grid(weight, 127, per_row=False)}))
    yield Hypothesis("weights in float8 (e4m3), a scale per row", _parameters({"weight": _float8(weight, True)}))
    yield Hypothesis("weights in float8 (e4m3), one scale", _parameters({"weight": _float8(weight, False)}))
    yield Hypothesis("weights in bfloat16", _parameters({"weight": weight.to(torch.bfloat16).to(weight.dtype)}))
    if rows == columns:
        yield Hypothesis("the weight transposed", _parameters({"weight": weight.T.contiguous()}))


def _settings(module: Any) -> Iterator[Hypothesis]:
    """Numbers and switches that a module keeps, at what they are where somebody forgot them."""
    for setting, values in _FORGOTTEN.items():
        value = getattr(module, setting, None)
        if isinstance(value, (int, float, bool)) or (value is None and hasattr(module, setting)):
            for one in values:
                made = one(value) if callable(one) else one
                if made != value and not (value is None and made is not None and setting != "sliding_window"):
                    yield Hypothesis(f"{setting} {_said(made)} instead of {_said(value)}", _attribute(setting, made))
    head = getattr(module, "head_dim", None)
    scaling = getattr(module, "scaling", None)
    if isinstance(head, int) and isinstance(scaling, float):
        for made in (1.0, head**-0.5, float(head) ** -1):
            if made != scaling:
                yield Hypothesis(f"scaling {made:g} instead of {scaling:g}", _attribute("scaling", made))
    activation = getattr(module, "act_fn", None)
    if isinstance(activation, torch.nn.Module):
        for made in (torch.nn.SiLU(), torch.nn.GELU(), torch.nn.GELU(approximate="tanh"), torch.nn.ReLU()):
            yield Hypothesis(f"activation {made}", _attribute("act_fn", made))


_FORGOTTEN: dict[str, tuple[Any, ...]] = {
    "routed_scaling_factor": (1.0,),
    "norm_topk_prob": (lambda value: not value,),
    "top_k": (lambda value: value + 1, lambda value: max(1, value - 1)),
    "attn_logit_softcapping": (None, 30.0, 50.0),
    "final_logit_softcapping": (None,),
    "sliding_window": (None, lambda value: (value or 0) + 1, lambda value: max(1, (value or 0) - 1)),
    "softmax_scale": (1.0,),
}


def _said(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _like(state: Mapping[str, torch.Tensor], path: str) -> torch.Tensor | None:
    """A weight of a state dict, whatever wraps its name."""
    return next((value for name, value in state.items() if name == path or name.endswith(f".{path}")), None)


def _grid(weight: torch.Tensor, steps: int, *, per_row: bool) -> torch.Tensor:
    scale = (weight.float().abs().amax(1, keepdim=True) if per_row else weight.float().abs().max()) / steps
    scale = scale.clamp(min=1e-30)
    return ((weight.float() / scale).round().clamp(-steps, steps) * scale).to(weight.dtype)


def _float8(weight: torch.Tensor, per_row: bool) -> torch.Tensor:
    scale = (weight.float().abs().amax(1, keepdim=True) if per_row else weight.float().abs().max()) / 448.0
    scale = scale.clamp(min=1e-30)
    return ((weight.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(weight.dtype)


# ---- changes


def _parameters(values: dict[str, torch.Tensor]) -> Callable[[Any], Any]:
    @contextmanager
    def change(module: Any) -> Iterator[None]:
        before = {name: module._parameters[name] for name in values}
        module._parameters.update(values)
        try:
            yield
        finally:
            module._parameters.update(before)

    return change


def _buffers(values: dict[str, torch.Tensor]) -> Callable[[Any], Any]:
    @contextmanager
    def change(module: Any) -> Iterator[None]:
        before = {name: module._buffers[name] for name in values}
        module._buffers.update(values)
        try:
            yield
        finally:
            module._buffers.update(before)

    return change


def _attribute(name: str, value: Any) -> Callable[[Any], Any]:
    @contextmanager
    def change(module: Any) -> Iterator[None]:
        before = getattr(module, name)
        setattr(module, name, value)
        try:
            yield
        finally:
            setattr(module, name, before)

    return change


def _partial_sums(ranks: int, way: str, bias: str) -> Callable[[Any], Any]:
    """The product as so many ranks compute it, each its part of the columns, every partial sum in the storage dtype.

    bias: added to the first rank's sum, with the last rounding, or after it.
    """

    @contextmanager
    def change(module: Any) -> Iterator[None]:

        def forward(given: torch.Tensor) -> torch.Tensor:
            dtype = given.dtype
            x, weight = (given.true if isinstance(given, TrueTensor) else given.double()), module.weight.double()
            parts = [torch.matmul(a, w.T) for a, w in zip(x.chunk(ranks, -1), weight.chunk(ranks, -1), strict=True)]
            if module.bias is not None and bias == "first":
                parts[0] = parts[0] + module.bias.double()
            parts = [_rounded(part, dtype) for part in parts]
            if way == "in float32":
                total = sum(parts[1:], parts[0])
            elif way == "in pairs":
                while len(parts) > 1:
                    parts = [_rounded(a + b, dtype) for a, b in zip(parts[::2], parts[1::2], strict=True)]
                total = parts[0]
            else:
                total = parts[0]
                for part in parts[1:]:
                    total = _rounded(total + part, dtype)
            if module.bias is not None and bias != "first":
                total = (_rounded(total, dtype) if bias == "last" else total) + module.bias.double()
            return TrueTensor(total, dtype)

        def plainly(given: torch.Tensor) -> torch.Tensor:
            with _disable_current_modes():
                return forward(given)

        module.forward = plainly
        try:
            yield
        finally:
            del module.forward

    return change


def _rounded(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.to(dtype).double()
