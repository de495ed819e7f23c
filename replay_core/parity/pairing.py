"""Which values face which: batches by name, else by their tokens; two backends of one directory by their own labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, field

from replay_core.dumps import open_run
from replay_core.errors import NothingComparableError, RequestError
from replay_core.parity.values import Ints, Values, read_values
from replay_core.records import Run


class PairedValues(Struct):
    """One batch: A's and B's values at each step both have, the first step being before any training."""

    batch: str
    a: list[Values] = field(default_factory=list)
    b: list[Values] = field(default_factory=list)


class Two(Struct):
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
    fitting, shapes = [], []
    for one, other in faces:
        if one.shape != other.shape:
            shapes.append(f"{one.batch}: {one.shape} against {other.shape}")
        elif (told := _other_tokens(one, other)) is not None:
            shapes.append(f"{one.batch}: {told}")
            notes.append(f"{one.batch}: not compared, {told}")
        else:
            laid = laid_as(one, other)
            if laid is not other:
                notes.append(f"{one.batch}: the padding of A and B is on other sides; values are held token by token")
            fitting.append((one, laid))
    if not fitting:
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


def _attended(values: Values) -> list[Ints] | None:
    """Each row's tokens without its padding, in order; None where tokens or padding are not known."""
    ids, held = values.ids_BS, values.attention_BS
    if ids is None or held is None or ids.shape != held.shape:
        return None
    return [row[kept] for row, kept in zip(ids, held, strict=True)]


def _other_tokens(one: Values, other: Values) -> str | None:
    """What is said where two critics were not given the same tokens; None where they were, or it is not known."""
    a, b = _attended(one), _attended(other)
    if a is None or b is None:
        return None
    if sorted(row.tobytes() for row in a) == sorted(row.tobytes() for row in b):
        return None
    # The same ids, padding included, under masks that differ: that a mask is missing is what is looked for.
    if one.ids_BS is not None and _same(one.ids_BS, other.ids_BS):
        return None
    apart = [row for row, (x, y) in enumerate(zip(a, b, strict=False)) if not np.array_equal(x, y)]
    first = apart[0] if apart else 0
    return (
        f"input_ids hold other tokens in {len(apart)} of {len(a)} rows: row {first} is "
        f"{a[first][:6].tolist()} in A and {b[first][:6].tolist()} in B"
    )


def laid_as(one: Values, other: Values) -> Values:
    """`other` with every token's value, position and mask where `one` has that token: padding on the other side is no
    difference. `other` itself where its padding lies as `one`'s does, or rows are not the same ones in the same order.
    """
    a, b = _attended(one), _attended(other)
    if a is None or b is None or one.attention_BS is None or other.attention_BS is None:
        return other
    if np.array_equal(one.attention_BS, other.attention_BS):
        return other
    if not all(np.array_equal(x, y) for x, y in zip(a, b, strict=True)):
        return other
    # Column j of [B, T] is the state of token j; of the last T where responses alone have values.
    width, before = one.shape[1], max(one.attention_BS.shape[1] - one.shape[1] - 1, 0)
    changed: dict[str, Any] = {name: getattr(other, name) for name in other.__struct_fields__}
    of_values = {name: value.copy() for name, value in changed.items() if name.endswith("_BT") and value is not None}
    probes = {name: value.copy() for name, value in other.probes.items()}
    positions = None if other.positions_BS is None else other.positions_BS.copy()
    for row, (here, there) in enumerate(zip(one.attention_BS, other.attention_BS, strict=True)):
        to, back = np.flatnonzero(here), np.flatnonzero(there)
        if positions is not None and other.positions_BS is not None:
            positions[row, to] = other.positions_BS[row, back]
        both = (to >= before) & (to < before + width) & (back >= before) & (back < before + width)
        for name, value in of_values.items():
            source = changed[name][row]
            value[row] = False if value.dtype == bool else source
            value[row, to[both] - before] = source[back[both] - before]
        for name, value in probes.items():
            value[row, to[both] - before] = other.probes[name][row, back[both] - before]
    changed |= {**of_values, "probes": probes, "positions_BS": positions}
    changed |= {"ids_BS": one.ids_BS, "attention_BS": one.attention_BS, "tokens_BT": one.tokens_BT}
    return Values(**changed)


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
