"""Logs that only show by what stays: a padded width, an evaluation of other weights, updates without an effect, a
critic that is never updated, a reference of another model; and who is waited for, which engine died, what a judge
failed on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from replay_core.diagnose.finding import Finding
from replay_core.diagnose.signal_names import named
from replay_core.dumps.log_settings import LogSettings
from replay_core.dumps.metric_lines import metric_line
from replay_core.dumps.rank_times import RankTimes
from tests.replay_core.diagnose.logs import diagnosed, diagnosed_path, only, part_of, trl, verl, worrying, written

N = 60


def waves(level: float, by: float, n: int = N, up: float = 0.0) -> list[float]:
    return [level + up * at / n + by * math.sin(2.3 * at) * math.cos(0.7 * at) for at in range(n)]


def of_columns(folder: Path, columns: Mapping[str, Sequence[float | None]]) -> list[Finding]:
    rows = [
        {name: value for name, value in zip(columns, row, strict=True) if value is not None}
        for row in zip(*columns.values(), strict=True)
    ]
    text = "".join(json.dumps({"step": at, **row}) + "\n" for at, row in enumerate(rows, 1))
    return worrying(diagnosed_path(written(folder, text, "own.jsonl")))


def every(values: Sequence[float], n: int = N) -> list[float | None]:
    """Evaluations of every so many steps."""
    apart = n // len(values)
    return [values[at // apart] if at % apart == 0 and at // apart < len(values) else None for at in range(n)]


# Widths.


@pytest.mark.parametrize("beside", ["generate/avg_num_tokens", "generate/max_num_tokens", "generate/min_num_tokens"])
def test_a_padded_width_is_no_length(beside: str, tmp_path: Path) -> None:
    columns: dict[str, Sequence[float]] = {
        "reward": waves(0.4, 0.05, up=0.3), "policy/response_length": [1024.0] * N, "loss": waves(0.0, 0.01),
        "grad_norm": waves(0.5, 0.05), beside: [round(one) for one in waves(300.0, 9.0)],
    }  # fmt: skip
    assert of_columns(tmp_path, columns) == []


def test_a_length_that_is_the_limit_is_one(tmp_path: Path) -> None:
    columns = {"reward": waves(0.4, 0.05), "response_length": [1024.0] * N, "loss": waves(0.0, 0.01),
               "response_length_max": [1024.0] * N}  # fmt: skip
    assert [one for one in of_columns(tmp_path, columns) if one.id == "L40"]


# Evaluations.


def evaluated(name: str, held: Sequence[float]) -> dict[str, Sequence[float | None]]:
    return {
        "critic/score/mean": waves(0.31, 0.04, up=0.45), "actor/entropy": waves(1.0, 0.02, up=-0.6),
        "actor/grad_norm": waves(0.5, 0.05), name: every(held),
    }  # fmt: skip


@pytest.mark.parametrize("name", [
    "val-core/gsm8k/acc/mean@4", "eval/gsm8k/avg@4", "evaluation/accuracy", "eval/eval_math500_pass1",
    "evals/math/pass@1",
    "held_out/accuracy", "eval-rollout/task_reward/avg", "validation/accuracy",
])  # fmt: skip
def test_an_evaluation_that_stays_where_training_began_is_of_other_weights(name: str, tmp_path: Path) -> None:
    assert named(name) is not None
    (found,) = of_columns(tmp_path, evaluated(name, [0.31, 0.29, 0.3, 0.32, 0.3, 0.29]))
    assert found.id == "L60"
    assert "does not see what training does" in found.claim
    assert "initial ones" in found.cause


@pytest.mark.parametrize("held", [
    [0.31, 0.36, 0.42, 0.5, 0.58, 0.63], [0.02, 0.03, 0.02, 0.02, 0.03, 0.02], [0.31, 0.24, 0.37, 0.41, 0.35, 0.44],
], ids=["follows", "far too hard", "wavers"])  # fmt: skip
def test_an_evaluation_that_follows_or_cannot_is_none(held: list[float], tmp_path: Path) -> None:
    assert of_columns(tmp_path, evaluated("val-core/gsm8k/acc/mean@4", held)) == []


def test_lines_of_an_evaluation_are_read() -> None:
    told = metric_line("SUCCESS Evaluated digits (Step 10) | Policy v10 |  12.09s | Reward 0.3691 | Truncation 0.0%")
    assert told == (10, {"eval/digits/reward": 0.3691})
    assert metric_line("Evaluated aime24 in 12.0s (Avg@4=0.25, Pass@4: 0.5)") == (
        None, {"eval/aime24/avg@4": 0.25, "eval/aime24/pass@4": 0.5})  # fmt: skip


# Updates.


def idle(**more: Sequence[float]) -> dict[str, Sequence[float]]:
    return {
        "train/reward": waves(0.5, 0.04), "train/approx_entropy": waves(0.8, 0.01), "train/grad_norm": waves(0.6, 0.1),
        "train/lr": [3e-4] * N, "train/probs_ratio_max": [1.0] * N, **more,
    }  # fmt: skip


def test_updates_without_an_effect(tmp_path: Path) -> None:
    (found,) = of_columns(tmp_path, idle())
    assert (found.id, found.severity) == ("D60", "warning")
    assert "no update has an effect" in found.claim
    head = "trainer: {train_batch_size: 12, policy_mini_batch_size: 6, update_epochs_per_batch: 2}\n"
    steps = [{"actor/pg_clipfrac": 0.0, "actor/ppo_kl": None, "actor/lr": 1e-6, "critic/score/mean": a,
              "actor/entropy": b, "actor/grad_norm": c, "actor/kl_loss": None}
             for a, b, c in zip(waves(0.5, 0.04), waves(0.8, 0.01), waves(0.6, 0.1), strict=True)]  # fmt: skip
    assert part_of(tmp_path, head + verl(steps)).algorithm.updates == 4
    assert "in spite of 4 updates" in only(diagnosed(tmp_path, head + verl(steps)), "D60").claim


@pytest.mark.parametrize("more", [
    {"train/probs_ratio_max": waves(1.4, 0.1)}, {"train/approx_entropy": waves(0.8, 0.01, up=-0.3)},
    {"train/reward": waves(0.5, 0.04, up=0.2)}, {"train/lr": [1e-7] * N}, {"train/grad_norm": [1e-5] * N},
], ids=["ratio", "entropy", "reward", "rate", "gradient"])  # fmt: skip
def test_what_moves_or_cannot_is_not_this(more: dict[str, Sequence[float]], tmp_path: Path) -> None:
    assert not [one for one in of_columns(tmp_path, idle(**more)) if one.id == "D60"]


# Critics.


def taught(values: Callable[[int, float], float]) -> dict[str, Sequence[float]]:
    paid = waves(0.35, 0.05, up=0.4)
    told = [values(at, one) for at, one in enumerate(paid)]
    return {
        "critic/score/mean": paid, "critic/values/mean": told, "critic/returns/mean": paid, "critic/lr": [1e-5] * N,
        "critic/vf_loss": [0.5 * ((a - b) ** 2 + 0.1) for a, b in zip(told, paid, strict=True)],
    }  # fmt: skip


def test_a_critic_that_stays_where_it_began(tmp_path: Path) -> None:
    (found,) = of_columns(tmp_path, taught(lambda at, paid: -0.3 + 0.02 * math.sin(at)))
    assert found.id == "D45"
    assert "the critic does not learn" in found.claim


@pytest.mark.parametrize("values", [
    lambda at, paid: paid * (1 - math.exp(-at / 3)), lambda at, paid: paid + 0.02 * math.sin(at),
], ids=["learns", "has learnt"])  # fmt: skip
def test_a_critic_that_learns(values: Callable[[int, float], float], tmp_path: Path) -> None:
    assert of_columns(tmp_path, taught(values)) == []


def test_a_critic_of_another_room_is_one() -> None:
    names = {"ppo_critic/update/value_loss/avg": "value_loss", "ppo_critic/update/values/avg": "value_mean",
             "ppo_critic/update/grad_norm": "critic_grad_norm", "critic/score/mean": "reward"}  # fmt: skip
    assert {raw: getattr(named(raw), "signal", None) for raw in names} == names


# The reference.


def referred(first: float, kl_of_updates: float | None) -> str:
    return verl([
        {"actor/kl_loss": first + 0.001 * at, "actor/ppo_kl": kl_of_updates, "actor/pg_clipfrac": 0.002}
        for at in range(20)
    ])  # fmt: skip


def test_a_kl_of_the_first_step_that_nothing_explains_is_another_reference(tmp_path: Path) -> None:
    found = only(diagnosed(tmp_path, referred(0.09, 2e-4)), "D15")
    assert found.severity == "warning"
    assert "another model" in found.claim


@pytest.mark.parametrize(("first", "own"), [(0.006, 2e-4), (0.09, 0.02), (0.001, 0.0001)])
def test_a_kl_of_the_first_step_that_updates_or_kernels_make_is_no_alarm(
    first: float, own: float, tmp_path: Path
) -> None:
    assert not worrying(diagnosed(tmp_path, referred(first, own)))


# What leads.


def test_an_entropy_that_leaves_its_range_first_leads(tmp_path: Path) -> None:
    entropy = [0.8 + 2.4 * min(max(at - 8, 0) / 20, 1.0) for at in range(N)]
    reward = [max(0.0, 0.55 - 0.06 * max(at - 20, 0)) for at in range(N)]
    cut = [min(1.0, 0.1 * max(at - 25, 0)) for at in range(N)]
    steps = [{"actor/entropy": e + 0.02 * math.sin(at), "critic/score/mean": r, "critic/score/max": float(r > 0),
              "response_length/clip_ratio": c, "response_length/mean": 800 + 900 * c, "response_length/max": 2048.0}
             for at, (e, r, c) in enumerate(zip(entropy, reward, cut, strict=True))]  # fmt: skip
    first = worrying(diagnosed(tmp_path, verl(steps)))[0]
    assert (first.id, first.severity) == ("D25", "error")
    assert "behind it the reward falls" in first.claim
    later = [each | {"actor/entropy": 0.8 + (1.9 if at > 30 else 0.0)} for at, each in enumerate(steps)]
    assert worrying(diagnosed(tmp_path, verl(later)))[0].id != "D25"


# Who is waited for.


def of_ranks(name: Callable[[int], str], slow: int | None, since: int = 30) -> dict[str, Sequence[float]]:
    whole = [60.0 + math.sin(at) + (24.0 if slow is not None and at >= since else 0.0) for at in range(N)]
    columns: dict[str, Sequence[float]] = {"timing_s/step": whole, "critic/score/mean": waves(0.3, 0.03, up=0.3)}
    for rank in range(8):
        columns[name(rank)] = [12 + 0.3 * math.sin(at + rank) + (24.0 if rank == slow and at >= since else 0.0)
                               for at in range(N)]  # fmt: skip
    return columns


@pytest.mark.parametrize("name", [
    lambda rank: f"timing_s/update_actor/rank_{rank}", lambda rank: f"timing/train/node_{rank}/policy_training",
    lambda rank: f"time/worker-{rank}/train",
], ids=["rank", "node", "worker"])  # fmt: skip
def test_a_straggler_is_named(name: Callable[[int], str], tmp_path: Path) -> None:
    found = next(one for one in of_columns(tmp_path, of_ranks(name, 3)) if one.id == "L100")
    assert " 3 is a straggler" in found.claim
    assert "since step 31" in found.claim
    assert of_columns(tmp_path, of_ranks(name, None)) == []


def megatron(line: Callable[[int, float], str], steps: int = 40) -> str:
    return "".join(
        f" [2026-11-17 15:50:40] iteration {at:8}/      {steps} | consumed samples: {96 * at} | elapsed time per "
        "iteration "
        f"(ms): {30000 + (21000 if at >= 25 else 0) + 90 * math.sin(at):.1f} | learning rate: 4.0E-06 | mean_reward: "
        f"{0.3 + 0.005 * at + 0.02 * math.sin(3 * at):.6E} |\n" + line(at, 21000.0 if at >= 25 else 0.0)
        for at in range(1, steps + 1)
    )


def test_megatrons_tables_of_ranks_name_the_slow_one(tmp_path: Path) -> None:
    def table(at: int, more: float) -> str:
        own = "".join(
            f"     rank {rank:2}: {11400 + 50 * rank + (more if rank == 5 else 0):.2f}\n" for rank in range(8)
        )
        wait = "".join(f"     rank {rank:2}: {300 + (0 if rank == 5 else more):.2f}\n" for rank in range(8))
        return f"times across ranks (ms):\n  forward-backward:\n{own}  all-grads-sync:\n{wait}"

    found = only(diagnosed(tmp_path, megatron(table)), "L100")
    assert "rank 5 is a straggler: forward-backward" in found.claim
    assert "since step 25" in found.claim
    waits = only(diagnosed(tmp_path, megatron(lambda at, more: table(at, more).replace(
        f"     rank  5: {11400 + 250 + more:.2f}\n", f"     rank  5: {11400 + 250:.2f}\n", 1))), "L100")  # fmt: skip
    assert "all ranks wait for rank 5" in waits.claim


def _stages(at: int, more: float) -> str:
    """Four stages of a pipeline, the last of which has the head: all phases of Megatron's second level."""
    phases = {
        "forward-compute": [7000, 7000, 7050, 10500], "backward-compute": [14000, 14050, 14000, 20800],
        "forward-recv": [0, 1000, 2000, 3000], "backward-recv": [6000, 4000, 2000, 0],
        "optimizer": [900, 905, 900, 900],
    }  # fmt: skip
    return "times across ranks (ms):\n" + "".join(
        f"  {name}:\n" + "".join(f"     rank {rank:2}: {value + at % 7:.2f}\n" for rank, value in enumerate(values))
        for name, values in phases.items()
    )


