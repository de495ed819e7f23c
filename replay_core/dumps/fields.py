"""Flattens the tree a container holds into named TensorRefs: dotted paths, columns for lists of dicts.

    {"loss": .1, "metrics": {"kl": 0.0}}             ->  loss, metrics.kl
    {"trajectories": [{"tokens": [..]}, ...]}        ->  trajectories.tokens, ragged rows end to end
    {"samples": [tensor, tensor]}                    ->  samples.0, samples.1

`None` is no field: two absent values agree, a one-sided one shows up as MISSING.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from replay_core import naming
from replay_core.budget import check_fields, spend_bytes, spend_values
from replay_core.dumps.instances import is_instance, plain
from replay_core.errors import DumpError
from replay_core.records import Inline, Parts, TensorRef, Unreadable

#: A tree nested deeper than this is no training record.
MAX_DEPTH = 64
#: Shared parts make a small file describe a huge tree; past these it is refused, not walked.
MAX_FIELDS = 100_000

#: Whether a file of its size may hold so many is asked once in so many.
_OFTEN = 0x3FF

#: A number that some samples have and others do not.
NULL = "null is stored as NaN"
_NAN = float("nan")
_INT64 = 2**63
#: Texts that a pickle holds once can stand in it very often: of these it is asked for each.
_LONG = 1 << 10
_NUMBERS: dict[type, str] = {bool: "bool", int: "int64", float: "float64"}
_ALONE = frozenset((*_NUMBERS, str))
_LEVEL, _TEXT = _ALONE | {TensorRef}, frozenset({str})


def flatten(tree: Any) -> list[TensorRef]:
    """Every field of a container's tree, in file order. Two fields never share a name.

    The tree is taken over: its tensors, nameless until now, get their names here.

    Raises:
        DumpError: more fields than any record has (a file whose parts contain each other), or than one of its size.
    """
    if type(tree) is dict and _LEVEL.issuperset(map(type, tree.values())) and _TEXT.issuperset(map(type, tree)):
        level = _level(tree)
        if level is not None:
            return level
    seen: dict[str, int] = {}
    fields: list[TensorRef] = []
    for order, ref in enumerate(_walk(tree, "", 0)):
        # Made by the walk and held by nobody else: it may be finished in place.
        name = asked = ref.name or "value"
        while name in seen:
            seen[asked] += 1
            name = f"{asked}#{seen[asked]}"
        seen[name] = 1
        ref.name, ref.order = name, order
        fields.append(ref)
        if order & _OFTEN == _OFTEN:
            check_fields(order)
        if order == MAX_FIELDS:
            raise DumpError("the file holds too many fields", expected=f"at most {MAX_FIELDS:,}", tensor=name)
    return fields


def _level(tree: dict[str, Any]) -> list[TensorRef] | None:
    """The fields of a mapping of words to tensors, numbers and texts: most of what is recorded, and all of a log. None
    where one has no name, or a tensor has two.
    """
    if "" in tree or "__class__" in tree:
        return None
    fields: list[TensorRef] = []
    for name, value in tree.items():
        if type(value) is TensorRef:
            if value.name:
                return None
            ref = value
            ref.name = name
        else:
            ref = _scalar(value, name)
        ref.order = len(fields)
        fields.append(ref)
    check_fields(len(fields))
    return fields if len(fields) <= MAX_FIELDS else None


#: Fields with a value per response token, beside which a reward of the same shape [B, R] has one as well.
_PER_TOKEN = frozenset({"response_mask", "loss_mask", "advantages", "old_logprobs", "returns"})


def settled(fields: list[TensorRef]) -> list[TensorRef]:
    """The fields of one record with what only the others settle: `rewards` [B, R] are rewards of tokens where the
    general table takes the word for a sample's, `uid` is the group where nothing else is, `mask` says what counts where
    no other mask does and it is laid out as what is said of responses, not as the tokens are, and of a critic's two
    numbers of a token the old ones are the `values` that advantages are made of, those beside them what it says now.
    """
    fields = ragged_alike(fields)
    meanings = {ref.canonical for ref in fields}
    if "reward" in meanings:
        shapes = {ref.shape for ref in fields if ref.canonical in _PER_TOKEN and len(ref.shape) == 2}
        fields = [
            ref.with_(canonical="token_rewards") if ref.canonical == "reward" and ref.shape in shapes else ref
            for ref in fields
        ]
    if meanings.isdisjoint(("response_mask", "loss_mask")) and any(ref.name == "mask" for ref in fields):
        said = {ref.shape for ref in fields if ref.canonical in _PER_TOKEN and ref.shape}
        tokens = {ref.shape for ref in fields if ref.canonical == "input_ids"}
        counts = said if "attention_mask" in meanings else said - tokens
        fields = [
            ref.with_(canonical="response_mask") if ref.name == "mask" and ref.shape in counts else ref
            for ref in fields
        ]
    if "old_values" in meanings:
        new = {"values": "new_values", "old_values": "values"}
        fields = [ref.with_(canonical=new.get(ref.canonical or "", ref.canonical)) for ref in fields]
    if "group_id" not in meanings:
        fields = [ref.with_(canonical="group_id") if ref.name in ("uid", "uids") else ref for ref in fields]
    return fields


def ragged_alike(fields: list[TensorRef]) -> list[TensorRef]:
    """The fields of one record in which lists of rows are such, whatever their lengths: responses that happen to be
    equally long stand beside prompts that are not, and what is said of their tokens beside them.
    """
    parts = {ref.canonical: ref for ref in fields if ref.canonical in ("prompt_ids", "response_ids")}
    if len(parts) < 2 or sum(ref.rows is not None for ref in parts.values()) != 1:
        return fields
    even = next(ref for ref in parts.values() if ref.rows is None)
    if len(even.shape) != 2:
        return fields
    return [
        ref.with_(shape=(ref.numel,), rows=(ref.shape[1],) * ref.shape[0])
        if ref.rows is None and ref.shape == even.shape and isinstance(ref.source, Inline) and not ref.is_text
        else ref
        for ref in fields
    ]


def _walk(value: Any, name: str, depth: int) -> Iterator[TensorRef]:
    if depth > MAX_DEPTH:
        yield TensorRef(name, "none", (), Unreadable(f"nested deeper than {MAX_DEPTH} levels"))
    elif isinstance(value, TensorRef):
        yield value.with_(name=name)
    elif isinstance(value, dict):
        if "__class__" in value and is_instance(value):
            opened = plain(value)
            if opened is not value:
                yield from _walk(opened, name, depth + 1)
                return
        for key, inner in value.items():
            path = f"{name}.{key}" if name else str(key)
            if type(inner) is TensorRef:  # most of a large record, and the generator below is dear
                if inner.name:  # one tensor under two names
                    inner = inner.with_()
                inner.name = path
                yield inner
            elif type(inner) in _ALONE:  # and all of a log
                yield _scalar(inner, path)
            else:
                yield from _walk(inner, path, depth + 1)
    elif isinstance(value, (list, tuple)):
        yield from _sequence(list(value), name, depth)
    elif value is not None:
        yield _scalar(value, name)


def _scalar(value: Any, name: str) -> TensorRef:
    if isinstance(value, str):
        if len(value) > _LONG:
            spend_bytes(len(value), "texts")
        return TensorRef(name, "text", (), Inline(value))
    if isinstance(value, bool):
        return TensorRef(name, "bool", (), Inline(value))
    if isinstance(value, int) and -_INT64 <= value < _INT64:
        return TensorRef(name, "int64", (), Inline(value))
    if isinstance(value, float):
        return TensorRef(name, "float64", (), Inline(value))
    if isinstance(value, complex):
        return TensorRef(name, "complex128", (), Inline(value))
    if isinstance(value, (set, frozenset)):
        # Two equal sets are one text, whatever order they were filled in.
        return TensorRef(name, "text", (), Inline("{" + ", ".join(sorted(map(repr, value))) + "}"))
    return TensorRef(name, "text", (), Inline(str(value)))


def _sequence(values: list[Any], name: str, depth: int) -> Iterator[TensorRef]:
    if values and type(values[0]) is dict:
        values = [plain(value) for value in values]
    kinds = set(map(type, values))
    if not values:
        yield TensorRef(name, "float64", (0,), Inline([]))
    elif _all(kinds, dict):
        yield from _columns(values, name, depth)
    elif (numbers := _number_dtype(values)) is not None:
        yield TensorRef(name, numbers, (len(values),), Inline(values))
    elif _all(kinds, str):
        spend_bytes(sum(map(len, values)), "texts of a column")
        yield TensorRef(name, "text", (len(values),), Inline(values))
    elif _all(kinds, (list, tuple)) and (ragged := _ragged(values, name)) is not None:
        yield ragged
    elif naming.canonical(name) in naming.MEANINGS and _are_rows(values) and (rows := join(name, values)) is not None:
        yield rows  # a vector per sample
    elif _are_talks(values) and (said := prose(name, values)) is not None:
        yield said  # a conversation per sample
    else:
        for position, inner in enumerate(values):
            yield from _walk(inner, f"{name}.{position}" if name else str(position), depth + 1)


def _are_rows(values: list[Any]) -> bool:
    """Whether each is a tensor of one sample: a number, or a number for each of its tokens."""
    return len(values) > 1 and all(isinstance(value, TensorRef) and len(value.shape) < 2 for value in values)


def _are_talks(values: list[Any]) -> bool:
    """Whether each is a list of messages."""
    for turns in values:
        if not isinstance(turns, list) or not turns or not all(isinstance(one, dict) for one in turns):
            return False
    return True


def _all(kinds: set[type], kind: type | tuple[type, ...]) -> bool:
    for one in kinds:  # noqa: SIM110 - asked of each of a hundred thousand lists in a list
        if not issubclass(one, kind):
            return False
    return True


def _number_dtype(values: list[Any]) -> str | None:
    """The dtype of a list of plain numbers, None when it is not one."""
    kinds = set(map(type, values))
    if kinds == {bool}:
        return "bool"
    if kinds == {int}:
        return "int64" if min(values) >= -_INT64 and max(values) < _INT64 else None
    return "float64" if kinds <= {int, float} else None


def prose(name: str, column: Sequence[Any]) -> TensorRef | None:
    """Conversations, lists of words, mixtures: a text per sample, as JSON where it is more than a text.

    Spelled out they would be a field per sample and turn. None where numbers or tensors are in it.
    """
    if all(isinstance(value, (str, type(None))) for value in column):
        words = [value or "" for value in column] if None in column else None
        spend_bytes(sum(map(len, words or ())), "texts of a column")
    elif any(isinstance(value, (list, tuple)) and value for value in column) and all(
        _is_prose(value) or value in ([], ()) for value in column
    ):
        words = []
        for value in column:
            words.append(value if isinstance(value, str) else json.dumps(value, default=str))
            spend_bytes(len(words[-1]), "texts of a column")
    else:
        words = None
    return None if words is None else TensorRef(name, "text", (len(words),), Inline(words))


def _is_prose(value: Any, depth: int = 0) -> bool:
    """Texts, and lists and dicts that end in texts; numbers only inside a dict."""
    if isinstance(value, dict):
        return depth < 8 and all(
            _is_prose(item, depth + 1) or isinstance(item, (int, float, bool)) for item in value.values()
        )
    if isinstance(value, (list, tuple)):
        return depth < 8 and bool(value) and all(_is_prose(item, depth + 1) for item in value)
    return value is None or isinstance(value, str)


def _ragged(rows: list[Any], name: str) -> TensorRef | None:
    """Rows of numbers: a matrix when equally long, else laid end to end with their lengths."""
    spend_values(sum(map(len, rows)), "a list of rows")
    flat = [number for row in rows for number in row]
    dtype = _number_dtype(flat) if flat else "float64"
    if dtype is None:
        return None
    lengths = tuple(len(row) for row in rows)
    if len(set(lengths)) == 1:
        return TensorRef(name, dtype, (len(rows), lengths[0]), Inline(flat))
    return TensorRef(name, dtype, (len(flat),), Inline(flat), rows=lengths, alignment="packed")


def join(name: str, column: Iterable[TensorRef | list[Any] | None]) -> TensorRef | None:
    """One tensor per sample, end to end along the first axis; None when they are no column.

    Equally long rows are a matrix; a 0-d tensor per sample is a vector; None is an empty row.
    """
    refs = [TensorRef("", "", (0,), Inline([])) if value is None else value for value in column]
    tensors = [ref for ref in refs if isinstance(ref, TensorRef)]
    filled = [ref for ref in tensors if ref.numel] or [ref for ref in tensors if ref.dtype][:1]
    if (
        len(refs) != len(tensors)
        or not filled
        or len({(ref.dtype, ref.shape[1:], not ref.shape) for ref in filled}) > 1
    ):
        return None
    first, parts = filled[0], [ref for ref in tensors if ref.numel]
    if not first.shape:
        return end_to_end(name, first, parts, (len(parts),)) if len(parts) == len(tensors) else None
    lengths, tail = tuple(ref.shape[0] if ref.shape else 0 for ref in tensors), first.shape[1:]
    if len(set(lengths)) == 1:
        return end_to_end(name, first, parts, (len(lengths), lengths[0], *tail))
    return end_to_end(name, first, parts, (sum(lengths), *tail)).with_(rows=lengths)


def end_to_end(name: str, first: TensorRef, parts: Sequence[TensorRef], shape: tuple[int, ...]) -> TensorRef:
    broken = next((part.source for part in (first, *parts) if isinstance(part.source, Unreadable)), None)
    return TensorRef(name, first.dtype, shape, broken or Parts(tuple(part for part in parts if part.numel)))


def _columns(samples: list[dict[Any, Any]], name: str, depth: int) -> Iterator[TensorRef]:
    """A list of dicts is a table: one field per key, a row per sample."""
    keys = list(dict.fromkeys(key for sample in samples for key in sample))
    spend_values(len(keys) * len(samples), f"the {len(samples):,} rows of {len(keys):,} columns")
    for key in keys:
        path = f"{name}.{key}" if name else str(key)
        present = [sample[key] for sample in samples if sample.get(key) is not None]
        if len(present) == len(samples):
            joined = join(path, present) if _are_rows(present) else None
            yield from _walk(present, path, depth + 1) if joined is None else [joined]
        elif present and all(type(value) in (int, float, bool) for value in present):
            numbers = [_NAN if sample.get(key) is None else float(sample[key]) for sample in samples]
            yield TensorRef(path, "float64", (len(numbers),), Inline(numbers), sentinel=NULL)
        else:
            # Rows that lack the key keep their numbers, so that row i stays sample i.
            for position, sample in enumerate(samples):
                yield from _walk(sample.get(key), f"{path}.{position}", depth + 1)
