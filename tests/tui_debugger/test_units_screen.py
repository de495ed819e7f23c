"""A directory of units on the screen: filled while workers work, and every unit opens or says why it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from replay_core import workbench
from replay_core.documents.gathering import GatheringDocument
from tests.tui_debugger.driving import screen, until
from tests.tui_debugger.test_screens import is_golden
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


def _seven(directory: str = "/shared/UNITS") -> GatheringDocument:
    """Seven units, each of which stands otherwise."""
    entry: dict[str, Any] = {"run": None, "rank": 0, "exit_code": None, "said": "", "file": None, "error": None,
                             "tries": 0}  # fmt: skip
    stands = (
        ("done", 0, "2 of 2 cells agree with each row alone; the recording: SAME"),
        ("done", 1, "packing on: samples of a row see each other in layers.0.self_attn"),
        ("done", 0, "2 of 2 cells agree with each row alone; the recording: CLOSE"),
        ("failed", 3, "the record is cut short: expected 4,096 bytes, found 40"),
        ("crashed", 4, "its worker is gone"),
        ("running", None, ""),
        ("left", None, ""),
    )
    units = [
        {**entry, "id": f"{micro:024x}", "label": f"step 3 rank 0 micro {micro}", "step": 3, "micro": micro,
         "state": state, "exit_code": code, "said": said}
        for micro, (state, code, said) in enumerate(stands)
    ]  # fmt: skip
    counts = {"total": 7, "done": 3, "failed": 1, "crashed": 1, "running": 1, "left": 1, "agree": 2, "diverge": 1}
    first = {"id": units[1]["id"], "label": units[1]["label"], "said": units[1]["said"], "file": None}
    doc: Any = {
        "schema_version": 1, "kind": "gathering", "tool": "rldbg", "created": "2026-01-02T03:04:05Z",
        "directory": directory, "command": "replay", "asked": {}, "shard": None, "agrees": False,
        "headline": "", "counts": counts, "first": first, "one_sided": {"a": [], "b": []}, "eta_s": 95.0, "stale": 2,
        "units": units, "problems": [], "notes": [],
    }  # fmt: skip
    return cast("GatheringDocument", doc)


@pytest.mark.parametrize("size", [(80, 24), (160, 48)])
async def test_the_screen_of_units_and_its_help_are_the_golden_ones(size: tuple[int, int]) -> None:
    app = RldbgApp(units=_seven)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: "micro 6" in screen(app))
        await pilot.press("n")
        is_golden(f"units-{size[0]}x{size[1]}", screen(app))
        await pilot.press("question_mark")
        await until(pilot, lambda: "the keys of Units" in screen(app))
        is_golden(f"units-help-{size[0]}x{size[1]}", screen(app))
        await pilot.press("escape", "q")


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
