"""Logs under names of people's own: pairs told apart by chance, figures that stand, a coefficient that runs away, a
reward that hardly rises; each at its limit, and beside what a healthy run shows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from replay_core.diagnose.finding import Finding
from replay_core.diagnose.signal_names import named
from tests.replay_core.diagnose.logs import diagnosed, diagnosed_path, told, worrying, written

N = 60


def rows(columns: Mapping[str, Sequence[float]]) -> str:
    return "".join(
        json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in zip(*columns.values(), strict=True)
    )


def waves(level: float, by: float, n: int = N, up: float = 0.0) -> list[float]:
    return [level + up * at / n + by * math.sin(2.3 * at) * math.cos(0.7 * at) for at in range(n)]


def first(folder: Path, columns: Mapping[str, Sequence[float]]) -> Finding | None:
    return next(iter(worrying(diagnosed_path(written(folder, rows(columns), "own.jsonl")))), None)


def steps(n: int = N, by: int = 10) -> list[float]:
    return [by * (at + 1) for at in range(n)]


@pytest.mark.parametrize(
    ("name", "signal"),
    [
        ("curriculum_reward", "reward"), ("sentiment_score", "reward"), ("agent/episode_score", "reward"),
        ("random_reward", None), ("expert_reward", None), ("length_reward", None), ("bleu_score", None),
        ("chosen_score_margin", None), ("reward_model_loss", "loss"), ("rm_loss", "loss"), ("entropy_loss", "entropy"),
        ("router_z_loss", None), ("kl_sampler_vs_trainer_v2", "rollout_k2"), ("kl_sample_train_v1", "rollout_k1"),
        ("beta", "kl_coefficient"), ("curriculum_stage", "difficulty"), ("reward_lr", None), ("eval/judge_score", None),
    ],
)  # fmt: skip
def test_a_name_is_taken_by_its_words_where_they_leave_no_doubt(name: str, signal: str | None) -> None:
    found = named(name)
    assert (found.signal if found is not None else None) in (signal, "held_out" if name.startswith("eval") else signal)


def test_a_name_of_a_frameworks_own_goes_before_one_by_a_word(tmp_path: Path) -> None:
    found = first(
        tmp_path, {"step": steps(), "sentiment_score": waves(0.6, 0.02, up=-0.5), "reward": waves(0.3, 0.02, up=0.2)}
    )
    assert found is None


# ---- pairs


@pytest.mark.parametrize(
    "columns",
    [
        {"rm_loss": waves(0.6935, 0.004), "acc": waves(0.5, 0.04)},
        {"loss": waves(0.695, 0.003)},
        {"loss": waves(3.0, 0.2, up=-1.5), "rewards/accuracies": waves(0.53, 0.2), "rewards/margins": waves(0.01, 0.02),
         "rewards/chosen": waves(-0.1, 0.02)},
    ],
)  # fmt: skip
def test_pairs_that_a_coin_would_tell_apart_as_well(columns: dict[str, list[float]], tmp_path: Path) -> None:
    found = first(tmp_path, {"step": steps(), **columns})
    assert found is not None
    assert (found.id, found.severity) == ("L47", "warning")


@pytest.mark.parametrize(
    "columns",
    [
        {"loss": waves(0.69, 0.01, up=-0.2), "rewards/accuracies": waves(0.5, 0.03, up=0.25)},
        {"loss": waves(0.69, 0.01, up=-0.06), "rewards/accuracies": waves(0.52, 0.1, up=0.12),
         "rewards/margins": waves(0.0, 0.01, up=0.1), "rewards/chosen": waves(0.0, 0.01, up=0.05)},
        {"loss": waves(0.75, 0.03)},
        {"loss": waves(0.693, 0.003), "reward": waves(0.2, 0.02, up=0.3)},  # a policy's loss may be any number
    ],
)  # fmt: skip
def test_pairs_that_are_learnt_are_none(columns: dict[str, list[float]], tmp_path: Path) -> None:
    assert first(tmp_path, {"step": steps(), **columns}) is None


def test_the_first_lines_of_a_run_on_pairs_are_no_failure(tmp_path: Path) -> None:
    assert first(tmp_path, {"step": steps(12, 1), "loss": waves(0.693, 0.002, 12)}) is None
    warms = {"step": steps(40, 1), "loss": waves(0.693, 0.002, 40), "learning_rate": [1e-7 * n for n in range(40)]}
    found = first(tmp_path, warms)
    assert found is None or found.id != "L47"


# ---- nothing changes

FROZEN = {"reward": [0.22576] * 12, "kl_divergence": [0.999565] * 12, "sentiment_score": [0.303163] * 12}


def test_figures_that_never_change_are_of_a_policy_that_is_not_updated(tmp_path: Path) -> None:
    diagnosis = diagnosed_path(written(tmp_path, rows({"step": steps(12), **FROZEN}), "own.jsonl"))
    found = worrying(diagnosis)[0]
    assert (found.id, found.severity) == ("L48", "warning")
    assert "all 3 figures" in found.claim
    assert {one.id for one in diagnosis.findings if one.downstream_of == "L48"} >= {"L17"}


@pytest.mark.parametrize(
    "more",
    [
        {"grad_norm": waves(0.4, 0.05, 12)},  # something goes on
        {"reward": [0.5] * 12, "kl_divergence": [0.25] * 12},  # shares of a few answers
    ],
)  # fmt: skip
def test_figures_that_rest_for_another_reason_are_not(more: dict[str, list[float]], tmp_path: Path) -> None:
    found = first(tmp_path, {"step": steps(12), **FROZEN, **more})
    assert found is None or found.id != "L48"


# ---- a coefficient

UP = [0.012 * 1.15**at for at in range(40)]


def test_a_coefficient_that_grows_without_a_hold_on_the_kl(tmp_path: Path) -> None:
    columns = {
        "step": steps(40),
        "beta": UP,
        "kl_divergence": waves(6.5, 0.2, 40),
        "reward": [0.3 - 1.2 * weight for weight in UP],
    }
    found = first(tmp_path, columns)
    assert found is not None
    assert (found.id, found.severity) == ("D122", "warning")


@pytest.mark.parametrize(
    ("weights", "kls", "rewards"),
    [
        (UP, [8 * math.exp(-at / 12) + 0.4 for at in range(40)], waves(0.3, 0.02, 40, 0.1)),  # it takes hold
        ([0.02 * min(1.1**at, 4) for at in range(40)], [6 * (1 - math.exp(-at / 6)) for at in range(40)],
         waves(0.2, 0.03, 40, 0.8)),  # steered to its target
        ([0.2 * 0.97**at for at in range(40)], waves(0.1, 0.02, 40), waves(0.2, 0.03, 40, 0.8)),
    ],
)  # fmt: skip
def test_a_coefficient_that_is_steered_is_none(
    weights: list[float], kls: list[float], rewards: list[float], tmp_path: Path
) -> None:
    assert first(tmp_path, {"step": steps(40), "kl_coef": weights, "kl": kls, "reward": rewards}) is None


# ---- rewards that stay


def test_a_reward_that_gains_next_to_nothing_of_what_there_is(tmp_path: Path) -> None:
    n = 150
    columns = {"step": steps(n, 1), "mean": waves(0.24, 0.01, n, 0.02), "min": [0.1] * n, "max": [1.0] * n}
    found = first(tmp_path, columns)
    assert found is not None
    assert (found.id, found.severity) == ("L40", "warning")
    assert "hardly rises" in found.claim


@pytest.mark.parametrize(("level", "up"), [(0.24, 0.2), (0.8, 0.02)])
def test_a_reward_that_rises_or_is_near_its_best_is_none(level: float, up: float, tmp_path: Path) -> None:
    n = 150
    columns = {"step": steps(n, 1), "mean": waves(level, 0.01, n, up), "min": [0.1] * n, "max": [1.0] * n}
    assert first(tmp_path, columns) is None


def test_a_reward_that_swings_over_many_steps_does_not_rise(tmp_path: Path) -> None:
    found = first(tmp_path, {"step": steps(34, 8), "avg_ep_reward": waves(-0.1, 0.3, 34), "loss": waves(1.5, 0.1, 34)})
    assert found is not None
    assert found.id == "L40"
    assert first(tmp_path, {"step": steps(34, 1), "avg_ep_reward": waves(-0.1, 0.3, 34)}) is None


# ---- engine and trainer


@pytest.mark.parametrize(("level", "severity"), [(0.4, "error"), (0.15, "warning"), (0.06, None)])
def test_half_the_mean_square_between_engine_and_trainer(level: float, severity: str | None, tmp_path: Path) -> None:
    columns = {
        "step": steps(20, 1),
        "optim/kl_sample_train_v2": waves(level, level / 50, 20),
        "reward": waves(0.3, 0.02, 20),
    }
    found = first(tmp_path, columns)
    assert (None if found is None else (found.id, found.severity)) == (severity and ("D09", severity))


# ---- lengths


def test_answers_that_shrink_while_paid_and_lose_the_reward_lead(tmp_path: Path) -> None:
    n = 24
    columns: dict[str, Sequence[float]] = {
        "step": steps(n, 1), "score": [0.42 + 0.04 * min(at, 6) - 0.035 * max(at - 8, 0) for at in range(n)],
        "response_length": [350 - 14 * at for at in range(n)],
        "grad_norm": [1 + 1.5 * max(at - 17, 0) + 0.01 * at for at in range(n)],
    }  # fmt: skip
    diagnosis = diagnosed_path(written(tmp_path, rows(columns), "own.jsonl"))
    found = worrying(diagnosis)[0]
    assert found.id == "L09"
    assert "shortness itself is paid for" in (found.cause or "")
    assert {one.id for one in diagnosis.findings if one.downstream_of == "L09"} == {"L02", "L08"}


# ---- what a script says itself

LINES = "".join(
    f"{{'loss': 0.01, 'reward': {reward}, 'epoch': 0.{at}}}\n" for at, reward in enumerate((0.45, 0.34, 0.25))
)


@pytest.mark.parametrize(
    "said",
    [
        "❌ VERDICT: NOT LEARNING",
        "Reward trended downward.",
        "Result: no improvement",
        "Final verdict: model did not learn",
    ],
)
def test_a_scripts_own_verdict_is_told_with_its_rewards(said: str, tmp_path: Path) -> None:
    found = worrying(diagnosed(tmp_path, LINES + f"\n{said}\n"))[0]
    assert (found.id, found.severity) == ("L29", "warning")
    assert "0.45, 0.34, 0.25" in found.claim


@pytest.mark.parametrize(
    "said", ["✅ VERDICT: LEARNING", "The patient says that the model is not learning.", "No improvement since epoch 3"]
)
def test_other_words_are_no_verdict(said: str, tmp_path: Path) -> None:
    assert not [one for one in told(diagnosed(tmp_path, LINES + f"\n{said}\n")) if one[0] == "L29"]


def test_an_answers_own_steps_do_not_end_the_run(tmp_path: Path) -> None:
    head = "Total steps = 1,000\nStep\tTraining Loss\treward\tkl\n"
    table = "".join(f"{at}\t0.01\t{0.1 + at / 400}\t0.0{at % 9}\n" for at in range(1, 293))
    diagnosis = diagnosed(tmp_path, head + table + "Answer:\nStep 2: the score is 3, loss 1\n")
    (found,) = [one for one in diagnosis.findings if one.id == "L42"]
    assert "step 292 of 1,000" in found.claim


def test_a_head_of_a_run_that_logs_every_eighth_step_is_new_on_purpose(tmp_path: Path) -> None:
    notice = (
        "Some weights of BertForSequenceClassification were not initialized from the model checkpoint at cache/bert "
        "and are newly initialized: ['classifier.weight', 'classifier.bias']\n"
    )
    text = notice + "".join(f"step {8 * at} | loss {1.5 - at / 30} | reward {at / 10}\n" for at in range(1, 12))
    assert not worrying(diagnosed(tmp_path, text))
    later = notice + "".join(f"step {400 + 8 * at} | loss {1.5 - at / 30} | reward {at / 10}\n" for at in range(1, 12))
    assert [one.id for one in worrying(diagnosed(tmp_path, later))] == ["L29"]


def test_a_function_that_never_pays_is_said_whether_the_reward_rises_or_not(tmp_path: Path) -> None:
    columns = {
        "step": steps(40, 1),
        "rewards/tag_func/mean": [0.0] * 40,
        "rewards/correctness/mean": waves(0.2, 0.02, 40, 0.5),
    }
    # Answers that are right are paid for and learnt: the form is not needed.
    rising = {**columns, "reward": waves(0.2, 0.02, 40, 0.5)}
    diagnosis = diagnosed_path(written(tmp_path, rows(rising), "a.jsonl"))
    assert ("L17", "info") in told(diagnosis)
    still = {**columns, "reward": waves(0.2, 0.02, 40)}
    assert ("L17", "warning") in told(diagnosed_path(written(tmp_path, rows(still), "b.jsonl")))


@pytest.mark.parametrize("answers", [None, -2.0], ids=["none is of answers", "the one of answers is one number"])
def test_a_function_that_never_pays_is_a_warning_where_no_other_pays_for_answers(
    answers: float | None, tmp_path: Path
) -> None:
    columns = {
        "step": steps(40, 1),
        "rewards/match_exactly": [0.0] * 40,
        "rewards/language": waves(0.2, 0.02, 40, 0.5),
        "reward": waves(0.2, 0.02, 40, 0.5),
        **({} if answers is None else {"rewards/check_answer": [answers] * 40}),
    }
    diagnosis = diagnosed_path(written(tmp_path, rows(columns), "a.jsonl"))
    assert ("L17", "warning") in told(diagnosis)
    (found,) = [one for one in diagnosis.findings if one.id == "L17"]
    assert answers is None or "rewards/check_answer -2" in found.claim
