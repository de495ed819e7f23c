"""Measures tensor pairs, some of them ahead of the one being judged: reading needs no verdict of an earlier pair."""

from __future__ import annotations

import math
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from msgspec import Struct

from replay_core import naming, pages
from replay_core.compare.judging import columns, limits, sample
from replay_core.compare.judging.tolerance import Tolerances
from replay_core.compare.judging.verdict import EXACT_KINDS, SCALAR_KINDS, Rounded
from replay_core.compare.pairing.align import MicroBatchPair, Rowwise, TensorPair
from replay_core.compare.pairing.chunks import rows_of_a_chunk
from replay_core.dtypes import DTYPES, Dtype, coarsest, family
from replay_core.measure import from_files
from replay_core.measure.figures import F64, PairFigures
from replay_core.measure.number import figures_of_numbers
from replay_core.measure.pair import figures
from replay_core.records import Inline, TensorRef

#: Tensors of fewer bytes are measured when their turn comes: handing them to a thread would cost more.
WORTH_A_THREAD = 1 << 18
#: More threads than this wait for memory, not for each other.
MOST_THREADS = 4


class Measured(Struct):
    """What one look at a pair found. `figures` is None where the bytes are the same, `rows` of two numbers as well."""

    figures: PairFigures | None = None
    #: Of the same bytes, how many numbers are NaN.
    nans: int = 0
    unmasked: PairFigures | None = None
    rows: Rowwise | None = None
    exact: bool = False
    #: The dtypes the numbers were computed in, as far as storage and bits show.
    dtypes: tuple[str, str] = ("", "")
    #: Two floating dtypes of different resolution, and what is left after rounding to the narrower.
    rounded: Rounded | None = None
    worst_sample: tuple[int, float] | None = None
    #: Of log probabilities, whether the figures show that both sides were computed in fp32.
    shows_fp32: bool = False
    #: Of positions, the constant that shifts each sample, in words; None where it is none.
    shift: str | None = None
    notes: tuple[str, ...] = ()


def measure(pair: TensorPair, micro_pair: MicroBatchPair, tolerances: Tolerances, *, bitwise: bool) -> Measured:
    """Look at both tensors of a pair of numbers.

    Raises:
        ShapesDifferError: their elements cannot face each other.
        DumpError: the bytes of one cannot be read.
    """
    assert pair.a is not None
    assert pair.b is not None
    a, b = pair.a[1], pair.b[1]
    meaning = naming.meaning(pair.name)
    if not bitwise and meaning.kind in SCALAR_KINDS and (single := _of_numbers(pair.name, a, b, tolerances)):
        return single
    if micro_pair.in_order(a, b):
        is_same, nans = pages.same_bytes_and_nans(a, b)
        if is_same:
            if nans and (rows := Rowwise(a, b, micro_pair)).masked:
                # What stands in padding is nobody's.
                nans = sum(int((side != side).sum()) for side, _ in rows.counted())
            return Measured(nans=nans, dtypes=(a.dtype, b.dtype))
    rows = Rowwise(a, b, micro_pair)
    positions = meaning.kind == "positions"
    integral = is_integral(a), is_integral(b)
    exact = meaning.kind in EXACT_KINDS or (all(integral) and not positions)
    if any(integral) and not exact and not positions:
        exact = all(_whole(side) for chunks in rows.counted() for side in chunks)
    logprobs = meaning.kind == "logprob"
    dtype = coarsest(_claimed(a), _claimed(b))
    elementwise = None if exact else tolerances.elementwise_of(pair.name, dtype)

    def look(*, counted: bool = True) -> PairFigures:
        facing = None if exact or logprobs or bitwise or elementwise else rows.facing(counted=counted)
        known = from_files.figures(facing, rows_of_a_chunk(facing.width)) if facing is not None else None
        if known is not None:
            return known
        chunks = rows.counted() if counted else rows.whole()
        return figures(chunks, exact=exact, logprobs=logprobs, bitwise=bitwise, limits=elementwise)

    found = Measured(look(), rows=rows, exact=exact)
    assert found.figures is not None
    if rows.masked and rows.paddings_face:
        found.unmasked = look(counted=False)
    _by_samples(rows, found.figures)
    found.dtypes, found.notes = _effective(a, b, found.figures)
    if found.figures.mismatched and not exact and not bitwise:
        found.rounded = _rounded(found.dtypes, rows)
        stored = meaning.kind in ("gradient", "param")
        if not stored and columns.is_open(found.figures, coarsest(*found.dtypes)):
            found.figures.columns.gains = columns.gains(rows.counted())
    if logprobs:
        found.worst_sample = _worst_sample(rows, found.figures)
        _tokens_of_samples(rows, found.figures)
        found.shows_fp32 = sample.shows_fp32(found.figures)
    if positions and found.figures.mismatched:
        found.shift = _shift(rows)
    return found


