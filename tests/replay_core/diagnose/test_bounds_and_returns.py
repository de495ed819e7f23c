"""Relations that the figures of a log keep: what falls back to its beginning, keeps to one side, or never changes; and
preference pairs. Each just where it speaks, and beside it where it must not.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from replay_core.diagnose.signal_names import named
from tests.replay_core.diagnose.logs import diagnosed, diagnosed_path, only, told, verl, written
from tests.replay_core.diagnose.test_relations import Line, ids, said, steps

BACK = ("kl_ref", "reward", "entropy")


def resumed(names: tuple[str, ...], at: int = 36) -> Callable[[int, Line], None]:
    """These figures begin again at a step, as they did at the first."""
    begun = steps(60)

    def change(step: int, line: Line) -> None:
        if step >= at:
            line.update({name: begun[step - at][name] for name in names})

    return change


def test_a_run_whose_kl_and_reward_are_back_where_they_began_lost_its_weights(tmp_path: Path) -> None:
    found = only(said(tmp_path, steps(60, resumed(BACK))), "L24")
    assert found.claim.startswith("the run starts again at step 36: kl_ref, reward")
    assert "checkpoint" in found.cause


@pytest.mark.parametrize("names", [("kl_ref",), ("reward",), ("reward", "entropy")])
def test_a_new_reference_or_new_prompts_alone_are_no_lost_weights(names: tuple[str, ...], tmp_path: Path) -> None:
    assert "L24" not in ids(said(tmp_path, steps(60, resumed(names))))


def advantages(high: float, low: float, mean: float = 0.05) -> str:
    wavers = random.Random(3).random
    return verl([
        {"critic/advantages/max": high * (0.8 + 0.2 * wavers() if abs(high) > 1 else 1),
         "critic/advantages/min": low * (0.8 + 0.2 * wavers() if abs(low) > 1 else 1),
         "critic/advantages/mean": mean, "critic/score/mean": 0.4 + 0.1 * wavers()} for _ in range(12)
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("high", "low", "words"),
    [(1.5, 0.0, "cut off at 0"), (0.0, -1.4, "baseline is the best"), (0.6, -0.6, "cut off at -0.6 and 0.6")],
)
def test_advantages_that_keep_to_a_side_or_a_bound_are_named(
    high: float, low: float, words: str, tmp_path: Path
) -> None:
    assert words in only(diagnosed(tmp_path, advantages(high, low)), "D73").claim


def over_std(group: np.ndarray, over: int) -> np.ndarray:
    return (group - group.mean()) / (group.std(ddof=over) + 1e-4)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize(
    ("halves", "formula"),
    [
        (True, lambda group: over_std(group, 1)),
        (False, lambda group: group - group.mean()),
        (True, lambda group: group - group.mean()),
    ],
)
def test_the_bound_that_the_formula_gives_is_no_clamp(
    size: int, halves: bool, formula: Callable[[np.ndarray], np.ndarray], tmp_path: Path
) -> None:
    # Each step has groups of one right, of one wrong, or of half and half: largest and smallest are the same always.
    kinds = [size // 2] * 2 if halves else [1, size - 1]
    made = np.concatenate([formula(np.repeat([1.0, 0.0], [right, size - right])) for right in kinds])
    text = advantages(float(made.max()), float(made.min()), float(made.mean()))
    assert "D73" not in [id for id, _ in told(diagnosed(tmp_path, text))]
    clamped = np.clip(made, *np.array([-0.43, 0.43]))
    text = advantages(float(clamped.max()), float(clamped.min()), float(clamped.mean()))
    assert "cut off at -0.43 and 0.43" in only(diagnosed(tmp_path, text), "D73").claim


@pytest.mark.parametrize(("high", "low"), [(1.5, -1.4), (0.0, 0.0), (5.0, -5.0)])
def test_advantages_on_both_sides_are_told_of_nothing(high: float, low: float, tmp_path: Path) -> None:
    assert "D73" not in [id for id, _ in told(diagnosed(tmp_path, advantages(high, low)))]


@pytest.mark.parametrize(("factor", "found"), [(1.0, True), (1.01, False)])
def test_returns_that_are_the_rewards_of_single_tokens_are_not_added_up(
    factor: float, found: bool, tmp_path: Path
) -> None:
    rng = random.Random(5)
    lines = steps(20)
    for line in lines:
        line["resp_len"] = 8 + rng.random()
        line["returns"] = factor * line["reward"] / line["resp_len"]
    assert ("D44" in ids(said(tmp_path, lines))) == found


def test_an_evaluation_that_never_changes_runs_on_other_weights(tmp_path: Path) -> None:
    def evaluated(step: int, line: Line) -> None:
        if step % 5 == 0:
            line["val/accuracy"] = 0.4375

    assert "L25" in ids(said(tmp_path, steps(60, evaluated)))
    other = tmp_path / "learns"
    other.mkdir()
    lines = steps(60, evaluated)
    lines[30]["val/accuracy"] = 0.46875
    assert "L25" not in ids(said(other, lines))


@pytest.mark.parametrize(("last", "slope", "found"), [(0.9, 0.0, True), (0.8, 0.0, False), (0.9, 0.01, False)])
def test_ever_fewer_groups_with_a_spread_leave_nothing_to_learn(
    last: float, slope: float, found: bool, tmp_path: Path
) -> None:
    """Where the reward rises meanwhile it has been learnt."""

    def rising(step: int, line: Line) -> None:
        line["zero_std_frac"] = min(last, 0.2 + 0.016 * step)
        line["reward"] = 0.3 + slope * step + 0.01 * (step % 3)

    assert ("D74" in ids(said(tmp_path, steps(60, rising)))) == found


@pytest.mark.parametrize(("share", "found"), [(0.9, True), (0.3, False)])
def test_a_critic_whose_every_value_is_clipped_cannot_move(share: float, found: bool, tmp_path: Path) -> None:
    lines = steps(20, lambda _, line: line.update({"critic/vf_clipfrac": share, "value_loss": 0.4}))
    assert ("D71" in ids(said(tmp_path, lines))) == found


def test_a_log_that_prints_hundredths_is_read_as_shares(tmp_path: Path) -> None:
    """It said that 1670% of the responses were cut."""
    text = "".join(
        f"11:00:{n:02d} SUCCESS Step {n} | Time: 21.3s | Reward: 0.4{n} | Truncated: 16.7% | Loss: 0.01{n}\n"
        for n in range(10, 22)
    )
    assert "D20" not in ids(diagnosed(tmp_path, text))
    other = tmp_path / "cut"
    other.mkdir()
    cut = only(diagnosed(other, text.replace("16.7%", "61.2 %")), "D20")
    assert cut.claim.startswith("61% of the responses")


def pairs(chosen: Callable[[int], float], rejected: Callable[[int], float], **more: Callable[[int], float]) -> str:
    rng = random.Random(1)
    lines = []
    for n in range(1, 41):
        line = {
            "loss": 0.69 * 0.99**n, "grad_norm": 2 + rng.random(), "learning_rate": 5e-7,
            "rewards/chosen": chosen(n) + rng.gauss(0, 0.005), "rewards/rejected": rejected(n) + rng.gauss(0, 0.005),
            "logps/chosen": -210 + rng.gauss(0, 2), "logps/rejected": -190 + rng.gauss(0, 2), "epoch": n / 50,
        }  # fmt: skip
        lines.append(str(line | {name.replace("__", "/"): made(n) for name, made in more.items()}) + "\n")
    return "".join(lines)


@pytest.mark.parametrize(
    ("text", "claim"),
    [
        (pairs(lambda n: -0.02 * n, lambda n: 0.02 * n), "the wrong way round"),
        (pairs(lambda n: -0.15 * n, lambda n: -0.25 * n), "both fall"),
        (pairs(lambda n: 0.01 * n, lambda n: 0.01 * n, logps__chosen=lambda n: -200.0 - n,
               logps__rejected=lambda n: -200.0 - n), "are the same text"),
    ],
)  # fmt: skip
def test_pairs_that_teach_the_wrong_thing_are_named(text: str, claim: str, tmp_path: Path) -> None:
    assert claim in only(diagnosed(tmp_path, text), "D72").claim


def test_pairs_whose_margin_grows_are_told_of_nothing(tmp_path: Path) -> None:
    """Chosen responses lose some likelihood in healthy runs, too."""
    assert "D72" not in [id for id, _ in told(diagnosed(tmp_path, pairs(lambda n: -0.03 * n, lambda n: -0.1 * n)))]


@pytest.mark.parametrize(
    ("name", "signal"),
    [
        ("actor/pg_loss@sum", "pg_loss"), ("actor/ppo_ratio_clipfrac@sum", "clip_fraction"),
        ("ppo_actor/update/entropy/avg", "entropy"), ("ppo_actor/task_reward/avg", "reward"),
        ("tokens/response_length/mean", "response_length"), ("policy/final_loss", "loss"),
        ("generation/completions/clip_ratio", "truncated"), ("sampler_trainer/logp_diff_mean", "logprob_diff"),
        ("train/mean_gen_tokens_per_sample", "response_length"), ("val/advantages_max", "advantage_max"),
        ("critic/vf_clipfrac", "value_clip_fraction"), ("approx_policy_kl", "policy_kl"),
        ("rewards/reward/mean", "reward"), ("rewards/accuracy_reward/mean", "reward_function"),
        ("validation/accuracy", "held_out"),
    ],
)  # fmt: skip
def test_names_that_frameworks_log_mean_what_they_mean(name: str, signal: str) -> None:
    found = named(name)
    assert found is not None
    assert found.signal == signal


@pytest.mark.parametrize(("stated", "found"), [(0.0003, []), (0.2, ["D24"])])
def test_a_small_clip_range_that_the_run_states_may_clip_half_of_the_tokens(
    stated: float, found: list[str], tmp_path: Path
) -> None:
    """GSPO's range is 3e-4, whatever the run calls itself."""
    clipped = verl([{"actor/pg_clipfrac": 0.45 + n / 1000, "actor/ppo_kl": 1e-5 * (1 + n % 3)} for n in range(12)])
    text = f"Namespace(advantage_estimator='group_norm', eps_clip={stated}, max_epochs=1)\n{clipped}"
    assert [id for id, _ in told(diagnosed(tmp_path, text)) if id == "D24"] == found


