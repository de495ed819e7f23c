"""Whether samples were drawn from the policy that trains on them: a bigram, sampled and trained for four steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay_core.diagnose.finding import Finding
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of, why_skipped
from tests.replay_core.diagnose.bigram import Bigram

PROMPTS = [[5, 6], [7], [8, 9, 10], [11, 3]]


def _trained(folder: Path, *, stated: dict[str, Any] | None = None, at: float = 1.0, **drawn: Any) -> Path:
    """Four steps of REINFORCE on answers that hold token 4; `at`: the temperature of what is recorded."""
    lm = Bigram(3, 20, 1.0)
    with Recorder(folder, flags=stated or {}) as recorder:
        for step in range(4):
            rollout = lm.rollout(PROMPTS, each=10, limit=12, **drawn)
            logs_VV = lm.log_table(at)
            entropy_V = -(np.exp(logs_VV) * logs_VV).sum(1)
            reward_B = (rollout.ids_BS == 4).any(1).astype(np.float32)
            with recorder.step(step) as record:
                record("forward_data", rollout.tensors(
                    log_probs=rollout.logprobs(lm, at).astype(np.float32),
                    entropy=(entropy_V[rollout.ids_BS[:, :-1]] * rollout.response_BT).astype(np.float32)))  # fmt: skip
            lm.learn(rollout, rollout.on_tokens(reward_B - reward_B.mean()), lr=4.0)
    return folder


def told(path: Path) -> Finding | None:
    return of(look(path, "L33"), "L33")


@pytest.mark.parametrize(
    ("how", "word"),
    [({"temperature": 0.6}, "sharper"), ({"top_p": 0.7}, "sharper"), ({"top_k": 3}, "sharper"),
     ({"temperature": 1.5}, "flatter")],
    ids=str,
)  # fmt: skip
def test_settings_of_the_engine_that_nobody_states_are_told(tmp_path: Path, how: dict[str, Any], word: str) -> None:
    found = told(_trained(tmp_path / "d", **how))
    assert found is not None
    assert (found.severity, found.steps) == ("warning", (0, 1, 2, 3))
    assert word in found.claim


def test_samples_of_the_policy_itself_are_fine(tmp_path: Path) -> None:
    assert told(_trained(tmp_path / "one")) is None
    assert told(_trained(tmp_path / "half", temperature=0.5, at=0.5)) is None


@pytest.mark.parametrize("stated", [{"top_p": 0.7}, {"temperature": 0.6}], ids=str)
def test_what_is_stated_is_not_hidden(tmp_path: Path, stated: dict[str, Any]) -> None:
    diagnosis = look(_trained(tmp_path / "d", stated=stated, **stated), "L33")
    assert of(diagnosis, "L33") is None
    assert "stated" in why_skipped(diagnosis, "L33")
