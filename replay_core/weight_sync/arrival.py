"""Each parameter of the engine held against what the trainer pushed, and every other value it may hold instead."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct, field

from replay_core import dtypes, hashes
from replay_core.engine_names import ENGINE_OWN, Piece, pieces
from replay_core.errors import DumpError, NothingComparableError
from replay_core.jobs import OnEvent, Progress, ignore
from replay_core.measure.digests import digest, digest_of, is_digest, shared_kind
from replay_core.measure.equality import unequal
from replay_core.records import TensorRef
from replay_core.weight_sync import fits
from replay_core.weight_sync.blocks import Block, Layout, laid_out, parallelism
from replay_core.weight_sync.scales import dequantised, on_its_grid
from replay_core.weight_sync.state import Values, WeightState
from replay_core.weight_sync.suspects import Known, Suspect, cast, layers_beside, siblings, suspects

if TYPE_CHECKING:
    from replay_core.documents.weights import Arrival

#: Worst first: what a destination of several parts is called by.
SEVERITY: tuple[Arrival, ...] = (
    "unreadable", "unmapped", "shape", "differs", "zero", "untouched", "older", "swapped", "other shard",
    "other expert", "other layer", "transposed", "partly", "update", "scaled", "quantised", "rounded", "arrived",
)  # fmt: skip
#: Combinations of parts that a digest of a fused parameter is tried against.
MAX_COMBINATIONS = 4096


class PartArrival(Struct, frozen=True):
    """What one block holds. rel_l2: against what it should, where values are known."""

    block: Block
    arrival: Arrival
    what: str = ""
    rel_l2: float | None = None


class Destination(Struct):
    """A parameter of the engine, judged."""

    name: str
    ref: TensorRef
    rank: int | None
    arrival: Arrival = "arrived"
    what: str = ""
    by_digest: bool = False
    is_unmoved: bool = False
    padding: int = 0
    parts: list[PartArrival] = field(default_factory=list)


class WeightSync(Struct):
    """The whole answer."""

    known: Known
    received: list[WeightState]
    parallel: int
    destinations: list[Destination]
    not_sent: list[str]
    engine_own: int
    notes: list[str]


def judge(
    known: Known,
    received: Sequence[WeightState],
    *,
    parallel: int | None = None,
    names: Sequence[str] = (),
    on_event: OnEvent = ignore,
) -> WeightSync:
    """Hold every parameter that an engine received against the sender's.

    Args:
        received: one state per rank of the engine.
        parallel: over how many ranks its parameters are cut; None: as their shapes say.
        names: only destinations of these names (globs).

    Raises:
        NothingComparableError: not one destination could be compared.
    """
    sender = known.sender
    shapes = {name: ref.shape for state in received for name, ref in state.tensors.items()}
    ranks = parallel or parallelism(shapes, sender)
    found = WeightSync(known, list(received), ranks, [], [], 0, [])
    used: set[str] = set()
    total, done = sum(len(state.tensors) for state in received), 0
    for place, state in enumerate(received):
        shard = _shard_of(state, place, ranks, known, found.notes)
        for name, ref in state.tensors.items():
            on_event(Progress(done, total, name))
            done += 1
            if names and not any(fnmatch.fnmatchcase(one, glob) for one in (name, ref.name) for glob in names):
                continue
            made_of = pieces(name, sender.has, ref.shape[0] if len(ref.shape) == 3 else None)
            if not made_of and ENGINE_OWN.fullmatch(name):
                found.engine_own += 1
                continue
            used.update(piece.source for piece in made_of)
            found.destinations.append(_destination(name, state, ref, made_of, shard, ranks, known))
    if not any(one.arrival not in ("unmapped", "unreadable", "shape") for one in found.destinations):
        raise NothingComparableError(
            "no parameter of the engine could be held against the trainer's",
            file=str(received[0].path),
            expected=f"names such as {', '.join(list(sender.tensors)[:3])}",
            found=", ".join(one.name for one in found.destinations[:3]) or "none that was chosen",
        )
    if not names:
        found.not_sent = [name for name in sender.tensors if name not in used]
    return found


def _shard_of(state: WeightState, place: int, ranks: int, known: Known, notes: list[str]) -> int:
    """Which shard a rank's state holds: the one that most of its cut parameters equal, else its own number."""
    said = state.rank if state.rank is not None else place
    if ranks < 2:
        return said
    votes: Counter[int] = Counter()
    for name, ref in state.tensors.items():
        if sum(votes.values()) >= 8:
            break
        made_of = pieces(name, known.sender.has)
        if len(made_of) != 1 or not _is_known(ref):
            continue
        for shard in range(ranks):
            layout = laid_out(name, ref.shape, made_of, known.sender, ranks, shard)
            if not layout.blocks or layout.blocks[0].shards is None:
                break
            if _holds(state, name, layout, known.sender):
                votes[shard] += 1
    if not votes:
        return said % ranks
    shard = votes.most_common(1)[0][0]
    if state.rank is not None and shard != state.rank % ranks:
        notes.append(f"rank {state.rank} of the engine holds shard {shard} of {ranks}")
    return shard


