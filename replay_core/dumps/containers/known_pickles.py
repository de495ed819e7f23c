"""A run's records are one pickle many times over: what it amounts to is worked out once.

Two torch zips of the same `data.pkl` differ in where their storages lie and in what those hold, and in nothing else.
The recipe is kept from the second time a pickle is met on, so that a run whose records all differ pays one hash each.
Only flat dictionaries of tensors and plain values are kept: what module outputs and batches are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from replay_core.records import FileBytes, TensorRef

#: A pickle of so many bytes names some ten thousand tensors; longer ones are read anew.
MOST_BYTES = 1 << 20
#: Bytes of pickles that are kept, and how many are remembered as met.
_KEPT_BYTES, _MET = 1 << 22, 1 << 12
_PLAIN = frozenset({str, int, float, bool, type(None)})

#: What else a reading depends on: the byte order, and the classes it is to keep inert.
Met = tuple[bytes, bool, frozenset[str]]


class _Entry(NamedTuple):
    """One tensor: of which storage, from which byte of it on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    storage: int
    first: int
    nbytes: int
    strides: tuple[int, ...] | None
    big_endian: bool


class KnownPickle(NamedTuple):
    """What a pickle makes of its storages: each by its key, with the size it had."""

    storages: tuple[tuple[bytes, int], ...]
    #: In the file's order: a tensor, or a name and its plain value.
    entries: tuple[_Entry | tuple[str, Any], ...]

    def tree(
        self, path: Path, look_up: Callable[[Iterable[bytes]], dict[bytes, tuple[int, int]]]
    ) -> dict[str, Any] | None:
        """The dictionary of another file of the same pickle; None where its storages are not of the same sizes."""
        found = look_up([key for key, _ in self.storages])
        starts = []
        for key, nbytes in self.storages:
            place = found.get(key)
            if place is None or place[1] != nbytes:
                return None
            starts.append(place[0])
        tree: dict[str, Any] = {}
        for entry in self.entries:
            if len(entry) == 2:
                tree[entry[0]] = entry[1]
                continue
            name, dtype, shape, storage, first, nbytes, strides, big_endian = entry
            where = FileBytes(path, starts[storage] + first, nbytes, strides, big_endian)
            tree[name] = TensorRef("", dtype, shape, where)
        return tree


_recipes: dict[Met, KnownPickle] = {}
_met: set[int] = set()


def recipe(met: Met) -> KnownPickle | None:
    """What is known of a pickle, if it is."""
    return _recipes.get(met)


def learn(met: Met, tree: Any, places: dict[bytes, tuple[int, int]]) -> None:
    """Keep what the pickle amounts to when it is met the second time, where it is plain enough.

    places: where each of its storages lies in this file, and its bytes.
    """
    mark = hash(met)
    if mark not in _met:
        if len(_met) >= _MET:
            _met.clear()
        _met.add(mark)
        return
    made = _recipe_of(tree, places)
    if made is not None:
        # A copy: another thread may learn a pickle meanwhile.
        if sum([len(pickled) for pickled, _, _ in tuple(_recipes)]) > _KEPT_BYTES:
            _recipes.clear()
        _recipes[met] = made


def forget() -> None:
    """Know no pickle any more."""
    _recipes.clear()
    _met.clear()


def _recipe_of(tree: Any, places: dict[bytes, tuple[int, int]]) -> KnownPickle | None:
    if type(tree) is not dict or not places:
        return None
    ordered = sorted(places.items(), key=lambda item: item[1])
    starts = [start for _, (start, _) in ordered]
    entries: list[_Entry | tuple[str, Any]] = []
    for name, value in tree.items():
        if type(name) is not str:
            return None
        if type(value) in _PLAIN:
            entries.append((name, value))
            continue
        if type(value) is not TensorRef or type(value.source) is not FileBytes:
            return None
        where = value.source
        number = bisect_right(starts, where.offset) - 1
        # A tensor without bytes may lie anywhere, between two storages too.
        if number < 0 or not where.nbytes or where.offset + where.nbytes > sum(ordered[number][1]):
            return None
        first = where.offset - starts[number]
        entries.append(
            _Entry(name, value.dtype, value.shape, number, first, where.nbytes, where.strides, where.big_endian)
        )
    return KnownPickle(tuple([(key, nbytes) for key, (_, nbytes) in ordered]), tuple(entries))
