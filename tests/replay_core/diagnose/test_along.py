"""Advantages that change along a response where no critic makes them; each pattern, and beside it what is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.replay_core.diagnose.batches import healthy, masks, of, seen

Fields = dict[str, Any]


def spread(along: Callable[[Any], Any], gap: bool = False) -> Fields:
    """The healthy batch, each response's advantage times what stands at its counted tokens' places [0 ...]."""
    fields = healthy()
    mask_BT = masks(fields)
    if gap:
        mask_BT[:, 3] = False
        fields["response_mask"] = mask_BT.astype(fields["response_mask"].dtype)
    places_BT = np.arange(mask_BT.shape[1])[None] * np.ones((len(mask_BT), 1))
    fields["advantages"] = (fields["advantages"] * along(places_BT) * mask_BT).astype(np.float32)
    fields["returns"] = fields["advantages"].copy()
    return fields


@pytest.mark.parametrize(
    ("along", "gap", "severity", "words"),
    [
        (lambda at: at == 0, False, "error", "only the first token"),
        (lambda at: at < 3, True, "warning", "0 behind the first turn"),
        (lambda at: at > 0, False, "warning", "one token late against the mask"),
        (lambda at: 0.8**at, False, "warning", "fade along the response: each is 0.8 times"),
    ],
    ids=["first token", "first turn", "all but the first token", "fading"],
)
def test_an_advantage_that_does_not_reach_the_whole_response_is_named(
    along: Callable[[Any], Any], gap: bool, severity: str, words: str, tmp_path: Path
) -> None:
    found = of(seen(tmp_path, spread(along, gap), "D78"), "D78")
    assert found is not None
    assert found.severity == severity
    assert words in found.claim


@pytest.mark.parametrize(
    ("along", "gap"),
    [(np.ones_like, False), (np.ones_like, True), (lambda at: np.cos(at), False), (lambda at: 1.05**at, False)],
    ids=["one number", "one number and a tool", "rewards by token", "discounted from the end"],
)
def test_one_number_or_rewards_along_the_response_are_no_fault(
    along: Callable[[Any], Any], gap: bool, tmp_path: Path
) -> None:
    assert of(seen(tmp_path, spread(along, gap), "D78"), "D78") is None


def test_a_critics_advantages_are_not_looked_at(tmp_path: Path) -> None:
    fields = spread(lambda at: 0.8**at)
    fields["values"] = fields["advantages"] * 0.5
    assert of(seen(tmp_path, fields, "D78"), "D78") is None
