"""Another tolerance while looking: judged again without reading, said in the header, taken back by esc."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay_core.errors import RequestError
from tests.tui_debugger.driving import A, B, opened, press, rest, screen, toasts
from tests.tui_debugger.scripted import ScriptedEngine
from tui_debugger.tolerance import Tolerance


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("", Tolerance()),
        ("table", Tolerance()),
        ("1e-3", Tolerance(atol=1e-3)),
        ("1e-3 1e-2", Tolerance(atol=1e-3, rtol=1e-2)),
        ("rtol=0.01", Tolerance(rtol=0.01)),
        ("--rtol 0.01 --atol 0", Tolerance(atol=0.0, rtol=0.01)),
        ("rtol 0.01 5", Tolerance(atol=5.0, rtol=0.01)),
        ("--exact", Tolerance(exact=True)),
    ],
)
def test_what_is_typed_is_what_is_meant(typed: str, meant: Tolerance) -> None:
    assert Tolerance.parse(typed) == meant


@pytest.mark.parametrize("typed", ["nan", "-1", "inf", "1 2 3", "atol=1 atol=2", "rtol", "loose", "exact 1", "no.toml"])
def test_what_is_no_tolerance_is_refused(typed: str) -> None:
    with pytest.raises(RequestError):
        Tolerance.parse(typed)


@given(st.floats(0, 1e6), st.none() | st.floats(0, 1e6))
def test_what_is_in_force_can_be_typed_again(atol: float, rtol: float | None) -> None:
    first = Tolerance.parse(str(Tolerance(float(f"{atol:g}"), None if rtol is None else float(f"{rtol:g}"))))
    assert Tolerance.parse(first.typed) == first


async def test_verdicts_change_at_once_without_another_comparison_and_esc_takes_them_back() -> None:
    engine = ScriptedEngine()
    async with opened(A, B, engine=engine, size=(80, 24)) as (app, pilot):
        assert "judged by the table" in screen(app).splitlines()[0]
        assert "DIFF" in screen(app).splitlines()[1]
        before = engine.kinds().count("compare")
        await press(app, pilot, "R", *"2 1e-3", "enter")
        assert "JUDGED BY atol 2 rtol 0.001" in screen(app).splitlines()[0]
        assert "SAME" in screen(app).splitlines()[1]
        params = engine.last("rejudge").params
        assert (params["atol"], params["rtol"], params["exact"]) == (2.0, 1e-3, False)
        await press(app, pilot, "escape")
        assert "judged by the table" in screen(app).splitlines()[0]
        assert "DIFF" in screen(app).splitlines()[1]
        assert engine.kinds().count("compare") == before


@pytest.mark.long
async def test_plus_and_minus_scale_what_was_given() -> None:
    engine = ScriptedEngine()
    async with opened(A, B, engine=engine) as (app, pilot):
        await press(app, pilot, "plus")
        assert any("R sets a tolerance first" in toast for toast in toasts(app))
        await press(app, pilot, "R", *"0.2", "enter", "plus")
        assert app.session.state.tolerance == Tolerance(atol=2.0)
        assert "SAME" in screen(app).splitlines()[1]
        await press(app, pilot, "minus", "minus")
        assert app.session.state.tolerance == Tolerance(atol=0.02)
        assert "DIFF" in screen(app).splitlines()[1]


async def test_presses_that_are_read_together_each_count() -> None:
    async with opened(A, B) as (app, pilot):
        await press(app, pilot, "R", *"1e-6", "enter")
        for _ in range(4):
            app.debugger.requests.do_loosen("10")
        await rest(app, pilot)
        assert app.session.state.tolerance == Tolerance(1e-2)


@pytest.mark.long
async def test_the_row_looked_at_stays_while_its_verdict_changes() -> None:
    async with opened(A, B) as (app, pilot):
        await press(app, pilot, "j", "j", "R", *"exact", "enter")
        row = app.session.state.tensors.row
        assert row is not None
        assert not row.is_first
        assert app.session.state.tolerance.exact


async def test_an_error_leaves_the_former_tolerance_in_force() -> None:
    engine = ScriptedEngine(rejudge=RequestError("rule 1: it limits nothing"))
    async with opened(A, B, engine=engine) as (app, pilot):
        await press(app, pilot, "R", *"1", "enter")
        assert app.session.state.tolerance.is_table
        assert "JUDGED BY" not in screen(app)
        assert any("limits nothing" in toast for toast in toasts(app))


@pytest.mark.long
async def test_figures_that_are_gone_are_read_again_under_the_tolerance() -> None:
    engine = ScriptedEngine(rejudge=RequestError("these two were not compared last"))
    async with opened(A, B, engine=engine) as (app, pilot):
        await press(app, pilot, "R", *"1e-3", "enter")
        assert engine.last("compare").params["atol"] == 1e-3
        assert "JUDGED BY atol 0.001" in screen(app)


@pytest.mark.long
async def test_a_tolerance_of_last_time_is_in_force_again_and_says_so() -> None:
    async with opened(A, B) as (app, pilot):
        await press(app, pilot, "R", *"0.5", "enter")
    engine = ScriptedEngine()
    async with opened(A, B, engine=engine) as (app, pilot):
        assert any("judged by atol 0.5, as last time" in toast for toast in toasts(app))
        assert "JUDGED BY atol 0.5" in screen(app).splitlines()[0]
        assert engine.last("compare").params["atol"] == 0.5


def test_a_restored_file_that_is_gone_is_the_table_again(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    kept = {"atol": None, "rtol": None, "file": str(file), "exact": False}
    assert Tolerance.restored(kept).is_table
    file.write_text("")
    assert Tolerance.restored(kept).file == str(file)
