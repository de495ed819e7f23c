"""What a dump says of a tensor's dimensions, and which are cut among which ranks, as sglang's dumper has it said.

    b s[cp:zigzag] h[tp] d                 the sequence in zigzag over cp ranks, h over tp ranks
    t 1 (num_heads*head_dim)[tp:partial]   a dimension of one, two in one; each rank has a part of a sum
    t[cp:zigzag,sp] h # dp:=moe_dp ep:replicated

`share` tells what a rank has of a dimension, by where it stands on each axis of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from replay_core.errors import DumpError
from replay_core.regexes import regex

#: Axes of ranks that a statement may name.
AXES = (
    "tp", "cp", "ep", "sp", "dp", "etp", "edp", "attn_tp", "attn_dp", "moe_ep", "moe_tp", "moe_dp", "recompute_pseudo",
)  # fmt: skip
_ORDERS = ("zigzag", "natural")
_NAME, _WHOLE = r"[a-zA-Z_]\w*", r"(?:\[([^\[\]]+)\])?"
_PLAIN, _FUSED = regex(rf"({_NAME}){_WHOLE}"), regex(rf"\(([^()]+)\){_WHOLE}")
_SUB, _ALIAS, _COPIES = regex(_NAME), regex(r"dp:=(\w+)"), regex(r"(\w+):replicated")
#: (where it begins in the whole, how long it is), along the axis that is cut.
Stretch = tuple[int, int]


class Cut(NamedTuple):
    """One axis of ranks that a dimension is shared among."""

    axis: str
    order: str | None = None
    is_partial: bool = False


class Dim(NamedTuple):
    """A dimension: its names (several where it is fused), and what it is shared among, outermost first."""

    names: tuple[str, ...]
    cuts: tuple[Cut, ...] = ()

    @property
    def name(self) -> str:
        return "*".join(self.names)


class Dims(NamedTuple):
    """Every dimension of a tensor; the axes of ranks that hold copies; the group that stands for dp."""

    dims: tuple[Dim, ...]
    replicated: frozenset[str] = frozenset()
    dp_alias: str | None = None


def parsed(text: str) -> Dims:
    """The statement's meaning.

    Raises:
        DumpError: it is none, or contradicts itself.
    """
    shape, _, said = text.partition("#")
    dims = tuple(map(_dim, shape.split()))
    if not dims:
        raise DumpError("dims are empty", hint="one name for each dimension, such as 'b s h[tp]'")
    names = [name for dim in dims for name in dim.names if name != "1"]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DumpError(f"dims {text.strip()!r}: two dimensions are called {', '.join(twice)}")
    replicated, alias = _said(said)
    if both := sorted(replicated & {cut.axis for dim in dims for cut in dim.cuts}):
        raise DumpError(f"dims {text.strip()!r}: {', '.join(both)} is said to be both sharded and replicated")
    return Dims(dims, replicated, alias)


def written(dims: Dims) -> str:
    """The statement that `parsed` reads so."""
    said = []
    for dim in dims.dims:
        name = dim.name if len(dim.names) == 1 else f"({dim.name})"
        cuts = [
            ":".join([cut.axis, *(["+".join(words)] if (words := _words(cut)) else [])]) for cut in dim.cuts
        ]  # fmt: skip
        said.append(name + (f"[{','.join(cuts)}]" if cuts else ""))
    comment = [f"dp:={dims.dp_alias}"] if dims.dp_alias else []
    comment += [f"{axis}:replicated" for axis in sorted(dims.replicated)]
    return " ".join([*said, *(["#", *comment] if comment else [])])


def _words(cut: Cut) -> list[str]:
    return [*([cut.order] if cut.order else []), *(["partial"] if cut.is_partial else [])]


def _dim(token: str) -> Dim:
    if token == "1":
        return Dim(("1",))
    if fused := _FUSED.fullmatch(token):
        names = tuple(name.strip() for name in fused.group(1).split("*"))
        if wrong := [name for name in names if not _SUB.fullmatch(name)]:
            raise DumpError(f"dims: {wrong[0]!r} in {token!r} is no name of a dimension")
        if len(names) < 2:
            raise DumpError(f"dims: {token!r} fuses one dimension, and there must be two or more")
        if len(set(names)) < len(names):
            raise DumpError(f"dims: two of the dimensions that {token!r} fuses have one name")
        return Dim(names, _cuts(fused.group(2), token))
    plain = _PLAIN.fullmatch(token)
    if plain is None:
        raise DumpError(f"dims: {token!r} is no dimension", hint="a name, and [axis:how] where it is cut: h[tp]")
    return Dim((plain.group(1),), _cuts(plain.group(2), token))


def _cuts(said: str | None, token: str) -> tuple[Cut, ...]:
    cuts = [_cut(one.strip(), token) for one in said.split(",")] if said is not None else []
    axes = [cut.axis for cut in cuts]
    if len(set(axes)) < len(axes):
        raise DumpError(f"dims: {token!r} names an axis of ranks twice")
    return tuple(cuts)


def _cut(said: str, token: str) -> Cut:
    axis, _, how = said.partition(":")
    axis = axis.strip()
    _known(axis, token)
    words = [word.strip() for word in how.split("+") if word.strip() and word.strip() != "sharded"]
    if unknown := [word for word in words if word not in (*_ORDERS, "partial")]:
        raise DumpError(f"dims: {unknown[0]!r} in {token!r} is none of zigzag, natural, partial, sharded")
    orders = [word for word in words if word in _ORDERS]
    if len(orders) > 1 or words.count("partial") > 1:
        raise DumpError(f"dims: {token!r} says {'the order' if len(orders) > 1 else 'partial'} twice")
    return Cut(axis, orders[0] if orders else None, "partial" in words)


def _known(axis: str, token: str) -> None:
    if axis not in AXES:
        raise DumpError(f"dims: {axis!r} in {token!r} is no axis of ranks", hint=f"one of {', '.join(AXES)}")


def _said(text: str) -> tuple[frozenset[str], str | None]:
    """What stands behind the #."""
    replicated: set[str] = set()
    alias: str | None = None
    for token in text.split():
        if named := _ALIAS.fullmatch(token):
            if alias is not None:
                raise DumpError(f"dims: dp is called both {alias} and {named.group(1)}")
            alias = named.group(1)
        elif copies := _COPIES.fullmatch(token):
            axis = copies.group(1)
            _known(axis, token)
            if axis in replicated:
                raise DumpError(f"dims: {token!r} stands there twice")
            replicated.add(axis)
        else:
            raise DumpError(f"dims: {token!r} is neither dp:=GROUP nor AXIS:replicated")
    return frozenset(replicated), alias


