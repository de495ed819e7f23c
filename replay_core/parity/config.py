"""CriticConfig: one side of a parity run, from a YAML of ROLL's shape, the environment and the backend's defaults."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict

from replay_core import dtypes
from replay_core.errors import RequestError
from replay_core.objectives.value_loss import REDUCTIONS

#: strategy_name of the YAML -> backend. ROLL names a strategy for inference and one for training.
STRATEGIES = {
    "deepspeed_train": "deepspeed",
    "deepspeed_infer": "deepspeed",
    "hf_infer": "torch",
    "torch_train": "torch",
    "megatron_train": "megatron",
    "megatron_infer": "megatron",
}
_DTYPES = ("float32", "bfloat16", "float16")

#: TRL's head drops 0.1 and has a bias unless told otherwise; Megatron's wrapper does neither.
DEFAULT_DROPOUT = {"deepspeed": 0.1, "torch": 0.1, "megatron": 0.0}
DEFAULT_BIAS = {"deepspeed": True, "torch": True, "megatron": False}

#: Where the two tiny configurations lie that come with the package.
SHIPPED = Path(__file__).parent / "configs"


class CriticConfig(Struct, frozen=True):
    """What one critic is asked to be. `sources` says where each control came from.

    value_head_init: every weight of the head, its bias zeroed; 0.0 means a random draw from `seed`.
    value_head_scale, value_head_offset: applied to the head after that. position_offset is added to every
    position id, position_gap to those of the response only.
    """

    path: str
    backend: str
    pretrain: str
    dtype: str = "float32"
    device: str = "cpu"
    attention: str = "eager"
    seed: int = 42
    training_seed: int = 42
    data_seed: int = 42
    random_seed: int = 0
    vocab_size: int = 512
    value_head: str = "auto"
    value_head_init: float = 0.0
    value_head_bias: bool = True
    value_head_scale: float = 1.0
    value_head_offset: float = 0.0
    dropout: float = 0.0
    shuffle: bool = True
    rms_norm_eps: float | None = None
    position_offset: int = 0
    position_gap: int = 0
    learning_rate: float = 1e-5
    weight_decay: float = 0.0
    warmup_steps: int = 0
    max_grad_norm: float = 1.0
    per_device_batch: int = 2
    accumulation: int = 2
    value_clip: float | None = None
    gamma: float = 1.0
    lambd: float = 0.95
    reduction: str = "roll"
    world_size: int = 1
    strategy_config: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_mapping(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> CriticConfig:
        known = set(cls.__struct_fields__)
        given = {name: value for name, value in mapping.items() if name in known}
        return cls(**{**given, "notes": tuple(mapping.get("notes", ()))})


def read_config(path: Path, environment: Mapping[str, str] | None = None) -> CriticConfig:
    """The critic a YAML file describes. A control is taken from its `system_envs`, else from `environment` (the
    process's own by default), else from its `model_args` or `training_args`, else it is the backend's default.

    Raises:
        RequestError: no such file, no YAML, or a value that cannot be used; says which.
    """
    whole = _load(path)
    critic = _section(whole, "critic", path)
    strategy = _section(critic, "strategy_args", path)
    name = str(strategy.get("strategy_name", ""))
    if name not in STRATEGIES:
        raise RequestError(
            "the configuration names no critic backend",
            file=str(path),
            expected="critic.strategy_args.strategy_name: " + ", ".join(STRATEGIES),
            found=name or "none",
        )
    return _Reader(
        path, whole, critic, STRATEGIES[name], dict(os.environ if environment is None else environment)
    ).read()


class _Reader:
    """Reads one configuration, remembering where each control came from."""

    def __init__(
        self, path: Path, whole: dict[str, Any], critic: dict[str, Any], backend: str, environment: dict[str, str]
    ) -> None:
        self.path, self.whole, self.backend = path, whole, backend
        self.model = _section(critic, "model_args", path, required=False)
        self.training = _section(critic, "training_args", path, required=False)
        self.strategy = _section(critic["strategy_args"], "strategy_config", path, required=False)
        self.own_environment = {
            **{str(key): str(value) for key, value in _section(whole, "system_envs", path, required=False).items()},
            **{str(key): str(value) for key, value in _section(critic, "system_envs", path, required=False).items()},
        }
        self.environment = environment
        self.sources: dict[str, str] = {}
        self.notes: list[str] = []

    def read(self) -> CriticConfig:
        seed = self._int("seed", self.whole.get("seed", 42), "seed" if "seed" in self.whole else "default")
        pretrain = self.whole.get("pretrain") or self.model.get("model_name_or_path")
        if not isinstance(pretrain, str) or not pretrain:
            raise self._wrong("pretrain", pretrain, "a model directory, or random:qwen2-tiny")
        if not pretrain.startswith("random:") and not Path(pretrain).expanduser().is_absolute():
            beside = self.path.parent / pretrain
            pretrain = str(beside.resolve()) if beside.is_dir() else pretrain
        dtype = str(self.model.get("dtype", "fp32"))
        if dtypes.named(dtype) not in _DTYPES:
            raise self._wrong("critic.model_args.dtype", dtype, "fp32, bf16 or fp16")
        if "lora_rank" in self.model or "lora_target" in self.model:
            self.notes.append(f"{self.path.name}: lora settings are not used; the critic is trained whole")
        reduction = str(self.whole.get("value_loss_reduction", "roll"))
        if reduction not in REDUCTIONS:
            raise self._wrong("value_loss_reduction", reduction, ", ".join(REDUCTIONS))
        number, model, training = self._number, self.model, self.training
        clip = self.whole.get("value_clip")
        eps = model.get("rms_norm_eps")
        return CriticConfig(
            path=str(self.path),
            backend=self.backend,
            pretrain=pretrain,
            dtype=dtypes.named(dtype),
            device=str(model.get("device", "cpu")),
            attention=str(model.get("attn_implementation", "eager")),
            seed=seed,
            training_seed=self._seed("seed", "training_seed", seed),
            data_seed=self._seed("data_seed", "data_seed", self._seed("seed", "training_seed", seed)),
            random_seed=self._int("critic.model_args.random_seed", model.get("random_seed", 0)),
            vocab_size=self._int("critic.model_args.vocab_size", model.get("vocab_size", 512), least=2),
            value_head=self._one_of("value_head", ("auto", "fresh", "checkpoint")),
            value_head_init=self._control("VALUE_HEAD_INIT", "value_head_init", 0.0),
            value_head_bias=bool(model.get("value_head_bias", DEFAULT_BIAS[self.backend])),
            value_head_scale=number("critic.model_args.value_head_scale", model.get("value_head_scale", 1.0)),
            value_head_offset=number("critic.model_args.value_head_offset", model.get("value_head_offset", 0.0)),
            dropout=self._dropout(),
            shuffle=self._shuffle(),
            rms_norm_eps=None if eps is None else number("critic.model_args.rms_norm_eps", eps, 0.0),
            position_offset=self._int("critic.model_args.position_offset", model.get("position_offset", 0)),
            position_gap=self._int("critic.model_args.position_gap", model.get("position_gap", 0)),
            learning_rate=number("critic.training_args.learning_rate", training.get("learning_rate", 1e-5), 0.0),
            weight_decay=number("critic.training_args.weight_decay", training.get("weight_decay", 0.0), 0.0),
            warmup_steps=self._int("critic.training_args.warmup_steps", training.get("warmup_steps", 0), least=0),
            max_grad_norm=number("critic.training_args.max_grad_norm", training.get("max_grad_norm", 1.0), 0.0),
            per_device_batch=self._trained("per_device_train_batch_size"),
            accumulation=self._trained("gradient_accumulation_steps"),
            value_clip=None if clip is None else number("value_clip", clip, 0.0),
            gamma=number("gamma", self.whole.get("gamma", 1.0), 0.0, 1.0),
            lambd=number("lambd", self.whole.get("lambd", 0.95), 0.0, 1.0),
            reduction=reduction,
            world_size=self._world_size(),
            strategy_config=self.strategy,
            sources=self.sources,
            notes=tuple(self.notes),
        )  # fmt: skip

    def _trained(self, key: str) -> int:
        return self._int(f"critic.training_args.{key}", self.training.get(key, 2), least=1)

    def _control(
        self, variable: str, key: str, default: float, low: float | None = None, high: float | None = None
    ) -> float:
        for source, table, name in (
            (f"{variable} in system_envs", self.own_environment, variable),
            (f"{variable} in the environment", self.environment, variable),
            (f"critic.model_args.{key}", self.model, key),
        ):
            if table.get(name) not in (None, ""):
                self.sources[key] = source
                return self._number(source, table[name], low, high)
        self.sources[key] = f"{self.backend}'s default"
        return default

    def _dropout(self) -> float:
        return self._control("CRITIC_DROPOUT_PROB", "summary_dropout_prob", DEFAULT_DROPOUT[self.backend], 0.0, 1.0)

    def _shuffle(self) -> bool:
        value = self._control("CRITIC_DATA_SHUFFLE", "data_shuffle", 1.0)
        if value not in (0.0, 1.0):
            raise self._wrong(self.sources["data_shuffle"], value, "0 or 1")
        return bool(value)

    def _seed(self, key: str, name: str, inherited: int) -> int:
        if self.training.get(key) is None:
            self.sources[name] = "inherited"
            return inherited
        return self._int(f"critic.training_args.{key}", self.training[key], f"critic.training_args.{key}", name=name)

    def _world_size(self) -> int:
        """Processes the configuration asks for: the parallel sizes of Megatron, or the devices ROLL maps it to."""
        sizes = [
            self._int(f"critic.strategy_args.strategy_config.{key}", self.strategy.get(key, 1), least=1)
            for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        ]
        return math.prod(sizes)

    def _one_of(self, key: str, choices: tuple[str, ...]) -> str:
        value = str(self.model.get(key, choices[0]))
        if value not in choices:
            raise self._wrong(f"critic.model_args.{key}", value, ", ".join(choices))
        return value

    def _int(
        self, where: str, value: Any, source: str | None = None, *, least: int | None = None, name: str | None = None
    ) -> int:
        found = self._number(where, value, None if least is None else float(least))
        if found != int(found):
            raise self._wrong(where, value, "a whole number")
        if source is not None:
            self.sources[name or where] = source
        return int(found)

    def _number(self, where: str, value: Any, low: float | None = None, high: float | None = None) -> float:
        try:
            found = float(value)
        except (TypeError, ValueError):
            found = math.nan
        if isinstance(value, bool) or not math.isfinite(found):
            raise self._wrong(where, value, "a number")
        if (low is not None and found < low) or (high is not None and found > high):
            raise self._wrong(
                where, value, f"{'' if low is None else f'{low:g} '}to {'' if high is None else f'{high:g}'}"
            )
        return found

    def _wrong(self, where: str, value: Any, expected: str) -> RequestError:
        return RequestError(
            f"{where} cannot be used",
            file=str(self.path),
            expected=expected,
            found="nothing" if value is None else str(value),
        )


def _section(mapping: Mapping[str, Any], key: str, path: Path, *, required: bool = True) -> dict[str, Any]:
    found = mapping.get(key)
    if found is None and not required:
        return {}
    if not isinstance(found, Mapping):
        raise RequestError(
            "the configuration is not one of a critic",
            file=str(path),
            expected=f"a `{key}:` section",
            found="none" if found is None else type(found).__name__,
            hint=f"the shipped ones lie in {SHIPPED}",
        )
    return {str(name): value for name, value in found.items()}


def _load(path: Path) -> dict[str, Any]:
    """The file as plain data, `${...}` resolved where omegaconf is installed."""
    try:
        import yaml
    except ImportError:
        raise RequestError(
            "reading a critic's YAML needs PyYAML", file=str(path), hint="pip install 'rldbg[parity]'"
        ) from None
    try:
        text = path.read_text(encoding="utf-8")
        plain = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        said = (
            error.strerror
            if isinstance(error, OSError)
            else "it is no text"
            if isinstance(error, UnicodeDecodeError)
            else str(error).splitlines()[0]
        )
        raise RequestError(
            f"the configuration cannot be read: {said}",
            file=str(path),
            expected="a critic's configuration as YAML",
            hint="rldbg parity --recorded A B holds dumps of values against each other",
        ) from None
    if not isinstance(plain, Mapping):
        raise RequestError("the configuration is no mapping", file=str(path), found=type(plain).__name__)
    if "${" in text:
        plain = _resolved(text, path)
    return {str(name): value for name, value in plain.items()}


def _resolved(text: str, path: Path) -> Any:
    try:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
    except ImportError:
        raise RequestError(
            "the configuration refers to other values with ${...}, which needs omegaconf",
            file=str(path), hint="pip install 'rldbg[yaml]'",
        ) from None  # fmt: skip
    try:
        return OmegaConf.to_container(OmegaConf.create(text), resolve=True)
    except OmegaConfBaseException as error:
        raise RequestError(
            f"the configuration cannot be resolved: {str(error).splitlines()[0]}", file=str(path)
        ) from None
