"""The flows of a session by themselves: jobs go out, answers change the state, and no screen is there to draw them."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from replay_core.errors import DumpError, JobCancelledError
from replay_core.jobs import Progress
from tests.tui_debugger.driving import A, B
from tests.tui_debugger.scripted import ScriptedEngine, document
from tui_debugger.flows.latest import Latest
from tui_debugger.session import Session
from tui_debugger.state import Part, Scope, State
from tui_debugger.tolerance import Tolerance

FIRST = "layers.0.self_attn.o_proj.inputs.0"


class Heard:
    """A session on a scripted engine, and what it told the screen that is not there."""

    def __init__(self, **answers: Any) -> None:
        self.engine = ScriptedEngine(**answers)
        self.changed: set[Part] = set()
        self.told: list[tuple[str, str]] = []
        self.log: list[str] = []
        self.session = Session(
            self.engine,
            State(),
            lambda *parts: self.changed.update(parts),
            lambda text, severity: self.told.append((severity, text)),
            self.log.append,
        )
        self.state = self.session.state


async def test_opening_a_dump_shows_its_first_record_and_inspects_a_tensor() -> None:
    heard = Heard()
    await heard.session.opening.open(A, None)
    assert heard.engine.kinds()[:3] == ["open", "record", "inspect"]
    assert heard.state.tensors.shows_record
    assert heard.state.inspection.document is not None
    assert heard.changed >= {Part.START, Part.RUNS, Part.TENSORS, Part.INSPECT}


async def test_opening_a_pair_stops_at_the_first_step_that_diverges_and_selects_its_first_divergence() -> None:
    heard = Heard()
    await heard.session.opening.open(A, B)
    assert heard.state.opened.steps.verdicts == {heard.state.opened.scope.step: "DIFF"}
    assert heard.state.tensors.row is not None
    assert heard.state.tensors.row.is_first
    assert heard.state.job.busy is None


async def test_a_path_that_is_no_dump_leaves_what_is_open_as_it_is() -> None:
    heard = Heard()
    await heard.session.opening.open(A, None)
    before = heard.state.opened.a
    await heard.session.opening.open_another(A.parent / "nothing")
    assert heard.state.opened.a is before
    assert heard.state.job.trouble is None
    assert [severity for severity, _ in heard.told] == ["error"]


async def test_an_error_is_shown_and_the_session_goes_on() -> None:
    heard = Heard(compare=DumpError("the file ends early", file="/runs/x.pt"))
    await heard.session.opening.open(A, B)
    assert heard.state.job.trouble == "the file ends early: /runs/x.pt"
    assert heard.state.tensors.comparison is None
    heard.engine.answers.clear()
    await heard.session.comparing.compare(Scope(0))
    assert heard.state.job.trouble is None
    assert heard.state.tensors.comparison is not None


async def test_judging_by_another_tolerance_reads_nothing_and_keeps_the_row() -> None:
    heard = Heard()
    await heard.session.opening.open(A, B)
    row, jobs = heard.state.tensors.selected, len(heard.engine.jobs)
    await heard.session.comparing.judge_by(Tolerance(atol=2.0))
    assert heard.engine.kinds()[jobs] == "rejudge"
    assert "compare" not in heard.engine.kinds()[jobs:]
    assert heard.state.tolerance == Tolerance(atol=2.0)
    assert heard.state.tensors.selected == row


async def test_a_tolerance_that_cannot_be_judged_by_leaves_the_former_in_force() -> None:
    heard = Heard()
    await heard.session.opening.open(A, B)
    heard.engine.answers["rejudge"] = JobCancelledError("cancelled")
    await heard.session.comparing.judge_by(Tolerance(atol=2.0))
    assert heard.state.tolerance.is_table
    assert heard.session.comparing.judging_by is None


async def test_a_finding_leads_to_the_record_that_contradicts_nothing_it_says() -> None:
    heard = Heard()
    await heard.session.opening.open(A, None)
    records = document("run_a")["records"]
    wanted = next(i for i, record in enumerate(records) if record["key"]["step"] == records[-1]["key"]["step"])
    assert heard.session.looking.record_at({"step": records[-1]["key"]["step"]}) == wanted
    assert heard.session.looking.record_at({"step": 10**6}) is None


async def test_a_diagnosis_that_is_cancelled_says_so_and_keeps_what_was_known() -> None:
    heard = Heard()
    await heard.session.opening.open(A, None)
    await heard.session.diagnosing.diagnose()
    known = heard.state.opened.health.document
    assert known is not None
    heard.engine.answers["diagnose"] = JobCancelledError("cancelled")
    await heard.session.diagnosing.diagnose()
    assert heard.state.opened.health.document is known
    assert heard.state.opened.health.trouble == "cancelled, E begins again"
    assert not heard.state.opened.health.doing


async def test_values_that_two_critics_recorded_become_the_parity_that_is_shown() -> None:
    heard = Heard()
    await heard.session.parities.run({"recorded": True, "a": str(A), "b": str(B)})
    assert heard.engine.kinds() == ["recorded_parity"]
    assert heard.state.parity.document == document("parity")
    assert not heard.state.parity.runs


async def test_a_second_job_leaves_the_progress_of_the_first_on_the_screen() -> None:
    heard = Heard()
    heard.engine.gate = asyncio.Event()
    first = asyncio.create_task(heard.session.parities.run({"recorded": True, "a": str(A), "b": str(B)}))
    while heard.state.job.busy is None or not heard.state.job.busy.far:
        await asyncio.sleep(0)
    busy = heard.state.job.busy
    await heard.session.opening.open(A, None)
    assert heard.state.job.busy is busy
    assert str(busy) == "reading values: 1 of 3 batches"
    heard.engine.gate.set()
    await first
    assert heard.state.job.busy is None


async def test_progress_of_nothing_that_runs_is_let_go() -> None:
    heard = Heard()
    heard.session.errands.take(Progress(1, 2, "tensors"))
    assert heard.state.job.busy is None
    assert Part.ANSWER not in heard.changed


async def test_of_looks_asked_for_while_one_runs_only_the_latest_is_done() -> None:
    latest, gate, done = Latest(), asyncio.Event(), list[int]()

    async def look(number: int) -> None:
        await gate.wait()
        done.append(number)

    first = asyncio.create_task(latest.do(lambda: look(0)))
    await asyncio.sleep(0)
    for number in (1, 2, 3):
        await latest.do(partial(look, number))
    assert latest.is_superseded
    gate.set()
    await first
    assert done == [0, 3]


@pytest.mark.parametrize("flow", ["comparing", "replaying"])
async def test_a_flow_that_needs_an_open_dump_says_so(flow: str) -> None:
    heard = Heard()
    await (heard.session.comparing.compare_with(B) if flow == "comparing" else heard.session.replaying.replay())
    assert not heard.engine.jobs
    assert heard.told == [("warning", heard.told[0][1])]
    assert "no dump is open" in heard.told[0][1]
