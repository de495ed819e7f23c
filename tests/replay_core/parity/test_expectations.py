"""What is said of a band holds of the band."""

from __future__ import annotations

import pytest

from replay_core.parity.expectations import Band, _note


@pytest.mark.parametrize(
    ("over_all", "says"),
    [(0.7, "only because padding"), (0.2, "above the band"), (0.9, "above the"), (None, "above the")],
)
def test_padding_meets_a_band_only_where_it_lies_inside(over_all: float | None, says: str) -> None:
    assert says in _note(Band("real text", "pearson", 0.65, 0.8), 0.999, over_all)
