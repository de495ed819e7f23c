"""Prompts that lost their beginning: cut from the left to a limit, before an engine answers them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from replay_core.diagnose.finding import Finding
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of
from tests.replay_core.diagnose.bigram import Bigram

BOS = 1
ASKED = [[4, 5], [6, 7], [8], [9, 3], [10, 11, 12], [13, 4, 5, 6], [7, 8, 9, 10], [11, 12, 13], [5, 3, 4, 9, 8]]


def _told(folder: Path, cut: Any, *, begins: list[int] | None = None, **stated: Any) -> Finding | None:
    lm = Bigram(2)
    with Recorder(folder, flags=stated) as recorder:
        for step in range(3):
            prompts = [cut([*([BOS] if begins is None else begins), *one]) for one in ASKED[3 * step : 3 * step + 3]]
            with recorder.step(step) as record:
                record("trajectory", **lm.rollout(prompts, each=3).tensors())
    return of(look(folder, "L28"), "L28")


@pytest.mark.parametrize(("stated", "severity"), [({"max_prompt_length": 3}, "error"), ({}, "warning"),
                                                  ({"max_prompt_length": 9}, "warning")], ids=str)  # fmt: skip
def test_prompts_without_their_beginning_are_all_of_the_largest_length(
    stated: dict[str, Any], severity: str, tmp_path: Path
) -> None:
    # Four lie below the limit: [BOS, 8] and three that the limit leaves as they are.
    short = lambda one: one[-4:] if len(one) > 4 else one  # noqa: E731
    found = _told(tmp_path / "d", short, **(stated and {"max_prompt_length": stated["max_prompt_length"] + 1}))
    assert found is not None
    assert found.severity == severity
    assert "cut from the left to 4 tokens" in found.claim


def test_whole_prompts_and_those_cut_from_the_right_begin_alike(tmp_path: Path) -> None:
    assert _told(tmp_path / "whole", lambda one: one) is None
    assert _told(tmp_path / "right", lambda one: one[:4]) is None


def test_prompts_that_have_no_common_beginning_tell_nothing(tmp_path: Path) -> None:
    assert _told(tmp_path / "d", lambda one: one[-3:], begins=[]) is None
