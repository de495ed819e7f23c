"""A file of metrics that several runs were appended to: the last of them is read, and not a mixture by step."""

from __future__ import annotations

import json
from pathlib import Path

from replay_core.dumps import open_run
from replay_core.records import Inline


def _steps(folder: Path, steps: list[tuple[int, float]]) -> tuple[list[float], list[str]]:
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "reward/mean": value}) + "\n" for step, value in steps))
    run = open_run(path)
    sources = [next(t for t in record.tensors() if t.name.endswith("mean")).source for record in run.records]
    values = [source.value for source in sources if isinstance(source, Inline)]
    return [float(value) for value in values if isinstance(value, (int, float))], list(run.notes)


def test_a_run_that_was_appended_to_another_is_read_alone(tmp_path: Path) -> None:
    values, notes = _steps(
        tmp_path, [(n, 0.0) for n in range(10)] + [(0, 0.9), (0, 1.0), *[(n, 1.0) for n in range(1, 5)]]
    )
    assert values == [1.0] * 5
    assert any("2 runs one after another" in note for note in notes)


def test_rows_of_one_step_and_a_late_row_are_one_run(tmp_path: Path) -> None:
    values, notes = _steps(tmp_path, [(0, 0.1), (0, 0.2), (1, 0.3), (2, 0.4), (3, 0.5), (2, 0.6), (4, 0.7)])
    assert values == [0.2, 0.3, 0.6, 0.5, 0.7]
    assert not any("runs" in note for note in notes)


def test_a_row_of_the_first_step_at_the_end_is_no_other_run(tmp_path: Path) -> None:
    values, _ = _steps(tmp_path, [(0, 0.1), *[(n, 0.1 * n) for n in range(1, 9)], (0, 0.5)])
    assert len(values) == 9
