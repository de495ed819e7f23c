"""Logs that people make for themselves: a bare number before names, one figure a row, units behind numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from replay_core import pages
from replay_core.dumps import open_run
from replay_core.dumps.console_lines import pairs_in
from replay_core.dumps.log_settings import LogSettings

FIGURES = "rew=0.{at:03d} len=12.{at}/18 ent=1.5 | t_gen=12.33s tok/s=12{at} mem=24.{at}G"


def told(path: Path, name: str) -> dict[int | None, float]:
    """Step -> a figure's value."""
    return {
        record.key.step: float(pages.array(ref)) for record in open_run(path).records for ref in record.tensors()
        if ref.name == name
    }  # fmt: skip


def written(folder: Path, text: str, name: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("head", ["[{at:04d}]", "({at})", "#{at}", "{at}:", "{at} |"])
def test_a_bare_number_before_names_and_numbers_is_the_step(tmp_path: Path, head: str) -> None:
    lines = "".join(f"{head} {FIGURES}\n".format(at=at) for at in range(5, 9))
    path = written(tmp_path, f"engine up, 8 workers\n{lines}", "own.txt")
    assert told(path, "rew") == {at: at / 1000 for at in range(5, 9)}
    assert told(path, "len") == {at: pytest.approx(12 + at / 10) for at in range(5, 9)}
    assert told(path, "mem") == {at: pytest.approx(24 + at / 10) for at in range(5, 9)}


def test_a_bare_number_that_stays_is_a_rank_and_no_step(tmp_path: Path) -> None:
    lines = "".join(f"[3] {FIGURES}\n".format(at=at) for at in range(5, 9))
    assert len(told(written(tmp_path, lines, "own.txt"), "rew")) == 4


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("Throughput 1128 tokens/s | MFU 4.9% | Peak Mem. 38.4 GiB", [1128, 0.049, 38.4]),
        ("gpu_mem 2048 MiB | model_size 2048 MB", [2, 2048]),
        ("correct=2/4 loss=0.1", [0.1]),
    ],
)
def test_a_unit_behind_a_number_is_none_of_it(text: str, values: list[float]) -> None:
    assert [value for _, value in pairs_in(text)] == [pytest.approx(value) for value in values]


def rows(*, by_tag: bool, field: str = "tag") -> list[dict[str, object]]:
    every = [
        {"wall_time": 1e9 + step, "step": step, field: name, "value": step / size}
        for step in range(1, 6) for name, size in (("train/loss", 10), ("train/score", 100))
    ]  # fmt: skip
    return sorted(every, key=lambda row: str(row[field])) if by_tag else every


@pytest.mark.parametrize("field", ["tag", "metric", "key"])
@pytest.mark.parametrize("by_tag", [False, True])
def test_rows_of_one_figure_each_are_put_together_by_their_step(tmp_path: Path, by_tag: bool, field: str) -> None:
    each = rows(by_tag=by_tag, field=field)
    lines = written(tmp_path, "".join(json.dumps(row) + "\n" for row in each), "scalars.jsonl")
    whole = written(tmp_path, json.dumps(each), "scalars.json")
    for path in (lines, whole):
        assert told(path, "train/loss") == {step: step / 10 for step in range(1, 6)}
        assert told(path, "train/score") == {step: step / 100 for step in range(1, 6)}


def test_a_text_among_such_rows_holds_the_settings(tmp_path: Path) -> None:
    head = {"step": 0, "tag": "args/text_summary", "value": json.dumps({"updates_per_step": 8})}
    text = "".join(json.dumps(row) + "\n" for row in [head, *rows(by_tag=False)])
    assert open_run(written(tmp_path, text, "scalars.jsonl")).facts["updates_per_step"] == 8


@pytest.mark.parametrize(("printed", "known"), [("0.00", False), ("0.000", False), ("0.0", True), ("0", True)])
def test_a_zero_of_two_decimals_and_more_is_no_setting_of_zero(printed: str, known: bool) -> None:
    settings = LogSettings()
    settings.take(f"lr: {printed}")
    assert ("lr" in settings.facts) == known
