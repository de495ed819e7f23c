"""What lines of a log tell of the run, and what they do not: windows, shares that grow, figures of a node, turns of an
agent, labels of tasks.
"""

from __future__ import annotations

from pathlib import Path

from replay_core.diagnose.finding import Finding
from tests.replay_core.diagnose.logs import diagnosed, trl, verl


def _told(tmp_path: Path, text: str, id: str) -> list[Finding]:
    return [one for one in diagnosed(tmp_path, text).findings if one.id == id]


def _loud(tmp_path: Path, text: str) -> list[tuple[str, str]]:
    return [(one.id, one.claim) for one in diagnosed(tmp_path, text).findings if one.severity != "info"]


def test_a_share_that_grows_is_not_said_to_be_there_from_the_first_step(tmp_path: Path) -> None:
    cut = [0.6, 0.7, 0.75, *(0.8 + 0.01 * n for n in range(20)), *[1.0] * 20]
    steps = [{"completions/clipped_ratio": share, "completions/max_length": 512.0} for share in cut]
    (found,) = _told(tmp_path, trl(steps), "D20")
    assert "68% in the first steps" in found.claim
    assert "from the first step on" not in found.claim


def test_lines_of_a_runs_end_say_nothing_of_its_beginning(tmp_path: Path) -> None:
    lines = "".join(f"  Gen {n % 8}: reward={0.3 + n % 3 / 10}, kl={11 + n % 4 / 8}, H=2.3\n" for n in range(60))
    (found,) = _told(tmp_path, "Step 998/1000\n" + lines, "D15")
    assert "in all of the lines given" in found.claim
    assert "before any update" not in found.cause


def test_a_share_of_groups_is_no_reward_function(tmp_path: Path) -> None:
    steps = [{"all_correct": 0.0, "all_wrong": 0.1 + n % 3 / 10, "rewards/format/mean": n % 5 / 5} for n in range(30)]
    assert not _told(tmp_path, trl(steps), "L17")


def test_a_forward_that_wants_no_gradient_warns_and_trains(tmp_path: Path) -> None:
    text = "UserWarning: None of the inputs have requires_grad=True. Gradients will be None\n"
    assert not _told(tmp_path, text + trl([{}] * 20), "L29")
    (found,) = _told(tmp_path, text + trl([{"grad_norm": 0.0}] * 20), "L29")
    assert found.severity == "warning"


def test_the_hosts_memory_is_the_whole_nodes(tmp_path: Path) -> None:
    steps = [{"perf/cpu_memory_used_gb": 200.0 + 3 * n} for n in range(60)]
    (found,) = _told(tmp_path, verl(steps), "L04")
    assert found.severity == "info"
    assert "torch.cuda" not in found.next_step


def test_the_reward_of_an_agents_turn_is_no_steps(tmp_path: Path) -> None:
    turn = "WARNING: Step {n} - Env response: reward=0, done=False, obs='could not execute it and failed'\n"
    assert _loud(tmp_path, trl([{}] * 20) + "".join(turn.format(n=n % 4) for n in range(40))) == []


def test_a_launchers_label_hides_no_traceback(tmp_path: Path) -> None:
    lines = [
        "starting", "loading the model", "loading the data", "preparing",
        "Traceback (most recent call last):",
        '  File "/job/train.py", line 4, in <module>', "    main()",
        '  File "/job/save.py", line 9, in save_checkpoint',
        "    write(state)", "RuntimeError: the frobnicator is out of flux",
    ]  # fmt: skip
    text = "".join(f"0: {line}\n" for line in lines) + "srun: error: n7: task 0: Exited with exit code 1\n"
    (found,) = _told(tmp_path, text, "L06")
    assert "while a checkpoint is saved" in found.claim


def test_steps_that_waver_are_not_said_to_slow_down(tmp_path: Path) -> None:
    slow = [100 + (n * 37 % 90) + n * 0.9 for n in range(120)]
    steps = [{"step_time": seconds} for seconds in slow]
    assert not [one for one in _told(tmp_path, trl(steps), "D37") if one.severity != "info"]
