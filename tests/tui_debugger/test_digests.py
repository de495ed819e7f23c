"""A cell captured as digests first: what it says, and which dump of the baseline it is held to."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from replay_core.replay.frontier import Hashed
from tests.tui_debugger.driving import A, opened, press, screen
from tests.tui_debugger.scripted import ScriptedEngine, document
from tui_debugger.digests import dump_beside, sentence
from tui_debugger.reports.replay import replay_report

TOLD = {
    "tensors": 97, "equal": 40, "differ": 57, "first": {"name": "layers.0.self_attn.q_proj.output"},
    "windows": 1, "not_in_full": 12, "baseline_dump": "/runs/cell1_window1",
}  # fmt: skip


def hashed(**told: Any) -> dict[str, Any]:
    return {"part": "cell", "dump": "/runs/cell6_window1", "capture": {"level": "hash", "hashes": {**TOLD, **told}}}


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({}, "57 of 97 module tensors differ in their bits, first layers.0.self_attn.q_proj.output; "
             "12 were not compared in full"),
        ({"first": None, "differ": 0, "not_in_full": 0}, "all 97 module tensors are bitwise the baseline's, by digest"),
        ({"tensors": 0, "not_in_full": 1}, "compiled, so without digests; 1 was not compared in full"),
    ],
)  # fmt: skip
def test_a_cell_says_how_many_bits_part_and_what_was_not_seen(told, said):
    assert sentence(hashed(**told)) == said


def test_whole_tensors_say_nothing_of_digests():
    assert sentence({"capture": {"level": "full", "hashes": None}}) == sentence({"capture": None}) == ""


def test_the_baseline_shows_the_modules_that_the_cell_has_in_full():
    baseline = {"part": "reference", "dump": "/runs/cell1"}
    assert dump_beside(baseline, hashed()) == "/runs/cell1_window1"
    assert dump_beside(baseline, hashed(baseline_dump=None)) == "/runs/cell1"
    assert dump_beside(hashed(), baseline) == "/runs/cell6_window1"
    assert dump_beside({"part": "cell", "dump": "/runs/cell2"}, hashed()) == "/runs/cell2"


def matrix_with_digests() -> dict[str, Any]:
    answer = document("matrix")
    answer["cells"][6] |= {name: value for name, value in hashed().items() if name != "part"}
    return answer


def test_from_a_hashed_cell_the_way_leads_to_the_modules_seen_in_full() -> None:
    async def run() -> None:
        engine = ScriptedEngine(replay=matrix_with_digests())
        async with opened(A, engine=engine) as (app, pilot):
            await press(app, pilot, "m", "r", *"jjjjjj")
            assert "57 of 97 module tensors differ in their bits" in " ".join(screen(app).split())
            await press(app, pilot, "enter")
            params = engine.last("compare").params
            assert (params["a"], params["b"]) == ("/runs/cell1_window1", "/runs/cell6_window1")

    asyncio.run(run())


def test_the_report_names_the_dumps_that_hold_the_same_modules():
    text = replay_report(matrix_with_digests())
    assert "cell 6: 57 of 97 module tensors differ in their bits" in text
    assert "hint: rldbg /runs/cell1_window1 /runs/cell6_window1" in text


NAMES = ("layers.0.q_proj.output", "layers.0.o_proj.output", "norm.output")


def test_a_replay_too_large_for_whole_tensors_is_looked_at_window_by_window() -> None:
    def cell(job: Any) -> dict[str, Any]:
        plan = job.params["plan"]
        which = document("cell_packed" if plan["flags"]["packing"] else "cell_reference")
        if plan.get("capture"):
            return {**which, "dump": plan["out"], "capture": {"level": "full", "mib": 1.0}}
        word = "packed" if plan["flags"]["packing"] else "alone"
        hashes = [Hashed(name, f"{word}{name}", 2**20, 1.0, 0.0, 1.0) for name in NAMES]
        said = [{name: getattr(one, name) for name in Hashed.__slots__} for one in hashes]
        # Room for one module at a time.
        return {**which, "capture": {"level": "hash", "room_mib": 1.5, "mib": 0.1, "hashes": None}, "hashes": said}

    def comparison(job: Any) -> dict[str, Any]:
        # Seen in full, the second module is the first that diverges.
        windows = sum(1 for one in engine.jobs if (one.params.get("plan") or {}).get("capture"))
        answer = document("comparison")
        answer["first_divergence"]["name"] = NAMES[1] if windows == 4 else NAMES[2]
        return answer

    engine = ScriptedEngine(replay_cell=cell, compare=comparison)

    async def run() -> None:
        async with opened(A, engine=engine) as (app, pilot):
            await press(app, pilot, "p", "r")
            plans = [job.params["plan"] for job in engine.jobs if job.kind == "replay_cell"]
            patterns = [plan.get("capture") for plan in plans]
            assert patterns == [None, None, *[r"^(?:layers\.0\.q_proj)$"] * 2, *[r"^(?:layers\.0\.o_proj)$"] * 2]
            last = engine.last("compare").params
            assert (last["a"], last["b"]) == (plans[-2]["out"], plans[-1]["out"])
            shown = app.session.state.cells[-1].document
            assert shown["capture"]["hashes"]["not_in_full"] == 1
            assert shown["dump"] == plans[-1]["out"]
            assert "hashes" not in shown
            assert app.session.state.plan.get("capture") is None
            assert len(app.session.state.cells) == 2

    asyncio.run(run())
