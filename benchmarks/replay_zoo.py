"""Model-side faults that a replay is to name, planted in tiny models of many architectures, and healthy models beside.

    python -m benchmarks.replay_zoo [faults|healthy|held-back] [--every N --start K] [--only NAME]

A fault changes the model, not the batch: what attention may see, its positions, what a norm averages over. Nothing in
here knows how a replay finds a cause. Half of the faults (`HELD_BACK`) were not looked at while the rules were made.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from replay_core.recorder import Recorder

F = torch.nn.functional
Tensor = torch.Tensor
#: (left padding, tokens, right padding).
LEFT = ((9, 17, 0), (0, 26, 0), (15, 11, 0), (3, 23, 0))
BOTH = ((4, 17, 5), (0, 24, 2), (12, 11, 3))
RIGHT = ((0, 26, 0), (0, 13, 13))
LONG = ((61, 50, 0), (0, 111, 0))
LAYOUTS = {"left": LEFT, "both": BOTH, "right": RIGHT, "long": LONG}
VOCABULARY = 128

OTHERS, PADDING, FUTURE, OWN = "other_samples", "padding", "future", "own_keys"
POSITIONS, STATE, BATCH, MATHS, RANDOM = "positions", "state", "batch", "maths", "random"


def configurations() -> dict[str, Callable[[], Any]]:
    """A configuration of every architecture."""
    import transformers as hf

    common: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 96, "max_position_embeddings": 256, "pad_token_id": None, "bos_token_id": None,
        "eos_token_id": None,
    }  # fmt: skip
    grouped = {**common, "num_key_value_heads": 2}
    experts = {"head_dim": 12, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    return {
        "llama": lambda: hf.LlamaConfig(**grouped),
        "qwen3": lambda: hf.Qwen3Config(**grouped, head_dim=12),
        "gemma2": lambda: hf.Gemma2Config(
            **grouped, head_dim=12, query_pre_attn_scalar=12, sliding_window=8, attn_logit_softcapping=20.0
        ),
        "gpt2": lambda: hf.GPT2Config(
            vocab_size=VOCABULARY, n_embd=48, n_layer=2, n_head=4, n_positions=256, bos_token_id=None,
            eos_token_id=None,
        ),
        "gpt_neox": lambda: hf.GPTNeoXConfig(**common),
        "mixtral": lambda: hf.MixtralConfig(**grouped, num_local_experts=4, num_experts_per_tok=2),
        "qwen3_moe": lambda: hf.Qwen3MoeConfig(**grouped, **experts),
        "mistral": lambda: hf.MistralConfig(**grouped, sliding_window=9),
        "falcon_h1": lambda: hf.FalconH1Config(
            **grouped, head_dim=12, mamba_d_ssm=48, mamba_n_heads=4, mamba_d_head=12, mamba_d_state=8,
            mamba_n_groups=1, mamba_d_conv=4, mamba_chunk_size=16,
        ),
        "lfm2": lambda: hf.Lfm2Config(**grouped, layer_types=["conv", "full_attention"], full_attn_idxs=[1]),
        "qwen3_next": lambda: hf.Qwen3NextConfig(
            **grouped, **experts, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=12,
            linear_value_head_dim=12, shared_expert_intermediate_size=48, layer_types=["linear_attention",
            "full_attention"],
        ),
        "gemma3": lambda: hf.Gemma3TextConfig(
            **grouped, head_dim=12, query_pre_attn_scalar=12, sliding_window=8, sliding_window_pattern=2
        ),
        "olmo2": lambda: hf.Olmo2Config(**grouped),
        "phi3": lambda: hf.Phi3Config(**grouped),
        "nanochat": lambda: hf.NanoChatConfig(**grouped),
        "deepseek_v3": lambda: hf.DeepseekV3Config(
            **common, num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
            v_head_dim=12, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=1,
            moe_intermediate_size=48, first_k_dense_replace=1,
        ),
    }  # fmt: skip


DENSE = ("llama", "qwen3", "gemma2", "gpt2", "gpt_neox", "mistral")
MIXTURES = ("mixtral", "qwen3_moe")
ATTENDING = (*DENSE, *MIXTURES)
#: Whose queries come from a projection of their own, and are not normed.
PROJECTING = ("llama", "gemma2", "mistral", "mixtral")
ROTATING = tuple(name for name in ATTENDING if name != "gpt2")
HYBRID = ("falcon_h1", "lfm2", "qwen3_next")
#: Replayed as they are alone: no fault is planted in them.
UNTOUCHED = ("gemma3", "olmo2", "phi3", "deepseek_v3", "nanochat")


@dataclass
class Call:
    """What the model was called with last, as its faults see it."""

    rows: int = 1
    width: int = 1
    mask_BS: Tensor | None = None
    positions_BS: Tensor | None = None

    @property
    def is_packed(self) -> bool:
        return self.rows == 1 and self.positions_BS is not None and int((self.positions_BS == 0).sum()) > 1

    @property
    def is_alone(self) -> bool:
        return self.rows == 1 and not self.is_packed and self.mask_BS is None

    @property
    def sample_T(self) -> Tensor:
        assert self.positions_BS is not None
        return (self.positions_BS[0] == 0).cumsum(0) - 1


@dataclass
class Patient:
    """A model whose calls are watched, so that a fault can depend on them."""

    model: Any
    call: Call = field(default_factory=Call)

    def __post_init__(self) -> None:
        def note(_module: Any, args: Any, kwargs: Any) -> None:
            ids, mask = kwargs.get("input_ids", args[0] if args else None), kwargs.get("attention_mask")
            if ids is None:
                return
            self.call.rows, self.call.width = ids.shape
            self.call.mask_BS = mask if mask is not None and mask.ndim == 2 else None
            self.call.positions_BS = kwargs.get("position_ids")

        self.model.base_model.register_forward_pre_hook(note, with_kwargs=True)

    def modules(self, *endings: str) -> list[Any]:
        return [module for name, module in self.model.base_model.named_modules() if name.endswith(endings)]

    @property
    def attentions(self) -> list[Any]:
        return [one for one in self.model.base_model.modules()
                if type(one).__name__.endswith("Attention") and hasattr(one, "config")]  # fmt: skip

    @property
    def norms(self) -> list[Any]:
        return self.modules("input_layernorm", "ln_1", "operator_norm")

    @property
    def mlps(self) -> list[Any]:
        return self.modules(".mlp", ".feed_forward", ".block_sparse_moe")

    def seeing(self, change: Callable[[Call, Tensor], Tensor], layers: slice = slice(None)) -> None:
        """Let attention of these layers see what `change` makes of [rows, 1, T, T] what it may see."""

        def hook(module: Any, args: Any, kwargs: Any) -> Any:
            hidden = kwargs.get("hidden_states", args[0] if args else None)
            width = hidden.shape[1]
            given = kwargs.get("attention_mask")
            place = None
            if given is None:
                place = next((n for n, one in enumerate(args) if torch.is_tensor(one) and one.ndim == 4), None)
                given = None if place is None else args[place]
            if given is None:
                allowed = (
                    torch.ones(width, width, dtype=torch.bool).tril()[None, None].expand(hidden.shape[0], 1, -1, -1)
                )
            else:
                allowed = given if given.dtype == torch.bool else given > -1.0
            changed = change(self.call, allowed.clone())
            eager = module.config._attn_implementation == "eager"
            mask = changed
            if eager:
                mask = torch.zeros(changed.shape, dtype=hidden.dtype).masked_fill(
                    ~changed, torch.finfo(hidden.dtype).min
                )
            if place is None:
                return args, {**kwargs, "attention_mask": mask}
            return (*args[:place], mask, *args[place + 1 :]), kwargs

        for one in self.attentions[layers]:
            one.register_forward_pre_hook(hook, with_kwargs=True)

    def given(self, change: Callable[[Call, Tensor], Tensor]) -> None:
        """Let the model work with what `change` makes of its positions [rows, T]."""

        def before(_module: Any, args: Any, kwargs: Any) -> Any:
            if "position_ids" in kwargs:
                return args, {**kwargs, "position_ids": change(self.call, kwargs["position_ids"])}
            return (args[0], change(self.call, args[1]), *args[2:]), kwargs

        for one in self.modules("rotary_emb"):
            one.register_forward_pre_hook(before, with_kwargs=True)
        for one in self.modules("wpe"):
            one.register_forward_pre_hook(lambda _m, args: (change(self.call, args[0]),))


def changed_output(module: Any, change: Callable[[Any, Tensor], Tensor]) -> None:
    """Let a module put out what `change(its input, its output)` makes of it."""

    def hook(_module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        given = args[0] if args else next(iter(kwargs.values()))
        if isinstance(output, tuple):
            return (change(given, output[0]), *output[1:])
        return change(given, output)

    module.register_forward_hook(hook, with_kwargs=True)


@dataclass(frozen=True)
class Fault:
    """One fault: its name, what it may be called, the settings that show it, where it can be planted."""

    name: str
    called: tuple[str, ...]
    flags: str
    plant: Callable[[Patient], None]
    architectures: tuple[str, ...] = ATTENDING
    layout: str = "both"
    #: The kernel that shows it; None: any.
    attention: str | None = None


FAULTS: list[Fault] = []


def fault(
    *called: str, flags: str, among: tuple[str, ...] = ATTENDING, layout: str = "both", attention: str | None = None
) -> Callable[[Callable[[Patient], None]], Callable[[Patient], None]]:
    def keep(plant: Callable[[Patient], None]) -> Callable[[Patient], None]:
        FAULTS.append(Fault(plant.__name__, called, flags, plant, among, layout, attention))
        return plant

    return keep


def _causal(width: int) -> Tensor:
    return torch.ones(width, width, dtype=torch.bool).tril()


def _segments(starts: Tensor, width: int) -> Tensor:
    """[T, T]: which token may see which where samples begin at `starts`."""
    begin = torch.zeros(width, dtype=torch.long)
    begin[starts[(starts >= 0) & (starts < width)]] = 1
    sample = begin.cumsum(0)
    return (sample[:, None] == sample) & _causal(width)


def _starts(call: Call) -> Tensor:
    assert call.positions_BS is not None
    return torch.nonzero(call.positions_BS[0] == 0)[:, 0]


PACK, PAD = "packing=on", "packing=off"


# ── what attention may see ──


@fault(OTHERS, flags=PACK)
def block_mask_dropped(patient: Patient) -> None:
    patient.seeing(lambda call, seen: _causal(seen.shape[-1])[None, None] if call.is_packed else seen)


@fault(OTHERS, flags=PACK)
def boundary_late(patient: Patient) -> None:
    patient.seeing(lambda call, seen: _segments(_starts(call)[1:] + 1, seen.shape[-1])[None, None]
                   if call.is_packed else seen)  # fmt: skip


@fault(OTHERS, flags=PACK)
def boundary_early(patient: Patient) -> None:
    patient.seeing(lambda call, seen: _segments(_starts(call)[1:] - 1, seen.shape[-1])[None, None]
                   if call.is_packed else seen)  # fmt: skip


@fault(OTHERS, flags=PACK)
def one_foreign_key(patient: Patient) -> None:
    def change(call: Call, seen: Tensor) -> Tensor:
        for start in _starts(call)[1:] if call.is_packed else ():
            seen[..., start, start - 1] = True
        return seen

    patient.seeing(change)


@fault(OTHERS, flags=PACK)
def last_sample_sees_the_first(patient: Patient) -> None:
    def change(call: Call, seen: Tensor) -> Tensor:
        if call.is_packed:
            seen[..., int(_starts(call)[-1]) :, 0] = True
        return seen

    patient.seeing(change)


@fault(OTHERS, flags=PACK)
def second_layer_without_block_mask(patient: Patient) -> None:
    patient.seeing(lambda call, seen: _causal(seen.shape[-1])[None, None] if call.is_packed else seen, slice(1, 2))


@fault(OTHERS, flags=PACK)
def samples_see_later_samples(patient: Patient) -> None:
    def change(call: Call, seen: Tensor) -> Tensor:
        if call.is_packed:
            seen[..., 0, int(_starts(call)[-1])] = True
        return seen

    patient.seeing(change)


@fault(FUTURE, flags=PACK)
def causal_mask_dropped(patient: Patient) -> None:
    patient.seeing(lambda call, seen: seen | seen.transpose(-1, -2))


@fault(FUTURE, flags=PAD)
def causal_mask_dropped_padded(patient: Patient) -> None:
    patient.seeing(lambda call, seen: seen if call.is_alone else seen | seen.transpose(-1, -2))


@fault(FUTURE, flags=PAD)
def one_ahead_visible(patient: Patient) -> None:
    def change(call: Call, seen: Tensor) -> Tensor:
        shown = seen[..., :-1, :-1] & True
        ahead = seen.clone()
        ahead[..., :-1, 1:] |= torch.eye(seen.shape[-1] - 1, dtype=torch.bool) & shown.any(-1, keepdim=True)
        return ahead

    patient.seeing(change)


@fault(FUTURE, flags=PACK)
def future_of_the_pack_in_one_layer(patient: Patient) -> None:
    patient.seeing(lambda call, seen: seen | seen.transpose(-1, -2) if call.is_packed else seen, slice(1, 2))


@fault(FUTURE, flags=PACK)
def last_token_visible(patient: Patient) -> None:
    def change(call: Call, seen: Tensor) -> Tensor:
        if call.is_alone:
            seen[..., :, -1] = True
        return seen

    patient.seeing(change)


@fault(PADDING, flags=PAD, layout="left")
def padding_visible(patient: Patient) -> None:
    patient.seeing(lambda call, seen: seen | _causal(seen.shape[-1]) if call.mask_BS is not None else seen)


@fault(PADDING, flags=PAD, layout="left")
def one_pad_visible(patient: Patient) -> None:
    def change(call: Call, seen: Tensor) -> Tensor:
        if call.mask_BS is not None:
            seen[..., :, 0] = True
        return seen

    patient.seeing(change)


@fault(PADDING, flags=PAD, layout="right")
def right_padding_visible(patient: Patient) -> None:
    def change(call: Call, seen: Tensor) -> Tensor:
        if call.mask_BS is None:
            return seen
        return seen | ~call.mask_BS.bool()[:, None, None, :]

    patient.seeing(change)


@fault(PADDING, flags=PAD, layout="left")
def padding_visible_in_the_second_layer(patient: Patient) -> None:
    patient.seeing(lambda call, seen: seen | _causal(seen.shape[-1]) if call.mask_BS is not None else seen,
                   slice(1, 2))  # fmt: skip


def _without(seen: Tensor, keys: Tensor) -> Tensor:
    """`seen` without these keys, but for a token's own."""
    return seen & ~(keys & ~torch.eye(seen.shape[-1], dtype=torch.bool))


