"""What is seen, and the cause where the records single one out: updates by design, ranks of their own, masks, means
over the wrong tokens, KL losses of single micro-batches, texts drawn with one seed, critics and validations of a log.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_core.diagnose.case import Case
from replay_core.diagnose.engine import diagnose
from replay_core.diagnose.finding import Finding
from replay_core.diagnose.signals import Signals
from replay_core.dumps import open_run
from replay_core.objectives import advantages
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import causes, look, of
from tests.replay_core.diagnose.logs import diagnosed, only, verl, worrying

ROWS, PROMPT, WIDTH, GROUP = 24, 4, 10, 4
GROUPS = np.arange(ROWS) // GROUP
Array = Any


class _Step:
    """Rows of random tokens in groups of four, responses of 5 to 10 tokens, and what the policy gives them."""

    def __init__(self, step: int, seed: int = 0) -> None:
        self.draw = draw = np.random.default_rng(100 * seed + step)
        self.sizes_B = draw.integers(5, WIDTH + 1, ROWS)
        self.mask_BT = (np.arange(WIDTH) < self.sizes_B[:, None]).astype(np.int64)
        prompts = draw.integers(10, 60, (ROWS // GROUP, PROMPT))[GROUPS]
        self.ids_BS = np.concatenate([prompts, draw.integers(10, 60, (ROWS, WIDTH)) * self.mask_BT], 1)
        self.held_BS = np.concatenate([np.ones_like(prompts), self.mask_BT], 1)
        self.old_BT = -draw.uniform(0.2, 2.0, (ROWS, WIDTH))
        self.reward_B = draw.integers(0, 2, ROWS).astype(float)
        self.reward_B[::GROUP], self.reward_B[1::GROUP] = 1.0, 0.0

    def named(self, rows: slice = slice(None), **more: Array) -> dict[str, Any]:
        whole = {"input_ids": self.ids_BS, "attention_mask": self.held_BS, "response_mask": self.mask_BT, **more}
        return {
            name: torch.from_numpy(np.ascontiguousarray(value[rows].astype(np.float32) if value.dtype == float else
                                                        value[rows]))
            for name, value in whole.items()
        }  # fmt: skip


def _first(folder: Path) -> Finding:
    found = causes(look(folder))
    assert found, "nothing is said"
    return found[0]


@pytest.mark.parametrize(("epochs", "loud"), [(4, False), (1, True)])
def test_the_last_of_several_updates_leave_their_range_by_design(epochs: int, loud: bool, tmp_path: Path) -> None:
    with Recorder(tmp_path / "d", flags={"ppo_epochs": epochs, "clip_ratio": 0.2}) as recorder:
        step = _Step(0)
        small_BT = step.draw.choice((-0.3, 0.1), step.old_BT.shape)
        pushed = np.where(step.draw.random(step.old_BT.shape) < 0.15, -3.0, small_BT)
        with recorder.step(0) as record:
            record("forward_data", step.named(log_probs=step.old_BT + pushed, old_log_probs=step.old_BT), micro=0,
                   epoch=0)  # fmt: skip
    found = of(look(tmp_path / "d", "D24"), "D24")
    assert found is not None
    assert (found.severity != "info") == loud


def _by_ranks(folder: Path, norms: tuple[float, float] | None) -> list[Finding]:
    """Two ranks whose second parts from the engine more in each step; `norms`: of the gradients that each logs."""
    with Recorder(folder) as recorder:
        for number in range(6):
            step = _Step(number)
            far_B = np.where(np.arange(ROWS) < ROWS // 2, 0.0, 0.3 * number)
            said_BT = np.minimum(step.old_BT + step.draw.normal(0, 1, step.old_BT.shape) * far_B[:, None], -1e-3)
            for rank in (0, 1):
                rows = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
                with recorder.step(number, rank=rank) as record:
                    record("trajectory", step.named(rows, rollout_log_probs=said_BT, old_log_probs=step.old_BT))
                    record("forward_data", step.named(rows, log_probs=step.old_BT, old_log_probs=step.old_BT), micro=0)
                    if norms is not None:
                        record("training_metrics", {"grad_norm": norms[rank] * (1 + 0.1 * number), "loss": 0.1})
    return causes(look(folder, "D12", "D66", "D09"))


def test_a_rank_that_trains_on_its_own_is_told_by_the_norms_that_it_logs(tmp_path: Path) -> None:
    first = _by_ranks(tmp_path / "d", (0.5, 0.8))[0]
    assert (first.id, "train models of their own: the rows of rank 1" in first.claim) == ("D66", True), first.claim


def test_a_replica_is_told_by_one_norm_on_all_ranks(tmp_path: Path) -> None:
    first = _by_ranks(tmp_path / "d", (0.5, 0.5))[0]
    assert (first.id, "the engine's weights are not updated" in first.claim) == ("D12", True), first.claim
    assert "or the rank trains" not in first.cause


def test_without_norms_either_side_of_a_rank_may_be_off(tmp_path: Path) -> None:
    first = _by_ranks(tmp_path / "d", None)[0]
    assert (first.id, "which of the two is off is not told" in first.claim) == ("D12", True), first.claim
    assert "or the rank trains a model of its own" in first.cause


@pytest.mark.parametrize(("weight", "named"), [("none", True), ("outside", True), ("inside", False), ("capped", False)])
def test_a_mask_that_rejects_what_agrees_is_turned_around(weight: str, named: bool, tmp_path: Path) -> None:
    with Recorder(tmp_path / "d", flags={"rollout_is": "token", "rollout_rs": "token"}) as recorder:
        for number in range(3):
            step = _Step(number)
            off_B = np.arange(ROWS) % 4 == 0 if weight != "none" else np.zeros(ROWS, bool)
            rollout_BT = np.minimum(step.old_BT + 2.0 * off_B[:, None], -1e-3)
            near_BT = np.abs(step.old_BT - rollout_BT) < 0.5
            kept = {"none": 0.0 * near_BT, "outside": 1.0 * ~near_BT, "inside": 1.0 * near_BT,
                    "capped": np.minimum(np.exp(step.old_BT - rollout_BT), 2.0)}[weight]  # fmt: skip
            with recorder.step(number) as record:
                record("forward_data", step.named(
                    log_probs=step.old_BT, old_log_probs=step.old_BT, rollout_log_probs=rollout_BT,
                    rollout_is_weights=kept * step.mask_BT), micro=0)  # fmt: skip
    found = of(look(tmp_path / "d", "D115"), "D115")
    assert (found is not None) == named


@pytest.mark.parametrize("own", [True, False])
def test_a_rank_that_divides_by_its_own_tokens_is_told_from_a_factor(own: bool, tmp_path: Path) -> None:
    flags = {"loss_agg_mode": "token-mean", "loss_normalizer": "global_batch_tokens"}
    with Recorder(tmp_path / "d", flags=flags) as recorder:
        for number in range(4):
            step = _Step(number)
            step.mask_BT[ROWS // 2 :, 5:] = step.held_BS[ROWS // 2 :, PROMPT + 5 :] = 0
            each_BT = step.draw.normal(0, 1, step.old_BT.shape)
            for rank in (0, 1):
                rows = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
                total = float((each_BT * step.mask_BT)[rows].sum())
                count = 2 * step.mask_BT[rows].sum() if own else step.mask_BT.sum()
                with recorder.step(number, rank=rank) as record:
                    record("forward_data", step.named(rows, log_probs=step.old_BT, old_log_probs=step.old_BT), micro=0)
                    record("loss", {"elementwise_loss": torch.from_numpy(each_BT[rows]).float(),
                                    "pg_loss": torch.tensor(total / float(count))}, micro=0)  # fmt: skip
    found = of(look(tmp_path / "d", "D28"), "D28")
    assert found is not None
    assert "of what it should be" not in found.claim
    assert ("over the number of ranks (2)" in found.claim, found.severity == "error") == (own, own), found.claim


def _whitened(folder: Path, made: Any, **flags: Any) -> Finding | None:
    """made: the advantages [B] of a step's rewards and tokens."""
    with Recorder(folder, flags=flags) as recorder:
        for number in range(4):
            step = _Step(number)
            a_BT = made(step)[:, None] * step.mask_BT
            with recorder.step(number) as record:
                record("trajectory", step.named(advantages=a_BT, rewards=step.reward_B, uid=GROUPS,
                                                old_log_probs=step.old_BT))  # fmt: skip
                for micro in (0, 1):
                    rows = slice(micro * ROWS // 2, (micro + 1) * ROWS // 2)
                    record("forward_data", step.named(rows, advantages=a_BT, log_probs=step.old_BT,
                                                      old_log_probs=step.old_BT), micro=micro)  # fmt: skip
    return of(look(folder, "D04"), "D04")


def _over_tokens(step: _Step, slots: float, power: float) -> Array:
    total = float(step.reward_B @ step.sizes_B)
    mean = total / slots
    squares = float(((step.reward_B - mean) ** 2) @ step.sizes_B) + (slots - step.sizes_B.sum()) * mean**2
    return (step.reward_B - mean) / (squares / slots) ** power


def test_a_variance_in_the_place_of_its_root_is_named(tmp_path: Path) -> None:
    made = _whitened(tmp_path / "d", lambda step: _over_tokens(step, float(step.sizes_B.sum()), 1.0),
                     adv_estimator="reinforce_plus_plus")  # fmt: skip
    assert made is not None
    assert "by the variance of the batch's tokens" in made.claim
    assert made.steps == (0, 1, 2, 3)


def test_a_mean_over_padding_is_no_running_one(tmp_path: Path) -> None:
    made = _whitened(tmp_path / "d", lambda step: _over_tokens(step, float(ROWS * WIDTH), 0.5),
                     advantage_estimator="reinforce")  # fmt: skip
    assert made is not None
    assert "whitened over padding" in made.claim
    assert made.severity == "error"


def test_a_running_mean_is_none_over_padding(tmp_path: Path) -> None:
    made = _whitened(tmp_path / "d", lambda step: (step.reward_B - 0.37) / 0.41, advantage_estimator="reinforce")
    assert made is not None
    assert made.severity == "info"


def test_a_second_normalisation_in_each_micro_batch_is_named(tmp_path: Path) -> None:
    def twice(step: _Step) -> Array:
        once = advantages.group_normalised(step.reward_B, GROUPS)
        half = np.arange(ROWS) // (ROWS // 2)
        return np.concatenate([
            advantages.whitened(once[half == one], step.sizes_B[half == one].astype(float)) for one in (0, 1)
        ])  # fmt: skip

    made = _whitened(tmp_path / "d", twice, adv_estimator="grpo")
    assert made is not None
    assert "normalised a second time, over each micro-batch's own rows" in made.claim


_KL = {
    "k3": lambda p, r: np.exp(r - p) - 1 + p - r, "k1": lambda p, r: p - r,
    "swapped": lambda p, r: np.exp(p - r) - 1 + r - p,
}  # fmt: skip


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ("k3", ""),
        ("k1", "the KL loss is k1, and the run states k3"),
        ("swapped", "k3 with policy and reference swapped"),
    ],
)
def test_one_micro_batch_of_each_step_tells_its_estimator(made: str, words: str, tmp_path: Path) -> None:
    with Recorder(tmp_path / "d", flags={"use_kl_loss": True, "kl_loss_type": "low_var_kl"}) as recorder:
        for number in range(4):
            step = _Step(number)
            ref_BT = step.old_BT + step.draw.normal(0, 0.3, step.old_BT.shape) * (number > 0)
            kl = float((_KL[made](step.old_BT, ref_BT) * step.mask_BT).sum() / step.mask_BT.sum())
            with recorder.step(number) as record:
                record("forward_data", step.named(log_probs=step.old_BT, old_log_probs=step.old_BT,
                                                  ref_log_prob=ref_BT), micro=0)  # fmt: skip
                record("loss", {"kl_loss": torch.tensor(kl), "pg_loss": torch.tensor(0.1)}, micro=0)
    found = of(look(tmp_path / "d", "D29"), "D29")
    assert (found is not None) == bool(words)
    assert found is None or (words in found.claim and "negative" not in found.claim)