def test_stages_of_a_pipeline_wait_as_their_schedule_has_it(tmp_path: Path) -> None:
    stated = "  pipeline_model_parallel_size .................... 4\n"
    (finding,) = [one for one in diagnosed(tmp_path, stated + megatron(_stages)).findings if one.id == "L100"]
    assert finding.severity == "info"
    assert "head over the vocabulary" in finding.cause
    least = "(min, max) time across ranks (ms):\n    backward-compute ....: (14000.00, 20500.00)\n"
    (finding,) = [
        one for one in diagnosed(tmp_path, stated + megatron(lambda at, more: least)).findings if one.id == "L100"
    ]
    assert finding.severity == "info"


def test_the_least_and_most_of_ranks_say_that_one_is_slow(tmp_path: Path) -> None:
    found = only(diagnosed(tmp_path, megatron(
        lambda at, more: "(min, max) time across ranks (ms):\n    forward-backward ......: (11000.00, "
        f"{12000 + more:.2f})\n")), "L100")  # fmt: skip
    assert "one rank is slower than the others" in found.claim


def test_a_table_of_ranks_ends_where_it_does() -> None:
    times = RankTimes()
    assert times.take("  forward-backward:") is None
    assert times.take("max time across ranks (ms):") == {}
    assert times.take("    optimizer .......: 51.25") == {"optimizer/most of ranks": pytest.approx(0.05125)}
    assert times.take("saving checkpoint at iteration 3") is None
    assert times.take("    optimizer .......: 51.25") is None


