"""More model-side faults, each as a framework's tracker tells it, in architectures that `replay_zoo` does not plant in.

    python -m benchmarks.replay_zoo_tracked [looked-at|aside|healthy] [--every N --start K] [--only NAME]

Half of the faults, every second one, was set aside while rules were repaired. Nothing in here knows how a replay finds
a cause. Each case runs in one dtype, which alternates.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import replay_zoo as zoo

F = torch.nn.functional
Tensor = torch.Tensor
OTHERS, PADDING, FUTURE, OWN = "other_samples", "padding", "future", "own_keys"
POSITIONS, STATE, BATCH, MATHS, RANDOM, ROUNDING = "positions", "state", "batch", "maths", "random", "rounding"
PACK, PAD = "packing=on", "packing=off"
#: (left padding, tokens, right padding): many short rows, two long ones, three of a middling length.
LAYOUTS = {
    "three": ((6, 22, 4), (0, 30, 2), (15, 17, 0)),
    "six": tuple((left, 20 - left, 0) for left in (0, 11, 4, 13, 8, 2)),
    "long": ((20, 150, 0), (0, 170, 0)),
    "two": ((0, 40, 0), (9, 31, 0)),
}


def configurations() -> dict[str, Callable[[], Any]]:
    import transformers as hf

    common: dict[str, Any] = {
        "vocab_size": zoo.VOCABULARY, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 80, "max_position_embeddings": 256, "pad_token_id": None, "bos_token_id": None,
        "eos_token_id": None,
    }  # fmt: skip
    grouped = {**common, "num_key_value_heads": 2}
    mamba = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}
    return {
        "qwen2": lambda: hf.Qwen2Config(**grouped),
        "smollm3": lambda: hf.SmolLM3Config(**grouped),
        "granite": lambda: hf.GraniteConfig(**grouped),
        "cohere": lambda: hf.CohereConfig(**grouped),
        "glm4": lambda: hf.Glm4Config(**grouped, head_dim=12),
        "starcoder2": lambda: hf.Starcoder2Config(**grouped, sliding_window=12),
        "stablelm": lambda: hf.StableLmConfig(**grouped, partial_rotary_factor=0.5),
        "phi": lambda: hf.PhiConfig(**common),
        "opt": lambda: hf.OPTConfig(
            **{key: one for key, one in common.items() if key != "intermediate_size"}, ffn_dim=80,
            word_embed_proj_dim=48,
        ),
        "olmoe": lambda: hf.OlmoeConfig(**grouped, num_experts=4, num_experts_per_tok=2),
        "qwen2_moe": lambda: hf.Qwen2MoeConfig(
            **grouped, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=40,
            shared_expert_intermediate_size=40,
        ),
        "jamba": lambda: hf.JambaConfig(
            **grouped, **mamba, attn_layer_period=3, attn_layer_offset=1, num_experts=2, use_mamba_kernels=False,
        ),
        "bamba": lambda: hf.BambaConfig(
            **grouped, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=24, mamba_n_groups=1, mamba_d_state=8,
            mamba_chunk_size=8,
        ),
        "nemotron": lambda: hf.NemotronConfig(**grouped),
        "seed_oss": lambda: hf.SeedOssConfig(**grouped, head_dim=12),
        "ernie4_5": lambda: hf.Ernie4_5Config(**grouped, head_dim=12),
        "exaone4": lambda: hf.Exaone4Config(**grouped, sliding_window=10, sliding_window_pattern=3),
        "gemma2": lambda: hf.Gemma2Config(
            **grouped, head_dim=12, query_pre_attn_scalar=12, sliding_window=16, attn_logit_softcapping=10.0
        ),
        "ministral": lambda: hf.MistralConfig(**grouped, sliding_window=8),
        "olmo3": lambda: hf.Olmo3Config(
            **grouped, sliding_window=8, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
        ),
    }  # fmt: skip


#: Whose attention has q_proj, k_proj and v_proj, and rotates.
PLAIN = ("qwen2", "smollm3", "granite", "cohere", "glm4", "stablelm", "seed_oss", "ernie4_5", "nemotron")
MIXTURES = ("olmoe", "qwen2_moe")
HYBRID = ("jamba", "bamba")


class Watched:
    """A model and what its last call was: which sample and which position stands in each slot [B, T]."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.kind = "alone"
        self.sample_BT = self.place_BT = self.valid_BT = torch.zeros(1, 1, dtype=torch.long)
        model.base_model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, _module: Any, args: Any, kwargs: Any) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if ids is None:
            return
        rows, width = ids.shape
        starts = 0 if positions is None else int((positions[0] == 0).sum())
        self.valid_BT = torch.ones(rows, width, dtype=torch.bool)
        self.sample_BT = torch.arange(rows)[:, None].expand(rows, width)
        if mask is not None and mask.ndim == 2:
            self.kind, self.valid_BT = "padded", mask.bool()
            self.place_BT = (mask.long().cumsum(1) - 1).clamp(min=0)
        elif rows == 1 and starts > 1:
            self.kind, self.place_BT = "packed", positions
            self.sample_BT = (positions == 0).long().cumsum(1) - 1
        else:
            self.kind = "alone" if rows == 1 else "padded"
            self.place_BT = torch.arange(width)[None].expand(rows, width)

    @property
    def alone(self) -> bool:
        return self.kind == "alone"

    @property
    def width(self) -> int:
        return int(self.place_BT.shape[1])

    def named(self, *endings: str) -> list[Any]:
        return [one for name, one in self.model.base_model.named_modules() if name.endswith(endings)]

    @property
    def attentions(self) -> list[Any]:
        return [one for one in self.model.base_model.modules()
                if type(one).__name__.endswith("Attention") and hasattr(one, "config")]  # fmt: skip

    @property
    def mlps(self) -> list[Any]:
        return self.named(".mlp", ".feed_forward", ".fc2")

    @property
    def layers(self) -> list[Any]:
        return [
            one for name, one in self.model.base_model.named_modules() if name.rpartition(".")[0].endswith("layers")
        ]

    # ── ways to plant ──

    def put_out(self, module: Any, change: Callable[[Tensor, Tensor], Tensor], *, always: bool = False) -> None:
        """What a module puts out is `change(given, put)`; of rows alone nothing unless `always`."""

        def after(_module: Any, args: Any, kwargs: Any, put: Any) -> Any:
            if self.alone and not always:
                return None
            first = put[0] if isinstance(put, tuple) else put
            given = args[0] if args else next(iter(kwargs.values()))
            changed = _where_it_can(change, first, given, first)
            return (changed, *put[1:]) if isinstance(put, tuple) else changed

        module.register_forward_hook(after, with_kwargs=True)

    def keys(self, change: Callable[[Tensor], Tensor], layers: Any = slice(None), *, always: bool = False) -> None:
        """Attention of these layers may see what `change` makes of [B, H, T, T] what it may see."""

        def before(module: Any, args: Any, kwargs: Any) -> Any:
            if self.alone and not always:
                return None
            place = next((n for n, one in enumerate(args) if torch.is_tensor(one) and one.ndim == 4), None)
            given = kwargs.get("attention_mask") if place is None else args[place]
            causal = torch.ones(self.width, self.width, dtype=torch.bool).tril()
            rows, heads = self.place_BT.shape[0], module.config.num_attention_heads
            seen = causal[None, None] if given is None else given if given.dtype == torch.bool else given > -1.0
            seen = seen.expand(rows, heads, -1, -1)
            seen = _where_it_can(change, seen, seen.clone())
            if module.config._attn_implementation == "eager":
                dtype = next(module.parameters()).dtype
                seen = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
            if place is None:
                return args, {**kwargs, "attention_mask": seen}
            return (*args[:place], seen, *args[place + 1 :]), kwargs

        for one in self.attentions[layers]:
            one.register_forward_pre_hook(before, with_kwargs=True)

    def turn(self, change: Callable[[Tensor], Tensor], *, always: bool = False) -> None:
        """Positions that are turned into angles, or looked up."""

        def before(_module: Any, args: Any, kwargs: Any) -> Any:
            if self.alone and not always:
                return None
            if "position_ids" in kwargs:
                return args, {**kwargs, "position_ids": change(kwargs["position_ids"])}
            return (args[0], change(args[1]), *args[2:]), kwargs

        for one in self.named("rotary_emb"):
            one.register_forward_pre_hook(before, with_kwargs=True)

    def angles(self, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        for one in self.named("rotary_emb"):
            one.register_forward_hook(lambda _m, _a, put: None if self.alone else change(*put))

    def scores(self, name: str, change: Callable[..., Tensor], *, always: bool = False) -> None:
        """A kernel of one's own, registered: `change(probabilities' scores, seen, value)` are the probabilities."""
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import eager_mask

        def kernel(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
                   scaling: float | None = None, **_more: Any) -> tuple[Tensor, None]:  # fmt: skip
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
            width = query.shape[2]
            seen = torch.ones(width, width, dtype=torch.bool).tril()[None, None] if mask is None else mask > -1.0
            scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
            if self.alone and not always:
                shares = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1)
            else:
                shares = change(scores, seen.expand_as(scores))
            return (shares @ value).transpose(1, 2).contiguous(), None

        AttentionInterface.register(name, kernel)
        AttentionMaskInterface.register(name, eager_mask)
        self.model.set_attn_implementation(name)


