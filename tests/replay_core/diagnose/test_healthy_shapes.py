"""Runs that look odd and are right: older samples by design, runs that go on, old log-probabilities of the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay_core.diagnose.algorithm import Algorithm
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Diagnosis
from replay_core.diagnose.rules.staleness import versions
from replay_core.dumps import open_run
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import causes, grpo, look, of
from tests.replay_core.diagnose.bigram import Bigram, Rollout

pytestmark = pytest.mark.long  # they train, or record whole runs

PROMPTS = [[3, 4, 5], [6, 7], [8], [9, 3, 4]]
#: Up in the table by so much for each unit of advantage and token.
RATE = 25.0


def _trained(
    folder: Path, steps: int, lag: int | None, *, first: int = 0, before: int = 0, versions: bool = False,
    old_of_engine: bool = False, with_reference: bool = False,
) -> Diagnosis:  # fmt: skip
    """A run whose samples are `lag` updates old (None: of the first weights), after `before` updates unrecorded."""
    lm, draw = Bigram(3), np.random.default_rng(1)
    start = Bigram(3)
    weights = [lm.table_VV.copy()]
    recorder = Recorder(folder, flags={"algorithm": "grpo", "kl_loss_coef": 0.01})
    for at in range(before + steps):
        engine = Bigram(100 + at)
        age = 0 if lag is None else max(0, len(weights) - 1 - lag)
        engine.table_VV = weights[age]
        rollout = engine.rollout([[3 + at % 11, *prompt] for prompt in PROMPTS], each=6)
        rewards_B = (rollout.ids_BS == 5).sum(1) + 0.01 * draw.normal(size=len(rollout.ids_BS))
        advantages_BT = rollout.on_tokens(grpo(rewards_B, rollout.group_B))
        if at >= before:
            named: dict[str, Any] = {"weight_version": age} if versions else {}
            with recorder.step(first + at - before) as record:
                record(
                    "trajectory", **rollout.tensors(rollout_log_probs=rollout.sampled_BT, rewards=rewards_B, **named)
                )
                old_BT = rollout.sampled_BT if old_of_engine else rollout.logprobs(lm).astype(np.float32)
                record("old_log_probs", **rollout.tensors(old_log_probs=old_BT))
                if with_reference:
                    record("ref_log_probs", **rollout.tensors(ref_log_probs=rollout.logprobs(start).astype(np.float32)))
                record("forward_data", micro=0, epoch=0, minibatch=0, **rollout.tensors(
                    log_probs=rollout.logprobs(lm).astype(np.float32), advantages=advantages_BT))  # fmt: skip
        lm.learn(rollout, advantages_BT, RATE)
        weights.append(lm.table_VV.copy())
    recorder.close()
    return look(folder)


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_samples_of_a_fixed_age_are_told_of_nothing_wrong(lag: int, tmp_path: Path) -> None:
    said = _trained(tmp_path / "d", 12, lag)
    assert [one.id for one in causes(said)] == []


def test_an_engine_that_is_never_updated_is_told_from_one_that_samples_late(tmp_path: Path) -> None:
    long, short = _trained(tmp_path / "long", 14, None), _trained(tmp_path / "short", 6, None)
    assert (found := of(long, "D12")) is not None
    assert found.severity == "error"
    assert causes(long)[0].id == "D12"
    assert (found := of(short, "D12")) is not None
    assert found.severity == "warning"
    assert "until they are as old" in found.cause
    assert not [one for one in short.findings if one.severity == "error"]


def test_old_log_probabilities_that_are_the_engines_hold_its_distance(tmp_path: Path) -> None:
    found = of(_trained(tmp_path / "d", 6, 2, old_of_engine=True, versions=True), "D14")
    assert found is not None
    assert found.severity == "info"
    assert "the engine's own" in found.claim


@pytest.mark.parametrize(("before", "severity"), [(3, "info"), (0, None)])
def test_a_run_that_goes_on_has_left_its_reference(before: int, severity: str | None, tmp_path: Path) -> None:
    found = of(_trained(tmp_path / "d", 3, 0, before=before, versions=True, with_reference=True), "D15")
    assert (None if found is None else found.severity) == severity


def test_one_version_for_a_whole_record_is_every_samples(tmp_path: Path) -> None:
    _trained(tmp_path / "d", 4, 2, versions=True)
    told = [versions(batch) for batch in Case(open_run(tmp_path / "d")).batches()]
    assert [set(high_B.tolist()) for _, high_B in filter(None, told)] == [{0.0}, {0.0}, {0.0}, {1.0}]


@pytest.mark.parametrize(
    ("stated", "used", "same"),
    [
        ({"clip_range": 0.2}, (0.2, 0.28), True),
        ({"clip_range": 0.2, "clip_range_high": 0.28}, (0.2, 0.28), True),
        ({"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}, (0.2, 0.28), False),
        ({"clip_range": 0.2}, (0.1, 0.2), False),
    ],
)
def test_a_range_is_the_stated_one_as_far_as_it_is_stated(
    stated: dict[str, float], used: tuple[float, float], same: bool
) -> None:
    assert Algorithm(stated).states_clip(*used) == same


@pytest.mark.parametrize(("algorithm", "found"), [("reinforce++", False), ("grpo", True)])
def test_one_response_to_each_prompt_is_how_reinforce_runs(algorithm: str, found: bool, tmp_path: Path) -> None:
    lm, draw = Bigram(3), np.random.default_rng(2)
    prompts = [[3, 4], [5], [6, 7], [3, 4], [8], [9, 3], [6, 6], [4, 4, 5]]
    with Recorder(tmp_path / "d", flags={"algorithm": algorithm}).step(0) as record:
        rollout: Rollout = lm.rollout(prompts, each=1)
        rewards_B = draw.normal(size=8)
        record("trajectory", **rollout.tensors(
            rollout_log_probs=rollout.sampled_BT, rewards=rewards_B,
            advantages=rollout.on_tokens((rewards_B - rewards_B.mean()) / rewards_B.std())))  # fmt: skip
    assert (of(look(tmp_path / "d"), "D05") is not None) == found
