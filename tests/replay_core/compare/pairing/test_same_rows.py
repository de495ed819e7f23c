"""An expert's rows in another order are its rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from replay_core.compare.pairing.same_rows import same_rows
from tests.replay_core.compare.ranks.recorded import compared, random

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


@pytest.mark.parametrize("tokens", [6, 9])
def test_rows_of_all_experts_in_one_agree_where_they_are_no_tokens_in_turn(tokens: int, tmp_path: Path) -> None:
    """Nine rows of six tokens, each sent to more experts than one, are in the order in which they came; nine of nine
    may be the tokens themselves.
    """
    name = "layers.0.mlp.experts.output"
    ids = torch.arange(tokens).reshape(1, tokens)
    half = 5 * tokens // 9
    found = compared(
        tmp_path,
        {"batch_inputs": {"input_ids": ids}, "modules": {name: ROWS}},
        {"batch_inputs": {"input_ids": ids[:, :half]}, "modules": {name: ROWS[ORDER[:5]]}},
        {"batch_inputs": {"input_ids": ids[:, half:]}, "modules": {name: ROWS[ORDER[5:]]}},
    )
    verdicts = {row.verdict.value for row in found.tensors if row.name == name}
    assert verdicts == {"SAME"} if tokens == 6 else "SAME" not in verdicts
