"""Rules that hold several figures of a log together, on runs that were really trained (`naming.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.replay_core.diagnose.logs import diagnosed, only, told, worrying
from tests.replay_core.diagnose.naming import Recipe, as_nemo_rl, as_openrlhf, as_slime, as_trl, train


@pytest.mark.parametrize("write", [as_trl, as_openrlhf, as_slime, as_nemo_rl])
def test_a_run_that_learns_is_well_in_every_form(tmp_path: Path, write) -> None:  # type: ignore[no-untyped-def]
    steps = train(Recipe(steps=80, lr=0.02))
    assert steps[-1]["reward"] > 0.9 > 0.5 > steps[0]["reward"]
    assert worrying(diagnosed(tmp_path, write(steps))) == []


def test_rewards_that_differ_by_rounding_alone_are_no_full_size_advantages(tmp_path: Path) -> None:
    recipe = {"lr": 0.02, "steps": 80, "prompts": 3, "jitter": 2e-7}
    found = diagnosed(tmp_path, as_trl(train(Recipe(**recipe, epsilon=0.0))))  # type: ignore[arg-type]
    assert told(found)[0] == ("D125", "warning")
    assert "rounding alone" in found.findings[0].claim
    # TRL's epsilon beside the std makes nothing of the same noise.
    well = diagnosed(tmp_path, as_trl(train(Recipe(**recipe, epsilon=1e-4))))  # type: ignore[arg-type]
    assert "D125" not in [id for id, _ in told(well)]


def test_a_rate_that_destroys_the_policy_leads_over_what_follows(tmp_path: Path) -> None:
    steps = train(Recipe(lr=3.0, warmup=6, kl=0.02, seed=3))
    assert steps[-1]["reward"] < 0.1 < steps[0]["reward"]
    found = diagnosed(tmp_path, as_trl(steps))
    assert told(found)[0] == ("L59", "error")
    assert 1 <= only(found, "L59").steps[0] <= 12


def test_a_large_rate_of_a_run_that_learns_is_none(tmp_path: Path) -> None:
    assert "L59" not in [id for id, _ in told(diagnosed(tmp_path, as_trl(train(Recipe(lr=0.02, steps=80)))))]


@pytest.mark.parametrize("write", [as_slime, as_nemo_rl])
def test_the_same_prompts_in_every_step_are_learnt_by_heart(tmp_path: Path, write) -> None:  # type: ignore[no-untyped-def]
    steps = train(Recipe(same=2, prompts=2, lr=0.02))
    assert steps[-1]["reward"] > 0.9
    assert steps[-1]["held_out"] < 0.6
    found = diagnosed(tmp_path, write(steps))
    assert told(found)[0] == ("L60", "warning")


def test_dropout_that_stays_on_shows_in_a_batchs_only_update(tmp_path: Path) -> None:
    steps = train(Recipe(dropout=0.15, lr=0.003))
    found = diagnosed(tmp_path, as_openrlhf(steps))
    assert told(found)[0] == ("D14", "warning")
    # Two updates of a batch move its ratio: where they are stated there is nothing to say.
    twice = diagnosed(tmp_path, as_openrlhf(steps, train_batch_size=36))
    assert "D14" not in [one.id for one in worrying(twice)]


PRIME = (
    "13:21:57 SUCCESS Step {n} |     21s | Reward 0.4722 | Trainable 66/72 (91.7%) | Turns 1.0 | Branches 1.0 | Max "
    "Off-Policy {lag} | Error 0.0% | Cancelled 0.0% | Truncation 0.0%\n"
    "13:22:01 SUCCESS Step {n} |      4s | Loss -0.0{a} | Entropy 1.1{a} | Mismatch KL 0.000{a} | Grad. Norm 0.5{a} "
    "| LR 7.00e-04 | Throughput 3139 tokens/s | MFU 10.6% | Peak Mem. 21.4 GiB\n"
)


def test_prime_rls_console_tells_how_old_its_samples_are(tmp_path: Path) -> None:
    grown = "".join(PRIME.format(n=n, lag=n // 3, a=10 + n % 7) for n in range(1, 61))
    assert ("D31", "error") in told(diagnosed(tmp_path, grown))
    bounded = "".join(PRIME.format(n=n, lag=min(n, 3), a=10 + n % 7) for n in range(1, 61))
    assert "D31" not in [id for id, _ in told(diagnosed(tmp_path, bounded))]


def test_a_scheduler_that_requeues_a_job_gives_no_rollout_out_again(tmp_path: Path) -> None:
    text = as_trl(train(Recipe())) + "--- requeued, attempt 2 ---\nslurmctld: job 99127 requeued\n"
    assert "L29" not in [id for id, _ in told(diagnosed(tmp_path, text))]


WATCHDOG = (
    "(WorkerDict pid=118) [rank{rank}]:[E511 11:52:40.270114 ProcessGroupNCCL.cpp:683] [Rank {rank}] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum={number}, OpType={op}, NumelIn=29196288, NumelOut=116785152, "
    "Timeout(ms)=600000) ran for 600031 milliseconds before timing out.\n"
)
GONE = (
    "(raylet) A worker died or was killed while executing a task by an unexpected system error. To troubleshoot the "
    "problem, check the logs for the dead worker. RayTask ID: ffffffffffffffffe8cb76360aa2\n"
)


def test_a_worker_that_is_gone_behind_a_wait_was_taken_down_by_it(tmp_path: Path) -> None:
    waits = WATCHDOG.format(rank=0, number=48213, op="_ALLGATHER_BASE")
    waits += WATCHDOG.format(rank=3, number=48197, op="_REDUCE_SCATTER_BASE")
    behind = only(diagnosed(tmp_path, as_trl(train(Recipe(steps=12))) + waits + GONE), "L06")
    assert "waited up to 600 s" in behind.claim
    assert "rank 3 is elsewhere" in behind.claim


SLURM = (
    "srun: error: gpu-n14: task 0: Aborted (core dumped)\n"
    "slurmstepd: error: *** STEP 2231877.0 ON gpu-n14 CANCELLED AT 2026-06-21T02:37:53 ***\n"
    "srun: error: gpu-n15: tasks 4-7: Killed\n"
)


def test_a_step_that_slurm_ends_behind_a_wait_is_its_end(tmp_path: Path) -> None:
    steps = as_trl(train(Recipe(steps=12)))
    each = [f"{n}: " + WATCHDOG.format(rank=n, number=48213, op="_ALLGATHER_BASE")[21:] for n in range(8)]
    waits = "".join(line for n, line in enumerate(each) if n != 5)
    behind = only(diagnosed(tmp_path, steps + waits + SLURM), "L06")
    assert "hung" in behind.claim
    assert "and rank 5 did not join" in behind.claim
    assert "rank 5 is the one rank" in behind.cause
    alone = only(diagnosed(tmp_path, steps + SLURM), "L06")
    assert "waited" not in alone.claim
    # A limit of time is what ended it, and what waits for a rank that was ended follows.
    limit = "slurmstepd: error: *** JOB 22318 ON n14 CANCELLED AT 2026-06-21T02:37:53 DUE TO TIME LIMIT ***\n"
    assert "TIME LIMIT" in only(diagnosed(tmp_path, steps + limit + waits), "L06").claim


def test_a_node_whose_log_is_elsewhere_may_have_joined(tmp_path: Path) -> None:
    waits = "".join(WATCHDOG.format(rank=n, number=48213, op="_ALLGATHER_BASE") for n in range(8, 32))
    found = only(diagnosed(tmp_path, as_trl(train(Recipe(steps=12))) + waits), "L06")
    assert "for the others" in found.claim


def test_ranks_of_one_group_that_all_wait_miss_none_of_another(tmp_path: Path) -> None:
    waits = "".join(WATCHDOG.format(rank=n, number=7, op="ALLREDUCE") for n in (0, 2, 4, 6))
    found = only(diagnosed(tmp_path, as_trl(train(Recipe(steps=12))) + waits), "L06")
    assert "for the others" in found.claim


UNFIT = """\
(SGLangEngine pid=224) [TP0] Scheduler hit an exception: Traceback (most recent call last):
(SGLangEngine pid=224)   File "/sgl/sglang/srt/managers/scheduler.py", line 2945, in run_scheduler_process
(SGLangEngine pid=224)     scheduler.event_loop_overlap()
(SGLangEngine pid=224)   File "/sgl/sglang/srt/managers/scheduler_update_weights_mixin.py", line 68, in \
update_weights_from_distributed
(SGLangEngine pid=224)     assert success, message
(SGLangEngine pid=224)   File "/sgl/sglang/srt/layers/linear.py", line 906, in weight_loader
(SGLangEngine pid=224)     assert param_data.shape == loaded_weight.shape
(SGLangEngine pid=224) AssertionError: model.layers.0.mlp.gate_up_proj.weight: parameter torch.Size([1024, 1024]), \
received torch.Size([1152, 1024])
"""


def test_weights_that_do_not_fit_the_engine_lead_over_the_assertion(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, as_slime(train(Recipe(steps=12))) + UNFIT)
    assert found.findings[0].id == "L06"
    assert "do not fit the engine's" in found.findings[0].claim


KERNEL = """\
(EngineCore_DP0 pid=311) ERROR 05-19 [core.py:866] EngineCore encountered a fatal error.
(EngineCore_DP0 pid=311) ERROR 05-19 [core.py:866] Traceback (most recent call last):
(EngineCore_DP0 pid=311) ERROR 05-19 [core.py:866]   File "/opt/vllm/v1/sample/sampler.py", line 187, in sample
(EngineCore_DP0 pid=311) ERROR 05-19 [core.py:866]     logits_sort, logits_idx = logits.sort(dim=-1)
(EngineCore_DP0 pid=311) ERROR 05-19 [core.py:866] torch.AcceleratorError: CUDA error: an illegal memory access was \
encountered
Traceback (most recent call last):
  File "/opt/nemo-rl/examples/run_grpo.py", line 212, in <module>
    main()
vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.
"""


def test_a_kernel_that_fails_in_the_engine_is_said_to_be_its(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, as_nemo_rl(train(Recipe(steps=12))) + KERNEL)
    assert found.findings[0].id == "L06"
    assert "engine died of it" in found.findings[0].cause


def test_groups_that_are_solved_are_no_collapse_of_the_entropy(tmp_path: Path) -> None:
    steps = train(Recipe(lr=0.02, steps=80))
    found = diagnosed(tmp_path, as_trl(steps))
    assert any(step["frac_reward_zero_std"] == 1 for step in steps)
    assert "collapse" not in " ".join(one.cause for one in found.findings if one.id == "D01")


def test_a_loss_that_is_0_by_chance_is_not_so_by_construction(tmp_path: Path) -> None:
    steps = [{**step, "clip": 0.05, "loss": 0.01 * (n % 5 - 2)} for n, step in enumerate(train(Recipe()))]
    assert "D02" not in [id for id, _ in told(diagnosed(tmp_path, as_trl(steps)))]
