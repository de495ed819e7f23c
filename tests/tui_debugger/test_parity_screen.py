"""The parity screen: the cause before anything else, what counts beside what does not, and the way to a token."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.tui_debugger.driving import A, B, opened, press, rest, screen, toasts, until
from tests.tui_debugger.scripted import ScriptedEngine, document
from tui_debugger.app import RldbgApp
from tui_debugger.screens.parity import ParityScreen

REQUEST = {"recorded": True, "a": "/runs/critic", "b": "/runs/critic", "threshold": 0.1}


async def test_a_parity_asked_for_opens_on_its_verdict_and_cause() -> None:
    engine = ScriptedEngine()
    async with opened(engine=engine, parity=REQUEST, size=(80, 24)) as (app, _):
        lines = screen(app).splitlines()
        assert engine.jobs[0].params == {"a": "/runs/critic", "b": "/runs/critic", "threshold": 0.1}
        assert "AGREES  cause: padding · batch padded" in lines[1]
        assert "over all positions Pearson is 0.740" in screen(app)
        header = next(line for line in lines if "unmasked" in line)
        assert header.replace("│", "").split() == ["values", "8×47", "response", "valid", "unmasked"]
        assert app.session.state.parity.exit_code == 0


async def test_a_disagreement_is_loud_and_exits_1() -> None:
    answer = document("parity")
    answer.update(agrees=False, cause="offset", why="every value is 0.07 higher")
    answer["batches"][0]["causes"].insert(0, {"kind": "offset", "why": "every value is 0.07 higher", "numbers": {}})

    engine = ScriptedEngine(recorded_parity=answer)
    async with opened(engine=engine, parity=REQUEST, size=(80, 24)) as (app, _):
        shown = screen(app)
        assert "DISAGREES  cause: offset" in shown.splitlines()[1]
        assert "also padding" in shown
        assert app.session.state.parity.exit_code == 1


@pytest.mark.long
async def test_every_part_is_reached_by_its_number_and_says_what_it_shows() -> None:
    wanted = {
        "1": "nearly identical % <0.1", "2": "╱ A=B", "3": "at most", "4": "No training step", "5": "row   pos",
        "6": "CONTRADICTED", "7": "read back",
    }  # fmt: skip

    async with opened(parity=REQUEST, size=(80, 24)) as (app, pilot):
        for key, says in wanted.items():
            await press(app, pilot, key)
            assert says in screen(app), key


async def test_brackets_turn_to_another_batch_with_its_own_cause() -> None:
    async with opened(parity=REQUEST, size=(80, 24)) as (app, pilot):
        await press(app, pilot, "right_square_bracket")
        assert "cause: noise · batch random" in screen(app)
        assert "of all batches padded explains most" in app.session.state.parity.answer().notes[-1]
        await press(app, pilot, "left_square_bracket", "left_square_bracket")
        assert "batch stale" in screen(app)


@pytest.mark.long
async def test_points_are_told_apart_by_glyph_and_what_no_one_reads_can_be_left_out() -> None:
    async with opened(parity=REQUEST, size=(80, 24), ascii=True) as (app, pilot):
        await press(app, pilot, "2")
        shown = screen(app)
        assert shown.isascii()
        assert "o response 118" in shown
        assert "x padding 199" in shown
        await press(app, pilot, "v")
        assert "padding 199" not in screen(app)
        assert "o response 118" in screen(app)


@pytest.mark.long
async def test_enter_on_a_worst_token_opens_the_critics_own_dumps_there() -> None:
    answer = document("parity")
    for side, path in (("a", A), ("b", B)):
        for batch in answer["batches"]:
            batch["sources"][side] = {
                "path": str(path), "key": document("run_a")["records"][0]["key"], "name": "values",
            }  # fmt: skip
    answer["batches"][0]["worst"][1]["row_b"] = 2

    engine = ScriptedEngine(recorded_parity=answer)
    async with opened(engine=engine, parity=REQUEST) as (app, pilot):
        await press(app, pilot, "5", "j", "enter")
        assert not isinstance(app.screen, ParityScreen)
        params = engine.last("inspect").params
        assert (params["a"]["path"], params["b"]["path"], params["a"]["name"]) == (str(A), str(B), "values")
        worst = answer["batches"][0]["worst"][1]
        assert params["at_a"] == [worst["row"], worst["column"]]
        assert params["at_b"] == [2, worst["column"]]
        assert app.debugger.panes.active == "inspect"
        await press(app, pilot, "P")
        assert isinstance(app.screen, ParityScreen)


@pytest.mark.long
async def test_both_critics_of_one_directory_are_still_inspected_side_by_side() -> None:
    answer = document("parity")
    key = document("run_a")["records"][0]["key"]
    for side, name in (("a", "values"), ("b", "values_b")):
        answer["batches"][0]["sources"][side] = {"path": str(A), "key": key, "name": name}

    engine = ScriptedEngine(recorded_parity=answer)
    async with opened(engine=engine, parity=REQUEST) as (app, pilot):
        await press(app, pilot, "5", "enter")
        params = engine.last("inspect").params
        assert (params["a"]["name"], params["b"]["name"]) == ("values", "values_b")
        assert "compare" not in engine.kinds()


async def test_keys_go_on_while_critics_run_and_ctrl_c_ends_them() -> None:
    engine = ScriptedEngine()
    engine.gate = asyncio.Event()
    app = RldbgApp(engine=engine, parity={"asked": {}})
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "critic A: deepspeed" in screen(app))
        assert "RUN" in screen(app).splitlines()[1]
        assert engine.jobs[0].kind == "parity"
        assert engine.jobs[0].params["out"]
        await pilot.press("2")
        await until(pilot, lambda: "Both critics run" in screen(app))
        await pilot.press("ctrl+c")
        await rest(app, pilot)
        assert app.session.state.job.busy is None
        assert "RUN" not in screen(app).splitlines()[1]
        assert app.session.state.parity.exit_code != 0


async def test_recorded_values_are_said_to_be_read_and_no_critic_to_run() -> None:
    engine = ScriptedEngine()
    engine.gate = asyncio.Event()
    app = RldbgApp(engine=engine, parity=REQUEST)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "no critic is run" in screen(app))
        assert "Both critics run" not in screen(app)
        assert " s · ctrl+c cancels" in screen(app).replace(" ms ", " s ")
        await pilot.press("5")
        await until(pilot, lambda: "5 Worst" in screen(app))
        assert "Both critics run" not in screen(app)
        engine.gate.set()
        await rest(app, pilot)


@pytest.mark.long
async def test_an_exported_parity_opens_again(in_tmp: Path) -> None:
    async with opened(parity=REQUEST) as (app, pilot):
        await press(app, pilot, "e", "enter")
    (written,) = in_tmp.glob("rldbg-parity-*.json")
    assert json.loads(written.read_text()) == document("parity")
    async with opened(written, size=(80, 24)) as (app, pilot):
        assert isinstance(app.screen, ParityScreen)
        assert "AGREES  cause: padding" in screen(app)
        assert "saved 2026" in screen(app)
        await press(app, pilot, "r")
        assert any("not run again" in toast for toast in toasts(app))


async def test_a_failure_is_said_and_its_exit_code_kept() -> None:
    from replay_core.errors import NothingComparableError

    failure: Any = NothingComparableError("no record holds a critic's values", file="/runs/critic", hint="rldbg ls X")

    engine = ScriptedEngine(recorded_parity=failure)
    async with opened(engine=engine, parity=REQUEST, size=(80, 24)) as (app, _):
        assert "ERROR  no record holds a critic's values: /runs/critic" in screen(app).splitlines()[1]
        assert "hint: rldbg ls X" in screen(app)
        assert app.session.state.parity.exit_code == 3