def test_a_reward_that_rests_at_the_most_it_ever_was_is_cached_unless_it_is_round(tmp_path: Path) -> None:
    for value, found in ((0.912448, True), (1.0, False)):
        folder = tmp_path / str(value)
        folder.mkdir()
        lines = steps(40)
        for line in lines[28:]:
            line["reward"] = value
        assert ("L18" in ids(said(folder, lines))) == found


@pytest.mark.parametrize(("times", "found"), [(60.0, True), (3.0, False)])
def test_the_scale_of_rewards_is_told_by_their_mean_alone(times: float, found: bool, tmp_path: Path) -> None:
    lines = steps(40)
    for line in lines:
        line.pop("reward_std")
        line["reward"] *= times if line["step"] >= 20 else 1
    assert ("L19" in ids(said(tmp_path, lines))) == found


@pytest.mark.parametrize(("weight", "found"), [(60.0, True), (0.5, False)])
def test_a_kl_that_outweighs_every_recipe_is_named(weight: float, found: bool, tmp_path: Path) -> None:
    lines = steps(30)
    for line in lines:
        line["pg_loss"] = line["loss"]
        line["loss"] += weight * line["kl_ref"]
    finding = next((one for one in said(tmp_path, lines).findings if one.id == "D49"), None)
    assert (finding is not None) == found
    if finding is not None:
        assert finding.claim.startswith("the KL term weighs 60 in the loss")


