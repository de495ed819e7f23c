"""Padding that the attention mask counts, and rows that only look as if it did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import causes, look, of
from tests.replay_core.diagnose.bigram import PAD, Bigram

PROMPTS = [[1, 4, 5, 9], [1, 7], [1, 8, 6], [1, 9, 3]]


def _dump(folder: Path, mask: Any, *, prompts: list[list[int]] = PROMPTS, off: float = 0.2, limit: int = 9) -> Path:
    lm = Bigram(5)
    rollout = lm.rollout(prompts, each=4, limit=limit)
    old_BT = rollout.logprobs(lm) + off * np.random.default_rng(0).normal(size=rollout.response_BT.shape)
    with Recorder(folder).step(0) as record:
        record("trajectory", **rollout.tensors(
            rollout_log_probs=rollout.sampled_BT, old_log_probs=(old_BT * rollout.response_BT).astype(np.float32),
            attention_mask=mask(rollout)))  # fmt: skip
    return folder


def _ones(rollout: Any) -> Any:
    return np.ones_like(rollout.attention_BS)


@pytest.mark.parametrize(("off", "severity"), [(0.2, "error"), (0.0, "warning")])
def test_a_mask_of_ones_over_left_padding_is_told(off: float, severity: str, tmp_path: Path) -> None:
    found = look(_dump(tmp_path / "d", _ones, off=off))
    assert [one.id for one in causes(found)] == ["D34"]
    assert causes(found)[0].severity == severity
    assert f"the token {PAD}" in causes(found)[0].claim


def test_a_mask_that_leaves_padding_out_is_right(tmp_path: Path) -> None:
    assert of(look(_dump(tmp_path / "d", lambda rollout: rollout.attention_BS)), "D34") is None


def test_right_padding_may_be_attended_to(tmp_path: Path) -> None:
    """Nothing that counts sees it: prompts of one length have no other."""
    prompts = [[1, 4, 5], [1, 7, 3], [1, 8, 6], [1, 9, 3]]
    assert of(look(_dump(tmp_path / "d", _ones, prompts=prompts, off=0.0)), "D34") is None


def test_a_beginning_that_repeats_and_stands_elsewhere_is_no_padding(tmp_path: Path) -> None:
    """Prompts of one length that begin with runs of a word: it stands within responses, too."""
    prompts = [[5, 5, 5, 4], [5, 5, 4, 7], [5, 4, 3, 6], [5, 5, 9, 3]]
    assert of(look(_dump(tmp_path / "d", _ones, prompts=prompts, off=0.0)), "D34") is None