def share(
    total: int, cuts: Sequence[Cut], place: Mapping[str, tuple[int, int]], sequences: Sequence[int] = ()
) -> tuple[Stretch, ...] | None:
    """What a rank has of a dimension so long; `place`: of each axis, where it stands and among how many. None where it
    does not come out even.

    sequences: the lengths of what lies end to end in it, each of which context parallelism (cp) cuts by itself; what is
    left behind the last is one more.
    """
    mine: tuple[Stretch, ...] = ((0, total),)
    for cut in cuts:
        number, many = place[cut.axis]
        pieces = 2 * many if cut.order == "zigzag" else many
        taken = (number, pieces - 1 - number) if cut.order == "zigzag" else (number,)
        found: list[Stretch] = []
        before = 0
        for length in _each(sum(long for _, long in mine), sequences if cut.axis == "cp" else ()):
            if length % pieces:
                return None
            long = length // pieces
            found += [stretch for one in taken for stretch in within(mine, before + one * long, long)]
            before += length
        mine = tuple(found)
    return mine


def _each(total: int, sequences: Sequence[int]) -> list[int]:
    """How long each of what lies end to end is; all of it where the lengths do not fit."""
    rest = total - sum(sequences)
    return [total] if rest < 0 else [*sequences, *([rest] if rest or not sequences else [])]


def within(mine: Sequence[Stretch], start: int, length: int) -> list[Stretch]:
    """A stretch of what lies in stretches."""
    found, before = [], 0
    for at, long in mine:
        first, last = max(start, before), min(start + length, before + long)
        if first < last:
            found.append((at + first - before, last - first))
        before += long
    return found