def test_a_table_of_metrics_is_a_log(tmp_path: Path) -> None:
    """Lightning, RLlib and Stable-Baselines write one, and wandb exports it."""
    rows = [f"{n},{0.3 + 0.01 * n:.4f},,0.0,{0.02 * n:.4f}" for n in range(20)]
    path = written(tmp_path, "\n".join(["iteration,reward_mean,val/accuracy,lr,kl(pi||ref)", *rows]), "progress.csv")
    found = diagnosed_path(path)
    assert only(found, "L07").claim.startswith("the learning rate is 0 in all 20 steps")
    assert diagnosed_path(tmp_path).findings == found.findings


def one_update(kl: float, batch: int) -> str:
    head = (
        "{'actor_rollout_ref': {'actor': {'ppo_epochs': 1, 'ppo_mini_batch_size': 8}},\n 'data': {'train_batch_size': "
        f"{batch}}}}}\n"
    )
    return head + verl([{"actor/ppo_kl": kl * (1 + n % 3), "actor/lr": 1e-6} for n in range(12)])


@pytest.mark.parametrize(("kl", "batch", "found"), [(-0.004, 8, True), (-0.004, 16, False), (0.0001, 8, False)])
def test_a_batchs_only_update_begins_at_a_ratio_of_one(kl: float, batch: int, found: bool, tmp_path: Path) -> None:
    assert ("D14" in [id for id, _ in told(diagnosed(tmp_path, one_update(kl, batch)))]) == found