def _is_known(ref: TensorRef) -> bool:
    return ref.is_readable or ref.digest is not None


def _holds(state: WeightState, name: str, layout: Layout, sender: WeightState) -> bool:
    ref = state.tensors[name]
    try:
        sent = [block.of(sender) for block in layout.blocks]
        if any(one is None for one in sent):
            return False
        if not ref.is_readable:
            return _digest_of([one for one in sent if one is not None], ref) == ref.digest
        return all(
            _equal(block.inside(state.values(name)), one)
            for block, one in zip(layout.blocks, sent, strict=True)
            if one is not None
        )
    except DumpError:
        return False


def _destination(
    name: str,
    state: WeightState,
    ref: TensorRef,
    made_of: Sequence[Piece],
    shard: int,
    ranks: int,
    known: Known,
) -> Destination:
    found = Destination(ref.name, ref, state.rank)
    if not made_of:
        found.arrival, found.what = "unmapped", "the trainer has no parameter that it is made of"
        return found
    lacking = [piece.source for piece in made_of if not known.sender.has(piece.source)]
    if lacking:
        found.arrival, found.what = "unmapped", f"the trainer lacks {', '.join(lacking)}"
        return found
    layout = laid_out(name, ref.shape, made_of, known.sender, ranks, shard)
    found.padding = layout.padding
    if layout.why is not None:
        found.arrival, found.what = "shape", layout.why
        return found
    unread = [piece.source for piece in made_of if not known.sender.tensors[piece.source].is_readable]
    if unread:
        _by_both_digests(found, unread, made_of, layout, known.sender)
        return found
    try:
        if ref.is_readable:
            found.parts = list(_parts(state, name, layout, known))
        elif ref.digest is not None:
            found.by_digest = True
            found.parts = _by_digest(name, ref, layout, known)
        else:
            found.arrival, found.what = "unreadable", "neither values nor a digest were recorded"
            return found
        found.is_unmoved = all(one.arrival == "arrived" for one in found.parts) and _is_unmoved(
            name, ref, layout, known
        )
    except DumpError as error:
        found.arrival, found.what = "unreadable", error.in_one_line
        return found
    worst = min(found.parts, key=lambda one: SEVERITY.index(one.arrival))
    found.arrival, found.what = worst.arrival, worst.what
    return found


def _by_both_digests(
    found: Destination, unread: list[str], made_of: Sequence[Piece], layout: Layout, sender: WeightState
) -> None:
    """Where the trainer kept no values, a parameter that is one of its own may have the same digest."""
    sent = sender.tensors[made_of[0].source]
    kind = shared_kind(found.ref, sent)
    alike = sent.shape == found.ref.shape and sent.dtype == found.ref.dtype and is_digest(sent.digest)
    if len(made_of) == 1 and alike and kind is not None:
        found.by_digest = True
        same = digest(found.ref, kind) == sent.digest
        found.arrival, found.what = ("arrived", "") if same else ("differs", "its digest is another")
    else:
        found.arrival, found.what = "unreadable", f"no values of the trainer's {', '.join(unread[:3])} were recorded"


def _is_unmoved(name: str, ref: TensorRef, layout: Layout, known: Known) -> bool:
    if known.before is None:
        return False
    if _same_digest(name, ref, known.before):
        return True
    pairs = [(block.of(known.sender), known.earlier(name, block)) for block in layout.blocks]
    return all(sent is not None and old is not None and _equal(old, sent) for sent, old in pairs)


def _parts(state: WeightState, name: str, layout: Layout, known: Known) -> Iterator[PartArrival]:
    got, scaled = state.values(name), dequantised(state, name)
    for block in layout.blocks:
        sent = block.of(known.sender)
        assert sent is not None  # the layout was made of it
        if scaled is not None and block.expert is None and on_its_grid(state.tensors[name].dtype, scaled, block, sent):
            yield PartArrival(block, "arrived")
        else:
            values = got if scaled is None or block.expert is not None else scaled[0]
            yield _part(name, block, block.inside(values), sent, layout.blocks, known)


