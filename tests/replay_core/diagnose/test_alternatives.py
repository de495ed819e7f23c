"""What figures show is told apart from what may stand behind it: a cause is named where they rule out the others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from replay_core.diagnose.finding import LINKS, Finding, Where
from replay_core.diagnose.function_weights import function_weights
from replay_core.diagnose.merging import _worst_first as worst_first
from replay_core.diagnose.merging import weighed
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import Fields, causes, healthy, look, of, seen
from tests.replay_core.diagnose.logs import Metrics, diagnosed, part_of, trl, verl, worrying

#: Right answers of 4 in each of 40 steps, as chance draws them at a rate of .12: most steps have none.
RARE = [
    0,
    1,
    0,
    0,
    1,
    0,
    2,
    0,
    0,
    1,
    0,
    0,
    1,
    1,
    0,
    0,
    0,
    1,
    0,
    0,
    1,
    0,
    0,
    2,
    0,
    0,
    1,
    0,
    1,
    0,
    0,
    0,
    1,
    0,
    1,
    0,
    0,
    1,
    0,
    0,
]


def rewarded(right: int, of_all: int) -> Metrics:
    """A step of verl's in which so many answers are right."""
    return {
        "critic/score/mean": right / of_all, "critic/score/max": float(right > 0), "critic/score/min": 0.0,
        "critic/advantages/max": 1.5 * (right > 0), "critic/advantages/min": -0.5 * (right > 0),
        "actor/pg_loss": 0.004 * (right > 0),
    }  # fmt: skip


def test_steps_that_chance_leaves_without_a_right_answer_are_no_alarm(tmp_path: Path) -> None:
    diagnosis = diagnosed(tmp_path, verl([rewarded(right, 4) for right in RARE]))
    assert not [one for one in worrying(diagnosis) if one.id in ("D01", "D03")]
    found = of(diagnosis, "D01")
    assert found is not None
    assert "chance" in found.claim
    assert "judge" not in found.cause


def test_as_many_of_a_judge_that_fails_at_times_are_one(tmp_path: Path) -> None:
    steps = [rewarded(0 if number % 5 < 2 else 12 + number % 3, 32) for number in range(40)]
    found = of(diagnosed(tmp_path, verl(steps)), "D01")
    assert found is not None
    assert found.severity == "warning"
    assert "chance" not in found.claim


def test_a_reward_that_fell_to_its_least_is_not_the_judges(tmp_path: Path) -> None:
    rights = [
        9,
        10,
        6,
        8,
        7,
        9,
        5,
        8,
        6,
        4,
        5,
        3,
        4,
        2,
        3,
        1,
        2,
        0,
        1,
        1,
        0,
        1,
        0,
        0,
        1,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
    ]
    diagnosis = diagnosed(tmp_path, verl([rewarded(right, 32) for right in rights]))
    found = of(diagnosis, "D01")
    assert found is not None
    assert found.severity == "warning"
    assert "since the reward fell" in found.claim
    assert found.cause.startswith("a judge that is constant did not pay before")
    assert found.downstream_of == "L08"


def functions(accuracy: float, form: float, weight: float) -> Metrics:
    """A step of TRL's whose reward is the form's, and so much of the accuracy's."""
    return {
        "rewards/accuracy_reward/mean": accuracy, "rewards/accuracy_reward/std": 0.4,
        "rewards/format_reward/mean": form, "rewards/format_reward/std": 0.4 * (form < 1),
        "reward": weight * accuracy + form, "reward_std": 0.2 * (form < 1), "frac_reward_zero_std": float(form >= 1),
    }  # fmt: skip


DRAWN = [0.3, 0.2, 0.25, 0.15, 0.35, 0.3, 0.2, 0.25, 0.3, 0.15, 0.2, 0.25, 0.35, 0.2, 0.3, 0.15, 0.2, 0.3, 0.25, 0.2]


def test_a_function_that_weighs_nothing_is_no_spread_of_the_reward(tmp_path: Path) -> None:
    steps = [functions(drawn, min(1.0, 0.5 + 0.06 * number), 0.0) for number, drawn in enumerate(DRAWN)]
    diagnosis = diagnosed(
        tmp_path, trl([{**step, "rewards/accuracy/mean": None, "rewards/accuracy/std": None} for step in steps])
    )
    assert of(diagnosis, "D03") is None
    found = of(diagnosis, "D01")
    assert found is not None
    assert "accuracy_reward/mean is logged and weighs nothing" in found.cause


