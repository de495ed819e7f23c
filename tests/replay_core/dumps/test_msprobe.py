"""Two runs of one process, written by msprobe's own PrecisionDebugger: B has one weight changed."""

from __future__ import annotations

from replay_core.compare import compare_runs
from replay_core.dumps import open_run
from tests.fixtures import FIXTURES


def test_two_runs_of_one_process_meet_though_each_names_its_own() -> None:
    a, b = (open_run(FIXTURES / "msprobe" / which) for which in ("a", "b"))
    assert [record.key.rank for record in (*a.records, *b.records)] == [0, 0]
    assert any("processes, not ranks" in note for note in a.notes)
    found = compare_runs(a, b)
    assert found.counts["MISSING"] == 0
    assert found.first is not None
    assert found.first.name == "fc.output"


def test_the_gradients_of_weights_are_read_whatever_number_the_call_has() -> None:
    names = {ref.name for record in open_run(FIXTURES / "msprobe" / "a").records for ref in record.tensors()}
    assert {"grad.fc.weight", "grad.fc.bias", "grad.out.weight", "grad.out.bias"} <= names
