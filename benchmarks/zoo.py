"""Tiny models of many architectures, built by transformers and run as a trainer or an engine would, into dumps.

Each is random, briefly trained, or rescaled until some of its channels outweigh the rest, as those of real models do.
Everything is seeded. Nothing in here, nor in `planted.py` and `harmless.py`, knows what rldbg judges by.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from replay_core.recorder import Recorder

Tensor = torch.Tensor
VOCABULARY, HIDDEN, LAYERS = 256, 64, 3
#: Tokens of each sample.
LENGTHS = (40, 33, 25, 17, 9)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
KINDS = ("random", "trained", "rescaled")
LAYOUTS = ("right", "left", "wide", "packed", "alone", "shuffled")
#: The step that is recorded; step 0 has the weights of one update before.
STEP = 1

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "intermediate_size": 160, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED = {**_COMMON, "num_key_value_heads": 2}
_GEMMA = {**_GROUPED, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 12}


def configurations() -> dict[str, Any]:
    """A configuration of every architecture."""
    import transformers as hf

    return {
        "llama": hf.LlamaConfig(**_GROUPED),
        "qwen2": hf.Qwen2Config(**_GROUPED),
        "qwen3": hf.Qwen3Config(**_GROUPED, head_dim=16),
        "gemma2": hf.Gemma2Config(**_GEMMA, attn_logit_softcapping=20.0),
        "gemma3": hf.Gemma3TextConfig(
            **_GEMMA, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
        ),
        "mistral": hf.MistralConfig(**_GROUPED, sliding_window=12),
        "mixtral": hf.MixtralConfig(**_GROUPED, num_local_experts=8, num_experts_per_tok=2),
        "qwen3_moe": hf.Qwen3MoeConfig(
            **_GROUPED, head_dim=16, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=48,
            norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
        ),
        "gpt_neox": hf.GPTNeoXConfig(**_COMMON, rope_parameters={
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
        "deepseek_v3": hf.DeepseekV3Config(
            **_COMMON, num_key_value_heads=4, moe_intermediate_size=48, n_routed_experts=8, num_experts_per_tok=3,
            n_group=2, topk_group=1, first_k_dense_replace=1, kv_lora_rank=24, q_lora_rank=32, qk_rope_head_dim=8,
            qk_nope_head_dim=16, v_head_dim=16, num_mtp_layers=0,
        ),
        "phi": hf.PhiConfig(**_COMMON),
        "olmo2": hf.Olmo2Config(**_GROUPED),
        "granite": hf.GraniteConfig(
            **_GROUPED, residual_multiplier=0.7, attention_multiplier=0.2, embedding_multiplier=3.0, logits_scaling=2.0
        ),
        "starcoder2": hf.Starcoder2Config(**_GROUPED),
    }  # fmt: skip


ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral", "mixtral", "qwen3_moe", "gpt_neox",
                 "deepseek_v3")  # fmt: skip
#: Those that rules and limits were not made with: `fresh.py`.
FRESH = ("phi", "olmo2", "granite", "starcoder2")

#: The parts of a block by what they do, and what architectures call them.
PARTS = {
    "q": ("self_attn.q_proj", "self_attn.q_b_proj", "attention.query_key_value"),
    "k": ("self_attn.k_proj", "self_attn.kv_b_proj"),
    "v": ("self_attn.v_proj", "self_attn.kv_a_proj_with_mqa"),
    "o": ("self_attn.o_proj", "attention.dense", "self_attn.dense"),
    "gate": ("mlp.gate_proj", "mlp.shared_experts.gate_proj"),
    "up": ("mlp.up_proj", "mlp.shared_experts.up_proj", "mlp.dense_h_to_4h", "mlp.fc1", "mlp.c_fc"),
    "down": ("mlp.down_proj", "mlp.shared_experts.down_proj", "mlp.dense_4h_to_h", "mlp.fc2", "mlp.c_proj"),
    "act": ("mlp.act_fn", "mlp.act", "mlp.activation_fn", "mlp.shared_experts.act_fn"),
    "attention": ("self_attn", "attention"),
    "norm": ("input_layernorm",),
    "second_norm": ("post_attention_layernorm",),
    "q_norm": ("self_attn.q_norm", "self_attn.q_a_layernorm"),
    "mlp": ("mlp",),
    "router": ("mlp.gate",),
    "experts": ("mlp.experts",),
    "shared": ("mlp.shared_experts",),
}


@dataclass
class Running:
    """A model about to run, and what may be changed of it.

    layer: the block that a change is made in. older: the weights of one update before, by parameter name.
    adapter: what an adapter added to a weight that is merged here, by parameter name.
    attending: how attention is computed, by the number of its block.
    after: what happens to the log probabilities before they are recorded.
    """

    model: Any
    layer: int
    older: dict[str, Tensor]
    adapter: dict[str, Tensor]
    random: random.Random
    layout: str = "right"
    attention: str = "eager"
    head: Callable[[Tensor], Tensor] = lambda logits: logits
    after: Callable[[Tensor], Tensor] = lambda logprobs: logprobs

    @property
    def base(self) -> Any:
        return self.model.base_model

    @property
    def block(self) -> Any:
        return self.base.layers[self.layer]

    def part(self, name: str) -> Any | None:
        """The first module of the block with one of the names a part goes by; None where it has none."""
        for path in PARTS[name]:
            found = self.block
            for step in path.split("."):
                found = getattr(found, step, None)
                if found is None:
                    break
            if isinstance(found, torch.nn.Module):
                return found
        return None

    def name(self, module: Any) -> str:
        """What a dump calls a module."""
        found = next(name for name, other in self.model.named_modules() if other is module)
        return found.removeprefix("model.")

    def weight(self, module: Any, which: str = "weight") -> str:
        """The name of a module's parameter."""
        prefix = next(name for name, other in self.model.named_modules() if other is module)
        return f"{prefix}.{which}"

    def attend(self, layer: int | None = None) -> Attending:
        """How the attention of a block (of this one, if none is named) is computed, to be changed."""
        self.attention = "zoo"
        self.model.config._attn_implementation = "zoo"
        number = self.layer if layer is None else layer
        block = self.base.layers[number]
        module = getattr(block, "self_attn", None) or block.attention
        if "zoo" not in module.__dict__:
            module.zoo = Attending()
        return module.zoo  # type: ignore[no-any-return]


