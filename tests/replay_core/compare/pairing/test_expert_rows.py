"""An expert's rows are the tokens that were sent to it: another number of them is no matter of layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from replay_core.compare import Comparison, compare_runs
from replay_core.dumps import open_run
from tests.builders import there
from tests.replay_core.compare.ranks.recorded import Step, compared, random, write

IDS = torch.randint(1, 99, (2, 6), generator=torch.Generator().manual_seed(3))
MASK = torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0]])


def _step(rows: dict[int, int]) -> Step:
    """What is recorded of a step whose experts computed so many rows; rows are random, for they do not face each
    other.
    """
    experts = {f"layers.0.mlp.experts.{number}.output": random(count, 4) for number, count in rows.items()}
    batch = {"input_ids": IDS, "attention_mask": MASK}
    return {"batch_inputs": batch, "modules": {**experts, "layers.0.output": torch.ones(2, 6, 8)}}


def _compared(directory: Path, one: Sequence[int], other: Sequence[int]) -> Comparison:
    """One process with all four experts against two ranks with two of them each."""
    ranks = ({0: other[0], 1: other[1]}, {2: other[2], 3: other[3]})
    return compared(directory, _step(dict(enumerate(one))), *map(_step, ranks))


@pytest.mark.parametrize(
    ("other", "ranks", "said"),
    [
        ((3, 3, 3, 0), (1,), "expert 3 of layers.0.mlp computed 3 rows in a and 0 in b"),
        ((3, 2, 3, 3), (0,), "1 of them was lost"),
    ],
)
def test_rows_that_an_expert_lacks_are_named(
    other: Sequence[int], ranks: tuple[int, ...], said: str, tmp_path: Path
) -> None:
    found = _compared(tmp_path, (3, 3, 3, 3), other)
    first = there(found.first)
    assert first.verdict.value == "SHAPE"
    assert said in first.reason
    assert there(first.ranks).parted == ranks
    assert found.agrees is False


def test_tokens_that_went_to_other_experts_are_not_compared_where_no_router_is_recorded(tmp_path: Path) -> None:
    found = _compared(tmp_path, (3, 3, 4, 2), (3, 3, 1, 5))
    assert (found.first, found.agrees) == (None, None)
    assert all("tokens were sent to other experts" in there(row.skipped) for row in found.skipped)
    assert {row.name[-8:] for row in found.skipped} == {"2.output", "3.output"}


def test_one_token_that_noise_sends_elsewhere_is_said_and_what_was_compared_agrees(tmp_path: Path) -> None:
    found = _compared(tmp_path, (3, 3, 4, 2), (3, 3, 3, 3))
    assert (found.first, found.agrees, found.skipped) == (None, True, [])
    (note,) = [one for one in found.notes if "another expert" in one]
    assert "layers.0.mlp: at least 1 of 12 rows went to another expert and none was lost" in note
    assert not any("2.output" in row.name or "3.output" in row.name for row in found.tensors), "not compared"


@pytest.mark.parametrize(
    ("one", "other"),
    [((3, 4, 3, 2), (3, 4, 3, 2)), ((3, 4, 3, 2), (4, 4, 4, 4)), ((3, 4, 3, 2), (3, 3, 2, 2))],
    ids=["alike", "filled up", "two slots of padding were not sent"],
)
def test_rows_that_padding_makes_are_layout(one: Sequence[int], other: Sequence[int], tmp_path: Path) -> None:
    found = _compared(tmp_path, one, other)
    assert found.first is None, there(found.first).reason


@pytest.mark.parametrize(("noise", "is_told"), [(0.0, True), (1e-6, True), (0.2, False)])
def test_tokens_sent_to_other_experts_for_the_same_scores_are_a_divergence(
    noise: float, is_told: bool, tmp_path: Path
) -> None:
    """What a router chose otherwise is said of the router; one whose scores are the same, or off by what turns none of
    its choices, chose alike.
    """
    scores = random(2, 6, 4)

    def step(rows: dict[int, int], scores: torch.Tensor) -> Step:
        made = _step(rows)
        return {**made, "modules": {"layers.0.mlp.router.output": scores, **made["modules"]}}

    own = scores + noise * random(2, 6, 4, seed=7)
    ranks = [step({0: 3, 1: 3}, own), step({2: 1, 3: 5}, own)]
    found = compared(tmp_path, step({0: 3, 1: 3, 2: 4, 3: 2}, scores), *ranks)
    assert any("layers.0.mlp.experts" in row.name for row in found.tensors if row.verdict.diverges) is is_told
    if is_told:
        fault = there(there(there(found.first).ranks).fault)
        assert (fault.kind, fault.ranks) == ("other tokens", (1,))


def test_of_ranks_that_face_each_other_none_is_said_to_lose_what_others_may_have(tmp_path: Path) -> None:
    def run(name: str, *counts: Sequence[int]) -> Path:
        steps = (_step({2 * rank + expert: rows for expert, rows in enumerate(own)}) for rank, own in enumerate(counts))
        return write(tmp_path / name, *steps)

    found = compare_runs(open_run(run("a", (3, 3), (4, 2))), open_run(run("b", (3, 2), (5, 2))))
    said = [there(row.skipped) for row in found.skipped]
    assert said
    assert all("sent to other ranks' experts, or lost on the way" in one for one in said)
    assert found.first is None
