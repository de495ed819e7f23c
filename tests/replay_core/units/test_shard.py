"""Which part of the units is a worker's: as typed, as a Slurm array says, as torchrun says."""

from __future__ import annotations

import pytest

from replay_core.errors import RequestError
from replay_core.units.shard import Shard

ARRAY = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": "1"}


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("units", [0, 1, 6, 23])
def test_every_unit_is_of_exactly_one_part(count: int, units: int) -> None:
    parts = [Shard(number, count).of(range(units)) for number in range(1, count + 1)]
    assert [one for part in parts for one in part] == list(range(units))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_part_is_counted_from_one() -> None:
    assert Shard.parse("2/4", {}) == Shard(2, 4)


@pytest.mark.parametrize("text", ["0/4", "5/4", "1/0", "1", "a/b", "1/4/2", "-1/4", "٣/4", ""])
def test_what_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="which of how many parts"):
        Shard.parse(text, ARRAY)


def test_a_task_of_a_slurm_array_is_its_place_in_the_array() -> None:
    assert str(Shard.parse("auto", ARRAY)) == "3/4"
    stepped = {**ARRAY, "SLURM_ARRAY_TASK_MIN": "10", "SLURM_ARRAY_TASK_STEP": "5", "SLURM_ARRAY_TASK_ID": "20"}
    assert str(Shard.parse("auto", stepped)) == "3/4"


def test_ids_of_an_array_that_are_in_no_row_are_refused() -> None:
    with pytest.raises(RequestError, match="in no row"):
        Shard.parse("auto", {**ARRAY, "SLURM_ARRAY_TASK_ID": "9"})


def test_a_rank_is_counted_from_nought_and_asked_after_the_array() -> None:
    launched = {"RANK": "0", "WORLD_SIZE": "8"}
    assert str(Shard.parse("auto", launched)) == "1/8"
    assert str(Shard.parse("auto", {**launched, **ARRAY})) == "3/4"
    with pytest.raises(RequestError, match="no rank"):
        Shard.parse("auto", {"RANK": "8", "WORLD_SIZE": "8"})


def test_auto_without_anything_that_says_which_is_refused() -> None:
    with pytest.raises(RequestError, match="nothing says which part"):
        Shard.parse("auto", {})
