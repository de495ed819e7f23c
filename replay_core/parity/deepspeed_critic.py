"""The DeepSpeed critic: a causal language model's backbone with TRL's value head, under a DeepSpeed engine.

What `AutoModelForCausalLMWithValueHead` computes: the last hidden states, after the final norm, through
`v_head.summary`. Without DeepSpeed the same model is trained by a plain torch loop, and `engine` says so.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from typing import Any

import torch

from replay_core.errors import UnavailableError
from replay_core.parity.backbone import backbone_state, build
from replay_core.parity.config import CriticConfig
from replay_core.parity.critics import Critic, CriticBatch, Tensors, head_state, make_head
from replay_core.parity.engines import CriticEngine, TorchEngine, lone_process_group
from replay_core.replay.capture import Capture, modules_matching

_CANNOT_COMPILE = "DeepSpeed compiles its CPU communication at its first start, which needs a C++ compiler"


class _WithValueHead(torch.nn.Module):  # type: ignore[misc]
    """Backbone and head as one module, which is what an engine takes."""

    def __init__(self, backbone: Any, head: torch.nn.Module) -> None:
        super().__init__()
        self.backbone, self.v_head = backbone, head

    def forward(self, ids_BS: torch.Tensor, attention_BS: torch.Tensor, positions_BS: torch.Tensor) -> torch.Tensor:
        hidden_BSD = self.backbone(
            input_ids=ids_BS, attention_mask=attention_BS, position_ids=positions_BS, use_cache=False
        ).last_hidden_state
        value: torch.Tensor = self.v_head(hidden_BSD).squeeze(-1)
        return value


class DeepSpeedCritic(Critic):
    """A `Critic`. The padding mask and the position ids go to the backbone, as in ROLL's DeepSpeed strategy."""

    def __init__(self, config: CriticConfig) -> None:
        """Raises:
        ModelError, UnavailableError: there is no such model, or DeepSpeed is there and cannot start.
        """
        self.config = config
        self.backend = "deepspeed" if config.backend == "deepspeed" else "torch"
        built = build(config)
        self.notes = list(built.notes)
        self.head = make_head(config, built, self.notes)
        dtype = getattr(torch, config.dtype)
        self.model: torch.nn.Module = _WithValueHead(built.causal_lm.base_model, self.head).to(config.device, dtype)
        self._causal_lm = built.causal_lm
        self._engine = self._made_engine()
        self.engine = self._engine.name

    def _made_engine(self) -> CriticEngine:
        if self.config.backend == "deepspeed":
            if importlib.util.find_spec("deepspeed") is not None:
                return DeepSpeedEngine(self.model, self.config)
            self.notes.append("DeepSpeed is not installed: the same critic runs under a plain torch loop")
        return TorchEngine(self.model, self.config, "DeepSpeed absent" if self.config.backend == "deepspeed" else "")

    def positions(self, batch: CriticBatch) -> torch.Tensor:
        attention_BS = batch.attention_BS.long()
        positions_BS = (attention_BS.cumsum(-1) - 1).clip(0)
        gap_BS = (batch.response_BS * batch.attention_BS).long().cummax(-1).values * self.config.position_gap
        return positions_BS + self.config.position_offset + gap_BS

    def values(self, batch: CriticBatch) -> torch.Tensor:
        values_BS = self._engine.forward(batch.ids_BS, batch.attention_BS, self.positions(batch))
        return values_BS[:, :-1].float()

    def state(self) -> Tensors:
        return {**backbone_state(self._causal_lm), **head_state(self.head)}

    def captured(self, batch: CriticBatch) -> Tensors:
        # The hooks sit on the model itself: an engine would add its own name to every module's.
        names = [name for name in modules_matching(self.model, None) if name != "backbone"]
        with torch.no_grad(), Capture(self.model, names, int(batch.ids_BS.shape[1])) as capture:
            self.model(batch.ids_BS, batch.attention_BS, self.positions(batch))
        return {name.removeprefix("backbone."): value for name, value in capture.tensors.items()}

    def attends(self) -> dict[str, Any]:
        return {
            "attention": str(self._causal_lm.config._attn_implementation),
            "padding_mask": "given to every attention layer",
            "positions": "given: counted over each row's tokens",
        }


class DeepSpeedEngine(CriticEngine):
    """A DeepSpeed engine of one process around the model."""

    def __init__(self, model: torch.nn.Module, config: CriticConfig) -> None:
        """Raises:
        UnavailableError: DeepSpeed cannot start here; says why.
        """
        # DeepSpeed reads these where no launcher set them.
        for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
            os.environ.setdefault(name, value)
        if config.device == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
            if not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "c++", "clang++")):
                raise UnavailableError(_CANNOT_COMPILE, expected="g++, c++ or clang++", found="none on the PATH")
        import deepspeed

        lone_process_group("gloo" if config.device == "cpu" else "nccl")
        asked = {name: value for name, value in config.strategy_config.items() if not name.startswith("train_")}
        options = {
            "zero_optimization": {"stage": 0},
            **asked,
            "train_micro_batch_size_per_gpu": config.per_device_batch,
            "gradient_accumulation_steps": config.accumulation,
            "gradient_clipping": config.max_grad_norm,
            "steps_per_print": 10**9,
            **({"bf16": {"enabled": True}} if config.dtype == "bfloat16" else {}),
            **({"fp16": {"enabled": True}} if config.dtype == "float16" else {}),
        }
        stage = int(dict(options["zero_optimization"]).get("stage", 0))
        # At stage 0 DeepSpeed updates bfloat16 weights as they are; any other way there are float32 copies.
        self.copies = None if config.dtype == "float32" else config.dtype == "float16" or stage > 0
        optimizer = self.adam(model.parameters(), config)
        try:
            deepspeed.init_distributed("gloo" if config.device == "cpu" else "nccl")
            made = deepspeed.initialize(model=model, optimizer=optimizer, config=options)
        except Exception as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
            raise UnavailableError(
                f"DeepSpeed {deepspeed.__version__} does not start: {first}",
                file=config.path,
                hint="its log above says more; strategy_name: torch_train runs the same critic without it",
            ) from error
        self._model, self._engine, self.optimizer, self.config = model, made[0], optimizer, config
        self.name = f"DeepSpeed {deepspeed.__version__}"

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        # Only a forward that trains goes through the engine: it counts micro-batches by it.
        value: torch.Tensor = (self._engine if torch.is_grad_enabled() else self._model)(*inputs)
        return value

    def backward(self, loss: torch.Tensor, *, of: int, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_boundary=last)
        # The engine divides by its own number of micro-batches; a step that has fewer makes up for it.
        self._engine.backward(loss * (self.config.accumulation / of))
        if not last:
            self._engine.step()

    def step(self) -> float | None:
        self.warm_up()
        self._engine.step()
        norm = None
        with contextlib.suppress(TypeError, AttributeError):
            norm = float(self._engine.get_global_grad_norm())
        return norm