def test_rewards_whose_mean_changes_while_no_group_has_a_spread_are_of_the_prompt_alone(tmp_path: Path) -> None:
    lines = steps(20, lambda _, line: line.update({"zero_std_frac": 1.0}))
    finding = only(said(tmp_path, lines), "D01")
    assert finding.claim.startswith("rewards differ over the prompts, but in no group")
    assert "one seed" in finding.cause


@pytest.mark.parametrize(("begun", "now", "found"), [(4e-5, 2.5e-4, False), (2e-3, 1.2e-2, True)])
def test_rounding_that_grows_with_a_sharper_policy_is_no_old_weights(
    begun: float, now: float, found: bool, tmp_path: Path
) -> None:
    lines = steps(40)
    for line in lines:
        line["rollout_logprob_diff"] = begun + (now - begun) * line["step"] / 39 * (1 + 1e-3 * (line["step"] % 3))
    assert ("D12" in [id for id, _ in told(said(tmp_path, lines))]) == found


@pytest.mark.parametrize(("times", "severity"), [(40.0, "info"), (4000.0, "warning")])
def test_one_gradient_norm_that_no_batch_explains_is_a_warning(times: float, severity: str, tmp_path: Path) -> None:
    lines = steps(40)
    lines[20]["grad_norm"] *= times
    assert only(said(tmp_path, lines), "L02").severity == severity


def test_a_best_response_as_baseline_shows_in_the_largest_advantage_alone(tmp_path: Path) -> None:
    text = verl([{"critic/advantages/max": 0.0, "critic/advantages/min": None, "critic/advantages/mean": -0.2 - n / 99}
                 for n in range(9)])  # fmt: skip
    assert "the baseline is the best" in only(diagnosed(tmp_path, text), "D73").claim


@pytest.mark.parametrize(("paid", "found"), [(0.0, True), (1.0, False)])
def test_a_reward_function_that_never_pays_is_named_and_one_that_always_does_is_not(
    paid: float, found: bool, tmp_path: Path
) -> None:
    lines = steps(30, lambda step, line: line.update(
        {"rewards/format_reward/mean": paid, "rewards/accuracy_reward/mean": 0.3 + 0.01 * (step % 7),
         "reward": 0.3 + 0.01 * (step % 7)}))  # fmt: skip
    assert ("L17" in ids(said(tmp_path, lines))) == found


def test_a_gradient_norm_that_dies_out_has_no_spike_at_its_beginning(tmp_path: Path) -> None:
    lines = steps(40)
    for line in lines:
        line["grad_norm"] *= 1.0 if line["step"] < 4 else 1e-4
    assert "L02" not in ids(said(tmp_path, lines))
