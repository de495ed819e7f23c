"""Records that hold what was sampled beside what is trained on: other ids, the same rows on two ranks, a later pass,
numbers that are missing, a critic's value behind the end, a reference that is another model.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_core.diagnose.finding import Diagnosis
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import causes, look, of
from tests.replay_core.diagnose.bigram import PAD, Bigram, Rollout
from tests.replay_core.diagnose.logs import diagnosed, verl

PROMPTS = [[5, 6], [7], [8, 9, 10], [11, 3]]


def _policy(seed: int = 5, limit: int = 9) -> tuple[Bigram, Rollout]:
    lm = Bigram(seed, 16, 0.8)
    return lm, lm.rollout(PROMPTS, each=5, limit=limit)


def _told(directory: Path, rollout: Rollout, step: int = 0, **more: Any) -> Diagnosis:
    with Recorder(directory).step(step) as record:
        record("trajectory", **rollout.tensors(rollout_log_probs=rollout.sampled_BT, **more))
    return look(directory)


@pytest.mark.parametrize("name", ["rollout_input_ids", "sampled_token_ids", "engine_token_ids"])
@pytest.mark.parametrize("share", [0.05, 0.3])
def test_ids_that_were_not_sampled_are_told(tmp_path: Path, name: str, share: float) -> None:
    lm, rollout = _policy()
    old_BT = rollout.logprobs(lm).astype(np.float32)
    same = _told(tmp_path / "a", rollout, old_log_probs=old_BT, **{name: rollout.ids_BS})
    assert of(same, "D27") is None
    other_BS = rollout.ids_BS.copy()
    inside_BS = np.pad(rollout.response_BT > 0, ((0, 0), (1, 0)))
    at = np.flatnonzero(inside_BS)[:: int(1 / share)]
    other_BS.reshape(-1)[at] = 15 - other_BS.reshape(-1)[at] % 8
    found = of(_told(tmp_path / "b", rollout, old_log_probs=old_BT, **{name: other_BS}), "D27")
    assert found is not None
    assert found.severity == "error"
    assert f"{int((other_BS != rollout.ids_BS).sum())} tokens differ" in found.claim


def _ranks(directory: Path, *, same: bool, sharded: bool = False, weights: bool = True) -> Path:
    recorder = [Recorder(directory) for _ in (0, 1)]
    for step in range(3):
        for rank in (0, 1):
            lm = Bigram(20 + step, 16, 0.8)
            lm.draw = np.random.default_rng(step if same else 10 * step + rank)
            rollout = lm.rollout(PROMPTS, each=4)
            whole = torch.from_numpy(lm.table_VV)
            with recorder[rank].step(step, rank=rank) as record:
                record("trajectory", **rollout.tensors(rollout_log_probs=rollout.sampled_BT))
                if weights:
                    record("param", **{"param.layers.0.qkv.weight": whole[rank::2] if sharded else whole})
    return directory


def test_replicas_that_hold_the_same_samples_are_told(tmp_path: Path) -> None:
    found = of(look(_ranks(tmp_path / "d", same=True)), "D65")
    assert found is not None
    assert found.severity == "warning"


def test_ranks_of_which_nothing_tells_how_they_share_the_work_are_worth_knowing(tmp_path: Path) -> None:
    found = of(look(_ranks(tmp_path / "d", same=True, weights=False)), "D65")
    assert found is not None
    assert found.severity == "info"


@pytest.mark.parametrize(
    "how", [{"same": False}, {"same": True, "sharded": True}], ids=["others", "one model in parts"]
)
def test_ranks_that_may_hold_the_same_samples(tmp_path: Path, how: dict[str, bool]) -> None:
    assert of(look(_ranks(tmp_path / "d", **how)), "D65") is None


@pytest.mark.parametrize("refreshed", [True, False])
def test_old_log_probabilities_taken_in_every_pass_are_no_other_rows(tmp_path: Path, refreshed: bool) -> None:
    lm, rollout = _policy()
    advantages_BT = rollout.on_tokens(np.random.default_rng(0).normal(size=len(rollout.ids_BS)))
    first_BT = rollout.logprobs(lm).astype(np.float32)
    with Recorder(tmp_path / "d").step(0) as record:
        record("trajectory", **rollout.tensors(
            rollout_log_probs=rollout.sampled_BT, old_log_probs=first_BT, advantages=advantages_BT))  # fmt: skip
        for epoch in range(3):
            now_BT = rollout.logprobs(lm).astype(np.float32)
            old_BT = now_BT if refreshed else first_BT
            record("forward_data", micro=epoch, epoch=epoch, **rollout.tensors(
                log_probs=now_BT, old_log_probs=old_BT, advantages=advantages_BT))  # fmt: skip
            lm.learn(rollout, advantages_BT, 12.0)
    said = look(tmp_path / "d")
    assert of(said, "D79") is None
    assert (of(said, "D60") is not None) == refreshed
    if refreshed:
        assert said.findings[0].id == "D60"


@pytest.mark.parametrize("missing", [1, 2, 4])
def test_numbers_that_are_missing_at_the_end_are_said_to_be(tmp_path: Path, missing: int) -> None:
    lm, rollout = _policy(limit=12)
    sampled_BT = rollout.sampled_BT.copy()
    for row, mask in enumerate(rollout.response_BT):
        at = np.flatnonzero(mask)
        if row % 2 and len(at) > missing + 1:
            sampled_BT[row, at[-missing:]] = 0.0
    holed = Rollout(rollout.ids_BS, rollout.attention_BS, rollout.response_BT, rollout.group_B, sampled_BT)
    found = of(_told(tmp_path / "d", holed, old_log_probs=rollout.logprobs(lm).astype(np.float32)), "D41")
    assert found is not None
    assert missing == 1 or "filled with 0" in found.cause


def _gae(rollout: Rollout, *, over_padding: bool, gamma: float, lam: float) -> dict[str, Any]:
    """Returns over values that are noise, padding's among them; without the mask each pad is a step of its own."""
    draw = np.random.default_rng(3)
    mask_BT = rollout.response_BT
    values_BT = draw.normal(0, 0.5, mask_BT.shape)
    rewards_BT = np.zeros(mask_BT.shape)
    for row, mask in enumerate(mask_BT):
        rewards_BT[row, np.flatnonzero(mask)[-1]] = row % 2
    counted_BT = np.ones(mask_BT.shape) if over_padding else mask_BT
    advantages_BT, later_B, next_B = np.zeros(mask_BT.shape), np.zeros(len(mask_BT)), np.zeros(len(mask_BT))
    for at in range(mask_BT.shape[1] - 1, -1, -1):
        delta_B = rewards_BT[:, at] + gamma * next_B - values_BT[:, at]
        now_B = delta_B + gamma * lam * later_B
        later_B = np.where(counted_BT[:, at] > 0, now_B, later_B)
        next_B = np.where(counted_BT[:, at] > 0, values_BT[:, at], next_B)
        advantages_BT[:, at] = now_B
    return {
        "values": values_BT.astype(np.float32), "token_level_rewards": rewards_BT.astype(np.float32),
        "returns": ((advantages_BT + values_BT) * mask_BT).astype(np.float32),
        "advantages": (advantages_BT * mask_BT).astype(np.float32),
    }  # fmt: skip


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.99, 0.9), (0.97, 0.8)])
def test_gae_over_padding_is_made_again(tmp_path: Path, gamma: float, lam: float) -> None:
    _, rollout = _policy()
    # No response fills its row: none tells by not being off.
    wide = [np.pad(each, ((0, 0), (0, 3)), constant_values=PAD) for each in (
        rollout.ids_BS, rollout.attention_BS, rollout.response_BT, rollout.sampled_BT)]  # fmt: skip
    rollout = Rollout(wide[0], wide[1], wide[2], rollout.group_B, wide[3])
    bad = _told(tmp_path / "bad", rollout, **_gae(rollout, over_padding=True, gamma=gamma, lam=lam))
    found = of(bad, "D44")
    assert found is not None
    assert found.severity == "error"
    assert "leaks from padding" in found.claim
    well = _told(tmp_path / "well", rollout, **_gae(rollout, over_padding=False, gamma=gamma, lam=lam))
    assert [one for one in causes(well) if one.id == "D44"] == []


