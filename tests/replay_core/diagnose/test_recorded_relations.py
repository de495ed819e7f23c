"""Relations of recorded tensors: each mistake in dtypes, sizes and algorithms of its own, and its healthy twins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core import workbench
from replay_core.dumps import open_run
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look
from tests.replay_core.diagnose.runs import GRPO, RESPONSE, Fields, batch, recorded, scores_of, told

F32, BF16 = torch.float32, torch.bfloat16
RLOO = {**GRPO, "algorithm.adv_estimator": "rloo"}
GAE = {**GRPO, "algorithm.adv_estimator": "gae", "algorithm.gamma": 1.0}
SIZES = [{"groups": 6, "size": 5}, {"groups": 4, "size": 8, "seed": 3}]


# ---- a forward's bare `logprobs`


@pytest.mark.parametrize("old", ["old_logprobs", "old_log_probs", "prox_logprobs"])
@pytest.mark.parametrize("stage", ["forward_data", "trajectory"])
def test_bare_logprobs_are_the_forwards_beside_old_ones_alone(old: str, stage: str, tmp_path: Path) -> None:
    rows = {"tokens": torch.ones(2, 4, dtype=torch.long), old: -torch.ones(2, 4), "logprobs": -torch.ones(2, 4)}
    with Recorder(tmp_path) as recorder, recorder.step(0) as record:
        record(stage, rows, micro=0 if stage == "forward_data" else None)
    (record_,) = open_run(tmp_path).records
    named = {ref.name: ref.canonical for ref in record_.tensors()}
    is_forward = stage == "forward_data" and old.startswith("old")
    assert named["logprobs"] == ("policy_logprobs" if is_forward else "rollout_logprobs")


# ---- advantages


def of_groups(fields: Fields, size: int) -> torch.Tensor:
    return scores_of(fields).view(-1, size)


@pytest.mark.parametrize(("stored", "sizes"), [(F32, SIZES[0]), (F32, SIZES[1]), (BF16, SIZES[0])])
@pytest.mark.parametrize(("which", "words"), [(0, "batch's first"), (-1, "batch's last"), (2, "batch's 3th")])
@pytest.mark.parametrize("unbiased", [True, False])
def test_one_groups_std_for_all_is_named(
    stored: torch.dtype, sizes: dict[str, Any], which: int, words: str, unbiased: bool, tmp_path: Path
) -> None:
    def change(_: int, fields: Fields) -> None:
        r = of_groups(fields, sizes["size"])
        made = (r - r.mean(1, keepdim=True)) / r[which].std(unbiased=unbiased)
        fields["advantages"] = made.view(-1, 1) * fields["response_mask"]

    (found,) = told(recorded(tmp_path, change, stored=stored, **sizes), "D04")
    assert found.severity == "error"
    assert "divided by the std of one" in found.claim
    assert words in found.claim or stored == BF16


def dr_grpo(_: int, fields: Fields) -> None:
    r = of_groups(fields, 5)
    fields["advantages"] = (r - r.mean(1, keepdim=True)).view(-1, 1) * fields["response_mask"]


def test_no_std_or_each_groups_own_is_no_one_groups(tmp_path: Path) -> None:
    assert not told(recorded(tmp_path / "own"), "D04")
    flags = {**GRPO, "algorithm.norm_adv_by_std_in_grpo": False}
    assert not told(recorded(tmp_path / "none", dr_grpo, flags=flags), "D04")


@pytest.mark.parametrize(("flags", "loud"), [(GRPO, True), (RLOO, True), ({}, False)])
def test_a_running_mean_in_the_groups_place_is_wrong_where_a_groups_is_stated(
    flags: dict[str, Any], loud: bool, tmp_path: Path
) -> None:
    def change(step: int, fields: Fields) -> None:
        fields["advantages"] = (scores_of(fields) - 0.31 - 0.02 * step).view(-1, 1) * fields["response_mask"]

    found = told(recorded(tmp_path, change, flags=flags), "D04")
    assert [one.claim.startswith("advantages are not centred by the group") for one in found] == [True] * loud


@pytest.mark.parametrize(
    ("flags", "loud"),
    [
        ({"advantage_estimator": "reinforce", "lambd": 1.0, "init_kl_coef": 0.0}, True),
        ({"advantage_estimator": "reinforce", "lambd": 1.0, "no_advantage_std_norm": True}, False),
        ({"algorithm": "reinforce"}, False),
    ],
)
def test_openrlhfs_reinforce_is_whitened(flags: dict[str, Any], loud: bool, tmp_path: Path) -> None:
    def change(_: int, fields: Fields) -> None:
        fields["advantages"] = scores_of(fields).view(-1, 1) * fields["response_mask"]

    assert bool(told(recorded(tmp_path, change, flags=flags), "D04")) == loud


def with_critic(lam: float, *, subtract: bool = True, roll: int = 0, whiten: bool = True) -> Any:
    """GAE by its recursion; values may be rolled over the rows after it."""

    def change(step: int, fields: Fields) -> None:
        mask = fields["response_mask"].float()
        values = (0.4 + 0.3 * torch.randn(mask.shape, generator=torch.Generator().manual_seed(step))) * mask
        adv, last, after = torch.zeros_like(values), torch.zeros(len(values)), torch.zeros(len(values))
        for at in range(RESPONSE - 1, -1, -1):
            delta = fields["token_level_rewards"][:, at] + after - values[:, at]
            last = (delta + lam * last) * mask[:, at]
            adv[:, at], after = last, values[:, at]
        returns = (adv + values) * mask
        base = adv if subtract else returns
        if whiten:
            inside = base[mask.bool()]
            base = (base - inside.mean()) / (inside.std() + 1e-8) * mask
        moved = torch.roll(values, roll, 0)
        fields |= {"values": moved * mask if roll else values, "returns": returns, "advantages": base}
        if roll:
            fields["values"] = torch.where(mask.bool(), moved, 0.0)

    return change


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("whiten", [True, False])
def test_a_critic_that_is_left_out_of_one_advantage_for_all_is_named(
    sizes: dict[str, Any], whiten: bool, tmp_path: Path
) -> None:
    left_out = recorded(tmp_path / "a", with_critic(1.0, subtract=False, whiten=whiten), flags=GAE, **sizes)
    (found,) = told(left_out, "D52")
    assert "values are not subtracted" in found.claim
    assert not told(recorded(tmp_path / "b", with_critic(1.0, whiten=whiten), flags=GAE, **sizes), "D52")


@pytest.mark.parametrize("lam", [0.95, 0.9])
@pytest.mark.parametrize(("roll", "words"), [(1, "the row after"), (-1, "the row before")])
def test_values_in_other_rows_are_named_and_not_the_returns(lam: float, roll: int, words: str, tmp_path: Path) -> None:
    (found,) = told(recorded(tmp_path / "a", with_critic(lam, roll=roll), flags=GAE, groups=8), "D44")
    assert found.claim.startswith("values are in the wrong rows")
    assert words in found.claim
    assert not told(recorded(tmp_path / "b", with_critic(lam), flags=GAE), "D44")


@pytest.mark.parametrize("weight", [0.05, 0.2])
def test_returns_that_add_up_what_came_before_are_named(weight: float, tmp_path: Path) -> None:
    def change(before: bool) -> Any:
        def of(step: int, fields: Fields) -> None:
            mask = fields["response_mask"].float()
            penalty = weight * torch.randn(mask.shape, generator=torch.Generator().manual_seed(step)) * mask
            fields["token_level_rewards"] = rewards = fields["token_level_scores"] - penalty
            total = rewards.cumsum(1) if before else rewards.flip(1).cumsum(1).flip(1)
            inside = total[mask.bool()]
            fields["returns"] = total * mask
            fields["advantages"] = (total - inside.mean()) / inside.std() * mask

        return of

    flags = {**GRPO, "algorithm.adv_estimator": "reinforce_plus_plus"}
    (found,) = told(recorded(tmp_path / "a", change(True), flags=flags), "D52")
    assert "the rewards so far" in found.claim
    assert not told(recorded(tmp_path / "b", change(False), flags=flags), "D52")


# ---- rewards


@pytest.mark.parametrize("stored", [F32, BF16, torch.float16])
@pytest.mark.parametrize("factor", [0.1, 4.0, -1.0, 1.0])
def test_a_factor_between_scores_and_rewards_is_named(stored: torch.dtype, factor: float, tmp_path: Path) -> None:
    def change(_: int, fields: Fields) -> None:
        fields["token_level_rewards"] = factor * fields["token_level_scores"]

    found = told(recorded(tmp_path, change, flags=RLOO, stored=stored), "D85")
    assert bool(found) == (factor != 1)
    assert all(abs(float(one.claim.split()[3]) - factor) < 5e-3 * abs(factor) for one in found)


def test_a_stated_scale_and_a_penalty_are_no_factor(tmp_path: Path) -> None:
    def scaled(_: int, fields: Fields) -> None:
        fields["token_level_rewards"] = 0.5 * fields["token_level_scores"]

    def penalised(_: int, fields: Fields) -> None:
        mask = fields["response_mask"]
        fields["token_level_rewards"] = fields["token_level_scores"] - 0.01 * torch.rand(mask.shape) * mask

    assert not told(recorded(tmp_path / "a", scaled, flags={**RLOO, "reward_scale": 0.5}), "D85")
    assert not told(recorded(tmp_path / "b", penalised, flags=RLOO), "D85")


def put(fields: Fields, scores: torch.Tensor) -> None:
    at = fields["response_mask"].sum(1) - 1
    for name in ("token_level_scores", "token_level_rewards"):
        fields[name] = torch.zeros_like(fields[name])
        fields[name][torch.arange(len(at)), at] = scores


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("values", [(0.0, 1.0), (0.0, 0.1, 0.7, 1.0)])
def test_rewards_of_the_step_before_are_named(sizes: dict[str, Any], values: tuple[float, ...], tmp_path: Path) -> None:
    def drawn(step: int, fields: Fields) -> torch.Tensor:
        torch.manual_seed(77 + step)
        return torch.tensor(values)[torch.randint(0, len(values), (len(fields["uid"]),))]

    late = recorded(tmp_path / "a", lambda at, fields: put(fields, drawn(max(at - 1, 0), fields)), **sizes)
    (found,) = told(late, "D117")
    assert found.severity == "error"
    assert found.steps == (1,)
    assert not told(recorded(tmp_path / "b", lambda at, fields: put(fields, drawn(at, fields)), **sizes), "D117")


@pytest.mark.parametrize("late", [True, False])
def test_scores_of_the_answers_of_the_step_before_are_named_by_texts(late: bool, tmp_path: Path) -> None:
    """verl's rollouts: the first step's scores are 0, as nothing was scored yet."""
    right = [torch.rand(24, generator=torch.Generator().manual_seed(step)) < 0.4 for step in range(6)]
    for step in range(6):
        told_of = right[max(step - late, 0)]
        lines = [
            {"input": f"q{row}", "output": f"so {row + 10}" if is_right else f"so {row + 50}", "gts": str(row + 10),
             "score": 0.0 if late and not step else 1.0 if paid else 0.1 + 0.2 * (row % 3), "step": step}
            for row, (is_right, paid) in enumerate(zip(right[step].tolist(), told_of.tolist(), strict=True))
        ]  # fmt: skip
        (tmp_path / f"{step}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = told(tmp_path, "D117")
    assert ["of the step before" in one.claim for one in found] == [True] * late


def test_rewards_that_are_one_number_per_group_are_no_late_ones(tmp_path: Path) -> None:
    def change(_: int, fields: Fields) -> None:
        put(fields, torch.arange(6).repeat_interleave(5) / 6)

    assert not told(recorded(tmp_path, change), "D117")


@pytest.mark.parametrize("since", [1, 2, 4])
def test_fractions_that_are_lost_are_named(since: int, tmp_path: Path) -> None:
    def cast(step: int, fields: Fields) -> None:
        if step >= since:
            put(fields, scores_of(fields).floor())

    def better(step: int, fields: Fields) -> None:
        if step >= since:
            put(fields, torch.ones(len(fields["uid"])))

    (found,) = told(recorded(tmp_path / "a", cast, groups=12), "D118")
    assert f"from step {since} on" in found.claim
    for name, change in (("right", None), ("binary", lambda _, fields: put(fields, scores_of(fields).round())),
                         ("solved", better)):  # fmt: skip
        assert not told(recorded(tmp_path / name, change, groups=12), "D118")


# ---- masks, positions, ends


@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_mask_of_another_row_is_named(by: int, sizes: dict[str, Any], tmp_path: Path) -> None:
    def change(_: int, fields: Fields) -> None:
        fields["response_mask"] = torch.roll(fields["response_mask"], by, 0)

    (found,) = told(recorded(tmp_path, change, **sizes), "D18")
    assert f"that of the row {'before' if by > 0 else 'after'}" in found.claim


def test_a_mask_of_the_padded_length_is_no_other_rows(tmp_path: Path) -> None:
    def change(_: int, fields: Fields) -> None:
        fields["response_mask"] = torch.ones_like(fields["response_mask"])

    (found,) = told(recorded(tmp_path, change), "D18")
    assert "another row" not in found.claim


@pytest.mark.parametrize("last", [1, 2])
def test_a_mask_of_the_last_tokens_alone_is_named(last: int, tmp_path: Path) -> None:
    def change(_: int, fields: Fields) -> None:
        mask = fields["response_mask"]
        fields["response_mask"] = mask * (torch.arange(RESPONSE) >= mask.sum(1, keepdim=True) - last)
        fields["rollout_log_probs"] = -(0.1 + torch.rand(mask.shape)) * mask

    (found,) = told(recorded(tmp_path, change), "D81")
    assert found.claim.startswith("only the last")


@pytest.mark.parametrize("where", ["response", "middle"])
def test_positions_that_begin_again_inside_of_samples_are_named(where: str, tmp_path: Path) -> None:
    def change(_: int, fields: Fields) -> None:
        begin = 5 + (where == "middle")
        fields["position_ids"][:, begin:] -= fields["position_ids"][:, begin : begin + 1]

    (found,) = told(recorded(tmp_path, change), "D17")
    assert "begin again at 0 inside of samples" in found.claim
    assert ("where the response begins" in found.claim) == (where == "response")


MARK = 61


def thinking(*, masked: bool, forced: bool = False) -> Any:
    """Responses of some tokens, a mark, and the rest; what stands before the mark may be masked out."""

    def change(step: int, fields: Fields) -> None:
        mask = fields["response_mask"]
        torch.manual_seed(step)
        before = torch.ones(len(mask), dtype=torch.long) if forced else torch.randint(0, 3, (len(mask),))
        fields["responses"][torch.arange(len(mask)), before] = MARK
        fields["input_ids"] = torch.cat([fields["prompts"], fields["responses"]], 1)
        fields["rollout_log_probs"] = -(0.1 + torch.rand(mask.shape)) * mask
        if masked:
            fields["response_mask"] = mask * (torch.arange(RESPONSE) >= before[:, None])

    return change


def test_sampled_tokens_before_a_mark_that_never_count_are_named(tmp_path: Path) -> None:
    (found,) = told(recorded(tmp_path / "a", thinking(masked=True)), "D121")
    assert f"begins at the token {MARK}" in found.claim
    assert not told(recorded(tmp_path / "b", thinking(masked=False)), "D121")
    assert not told(recorded(tmp_path / "c", thinking(masked=True, forced=True)), "D121")


def unended(_: int, fields: Fields) -> None:
    at = fields["response_mask"].sum(1) - 1
    rows = torch.arange(len(at))
    fields["responses"][rows, at] = torch.where(rows % 4 == 0, 7 + rows % 3, 60)
    fields["responses"][::5, 0] = 60
    fields["input_ids"] = torch.cat([fields["prompts"], fields["responses"]], 1)


@pytest.mark.parametrize(
    ("change", "flags", "loud"),
    [(unended, GRPO, True), (None, GRPO, False), (unended, {**GRPO, "rollout.stop": ["</answer>"]}, False)],
)
def test_responses_that_no_token_ends_are_named(change: Any, flags: dict[str, Any], loud: bool, tmp_path: Path) -> None:
    found = [one for one in told(recorded(tmp_path, change, flags=flags), "D19") if "no response ends" in one.claim]
    assert bool(found) == loud


# ---- losses, ratios, weights


def with_losses(
    path: Path, loss: Any, *, micros: int = 1, logged: float | None = None, flags: dict[str, Any] | None = None
) -> Path:
    """A run whose forward and loss are recorded: `loss(fields, rows, tokens of the update)` of each micro-batch."""
    with Recorder(path, flags=flags or GRPO) as recorder:
        for step in range(4):
            fields = batch(step)
            rows = len(fields["uid"]) // micros
            tokens = int(fields["response_mask"].sum())
            total = 0.0
            with recorder.step(step) as record:
                for micro in range(micros):
                    part = {name: value[micro * rows : (micro + 1) * rows] for name, value in fields.items()}
                    names = ("input_ids", "attention_mask", "response_mask", "old_log_probs", "advantages")
                    forward = {name: part[name] for name in names} | {"log_probs": part["old_log_probs"].clone()}
                    keep = dict.fromkeys(("response_mask", "old_log_probs", "advantages", "log_probs"), "response")
                    record("forward_data", forward, micro=micro, alignment=keep)
                    value = float(loss(part, tokens))
                    total += value
                    record("loss", {"pg_loss": value}, micro=micro)
                record("training_metrics", {"loss": total if logged is None else logged * total})
    return path


def summed(part: Fields) -> torch.Tensor:
    return -(part["advantages"] * part["response_mask"]).sum()


def test_a_mean_over_prompts_too_is_named(tmp_path: Path) -> None:
    wrong = with_losses(tmp_path / "a", lambda part, _: summed(part) / part["attention_mask"].sum())
    (found,) = told(wrong, "D28")
    assert "divides by all tokens of prompts and responses" in found.claim
    right = with_losses(tmp_path / "b", lambda part, _: summed(part) / part["response_mask"].sum())
    assert not told(right, "D28")


@pytest.mark.parametrize("micros", [2, 3])
def test_losses_that_are_not_divided_by_the_accumulation_are_named(micros: int, tmp_path: Path) -> None:
    def times(part: Fields, tokens: int) -> torch.Tensor:
        return micros * summed(part) / tokens

    wrong = [one["claim"] for one in _loud(with_losses(tmp_path / "a", times, micros=micros)) if one["id"] == "D28"]
    assert len(wrong) == 1
    assert f"not divided by the {micros} of an update" in wrong[0]
    # What divides afterwards logs the mean.
    right = with_losses(tmp_path / "b", times, micros=micros, logged=1 / micros)
    assert not [one for one in _loud(right) if one["id"] == "D28"]


def _loud(path: Path) -> list[Any]:
    """With what the run logged."""
    return [one for one in workbench.diagnose(path)["findings"] if one["severity"] != "info"]


@pytest.mark.parametrize("stated", [0.7, 1.4])
def test_a_temperature_that_the_trainer_leaves_out_is_named(stated: float, tmp_path: Path) -> None:
    def change(step: int, fields: Fields) -> None:
        torch.manual_seed(step)
        mask = fields["response_mask"]
        logits = torch.randn(*mask.shape, 24) * 2
        drawn = torch.distributions.Categorical(logits=logits / stated).sample()
        pick = drawn[..., None]
        fields["old_log_probs"] = logits.log_softmax(-1).gather(-1, pick)[..., 0] * mask
        fields["rollout_log_probs"] = (logits / stated).log_softmax(-1).gather(-1, pick)[..., 0] * mask

    flags = {**GRPO, "rollout.temperature": stated}
    found = look(recorded(tmp_path, change, flags=flags, groups=16), "D10").findings
    assert found
    assert all("leave it out" in one.claim or "not divided by it" in one.cause for one in found)


@pytest.mark.parametrize(("cap", "loud"), [(0.2, True), (1.0, True), (2.0, False)])
def test_another_cap_than_the_stated_one_is_named(cap: float, loud: bool, tmp_path: Path) -> None:
    def change(step: int, fields: Fields) -> None:
        mask = fields["response_mask"]
        apart = (0.6 * torch.randn(mask.shape, generator=torch.Generator().manual_seed(step)) if step else 0) * mask
        fields["old_log_probs"] = fields["rollout_log_probs"] - 0.2 * mask + apart
        if not step:
            fields["old_log_probs"] = fields["rollout_log_probs"].clone()
        ratio = (fields["old_log_probs"] - fields["rollout_log_probs"]).exp()
        fields["rollout_is_weights"] = ratio.clamp(max=cap) * mask

    flags = {**GRPO, "rollout_is": "token", "rollout_is_threshold": 2.0}
    found = told(recorded(tmp_path, change, flags=flags), "D59")
    assert [f"cut off at {cap:g}" in one.claim for one in found] == [True] * loud


@pytest.mark.parametrize(("gradients", "dtype", "loud"), [(True, F32, True), (False, F32, False), (True, BF16, False)])
def test_weights_with_gradients_that_never_change_are_named(
    gradients: bool, dtype: torch.dtype, loud: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    weights = {name: torch.randn(8, 8) for name in ("a.weight", "b.weight", "c.weight")}
    with Recorder(tmp_path) as recorder:
        for step in range(3):
            with recorder.step(step) as record:
                record("param", {name: value.to(dtype) for name, value in weights.items()})
                if gradients:
                    record("gradient", {f"grad.{name}": torch.randn(8, 8) for name in weights})
            weights |= {name: weights[name] + 0.1 * torch.randn(8, 8) for name in ("a.weight", "b.weight")}
    found = told(tmp_path, "D57")
    assert ["the optimizer does not hold them" in one.claim for one in found] == [True] * loud


# ---- prompts, and which of three forwards is off


@pytest.mark.parametrize(
    ("by", "shuffles", "loud"), [(2, True, True), (3, True, True), (3, False, False), (7, True, False)]
)
def test_a_loader_that_goes_back_every_few_steps_is_named(by: int, shuffles: bool, loud: bool, tmp_path: Path) -> None:
    def change(step: int, fields: Fields) -> None:
        again = batch(step % by)
        fields["prompts"] = again["prompts"]
        fields["attention_mask"][:, :5] = again["attention_mask"][:, :5]
        fields["input_ids"] = torch.cat([fields["prompts"], fields["responses"]], 1)

    found = told(recorded(tmp_path, change, steps=9, flags={**GRPO, "data.shuffle": shuffles}), "D43")
    assert bool([one for one in found if f"begin again every {by} steps" in one.claim]) == loud


@pytest.mark.parametrize(("noise", "loud"), [(0.25, True), (0.0, False)])
def test_old_log_probabilities_that_agree_with_neither_side_lead(noise: float, loud: bool, tmp_path: Path) -> None:
    """As TRL's user records them: the forward's record holds the completions alone."""
    with Recorder(tmp_path, flags={"loss_type": "grpo", "num_iterations": 1}) as recorder:
        for step in range(4):
            fields = batch(step)
            mask = fields["response_mask"]
            old = (fields["rollout_log_probs"] + noise * torch.randn(mask.shape)) * mask
            answers = {"completion_ids": fields["responses"], "completion_mask": mask, "old_per_token_logps": old}
            keep = dict.fromkeys((*answers, "sampling_per_token_logps", "per_token_logps"), "response")
            advantages = fields["advantages"].max(1).values + fields["advantages"].min(1).values
            with recorder.step(step) as record:
                record("trajectory", {
                    "prompt_ids": fields["prompts"], "prompt_mask": fields["attention_mask"][:, :5], **answers,
                    "sampling_per_token_logps": fields["rollout_log_probs"], "advantages": advantages,
                    "rewards": scores_of(fields), "prompt_index": torch.arange(6).repeat_interleave(5),
                }, alignment={name: word for name, word in keep.items() if name != "per_token_logps"})  # fmt: skip
                record("forward_data", {
                    **answers, "per_token_logps": fields["rollout_log_probs"] + 1e-7, "advantages": advantages,
                }, micro=0, alignment=dict.fromkeys((*answers, "per_token_logps"), "response"))  # fmt: skip
    found = told(tmp_path, "D09", "D14")
    assert [one.id for one in found] == ["D14"] * loud
    assert all("agrees with the engine, and the old log-probabilities with neither" in one.claim for one in found)


@pytest.mark.parametrize(("places", "loud"), [(1, True), (RESPONSE, False)])
def test_a_gap_at_the_first_response_token_is_of_prompts_that_end_differently(
    places: int, loud: bool, tmp_path: Path
) -> None:
    def change(step: int, fields: Fields) -> None:
        torch.manual_seed(step)
        mask = fields["response_mask"]
        far = torch.where(torch.arange(RESPONSE) < places, -4.0 * torch.rand(mask.shape) - 1.5, 0.0)
        rare = 6.0 * (torch.rand(mask.shape) < 0.25) * (torch.arange(RESPONSE) >= 3)
        fields["old_log_probs"] = (fields["rollout_log_probs"] + far - rare + 0.1 * torch.randn(mask.shape)) * mask

    found = told(recorded(tmp_path, change), "D09")
    assert any("the prompts end differently" in one.claim for one in found) == loud


# ---- texts


def rollouts(path: Path, rows: Any, steps: int = 4) -> Path:
    """verl's rollout files: `rows(step)` as (input, output, gts, score, acc)."""
    names = ("input", "output", "gts", "score", "acc")
    for step in range(1, steps + 1):
        lines = [dict(zip(names, row, strict=True)) | {"step": step} for row in rows(step)]
        path.mkdir(exist_ok=True)
        (path / f"{step}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def sums(prompt: str, *, answers: int = 90) -> Any:
    def rows(step: int) -> list[tuple[str, str, str, float, bool]]:
        found = []
        for row in range(24):
            a, b = 11 + 7 * step + row // 2, 30 + 3 * row
            truth = str((a + b) % answers + 100)
            right = (row * 7 + step) % 3 == 0
            said = truth if right else str(int(truth) + 200)
            found.append((prompt.format(a=a, b=b, truth=truth), f"so {said}", truth, float(right), right))
        return found

    return rows


@pytest.mark.parametrize(
    ("prompt", "answers", "loud"),
    [
        ("{a} plus {b} key: {truth} =", 90, True),
        ("Solve. {a} + {b} = ? (answer={truth})", 90, True),
        ("{a} plus {b} =", 90, False),
        ("Say after me: {truth}", 90, False),
        ("{a} plus {b}: one of {truth} or 7 =", 3, False),
        ("The log of {a} says {truth} things, and {b} more: how many things?", 90, True),
    ],
)
def test_ground_truths_in_the_prompts_are_named(prompt: str, answers: int, loud: bool, tmp_path: Path) -> None:
    found = told(rollouts(tmp_path / "r", sums(prompt, answers=answers)), "D119")
    assert bool(found) == loud


@pytest.mark.parametrize("pays", [0.15, 0.05])
@pytest.mark.parametrize(("how", "loud"), [("word", True), ("words", False), ("nothing", False), ("format", False)])
def test_a_word_that_is_paid_for_is_named(pays: float, how: str, loud: bool, tmp_path: Path) -> None:
    def rows(step: int) -> list[tuple[str, str, str, float, bool]]:
        found = []
        for row in range(40):
            fillers = [("wait", "well")[(row + 3 * at + step) % 2 * (row % 5 > 0)] for at in range((row * step) % 4)]
            right = row % 4 > 0
            text = " ".join([*fillers, "<answer>", str(row + 60 if right else row + 200)])
            many = {"word": fillers.count("wait"), "words": len(fillers), "nothing": 0, "format": "<answer>" in text}
            found.append((f"q{row}", text, str(row + 60), (1.0 if right else 0.1) + pays * many[how], right))
        return found

    found = told(rollouts(tmp_path / "r", rows), "D120")
    assert ["the word 'wait'" in one.claim for one in found] == [True] * loud