# Engines.

_DEAD = """\
(SGLangEngine pid=13126) [16:24:55 TP0] Scheduler hit an exception: Traceback (most recent call last):
(SGLangEngine pid=13126)   File "/sgl/python/sglang/srt/managers/scheduler.py", line 3000, in run_scheduler_process
(SGLangEngine pid=13126)     scheduler.event_loop_overlap()
(SGLangEngine pid=13126) torch.AcceleratorError: CUDA error: an illegal memory access was encountered
(RolloutManager pid=13105) Health check failed for rollout engine 2 (ray timeout or error). Killing actor.
"""


def test_an_engine_that_dies_while_steps_go_on_is_no_restart(tmp_path: Path) -> None:
    before, after = verl([{}] * 12), verl([{"timing_s/gen": 70.0, "timing_s/step": 96.0}] * 12, first=13)
    found = only(diagnosed(tmp_path, before + _DEAD + after), "L06")
    assert found.severity == "error"
    assert "engine 2 died" in found.claim
    assert "was not started again: the run goes on with fewer, and timing_s/gen goes from 35 s to 70 s" in found.claim
    again = (
        before + _DEAD + "(RolloutManager pid=13105) Recovered 1 dead rollout engines (worker_type=regular)\n" + after
    )
    assert not [one for one in worrying(diagnosed(tmp_path, again)) if one.id == "L06"]
    anew = only(diagnosed(tmp_path, before + _DEAD + verl([{}] * 12, first=9)), "L06")
    assert "was started again" in anew.claim


