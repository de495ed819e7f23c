"""What torch's hooks can see of a model without a change to it: module outputs, gradients, parameters, arguments.

Names are those replay gives: `layers.0.mlp.output`, `layers.0.mlp.inputs.0`, `grad.<name>`, `param.<name>`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from replay_core.errors import RequestError
from replay_core.recorder.settings import Settings, need_pattern
from replay_core.recorder.values import Snapshots, is_storable, is_tensor

#: Within it, an error is the trainer's to see or a field given up: `Recorder.guarded`.
Guarded = Callable[[Mapping[str, Any]], AbstractContextManager[None]]


def gradients(model: Any, settings: Settings) -> dict[str, Any]:
    """`grad.<name>` of every chosen parameter that has a gradient.

    Raises:
        RequestError: the pattern chooses no parameter at all.
    """
    chosen = _chosen(model, settings)
    return {f"grad.{name}": parameter.grad for name, parameter in chosen.items() if parameter.grad is not None}


def parameters(model: Any, settings: Settings) -> dict[str, Any]:
    """`param.<name>` of every chosen parameter.

    Raises:
        RequestError: the pattern chooses none.
    """
    return {f"param.{name}": parameter for name, parameter in _chosen(model, settings).items()}


def _chosen(model: Any, settings: Settings) -> dict[str, Any]:
    every = dict(model.named_parameters())
    chosen = {name: parameter for name, parameter in every.items() if settings.wants_param(name)}
    if not chosen:
        raise RequestError(
            "target_param_pattern chooses no parameter",
            expected=", ".join(list(every)[:3]) + " …",
            found=f"target_param_pattern: {settings.target_param_pattern!r}",
            hint="FSDP1 flattens parameters: wrap with use_orig_params=True",
        )
    return chosen


@contextmanager
def accumulating(guarded: Guarded, snapshots: Snapshots, model: Any, settings: Settings) -> Iterator[dict[str, Any]]:
    """Around a backward: the dict fills with each chosen gradient right after it accumulated."""
    seen: dict[str, Any] = {}

    def catcher(name: str) -> Callable[[Any], None]:
        def hook(parameter: Any) -> None:
            with guarded({"stage": "gradient", "field": name}):
                seen[f"grad.{name}"] = snapshots.take_now(parameter.grad, f"grad.{name}")

        return hook

    handles = [
        parameter.register_post_accumulate_grad_hook(catcher(name))
        for name, parameter in _chosen(model, settings).items()
        if parameter.requires_grad
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def catching(
    guarded: Guarded,
    snapshots: Snapshots,
    model: Any,
    pattern: str | None,
    *,
    inputs: bool = False,
    gradients: bool = False,
) -> Iterator[dict[str, Any]]:
    """Hooks on the chosen modules while it is open; the dict fills in call order.

    gradients: those of the outputs too, `grad.layers.0.mlp.output`, of a backward within.
    A module called several times has `name`, `name[1]`, … as replay's capture names them.

    Raises:
        RequestError: the pattern chooses no module.
    """
    if pattern is not None:
        need_pattern("modules", pattern)
    modules = {name: module for name, module in model.named_modules() if name and _can_run(module)}
    chosen = {name: module for name, module in modules.items() if pattern is None or re.search(pattern, name)}
    if not chosen:
        raise RequestError(
            "the pattern chooses no module", expected=", ".join(list(modules)[:4]) + " …", found=str(pattern)
        )
    seen: dict[str, Any] = {}
    calls: dict[str, int] = {}

    def keep(name: str, value: Any) -> None:
        for inner, tensor in tensors_of(name, value):
            with guarded({"stage": "modules", "field": inner}):
                seen[inner] = snapshots.take_now(tensor, inner)

    def before(name: str) -> Any:
        def hook(_module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            calls[name] = calls.get(name, 0) + 1
            if inputs:
                keep(f"{_numbered(name, calls[name])}.inputs", {**dict(enumerate(args)), **kwargs})

        return hook

    def after(name: str) -> Any:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            whole = f"{_numbered(name, calls.get(name, 1))}.output"
            keep(whole, output)
            for inner, tensor in tensors_of(whole, output) if gradients else ():
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient, inner=inner: keep(f"grad.{inner}", gradient))

        return hook

    handles = []
    for name, module in chosen.items():
        handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
        handles.append(module.register_forward_hook(after(name)))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def norm(gradients: Iterable[Any]) -> float | None:
    """The L2 norm over gradients, those of shards over all ranks; None where there is none."""
    import torch

    norms = []
    for gradient in gradients:
        if gradient is not None and not gradient.is_sparse:
            one = torch.linalg.vector_norm(gradient.detach().float())
            norms.append((one.full_tensor() if hasattr(one, "full_tensor") else one).cpu())
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else None


#: The weights of a model up to this size are kept with every recorded step unless somebody says otherwise.
SMALL = 64 << 20


def is_small(model: Any) -> bool:
    """Whether a model's weights are so small that each recorded step keeps them."""
    return bool(sum(weight.numel() * weight.element_size() for weight in model.parameters()) <= SMALL)


