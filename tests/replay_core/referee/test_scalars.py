"""A loss or KL is ruled in what the log-probabilities' noise leaves of it, where its formula is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_core.dumps import open_run
from replay_core.recorder import Recorder
from replay_core.referee.recorded import Recorded, ruled_first
from replay_core.referee.ruled import RuledScalar
from replay_core.referee.scalars import ruled_scalars

GENERATOR = np.random.default_rng(0)
OLD = GENERATOR.normal(-2, 1, (4, 9))
TRUTH = OLD + GENERATOR.normal(0, 1e-4, (4, 9))
NOISE = 0.01


def _ruled(folder: Path, logprobs: Any, **numbers: float) -> dict[str, RuledScalar]:
    mask = np.ones((4, 10), np.int64)
    fields = {"input_ids": torch.arange(1, 41).reshape(4, 10), "attention_mask": torch.from_numpy(mask),
              "response_mask": torch.from_numpy(mask), "old_log_probs": torch.from_numpy(OLD).float(),
              "log_probs": torch.from_numpy(logprobs).float(), **numbers}  # fmt: skip
    with Recorder(folder) as recorder, recorder.step(0) as step:
        step("forward_data", fields, micro=0)
    run = open_run(folder)
    recorded = Recorded(run, *ruled_first(run.records))
    given = (TRUTH, np.full_like(TRUTH, NOISE), logprobs)
    return {one.name: one for one in ruled_scalars(recorded, *(torch.from_numpy(one) for one in given))}


def test_a_kl_that_cancels_to_almost_nothing_is_noise_by_what_its_tokens_have(tmp_path: Path):
    logprobs = TRUTH + GENERATOR.normal(0, NOISE, TRUTH.shape)
    said = float((OLD - logprobs).mean())
    found = _ruled(tmp_path / "dump", logprobs, ppo_kl=said)["ppo_kl"]
    assert found.ruling == "NOISE"
    assert found.floor == pytest.approx(NOISE / TRUTH.size**0.5, rel=1e-3)
    assert abs(found.recorded - found.truth) > 3 * abs(found.truth), "no limit on its relative error could say so"


def test_every_token_off_one_way_by_little_more_than_its_noise_is_none(tmp_path: Path):
    logprobs = TRUTH + 1.2 * NOISE
    found = _ruled(tmp_path / "dump", logprobs, ppo_kl=float((OLD - logprobs).mean()))["ppo_kl"]
    assert found.ruling == "SUSPECT"
    assert abs(found.recorded - found.truth) / found.floor == pytest.approx(1.2 * TRUTH.size**0.5, rel=0.02)


def test_a_number_of_another_formula_is_not_ruled(tmp_path: Path):
    assert _ruled(tmp_path / "dump", TRUTH, ppo_kl=0.5, approx_kl=0.1) == {}