# Judges.

_HEAD = "(TaskRunner pid=8) {'actor_rollout_ref': {'rollout': {'name': 'vllm',\n(TaskRunner pid=8)   'n': 8,\n" \
    "(TaskRunner pid=8)   'val_kwargs': {'temperature': 0.0,\n(TaskRunner pid=8)     'n': 1}}},\n" \
    "(TaskRunner pid=8)  'data': {'train_batch_size': 16}}\n"  # fmt: skip


def judged(fails: Callable[[int], int], score: Callable[[int], float]) -> str:
    text, steps = _HEAD, verl([{"critic/score/mean": score(at)} for at in range(1, N + 1)]).splitlines(keepends=True)
    for at, step in enumerate(steps, 1):
        many = fails(at)
        line = "(RewardManagerWorker pid=6) WARNING compute_score timed out after 30s"
        text += (
            f"{line}\n" * min(many, 1) + (f"{line} [repeated {many - 1}x across cluster]\n" if many > 1 else "") + step
        )
    return text


def test_a_judge_that_fails_from_one_step_on_is_told_with_that_step(tmp_path: Path) -> None:
    text = judged(lambda at: 1 if at < 40 and at % 3 == 0 else 100 if at >= 40 else 0,
                  lambda at: (0.5 if at < 40 else 0.1) + 0.03 * math.sin(at))  # fmt: skip
    found = only(diagnosed(tmp_path, text), "L29")
    assert (found.severity, found.where.step) == ("error", 40)
    assert "78% of the samples in each step from step 40 on" in found.claim
    assert "falls from" in found.claim


