"""Every screen on every terminal: nothing garbled, nothing cut without a sign of it, no crash."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures import FIXTURES
from tests.tui_debugger.in_tmux import Tmux, needs_tmux

#: Name -> (size, TERM, the rest of the environment).
TERMINALS: dict[str, tuple[tuple[int, int], dict[str, str]]] = {
    "xterm": ((80, 24), {"TERM": "xterm"}),
    "screen": ((80, 24), {"TERM": "screen"}),
    "vt100": ((80, 24), {"TERM": "vt100"}),
    "no colours": ((80, 24), {"TERM": "xterm-256color", "NO_COLOR": "1"}),
    "LANG=C": ((80, 24), {"TERM": "xterm-256color", "LANG": "C"}),
    "60x20": ((60, 20), {"TERM": "xterm-256color"}),
}
#: Keys, and what then stands on the screen at the latest; from the pair of dumps on.
WALK: tuple[tuple[str, str], ...] = (
    ("", "first at"),
    ("Enter", "a="),
    ("3 z", "relative L2"),
    ("z 1", "step 0"),
    ("4", "4 Log"),
    ("5", "attention"),
    ("6", "6 Telemetry"),
    ("7", "7 Findings"),
    ("2 ?", "Find the divergence"),
    ("Escape F2", "rldbg-dark"),
    ("Escape l", "Log"),
    ("Escape :", "Search"),
    ("Escape @", "index"),
    ("Escape /", "regular expression"),
    ("Escape o", "Open"),
    ("Escape c", "Compare"),
    ("Escape M", "odel"),
    ("Escape R", "Judge by"),
    ("Escape m", "READY"),
    ("r", "ERROR"),
    ("a", "Axes"),
    ("Escape Escape P", "parity"),
    ("Escape J", "Weights to rule"),
    ("Escape C", "rends"),
    ("Escape", "first at"),
)
_DUMPS = [str(FIXTURES / "sglang_dumper/baseline_sdpa_fp32"), str(FIXTURES / "sglang_dumper/target_eager_bf16")]
#: What UTF-8 read as Latin-1 begins with, and what a terminal draws for bytes that are no UTF-8.
_GARBLED = ("â", "Ã", "Â", "\N{REPLACEMENT CHARACTER}")

pytestmark = [pytest.mark.slow, needs_tmux]


@pytest.fixture(params=TERMINALS)
def pane(request: pytest.FixtureRequest) -> Iterator[Tmux]:
    size, environment = TERMINALS[request.param]
    with tempfile.TemporaryDirectory(prefix="rt") as folder:
        session = Tmux(Path(folder), size, **environment)
        yield session
        session.close()


def test_a_walk_through_every_screen(pane: Tmux, request: pytest.FixtureRequest) -> None:
    pane.start(*_DUMPS)
    for keys, what in WALK:
        pane.keys(*keys.split())
        shown = pane.wait_for(what, timeout=30 if keys else 120)
        assert not any(sign in shown for sign in (*_GARBLED, "Traceback", "EXIT")), shown
        if "LANG=C" in request.node.name:
            assert shown.isascii(), sorted({char for char in shown if not char.isascii()})
        lines = shown.splitlines()
        assert max(map(len, lines)) <= pane.size[0], shown
        # A box that reaches past the edge shows no right corner.
        tops = [line for line in lines if line.count("╭") > line.count("╮")]
        assert not tops, shown
    pane.keys("q")
    assert "EXIT 0" in pane.wait_for("EXIT")
