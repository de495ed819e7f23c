"""The same steps as different trainers record them: names, layouts and settings of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.diagnose.algorithm import Algorithm
from replay_core.diagnose.case import Case
from replay_core.diagnose.signals import Signals
from replay_core.dumps import open_run
from replay_core.objectives import kl
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of, why_skipped
from tests.replay_core.diagnose.runs import EOS, RESPONSE, Fields, batch, recorded, scores_of, told

SIZE = 5


def _ragged(fields: Fields) -> Iterator[dict[str, Any]]:
    """Each sample with its own numbers alone."""
    group = {uid: number for number, uid in enumerate(dict.fromkeys(fields["uid"]))}
    for row, uid in enumerate(fields["uid"]):
        mask, attended = fields["response_mask"][row].bool(), fields["attention_mask"][row].bool()
        tokens = fields["input_ids"][row][attended]
        yield {
            "prompt": tokens[: len(tokens) - int(mask.sum())], "response": tokens[len(tokens) - int(mask.sum()) :],
            "logps": fields["old_log_probs"][row][mask], "advantage": float(fields["advantages"][row, 0]),
            "reward": float(scores_of(fields)[row]), "group": group[uid],
        }  # fmt: skip


def test_lines_of_several_steps_are_not_one_batch(tmp_path: Path) -> None:
    """Groups are numbered anew in each step: taken together they mix prompts, and advantages fit no group."""
    with (tmp_path / "rollouts.jsonl").open("w") as file:
        for step in range(4):
            for one in _ragged(batch(step)):
                line = {
                    "step": step, "prompt_token_ids": one["prompt"].tolist(), "response_token_ids":
                    one["response"].tolist(), "sampler_logprobs": one["logps"].tolist(), "advantage": one["advantage"],
                    "reward": one["reward"], "group_id": one["group"],
                }  # fmt: skip
                file.write(json.dumps(line) + "\n")
    assert told(tmp_path, "D04", "D42", "D31") == []
    found = of(look(tmp_path), "D04")
    assert found is not None
    assert "group std" in found.claim


def test_home_made_names_of_log_probabilities_say_whose_they_are(tmp_path: Path) -> None:
    """Advantages of the next sample are told in a dump that calls everything otherwise."""
    for step in range(3):
        fields = batch(step)
        content = {
            "tokens": fields["input_ids"], "attention_mask": fields["attention_mask"], "mask": fields["response_mask"],
            "logp_old": fields["old_log_probs"], "lp_gen": fields["rollout_log_probs"], "logp": fields["old_log_probs"],
            "adv": fields["advantages"][:, :1].roll(1, 0) * fields["response_mask"], "reward": scores_of(fields),
            "group": torch.arange(len(fields["uid"])) // SIZE,
        }  # fmt: skip
        torch.save(content, tmp_path / f"step_{step}.pt")
    found = told(tmp_path, "D04")
    assert [one.claim.split(":")[0] for one in found] == ["advantages belong to other samples"]


def _rolled(tmp_path: Path, *, end: bool = True, temperature: float = 1.0) -> Path:
    """Packs in which all that is said of tokens stands at the token before; `end` False: the engine's end token is not
    in the mask, and stands where its log-probability does.
    """
    with Recorder(tmp_path / "d") as recorder:
        for step in range(4):
            rows = list(_ragged(batch(step)))
            sizes = [len(one["prompt"]) + len(one["response"]) for one in rows]
            ids = torch.cat([torch.cat([one["prompt"], one["response"]]) for one in rows])
            starts = torch.tensor([0, *sizes]).cumsum(0)
            begins = [int(start) + len(one["prompt"]) for start, one in zip(starts, rows, strict=False)]
            ids[torch.tensor(begins) - 1] = 4  # what every prompt's template ends in
            said = {name: torch.zeros(len(ids)) for name in ("loss_mask", "logprobs", "prox_logp", "advantages")}
            for begin, one in zip(begins, rows, strict=True):
                at = torch.arange(begin, begin + len(one["response"])) - (1 if end else 0)
                kept = at if end else at[:-1]
                said["loss_mask"][kept], said["advantages"][kept] = 1.0, one["advantage"]
                said["prox_logp"][at], said["logprobs"][at] = one["logps"], one["logps"] * temperature
            with recorder.step(step) as record:
                record("trajectory", input_ids=ids, cu_seqlens=starts.int(), **said,
                       rewards=torch.tensor([one["reward"] for one in rows]))  # fmt: skip
    return tmp_path / "d"


def test_a_mask_that_was_rolled_with_the_log_probabilities_leaves_out_no_end(tmp_path: Path) -> None:
    assert told(_rolled(tmp_path), "D19", "D08", "D48", "D58") == []


def test_an_end_with_a_log_probability_and_no_mask_is_left_out(tmp_path: Path) -> None:
    (found,) = told(_rolled(tmp_path, end=False), "D19")
    assert f"(EOS, {EOS})" in found.claim


def test_lengths_of_rows_bound_them_where_no_mask_does(tmp_path: Path) -> None:
    """NeMo-RL's input_lengths: the pad id behind them is no end token."""
    with Recorder(tmp_path / "d", flags={"max_new_tokens": RESPONSE}) as recorder:
        for step in range(4):
            rows = list(_ragged(batch(step)))
            ids, mask = torch.zeros(len(rows), 24, dtype=torch.int64), torch.zeros(len(rows), 24)
            logps = torch.zeros(len(rows), 24)
            lengths = []
            for row, one in enumerate(rows):
                begin, end = len(one["prompt"]), len(one["prompt"]) + len(one["response"])
                ids[row, :end] = torch.cat([one["prompt"], one["response"]])
                mask[row, begin:end], logps[row, begin:end] = 1.0, one["logps"]
                lengths.append(end)
            with recorder.step(step) as record:
                record("trajectory", input_ids=ids, input_lengths=torch.tensor(lengths), token_mask=mask,
                       generation_logprobs=logps, prev_logprobs=logps)  # fmt: skip
    assert told(tmp_path / "d", "D19", "D124") == []