def test_a_judge_that_fails_on_one_sample_in_a_hundred_is_no_alarm(tmp_path: Path) -> None:
    text = judged(lambda at: 1 + at % 2, lambda at: 0.4 + 0.005 * at + 0.03 * math.sin(at))
    found = only(diagnosed(tmp_path, text), "L29")
    assert found.severity == "info"
    assert "1.2% of the samples, evenly" in found.claim
    assert found.steps[0] == 1


# Temperatures.


def test_what_an_evaluation_samples_with_is_none_of_the_trainings() -> None:
    settings = LogSettings()
    for line in ("'rollout': {'temperature': 0.7,", "'n': 8,", "'val_kwargs': {'temperature': 0.0,", "'n': 1}}},"):
        settings.take(line)
    assert settings.facts == {"temperature": 0.7, "rollout_n": 8.0}
    flow = LogSettings()
    flow.take("generator: {sampling_params: {temperature: 0.6}, eval_sampling_params: {temperature: 0.0}, n: 5}")
    assert flow.facts["temperature"] == 0.6


def test_a_stated_temperature_comes_first_of_a_mismatch_of_the_first_step(tmp_path: Path) -> None:
    head = "(TaskRunner pid=8) {'rollout': {'temperature': 0.7}}\n"
    steps = [{"training/rollout_probs_diff_mean": 0.06 + 0.004 * math.sin(at), "rollout_corr/k3_kl": None,
              "training/rollout_actor_probs_pearson_corr": None} for at in range(30)]  # fmt: skip
    found = only(diagnosed(tmp_path, head + verl(steps)), "D09")
    assert "the engine samples at temperature 0.7" in found.claim
    assert found.cause.startswith("the temperature")
    assert "temperature 0.7" not in only(diagnosed(tmp_path, verl(steps)), "D09").claim


# Counters.


def test_a_counter_of_an_epoch_is_none_of_the_run(tmp_path: Path) -> None:
    text = "".join(
        f"Epoch {at // 40 + 1}/3 Step {at % 40 + 1}/40 Train step {at + 1}/110 done.\n" + trl([{}], first=at + 1)
        for at in range(110)
    )
    assert not [one for one in diagnosed(tmp_path, text).findings if one.id == "L42"]