@fault(OWN, flags=PACK)
def first_key_masked(patient: Patient) -> None:
    def change(call: Call, seen: Tensor) -> Tensor:
        first = torch.zeros(seen.shape[-1], dtype=torch.bool)
        first[_starts(call) if call.is_packed else 0] = True
        return seen if call.mask_BS is not None else _without(seen, first)

    patient.seeing(change)


@fault(OWN, flags=PACK)
def first_key_masked_in_the_pack(patient: Patient) -> None:
    def change(call: Call, seen: Tensor) -> Tensor:
        first = torch.zeros(seen.shape[-1], dtype=torch.bool)
        first[_starts(call)] = True
        return _without(seen, first) if call.is_packed else seen

    patient.seeing(change)


def _far(width: int, least: int) -> Tensor:
    at = torch.arange(width)
    return (at[:, None] - at) >= least


@fault(OWN, flags=PACK, among=("llama", "qwen3", "gpt2", "gpt_neox", *MIXTURES))
def window_in_the_pack(patient: Patient) -> None:
    patient.seeing(lambda call, seen: seen & ~_far(seen.shape[-1], 4) if call.is_packed else seen)


@fault(OWN, flags=PAD)
def neighbour_masked_when_padded(patient: Patient) -> None:
    def change(call: Call, seen: Tensor) -> Tensor:
        at = torch.arange(seen.shape[-1])
        return seen if call.is_alone else seen & ~((at[:, None] - at) == 1)

    patient.seeing(change)


