"""What is said of a pair beside its verdict: which samples face each other, the values around an element, and what
two tensors of different shapes have in common."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from replay_core import naming, pages
from replay_core.compare.correlation import Values, pearson
from replay_core.compare.judging import digests
from replay_core.compare.judging.faults import whose
from replay_core.compare.judging.locating import furthest, show_element
from replay_core.compare.judging.tensors import TensorVerdict
from replay_core.compare.judging.verdict import EXACT_KINDS
from replay_core.compare.pairing.align import MicroBatchPair, Rowwise, ShapesDifferError, Side, TensorPair
from replay_core.errors import DumpError
from replay_core.measure.pair import figures
from replay_core.measure.statistics import as_real, as_reals
from replay_core.records import Inline, TensorRef

#: Values shown on either side of an element.
NEIGHBOURS = 4

#: Elements that are correlated beside their verdict; more would cost a second reading that is felt.
MOST_CORRELATED = 1 << 22


class Around(Struct):
    """Values beside an element, both sides: of the tokens before and after it, else along the last axis.

    positions: tokens of its sample, or indices into the last axis; token_ids: None where no ids are known.
    """

    by_token: bool
    positions: list[int] = field(default_factory=list)
    a: list[Any] = field(default_factory=list)
    b: list[Any] = field(default_factory=list)
    token_ids: list[int | None] | None = None


def faces(a: TensorRef, b: TensorRef, micro_pair: MicroBatchPair) -> bool:
    """Whether the two are laid out by the samples of the micro-batches, so that some of their rows face each other."""
    return micro_pair.placed(a, b) is not None


def texts_in_order(pair: TensorPair, micro_pair: MicroBatchPair) -> TensorPair:
    """The pair, or, of texts whose samples are paired otherwise than in order, those that face each other."""
    assert pair.a is not None
    assert pair.b is not None
    a, b = pair.a[1], pair.b[1]
    both = micro_pair.batches(a, b) if a.is_text and b.is_text else None
    if both is None or not faces(a, b, micro_pair):
        return pair
    pairing = micro_pair.pairing(*both)
    if pairing.in_order:
        return pair
    shared = np.flatnonzero(pairing.to_b >= 0)
    in_order = shared.tolist(), pairing.to_b[shared].tolist()
    picked = _picked(a, in_order[0]), _picked(b, in_order[1])
    together = micro_pair.together
    if together is not None:
        ours = 0 if together.which == "a" else 1
        held = together.held.get(id((a, b)[ours]))
        if held is not None and all(ref.is_text and ref.shape == (a, b)[ours].shape for ref in held.parts):
            # Each rank's, in the same order; the first stands for all, and is kept with them.
            rest = (_picked(ref, in_order[ours]) for ref in held.parts[1:])
            together.held[id(picked[ours])] = replace(held, parts=(picked[ours], *rest))
    return TensorPair(pair.name, (pair.a[0], picked[0]), (pair.b[0], picked[1]))


def _picked(ref: TensorRef, samples: list[int]) -> TensorRef:
    values = pages.array(ref).tolist()
    return ref.with_(source=Inline([values[sample] for sample in samples]), shape=(len(samples),))


def is_tied(pair: TensorPair, micro_pair: MicroBatchPair) -> bool:
    """Whether a head that only one side stores is that side's own embedding, byte for byte: the two are tied. Of other
    names than a head's: whether it is the one embedding of its shape, which both sides have.
    """
    if pair.a is not None and pair.b is not None:
        return False
    head = pair.one[1]
    here, there = (micro_pair.a, micro_pair.b) if pair.b is None else (micro_pair.b, micro_pair.a)
    try:
        if naming.is_head(pair.name):
            prefix = naming.around_head(pair.name)
            if not there.ending(*naming.EMBEDDINGS):
                return False
            own = [ref for _, ref in here.ending(*naming.EMBEDDINGS) if (ref.canonical or ref.name).startswith(prefix)]
        else:
            own = _looked_up_like(head, pair.name, here, there)
        every = _of_every_rank(head, micro_pair) if own else ()
        return any(_are_the_same(every, _of_every_rank(ref, micro_pair)) for ref in own)
    except DumpError:
        return False


def _looked_up_like(head: TensorRef, name: str, here: Side, there: Side) -> list[TensorRef]:
    """The one embedding of a matrix's shape, by its name, where both sides have it and it is no constant."""
    prefix = next((one for one in ("grad.", "param.") if name.startswith(one)), None)
    if prefix is None or len(head.shape) != 2 or not name.endswith(".weight") or head.shape[0] in (1, head.shape[1]):
        return []
    alike = [ref for _, ref in here.embeddings() if ref is not head and ref.shape == head.shape]
    alike = [ref for ref in alike if (ref.canonical or ref.name).startswith(prefix)]
    if len(alike) != 1 or not there.named(alike[0].canonical or alike[0].name) or not head.is_readable:
        return []
    values = pages.array(head)
    return alike if (values != values.reshape(-1)[:1]).any() else []


