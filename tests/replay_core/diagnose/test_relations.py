"""Rules that hold one series of a log against another, or against its own past: at their limits, and beside what a
healthy run shows.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from replay_core.diagnose.finding import Diagnosis
from replay_core.diagnose.signal_names import named
from tests.replay_core.diagnose.logs import diagnosed, only, verl, worrying

Line = dict[str, float]


def steps(count: int, change: Callable[[int, Line], None] | None = None) -> list[Line]:
    """A run that learns: what a home-grown trainer logs of it, each figure wavering as a batch's does."""
    rng, lines = random.Random(7), []
    for step in range(count):
        line = {
            "step": step, "reward": 0.3 + 0.5 * step / count + rng.gauss(0, 0.02),
            "reward_std": 0.3 + rng.gauss(0, 0.02),
            "entropy": 1.1 - 0.4 * step / count + rng.gauss(0, 0.01), "grad_norm": 0.4 * math.exp(rng.gauss(0, 0.15)),
            "resp_len": 300 + rng.gauss(0, 12), "loss": rng.gauss(0, 0.02), "kl_ref": 1e-3 * step + 1e-4 * rng.random(),
            "lr": 1e-6, "approx_kl": 2e-3 + abs(rng.gauss(0, 1e-3)), "clipfrac": 0.02 + 0.01 * rng.random(),
            "tokens_per_second": 9000 + rng.gauss(0, 100),
        }  # fmt: skip
        if change is not None:
            change(step, line)
        lines.append(line)
    return lines


def said(folder: Path, lines: Sequence[Line]) -> Diagnosis:
    return diagnosed(folder, "".join(json.dumps(line) + "\n" for line in lines))


def ids(diagnosis: Diagnosis) -> list[str]:
    return [one.id for one in worrying(diagnosis)]


def test_a_run_that_learns_is_told_of_nothing(tmp_path: Path) -> None:
    assert ids(said(tmp_path, steps(60))) == []


# ---- the log repeats itself


@pytest.mark.parametrize(("repeated", "found"), [(2, []), (3, ["L18"]), (20, ["L18"])])
def test_lines_that_say_the_line_before_again_are_cached(repeated: int, found: list[str], tmp_path: Path) -> None:
    lines = steps(30)
    lines += [{**lines[-1], "step": 30 + n} for n in range(repeated)]
    assert ids(said(tmp_path, lines)) == found


def test_times_may_go_on_while_the_metrics_are_cached(tmp_path: Path) -> None:
    lines = steps(30)
    lines += [{**lines[-1], "step": 30 + n, "tokens_per_second": 9000.0 + n} for n in range(5)]
    assert "all 7 figures that waver are the same in the last 5 steps" in only(said(tmp_path, lines), "L18").claim


@pytest.mark.parametrize(("since", "found"), [(33, []), (31, ["L18"])])
def test_a_reward_that_stands_still_alone_is_cached(since: int, found: list[str], tmp_path: Path) -> None:
    def change(step: int, line: Line) -> None:
        if step >= since:
            line["reward"] = 0.4321

    assert ids(said(tmp_path, steps(40, change))) == found


def test_a_reward_that_has_come_to_its_best_stands_still_and_is_well(tmp_path: Path) -> None:
    def change(step: int, line: Line) -> None:
        line["reward"] = 1.0 if step >= 40 else line["reward"]

    assert "L18" not in ids(said(tmp_path, steps(60, change)))


# ---- rewards that are the same in every step


@pytest.mark.parametrize(("wavers", "found"), [("reward_std", []), ("", ["L17"])])
def test_rewards_that_differ_in_a_batch_and_never_between_steps_are_cached(
    wavers: str, found: list[str], tmp_path: Path
) -> None:
    def change(step: int, line: Line) -> None:
        line.update({name: 0.4 for name in ("reward", "reward_std") if name != wavers})

    assert ids(said(tmp_path, steps(30, change))) == found


# ---- the scale of rewards