@pytest.mark.parametrize("moved", [0.25, 0.45])
@pytest.mark.parametrize(("used", "version"), [(True, 0), (True, 7), (True, None), (False, 0)])
def test_a_reference_of_another_checkpoint_is_a_warning_where_it_pulls_from_the_beginning(
    tmp_path: Path, moved: float, used: bool, version: int | None
) -> None:
    lm, rollout = _policy()
    other = deepcopy(lm)
    other.table_VV = lm.table_VV + np.random.default_rng(1).normal(0, moved, lm.table_VV.shape)
    with Recorder(tmp_path / "d", flags={"kl_loss_coef": 0.01 if used else 0.0}).step(0) as record:
        record("trajectory", **rollout.tensors(
            rollout_log_probs=rollout.sampled_BT, old_log_probs=rollout.logprobs(lm).astype(np.float32),
            ref_log_prob=rollout.logprobs(other).astype(np.float32),
            **({} if version is None else {"weight_version": version})))  # fmt: skip
    found = of(look(tmp_path / "d"), "D15")
    assert found is not None
    assert found.severity == ("warning" if used and version == 0 else "info")


@pytest.mark.parametrize(
    "line",
    [
        "(SGLangEngine pid=77) [2026-01-02 03:04:05 DP1 TP0] Failed to update parameter online: shape mismatch.",
        "(ModelWorker pid=5, ip=10.0.0.2) ERROR 01-02 03:04:05 worker.py:12] update_weights_from_tensor failed: name",
        "(RolloutActor pid=9) weight sync to engine 3 failed after 2 retries",
    ],
)
def test_a_weight_update_that_failed_is_read_and_told(tmp_path: Path, line: str) -> None:
    told = diagnosed(
        tmp_path, f'(SGLangEngine pid=77) INFO: 10.0.0.1 - "POST /update_weights HTTP/1.1" 200 OK\n{line}\n'
    )
    assert (told.findings[0].severity, "weight update of the engine failed" in told.findings[0].claim) == (
        "error",
        True,
    )


def test_weights_that_are_updated_are_no_failure(tmp_path: Path) -> None:
    text = verl([{}] * 3) + "(SGLangEngine pid=77) Update weights: 8it [00:01, 5.46it/s]\n"
    assert "L29" not in {one.id for one in diagnosed(tmp_path, text).findings}
