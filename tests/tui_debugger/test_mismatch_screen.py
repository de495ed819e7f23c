"""`W`: why engine and trainer disagree, at both sizes: asked once a step, again with a model, and called off."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from replay_core import workbench
from replay_core.jobs import Answer, Job, OnEvent, Progress
from tests.fixtures import FIXTURES
from tests.tui_debugger.driving import A, opened, press, rest, screen, until
from tests.tui_debugger.scripted import ScriptedEngine


def _tempered(_job: Job) -> Answer:
    return workbench.mismatch(FIXTURES / "faults/temperature_mismatch/batch.pt")


class _Waiting(ScriptedEngine):
    """Its candidates are tried until they are called off."""

    async def _mismatch(self, _job: Job, on_event: OnEvent) -> Any:
        on_event(Progress(2, 9, "temperature 0.7"))
        await asyncio.Event().wait()


@pytest.mark.long
@pytest.mark.parametrize("size", [(80, 24), (160, 48)])
async def test_one_key_asks_and_shows_the_cause_with_what_it_leaves(size: tuple[int, int]) -> None:
    engine = ScriptedEngine(mismatch=_tempered)
    async with opened(A, engine=engine, size=size) as (app, pilot):
        await press(app, pilot, "W")
        seen = screen(app)
        assert "MISMATCH" in seen
        assert "What is left of the gap, were this the cause" in seen
        assert "› " in seen
        assert "temperature" in seen
        heads = next(line for line in seen.splitlines() if "side" in line and "cause" in line)
        assert ("k3" in heads) == (size[0] > 110)
        await press(app, pilot, "escape", "W")
        assert engine.kinds().count("mismatch") == 1, "what was explained is not asked again"
        assert engine.last("mismatch").params["path"] == str(A)


@pytest.mark.long
async def test_a_model_is_asked_for_and_tried_with() -> None:
    engine = ScriptedEngine(mismatch=_tempered)
    async with opened(A, engine=engine) as (app, pilot):
        await press(app, pilot, "W", "M", *"random:llama-tiny", "enter")
        assert engine.last("mismatch").params["model"] == "random:llama-tiny"
        assert "MISMATCH" in screen(app)


async def test_progress_is_said_and_ctrl_c_ends_it() -> None:
    async with opened(A, engine=_Waiting(), size=(80, 24)) as (app, pilot):
        await pilot.press("W")
        await until(pilot, lambda: "2 of 9" in screen(app))
        await pilot.press("ctrl+c")
        await rest(app, pilot)
        assert app.session.state.job.busy is None


def test_a_findings_next_step_is_done_on_the_screen() -> None:
    from tui_debugger.screens.examining import can_do

    assert can_do("rldbg mismatch runs/one --step 3")
