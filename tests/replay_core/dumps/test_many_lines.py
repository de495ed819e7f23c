"""Files of very many short lines: looked at by their first, decoded together."""

from __future__ import annotations

import json
from pathlib import Path

from replay_core.dumps import open_run, peeking


def _lines(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"step": step, "loss": step / 8}) + "\n" for step in range(count)))
    return path


def test_a_first_look_into_a_file_of_lines_is_a_look_at_its_first_lines(tmp_path: Path) -> None:
    path = _lines(tmp_path / "x.jsonl", 5_000)
    peeking.forget()
    assert peeking.tree_of(path)["loss"].shape[0] < 100
    assert peeking.look(path).tree["loss"].shape == (5_000,)
    assert peeking.content_of(path).tree["loss"].shape == (5_000,)


def test_two_damaged_lines_that_make_one_mapping_together_are_not_read_as_one(tmp_path: Path) -> None:
    path = _lines(tmp_path / "metrics.jsonl", 3)
    with path.open("a") as file:
        file.write(
            '{"step": 3, "c": [{"x": 1}\n{"y": 2}]}\n{"step": 4, "loss": 9.5}, {"step": 5}\n{"step": 6, "loss": NaN}\n'
        )
    run = open_run(path)
    told = {record.key.step: [ref.source.value for ref in record.tensors() if ref.name == "loss"]  # type: ignore[union-attr]
            for record in run.records if record.key.step in (0, 1, 2, 6)}  # fmt: skip
    assert told == {0: [0.0], 1: [0.125], 2: [0.25], 6: told[6]}
    assert told[6][0] != told[6][0]
