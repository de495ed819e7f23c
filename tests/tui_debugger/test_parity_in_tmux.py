"""Critic parity and live tolerance by keys alone, on genuine values, in a real tmux."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fixtures import FIXTURES
from tests.tui_debugger.in_tmux import Tmux, needs_tmux

SIZES = [(80, 24), (160, 48)]
CRITICS = FIXTURES / "roll_critic" / "bf16_init0.01"

pytestmark = [pytest.mark.slow, needs_tmux]


@pytest.fixture
def tmux() -> Iterator[Callable[..., Tmux]]:
    started: list[Tmux] = []
    with tempfile.TemporaryDirectory(prefix="rt") as folder:

        def start(size: tuple[int, int]) -> Tmux:
            started.append(Tmux(Path(folder), size))
            return started[-1]

        yield start
        for session in started:
            session.close()


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_from_recorded_values_to_the_token_that_parts_most_and_the_exported_document(
    tmux: Callable[..., Tmux], size: tuple[int, int], tmp_path: Path
) -> None:
    pane = tmux(size)
    pane.start("parity", "--recorded", str(CRITICS), cwd=tmp_path)
    shown = pane.wait_for("AGREES", "cause: padding", "response", "unmasked")
    assert "AGREES" in shown.splitlines()[1]
    pane.keys("2")
    pane.wait_for("response 118", "padding 199")
    pane.keys("3")
    pane.wait_for("at most")
    pane.keys("6")
    pane.wait_for("CONTRADICTED")
    pane.keys("]")
    pane.wait_for("cause: noise", "batch random")
    pane.keys("[", "5")
    pane.wait_for("cause: padding", "0.0024")
    pane.keys("e", "Enter")
    pane.wait_for("wrote")
    pane.keys("Enter")
    pane.wait_for("3 Inspect", "4,14", "0.0444")
    pane.keys("P")
    pane.wait_for("AGREES", "cause: padding")
    pane.keys("q")
    pane.wait_for("EXIT 0")
    (written,) = tmp_path.glob("rldbg-parity-*.json")
    pane.close()

    again = tmux(size)
    again.start(str(written))
    again.wait_for("AGREES", "cause: padding", "saved ")
    again.keys("q")
    again.wait_for("EXIT 0")


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_a_tolerance_changes_verdicts_in_place_and_is_there_next_time(
    tmux: Callable[..., Tmux], size: tuple[int, int]
) -> None:
    pair = [str(CRITICS / f"padded_{name}.pt") for name in ("deepspeed", "megatron")]
    pane = tmux(size)
    pane.start(*pair)
    pane.wait_for("1 PADDING · 4 SAME of 5", "judged by the table")
    pane.keys("R")
    pane.wait_for("Judge by")
    pane.type("1e-6")
    pane.keys("Enter")
    pane.wait_for("JUDGED BY atol 1e-06", "DIFF  first at values")
    for atol in ("1e-05", "0.0001", "0.001", "0.01"):
        pane.keys("+")
        pane.wait_for(f"JUDGED BY atol {atol}")
    pane.wait_for("1 PADDING")
    pane.keys("Escape")
    pane.wait_for("judged by the table")
    pane.keys("R")
    pane.wait_for("Judge by")
    pane.type("exact")
    pane.keys("Enter")
    pane.wait_for("JUDGED BY bitwise equality", "DIFF  first at values")
    pane.keys("3", "Right")
    pane.wait_for("Pearson 0.9999")
    pane.keys("Enter")
    pane.wait_for("b - a")
    pane.keys("q")
    pane.wait_for("EXIT 0")
    pane.close()

    again = tmux(size)
    again.start(*pair)
    again.wait_for("JUDGED BY bitwise equality", "as last time", "DIFF  first at values")
    again.keys("q")
    again.wait_for("EXIT 0")