@dataclass
class Attending:
    """How one attention is computed.

    kernel: plain (as transformers' eager), fp32 (nothing rounded before the output), flash (blocks of keys, weights
    rounded to the storage dtype before they are normalised). The rest are hooks for what goes wrong.
    """

    kernel: str = "plain"
    scale: float = 1.0
    softcap: bool = True
    softmax: Callable[[Tensor], Tensor] = lambda scores: functional.softmax(scores, dim=-1, dtype=torch.float32)
    interleaved: bool = False
    mask: Callable[[Tensor | None, Tensor], Tensor | None] = lambda mask, query: mask
    see: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] = lambda q, k, v: (q, k, v)


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float,
    dropout: float = 0.0, softcap: float | None = None, **_: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """[B, H, T, D] queries on keys and values of as many heads or fewer, as `module.zoo` says."""
    how: Attending = module.__dict__.get("zoo") or Attending()
    query, key, value = how.see(query, key, value)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (
            one.repeat(1, groups, 1, 1) if how.interleaved else one.repeat_interleave(groups, dim=1)
            for one in (key, value)
        )
    mask, dtype = how.mask(attention_mask, query), query.dtype
    if how.kernel != "plain":
        query, key, value = query.float(), key.float(), value.float()
        mask = None if mask is None else mask.float()
    scores = torch.matmul(query, key.transpose(2, 3)) * (scaling * how.scale)
    if softcap is not None and how.softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask[..., : scores.shape[-1]]
    if how.kernel == "flash":
        out = _in_blocks(scores, value, dtype)
        return out.to(dtype).transpose(1, 2).contiguous(), None
    weights = how.softmax(scores).to(query.dtype)
    out = torch.matmul(weights, value).to(dtype).transpose(1, 2).contiguous()
    return out, weights if how.kernel == "plain" else None