@pytest.mark.parametrize(
    ("times", "since", "found"),
    [(100, 20, ["L19"]), (100, 28, []), (3, 20, [])],
    ids=["a hundredfold", "two steps of it", "threefold"],
)
def test_rewards_of_another_scale_are_a_leap(times: float, since: int, found: list[str], tmp_path: Path) -> None:
    def change(step: int, line: Line) -> None:
        if step >= since:
            line["reward"], line["reward_std"] = times * line["reward"], times * line["reward_std"]

    assert ids(said(tmp_path, steps(30, change))) == found


def test_a_policy_that_finds_the_answer_at_once_is_no_leap(tmp_path: Path) -> None:
    def change(step: int, line: Line) -> None:
        line.update(reward=0.01 if step < 15 else 0.9, reward_max=1.0, reward_std=0.1 if step < 15 else 0.3)
        line["reward"] += 1e-4 * step

    assert ids(said(tmp_path, steps(30, change))) == []


# ---- held-out results


@pytest.mark.parametrize(
    ("falls", "found"), [(0.0, ["L60"]), (0.1, []), (0.3, ["L20"])], ids=["stays", "by a tenth", "by a third"]
)
def test_a_validation_that_falls_while_the_reward_rises_is_overfitting(
    falls: float, found: list[str], tmp_path: Path
) -> None:
    def change(step: int, line: Line) -> None:
        if step % 5 == 0:
            line["val/accuracy"] = 0.5 * (1 - falls * step / 60) + 0.001 * (step % 2)

    assert ids(said(tmp_path, steps(60, change))) == found


@pytest.mark.parametrize("raw", ["val/accuracy", "val-core/gsm8k/reward/mean@1", "eval_reward", "test/pass@1"])
def test_what_an_evaluation_says_of_answers_is_held_out(raw: str) -> None:
    name = named(raw)
    assert name is not None
    assert name.signal == "held_out"


# ---- clipping


@pytest.mark.parametrize(
    ("moved", "clip", "found"),
    [(0.3, 0.0, ["L21"]), (0.2, 0.0, []), (0.3, 0.1, [])],
    ids=["far and never clipped", "not so far", "clipped"],
)
def test_a_policy_that_moves_far_and_is_never_clipped_has_no_clip_range(
    moved: float, clip: float, found: list[str], tmp_path: Path
) -> None:
    lines = steps(20, lambda step, line: line.update(approx_kl=moved + 1e-3 * step, clipfrac=clip))
    assert ids(said(tmp_path, lines)) == found


def test_a_range_as_small_as_a_sequences_is_worth_knowing_and_no_warning(tmp_path: Path) -> None:
    found = said(tmp_path, steps(20, lambda step, line: line.update(approx_kl=1e-4, clipfrac=0.4 + 1e-3 * step)))
    assert [(one.id, one.severity) for one in found.findings if one.id == "D24"] == [("D24", "info")]


@pytest.mark.parametrize(("moved", "said_so"), [(0.0015, True), (0.01, False)])
def test_tokens_that_are_clipped_though_they_hardly_moved_tell_of_the_range(
    moved: float, said_so: bool, tmp_path: Path
) -> None:
    lines = steps(20, lambda step, line: line.update(approx_kl=moved, clipfrac=0.4 + 1e-3 * step))
    one = only(said(tmp_path, lines), "D24")
    assert ("although the policy hardly moves" in one.claim) is said_so
    assert ("the clip range (eps) is far too small" in one.cause) is said_so


# ---- gradients


def _piling(noise: float, growth: float) -> Callable[[int, Line], None]:
    rng = random.Random(1)

    def change(step: int, line: Line) -> None:
        line["grad_norm"] = 0.3 * (1 + growth * math.sqrt(step)) * math.exp(rng.gauss(0, noise))

    return change


@pytest.mark.parametrize(
    ("noise", "growth", "found"),
    [(0.005, 1.0, True), (0.1, 1.0, False), (0.005, 0.2, False)],
    ids=["smooth and large", "as batches waver", "smooth and not so large"],
)
def test_a_norm_that_grows_and_does_not_waver_is_a_sum_of_gradients(
    noise: float, growth: float, found: bool, tmp_path: Path
) -> None:
    diagnosis = said(tmp_path, steps(60, _piling(noise, growth)))
    assert ("D68" in ids(diagnosis)) is found
    if found:
        assert "zero_grad() is missing" in only(diagnosis, "D68").cause