def _part(name: str, block: Block, got: Values, sent: Values, beside: Sequence[Block], known: Known) -> PartArrival:
    if _equal(got, sent):
        return PartArrival(block, "arrived")
    far = fits.rel_l2(got, sent) if got.shape == sent.shape else None
    elsewhere = (*siblings(block, known.sender), *layers_beside(block, known.sender))
    for suspect in (*suspects(name, block, beside, known, str(got.dtype)), *elsewhere):
        values = suspect.values()
        if values is not None and _equal(got, values) and not _is_same(values, sent, suspect):
            return PartArrival(block, suspect.arrival, f"holds {suspect.what}", far)
    if far is None:
        return PartArrival(block, "differs", "equals nothing that is known")
    before = known.earlier(name, block)
    near = fits.fit(got, cast(sent, str(got.dtype)), before)
    if near is not None:
        return PartArrival(block, near[0], near[1], far)
    return PartArrival(block, "differs", f"equals nothing that is known; |b - a| is {far:.3g} of |a|", far)


def _is_same(values: Values, sent: Values, suspect: Suspect) -> bool:
    """Whether a suspect's values are what was sent anyway: then they explain nothing."""
    return suspect.arrival != "rounded" and values.shape == sent.shape and not unequal(values, sent).any()


def _equal(got: Values, sent: Values) -> bool:
    """Whether a block holds these values, in its own dtype. The first row says no at once."""
    if got.shape != sent.shape:
        return False
    if got.ndim and len(got) > 8 and not _equal(got[:1], sent[:1]):
        return False
    return not unequal(got, cast(sent, str(got.dtype))).any()


def _by_digest(name: str, ref: TensorRef, layout: Layout, known: Known) -> list[PartArrival]:
    """What a fused parameter holds, told from its digest: every combination of what its parts may hold is tried."""
    sender = known.sender
    options: list[list[Suspect]] = []
    for block in layout.blocks:
        sent = Suspect("arrived", "", lambda block=block: block.of(sender))  # type: ignore[misc]
        options.append([sent, *suspects(name, block, layout.blocks, known, ref.dtype)])
        if len(layout.blocks) == 1:
            options[0] += siblings(block, sender)
    for chosen in _combinations(options):
        values = [suspect.values() for suspect in chosen]
        held = [one for one in values if one is not None]
        # vLLM's VocabParallelEmbedding fills the rows it adds with zeros.
        if len(held) == len(values) and _digest_of([*held, *_padding(layout, ref)], ref) == ref.digest:
            return [
                PartArrival(block, suspect.arrival, f"holds {suspect.what}" if suspect.what else "")
                for block, suspect in zip(layout.blocks, chosen, strict=True)
            ]
    if known.before is not None and _same_digest(name, ref, known.before):
        return [PartArrival(block, "untouched", "holds what it held before the push") for block in layout.blocks]
    why = "its digest is that of nothing known"
    if layout.padding:
        why += f", with {layout.padding} rows of zeros as padding"
    return [PartArrival(block, "differs", why) for block in layout.blocks]


def _same_digest(name: str, ref: TensorRef, before: WeightState) -> bool:
    """Whether the engine recorded the same digest of a parameter before the push."""
    held = before.tensors.get(name)
    return held is not None and is_digest(held.digest) and (held.digest, held.dtype) == (ref.digest, ref.dtype)


def _padding(layout: Layout, ref: TensorRef) -> list[Values]:
    return [np.zeros((layout.padding, *ref.shape[1:]), dtype=np.float32)] if layout.padding else []


def _combinations(options: list[list[Suspect]]) -> Iterator[tuple[Suspect, ...]]:
    """All as sent; then one part after the other otherwise; all alike; then every combination, where they are few."""
    sent = [of_part[0] for of_part in options]
    yield tuple(sent)
    for at, of_part in enumerate(options):
        for suspect in of_part[1:]:
            yield (*sent[:at], suspect, *sent[at + 1 :])
    if len(options) > 1:
        for number in range(1, min(map(len, options))):
            yield tuple(of_part[number] for of_part in options)
        count = int(np.prod([float(len(of_part)) for of_part in options]))
        if count <= MAX_COMBINATIONS:
            yield from product(*options)


def _digest_of(values: Sequence[Values], ref: TensorRef) -> str | None:
    """The recorder's digest of a parameter that holds these parts, one below the other, in its dtype."""
    if ref.dtype not in dtypes.ITEMSIZE:
        return None
    return digest_of((cast(one, ref.dtype) for one in values), hashes.kind_of(ref.digest))