@pytest.mark.parametrize("weight", [1.0, 0.1])
def test_answers_that_are_paid_for_more_than_the_form_are_not_lost_for_it(tmp_path: Path, weight: float) -> None:
    steps: list[Metrics] = []
    for number, drawn in enumerate(DRAWN):
        accuracy, form = 0.8 - 0.03 * number + 0.1 * drawn, 0.3 + 0.02 * number - 0.1 * drawn * drawn
        steps.append({
            "rewards/accuracy/mean": accuracy, "rewards/format/mean": form, "reward": weight * accuracy + 0.2 * form
        })  # fmt: skip
    found = of(diagnosed(tmp_path, trl(steps)), "L12")
    assert found is not None
    assert found.severity == ("info" if weight == 1.0 else "error")
    assert ("a right answer is paid 1" in found.claim) == (weight == 1.0)


def test_weights_are_solved_for_where_there_is_but_one_sum(tmp_path: Path) -> None:
    steps: list[Metrics] = [
        {"rewards/accuracy/mean": drawn, "rewards/format/mean": drawn * drawn, "reward": drawn + 0.5 * drawn**2 - 1}
        for drawn in DRAWN
    ]
    weights = function_weights(part_of(tmp_path, trl(steps)))
    assert weights is not None
    assert weights["rewards/accuracy/mean"] == pytest.approx(1)
    assert weights["rewards/format/mean"] == pytest.approx(0.5)
    flat: list[Metrics] = [{**step, "reward": 0.5} for step in steps]
    (tmp_path / "flat").mkdir()
    assert function_weights(part_of(tmp_path / "flat", trl(flat))) is None


def finding(id: str, severity: str, steps: range, link: str) -> Finding:
    return Finding(id, severity, id, (), "why", "next", link, "source", Where(), tuple(steps))  # type: ignore[arg-type]


def test_a_symptom_of_few_steps_stands_behind_what_began_earlier() -> None:
    symptom, cause = (
        finding("D20", "warning", range(30, 35), "tokens"),
        finding("D68", "warning", range(3, 36), "gradient"),
    )
    assert LINKS.index("tokens") < LINKS.index("gradient")
    assert [one.id for one in worst_first([symptom, cause])] == ["D68", "D20"]
    later = finding("D68", "warning", range(33, 36), "gradient")
    assert [one.id for one in worst_first([symptom, later])] == ["D20", "D68"]


@pytest.mark.parametrize(("bad", "severity"), [(3, "info"), (4, "warning"), (6, "error")])
def test_a_few_odd_steps_of_a_run_are_no_habit(bad: int, severity: str) -> None:
    assert weighed(finding("D01", "error", range(bad), "rewards"), 12, varies=True).severity == severity


def recorded(directory: Path, steps: list[Fields], **flags: object) -> Path:
    recorder = Recorder(directory, flags=flags)
    for number, fields in enumerate(steps):
        with recorder.step(number, rank=0) as record:
            metrics = {name: fields.pop(name) for name in list(fields) if name.startswith("critic_")}
            record("trajectory", fields)
            if metrics:
                record("training_metrics", metrics)
    recorder.close()
    return directory


@pytest.mark.parametrize("least", [0.0, 0.1])
def test_a_least_advantage_of_0_is_a_clamp_only_beside_a_least_reward_that_is_not(tmp_path: Path, least: float) -> None:
    steps: list[Metrics] = [
        {"critic/advantages/max": 1.7 + 0.1 * (number % 3), "critic/advantages/min": 0.0, "critic/score/min": least,
         "critic/score/max": 1.0, "critic/score/mean": 0.4 + 0.01 * (number % 4)} for number in range(12)
    ]  # fmt: skip
    found = of(diagnosed(tmp_path, verl(steps)), "D73")
    assert found is not None
    assert ("or nothing is subtracted" in found.claim) == (least == 0)


