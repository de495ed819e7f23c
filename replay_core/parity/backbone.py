"""The Hugging Face model a critic starts from: a directory's, or a small random one; and the head beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open

from replay_core.errors import ModelError, RldbgError, UnavailableError
from replay_core.parity.config import CriticConfig
from replay_core.parity.critics import HEAD_BIAS, HEAD_WEIGHT, Built
from replay_core.replay.architectures import settings
from replay_core.replay.versions import loaded_in

RANDOM = "random:"

#: What frameworks call the head's weight in a checkpoint.
_HEADS = (HEAD_WEIGHT, "output_layer.value_head.weight", "value_head.weight", "score.weight")


def build(config: CriticConfig) -> Built:
    """The model of a configuration in float32, its norms' epsilon replaced where asked.

    Raises:
        ModelError: no such directory, no weights in it, or transformers cannot read it.
        UnavailableError: transformers does not know the architecture.
    """
    built = _random(config) if config.pretrain.startswith(RANDOM) else _directory(config)
    built.causal_lm.eval()
    if config.rms_norm_eps is not None:
        built.shape.rms_norm_eps = config.rms_norm_eps
        for module in built.causal_lm.modules():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon = config.rms_norm_eps
    return built


def _random(config: CriticConfig) -> Built:
    kind, arguments = settings(config.pretrain.removeprefix(RANDOM), config.vocab_size - 1, 4096)
    arguments["vocab_size"] = config.vocab_size
    try:
        made = transformers.AutoConfig.for_model(kind, **arguments)
    except ValueError:
        raise UnavailableError(f"transformers {transformers.__version__} knows no architecture {kind}") from None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.random_seed)
        model = transformers.AutoModelForCausalLM.from_config(
            made, **loaded_in(torch.float32), attn_implementation=config.attention
        )
        # Biases and norms of a fresh model are all zeros and ones: a converter that mixed them up would not show.
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.data.normal_(0.0, 0.02)
            elif "norm" in name:
                parameter.data.add_(torch.randn_like(parameter) * 0.05)
    return Built(model, {}, [f"random weights of {config.pretrain}, drawn from seed {config.random_seed}"])


def _directory(config: CriticConfig) -> Built:
    directory = Path(config.pretrain).expanduser()
    if not (directory / "config.json").is_file():
        raise ModelError(
            "the critic's model is not a Hugging Face directory",
            file=str(directory),
            expected="config.json and *.safetensors",
            found="nothing there" if not directory.exists() else "no config.json",
            hint="nothing is downloaded: fetch the model first, or pretrain: random:qwen2-tiny",
        )
    if not any(directory.glob("*.safetensors")):
        raise ModelError("the model directory holds no weights", file=str(directory), expected="*.safetensors")
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False, **loaded_in(torch.float32),
            attn_implementation=config.attention, use_safetensors=True, output_loading_info=True,
        )  # fmt: skip
    except RldbgError:
        raise
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise ModelError(f"the critic's model cannot be loaded: {first}", file=str(directory)) from error
    missing = sorted(name for name in info["missing_keys"] if not name.startswith("lm_head"))
    if missing:
        raise ModelError(
            f"the directory lacks {len(missing)} of the backbone's weights",
            file=str(directory), tensor=missing[0], expected="every backbone weight", found=", ".join(missing[:3]),
        )  # fmt: skip
    return Built(model, _head(directory), [])


def _head(directory: Path) -> dict[str, torch.Tensor]:
    """The value head a checkpoint holds, under TRL's names; empty where it holds none."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(str(file), "pt") as held:
            names = set(held.keys())
            for name in _HEADS:
                bias = name.removesuffix("weight") + "bias"
                if name in names and HEAD_WEIGHT not in found:
                    found[HEAD_WEIGHT] = held.get_tensor(name).float().reshape(1, -1)
                    if bias in names:
                        found[HEAD_BIAS] = held.get_tensor(bias).float().reshape(1)
    return found


def backbone_state(causal_lm: Any) -> dict[str, torch.Tensor]:
    """The weights below the language-model head, float32 on the host, without `model.`."""
    return {name: value.detach().float().cpu() for name, value in causal_lm.base_model.state_dict().items()}
