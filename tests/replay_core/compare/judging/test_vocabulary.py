"""What is wrong with words that are cut among ranks, whatever the lookup and the logits are called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from replay_core.compare import Comparison
from replay_core.compare.judging import vocabulary
from replay_core.compare.pairing.ranks import HeldByRanks
from replay_core.compare.parallel import parallel
from tests.builders import there
from tests.replay_core.compare.ranks.recorded import compared, random

IDS = torch.randint(2, 40, (4, 16), generator=torch.Generator().manual_seed(3))
LABELS = torch.randint(0, 40, (4, 16), generator=torch.Generator().manual_seed(5))
LOGITS = 2 * random(4, 16, 40, seed=6)
LOGITS[..., 20:] += 1.0


def kinds(found: Comparison) -> set[tuple[str, tuple[int, ...]]]:
    return {(one.fault.kind, one.fault.ranks) for one in there(parallel(found.tensors, found.together)).faults}


def tokens_of(ids: Tensor, **modules: Tensor) -> dict[str, Any]:
    named = {name.replace("__", "."): values.contiguous() for name, values in modules.items()}
    return {"batch_inputs": {"input_ids": ids.contiguous()}, "modules": named}


def test_words_of_a_rank_that_are_looked_up_wrongly(tmp_path: Path) -> None:
    table = random(40, 8)
    wrong = table.clone()
    wrong[20:] = table[19:39]
    one = {**tokens_of(IDS, embed_tokens__output=table[IDS]), "param": {"param.embed_tokens.weight": table}}
    looked_up = tokens_of(IDS, embed_tokens__output=wrong[IDS])
    ranks = [{**looked_up, "param": {"param.embed_tokens.weight": own.contiguous()}} for own in table.chunk(2)]
    assert kinds(compared(tmp_path, one, *ranks)) == {("vocabulary slice", (1,))}


@pytest.mark.parametrize("count", [8, 16])
def test_a_slice_of_the_vocabulary_is_told_of_sixteen_tokens_and_not_of_eight(count: int) -> None:
    ids, held = np.arange(count) * 40 // count, HeldByRanks((0, 1), (), 0, (((0, 20),), ((20, 20),)))
    off = ids >= 20
    said = [np.where(off, 0.5, 0.0)] * 2
    told = vocabulary.of_words("x", off, ids, held), vocabulary.of_one_slice("x", 0 * said[0], said, held, ids)
    assert [one and one.ranks for one in told] == ([(1,)] * 2 if count == 16 else [None] * 2)


@pytest.mark.parametrize("is_stale", [False, True])
def test_a_lookup_is_told_from_a_weight_that_is_itself_off(is_stale: bool, tmp_path: Path) -> None:
    """Weights that are recorded after their step are off by what wrong gradients made of them."""
    table, name = random(40, 8), "param.embed_tokens.weight"
    off = table.clone()
    off[20:] += 0.004 * random(20, 8, seed=1)
    wrong = torch.cat([table[:20], table[19:39]])
    one = {**tokens_of(IDS, embed_tokens__output=table[IDS]), "param": {name: table}}
    ranks = [
        {**tokens_of(IDS, embed_tokens__output=(off if is_stale else wrong)[IDS]), "param": {name: own.contiguous()}}
        for own in off.chunk(2)
    ]
    told = kinds(compared(tmp_path, one, *ranks))
    assert (("vocabulary slice", (1,)) in told) is not is_stale
    assert ("apart", (1,)) in told


@pytest.mark.parametrize(("word", "expected"), [(20, (1,)), (39, (1,)), (25, None)])
def test_a_rank_that_adds_a_row_of_its_own_for_other_ranks_words(
    word: int, expected: tuple[int, ...] | None, tmp_path: Path
) -> None:
    """A lookup that is called anything: that it is one its values say."""
    table = random(40, 8)
    right = table[IDS]
    wrong = right + (IDS < 20)[..., None] * table[word]
    one = {**tokens_of(IDS, tokens__output=right), "param": {"param.tokens.weight": table}}
    ranks = [
        {**tokens_of(IDS, tokens__output=wrong), "param": {"param.tokens.weight": own.contiguous()}}
        for own in table.chunk(2)
    ]
    told = kinds(compared(tmp_path, one, *ranks))
    assert (("vocabulary slice", (1,)) in told) is (expected is not None)


def said(how: str) -> list[Tensor]:
    """What each of two ranks says of every label's log-probability."""
    target = LOGITS.gather(-1, LABELS[..., None])[..., 0]
    most = torch.stack([part.amax(-1) for part in LOGITS.chunk(2, -1)])
    sums = torch.stack([(part - top[..., None]).exp().sum(-1)
                        for part, top in zip(LOGITS.chunk(2, -1), most, strict=True)])  # fmt: skip
    if how == "own sum":
        return list(target - most - sums.log())
    if how == "own maximum":
        return list(target - most - sums.sum(0).log())
    right = target - LOGITS.logsumexp(-1)
    if how == "unmasked":
        return [right + (LABELS < 20) * LOGITS[..., 20]] * 2
    return [right + 0.3 * random(4, 16, seed=8)] * 2


@pytest.mark.parametrize(
    ("how", "expected"),
    [("own sum", {("own vocabulary", (0, 1))}), ("own maximum", {("own maximum", (0, 1))}),
     ("unmasked", {("vocabulary slice", (1,))}), ("anything", set())],
)  # fmt: skip
def test_logits_are_those_that_make_the_other_runs_log_probabilities(
    how: str, expected: set[Any], tmp_path: Path
) -> None:
    right = LOGITS.log_softmax(-1).gather(-1, LABELS[..., None])[..., 0]

    def step(logits: Tensor, logprobs: Tensor) -> dict[str, Any]:
        data = {"log_probs": logprobs, "labels": LABELS}
        return {**tokens_of(IDS, other__output=logits.flip(0), output__output=logits), "forward_data": data}

    ranks = [step(own, one) for own, one in zip(LOGITS.chunk(2, -1), said(how), strict=True)]
    assert kinds(compared(tmp_path, step(LOGITS, right), *ranks)) == expected


@pytest.mark.parametrize("masked", [-1e4, float("-inf")])
@pytest.mark.parametrize("off", [0.0, 0.5])
def test_words_that_pad_a_vocabulary_and_count_are_named(masked: float, off: float, tmp_path: Path) -> None:
    """Far below all others, the numbers that mask make all of a slice's size: no other slice is near it for that."""
    right, wrong = LOGITS.clone(), LOGITS.clone()
    right[..., 37:], wrong[..., 37:] = masked, 0.0
    wrong[..., :20] *= 1 + off
    one = tokens_of(IDS, forward__output__logits=right)
    ranks = [tokens_of(IDS, forward__output__logits=own) for own in wrong.chunk(2, -1)]
    told = kinds(compared(tmp_path, one, *ranks))
    assert told == {("padded words", (1,))} if not off else "padded words" not in {kind for kind, _ in told}
    assert "held twice" not in {kind for kind, _ in told}
