"""The tensor list as data: sorted, filtered, and growing while a comparison runs."""

from __future__ import annotations

from typing import Any

from tests.tui_debugger.driving import A, B, opened, press, screen
from tests.tui_debugger.scripted import ScriptedEngine, document
from tui_debugger.tensor_list import TensorList
from tui_debugger.tensor_rows import TensorRow, ordered

VERDICTS = ("NAN", "SHAPE", "DIFF", "MISSING", "PADDING", "CLOSE", "SAME")


def _row(name: str, verdict: str, rel_l2: object = None) -> TensorRow:
    return TensorRow(name, verdict, {"name": name, "verdict": verdict, "metrics": {"rel_l2": rel_l2}})


def test_rows_stand_there_while_the_comparison_runs_and_the_first_diverging_one_is_selected() -> None:
    entries = document("comparison")["tensors"]
    tensors = TensorList()
    tensors.begin_live()
    tensors.add_live(entries[:4])
    assert len(tensors.rows) == len(tensors.shown) == 4
    early: Any = {"name": entries[8]["name"]}
    tensors.early = early
    tensors.add_live(entries[4:10])
    assert tensors.row is not None
    assert tensors.row.name == entries[8]["name"]
    tensors.add_live(entries[10:])
    assert tensors.row.name == entries[8]["name"]


async def test_sorting_and_filtering_keep_next_and_previous_in_the_order_shown() -> None:
    async with opened(A, B) as (app, pilot):
        await press(app, pilot, "S")
        assert "worst first" in screen(app)
        state = app.session.state
        order = [state.tensors.rows[i] for i in state.tensors.shown]
        assert [row.verdict for row in order] == sorted((row.verdict for row in order), key=VERDICTS.index)
        await press(app, pilot, "g", "right_square_bracket")
        assert state.tensors.shown.index(state.tensors.selected) == 1


def test_worst_first_goes_by_verdict_then_by_distance() -> None:
    rows = [
        _row("a", "SAME", 0.0),
        _row("b", "DIFF", 0.1),
        _row("c", "DIFF", "inf"),
        _row("d", "NAN"),
        _row("e", "CLOSE"),
    ]
    assert [rows[i].name for i in ordered(rows, range(5), "worst first")] == ["d", "c", "b", "e", "a"]
    assert [rows[i].name for i in ordered(rows, range(5), "name")] == ["a", "b", "c", "d", "e"]


async def test_a_record_that_holds_nothing_is_not_said_to_wait_for_being_chosen() -> None:
    async with opened(A, engine=ScriptedEngine(record={**document("record"), "fields": []})) as (app, _pilot):
        assert "This record holds no tensor" in screen(app)
        assert "Choose a record" not in screen(app)
