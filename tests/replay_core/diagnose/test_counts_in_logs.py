"""What a run counts of its samples, calls, turns and steps: what is lost is told, what runs do that are well is not."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from replay_core.diagnose.finding import Diagnosis
from replay_core.diagnose.signal_names import named
from replay_core.dumps.console_lines import pairs_in
from tests.replay_core.diagnose.agents import Counts, World, prime, train
from tests.replay_core.diagnose.logs import diagnosed, only, trl, verl, worrying

SEEDS = range(3)
OURS = {f"L{number}" for number in range(80, 90)}


def ours(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    return [(one.id, one.severity) for one in diagnosis.findings if one.id in OURS]


def alarms(diagnosis: Diagnosis) -> list[str]:
    return [one.id for one in worrying(diagnosis)]


@pytest.mark.parametrize(
    ("name", "signal"),
    [
        ("generate/num_error_trajectories", "lost_count"), ("generate/num_hard_verifier_failures", "lost_count"),
        ("generate/trajectories_context_length_exceeded", "left_count"), ("generate/batch_num_seq", "batch_count"),
        ("generate/num_masked_instances", "left_count"), ("async/num_groups_dropped", "left_count"),
        ("async/keep_rate", "kept_share"), ("Trainable", "kept_share"), ("train/agg/all/has_error/mean", "lost_share"),
        ("Cancelled", "left_share"), ("rollout/dynamic_filter/drop_zero_std_0.0", "filtered_count"),
        ("tools/failure_frequency", "tool_failures"), ("num_turns/max", "turns_max"), ("mtp_1_loss", "draft_loss"),
        ("timing_s/agent_loop/num_preempted/mean", "preempted"), ("global_seqlen/balanced_max", "most_tokens"),
        ("grpo_actor/no_eos_ratios/avg", "truncated"),
        ("grpo_actor/version_stats/sample_staleness_theta_avg", "weight_lag"),
    ],
)  # fmt: skip
def test_counts_are_known_by_their_words(name: str, signal: str) -> None:
    found = named(name)
    assert found is not None
    assert found.signal == signal


@pytest.mark.parametrize(
    "name",
    ["error", "error_rate", "wer/error_rate", "failure_rate", "env/failure_rate", "failed_trajectories",
     "masked_ratio", "dropout", "trainable_ratio", "num_failed", "val/num_errors", "eval/has_error/mean"],
)  # fmt: skip
def test_what_may_be_a_wrong_answer_or_tokens_is_no_lost_sample(name: str) -> None:
    found = named(name)
    assert found is None or found.signal not in ("lost_share", "lost_count", "left_share", "left_count", "kept_share")


def test_a_part_of_a_whole_is_its_share() -> None:
    assert dict(pairs_in("Trainable 8/512 (1.6%) | Turns 1.0"))["Trainable"] == 8 / 512
    assert "Epoch" not in dict(pairs_in("Epoch 3/10 (12.0%) | loss 0.1"))


@pytest.mark.parametrize("seed", SEEDS)
def test_runs_that_learn_are_quiet(seed: int, tmp_path: Path) -> None:
    for number, world in enumerate((World(), World(tool=lambda step: 0.5), World(begins=-2.0))):
        assert alarms(diagnosed(tmp_path, prime(train(world, 40, seed + 10 * number)))) == []


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_environments_that_break_are_told(share: float, seed: int, tmp_path: Path) -> None:
    found = only(diagnosed(tmp_path, prime(train(World(breaks=lambda step: share), 30, seed))), "L80")
    assert found.severity == "warning"
    assert "end in an error: Error is" in found.claim


@pytest.mark.parametrize("seed", SEEDS)
def test_environments_that_break_more_and_more_are_told_with_their_beginning(seed: int, tmp_path: Path) -> None:
    run = train(World(breaks=lambda step: min(0.7, 0.02 * step)), 40, seed)
    found = only(diagnosed(tmp_path, prime(run)), "L80")
    assert found.severity == "warning"
    assert "at first" in found.claim


@pytest.mark.parametrize("seed", SEEDS)
def test_few_errors_and_those_that_pass_are_no_warning(seed: int, tmp_path: Path) -> None:
    def passing(step: int) -> float:
        return max(0.02, 0.6 - 0.03 * step)

    for breaks in (lambda step: 0.05, lambda step: 0.5 if step == 12 else 0.02, passing):
        told = ours(diagnosed(tmp_path, prime(train(World(breaks=breaks), 40, seed))))
        assert ("L80", "warning") not in told


@pytest.mark.parametrize("seed", SEEDS)
def test_samples_left_out_are_a_warning_where_they_are_too_old_or_most(seed: int, tmp_path: Path) -> None:
    def told(share: float, age: int) -> list[tuple[str, str]]:
        run = train(World(cancels=lambda step: share), 30, seed)
        return [each for each in ours(diagnosed(tmp_path, prime(run, age))) if each[0] == "L80"]

    assert told(0.45, 8) == [("L80", "warning")]
    assert told(0.45, 2) == [("L80", "info")]
    assert told(0.7, 2) == [("L80", "warning")]
    assert told(0.1, 8) == told(0.2, 2) == []


def skyrl(run: Sequence[Mapping[str, float]]) -> str:
    draw = random.Random(3)
    return "".join(
        f"(skyrl_entrypoint pid=8123) 2026-04-02 11:{step:02}:20.112 | INFO     | "
        "skyrl_train.utils.tracking:log:80 - "
        + str({
            "reward/avg_raw_reward": 0.4 + 0.05 * draw.random(), "policy/policy_entropy": 0.4 + 0.02 * draw.random(),
            "policy/raw_grad_norm": 0.3 + 0.03 * draw.random(), "timing/step": 60 + 8 * draw.random(),
            **one, "trainer/global_step": step,
        })
        + "\n"
        for step, one in enumerate(run, 1)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "claim"),
    [
        ("generate/num_error_trajectories", "59% of the samples end in an error"),
        ("generate/num_hard_verifier_failures", "59% of the samples end in an error"),
    ],
)
def test_a_count_is_told_beside_the_size_of_its_batch_alone(name: str, claim: str, tmp_path: Path) -> None:
    counts = [{name: 300.0} for _ in range(12)]
    assert ours(diagnosed(tmp_path, skyrl(counts))) == []
    found = only(diagnosed(tmp_path, skyrl([one | {"generate/batch_num_seq": 512} for one in counts])), "L80")
    assert found.claim.startswith(claim)
    assert "300 of 512" in found.claim
    # Groups are no samples.
    beside = [{"async/num_groups_dropped": 300, "generate/batch_num_seq": 512} for _ in range(12)]
    assert ours(diagnosed(tmp_path, skyrl(beside))) == []


def test_long_samples_that_are_lost_are_told_from_most_on(tmp_path: Path) -> None:
    name = "generate/trajectories_context_length_exceeded"
    for count, severity in ((50, []), (200, [("L80", "info")]), (400, [("L80", "warning")])):
        run = [{name: count + 3 * (step % 3), "generate/batch_num_seq": 512} for step in range(12)]
        assert ours(diagnosed(tmp_path, skyrl(run))) == severity


@pytest.mark.parametrize("seed", SEEDS)
def test_a_small_part_that_is_trained_on_is_told_and_half_is_not(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    for share, severity in ((0.5, []), (0.35, []), (0.17, [("L81", "info")]), (0.06, [("L81", "warning")])):
        run = [{"async/keep_rate": share * (0.9 + 0.2 * draw.random())} for _ in range(15)]
        assert ours(diagnosed(tmp_path, skyrl(run))) == severity


def solved(seed: int) -> list[Counts]:
    """A run whose prompts are all solved in the end: hardly a group teaches any more."""
    return train(World(tool=lambda step: 0.5 + 0.05 * step, alone=lambda step: 0.3 + 0.05 * step), 40, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_prompts_that_are_solved_are_no_warning(seed: int, tmp_path: Path) -> None:
    assert ("L81", "warning") not in ours(diagnosed(tmp_path, prime(solved(seed))))


def slime(dropped: list[float], reason: str = "0.0") -> str:
    draw = random.Random(8)
    return "".join(
        f"(MegatronTrainRayActor pid=733) [2026-02-03 11:{step:02}:10] model.py:640 - step {step}: "
        + str({
            "train/loss": 0.01 * draw.random(), "train/entropy_loss": 0.4 + 0.02 * draw.random(),
            "train/grad_norm": 0.3 + 0.02 * draw.random(), "rollout/raw_reward": 0.5 + 0.05 * draw.random(),
            f"rollout/dynamic_filter/drop_zero_std_{reason}": number,
        })
        + "\n"
        for step, number in enumerate(dropped)
    )  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
def test_ever_more_groups_that_are_thrown_away_are_told_and_as_many_as_ever_are_not(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    noise = [0.85 + 0.3 * draw.random() for _ in range(24)]
    grows = [20 * 1.17**step * each for step, each in enumerate(noise)]
    assert ours(diagnosed(tmp_path, slime(grows))) == [("L81", "warning")]
    # Prompts that are solved are learnt.
    assert ours(diagnosed(tmp_path, slime(grows, "1.0"))) == [("L81", "info")]
    for steady in ([128 * each for each in noise], [20 * (1 + step / 24) * each for step, each in enumerate(noise)]):
        assert ours(diagnosed(tmp_path, slime(steady))) == []
    trained = [float(one.dropped) for one in train(World(drawn=4), 24, seed)]
    assert ours(diagnosed(tmp_path, slime(trained))) == []


def tools(run: list[Counts]) -> str:
    return trl([
        {"reward": one.reward, "rewards/accuracy/mean": one.reward, "tools/call_frequency": one.calls,
         "tools/failure_frequency": one.failed, "frac_reward_zero_std": 1 - one.trainable / one.total,
         "grad_norm": 0.4 + 0.001 * (one.broken % 7), "entropy": 0.6 + 0.002 * (one.cancelled % 5)}
        for one in run
    ])  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
def test_calls_that_fail_are_told_and_few_failures_are_not(seed: int, tmp_path: Path) -> None:
    down = train(World(fails=lambda step: 0.9, rate=0.02), 30, seed)
    assert ("L82", "warning") in ours(diagnosed(tmp_path, tools(down)))
    learnt = train(World(fails=lambda step: max(0.05, 0.8 - 0.03 * step)), 40, seed)
    for run in (train(World(), 40, seed), learnt):
        assert not {"L82", "L83"} & {
            one for one, severity in ours(diagnosed(tmp_path, tools(run))) if severity != "info"
        }


@pytest.mark.parametrize("seed", SEEDS)
def test_a_tool_that_is_given_up_is_a_warning_where_the_reward_falls(seed: int, tmp_path: Path) -> None:
    def breaks(step: int) -> float:
        return 0.9 if step < 40 else 0.0

    # What goes down is a tool that was of use: without it fewer answers are right.
    lost = ours(
        diagnosed(tmp_path, tools(train(World(tool=breaks, alone=lambda step: 0.4, rate=2.5, begins=0.5), 160, seed)))
    )
    assert ("L83", "warning") in lost
    # A tool that never was of use is given up, and the reward rises.
    useless = ours(
        diagnosed(
            tmp_path,
            tools(train(World(tool=lambda step: 0.1, alone=lambda step: 0.6, rate=0.25, begins=1.0), 120, seed)),
        )
    )
    assert [each for each in useless if each[0] == "L83"] == [("L83", "info")]


def turns(mean: Callable[[int], float], most: Callable[[int], int], least: int = 2, falls: bool = False) -> str:
    draw = random.Random(4)
    return verl([
        {"num_turns/mean": mean(step) + 0.02 * draw.random(), "num_turns/max": most(step), "num_turns/min": least,
         "critic/score/mean": (0.6 - 0.012 * step if falls else 0.5) + 0.02 * draw.random(),
         "actor/entropy": 0.4 + 0.01 * draw.random(), "actor/grad_norm": 0.2 + 0.01 * draw.random()}
        for step in range(24)
    ])  # fmt: skip


def test_turns_at_either_end_are_worth_knowing_and_a_warning_where_the_reward_falls(tmp_path: Path) -> None:
    ends = [
        (lambda step: min(15.6, 3 + 0.8 * step), lambda step: 16),
        (lambda step: max(2.0, 6 - 0.3 * step), lambda step: max(2, 12 - step)),
    ]
    for mean, most in ends:
        assert ours(diagnosed(tmp_path, turns(mean, most))) == [("L83", "info")]
        assert ("L83", "warning") in ours(diagnosed(tmp_path, turns(mean, most, falls=True)))
    # More turns that are not at a limit, or fewer that are not the fewest.
    for mean, most in [
        (lambda step: 3 + 0.3 * step, lambda step: 14 + step % 5),
        (lambda step: 6 - 0.1 * step, lambda step: 12),
    ]:
        assert ours(diagnosed(tmp_path, turns(mean, most))) == []


def test_tools_that_take_ever_longer_are_a_warning_where_steps_do(tmp_path: Path) -> None:
    def text(each: float, whole: float) -> str:
        draw = random.Random(5)
        return verl([
            {"timing_s/agent_loop/tool_calls/mean": 2 * each**step + 0.1 * draw.random(),
             "timing_s/step": 60 * whole**step + draw.random(), "actor/grad_norm": 0.2 + 0.01 * draw.random()}
            for step in range(24)
        ])  # fmt: skip

    assert ours(diagnosed(tmp_path, text(1.13, 1.0))) == [("L89", "info")]
    assert ("L89", "warning") in ours(diagnosed(tmp_path, text(1.13, 1.04)))
    assert ours(diagnosed(tmp_path, text(1.02, 1.0))) == []


def test_tools_that_take_as_long_as_ever_and_are_called_more_are_worth_knowing(tmp_path: Path) -> None:
    draw = random.Random(5)
    steps = [
        {"timing_s/agent_loop/tool_calls/mean": 1.5 * calls + 0.1 * draw.random(), "num_turns/mean": 1 + calls,
         "timing_s/step": 50 + 5 * calls + draw.random(), "actor/grad_norm": 0.2 + 0.01 * draw.random()}
        for calls in (1 + step / 3 for step in range(30))
    ]  # fmt: skip
    assert ours(diagnosed(tmp_path, verl(steps))) == [("L89", "info")]


def megatron(skipped: Callable[[int], int], scale: Callable[[int], float]) -> str:
    draw = random.Random(6)
    return "".join(
        f" [2026-01-12 01:{line:02}:11] iteration {10 * line:8}/    5000 | consumed samples: {2560 * line:12} | "
        f"elapsed time per iteration (ms): {4200 + 40 * draw.random():.1f} | learning rate: 3.000000E-05 | "
        f"global batch size:   256 | lm loss: {2.5 - 0.01 * line + 0.01 * draw.random():.6E} | "
        f"loss scale: {scale(line):.1f} | grad norm: {0.9 + 0.1 * draw.random():.3f} | "
        f"number of skipped iterations: {skipped(line):3} | number of nan iterations:   0 |\n"
        for line in range(1, 25)
    )


def test_steps_that_are_skipped_are_told_and_a_scale_that_is_looked_for_is_not(tmp_path: Path) -> None:
    found = only(diagnosed(tmp_path, megatron(lambda line: 10 if line > 5 else 0, lambda line: 1.0)), "L84")
    assert found.severity == "error"
    assert "100% of the steps" in found.claim
    assert only(diagnosed(tmp_path, megatron(lambda line: 3, lambda line: 65536.0)), "L84").severity == "warning"
    gone = megatron(lambda line: 1, lambda line: max(1.0, 65536.0 / 2**line))
    assert "the loss scale falls" in only(diagnosed(tmp_path, gone), "L84").claim
    # fp16 looks for its scale; later one step in a thousand overflows, and the scale grows again. bf16 has none.
    fits = megatron(lambda line: 10 if line < 3 else int(line == 14), lambda line: max(65536.0, 2.0 ** (32 - 5 * line)))
    for text in (fits, megatron(lambda line: 0, lambda line: 1.0)):
        assert ours(diagnosed(tmp_path, text)) == []


@pytest.mark.parametrize(
    ("low", "high", "mean", "told"),
    [(41e3, 221e3, 98e3, "warning"), (60e3, 130e3, 98e3, "info"), (96e3, 100e3, 98e3, None), (70e3, 120e3, 98e3, None)],
)
def test_ranks_that_wait_are_told(low: float, high: float, mean: float, told: str | None, tmp_path: Path) -> None:
    draw = random.Random(7)
    text = verl([
        {"global_seqlen/balanced_min": low + 900 * draw.random(), "global_seqlen/balanced_max": high,
         "global_seqlen/mean": mean, "actor/grad_norm": 0.2 + 0.01 * draw.random()}
        for _ in range(16)
    ])  # fmt: skip
    assert ours(diagnosed(tmp_path, text)) == ([] if told is None else [("L85", told)])


@pytest.mark.parametrize(("mean", "told"), [(2.1, "warning"), (0.4, "info"), (0.02, None), (-1.0, None)])
def test_requests_that_are_preempted_are_told(mean: float, told: str | None, tmp_path: Path) -> None:
    draw = random.Random(7)
    text = verl([
        {"timing_s/agent_loop/num_preempted/mean": mean * (0.9 + 0.2 * draw.random()) if mean > 0 else mean,
         "actor/grad_norm": 0.2 + 0.01 * draw.random()}
        for _ in range(16)
    ])  # fmt: skip
    assert ours(diagnosed(tmp_path, text)) == ([] if told is None else [("L86", told)])


def test_drafts_that_do_not_follow_are_worth_knowing(tmp_path: Path) -> None:
    draw = random.Random(2)
    lines = slime([20] * 24).splitlines()
    for rises, told in ((1.12, [("L87", "info")]), (1.01, [])):
        body = "\n".join(
            line.replace(
                "'train/loss'", f"'train/mtp_1_loss': {0.4 * rises**step + 0.01 * draw.random()}, 'train/loss'"
            )
            for step, line in enumerate(lines)
        )
        assert ours(diagnosed(tmp_path, body)) == told


def demonstrations(losses: list[float], epochs: float = 1.0) -> str:
    draw = random.Random(9)
    return "".join(
        str({"loss": round(loss, 4), "grad_norm": 0.7 + 0.1 * draw.random(), "learning_rate": 1e-5,
             "epoch": round(epochs * (n + 1) / len(losses), 4)})
        + "\n"
        for n, loss in enumerate(losses)
    )  # fmt: skip


def test_a_loss_of_a_uniform_guess_is_told_and_a_beginning_from_nothing_is_not(tmp_path: Path) -> None:
    draw = random.Random(1)
    for vocabulary in (10.37, 11.93, 12.45):
        stays = [vocabulary - 0.002 * step + 0.02 * draw.random() for step in range(24)]
        assert only(diagnosed(tmp_path, demonstrations(stays)), "L88").severity == "warning"
        falls = [max(4.0, vocabulary - 0.2 * step) + 0.05 * draw.random() for step in range(24)]
        assert ours(diagnosed(tmp_path, demonstrations(falls))) == []


def test_a_loss_that_falls_in_stairs_is_worth_knowing(tmp_path: Path) -> None:
    draw = random.Random(1)

    def text(levels: tuple[float, ...], slope: float) -> str:
        values = [level - slope * n + 0.02 * level * draw.random() for level in levels for n in range(10)]
        return demonstrations(values, float(len(levels)))

    assert only(diagnosed(tmp_path, text((1.4, 0.5, 0.17), 0.0)), "L43").severity == "info"
    for levels, slope in (((1.4, 1.2, 1.1), 0.0), ((1.4, 0.7, 0.3), 0.04)):
        assert "L43" not in [one.id for one in diagnosed(tmp_path, text(levels, slope)).findings]