def _in_blocks(scores: Tensor, value: Tensor, dtype: torch.dtype, size: int = 16) -> Tensor:
    """Softmax over blocks of keys, rescaled as the maximum grows; weights of a block in the storage dtype."""
    most = torch.full((*scores.shape[:-1], 1), float("-inf"))
    total, out = torch.zeros_like(most), torch.zeros((*scores.shape[:-1], value.shape[-1]))
    for start in range(0, scores.shape[-1], size):
        block = scores[..., start : start + size]
        grown = torch.maximum(most, block.amax(-1, keepdim=True))
        weights = torch.exp(block - grown)
        shrink = torch.exp(most - grown)
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + weights.to(dtype).float() @ value[..., start : start + size, :]
        most = grown
    return out / total


def around(module: Any, change: Callable[..., Any]) -> None:
    """Let `change(run, *args, **kwargs)` stand where a module's forward stood; hooks see what went in and came out."""
    run = module.forward
    module.forward = lambda *args, **kwargs: change(run, *args, **kwargs)


def samples() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def batches(layout: str) -> Iterator[dict[str, Tensor]]:
    """What a forward is given, of each micro-batch of a layout."""
    rows = samples()
    if layout == "packed":
        bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
        positions = torch.cat([torch.arange(length) for length in LENGTHS])
        yield {"input_ids": torch.cat(rows)[None], "position_ids": positions[None], "cu_seqlens": bounds}
        return
    if layout == "alone":
        for row in rows:
            yield _padded([row], row.numel(), left=False)
        return
    if layout == "shuffled":
        rows = [rows[at] for at in (3, 0, 4, 1, 2)]
    yield _padded(rows, max(LENGTHS) + 8 * (layout == "wide"), left=layout == "left")


def _padded(rows: list[Tensor], width: int, *, left: bool) -> dict[str, Tensor]:
    ids_BS, mask_BS = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for row, ids in enumerate(rows):
        where = slice(width - ids.numel(), None) if left else slice(0, ids.numel())
        ids_BS[row, where], mask_BS[row, where] = ids, 1
    return {"input_ids": ids_BS, "attention_mask": mask_BS, "position_ids": (mask_BS.cumsum(1) - 1).clamp(min=0)}


def forward(running: Running, given: dict[str, Tensor]) -> Tensor:
    """Log probabilities [B, S]: at t, of the token after t in its sample; 0 where there is none."""
    ids_BS = given["input_ids"]
    logits = running.model(
        input_ids=ids_BS, attention_mask=given.get("attention_mask"), position_ids=given["position_ids"],
        use_cache=False,
    ).logits  # fmt: skip
    logits = running.head(logits)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    logp_BS = torch.log_softmax(wide[:, :-1], -1).gather(-1, ids_BS[:, 1:, None])[..., 0]
    logp_BS = functional.pad(logp_BS, (0, 1))
    bounds = given.get("cu_seqlens")
    if bounds is not None:
        logp_BS[:, bounds[1:] - 1] = 0
    else:
        mask_BS = given["attention_mask"]
        logp_BS = logp_BS * mask_BS * functional.pad(mask_BS[:, 1:], (0, 1))
    return running.after(logp_BS)


def record(folder: Path, running: Running, dtype: str, weights: dict[int, Path] | None = None) -> None:
    """Run the model and write the dump of it. weights: the checkpoints that the dump notes, by step."""
    with Recorder(folder, flags={"dtype": dtype, "attention": running.attention}) as recorder:
        for step, where in (weights or {}).items():
            recorder.note_model(step, str(where))
        with recorder.step(STEP) as step, torch.no_grad():
            for micro, given in enumerate(batches(running.layout)):
                with step.modules(running.model, inputs=True, micro=micro):
                    logprobs = forward(running, given)
                step("forward_data", {**given, "log_probs": logprobs}, micro=micro)


