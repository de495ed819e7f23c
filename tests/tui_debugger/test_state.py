"""What the screen shows, as data: marks, and what of the open runs is looked at."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tui_debugger.driving import A, B, opened, press, screen, until
from tests.tui_debugger.scripted import ScriptedEngine, document
from tui_debugger.peek import steps_in
from tui_debugger.state import Mark, State


def test_of_marks_there_are_two_of_one_kind_at_most() -> None:
    state = State()
    one, two, three = (Mark("tensor", name, {}) for name in "abc")
    cell = Mark("cell", "0", {})
    for mark in (one, two, three):
        state.toggle_mark(mark)
    assert state.marks == [two, three]
    state.toggle_mark(two)
    assert state.marks == [three]
    state.toggle_mark(cell)
    assert state.marks == [cell]


async def test_two_marked_tensors_are_inspected_side_by_side() -> None:
    engine = ScriptedEngine()
    async with opened(A, engine=engine) as (app, pilot):
        await press(app, pilot, "space", "j", "j", "space")
        assert "+" in screen(app)
        names = [mark.name for mark in app.session.state.marks]
        assert len(names) == 2
        await press(app, pilot, "equals_sign")
        params = engine.jobs[-1].params
        assert [params["a"]["name"], params["b"]["name"]] == names


@pytest.mark.long
async def test_a_marked_tensor_waits_for_one_of_another_run() -> None:
    engine = ScriptedEngine()
    async with opened(A, engine=engine) as (app, pilot):
        await press(app, pilot, "space", "o", *str(B), "enter")
        assert "+›" not in screen(app), "the mark is the other run's"
        await press(app, pilot, "space", "equals_sign")
        params = engine.last("inspect").params
        assert [params[side]["path"] for side in ("a", "b")] == [str(A), str(B)]


@pytest.mark.long
async def test_two_marked_tensors_that_no_comparison_pairs_get_no_verdict_of_a_line() -> None:
    async with opened(A, B, size=(160, 48)) as (app, pilot):
        await press(app, pilot, "space", "j", "space", "k", "equals_sign", "z")
        assert len({mark.name for mark in app.session.state.marks}) == 2
        shown = screen(app)
    assert "no verdict: a comparison does not pair these two" in shown


async def test_a_parameter_and_its_gradient_are_two_columns() -> None:
    answer = document("inspect_one")
    stats = {**answer["a"]["stats"], "l2": 0.5}
    key = {**answer["a"]["key"], "stage": "gradient"}
    values = [0.25] * len(answer["window"]["index"])
    answer["a"]["counterpart"] = {"kind": "gradient", "key": key, "name": "grad.w", "stats": stats, "values": values,
                                  "ratio": 0.0125}  # fmt: skip

    async with opened(A, engine=ScriptedEngine(inspect=answer)) as (app, pilot):
        await press(app, pilot, "3", "z")
        shown = screen(app)
    assert re.search(r"index +parameter +gradient", shown)
    assert "0.25" in shown
    assert "gradient grad.w" in shown
    assert "|gradient| / |parameter| 0.0125" in shown


async def test_two_marked_steps_of_one_run_are_compared() -> None:
    engine = ScriptedEngine()
    async with opened(A, engine=engine) as (app, pilot):
        await press(app, pilot, "1", "g", "space", "G", "space", "equals_sign")
        await until(pilot, lambda: any(job.kind == "compare" for job in engine.jobs), "a comparison that was asked for")
        params = engine.last("compare").params
        assert params["a"] == params["b"]
        assert (params["step"], params["scope_b"]["step"]) == (0, 3)


@pytest.mark.long
async def test_steps_can_be_filtered_by_what_their_line_says() -> None:
    run_a = document("run_a")
    run_a["problems"] = [{"where": run_a["records"][-1]["path"], "what": "the file ends inside a tensor"}]

    async with opened(A, engine=ScriptedEngine(open=run_a)) as (app, pilot):
        assert "step 3  ▲W" in screen(app)
        await press(app, pilot, "1", "slash", *"PROBLEM", "enter")
        shown = screen(app)
        assert "step 3" in shown
        assert "▸ step 1" not in shown
        await press(app, pilot, "escape")
        assert "▸ step 1" in screen(app)
        await press(app, pilot, "7")
        assert "the file ends inside a tensor" in screen(app)
        await press(app, pilot, "enter")
        assert app.debugger.panes.active in ("steps", "tensors")


def test_a_peek_sees_the_steps_in_names_alone(tmp_path: Path) -> None:
    for name in (
        "modules/step_000003_rank0.pt",
        "loss/step_12.jsonl",
        "actor/batch/step-7.pt",
        "misstep_9.pt",
        "x/y/z",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert steps_in(tmp_path) == [3, 7, 12]
    assert steps_in(tmp_path / "none") == []