def _short(norm: Callable[[int, random.Random], float]) -> list[Line]:
    rng = random.Random(3)
    return steps(16, lambda step, line: line.update(grad_norm=norm(step, rng)))


@pytest.mark.parametrize(
    ("norm", "found"),
    [
        (lambda step, rng: 3 + 2 * step + rng.gauss(0, 0.8), True),
        (lambda step, rng: 3 * math.sqrt(1 + step**2 / 2) * math.exp(rng.gauss(0, 0.03)), True),
        (lambda step, rng: 0.4 * (1 + 0.25 * step) * math.exp(rng.gauss(0, 0.02)), False),
        (lambda step, _rng: 0.4 * 1.35**step, False),
        (lambda step, rng: 3 * math.exp(rng.gauss(0, 0.4)) + 0.4 * step, False),
    ],
    ids=["a sum that wavers a little", "a sum of batches that differ", "grows slowly", "explodes", "wavers"],
)
def test_a_short_log_of_a_sum_of_gradients(
    norm: Callable[[int, random.Random], float], found: bool, tmp_path: Path
) -> None:
    assert ("D68" in ids(said(tmp_path, _short(norm)))) is found


@pytest.mark.parametrize(
    ("since", "times", "back", "found"),
    [(3, 1024, 99, True), (12, 512, 99, True), (3, 1024, 5, False), (6, 20, 99, False), (1, 1024, 99, False)],
    ids=["early", "late", "for two steps", "by little", "after one step"],
)
def test_a_norm_that_leaps_a_hundredfold_and_stays_is_of_another_scale(
    since: int, times: float, back: int, found: bool, tmp_path: Path
) -> None:
    def change(step: int, line: Line) -> None:
        line["grad_norm"] *= times if since <= step < back else 1.0

    told = [one for one in said(tmp_path, steps(16, change)).findings if one.id == "L02" and "from step" in one.claim]
    assert [one.severity for one in told if "times what it was" in one.claim] == ["warning"] * found


# ---- rewards that are gone


@pytest.mark.parametrize(
    ("length", "ends"),
    [
        (lambda _rng: 512.0, False),
        (lambda rng: 300 + rng.gauss(0, 12), True),
        (lambda rng: 900 + rng.gauss(0, 90), True),
    ],
    ids=["all at one length", "as before", "longer, of many lengths"],
)
def test_a_reward_that_is_lost_as_responses_stop_ending_is_not_the_judges(
    length: Callable[[random.Random], float], ends: bool, tmp_path: Path
) -> None:
    rng = random.Random(4)

    def change(step: int, line: Line) -> None:
        if step >= 10:
            line.update(reward=0.0, reward_std=0.0, grad_norm=0.0, resp_len=length(rng))

    found = only(said(tmp_path, steps(20, change)), "L17")
    assert ("no longer end" in found.claim) is not ends
    assert ("judge died" in found.cause) is ends


# ---- what does not move


def test_pairs_whose_rewards_are_all_0_have_the_policy_as_their_reference(tmp_path: Path) -> None:
    def pairs(step: int, margin: float) -> str:
        return str({
            "loss": 0.6931, "grad_norm": 2.0 + 0.01 * step, "learning_rate": 5e-7, "rewards/chosen": margin,
            "rewards/rejected": 0.0, "rewards/margins": margin, "logps/chosen": -120.0 - step, "step": step,
        })  # fmt: skip

    still = diagnosed(tmp_path, "\n".join(pairs(step, 0.0) for step in range(20)))
    assert "the reference is the policy itself" in only(still, "D46").cause
    moving = diagnosed(tmp_path, "\n".join(pairs(step, 1e-3 * step) for step in range(20)))
    assert "D46" not in ids(moving)


