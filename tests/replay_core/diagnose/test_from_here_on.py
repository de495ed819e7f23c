"""What is otherwise from one step of a log on: one environment of several, the limit of tokens, the time of a step."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from replay_core.diagnose.finding import Diagnosis, Finding
from tests.replay_core.diagnose.logs import diagnosed, only, verl, worrying

START = "2026-11-20 08:01:02,114\tINFO worker.py:1821 -- Started a local Ray instance.\n"


def ids(diagnosis: Diagnosis) -> list[str]:
    return [one.id for one in worrying(diagnosis)]


def environments(dies_at: int | None, *, both: bool = False) -> str:
    """prime-rl's lines of 40 steps, with two environments, of which one (or both) pays nothing from a step on."""
    draw, lines = random.Random(5), []
    for step in range(1, 41):
        dead = dies_at is not None and step >= dies_at
        math = 0.0 if dead else 0.4 + 0.2 * draw.random()
        code = 0.0 if dead and both else 0.4 + 0.2 * draw.random()
        mean = (math + code) / 2
        lines.append(
            f"10:02:48 SUCCESS Step {step} |   49s | Reward {mean:.4f} | Truncation {9 * draw.random():.1f}%\n"
        )
        lines += [
            f"\t\t ╰─ {name} | Ratio 50.0% | Reward {paid:.4f} | Turns 1.0\n"
            for name, paid in (("i3-math", math), ("deepcoder", code))
        ]
    return "".join(lines)


def test_an_environment_that_pays_nothing_any_more_is_named(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, environments(21)).findings[0]
    assert (found.id, found.severity, found.steps[0], len(found.steps)) == ("L62", "error", 21, 20)
    assert "the reward of i3-math is exactly 0" in found.claim


def test_environments_that_go_on_or_all_end_are_none(tmp_path: Path) -> None:
    assert ids(diagnosed(tmp_path, environments(None))) == []
    assert "L62" not in ids(diagnosed(tmp_path, environments(38)))
    assert "L62" not in ids(diagnosed(tmp_path, environments(21, both=True)))


@pytest.mark.parametrize(
    "names",
    [
        ("objective/chem_correct_rate", "objective/bio_correct_rate"),
        ("critic/score/chem", "critic/score/bio"),
        ("rewards/chem_func/mean", "rewards/bio_func/mean"),
    ],
)
def test_a_verifier_that_pays_nothing_any_more_is_named(names: tuple[str, str], tmp_path: Path) -> None:
    def text(dead: list[float]) -> str:
        draw = random.Random(6)
        return verl([{names[0]: paid, names[1]: draw.uniform(0.4, 0.6)} for paid in dead])

    draw = random.Random(7)
    paid = [draw.uniform(0.4, 0.6) for _ in range(20)]
    found = only(diagnosed(tmp_path, text(paid + [0.0] * 20)), "L62")
    assert (found.severity, found.steps[0], names[0] in found.claim or "chem" in found.claim) == ("error", 21, True)
    assert "L62" not in ids(diagnosed(tmp_path, text(paid + [0.2] * 20)))
    if "score" not in names[0]:  # by and by a policy may lose it
        assert "L62" not in ids(diagnosed(tmp_path, text(paid + [0.3, 0.2, 0.1, 0.05, 0.02] + [0.0] * 20)))


def cut(share: float, length: float, *, again: bool = True) -> str:
    """20 steps of verl, then 20 with another share of cut responses and another length, started again before them."""
    draw = random.Random(4)

    def steps(share: float, length: float, reward: float) -> list[dict[str, float | None]]:
        return [
            {"response_length/clip_ratio": share * draw.uniform(0.9, 1.1), "response_length/max": 1900.0,
             "response_length/mean": length * draw.uniform(0.95, 1.05), "critic/score/mean": reward + draw.random() / 9,
             "actor/grad_norm": draw.uniform(0.2, 0.3)}
            for _ in range(20)
        ]  # fmt: skip

    return verl(steps(0.01, 800, 0.5)) + START * again + verl(steps(share, length, 0.1), first=21)


def shorter(diagnosis: Diagnosis) -> Finding | None:
    return next((one for one in diagnosis.findings if one.id == "L63"), None)


