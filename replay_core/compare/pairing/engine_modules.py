"""An engine's module tensors under a trainer's names: vLLM's and sglang's fused projections and their residual.

What differs is data (`_MEANS`). Their linears return (out, bias), so `qkv_proj.output.0` is an engine's. Their norms
add the residual: `input_layernorm(hidden, residual)` returns (normed, hidden + residual), so what transformers hands to
a norm is an engine's `output.1`. `self_attn.attn` is attention between its projections, `act_fn` takes gate and up and
returns their product. A decoder layer hands on (what its MLP put out, residual): neither is a trainer's layer output.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from replay_core.dtypes import ITEMSIZE
from replay_core.engine_names import FUSED
from replay_core.records import FileBytes, Record, TensorRef
from replay_core.regexes import regex

Tensors = Mapping[tuple[str, str], tuple[Record, TensorRef]]

#: Who has one of these is an engine; no transformers module returns so.
_ENGINE = regex(r"(?:^|\.)(?:(?:qkv|gate_up)_proj\.output\.0|(?:input|post_attention)_layernorm\.output\.1)$")
_NORM = r"((?:.*\.)?(?:\w*_layernorm|norm))"
#: An engine's tensor -> a trainer's, the first that fits; "" where a trainer has no such tensor.
_MEANS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (regex(pattern), name)
    for pattern, name in (
        (_NORM + r"\.output\.1", r"\1.inputs.0"),
        (_NORM + r"\.output\.0", r"\1.output"),
        (_NORM + r"\.inputs\.\w+", ""),
        (r"(.*\.self_attn)\.attn\.output(?:\.0)?", r"\1.o_proj.inputs.0"),
        (r"(.*\.self_attn)\.(?:attn|rotary_emb)\..*", ""),
        (r"(.*\.mlp)\.act_fn\.output(?:\.0)?", r"\1.down_proj.inputs.0"),
        (r"(.*\.mlp)\.act_fn\..*", ""),
        (r"(.*\.\w+_proj|lm_head)\.output\.0", r"\1.output"),
        (r"((?:.*\.)?layers\.\d+)\.(?:inputs|output)\..*", ""),
        (r"((?:.*\.)?layers\.\d+\.self_attn)\.inputs\..*", ""),
    )
)
_FUSED = regex(r"(.*\.)(qkv_proj|gate_up_proj)\.(inputs|output)\.0")


def is_engine(names: Iterator[str]) -> bool:
    """Whether these are the tensors of an engine's modules."""
    return any(_ENGINE.search(name) for name in names)


def as_trainers(tensors: Tensors) -> dict[tuple[str, str], tuple[Record, TensorRef]]:
    """An engine's tensors under a trainer's names, fused ones cut into their columns; what means nothing there is left
    out, and so is a second name of one that is there."""
    columns = {name: ref.shape[-1] for (name, _), (_, ref) in tensors.items() if ref.shape}
    found: dict[tuple[str, str], tuple[Record, TensorRef]] = {}
    for (name, stage), (record, ref) in tensors.items():
        if stage != "modules":
            found[name, stage] = (record, ref)
            continue
        for called, made in _named(name, ref, columns):
            found.setdefault((called, stage), (record, made))
    return found


def _named(name: str, ref: TensorRef, columns: Mapping[str, int]) -> Iterator[tuple[str, TensorRef]]:
    fused = _FUSED.fullmatch(name)
    if fused is not None:
        prefix, which, end = fused.groups()
        sizes = _sizes(prefix, which, ref, columns) if end == "output" else (0,) * len(FUSED[which][0])
        start = 0
        for part, size in zip(FUSED[which][0], sizes, strict=False):
            called = f"{prefix}{part}.{end}" + (".0" if end == "inputs" else "")
            made = _cut(ref, start, size) if end == "output" else ref
            if made is not None:
                yield called, made.with_(canonical=called)
            start += size
        return
    for pattern, means in _MEANS:
        found = pattern.fullmatch(name)
        if found is not None:
            called = found.expand(means)
            if called:
                yield called, ref.with_(canonical=called)
            return
    yield name, ref


def _sizes(prefix: str, which: str, ref: TensorRef, columns: Mapping[str, int]) -> tuple[int, ...]:
    """Columns of each projection in a fused one: of queries as many as attention puts out, keys and values the rest."""
    whole = ref.shape[-1] if ref.shape else 0
    if which == "gate_up_proj":
        return (whole // 2, whole // 2)
    put_out = (f"{prefix}attn.output", f"{prefix}o_proj.inputs.0")
    queries = next((columns[name] for name in put_out if name in columns), 0)
    rest = (whole - queries) // 2
    return (queries, rest, rest) if queries and rest > 0 else ()


def _cut(ref: TensorRef, start: int, size: int) -> TensorRef | None:
    """Columns of a tensor; None where its bytes do not lie so that they can be cut out."""
    where = ref.source
    if not isinstance(where, FileBytes) or ref.rows is not None or size <= 0:
        return None
    strides = where.strides
    if strides is None:
        strides, step = (), 1
        for length in reversed(ref.shape):
            strides, step = (step, *strides), step * length
    item, shape = ITEMSIZE[ref.dtype], (*ref.shape[:-1], size)
    last = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    made = replace(where, offset=where.offset + start * strides[-1] * item, nbytes=(last + 1) * item, strides=strides)
    return ref.with_(shape=shape, digest=None, source=made)
