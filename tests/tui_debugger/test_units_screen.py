"""A directory of units on the screen: filled while workers work, and every unit opens or says why it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from replay_core import workbench
from tests.tui_debugger.driving import screen, until
from tui_debugger.app import RldbgApp
from tui_debugger.cli import run

DATA = Path(__file__).parents[1] / "data"
A, B = str(DATA / "nexrl/self_hosted_fp32"), str(DATA / "nexrl/self_hosted_bf16")


def _work(part: str, out: Path) -> None:
    assert run(["compare", A, B, "--shard", part, "--out", str(out)]) == 1


@pytest.mark.long
@pytest.mark.parametrize("size", [(80, 24), (160, 48)])
async def test_units_fill_while_workers_work_and_one_that_is_done_opens(tmp_path: Path, size: tuple[int, int]) -> None:
    _work("2/2", tmp_path)
    app = RldbgApp(units=lambda: workbench.gather(tmp_path))
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: "done 1 of 2, left 1" in screen(app))
        shown = screen(app)
        assert "DISAGREES" in shown
        assert "first so far: step 1: DIFF" in shown
        assert [line for line in shown.splitlines() if "step 0" in line and "left" in line]
        await pilot.press("enter")
        await until(pilot, lambda: "step 0: left" in screen(app), "how a unit without a document stands")
        await pilot.press("escape")
        _work("1/2", tmp_path)
        await until(pilot, lambda: "done 2 of 2" in screen(app), "what the second worker did")
        assert "first: step 0: DIFF" in screen(app)
        await pilot.press("g", "enter")
    assert app.chosen_unit is not None
    assert workbench.reopen(Path(app.chosen_unit))["kind"] == "comparison"


@pytest.mark.long
async def test_a_unit_that_failed_says_why_and_is_found_by_n(tmp_path: Path) -> None:
    _work("2/2", tmp_path)
    doc = workbench.gather(tmp_path)
    for outcome in (tmp_path / "outcomes").iterdir():
        outcome.write_text("{")
    app = RldbgApp(units=lambda: workbench.gather(tmp_path))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "failed 1" in screen(app))
        assert "no unit is done yet" in screen(app)
        await pilot.press("n", "enter")
        await until(pilot, lambda: f"{doc['units'][1]['label']}: failed" in screen(app), "the reason")
        await pilot.press("escape", "q")
    assert app.chosen_unit is None
