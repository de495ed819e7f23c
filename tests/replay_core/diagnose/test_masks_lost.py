"""Masks that come with the samples and that the update drops: a policy with a tool, really sampled and trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import causes, look, of
from tests.replay_core.diagnose.bigram import PAD, Bigram, Rollout

PROMPTS = [[5, 6], [7], [8, 9, 10], [11, 3]]
TOOL, MICROS = (12, 13), 4
#: What a mask of tools may be called, the name of the update's own, and what it says of a tool's token.
NAMES = [("tool_mask", "completion_mask"), ("loss_mask", "completion_mask"), ("assistant_mask", "loss_mask")]


def _with_tool(rollout: Rollout) -> tuple[Rollout, Any]:
    """The tool writes two tokens behind the first one of every longer response [B, T]; and which are not the tool's."""
    at = rollout.ids_BS.shape[1] - rollout.response_BT.shape[1] - 1 + int(rollout.response_BT[0].argmax()) + 2
    goes_on_B = rollout.response_BT.sum(1) > 1
    ids_BS, tools = rollout.ids_BS, np.zeros_like(rollout.response_BT)
    for token in reversed(TOOL):
        ids_BS = np.insert(ids_BS, at, np.where(goes_on_B, token, PAD), axis=1)
    attended_BS = np.insert(rollout.attention_BS, [at, at], goes_on_B[:, None].astype(np.int64), axis=1)
    spread = [at - 1, at - 1]
    response_BT = np.insert(rollout.response_BT, spread, goes_on_B[:, None].astype(np.float32), axis=1)
    tools = np.insert(tools, spread, goes_on_B[:, None].astype(np.float32), axis=1)
    sampled_BT = np.insert(rollout.sampled_BT, spread, np.float32(0), axis=1)
    return Rollout(ids_BS, attended_BS, response_BT, rollout.group_B, sampled_BT), 1 - tools


def _named(fields: dict[str, Any], names: tuple[str, str]) -> dict[str, Any]:
    return {names[1] if name == "response_mask" else name: value for name, value in fields.items()}


def _run(directory: Path, names: tuple[str, str], *, handed: bool, counts: bool, losses: bool = True) -> Path:
    """Three updates in micro-batches. handed: the update's records have the mask, too; counts: the loss counts what the
    tool wrote; losses: micro-batches' losses are recorded.
    """
    lm = Bigram(5, 16, 0.8)
    recorder = Recorder(directory, flags={"loss_type": "bnpo", "num_generations": 6})
    for step in range(3):
        rollout, policy_BT = _with_tool(lm.rollout(PROMPTS, each=6))
        reward_B = (rollout.ids_BS == 3).sum(1).astype(np.float32)
        by_group = reward_B.reshape(len(PROMPTS), -1)
        advantage_B = (by_group - by_group.mean(1, keepdims=True)) / (by_group.std(1, keepdims=True, ddof=1) + 1e-4)
        advantage_B = advantage_B.reshape(-1).astype(np.float32)
        old_BT = rollout.logprobs(lm).astype(np.float32)
        whole = _named(rollout.tensors(rollout_log_probs=rollout.sampled_BT, rewards=reward_B), names)
        # A mask of the loss leaves out the prompt, too.
        mask_BT = policy_BT if names[0] == "tool_mask" else policy_BT * rollout.response_BT
        kept = {names[0]: torch.from_numpy(mask_BT.astype(np.int64))}
        if names[1] == "loss_mask":
            whole.pop(names[1])
        counted_BT = rollout.response_BT if counts else rollout.response_BT * policy_BT
        order = np.random.default_rng(step).permutation(len(advantage_B))
        with recorder.step(step) as record:
            record("trajectory", whole | kept)
            for micro, rows in enumerate(np.array_split(order, MICROS)):
                of_rows = {"log_probs": old_BT[rows], "advantages": advantage_B[rows]}
                fields = _named(rollout.only(rows).tensors(old_log_probs=old_BT[rows], **of_rows), names)
                if handed:
                    fields[names[0]] = kept[names[0]][rows]
                record("forward_data", fields, micro=micro)
                mean = float((-advantage_B[rows][:, None] * counted_BT[rows]).sum() / counted_BT[rows].sum())
                if losses:
                    record("loss", loss=mean, micro=micro)
        lm.learn(rollout, advantage_B[:, None] * counted_BT, lr=2.0)
    return directory


@pytest.mark.parametrize("names", NAMES, ids=[one for one, _ in NAMES])
def test_a_mask_that_the_update_has_lost_is_told(tmp_path: Path, names: tuple[str, str]) -> None:
    found = causes(look(_run(tmp_path / "lost", names, handed=False, counts=True)))
    assert [(one.id, one.severity) for one in found][:1] == [("D129", "error")], [one.claim for one in found]
    assert names[0] in found[0].claim
    assert found[0].steps == (0, 1, 2)


@pytest.mark.parametrize("names", NAMES[:2], ids=[one for one, _ in NAMES[:2]])
@pytest.mark.parametrize("handed", [True, False], ids=["recorded", "not recorded"])
def test_a_mask_that_the_loss_follows_is_no_fault(tmp_path: Path, names: tuple[str, str], handed: bool) -> None:
    found = look(_run(tmp_path / "kept", names, handed=handed, counts=False))
    assert of(found, "D129") is None, [one.claim for one in causes(found)]


def test_where_no_loss_tells_whether_it_is_followed_it_is_a_warning(tmp_path: Path) -> None:
    found = of(look(_run(tmp_path / "untold", NAMES[0], handed=False, counts=True, losses=False)), "D129")
    assert found is not None
    assert found.severity == "warning"
    assert "the update's completion_mask counts" in found.claim