def same_numbers(a: TensorRef, b: TensorRef) -> PairFigures | None:
    """The figures of two numbers of a log that are one and the same, or both NaN; None where they are not."""
    if pages.is_same_number(a, b):
        return _SAME
    x, y = pages.number_of(a), pages.number_of(b)
    return _NANS if x is not None and y is not None and x != x and y != y else None


_SAME, _NANS = PairFigures(compared=1), PairFigures(compared=1, nan_a=1, nan_b=1)


def _of_numbers(name: str, a: TensorRef, b: TensorRef, tolerances: Tolerances) -> Measured | None:
    """What is found of two numbers that stood in the text of files; None where they are more than that."""
    x, y = pages.number_of(a), pages.number_of(b)
    if x is None or y is None:
        return None
    if pages.is_same_number(a, b):
        return Measured(dtypes=(a.dtype, b.dtype))
    integral = is_integral(a), is_integral(b)
    exact = any(integral) and all(type(value) is not float or value % 1 == 0 or math.isinf(value) for value in (x, y))
    elementwise = None if exact else tolerances.elementwise_of(name, coarsest(_claimed(a), _claimed(b)))
    found = figures_of_numbers(x, y, exact=exact, limits=elementwise)
    if found is None:
        return None
    dtypes, notes = _effective(a, b, found)
    return Measured(found, exact=exact, dtypes=dtypes, notes=notes)


class LookAhead:
    """Measures the pairs of a list in threads, a few ahead of the one asked for; answers come in the list's order."""

    def __init__(
        self, tolerances: Tolerances, *, bitwise: bool, is_asked: Callable[[TensorPair], bool] | None = None
    ) -> None:
        """is_asked: which pairs will be asked for, where that is not all."""
        self._tolerances, self._bitwise = tolerances, bitwise
        self._is_asked = is_asked or (lambda pair: True)
        self._under_way: dict[int, Future[Measured]] = {}

    def over(self, work: Sequence[tuple[TensorPair, MicroBatchPair]]) -> Iterator[tuple[TensorPair, MicroBatchPair]]:
        """The same pairs in the same order; those that follow are being measured meanwhile."""
        threads = min(MOST_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)
        if threads < 2 or sum(_is_worth_a_thread(pair) and self._is_asked(pair) for pair, _ in work) < 2:
            yield from work
            return
        pool = ThreadPoolExecutor(threads, thread_name_prefix="measure")
        coming = deque(entry for entry in work if _is_worth_a_thread(entry[0]) and self._is_asked(entry[0]))
        try:
            for pair, micro_pair in work:
                while coming and len(self._under_way) < 2 * threads:
                    ahead, its_micro_pair = coming.popleft()
                    self._under_way[id(ahead)] = pool.submit(
                        measure, ahead, its_micro_pair, self._tolerances, bitwise=self._bitwise
                    )
                yield pair, micro_pair
                self._under_way.pop(id(pair), None)
        finally:
            self._under_way.clear()
            pool.shutdown(cancel_futures=True)

    def measured(self, pair: TensorPair, micro_pair: MicroBatchPair) -> Measured:
        """What `measure` says of a pair, waited for if it is under way."""
        future = self._under_way.get(id(pair))
        return future.result() if future else measure(pair, micro_pair, self._tolerances, bitwise=self._bitwise)


def _is_worth_a_thread(pair: TensorPair) -> bool:
    return pair.a is not None and pair.b is not None and all(
        side[1].is_readable and not side[1].is_text and side[1].nbytes >= WORTH_A_THREAD for side in (pair.a, pair.b)
    )  # fmt: skip


def is_integral(ref: TensorRef) -> bool:
    return ref.dtype == "bool" or ref.dtype.startswith(("int", "uint"))


def _whole(values: np.ndarray) -> bool:
    """Whether numbers are whole, whatever holds them."""
    if values.dtype.kind in "iub":
        return True
    if values.dtype.kind == "c" and values.imag.any():
        return False
    numbers = values.real.astype(np.float64)
    return bool((numbers == np.trunc(numbers)).all())


def _claimed(ref: TensorRef) -> str:
    """The precision a tensor claims. Python and JSON keep every number as a double, whatever computed it."""
    return "float32" if isinstance(ref.source, Inline) and ref.dtype == "float64" else ref.dtype


def _effective(a: TensorRef, b: TensorRef, found: PairFigures) -> tuple[tuple[str, str], tuple[str, ...]]:
    """The dtypes numbers were computed in: bf16 stored as fp32 is bf16. An integer says nothing beside a float."""
    dtypes, notes = [], []
    for which, ref, other, precision in zip("ab", (a, b), (b, a), found.precision, strict=True):
        shown = precision.dtype if ref.dtype == "float32" else None
        if shown is not None:
            notes.append(f"{which} is stored in {ref.dtype}, its numbers have the precision of {shown}")
        dtypes.append(_claimed(other) if is_integral(ref) and not is_integral(other) else shown or _claimed(ref))
    return (dtypes[0], dtypes[1]), tuple(notes)


