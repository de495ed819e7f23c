"""The table of a record's fields says what its least and greatest leave out."""

from __future__ import annotations

from tui_debugger import format as fmt


def test_infinities_stand_beside_the_count_of_nan() -> None:
    assert fmt.not_finite({"nan": 0, "pos_inf": 3, "neg_inf": 1}) == "0 +3 inf -1 inf"
    assert fmt.not_finite({"nan": 2, "pos_inf": 0, "neg_inf": 0}) == "2"
    assert fmt.not_finite({}) == ""
