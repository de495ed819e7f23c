"""Runs that a known algorithm makes and the dump states little of: worth knowing; and what contradicts itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay_core.diagnose import surrogates
from replay_core.diagnose.algorithm import Algorithm
from replay_core.diagnose.finding import Diagnosis
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import causes, healthy, look, masks, of, seen

Changed = Callable[[dict[str, Any], int], None]


def run(
    folder: Path, change: Changed, steps: range, *rules: str, flags: dict[str, Any] | None = None, **fields: Any
) -> Diagnosis:
    """The genuine batch in each of these steps, each changed."""
    recorder = Recorder(folder, flags=flags or {})
    for step in steps:
        batch = {name: value for name, value in healthy().items() if name != "uid"}
        change(batch, step)
        with recorder.step(step) as write:
            write("trajectory", **batch, **{name: value(step) for name, value in fields.items()})
    recorder.close()
    return look(folder, *rules)


def apart(batch: dict[str, Any], by: float, seed: int) -> None:
    """Engine and trainer so far apart, evenly."""
    noise = np.random.default_rng(seed).normal(0, by / 0.8, batch["old_log_probs"].shape)
    batch["rollout_log_probs"] = (batch["old_log_probs"] + noise * masks(batch)).astype(np.float32)


@pytest.mark.parametrize("times", [0.0, 1.0], ids=["as it is", "times the ratio"])
def test_an_unbiased_k3_is_one_of_the_estimators(times: float, tmp_path: Path) -> None:
    fields = healthy()
    draw = np.random.default_rng(3)
    policy = fields["old_log_probs"] + draw.normal(0, 0.1, fields["old_log_probs"].shape) * masks(fields)
    fields["log_probs"] = policy.astype(np.float32)
    moved = fields["ref_log_prob"].astype(np.float64) - fields["log_probs"]
    ratio = np.exp(times * (fields["log_probs"].astype(np.float64) - fields["old_log_probs"]))
    fields["kl"] = ((np.expm1(moved) - moved) * ratio * masks(fields)).astype(np.float32)
    assert of(seen(tmp_path, fields, "D29"), "D29") is None
    fields["kl"] = 0.3 * np.abs(fields["old_log_probs"]) * masks(fields)
    other = of(seen(tmp_path, fields, "D29"), "D29")
    assert other is not None
    assert other.severity == "info"


@pytest.mark.parametrize(("grows", "severity"), [(False, "info"), (True, "warning")])
def test_versions_that_stand_while_weights_do_not(grows: bool, severity: str, tmp_path: Path) -> None:
    def older(batch: dict[str, Any], step: int) -> None:
        apart(batch, 0.0 if not step else 0.004 * step if grows else 0.04, step)

    found = of(
        run(
            tmp_path / "d", older, range(0, 40, 4), weight_version=lambda step: np.full(16, min(step, 12) - (step > 0))
        ),
        "D31",
    )
    assert found is not None
    assert found.severity == severity


@pytest.mark.parametrize(("first", "by", "severity"), [(0, 0.15, "error"), (6, 0.15, "warning"), (500, 2.0, "error")])
def test_weights_that_may_be_old_are_no_contradiction(first: int, by: float, severity: str, tmp_path: Path) -> None:
    steps = range(first, first + 5)
    found = of(run(tmp_path / "d", lambda batch, step: apart(batch, by, step), steps, "D09"), "D09")
    assert found is not None
    assert found.severity == severity


def test_a_forward_that_is_wrong_is_so_whatever_weights_it_has(tmp_path: Path) -> None:
    def dropped(batch: dict[str, Any], step: int) -> None:
        apart(batch, 0.3, step)
        noise = np.random.default_rng(step + 50).normal(0, 0.3, batch["old_log_probs"].shape)
        batch["log_probs"] = (batch["old_log_probs"] + noise * masks(batch)).astype(np.float32)

    found = of(run(tmp_path / "d", dropped, range(6, 10), "D09"), "D09")
    assert found is not None
    assert (found.severity, "two forwards of the trainer" in found.claim) == ("error", True), found.claim


@pytest.mark.parametrize(("by", "severity"), [(0.4, "warning"), (6.0, "error")], ids=["a hole", "another policy"])
def test_one_row_before_any_update(by: float, severity: str, tmp_path: Path) -> None:
    def one(batch: dict[str, Any], step: int) -> None:
        batch["log_probs"] = batch["old_log_probs"].copy()
        batch["log_probs"][0] -= by * masks(batch)[0]

    found = of(run(tmp_path / "d", one, range(1), "D14"), "D14")
    assert found is not None
    assert found.severity == severity


@pytest.mark.parametrize(("spared", "told"), [(0, True), (5, False)], ids=["the first", "another"])
def test_packs_whose_first_sample_is_short_leak_in_every_step(spared: int, told: bool, tmp_path: Path) -> None:
    def leaks(batch: dict[str, Any], step: int) -> None:
        batch["response_mask"][0, 3:] = 0
        apart(batch, 0.5, step)
        batch["rollout_log_probs"][spared] = batch["old_log_probs"][spared]

    found = of(run(tmp_path / "d", leaks, range(4), "D16"), "D16")
    assert (found is not None) == told
    if found is not None:
        assert (found.severity, found.steps) == ("error", (0, 1, 2, 3))


def test_one_response_for_each_prompt_needs_no_baseline_where_none_is_stated(tmp_path: Path) -> None:
    def alone(batch: dict[str, Any], step: int) -> None:
        batch["prompts"] = np.arange(batch["prompts"].size).reshape(batch["prompts"].shape) + 5
        batch["input_ids"][:, : batch["prompts"].shape[1]] = batch["prompts"]
        batch["advantages"] = batch["token_level_scores"].sum(1)[:, None] * masks(batch)

    def told(folder: str, flags: dict[str, Any]) -> str:
        ids = lambda step: np.arange(16)  # noqa: E731
        found = of(run(tmp_path / folder, alone, range(2), "D05", flags=flags, group_id=ids), "D05")
        return "" if found is None else found.severity

    assert (told("none", {}), told("grpo", {"adv_estimator": "grpo"})) == ("info", "error")
    assert causes(look(tmp_path / "none", "D05")) == []


@pytest.mark.parametrize(("mistake", "stated"), [
    (surrogates.SUMMED, {"adv_estimator": "gspo"}), (surrogates._UP, {"adv_estimator": "grpo"}),
    *((one, {"adv_estimator": name}) for one in (surrogates._UP, surrogates._REWARD)
      for name in ("gae", "remax", "reinforce_plus_plus")),
    (surrogates._ABOVE_ALONE, {"clip_ratio": 0.2}), (surrogates._OF_ENGINE, {"bypass_mode": False}),
])  # fmt: skip
def test_what_some_algorithm_makes_is_wrong_where_another_is_stated(mistake: str, stated: dict[str, Any]) -> None:
    one = surrogates.Surrogate(np.zeros(1), mistake=mistake)
    assert one.severity(Algorithm({})) == "info"
    assert one.severity(Algorithm(stated)) == "error"
    assert surrogates.Surrogate(np.zeros(1), mistake=surrogates._SIGN).severity(Algorithm({})) == "error"


@pytest.mark.parametrize(("more", "severity"), [
    ({}, "warning"), ({"use_rollout_logprobs": True}, "info"), ({"bypass_mode": True}, "info"),
    ({"max_staleness": 2}, "info"),
])  # fmt: skip
def test_a_ratio_to_the_engine_is_worth_a_look_where_an_algorithm_is_stated_and_it_is_not(
    more: dict[str, Any], severity: str
) -> None:
    one = surrogates.Surrogate(np.zeros(1), mistake=surrogates._OF_ENGINE)
    assert one.severity(Algorithm({"adv_estimator": "grpo", **more})) == severity


@pytest.mark.parametrize(("stated", "severity"), [({}, "info"), ({"adv_estimator": "rloo"}, "error")])
def test_rewards_for_advantages_need_no_baseline_where_none_is_stated(
    stated: dict[str, Any], severity: str, tmp_path: Path
) -> None:
    def signs(batch: dict[str, Any], step: int) -> None:
        draw = np.random.default_rng(step)
        batch["advantages"] = (draw.choice([-1.0, 1.0, 1.0], 16)[:, None] * masks(batch)).astype(np.float32)
        batch.pop("token_level_scores")
        batch.pop("token_level_rewards", None)

    found = of(
        run(tmp_path / "d", signs, range(3), "D93", flags=stated, group_id=lambda step: np.arange(16) // 4), "D93"
    )
    assert found is not None
    assert found.severity == severity, found.claim


@pytest.mark.parametrize(
    ("stated", "severity"), [({"top_p": 0.9}, "info"), ({"top_p": 1.0, "top_k": -1}, "error"), ({}, "warning")]
)
def test_an_engine_may_say_what_it_sampled_from(stated: dict[str, Any], severity: str, tmp_path: Path) -> None:
    def kept(batch: dict[str, Any], step: int) -> None:
        share = np.random.default_rng(step).uniform(0.8, 0.97, batch["old_log_probs"].shape)
        batch["rollout_log_probs"] = ((batch["old_log_probs"] - np.log(share)) * masks(batch)).astype(np.float32)

    found = of(run(tmp_path / "d", kept, range(2), "D11", flags=stated), "D11")
    assert found is not None
    assert found.severity == severity


@pytest.mark.parametrize(("first", "by", "severity"), [(0, 1.15, "error"), (6, 1.15, "warning"), (6, 1.5, "error")])
def test_older_samples_look_as_if_they_were_at_another_temperature(
    first: int, by: float, severity: str, tmp_path: Path
) -> None:
    def colder(batch: dict[str, Any], step: int) -> None:
        noise = np.random.default_rng(step).normal(0, 0.05, batch["old_log_probs"].shape)
        batch["rollout_log_probs"] = ((by * batch["old_log_probs"] + 0.3 + noise) * masks(batch)).astype(np.float32)
        batch["input_ids"] = np.arange(batch["input_ids"].size).reshape(batch["input_ids"].shape) + 5

    found = of(run(tmp_path / "d", colder, range(first, first + 2), "D10"), "D10")
    assert found is not None
    assert found.severity == severity


@pytest.mark.parametrize(("rows", "tokens", "advantage", "severity"),
                         [([0, 1, 2, 3], 24, 1.0, ""), ([0, 1, 2, 3], 24, -1.0, "warning"),
                          ([0, 5, 10], 24, 1.0, "warning"), ([0, 1, 2, 3], 4, 1.0, "error")],
                         ids=["whole groups", "pushed down", "among sampled ones", "parts of them"])  # fmt: skip
def test_whole_responses_of_no_engine_may_be_demonstrations(
    rows: list[int], tokens: int, advantage: float, severity: str, tmp_path: Path
) -> None:
    def mixed(batch: dict[str, Any], step: int) -> None:
        batch["old_log_probs"][rows, :tokens] -= 1.5 * masks(batch)[rows, :tokens]
        batch["rollout_log_probs"] = batch["old_log_probs"].copy()
        batch["rollout_log_probs"][rows, :tokens] = 0
        batch["advantages"][rows] = advantage * masks(batch)[rows]

    diagnosis = run(tmp_path / "d", mixed, range(3), group_id=lambda step: np.repeat(np.arange(4), 4))
    # One batch in every step is a policy that stands (D55); advantages that are set are no estimator's (D04).
    loud = [(one.id, one.severity) for one in causes(diagnosis) if one.id not in ("D04", "D55")]
    assert loud == ([("D41", severity)] if severity else []), loud
