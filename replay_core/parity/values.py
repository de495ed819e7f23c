"""Values: what one critic said of one batch, read from any dump: native, ROLL's critic files, or a trainer's own."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from replay_core import pages
from replay_core.errors import NothingComparableError, RldbgError
from replay_core.records import Inline, Record, Run, TensorRef, Unreadable
from replay_core.regexes import regex

if TYPE_CHECKING:
    from replay_core.documents.parts import NamedTensor

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

#: Words in a file's name that say who wrote it, not which batch it is.
_BACKEND = regex(r"[_\-.]?(deepspeed|megatron|torch|critic|values)", re.IGNORECASE)

#: Beside the values of a batch: train mode twice, and each row alone.
PROBES = ("values_train", "values_train_again", "values_alone")


class Values(Struct):
    """Values [B, T] of one batch at one training step, with the tokens they are about.

    On the values' own axis, index t of a [B, S - 1] tensor being the state of token t, before token t + 1:
    response_BT says whether token t + 1 was generated, valid_BT whether token t is none of the padding, tokens_BT
    holds token t + 1.
    """

    step: int | None
    batch: str
    backend: str
    dtype: str
    values_BT: Floats
    response_BT: Bools | None = None
    valid_BT: Bools | None = None
    tokens_BT: Ints | None = None
    ids_BS: Ints | None = None
    attention_BS: Bools | None = None
    positions_BS: Ints | None = None
    probes: dict[str, Floats] = field(default_factory=dict)
    where: str = ""
    records: list[Record] = field(default_factory=list)
    returns_BT: Floats | None = None
    source: NamedTensor | None = None
    """The tensor they were read from, as an inspection names it: path, key, name."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values_BT.shape

    def rows(self, order: Ints) -> Values:
        """The same with its rows in another order."""
        changed: dict[str, Any] = {name: getattr(self, name) for name in self.__struct_fields__}
        for name, value in changed.items():
            if isinstance(value, np.ndarray):
                changed[name] = value[order]
        changed["probes"] = {name: value[order] for name, value in self.probes.items()}
        return Values(**changed)


def read_values(run: Run) -> list[Values]:
    """The values of every batch and step of a run, in recorded order.

    Raises:
        NothingComparableError: no record holds values.
    """
    together: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in run.records:
        # Files that name no step or micro stand for themselves.
        key = record.key
        together[key.step, key.micro, key.rank, key.role].append(record)
    found: list[Values] = []
    unreadable: list[str] = []
    for records in together.values():
        found += _of(records, run, unreadable)
    if not found:
        raise NothingComparableError(
            "no record holds a critic's values",
            file=str(run.path),
            expected="a tensor `values` [B, T] beside input_ids and masks",
            found="; ".join(unreadable[:3])
            or ", ".join(sorted({str(record.key) for record in run.records})[:4])
            or "no record",
            hint=f"rldbg ls {run.path}",
        )
    return found


def _of(records: list[Record], run: Run, unreadable: list[str]) -> list[Values]:
    tensors: dict[str, TensorRef] = {}
    holders = []
    for record in records:
        try:
            refs = record.tensors()
        except RldbgError as error:
            unreadable.append(f"{record.path.name}: {error.message}")
            continue
        for ref in refs:
            if not isinstance(ref.source, Unreadable):
                tensors.setdefault(ref.canonical or ref.name, ref)
        if any((ref.canonical or ref.name) == "values" and len(ref.shape) in (2, 3) for ref in refs):
            holders.append(record)
    if not holders:
        return []
    holder, ref = holders[0], tensors["values"]
    values_BT = _floats(ref)
    if values_BT.ndim == 3:
        values_BT = values_BT[..., 0]
    ids, mask, response = (_masks(tensors, name) for name in ("input_ids", "attention_mask", "response_mask"))
    made = Values(
        step=holder.key.step,
        batch=_text(tensors, "batch") or _batch_name(holder),
        backend=_text(tensors, "backend") or str((run.flags or {}).get("backend") or holder.path.parent.name),
        dtype=computed_dtype(ref, run),
        values_BT=values_BT,
        where=str(holder.path),
        source={"path": str(run.path), "key": holder.key.to_mapping(), "name": _name_of(holder, ref)},
        records=records,
        ids_BS=ids,
        attention_BS=None if mask is None else mask.astype(bool),
        positions_BS=_masks(tensors, "position_ids"),
        probes={name: _floats(tensors[name]) for name in PROBES if name in tensors},
        returns_BT=_floats(tensors["returns"]) if "returns" in tensors else None,
    )
    alignment = ref.alignment
    width = values_BT.shape[1]
    made.valid_BT = None if mask is None else _states(mask, width).astype(bool)
    made.response_BT = None if response is None else _onto(response, width, alignment)
    if made.response_BT is not None and made.valid_BT is not None:
        made.response_BT = made.response_BT & made.valid_BT
    if ids is not None:
        made.tokens_BT = _onto(ids, width, alignment, keep=True)
    return [made]