@pytest.mark.parametrize("again", [True, False])
def test_a_limit_that_is_shorter_from_a_step_on_is_told(again: bool, tmp_path: Path) -> None:
    found = shorter(diagnosed(tmp_path, cut(0.85, 400, again=again)))
    assert found is not None
    assert (found.severity, found.steps[0]) == ("warning", 21)
    assert ("where the run was started again" in found.claim) is again
    assert "reward with them" in found.claim


@pytest.mark.parametrize(("share", "length"), [(0.85, 1200), (0.3, 400), (0.01, 400)])
def test_longer_or_whole_responses_tell_of_no_shorter_limit(share: float, length: float, tmp_path: Path) -> None:
    assert shorter(diagnosed(tmp_path, cut(share, length))) is None


def timed(*, slower: float = 0.0, trains: float = 0.0, waits: float = 1.0, wait: str = "perf/train_wait_time") -> str:
    """40 steps that name no whole but a total, whose rollout (or training) gets slower; and a wait for it."""
    draw, lines = random.Random(3), []
    for step in range(40):
        rollout = (25 + slower * step) * draw.uniform(0.95, 1.05)
        told = {
            "perf/rollout_time": rollout,
            wait: waits * rollout + 0.5,
            "perf/train_time": (14.0 + trains * step) * draw.uniform(0.95, 1.05),
        }
        told |= {"timeperf/total": told[wait] + told["perf/train_time"], "rollout/raw_reward": 0.3 + 0.01 * step,
                 "rollout/response_len/mean": 300 * draw.uniform(0.95, 1.05)}  # fmt: skip
        lines.append(f"step {step}: {told}\n")
    return "".join(lines)


def test_steps_whose_whole_is_called_a_total_get_slower(tmp_path: Path) -> None:
    found = only(diagnosed(tmp_path, timed(slower=5.0)), "D37")
    assert found.severity == "warning"
    assert "perf/rollout_time grows" in found.claim
    assert "the length of responses goes from 30" in found.claim
    assert ids(diagnosed(tmp_path, timed())) == []


def test_phases_that_get_slower_alike_are_of_a_busy_machine(tmp_path: Path) -> None:
    both = only(diagnosed(tmp_path, timed(slower=1.2, trains=0.66)), "D37")
    assert (both.severity, "steps get slower" in both.claim) == ("info", True)
    one = only(diagnosed(tmp_path, timed(slower=1.2)), "D37")
    assert (one.severity, "steps get slower" in one.claim) == ("warning", True)


def test_a_wait_that_is_the_whole_generation_is_no_idling(tmp_path: Path) -> None:
    assert ids(diagnosed(tmp_path, timed())) == []
    overlapping = only(diagnosed(tmp_path, timed(waits=0.7)), "D37")
    assert "waiting for data or for another process" in overlapping.claim


@pytest.mark.parametrize(("slower", "tokens"), [(1.2, 0.0), (0.0, 0.0), (1.2, 200.0)])
def test_a_phase_that_takes_several_times_as_long_is_named_with_its_growth(
    slower: float, tokens: float, tmp_path: Path
) -> None:
    draw = random.Random(9)
    steps = []
    for step in range(40):
        told = {
            "timing_s/broadcast_params": (3.0 + slower * step) * draw.uniform(0.95, 1.05),
            "timing_s/gen": 35.0 * draw.uniform(0.95, 1.05),
            "timing_s/update_actor": 20.0 * draw.uniform(0.95, 1.05),
            "response_length/mean": (800.0 + tokens * step) * draw.uniform(0.97, 1.03),
        }
        told["timing_s/step"] = sum(value for name, value in told.items() if name.startswith("timing_s/"))
        steps.append(told)
    found = [one for one in worrying(diagnosed(tmp_path, verl(steps))) if one.id == "D37"]
    grows = [one for one in found if "timing_s/broadcast_params grows from step to step" in one.claim]
    assert bool(grows) is (slower > 0 and not tokens)
    for one in grows:
        assert f"since step {one.steps[0]}: from" in one.claim
        assert 2 <= one.steps[0] <= 6
        assert one.steps == tuple(range(one.steps[0], one.steps[-1] + 1))