@fault(OWN, flags=PACK)
def second_half_does_not_see_the_first(patient: Patient) -> None:
    def change(call: Call, seen: Tensor) -> Tensor:
        if call.is_packed and call.positions_BS is not None:
            late = call.positions_BS[0] >= 6
            seen = seen & ~(late[:, None] & ~late)
        return seen

    patient.seeing(change)


# ── positions ──


@fault(POSITIONS, flags=PACK)
def positions_doubled(patient: Patient) -> None:
    patient.given(lambda call, positions: positions if call.is_alone else positions * 2)


@fault(POSITIONS, flags=PAD)
def positions_clipped(patient: Patient) -> None:
    patient.given(lambda call, positions: positions if call.is_alone else positions.clamp(max=5))


@fault(POSITIONS, flags=PACK)
def positions_reversed(patient: Patient) -> None:
    patient.given(lambda call, positions: positions if call.is_alone else positions.flip(-1))


@fault(POSITIONS, flags=PACK, among=("gpt2",))
def positions_count_on(patient: Patient) -> None:
    patient.given(lambda call, positions: torch.arange(call.width)[None] if call.is_packed else positions)


@fault(POSITIONS, flags=PAD)
def positions_all_zero(patient: Patient) -> None:
    patient.given(lambda call, positions: positions if call.is_alone else positions * 0)


