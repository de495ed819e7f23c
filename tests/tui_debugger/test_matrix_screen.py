"""`m`: cells as they end, from a cell to its divergences or its log, two cells compared, cancelled in time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from replay_core.jobs import Answer, Job, OnEvent, Partial, Progress
from tests.tui_debugger.driving import A, B, opened, press, rest, screen, toasts, until
from tests.tui_debugger.scripted import ScriptedEngine, document
from tui_debugger.screens.matrix import MatrixScreen


async def test_the_answer_is_first_and_every_cell_says_what_it_did() -> None:
    engine = ScriptedEngine()
    async with opened(A, engine=engine) as (app, pilot):
        await press(app, pilot, "m", "r")
        lines = screen(app).splitlines()
        assert "DIFFERS  3 agree · 1 differ · 4 unavailable of 8 cells" in lines[1]
        assert "breaks agreement: packing=on block_mask=off" in lines[2]
        assert engine.jobs[-1].params["matrix"] == "attention=eager,flash compile=off,inductor packing=off,on"
        await press(app, pilot, *"jjjjjj")
        assert "other_samples: segments 1..15 off" in screen(app)


async def test_a_recording_that_is_not_what_each_row_alone_computes_is_no_agreement() -> None:
    answer = document("matrix")
    for cell in answer["cells"]:
        if cell["agreement"]["agrees"] is False:
            cell["agreement"] = {**cell["agreement"], "agrees": True}
    answer["matrix"] = {**answer["matrix"], "breaking": [], "failing": []}
    baseline = answer["cells"][answer["baseline"]]
    async with opened(A, engine=ScriptedEngine(replay=answer)) as (app, pilot):
        await press(app, pilot, "m", "r")
        assert "AGREES  4 agree" in screen(app).splitlines()[1]
    at = {"sample": 1, "position": 2, "recorded": -3.0703, "replayed": -3.5703}
    baseline["recorded"] = [{"field": "log_probs", "verdict": "DIFF", "reason": "mean exp|d| 1.649", "at": at}]
    async with opened(A, engine=ScriptedEngine(replay=answer)) as (app, pilot):
        await press(app, pilot, "m", "r")
        lines = screen(app).splitlines()
        assert "RECORDING  4 agree" in lines[1]
        assert "log_probs is not what each row alone computes: mean exp|d| 1.649" in lines[2]


@pytest.mark.long
async def test_enter_on_a_disagreeing_cell_opens_its_divergence_list() -> None:
    engine = ScriptedEngine()
    async with opened(A, engine=engine) as (app, pilot):
        await press(app, pilot, "m", "r", *"jjjjjj", "enter")
        params = engine.last("compare").params
        assert (params["a"], params["b"]) == ("/runs/demo/matrix/cell1", "/runs/demo/matrix/cell6")
        assert not isinstance(app.screen, MatrixScreen)
        assert "DIFF  first at" in screen(app)
        await press(app, pilot, "m")
        assert "1 differ" in screen(app)  # the matrix is still there


async def test_enter_on_a_cell_that_did_not_run_opens_its_log(tmp_path: Path) -> None:
    log = tmp_path / "cell5.log"
    log.write_text("loading\nCUDA error: \x1b[31mout of memory\n")
    answer = document("matrix")
    answer["cells"][5] = {**answer["cells"][5], "outcome": "crashed", "log": str(log)}

    async with opened(A, engine=ScriptedEngine(replay=answer)) as (app, pilot):
        await press(app, pilot, "m", "r", *"jjjjj", "enter")
        assert "out of memory" in screen(app)
        assert "\x1b" not in screen(app)
        await press(app, pilot, "escape")
        assert isinstance(app.screen, MatrixScreen)


def _packed_away(_job: Job) -> Answer:
    matrix = document("matrix")
    held = {"bytes": 53_000, "rows": 2, "tokens": [1, 5], "layers": 1}
    return {**matrix, "capsule": held}


async def test_a_cell_that_disagrees_is_written_as_one_file_and_a_script(tmp_path: Path) -> None:
    engine = ScriptedEngine(capsule=_packed_away)
    async with opened(A, engine=engine, size=(120, 40)) as (app, pilot):
        await press(app, pilot, "m", "r", "g", "B")
        assert any("does not disagree" in toast for toast in toasts(app))
        cells = app.session.state.replay.matrix.cells
        off = next(number for number, cell in enumerate(cells) if cell["agreement"]["agrees"] is False)
        await press(app, pilot, *["j"] * off, "B", "ctrl+u", *str(tmp_path / "mine"), "enter")
        params = engine.last("capsule").params
        assert (params["replay"], params["file"]) == (cells[off]["dump"], str(tmp_path / "mine.capsule"))
        assert params["script"] == str(tmp_path / "mine.py")
        assert any("0.05 MB: 2 rows, 6 tokens, layer 1" in toast for toast in toasts(app))


async def test_without_a_replay_there_is_nothing_to_write() -> None:
    engine = ScriptedEngine()
    async with opened(A, B, engine=engine) as (app, pilot):
        await press(app, pilot, "B")
        assert any("no replayed cell" in toast for toast in toasts(app))
        assert "capsule" not in engine.kinds()


@pytest.mark.long
async def test_two_marked_cells_are_compared() -> None:
    engine = ScriptedEngine()
    async with opened(A, engine=engine) as (app, pilot):
        await press(app, pilot, "m", "r", "j", "j", "space", *"jjjj", "space", "equals_sign")
        params = engine.last("compare").params
        assert (params["a"], params["b"]) == ("/runs/demo/matrix/cell2", "/runs/demo/matrix/cell6")


async def test_a_cell_without_a_dump_cannot_be_marked() -> None:
    async with opened(A) as (app, pilot):
        await press(app, pilot, "m", "r", *"jjjjj", "space")
        assert app.session.state.marks == []
        assert any("left nothing to compare" in toast for toast in toasts(app))


async def test_cells_stand_there_as_they_end_and_the_run_can_be_cancelled() -> None:
    engine = ScriptedEngine()
    engine.gate = asyncio.Event()
    async with opened(A, engine=engine) as (app, pilot):
        await pilot.press("m", "r")
        await until(pilot, lambda: "RUN" in screen(app))
        await pilot.press("ctrl+c")
        await until(pilot, lambda: app.session.state.job.busy is None)
        assert not app.session.state.replay.matrix.runs


async def test_wrong_axes_are_refused_with_what_is_right() -> None:
    async with opened(A) as (app, pilot):
        await press(app, pilot, "m", "a", "ctrl+u", *"attention=nosuch,eager", "enter")
        assert any("attention cannot be" in toast for toast in toasts(app))
        assert app.session.state.replay.matrix.axes.startswith("attention=eager")


@pytest.mark.long
async def test_what_will_run_stands_there_before_it_runs_under_the_number_it_keeps() -> None:
    engine = ScriptedEngine()
    async with opened(A, engine=engine, size=(80, 24)) as (app, pilot):
        await press(app, pilot, "m", "a", "ctrl+u", *"attention=eager,fa2 packing=off,on block_mask=on,off", "enter")
        before = [line.split() for line in screen(app).splitlines() if " to run " in line]
        assert len(before) == 9
        assert before[0][-7:] == ["1", "to", "run", "-", "each", "row", "alone"]
        engine.gate = asyncio.Event()
        await pilot.press("r", "j", "j")
        await until(pilot, lambda: "1 runs now    -          each row alone" in screen(app))
        assert "› 3 to run" in screen(app)
        engine.gate.set()
        await rest(app, pilot)
        assert " 1 ran         BASELINE   each row alone" in screen(app)
        assert "› 3 ran" in screen(app), "the cursor stays where it was, though the recording comes before it"
        rows = [line[28:].split()[:3] for line in screen(app).splitlines() if "AGREES  " in line or "DIFFERS  " in line]
        settings = [row for row in rows if row and row[0] in ("eager", "fa2")]
        assert len({tuple(row) for row in settings}) == len(settings) == 4, "every line says what it ran"


@pytest.mark.long
async def test_esc_leads_from_a_cells_tensors_back_to_the_cell() -> None:
    async with opened(A) as (app, pilot):
        await press(app, pilot, "m", "r", *"jjjjjj", "enter")
        assert "rldbg  matrix ›" in screen(app).splitlines()[0]
        await press(app, pilot, "escape")
        assert isinstance(app.screen, MatrixScreen)
        assert app.session.state.replay.matrix.at == 6
        assert "› 6 ran" in screen(app)


class _OneCell(ScriptedEngine):
    """Its matrix has run each row alone and one cell, and stands at the next."""

    async def _replay(self, _job: Job, on_event: OnEvent) -> Any:
        for part, cell in enumerate(document("matrix")["cells"][1:3]):
            on_event(Progress(3, 3, "records written", part, 9))
            on_event(Partial({"cell": cell}))
        on_event(Progress(0, None, "padded batch, eager", 2, 9))
        await asyncio.Event().wait()


async def test_a_matrix_that_runs_says_since_when_what_is_left_and_how_to_stop_and_no_count_of_the_cell_before() -> (
    None
):
    async with opened(A, engine=_OneCell(), size=(80, 24)) as (app, pilot):
        await pilot.press("m", "r")
        await until(pilot, lambda: "1 of 8 cells" in screen(app))
        head = "\n".join(screen(app).splitlines()[1:4])
        assert "records written" not in head, "those were of the cell before"
        assert "1 of 8 cells · padded batch, eager" in head
        busy = app.session.state.job.busy
        assert busy is not None
        busy.began -= 40
        await until(pilot, lambda: " s, about 2 min left · ctrl+c cancels" in screen(app))
        await pilot.press("ctrl+c")
        await rest(app, pilot)
        assert "CANCELLED  1 of 8 cells ran" in screen(app).splitlines()[1], "the count it had"


@pytest.mark.long
async def test_a_cell_that_has_run_can_be_looked_at_while_the_others_run() -> None:
    engine = _OneCell()
    async with opened(A, engine=engine, size=(80, 24)) as (app, pilot):
        await pilot.press("m", "r")
        await until(pilot, lambda: "1 of 8 cells" in screen(app))
        await pilot.press("j", "enter")
        await until(pilot, lambda: app.session.state.tensors.comparison is not None)
        await until(pilot, lambda: "RUN  matrix" in screen(app).splitlines()[1])
        await until(pilot, lambda: "below: DIFF first at" in "".join(screen(app).splitlines()[2:5]))
        assert engine.kinds().count("compare") == 1
        await pilot.press("o", *str(A), "enter")
        await until(pilot, lambda: any("matrix" in toast and "ctrl+c" in toast for toast in toasts(app)), "a refusal")
        await pilot.press("escape")
        await until(pilot, lambda: isinstance(app.screen, MatrixScreen))
        assert app.session.state.replay.matrix.runs
        await pilot.press("ctrl+c")
        await rest(app, pilot)
        assert "CANCELLED  1 of 8 cells ran" in screen(app).splitlines()[1]
