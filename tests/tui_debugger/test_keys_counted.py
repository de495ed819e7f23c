"""How many keys lie between what a person opens and its answer, in a real tmux: compare 0, replay 2, matrix 2, log 0,
parity 0."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fixtures import FIXTURES
from tests.tui_debugger.in_tmux import Tmux, needs_tmux

SIZES = [(80, 24), (160, 48)]
#: What starting takes on a box that others use too, and what a first replay does: bounds, not pauses.
_OPEN_S, _REPLAY_S, _MATRIX_S = 120, 300, 1500

pytestmark = [pytest.mark.slow, needs_tmux]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "tui_debugger", "demo", "--json", "--dir", str(folder)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1
    return folder


@pytest.fixture(params=SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def start(request: pytest.FixtureRequest) -> Iterator[Callable[..., Tmux]]:
    """Opens rldbg with arguments; nothing else is pressed."""
    started: list[Tmux] = []
    with tempfile.TemporaryDirectory(prefix="rt") as folder:

        def start(*arguments: object) -> Tmux:
            started.append(Tmux(Path(folder), request.param))
            started[-1].start(*map(str, arguments))
            return started[-1]

        yield start
        for session in started:
            session.close()


def test_a_pair_of_dumps_opens_on_where_they_part_with_both_values_and_the_origin(
    start: Callable[..., Tmux], demo: Path
) -> None:
    pane = start(demo / "replay/cell0", demo / "replay/cell2")
    shown = pane.wait_for(
        "first at layers.0.self_attn.o_proj.inputs.0", "a=", "b=", "origin layers.0.self_attn", timeout=_OPEN_S
    )
    assert "DIFF" in shown.splitlines()[1]


def test_a_log_opens_on_what_is_wrong_with_it(start: Callable[..., Tmux]) -> None:
    pane = start(FIXTURES / "grpo_notes/train_1da2900_normal.log")
    shown = pane.wait_for("ERROR", "D07", "cause:", timeout=_OPEN_S)
    assert "ERROR" in shown.splitlines()[1]


def test_two_recorded_critics_open_on_whether_they_agree_and_why(start: Callable[..., Tmux]) -> None:
    pane = start("parity", "--recorded", FIXTURES / "roll_critic/fp32_sharedhead")
    shown = pane.wait_for("AGREES", "cause:", timeout=_OPEN_S)
    assert "AGREES" in shown.splitlines()[1]


def test_a_replay_under_another_setting_takes_the_flag_and_r(start: Callable[..., Tmux], demo: Path) -> None:
    pane = start(demo / "run")
    pane.wait_for("Tensors · of step 0", timeout=_OPEN_S)
    pane.keys("p", "r")
    pane.wait_for("A rows alone ↔ B packed", "everything SAME or CLOSE", timeout=_REPLAY_S)


def test_which_of_all_settings_breaks_agreement_takes_m_and_r(start: Callable[..., Tmux], demo: Path) -> None:
    pane = start(demo / "run")
    pane.wait_for("Tensors · of step 0", timeout=_OPEN_S)
    pane.keys("m", "r")
    shown = pane.wait_for("agree", "of 8 cells", "BASELINE", "recorded", timeout=_MATRIX_S)
    assert re.match(r"▌  (AGREES|DIFFERS|FAILED)  \d agree", shown.splitlines()[1]), shown
    assert len(re.findall(r"^[ ›+]+\d+ (ran|unavailable|failed) ", shown, re.MULTILINE)) >= 8, shown
