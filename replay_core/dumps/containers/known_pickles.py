"""A run's records are one pickle many times over: what it amounts to is worked out once.

Two torch zips of the same `data.pkl` differ in where their storages lie and in what those hold, and in nothing else.
The recipe is kept from the third time a pickle is met on: a run whose records all differ pays one hash each, and a
comparison meets the pickle of a lone record twice.
Only flat dictionaries of tensors and plain values are kept: what module outputs and batches are.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from replay_core.records import FileBytes, TensorRef

#: A pickle of so many bytes names some ten thousand tensors; longer ones are read anew.
MOST_BYTES = 1 << 20
#: Bytes of pickles that are kept, and how many are remembered as met.
_KEPT_BYTES, _MET = 1 << 22, 1 << 12
_OFTEN = 3
_PLAIN = frozenset({str, int, float, bool, type(None)})


#: What a pickle is known by, and what else a reading depends on: the byte order, and the classes it is to keep inert.
Met = tuple[bytes, bool, frozenset[str]]
#: Pickles of more bytes are known by their digest.
_LONG = 1 << 16


class KnownPickle(NamedTuple):
    """What a pickle makes of its storages, in some forty bytes a tensor: thousands are what a large model records."""

    #: The storages' keys, end to end with a zero between, and the size that each had.
    keys: bytes
    sizes: array[int]
    #: In the file's order, with the kind of each: the number of a plain value's is below zero.
    names: tuple[str, ...]
    kinds: array[int]
    #: dtype, shape, bytes, strides, whether it is big-endian: those that there are.
    of_kind: tuple[tuple[str, tuple[int, ...], int, tuple[int, ...] | None, bool], ...]
    #: Of each tensor which storage it views, from which byte of it on.
    storages: array[int]
    firsts: array[int]
    values: tuple[Any, ...]
    #: Bytes of the pickle.
    nbytes: int

    def tree(
        self, path: Path, look_up: Callable[[Iterable[bytes]], dict[bytes, tuple[int, int]]]
    ) -> dict[str, Any] | None:
        """The dictionary of another file of the same pickle; None where its storages are not of the same sizes."""
        keys = self.keys.split(b"\0")
        found = look_up(keys)
        starts = []
        for key, nbytes in zip(keys, self.sizes, strict=True):
            place = found.get(key)
            if place is None or place[1] != nbytes:
                return None
            starts.append(place[0])
        tree: dict[str, Any] = {}
        of_kind = self.of_kind
        for name, number, storage, first in zip(self.names, self.kinds, self.storages, self.firsts, strict=True):
            if number < 0:
                tree[name] = self.values[~number]
                continue
            dtype, shape, nbytes, strides, big_endian = of_kind[number]
            where = FileBytes(path, starts[storage] + first, nbytes, strides, big_endian)
            tree[name] = TensorRef("", dtype, shape, where)
        return tree


_recipes: dict[Met, KnownPickle] = {}
#: How often each was met, by its hash.
_met: dict[int, int] = {}


def met_as(pickled: bytes, big_endian: bool, inert: frozenset[str]) -> Met:
    """What a pickle is known by."""
    # No two pickles that anybody can make share one: a recipe stands in for every check of its pickle.
    return (pickled if len(pickled) <= _LONG else blake2b(pickled).digest(), big_endian, inert)


def recipe(met: Met) -> KnownPickle | None:
    """What is known of a pickle, if it is."""
    return _recipes.get(met)


def learn(met: Met, tree: Any, places: dict[bytes, tuple[int, int]], pickled: int) -> None:
    """Keep what the pickle of so many bytes amounts to when it is met the third time, where it is plain enough.

    places: where each of its storages lies in this file, and its bytes.
    """
    mark = hash(met)
    times = _met.get(mark, 0) + 1
    if times < _OFTEN:
        if len(_met) >= _MET:
            _met.clear()
        _met[mark] = times
        return
    made = _recipe_of(tree, places, pickled)
    if made is not None:
        # A copy: another thread may learn a pickle meanwhile.
        if sum([one.nbytes for one in tuple(_recipes.values())]) > _KEPT_BYTES:
            _recipes.clear()
        _recipes[met] = made


def forget() -> None:
    """Know no pickle any more."""
    _recipes.clear()
    _met.clear()


def _recipe_of(tree: Any, places: dict[bytes, tuple[int, int]], pickled: int) -> KnownPickle | None:
    if type(tree) is not dict or not places or any(b"\0" in key for key in places):
        return None
    ordered = sorted(places.items(), key=lambda item: item[1])
    starts = [start for _, (start, _) in ordered]
    numbers: dict[Any, int] = {}
    kinds, storages, firsts = array("i"), array("I"), array("q")
    values: list[Any] = []
    for name, value in tree.items():
        if type(name) is not str:
            return None
        if type(value) in _PLAIN:
            kinds.append(~len(values))
            storages.append(0)
            firsts.append(0)
            values.append(value)
            continue
        if type(value) is not TensorRef or type(value.source) is not FileBytes:
            return None
        where = value.source
        number = bisect_right(starts, where.offset) - 1
        # A tensor without bytes may lie anywhere, between two storages too.
        if number < 0 or not where.nbytes or where.offset + where.nbytes > sum(ordered[number][1]):
            return None
        kind = value.dtype, value.shape, where.nbytes, where.strides, where.big_endian
        kinds.append(numbers.setdefault(kind, len(numbers)))
        storages.append(number)
        firsts.append(where.offset - starts[number])
    keys, sizes = b"\0".join([key for key, _ in ordered]), array("q", [nbytes for _, (_, nbytes) in ordered])
    return KnownPickle(keys, sizes, tuple(tree), kinds, tuple(numbers), storages, firsts, tuple(values), pickled)
