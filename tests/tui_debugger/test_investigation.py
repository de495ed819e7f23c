"""A whole investigation by keys alone, on a really trained policy and really run replays, in a real tmux."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tui_debugger.in_tmux import Tmux, needs_tmux

SIZES = [(80, 24), (160, 48)]
#: What replays may take on a box that others use too: a bound, not a pause.
_REPLAY_S = 240

pytestmark = [pytest.mark.slow, needs_tmux]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The demo's two dumps: each row alone, and packed without the mask between samples."""
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "tui_debugger", "demo", "--json", "--dir", str(folder)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 1, answer.stderr
    cells = json.loads(answer.stdout)["cells"]
    return Path(cells[0]["dump"]), Path(cells[-1]["dump"])


@pytest.fixture
def tmux() -> Iterator[Callable[..., Tmux]]:
    started: list[Tmux] = []
    with tempfile.TemporaryDirectory(prefix="rt") as folder:

        def start(size: tuple[int, int], **environment: str) -> Tmux:
            started.append(Tmux(Path(folder), size, **environment))
            return started[-1]

        yield start
        for session in started:
            session.close()


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_from_the_pair_to_the_reopened_snapshot(
    tmux: Callable[..., Tmux], pair: tuple[Path, Path], size: tuple[int, int], tmp_path: Path
) -> None:
    pane = tmux(size)
    pane.start(*map(str, pair), cwd=tmp_path)
    first = "layers.0.self_attn.o_proj.inputs.0"
    shown = pane.wait_for("DIFF  first at", first, "sample 1 position 0")
    assert "DIFF" in shown.splitlines()[1]
    pane.keys("Enter")
    pane.wait_for("relative L2", "origin layers.0.self_attn", "where")
    pane.keys("@")
    pane.wait_for("Values from index")
    pane.type("0,3,5")
    pane.keys("Enter")
    pane.wait_for("0,3,0")
    pane.keys("2", "]", "]")
    pane.wait_for("› DIFF")
    pane.keys("d", "5")
    pane.wait_for("a attention     sdpa")
    pane.keys("a")
    pane.wait_for("sdpa-math")
    pane.keys("r")
    # The replay of padded rows agrees with each row alone, whatever the kernel. A narrow title cuts the sides' names,
    # and has the flags to itself.
    told = ("A rows alone, sdpa ↔ B padded, sdpa-math",) if size[0] > 100 else ("A rows", "ran math")
    pane.wait_for("everything SAME or CLOSE", *told, timeout=_REPLAY_S)
    pane.keys("m")
    pane.wait_for("No cell has run")
    pane.keys("a")
    pane.wait_for("Axes of the matrix")
    pane.keys("C-u")
    pane.type("packing=off,on block_mask=on,off")
    pane.keys("Enter", "r")
    pane.wait_for("of 4 cells", "breaks agreement: packing=on block_mask=off", timeout=2 * _REPLAY_S)
    pane.keys("G")
    pane.wait_for("other_samples: samples 1..")
    pane.keys("Enter")
    pane.wait_for("DIFF  first at", first, " of ", "in order of computation")  # judged to its end, not only found
    pane.keys("7")
    pane.wait_for("7 Findings")
    pane.keys("e", "Enter")
    pane.wait_for("wrote")
    assert list(tmp_path.glob("rldbg-diagnosis-*.json"))
    pane.keys("2", "e", "Enter")
    pane.wait_for("rldbg-comparison-")
    pane.keys("q")
    pane.wait_for("EXIT 0")
    (written,) = tmp_path.glob("rldbg-comparison-*.json")
    assert list(tmp_path.glob("rldbg-replay-*.json"))
    pane.close()

    again = tmux(size)
    again.start(str(written))
    again.wait_for("DIFF  first at", first, "saved ")
    again.keys("Enter")
    again.wait_for("relative L2", "where")
    again.keys("q")
    again.wait_for("EXIT 0")


def test_a_running_replay_is_cancelled_within_a_second_and_the_keys_go_on(
    tmux: Callable[..., Tmux], pair: tuple[Path, Path]
) -> None:
    pane = tmux((80, 24))
    pane.start(*map(str, pair))
    pane.wait_for("DIFF  first at", "in order of computation")  # while a comparison runs, r is refused
    pane.keys("m")
    pane.wait_for("No cell has run")
    pane.keys("r")
    pane.wait_for("RUN")
    time.sleep(2)
    began = time.monotonic()
    pane.keys("C-c")
    pane.wait_for("READY", timeout=5) if not _has_cells(pane) else pane.wait_for("of", timeout=5)
    while " RUN " in pane.screen():
        assert time.monotonic() - began < 5
    assert time.monotonic() - began < 2.5  # a second, and what tmux and the screen take to show it
    pane.keys("Escape", "q")
    pane.wait_for("EXIT 0")


def _has_cells(pane: Tmux) -> bool:
    return "BASELINE" in pane.screen()


def test_detaching_and_attaching_again_at_another_size_keeps_the_answer(
    tmux: Callable[..., Tmux], pair: tuple[Path, Path]
) -> None:
    pane = tmux((120, 40))
    pane.start(*map(str, pair))
    pane.wait_for("DIFF  first at")
    pane.tmux("resize-window", "-t", "t", "-x", "80", "-y", "24")
    pane.wait_for("DIFF  first at", "1 Steps  2 Tensors")
    # A terminal rebuilt under the app reports clicks in bytes that are no UTF-8.
    pane.tmux("send-keys", "-t", "t", "-H", "1b", "5b", "4d", "20", "80", "b6")
    pane.tmux("resize-window", "-t", "t", "-x", "160", "-y", "48")
    pane.keys("Escape")
    pane.wait_for("DIFF  first at", "3 Inspect")
    pane.keys("q")
    pane.wait_for("EXIT 0")


def test_a_hangup_ends_the_app_and_its_children(tmux: Callable[..., Tmux], pair: tuple[Path, Path]) -> None:
    pane = tmux((80, 24))
    pane.start(*map(str, pair))
    pane.wait_for("DIFF  first at")
    shell = int(pane.tmux("display-message", "-p", "-t", "t", "#{pane_pid}"))
    app = int(subprocess.run(["pgrep", "-P", str(shell)], capture_output=True, text=True, check=True).stdout.split()[0])
    children = subprocess.run(["pgrep", "-P", str(app)], capture_output=True, text=True, check=True).stdout.split()
    assert children
    subprocess.run(["kill", f"-{signal.SIGHUP.value}", str(app)], check=True)
    pane.wait_for("EXIT 129", timeout=10)
    end = time.monotonic() + 5
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < end, "a child outlived the screen"
        time.sleep(0.1)