def test_samples_that_are_left_out_of_the_loss_are_no_missing_baseline(tmp_path: Path) -> None:
    steps = []
    for _ in range(6):
        batch = healthy()
        batch["response_mask"] = batch["response_mask"] * (batch["advantages"].max(1) > 0)[:, None]
        steps.append({**batch, "critic_advantages_max": 1.5, "critic_advantages_min": 0.3, "critic_score_max": 1.0,
                      "critic_score_min": 0.0})  # fmt: skip
    diagnosis = look(recorded(tmp_path / "d", steps))
    assert of(diagnosis, "D73") is None
    assert any(one.id == "D07" for one in causes(diagnosis))


def doubled() -> Fields:
    return {name: np.concatenate([value, value]) if isinstance(value, np.ndarray) else value * 2
            for name, value in healthy().items()}  # fmt: skip


@pytest.mark.parametrize(("size", "words"), [(4, "the batch holds copies"), (8, "engines draw the same"), (None, "")])
def test_a_stated_size_of_groups_tells_copies_from_drawings(tmp_path: Path, size: int | None, words: str) -> None:
    path = recorded(tmp_path / "d", [doubled() for _ in range(2)], **({} if size is None else {"rollout_n": size}))
    found = of(look(path), "D64")
    assert found is not None
    assert (words in found.claim) if words else not ("copies" in found.claim or "engines" in found.claim)


def test_old_ones_of_other_rows_are_told_by_the_policys_first_forward(tmp_path: Path) -> None:
    batch = healthy()
    batch["log_probs"] = batch["old_log_probs"].copy()
    batch["old_log_probs"] = np.roll(batch["old_log_probs"], 1, 0)
    found = causes(seen(tmp_path, batch))
    assert found[0].id in ("D79", "D92")
    assert found[0].claim.startswith("old log-probabilities are in the wrong rows")


def test_a_reward_that_is_lost_in_the_first_steps_is_no_chance(tmp_path: Path) -> None:
    rights = [15, 14, 3, 2, 0, 1, 0, 0, 2, 0, 1, 0, 0, 1, 2, 0, 0, 1, 0, 0, 1, 0, 0, 0, 2, 0, 0, 1, 0, 0]
    found = of(diagnosed(tmp_path, verl([rewarded(right, 32) for right in rights])), "D01")
    assert found is not None
    assert "since the reward fell" in found.claim
    assert "chance" not in found.claim


def test_a_gap_of_the_first_step_is_not_of_old_weights(tmp_path: Path) -> None:
    steps: list[Metrics] = [{"sampling/sampling_logp_difference/mean": 0.14 * 1.2**number} for number in range(14)]
    found = worrying(diagnosed(tmp_path, trl(steps)))
    assert "D12" not in [one.id for one in found]
    assert "D09" in [one.id for one in found]


def test_a_function_that_outweighs_both_is_named_beside_form_and_answers(tmp_path: Path) -> None:
    steps: list[Metrics] = []
    for number, drawn in enumerate(DRAWN):
        accuracy, style = 0.8 - 0.03 * number + 0.1 * drawn, 3 * drawn * drawn - 2.0 + 0.05 * number
        steps.append({
            "rewards/accuracy/mean": accuracy, "rewards/format/mean": 0.3 + 0.02 * number - 0.1 * drawn**3,
            "rewards/style/mean": style, "reward": accuracy + style,
        })  # fmt: skip
    found = of(diagnosed(tmp_path, trl(steps)), "L12")
    assert found is not None
    assert "rewards/style/mean may" in found.cause


def test_a_kl_that_wavers_is_not_that_of_first_weights(tmp_path: Path) -> None:
    kls = [0.0005, 0.001, 0.0008, 0.001, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.3, 0.35, 0.4, 0.42, 0.4, 0.43]
    rewards = [0.2, 0.22, 0.25, 0.21, 0.3, 0.4, 0.5, 0.55, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.9, 0.93, 0.95]
    later = [(0.12, 0.25), (0.11, 0.3), (0.13, 0.2), (0.12, 0.28), (0.12, 0.25)]
    again = [(0.0004, 0.25), (0.001, 0.3), (0.0009, 0.2), (0.002, 0.28), (0.004, 0.25)]
    for folder, tail, said in (("wavers", later, False), ("again", again, True)):
        (tmp_path / folder).mkdir()
        values = [*zip(kls, rewards, strict=True), *tail]
        steps: list[Metrics] = [{"kl": kl, "reward": reward, "rewards/accuracy/mean": None} for kl, reward in values]
        assert (of(diagnosed(tmp_path / folder, trl(steps)), "L24") is not None) == said
