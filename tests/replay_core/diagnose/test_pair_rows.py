"""Pairs: the prompt in one half's mask, references of other rows, and losses that are made otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of
from tests.replay_core.diagnose.runs import EOS

DPO = {"beta": 0.1, "loss_type": "sigmoid", "trainer": "DPOTrainer"}
ROWS, PROMPT, WIDTH = 16, 6, 8


def _pairs(step: int, how: str = "", beta: float = 0.1) -> dict[str, Any]:
    """Eight pairs, the chosen answers first; one thing wrong with them."""
    draw = torch.Generator().manual_seed(step)
    half, total = ROWS // 2, PROMPT + WIDTH
    ids = torch.randint(5, 60, (ROWS, total), generator=draw)
    ids[half:, :PROMPT] = ids[:half, :PROMPT]
    length = torch.randint(4, WIDTH + 1, (ROWS,), generator=draw)
    attention = torch.arange(total) < (PROMPT + length)[:, None]
    ids = ids * attention
    ids[torch.arange(ROWS), PROMPT + length - 1] = EOS
    mask = attention.clone()
    mask[:, :PROMPT] = False
    policy = -torch.rand(ROWS, total, generator=draw) * 2 * attention
    ref = policy + 0.1 * torch.randn(ROWS, total, generator=draw) * attention
    counted = mask.clone()
    if how in ("prompt in one half", "prompt in both"):
        counted[half:] = attention[half:]
        counted[half:, 0] = False
    if how == "prompt in both":
        counted[:half] = attention[:half]
        counted[:half, 0] = False
    if how == "one token less":
        counted[half:, PROMPT] = False
    ours, theirs = (policy * counted).sum(1), (ref * counted).sum(1)
    if how == "ref of the next row":
        theirs = torch.cat([theirs[:half].roll(1), theirs[half:].roll(1)])
    chosen, rejected, ref_chosen, ref_rejected = ours[:half], ours[half:], theirs[:half], theirs[half:]
    better, worse = chosen - ref_chosen, rejected - ref_rejected
    smoothing = 0.2 if how == "smoothed" else 0.0
    margin = better - worse
    if how == "swapped":
        margin = -margin
    if how == "no reference":
        margin = chosen - rejected
    if how == "by length":
        margin = better / counted[:half].sum(1) - worse / counted[half:].sum(1)
    if how == "no beta":
        margin = margin / beta
    loss = -(1 - smoothing) * logsigmoid(beta * margin) - smoothing * logsigmoid(-beta * margin)
    if how == "hinge":
        loss = torch.relu(1 - beta * margin)
    rewards = (beta * worse, beta * better) if how == "rewards swapped" else (beta * better, beta * worse)
    return {
        "input_ids": ids, "attention_mask": attention.long(), "loss_mask": counted.long(),
        "policy_chosen_logps": chosen, "policy_rejected_logps": rejected, "reference_chosen_logps": ref_chosen,
        "reference_rejected_logps": ref_rejected, "loss": loss.mean(), "log_probs": policy, "ref_log_probs": ref,
        "chosen_rewards": rewards[0], "rejected_rewards": rewards[1],
    }  # fmt: skip


def _run(path: Path, how: str = "", **flags: Any) -> Path:
    with Recorder(path, flags={**DPO, **flags}) as recorder:
        for step in range(4):
            with recorder.step(step) as record:
                record("forward_data", _pairs(step, how), micro=0)
    return path


def _claims(path: Path) -> list[str]:
    return [f"{one.id} {one.claim}" for one in look(path).findings if one.severity != "info"]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("prompt in one half", "D153 the mask counts the prompt in the second half (the rejected ones)"),
        ("ref of the next row", "D154 the reference's log-probabilities of chosen answers are those of the"),
        ("rewards swapped", "D154 chosen and rejected are swapped"),
        ("swapped", "D154 the loss of pairs is made of the margin turned around"),
        ("no reference", "D154 the loss of pairs is made without the reference"),
        ("by length", "D154 the loss of pairs is made of means over tokens"),
        ("smoothed", "D154 the loss of pairs is made with a label smoothing of 0.2, and 0 is stated"),
        ("no beta", "D154 the loss of pairs is made with a beta of 1"),
    ],
)
def test_pairs_that_are_wrong(how: str, words: str, tmp_path: Path) -> None:
    claims = _claims(_run(tmp_path, how))
    assert claims
    assert claims[0].startswith(words), claims


@pytest.mark.parametrize("how", ["", "prompt in both", "one token less", "hinge"])
def test_pairs_of_another_kind(how: str, tmp_path: Path) -> None:
    flags = {"loss_type": "hinge"} if how == "hinge" else {}
    assert not [one for one in _claims(_run(tmp_path, how, **flags)) if one.startswith(("D153", "D154"))]


@pytest.mark.parametrize(
    ("how", "flags"),
    [
        ("smoothed", {"label_smoothing": 0.2}),
        ("no reference", {"reference_free": True}),
        ("by length", {"average_log_prob": True}),
        ("swapped", {"rpo_alpha": 1.0}),
    ],
)
def test_what_is_stated_is_meant(how: str, flags: dict[str, Any], tmp_path: Path) -> None:
    assert not [one for one in _claims(_run(tmp_path, how, **flags)) if one.startswith("D154")]


def _precomputed(
    folder: Path, how: str, *, sides: tuple[str, ...] = ("chosen", "rejected"), index: bool = True
) -> None:
    """Ten steps of eight pairs of 96; their reference is the policy before the first, computed before training."""
    draw = np.random.default_rng(4)
    own = {side: draw.normal(-6, 2, 96) for side in sides}
    drift = {side: draw.normal(0, 0.05, 96) for side in sides}
    order = {"shuffled": draw.permutation(96), "near": np.arange(96)}.get(how, np.arange(96))
    with Recorder(folder, flags={"beta": 0.1, "loss_type": "sigmoid"}) as recorder:
        for step in range(10):
            at = draw.permutation(96)[:8] if step % 12 else np.arange(8)
            fields: dict[str, Any] = {"index": at} if index else {}
            for side in sides:
                name = f"{side}_logps" if side else "logps"
                fields[f"policy_{name}"] = (own[side] + step * drift[side])[at].astype(np.float32)
                ref = own[side] + 0.5 * draw.normal(0, 1, 96) if how == "near" else own[side][order]
                fields[f"reference_{name}"] = ref[at].astype(np.float32)
            with recorder.step(step) as record:
                record("forward_data", fields, micro=0)


@pytest.mark.parametrize("sides", [("chosen", "rejected"), ("",)])
@pytest.mark.parametrize(("how", "says"), [("shuffled", True), ("right", False), ("near", False)])
def test_references_of_other_pairs_of_the_whole_data(
    how: str, says: bool, sides: tuple[str, ...], tmp_path: Path
) -> None:
    _precomputed(tmp_path / "d", how, sides=sides)
    found = of(look(tmp_path / "d", "D154"), "D154")
    assert (found is not None) == says
    if found is not None:
        assert "reference" in found.claim
        assert "pairs" in found.claim


@pytest.mark.parametrize(
    ("how", "says"),
    [("mean of the reference", "the reference's"), ("mean of the policy", "the policy's"), ("", ""), ("both", "")],
)
def test_sums_beside_means_of_the_same_model(how: str, says: str, tmp_path: Path) -> None:
    with Recorder(tmp_path / "d", flags={"beta": 0.1}) as recorder:
        for step in range(3):
            fields = _pairs(step)
            for side, rows in (("chosen", slice(0, 8)), ("rejected", slice(8, 16))):
                ours = fields[f"policy_{side}_logps"]
                theirs = ours - 0.2 * step
                counts = fields["loss_mask"][rows].sum(1)
                fields[f"policy_{side}_logps"] = ours / counts if how in ("mean of the policy", "both") else ours
                fields[f"reference_{side}_logps"] = (
                    theirs / counts if how in ("mean of the reference", "both") else theirs
                )
            for name in ("loss", "log_probs", "ref_log_probs", "chosen_rewards", "rejected_rewards"):
                fields.pop(name)
            with recorder.step(step) as record:
                record("forward_data", fields, micro=0)
    found = of(look(tmp_path / "d", "D154"), "D154")
    assert (found is not None) == bool(says)
    if found is not None:
        assert found.claim.startswith(f"{says} log-probabilities of answers are means over tokens")
