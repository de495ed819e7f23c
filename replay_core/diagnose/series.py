"""Every series of a run as the trends view draws it: JSON-ready, what stands out marked, the expected beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from msgspec import Struct

from replay_core.diagnose import trends
from replay_core.diagnose.signals import RunLog, Series, Signals

if TYPE_CHECKING:
    from replay_core.documents.diagnosis import ExpectedRow, SeriesEntry


def series_block(signals: Signals | None) -> list[SeriesEntry]:
    """One entry per run and signal: {signal, name, framework, formula, run, steps, values, marks, sparkline, expected,
    share}. `marks` are positions in `steps` and `values` that stand out (`trends.outliers`), non-finite values
    included; `expected` are rows of `seen`; `share` is a phase's share of the time that phases take.
    """
    block: list[SeriesEntry] = []
    for log in signals.logs if signals else ():
        rows, shares = seen(log), _phase_shares(log)
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


#: What the notes of a small GRPO trainer expect, for one GPU and group_size 8: an orientation. A smaller model is
#: faster, and no anomaly. docs/evidence.md#grpo-notes
_NOTES = "GRPO notes, rough estimates for batch_size 1, group_size 8, 16 micro-batches"
#: Micro-batches per iteration that the notes' ranges per iteration stand for.
MICROS = 16


class Expectation(Struct, frozen=True):
    """A range of a signal, per micro-batch or iteration; None is open. `correction`: where the notes are wrong."""

    what: str
    signal: str
    """The trainer's own name of the value in the log."""
    low: float | None
    high: float | None
    unit: str
    source: str = _NOTES
    correction: str | None = None


EXPECTED: tuple[Expectation, ...] = (
    Expectation("sampling, per micro-batch", "time.samples_generated", 0.5, 1.0, "s"),
    Expectation("scoring, per micro-batch", "time.samples_scored", 0.2, 0.5, "s"),
    Expectation("current policy forward, per micro-batch", "time.current_policy_forward", 0.5, 1.0, "s"),
    Expectation("reference policy forward, per micro-batch", "time.reference_policy_forward", 0.5, 1.0, "s"),
    Expectation("backward, per micro-batch", "time.backward", 0.5, 1.0, "s"),
    Expectation("iteration without compile", "time_ms", 32_000, 64_000, "ms"),
    Expectation("iteration with compile, after warm-up", "time_ms", 25_000, 50_000, "ms"),
    Expectation(
        "policy-gradient loss", "pg_loss", None, None, "", "GRPO notes: negative",
        "either sign is healthy: -mean(logp * A) of centred advantages (547c4bf: +0.103 and -0.262)",
    ),
    Expectation(
        "KL to the reference", "kl", None, None, "", "GRPO notes: 0.001 to 0.1",
        "k1 may be negative in a step (-0.008 in a healthy one), and is 0 before the first update",
    ),
    Expectation(
        "reward std within a group", "rewards_std", None, None, "", "GRPO notes: over 0.01",
        "0.0004 is fine: advantages are normalised; only an exact 0 leaves no gradient",
    ),
    Expectation(
        "loss", "loss", None, None, "", "GRPO notes: not 0",
        "0 with an on-policy ratio of 1 is normal while grad_norm is not 0; not 0 does not prove learning (KL alone); "
        "the displayed loss may be the last micro-batch's",
    ),
)  # fmt: skip


def seen(log: RunLog) -> list[dict[str, Any]]:
    """Expected beside seen, for every expectation the log has a value of: JSON-ready.

    `holds` is None where the notes' range is corrected, else whether the median stays under the range's end. Only
    the log of the notes' own trainer is held against it.
    """
    if not log.has("micro_loss") and not log.has("iter_ms"):
        return []
    micros = max((1 + point.micro for point in log.micros("micro_loss") if point.micro is not None), default=MICROS)
    by_name = {series.name: series for series in log.signals()}
    rows = []
    for expectation in EXPECTED:
        series = by_name.get(expectation.signal)
        if series is None or not series.finite:
            continue
        scale = micros / MICROS if expectation.signal == "time_ms" and micros else 1.0
        low = None if expectation.low is None else expectation.low * scale
        high = None if expectation.high is None else expectation.high * scale
        values = sorted(series.finite)
        middle = values[len(values) // 2]
        rows.append(
            {
                "what": expectation.what, "signal": expectation.signal, "expected": [low, high],
                "unit": expectation.unit,
                "seen": {"min": values[0], "median": middle, "max": values[-1]},
                "holds": None if high is None else middle <= high,
                "source": expectation.source, "correction": expectation.correction,
            }
        )  # fmt: skip
    return rows
