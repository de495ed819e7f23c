"""Two single numbers have the figures, the row and the document that two tensors of one element have."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import asdict

from replay_core.measure.number import figures_of_numbers
from replay_core.measure.pair import figures
from replay_core.workbench import compare_dumps

NAN, INF = float("nan"), float("inf")
NUMBERS = (0.0, -0.0, 0.5, -0.5, 1.0, 1 / 3, 1e-12, 3e40, -7e-40, NAN, INF, -INF, 0, 1, -7, 2**40, True, False)


@pytest.mark.parametrize("limits", [None, (0.1, 0.0), (0.0, 0.5)])
def test_the_figures_are_those_of_arrays(limits: tuple[float, float] | None) -> None:
    for x, y in itertools.product(NUMBERS, NUMBERS):
        exact = type(x) is not float and type(y) is not float
        found = figures_of_numbers(x, y, exact=exact, limits=limits)
        measured = figures([(np.array([[x]]), np.array([[y]]))], exact=exact, limits=limits)
        measured.forget_rows()
        assert found is not None
        one, other = asdict(found), asdict(measured)
        for part in ("rows", "columns", "precision"):
            del one[part], other[part]
        assert _said(one) == _said(other), (x, y)


def _said(figures: dict[str, object]) -> str:
    """NaN equals no NaN, and the sign of a sum that is 0 says nothing."""
    return re.sub(r"-0\.0(?=[,)}\]])", "0.0", repr(figures))


def test_what_needs_an_array_is_left_to_it() -> None:
    assert figures_of_numbers(1e200, 1.0, exact=False) is None
    assert figures_of_numbers(2**60, 1, exact=True) is None


@pytest.mark.long
def test_a_document_of_logs_is_the_same_with_and_without_the_short_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [0.5, 0.500001, 1 / 3, NAN, INF, -INF, 0.0, 1e-12, 3, 4, 1e300, True]
    pairs = list(itertools.product(values, values))
    for name, which in (("a", 0), ("b", 1)):
        rows = ({"step": i, "loss": pair[which], "kl": 2 * pair[which]} for i, pair in enumerate(pairs))
        (tmp_path / f"{name}.metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    a, b = tmp_path / "a.metrics.jsonl", tmp_path / "b.metrics.jsonl"
    for options in ({}, {"atol": 1e-3}, {"exact": True}):
        short = dict(compare_dumps(a, b, **options))
        with monkeypatch.context() as patch:
            patch.setattr("replay_core.compare.judging.measuring._of_numbers", lambda *_: None)
            long = dict(compare_dumps(a, b, **options))
        for doc in (short, long):
            del doc["created"]
        assert short == long
