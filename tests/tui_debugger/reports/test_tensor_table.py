"""The table of compared tensors: whole where nobody's terminal has a width, and within it where one has."""

from __future__ import annotations

from typing import Any

import pytest

from tui_debugger.reports.comparison import divergence
from tui_debugger.reports.tensor_table import tensor_table


def row(name: str, verdict: str = "DIFF", *, micro: int = 0, reason: str = "", suspect: bool = False) -> Any:
    key = {"step": 12, "rank": 0, "micro": micro, "role": "actor", "stage": "modules"}
    figures = {"mismatched": 5, "max_abs": 1.25e-4, "rel_l2": 0.0625}
    return {
        "name": name, "verdict": verdict, "suspect": suspect, "a_key": key, "b_key": key,
        "dtype": ["bfloat16", "float32"], "shape": [[4, 128, 4096], [4, 128, 4096]],
        "metrics": None if reason else figures, "reason": reason, "note": None,
    }  # fmt: skip


ROWS = [
    row("layers.0.self_attn.o_proj.output"),
    row("layers.17.mlp.experts.12.down_proj.output", "CLOSE", suspect=True),
    row("layers.1.self_attn.output.1", "MISSING", reason="only a has it"),
]


def test_without_a_terminal_every_column_is_there() -> None:
    head, *lines = tensor_table(ROWS)
    assert head.split() == ["verdict", "tensor", "where", "dtype", "shape", "max", "abs", "rel", "L2", "why"]
    assert all(name in line for name, line in zip((one["name"] for one in ROWS), lines, strict=True))
    assert max(map(len, [head, *lines])) > 120
    assert tensor_table(ROWS, 400) == [head, *lines]


@pytest.mark.parametrize("width", [60, 72, 80, 100, 120, 132])
@pytest.mark.parametrize("micros", [1, 2])
def test_within_a_terminal_every_line_fits_and_what_is_left_out_is_said(width: int, micros: int) -> None:
    rows: list[Any] = [{**one, "a_key": {**one["a_key"], "micro": at % micros}} for at, one in enumerate(ROWS)]
    rows = [{**one, "b_key": one["a_key"]} for one in rows]
    lines = tensor_table(rows, width)
    said = lines.pop() if lines[-1].startswith("(cut to ") else ""
    table = [line for line in lines if not line.startswith("all of ")]
    assert max(map(len, table)) <= width
    assert "rel L2" in table[0]
    assert [line.split()[0] for line in table[1:]] == ["DIFF", "CLOSE?", "MISSING"]
    assert all("output" in line for line in table[1:])
    for title in ("dtype", "shape", "why"):
        assert title in table[0] or f" {title}" in said
    assert (micros == 1) == (lines[0] == "all of step 12 rank 0 micro 0 modules:")


def test_names_that_are_cut_keep_their_layer_and_it_is_said() -> None:
    *lines, last = tensor_table(ROWS, 60)
    assert any("17." in line and "…" in line for line in lines)
    assert "--explain NAME and --json have " in last
    assert "whole names" in last


def test_values_around_an_element_give_way_from_the_outside() -> None:
    first: Any = {
        "name": "x", "verdict": "DIFF", "a_key": None, "b_key": None, "a": 1.0, "b": 2.0, "origin": None,
        "why": "so", "note": None,
        "index": {"sample": None, "position": None, "raw_a": [14], "raw_b": [14], "sample_b": None},
        "around": {"by_token": False, "positions": list(range(10, 19)), "a": [1.23456e-5] * 9, "b": [-2.34567e-5] * 9,
                   "token_ids": None, "texts": None},
    }  # fmt: skip
    whole, narrow = divergence(first).splitlines(), divergence(first, 60).splitlines()
    assert max(map(len, whole)) > 80
    assert max(map(len, narrow)) <= 60
    heads = [next(line.split()[1:] for line in lines if line.strip().startswith("index")) for lines in (whole, narrow)]
    assert len(heads[0]) == 9
    assert "[14]" in heads[1]
    assert heads[1][0] != "10"
    assert heads[1][-1] != "18"
