"""Values as columns: no line is wider than the sheet, and no id is rounded."""

from __future__ import annotations

from typing import Any, cast

import pytest
from rich.text import Text

from tui_debugger.widgets import tables


@pytest.fixture(autouse=True)
def unpainted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "paint", lambda _widget, _token: "")


def test_a_line_of_a_slice_with_the_other_sides_letter_fits_the_width() -> None:
    part: Any = {"start": [0, 0, 0], "shape": [1, 6, 4], "values": [0.123456] * 24, "left_out": 0}
    other: Any = {**part, "values": [1.123456] * 24}
    for width in range(40, 90):
        text = Text()
        tables.parts_table(cast(Any, None), text, part, other, width)
        assert max(map(len, text.plain.splitlines())) <= width


def test_long_ids_of_a_pair_are_shown_in_full() -> None:
    ids = [1_200_000_000_000_000_001, -1_119_021_634_053_362_427]
    window: Any = {"index": [[0], [1]], "a": ids, "b": [one + 100 for one in ids], "d": [100, 100]}
    text = Text()
    tables.window_table(cast(Any, None), text, window, [0], 76)
    assert max(map(len, text.plain.splitlines())) <= 76
    assert all(str(one) in text.plain and str(one + 100) in text.plain for one in ids)
