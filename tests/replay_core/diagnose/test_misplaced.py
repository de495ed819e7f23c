"""Log-probabilities gathered from another place's logits, or at another place's token, told by tokens that repeat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of
from tests.replay_core.diagnose.bigram import Bigram

PROMPTS = [[3, 4, 5], [6, 7], [5], [7, 3, 4]]


def _gathered(lm: Bigram, ids_BS: Any, logits: int, token: int) -> Any:
    """log p of tokens `token` places on, by the logits `logits` places on [B, T]."""
    width = ids_BS.shape[1]
    places = np.arange(1, width)
    last_BT = ids_BS[:, np.clip(places - 1 + logits, 0, width - 1)]
    taken_BT = ids_BS[:, np.clip(places + token, 0, width - 1)]
    return lm.log_table()[last_BT, taken_BT]


def _run(folder: Path, made: Any, steps: int = 3) -> Path:
    recorder = Recorder(folder)
    for step in range(steps):
        lm = Bigram(step + 1, vocab=8)
        rollout = lm.rollout(PROMPTS, each=6, limit=14)
        old_BT = (made(lm, rollout) * rollout.response_BT).astype(np.float32)
        with recorder.step(step) as record:
            record("trajectory", **rollout.tensors(rollout_log_probs=rollout.sampled_BT, old_log_probs=old_BT))
    recorder.close()
    return folder


@pytest.mark.parametrize(
    ("logits", "token", "words"),
    [
        (1, 0, "from the logits one place too late"),
        (-1, 0, "from the logits one place too early"),
        (-2, 0, "from the logits 2 places too early"),
        (0, -1, "the token one place before"),
        (0, 2, "the token 2 places further on"),
    ],
)
def test_what_is_gathered_elsewhere_is_told_by_tokens_that_repeat(
    logits: int, token: int, words: str, tmp_path: Path
) -> None:
    found = of(look(_run(tmp_path / "d", lambda lm, seen: _gathered(lm, seen.ids_BS, logits, token)), "D09"), "D09")
    assert found is not None
    assert words in found.claim


@pytest.mark.parametrize("other", ["noise", "another model", "nothing"])
def test_what_differs_otherwise_is_gathered_in_its_place(other: str, tmp_path: Path) -> None:
    def made(lm: Bigram, rollout: Any) -> Any:
        if other == "another model":
            return rollout.logprobs(Bigram(99, vocab=8))
        off = 0.4 if other == "noise" else 0.0
        return rollout.logprobs(lm) + off * np.random.default_rng(0).normal(size=rollout.response_BT.shape)

    found = of(look(_run(tmp_path / "d", made), "D09"), "D09")
    assert (found is None) == (other == "nothing")
    assert found is None or "gathers" not in found.claim