@dataclass(frozen=True)
class Tracked:
    name: str
    called: tuple[str, ...]
    flags: str
    plant: Callable[[Watched], None]
    among: tuple[str, ...]
    layout: str
    own: bool


FAULTS: list[Tracked] = []


def tracked(
    *called: str, flags: str = PACK, among: str | tuple[str, ...] = PLAIN[:2], layout: str = "three", own: bool = False
) -> Callable[[Callable[[Watched], None]], Callable[[Watched], None]]:
    names = tuple(among.split()) if isinstance(among, str) else among

    def keep(plant: Callable[[Watched], None]) -> Callable[[Watched], None]:
        FAULTS.append(Tracked(plant.__name__, called, flags, plant, names, layout, own))
        return plant

    return keep


def _where_it_can(change: Callable[..., Tensor], unchanged: Tensor, *given: Tensor) -> Tensor:
    """A fault that a smaller batch has no room for is not there in it."""
    try:
        return change(*given)
    except (IndexError, RuntimeError):
        return unchanged


def _at(width: int) -> tuple[Tensor, Tensor]:
    at = torch.arange(width)
    return at[:, None], at[None]


def _own(width: int) -> Tensor:
    return torch.eye(width, dtype=torch.bool)


# ── sees other samples ──


@tracked(OTHERS, among="qwen2 cohere olmoe")
def cu_seqlens_begin_a_token_late(w: Watched) -> None:
    def change(seen: Tensor) -> Tensor:
        late = F.pad(w.sample_BT[0], (1, 0))[:-1]
        return seen | ((late[:, None] == late) & torch.ones_like(seen[0, 0]).tril())

    w.keys(change)


