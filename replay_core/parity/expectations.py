"""The bands that a published parity guide calls expected, as data, and what this run measures beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from msgspec import Struct
from msgspec.structs import asdict

from replay_core.parity.correlation import Measures

if TYPE_CHECKING:
    from replay_core.documents.parity import BandEntry

#: The guide's own words for where its numbers come from.
SOURCE = "ROLL fork's critic parity guide: tests/critic_parity, all positions, padding included"


class Band(Struct, frozen=True):
    """What the guide expects of one kind of data. Correlations are unitless, nearly identical is a percentage."""

    data: str
    measure: str
    low: float
    high: float


BANDS = (
    Band("random tokens", "pearson", 0.95, 0.99),
    Band("random tokens", "spearman", 0.95, 0.99),
    Band("random tokens", "nearly_identical", 95.0, 99.0),
    Band("real text", "pearson", 0.65, 0.80),
    Band("real text", "spearman", 0.70, 0.85),
    Band("real text", "nearly_identical", 60.0, 80.0),
    Band("after training", "pearson", 0.60, 0.75),
    Band("after training", "spearman", 0.65, 0.80),
)

_ARTEFACT = "the band is met only because padding is counted: over the tokens that count the critics agree"
_BELOW = 'below the band where it counts: the guide\'s "architectural differences" do not explain this'
_ABOVE = "above the band: on the same weights the critics agree better than the guide expects"
_AS_EXPECTED = (
    "inside the band where it counts; with the same weights real Megatron-core and a DeepSpeed critic measure 1.000, "
    "so this is a difference to explain, not to expect"
)


def against(
    kind: str, masked: Measures, unmasked: Measures, after: Measures | None, whole: Measures | None
) -> list[BandEntry]:
    """Each band that is about this batch, with both figures. `after` and `whole` are those after training, if any."""
    data = "random tokens" if kind == "random" else "real text"
    rows = [_row(band, masked, unmasked) for band in BANDS if band.data == data]
    if after is not None and whole is not None:
        rows += [_row(band, after, whole) for band in BANDS if band.data == "after training"]
    return rows


def _row(band: Band, masked: Measures, unmasked: Measures) -> BandEntry:
    found, over_all = getattr(masked, band.measure), getattr(unmasked, band.measure)
    held = {"masked": found, "unmasked": over_all, "note": _note(band, found, over_all), "source": SOURCE}
    return cast("BandEntry", {**asdict(band), **held})


def _note(band: Band, found: float | None, over_all: float | None) -> str:
    if found is None:
        return "not defined here: a value does not vary"
    if found < band.low:
        return _BELOW
    if found > band.high:
        return _ARTEFACT if over_all is not None and band.low <= over_all <= band.high else _ABOVE
    return _AS_EXPECTED
