"""LoRA adapters on a base model, computed beside it as PEFT does: W x + scale * B (A x), never merged.

Source: LoRA (arXiv 2106.09685) equation 3; the files and their names are PEFT's. Anything else PEFT knows is refused by
name: half an adapter would be another model.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from replay_core.dumps.containers.json_lines import read_object
from replay_core.errors import DumpError, ModelError, UnavailableError
from replay_core.regexes import regex

CONFIG = "adapter_config.json"
_MOST_CONFIG = 1 << 20
_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PART = regex(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
#: Settings that change what an adapter computes, and the value under which this file computes the same.
_PLAIN = {
    "use_dora": False, "fan_in_fan_out": False, "bias": "none", "lora_bias": False, "use_qalora": False,
    "trainable_token_indices": None, "alora_invocation_tokens": None,
}  # fmt: skip
#: Initialisations that change the base (peft.tuners.lora.layer: pissa_init, olora_init, corda_init, loftq_init).
_REBASING = ("pissa", "olora", "corda", "loftq")
#: Where a model keeps the names of what its adapter trains.
_TRAINED = "_trained_with_adapter"


def is_adapter(directory: Path) -> bool:
    return (directory / CONFIG).is_file() and not (directory / "config.json").is_file()


def settings(directory: Path) -> dict[str, Any]:
    """The adapter's config.

    Raises:
        ModelError: it is no JSON object.
        UnavailableError: it is of a kind that is not computed here.
    """
    try:
        config = read_object(directory / CONFIG, "the adapter's config", _MOST_CONFIG)
    except (OSError, DumpError) as error:
        said = error.message if isinstance(error, DumpError) else str(error)
        raise ModelError(said, file=str(directory / CONFIG)) from None
    kind = config.get("peft_type")
    odd = [f"{name}={config[name]}" for name, plain in _PLAIN.items() if config.get(name, plain) not in (plain, None)]
    if kind != "LORA" or odd:
        raise UnavailableError(
            "this kind of adapter is not computed here", file=str(directory / CONFIG), expected="plain LoRA",
            found=", ".join(odd) or str(kind), hint="merge it into its base with PEFT, and replay the merged model",
        )  # fmt: skip
    start = str(config.get("init_lora_weights") or "")
    if start.lower().startswith(_REBASING):
        # What such an adapter lies beside is what its start left of the base, which is not on disk.
        raise UnavailableError(
            f"the adapter was initialised with {start}, which takes its start out of the base's weights",
            file=str(directory / CONFIG), expected="an initialisation that leaves the base: true, gaussian, orthogonal",
            found=f"init_lora_weights={start}",
            hint="convert it (save_pretrained with path_initial_model_for_weight_conversion), or merge it with PEFT",
        )  # fmt: skip
    return config


def trained(model: Any) -> frozenset[str] | None:
    """The parameters that are trained where an adapter lies beside the model; None where all are."""
    names: frozenset[str] | None = model.__dict__.get(_TRAINED)
    return names


def attach(model: Any, directory: Path, config: dict[str, Any]) -> str:
    """Put the adapter beside the model's modules; what to say of it.

    Raises:
        ModelError: no weights, or weights for modules that the base does not have.
    """
    file = directory / _WEIGHTS
    if not file.is_file():
        raise ModelError(
            "the adapter has no weights", file=str(directory), expected=_WEIGHTS,
            found=", ".join(sorted(entry.name for entry in directory.iterdir())[:6]),
        )  # fmt: skip
    modules = dict(model.named_modules())
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    whole: list[torch.Tensor] = []
    for key, value in load_file(file).items():
        name = key.removeprefix(_PREFIX)
        part = _PART.fullmatch(name)
        if ".lora_embedding_" in name:
            raise UnavailableError(
                "the adapter is on the embeddings, which is not computed here", file=str(file), tensor=name,
                expected="lora_A and lora_B of linear modules", found="lora_embedding_A and lora_embedding_B",
                hint="merge it into its base with PEFT, and replay the merged model",
            )  # fmt: skip
        if part is not None:
            pairs.setdefault(part["module"], {})[part["side"]] = value
            continue
        whole.append(_replace(modules, name, value, file))
    for name, pair in pairs.items():
        module = modules.get(name)
        if module is None or set(pair) != {"A", "B"} or not isinstance(module, torch.nn.Linear):
            raise ModelError(
                "the adapter does not fit the base model", file=str(file), tensor=f"{name}.lora_A",
                expected="lora_A and lora_B of a linear module of the base", found=type(module).__name__,
                hint="is it the base it was trained on? --base-model DIRECTORY",
            )  # fmt: skip
        _beside(module, pair["A"], pair["B"], _scale(config, name, pair["A"].shape[0]), name, file)
    mine = {id(one) for one in whole}
    named = model.named_parameters()
    model.__dict__[_TRAINED] = frozenset(
        name for name, one in named if id(one) in mine or ".lora_A." in name or ".lora_B." in name
    )
    return f"LoRA adapter of rank {config.get('r')} beside {len(pairs)} modules of its base, not merged"


def _replace(modules: dict[str, Any], name: str, value: torch.Tensor, file: Path) -> torch.Tensor:
    """A whole weight that was trained with the adapter (modules_to_save)."""
    owner, _, leaf = name.replace(".modules_to_save.default.", ".").replace(".base_layer.", ".").rpartition(".")
    parameter = getattr(modules.get(owner), leaf, None)
    if not isinstance(parameter, torch.Tensor) or parameter.shape != value.shape:
        raise ModelError(
            "the adapter does not fit the base model", file=str(file), tensor=name,
            expected="a weight of the base" if parameter is None else str(list(parameter.shape)),
            found=str(list(value.shape)), hint="is it the base it was trained on? --base-model DIRECTORY",
        )  # fmt: skip
    parameter.data = value.to(parameter.dtype)
    return parameter


def _scale(config: dict[str, Any], name: str, rank: int) -> float:
    alpha = _by_pattern(config.get("alpha_pattern"), name, config.get("lora_alpha", rank))
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _by_pattern(patterns: dict[str, Any] | None, name: str, default: Any) -> Any:
    for pattern, value in (patterns or {}).items():
        if name == pattern or name.endswith(f".{pattern}"):
            return value
    return default


def _beside(module: torch.nn.Linear, a: torch.Tensor, b: torch.Tensor, scale: float, name: str, file: Path) -> None:
    if a.shape[1] != module.in_features or b.shape[0] != module.out_features or a.shape[0] != b.shape[1]:
        raise ModelError(
            "the adapter does not fit the base model", file=str(file), tensor=f"{name}.lora_A",
            expected=f"[r, {module.in_features}] and [{module.out_features}, r]",
            found=f"{list(a.shape)} and {list(b.shape)}", hint="is it the base it was trained on?",
        )  # fmt: skip
    for side, weight in (("lora_A", a), ("lora_B", b)):
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=module.weight.dtype)
        linear.weight.data = weight.to(module.weight.dtype)
        module.add_module(side, linear)

    def add(owner: Any, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return output + owner.lora_B(owner.lora_A(args[0])) * scale

    module.register_forward_hook(add)