@tracked(OTHERS, among="granite stablelm", layout="six")
def last_boundary_missing_from_cu_seqlens(w: Watched) -> None:
    def change(seen: Tensor) -> Tensor:
        merged = w.sample_BT[0].clamp(max=int(w.sample_BT.max()) - 1)
        return (merged[:, None] == merged) & torch.ones_like(seen).tril()

    w.keys(change)


@tracked(OTHERS, among="seed_oss glm4", layout="six")
def one_token_of_the_fifth_sees_a_key_of_the_fourth(w: Watched) -> None:
    def change(seen: Tensor) -> Tensor:
        mine = (w.sample_BT[0] == 4) & (w.place_BT[0] == 2)
        seen[..., mine.nonzero()[:, 0], (w.sample_BT[0] == 3).nonzero()[1, 0]] = True
        return seen

    w.keys(change, slice(2, 3))


@tracked(OTHERS, among="ernie4_5 smollm3")
def last_head_goes_without_the_block_mask(w: Watched) -> None:
    def change(seen: Tensor) -> Tensor:
        seen[:, -1] = torch.ones_like(seen[0, 0]).tril()
        return seen

    w.keys(change, slice(1, 2))


@tracked(OTHERS, among="qwen2 nemotron", layout="six")
def values_of_the_third_from_the_second(w: Watched) -> None:
    """A block table that names another request's block."""

    def change(_given: Tensor, put: Tensor) -> Tensor:
        to, of = ((w.sample_BT[0] == number).nonzero()[:4, 0] for number in (2, 1))
        put = put.clone()
        put[0, to] = put[0, of]
        return put

    w.put_out(w.named("v_proj")[-1], change)


@tracked(OTHERS, flags=PAD, among="granite cohere")
def last_kv_head_is_of_row_0(w: Watched) -> None:
    def change(_given: Tensor, put: Tensor) -> Tensor:
        size = put.shape[-1] // 2
        return torch.cat([put[..., :size], put[:1, :, size:].expand(put.shape[0], -1, -1)], -1)

    w.put_out(w.named("v_proj")[1], change)


@tracked(OTHERS, flags=PAD, among="phi glm4", layout="two")
def unpadding_moves_a_rows_end_to_the_next(w: Watched) -> None:
    def change(_given: Tensor, put: Tensor) -> Tensor:
        if put.ndim != 3 or put.shape[0] < 2:
            return put
        put = put.clone()
        put[1, -1], put[0, -1] = put[0, -1].clone(), put[1, -1].clone()
        return put

    w.put_out(w.mlps[0], change)


@tracked(OTHERS, STATE, among="qwen2 granite")
def convolution_of_keys_without_seq_idx(w: Watched) -> None:
    def change(_given: Tensor, put: Tensor) -> Tensor:
        starts = (w.place_BT[0] == 0) & (torch.arange(w.width) > 0)
        return put + 0.4 * F.pad(put, (0, 0, 1, 0))[:, :-1] * starts[None, :, None]

    w.put_out(w.named("k_proj")[0], change)


@tracked(OTHERS, among="olmoe seed_oss")
def later_samples_queries_see_the_first_four_keys_of_the_pack(w: Watched) -> None:
    """Sinks kept as slots 0..3 of the pack, not of the sample."""

    def change(seen: Tensor) -> Tensor:
        seen[..., 8:, :4] = True
        return seen

    w.keys(change)


# ── sees padding ──


@tracked(PADDING, flags=PAD, among="qwen2 opt")
def last_pad_visible(w: Watched) -> None:
    def change(seen: Tensor) -> Tensor:
        for row in range(seen.shape[0]):
            pads = (~w.valid_BT[row]).nonzero()[:, 0]
            left = pads[pads < int(w.valid_BT[row].nonzero()[0, 0])]
            if left.numel():
                seen[row, :, int(left[-1]) :, left[-1]] = True
        return seen

    w.keys(change)


@tracked(PADDING, flags=PAD, among="phi ernie4_5", own=True)
def padding_masked_by_minus_six(w: Watched) -> None:
    def change(scores: Tensor, seen: Tensor) -> Tensor:
        causal = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
        return (scores - (6.0 * ~seen).to(scores.dtype)).masked_fill(~causal, torch.finfo(scores.dtype).min).softmax(-1)

    w.scores("tracked_minus_six", change)


@tracked(PADDING, flags=PAD, among="cohere granite", layout="two")
def only_the_longest_rows_mask_is_used(w: Watched) -> None:
    w.keys(lambda seen: seen[:1].expand_as(seen))