def are_places(pair: TensorPair, micro_pair: MicroBatchPair) -> bool:
    """Whether one run alone has positions, and they are where its tokens stand in their sequences, which is what a
    model counts that is given none.
    """
    ref = pair.one[1]
    if (pair.a is not None and pair.b is not None) or naming.meaning(pair.name).kind != "positions":
        return False
    together = micro_pair.together
    held = together.held.get(id(ref)) if together is not None else None
    parts = held.parts if held is not None else (ref,)
    ranks = held.ranks if held is not None else ()
    cut = next((of for axis, of in together.cuts if axis == 1), None) if together is not None else None
    here = micro_pair.a if pair.b is None else micro_pair.b
    mask = here.find("attention_mask")
    masks = together.held.get(id(mask)) if together is not None and mask is not None else None
    try:
        for number, part in enumerate(parts):
            if part.rows is not None or not part.shape or not part.dtype.startswith(("int", "uint")):
                return False
            stretches = ((0, part.shape[-1]),)
            if cut is not None and together is not None and held is not None:
                stretches = cut[together.ranks.index(ranks[number])]  # type: ignore[assignment]
            places = np.concatenate([np.arange(at, at + long) for at, long in stretches])
            if places.size != part.shape[-1]:
                return False
            # Padding stands where it may.
            own = masks.parts[number] if masks is not None and masks.ranks == ranks else mask
            counts = pages.array(own) != 0 if own is not None and own.shape == part.shape else np.True_
            if ((pages.array(part) != places) & counts).any():
                return False
    except DumpError:
        return False
    return True


def is_attentions_weights(pair: TensorPair, micro_pair: MicroBatchPair) -> bool:
    """Whether one run alone has attention's weights [sample, head, query, key], which one implementation returns beside
    its output (eager) and another does not make (flash, sdpa), and both have the output itself.
    """
    if pair.a is not None and pair.b is not None:
        return False
    module, _, number = pair.name.rpartition(".output.")
    ref = pair.one[1]
    is_square = len(ref.shape) == 4 and ref.shape[2] == ref.shape[3] and ref.dtype.startswith(("float", "bfloat"))
    if number != "1" or not is_square or "att" not in module.rpartition(".")[2].lower():
        return False
    there = micro_pair.a if pair.a is None else micro_pair.b
    return bool(there.named(f"{module}.output") or there.named(f"{module}.output.0"))


def _of_every_rank(ref: TensorRef, micro_pair: MicroBatchPair) -> tuple[TensorRef, ...]:
    """What the ranks hold of a tensor; where nothing is said of ranks, it alone."""
    held = micro_pair.together.held.get(id(ref)) if micro_pair.together is not None else None
    return held.parts if held is not None else (ref,)


def _are_the_same(one: tuple[TensorRef, ...], other: tuple[TensorRef, ...]) -> bool:
    """Whether what ranks hold of one tensor are the bytes that ranks hold of another, slice for slice, and all."""

    def has(refs: tuple[TensorRef, ...], ref: TensorRef) -> bool:
        return any(
            (mine.shape, mine.dtype) == (ref.shape, ref.dtype) and bool(pages.same_bytes(mine, ref)) for mine in refs
        )

    return all(has(other, ref) for ref in one) and all(has(one, ref) for ref in other)


#: What a wrapper around the whole model hands on (DistributedDataParallel, torch.compile): the model's own output,
#: which no module of the other run bears the name of.
_OF_WRAPPERS = ("module.output", "_orig_mod.output")


def why_missing(pair: TensorPair, micro_pair: MicroBatchPair) -> str | None:
    """What to say of a one-sided tensor; None where its own side says the same in another stage, which was compared.

    A twin that cannot be looked at, or that nothing faces either, clears nothing.
    """
    which, side = ("a", micro_pair.a) if pair.b is None else ("b", micro_pair.b)
    record, own = pair.one
    twins = [
        (there.key.stage, ref)
        for there, ref in side.named(pair.name)
        if ref is not own and micro_pair.alone is not None and id(ref) not in micro_pair.alone
    ]
    if pair.name in _OF_WRAPPERS and _is_handed_on(own, side, micro_pair):
        return None
    if not twins:
        return f"only {which} has it"
    if any(_says_the_same(own, ref, MicroBatchPair(micro_pair.key, side, side)) for _, ref in twins):
        return None
    return f"only {which} has it in {record.key.stage}; it is not known to be what {which} says in {twins[0][0]}"


