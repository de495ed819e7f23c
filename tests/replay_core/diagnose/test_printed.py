"""Numbers that were rounded for printing: below the last decimal nothing is told."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay_core.diagnose.printed import decimals, is_rounding_of, untold
from tests.replay_core.diagnose.logs import diagnosed, diagnosed_path, part_of, worrying


def _healthy(step: int, noise: random.Random) -> dict[str, float]:
    return {
        "actor/lr": 1e-6,
        "actor/pg_loss": noise.gauss(0, 2e-4),
        "actor/ppo_kl": abs(noise.gauss(0, 2e-4)),
        "actor/kl_loss": 3e-4 * step / (step + 3),
        "actor/grad_norm": 0.4 + noise.random() / 9,
        "actor/entropy": 0.7 - 0.01 * step + noise.random() / 40,
        "critic/score/mean": min(0.9, 0.3 + 0.03 * step + noise.random() / 20),
        "critic/advantages/mean": 0.0,
        "response_length/mean": 212 + noise.random() * 9,
    }


def _written(path: Path, form: str, steps: int = 14, **changed: float) -> Path:
    noise = random.Random(3)
    with path.open("w") as file:
        for step in range(1, steps + 1):
            said = _healthy(step, noise) | {name.replace("__", "/"): value for name, value in changed.items()}
            if form == "json":
                file.write(json.dumps({"step": step, "data": said}) + "\n")
            else:
                figures = " - ".join(f"{name}:{value:{form}}" for name, value in said.items())
                file.write(f"(TaskRunner pid=7) step:{step} - {figures}\n")
    return path


def _alarms(path: Path) -> list[str]:
    return [one.id for one in diagnosed_path(path).findings if one.severity != "info"]


def test_a_console_of_three_decimals_does_not_say_that_rate_loss_and_kl_are_0(tmp_path: Path) -> None:
    path = _written(tmp_path / "run.log", ".3f")
    assert "actor/lr:0.000" in path.read_text()
    assert _alarms(path) == []
    (note,) = [note for note in diagnosed_path(path).notes if "decimals" in note]
    assert note.startswith("numbers are printed with 3 decimals: ")
    assert all(name in note for name in ("actor/lr", "actor/pg_loss", "actor/kl_loss"))
    assert "grad_norm" not in note


def test_a_gradient_of_0_is_0_though_it_is_rounded(tmp_path: Path) -> None:
    path = _written(tmp_path / "run.log", ".3f", actor__grad_norm=0.0)
    assert "D23" in _alarms(path)


def test_a_rate_that_is_written_as_it_is_among_rounded_numbers_is_0(tmp_path: Path) -> None:
    path = _written(tmp_path / "run.log", ".3f", actor__lr=0.0)
    path.write_text(path.read_text().replace("actor/lr:0.000", "actor/lr:0.0").replace(":0.000", ":0.0"))
    assert "L07" in _alarms(path)


def test_a_rate_of_0_among_whole_numbers_is_0(tmp_path: Path) -> None:
    path = _written(tmp_path / "metrics.jsonl", "json", actor__lr=0.0)
    assert "L07" in _alarms(path)


@given(st.lists(st.floats(-1e3, 1e3, allow_nan=False), min_size=40, max_size=60), st.integers(1, 4))
def test_rounded_numbers_show_their_decimals_and_others_none(values: list[float], places: int) -> None:
    rounded = [float(f"{value:.{places}f}") for value in values]
    found = decimals(rounded)
    assert found is None or found <= places
    assert decimals([*values, math.pi]) is None


def test_few_numbers_tell_no_rounding() -> None:
    assert untold({("learning_rate", "lr"): [0.0] * 5, ("reward", "reward"): [0.5, 0.25, 0.5]}) is None


def test_what_is_large_is_judged_however_it_is_printed() -> None:
    rewards = [round(0.013 * number + 0.1, 3) for number in range(30)]
    found = untold({("kl", "kl"): [0.0, 0.4], ("policy_kl", "ppo_kl"): [0.0, 0.002], ("reward", "r"): rewards})
    assert found == (3, [("policy_kl", "ppo_kl")])


@pytest.mark.parametrize(("printed", "told"), [("0.000", False), ("0.0", True)])
def test_a_rate_of_few_decimals_is_not_called_0(tmp_path: Path, printed: str, told: bool) -> None:
    line = f"step:5 - actor/kl_loss:0.071 - actor/ppo_kl:0.002 - actor/pg_loss:0.013 - actor/lr:{printed}\n"
    assert ("D14" in [one.id for one in worrying(diagnosed(tmp_path, line))]) is told


def _table(step: int, rate: str, exact: str = "") -> str:
    """SkyRL's table of a step, four decimals of everything, behind a line that may print all of them."""
    loss, norm = -0.02 + 0.00137 * (step + 1e-3), 0.1 + 0.01 * (step % 7)
    line = f"(e pid=7) trainer:497 - {{'policy_loss': {loss}, {exact}'raw_grad_norm': {norm}}}\n"
    return line + (
        f"(e pid=7) Step {step}: \n(e pid=7) {{'reward/avg_raw_reward': '{0.3 + 0.01 * step:.4f}',\n"
        f"(e pid=7)  'policy/policy_loss': '{loss:.4f}',\n(e pid=7)  'policy/policy_lr': '{rate}',\n"
        f"(e pid=7)  'trainer/global_step': {step}}}\n"
    )


@pytest.mark.parametrize("exact", ["", "'policy_lr': 2.4e-06, "])
def test_a_rate_of_a_table_of_four_decimals_is_no_0(exact: str, tmp_path: Path) -> None:
    found = diagnosed(tmp_path, "".join(_table(step, "0.0000", exact) for step in range(1, 21)))
    assert worrying(found) == []


def test_a_rate_that_is_0_beside_it_is_told(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, "".join(_table(step, "0.0000", "'policy_lr': 0.0, ") for step in range(1, 21)))
    assert [one.id for one in worrying(found)] == ["L07"]


def test_of_two_printings_of_one_quantity_the_more_exact_one_is_kept(tmp_path: Path) -> None:
    log = part_of(tmp_path, "".join(_table(step, "0.0000") for step in range(1, 21)))
    assert [one.name for one in log.all("pg_loss")] == ["policy_loss"]
    assert [point.step for point in log.all("reward")[0].points] == list(range(1, 21))
    assert not log.is_counted


def test_another_quantity_is_no_rounding() -> None:
    exact = {(n, None, None): 0.123456 + n for n in range(9)}
    assert is_rounding_of({at: round(value, 3) for at, value in exact.items()}, exact, 3)
    assert not is_rounding_of({at: round(value, 3) + 0.001 for at, value in exact.items()}, exact, 3)
    assert not is_rounding_of(exact, exact, 3)
    assert not is_rounding_of({(0, None, None): 0.123}, exact, 3)
