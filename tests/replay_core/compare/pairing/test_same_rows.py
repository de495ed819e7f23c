"""An expert's rows in another order are its rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from replay_core.compare import Comparison
from replay_core.compare.pairing.same_rows import same_rows
from tests.builders import there
from tests.replay_core.compare.ranks.recorded import Step, compared, random

ROWS = random(9, 8)
ORDER = torch.tensor([3, 0, 1, 8, 2, 4, 7, 5, 6])
IDS = torch.randint(2, 40, (2, 9), generator=torch.Generator().manual_seed(3))


def test_rows_are_found_wherever_they_stand() -> None:
    found = same_rows(ROWS.double().numpy(), ROWS[ORDER].double().numpy())
    assert found is not None
    assert ORDER[torch.from_numpy(found)].tolist() == list(range(9))


def test_rows_that_are_alike_are_paired_one_by_one() -> None:
    rows = torch.cat([ROWS[:4], ROWS[:4]])
    found = same_rows(rows.double().numpy(), rows.flip(0).double().numpy())
    assert found is not None
    assert sorted(found.tolist()) == list(range(8))


@pytest.mark.parametrize("other", [ROWS, ROWS * 1.3, random(9, 8, seed=1), ROWS[ORDER] + random(9, 8, seed=2)])
def test_rows_in_their_place_and_others_are_left(other: torch.Tensor) -> None:
    assert same_rows(ROWS.double().numpy(), other.double().numpy()) is None


@pytest.mark.parametrize(("off", "verdict"), [(0.0, "SAME"), (0.3, "DIFF")])
def test_a_rank_that_was_sent_an_experts_tokens_in_another_order_agrees(
    off: float, verdict: str, tmp_path: Path
) -> None:
    name = "layers.0.mlp.experts.{}.output"
    given = {"batch_inputs": {"input_ids": IDS}}
    whole = {**given, "modules": {name.format(0): ROWS, name.format(1): 2 * ROWS}}
    ranks = [
        {**given, "modules": {name.format(0): ROWS[ORDER] + off * random(9, 8, seed=4)}},
        {**given, "modules": {name.format(1): 2 * ROWS}},
    ]
    found = compared(tmp_path, whole, *ranks)
    assert {row.verdict.value for row in found.tensors if row.name == name.format(0)} == {verdict}
    assert any("stand in another order in b" in note for note in found.notes) is (not off)


#: Rows of three experts, in another order within each; and a row of the first expert where the last one's belongs.
WITHIN = torch.tensor([2, 0, 1, 4, 3, 8, 6, 5, 7])
SWAPPED = torch.tensor([7, 1, 2, 3, 4, 5, 6, 0, 8])
COUNTS = {"router.tokens_per_expert.output": torch.tensor([3, 2, 4])}


@pytest.mark.parametrize(
    ("order", "recorded", "is_same"),
    [
        (WITHIN, COUNTS, True),
        (SWAPPED, COUNTS, False),
        (WITHIN, {}, False),
        (WITHIN, {"router.tokens_per_expert.output": torch.tensor([3, 2, 5])}, False),
        (WITHIN, {"router.output": random(6, 3)}, False),
    ],
    ids=["within each expert", "swapped between experts", "nothing is known", "counts of other rows", "scores alone"],
)
def test_rows_of_several_experts_agree_in_another_order_only_within_what_each_is_known_to_compute(
    order: torch.Tensor, recorded: dict[str, torch.Tensor], is_same: bool, tmp_path: Path
) -> None:
    found, name = _of_all_experts(tmp_path, ROWS, order, recorded, tokens=6)
    assert ({row.verdict.value for row in found.tensors if row.name == name} == {"SAME"}) is is_same
    assert any("stand in another order in b" in note for note in found.notes) is is_same
    if not is_same:
        assert "in another order" not in there(found.first).reason
        fault = there(there(found.first).ranks).fault
        assert fault is None or fault.kind != "rows order"


@pytest.mark.parametrize(("order", "is_same"), [([1, 0, 3, 2, 5, 4, 7, 6], True), ([7, 1, 2, 3, 4, 5, 6, 0], False)])
def test_how_many_rows_each_expert_computed_is_known_by_the_experts_of_each_token(
    order: list[int], is_same: bool, tmp_path: Path
) -> None:
    chosen = {"router.output.1": torch.tensor([[0, 1], [1, 2], [0, 3], [2, 3]])}
    found, name = _of_all_experts(tmp_path, ROWS[:8], torch.tensor(order), chosen, tokens=4)
    assert ({row.verdict.value for row in found.tensors if row.name == name} == {"SAME"}) is is_same


def _of_all_experts(
    directory: Path, rows: torch.Tensor, order: torch.Tensor, recorded: dict[str, torch.Tensor], tokens: int
) -> tuple[Comparison, str]:
    """One process against two ranks that have some of the experts each, all experts' rows in one tensor."""
    name, half = "layers.0.mlp.experts.output", 5
    ids = torch.arange(tokens).reshape(1, tokens)
    beside = {f"layers.0.mlp.{of}": value for of, value in recorded.items()}
    steps: list[Step] = [
        {"batch_inputs": {"input_ids": own_ids}, "modules": {**beside, name: own}}
        for own_ids, own in (
            (ids, rows), (ids[:, : tokens // 2], rows[order[:half]]), (ids[:, tokens // 2 :], rows[order[half:]])
        )
    ]  # fmt: skip
    return compared(directory, *steps), name