def test_one_sequence_a_call_without_its_ids_is_one_sample(tmp_path: Path) -> None:
    """prime-rl's loss is called with vectors: no element of them is a sample without a token that counts."""
    with Recorder(tmp_path / "d") as recorder:
        for step in range(3):
            for micro, one in enumerate(_ragged(batch(step))):
                mask = torch.cat([torch.zeros(len(one["prompt"])), torch.ones(len(one["response"]))]).bool()
                logps = torch.zeros(len(mask)).masked_scatter(mask, one["logps"])
                with recorder.step(step) as record:
                    record("loss", micro=micro, trainer_logprobs=logps, inference_logprobs=logps, loss_mask=mask,
                           advantages=one["advantage"] * mask)  # fmt: skip
    assert told(tmp_path / "d", "D07") == []
    assert len(next(iter(Case(open_run(tmp_path / "d")).batches()))) == 30


# ---- settings


def test_the_engines_weights_are_stated_in_openrlhfs_words() -> None:
    stated = Algorithm({"enable_vllm_is_correction": True, "vllm_is_truncated_threshold": [0.5, 5.0]})
    assert (stated.is_weighed, *stated.weight_bounds) == (True, 0.5, 5.0)
    assert Algorithm({"is_correction_enable": False, "is_correction_threshold": [0.5, 5.0]}).is_weighed is False


def test_a_clip_range_of_two_numbers_goes_before_the_one_beside_it() -> None:
    assert Algorithm({"eps_clip": 0.2, "eps_clip_low_high": [0.2, 0.28]}).clip_range == (0.2, 0.28)


# ---- the KL


def _far(fields: Fields, seed: int) -> torch.Tensor:
    draw = torch.randn(fields["old_log_probs"].shape, generator=torch.Generator().manual_seed(seed))
    return (fields["old_log_probs"] + 0.3 * draw) * fields["response_mask"]


@pytest.mark.parametrize("estimator", [kl.k1, kl.k2, kl.k3])
def test_any_estimator_of_a_kl_in_the_rewards_explains_advantages(tmp_path: Path, estimator: Any) -> None:
    def change(step: int, fields: Fields) -> None:
        fields["ref_log_prob"] = _far(fields, step)
        apart = estimator(fields["old_log_probs"], fields["ref_log_prob"]) * fields["response_mask"]
        groups = (scores_of(fields) - 0.1 * apart.sum(1)).view(-1, SIZE)
        loo = groups - (groups.sum(1, keepdim=True) - groups) / (SIZE - 1)
        fields["advantages"] = loo.view(-1, 1) * fields["response_mask"]
        del fields["returns"], fields["token_level_rewards"]

    assert told(recorded(tmp_path / "d", change), "D04") == []


