"""A parameter's gradient, and a gradient's parameter: what the same step recorded of the same weight.

Weights and gradients are two records, so whoever looks at one asks for the other next: how large is the step
against what it changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from replay_core.inspection.subject import Subject
from replay_core.inspection.window import Place, window
from replay_core.measure.statistics import statistics
from replay_core.records import Record, TensorRef

if TYPE_CHECKING:
    from replay_core.documents.record import StatisticsEntry
    from replay_core.documents.tensor import CounterpartEntry

#: Stage and name prefix of either kind.
_PREFIXES = {"param": "param.", "gradient": "grad."}


def counterpart(
    subject: Subject, own: StatisticsEntry, start: Place, count: int, chunks: int
) -> CounterpartEntry | None:
    """The gradient beside a parameter or the parameter beside a gradient; None where the run holds none.

    Args:
        own: the statistics of the subject.
        start, count: the window of values that is shown of it; the counterpart's are from the same place.
        chunks: pieces that its statistics look at, as the subject's own do.
    """
    kind = subject.record.key.stage
    if kind not in _PREFIXES or not subject.has_numbers:
        return None
    wanted: Literal["gradient", "param"] = "gradient" if kind == "param" else "param"
    weight = _weight(subject.ref, kind)
    for other in _near(subject, wanted):
        for found in other.tensors():
            if _weight(found, wanted) == weight and found.shape == subject.ref.shape and found.is_readable:
                looked = statistics(found, chunks).to_mapping()
                gradient, param = (looked, own) if wanted == "gradient" else (own, looked)
                return {
                    "kind": wanted,
                    "key": other.key.to_mapping(),
                    "name": found.name,
                    "stats": looked,
                    "values": window(found, None, start, (), count)["a"] or [],
                    "ratio": _ratio(gradient, param),
                }
    return None


def _weight(ref: TensorRef, stage: str) -> str:
    return (ref.canonical or ref.name).removeprefix(_PREFIXES[stage])


def _near(subject: Subject, stage: str) -> list[Record]:
    """Records of the other stage that belong to the same step, rank and role, those of the same micro-batch first.

    A step's weights are often one record, its gradients one per micro-batch.
    """
    here = subject.record.key
    fitting = [
        other
        for other in subject.run.records
        if other.key.stage == stage
        and (other.key.step, other.key.role) == (here.step, here.role)
        and (other.key.rank == here.rank or None in (other.key.rank, here.rank))
    ]
    return sorted(fitting, key=lambda other: (other.key.micro != here.micro, other.key.order))


def _ratio(gradient: StatisticsEntry, param: StatisticsEntry) -> float | None:
    """The gradient's L2 over the parameter's; None where either has none, the parameter is 0, or one was sampled and
    the other not."""
    small, large = gradient["l2"], param["l2"]
    if gradient["numel"] != param["numel"] or small is None or not large:
        return None
    return float(small) / float(large)