@tracked(PADDING, STATE, flags=PAD, among="glm4 smollm3", layout="two")
def convolution_reads_the_padding(w: Watched) -> None:
    w.put_out(
        w.named("k_proj")[-1],
        lambda _given, put: put + 0.3 * F.pad(put, (0, 0, 1, 0))[:, :-1] * (w.place_BT == 0)[..., None],
    )


@tracked(PADDING, FUTURE, flags=PAD, among="stablelm qwen2")
def mask_added_as_a_bool(w: Watched) -> None:
    w.keys(lambda seen: torch.ones_like(seen), slice(0, 1))


@tracked(PADDING, flags=PAD, among="seed_oss qwen2", layout="six")
def one_rows_padding_visible_in_one_head(w: Watched) -> None:
    def change(seen: Tensor) -> Tensor:
        seen[3, 2] = torch.ones_like(seen[0, 0]).tril()
        return seen

    w.keys(change, slice(1, 2))


# ── sees the future ──


@tracked(FUTURE, among="qwen2 granite olmoe")
def the_eighth_token_sees_the_ninth(w: Watched) -> None:
    def change(seen: Tensor) -> Tensor:
        for one in ((w.place_BT[0] == 8).nonzero()[:, 0]).tolist():
            seen[..., one - 1, one] = True
        return seen

    w.keys(change, slice(1, 2))


@tracked(FUTURE, flags=PAD, among="cohere stablelm")
def prompt_both_ways(w: Watched) -> None:
    def change(seen: Tensor) -> Tensor:
        early = w.valid_BT & (w.place_BT < 6)
        return seen | (early[:, None, :, None] & early[:, None, None, :])

    w.keys(change)


@tracked(FUTURE, flags=PACK, among="seed_oss ernie4_5")
def tiles_of_four_both_ways(w: Watched) -> None:
    def change(seen: Tensor) -> Tensor:
        sample, tile = w.sample_BT[0], w.place_BT[0] // 4
        return seen | ((sample[:, None] == sample) & (tile[:, None] == tile))

    w.keys(change, slice(2, 3))


@tracked(FUTURE, flags=PAD, among="smollm3 phi")
def convolution_is_centred(w: Watched) -> None:
    def change(_given: Tensor, put: Tensor) -> Tensor:
        return put + 0.3 * F.pad(put * w.valid_BT[..., None], (0, 0, 0, 1))[:, 1:]

    w.put_out(w.named("v_proj")[1], change)


@tracked(FUTURE, among="qwen2 glm4", layout="long")
def a_head_looks_ahead_past_128(w: Watched) -> None:
    def change(seen: Tensor) -> Tensor:
        row, column = _at(w.width)
        same = w.sample_BT[0][:, None] == w.sample_BT[0]
        seen[:, 1] |= same & (w.place_BT[0][:, None] >= 128) & (column - row == 1)
        return seen

    w.keys(change)


@tracked(FUTURE, among="granite nemotron", layout="two")
def answer_tokens_see_the_last_token(w: Watched) -> None:
    """As a pooled embedding that was put into the keys of a few."""

    def change(seen: Tensor) -> Tensor:
        for sample in w.sample_BT[0].unique().tolist():
            mine = (w.sample_BT[0] == sample).nonzero()[:, 0]
            seen[..., mine[10:13], mine[-2]] = True
        return seen

    w.keys(change, slice(0, 1))


# ── loses own keys ──


@tracked(OWN, among="qwen2 cohere stablelm")
def every_eighth_key_lost(w: Watched) -> None:
    w.keys(lambda seen: seen & ((w.place_BT[0] % 8 != 5) | _own(w.width)))


@tracked(OWN, flags=PAD, among="ernie4_5 seed_oss", layout="two")
def last_block_of_keys_dropped(w: Watched) -> None:
    def change(seen: Tensor) -> Tensor:
        kept = torch.arange(w.width) < w.width // 16 * 16
        return seen & (kept | _own(w.width))

    w.keys(change)


@tracked(OWN, among="ministral starcoder2", layout="two")
def window_a_key_too_short(w: Watched) -> None:
    size = w.model.config.sliding_window

    def change(seen: Tensor) -> Tensor:
        row, column = _at(w.width)
        return seen & (row - column < size - 1)

    w.keys(change)


@tracked(OWN, among="exaone4 olmo3", layout="two")
def window_in_layers_of_full_attention(w: Watched) -> None:
    def change(seen: Tensor) -> Tensor:
        row, column = _at(w.width)
        return seen & (row - column < 8)

    w.keys(change)


@tracked(OWN, among="granite qwen2 olmoe")
def one_key_in_one_head_of_the_last_layer(w: Watched) -> None:
    def change(seen: Tensor) -> Tensor:
        seen[:, 3] &= (w.place_BT[0] != 11) | _own(w.width)
        return seen

    w.keys(change, slice(2, 3))


@tracked(OWN, flags=PACK, among="smollm3 glm4")
def chunked_attention_in_place_of_full(w: Watched) -> None:
    def change(seen: Tensor) -> Tensor:
        chunk = w.place_BT[0] // 8
        return seen & (chunk[:, None] == chunk)

    w.keys(change)


