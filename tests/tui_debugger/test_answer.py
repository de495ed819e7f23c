"""The one answer of several steps: never better than the worst of them."""

from __future__ import annotations

import pytest

from replay_core.jobs import Job
from tests.tui_debugger.driving import A, B, opened, press, screen
from tests.tui_debugger.scripted import ScriptedEngine, document


@pytest.mark.long
async def test_steps_that_were_only_partly_compared_are_not_counted_as_agreeing() -> None:
    same = document("comparison_same")
    partly = {**same, "counts": {**same["counts"], "MISSING": 2, "total": same["counts"]["total"] + 2}}

    engine = ScriptedEngine(compare=lambda job: partly if job.params["step"] in (1, 2) else same)
    async with opened(A, B, engine=engine) as (app, _):
        assert app.session.state.opened.steps.verdicts == {0: "SAME", 1: "PARTLY", 2: "PARTLY", 3: "SAME"}
        lines = screen(app).splitlines()
        assert "PARTLY  no divergence, but not everything was compared" in lines[1]
        assert "4 steps compared: none diverges, but 2 only partly compared" in lines[1] + lines[2]


async def test_the_answer_of_all_steps_is_never_better_than_the_worst_of_them() -> None:
    same = document("comparison_same")
    counts = {**same["counts"], "SAME": same["counts"]["SAME"] - 1, "CLOSE": same["counts"].get("CLOSE", 0) + 1}

    close = {**same, "counts": counts}
    engine = ScriptedEngine(compare=lambda job: close if job.params["step"] == 1 else same)
    async with opened(A, B, engine=engine) as (app, _):
        assert "CLOSE  everything SAME or CLOSE" in screen(app).splitlines()[1]
        assert "4 steps compared: none diverges" in screen(app)


@pytest.mark.long
async def test_a_step_that_agrees_does_not_hide_one_that_diverged() -> None:
    def answer(job: Job) -> dict[str, object]:
        return document("comparison" if job.params["step"] == 0 else "comparison_same")

    async with opened(A, B, engine=ScriptedEngine(compare=answer)) as (app, pilot):
        await press(app, pilot, "1", "G", "enter")
        assert app.session.state.opened.steps.verdicts == {0: "DIFF", 1: "SAME", 2: "SAME", 3: "SAME"}
        top = "\n".join(screen(app).splitlines()[:3])
        assert "none diverges" not in top
        assert "step 3: everything" in top
        assert "but step 0 diverges" in top


@pytest.mark.long
async def test_a_micro_batch_that_agrees_does_not_make_its_step_agree() -> None:
    def answer(job: Job) -> dict[str, object]:
        return document("comparison" if job.params["micro"] is None else "comparison_same")

    async with opened(A, B, engine=ScriptedEngine(compare=answer)) as (app, pilot):
        await press(app, pilot, "1", "j", "enter")
        assert app.session.state.opened.scope.micro is not None
        assert app.session.state.opened.steps.verdicts[0] == "DIFF"
        assert "step 0  DIFF 23" in screen(app)


@pytest.mark.long
async def test_keys_that_need_a_dump_leave_the_first_screen_and_its_answer_as_they_are() -> None:
    engine = ScriptedEngine()
    async with opened(engine=engine, size=(80, 24)) as (app, pilot):
        for key in ("r", "c", "at", "R", "E", "equals_sign", "right_square_bracket"):
            await press(app, pilot, key)
            assert len(app.screen_stack) == 1, f"{key} asks for something that nothing can be done with"
            assert "RLDBG  no dump is open" in screen(app).splitlines()[1]
        await press(app, pilot, "m", "r")
        assert "no dump is open: esc, then o opens one" in screen(app).splitlines()[1]
        assert engine.jobs == []


async def test_what_was_met_while_reading_comes_before_no_warning_and_no_error() -> None:
    problems = [{"where": "/runs/demo/alone", "what": "holds 2 runs that repeat each other's steps: open one of them"}]

    answer = {**document("run_a"), "problems": problems}
    async with opened(A, engine=ScriptedEngine(open=answer), size=(80, 24)) as (app, _):
        first, *rest = screen(app).splitlines()[1:4]
    assert "WARN  holds 2 runs that repeat each other's steps: open one of them" in first
    assert "no warning" not in first
    assert rest[0].endswith("· nothing compared"), "a line that just fits is not cut"
    assert rest[1].endswith("yet: c another dump, r a replay, m all flags")
