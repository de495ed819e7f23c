"""Runs as trainers of three kinds record them: packed with slime's words, padded with verl's, a critic beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from replay_core.diagnose.case import Case
from replay_core.diagnose.engine import diagnose
from replay_core.diagnose.finding import Finding
from replay_core.diagnose.signals import Signals
from replay_core.dumps import open_run
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.updating import Net

P, R, GROUP = 3, 6, 4


def told(folder: Path, *rules: str) -> list[Finding]:
    run = open_run(folder)
    found = diagnose(Case(run, Signals.of(run)), rules).findings
    return [one for one in found if one.severity != "info" and one.downstream_of is None]


def batch(seed: int, rows: int = 24) -> dict[str, Any]:
    """Rows [B, P + R] padded on the right, with a mask, log-probabilities and rewards in groups of four."""
    draw = torch.Generator().manual_seed(seed)
    ids_BS = torch.randint(5, 40, (rows, P + R), generator=draw)
    mask_BS = torch.zeros(rows, P + R, dtype=torch.int64)
    for row, length in enumerate(torch.randint(2, R + 1, (rows,), generator=draw).tolist()):
        mask_BS[row, P : P + length] = 1
    attention_BS = mask_BS.clone()
    attention_BS[:, :P] = 1
    logprobs_BT = -torch.rand(rows, P + R - 1, generator=draw) - 0.1
    return {
        "input_ids": ids_BS * attention_BS, "attention_mask": attention_BS, "response_mask": mask_BS,
        "old_log_probs": logprobs_BT, "rewards": torch.rand(rows, generator=draw).round(decimals=3),
        "group_ids": torch.arange(rows) // GROUP,
    }  # fmt: skip


def normalised(fields: dict[str, Any]) -> torch.Tensor:
    each = fields["rewards"].view(-1, GROUP)
    a_B = ((each - each.mean(1, keepdim=True)) / (each.std(1, keepdim=True) + 1e-6)).reshape(-1)
    return torch.as_tensor(a_B[:, None] * fields["response_mask"][:, 1:])


def test_tool_output_in_the_mask_of_packed_samples_is_named_in_slimes_words(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    recorder = Recorder(tmp_path / "run", flags={"packing": True, "temperature": 1.0})
    for step in range(3):
        lengths = draw.integers(10, 14, 16)
        total, starts = int(lengths.sum()), np.concatenate([[0], np.cumsum(lengths)])
        mask_T, said_T = np.zeros(total, np.float32), np.zeros(total, np.float32)
        for at, length in zip(starts, lengths, strict=False):
            mask_T[at + 3 : at + length] = 1
            said_T[at + 3 : at + length] = -draw.random(length - 3) - 0.1
            said_T[at + 5 : at + 7] = 0.0  # the tool's, which no engine sampled
        old_T = np.where(said_T == 0, -9.0, said_T)
        with recorder.step(step) as record:
            record(
                "trajectory", tokens=torch.from_numpy(draw.integers(5, 40, total)),
                cu_seqlens=torch.from_numpy(starts), loss_masks=torch.from_numpy(mask_T),
                response_lengths=torch.from_numpy(lengths - 3), rollout_log_probs=torch.from_numpy(said_T),
                old_log_probs=torch.from_numpy(old_T.astype(np.float32)), rewards=torch.from_numpy(draw.random(16)),
                group_index=torch.arange(16) // 4,
            )  # fmt: skip
    recorder.close()
    first = told(tmp_path / "run")[0]
    assert (first.id, "no engine sampled" in first.claim) == ("D41", True)


def test_a_critics_rate_is_not_the_policys(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run", flags={"learning_rate": 5e-4, "critic_lr": 2e-3})
    for step in range(4):
        with recorder.step(step) as record:
            record("optimizer", lr=5e-4, micro=0)
            record("optimizer", lr=2e-3, micro=1, role="critic")
            record("training_metrics", loss=0.1 + step / 100)
    recorder.close()
    assert not told(tmp_path / "run", "D124")


def test_a_kl_penalty_of_padding_is_named_as_such(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run", flags={"adv_estimator": "reinforce_plus_plus", "use_kl_in_reward": True})
    for step in range(3):
        fields = batch(step)
        mask_BR = fields["response_mask"][:, P:]
        scores_BR = torch.zeros(mask_BR.shape)
        scores_BR[torch.arange(24), mask_BR.sum(1) - 1] = fields["rewards"]
        penalty_BR = 0.5 * torch.rand(mask_BR.shape, generator=torch.Generator().manual_seed(step))  # of padding, too
        rewards_BR = scores_BR - penalty_BR
        returns_BR = rewards_BR.flip(1).cumsum(1).flip(1)
        a_BR = (returns_BR - returns_BR.mean()) * mask_BR
        with recorder.step(step) as record:
            record("trajectory", {name: fields[name] for name in ("input_ids", "attention_mask", "rewards")},
                   response_mask=mask_BR, token_level_scores=scores_BR, token_level_rewards=rewards_BR,
                   advantages=a_BR, returns=returns_BR)  # fmt: skip
    recorder.close()
    first = told(tmp_path / "run", "D53")[0]
    assert first.claim.startswith("the KL penalty is not masked")


def _of_groups_that_lost_rows(folder: Path, *, nominal: bool) -> Path:
    recorder = Recorder(folder, flags={"adv_estimator": "rloo", "num_generations": GROUP})
    for step in range(4):
        fields = batch(step)
        kept = torch.ones(24, dtype=torch.bool)
        kept[[1, 6, 13]] = False
        rewards_B, groups_B = fields["rewards"][kept], fields["group_ids"][kept]
        sums_B = torch.stack([rewards_B[groups_B == group].sum() for group in groups_B])
        others_B = torch.tensor([int((groups_B == group).sum()) - 1 for group in groups_B])
        a_B = rewards_B - (sums_B - rewards_B) / (GROUP - 1 if nominal else others_B)
        rows = {name: value[kept] for name, value in fields.items()}
        with recorder.step(step) as record:
            record("trajectory", rows, advantages=a_B[:, None] * rows["response_mask"][:, 1:])
    recorder.close()
    return folder


def test_a_baseline_of_the_nominal_group_size_is_told_from_one_of_the_rows_that_are_left(tmp_path: Path) -> None:
    first = told(_of_groups_that_lost_rows(tmp_path / "nominal", nominal=True), "D04")[0]
    assert "divides the sum of the group's other rewards by 3 in every group" in first.claim
    assert not told(_of_groups_that_lost_rows(tmp_path / "own", nominal=False), "D04")


def _of_two_epochs(folder: Path, *, replaced: bool) -> Path:
    draw = torch.Generator().manual_seed(1)
    recorder = Recorder(folder, flags={"ppo_epochs": 2})
    for step in range(3):
        fields = batch(step)
        fields["advantages"] = normalised(fields)
        with recorder.step(step) as record:
            record("trajectory", fields)
            micro = 0
            for epoch in range(2):
                order = torch.randint(24, (24,), generator=draw) if replaced else torch.randperm(24, generator=draw)
                for rows in order.split(12):
                    part = {name: value[rows] for name, value in fields.items()}
                    record("forward_data", part, log_probs=part["old_log_probs"], micro=micro, epoch=epoch)
                    micro += 1
    recorder.close()
    return folder


def test_rows_drawn_with_replacement_are_told_in_each_of_several_epochs(tmp_path: Path) -> None:
    first = told(_of_two_epochs(tmp_path / "drawn", replaced=True), "D88")[0]
    assert "rows are drawn with replacement" in first.claim
    assert not told(_of_two_epochs(tmp_path / "each once", replaced=False), "D88")


def test_weights_that_shrink_are_told_by_checkpoints(tmp_path: Path) -> None:
    net = Net(0, lora=False, dead=False)
    recorder = Recorder(tmp_path / "run")
    for step in range(5):
        recorder.checkpoint(step, net)
        with recorder.step(step) as record:
            record("training_metrics", loss=0.1)
        with torch.no_grad():
            for weight in net.parameters():
                weight.mul_(0.95)
    recorder.close()
    first = told(tmp_path / "run", "D110")[0]
    assert "shrink by 0.05 of themselves" in first.claim


def test_one_token_in_a_thousand_does_not_make_a_batch_of_no_effect(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run", flags={"clip_ratio_high": 0.28})
    for step in range(3):
        fields = batch(step, rows=600)
        moved_BT = 0.05 * torch.randn(fields["old_log_probs"].shape, generator=torch.Generator().manual_seed(step))
        moved_BT[5, P] = 4.5
        with recorder.step(step) as record:
            record("forward_data", fields, advantages=normalised(fields), log_probs=fields["old_log_probs"] + moved_BT,
                   micro=0)  # fmt: skip
    recorder.close()
    assert not told(tmp_path / "run", "D24")


def test_a_number_of_groups_is_no_share_of_them(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    for step in range(8):
        with recorder.step(step) as record:
            record("training_metrics", loss=0.1, zero_std_groups=9.0 + step % 2)
    recorder.close()
    assert not told(tmp_path / "run", "L30")


def _of_own_means(folder: Path, *, counted: bool) -> Path:
    recorder = Recorder(folder, flags={"algorithm": "dapo", "adv_estimator": "grpo", "loss_agg_mode": "token-mean"})
    for step in range(3):
        fields = batch(step)
        fields["advantages"] = normalised(fields)
        total = int(fields["response_mask"].sum())
        with recorder.step(step) as record:
            for micro, rows in enumerate((slice(0, 9), slice(9, 24))):
                part = {name: value[rows] for name, value in fields.items()}
                mask_BT = part["response_mask"][:, 1:]
                loss = -(part["advantages"] * mask_BT).sum() / mask_BT.sum()
                record("forward_data", part, log_probs=part["old_log_probs"], micro=micro, epoch=0, minibatch=0)
                beside = {"batch_num_tokens": torch.tensor(float(total))} if counted else {}
                record("loss", pg_loss=loss, **beside, micro=micro, epoch=0, minibatch=0)
    recorder.close()
    return folder


def test_means_of_micro_batches_are_told_beside_the_number_of_tokens_that_they_leave_unused(tmp_path: Path) -> None:
    first = told(_of_own_means(tmp_path / "beside", counted=True), "D28")[0]
    assert "each micro-batch is divided by its own tokens" in first.claim
    assert not told(_of_own_means(tmp_path / "alone", counted=False), "D28"), "it may be scaled before the backward"


def _of_baselines(folder: Path, *, tiled: bool) -> Path:
    recorder = Recorder(folder, flags={"adv_estimator": "remax", "rollout_n": GROUP})
    for step in range(3):
        fields = batch(step)
        greedy_G = torch.rand(24 // GROUP, generator=torch.Generator().manual_seed(step))
        baselines_B = greedy_G.repeat(GROUP) if tiled else greedy_G.repeat_interleave(GROUP)
        a_BT = (fields["rewards"] - baselines_B)[:, None] * fields["response_mask"][:, 1:]
        with recorder.step(step) as record:
            record("trajectory", fields, reward_baselines=baselines_B, advantages=a_BT)
    recorder.close()
    return folder


def test_greedy_baselines_that_are_tiled_are_other_prompts(tmp_path: Path) -> None:
    first = told(_of_baselines(tmp_path / "tiled", tiled=True), "D04", "D127")[0]
    assert (first.id, "tiled (b1 b2 ... b1 b2 ...)" in first.claim) == ("D127", True)
    assert not told(_of_baselines(tmp_path / "right", tiled=False), "D04", "D127")


def _of_sequences(folder: Path, *, by_width: bool) -> Path:
    recorder = Recorder(folder, flags={"adv_estimator": "grpo", "importance_sampling_level": "sequence"})
    for step in range(3):
        fields = batch(step)
        mask_BT = fields["response_mask"][:, 1:]
        moved_BT = 0.1 * torch.randn(mask_BT.shape, generator=torch.Generator().manual_seed(step)) * mask_BT
        length_B = torch.full((24,), float(R)) if by_width else mask_BT.sum(1).float()
        ratio_BT = (moved_BT.sum(1) / length_B).exp()[:, None].expand(mask_BT.shape).clone()
        with recorder.step(step) as record:
            record("forward_data", fields, advantages=normalised(fields), log_probs=fields["old_log_probs"] + moved_BT,
                   micro=0)  # fmt: skip
            record("loss", prob_ratio=ratio_BT, micro=0)
    recorder.close()
    return folder


def test_a_responses_ratio_over_the_padded_width_is_named(tmp_path: Path) -> None:
    first = told(_of_sequences(tmp_path / "width", by_width=True), "D128")[0]
    assert "divided by 6 in each row of its micro-batch" in first.claim
    assert not told(_of_sequences(tmp_path / "length", by_width=False), "D128")


def _of_a_buffer(folder: Path, *, kept: bool) -> Path:
    recorder = Recorder(folder)
    rows: dict[str, Any] = {}
    for step in range(6):
        before, rows = rows, batch(step)
        rows["rollout_log_probs"] = rows["old_log_probs"]
        fields = dict(rows)
        if before and kept:
            fields = {name: torch.cat([rows[name], before[name][:8]]) for name in rows}
            fields["group_ids"] = torch.arange(32) // GROUP
            fields["old_log_probs"] = fields["old_log_probs"] - 0.01 * step
        with recorder.step(step) as record:
            record("trajectory", fields, advantages=fields["response_mask"][:, 1:].float())
    recorder.close()
    return folder


def test_groups_that_a_buffer_hands_out_again_are_told(tmp_path: Path) -> None:
    first = told(_of_a_buffer(tmp_path / "kept", kept=True), "D75")[0]
    assert "10 groups of samples are trained on again in a later step" in first.claim
    assert not told(_of_a_buffer(tmp_path / "emptied", kept=False), "D75")


def test_truncated_responses_whose_masks_are_emptied_are_the_same_samples(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run", flags={"mask_truncated_completions": True})
    for step in range(4):
        fields = batch(step)
        length_B = fields["response_mask"].sum(1)
        truncated_B = length_B == R
        completion_BR = fields["input_ids"][:, P:]
        mask_BR = fields["response_mask"][:, P:] * (~truncated_B).long()[:, None]
        with recorder.step(step) as record:
            record("trajectory", prompt_ids=fields["input_ids"][:, :P], prompt_mask=torch.ones(24, P).long(),
                   completion_ids=completion_BR, completion_mask=mask_BR, truncated=truncated_B,
                   rewards=fields["rewards"], group_ids=fields["group_ids"], advantages=normalised(fields)[:, 2],
                   sampling_per_token_logps=fields["old_log_probs"][:, P - 1 :])  # fmt: skip
            record("forward_data", {name: fields[name] for name in ("input_ids", "attention_mask")},
                   completion_ids=completion_BR, completion_mask=mask_BR, advantages=normalised(fields)[:, 2],
                   per_token_logps=fields["old_log_probs"][:, P - 1 :], micro=0)  # fmt: skip
    recorder.close()
    assert not told(tmp_path / "run", "D07", "D27", "D55")


def test_passes_over_one_rollout_are_no_buffer_that_hands_it_out_again(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    for step in range(6):
        fields = batch(step // 2)  # each rollout in two steps, with the old log-probabilities of its first
        fields["rollout_log_probs"] = fields["old_log_probs"]
        with recorder.step(step) as record:
            record("trajectory", fields, advantages=fields["response_mask"][:, 1:].float())
    recorder.close()
    assert not told(tmp_path / "run", "D75")


def test_baselines_of_the_others_are_no_greedy_ones(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run", flags={"adv_estimator": "rloo"})
    for step in range(3):
        fields = batch(step)
        each = fields["rewards"].view(-1, GROUP)
        others_B = ((each.sum(1, keepdim=True) - each) / (GROUP - 1)).reshape(-1)
        a_BT = (fields["rewards"] - others_B)[:, None] * fields["response_mask"][:, 1:]
        with recorder.step(step) as record:
            record("trajectory", fields, reward_baselines=others_B, advantages=a_BT)
    recorder.close()
    assert not told(tmp_path / "run", "D127")
