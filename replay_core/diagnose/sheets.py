"""A step's records as sheets of samples, and sheets of the same samples joined: by their tokens, never by luck."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from replay_core import pages
from replay_core.diagnose.two_sides import one_batch
from replay_core.errors import RldbgError
from replay_core.records import Inline, Record, TensorRef
from replay_core.samples.batch import Batch, places_of
from replay_core.samples.padding import among, around_parts

Array = NDArray[Any]


class Sheet(Struct):
    """The samples of the records of one stage and role, rank by rank and micro by micro."""

    name: str
    parts: list[Batch]
    index: list[tuple[int, int]] = field(default_factory=list)
    """Sample -> (part, row within it)."""
    answers: list[int] | None = None
    """Where its rows are the responses alone of the samples that it is joined to: how many tokens each has."""
    is_by_id: bool = False
    """Whether it holds no tokens and is joined by the ids of its samples: it then says one number of each, and none of
    a token."""

    def __post_init__(self) -> None:
        self.index = [(number, row) for number, part in enumerate(self.parts) for row in range(len(part))]

    def __len__(self) -> int:
        return len(self.index)

    @property
    def has_tokens(self) -> bool:
        return all(part.has_tokens for part in self.parts)

    @property
    def padding_known(self) -> bool:
        return all(part.padding_known for part in self.parts)

    def of(self, samples: Sequence[int]) -> Sheet:
        """The sheet of these samples alone."""
        sheet = Sheet(self.name, self.parts)
        sheet.index = [self.index[sample] for sample in samples]
        sheet.answers = None if self.answers is None else [self.answers[sample] for sample in samples]
        sheet.is_by_id = self.is_by_id
        return sheet

    def tokens(self, sample: int) -> Array:
        part, row = self.index[sample]
        tokens = self.parts[part].contents
        assert tokens is not None
        return tokens[row]

    def names(self) -> set[str]:
        """Canonical names that every part has."""
        each = [{ref.canonical or ref.name for ref in part.held.fields()} for part in self.parts]
        return set.intersection(*each) if each else set()

    def refs(self, name: str) -> list[TensorRef] | None:
        """The tensor of that name in every part, or None where one lacks it."""
        found = [_field(part.held.fields(), name) for part in self.parts]
        return None if any(ref is None for ref in found) else [ref for ref in found if ref is not None]


def _field(fields: Iterable[TensorRef], name: str) -> TensorRef | None:
    for ref in fields:
        if (ref.canonical or ref.name) == name and ref.is_readable:
            return ref
    return None


def sheets_of(records: Iterable[Record], pad: int | None = None) -> tuple[list[Sheet], list[str], list[str]]:
    """Every sheet of these records, what could not be read, and what is there twice, in words.

    pad: the id that the run states to be padding, which tells it where no mask does.

    A shard that repeats samples by id counts once, and so does a second file of the same tensors of the same samples.
    """
    parts: dict[tuple[str, str | None, int], list[Batch]] = defaultdict(list)
    folders: list[tuple[Path, frozenset[str]]] = []
    unreadable: list[str] = []
    repeated: list[str] = []
    seen: dict[tuple[str, str | None, int], set[Any]] = defaultdict(set)
    micros: dict[tuple[Any, ...], Batch] = {}
    #: The samples of a rank's whole step, by how many they are: values, weights and the like may be recorded beside.
    wholes: dict[tuple[int | None, int], list[Batch]] = defaultdict(list)
    #: What a second file of them would hold: asked by content, as one file may hold ten thousand records.
    held: dict[Any, list[Batch]] = defaultdict(list)
    known: list[tuple[bool, Batch]] = []
    for record in records:
        try:
            fields = () if record.is_flat else record.tensors()
            if record.is_flat:
                continue
            rows = Batch(record, one_batch(fields), by_shape=True)
            rows = around_parts(rows, pad) or rows
            known.append((not rows.has_tokens, rows))
        except (RldbgError, ValueError) as error:
            what = error.in_one_line if isinstance(error, RldbgError) else error
            unreadable.append(f"{record.path.name}: {what}")
    # A pack's losses and log-probabilities do not tell its samples: they are laid out by its tokens, read first.
    for lacks_tokens, rows in sorted(known, key=lambda one: one[0]):
        if not len(rows):
            continue
        record, tokens = rows.held.record, not lacks_tokens
        family = (record.key.stage, record.key.role, _folder(record, folders))
        # Samples of a micro-batch are known by how many they are, or by the one row that they are packed in.
        micro = [(record.key.rank, record.key.micro, record.key.role, size) for size in (len(rows), _pack(rows))]
        laid_out = next((micros[one] for one in micro if one in micros), None)
        if not tokens and record.key.micro is not None and laid_out is not None:
            laid_out.held.take_in(record)
            continue
        if lacks_tokens and (beside := _beside(record, len(rows), micros, wholes)) is not None:
            beside.held.take_in(record)
            continue
        ids = _sample_ids(record) if record.key.rank else None
        if ids and seen[family] and ids <= seen[family]:
            continue  # a tensor-parallel twin
        content = _content(rows)
        twin = next((part for part in held[content] if part.held.record.path != record.path), None) if content else None
        if twin is not None:
            again, first = record.path.name, twin.held.record.path.name
            repeated.append(f"{again} holds the same {len(rows)} samples as {first}: counted once")
            continue
        if content:
            held[content].append(rows)
        seen[family] |= _sample_ids(record) or set()
        parts[family].append(rows)
        if tokens:
            wholes[record.key.rank, len(rows)].append(rows)
        if tokens and record.key.micro is not None:
            micros |= dict.fromkeys(micro if rows.packs is not None else micro[:1], rows)
    return [Sheet(f"{role}/{stage}" if role not in (None, "actor") else stage, found)
            for (stage, role, _), found in parts.items()], unreadable, repeated  # fmt: skip


def _folder(record: Record, folders: list[tuple[Path, frozenset[str]]]) -> int:
    """Which of the folders so far a record of no named stage is of: its own, or one whose records hold what its own do,
    or less, or more (ranks and micro-batches may lie in folders). Rollouts and what is trained on, beside each other,
    are two stages.
    """
    if record.key.stage != "tensors":
        return 0
    home, names = record.path.parent, frozenset(ref.canonical or ref.name for ref in record.tensors())
    for at, (folder, held) in enumerate(folders):
        if folder == home or names <= held or held <= names:
            return at
    folders.append((home, names))
    return len(folders) - 1


def _beside(
    record: Record, size: int, micros: dict[tuple[Any, ...], Batch], wholes: dict[tuple[int | None, int], list[Batch]]
) -> Batch | None:
    """The samples that a record without tokens is about: of the same micro-batch, whatever the role; else the one batch
    of the step and rank of as many samples. None where there are two that differ, or are in two orders.
    """
    if record.key.micro is not None:
        return micros.get((record.key.rank, record.key.micro, None, size))
    homes = wholes.get((record.key.rank, size)) or wholes.get((None, size)) or []
    if not homes or homes[0].packs is not None or len({tuple(home.digests or ()) for home in homes}) > 1:
        return None
    return homes[0] if _has_its_advantages(record, homes[0]) else None


def _has_its_advantages(record: Record, home: Batch) -> bool:
    """Whether one advantage of each sample, where both hold one, is the same: a table that is written after an update
    counts steps from 1, and then stands beside the samples of the step after its own.
    """
    ref, own = _field(record.tensors(), "advantages"), _field(home.held.fields(), "advantages")
    said = None if ref is None or own is None or ref.shape != (len(home),) else home.values(own)
    if ref is None or said is None:
        return True
    theirs_B = pages.array(ref).astype(np.float64)
    there_N = said.said_N & np.isfinite(said.values_N) & (said.values_N != 0)
    sample_N = np.repeat(np.arange(len(home)), home.lengths)
    alike = np.isclose(theirs_B[sample_N[there_N]], said.values_N[there_N], rtol=1e-3, atol=1e-5).all()
    return bool(alike and there_N.any())


def _pack(rows: Batch) -> tuple[int, int] | None:
    """The slots of a row that may be a pack; None of other grids."""
    return rows.layout.shape if rows.layout is not None and rows.layout.shape[0] == 1 else None


def _content(rows: Batch) -> Any:
    """The fields and samples of a file that names no stage: what a copy of it holds too. None of others.

    Where a stage is known, the same samples come again on purpose: in every epoch, and on tensor-parallel ranks. Files
    that name two ranks are no copies, either: whether the ranks are to hold the same is D65's.
    """
    record = rows.held.record
    if record.key.stage != "tensors" or rows.digests is None or not rows.has_tokens:
        return None
    return (
        record.key.role,
        record.key.rank,
        frozenset((ref.name, ref.shape) for ref in record.tensors()),
        tuple(rows.digests),
    )


def _sample_ids(record: Record) -> set[Any] | None:
    ref = _field(record.tensors(), "sample_id")
    if ref is None or len(ref.shape) != 1:
        return None
    values = ref.source.value if ref.is_text and isinstance(ref.source, Inline) else pages.array(ref).tolist()
    return {str(value) for value in values} if len(set(map(str, values))) == len(values) else None


def match(spine: Sheet, other: Sheet) -> list[int | None] | None:
    """For each sample of the spine, its sample in the other sheet; None where the two hold different samples.

    Samples are the same when their tokens are, or their ids where the other holds no tokens. A sheet whose padding is
    unknown matches by what it begins with. A sample that occurs more often in the other sheet (epochs) is its first
    occurrence.
    """
    if not spine.has_tokens or not other.has_tokens:
        return (_by_answers(spine, other) or _by_ids(spine, other)) if spine.has_tokens else None
    if not other.padding_known:
        # Rows of unknown padding: each is a sample of the spine, and one id around it.
        samples = [spine.tokens(sample) for sample in range(len(spine))]
        told = [part if part.padding_known else among(part, samples) for part in other.parts]
        if None in told:
            return None
        other.parts = [part for part in told if part is not None]
    if (stated := _stated_rows(spine, other)) is not None:
        return stated
    twins = len({_key(spine.tokens(sample)) for sample in range(len(spine))}) < len(spine)
    for names in (_TELL_ANSWERS, TELL_TWINS) if twins else ():
        shared = [name for name in names if spine.refs(name) and other.refs(name)]
        if not shared:
            continue
        chosen = _matched(marked(spine, shared), marked(other, shared))
        # Some of the spine's samples may be in no micro-batch: then all that are there are told.
        if chosen is not None and (None not in chosen or len(chosen) - chosen.count(None) == len(other)):
            return chosen
    return _matched(marked(spine, []), marked(other, []))


def _by_answers(spine: Sheet, other: Sheet) -> list[int | None] | None:
    """`match` of a sheet whose rows hold the responses alone (TRL's completions), beside samples with their prompts."""
    starts = [part.response_starts for part in spine.parts]
    theirs = [_answers(part) for part in other.parts]
    if len(spine) != len(other) or any(each is None for each in (*starts, *theirs)):
        return None
    held = [theirs[part][row] for part, row in other.index]  # type: ignore[index]
    own = [
        _key(spine.tokens(sample)[int(starts[part][row]) :])  # type: ignore[index]
        for sample, (part, row) in enumerate(spine.index)
    ]
    keys = list(map(_key, held))
    # Rows in one order are the same samples, of equal answers too; in another order they have to tell.
    places: list[int | None] = list(range(len(own))) if own == keys else []
    if not places and len(set(keys)) == len(keys):
        places = places_of(own, keys)
    if not places or None in places or not all(own):
        return None
    other.answers = [len(row) for row in held]
    return places


def _by_ids(spine: Sheet, other: Sheet) -> list[int | None] | None:
    """`match` of a table without tokens (ids, rewards, groups of a rollout) beside samples that name its ids: each id
    is one row of the table and one sample, however often that was trained on, and what both say of a sample is equal.
    """
    ids, own = _ids_of(other), _ids_of(spine)
    if ids is None or own is None or len(set(ids)) < len(ids) or not set(own) <= set(ids):
        return None
    samples: dict[str, bytes] = {}
    for sample, name in enumerate(own):
        # Ids that every rank counts from its own beginning are those of several samples.
        if samples.setdefault(name, key := _key(spine.tokens(sample))) != key:
            return None
    rows = {name: row for row, name in enumerate(ids)}
    places: list[int | None] = [rows[name] for name in own]
    for name in ("group_id", "group_ids", "uid", "reward"):
        here, there = _numbers(spine, name), _numbers(other, name)
        if here is not None and there is not None and [there[rows[each]] for each in own] != here:
            return None
    other.is_by_id = True
    return places


def _ids_of(sheet: Sheet) -> list[str] | None:
    """The id of each sample, in one word; None where a part names none."""
    return _numbers(sheet, "sample_id")


def _numbers(sheet: Sheet, name: str) -> list[str] | None:
    """What a sheet says once of each sample, as text; None where it says that of none."""
    each: list[Any] = []
    for part, ref in zip(sheet.parts, sheet.refs(name) or [], strict=False):
        said: Any = texts_of(part, ref) if ref.is_text else part.per_sample(ref)
        if said is None:
            return None
        each.append(said)
    return [str(each[part][row]) for part, row in sheet.index] if each else None


def _answers(part: Batch) -> list[Array] | None:
    """The tokens of each row of responses alone, as long as its mask says; None of what holds anything else."""
    ids, mask = part.held.find("response_ids"), part.held.find("response_mask")
    if part.has_tokens or ids is None or mask is None or part.held.find("prompt_ids", "input_ids") is not None:
        return None
    if len(ids.shape) != 2 or ids.shape != mask.shape or part.layout is None or part.layout.shape != ids.shape:
        return None
    ids_BT, mask_BT = pages.array(ids), pages.array(mask) != 0
    sizes_B = mask_BT.sum(1)
    if (mask_BT != (np.arange(mask_BT.shape[1]) < sizes_B[:, None])).any():
        return None
    return [row[:size] for row, size in zip(ids_BT, sizes_B, strict=True)]


def _stated_rows(spine: Sheet, other: Sheet) -> list[int | None] | None:
    """The places that the other sheet itself names, where the tokens agree with what it says."""
    refs = other.refs("trajectory_rows")
    if spine.name != "trajectory" or len(spine.parts) != 1 or not refs:
        return None
    each = [part.per_sample(ref) for part, ref in zip(other.parts, refs, strict=True)]
    if any(rows is None for rows in each):
        return None
    chosen: list[int | None] = [None] * len(spine)
    for place, (part, row) in enumerate(other.index):
        sample = int(each[part][row])  # type: ignore[index]
        if not 0 <= sample < len(spine) or not np.array_equal(other.tokens(place), spine.tokens(sample)):
            return None
        if chosen[sample] is None:
            chosen[sample] = place
    return chosen


#: What tells two samples of equal tokens apart: answers to one prompt drawn twice, in different groups.
TELL_TWINS = ("sample_id", "group_id", "reward", "advantages")
#: And answers of one group: a forward that sees neighbours, or is random, gives them other numbers.
_TELL_ANSWERS = (*TELL_TWINS, "rollout_logprobs", "old_logprobs")


def marked(sheet: Sheet, names: Sequence[str]) -> list[bytes]:
    """Each sample's tokens, and its values of these names, as one key."""
    keys = [_key(sheet.tokens(sample)) for sample in range(len(sheet))]
    for name in names:
        refs = sheet.refs(name) or []
        each = [_values(part, ref) for part, ref in zip(sheet.parts, refs, strict=True)]
        keys = [key + b"|" + each[part][row] for key, (part, row) in zip(keys, sheet.index, strict=True)]
    return keys


def _values(part: Batch, ref: TensorRef) -> list[bytes]:
    """Each sample's values, as bytes that are equal where the values are."""
    each: Any = texts_of(part, ref) if ref.is_text else part.per_sample(ref)
    if each is not None:
        return [str(value).encode() for value in each]
    found = part.values(ref)
    if found is None:
        return [b""] * len(part)
    said = zip(*(np.split(flat_N, part.starts[1:]) for flat_N in (found.values_N, found.said_N)), strict=True)
    return [row[there & (row != 0)].astype(np.float32).tobytes() for row, there in said]


def _matched(spine: Sequence[bytes], other: Sequence[bytes]) -> list[int | None] | None:
    chosen = places_of(spine, other)
    known = set(spine)
    is_inside = all(key in known for key in other)
    return chosen if any(place is not None for place in chosen) and (is_inside or None not in chosen) else None


def _key(tokens: Array) -> bytes:
    return np.ascontiguousarray(tokens, dtype=np.int64).tobytes()


def joined(sheets: Sequence[Sheet]) -> list[tuple[Sheet, list[tuple[Sheet, list[int | None]]]]]:
    """Sheets by the samples they share: the richest first, and what joins it."""
    left = sorted(sheets, key=_richness, reverse=True)
    groups = []
    while left:
        spine, rest = left[0], left[1:]
        others, left = [], []
        for sheet in rest:
            places = match(spine, sheet)
            if places is None:
                left.append(sheet)
            else:
                others.append((sheet, places))
        groups.append((spine, others))
    return groups


def _richness(sheet: Sheet) -> tuple[bool, bool, int, int]:
    """Tokens with known padding first; then the more samples; then the more fields."""
    return sheet.has_tokens, sheet.padding_known, len(sheet), len(sheet.names())


def texts_of(batch: Batch, ref: TensorRef) -> list[str] | None:
    """One text per sample, or None."""
    if not ref.is_text or not isinstance(ref.source, Inline) or len(ref.source.value) != batch.count:
        return None
    return [str(text) for text in ref.source.value]