@fault(POSITIONS, flags=PACK, among=ROTATING)
def rotation_depends_on_the_length(patient: Patient) -> None:
    def change(call: Call, turned: Any) -> Any:
        return turned if call.width < 30 else turned.roll(1, -1)

    for one in patient.modules("rotary_emb"):
        one.register_forward_hook(lambda _m, _a, out: tuple(change(patient.call, part) for part in out))


# ── state ──


@fault(STATE, flags=PACK, among=HYBRID)
def state_runs_through_the_pack(patient: Patient) -> None:
    """As the library is: nothing tells a convolution or a recurrence where a sample begins."""


@fault(STATE, flags=PACK, among=(*ATTENDING, *HYBRID))
def state_kept_between_calls(patient: Patient) -> None:
    kept: dict[str, Tensor] = {}
    for layer in patient.norms[:1]:

        def carry(_given: Any, output: Tensor) -> Tensor:
            before = kept.get("last")
            kept["last"] = output[:1, -1:].detach()
            return output if before is None else output + 0.3 * before.to(output.dtype)

        changed_output(layer, carry)


# ── the batch ──


@fault(BATCH, flags=PACK)
def norm_over_the_batch(patient: Patient) -> None:
    for one in patient.norms[:1]:
        changed_output(one, lambda _given, output: output - 0.5 * output.mean(dim=(0, 1), keepdim=True))


@fault(BATCH, flags=PAD)
def norm_over_the_batch_padded(patient: Patient) -> None:
    for one in patient.norms[-1:]:
        changed_output(one, lambda _given, output: output - 0.5 * output.mean(dim=(0, 1), keepdim=True))


@fault(BATCH, flags=PAD)
def scaled_by_the_greatest(patient: Patient) -> None:
    for one in patient.mlps[:1]:
        changed_output(one, lambda _given, output: output / output.abs().amax())


@fault(BATCH, flags=PAD)
def mean_over_the_rows(patient: Patient) -> None:
    for one in patient.mlps[:1]:
        changed_output(one, lambda _given, output: output - 0.5 * output.mean(dim=0, keepdim=True)
                       if output.ndim == 3 and output.shape[0] > 1 else output)  # fmt: skip


@fault(BATCH, flags=PAD)
def scaled_by_the_number_of_rows(patient: Patient) -> None:
    for one in patient.mlps:
        changed_output(one, lambda _given, output: output * (1 + 0.3 * (patient.call.rows - 1)))


