"""Tokens that are missing from the gradient of the last norm, where the head behind it was not recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from replay_core.compare.parallel import parallel
from tests.builders import there
from tests.replay_core.compare.ranks.recorded import Step, compared, random

SAMPLES, SEQ, HIDDEN, WORDS = 4, 8, 16, 24
LABELS = torch.randint(1, WORDS, (SAMPLES, SEQ), generator=torch.Generator().manual_seed(3))
IDS = torch.arange(SAMPLES * SEQ).reshape(SAMPLES, SEQ)
NORMED, HEAD = random(SAMPLES, SEQ, HIDDEN), random(WORDS, HIDDEN, seed=1) / 4
WEIGHT, BIAS = 1 + random(HIDDEN, seed=2) / 5, random(HIDDEN, seed=4) / 5
ADVANTAGES = random(SAMPLES, 1, seed=5).expand(SAMPLES, SEQ).contiguous()
MASK = torch.ones(SAMPLES, SEQ, dtype=torch.long)
MASK[:, :2] = MASK[1, 6:] = 0
OUTPUT = NORMED * WEIGHT + BIAS
LOGPROBS = (OUTPUT @ HEAD.T).log_softmax(-1).gather(-1, LABELS[..., None])[..., 0]
OLD = LOGPROBS + random(SAMPLES, SEQ, seed=6) / 5

Loss = Callable[[Tensor, Tensor], Tensor]


def clipped(logprobs: Tensor, mask: Tensor) -> Tensor:
    ratio = (logprobs - OLD).exp()
    each = torch.minimum(ratio * ADVANTAGES, ratio.clamp(0.8, 1.2) * ADVANTAGES)
    return -(each * mask).sum() / MASK.sum()


def by_sample(logprobs: Tensor, mask: Tensor) -> Tensor:
    return -((logprobs * mask).sum(1) / MASK.sum(1)).mean()


def squared(logprobs: Tensor, mask: Tensor) -> Tensor:
    return ((logprobs.square() * mask).sum(1)).mean()


def gradients(loss: Loss, samples: Tensor) -> dict[str, Tensor]:
    """Of the norm's weight and bias, by these samples alone."""
    weight, bias = WEIGHT.clone().requires_grad_(), BIAS.clone().requires_grad_()
    logits = (NORMED * weight + bias) @ HEAD.T
    mask = torch.zeros_like(MASK)
    mask[samples] = MASK[samples]
    loss(logits.log_softmax(-1).gather(-1, LABELS[..., None])[..., 0], mask).backward()
    return {"grad.norm.bias": there(bias.grad), "grad.norm.weight": there(weight.grad)}


def step(samples: Tensor, made: dict[str, Tensor]) -> Step:
    tokens = {
        "labels": LABELS, "response_mask": MASK, "log_probs": LOGPROBS, "old_log_probs": OLD, "advantages": ADVANTAGES
    }  # fmt: skip
    return {
        "batch_inputs": {"input_ids": IDS[samples]},
        "modules": {"norm.output": OUTPUT[samples]},
        "forward_data": {name: x[samples] for name, x in tokens.items()},
        "gradient": made,
        "param": {"param.embed.weight": HEAD, "param.norm.weight": WEIGHT, "param.norm.bias": BIAS},
    }


ALL = torch.arange(SAMPLES)
HALVES = ALL.chunk(2)


@pytest.mark.parametrize(("loss", "is_told"), [(clipped, True), (by_sample, True), (squared, False)])
def test_a_rank_whose_tokens_are_missing_from_the_last_norms_gradient_is_named(
    loss: Loss, is_told: bool, tmp_path: Path
) -> None:
    first = gradients(loss, HALVES[0])
    found = compared(tmp_path, step(ALL, gradients(loss, ALL)), *(step(own, first) for own in HALVES))
    faults = [one.fault for one in there(parallel(found.tensors, found.together)).faults]
    assert (("missing", (1,)) in {(one.kind, one.ranks) for one in faults}) is is_told
    assert any("by the norm's outputs and the head" in one.sentence for one in faults) is is_told
