"""What runs of the field logged and nothing told of: held-out rows among the training's, a reference that is another
model before any update, reward functions of one number, lengths that stand at a limit.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from replay_core.diagnose.finding import Diagnosis
from tests.replay_core.diagnose.logs import Metrics, diagnosed, diagnosed_path, only, told, trl, worrying


def _rows(folder: Path, rows: list[dict[str, object]]) -> Diagnosis:
    path = folder / "run.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return diagnosed_path(path)


def _trained(steps: int, *held: float, every: int = 10) -> list[dict[str, object]]:
    rng = random.Random(4)
    rows: list[dict[str, object]] = []
    for n in range(steps):
        rows.append({"step": n, "loss": rng.gauss(0, 0.02), "reward_mean": n / 100 + rng.gauss(0, 0.02), "kl": n / 1e4})
        if (n + 1) % every == 0 and n // every < len(held):
            rows.append({"step": n, "eval": True, "ndcg@10": held[n // every], "recall@10": 0.04})
    return rows


def test_held_out_rows_that_fall_each_time_while_the_reward_rises_are_told(tmp_path: Path) -> None:
    found = only(_rows(tmp_path, _trained(60, 0.022, 0.0213, 0.0201, 0.019, 0.0179, 0.0165)), "L20")
    assert found.severity == "warning"
    assert found.claim.startswith("eval/ndcg@10 falls from 0.0213 to 0.0179 while reward_mean rises")


def test_held_out_rows_that_waver_are_no_fall(tmp_path: Path) -> None:
    assert "L20" not in dict(told(_rows(tmp_path, _trained(60, 0.022, 0.0213, 0.0219, 0.019, 0.0179, 0.0165))))


@pytest.mark.parametrize("mark", [{"eval": True}, {"split": "val"}, {"phase": "test"}])
def test_a_row_that_says_it_is_held_out_is_no_row_of_training(tmp_path: Path, mark: dict[str, object]) -> None:
    rows: list[dict[str, object]] = [{"step": n, "loss": 0.5, "reward": n / 10} for n in range(6)]
    rows += [{"step": 5, "reward": 0.01, **mark}]
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    from replay_core.diagnose.signals import Signals
    from replay_core.dumps import open_run

    signals = Signals.of(open_run(path))
    assert signals is not None
    reward, held = signals.logs[0].get("reward"), signals.logs[0].get("held_out")
    assert reward is not None
    assert held is not None
    assert reward.last.value == 0.5
    assert held.last.value == 0.01


def _accuracies(*shares: float) -> list[dict[str, object]]:
    return [
        {"step": 25 * n, "loss": 0.04 + n % 3 / 100, "mean_reward": 0.5 + n % 4 / 10, "n_eval_actions": 120,
         "accuracy": share}
        for n, share in enumerate(shares)
    ]  # fmt: skip


def test_a_held_out_share_that_breaks_in_the_first_steps_and_stays_down_is_told(tmp_path: Path) -> None:
    found = only(_rows(tmp_path, _accuracies(0.99, 0.79, 0.61, *[0.64] * 8)), "L20")
    assert found.severity == "warning"
    assert "held-out results are lost within the first steps: eval/accuracy falls from 0.99" in found.claim


@pytest.mark.parametrize("shares", [(0.99, 0.79, 0.61, *[0.85] * 8), (0.3, 0.2, *[0.15] * 9), (0.7, 0.9, *[0.5] * 9)])
def test_a_share_that_comes_back_or_was_no_best_at_first_is_not(tmp_path: Path, shares: tuple[float, ...]) -> None:
    assert "L20" not in dict(told(_rows(tmp_path, _accuracies(*shares))))


def _warmed_up(kl: float, every: int = 2, first: float = 6e-8) -> str:
    rows: list[str] = []
    for n in range(1, 31):
        rate = first if n == 1 else min(6e-6, 2e-7 * n)
        rows.append(str({"loss": 0.01, "grad_norm": 0.2 + n / 100, "learning_rate": rate, "reward": 0.4 + n / 100,
                         "reward_std": 0.3, "kl": kl + n % 3 / 50, "completions/mean_length": 300.0 + n,
                         "step": n * every}))  # fmt: skip
    return "\n".join(rows) + "\n"


def test_a_kl_before_the_learning_rate_is_one_is_no_updates(tmp_path: Path) -> None:
    found = only(diagnosed(tmp_path, _warmed_up(0.45)), "D15")
    assert found.severity == "warning"
    assert "in the first line (step 2), at a learning rate of 6e-08, 1.0% of its largest" in found.claim


@pytest.mark.parametrize(
    "text", [_warmed_up(0.001), _warmed_up(0.45, first=3e-6), _warmed_up(0.45, every=25)],
    ids=["next to no KL", "a rate from the start on", "many steps to a line"],
)  # fmt: skip
def test_a_first_line_that_updates_may_have_made_is_not_judged(tmp_path: Path, text: str) -> None:
    assert "D15" not in dict(told(diagnosed(tmp_path, text)))


def _functions(level: float, std: float = 0.0, count: int = 24) -> str:
    return trl([{"rewards/tool/mean": level, "rewards/tool/std": std, "rewards/accuracy/mean": 0.3 + n % 5 / 10,
                 "reward": 0.3 + n % 5 / 10 + level} for n in range(count)])  # fmt: skip


@pytest.mark.parametrize(("level", "severity"), [(-0.5, "warning"), (0.5, "info")])
def test_a_reward_function_of_one_number_says_nothing(tmp_path: Path, level: float, severity: str) -> None:
    found = only(diagnosed(tmp_path, _functions(level)), "L17")
    assert found.severity == severity
    assert f"rewards/tool/mean is {level} in all 24 steps" in found.claim


@pytest.mark.parametrize(("level", "std"), [(1.0, 0.0), (-0.5, 0.2)])
def test_a_function_at_its_best_or_with_a_spread_says_something(tmp_path: Path, level: float, std: float) -> None:
    assert "L17" not in dict(told(diagnosed(tmp_path, _functions(level, std))))


def _lengths(others: int, limit: float = 256.0) -> str:
    bare: Metrics = dict.fromkeys(("completions/mean_length", "completions/max_length", "completions/clipped_ratio"))
    return trl([{**bare, "completion_length": limit - 31 * (n < others), "reward": n % 7 / 10} for n in range(40)])


def test_lengths_that_stand_at_a_limit_in_nearly_all_lines_are_cut(tmp_path: Path) -> None:
    found = [one for one in worrying(diagnosed(tmp_path, _lengths(1))) if "run to the limit" in one.claim]
    assert [one.id for one in found] == ["L40"]
    assert "their mean length is 256 tokens in 39 of 40 lines, and more in none" in found[0].claim


@pytest.mark.parametrize("text", [_lengths(5), _lengths(1, 251.0)], ids=["not in nearly all", "no limit's number"])
def test_lengths_that_waver_are_not(tmp_path: Path, text: str) -> None:
    assert not [one for one in diagnosed(tmp_path, text).findings if "run to the limit" in one.claim]
