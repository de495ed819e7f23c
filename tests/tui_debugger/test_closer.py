"""The closer look: asked for once a diverging pair is on the screen, walked along, and left behind by moving on."""

from __future__ import annotations

import asyncio

import pytest

from replay_core.errors import RequestError
from tests.tui_debugger.driving import A, B, opened, press, screen, until
from tests.tui_debugger.scripted import ScriptedEngine, document


async def test_a_diverging_tensor_shows_how_its_differences_are_spread() -> None:
    engine = ScriptedEngine()
    async with opened(A, B, engine=engine, size=(80, 24)) as (app, pilot):
        assert engine.last("difference").params["a"]["name"] == "layers.0.self_attn.o_proj.inputs.0"
        await press(app, pilot, "enter", "z")
        text = app.debugger._inspect.text
        found = document("difference")
        assert f"{found['mismatched']:,} of {found['compared']:,} elements" in text
        for says in ("Pearson", "|d| up to", "log2|d|", "ULP f32", "where: rel l2 per token"):
            assert says in text, says


async def test_what_is_equal_is_not_looked_at_closer() -> None:
    engine = ScriptedEngine(compare=document("comparison_same"))
    async with opened(A, B, engine=engine):
        assert "inspect" in engine.kinds()
        assert "difference" not in engine.kinds()


@pytest.mark.long
async def test_arrows_walk_along_the_strip_and_enter_goes_to_the_stretch() -> None:
    engine = ScriptedEngine()
    async with opened(A, B, engine=engine) as (app, pilot):
        await press(app, pilot, "3", "right")
        strip = document("difference")["strip"]
        far = max(range(len(strip)), key=lambda cell: strip[cell]["rel_l2"])
        assert app.session.state.inspection.strip_at == far  # the first step stands where it is worst
        await press(app, pilot, "left")
        at = strip[max(0, far - 1)]["at"]
        token = at["token"]
        assert f"sample {token['sample']} position {token['position']}" in app.debugger._inspect.text
        await press(app, pilot, "enter")
        params = engine.last("inspect").params
        assert (params["at_a"], params["at_b"]) == (at["raw_a"], at["raw_b"])


@pytest.mark.long
async def test_h_asks_for_the_strip_along_the_other_axis() -> None:
    engine = ScriptedEngine()
    async with opened(A, B, engine=engine) as (app, pilot):
        await press(app, pilot, "3", "h")
        assert engine.last("difference").params["axis"] == "channel"
        await press(app, pilot, "h")
        assert engine.last("difference").params["axis"] == "row"


@pytest.mark.long
async def test_moving_on_gives_up_what_is_still_being_read() -> None:
    class Slow(ScriptedEngine):
        given_up = 0

        async def _difference(self, job, on_event):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.given_up += 1
                raise

    engine = Slow()
    from tui_debugger.app import RldbgApp

    app = RldbgApp(A, B, engine=engine)
    async with app.run_test(size=(160, 48)) as pilot:
        await until(pilot, lambda: "looking closer" in screen(app))
        before = engine.kinds().count("inspect")
        await pilot.press("right_square_bracket")
        await until(pilot, lambda: engine.given_up and engine.kinds().count("inspect") > before)
        assert engine.given_up == 1
        assert engine.kinds().count("inspect") == before + 1


@pytest.mark.long
async def test_a_pair_that_cannot_be_laid_over_each_other_says_why() -> None:
    engine = ScriptedEngine(difference=RequestError("the two cannot be laid over each other: shapes differ"))
    async with opened(A, B, engine=engine) as (app, _):
        assert "no closer look: the two cannot be laid" in app.debugger._inspect.text
