"""A framework's own words for its fields: what each means and how its token axis lies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from replay_core import naming
from replay_core.records import TensorRef

#: field -> (canonical name, alignment). None: the general table knows the name; no token axis.
Words = Mapping[str, tuple[str | None, str | None]]


def words(**by_alignment: str) -> Words:
    """A table of words by what they say of the token axis: words(full="ids=input_ids attention_mask", none="meta").

    `field=canonical name`, or the field alone where the general table knows it; `none`: no token axis.
    """
    table: dict[str, tuple[str | None, str | None]] = {}
    for alignment, line in by_alignment.items():
        for word in line.split():
            field, _, canonical = word.partition("=")
            table[field] = canonical or None, None if alignment == "none" else alignment
    return table


#: What is a tensor wherever it is recorded.
_NEVER_SCALAR = ("ids", "mask", "positions", "layout", "logprob")


@lru_cache(maxsize=1 << 13)  # a log says the same names at every step
def metric_name(field: str, own: tuple[tuple[str, str], ...] = (), *, is_scalar: bool = True) -> str:
    """The canonical name of what a trainer logs: of a known meaning, a note, or under `metrics.`. A logged number is
    none of a batch's tensors, whatever it is called: `tokens=12,288` counts tokens.

    Args:
        own: the logger's own words, in the place of the notes.
        is_scalar: false of a list of numbers that a file of metrics holds.
    """
    table = dict(own)
    known = naming.canonical(field, table or None)
    if is_scalar and naming.meaning(known).kind in _NEVER_SCALAR:
        return f"metrics.{field}"
    return known if known in naming.MEANINGS or field in (table or naming.NOTES) else f"metrics.{field}"


_TOKEN = ("full", "response", "next", "packed", "prompt")


def named(
    fields: Iterable[TensorRef], words: Words, pad: str | Mapping[str, str] | None = None, prefix: str = ""
) -> list[TensorRef]:
    """The fields with canonical name, alignment and pad side; order as given.

    Args:
        pad: which side of the token axis is filled; by alignment where they differ. Only for padded token axes.
        prefix: what the dialect's fields are nested under (`inputs.`); not part of their meaning.
    """
    answer = []
    for order, ref in enumerate(fields):
        name = ref.name.removeprefix(prefix)
        canonical, alignment = words.get(name, (None, None))
        side = pad.get(alignment or "") if isinstance(pad, Mapping) else pad
        padded = alignment in _TOKEN and len(ref.shape) >= 2 and ref.rows is None
        answer.append(
            ref.with_(
                canonical=canonical or naming.canonical(name),
                alignment=(alignment or ("sample" if ref.alignment == "sample" else None)) if ref.shape else None,
                pad=side if padded else None,
                order=order,
            )
        )
    return answer


def settled_by_width(fields: list[TensorRef]) -> list[TensorRef]:
    """The fields with the alignment their width says, where it is not the one of their name.

    verl's multi-turn loss_mask is as wide as input_ids [B, T], its other masks as responses [B, R]; ROLL's masks are
    [B, T], and [B, R] in batches made up for a test.
    """
    ids, responses = (_padded(fields, name) for name in ("input_ids", "response_ids"))
    if ids is None or responses is None or responses.shape[1] >= ids.shape[1] - 1:
        return fields
    sides = {ids.shape[1]: ("full", ids.pad), ids.shape[1] - 1: ("next", ids.pad),
             responses.shape[1]: ("response", responses.pad)}  # fmt: skip
    answer = []
    for ref in fields:
        if ref.alignment in ("full", "next", "response") and len(ref.shape) >= 2 and ref.rows is None:
            alignment, pad = sides.get(ref.shape[1], (ref.alignment, ref.pad))
            if alignment != ref.alignment and (ref.alignment, alignment) != ("next", "full"):
                ref = ref.with_(alignment=alignment, pad=pad)
        answer.append(ref)
    return answer


def _padded(fields: Iterable[TensorRef], name: str) -> TensorRef | None:
    return next((ref for ref in fields if ref.canonical == name and len(ref.shape) == 2 and ref.rows is None), None)
