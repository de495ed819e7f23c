"""Entropies that each rank makes of its own words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from replay_core.compare.parallel import parallel
from tests.replay_core.compare.ranks.recorded import Step, compared, random

IDS = torch.arange(24).reshape(2, 12)
HIDDEN, HEAD = random(2, 12, 8), random(20, 8, seed=1)
LOGITS = HIDDEN @ HEAD.T


def entropy(logits: Tensor) -> Tensor:
    logs = logits.log_softmax(-1)
    return -(logs.exp() * logs).sum(-1)


RIGHT = entropy(LOGITS)
OWN = [entropy(part) for part in LOGITS.chunk(2, -1)]
WRONG = {
    "the entropy of a softmax over the rank's own words": OWN,
    "the sum of entropies": [OWN[0] + OWN[1]] * 2,
    "the mean of entropies": [(OWN[0] + OWN[1]) / 2] * 2,
}


def of(made: Tensor, words: slice, *, are_recorded: bool) -> Step:
    """Logits that are recorded themselves, or the output and the weight that make them."""
    if are_recorded:
        more = {"modules": {"lm_head.output": LOGITS[..., words].contiguous()}}
    else:
        weight = HEAD[words].contiguous()
        more = {"modules": {"norm.output": HIDDEN}, "param": {"param.embed.weight": weight}}
    return {"batch_inputs": {"input_ids": IDS}, "forward_data": {"entropy": made}, **more}


def faults(folder: Path, made: list[Tensor], *, are_recorded: bool) -> list[tuple[str, tuple[int, ...], str]]:
    ranks = [
        of(one, words, are_recorded=are_recorded)
        for one, words in zip(made, (slice(0, 10), slice(10, 20)), strict=True)
    ]
    found = compared(folder, of(RIGHT, slice(None), are_recorded=are_recorded), *ranks)
    of_ranks = parallel(found.tensors, found.together)
    return [] if of_ranks is None else [
        (one.fault.kind, one.fault.ranks, one.fault.sentence) for one in of_ranks.faults
    ]  # fmt: skip


@pytest.mark.parametrize("said", WRONG)
@pytest.mark.parametrize("are_recorded", [True, False])
def test_an_entropy_that_is_made_of_a_ranks_own_words_is_told(said: str, are_recorded: bool, tmp_path: Path) -> None:
    ((kind, ranks, sentence),) = faults(tmp_path, WRONG[said], are_recorded=are_recorded)
    assert (kind, ranks) == ("own vocabulary", (0, 1))
    assert f"entropy on ranks 0 and 1 is {said}" in sentence


@pytest.mark.parametrize("are_recorded", [True, False])
def test_an_entropy_that_is_another_altogether_is_not_explained(are_recorded: bool, tmp_path: Path) -> None:
    made = [RIGHT + random(2, 12, seed=3) / 5] * 2
    assert not any(kind == "own vocabulary" for kind, _, _ in faults(tmp_path, made, are_recorded=are_recorded))


@pytest.mark.parametrize("are_recorded", [True, False])
def test_an_entropy_over_all_words_is_right(are_recorded: bool, tmp_path: Path) -> None:
    assert not faults(tmp_path, [RIGHT, RIGHT], are_recorded=are_recorded)