@tracked(OWN, among="qwen2 nemotron", layout="long")
def keys_further_than_64_lost(w: Watched) -> None:
    def change(seen: Tensor) -> Tensor:
        row, column = _at(w.width)
        return seen & (row - column <= 64)

    w.keys(change, slice(1, 2))


@tracked(OWN, among="cohere phi", layout="long")
def a_block_of_keys_past_128_lost(w: Watched) -> None:
    w.keys(lambda seen: seen & ~((w.place_BT[0] >= 131) & (w.place_BT[0] < 134) & ~_own(w.width)))


@tracked(OWN, flags=PAD, among="stablelm opt", layout="two")
def sink_lost_by_queries_past_16(w: Watched) -> None:
    def change(seen: Tensor) -> Tensor:
        late = (w.place_BT >= 16)[:, None, :, None]
        return seen & ~(late & (w.valid_BT & (w.place_BT == 0))[:, None, None, :])

    w.keys(change)


@tracked(OWN, flags=PAD, among="seed_oss ernie4_5", layout="two")
def last_token_does_not_see_the_one_before(w: Watched) -> None:
    def change(seen: Tensor) -> Tensor:
        seen[..., -1, -2] = False
        return seen

    w.keys(change, slice(2, 3))


@tracked(OWN, among="olmoe granite", layout="two")
def first_key_of_each_block_lost_by_one_head(w: Watched) -> None:
    def change(seen: Tensor) -> Tensor:
        seen[:, 0] &= (w.place_BT[0] % 16 != 0) | (w.place_BT[0] == 0) | _own(w.width)
        return seen

    w.keys(change, slice(0, 1))


@tracked(OWN, MATHS, among="qwen2 seed_oss", own=True)
def only_the_six_best_keys(w: Watched) -> None:
    def change(scores: Tensor, seen: Tensor) -> Tensor:
        least = torch.finfo(scores.dtype).min
        held = scores.masked_fill(~seen, least)
        sixth = held.topk(min(6, held.shape[-1]), -1).values[..., -1:]
        return held.masked_fill(held < sixth, least).softmax(-1)

    w.scores("tracked_best_keys", change)


@tracked(OWN, flags=PAD, among="qwen2 granite", own=True, layout="two")
def kernel_skips_the_last_key_of_a_row_whose_length_is_odd(w: Watched) -> None:
    def change(scores: Tensor, seen: Tensor) -> Tensor:
        seen = seen.clone()
        for number in range(4, scores.shape[-1], 9):
            seen[..., number + 1 :, number] = False
        return scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1)

    w.scores("tracked_every_ninth", change, always=True)


# ── positions ──


@tracked(POSITIONS, among="qwen2 cohere stablelm")
def cache_of_rotations_too_short(w: Watched) -> None:
    w.turn(lambda positions: positions.clamp(max=15))


@tracked(POSITIONS, MATHS, ROUNDING, flags=PACK, among="granite phi")
def table_of_rotations_in_bfloat16(w: Watched) -> None:
    w.turn(lambda positions: positions)
    w.angles(lambda cos, sin: (cos.bfloat16().to(cos.dtype), sin.bfloat16().to(sin.dtype)))