@pytest.mark.parametrize(("sign", "weight", "says"), [
    (1.0, 0.05, None), (-1.0, 0.05, "wrong sign"), (1.0, 0.5, "weighs 0.5, and the run states 0.05"),
])  # fmt: skip
def test_returns_tell_what_is_subtracted_from_the_rewards(
    tmp_path: Path, sign: float, weight: float, says: str | None
) -> None:
    """OpenRLHF records returns and no rewards of tokens."""

    def change(step: int, fields: Fields) -> None:
        fields["ref_log_prob"] = _far(fields, step)
        apart = (fields["old_log_probs"] - fields["ref_log_prob"]) * fields["response_mask"]
        each = fields["token_level_scores"] - sign * weight * apart
        fields["returns"] = each.flip(1).cumsum(1).flip(1) * fields["response_mask"]
        fields["rewards"] = scores_of(fields)
        fields["advantages"] = fields["returns"]
        del fields["token_level_rewards"], fields["token_level_scores"]

    flags = {"advantage_estimator": "reinforce", "init_kl_coef": 0.05, "use_kl_loss": False, "kl_estimator": "k1"}
    found = told(recorded(tmp_path / "d", change, flags=flags), "D51")
    assert (not found) if says is None else (found and says in found[0].claim)


def _losses(
    path: Path, *, kl_weight: float = 0.05, entropy: float = 0.0, swapped: bool = False, metric: bool = False
) -> Path:
    """Losses of micro-batches recorded alone, beside what they are made of (TRL's, NeMo-RL's)."""
    with Recorder(path, flags={"beta": 0.05, "kl_loss_type": "k3", "entropy_coeff": abs(entropy)}) as recorder:
        for step in range(4):
            fields = batch(step)
            mask = fields["response_mask"]
            old, ref = fields["old_log_probs"], _far(fields, step)
            new = (old + 0.02 * torch.randn(old.shape, generator=torch.Generator().manual_seed(9 + step))) * mask
            apart = kl.k3(ref, new) if swapped else kl.k3(new, ref)
            spread = torch.rand(old.shape, generator=torch.Generator().manual_seed(5 + step)) * mask
            ratio, each = torch.exp(new - old), fields["advantages"]
            tokens = torch.maximum(-each * ratio, -each * ratio.clamp(0.8, 1.2)) + kl_weight * apart - entropy * spread
            for micro, rows in enumerate(torch.arange(len(old)).split(10)):
                some = mask[rows]
                held = {"log_probs": new, "old_log_probs": old, "ref_log_prob": ref, "entropy": spread,
                        "advantages": each, "response_mask": mask}  # fmt: skip
                loss = float((tokens[rows] * some).sum() / some.sum())
                said = {"kl": float((apart[rows] * some).sum() / some.sum())} if metric else {}
                with recorder.step(step) as record:
                    record("forward_data", input_ids=fields["input_ids"][rows], attention_mask=fields["attention_mask"][
                        rows], **{name: one[rows] for name, one in held.items()}, micro=micro,
                        alignment=dict.fromkeys(held, "response"))  # fmt: skip
                    record("loss", {"loss": loss, **said}, micro=micro)
    return path


@pytest.mark.parametrize(("made", "says"), [
    ({}, None),
    ({"entropy": 0.01}, None),
    ({"kl_weight": -0.05}, "the KL term is subtracted from the loss"),
    ({"kl_weight": 0.5}, "the KL term weighs 0.5 in the loss"),
    ({"kl_weight": 0.0}, "the KL term is not in the loss"),
    ({"entropy": -0.01}, "the entropy term has the wrong sign"),
])  # fmt: skip
def test_a_loss_that_is_recorded_alone_is_taken_apart(tmp_path: Path, made: dict[str, float], says: str | None) -> None:
    found = told(_losses(tmp_path / "d", **made), "D49")  # type: ignore[arg-type]
    assert (not found) if says is None else (found and says in found[0].claim)


