"""Every series of a run as the trends view draws it: JSON-ready, what stands out marked, the expected beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from replay_core.diagnose import expectations, trends
from replay_core.diagnose.signals import RunLog, Series, Signals

if TYPE_CHECKING:
    from replay_core.documents.diagnosis import ExpectedRow, SeriesEntry


def series_block(signals: Signals | None) -> list[SeriesEntry]:
    """One entry per run and signal: {signal, name, framework, formula, run, steps, values, marks, sparkline, expected,
    share}. `marks` are positions in `steps` and `values` that stand out (`trends.outliers`), non-finite values
    included; `expected` are rows of `expectations.seen`; `share` is a phase's share of the time that phases take.
    """
    block: list[SeriesEntry] = []
    for log in signals.logs if signals else ():
        rows, shares = expectations.seen(log), _phase_shares(log)
        for series in log.signals():
            expected = [cast("ExpectedRow", row) for row in rows if row["signal"] == series.name]
            block.append(_entry(series, log.paths[0], expected, shares.get(series.name)))
    return block


def _entry(series: Series, run: str, expected: list[ExpectedRow], share: float | None) -> SeriesEntry:
    return {
        "signal": series.signal,
        "name": series.name,
        "framework": series.framework,
        "formula": series.formula or None,
        "run": run,
        "steps": [point.step for point in series.points],
        "values": [*series.values],
        "marks": trends.outliers(series.values),
        "sparkline": trends.sparkline(series.values),
        "expected": expected,
        "share": share,
    }


def _phase_shares(log: RunLog) -> dict[str, float]:
    """Each phase's share of all the time that phases take, steady steps only."""
    total = {series.name: sum(series.finite[trends.WARM_UP :] or series.finite) for series in log.all("phase_seconds")}
    whole = sum(total.values())
    return {name: value / whole for name, value in total.items()} if whole > 0 else {}
