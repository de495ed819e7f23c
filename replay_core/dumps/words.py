"""A framework's own words for its fields: what each means and how its token axis lies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from replay_core import naming
from replay_core.records import TensorRef

#: field -> (canonical name, alignment). None: the general table knows the name; no token axis.
Words = Mapping[str, tuple[str | None, str | None]]

_TOKEN = ("full", "response", "next", "packed", "prompt")


def named(
    fields: Iterable[TensorRef], words: Words, pad: str | Mapping[str, str] | None = None, prefix: str = ""
) -> list[TensorRef]:
    """The fields with canonical name, alignment and pad side; order as given.

    Args:
        pad: which side of the token axis is filled; by field where they differ. Only for padded token axes.
        prefix: what the dialect's fields are nested under (`inputs.`); not part of their meaning.
    """
    answer = []
    for order, ref in enumerate(fields):
        name = ref.name.removeprefix(prefix)
        canonical, alignment = words.get(name, (None, None))
        side = pad.get(name) if isinstance(pad, Mapping) else pad
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
