"""What NexRL's own compare_debug_dumps.py reports, of every rank and micro-batch that there is: trajectories,
forward data, loss, importance-sampling loss, datums. Figures are over every element, padding included, as there.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from replay_core import pages
from replay_core.compare.correlation import pearson
from replay_core.compare.judging.tensors import TensorVerdict
from replay_core.compare.pairing.align import MicroBatchPair, Rowwise, ShapesDifferError
from replay_core.errors import DumpError
from replay_core.measure.statistics import as_reals
from replay_core.samples.batch import Batch

if TYPE_CHECKING:
    from replay_core.documents.comparison import (
        DatumsEntry,
        Moments,
        SamplePairing,
        SummaryBlock,
        SummaryEntry,
        SummaryField,
        TrajectoryEntry,
    )

#: The script's sections, and the fields each of them compares (canonical names).
SECTIONS: dict[str, tuple[str, ...]] = {
    "forward_data": ("policy_logprobs", "entropy", "response_mask"),
    "loss": ("loss", "pg_loss", "entropy_loss"),
    "is_loss_debug": ("policy_logprobs", "old_logprobs", "advantages", "is_ratio", "token_loss", "response_mask"),
}
TRAJECTORIES = ("trajectory", "prepared_trajectories")
_TRAJECTORY_FIELDS = ("input_ids", "loss_mask", "reward", "advantages")

#: The script's own notion of close: numpy's allclose with these, a number by the first alone.
ATOL, RTOL = 1e-5, 1e-4


class Summary(Struct):
    """Collects rows as they are judged."""

    #: (section, name) -> one entry per step, rank and micro-batch
    entries: dict[tuple[str, str], list[SummaryEntry]] = field(default_factory=lambda: defaultdict(list))
    trajectories: list[TrajectoryEntry] = field(default_factory=list)
    datums: list[DatumsEntry] = field(default_factory=list)
    _paired: set[tuple[int, int]] = field(default_factory=set)

    def add(self, row: TensorVerdict, micro_pair: MicroBatchPair) -> None:
        """Take a row that belongs into the report; others are passed over."""
        present = row.a or row.b
        if present is None or row.skipped is not None:
            return
        stage = present[0].key.stage
        if row.name in SECTIONS.get(stage, ()):
            self.entries[stage, row.name].append(_entry(row, micro_pair))
        elif stage in TRAJECTORIES:
            self._trajectories(row, micro_pair)
        elif stage == "datums" and row.name == "input_ids":
            self._datums(row, micro_pair)

    def _trajectories(self, row: TensorVerdict, micro_pair: MicroBatchPair) -> None:
        present = row.a or row.b
        assert present is not None
        if row.name not in _TRAJECTORY_FIELDS:
            return
        samples = _samples(row, micro_pair)
        self.trajectories.append(
            {
                "step": present[0].key.step,
                "stage": present[0].key.stage,
                "name": row.name,
                "verdict": row.verdict.value,
                "max_abs": None if row.figures is None else row.figures.max_abs,
                **samples,
            }
        )

    def _datums(self, row: TensorVerdict, micro_pair: MicroBatchPair) -> None:
        present = row.a or row.b
        assert present is not None
        lengths = [None if side is None else list(side[1].rows or ()) for side in (row.a, row.b)]
        self.datums.append(
            {
                "step": present[0].key.step,
                "verdict": row.verdict.value,
                **_samples(row, micro_pair),
                "tokens_a": None if lengths[0] is None else sum(lengths[0]),
                "tokens_b": None if lengths[1] is None else sum(lengths[1]),
            }
        )

    def to_mapping(self) -> SummaryBlock:
        """The report: per field its entries, and max, min and mean of their differences over ranks x micro-batches."""
        fields: list[SummaryField] = []
        for (section, name), entries in self.entries.items():
            known = [float(entry["max_abs"]) for entry in entries if entry["max_abs"] is not None]
            fields.append(
                {
                    "section": section,
                    "name": name,
                    "count": len(entries),
                    "max": max(known, default=None),
                    "min": min(known, default=None),
                    "mean": float(np.mean(known)) if known else None,
                    "entries": entries,
                }
            )
        fields.sort(key=lambda one: list(SECTIONS).index(one["section"]))
        return {"trajectories": self.trajectories, "fields": fields, "datums": self.datums}


def _samples(row: TensorVerdict, micro_pair: MicroBatchPair) -> SamplePairing:
    """How many samples are paired, and how many stand on one side."""
    both: tuple[Batch, Batch] | None = None
    if row.a is not None and row.b is not None:
        both = micro_pair.batches(row.a[1], row.b[1])
    if both is None:
        return {"paired": None, "only_in_a": None, "only_in_b": None}
    pairing = micro_pair.pairing(*both)
    return {
        "paired": int((pairing.to_a >= 0).sum()),
        "only_in_a": int((pairing.to_b < 0).sum()),
        "only_in_b": int((pairing.to_a < 0).sum()),
    }


def _entry(row: TensorVerdict, micro_pair: MicroBatchPair) -> SummaryEntry:
    present = row.a or row.b
    assert present is not None
    key = present[0].key
    entry: SummaryEntry = {
        "step": key.step,
        "rank": key.rank,
        "micro": key.micro,
        "verdict": row.verdict.value,
        "max_abs": None,
        "mean_abs": None,
        "a": None,
        "b": None,
        "pearson": None,
        "is_close": None,
    }
    values = _values(row, micro_pair)
    if values is None:
        return entry
    a, b = values
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.abs(b - a)
    finite = gap[np.isfinite(gap)]
    entry.update(
        {
            "max_abs": float(finite.max()) if finite.size else None,
            "mean_abs": float(finite.mean()) if finite.size else None,
            "a": _moments(a),
            "b": _moments(b),
            "pearson": pearson(a, b),
            "is_close": bool(gap.item() < ATOL) if a.size == 1 else bool(np.allclose(a, b, rtol=RTOL, atol=ATOL)),
        }
    )
    return entry


def _values(row: TensorVerdict, micro_pair: MicroBatchPair) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    if row.a is None or row.b is None:
        return None
    a, b = row.a[1], row.b[1]
    if a.is_text or b.is_text or not a.numel or not b.numel:
        return None
    try:
        if a.shape == b.shape and a.rows == b.rows and micro_pair.in_order(a, b):
            return as_reals(pages.array(a).reshape(-1), pages.array(b).reshape(-1))
        chunks = list(Rowwise(a, b, micro_pair, overlap=True).counted())
    except (ShapesDifferError, DumpError):
        return None
    return as_reals(*(np.concatenate([chunk[side].reshape(-1) for chunk in chunks]) for side in (0, 1)))


def _moments(values: NDArray[np.float64]) -> Moments:
    """mean, std (of a sample, n - 1, as torch.std), min, max."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return {"mean": None, "std": None, "min": None, "max": None}
    std = float(finite.std(ddof=1)) if finite.size > 1 else 0.0
    return {"mean": float(finite.mean()), "std": std, "min": float(finite.min()), "max": float(finite.max())}
