"""The Megatron critic: Megatron-core's GPTModel, its output layer replaced by a value head. On CPU as on GPU.

What ROLL's McaGPTModel(use_value_head=True) is: local layer spec, RMSNorm, rotary positions, grouped queries, SwiGLU.
Attention is causal and nothing else: as with Transformer CriticEngine's causal mask, padding is not hidden from it, and
positions are slots of the row.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from collections.abc import Iterator
from typing import Any

import torch

from replay_core.errors import RequestError, UnavailableError
from replay_core.parity import weights
from replay_core.parity.backbone import backbone_state, build
from replay_core.parity.config import CriticConfig
from replay_core.parity.critics import Built, Critic, CriticBatch, Tensors, ValueHead, head_state, make_head
from replay_core.parity.engines import TorchEngine, lone_process_group
from replay_core.parity.modules import from_megatron
from replay_core.replay.capture import Capture, modules_matching

_SUPPORTED = ("llama", "qwen2", "mistral")


class ValueHeadWrapper(torch.nn.Module):  # type: ignore[misc]
    """Stands where GPTModel's output layer stands: hidden states [S, B, D] to values [S, B, 1]."""

    def __init__(self, head: ValueHead) -> None:
        super().__init__()
        self.value_head = head

    def forward(self, hidden_SBD: torch.Tensor, *_args: Any, **_kwargs: Any) -> tuple[torch.Tensor, None]:
        return self.value_head(hidden_SBD), None


class MegatronCritic(Critic):
    """A `Critic` on megatron-core, one process, tensor and pipeline size 1."""

    backend = "megatron"

    def __init__(self, config: CriticConfig) -> None:
        """Raises:
        UnavailableError: megatron-core is not installed, or cannot hold this architecture.
        RequestError: a world larger than this process, or positions that this backend cannot take.
        """
        need(config)
        from megatron import core
        from megatron.core import parallel_state

        self.config = config
        built = build(config)
        self.notes = list(built.notes)
        self.head = make_head(config, built, self.notes)
        lone_process_group("gloo" if config.device == "cpu" else "nccl")
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(1, 1)
        _answer_for_cpu(config.device)
        self._shape = weights.Shape.of(built.shape)
        self.model: torch.nn.Module = self._made(built)
        self._engine = TorchEngine(self.model, config)
        self.engine = f"megatron-core {core.__version__}, torch {torch.__version__}"

    def _made(self, built: Built) -> torch.nn.Module:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        shape = built.shape
        takes = inspect.signature(get_gpt_layer_local_spec).parameters
        spec = get_gpt_layer_local_spec(**({"normalization": "RMSNorm"} if "normalization" in takes else {}))
        model = GPTModel(
            _transformer_config(built, self.config, self._shape),
            spec,
            vocab_size=shape.vocab_size,
            max_sequence_length=shape.max_position_embeddings,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            rotary_base=_rotary_base(shape),
        )
        model.output_layer = ValueHeadWrapper(self.head)
        state = weights.to_megatron({**backbone_state(built.causal_lm), **head_state(self.head)}, self._shape)
        found = model.load_state_dict(state, strict=False)
        missing = [name for name in found.missing_keys if "_extra_state" not in name]
        if missing or found.unexpected_keys:
            raise UnavailableError(
                "Megatron's GPTModel is not the shape of this model",
                file=self.config.pretrain, tensor=(missing or found.unexpected_keys)[0],
                expected="a Llama or Qwen2 backbone", found=str(shape.model_type),
            )  # fmt: skip
        if self.config.position_offset:
            _shift_positions(model.rotary_pos_emb, self.config.position_offset)
        made: torch.nn.Module = model.to(self.config.device, getattr(torch, self.config.dtype)).eval()
        return made

    def positions(self, batch: CriticBatch) -> torch.Tensor:
        slots_S = torch.arange(batch.ids_BS.shape[1]) + self.config.position_offset
        return slots_S.expand(batch.ids_BS.shape)

    def values(self, batch: CriticBatch) -> torch.Tensor:
        return self._forward(batch)[:, :-1].float()

    def _forward(self, batch: CriticBatch) -> torch.Tensor:
        width = batch.ids_BS.shape[1]
        # True hides: every slot sees itself and what is left of it, padding included.
        hidden_11SS = torch.ones(width, width, dtype=torch.bool, device=batch.ids_BS.device).triu(1)[None, None]
        value: torch.Tensor = self.model(batch.ids_BS, None, hidden_11SS).squeeze(-1)
        return value

    def state(self) -> Tensors:
        state = {
            name: value.detach().float().cpu()
            for name, value in self.model.state_dict().items()
            if isinstance(value, torch.Tensor) and "_extra_state" not in name
        }
        return weights.to_huggingface(state, self._shape)

    def captured(self, batch: CriticBatch) -> Tensors:
        width = int(batch.ids_BS.shape[1])
        with torch.no_grad(), Capture(self.model, modules_matching(self.model, None), width) as capture:
            self._forward(batch)
        return from_megatron(capture.tensors, self._shape)

    def attends(self) -> dict[str, Any]:
        return {
            "attention": "megatron-core DotProductAttention",
            "padding_mask": "not given: attention is causal only",
            "positions": "slots of the row",
        }