def _is_handed_on(own: TensorRef, side: Side, micro_pair: MicroBatchPair) -> bool:
    """Whether some module that was compared put out, byte for byte, what a wrapper hands on."""
    every = _of_every_rank(own, micro_pair)
    outputs = [_of_every_rank(ref, micro_pair) for (_, stage), (_, ref) in side.tensors.items()
               if stage == "modules" and ref is not own and id(ref) not in (micro_pair.alone or ())]  # fmt: skip
    return micro_pair.alone is not None and any(_are_the_same(every, other) for other in outputs)


def _says_the_same(one: TensorRef, other: TensorRef, micro_pair: MicroBatchPair) -> bool:
    """Whether all that a tensor says stands in another of its side, token by token where their layouts differ."""
    if digests.are_comparable(one, other):
        return digests.are_equal(one, other)
    if not (one.is_readable and other.is_readable) or one.is_text != other.is_text:
        return False
    try:
        if one.is_text:
            return bool(pages.array(one).tolist() == pages.array(other).tolist())
        if one.dtype == other.dtype and one.rows == other.rows and pages.same_bytes(one, other):
            return True
        rows = Rowwise(one, other, micro_pair, overlap=True)
        said = [np.array_equal(as_real(x), as_real(y), equal_nan=True) for x, y in rows.counted()]
        return bool(said) and all(said) and "a" not in rows.lone
    except (ShapesDifferError, DumpError):
        return False


def name_samples(row: TensorVerdict, pair: TensorPair, micro_pair: MicroBatchPair) -> None:
    """Say which text of a list differs, and what b calls a sample that stands elsewhere in it."""
    assert pair.a is not None
    assert pair.b is not None
    a, b = pair.a[1], pair.b[1]
    both = micro_pair.batches(a, b)
    if a.is_text and b.is_text and isinstance(row.value_a, list) and isinstance(row.value_b, list):
        _first_text(row)
    if both is None or row.token is None:
        return
    pairing = micro_pair.pairing(*both)
    sample = row.token[0]
    if a.is_text and not pairing.in_order:
        sample = int(np.flatnonzero(pairing.to_b >= 0)[sample])
        row.token, row.raw_a = (sample, 0), (sample,)
        row.raw_b = (int(pairing.to_b[sample]),)
    for one in (row, furthest(row)):
        sample = -1 if one is None or one.token is None else one.token[0]
        if 0 <= sample < pairing.to_b.size and pairing.to_b[sample] != sample and faces(a, b, micro_pair):
            assert one is not None
            one.sample_b = int(pairing.to_b[sample])


def _first_text(row: TensorVerdict) -> None:
    texts_a, texts_b = row.value_a, row.value_b
    differing = [i for i, (x, y) in enumerate(zip(texts_a, texts_b, strict=False)) if x != y]
    if len(texts_a) != len(texts_b) or not differing:
        return
    first = differing[0]
    row.token, row.raw_a, row.raw_b = (first, 0), (first,), (first,)
    row.value_a, row.value_b = texts_a[first], texts_b[first]
    if row.figures is not None:
        row.figures.compared, row.figures.mismatched = len(texts_a), len(differing)
    of_ranks = f"of {whose(row.ranks.parted)}: " if row.ranks is not None and row.ranks.parted else ""
    said = f"{_short(row.value_a)} against {_short(row.value_b)}"
    row.reason = f"{of_ranks}{len(differing)} of {len(texts_a)} texts differ; {said}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def look_at_the_overlap(row: TensorVerdict, micro_pair: MicroBatchPair) -> None:
    """Compare what two tensors of different shapes have in common; the verdict stays SHAPE."""
    assert row.a is not None
    assert row.b is not None
    a, b = row.a[1], row.b[1]
    kind = naming.meaning(row.name).kind
    integral = all(ref.dtype == "bool" or ref.dtype.startswith(("int", "uint")) for ref in (a, b))
    try:
        rows = Rowwise(a, b, micro_pair, overlap=True)
        found = figures(rows.counted(), exact=integral or kind in EXACT_KINDS, logprobs=kind == "logprob")
    except (ShapesDifferError, DumpError):
        return
    if not found.compared:
        return
    row.figures = found
    shown = (found.first if integral else found.greatest) or found.nonfinite
    equal = f"what both have ({found.compared:,} elements) is equal"
    differ = (
        f"of the {found.compared:,} elements that both have {found.mismatched:,} differ, by up to {found.max_abs:.3g}"
    )
    said = [*rows.left_out, differ if found.mismatched else equal]
    row.note = "; ".join([note for note in (row.note, *said) if note])
    if shown is None:
        return
    show_element(row, rows, shown.at)


