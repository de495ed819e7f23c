"""From a finding to what it rests on: the tensor, the line of the log, the evidence, the next step done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tui_debugger.driving import A, opened, press, screen, toasts
from tests.tui_debugger.scripted import ScriptedEngine, document
from tui_debugger.panes.steps import StepsPane
from tui_debugger.screens.examining import can_do, flags_of, parsed
from tui_debugger.screens.logview import _around


def shifted(**changes: Any) -> dict[str, Any]:
    doc = document("diagnosis_shifted")
    doc["findings"][0] |= changes
    return doc


def at(**place: Any) -> dict[str, Any]:
    nowhere = dict.fromkeys(("step", "micro", "rank", "role", "stage", "tensor", "sample", "position", "line", "path"))
    return {**nowhere, **place}


async def test_enter_on_a_finding_inspects_its_tensor_at_its_token() -> None:
    where = at(step=1, micro=1, rank=0, tensor="old_logprobs", sample=1, position=3)
    engine = ScriptedEngine(diagnose=shifted(where=where))
    async with opened(A, engine=engine) as (app, pilot):
        await press(app, pilot, "7", "enter")
        state = app.session.state
        assert (state.opened.scope.step, state.opened.scope.micro) == (1, 1)
        assert state.tensors.row is not None
        assert state.tensors.row.name == "old_logprobs"
        asked = [job.params for job in engine.jobs if job.kind == "inspect"][-1]
        assert (asked["a"]["name"], asked["token"]) == ("old_logprobs", [1, 3])
        assert app.debugger.panes.active == "inspect"


@pytest.mark.long
async def test_a_finding_that_points_nowhere_shows_its_evidence_instead() -> None:
    engine = ScriptedEngine(diagnose=shifted(where=at(), steps=[]))
    async with opened(A, engine=engine) as (app, pilot):
        await press(app, pilot, "7", "enter")
        assert "Likely cause" in screen(app)


async def test_enter_on_a_finding_of_a_log_opens_the_log_at_its_line(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("".join(f"line {number} says nothing\n" for number in range(1, 9_001)))

    engine = ScriptedEngine(diagnose=shifted(where=at(line=7_000, path=str(log))))
    async with opened(A, engine=engine) as (app, pilot):
        await press(app, pilot, "7", "enter")
        assert "7000  line 7000 says nothing" in screen(app)


def test_a_line_of_a_log_is_shown_with_what_is_around_it(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("\n".join(f"line {number}" for number in range(1, 10_001)))
    for line in (1, 2, 1_999, 2_001, 2_002, 5_000, 10_000):
        shown, here = _around(log, line)
        assert here is not None
        assert shown[here].split() == [str(line), "line", str(line)]
    shown, here = _around(log, 10_001)
    assert here is None
    assert "the file has 10,000 lines now, not 10,001" in shown[-1]
    assert _around(tmp_path / "gone.log", 3)[1] is None


@pytest.mark.long
async def test_the_evidence_screen_copies_the_next_step_and_explains_the_rule() -> None:
    engine = ScriptedEngine(diagnose=document("diagnosis_shifted"))
    async with opened(A, engine=engine) as (app, pilot):
        await press(app, pilot, "f")
        assert "correlation at lag +1" in screen(app)
        await press(app, pilot, "y")
        assert app.clipboard.startswith("rldbg show /runs/demo/alone")
        await press(app, pilot, "x")
        assert "D08 looks at log-probabilities." in screen(app)
        await press(app, pilot, "r")
        assert any("cannot do this step" in toast for toast in toasts(app))


async def test_a_next_step_that_replays_is_done_on_the_screen() -> None:
    command = "rldbg replay /runs/demo/alone --step 0 --rank 0 --micro 1 --rows-per-forward 1 --temperature 0.61"
    engine = ScriptedEngine(diagnose=shifted(next_step=command))
    async with opened(A, engine=engine) as (app, pilot):
        await press(app, pilot, "f", "r")
        plans = [job.params["plan"] for job in engine.jobs if job.kind == "replay"]
        assert plans
        assert {(plan["micro"], plan["temperature"]) for plan in plans} == {(1, 0.61)}
        assert plans[-1]["flags"]["rows_per_forward"] == 1


@pytest.mark.parametrize(
    ("command", "can"),
    [
        ("rldbg replay RUN --micro 1 --model HF_DIR --packing", True),
        ("rldbg compare A B", True),
        ("rldbg compare A", False),
        ("rldbg replay RUN --model POLICY --model REFERENCE --against ref_logprobs", False),
        ("rldbg show RUN tensor --slice 0:1   # then look", False),
        ("print logits.shape beside mask.shape", False),
        ("rldbg replay 'unclosed", False),
        ("", False),
    ],
)
def test_what_the_screen_can_do_itself(command: str, can: bool) -> None:
    assert can_do(command) is can


def test_a_command_is_read_as_the_shell_reads_it() -> None:
    assert parsed("rldbg replay '/a b/run' --micro 1 --packing --logits chunked  # why") == (
        "replay", ["/a b/run"], {"micro": "1", "packing": "", "logits": "chunked"},
    )  # fmt: skip
    assert flags_of({"packing": "", "logits": "chunked", "rows-per-forward": "1"}) == {
        "packing": True, "logits": "chunked", "rows_per_forward": 1,
    }  # fmt: skip


async def test_a_diagnosis_that_fails_is_said_and_can_be_begun_again() -> None:
    from replay_core.errors import DumpError

    engine = ScriptedEngine(diagnose=DumpError("the index cannot be read", file="/runs/demo/alone"))
    async with opened(A, engine=engine) as (app, pilot):
        await press(app, pilot, "7")
        assert "not diagnosed: the index cannot be read" in screen(app)
        assert "CLEAN" not in screen(app)
        del engine.answers["diagnose"]
        await press(app, pilot, "E")
        assert "✓ CLEAN no warning and no error in 33 rules" in screen(app)


@pytest.mark.long
async def test_enter_on_a_value_that_stands_out_goes_to_its_step() -> None:
    doc = document("diagnosis")
    one = doc["series"][0]
    one |= {"steps": [0, 1, 2], "values": [0.1, 0.1, 9.0], "marks": [2]}
    async with opened(A, engine=ScriptedEngine(diagnose=doc)) as (app, pilot):
        await press(app, pilot, "C")
        assert "stands out at step 2" in screen(app)
        await press(app, pilot, "enter")
        assert app.screen is app.debugger
        assert app.session.state.opened.scope.step == 2


async def test_arrows_walk_along_the_steps_of_a_trend() -> None:
    async with opened(A, engine=ScriptedEngine(diagnose=document("diagnosis_shifted"))) as (app, pilot):
        await press(app, pilot, "C", "left", "left", "right", "h")
        assert "· step 9 = " in screen(app)


@pytest.mark.long
async def test_beside_a_replay_no_step_has_the_mark_of_a_clean_recording_and_nothing_is_called_clean() -> None:
    async with opened(A) as (app, pilot):
        steps = app.debugger.query_one(StepsPane)
        assert any("✓" in steps.line(row, 40).plain for row in range(steps.count)), "a recording by itself has them"
        await press(app, pilot, "r")
        assert not any("✓" in steps.line(row, 40).plain for row in range(steps.count))
        assert "CLEAN" not in screen(app)
        assert "the recording by itself: no warning and no error in 33 rules" in screen(app)
        await press(app, pilot, "v")
        assert "✓ CLEAN no warning" in screen(app), "a record's own tensors are no comparison"
