"""A token of a finding leads to its own place in the file: the value there is the value the rule looked at."""

from __future__ import annotations

import numpy as np
import pytest

from replay_core import pages
from replay_core.dumps import open_run
from replay_core.samples.batch import Batch
from tests.fixtures import FIXTURES


@pytest.mark.parametrize(
    "name", ["faults/healthy", "verl", "openrlhf", "areal", "slime", "trl", "nexrl/self_hosted_fp32"]
)
def test_every_placed_value_stands_at_the_index_of_its_token(name: str) -> None:
    looked = 0
    for record in open_run(FIXTURES / name).records[:12]:
        batch = Batch(record, record.tensors(), by_shape=True)
        for ref in record.tensors():
            found = batch.values(ref) if ref.is_readable and batch.per_sample(ref) is None else None
            if found is None:
                continue
            flat = np.asarray(pages.array(ref), dtype=np.float64)
            for sample, (start, length) in enumerate(zip(batch.starts, batch.lengths, strict=True)):
                said = found.said_N[start : start + length]
                for position in np.flatnonzero(said)[[0, -1]] if said.any() else ():
                    index = batch.index_of(ref, sample, int(position))
                    assert index is not None
                    assert len(index) == len(ref.shape)
                    value = found.values_N[start + position]
                    np.testing.assert_equal(flat[tuple(index)], value, err_msg=f"{ref.name} {index}")
                    looked += 1
    assert looked > 20


def test_a_token_that_is_not_there_leads_to_its_sample_or_nowhere() -> None:
    (record,) = open_run(FIXTURES / "faults" / "healthy" / "batch.pt").records
    batch = Batch(record, record.tensors())
    ref = next(ref for ref in record.tensors() if ref.name == "old_log_probs")
    assert batch.index_of(ref, 3, 10_000) == [3, 0]
    assert batch.index_of(ref, 3) == [3, 0]
    assert batch.index_of(ref, len(batch)) is None
