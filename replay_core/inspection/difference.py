"""How two tensors' differences are spread, and where along an axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replay_core.compare.differences import difference
from replay_core.documents.version import SCHEMA_VERSION
from replay_core.errors import RequestError
from replay_core.export.documents import stamp
from replay_core.export.numbers import clean
from replay_core.inspection.subject import Subject

if TYPE_CHECKING:
    from replay_core.documents.difference import DifferenceDocument


def difference_document(a: Subject, b: Subject, *, axis: str = "row", cells: int = 64) -> DifferenceDocument:
    """How two tensors' differences are spread (ULP, log2 |d|, quantiles, Pearson), and a strip along an axis.

    Args:
        axis: `row` (token, where the layout tells) or `channel`.
        cells: how many cells the strip has at most.

    Raises:
        RequestError: no such axis, texts, or two tensors whose elements cannot face each other.
    """
    for one in (a, b):
        if not one.has_numbers:
            raise RequestError("there are no numbers to take a difference of", tensor=one.ref.name, found=one.ref.dtype)
    found = difference(a.micro_batch(), b.micro_batch(), a.ref, b.ref, axis=axis, cells=cells)
    doc: DifferenceDocument = {
        "schema_version": SCHEMA_VERSION,
        "kind": "difference",
        **stamp(),
        "a": a.named(),
        "b": b.named(),
        **found,
    }
    return clean(doc)
