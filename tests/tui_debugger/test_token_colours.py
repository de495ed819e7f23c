"""How strongly a token is coloured, and what the strongest stands for."""

from __future__ import annotations

import pytest

from replay_core.documents.parts import Number
from tui_debugger.token_colours import levels


@pytest.mark.parametrize(
    ("name", "values", "strength", "said"),
    [
        ("entropy", [0.0, 1.0, 4.0], [0, 1, 4], "4"),
        ("rollout_logprob", [-8.0, 0.0, None], [4, 0, None], "8 from 0"),
        ("delta_logprob", [-0.5, 0.25, "nan"], [4, 2, 4], "0.5 from 0"),
        ("ratio", [1.0, 0.5, 1.25], [0, 4, 2], "0.5 from 1"),
        ("weight_version", [7, 9, 8], [0, 4, 2], "the newest of 3"),
    ],
)
def test_a_number_counts_by_how_far_it_is_from_what_is_nothing(
    name: str, values: list[Number | None], strength: list[int | None], said: str
) -> None:
    assert levels({"name": name, "values": values}) == (strength, said)