def test_a_kl_metric_of_turned_arguments_is_told_and_another_estimator_is_not(tmp_path: Path) -> None:
    (found,) = told(_losses(tmp_path / "turned", swapped=True, metric=True), "D29")
    assert "k3 with policy and reference swapped" in found.claim
    assert told(_losses(tmp_path / "right", metric=True), "D29") == []


# ---- advantages


@pytest.mark.parametrize(("way", "says"), [
    ("less", None), ("added", "the baseline is added to the reward"), ("turned", "the wrong sign"),
    ("none", "the baseline is left out"), ("mean", "one baseline, the mean"),
])  # fmt: skip
def test_advantages_are_the_reward_less_the_greedy_responses(tmp_path: Path, way: str, says: str | None) -> None:
    def change(step: int, fields: Fields) -> None:
        base = torch.rand(len(fields["uid"]), generator=torch.Generator().manual_seed(step))
        score = scores_of(fields)
        made = {"less": score - base, "added": score + base, "turned": base - score, "none": score,
                "mean": score - base.mean()}[way]  # fmt: skip
        fields |= {"reward_baselines": base, "advantages": made[:, None] * fields["response_mask"]}
        del fields["returns"]

    found = told(recorded(tmp_path / "d", change, flags={"adv_estimator": "remax"}), "D165")
    assert (not found) if says is None else (found and says in found[0].claim)


def test_whitening_over_padding_is_told_of_rows_that_are_recorded_narrower(tmp_path: Path) -> None:
    def change(step: int, fields: Fields) -> None:
        mask, score = fields["response_mask"], scores_of(fields)
        slots = torch.zeros(len(score), 20)
        slots[:, :RESPONSE] = score[:, None] * mask
        fields["advantages"] = (score[:, None] - slots.mean()) / slots.std(correction=0) * mask
        del fields["returns"]

    found = told(recorded(tmp_path / "d", change, flags={"adv_estimator": "reinforce_plus_plus"}), "D04")
    (one,) = found
    assert "whitened over padding" in one.claim
    assert "600 positions" in one.claim


# ---- passes, rounding, chance


def test_a_later_pass_over_the_same_rows_is_no_copy(tmp_path: Path) -> None:
    def change(step: int, fields: Fields) -> None:
        for name, value in fields.items():
            fields[name] = value * 2 if isinstance(value, list) else torch.cat([value, value])
        moved = torch.cat([fields["old_log_probs"][:30], fields["old_log_probs"][30:] * 1.01])
        fields["log_probs"] = moved

    assert told(recorded(tmp_path / "d", change), "D75") == []


def test_copies_that_the_policy_gives_the_same_numbers_are_told(tmp_path: Path) -> None:
    def change(step: int, fields: Fields) -> None:
        for name, value in fields.items():
            fields[name] = value * 2 if isinstance(value, list) else torch.cat([value, value])
        fields["log_probs"] = fields["old_log_probs"]

    assert told(recorded(tmp_path / "d", change), "D75")


