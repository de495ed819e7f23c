"""A cell captured as digests first: what it says, and which dump of the baseline it is held to."""

from __future__ import annotations

from typing import Any

import pytest

from replay_core.errors import RequestError
from replay_core.replay.frontier import Hashed
from tests.tui_debugger.driving import A, opened, press, screen, toasts
from tests.tui_debugger.scripted import ScriptedEngine, document
from tui_debugger.digests import dump_beside, sentence, stated
from tui_debugger.format import comparison_answer
from tui_debugger.reports.replay import replay_report
from tui_debugger.tolerance import Tolerance

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
        ({"first": None, "equal": 97, "not_in_full": 0},
         "97 of 97 module tensors are bitwise the baseline's, by digest"),
        ({"tensors": 0, "not_in_full": 1}, "compiled, so without digests; 1 was not compared in full"),
    ],
)  # fmt: skip
def test_a_cell_says_how_many_bits_part_and_what_was_not_seen(told, said):
    assert sentence(hashed(**told)) == said


def test_whole_tensors_say_nothing_of_digests():
    assert sentence({"capture": {"level": "full", "hashes": None}}) == sentence({"capture": None}) == ""


def test_what_was_seen_as_digests_only_is_never_called_agreement():
    comparison = stated(document("comparison_same"), hashed())
    assert comparison_answer(comparison).word == "PARTLY"
    counts = comparison["counts"]
    assert counts["skipped"] == 12
    assert counts["total"] == sum(value for name, value in counts.items() if name != "total")
    assert "12 were not compared in full" in comparison["problems"][-1]["what"]
    assert stated(document("comparison_same"), hashed(not_in_full=0)) == document("comparison_same")


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


async def test_from_a_hashed_cell_the_way_leads_to_the_modules_seen_in_full() -> None:
    engine = ScriptedEngine(replay=matrix_with_digests())
    async with opened(A, engine=engine) as (app, pilot):
        await press(app, pilot, "m", "r", *"jjjjjj")
        assert "57 of 97 module tensors differ in their bits" in " ".join(screen(app).split())
        await press(app, pilot, "enter")
        params = engine.last("compare").params
        assert (params["a"], params["b"]) == ("/runs/cell1_window1", "/runs/cell6_window1")


def test_the_report_names_the_dumps_that_hold_the_same_modules():
    text = replay_report(matrix_with_digests())
    assert "cell 6: 57 of 97 module tensors differ in their bits" in text
    assert "hint: rldbg /runs/cell1_window1 /runs/cell6_window1" in text


NAMES = ("layers.0.q_proj.output", "layers.0.o_proj.output", "norm.output")


def replayed(job: Any) -> dict[str, Any]:
    """A cell whose capture does not fit: digests of three modules, and room for one module at a time."""
    plan = job.params["plan"]
    which = document("cell_packed" if plan["flags"]["packing"] else "cell_reference")
    if plan.get("capture"):
        return {**which, "dump": plan["out"], "capture": {"level": "full", "mib": 1.0}}
    word = "packed" if plan["flags"]["packing"] else "alone"
    hashes = [Hashed(name, f"{word}{name}", 2**20, 1.0, 0.0, 1.0) for name in NAMES]
    said = [{name: getattr(one, name) for name in Hashed.__slots__} for one in hashes]
    return {**which, "capture": {"level": "hash", "room_mib": 1.5, "mib": 0.1, "hashes": None}, "hashes": said}


def plans(engine: ScriptedEngine) -> list[dict[str, Any]]:
    return [job.params["plan"] for job in engine.jobs if job.kind == "replay_cell"]


async def test_a_replay_too_large_for_whole_tensors_is_looked_at_window_by_window() -> None:
    def comparison(_job: Any) -> dict[str, Any]:
        # Seen in full, the second module is the first that diverges.
        windows = sum(1 for plan in plans(engine) if plan.get("capture"))
        answer = document("comparison")
        answer["first_divergence"]["name"] = NAMES[1] if windows == 4 else NAMES[2]
        return answer

    engine = ScriptedEngine(replay_cell=replayed, compare=comparison)

    async with opened(A, engine=engine) as (app, pilot):
        await press(app, pilot, "p", "r")
        asked = plans(engine)
        patterns = [plan.get("capture") for plan in asked]
        assert patterns == [None, None, *[r"^(?:layers\.0\.q_proj)$"] * 2, *[r"^(?:layers\.0\.o_proj)$"] * 2]
        last = engine.last("compare").params
        assert (last["a"], last["b"]) == (asked[-2]["out"], asked[-1]["out"])
        state = app.session.state
        shown = state.cells[-1].document
        assert shown["capture"]["hashes"]["not_in_full"] == 1
        assert shown["dump"] == asked[-1]["out"]
        assert "hashes" not in shown
        assert state.plan is not None
        assert state.plan.get("capture") is None
        assert len(state.cells) == 2


async def test_another_tolerance_makes_nothing_seen_that_was_kept_as_digests() -> None:
    same = document("comparison_same")
    engine = ScriptedEngine(replay_cell=replayed, compare=same, rejudge=same)
    async with opened(A, engine=engine) as (app, pilot):
        await press(app, pilot, "p", "r")
        before = app.session.state.comparison["counts"]
        assert before["skipped"] > same["counts"].get("skipped", 0)
        await app.session.comparing.judge_by(Tolerance(atol=2.0))
        assert app.session.state.comparison is not same
        assert app.session.state.comparison["counts"] == before


async def test_a_reference_that_was_kept_whole_is_hashed_before_it_is_held_to_digests() -> None:
    def cell(job: Any) -> dict[str, Any]:
        plan = job.params["plan"]
        if not plan["flags"]["packing"] and "capture_level" not in plan:
            return {**document("cell_reference"), "capture": {"level": "full", "mib": 1.0}}
        return replayed(job)

    engine = ScriptedEngine(replay_cell=cell)

    async with opened(A, engine=engine) as (app, pilot):
        await press(app, pilot, "p", "r")
        assert [plan.get("capture_level") for plan in plans(engine)][:3] == [None, None, "hash"]
        assert app.session.state.cells[-1].document["capture"]["hashes"]["differ"] == 3


async def test_a_window_that_cannot_be_captured_leaves_what_is_known_on_the_screen() -> None:
    def cell(job: Any) -> Any:
        if job.params["plan"].get("capture"):
            return RequestError("capturing these modules takes more room than there is")
        return replayed(job)

    engine = ScriptedEngine(replay_cell=cell)

    async with opened(A, engine=engine) as (app, pilot):
        await press(app, pilot, "p", "r")
        assert any("not compared in full from layers.0.q_proj.output on" in toast for toast in toasts(app))
        assert "DIFF  first at" in screen(app)
        assert app.session.state.cells[-1].document["capture"]["hashes"]["not_in_full"] == 3
