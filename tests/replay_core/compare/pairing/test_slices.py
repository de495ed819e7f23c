"""Slices that several ranks have a copy of, and vocabularies that are padded until ranks can share them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.compare.pairing.slices import places_of
from tests.builders import there
from tests.replay_core.compare.ranks.recorded import compared, random

IDS = torch.randint(2, 61, (4, 16), generator=torch.Generator().manual_seed(3))
#: Two heads of keys of 12, among four ranks; 61 words, among two.
KEYS, LOGITS, GRADIENT = random(4, 16, 24), random(4, 16, 61), random(24, 8)


def _rank(modules: dict[str, torch.Tensor], gradient: torch.Tensor | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"batch_inputs": {"input_ids": IDS}, "modules": modules}
    return found if gradient is None else found | {"gradient": {"grad.layers.0.self_attn.k_proj.weight": gradient}}


def _of_keys(*heads: int, gradients: list[torch.Tensor]) -> list[dict[str, Any]]:
    name = "layers.0.self_attn.k_proj.output"
    return [
        _rank({name: KEYS.chunk(2, -1)[head].contiguous()}, gradient.contiguous())
        for head, gradient in zip(heads, gradients, strict=True)
    ]


@pytest.mark.parametrize("heads", [(0, 0, 1, 1), (0, 1, 0, 1)])
def test_heads_of_keys_that_ranks_share_are_put_together(heads: tuple[int, ...], tmp_path: Path):
    whole = _rank({"layers.0.self_attn.k_proj.output": KEYS}, GRADIENT)
    ranks = _of_keys(*heads, gradients=[GRADIENT.chunk(2)[head] for head in heads])
    found = compared(tmp_path, whole, *ranks)
    assert {row.verdict.value for row in found.tensors} == {"SAME"}
    assert found.elements == IDS.numel() + KEYS.numel() + GRADIENT.numel()


def test_copies_whose_gradients_are_not_summed_are_named(tmp_path: Path):
    whole = _rank({"layers.0.self_attn.k_proj.output": KEYS}, GRADIENT)
    part = random(24, 8)
    own = [(one if number % 2 else -one) + half / 2 for number, (one, half) in
           enumerate((part.chunk(2)[head], GRADIENT.chunk(2)[head]) for head in (0, 0, 1, 1))]  # fmt: skip
    fault = there(there(there(compared(tmp_path, whole, *_of_keys(0, 0, 1, 1, gradients=own)).first).ranks).fault)
    assert (fault.kind, fault.ranks) == ("not summed", (0, 1, 2, 3))


def _of_words(pad: int, *, off: float = 0.0) -> list[dict[str, Any]]:
    padded = torch.cat([LOGITS, torch.full((4, 16, pad), -1e4)], -1)
    parts = [one.contiguous() for one in padded.chunk(2, -1)]
    return [_rank({"lm_head.output": parts[0]}), _rank({"lm_head.output": parts[1] + off})]


def test_a_vocabulary_that_is_padded_for_the_ranks_is_as_long_as_the_words(tmp_path: Path):
    found = compared(tmp_path, _rank({"lm_head.output": LOGITS}), *_of_words(3))
    assert {row.verdict.value for row in found.tensors} == {"SAME"}
    assert found.elements == IDS.numel() + LOGITS.numel()
    assert any("padded vocabulary" in note and "rank 1" in note for note in found.notes)


def test_what_a_rank_has_wrong_of_a_padded_vocabulary_is_found(tmp_path: Path):
    first = there(compared(tmp_path, _rank({"lm_head.output": LOGITS}), *_of_words(3, off=1.0)).first)
    assert (first.name, there(first.ranks).parted) == ("lm_head.output", (1,))


def test_no_other_axis_is_padded():
    assert list(places_of(2, 32, 61, "layers.0.mlp.up_proj.output")) == []
    assert list(places_of(2, 32, 61, "lm_head.output")) == [[(0, 32), (32, 29)]]
    assert list(places_of(2, 64, 61, "lm_head.output")) == [], "a rank would have padding alone"
