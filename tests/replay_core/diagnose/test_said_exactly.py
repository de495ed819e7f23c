"""Findings that name the right thing and say a part of it wrongly: where, from what, which one, what to do."""

from __future__ import annotations

from pathlib import Path

from tests.replay_core.diagnose.logs import diagnosed, only, part_of, trl, verl

_OOM = (
    "Traceback (most recent call last):\n"
    '  File "/root/trainer/workers/worker.py", line 1098, in _forward_backward_micro\n'
    "    policy_loss.backward()\n"
    '  File "/root/.venv/lib/python3.12/site-packages/torch/_tensor.py", line 647, in backward\n'
    "    torch.autograd.backward(\n"
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 13.86 GiB. GPU 3 has a total capacity of 79.11 GiB "
    "of which 9.04 GiB is free. Including non-PyTorch memory, this process has 70.05 GiB memory in use. Of the "
    "allocated memory 61.77 GiB is allocated by PyTorch, and 6.12 GiB is reserved by PyTorch but unallocated.\n"
)
_RAYS = (
    "(raylet) node_manager.cc:3099: 1 Workers (tasks / actors) killed due to memory pressure (OOM)\n"
    "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n"
    "PID\tMEM(GB)\tCOMMAND\n"
)
_ENGINE = (
    "(SGLangEngine pid=259499) [2026-07-03 12:59:43] [TP0] Scheduler hit an exception: Traceback (most recent call "
    "last):\n"
    '  File "/sgl-workspace/sglang/python/sglang/srt/managers/scheduler.py", line 2870, in run_scheduler_process\n'
    "    scheduler.event_loop_overlap()\n"
    "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
)
_HEALTH = (
    "(RolloutManager pid=259397) [2026-07-03 13:00:57] health_monitor.py:153 - Health check failed for rollout "
    "engine 2 (ray timeout or error). Killing actor. Exception: HTTPConnectionPool(host='10.103.179.62', port=15002)\n"
)
_TIME = "slurmstepd: error: *** JOB 107 ON c0661 CANCELLED AT 2026-03-17T07:00:33 DUE TO TIME LIMIT ***\n"


def test_out_of_memory_in_a_backward_says_so_and_who_called_it(tmp_path: Path) -> None:
    found = only(diagnosed(tmp_path, verl([{}] * 4) + _OOM), "D36")
    assert found.cause.startswith("the backward pass")
    assert "_forward_backward_micro (worker.py:1098): policy_loss.backward()" in str(found.evidence)


def test_out_of_host_memory_names_the_process_that_holds_it(tmp_path: Path) -> None:
    grows = verl([{"perf/cpu_memory_used_gb": 300.0 + 10 * n} for n in range(40)])
    users = "439761\t586.44\tray::TaskRunner.run\n440173\t31.27\tray::WorkerDict.actor_rollout_update_actor\n"
    found = only(diagnosed(tmp_path, grows + _RAYS + users), "D36")
    assert "TaskRunner.run holds 586.4 GB" in found.claim
    assert "torch.cuda" not in found.next_step
    assert "on the host" in found.cause
    alike = "".join(f"{n}\t31.{n}0\tray::WorkerDict.update\n" for n in range(1, 9))
    assert "holds" not in only(diagnosed(tmp_path, grows + _RAYS + alike), "D36").claim


def test_an_engine_that_died_is_named_by_its_number(tmp_path: Path) -> None:
    dead = only(diagnosed(tmp_path, verl([{}] * 4) + _ENGINE + _HEALTH), "L06")
    assert dead.claim.endswith("(engine 2, and it was not started again)")
    assert "engine 2" not in only(diagnosed(tmp_path, verl([{}] * 4) + _ENGINE), "L06").claim


def test_nobody_is_sent_to_a_checkpoint_that_was_not_due(tmp_path: Path) -> None:
    def said(setting: str) -> str:
        return str(only(diagnosed(tmp_path, setting + trl([{}] * 20) + _TIME), "L06").next_step)

    assert "resume from the last checkpoint" in said("save_steps: 10\n")
    assert "resume from the last checkpoint" in said("")
    assert "no checkpoint may be there to go on from (save_steps = 100)" in said("save_steps: 100\n")
    assert "(save_freq = -1)" in said("save_freq: -1\n")
    assert "save_every_n_epochs = 1" in said("save_every_n_epochs: 1\n")


def test_a_reward_that_is_lost_fell_from_what_it_came_to(tmp_path: Path) -> None:
    rewards = [0.36, 0.1, 0.36, *[0.4 + 0.03 * n for n in range(19)], 0.5, *[0.0] * 18]
    cut = [0.0] * 23 + [1.0] * 18
    text = verl([{"critic/score/mean": r, "response_length/clip_ratio": c} for r, c in zip(rewards, cut, strict=True)])
    found = only(diagnosed(tmp_path, text), "L08")
    assert "falls from 0.94 at step 22 (0.36 at first) to 0" in found.claim
    # A low step of the beginning is no fall.
    assert found.steps[0] == 24


def test_one_bonus_has_one_coefficient(tmp_path: Path) -> None:
    steps = []
    for n in range(40):
        entropy, policy = 0.5 + 0.03 * n, -0.08 + 0.002 * n
        steps.append({"actor/entropy": entropy, "actor/pg_loss": policy, "actor/loss": policy - 0.37 * entropy})
    found = diagnosed(tmp_path, verl([{**step, "critic/score/mean": 0.2 - 0.004 * n} for n, step in enumerate(steps)]))
    assert "0.37 times it" in only(found, "D25").claim


def test_steps_are_no_episodes(tmp_path: Path) -> None:
    panels = "".join(
        "╭────────────────────────────────────────────╮\n"
        f"│ other      episode: {128 * n} | global_step: {128 * n} | training_step: {n} | scores: 0.5{n % 7} │\n"
        "│ optim      grad_norm: 0.1 │\n"
        "╰────────────────────────────────────────────╯\n"
        for n in range(1, 50)
    )
    scores = part_of(tmp_path, panels).get("reward")
    assert scores is not None
    assert [point.step for point in scores.points] == list(range(1, 50))