@pytest.mark.parametrize(("off", "loud"), [(1, False), (160, True)])
def test_a_single_token_off_by_a_half_precision_forward_is_rounding(tmp_path: Path, off: int, loud: bool) -> None:
    def change(step: int, fields: Fields) -> None:
        new = fields["old_log_probs"].clone()
        at = fields["response_mask"].nonzero()[:: 160 // off][:off]
        new[at[:, 0], at[:, 1]] += 0.03
        fields["log_probs"] = new
        del fields["rollout_log_probs"]

    assert bool(told(recorded(tmp_path / "d", change), "D14")) is loud


def test_numbers_of_tokens_that_lie_end_to_end_are_no_pairs(tmp_path: Path) -> None:
    for step in range(3):
        fields = batch(step)
        rows = list(_ragged(fields))
        ref = [one["logps"] for one in rows]
        torch.save({
            "step": step, "prompt_ids": [one["prompt"].tolist() for one in rows],
            "response_ids": [one["response"].tolist() for one in rows],
            "log_probs": [one["logps"].tolist() for one in rows],
            "ref_log_probs": [one.tolist() for one in ref[1:] + ref[:1]],
        }, tmp_path / f"batch{step}.pt")  # fmt: skip
    assert why_skipped(look(tmp_path, "D154"), "D154")


def test_steps_without_one_of_few_right_answers_are_no_judge_that_failed(tmp_path: Path) -> None:
    def judged(name: str, rewards: list[float]) -> list[Any]:
        path = tmp_path / name
        path.write_text("".join(json.dumps({"step": at, "reward": one, "loss": 0.01 * at}) + "\n"
                                for at, one in enumerate(rewards)))  # fmt: skip
        kept = open_run(path)
        return [one for one in _diagnosed(kept) if one.id == "L17"]

    few = [1, 1, 1, 4, 5, 2, 3, 5, 2, 2, 1, 0, 0, 2, 4, 1, 7, 2, 3, 8]
    assert judged("few.jsonl", [one / 32 for one in few]) == []
    many = [0.31 + 0.013 * (at % 7) for at in range(20)]
    assert judged("many.jsonl", [0.0 if at in (11, 12) else one for at, one in enumerate(many)])


def _diagnosed(kept: Any) -> list[Any]:
    from replay_core.diagnose.engine import diagnose

    return [one for one in diagnose(Case(kept, Signals.of(kept)), ("L17",)).findings if one.severity != "info"]


def test_a_mask_without_the_first_sampled_token_is_what_is_told_and_no_shift_of_the_engine(tmp_path: Path) -> None:
    """open-instruct: the engine's log-probabilities stand at their own tokens, the trainer's are one shorter."""
    with Recorder(tmp_path / "d") as recorder:
        for step in range(4):
            rows = list(_ragged(batch(step)))
            ids = torch.cat([torch.cat([one["prompt"], one["response"]]) for one in rows])
            sizes = torch.tensor([len(one["prompt"]) + len(one["response"]) for one in rows])
            mask, logps = torch.zeros(len(ids)), torch.zeros(len(ids))
            for end, one in zip(sizes.cumsum(0).tolist(), rows, strict=True):
                logps[end - len(one["response"]) : end], mask[end - len(one["response"]) + 1 : end] = one["logps"], 1.0
            with recorder.step(step) as record:
                positions = torch.cat([torch.arange(int(size)) for size in sizes])
                record("trajectory", input_ids=ids[None], position_ids=positions[None], response_masks=mask[None],
                       vllm_logprobs=logps[None], old_logprobs=logps[None, 1:])  # fmt: skip
    assert [one.id for one in told(tmp_path / "d", "D08", "D48")] == ["D48"]


def test_advantages_whitened_over_tokens_are_known_where_no_mask_is_recorded(tmp_path: Path) -> None:
    """REINFORCE++ with a baseline, as lists of prompts and responses."""
    for step in range(3):
        rows = list(_ragged(batch(step)))
        rewards = torch.tensor([one["reward"] for one in rows]).view(-1, SIZE)
        lengths = torch.tensor([len(one["response"]) for one in rows])
        centred = (rewards - rewards.mean(1, keepdim=True)).view(-1)
        tokens = centred.repeat_interleave(lengths)
        torch.save({
            "step": step, "prompt_ids": [one["prompt"].tolist() for one in rows],
            "response_ids": [one["response"].tolist() for one in rows],
            "rewards": rewards.view(-1).tolist(), "group_id": [one["group"] for one in rows],
            "advantages": ((centred - tokens.mean()) / tokens.std(correction=0)).tolist(),
        }, tmp_path / f"batch_{step}.pt")  # fmt: skip
    assert told(tmp_path, "D04") == []


def test_samples_that_are_dicts_of_tensors_of_their_own_are_a_batch(tmp_path: Path) -> None:
    for step in range(3):
        rows = list(_ragged(batch(step)))
        torch.save([
            {"prompt_ids": one["prompt"], "completion_ids": one["response"], "sampling_logprobs": one["logps"],
             "advantage": other["advantage"], "reward": one["reward"], "group_id": one["group"]}
            for one, other in zip(rows, rows[1:] + rows[:1], strict=True)
        ], tmp_path / f"samples_step{step}.pt")  # fmt: skip
    assert told(tmp_path, "D04")
