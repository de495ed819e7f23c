"""What several rules ask of a batch is worked out for the first of them, and forgotten with the batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.gap import gap
from replay_core.diagnose.rule import Skip
from replay_core.dumps import open_run
from replay_core.objectives.arrays import group_index
from tests.replay_core.diagnose.batches import Fields, healthy, save


def batch_of(directory: Path, fields: Fields) -> StepBatch:
    return next(Case(open_run(save(directory, fields))).batches())


def test_a_gap_is_measured_once_until_the_batch_is_forgotten(tmp_path: Path) -> None:
    batch = batch_of(tmp_path, healthy())
    first = gap(batch)
    assert gap(batch) is first
    batch.release()
    again = gap(batch)
    assert again is not first
    assert (again.mean, again.lag, again.leak) == (first.mean, first.lag, first.leak)


def test_why_a_batch_cannot_be_judged_is_told_to_all_who_ask(tmp_path: Path) -> None:
    fields = healthy()
    fields["old_log_probs"] = np.full_like(fields["old_log_probs"], -1.0)
    batch = batch_of(tmp_path, fields)
    told = []
    for _ in range(2):
        with pytest.raises(Skip) as skipped:
            gap(batch)
        told.append(str(skipped.value))
    assert told[0] == told[1]


@pytest.mark.parametrize("ids", [[0, 1, 0, 2], [0, 2, 2], [5, 3, 5], [-1, 0, 1], [0], [0, 0, 3, 1, 2]])
def test_groups_are_numbered_as_a_sort_numbers_them(ids: list[int]) -> None:
    index_B, groups = group_index(np.array(ids))
    unique_G, sorted_B = np.unique(ids, return_inverse=True)
    assert groups == len(unique_G)
    np.testing.assert_array_equal(index_B, sorted_B)