@tracked(POSITIONS, among="smollm3 seed_oss")
def stretched_by_the_length_of_the_pack(w: Watched) -> None:
    def change(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        angle = torch.atan2(sin, cos)
        factor = 1 / (1 + w.width / 100)
        return (angle * factor).cos(), (angle * factor).sin()

    w.angles(change)


@tracked(POSITIONS, flags=PAD, among="glm4 nemotron")
def half_of_the_positions(w: Watched) -> None:
    w.turn(lambda positions: positions // 2)


@tracked(POSITIONS, MATHS, flags=PAD, among="ernie4_5 qwen2")
def cosines_and_sines_exchanged(w: Watched) -> None:
    w.angles(lambda cos, sin: (sin, cos))


@tracked(POSITIONS, flags=PACK, among="stablelm granite", layout="six")
def the_third_sample_does_not_begin_anew(w: Watched) -> None:
    def change(positions: Tensor) -> Tensor:
        third = w.sample_BT == 2
        within = torch.arange(positions.shape[-1])[None] - int((w.sample_BT < 2).sum())
        return torch.where(third, positions + within * 2, positions)

    w.turn(change)


@tracked(POSITIONS, flags=PAD, among="opt")
def padding_is_counted(w: Watched) -> None:
    for one in w.named("embed_positions"):

        def before(_module: Any, args: Any, kwargs: Any) -> Any:
            if w.alone:
                return None
            return args, {**kwargs, "position_ids": torch.arange(w.width)[None].expand_as(w.place_BT)}

        one.register_forward_pre_hook(before, with_kwargs=True)


@tracked(POSITIONS, among="cohere qwen2")
def base_of_the_rotations_is_another_in_the_pack(w: Watched) -> None:
    def change(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        size = cos.shape[-1] // 2
        turns = 500000.0 ** (-torch.arange(size, dtype=torch.float64) / size)
        angle = w.place_BT[..., None] * torch.cat([turns, turns])
        return angle.cos().to(cos.dtype), angle.sin().to(sin.dtype)

    w.turn(lambda positions: positions)
    for one in w.named("rotary_emb"):
        if type(one).__name__.startswith("Cohere"):
            continue
    w.angles(change)


# ── state carried over ──


@tracked(STATE, among=HYBRID)
def convolution_and_recurrence_run_through_the_pack(_w: Watched) -> None:
    """As the library is."""


@tracked(STATE, flags=PAD, among="qwen2 granite")
def values_of_the_call_before(w: Watched) -> None:
    held: list[Tensor] = []

    def change(_given: Tensor, put: Tensor) -> Tensor:
        changed = put.clone()
        if held and held[-1].dtype == put.dtype:
            changed[:, :1] = held[-1]
        held[:] = [put[:1, -1:].detach().clone()]
        return changed

    w.put_out(w.named("v_proj")[0], change, always=True)


@tracked(STATE, among="seed_oss phi")
def norm_with_a_running_mean(w: Watched) -> None:
    held: dict[str, Tensor] = {}

    def change(_given: Tensor, put: Tensor) -> Tensor:
        mean = held.get("mean", torch.zeros(put.shape[-1])).to(put.dtype)
        held["mean"] = 0.9 * mean + 0.1 * put.detach().mean((0, 1))
        return put - mean

    w.put_out(w.named("input_layernorm")[-1], change, always=True)


@tracked(STATE, flags=PAD, among="cohere ernie4_5")
def fp8_scale_of_the_calls_before(w: Watched) -> None:
    history = [1.0]

    def change(_given: Tensor, put: Tensor) -> Tensor:
        step = max(history[-8:]) / 16
        history.append(float(put.detach().abs().amax()))
        return (put / step).round().clamp(-20, 20) * step

    w.put_out(w.mlps[1], change, always=True)


@tracked(STATE, flags=PAD, among="stablelm smollm3")
def counts_its_calls(w: Watched) -> None:
    calls = [0]

    def change(_given: Tensor, put: Tensor) -> Tensor:
        calls[0] += 1
        return put * (1 + 0.1 * (calls[0] % 5))

    w.put_out(w.mlps[0], change)


@tracked(STATE, OTHERS, flags=PAD, among="granite glm4", layout="two")
def scan_over_two_rows(w: Watched) -> None:
    def change(given: Tensor, put: Tensor) -> Tensor:
        carry = torch.zeros(put.shape[-1], dtype=put.dtype)
        rows = []
        for row in range(put.shape[0]):
            rows.append(put[row] + 0.2 * carry)
            carry = 0.5 * carry + put[row, -1]
        return torch.stack(rows)

    w.put_out(w.named("input_layernorm")[1] if w.named("input_layernorm") else w.layers[1], change)


# ── depends on the batch ──


@tracked(BATCH, flags=PAD, among="qwen2 cohere")
def activations_quantised_by_the_batchs_greatest(w: Watched) -> None:
    def change(_given: Tensor, put: Tensor) -> Tensor:
        step = put.abs().amax() / 15
        return (put / step).round() * step

    w.put_out(w.mlps[0], change)


@tracked(BATCH, among="olmoe qwen2_moe")
def tokens_past_the_capacity_dropped(w: Watched) -> None:
    def change(given: Tensor, put: Tensor) -> Tensor:
        flat = given.reshape(-1, given.shape[-1])
        expert = flat[:, :4].argmax(-1)
        rank = torch.stack([(expert[: n + 1] == expert[n]).sum() for n in range(flat.shape[0])])
        return put * (rank <= 8).reshape(*put.shape[:-1], 1)

    w.put_out(w.mlps[1], change)


@tracked(BATCH, among="stablelm ernie4_5")
def a_dense_layer_takes_48_tokens(w: Watched) -> None:
    w.put_out(
        w.mlps[1], lambda _given, put: put * (torch.arange(w.width) < 48)[None, :, None] if put.ndim == 3 else put
    )


@tracked(BATCH, flags=PAD, among="granite smollm3")
def scaled_by_the_number_of_tokens(w: Watched) -> None:
    w.put_out(w.mlps[0], lambda _given, put: put * (w.place_BT.numel() / 48) ** 0.5)


@tracked(BATCH, FUTURE, flags=PACK, among="phi qwen2")
def normed_over_the_tokens(w: Watched) -> None:
    w.put_out(w.named("input_layernorm")[-1], lambda _given, put: put - put.mean(1, keepdim=True))


@tracked(BATCH, among=MIXTURES)
def experts_choose_their_tokens(w: Watched) -> None:
    def change(given: Tensor, put: Tensor) -> Tensor:
        flat = given.reshape(-1, given.shape[-1])
        chosen = torch.zeros(flat.shape[0], 1, dtype=put.dtype)
        chosen[flat[:, 1].topk(flat.shape[0] // 2).indices] = 1.5
        return put * chosen.reshape(*put.shape[:-1], 1)

    w.put_out(w.mlps[-1], change)


@tracked(BATCH, MATHS, flags=PAD, among="nemotron seed_oss")
def more_than_two_rows_take_another_kernel(w: Watched) -> None:
    w.put_out(w.named("o_proj")[0], lambda _given, put: put * 1.2 if put.shape[0] > 2 else put)


@tracked(BATCH, flags=PAD, among="qwen2 ernie4_5", layout="six")
def mean_of_the_rows_taken_off(w: Watched) -> None:
    w.put_out(w.named("q_proj")[1], lambda _given, put: put - 0.5 * put.mean((0, 1), keepdim=True))


# ── random ──


@tracked(RANDOM, among="qwen2 phi", own=True)
def dropout_of_attention_left_on(w: Watched) -> None:
    def change(scores: Tensor, seen: Tensor) -> Tensor:
        return F.dropout(scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1), 0.1)

    w.scores("tracked_dropout", change)


@tracked(RANDOM, flags=PAD, among=MIXTURES)
def jitter_of_the_router(w: Watched) -> None:
    def before(_module: Any, args: Any) -> Any:
        return None if w.alone else (args[0] * torch.empty_like(args[0]).uniform_(0.9, 1.1), *args[1:])

    w.mlps[0].register_forward_pre_hook(before)


@tracked(RANDOM, flags=PAD, among="granite cohere")
def layers_dropped_at_random(w: Watched) -> None:
    for one in w.layers:
        w.put_out(one, lambda given, put: given if torch.rand(()) < 0.5 else put)


@tracked(RANDOM, among="seed_oss glm4")
def stochastic_rounding(w: Watched) -> None:
    w.put_out(w.mlps[-1], lambda _given, put: ((put * 64) + torch.rand_like(put)).floor() / 64)


# ── other weights or maths ──


@tracked(MATHS, among="gemma2")
def scores_capped_otherwise_in_the_pack(w: Watched) -> None:
    for one in w.attentions:

        def before(module: Any, _args: Any) -> None:
            module.kept_cap = getattr(module, "kept_cap", module.attn_logit_softcapping)
            module.attn_logit_softcapping = module.kept_cap if w.alone else 0.2

        one.register_forward_pre_hook(before)


@tracked(MATHS, flags=PAD, among="qwen2 olmoe")
def a_layer_left_out_when_padded(w: Watched) -> None:
    w.put_out(w.layers[1], lambda given, _put: given)


@tracked(MATHS, among="granite stablelm")
def heads_of_keys_in_another_order(w: Watched) -> None:
    w.put_out(w.named("k_proj")[1], lambda _given, put: put.roll(put.shape[-1] // 2, -1))


@tracked(MATHS, flags=PAD, among="seed_oss ernie4_5")
def activation_is_another(w: Watched) -> None:
    w.put_out(w.named("act_fn")[0], lambda given, _put: F.gelu(given))


@tracked(MATHS, among="qwen2_moe")
def shared_expert_left_out(w: Watched) -> None:
    w.put_out(w.named("shared_expert")[0], lambda _given, put: put * 0)


@tracked(MATHS, among="cohere qwen2")
def adapter_off_in_the_pack(w: Watched) -> None:
    torch.manual_seed(1)
    low = torch.randn(48, 4) * 0.3
    w.put_out(
        w.named("q_proj")[1], lambda given, put: put + (given @ low.to(put.dtype)).repeat(1, 1, put.shape[-1] // 4)
    )


@tracked(MATHS, ROUNDING, among="phi granite", own=True)
def scores_in_half_precision(w: Watched) -> None:
    def change(scores: Tensor, seen: Tensor) -> Tensor:
        held = scores.half().to(scores.dtype)
        return held.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1).half().to(scores.dtype)

    w.scores("tracked_half", change)


@tracked(MATHS, flags=PAD, among="nemotron glm4")
def epsilon_of_the_norm_is_another(w: Watched) -> None:
    w.put_out(w.named("input_layernorm")[-1], lambda given, put: put * 0.7)


@tracked(MATHS, flags=PAD, among="qwen2 stablelm")
def gradient_scale_left_in_the_embedding(w: Watched) -> None:
    w.put_out(w.named("embed_tokens")[0], lambda _given, put: put * 1.1)


@tracked(MATHS, among="seed_oss smollm3")
def old_head_in_the_pack(w: Watched) -> None:
    torch.manual_seed(2)
    off = torch.randn(zoo.VOCABULARY, 48) * 0.05

    def after(_module: Any, args: Any, put: Tensor) -> Any:
        return None if w.alone else put + args[0] @ off.to(put.dtype).T

    w.model.lm_head.register_forward_hook(after)


# ── running ──

_NOW: dict[str, Any] = {}


def build() -> Any:
    """The model that `factory:benchmarks.replay_zoo_tracked:build` means now."""
    import transformers as hf

    name = _NOW["architecture"]
    config = configurations()[name]()
    for key in ("initializer_range", "init_std"):
        if hasattr(config, key):
            setattr(config, key, _NOW["std"])
    torch.manual_seed(zlib.crc32(name.encode()))
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    if _NOW["plant"] is not None:
        _NOW["plant"](Watched(model))
    return model


def dumped(folder: Path, layout: str) -> Path:
    from replay_core.recorder import Recorder

    path = folder / layout
    if not path.exists():
        rows = LAYOUTS[layout]
        generator = torch.Generator().manual_seed(zlib.crc32(layout.encode()))
        ids = torch.randint(4, zoo.VOCABULARY - 4, (len(rows), sum(rows[0])), generator=generator)
        mask = torch.tensor([[0] * left + [1] * tokens + [0] * right for left, tokens, right in rows])
        with Recorder(path) as recorder, recorder.step(0) as record:
            record("forward_data", micro=0, input_ids=ids, attention_mask=mask, response_mask=mask.bool())
    return path


def replayed(folder: Path, layout: str, flags: str, architecture: str, std: float, plant: Any) -> Any:
    from replay_core import workbench
    from replay_core.replay.flags import Flags
    from replay_core.replay.held import HOLDER

    HOLDER.drop()
    _NOW.update(architecture=architecture, std=std, plant=plant)
    plan = {
        "dump": str(dumped(folder, layout)), "model": "factory:benchmarks.replay_zoo_tracked:build",
        "forward_path": str(Path(__file__).parent.parent), "flags": Flags.parse(f"threads=1 {flags}").to_mapping(),
        "step": 0, "rank": 0, "micro": 0,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir=folder) as out:
        return workbench.replay(plan, Path(out), zoo.Here())


def cases(chosen: list[Tracked]) -> list[tuple[Tracked, str, str, str, float]]:
    listed = []
    for one in chosen:
        for number, architecture in enumerate(one.among):
            chance = zlib.crc32(f"{one.name}{architecture}".encode())
            dtype = ("float32", "bfloat16")[(number + len(one.name)) % 2]
            attention = "own" if one.own else ("sdpa", "eager")[chance % 2]
            listed.append((one, architecture, dtype, attention, (0.06, 0.12, 0.2)[chance // 2 % 3]))
    return listed


def run_faults(folder: Path, listed: list[tuple[Tracked, str, str, str, float]], most_s: float) -> None:
    counts: Counter[str] = Counter()
    for one, architecture, dtype, attention, std in listed:
        if time.process_time() > most_s:
            break
        doc = replayed(
            folder, one.layout, f"{one.flags} dtype={dtype} attention={attention}", architecture, std, one.plant
        )
        cells = [doc["cells"][doc["baseline"]], *(cell for cell in doc["cells"] if cell["part"] != "reference")]
        wrong = [cell for cell in cells if cell["agreement"]["agrees"] is False]
        errors = [cell["error"]["message"] for cell in cells if cell["error"]]
        asked = [cell["cause"]["kind"] for cell in wrong if cell["part"] == "cell"]
        asked = asked or [cell["cause"]["kind"] for cell in wrong][:1]
        if ROUNDING in one.called and not wrong:
            asked = [ROUNDING]
        right = bool(asked) and all(kind in one.called for kind in asked)
        word = "error" if errors else "right" if right else "missed" if not wrong else "wrong"
        counts[word] += 1
        said = wrong[-1]["cause"]["sentence"] if wrong else "; ".join(errors)
        if word != "right" or "-v" in sys.argv:
            zoo._say(f"{word:6} {one.name} {architecture} {dtype} {attention} std {std}: {asked} {said}")
    total = sum(counts.values())
    zoo._say(f"{dict(counts)}: cause right in {counts['right']} of {total}")


def run_healthy(folder: Path, part: slice) -> None:
    grid = [
        (architecture, layout, flags, dtype, std)
        for architecture in configurations()
        for layout, flags in (("three", PAD), ("six", PACK), ("long", PACK), ("two", f"{PAD} attention=eager"))
        if PACK not in flags or architecture not in (*HYBRID, "opt")  # neither begins a sample anew in a pack
        for dtype, std in (("bfloat16", 0.06), ("bfloat16", 0.2), ("float32", 0.12))
    ]
    cells_seen = false = 0
    for architecture, layout, flags, dtype, std in grid[part]:
        doc = replayed(folder, layout, f"{flags} dtype={dtype}", architecture, std, None)
        for cell in doc["cells"]:
            if cell["part"] == "reference" and cell["agreement"]["agrees"] is None:
                continue
            cells_seen += 1
            if cell["agreement"]["agrees"] is not True:
                false += 1
                said = (cell["cause"] or {}).get("sentence") or (cell["error"] or {}).get("message")
                zoo._say(f"false  {architecture} {dtype} std {std} {layout} {flags} {cell['part']}: {said}")
    zoo._say(f"{cells_seen} healthy cells: {false} false alarms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("looked-at", "aside", "healthy"))
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--only", default=None)
    parser.add_argument("-v", action="store_true", help="say what was said of the right ones, too")
    parser.add_argument("--cpu-s", type=float, default=1e9)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    part = slice(asked.start, None, asked.every)
    with tempfile.TemporaryDirectory(prefix="rldbg-zoo-") as folder, contextlib.suppress(KeyboardInterrupt):
        if asked.what == "healthy":
            return run_healthy(Path(folder), part)
        chosen = FAULTS[asked.what == "aside" :: 2]
        if asked.only:
            chosen = [one for one in FAULTS if one.name in asked.only.split(",")]
        run_faults(Path(folder), cases(chosen)[part], asked.cpu_s)


if __name__ == "__main__":
    import benchmarks.replay_zoo_tracked as importable  # so that the factory and this are one module

    importable.main()