@pytest.mark.parametrize(("kl", "found"), [(1e-12, ["L14"]), (1e-5, [])])
def test_a_policy_that_stands_is_told_at_rates_of_sgd_too(kl: float, found: list[str], tmp_path: Path) -> None:
    lines = steps(30, lambda step, line: line.update(kl_ref=kl * (step + 1), lr=0.02))
    assert ids(said(tmp_path, lines)) == found


# ---- entropy, lengths, throughput


@pytest.mark.parametrize(
    ("left", "rises", "severity"),
    [
        (0.2, True, "info"),
        (0.2, False, "warning"),
        (0.06, True, "info"),
        (0.06, False, "warning"),
        (0.3, False, None),
    ],
)
def test_entropy_may_fall_while_the_reward_rises(
    left: float, rises: bool, severity: str | None, tmp_path: Path
) -> None:
    def change(step: int, line: Line) -> None:
        line["entropy"] = 1.1 * (1 - (1 - left) * step / 59)
        if not rises:
            line["reward"] = 0.5 + 0.01 * (step % 3)

    told = [one.severity for one in said(tmp_path, steps(60, change)).findings if one.id == "D25"]
    assert told == ([] if severity is None else [severity])


@pytest.mark.parametrize(("falls", "word"), [(True, "the sign of loss or advantage is turned"), (False, "paid for")])
def test_responses_that_shrink_as_the_reward_falls_are_the_sign(falls: bool, word: str, tmp_path: Path) -> None:
    def change(step: int, line: Line) -> None:
        line["resp_len"] = 300 - 250 * step / 60
        if falls:
            line["reward"] = 0.8 - line["reward"]

    assert word in only(said(tmp_path, steps(60, change)), "L09").cause


@pytest.mark.parametrize(("slows", "found"), [(2.0, ["D37"]), (1.3, [])])
def test_a_throughput_that_falls_is_told_where_no_time_is_logged(
    slows: float, found: list[str], tmp_path: Path
) -> None:
    def change(step: int, line: Line) -> None:
        line["tokens_per_second"] /= 1 + (slows - 1) * step / 45

    assert ids(said(tmp_path, steps(60, change))) == found


def test_an_engine_that_is_a_nat_apart_from_the_first_step_on_speaks_of_other_tokens(tmp_path: Path) -> None:
    def apart(gap: float) -> Diagnosis:
        return said(tmp_path, steps(20, lambda step, line: line.update(rollout_logprob_diff=gap + 0.01 * (step % 3))))

    assert "shifted by one token" in only(apart(2.1), "D09").cause
    assert "shifted by one token" not in only(apart(0.2), "D09").cause


@pytest.mark.parametrize(("zeros", "severity"), [(3, "info"), (15, "warning")])
def test_a_step_without_a_reward_is_no_warning_where_others_have_one(zeros: int, severity: str, tmp_path: Path) -> None:
    def change(step: int, line: Line) -> None:
        for name in ("reward_std", "approx_kl", "clipfrac"):
            line.pop(name)
        if 5 <= step < 5 + zeros:
            line["loss"] = line["grad_norm"] = 0.0

    assert only(said(tmp_path, steps(40, change)), "L01").severity == severity


# ---- the learning rate


def _cosine(step: int) -> float:
    return 1e-6 * (0.5 + 0.5 * math.cos(math.pi * (step % 20) / 20)) + 1e-8


def _linear(step: int) -> float:
    return 1e-6 * min(1.0, (step + 1) / 20) * (1 - step / 60)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (lambda step: 1e-6, ""),
        (_cosine, ""),
        (_linear, ""),
        (lambda step: 1e-6 * (100 if step == 20 else 1), "leaps 100 times at step 20, to 0.0001, and comes back"),
        (lambda step: 1e-6 * (4 if step == 20 else 1), ""),
        (lambda step: 1e-6 * (10 if step >= 20 else 1), "leaps 10 times at step 20"),
        (lambda step: 1e-6 * min(1, (step % 30 + 1) / 10), "warm-up begins again at step 30"),
        (lambda step: 1e-6 * (0.2 if step >= 20 else 1), ""),
        (lambda step: 1e-6 * (0.01 if step >= 20 else 1), "falls to a 100th at step 20"),
        (lambda step: 1e-6 * 0.1 ** (step // 20), ""),
    ],
    ids=[
        "constant",
        "restarts",
        "warmed up and let down",
        "a spike",
        "fourfold",
        "a leap",
        "resumed",
        "decays at once",
        "falls down",
        "stairs",
    ],
)
def test_a_learning_rate_does_what_a_schedule_does(
    schedule: Callable[[int], float], words: str, tmp_path: Path
) -> None:
    found = [one.claim for one in worrying(said(tmp_path, steps(60, lambda n, line: line.update(lr=schedule(n)))))]
    assert len(found) == bool(words)
    assert all(words in claim for claim in found)


