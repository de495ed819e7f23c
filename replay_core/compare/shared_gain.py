"""Gradients that all share one factor are one finding: a sum where a mean belongs, a loss scale left in.

The factor is held against the ratios the two runs offer.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct, field

from replay_core import naming, pages
from replay_core.compare.judging import limits, structure
from replay_core.errors import RldbgError
from replay_core.records import Record, RecordKey, TensorRef

if TYPE_CHECKING:
    from replay_core.compare.judging.tensors import Place, TensorVerdict

#: Gradients from which on a shared factor is no coincidence.
FEWEST = 2
#: How closely factors must agree, and an offered ratio the factor: bf16 gradients round to 4e-3.
AGREEMENT = 1e-2
#: Parts of all compared gradients of a micro-batch that must share it.
SHARE = 0.9

_SCALES = ("loss_scale", "grad_scale", "gradient_accumulation_steps")


class _Gradients(Struct):
    """Of a micro-batch: the key of the first, how many there are, and the factors of those that a factor explains."""

    key: RecordKey
    #: Of the first: its step among those that have gradients, and where in it it stands, if rows come in another order.
    at: tuple[int, Any]
    number: int = 0
    factors: array[float] = field(default_factory=lambda: array("d"))

    def factor(self) -> float | None:
        """The factor that (nearly) all of them share and that explains them, else None."""
        if len(self.factors) < FEWEST or len(self.factors) < SHARE * self.number:
            return None
        middle = float(np.median(self.factors))
        if not middle or max(abs(factor / middle - 1) for factor in self.factors) > AGREEMENT:
            return None
        return middle


class SharedGains:
    """Takes rows as they are judged, and says which micro-batches' gradients share a factor."""

    def __init__(self) -> None:
        self._places: dict[Place, _Gradients] = {}
        self._steps: dict[int | None, int] = {}

    def take(self, row: TensorVerdict) -> None:
        """Take a row; one of no gradient is passed over."""
        if naming.meaning(row.name).kind != "gradient" or row.figures is None or row.figures.compared < 2:
            return
        here = self._places.get(row.place)
        if here is None:
            step = self._steps.setdefault(row.key.step, len(self._steps))
            here = self._places[row.place] = _Gradients(row.key, (step, () if row.order is None else row.order[1]))
        here.number += 1
        if not row.figures.mismatched or row.verdict.value != "DIFF":
            return
        if (seen := structure.gain(row.figures)) is not None and seen.value > limits.GAIN_FLOOR["bfloat16"]:
            here.factors.append(1 + row.figures.total.gain)

    def sentences(self, records_a: list[Record], records_b: list[Record]) -> list[str]:
        """One per micro-batch whose gradients all share one factor, with the ratios that equal it."""
        said = []
        for gradients in sorted(self._places.values(), key=lambda one: one.at):
            factor = gradients.factor()
            if factor is None:
                continue
            explained = [f"{name} {ratio:g}" for name, ratio in _ratios(records_a, records_b, gradients.key.step)
                         if abs(ratio / factor - 1) <= AGREEMENT]  # fmt: skip
            because = f", which is {' and '.join(explained)}" if explained else "; no count of the runs explains it"
            said.append(
                f"{gradients.key}: all {gradients.number} gradients of b are a times {factor:.6g}{because}: one cause"
            )
        return said


def _ratios(records_a: list[Record], records_b: list[Record], step: int | None) -> Iterator[tuple[str, float]]:
    """Ratios the runs offer, b against a and the other way round, and counts that both share."""
    counts_a, counts_b = (_counts(records, step) for records in (records_a, records_b))
    for name in counts_a.keys() | counts_b.keys():
        one, other = counts_a.get(name), counts_b.get(name)
        if one and other and one != other:
            yield f"{name}, {one:g} in a and {other:g} in b: the ratio", other / one
            yield f"{name}, {one:g} in a and {other:g} in b: the inverse ratio", one / other
        elif one and other and one > 1:
            yield f"the number of {name}", one
            yield f"one over the number of {name},", 1 / one


def _counts(records: Iterable[Record], step: int | None) -> dict[str, float]:
    """What a step can be divided by: micro-batches, ranks, samples, tokens, and scales the trainer recorded."""
    here = [record for record in records if record.key.step == step]
    counts: dict[str, float] = {
        "micro-batches": len({record.key.micro for record in here if record.key.micro is not None}),
        "ranks": len({record.key.rank for record in here if record.key.rank is not None}),
    }
    for record in here:
        try:
            fields = record.tensors()
        except RldbgError:
            continue  # counted as unreadable by the comparison itself
        for ref in fields:
            _count(counts, ref)
    return {name: value for name, value in counts.items() if value}


def _count(counts: dict[str, float], ref: TensorRef) -> None:
    name = ref.canonical or ref.name
    last = name.rpartition(".")[2]
    if not ref.is_readable or ref.is_text:
        return
    if name == "attention_mask" and len(ref.shape) == 2:
        counts["samples"] = counts.get("samples", 0) + ref.shape[0]
        counts["tokens"] = counts.get("tokens", 0) + _total(ref)
        counts["tokens with padding"] = counts.get("tokens with padding", 0) + ref.numel
    elif name in ("response_mask", "loss_mask"):
        counts["response tokens"] = counts.get("response tokens", 0) + _total(ref)
    elif last in _SCALES and ref.numel == 1:
        counts[last] = _total(ref)


def _total(ref: TensorRef) -> float:
    try:
        values: Any = pages.array(ref)
    except RldbgError:
        return 0.0
    return float(np.asarray(values, dtype=np.float64).sum())
