"""Documents written piece by piece are the text that they are at once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, overload

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay_core.export.written import compact, pieces

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_DOCUMENTS = st.dictionaries(st.text(), _VALUES, max_size=5)


class Rows(Sequence[Any]):
    """Rows that are no list, as those of a large comparison."""

    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)


@given(_DOCUMENTS, st.lists(_VALUES, max_size=4))
def test_both_forms_are_what_json_makes_of_the_whole(document: dict[str, Any], rows: list[Any]) -> None:
    whole = {**document, "tensors": rows}
    by_row = {**document, "tensors": Rows(rows)}
    assert "".join(compact(by_row)) == json.dumps(whole, allow_nan=False)
    assert "".join(pieces(by_row)) == json.dumps(whole, allow_nan=False, indent=1)
    assert "".join(compact(document)) == json.dumps(document, allow_nan=False)


def test_a_number_that_json_has_no_word_for_is_refused_within_a_row_too() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        "".join(compact({"tensors": [{"max": float("nan")}]}))