@pytest.mark.parametrize("lost", [True, False], ids=["for good", "for two steps"])
def test_a_leap_of_the_learning_rate_after_which_the_reward_is_gone(lost: bool, tmp_path: Path) -> None:
    def leaps(n: int, line: Line) -> None:
        line.update(lr=1e-6 * (60 if n >= 20 else 1))
        if n > 20 and (lost or n < 23):
            line.update(reward=0.01)

    found = worrying(said(tmp_path, steps(60, leaps)))
    assert [one.severity for one in found if one.id == "L22"] == ["error" if lost else "warning"]
    assert not lost or (found[0].id, "never comes back" in found[0].claim) == ("L22", True)


def test_a_policy_that_gets_as_sure_as_it_gets_right_has_not_collapsed(tmp_path: Path) -> None:
    def change(learns: bool) -> Callable[[int, Line], None]:
        return lambda step, line: line.update(
            entropy=1.6 * 0.95**step, reward=0.3 + 0.01 * (step if learns else 20 + 2 * (step % 7)) + 0.1 * (step > 50)
        )

    assert ids(said(tmp_path, steps(60, change(learns=True)))) == []
    assert "D25" in ids(said(tmp_path, steps(60, change(learns=False))))


@pytest.mark.parametrize(("longer", "found"), [(1.0, ["D37"]), (1.3, ["D37"]), (3.0, [])])
def test_steps_may_get_slower_by_as_much_as_responses_get_longer(
    longer: float, found: list[str], tmp_path: Path
) -> None:
    def change(step: int, line: Line) -> None:
        line.update(step_time=20 * (1 + 3.0 * step / 60), resp_len=line["resp_len"] * (1 + (longer - 1) * step / 60))
        del line["tokens_per_second"]

    assert ids(said(tmp_path, steps(60, change))) == found


# ---- what is paid for, and what is stated


@pytest.mark.parametrize(("accuracy", "found"), [(-0.3, ["L12"]), (0.0, []), (0.3, [])])
def test_answers_that_are_lost_while_the_reward_rises_are_not_what_is_paid_for(
    accuracy: float, found: list[str], tmp_path: Path
) -> None:
    rng = random.Random(2)

    def change(step: int, line: Line) -> None:
        line["accuracy"] = 0.5 + accuracy * step / 60 + rng.gauss(0, 0.02)

    assert ids(said(tmp_path, steps(60, change))) == found


@pytest.mark.parametrize(
    ("in_reward", "in_loss", "found"), [(True, True, ["L23"]), (False, True, []), (True, False, [])]
)
def test_a_kl_in_the_rewards_and_in_the_loss_counts_twice(
    in_reward: bool, in_loss: bool, found: list[str], tmp_path: Path
) -> None:
    head = (
        f"(TaskRunner pid=1) {{'algorithm': {{'use_kl_in_reward': {in_reward}, 'kl_ctrl': {{'kl_coef': 0.05}}}},\n"
        f"(TaskRunner pid=1)  'actor': {{'use_kl_loss': {in_loss}, 'kl_loss_coef': 0.001}}}}\n"
    )
    assert ids(diagnosed(tmp_path, head + verl([{}] * 3))) == found


# ---- cut responses


