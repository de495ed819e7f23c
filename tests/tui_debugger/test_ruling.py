"""`J`: which of the two is wrong. The referee is asked with the weights that are noted or given, can be called off, and
what it says is the answer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from replay_core.jobs import Answer, Job, OnEvent, Progress
from tests.tui_debugger.driving import A, B, opened, press, rest, screen, toasts, until
from tests.tui_debugger.scripted import ScriptedEngine, document
from tui_debugger.answer import answer_of
from tui_debugger.flows.ruling import grafted

TENSOR = "layers.1.input_layernorm.output"


def _bug(_job: Job) -> Answer:
    return {
        **document("ruling_lacking"),
        "ruling": "BUG",
        "side": "b",
        "tensor": TENSOR,
        "sentence": "B is wrong at layers.1.input_layernorm",
    }


def _unnoted(job: Job) -> Answer:
    run = document("run_a" if job.params["path"] == str(A) else "run_b")
    return {**run, "models": {}}


def _modules_apart(job: Job) -> Answer:
    record = document("record")
    if job.params["key"]["stage"] == "modules":
        record["fields"] = [{**field, "name": TENSOR, "canonical": TENSOR} for field in record["fields"][:1]]
    return {**record, "key": job.params["key"]}


class _Waiting(ScriptedEngine):
    """Its referee runs until it is called off."""

    async def _referee(self, _job: Job, on_event: OnEvent) -> Any:
        on_event(Progress(3, 8, "A: its rounding"))
        await asyncio.Event().wait()


async def test_noted_weights_are_ruled_with_and_what_is_ruled_is_the_answer() -> None:
    engine = ScriptedEngine(referee=_bug)
    async with opened(A, B, engine=engine, size=(80, 24)) as (app, pilot):
        await press(app, pilot, "J")
        params = engine.last("referee").params
        assert (params["a"], params["weights_a"], params["b"], params["weights_b"]) == (str(A), None, str(B), None)
        assert "BUG  B is wrong at layers.1.input_layernorm" in screen(app).splitlines()[1]
        assert app.session.state.tensors.row is not None
        assert app.session.state.tensors.row.name == TENSOR
        await press(app, pilot, "g", "J")
        assert engine.kinds().count("referee") == 1, "what was ruled is not ruled again"
        assert app.session.state.tensors.row.name == TENSOR


async def test_one_dump_is_ruled_alone_and_shown_where_it_is_wrong() -> None:
    engine = ScriptedEngine(referee=lambda job: {**_bug(job), "side": "a", "b": None}, record=_modules_apart)
    async with opened(A, engine=engine, size=(80, 24)) as (app, pilot):
        await press(app, pilot, "J")
        params = engine.last("referee").params
        assert (params["a"], params["step"], "b" in params) == (str(A), app.session.state.opened.scope.step, False)
        assert "BUG  B is wrong at layers.1.input_layernorm" in screen(app).splitlines()[1]
        assert app.session.state.tensors.row is not None
        assert app.session.state.tensors.row.name == TENSOR, "which another record of the computation holds"
        await press(app, pilot, "J")
        assert engine.kinds().count("referee") == 1, "what was ruled is not ruled again"
        await press(app, pilot, "1", "s", "1", "enter")
        assert "BUG" not in screen(app).splitlines()[1], "of another step nothing was ruled"


def _grafted(job: Job) -> Answer:
    graft = {
        "sentence": "layers.1.mlp carries 97.5% of what the log-probabilities differ by", "module": "layers.1.mlp",
        "grafts": [{"tensor": "layers.0.output", "comes": 0.001, "goes": None},
                   {"tensor": "layers.1.mlp.output", "comes": 0.975, "goes": None}],
    }  # fmt: skip
    return {**_bug(job), "graft": graft if job.params.get("graft") else None}


async def test_which_module_carries_the_difference_is_said_in_per_cent() -> None:
    engine = ScriptedEngine(referee=_grafted)
    async with opened(A, B, engine=engine, size=(80, 24)) as (app, pilot):
        await press(app, pilot, "J", "A")
        assert [job.params.get("graft") for job in engine.jobs if job.kind == "referee"] == [None, True]
        assert any("layers.1.mlp.output  97.5%" in toast and "layers.0" not in toast for toast in toasts(app))
        await press(app, pilot, "A", "J")
        assert engine.kinds().count("referee") == 2, "what was asked is not asked again"
        assert "graft: layers.1.mlp carries 97.5%" in answer_of(app.session.state).notes[0]
        assert any("graft: layers.1.mlp carries 97.5%" in line for line in screen(app).splitlines()[1:4]), (
            "when it fades"
        )


def test_what_stands_beside_the_module_that_carries_it_is_listed_whatever_came_a_little_before() -> None:
    shares = [0.02] * 12 + [0.9, 1.0, 1.0]
    grafts: Any = [{"tensor": f"layers.{n}.output", "comes": share, "goes": None} for n, share in enumerate(shares)]
    listed = grafted({"sentence": "", "module": "layers.12", "grafts": grafts})
    assert listed == [
        *(f"layers.{n}.output  2.0%" for n in range(7, 12)), "layers.12.output  90.0%", "layers.13.output  100.0%",
        "layers.14.output  100.0%", "and 7 more: e writes all",
    ]  # fmt: skip
    assert grafted({"sentence": "", "module": None, "grafts": grafts})[0] == "layers.0.output  2.0%"
    assert grafted({"sentence": "", "module": "layers.0", "grafts": grafts[:3]}) == [
        f"layers.{n}.output  2.0%" for n in range(3)
    ]


async def test_one_dump_has_nothing_to_graft_from() -> None:
    engine = ScriptedEngine()
    async with opened(A, engine=engine) as (app, pilot):
        await press(app, pilot, "A")
        assert any("from one side into the other" in toast for toast in toasts(app))
        assert "referee" not in engine.kinds()


async def test_a_log_is_not_asked_for_weights() -> None:
    engine = ScriptedEngine()
    async with opened(Path("/runs/train.log"), engine=engine) as (app, pilot):
        await press(app, pilot, "escape", "J")
        assert engine.kinds().count("referee") == 1
        assert any("not ruled" in toast for toast in toasts(app))


async def test_without_a_dump_there_is_nothing_to_rule() -> None:
    async with opened() as (app, pilot):
        await press(app, pilot, "J")
        assert any("no dump is open" in toast for toast in toasts(app))


@pytest.mark.long
async def test_weights_that_no_dump_notes_are_asked_for() -> None:
    engine = ScriptedEngine(referee=_bug, open=_unnoted)
    async with opened(A, B, engine=engine) as (app, pilot):
        await press(app, pilot, "J")
        assert "Weights to rule with" in screen(app)
        await press(app, pilot, "escape")
        assert "referee" not in engine.kinds()
        await press(app, pilot, "J", *"random:llama-tiny", "enter")
        params = engine.last("referee").params
        assert params["weights_a"] == params["weights_b"] == "random:llama-tiny"
        assert "BUG" in screen(app).splitlines()[1]


@pytest.mark.parametrize("width", [60, 160])
async def test_a_ruling_says_how_far_it_is_and_ctrl_c_ends_it(width: int) -> None:
    engine = _Waiting()
    async with opened(A, B, engine=engine, size=(width, 24)) as (app, pilot):
        await pilot.press("J")
        await until(pilot, lambda: "3 of 8" in screen(app))
        assert "ctrl+c cancels" in screen(app)
        await pilot.press("r")
        await until(pilot, lambda: any("ruling" in toast for toast in toasts(app)), "a second job is refused")
        await pilot.press("ctrl+c")
        await rest(app, pilot)
        assert app.session.state.job.busy is None
        assert "DIFF  first at" in screen(app)


async def test_no_ruling_is_asked_for_while_something_else_runs() -> None:
    engine = ScriptedEngine()
    async with opened(A, B, engine=engine) as (app, pilot):
        engine.gate = asyncio.Event()
        await pilot.press("r")
        await until(pilot, lambda: "RUN" in screen(app).splitlines()[1])
        await pilot.press("J")
        await until(pilot, lambda: any("replaying" in toast for toast in toasts(app)))
        assert "referee" not in engine.kinds()
        await pilot.press("ctrl+c")
        await rest(app, pilot)