def _name_of(holder: Record, ref: TensorRef) -> str:
    """What the holder calls its values: the reference may be a neighbour's of the same meaning."""
    return next((one.name for one in holder.tensors() if (one.canonical or one.name) == "values"), ref.name)


def _onto(whole: NDArray[Any], width: int, alignment: str | None, *, keep: bool = False) -> Any:
    """A [B, S] mask (or ids) on the axis of values [B, width]: what is said of the token that a value is about."""
    if whole.shape[1] == width and alignment == "next":
        # Said of the token after; the last column has none.
        whole = np.pad(whole[:, 1:], ((0, 0), (0, 1)))
    elif whole.shape[1] > width:
        # [B, S - 1] is about tokens 1..S-1, [B, A] about the last A.
        whole = whole[:, whole.shape[1] - width :]
    elif whole.shape[1] < width:
        whole = np.pad(whole, ((0, 0), (width - whole.shape[1], 0)))
    return whole if keep else whole.astype(bool)


def _states(whole: NDArray[Any], width: int) -> NDArray[Any]:
    """A [B, S] mask on the axis of values [B, width]: what is said of the token whose state is valued."""
    before = whole.shape[1] - width
    return whole[:, before - 1 : -1] if before > 0 else np.pad(whole, ((0, 0), (-before, 0)))


def _masks(tensors: dict[str, TensorRef], name: str) -> Ints | None:
    ref = tensors.get(name)
    if ref is None or len(ref.shape) != 2 or ref.is_text:
        return None
    return np.asarray(pages.array(ref)).astype(np.int64)


def _floats(ref: TensorRef) -> Floats:
    return np.asarray(pages.array(ref)).astype(np.float64)


def _text(tensors: dict[str, TensorRef], name: str) -> str | None:
    ref = tensors.get(name)
    value = ref.source.value if ref is not None and isinstance(ref.source, Inline) else None
    return value if isinstance(value, str) else None


def _batch_name(record: Record) -> str:
    stem = _BACKEND.sub("", record.path.stem)
    return re.sub(r"step_\d+|_?rank\d+|_?micro\d+", "", stem).strip("_-.") or str(record.key.micro or 0)


def computed_dtype(ref: TensorRef, run: Run | None = None) -> str:
    """The dtype the values were computed in: what the dump says, else the coarsest that holds every one of them."""
    flags = (run.flags or {}) if run is not None else {}
    effective = flags.get("effective")
    said = (effective if isinstance(effective, dict) else flags).get("dtype")
    if isinstance(said, str) and said in ("float32", "bfloat16", "float16", "float64"):
        return said
    if ref.dtype != "float32":
        return ref.dtype
    bits = np.ascontiguousarray(np.asarray(pages.array(ref)), np.float32).view(np.uint32)
    nonzero = bits[bits != 0]
    # Stored in float32, but no number uses the 16 bits that bfloat16 lacks.
    return "bfloat16" if nonzero.size >= 8 and not (nonzero & 0xFFFF).any() else "float32"
