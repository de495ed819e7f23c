"""A lookup's rows say whose tokens, and which micro-batch's, are in its gradient, and how often."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.compare import compare_runs
from replay_core.compare.judging.token_rows import Given, dealt_otherwise, of_rows, reduced_of_some
from replay_core.compare.parallel import parallel
from replay_core.dumps import open_run
from replay_core.recorder import Recorder
from tests.builders import there
from tests.replay_core.compare.ranks.in_memory import alike, as_ref, cut
from tests.replay_core.compare.ranks.recorded import compared, random

WORDS, HIDDEN = 96, 8
#: [micro-batch][rank] -> rows of token ids.
IDS = torch.randint(0, WORDS, (2, 2, 2, 12), generator=torch.Generator().manual_seed(3))
GRADIENTS = [[torch.zeros(WORDS, HIDDEN).index_add(0, IDS[m, r].reshape(-1), random(24, HIDDEN, seed=4 + 2 * m + r))
              for r in range(2)] for m in range(2)]  # fmt: skip
NAME = "grad.tokens.weight"


def told(folder: Path, factors: list[list[float]], name: str = NAME) -> set[tuple[str, tuple[int, ...]]]:
    """Two ranks of two micro-batches each, against one process that has all samples in one; factors: [micro][rank],
    how often each micro-batch of a rank counts in what the ranks hold.
    """
    whole = sum(one for own in GRADIENTS for one in own)
    made = sum(factors[m][r] * GRADIENTS[m][r] for m in range(2) for r in range(2))
    with Recorder(folder / "a").step(0, rank=0) as record:
        record("batch_inputs", {"input_ids": torch.cat([IDS[m, r] for r in range(2) for m in range(2)])}, micro=0)
        record("gradient", {name: whole})
    for rank in range(2):
        with Recorder(folder / "b") as recorder, recorder.step(0, rank=rank) as record:
            for micro in range(2):
                record("batch_inputs", {"input_ids": IDS[micro, rank].contiguous()}, micro=micro)
            record("gradient", {name: made})
    found = compare_runs(open_run(folder / "a"), open_run(folder / "b"))
    return {(one.fault.kind, one.fault.ranks) for one in there(parallel(found.tensors, found.together)).faults}


CASES: dict[str, tuple[list[list[float]], set[Any]]] = {
    "a rank is missing": ([[1, 0], [1, 0]], {("missing", (1,))}),
    "a rank is missing, and what is left is clipped": ([[0.3, 0], [0.3, 0]], {("missing", (1,))}),
    "the first micro-batch is missing": ([[0, 0], [1, 1]], {("missing", (0, 1))}),
    "one micro-batch of one rank is missing": ([[1, 1], [1, 0]], {("missing", (1,))}),
    "summed after each micro-batch": ([[2, 2], [1, 1]], {("summed again", (0, 1))}),
    "summed after each, and clipped": ([[0.8, 0.8], [0.4, 0.4]], {("summed again", (0, 1))}),
    "means of 30, 20, 10 and 20 tokens": ([[2 / 3, 1], [2, 1]], {("own token mean", (0, 1))}),
    "and not divided by the micro-batches": ([[4 / 3, 2], [4, 2]], {("own token mean", (0, 1))}),
    "a rank counts twice": ([[1, 2], [1, 2]], {("twice", (1,))}),
    "a rank counts three times": ([[3, 1], [3, 1]], {("twice", (0,))}),
    "a rank counts twice and the other not as it should": ([[1.1, 2], [1.1, 2]], {("weighed", (0, 1))}),
    "anything": ([[0.7, 1.1], [1.3, 0.6]], set()),
    "once and a half": ([[1.5, 1.5], [1, 1]], set()),
}


@pytest.mark.parametrize("case", CASES)
def test_whose_tokens_count_how_often(case: str, tmp_path: Path) -> None:
    factors, expected = CASES[case]
    assert told(tmp_path, factors) == expected


@pytest.mark.parametrize(
    ("kept", "said"), [(3, "only the last micro-batch's (3)"), (0, "only the first micro-batch's")]
)
def test_a_gradient_in_which_one_micro_batch_alone_is_left_has_lost_the_accumulation(kept: int, said: str) -> None:
    ids = torch.randint(0, WORDS, (2, 4, 10), generator=torch.Generator().manual_seed(5))
    made = [
        torch.zeros(WORDS, HIDDEN).index_add(0, ids[:, m].reshape(-1), random(20, HIDDEN, seed=30 + m))
        for m in range(4)
    ]
    given = [Given(rank, m, ids[rank, m].numpy()) for rank in range(2) for m in range(4)]
    whole = torch.stack(made).sum(0)
    fault = there(of_rows(NAME, as_ref(whole), alike(made[kept], made[kept]), given))
    assert (fault.kind, fault.ranks) == ("missing", (0, 1))
    assert said in fault.sentence
    assert "the accumulation over micro-batches is lost" in fault.sentence
    two = whole - made[0] - made[1]
    assert "accumulation" not in there(of_rows(NAME, as_ref(whole), alike(two, two), given)).sentence


def test_a_weight_whose_other_rows_are_not_0_is_no_lookup(tmp_path: Path) -> None:
    """Its rows belong to no words."""
    before = GRADIENTS[0][0]
    try:
        GRADIENTS[0][0] = before + 0.1 * random(WORDS, HIDDEN, seed=9)
        assert told(tmp_path, [[0, 0], [1, 1]]) == set()
    finally:
        GRADIENTS[0][0] = before


SAMPLES, WEIGHT = IDS.reshape(4, 2, 12)[:, 0], random(16, HIDDEN, seed=20)
EMBEDDED = random(4, 12, HIDDEN, seed=21)


def dealt(folder: Path, sampled: list[int], wrong: int | None = None) -> set[tuple[str, tuple[int, ...]]]:
    """Four ranks, two and two of a tensor-parallel group; sampled: which half of the samples each was given."""
    name = "layers.0.mlp.up_proj"

    def step(rows: slice, channels: slice, off: float = 0.0) -> dict[str, Any]:
        own = WEIGHT[channels]
        return {
            "batch_inputs": {"input_ids": SAMPLES[rows].contiguous()},
            "modules": {f"{name}.output": EMBEDDED[rows] @ own.T + off},
            "param": {f"param.{name}.weight": own.contiguous()},
        }

    ranks = [
        step(slice(2 * half, 2 * half + 2), slice(8 * (rank % 2), 8 * (rank % 2) + 8), float(rank == wrong))
        for rank, half in enumerate(sampled)
    ]
    found = compared(folder, step(slice(0, 4), slice(0, 16)), *ranks)
    assert found.agrees is False or wrong is None
    return {(one.fault.kind, one.fault.ranks) for one in there(parallel(found.tensors, found.together)).faults}


def test_samples_that_are_dealt_by_another_ranks_number_are_named(tmp_path: Path) -> None:
    assert dealt(tmp_path / "right", [0, 0, 1, 1]) == set()
    assert dealt(tmp_path / "wrong", [0, 0, 1, 1], wrong=2) == {("constant", (2,))}
    assert dealt(tmp_path / "dealt", [0, 1, 0, 1]) == {("dealt otherwise", (0, 1, 2, 3))}


#: Which slice of a weight each rank holds, and which tokens it was given -> who is named.
HANDS: list[tuple[list[int], list[int], tuple[int, ...] | None]] = [
    ([0, 1, 0, 1], [0, 0, 1, 1], None),
    ([0, 1, 0, 1], [0, 1, 0, 1], (0, 1, 2, 3)),
    ([0, 1, 0, 1, 0, 1], [0, 0, 1, 2, 2, 1], None),
    ([0, 1, 0, 1, 0, 1], [0, 0, 1, 2, 1, 2], (2, 3, 4, 5)),
    # All were given the same, or two replicas by chance: every slice is there as often as any other.
    ([0, 1, 0, 1], [0, 0, 0, 0], None),
    ([0, 1, 0, 1, 0, 1], [0, 0, 0, 0, 1, 1], None),
]


@pytest.mark.parametrize(("slices", "tokens", "expected"), HANDS)
def test_ranks_of_the_same_tokens_hold_every_slice_equally_often(
    slices: list[int], tokens: list[int], expected: tuple[int, ...] | None
) -> None:
    weight = cut([WEIGHT.chunk(2)[one] for one in slices], 0, stretches=[((8 * one, 8),) for one in slices])
    given = [Given(rank, 0, SAMPLES[one].numpy()) for rank, one in enumerate(tokens)]
    fault = dealt_otherwise("up.output", weight, given)
    assert (fault and fault.ranks) == expected
    assert dealt_otherwise("up.output", weight, given[:-1]) is None  # what the last was given is not known


@pytest.mark.parametrize(("kept", "expected"), [(1, {("reduced of some", (0, 1))}), (0, {("reduced of some", (0, 1))})])
def test_a_gradient_of_which_one_micro_batch_alone_is_reduced_is_told(
    kept: int, expected: set[Any], tmp_path: Path
) -> None:
    whole = sum(one for own in GRADIENTS for one in own)
    with Recorder(tmp_path / "a").step(0, rank=0) as record:
        record("batch_inputs", {"input_ids": torch.cat([IDS[m, r] for r in range(2) for m in range(2)])}, micro=0)
        record("gradient", {NAME: whole})
    for rank in range(2):
        with Recorder(tmp_path / "b") as recorder, recorder.step(0, rank=rank) as record:
            for micro in range(2):
                record("batch_inputs", {"input_ids": IDS[micro, rank].contiguous()}, micro=micro)
            record("gradient", {NAME: GRADIENTS[kept][0] + GRADIENTS[kept][1] + GRADIENTS[1 - kept][rank]})
    found = compare_runs(open_run(tmp_path / "a"), open_run(tmp_path / "b"))
    assert {(one.fault.kind, one.fault.ranks) for one in there(parallel(found.tensors, found.together)).faults} == (
        expected
    )


def test_replicas_of_which_one_micro_batch_alone_is_reduced_are_told_as_groups() -> None:
    """Ranks 0 and 1, and 2 and 3, share the gradient of their tokens; each group keeps its own of the first."""
    rows = [[random(30, 6, seed=10 * rank + micro) for micro in range(2)] for rank in range(4)]
    draw = torch.Generator().manual_seed(1)
    ids = [[torch.randint(0, 30, (8,), generator=draw) for micro in range(2)] for rank in range(4)]
    own = [[of * torch.zeros(30, 1).index_fill_(0, words, 1.0) for of, words in zip(*pair, strict=True)]
           for pair in zip(rows, ids, strict=True)]  # fmt: skip
    whole = torch.stack([one for of in own for one in of]).sum(0)
    last = torch.stack([of[1] for of in own]).sum(0)
    replicas = [last + own[first][0] + own[first + 1][0] for first in (0, 2)]
    held = alike(replicas[0], replicas[0], replicas[1], replicas[1])
    given = [Given(rank, micro, ids[rank][micro].numpy()) for rank in range(4) for micro in range(2)]
    fault = there(reduced_of_some("w's gradient", as_ref(whole), held, given))
    assert fault.ranks == (0, 1, 2, 3)
    assert "0 and 1; 2 and 3 (ranks that hold the same, as replicas do)" in fault.sentence
    assert "reduced over replicas" in fault.sentence
