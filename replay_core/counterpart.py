"""A parameter's gradient, and a gradient's parameter: what the same step recorded of the same weight.

Weights and gradients are two records, so whoever looks at one asks for the other next: how large is the step
against what it changes.
"""

from __future__ import annotations

from typing import Any

from replay_core.inspection import Named, window
from replay_core.measure.statistics import statistics
from replay_core.records import Record, TensorRef

#: Stage and name prefix of either kind.
_PREFIXES = {"param": "param.", "gradient": "grad."}


def counterpart(
    named: Named, ref: TensorRef, own: dict[str, Any], start: tuple[int, ...], count: int, chunks: int
) -> dict[str, Any] | None:
    """The gradient beside a parameter or the parameter beside a gradient; None where the run holds none.

    Args:
        own: the statistics of `ref`.
        start, count: the window of values that is shown of `ref`; the counterpart's are from the same place.
        chunks: pieces that its statistics look at, as `ref`'s own do.

    Returns:
        `kind` gradient or param; `key` and `name`; `stats`; `values`, those of the window; `ratio`, the gradient's
        L2 over the parameter's, null where either has none, the parameter is 0, or one was sampled and the other not.
    """
    run, record, _ = named
    kind = record.key.stage
    if kind not in _PREFIXES or not ref.is_readable or ref.is_text:
        return None
    wanted = "gradient" if kind == "param" else "param"
    weight = _weight(ref, kind)
    for other in _near(run.records, record, wanted):
        for found in other.tensors():
            if _weight(found, wanted) == weight and found.shape == ref.shape and found.is_readable:
                looked = statistics(found, chunks).to_mapping()
                gradient, param = (looked, own) if wanted == "gradient" else (own, looked)
                return {
                    "kind": wanted,
                    "key": other.key.to_mapping(),
                    "name": found.name,
                    "stats": looked,
                    "values": window(found, None, start, (), count)["a"],
                    "ratio": _ratio(gradient, param),
                }
    return None


def _weight(ref: TensorRef, stage: str) -> str:
    return (ref.canonical or ref.name).removeprefix(_PREFIXES[stage])


def _near(records: list[Record], record: Record, stage: str) -> list[Record]:
    """Records of the other stage that belong to the same step, rank and role, those of the same micro-batch first."""
    here = record.key
    fitting = [
        other
        for other in records
        if other.key.stage == stage
        and (other.key.step, other.key.role) == (here.step, here.role)
        and (other.key.rank == here.rank or None in (other.key.rank, here.rank))
    ]
    return sorted(fitting, key=lambda other: (other.key.micro != here.micro, other.key.order))


def _ratio(gradient: dict[str, Any], param: dict[str, Any]) -> float | None:
    small, large = gradient.get("l2"), param.get("l2")
    if gradient.get("numel") != param.get("numel") or small is None or not large:
        return None
    return float(small / large)
