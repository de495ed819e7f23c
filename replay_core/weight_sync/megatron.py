"""A Megatron checkpoint under the names of Hugging Face's: tensor and pipeline shards joined, fused layers cut apart.

Sources: Megatron-LM's `mp_rank_TT[_PPP]/model_optim_rng.pt`, `megatron/core/transformer/attention.py` (linear_qkv holds
of each query group its queries, its key, its value), `mlp.py` (each rank's linear_fc1 is its gate over its up).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from msgspec import Struct, field

from replay_core import pages
from replay_core.errors import DumpError
from replay_core.records import FileBytes, TensorRef
from replay_core.regexes import regex
from replay_core.weight_sync.state import Values, WeightState

_RANK = regex(r"mp_rank_(\d{1,6})(?:_(\d{1,6}))?(?:_(\d{1,6}))?")
_LAYER = regex(r"(?:decoder|encoder)\.layers\.(\d{1,6})\.(.*)")
_EXPERT = regex(r"mlp\.experts\.(?:local_experts\.(\d{1,6})\.(linear_fc\d)\.weight|(linear_fc\d)\.weight(\d{1,6}))")
#: Megatron's name within a layer -> Hugging Face's, and the axis along which ranks hold parts; None: all hold all.
_SAME: dict[str, tuple[str, int | None]] = {
    "input_layernorm.weight": ("input_layernorm.weight", None),
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight", None),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight", 1),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight", None),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight", None),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight", None),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight", None),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight", 1),
    "mlp.router.weight": ("mlp.gate.weight", None),
}
_OUTER: dict[str, tuple[str, int | None]] = {
    "embedding.word_embeddings.weight": ("embed_tokens.weight", 0),
    "decoder.final_layernorm.weight": ("norm.weight", None),
    "output_layer.weight": ("lm_head.weight", 0),
}
#: What stands in the file and is no weight.
_BESIDE = ("args.", "optimizer.", "opt_param_scheduler.", "rng_state", "_extra_state")


class _Whole(Struct, frozen=True):
    """A parameter of Hugging Face's: the ranks' parts, how they join, and which rows of that it is."""

    parts: tuple[TensorRef, ...]
    axis: int | None
    take: Callable[[list[Values]], Values] | None = None

    def values(self) -> Values:
        parts = [np.asarray(pages.array(one)) for one in self.parts]
        if self.take is not None:
            return self.take(parts)
        return parts[0] if self.axis is None else np.concatenate(parts, self.axis)


class MegatronWeights(WeightState, eq=False):
    """The joined state; values are read when they are asked for."""

    wholes: dict[str, _Whole] = field(default_factory=dict)

    def _values(self, name: str) -> Values:
        return self.wholes[name].values()


def joined(states: Sequence[WeightState]) -> list[WeightState]:
    """One state of Megatron's ranks, where that is what they are; else the states as they are.

    Raises:
        DumpError: the checkpoint does not say how many heads there are, or ranks are missing.
    """
    if not any(name.endswith("self_attention.linear_qkv.weight") for state in states for name in state.tensors):
        return list(states)
    by_rank = {_place(state): state for state in states}
    tensor = 1 + max(at for at, _ in by_rank)
    pipeline = 1 + max(stage for _, stage in by_rank)
    found = MegatronWeights(states[0].path, states[0].label, {}, None, states[0].step)
    first_layer = 0
    for stage in range(pipeline):
        # Of those there are: a folder may be called rank nine hundred thousand.
        whole = [by_rank[place] for place in sorted(by_rank) if place[1] == stage]
        if len(whole) < tensor:
            raise DumpError(
                "ranks of a Megatron checkpoint are missing", file=str(states[0].path),
                expected=f"{tensor} tensor parallel ranks of pipeline stage {stage}", found=f"{len(whole)}",
            )  # fmt: skip
        layers = [int(match[1]) for name in whole[0].tensors if (match := _LAYER.fullmatch(name))]
        for name in whole[0].tensors:
            _add(found, name, [one.tensors[name] for one in whole if one.has(name)], first_layer, states[0])
        first_layer += 1 + max(layers, default=-1)
    return [found]


def _place(state: WeightState) -> tuple[int, int]:
    """(tensor rank, pipeline stage), of the folder's name."""
    files = (ref.source.path for ref in state.tensors.values() if isinstance(ref.source, FileBytes))
    folder = next(files, Path(state.path))
    match = next((found for part in reversed(folder.parts) if (found := _RANK.fullmatch(part))), None)
    if match is None:
        return 0, 0
    if match[3] is not None:
        raise DumpError("a Megatron checkpoint of expert parallel ranks is not joined", file=str(folder),
                        hint="convert it to Hugging Face's layout first (megatron-bridge, mbridge)")  # fmt: skip
    return int(match[1]), int(match[2] or 0)