def _is_floating(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


def _rounded(dtypes: tuple[str, str], rows: Rowwise) -> Rounded | None:
    """What is left of the difference of two resolutions after rounding both to the narrower.

    Each may be a cast of what neither holds (fp16 and bf16 of the same fp32 weights): what no number between rounds to
    both is left.
    """
    if not all(map(_is_floating, dtypes)) or dtypes[0] == dtypes[1]:
        return None
    known = [DTYPES[dtype] for dtype in dtypes if dtype in DTYPES]
    if family(dtypes[0]) == family(dtypes[1]):
        # Two layouts of eight bits: what the wider of the two leaves of a number is no matter of the narrower's digits.
        if len(known) < 2 or known[0].eps == known[1].eps or not all(one.eps for one in known):
            return None
        name = max(known, key=lambda one: one.eps or 0.0).name
    else:
        name = next(dtype for dtype in dtypes if family(dtype) == coarsest(*dtypes))
    narrow = pages.numpy_dtype(name)
    unequal, of_both = 0, False
    with np.errstate(over="ignore", invalid="ignore"):
        for chunk_a, chunk_b in rows.counted():
            x, y = (chunk.astype(narrow).astype(np.float64) for chunk in (chunk_a, chunk_b))
            left = (x != y) & ~(np.isnan(x) & np.isnan(y))
            if left.any() and len(known) == 2:
                a, b = (np.asarray(chunk[left], dtype=np.float64) for chunk in (chunk_a, chunk_b))
                apart = np.abs(b - a) > _half_a_step(known[0], a, b) + _half_a_step(known[1], b, a)
                of_both |= bool((~apart).any())
                unequal += int(np.count_nonzero(apart | ~np.isfinite(a - b)))
            else:
                unequal += int(np.count_nonzero(left))
    said = f"casts of the same numbers to {dtypes[0]} and {dtypes[1]}" if of_both else f"equal after rounding to {name}"
    return Rounded(name, unequal, said)


def _half_a_step(dtype: Dtype, at: F64, towards: F64) -> F64:
    """How far a number may lie from one of a dtype, on the side of another, and still be rounded to it."""
    least = dtype.smallest_normal or 0.0
    mantissa, exponent = np.frexp(np.maximum(np.abs(at), least))
    step = np.ldexp(dtype.eps or 0.0, exponent - 1)
    # Below a power of two the steps are half as wide.
    is_below = (mantissa == 0.5) & (np.abs(towards) < np.abs(at)) & (np.abs(at) > least)
    half: F64 = np.where(is_below, step / 4, step / 2)
    return half


def _by_samples(rows: Rowwise, counted: PairFigures) -> None:
    """Say which sample every row belongs to, where a row is a number or two and the sample is what has a norm."""
    samples = rows.samples() if counted.rows.width < limits.PATTERN_ELEMENTS else None
    if samples is not None and samples.size == counted.rows.d2.size:
        counted.rows.sample = samples


def _tokens_of_samples(rows: Rowwise, counted: PairFigures) -> None:
    """Look at the tokens of log probabilities whose rows are samples: their sums tell no token from another."""
    of_row = rows.samples()
    each_its_own = of_row is not None and np.array_equal(of_row, np.arange(counted.rows.d2.size))
    if counted.mismatched and counted.rows.width > 1 and each_its_own:
        sample.look(counted, rows.counted(), counted.rows.d2.size)


def _worst_sample(rows: Rowwise, counted: PairFigures) -> tuple[int, float] | None:
    """(sample, mean exp|d|) of the sample furthest off, among those with enough tokens to have a mean; None of none."""
    samples = rows.samples()
    if samples is None or samples.size != counted.rows.exp_abs.size or not samples.size:
        return None
    tokens = np.bincount(samples) * counted.rows.width
    mean = np.bincount(samples, counted.rows.exp_abs) / np.maximum(tokens, 1)
    asked = tokens >= limits.SAMPLE_TOKENS
    if not asked.any():
        return None
    mean[~asked] = -np.inf
    worst = int(mean.argmax())
    return worst, float(mean[worst])


def _shift(rows: Rowwise) -> str | None:
    """The one constant by which the positions of each sample are shifted, in words; None where it is not one."""
    shifts: dict[int, set[int]] = defaultdict(set)
    row = 0
    for chunk_a, chunk_b in rows.counted():
        for delta in (chunk_b.astype(np.int64) - chunk_a.astype(np.int64)).reshape(chunk_a.shape[0], -1):
            token = rows.token(row)
            shifts[token[0] if token else 0].update(int(value) for value in delta)
            row += 1
    if any(len(values) > 1 for values in shifts.values()):
        return None
    moved = [(sample, next(iter(values))) for sample, values in sorted(shifts.items()) if values != {0}]
    named = ", ".join(f"sample {sample} by {shift:+d}" for sample, shift in moved[:4])
    more = f" and {len(moved) - 4} more" if len(moved) > 4 else ""
    return f"shifted by a constant: {named}{more} (measured cost up to 2.1e-4 nats in fp32, .21 in bf16)"
