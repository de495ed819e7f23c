"""Pairs of which a side kept a digest and no values (records of level hash or stats): whether the bytes are equal is
all there is to say. How far they part, and whether that is noise, nobody can tell from them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replay_core.compare.judging.verdict import Verdict
from replay_core.compare.pairing.shapes import explain_shapes
from replay_core.compare.told import EQUAL_DIGESTS
from replay_core.dtypes import ITEMSIZE
from replay_core.errors import DumpError
from replay_core.measure.digests import digest, is_digest, shared_kind
from replay_core.measure.statistics import statistics
from replay_core.records import TensorRef, Unreadable

if TYPE_CHECKING:
    from replay_core.compare.judging.tensors import TensorVerdict

#: Why a pair is not compared: of equal bytes of other samples, too, no digest tells.
OTHER_ORDER = "the samples stand in another order, of which digests say nothing; without --digests values are read"
_SPARED = "equal digests; values were not read"
_BARE = "equal digests; values were not recorded on both sides"
#: What the recorder counts of values that are no numbers, and the extremes and moments it keeps of those that are.
_ODD, _MOMENTS = ("nan", "posinf", "neginf"), ("l2", "mean", "std", "min", "max")


def are_comparable(a: TensorRef, b: TensorRef) -> bool:
    """Whether a digest stands where values do not, and the other side has one too or the values to take it of."""
    return (
        not (a.is_readable and b.is_readable)
        and _kind(a) == _kind(b)
        and all(is_digest(ref.digest) or (ref.is_readable and ref.dtype in ITEMSIZE) for ref in (a, b))
        and shared_kind(a, b) is not None
    )


def why_not(a: TensorRef, b: TensorRef) -> str | None:
    """Why a pair that both recorded a digest of is not `are_comparable`; None where that is not the reason."""
    if any(ref.is_readable or not is_digest(ref.digest) for ref in (a, b)) or shared_kind(a, b) is not None:
        return None
    kinds = " and ".join(sorted({str(ref.digest).partition(":")[0] for ref in (a, b)}))
    return (
        f"a and b recorded digests of two kinds ({kinds}), and no values: record both with one version of rldbg, "
        "on one kind of device, and both with or without --whole or a black box"
    )


def are_equal(a: TensorRef, b: TensorRef) -> bool:
    """Whether two that `are_comparable` hold the same bytes, as far as digests tell; False where bytes are damaged."""
    try:
        return (_squeezed(a), a.dtype) == (_squeezed(b), b.dtype) and _is_one_digest(a, b)
    except DumpError:
        return False


def _is_one_digest(a: TensorRef, b: TensorRef) -> bool:
    kind = shared_kind(a, b)
    return digest(a, kind) == digest(b, kind)


def _kind(ref: TensorRef) -> str:
    return "tensor" if ref.dtype in ITEMSIZE else ref.dtype


def judge(row: TensorVerdict, a: TensorRef, b: TensorRef) -> None:
    """Fill in the verdict and the sentence of a pair that `are_comparable`.

    Raises:
        DumpError: the bytes of the side that has values cannot be read.
    """
    row.by_digest = True
    if _squeezed(a) != _squeezed(b):
        row.verdict, row.reason = Verdict.SHAPE, explain_shapes(a, b)
    elif a.dtype != b.dtype:
        row.verdict = Verdict.DIFF
        row.reason = f"dtype {a.dtype} against {b.dtype}, and values were not recorded on both sides to cast one"
    elif _is_one_digest(a, b):
        spared = isinstance(a.source, Unreadable) and a.source.why == EQUAL_DIGESTS
        # Of a hundred thousand pairs the sentence is one.
        row.verdict, row.reason = Verdict.SAME, _SPARED if spared else _BARE
        if nans := nans_of(a, b):
            row.reason += f"; {nans:,} of its values are NaN"
    else:
        odd, said = _statistics(a, b)
        row.verdict = Verdict.NAN if odd else Verdict.DIFF
        row.reason = "; ".join(["digests differ; values were not recorded", *said])


def nans_of(*equal: TensorRef) -> int:
    """How many values of tensors with one digest are NaN, as far as one of them says."""
    kept = [ref.source.stats or {} for ref in equal if isinstance(ref.source, Unreadable)]
    return max((one["nan"] for one in kept if isinstance(one.get("nan"), int)), default=0)


def _squeezed(ref: TensorRef) -> tuple[int, ...]:
    return tuple(length for length in ref.shape if length != 1)


def _statistics(a: TensorRef, b: TensorRef) -> tuple[bool, list[str]]:
    """Whether one side holds more NaN or infinities than the other, and what either says of its values."""
    kept = [ref.source.stats if isinstance(ref.source, Unreadable) else None for ref in (a, b)]
    if not any(kept):
        return False, []
    of_a, of_b = (
        recorded or (_taken(ref) if ref.is_readable else None) for recorded, ref in zip(kept, (a, b), strict=True)
    )
    if of_a is None or of_b is None:
        return False, [f"{which}: {_listed(one)}" for which, one in (("a", of_a), ("b", of_b)) if one]
    odd = [name for name in _ODD if of_a.get(name) != of_b.get(name)]
    apart = [name for name in (*odd, *_MOMENTS) if of_a.get(name) != of_b.get(name)]
    said = ", ".join(f"{name} {_number(of_a.get(name))} against {_number(of_b.get(name))}" for name in apart)
    return bool(odd), [said or "the statistics of both are equal"]


def _taken(ref: TensorRef) -> dict[str, Any]:
    """The statistics of a side that has values, called as the recorder calls them."""
    found = statistics(ref).to_mapping()
    return {**found, "posinf": found["pos_inf"], "neginf": found["neg_inf"]}


def _listed(stats: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_number(stats.get(name))}" for name in (*_ODD, *_MOMENTS))


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, (int, float)) else "none" if value is None else str(value)