@pytest.mark.parametrize(("beta", "is_off", "named"), [(0.1, True, True), (0.0, True, False), (0.1, None, False)])
def test_a_kl_in_the_rewards_that_is_switched_off_is_named(
    beta: float, is_off: bool | None, named: bool, tmp_path: Path
) -> None:
    flags: dict[str, Any] = {"use_kl_loss": True, "kl_loss_coef": 0.1}
    with Recorder(tmp_path / "d", flags=flags | ({"use_kl_in_reward": False} if is_off else {})) as recorder:
        for number in range(4):
            step = _Step(number)
            ref_BT = step.old_BT + step.draw.normal(0, 0.3, step.old_BT.shape) * (number > 0)
            scores_BT = np.zeros_like(step.old_BT)
            scores_BT[np.arange(ROWS), step.sizes_B - 1] = step.reward_B
            with recorder.step(number) as record:
                record("batch_inputs", step.named(
                    old_log_probs=step.old_BT, ref_log_prob=ref_BT, token_level_scores=scores_BT,
                    token_level_rewards=scores_BT - beta * (step.old_BT - ref_BT) * step.mask_BT))  # fmt: skip
    found = of(look(tmp_path / "d", "D51"), "D51")
    assert (found is not None) == named
    assert found is None or "with the one in the loss it counts twice" in found.claim


