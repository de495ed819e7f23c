"""Which values face which: batches by name, else by their tokens; two backends of one directory by their own labels."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from replay_core.dumps import open_run
from replay_core.errors import NothingComparableError, RequestError
from replay_core.parity.values import Ints, Values, read_values
from replay_core.records import Run


@dataclass(slots=True)
class PairedValues:
    """One batch: A's and B's values at each step both have, the first step being before any training."""

    batch: str
    a: list[Values] = field(default_factory=list)
    b: list[Values] = field(default_factory=list)


@dataclass(slots=True)
class Two:
    """Two sets of values, the runs they come from, and the names their critics give themselves."""

    run_a: Run
    run_b: Run
    a: list[Values]
    b: list[Values]


def open_two(path_a: Path, path_b: Path) -> Two:
    """The values of two dumps; one directory that holds two critics' files is both.

    Raises:
        RequestError: a dump holds the values of several critics and nothing says which is meant.
        NothingComparableError: a dump holds no values.
    """
    run_a = open_run(path_a)
    values_a = read_values(run_a)
    backends_a = list(dict.fromkeys(one.backend for one in values_a))
    if path_a.resolve() == path_b.resolve():
        if len(backends_a) != 2:
            raise RequestError(
                "one directory is both sides only where it holds two critics' values",
                file=str(path_a), expected="values of two backends", found=", ".join(backends_a),
            )  # fmt: skip
        one, other = ([value for value in values_a if value.backend == name] for name in backends_a)
        return Two(run_a, run_a, one, other)
    run_b = open_run(path_b)
    values_b = read_values(run_b)
    backends_b = list(dict.fromkeys(one.backend for one in values_b))
    for path, backends in ((path_a, backends_a), (path_b, backends_b)):
        if len(backends) > 1:
            raise RequestError(
                "the dump holds the values of several critics",
                file=str(path),
                expected="one critic's values in each directory",
                found=", ".join(backends),
                hint=f"name the files of one, or give the directory twice: rldbg parity --recorded {path} {path}",
            )
    return Two(run_a, run_b, values_a, values_b)


def paired(a: list[Values], b: list[Values], where: str) -> tuple[list[PairedValues], list[str]]:
    """The batches both hold, and what only one holds.

    Raises:
        NothingComparableError: no batch is in both, or none of them has one shape.
    """
    left = {(one.batch, one.step): one for one in b}
    faces: list[tuple[Values, Values]] = []
    alone: list[Values] = []
    for one in a:
        other = left.pop((one.batch, one.step), None)
        if other is None:
            alone.append(one)
        else:
            faces.append((one, other))
    for one in list(alone):
        same = [key for key, other in left.items() if _tokens(one) is not None and _tokens(one) == _tokens(other)]
        if len(same) == 1:
            faces.append((one, left.pop(same[0])))
            alone.remove(one)
    if not faces and len(a) == len(b) == 1 and a[0].shape == b[0].shape and None in (_tokens(a[0]), _tokens(b[0])):
        faces, alone, left = [(a[0], b[0])], [], {}
    notes = [f"{one.batch} step {one.step}: only in A" for one in alone]
    notes += [f"{one.batch} step {one.step}: only in B" for one in left.values()]
    fitting = [(one, other) for one, other in faces if one.shape == other.shape]
    if not fitting:
        shapes = [f"{one.batch}: {one.shape} against {other.shape}" for one, other in faces]
        raise NothingComparableError(
            "no batch of the two has values that could be paired",
            file=where, tensor="values", expected="the same tokens in the same shape",
            found="; ".join(shapes or notes)[:400],
        )  # fmt: skip
    notes += [
        f"{one.batch}: shapes {one.shape} and {other.shape} cannot be paired"
        for one, other in faces
        if one.shape != other.shape
    ]
    return _grouped(fitting), notes


def _tokens(values: Values) -> bytes | None:
    """The rows' tokens, whatever their order."""
    return None if values.ids_BS is None else b"".join(sorted(row.tobytes() for row in values.ids_BS))


def _same(one: Ints, other: Ints | None) -> bool:
    return other is not None and np.array_equal(one, other)


def _grouped(faces: list[tuple[Values, Values]]) -> list[PairedValues]:
    """Steps of one batch together: the same tokens under the same name. Other tokens are another batch."""
    made: list[PairedValues] = []
    for a, b in faces:
        for pair in made:
            first = pair.a[0]
            if pair.batch == a.batch and first.ids_BS is not None and _same(first.ids_BS, a.ids_BS):
                pair.a.append(a)
                pair.b.append(b)
                break
        else:
            taken = any(pair.batch == a.batch for pair in made)
            made.append(PairedValues(f"{a.batch} step {a.step}" if taken else a.batch, [a], [b]))
    return made
