"""What a run states of its algorithm, in the words of several frameworks, and what rules make of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from replay_core.diagnose.algorithm import GROUP_SIZE, Algorithm, stated_by
from replay_core.diagnose.case import Case
from replay_core.diagnose.engine import diagnose
from replay_core.diagnose.signals import Signals
from replay_core.dumps import open_run

HEADS = {
    "verl": "{'algorithm': {'adv_estimator': 'rloo', 'gamma': 1.0},\n'clip_ratio_low': 0.2, 'clip_ratio_high': 0.28,\n",
    "json": 'config: {"adv_estimator": "rloo", "eps_low": 0.2, "eps_high": 0.28}\n',
    "slime": "advantage_estimator ................ rloo\neps_clip ............ 0.2\neps_clip_high ....... 0.28\n",
    "namespace": "Namespace(advantage_estimator='rloo', epsilon=0.2, epsilon_high=0.28)\n",
}
LINES = [f"step:{n} - actor/pg_loss:0.0{n} - actor/pg_clipfrac:0.6 - actor/grad_norm:1.{n}\n" for n in range(1, 9)]


@pytest.mark.parametrize("form", sorted(HEADS))
def test_the_head_of_a_log_states_the_algorithm(tmp_path: Path, form: str) -> None:
    (tmp_path / "train.log").write_text(HEADS[form] + "".join(LINES))
    algorithm = Algorithm(stated_by(open_run(tmp_path / "train.log")))
    assert (algorithm.estimator, algorithm.clip_range) == ("rloo", (0.2, 0.28))


@pytest.mark.parametrize(("head", "found"), [("loss_mode: gspo\n", []), ("loss_mode: vanilla\n", ["D24"])])
def test_a_sequence_s_ratio_is_clipped_on_purpose(tmp_path: Path, head: str, found: list[str]) -> None:
    (tmp_path / "train.log").write_text(head + "".join(LINES))
    run = open_run(tmp_path / "train.log")
    told = diagnose(Case(run, Signals.of(run)), ["D24"]).findings
    assert [one.id for one in told if one.severity != "info"] == found


def test_a_rate_that_runs_out_before_the_run_does_is_said(tmp_path: Path) -> None:
    rates = [3e-4, 1e-4] + [0.0] * 8
    lines = [f"step:{n} - actor/lr:{rate} - actor/grad_norm:1.{n}\n" for n, rate in enumerate(rates)]
    (tmp_path / "train.log").write_text("".join(lines))
    run = open_run(tmp_path / "train.log")
    (found,) = [one for one in diagnose(Case(run, Signals.of(run)), ["L07"]).findings if one.severity != "info"]
    assert "run out" in found.claim
    assert found.steps[0] == 2


@pytest.mark.parametrize(
    ("facts", "is_weighed"),
    [
        ({"use_tis": False, "tis_clip": 2.0}, False), ({"rollout_is": False, "rollout_is_threshold": 2.0}, False),
        ({"rollout_is": None, "rollout_is_threshold": 2.0}, None), ({"rollout_is": "token"}, True),
        ({"vllm_importance_sampling_correction": False, "vllm_importance_sampling_cap": 2.0}, False),
        ({"vllm_importance_sampling_correction": True}, True), ({"tis_imp_ratio_cap": 2.0}, True),
        ({"tis_imp_ratio_cap": -1}, False), ({}, None),
    ],
)  # fmt: skip
def test_a_cap_beside_its_switch_is_no_switch(facts: dict[str, object], is_weighed: bool | None) -> None:
    assert Algorithm(facts).is_weighed is is_weighed


@pytest.mark.parametrize(
    ("facts", "leaves_out"),
    [
        ({"loss_type": "dr_grpo", "scale_rewards": "group"}, False), ({"loss_type": "dr_grpo"}, False),
        ({"loss_type": "dr_grpo", "scale_rewards": "none"}, True), ({"adv_estimator": "dr_grpo"}, True),
        ({"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False}, True), ({"adv_estimator": "grpo"}, False),
    ],
)  # fmt: skip
def test_a_loss_that_is_dr_grpos_says_nothing_of_the_std(facts: dict[str, object], leaves_out: bool) -> None:
    assert Algorithm(facts).leaves_out_std is leaves_out


def test_the_std_of_the_batch_says_more_than_that_there_is_one() -> None:
    assert Algorithm({"norm_adv_by_std_in_grpo": True}).std_of == "group"
    assert Algorithm({"norm_adv_by_std_in_grpo": True, "scale_rewards": "batch"}).std_of == "batch"
    assert Algorithm({"norm_adv_by_std_in_grpo": False, "scale_rewards": "group"}).std_of == "group"


def test_the_estimator_is_read_where_it_has_a_setting_and_the_loss_is_not_taken_for_it() -> None:
    assert Algorithm({"loss": "ppo", "adv_estimator": "reinforce"}).estimator == "reinforce"
    assert Algorithm({"loss": "ppo"}).estimator == "gae"
    assert Algorithm({"loss_mode": "geo_mean", "loss_agg_mode": "token-mean"}).averages_sequences
    assert not Algorithm({"loss_mode": "vanilla"}).averages_sequences


@pytest.mark.parametrize(
    "flags",
    [
        {"actor_rollout_ref": {"rollout": {"n": 4, "temperature": 0.9, "val_kwargs": {"n": 1, "temperature": 0}}}},
        {"actor_rollout_ref.rollout.n": 4, "actor_rollout_ref.rollout.val_kwargs.n": 1,
         "actor_rollout_ref.rollout.temperature": 0.9, "actor_rollout_ref.rollout.val_kwargs.temperature": 0},
    ],
)  # fmt: skip
def test_verls_settings_of_rollouts_are_not_those_of_its_evaluations(flags: dict[str, object]) -> None:
    stated = Algorithm({"flags": flags})
    assert stated.number(*GROUP_SIZE) == 4
    assert stated.number("temperature") == 0.9