@dataclass
class Zoo:
    """The models, made once: weights in a dtype, and on disk what a dump notes of them.

    folder: where weights are written. Keeps the fp32 masters of every (architecture, kind).
    """

    folder: Path
    _made: dict[tuple[str, str], tuple[Any, dict[str, Tensor], dict[str, Tensor]]] = field(default_factory=dict)
    _saved: dict[tuple[str, str, str], dict[int, Path]] = field(default_factory=dict)

    def running(self, architecture: str, kind: str, dtype: str, seed: int) -> Running:
        """A copy of a model in a dtype; `seed` says which block a change is made in, and other chances."""
        model, older, adapter = self._of(architecture, kind)
        chance = random.Random(seed)
        torch_dtype = DTYPES[dtype]
        copied = cast(copy.deepcopy(model).eval(), torch_dtype)
        copied.config._attn_implementation = "eager"
        layer = chance.randrange(1 if architecture == "deepseek_v3" else 0, LAYERS)
        before = {name: weight.to(torch_dtype) for name, weight in older.items()}
        return Running(copied, layer, before, adapter, chance)

    def weights(self, architecture: str, kind: str, dtype: str) -> dict[int, Path]:
        """The checkpoints of steps 0 and 1, as Hugging Face directories."""
        key = (architecture, kind, dtype)
        if key not in self._saved:
            running = self.running(*key, 0)
            where = {step: self.folder / "-".join((*key, str(step))) for step in (0, STEP)}
            running.model.save_pretrained(where[STEP])
            with torch.no_grad():
                for name, weight in running.model.named_parameters():
                    weight.copy_(running.older[name])
            running.model.save_pretrained(where[0])
            self._saved[key] = where
        return self._saved[key]

    def _of(self, architecture: str, kind: str) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
        key = (architecture, kind)
        if key not in self._made:
            self._made[key] = _made(architecture, kind)
        return self._made[key]


def cast(model: Any, dtype: torch.dtype) -> Any:
    """The model with its parameters in a dtype; rope's frequencies stay fp32, as loading a checkpoint leaves them."""
    kept = {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    model.to(dtype)
    for name, buffer in model.named_buffers():
        if name in kept:
            buffer.data = kept[name]
    return model


def _made(architecture: str, kind: str) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
    from transformers.masking_utils import eager_mask

    AttentionInterface.register("zoo", attend)
    AttentionMaskInterface.register("zoo", eager_mask)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(configurations()[architecture]), attn_implementation="eager", dtype=torch.float32
    )
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # expert by expert, in fp64 as well
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):  # transformers starts them at zero, where a missing one shows nowhere
                weight.normal_(0, 0.02, generator=generator)
            elif "norm" in name:
                weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1, generator=generator)
    if kind == "trained":
        _train(model)
    elif kind == "rescaled":
        _rescale(model, generator)
    adapter = {}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name and "lm_head" not in name:
                down, up = (torch.randn(size, 4, generator=generator) for size in weight.shape)
                adapter[name] = 0.02 * float(weight.std()) * down @ up.T
                weight.add_(adapter[name])
        # One Adam step of 1e-4 before: every weight moves about as far.
        older = {
            name: weight - 1e-4 * torch.sign(torch.randn(weight.shape, generator=generator))
            for name, weight in model.named_parameters()
        }
    return model.eval(), older, adapter


def _train(model: Any, steps: int = 60) -> None:
    """A few steps on sequences that repeat themselves: attention then looks somewhere."""
    generator = torch.Generator().manual_seed(5)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(steps):
        half = torch.randint(3, VOCABULARY, (8, 24), generator=generator)
        ids = torch.cat([half, half], dim=1)
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
    model.eval()


def _rescale(model: Any, generator: torch.Generator) -> None:
    """Weights as spread as those of large models are, attention that is sharp, and channels 30 times the rest."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                rows = torch.exp(0.5 * torch.randn(weight.shape[-2], 1, generator=generator))
                weight.mul_(rows * (1.0 if "embed" in name or "lm_head" in name else 4.0))
            elif "norm" in name:
                weight.mul_(torch.exp(0.3 * torch.randn(weight.shape, generator=generator)))
            elif name.endswith("bias"):
                weight.mul_(20.0)
        embedding = model.get_input_embeddings().weight
        embedding[:, [5, 41]] *= 30.0
