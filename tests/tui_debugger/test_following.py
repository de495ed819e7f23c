"""A run is followed on the screen while another process writes it: steps appear, marks follow, the cursor stays."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from replay_core import workbench
from replay_core.jobs import Job
from tests.builders import write_dump
from tests.tui_debugger.driving import screen, until
from tui_debugger.app import RldbgApp
from tui_debugger.live import LiveRun
from tui_debugger.opening import begun

#: Writes a step whenever a line comes on its standard input; `bad` is a step of equal rewards.
WRITER = """
import sys, torch
from replay_core.recorder import Recorder
recorder = Recorder(sys.argv[1])
for step, line in enumerate(sys.stdin):
    rewards = torch.ones(16) if "bad" in line else (torch.arange(16.0) + step) % 3
    groups = torch.arange(16) // 4
    mean = rewards.view(4, 4).mean(1).repeat_interleave(4)
    std = rewards.view(4, 4).std(1).repeat_interleave(4)
    advantages = ((rewards - mean) / (std + 1e-6))[:, None].expand(16, 5).contiguous()
    # Four tokens of prompt, two to five of response.
    held = (torch.arange(9)[None, :] < 6 + torch.arange(16)[:, None] % 4).long()
    response = held * (torch.arange(9) >= 4)
    with recorder.step(step) as record:
        record("trajectory", input_ids=(torch.arange(144).view(16, 9) + step) % 50 * held, attention_mask=held,
               response_mask=response, rewards=rewards, group_ids=groups, advantages=advantages * response[:, 4:])
    print(step, flush=True)
"""


class Writer:
    def __init__(self, dump: Path) -> None:
        command = [sys.executable, "-c", WRITER, str(dump)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def step(self, word: str = "good") -> int:
        """Have one more step written, and wait until it is."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    (tmp_path / "run").mkdir()
    writer = Writer(tmp_path / "run")
    yield writer
    writer.close()


@contextlib.asynccontextmanager
async def followed(run: Path) -> Any:
    app = RldbgApp(run, follow=True, listed=begun(run))
    async with app.run_test(size=(160, 48)) as pilot:
        yield app, pilot


@pytest.mark.long
async def test_a_run_is_followed_from_its_first_step_on(
    tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begun on an empty folder; a step that goes wrong gets its mark; who stands elsewhere is not moved."""
    # A machine that is busy would look at the new step alone, where one step of three weighs more.
    monkeypatch.setattr("tui_debugger.flows.following.SHORT_S", float("inf"))
    run = tmp_path / "run"

    async with followed(run) as (app, pilot):
        state = app.session.state
        await until(pilot, lambda: "nothing is written yet" in screen(app), "waiting")
        writer.step()
        await until(pilot, lambda: "▸ step 0" in screen(app) or "  step 0" in screen(app), "the first step")
        await until(pilot, lambda: "last step 0" in screen(app), "the header")
        writer.step()
        await until(pilot, lambda: "step 1" in screen(app), "the second step")
        await until(pilot, lambda: state.opened.scope.step == 1, "the cursor on the newest step")
        await until(pilot, lambda: state.opened.health.at_steps().get(1) == ("", 0), "a clean mark")

        await pilot.press("1", "g")
        await until(pilot, lambda: state.opened.scope.step == 0, "the first step again")
        # One step of three is worth knowing, as it is chance; two of four are no step of this run's.
        writer.step("bad")
        writer.step("bad")
        await until(pilot, lambda: state.opened.health.at_steps().get(2, ("", 0))[0] == "error", "the mark of step 2")
        await until(pilot, lambda: "step 2  ✗E" in screen(app), "the mark on the screen")
        assert state.opened.scope.step == 0
        assert "D01" in screen(app)
        steps = [record["key"]["step"] for record in state.opened.a["records"]]
        assert steps == [0, 1, 2, 3]
        await pilot.press("F")
        await until(pilot, lambda: state.opened.live_run is None, "the end of following")


@pytest.mark.long
async def test_a_run_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    run = tmp_path / "later" / "run"
    async with followed(run) as (app, pilot):
        await until(pilot, lambda: "nothing is written yet" in screen(app), "waiting")
        write_dump(run, {"loss": {"loss": 1.0}})
        await until(pilot, lambda: "last step 0" in screen(app), "the header")


def test_the_header_says_when_nothing_is_written_any_more() -> None:
    assert str(LiveRun(12, 3.4, 10.0)) == "following · last step 12 · 3 s ago"
    assert str(LiveRun(12, 49.0, 10.0)) == "following · last step 12 · 49 s ago"
    assert str(LiveRun(12, 300.0, 10.0)) == "stopped? · last step 12 · nothing written for 5 min"
    assert str(LiveRun(12, 31.0, None)) == "stopped? · last step 12 · nothing written for 31 s"
    # A step that takes ten minutes is not late after five.
    assert not LiveRun(12, 300.0, 600.0).is_silent


@pytest.mark.long
def test_following_sends_what_has_come_and_nothing_twice(tmp_path: Path, writer: Writer) -> None:
    from replay_core.desk import perform

    run = tmp_path / "run"
    writer.step()
    first = perform(Job("follow", {"path": str(run), "have": -1}))
    assert first["whole"]
    assert [record["key"]["step"] for record in first["run"]["records"]] == [0]
    assert perform(Job("follow", {"path": str(run), "have": 1}))["run"] is None
    writer.step()
    writer.step()
    more = perform(Job("follow", {"path": str(run), "have": 1}))
    assert not more["whole"]
    assert [record["key"]["step"] for record in more["run"]["records"]] == [1, 2]
    assert (more["total"], more["last_step"]) == (3, 2)
    assert more["silent_s"] < 30
    # Who holds another number of records than were sent has missed some: all of them come again.
    again = perform(Job("follow", {"path": str(run), "have": 2}))
    assert again["whole"]
    assert len(again["run"]["records"]) == 3
    assert workbench.open_dump(run)["records"] == again["run"]["records"]
