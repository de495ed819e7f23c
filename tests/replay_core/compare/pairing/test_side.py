"""One run's part of a computation: its tensors by their names."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from replay_core.compare.pairing.micro_batch_pair import Side
from replay_core.dumps import open_run
from tests.builders import write_dump


def test_a_tensor_is_found_by_its_name_and_by_its_end_after_the_tensors_were_renamed_too(tmp_path: Path):
    fields = {"a.weight": np.zeros(2), "b.weight": np.ones(3), "c": np.ones(4)}
    side = Side(list(open_run(write_dump(tmp_path, {"modules": fields})).records))
    side.load()
    assert [ref.shape for _, ref in side.named("c")] == [(4,)]
    assert [ref.shape for _, ref in side.ending("a.weight", "b.weight")] == [(2,), (3,)]
    assert side.named("d") == []
    side.tensors = {("d", stage): held for (name, stage), held in side.tensors.items() if name == "c"}
    found = side.find("d")
    assert found is not None
    assert found.shape == (4,)
    assert side.ending("weight") == []