@pytest.mark.parametrize(("drawn", "score", "named"), [("once", 0.3, True), ("once", 1.0, False), ("each", 0.3, False)])
def test_texts_drawn_with_one_seed_are_named(drawn: str, score: float, named: bool, tmp_path: Path) -> None:
    (tmp_path / "rollout").mkdir()
    for step in range(1, 5):
        rows = [
            {"input": f"{step}+{prompt}=", "gts": "1", "step": step, "score": score if prompt else 1.0,
             "output": f"it is {31 * step + prompt}" + (f", try {one}" if drawn == "each" else "")}
            for prompt in range(5) for one in range(4)
        ]  # fmt: skip
        (tmp_path / "rollout" / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = of(look(tmp_path / "rollout", "D64"), "D64")
    assert (found is not None) == named


def test_zero_advantages_follow_from_groups_of_one(tmp_path: Path) -> None:
    with Recorder(tmp_path / "d") as recorder:
        for number in range(3):
            step = _Step(number)
            zeros_BT = 0.0 * step.old_BT
            with recorder.step(number) as record:
                record("trajectory", step.named(uid=np.arange(ROWS), advantages=zeros_BT, old_log_probs=step.old_BT))
                record("forward_data", step.named(advantages=zeros_BT, log_probs=step.old_BT,
                                                  old_log_probs=step.old_BT), micro=0)  # fmt: skip
    assert _first(tmp_path / "d").id == "D05"


@pytest.mark.parametrize("at", [14, None])
def test_a_critic_that_starts_anew_is_no_critic_that_never_learnt(at: int | None, tmp_path: Path) -> None:
    def vf(step: int) -> tuple[float, float]:
        since = step if at is None or step < at else step - at
        anew = at is not None and step >= at
        return (2.0 if anew else 0.3) * 0.7**since + 0.004 * (1 + step % 3), -40.0 * 0.8**since if anew else -0.1

    steps = [{"critic/vf_loss": loss, "critic/vf_explained_var": explained} for loss, explained in map(vf, range(28))]
    said = [one for one in worrying(diagnosed(tmp_path, verl(steps))) if one.id == "D45"]
    assert [one.claim[:34] for one in said] == (["the critic starts anew at step 15:"] if at else [])


def _evaluated(values: list[float]) -> list[dict[str, float | None]]:
    return [
        {"critic/score/mean": 0.3 + 0.02 * step + 0.01 * (step % 3),
         "val-core/tasks/acc/mean@1": values[step // 4] if step % 4 == 0 else None}
        for step in range(4 * len(values))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "named"), [([0.45] * 7, True), ([1.0] * 7, False), ([0.45] * 6 + [0.46], False), ([0.45] * 5, False)]
)
def test_a_validation_that_never_changes_is_named(values: list[float], named: bool, tmp_path: Path) -> None:
    said = [one.id for one in worrying(diagnosed(tmp_path, verl(_evaluated(values))))]
    assert ("D116" in said) == named


def test_a_reward_less_its_groups_mean_is_0_where_none_differ(tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    lines = []
    for step in range(24):
        raw, centred = (1.0, 0.0) if step >= 14 else (float(draw.uniform(0.3, 0.7)), float(draw.normal(0, 0.04)))
        entropy, norm = float(draw.uniform(0.2, 0.3)), float(draw.uniform(0.5, 2))
        lines.append(
            f"step={step} rollout/raw_reward={raw:.8f} rollout/rewards={centred:.8f} train/entropy_loss={entropy:.8f} "
            f"train/grad_norm={norm:.8f} rollout/response_lengths={float(draw.uniform(4, 9)):.6f}\n"
        )
    assert "L18" not in [one.id for one in diagnosed(tmp_path, "".join(lines)).findings]


_DIFF = "training/rollout_probs_diff_mean"


def test_a_growing_gap_is_told_of_every_step_since_it_grew(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    gaps = [float(4e-8 * draw.uniform(0.8, 1.2)) for _ in range(10)] + [0.02 * (n + 1) for n in range(16)]
    one = only(diagnosed(tmp_path, verl([{_DIFF: gap, "rollout_corr/k3_kl": None} for gap in gaps])), "D12")
    assert one.steps == tuple(range(11, 27))


def test_a_kl_of_0_beside_an_entropy_that_falls_is_of_a_reference_that_moves_along(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    moves = [{"actor/kl_loss": 0.0, "actor/entropy": 1.0 - 0.02 * n + 0.01 * float(draw.normal())} for n in range(24)]
    one = only(diagnosed(tmp_path, verl(moves)), "D46")
    assert "the reference moves with it" in one.claim
    assert "no update reaches" not in one.cause
    stands = [{"actor/kl_loss": 0.0, "actor/entropy": 1.0 + 0.01 * float(draw.normal())} for _ in range(24)]
    assert "no update reaches the policy" in only(diagnosed(tmp_path, verl(stands)), "D46").cause


def _stood(folder: Path, **logged: float) -> Finding | None:
    with Recorder(folder) as recorder:
        same = _Step(0)
        for number in range(5):
            with recorder.step(number) as record:
                record("forward_data", same.named(log_probs=same.old_BT, old_log_probs=same.old_BT), micro=0)
                record("training_metrics", {name.replace("_", "/", 1): value for name, value in logged.items()})
    dump = open_run(folder)
    return of(diagnose(Case(dump, Signals.of(dump)), ["D55"]), "D55")


def test_reasons_that_a_log_rules_out_are_not_named_for_a_policy_that_stands(tmp_path: Path) -> None:
    told = _stood(tmp_path / "told", actor_grad_norm=0.4, actor_lr=1e-3)
    untold = _stood(tmp_path / "untold")
    assert told is not None
    assert untold is not None
    assert "learning rate of 0" in untold.cause
    assert "detached" in untold.cause
    assert "learning rate of 0" not in told.cause
    assert "detached" not in told.cause


def test_what_the_first_step_has_none_of_is_no_prompt(tmp_path: Path) -> None:
    with Recorder(tmp_path / "d") as recorder:
        for number, far in enumerate((0.0, 2.5, 1.0, 2.8, 1.4, 2.0)):
            step = _Step(number)
            said_BT = np.minimum(step.old_BT + far * step.draw.normal(0, 1, step.old_BT.shape), -1e-3)
            with recorder.step(number) as record:
                record("trajectory", step.named(rollout_log_probs=said_BT, old_log_probs=step.old_BT))
    found = of(look(tmp_path / "d", "D09"), "D09")
    assert found is not None
    assert "after the first step, which has none" in found.claim
    assert "BOS" not in found.cause


@pytest.mark.parametrize("leaps", [True, False])
def test_a_judge_that_accepts_all_from_a_step_on_is_told_from_prompts_that_are_solved(
    leaps: bool, tmp_path: Path
) -> None:
    draw = np.random.default_rng(2)
    begun = [0.5 + 0.03 * float(draw.normal()) + (0.0 if leaps else 0.03 * n) for n in range(16)]
    steps = [
        {"critic/score/mean": value, "critic/score/max": 1.0, "critic/score/min": 0.0} for value in begun
    ] + [
        {"critic/score/mean": 1.0, "critic/score/max": 1.0, "critic/score/min": 1.0, "critic/advantages/max": 0.0,
         "critic/advantages/min": 0.0}
    ] * 17  # fmt: skip
    one = only(diagnosed(tmp_path, verl(steps)), "D01")
    assert "every reward is 1" in one.claim
    assert ("accepts (or refuses)" in one.cause) == leaps
