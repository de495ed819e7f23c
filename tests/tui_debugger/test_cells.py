"""A cell captured as digests first: what it says, and which dump of the baseline it is held to."""

from __future__ import annotations

from typing import Any

import pytest

from replay_core.export.outcome import exit_code
from tests.tui_debugger.driving import A, opened, press, screen
from tests.tui_debugger.scripted import ScriptedEngine, document, replayed
from tui_debugger.cells import dump_beside, held_to_baseline, label, sentence, stated
from tui_debugger.format import comparison_answer
from tui_debugger.panes.log import LogPane
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
    baseline: Any = {"part": "reference", "dump": "/runs/cell1", "capture": None}
    assert dump_beside(baseline, hashed()) == "/runs/cell1_window1"
    assert dump_beside(baseline, hashed(baseline_dump=None)) == "/runs/cell1"
    assert dump_beside(hashed(), baseline) == "/runs/cell6_window1"
    plain: Any = {"part": "cell", "dump": "/runs/cell2", "capture": None}
    assert dump_beside(plain, hashed()) == "/runs/cell2"


def matrix_with_digests() -> dict[str, Any]:
    answer = document("matrix")
    answer["cells"][6] |= {name: value for name, value in hashed().items() if name != "part"}
    return answer


@pytest.mark.long
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


def hashed_replay() -> dict[str, Any]:
    """A replay whose cell was captured as digests, and in full from the first differing module on."""
    answer = replayed({"packing": True})
    answer["cells"][-1]["capture"] = {"level": "hash", "hashes": TOLD}
    return answer


@pytest.mark.long
async def test_a_replay_kept_as_digests_is_listed_from_the_modules_seen_in_full() -> None:
    engine = ScriptedEngine(replay=hashed_replay())
    async with opened(A, engine=engine) as (app, pilot):
        await press(app, pilot, "p", "r")
        params = engine.last("compare").params
        assert (params["a"], params["b"]) == ("/runs/cell1_window1", "/runs/demo/packed")
        assert "57 of 97 module tensors differ in their bits" in "\n".join(app.debugger.query_one(LogPane).kept)
        assert engine.kinds().count("replay") == 1, "windows are the replay's own affair"


@pytest.mark.long
async def test_another_tolerance_makes_nothing_seen_that_was_kept_as_digests() -> None:
    same = document("comparison_same")
    engine = ScriptedEngine(replay=hashed_replay(), compare=same, rejudge=same)
    async with opened(A, engine=engine) as (app, pilot):
        await press(app, pilot, "p", "r")
        assert app.session.state.tensors.comparison is not None
        before = app.session.state.tensors.comparison["counts"]
        assert before["skipped"] == same["counts"].get("skipped", 0) + TOLD["not_in_full"]
        await app.session.comparing.judge_by(Tolerance(atol=2.0))
        assert app.session.state.tensors.comparison is not None
        assert app.session.state.tensors.comparison is not same
        assert app.session.state.tensors.comparison["counts"] == before


def test_gradients_that_are_not_the_recorded_ones_stand_in_the_answer_with_the_exit_code():
    answer = replayed({})
    said = "54 of 54 tensors (0 losses, 54 gradients) differ, first divergence grad.norm.weight: relative L2 0.07"
    for cell in answer["cells"]:
        cell["recorded_training"] = {"agrees": False, "sentence": said}
    assert exit_code(answer) == 1
    assert replay_report(answer).startswith(f"RECORDING  what was trained is not what each row alone gives: {said}")
    for cell in answer["cells"]:
        cell["recorded_training"]["agrees"] = True
    assert "RECORDING" not in replay_report(answer)


def test_the_cell_that_is_shown_is_the_one_that_was_asked_for():
    document = replayed({"packing": True})
    baseline, cell = held_to_baseline(document)
    assert (baseline["part"], cell["part"]) == ("reference", "cell")
    document["cells"] = document["cells"][:2]
    assert held_to_baseline(document)[1]["part"] == "control", (
        "each row alone was asked for: the padded batch beside it"
    )


def test_labels_name_the_part_where_it_is_no_setting():
    assert label({"part": "recording"}) == "the recording"
    assert label({"part": "reference", "flags": {"rows_per_forward": 1}}) == "reference: rows alone, sdpa, float32"
    assert label({"part": "cell", "flags": {"warp": 9}}) == "warp=9", "flags of another rldbg"
