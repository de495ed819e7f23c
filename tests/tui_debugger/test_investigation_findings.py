"""From a fault to the tensor that shows it, and from a log to its line, by keys alone in a real tmux."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fixtures import FIXTURES
from tests.tui_debugger.in_tmux import Tmux, needs_tmux

pytestmark = [pytest.mark.slow, needs_tmux]
SIZES = [(80, 24), (160, 48)]
either = pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")


@pytest.fixture(scope="module")
def shifted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a policy leaves that was really trained with log-probabilities one token off."""
    folder = tmp_path_factory.mktemp("shifted")
    command = [sys.executable, "-m", "tui_debugger", "demo", "--fault", "logprob-shift", "--json", "--dir", str(folder)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 1, answer.stderr
    return folder / "run"


@pytest.fixture
def tmux() -> Iterator[Callable[..., Tmux]]:
    started: list[Tmux] = []
    with tempfile.TemporaryDirectory(prefix="rf") as folder:

        def start(size: tuple[int, int]) -> Tmux:
            started.append(Tmux(Path(folder), size))
            return started[-1]

        yield start
        for session in started:
            session.close()


@either
def test_a_faulty_run_says_its_fault_first_and_enter_goes_to_the_tensor(
    tmux: Callable[..., Tmux], shifted: Path, size: tuple[int, int]
) -> None:
    pane = tmux(size)
    pane.start(str(shifted))
    shown = pane.wait_for("ERROR  D08", timeout=60)
    assert "D08" in shown.splitlines()[1]
    pane.keys("1")
    pane.wait_for("step 0  ✗E")
    pane.keys("7")
    pane.wait_for("› ERROR D08", "rules skipped")
    pane.keys("Enter")
    pane.wait_for("rollout_log", "shape 128")
    pane.keys("7", "f")
    pane.wait_for("Likely cause", "Next step", "rldbg show")
    pane.keys("Escape", "C")
    pane.wait_for("first → last", "step  0")
    pane.keys("Escape", "q")
    pane.wait_for("EXIT 0")


@either
def test_a_log_opens_on_its_finding_and_its_trends_and_leads_to_the_line(
    tmux: Callable[..., Tmux], size: tuple[int, int]
) -> None:
    pane = tmux(size)
    pane.start(str(FIXTURES / "grpo_notes" / "train_1da2900_normal.log"))
    shown = pane.wait_for("ERROR  D07", "num_masked", "pg_loss", "step  0", timeout=60)
    assert "D07" in shown.splitlines()[1]
    pane.keys("f")
    pane.wait_for("Likely cause", "num_masked", "line 4")
    pane.keys("Enter")
    pane.wait_for("4  ", "All sequence_log_probs are near zero")
    pane.keys("Escape", "Escape", "q")
    pane.wait_for("EXIT 0")
