"""What a setup does on purpose is no alarm; the same is one where it contradicts what the run states."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_core.diagnose.finding import Diagnosis
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import causes, look, of
from tests.replay_core.diagnose.logs import diagnosed_path

STEPS, GROUPS = 4, np.repeat(np.arange(4), 4)

#: Rewards, group by group, to advantages.
Made = Callable[[Any], Any]


def recorded(
    folder: Path, made: Callable[[Any, int], Any], flags: dict[str, Any], *, binary: bool = False
) -> Diagnosis:
    """A run of four steps, 16 samples each, whose advantages are made so."""
    recorder = Recorder(folder, flags=flags)
    for step in range(STEPS):
        draw = np.random.default_rng(step)
        reward_B = draw.uniform(0, 1, 16).round(4)
        if binary:
            reward_B = (reward_B > np.array([0.2, 0.4, 0.6, 0.8])[GROUPS]).astype(float)
        ids_BS = draw.integers(10, 30, (16, 6))
        mask_BS = np.ones((16, 6), dtype=np.int64)
        mask_BS[:, :2] = 0
        advantage_BS = (made(reward_B, step)[:, None] * mask_BS).astype(np.float32)
        with recorder.step(step) as write:
            tensors = {
                "input_ids": ids_BS,
                "attention_mask": np.ones_like(mask_BS),
                "response_mask": mask_BS,
                "rewards": reward_B.astype(np.float32),
                "group_id": GROUPS,
                "advantages": advantage_BS[:, 1:],
            }
            write("trajectory", {name: torch.from_numpy(np.ascontiguousarray(each)) for name, each in tensors.items()})
    recorder.close()
    return look(folder)


def by_group(each: Made) -> Callable[[Any, int], Any]:
    return lambda r, _: np.concatenate([each(r[group == GROUPS]) for group in range(4)])


def grpo(epsilon: float = 1e-6) -> Callable[[Any, int], Any]:
    return by_group(lambda r: (r - r.mean()) / (r.std(ddof=1) + epsilon))


def ranks(r: Any) -> Any:
    order = np.argsort(np.argsort(r)).astype(float)
    return (order - order.mean()) / order.std(ddof=1)


def running(r: Any, step: int) -> Any:
    return (r - 0.3 - 0.02 * step) / (0.4 + 0.03 * step)


GRPO = {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": True}
MEANT: dict[str, tuple[Callable[[Any, int], Any], dict[str, Any], bool]] = {
    "the epsilon solved for": (grpo(1e-3), GRPO, False),
    "the epsilon solved for, binary": (grpo(5e-3), GRPO, True),
    "root of (group variance": (by_group(lambda r: (r - r.mean()) / np.sqrt(r.var(ddof=1) + 1e-3)), GRPO, False),
    "clipped to -1 and 1": (lambda r, at: np.clip(grpo()(r, at), -1, 1), GRPO, False),
    "clipped to -1 and 1, binary": (lambda r, at: np.clip(grpo()(r, at), -1, 1), GRPO, True),
    "clipped to -0.2 and 0.2": (lambda r, at: np.clip(grpo()(r, at), -0.2, 0.2), GRPO | {"advantage_clip": 0.2}, False),
    "clipped to -1 and 1, binary, of RLOO": (
        lambda r, at: np.clip(by_group(lambda each: 8 / 3 * (each - each.mean()))(r, at), -1, 1),
        {"adv_estimator": "rloo", "advantage_clip": 1.0},
        True,
    ),
    "rising function of the ranks": (by_group(ranks), GRPO, False),
    "rising function of": (lambda r, at: np.tanh(grpo()(r, at)), GRPO, False),
    "running ones": (running, {"adv_estimator": "reinforce"}, False),
    "the raw rewards": (lambda r, _: r, {"adv_estimator": "reinforce"}, False),
    "the raw rewards, unstated": (lambda r, _: r, {}, False),
    "advantages choose: 1 for the best": (by_group(lambda r: (r >= r.max()).astype(float)), {}, False),
    "advantages choose: 0.5 for the best, unknown word": (
        by_group(lambda r: (r >= np.sort(r)[-2]) * 0.5), {"adv_estimator": "raft"}, False
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", MEANT)
def test_what_is_meant_is_no_alarm(words: str, tmp_path: Path) -> None:
    made, flags, binary = MEANT[words]
    said = recorded(tmp_path / "d", made, flags, binary=binary)
    found = of(said, "D04")
    assert found is not None
    assert (found.severity, re.split(", binary|, unstated|, unknown", words)[0] in found.claim) == ("info", True), (
        found.claim
    )
    assert [(one.id, one.claim) for one in causes(said) if one.id in ("D04", "D73")] == []


WRONG: dict[str, tuple[Callable[[Any, int], Any], dict[str, Any], str]] = {
    "the raw rewards": (lambda r, _: r, GRPO, "error"),
    "raw rewards": (lambda r, _: r, {}, "info"),
    "no baseline": (by_group(lambda r: r / r.std(ddof=1)), GRPO, "error"),
    "there is no baseline": (by_group(lambda r: r / r.std(ddof=1)), {}, "warning"),
    "the group's best reward": (by_group(lambda r: r - r.max()), GRPO, "error"),
    "the group's variance": (by_group(lambda r: (r - r.mean()) / r.var(ddof=1)), GRPO, "error"),
    "none is negative": (lambda r, at: np.maximum(grpo()(r, at), 0), GRPO, "warning"),
    "most of them at a bound": (lambda r, at: np.clip(grpo()(r, at), -0.2, 0.2), GRPO, "warning"),
    "no variant": (lambda r, at: grpo()(r, at) * np.linspace(0.5, 1.5, 16), GRPO, "warning"),
    "0.1): the epsilon": (grpo(0.1), GRPO, "warning"),
    "wrong sign": (lambda r, at: -np.tanh(grpo()(r, at)), GRPO, "warning"),
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG)
def test_what_contradicts_a_setting_is_an_alarm(words: str, tmp_path: Path) -> None:
    made, flags, severity = WRONG[words]
    found = of(recorded(tmp_path / "d", made, flags), "D04")
    assert found is not None
    assert found.severity == severity, found.claim
    # Of what is squashed and turned, or cut off to next to nothing, no formula is known.
    if words not in ("wrong sign", "most of them at a bound"):
        assert words in found.claim


@pytest.mark.parametrize(("stated", "severity"), [("reinforce", "info"), ("grpo", "error"), ("", "info")])
def test_raw_rewards_in_a_log_are_held_against_the_stated_algorithm(stated: str, severity: str, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "d", flags={"adv_estimator": stated} if stated else {})
    for step in range(6):
        figures = {"critic/advantages/max": 1.0 - step / 9, "critic/score/max": 1.0 - step / 9,
                   "critic/advantages/min": 0.0, "critic/score/min": 0.0}  # fmt: skip
        with recorder.step(step) as write:
            write("training_metrics", {"metrics": figures})
    recorder.close()
    said = diagnosed_path(tmp_path / "d")
    found = of(said, "D04")
    assert found is not None
    assert found.severity == severity
    assert (of(said, "D73") is None) == (stated == "reinforce")


@pytest.mark.parametrize(("stated", "severity"), [("k1", "info"), ("", "warning")])
def test_a_kl_that_is_k1_is_worth_knowing_where_it_is_stated(stated: str, severity: str, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "d", flags={"kl_type": stated} if stated else {})
    for step in range(6):
        with recorder.step(step) as write:
            write("training_metrics", {"metrics": {"actor/kl_loss": 0.01 * (-1) ** step}})
    recorder.close()
    found = of(diagnosed_path(tmp_path / "d"), "D29")
    assert found is not None
    assert found.severity == severity


def test_one_short_micro_batch_of_many_steps_is_chance(tmp_path: Path) -> None:
    assert of(_micros(tmp_path / "one", short_steps=1), "D28").severity == "info"  # type: ignore[union-attr]
    found = of(_micros(tmp_path / "all", short_steps=4), "D28")
    assert found is not None
    assert found.severity == "warning"
    assert "mean over each micro-batch's own tokens" in found.claim


def _micros(folder: Path, short_steps: int) -> Diagnosis:
    """Four steps of two micro-batches of one update, each a mean over its own tokens."""
    recorder = Recorder(folder)
    for step in range(4):
        draw = np.random.default_rng(step)
        with recorder.step(step) as write:
            for micro in range(2):
                length = 2 if micro == 0 and step < short_steps else 9
                ids_BS = draw.integers(10, 30, (4, 12))
                mask_BS = np.zeros((4, 12), dtype=np.int64)
                mask_BS[:, 2 : 2 + length] = 1
                a_B = draw.normal(0, 1, 4)
                fields = {"input_ids": ids_BS, "attention_mask": np.ones_like(mask_BS), "response_mask": mask_BS,
                          "advantages": (a_B[:, None] * mask_BS[:, 1:]).astype(np.float32)}  # fmt: skip
                tensors = {name: torch.from_numpy(np.ascontiguousarray(each)) for name, each in fields.items()}
                write("forward_data", tensors, micro=micro)
                write("loss", pg_loss=torch.tensor(float(-a_B.mean())), micro=micro)
    recorder.close()
    return look(folder)