def bare(model: Any) -> Any:
    """The model inside what DDP and torch.compile put around it: a wrapper has no weights of its own."""
    within: Any = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
    if not hasattr(within, "parameters") or len(list(within.parameters())) != len(list(model.parameters())):
        return model
    return bare(within)


def is_averaged(model: Any) -> bool:
    """Whether what wraps the model makes the ranks' gradients their mean, as DDP and FSDP do."""
    wrapper = getattr(model, "_orig_mod", model)
    named = {kind.__name__ for kind in type(wrapper).__mro__}
    return bool(named & {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"})


def whole_state(model: Any) -> dict[str, Any] | None:
    """The whole state dict of a model that holds shards of it; None where it holds all. Every rank has to ask."""
    if not any(hasattr(weight, "full_tensor") for weight in model.parameters()):
        return None
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().cpu()
        for name, value in model.state_dict().items()
    }


def named_arguments(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments by the names `forward` gives them; a wrapper (DDP) takes whatever the model in it takes."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    within = getattr(model, "module", None)
    if parameters and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL and hasattr(within, "forward"):
        return named_arguments(within, args, kwargs)
    names = [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    named = {names[at] if at < len(names) else f"argument_{at}": value for at, value in enumerate(args)}
    return {**named, **kwargs}


def recordable(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments a record can hold; the rest by name under `not_recorded`."""
    plain = {name: value for name, value in given.items() if _recordable(value)}
    left_out = [name for name, value in given.items() if value is not None and name not in plain]
    return {**plain, "not_recorded": left_out} if left_out else plain


def _recordable(value: Any) -> bool:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return not is_tensor(value) or is_storable(value)
    if isinstance(value, (list, tuple)):
        return all(_recordable(item) for item in value)
    if isinstance(value, Mapping):
        return all(_recordable(item) for item in value.values())
    return isinstance(value, (bool, int, float, str))


def tensors_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The tensors of a module's inputs or outputs, by position or key. Caches are state, not results."""
    if hasattr(value, "detach") and hasattr(value, "layout"):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in ("past_key_values", "cache"):  # the latter since transformers 5.24
                yield from tensors_of(f"{name}.{key}", inner)
    elif isinstance(value, (list, tuple)):
        for position, inner in enumerate(value):
            yield from tensors_of(f"{name}.{position}", inner)


def _numbered(name: str, call: int) -> str:
    return name if call == 1 else f"{name}[{call - 1}]"


def _can_run(module: Any) -> bool:
    # ModuleList and the like hold modules but are never called.
    forward = getattr(type(module), "forward", None)
    return forward is not None and getattr(forward, "__name__", "") != "_forward_unimplemented"
