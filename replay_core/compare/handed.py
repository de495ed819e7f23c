"""What a stage of a pipeline was given, against what the stage before put out: told by the values of one run alone.

What crosses a boundary between stages is copied, so that what is given in a micro-batch is, byte for byte, an output of
some other rank in the same one. Where it is one of another micro-batch, or an output in half precision or times a
factor, that is what went wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from replay_core import pages
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.pairing.micro_batch_pair import Side
from replay_core.compare.pairing.pipeline import OF_LAYER, is_of_tokens
from replay_core.compare.pairing.ranks import named, same_values
from replay_core.errors import DumpError
from replay_core.measure.precision import as_bfloat16
from replay_core.records import Record, TensorRef

#: Elements that are read of a step, at most; and what rounding leaves of a factor, of the norm.
_MOST, _LEFT = 1 << 26, 1e-5


class _Stage(Struct):
    """What a rank was given in a micro-batch, and what it put out; digests: of both, by what they are told apart."""

    given: list[TensorRef]
    made: list[TensorRef]
    digests: tuple[list[bytes], set[bytes]] = ([], set())


def handed_otherwise(records: Sequence[Record], step: int, role: str | None) -> Fault | None:
    """Which ranks of a run were given what no rank put out for them; None where all is as it was put out, or it is not
    known.
    """
    stages = _stages([one for one in records if one.key.step == step and one.key.role == role])
    size = sum(ref.numel for by_micro in stages.values() for one in by_micro.values() for ref in one.given + one.made)
    if len(stages) < 2 or size > _MOST:
        return None
    try:
        for by_micro in stages.values():
            for one in by_micro.values():
                one.digests = [_digest(ref) for ref in one.given], {_digest(ref) for ref in one.made}
    except DumpError:
        return None
    for rank, by_micro in stages.items():
        others = {other: of for other, of in stages.items() if other != rank}
        found = _of_other_micros(rank, by_micro, others) or _changed(rank, by_micro, others)
        if found is not None:
            return found
    return None


def masks_otherwise(records: Sequence[Record], step: int, role: str | None) -> Fault | None:
    """Which later stages were given a mask that no first stage has in the same micro-batch, but in another: samples of
    one micro-batch are computed under the padding of another. None where there are none, or it is not known.
    """
    own: dict[int, dict[int, TensorRef]] = {}
    first: set[int] = set()
    by_key: dict[tuple[int, int], list[Record]] = {}
    for one in records:
        if one.key.step == step and one.key.role == role and one.key.rank is not None and one.key.micro is not None:
            by_key.setdefault((one.key.rank, one.key.micro), []).append(one)
    for (rank, micro), of_micro in by_key.items():
        side = Side(of_micro)
        side.load()
        mask = side.find("attention_mask")
        first |= {rank} if side.find("input_ids") is not None else set()
        if mask is not None and mask.is_readable and mask.numel <= _MOST >> 8:
            own.setdefault(rank, {})[micro] = mask
    there = {(rank, micro): ref for rank in first for micro, ref in own.get(rank, {}).items()}
    astray: dict[int, dict[int, int]] = {}
    for rank, of_rank in own.items():
        for micro, ref in of_rank.items() if rank not in first and there else ():
            if any(same_values(ref, other) for (_, at), other in there.items() if at == micro):
                continue
            of = next((at for (_, at), other in there.items() if at != micro and same_values(ref, other)), None)
            if of is None:
                return None
            astray.setdefault(rank, {})[micro] = of
    if not astray:
        return None
    rank = min(astray)
    said = ", ".join(f"in micro-batch {micro} that of {of}" for micro, of in sorted(astray[rank].items())[:4])
    return Fault(
        "other mask", tuple(sorted(astray)),
        f"{whose(sorted(astray))} {'was' if len(astray) == 1 else 'were'} given another micro-batch's attention mask "
        f"({said}, as the first stage has them): its tokens are computed under the padding of other samples",
    )  # fmt: skip


def _stages(records: Sequence[Record]) -> dict[int, dict[int, _Stage]]:
    found: dict[int, dict[int, _Stage]] = {}
    by_key: dict[tuple[int, int], list[Record]] = {}
    for record in records:
        if record.key.rank is not None and record.key.micro is not None:
            by_key.setdefault((record.key.rank, record.key.micro), []).append(record)
    sides = {key: Side(own) for key, own in by_key.items()}
    layers: dict[int, set[int]] = {}
    for (rank, _), side in sides.items():
        side.load()
        numbers = {int(at[2]) for name, stage in side.tensors if stage == "modules" and (at := OF_LAYER.match(name))}
        layers.setdefault(rank, set()).update(numbers)
    lowest = min((min(own) for own in layers.values() if own), default=0)
    for (rank, micro), side in sides.items():
        given, made = [], []
        own = layers[rank]
        for (name, stage), (_, ref) in side.tensors.items():
            if not is_of_tokens(ref) or not ref.is_readable or name.startswith("grad."):
                continue
            at = OF_LAYER.match(name)
            if stage == "batch_inputs":
                given.append(ref)
            elif stage == "modules" and at is None and name.startswith("forward.output."):
                made.append(ref)
            elif at is not None and name == f"{at[0]}inputs.0" and int(at[2]) == min(own) > lowest:
                given.append(ref)
            elif at is not None and name == f"{at[0]}output" and int(at[2]) == max(own):
                made.append(ref)
        found.setdefault(rank, {})[micro] = _Stage(given, made)
    return found


def _of_other_micros(rank: int, by_micro: dict[int, _Stage], others: dict[int, dict[int, _Stage]]) -> Fault | None:
    astray: dict[int, tuple[int, int]] = {}
    for micro, own in by_micro.items():
        for digest in own.digests[0]:
            if any(digest in of[micro].digests[1] for of in others.values() if micro in of):
                break
            instead = [
                (other, at) for other, of in others.items() for at, stage in of.items()
                if at != micro and digest in stage.digests[1]
            ]  # fmt: skip
            if instead:
                astray[micro] = instead[0]
    if not astray:
        return None
    senders = sorted({other for other, _ in astray.values()})
    before = {micro - at for micro, (_, at) in astray.items()}
    which = "the one before" if before == {1} else "the one after" if before == {-1} else (
        f"micro-batch{'es' * (len(astray) > 1)} {named(at for _, at in astray.values())}"
    )  # fmt: skip
    return Fault(
        "other micro-batch", tuple(sorted({rank, *senders})),
        f"rank {rank} was given in micro-batch{'es' * (len(astray) > 1)} {named(astray)} what {whose(senders)} put out "
        f"in {which}, value by value: another micro-batch's activations were handed from stage to stage",
    )  # fmt: skip


def _changed(rank: int, by_micro: dict[int, _Stage], others: dict[int, dict[int, _Stage]]) -> Fault | None:
    """Whether all that a rank was given is what another put out, rounded or times one factor."""
    said: set[tuple[int, str, float | None]] = set()
    for micro, own in by_micro.items():
        for ref, digest in zip(own.given, own.digests[0], strict=True):
            sent = [(other, one) for other, of in others.items() if micro in of for one in of[micro].made]
            if not sent or any(digest in of[micro].digests[1] for of in others.values() if micro in of):
                return None
            how = [(other, *one) for other, made in sent if (one := _how(ref, made)) is not None]
            if not how:
                return None
            said.add(how[0])
    if len(said) != 1:
        return None
    ((sender, what, factor),) = said
    return Fault(
        "rounded" if factor is None else "handed on", (sender, rank),
        f"rank {rank} was given what rank {sender} put out {what}: it is not handed from stage to stage as it is",
        factor,
    )  # fmt: skip


def _digest(ref: TensorRef) -> bytes:
    values = pages.array(ref)
    return hashlib.blake2b(f"{values.dtype}{values.shape}".encode() + values.tobytes(), digest_size=16).digest()


def _how(given: TensorRef, made: TensorRef) -> tuple[str, float | None] | None:
    if given.shape != made.shape or given.dtype != made.dtype or given.dtype != "float32":
        return None
    try:
        here, there = (pages.array(ref).astype(np.float32) for ref in (given, made))
    except DumpError:
        return None
    if not np.isfinite(here).all() or not np.isfinite(there).all() or not there.any():
        return None
    if _is_rounded(here, there):
        return "rounded to bfloat16", None
    factor = float((here.astype(np.float64) * there).sum() / np.square(there.astype(np.float64)).sum())
    left = float(np.linalg.norm(here - factor * there.astype(np.float64)))
    if left <= _LEFT * float(np.linalg.norm(here)) and abs(factor - 1) > 100 * _LEFT:
        return f"times {factor:.4g}", round(factor, 4)
    return None


def _is_rounded(here: Any, there: Any) -> bool:
    """Whether values are others to the nearest of bfloat16, ties to even."""
    made = as_bfloat16(there).view(np.uint32)
    return bool((made == np.ascontiguousarray(here).view(np.uint32)).all())