def _add(found: MegatronWeights, name: str, parts: list[TensorRef], first_layer: int, told: WeightState) -> None:
    def put(theirs: str, shape: tuple[int, ...], whole: _Whole) -> None:
        found.tensors[theirs] = parts[0].with_(name=theirs, shape=shape, digest=None)
        found.wholes[theirs] = whole

    def put_same(theirs: str, axis: int | None) -> None:
        _need_alike(parts, axis, told)
        shape = list(parts[0].shape)
        if axis is not None:
            shape[axis] = sum(one.shape[axis] for one in parts)
        put(theirs, tuple(shape), _Whole(tuple(parts), axis))

    def put_gate_up(theirs: str) -> None:
        _need_alike(parts, 0, told)
        rows = sum(one.shape[0] for one in parts) // 2
        if any(one.shape[0] % 2 for one in parts):
            raise _unfit(told, parts[0], "as many rows of the gate as over it", parts)
        for half, what in enumerate(("gate_proj", "up_proj")):

            def take(ranks: list[Values], half: int = half) -> Values:
                return np.concatenate([np.split(one, 2)[half] for one in ranks])

            put(f"{theirs}.{what}.weight", (rows, *parts[0].shape[1:]), _Whole(tuple(parts), 0, take))

    if any(name.startswith(one) or one in name for one in _BESIDE) or not parts[0].shape:
        return
    match = _LAYER.fullmatch(name)
    if match is None:
        put_same(*_OUTER.get(name, (name, None)))
        return
    layer, inner = f"layers.{first_layer + int(match[1])}", match[2]
    expert = _EXPERT.fullmatch(inner)
    if expert is not None:
        one = f"{layer}.mlp.experts.{expert[1] or expert[4]}"
        if (expert[2] or expert[3]) == "linear_fc1":
            put_gate_up(one)
        else:
            put_same(f"{one}.down_proj.weight", 1)
    elif inner == "mlp.linear_fc1.weight":
        put_gate_up(f"{layer}.mlp")
    elif inner.startswith("self_attention.linear_qkv.") and inner.rsplit(".", 1)[1] in ("weight", "bias"):
        heads, groups = _heads(told)
        _need_alike(parts, 0, told)
        rows = sum(one.shape[0] for one in parts)
        if rows % (heads + 2 * groups):
            raise _unfit(told, parts[0], f"rows of {heads} heads and {groups} query groups", parts)
        head = rows // (heads + 2 * groups)
        counts = (heads // groups, 1, 1)
        for at, what in enumerate(("q_proj", "k_proj", "v_proj")):
            span = slice(sum(counts[:at]), sum(counts[: at + 1]))

            def take(ranks: list[Values], span: slice = span) -> Values:
                fused = np.concatenate(ranks)
                by_group = fused.reshape(groups, heads // groups + 2, head, *fused.shape[1:])
                return by_group[:, span].reshape(-1, *fused.shape[1:])

            put(f"{layer}.self_attn.{what}.{inner.rsplit('.', 1)[1]}",
                (groups * counts[at] * head, *parts[0].shape[1:]), _Whole(tuple(parts), 0, take))  # fmt: skip
    else:
        theirs, axis = _SAME.get(inner, (inner, None))
        put_same(f"{layer}.{theirs}", axis)


def _need_alike(parts: list[TensorRef], axis: int | None, told: WeightState) -> None:
    """Refuse parts that do not join along an axis."""
    beside = [[length for at, length in enumerate(one.shape) if at != axis] for one in parts]
    if any(one != beside[0] for one in beside) or (axis is not None and len(parts[0].shape) <= axis):
        raise _unfit(told, parts[0], "parts that differ along one axis alone", parts)


def _unfit(told: WeightState, ref: TensorRef, expected: str, parts: list[TensorRef]) -> DumpError:
    return DumpError(
        "the ranks of a Megatron checkpoint do not fit together", file=str(told.path), tensor=ref.name,
        expected=expected, found=", ".join(str(list(one.shape)) for one in parts[:4]),
    )  # fmt: skip


def _heads(state: WeightState) -> tuple[int, int]:
    """(attention heads, query groups), of the arguments in the file.

    Raises:
        DumpError: they are not there.
    """
    asked = ("num_attention_heads", "group_query_attention", "num_query_groups")
    said = {one: np.asarray(state.values(f"args.{one}")).tolist() for one in asked if state.has(f"args.{one}")}
    if "num_attention_heads" not in said:
        raise DumpError(
            "the fused attention of a Megatron checkpoint cannot be cut apart", file=str(state.path),
            expected="args.num_attention_heads and args.num_query_groups in model_optim_rng.pt", found="none",
            hint="convert it to Hugging Face's layout first (megatron-bridge, mbridge)",
        )  # fmt: skip
    heads = said["num_attention_heads"]
    # Megatron's default of num_query_groups is 1, and means nothing unless groups are asked for.
    groups = (said.get("num_query_groups") or heads) if said.get("group_query_attention", True) else heads
    if type(heads) is not int or type(groups) is not int or groups < 1 or heads < groups or heads % groups:
        raise DumpError(
            "the arguments of a Megatron checkpoint are of no attention", file=str(state.path),
            expected="so many heads in each query group", found=" and ".join(_counted(one) for one in (heads, groups)),
        )  # fmt: skip
    return heads, groups


def _counted(said: object) -> str:
    return str(said) if isinstance(said, int) and abs(said) < 1 << 40 else f"a {type(said).__name__} that is no count"