@fault(BATCH, flags=PACK, among=MIXTURES)
def experts_of_limited_capacity(patient: Patient) -> None:
    def change(given: Tensor, output: Tensor) -> Tensor:
        flat = output.reshape(-1, output.shape[-1])
        busiest = given.reshape(-1, given.shape[-1])[:, 0]
        keep = busiest.argsort(descending=True)[: max(1, flat.shape[0] // 2)]
        mask = torch.zeros(flat.shape[0], 1, dtype=flat.dtype)
        mask[keep] = 1
        return (flat * mask).reshape(output.shape)

    for one in patient.mlps:
        changed_output(one, change)


# ── other weights or maths ──


@fault(MATHS, flags=PAD)
def residual_scaled_when_padded(patient: Patient) -> None:
    for one in patient.mlps[-1:]:
        changed_output(one, lambda _given, output: output if patient.call.is_alone else output * 1.3)


@fault(MATHS, flags=PACK)
def attention_scaled_in_the_pack(patient: Patient) -> None:
    for one in patient.attentions:

        def before(module: Any, _args: Any) -> None:
            module.own_scale = getattr(module, "own_scale", module.scaling)
            module.scaling = module.own_scale * (1 if patient.call.is_alone else 1.5)

        one.register_forward_pre_hook(before)


@fault(MATHS, flags=PACK)
def channels_rolled_in_the_pack(patient: Patient) -> None:
    for one in patient.mlps[:1]:
        changed_output(one, lambda _given, output: output if patient.call.is_alone else output.roll(1, -1))


@fault(MATHS, flags=PAD)
def other_weights_when_padded(patient: Patient) -> None:
    for one in patient.mlps[:1]:
        changed_output(one, lambda given, output: output if patient.call.is_alone else output + 0.1 * given)


@fault(MATHS, flags=PAD)
def norm_without_its_weight_when_padded(patient: Patient) -> None:
    for one in patient.norms[1:]:
        changed_output(one, lambda _given, output: output if patient.call.is_alone else output * 0.8 + 0.01)


@fault(MATHS, flags=PAD)
def attention_put_out_as_nothing_when_padded(patient: Patient) -> None:
    for one in patient.attentions[1:]:
        last = next(getattr(one, name) for name in ("o_proj", "c_proj", "dense") if hasattr(one, name))
        changed_output(last, lambda _given, output: output if patient.call.is_alone else output * 0)


@fault(MATHS, flags=PACK, among=MIXTURES)
def experts_permuted_in_the_pack(patient: Patient) -> None:
    def before(module: Any, args: Any) -> Any:
        hidden, chosen, weights = args
        return hidden, chosen if patient.call.is_alone else (chosen + 1) % module.num_experts, weights

    for one in patient.modules(".experts")[:1]:
        one.register_forward_pre_hook(before)


@fault(OWN, flags=PAD)
def own_key_masked(patient: Patient) -> None:
    patient.seeing(lambda call, seen: seen if call.is_alone else _without_itself(seen))


@fault(OWN, flags=PACK)
def past_lost_in_the_second_layer(patient: Patient) -> None:
    patient.seeing(lambda call, seen: seen & torch.eye(seen.shape[-1], dtype=torch.bool) if call.is_packed else seen,
                   slice(1, 2))  # fmt: skip


@fault(STATE, flags=PAD)
def every_other_call_goes_without_the_last_mlp(patient: Patient) -> None:
    calls = [0]

    def change(_given: Tensor, put: Tensor) -> Tensor:
        calls[0] += 1
        return put * (calls[0] % 2)

    changed_output(patient.mlps[-1], change)


@fault(STATE, flags=PAD)
def every_third_call_is_louder(patient: Patient) -> None:
    calls = [0]

    def change(_given: Tensor, put: Tensor) -> Tensor:
        calls[0] += 1
        return put * (1.4 if calls[0] % 3 == 0 else 1.0)

    changed_output(patient.mlps[0], change)


@fault(OWN, flags=PAD)
def a_head_sees_only_itself(patient: Patient) -> None:
    def change(_call: Call, seen: Tensor) -> Tensor:
        heads = next(one for one in patient.attentions).config.num_attention_heads
        changed = seen.expand(-1, heads, -1, -1).clone()
        if not patient.call.is_alone:
            changed[:, 1] &= torch.eye(seen.shape[-1], dtype=torch.bool)
        return changed

    patient.seeing(change)


@fault(OWN, flags=PACK)
def a_head_loses_three_keys(patient: Patient) -> None:
    def change(call: Call, seen: Tensor) -> Tensor:
        heads = next(one for one in patient.attentions).config.num_attention_heads
        changed = seen.expand(-1, heads, -1, -1).clone()
        if call.is_packed:
            assert call.positions_BS is not None
            lost = (call.positions_BS[0] >= 3) & (call.positions_BS[0] <= 5)
            changed[:, 2] &= ~lost[None, :] | torch.eye(seen.shape[-1], dtype=torch.bool)
        return changed

    patient.seeing(change, slice(1, 2))


@fault(OTHERS, flags=PACK)
def two_tokens_change_places(patient: Patient) -> None:
    def change(_given: Tensor, put: Tensor) -> Tensor:
        starts = torch.nonzero(patient.call.positions_BS[0] == 0)[:, 0].tolist() if patient.call.is_packed else []
        if len(starts) < 2 or min(starts[1], put.shape[1] - starts[1]) < 3:
            return put
        places = torch.arange(put.shape[1])
        places[[starts[0] + 2, starts[1] + 2]] = places[[starts[1] + 2, starts[0] + 2]]
        return put[:, places]

    changed_output(patient.mlps[-1], change)


@fault(OTHERS, STATE, flags=PACK)
def token_shift_over_boundaries(patient: Patient) -> None:
    def change(_given: Tensor, put: Tensor) -> Tensor:
        if not patient.call.is_packed:
            return put
        before = F.pad(put, (0, 0, 1, 0))[:, :-1]
        return put + 0.5 * before * F.pad(patient.call.sample_T.diff(), (1, 0))[None, :, None]

    changed_output(patient.norms[0], change)


@fault(PADDING, flags=PAD, layout="left")
def token_shift_reads_padding(patient: Patient) -> None:
    changed_output(patient.norms[-1], lambda _given, put: put + 0.5 * F.pad(put, (0, 0, 1, 0))[:, :-1])


def _without_itself(seen: Tensor) -> Tensor:
    """`seen` without every token's own key, but where it is all there is."""
    itself = torch.eye(seen.shape[-1], dtype=torch.bool)
    others = seen & ~itself
    return others | (itself & ~others.any(-1, keepdim=True))


# ── draws, what is kept from the first call, how much there is of what is not seen, kernels of one's own ──


@fault(RANDOM, flags=PAD)
def dropout_on_when_padded(patient: Patient) -> None:
    changed_output(patient.mlps[-1], lambda _given, put: put if patient.call.is_alone else F.dropout(put, 0.2))


@fault(RANDOM, flags=PACK)
def noise_in_the_pack(patient: Patient) -> None:
    changed_output(
        patient.norms[1], lambda _given, put: put if patient.call.is_alone else put + 0.1 * torch.randn_like(put)
    )


@fault(BATCH, flags=PACK, among=MIXTURES)
def places_taken_in_order_of_arrival(patient: Patient) -> None:
    def change(given: Tensor, put: Tensor) -> Tensor:
        if patient.call.is_alone:
            return put
        flat = put.reshape(-1, put.shape[-1])
        chosen = F.one_hot(given.reshape(flat.shape)[:, :4].argmax(-1), 4)
        kept = (chosen.cumsum(0) * chosen).sum(-1) <= 6
        return (flat * kept[:, None]).reshape(put.shape)

    for one in patient.mlps[-1:]:
        changed_output(one, change)


@fault(BATCH, flags=PACK)
def mlp_scaled_by_the_number_of_samples(patient: Patient) -> None:
    def change(_given: Tensor, put: Tensor) -> Tensor:
        count = int(patient.call.sample_T[-1]) + 1 if patient.call.is_packed else 1
        return put * (1 + 0.2 * (count - 1))

    changed_output(patient.mlps[0], change)


@fault(STATE, OTHERS, flags=PAD)
def first_tokens_of_rows_alone_kept_for_ever(patient: Patient) -> None:
    held: list[Tensor] = []

    def change(_given: Tensor, put: Tensor) -> Tensor:
        if not patient.call.is_alone or put.ndim != 3:
            return put
        if not held:
            held.append(put[:, :2].detach().clone())
        size = min(put.shape[1], held[0].shape[1])
        return torch.cat([held[0][:, :size].to(put.dtype), put[:, size:]], dim=1)

    changed_output(patient.mlps[-1], change)


@fault(STATE, OTHERS, flags=PAD)
def running_sum_over_all_rows(patient: Patient) -> None:
    def change(given: Tensor, put: Tensor) -> Tensor:
        if patient.call.is_alone:
            return put
        held, ran = torch.zeros(given.shape[-1], dtype=given.dtype), []
        for token in given.reshape(-1, given.shape[-1]):
            held = 0.97 * held + token
            ran.append(held)
        rows = torch.stack(ran).reshape(given.shape)
        # Of a row itself nothing: only what the rows before it left.
        before = rows[:-1, -1:] if rows.shape[0] > 1 else rows[:0, :1]
        decay = 0.97 ** torch.arange(1, given.shape[1] + 1, dtype=given.dtype)[None, :, None]
        return put + 0.1 * F.pad(before, (0, 0, 0, 0, 1, 0)) * decay

    changed_output(patient.norms[-1], change)


@fault(BATCH, flags=PAD, among=PROJECTING)
def queries_scaled_by_the_padded_width(patient: Patient) -> None:
    last = patient.modules(".q_proj")[-1]
    changed_output(last, lambda _given, put: put * (patient.call.width / 16 if patient.call.mask_BS is not None else 1))


@fault(MATHS, flags=PAD, among=PROJECTING)
def values_rounded_to_eighths_when_padded(patient: Patient) -> None:
    for one in patient.modules(".v_proj"):
        changed_output(one, lambda _given, put: put if patient.call.is_alone else (put * 8).round() / 8)


def _turned(patient: Patient, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    """Let the last attention rotate by what `change` makes of its cosines and sines."""

    def before(_module: Any, args: Any, kwargs: Any) -> Any:
        if patient.call.is_alone:
            return args, kwargs
        return args, {**kwargs, "position_embeddings": change(*kwargs["position_embeddings"])}

    patient.attentions[-1].register_forward_pre_hook(before, with_kwargs=True)


@fault(POSITIONS, flags=PAD, among=ROTATING)
def last_layer_turns_by_twice_the_positions(patient: Patient) -> None:
    _turned(patient, lambda cos, sin: (cos * cos - sin * sin, 2 * sin * cos))


@fault(POSITIONS, flags=PACK, among=ROTATING)
def last_layer_turns_the_other_way(patient: Patient) -> None:
    _turned(patient, lambda cos, sin: (cos, -sin))


@fault(FUTURE, flags=PAD)
def mlp_looks_one_ahead_everywhere(patient: Patient) -> None:
    changed_output(patient.mlps[0], lambda given, put: put + 0.5 * F.pad(given.reshape(put.shape), (0, 0, 0, 1))[:, 1:]
                   if put.ndim == 3 else put)  # fmt: skip


def _own_kernel(patient: Patient, name: str, change: Callable[[Tensor], Tensor], scale: float = 1.0) -> None:
    """Let the model attend by a kernel of its own that sees what `change` makes of [T, T] what it may see."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    def kernel(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None,
        **_more: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        width = query.shape[2]
        allowed = _causal(width)[None, None].expand(query.shape[0], query.shape[1], -1, -1)
        if mask is not None:
            allowed = (mask[..., :width] > -1.0).expand_as(allowed)
        seen = allowed & change(allowed)
        scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling) * scale
        held = torch.softmax(scores.masked_fill(~seen, torch.finfo(scores.dtype).min).float(), -1).to(query.dtype)
        return (held @ value).transpose(1, 2).contiguous(), None

    AttentionInterface.register(name, kernel)
    AttentionMaskInterface.register(name, eager_mask)
    patient.model.set_attn_implementation(name)


@fault(OWN, flags=PAD, among=("llama", "qwen3", "mixtral", "gpt_neox", "gpt2"), attention="own", layout="right")
def own_kernel_skips_a_tile(patient: Patient) -> None:
    def change(seen: Tensor) -> Tensor:
        kept = torch.ones_like(seen)
        kept[:, -2:, 12:, 4:8] = False
        return kept

    _own_kernel(patient, "zoo_skips_a_tile", change)


@fault(OWN, flags=PACK, among=("llama", "qwen3", "mixtral", "gpt_neox", "gpt2"), attention="own")
def own_kernel_forgets_what_is_far(patient: Patient) -> None:
    _own_kernel(
        patient, "zoo_forgets", lambda seen: ~torch.ones(seen.shape[-2:], dtype=torch.bool).tril(-10).expand_as(seen)
    )


@fault(MATHS, flags=PAD, among=("llama", "qwen3", "mixtral", "gpt_neox", "gpt2"), attention="own")
def own_kernel_doubles_the_scores(patient: Patient) -> None:
    _own_kernel(patient, "zoo_doubles", torch.ones_like, 2.0)


# ── biases of the positions, keys that only their own token sees, who is chosen of all, rows exchanged by two ──


@fault(POSITIONS, flags=PAD, among=("llama", "qwen3", "mistral", "mixtral"))
def distances_counted_by_fours_in_the_batch(patient: Patient) -> None:
    def before(module: Any, args: Any, kwargs: Any) -> Any:
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        at = torch.arange(hidden.shape[1])
        apart = (at[:, None] - at).clamp(min=0)
        bias = -0.1 * (apart if patient.call.is_alone else apart // 4 * 4)
        given = kwargs.get("attention_mask")
        if given is None or given.dtype == torch.bool:
            allowed = _causal(hidden.shape[1])[None, None] if given is None else given
            given = torch.zeros(allowed.shape, dtype=hidden.dtype)
            given = given.masked_fill(~allowed, torch.finfo(hidden.dtype).min)
        return args, {**kwargs, "attention_mask": given + bias.to(hidden.dtype)}

    for one in patient.attentions:
        one.register_forward_pre_hook(before, with_kwargs=True)


@fault(OWN, flags=PAD, layout="left")
def last_column_of_keys_lost(patient: Patient) -> None:
    def change(call: Call, seen: Tensor) -> Tensor:
        if call.is_alone:
            return seen
        kept = seen.clone()
        kept[..., -1] = False
        return torch.where(kept.any(-1, keepdim=True), kept, seen)

    patient.seeing(change)


@fault(BATCH, flags=PAD)
def experts_choose_of_all_tokens(patient: Patient) -> None:
    def change(given: Tensor, put: Tensor) -> Tensor:
        if patient.call.is_alone:
            return put
        scores = given.reshape(-1, given.shape[-1])[:, :4]
        chosen = torch.zeros_like(scores).scatter_(0, scores.topk(scores.shape[0] // 3, dim=0).indices, 1.0)
        return (put.reshape(-1, put.shape[-1]) * (0.5 + 0.25 * chosen.sum(1, keepdim=True))).reshape(put.shape)

    changed_output(patient.mlps[0], change)


@fault(OTHERS, flags=PAD, layout="long")
def two_rows_change_places(patient: Patient) -> None:
    changed_output(patient.mlps[0], lambda _given, put: put.roll(1, 0) if put.ndim == 3 else put)


@fault(BATCH, flags=PAD, among=PROJECTING, layout="right")
def values_quantised_by_the_greatest_of_the_batch(patient: Patient) -> None:
    def change(_given: Tensor, put: Tensor) -> Tensor:
        step = put.abs().amax() / 16
        return (put / step).round() * step

    for one in patient.modules(".v_proj"):
        changed_output(one, change)


@fault(OWN, PADDING, flags=PAD, among=("llama", "qwen3", "mistral"), layout="left")
def first_tokens_are_let_see_nothing(patient: Patient) -> None:
    def change(call: Call, seen: Tensor) -> Tensor:
        if call.mask_BS is None:
            return seen
        first = call.mask_BS.bool() & (call.mask_BS.cumsum(1) <= 2)
        return seen & ~first[:, None, :, None]

    patient.seeing(change)


# ── the content of padding, or its length alone ──


@fault(BATCH, flags=PAD)
def mlp_scaled_by_the_padded_length(patient: Patient) -> None:
    """By how long the row is with its padding, as a loss scale of slots is."""
    changed_output(
        patient.mlps[-1], lambda _given, put: put if patient.call.is_alone else put * (patient.call.width / 16) ** 0.5
    )


@fault(BATCH, flags=PAD, among=PROJECTING, layout="left")
def values_scaled_by_tiles_of_16(patient: Patient) -> None:
    """By how many tiles the padded row fills: a few columns more are the same."""
    changed_output(patient.modules(".v_proj")[0], lambda _given, put: put * (1 + 0.2 * (patient.call.width // 16)))


@fault(PADDING, flags=PAD, among=PROJECTING, layout="left")
def padding_adds_to_the_first_values(patient: Patient) -> None:
    """The last slot of a row's padding in the value of its first token, whatever attention may see."""

    def change(_given: Tensor, put: Tensor) -> Tensor:
        mask_BS = patient.call.mask_BS
        if mask_BS is None:
            return put
        begins_BS = mask_BS.bool() & (mask_BS.cumsum(1) == 1)
        return put + 0.5 * F.pad(put, (0, 0, 1, 0))[:, :-1] * begins_BS[..., None]

    changed_output(patient.modules(".v_proj")[0], change)


@fault(POSITIONS, flags=PAD, among=PROJECTING, layout="left")
def frequencies_follow_the_padded_length(patient: Patient) -> None:
    """As dynamic NTK and longrope have them past a length, but of the padded one."""

    def stretched(turned: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        cos, sin = turned
        return cos * cos - sin * sin, 2 * sin * cos

    for one in patient.modules("rotary_emb"):
        one.register_forward_hook(lambda _module, _args, put: put if patient.call.mask_BS is None else stretched(put))


#: Faults that the rules were not made with.
HELD_BACK = tuple(one.name for one in FAULTS[1::2])


# ── running ──

_NOW: dict[str, Any] = {}


def build() -> Any:
    """The model that `factory:benchmarks.replay_zoo:build` means now."""
    model, plant = made(_NOW["architecture"], _NOW["std"], _NOW["trained"]), _NOW["plant"]
    if plant is not None:
        plant(Patient(model))
    return model


_MADE: dict[Any, dict[str, Tensor]] = {}


def made(architecture: str, std: float, trained: bool) -> Any:
    """A model drawn with this standard deviation, trained for a few steps where asked."""
    import transformers as hf

    config = configurations()[architecture]()
    config.initializer_range = std
    torch.manual_seed(zlib.crc32(f"{architecture}{std}".encode()))
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    key = (architecture, std, trained)
    if trained and key not in _MADE:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(25):
            start = torch.randint(4, 60, (8, 1))
            ids = (start + torch.arange(24) * 3) % (VOCABULARY - 4) + 4
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
        _MADE[key] = {name: one.detach().clone() for name, one in model.state_dict().items()}
    if trained:
        model.load_state_dict(_MADE[key])
    return model.eval()


class Here:
    """Runs jobs in this process, every one with its own model."""

    def run(self, job: Any, on_event: Any = lambda _event: None) -> Any:
        from replay_core.desk import perform

        return perform(job, on_event)


def dumped(folder: Path, layout: str) -> Path:
    """A recorded micro-batch of a layout."""
    path = folder / layout
    if not path.exists():
        rows = LAYOUTS[layout]
        generator = torch.Generator().manual_seed(len(rows))
        width = sum(rows[0])
        ids = torch.randint(4, VOCABULARY - 4, (len(rows), width), generator=generator)
        mask = torch.tensor([[0] * left + [1] * tokens + [0] * right for left, tokens, right in rows])
        with Recorder(path) as recorder, recorder.step(0) as record:
            record("forward_data", micro=0, input_ids=ids, attention_mask=mask, response_mask=mask.bool())
    return path


def replayed(folder: Path, layout: str, flags: str, architecture: str, std: float, trained: bool,
             plant: Callable[[Patient], None] | None, *, why: bool = False) -> Any:  # fmt: skip
    """The document of one replay."""
    from replay_core import workbench
    from replay_core.replay.flags import Flags
    from replay_core.replay.held import HOLDER

    HOLDER.drop()
    _NOW.update(architecture=architecture, std=std, trained=trained, plant=plant)
    plan = {
        "dump": str(dumped(folder, layout)), "model": "factory:benchmarks.replay_zoo:build",
        "forward_path": str(Path(__file__).parent.parent), "flags": Flags.parse(f"threads=1 {flags}").to_mapping(),
        "step": 0, "rank": 0, "micro": 0,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir=folder) as out:
        return workbench.replay(plan, Path(out), Here(), why=why)


def cases(names: tuple[str, ...] | None = None) -> Iterator[tuple[Fault, str, str]]:
    """Every fault in every architecture and dtype it can be planted in."""
    for one in FAULTS:
        for architecture in one.architectures if names is None or one.name in names else ():
            for dtype in ("float32", "bfloat16"):
                yield one, architecture, dtype


def run_faults(folder: Path, chosen: list[tuple[Fault, str, str]], most_s: float) -> None:
    """Every case, and a table of how many of each kind were named right, also where it is interrupted."""
    counts: Counter[str] = Counter()
    by_kind: Counter[tuple[str, str]] = Counter()
    with contextlib.suppress(KeyboardInterrupt):
        _run_faults(folder, chosen, most_s, counts, by_kind)
    words = ("right", "wrong", "missed", "error")
    _say(f"{'planted':14}" + "".join(f"{word:>8}" for word in words))
    for kind in dict.fromkeys(kind for kind, _ in by_kind):
        _say(f"{kind:14}" + "".join(f"{by_kind[kind, word]:8}" for word in words))
    total = sum(counts.values())
    _say(f"{dict(counts)}: cause right in {counts['right']} of {total} ({100 * counts['right'] / max(1, total):.1f} %)")


def _run_faults(
    folder: Path, chosen: list[tuple[Fault, str, str]], most_s: float, counts: Counter[str],
    by_kind: Counter[tuple[str, str]],
) -> None:  # fmt: skip
    for one, architecture, dtype in chosen:
        if time.process_time() > most_s:
            break
        chance = random.Random(zlib.crc32(f"{one.name}{architecture}{dtype}".encode()))
        std, trained = chance.choice((0.05, 0.1, 0.2)), chance.random() < 0.4
        attention = one.attention or chance.choice(("sdpa", "eager"))
        flags = f"{one.flags} dtype={dtype} attention={attention}"
        doc = replayed(folder, one.layout, flags, architecture, std, trained, one.plant)
        cells = [doc["cells"][doc["baseline"]], *(cell for cell in doc["cells"] if cell["part"] != "reference")]
        wrong = [cell for cell in cells if cell["agreement"]["agrees"] is False]
        kinds = [cell["cause"]["kind"] for cell in wrong]
        errors = [cell["error"]["message"] for cell in cells if cell["error"]]
        asked = [cell["cause"]["kind"] for cell in wrong if cell["part"] == "cell"] or kinds[:1]
        ok = bool(asked) and all(kind in one.called for kind in asked)
        word = "right" if ok else "missed" if not wrong else "wrong"
        word = "error" if errors else word
        counts[word] += 1
        by_kind[one.called[0], word] += 1
        if word != "right":
            said = wrong[-1]["cause"]["sentence"] if wrong else "; ".join(errors)
            _say(
                f"{word:6} {one.name} {architecture} {dtype} {attention} std {std} {'trained ' * trained}: "
                f"{kinds} {said}"
            )


def run_healthy(folder: Path, dtypes: tuple[str, ...], part: slice) -> None:
    false = cells_seen = cleared = 0
    grid = [
        (architecture, std, trained, layout, flags, dtype)
        for architecture in (*ATTENDING, *UNTOUCHED, *HYBRID)
        for std, trained in ((0.02, False), (0.05, False), (0.08, False), (0.2, False), (0.08, True))
        for layout, flags in (
            ("right", PAD), ("long", PAD), ("both", PACK), ("long", PACK), ("left", f"{PAD} attention=eager")
        )
        if flags != PACK or architecture not in HYBRID
        for dtype in dtypes
    ]  # fmt: skip
    for architecture, std, trained, layout, flags, dtype in grid[part]:
        doc = replayed(folder, layout, f"{flags} dtype={dtype}", architecture, std, trained, None)
        for cell in doc["cells"]:
            if cell["part"] == "reference" and cell["agreement"]["agrees"] is None:
                continue
            cells_seen += 1
            cleared += cell["agreement"]["agrees"] is True and cell["cause"] is not None
            if cell["agreement"]["agrees"] is not True:
                false += 1
                said = (cell["cause"] or {}).get("sentence") or (cell["error"] or {}).get("message")
                evidence = (cell["cause"] or {}).get("evidence") or {}
                _say(
                    f"false  {architecture} {dtype} std {std} {'trained ' * trained}{layout} {flags} "
                    f"{cell['part']}: {said} {evidence.get('truth')}"
                )
    _say(f"{cells_seen} healthy cells: {false} false alarms; {cleared} would have been by limits alone")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("faults", "healthy", "held-back"))
    parser.add_argument("--every", type=int, default=1, help="take one case of so many")
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--only", default=None)
    parser.add_argument("--cpu-s", type=float, default=1e9, help="begin no further fault after so many CPU seconds")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    part = slice(asked.start, None, asked.every)
    with tempfile.TemporaryDirectory(prefix="rldbg-zoo-") as folder:
        if asked.what == "healthy":
            run_healthy(Path(folder), ("bfloat16",), part)
            return
        back = asked.what == "held-back"
        names = tuple(one.name for one in FAULTS if (one.name in HELD_BACK) == back)
        if asked.only:
            names = tuple(asked.only.split(","))
        run_faults(Path(folder), list(cases(names))[part], asked.cpu_s)


if __name__ == "__main__":
    import benchmarks.replay_zoo as importable  # so that the factory and this are one module

    importable.main()