def note_correlation(row: TensorVerdict, micro_pair: MicroBatchPair) -> None:
    """How well two tensors correlate with and without their padding, where that is not the same question.

    Correlation alone is what critics are compared by, and padding ruins it while every token that counts agrees.
    """
    kind = naming.meaning(row.name).kind
    if row.unmasked is None or not row.unmasked.mismatched or kind not in ("value", "logprob", "loss"):
        return
    assert row.a is not None
    assert row.b is not None
    a, b = row.a[1], row.b[1]
    if a.numel > MOST_CORRELATED:
        return
    try:
        chunks = list(Rowwise(a, b, micro_pair).counted())
        x, y = as_reals(*(pages.array(ref).reshape(-1) for ref in (a, b)))
    except (ShapesDifferError, DumpError):
        return
    if not chunks:
        return
    counted = as_reals(*(np.concatenate([chunk[side].reshape(-1) for chunk in chunks]) for side in (0, 1)))
    inside, every = pearson(counted[0], counted[1]), pearson(x, y)
    if inside is not None and every is not None:
        said = f"Pearson {inside:.6g} over the tokens that count, {every:.6g} with padding"
        row.note = "; ".join(note for note in (row.note, said, _offset(*counted)) if note)


def _offset(a: Values, b: Values) -> str | None:
    """The one constant between two tensors that correlation does not see: a value head's bias, say."""
    d = b - a
    if not np.isfinite(d).all() or d.size < 2 or not d.any():
        return None
    left = float(np.abs(d - d.mean()).max())
    if left > 1e-3 * abs(float(d.mean())):
        return None
    return f"b is a plus {d.mean():.6g}, and apart from that within {left:.2g}: look for a bias that one side lacks"


def around(row: TensorVerdict, micro_pair: MicroBatchPair) -> Around | None:
    """The values beside the element a row shows; None where it shows none."""
    if row.a is None or row.b is None or row.raw_a is None or row.raw_b is None:
        return None
    a, b = row.a[1], row.b[1]
    if a.is_text or b.is_text or not a.shape:
        return None
    try:
        rows = Rowwise(a, b, micro_pair, overlap=True)
        found = _by_token(row, rows) if rows.slots_a is not None and row.token is not None else None
        if found is not None:
            both = micro_pair.batches(a, b)
            contents = both[0].contents if both is not None else None
            if contents is not None and row.token is not None:
                ids = contents[row.token[0]]
                found.token_ids = [int(ids[at]) if at < len(ids) else None for at in found.positions]
            return found
        return _along(a, b, row.raw_a, row.raw_b)
    except (ShapesDifferError, DumpError):
        return None


def _by_token(row: TensorVerdict, rows: Rowwise) -> Around | None:
    assert row.token is not None
    assert row.raw_a is not None
    sample, position = row.token
    inner = (
        int(np.ravel_multi_index(row.raw_a[rows.axes_a :], rows.a.shape[rows.axes_a :]))
        if rows.a.shape[rows.axes_a :]
        else 0
    )
    found = Around(by_token=True)
    assert rows.tokens is not None
    of_sample = rows.samples()
    for number in np.flatnonzero(of_sample == sample).tolist():
        token = rows.token(number)
        if token is None or abs(token[1] - position) > NEIGHBOURS:
            continue
        raw_a, raw_b = rows.index(number, inner)
        found.positions.append(token[1])
        found.a.append(pages.element(rows.a, raw_a))
        found.b.append(pages.element(rows.b, raw_b))
    return found if found.positions else None


def _along(a: TensorRef, b: TensorRef, raw_a: tuple[int, ...], raw_b: tuple[int, ...]) -> Around:
    found = Around(by_token=False)
    if not raw_a or not raw_b:
        return found
    for step in range(-NEIGHBOURS, NEIGHBOURS + 1):
        at_a, at_b = raw_a[-1] + step, raw_b[-1] + step
        if 0 <= at_a < a.shape[-1] and 0 <= at_b < b.shape[-1]:
            found.positions.append(at_a)
            found.a.append(pages.element(a, (*raw_a[:-1], at_a)))
            found.b.append(pages.element(b, (*raw_b[:-1], at_b)))
    return found
