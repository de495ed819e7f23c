"""Which computation of one run faces which of the other by its key: (step, micro, rank, role); and which of the
samples of two that face each other are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct, field

from replay_core import naming, pages
from replay_core.compare.pairing import engine_modules
from replay_core.compare.pairing.by_name import renumbered
from replay_core.compare.pairing.matching import Pool, match
from replay_core.errors import RldbgError
from replay_core.records import Problem, Record, RecordKey, TensorRef
from replay_core.regexes import regex
from replay_core.samples.batch import Batch, Placed, batch_of, fills_the_mask
from replay_core.samples.layout import Bools, Ints, TokenLayout, positions_of, samples_of

if TYPE_CHECKING:
    from replay_core.compare.pairing.folding import FieldFolder
    from replay_core.compare.pairing.ranks import Together

#: The weight of a lookup of words, by its name.
_EMBEDDING = regex(r"(?:^|\.)(?:wte|\w*embed\w*|tok|tok_\w+|\w*words?\w*|\w*vocab\w*)\.weight$")
#: (step, micro, rank, role)
Parts = tuple[Any, ...]

#: Why a number of a micro-batch has no verdict where its samples stand in several of the other run, or it was laid
#: together with others.
CUT_OTHERWISE = (
    "said of a whole micro-batch, and the samples of a's stand in several of b's or the other way round",
    "said of each micro-batch, and the two runs cut the batch otherwise",
)


#: A layer of a model, by its number, or what is within one.
_OF_LAYER = regex(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.\d{1,5}(?:\.|$)")


def _as_outputs(tensors: Sequence[TensorRef]) -> tuple[TensorRef, ...]:
    """A record of modules that has a model's layers by their own names (`layers.0.attn`) has what these put out, and so
    it is of all else that it has by a bare name (`embed`, `norm`).
    """
    bare = {id(ref) for ref in tensors if _is_bare(ref)}
    if not any(id(ref) in bare and _OF_LAYER.search(ref.canonical or ref.name) for ref in tensors):
        return tuple(tensors)
    return tuple(
        ref.with_(canonical=f"{ref.canonical or ref.name}.output") if id(ref) in bare else ref for ref in tensors
    )


def _is_bare(ref: TensorRef) -> bool:
    name = ref.canonical or ref.name
    return (
        len(ref.shape) >= 2 and ref.dtype.startswith(("float", "bfloat")) and not name.startswith("grad.")
        and naming.meaning(name).phase is naming.Phase.UNKNOWN
    )  # fmt: skip


class Side(Struct):
    """One run's part of a computation: the records of one (step, micro, rank, role), their tensors and samples."""

    records: list[Record] = field(default_factory=list)
    #: (canonical name, stage) -> (record, tensor), in file order
    tensors: dict[tuple[str, str], tuple[Record, TensorRef]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    unreadable: int = 0
    #: The samples of every record that knows of some, in file order.
    batches: list[Batch] = field(default_factory=list)
    _of: dict[int, Batch] = field(default_factory=dict)
    is_loaded: bool = False
    #: The micro-batches that were laid together here, in turn; none where it is of one.
    micros: tuple[int, ...] = ()
    #: Name, or the ends of names asked for -> the tensors, of the `tensors` that these were looked up in.
    _found: dict[Any, list[tuple[Record, TensorRef]]] = field(default_factory=dict)
    _found_in: tuple[int, int] = (0, 0)

    def load(self) -> None:
        if self.is_loaded:
            return
        self.is_loaded = True
        for record in self.records:
            try:
                tensors = record.tensors()
            except RldbgError as error:
                self.problems.append(Problem(str(record.path), error.message))
                self.unreadable += 1
                continue
            if record.problems and any(ref.dtype == "none" for ref in tensors):
                # A file that an index names and that is not there, or is cut short: its tensors are listed and lost.
                self.problems += record.problems
                self.unreadable += 1
            stage = record.key.stage
            if stage == "modules":
                tensors = _as_outputs(tensors)
            if record.is_flat and len(self.records) == 1:
                named = {(ref.canonical or ref.name, stage): (record, ref) for ref in tensors}
                if len(named) == len(tensors):
                    self.tensors = named  # the numbers of a log
                    return
            # Of two fields with one meaning (`sequences` beside `input_ids`) the one called so has the name.
            ordered = sorted(tensors, key=lambda ref: ref.name != (ref.canonical or ref.name))
            for ref in ordered:
                self._take(record, ref)
            self._group(record, ordered)

    def release(self, folder: FieldFolder | None = None) -> None:
        """Be as it was before it was loaded; folder: with the records' fields held in little."""
        self.tensors, self.problems, self.unreadable = {}, [], 0
        self.batches, self._of, self.is_loaded = [], {}, False
        self._found, self._found_in = {}, (0, 0)
        for record in self.records:
            if folder is not None:
                record.fold(folder.fold)
            else:
                record.release()

    @property
    def is_engine(self) -> bool:
        """Whether its module tensors are those of an inference engine's modules."""
        return engine_modules.is_engine(name for name, _ in self.tensors)

    def as_trainer(self) -> None:
        """Call an engine's module tensors what a trainer calls them."""
        own = {(record.path, ref.name): self._of.get(id(ref)) for record, ref in self.tensors.values()}
        self.tensors = engine_modules.as_trainers(self.tensors)
        laid = ((id(ref), own[record.path, ref.name]) for record, ref in self.tensors.values())
        self._of.update((number, batch) for number, batch in laid if batch is not None)

    def _take(self, record: Record, ref: TensorRef) -> None:
        stage = record.key.stage
        if (key := (ref.canonical or ref.name, stage)) not in self.tensors:
            self.tensors[key] = (record, ref)
            return
        for name in (ref.name, f"{ref.name} of {record.path.name}"):
            if (name, stage) not in self.tensors:
                self.tensors[name, stage] = (record, ref)
                return
        self.problems.append(Problem(str(record.path), f"{ref.name} is there more than twice; not compared"))
        self.unreadable += 1

    def _group(self, record: Record, tensors: list[TensorRef]) -> None:
        try:
            batch, why = batch_of(record, tensors)
        except RldbgError as error:
            batch, why = None, error.message
        if why is not None:
            self.problems.append(Problem(str(record.path), why))
        if batch is not None:
            self.batches.append(batch)
            self._of.update((id(ref), batch) for ref in tensors)

    def relay(self, old: Batch, new: Batch) -> None:
        """Let a batch stand where another stood."""
        self.batches = [new if batch is old else batch for batch in self.batches]
        self._of = {ref: new if batch is old else batch for ref, batch in self._of.items()}

    def batch(self, ref: TensorRef) -> Batch | None:
        """The samples a tensor is laid out by: its own record's, else the first of the side with a layout for it."""
        own = self._of.get(id(ref))
        if own is not None and (own.layout is not None or own.place(ref) is not None):
            return own
        lent = next((batch for batch in self.batches if batch.layout is not None), None)
        return lent or own

    def exchange(self, place: tuple[str, str], ref: TensorRef) -> None:
        """Let a tensor, said otherwise, stand where it stood."""
        record, before = self.tensors[place]
        self.tensors[place] = record, ref
        if (batch := self._of.get(id(before))) is not None:
            self._of[id(ref)] = batch
        self._found = {}

    def owns(self, ref: TensorRef) -> bool:
        """Whether the tensor's own record says which samples there are."""
        return id(ref) in self._of

    @property
    def main(self) -> Batch | None:
        """The samples this side is known by: the first record that holds tokens, else the first that holds any."""
        known = [batch for batch in self.batches if batch.layout is not None]
        return (known or self.batches or [None])[0]  # type: ignore[list-item]

    @property
    def layout(self) -> TokenLayout | None:
        return self.main.layout if self.main is not None else None

    def find(self, name: str) -> TensorRef | None:
        return next((ref for _, ref in self.named(name)), None)

    def named(self, name: str) -> list[tuple[Record, TensorRef]]:
        """The tensors of a name, one for each stage that has it."""
        return self._lookup().get(name, [])

    def ending(self, *ends: str) -> list[tuple[Record, TensorRef]]:
        """The tensors whose name ends so."""
        found = self._lookup()
        if ends not in found:
            found[ends] = [held for (name, _), held in self.tensors.items() if name.endswith(ends)]
        return found[ends]

    def embeddings(self) -> list[tuple[Record, TensorRef]]:
        """The weights, and their gradients, of what is called as a lookup of words."""
        found = self._lookup()
        if "embeddings" not in found:
            found["embeddings"] = [held for (name, _), held in self.tensors.items() if _EMBEDDING.search(name)]
        return found["embeddings"]

    def _lookup(self) -> dict[Any, list[tuple[Record, TensorRef]]]:
        """Made once: every one of ten thousand tensors without a counterpart is looked for by its name."""
        if self._found_in != (id(self.tensors), len(self.tensors)):
            self._found, self._found_in = {}, (id(self.tensors), len(self.tensors))
            for (name, _), held in self.tensors.items():
                self._found.setdefault(name, []).append(held)
        return self._found


class Rerouted(Struct, frozen=True):
    """What one router of the two sides sent elsewhere, `of` so many tokens, `taking` so many experts each.

    tokens: those that took other experts, as numbers of a's samples; in_turn: those that took the same in another turn.
    order: where the router's choice stands among what its record holds.
    """

    router: str
    order: int
    taking: int
    tokens: Ints
    in_turn: Ints
    of: int

    def precedes(self, tokens: Ints) -> Bools:
        """Whether a token that took other experts stands before each of these in its sample."""
        samples = samples_of(tokens)
        first = np.full(
            1 + int(max(samples.max(initial=0), samples_of(self.tokens).max(initial=0))), np.iinfo(np.int64).max
        )
        np.minimum.at(first, samples_of(self.tokens), positions_of(self.tokens))
        return np.asarray(positions_of(tokens) > first[samples])


class Pairing(Struct, dict=True):
    """The samples of two batches that are the same: `to_a[sample of b]` is its number in a, -1 where a has none;
    `to_b` the other way round."""

    to_a: Ints
    to_b: Ints

    @cached_property
    def in_order(self) -> bool:
        return self.to_a.size == self.to_b.size and bool((self.to_a == np.arange(self.to_a.size)).all())


class MicroBatchPair(Struct):
    """Two sides of one computation.

    partial: only some samples of either face each other, so that what is said of a whole micro-batch does not.
    alone: the tensors, by id, that have no counterpart on the other side; None until they were paired.
    rerouted: what routers sent elsewhere, in order of computation.
    together: what the ranks of one side hold, where they face one process.
    averaged: what b's gradients of a micro-batch's own values are to be multiplied by, for the ranks, as its loss is.
    shared_experts: layers whose experts lie on several ranks, of which this pair has one's.
    untold: why ranks that share the step otherwise in the two runs could not be put together, so that none of them is
    to hold what a rank of the same number does.
    untold_of: the same of some tensors alone, by name.
    in_both: where it is untold, the tensors that both runs have in the step, each on some rank; None: nobody looked.
    has_own_samples: where it is untold, whether all samples are in both runs, each whole on one rank.
    """

    key: RecordKey
    a: Side
    b: Side
    partial: bool = False
    notes: list[str] = field(default_factory=list)
    alone: set[int] | None = None
    rerouted: list[Rerouted] = field(default_factory=list)
    together: Together | None = None
    averaged: float = 1.0
    shared_experts: frozenset[str] = frozenset()
    untold: str | None = None
    untold_of: dict[str, str] = field(default_factory=dict)
    in_both: frozenset[str] | None = None
    has_own_samples: bool = False
    _pairings: dict[tuple[int, int], Pairing] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """`step 0 rank 1 micro 2 critic`, without a stage: a pair has several; an actor's without its role."""
        before, _, last = str(self.key).rpartition(" ")
        role = last.removesuffix(self.key.stage).rstrip("/")
        return " ".join(part for part in (before, role) if part) or last

    def release(self, folder: FieldFolder | None = None) -> None:
        """Forget both sides' tensors, and what was found of them; `load` brings them again."""
        self.a.release(folder)
        self.b.release(folder)
        # All of it goes by the ids of what is gone.
        self.alone, self.rerouted, self._pairings = None, [], {}

    def settle(self, a: Batch, b: Batch, pairing: Pairing) -> None:
        """Keep what a look at the whole step has found."""
        self._pairings[id(a), id(b)] = pairing

    def pairing(self, a: Batch, b: Batch) -> Pairing:
        """Which samples of two records are the same."""
        key = (id(a), id(b))
        if key not in self._pairings:
            self._pairings[key] = in_order(a, b) or self._matched(a, b)
        return self._pairings[key]

    def _matched(self, a: Batch, b: Batch) -> Pairing:
        found = match(Pool([a]), Pool([b]), lambda _a, _b: True)
        self.notes += found.notes
        return pairing_of(a, b, found.pairs)

    def batches(self, a: TensorRef, b: TensorRef) -> tuple[Batch, Batch] | None:
        """The samples either tensor is laid out by; None where one side knows of none."""
        of_a, of_b = self.a.batch(a), self.b.batch(b)
        return None if of_a is None or of_b is None else (of_a, of_b)

    def placed(self, a: TensorRef, b: TensorRef) -> tuple[Placed, Placed, Pairing] | None:
        """Where the two speak of which token or sample; None where they do not, or not of the same kind of thing.

        A tensor nothing is known of is taken for what its shape looks like, but only where its own record holds the
        samples, and only where one order and one shape do not make the two face each other without a guess.
        """
        both = self.batches(a, b)
        if both is None:
            return None
        pairing = self.pairing(*both)
        guess = (not pairing.in_order or a.shape != b.shape) and self.a.owns(a) and self.b.owns(b)
        # Of two that stand alike in their files one may have lost the cells that tell: what tells of one side alone
        # would move it against the other, and hide that it was moved.
        by_mask = a.shape != b.shape or fills_the_mask(both[0].held, a) == fills_the_mask(both[1].held, b)
        placed_a, placed_b = (
            batch.place(ref, by_shape=guess, by_mask=by_mask) for batch, ref in zip(both, (a, b), strict=True)
        )
        if placed_a is None or placed_b is None or placed_a.by_token != placed_b.by_token:
            return None
        if placed_a.heads != placed_b.heads or (placed_a.keys is None) is not (placed_b.keys is None):
            return None
        if placed_a.keys is None and a.shape[placed_a.axes :] != b.shape[placed_b.axes :]:
            return None
        return placed_a, placed_b, pairing

    def gone_elsewhere(self, tokens: Ints, ref: TensorRef, name: str) -> Bools:
        """Of every token of a's samples, whether a tensor of a says what another route made of it: it took other
        experts, or, in a later block, attends to one that did. The latter are kept where they are most tokens.
        """
        meaning, gone, after = naming.meaning(name), np.zeros(tokens.size, bool), np.zeros(tokens.size, bool)
        for one in self.rerouted:
            later = meaning.phase > naming.Phase.MODULES
            if not later and (meaning.phase < naming.Phase.MODULES or (ref.order or 0) < one.order):
                continue
            computed_at = tokens - (later and meaning.alignment == "next")
            gone |= np.isin(computed_at, one.tokens)
            block = one.router.rpartition(".")[0]
            if ref.shape[-1:] == (one.taking,) and name.startswith(block + "."):
                gone |= np.isin(tokens, one.in_turn)
            if later or not name.startswith(block.rpartition(".")[0] + "."):
                after |= one.precedes(computed_at)
        return gone | after if 2 * np.count_nonzero(gone | after) <= tokens.size else gone

    def in_order(self, a: TensorRef, b: TensorRef) -> bool:
        """Whether element i of one faces element i of the other, as far as their samples tell."""
        both = self.batches(a, b)
        return both is None or self.pairing(*both).in_order or self.placed(a, b) is None


def pairing_of(a: Batch, b: Batch, pairs: Iterable[tuple[int, int]]) -> Pairing:
    to_a, to_b = np.full(b.count, -1, np.int64), np.full(a.count, -1, np.int64)
    for one, other in pairs:
        to_a[other], to_b[one] = one, other
    return Pairing(to_a, to_b)


def in_order(a: Batch, b: Batch) -> Pairing | None:
    """The pairing of batches whose samples are the same one by one; None where some are not."""
    if not _same_in_order(a, b):
        return None
    shared = np.arange(min(a.count, b.count))
    return pairing_of(a, b, zip(shared, shared, strict=True))


def _same_in_order(a: Batch, b: Batch) -> bool:
    tail = (a if a.count > b.count else b).lengths[min(a.count, b.count) :]
    if a.layout is None or b.layout is None:
        return a.count == b.count and a.digests == b.digests
    if tail.any():
        return False
    ids_a, ids_b = a.held.ids, b.held.ids
    if ids_a is not None and ids_b is not None and ids_a.rows == ids_b.rows and pages.same_bytes(ids_a, ids_b):
        return bool(np.array_equal(a.lengths, b.lengths))
    if a.contents is None or b.contents is None:
        return bool(np.array_equal(a.lengths[: b.count], b.lengths[: a.count]))
    pairs = zip(a.contents, b.contents, strict=False)
    return all(np.array_equal(one, other) for one, other in pairs)


def pair_micro_batches(
    records_a: Iterable[Record], records_b: Iterable[Record], steps: dict[int | None, int | None] | None = None
) -> tuple[list[MicroBatchPair], list[Problem]]:
    """Pair computations by (step, micro, rank, role). A part that is None on one side pairs with a single value.

    `steps`: what a calls the steps of b, where they count differently.
    """
    records_a, records_b, steps = list(records_a), list(records_b), steps or {}
    micros = renumbered(records_a, records_b, steps)
    sides_a, sides_b = _sides(records_a, {}, {}), _sides(records_b, steps, micros)
    problems: list[Problem] = []
    paired: list[tuple[Parts, Parts]] = [(key, key) for key in sides_a if key in sides_b]
    left_a = _Left(key for key in sides_a if key not in sides_b)
    left_b = _Left(key for key in sides_b if key not in sides_a)
    for key in left_a.all():
        matches = left_b.compatible(key)
        rivals = left_a.compatible(matches[0]) if matches else []
        if len(matches) == 1 and len(rivals) == 1:
            paired.append((key, matches[0]))
            left_a.remove(key)
            left_b.remove(matches[0])
        elif matches:
            where = str(sides_a[key].records[0].path)
            problems.append(
                Problem(where, f"could be paired with any of {len(matches)} records of the other run; paired with none")
            )
    micro_pairs = [MicroBatchPair(_key(key_a), sides_a[key_a], sides_b[key_b]) for key_a, key_b in paired]
    micro_pairs += [MicroBatchPair(_key(key), sides_a[key], Side()) for key in left_a.all()]
    micro_pairs += [MicroBatchPair(_key(key), Side(), sides_b[key]) for key in left_b.all()]
    return sorted(micro_pairs, key=lambda micro_pair: micro_pair.key.order), problems


def _sides(records: Iterable[Record], steps: dict[int | None, int | None], micros: dict[int, int]) -> dict[Parts, Side]:
    sides: dict[Parts, Side] = defaultdict(Side)
    for record in records:
        key = record.key
        parts = key.step, key.micro, key.rank, key.role
        if steps or micros:
            parts = steps.get(key.step, key.step), micros.get(id(record), key.micro), key.rank, key.role
        sides[parts].records.append(record)
    return dict(sides)


def _key(parts: Parts) -> RecordKey:
    step, micro, rank, role = parts
    return RecordKey(step, micro, rank, role)


class _Left:
    """Computations of one run that the other has under no equal key, found by step: a log has tens of thousands."""

    def __init__(self, keys: Iterable[Parts]) -> None:
        self._by_step: dict[int | None, dict[Parts, None]] = {}
        for key in keys:
            self._by_step.setdefault(key[0], {})[key] = None

    def all(self) -> list[Parts]:
        return [key for keys in self._by_step.values() for key in keys]

    def compatible(self, key: Parts) -> list[Parts]:
        """Those that differ from a key only in parts that one of the two does not say."""
        steps = self._by_step if key[0] is None else (key[0], None)
        return [one for step in steps for one in self._by_step.get(step, ()) if _compatible(key, one)]

    def remove(self, key: Parts) -> None:
        del self._by_step[key[0]][key]


def _compatible(a: Parts, b: Parts) -> bool:
    return all(x is None or y is None or x == y for x, y in zip(a, b, strict=True))