def need(config: CriticConfig) -> None:
    """Raises:
    UnavailableError: megatron-core is not installed.
    RequestError: the configuration asks for what this backend, or one process, cannot do.
    """
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        raise UnavailableError(
            "the Megatron critic needs megatron-core",
            file=config.path, expected="megatron-core >= 0.12", found="not installed",
            hint="pip install 'rldbg[parity]'",
        )  # fmt: skip
    if config.position_gap:
        raise RequestError(
            "position_gap needs position ids, and the Megatron critic counts slots", file=config.path,
            hint="set it on the other critic",
        )  # fmt: skip


def _transformer_config(built: Built, config: CriticConfig, shape: weights.Shape) -> Any:
    from megatron.core.transformer.transformer_config import (
        TransformerConfig,
    )

    hf = built.shape
    dtype = getattr(torch, config.dtype)
    scaling = _rope(hf).get("rope_type", "default")
    windowed = bool(getattr(hf, "sliding_window", None)) and bool(getattr(hf, "use_sliding_window", True))
    if hf.model_type not in _SUPPORTED or windowed or scaling != "default":
        raise UnavailableError(
            "the Megatron critic holds plain Llama, Qwen2 and Mistral backbones",
            file=config.pretrain,
            expected=", ".join(_SUPPORTED) + " without sliding windows or scaled positions",
            found=f"{hf.model_type}, rope {scaling}" + (", sliding window" if windowed else ""),
        )
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head_dim,
        ffn_hidden_size=hf.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=any(name.endswith("q_proj.bias") for name, _ in built.causal_lm.named_parameters()),
        hidden_dropout=0.0,
        attention_dropout=float(getattr(hf, "attention_dropout", 0.0) or 0.0),
        use_cpu_initialization=True,
        params_dtype=dtype,
        bf16=config.dtype == "bfloat16",
        fp16=config.dtype == "float16",
        attention_softmax_in_fp32=True,
        # Fused kernels are CUDA's.
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )


def _rope(hf: Any) -> dict[str, Any]:
    # transformers 5 keeps the base in rope_parameters, 4 beside rope_scaling.
    return dict(getattr(hf, "rope_parameters", None) or getattr(hf, "rope_scaling", None) or {})


def _rotary_base(hf: Any) -> float:
    base: Any = _rope(hf).get("rope_theta") or getattr(hf, "rope_theta", 10000.0)
    return float(base)


def _shift_positions(rotary: Any, offset: int) -> None:
    forward = rotary.forward

    def shifted(length: int, *args: Any, **kwargs: Any) -> Any:
        whole = forward(length + offset, *args, **kwargs)
        return whole[offset:]

    rotary.forward = shifted


class _NoTracker:
    """Megatron's tracker of CUDA random states, where there is no CUDA: nothing is kept apart."""

    @contextlib.contextmanager
    def fork(self, _name: str = "") -> Iterator[None]:
        yield

    def is_initialized(self) -> bool:
        return True

    def get_states(self) -> dict[str, Any]:
        return {}


def _answer_for_cpu(device: str) -> None:
    """Megatron-core asks CUDA for its random states and its current device. In this process the answer is the CPU."""
    if device != "cpu":
        from megatron.core.tensor_parallel.random import (
            model_parallel_cuda_manual_seed,
        )

        model_parallel_cuda_manual_seed(0)
        return
    from megatron.core.tensor_parallel import random as tracked

    tracked.initialize_rng_tracker()
    tracked._CUDA_RNG_STATE_TRACKER = _NoTracker()
    torch.cuda.current_device = lambda: "cpu"