@pytest.mark.parametrize(
    ("cut", "reward", "severity"),
    [(0.36, 0.0, "info"), (0.36, -0.01, "warning"), (0.62, 0.0, "warning")],
    ids=["a run that holds", "a run that falls", "most are cut"],
)
def test_an_agents_limit_is_worth_knowing_while_the_run_holds(
    cut: float, reward: float, severity: str, tmp_path: Path
) -> None:
    rng = random.Random(2)

    def change(step: int, line: Line) -> None:
        line.pop("reward_std")
        line.update(reward=0.6 + reward * step + rng.gauss(0, 0.02), truncated_ratio=cut + rng.gauss(0, 0.02))

    found = [one for one in said(tmp_path, steps(30, change)).findings if one.id == "D20"]
    assert [one.severity for one in found] == [severity]


# ---- prompts, the weight of the KL, and engines of old weights


@pytest.mark.parametrize(("cut", "found"), [(1.0, True), (0.3, False)], ids=["nearly all", "some"])
def test_prompts_that_are_all_as_long_as_the_limit_are_cut(cut: float, found: bool, tmp_path: Path) -> None:
    def change(step: int, line: Line) -> None:
        line["prompt_length/clip_ratio"] = cut - 0.01 * (step % 3)

    assert ("L28" in ids(said(tmp_path, steps(20, change)))) is found


@pytest.mark.parametrize(
    ("weight", "learns", "found"),
    [(10.0, False, True), (0.05, False, False), (10.0, True, False)],
    ids=["pinned", "a usual weight", "learns all the same"],
)
def test_a_kl_that_outweighs_the_policys_loss_pins_the_policy(
    weight: float, learns: bool, found: bool, tmp_path: Path
) -> None:
    rng = random.Random(3)

    def change(step: int, line: Line) -> None:
        line["actor/kl_coef"] = weight
        line["actor/kl_loss"] = line.pop("kl_ref") + 0.01
        line["actor/pg_loss"] = rng.gauss(0, 0.01)
        if not learns:
            line["reward"] = 0.5 + rng.gauss(0, 0.02)

    assert ("L27" in ids(said(tmp_path, steps(30, change)))) is found


@pytest.mark.parametrize("end", [1.0, 0.001], ids=["grows", "stays"])
def test_a_first_order_kl_to_the_engine_that_grows_is_of_old_weights(end: float, tmp_path: Path) -> None:
    def change(step: int, line: Line) -> None:
        line["vllm_kl"] = 1e-4 + end * step / 30

    assert ("D12" in ids(said(tmp_path, steps(30, change)))) is (end == 1.0)


def test_a_sum_of_gradients_may_fall_again_as_smoothly_as_it_rose(tmp_path: Path) -> None:
    rng = random.Random(2)

    def change(step: int, line: Line) -> None:
        line["grad_norm"] = 5 + 60 * math.sin(min(step, 26) / 30 * math.pi * 0.9) + rng.gauss(0, 0.2)

    assert "D68" in ids(said(tmp_path, steps(30, change)))


@pytest.mark.parametrize(("differ", "found"), [(2, True), (10, False)], ids=["in two steps of 30", "in a third"])
def test_groups_without_a_spread_whose_means_differ_may_be_one_text_each(
    differ: int, found: bool, tmp_path: Path
) -> None:
    def change(step: int, line: Line) -> None:
        line["frac_reward_zero_std"] = 0.9 if step < differ else 1.0

    told = [one for one in said(tmp_path, steps(30, change)).findings if one.id == "D01"]
    assert any("all responses of a group are the same text" in one.cause for one in told) is found


@pytest.mark.parametrize(
    ("mean", "std", "found"),
    [(0.42, 1.0, True), (-0.3, 1.0, True), (0.0, 1.0, False), (0.42, 0.8, False)],
    ids=["up", "down", "centred", "weighed by length"],
)
def test_advantages_over_their_std_that_are_not_centred(mean: float, std: float, found: bool, tmp_path: Path) -> None:
    rng = random.Random(3)

    def change(_step: int, line: Line) -> None:
        line["advantages/mean"] = mean + rng.gauss(0, 0.03)
        line["advantages/std"] = std if std == 1 else std + rng.gauss(0, 0.05)

    told = worrying(said(tmp_path, steps(20, change)))
    assert [one.id for one in told] == (["D73"] if found else [])
