"""The words hold: on every genuine pair the headline, the marks, pane 7, the table and the saved answer say the same,
and no step is called anything that was not compared."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from replay_core import workbench
from replay_core.records import Selection
from tests.fixtures import FIXTURES
from tests.genuine_pairs import LONG, QUICK
from tests.tui_debugger.at_desk import DeskEngine
from tests.tui_debugger.driving import opened, press, rest, screen, until
from tui_debugger import format as fmt
from tui_debugger.app import RldbgApp
from tui_debugger.panes.findings import FindingsPane
from tui_debugger.panes.steps import StepsPane


def _lines(pane: StepsPane | FindingsPane) -> list[str]:
    return [pane.line(row, 200).plain.strip() for row in range(pane.count)]


def _marks(app: RldbgApp) -> dict[int, str]:
    """Step -> what its line says behind its name."""
    found = (re.match(r"[▾▸]?\s*step (\d+)(.*)", line) for line in _lines(app.debugger.query_one(StepsPane)))
    return {int(line[1]): line[2].strip() for line in found if line}


@pytest.mark.long
@pytest.mark.parametrize(
    ("a", "b"), [*QUICK, *(pytest.param(*pair, marks=pytest.mark.long) for pair in LONG)], ids=lambda name: name
)
async def test_the_screen_says_one_thing_everywhere(a: str, b: str, in_tmp: Path) -> None:
    paths = FIXTURES / a, FIXTURES / b
    async with opened(*paths, engine=DeskEngine()) as (app, pilot):
        state = app.session.state
        shown, steps = state.tensors.comparison, state.opened.steps
        assert shown is not None
        top = "".join(line.lstrip("▌").strip() + " " for line in screen(app).splitlines()[1:4])
        first = shown["first_divergence"]
        counts: Any = shown["counts"]

        # The table: what is marked as first is first, and as many rows have each verdict as the document counts.
        rows = [row for row in state.tensors.rows if row.is_first]
        assert [row.name for row in rows] == ([first["name"]] if first else [])
        for word in fmt.VERDICTS:
            assert sum(row.verdict == word for row in state.tensors.rows) == counts[word]

        # The headline: a divergence anywhere is told, and so is that there is none.
        word = top.split()[0]
        diverging = sum(counts[verdict] for verdict in fmt.DIVERGING)
        assert (word in fmt.DIVERGING) == bool(diverging)
        if first:
            said = re.search(r"(?:first|part first) at (.+?)(…| · |  )", top)
            assert said is not None, top
            assert first["name"] == said[1] or (said[2] == "…" and first["name"].startswith(said[1]))
        assert fmt.counts(shown["counts"]) in top

        # The marks: a step has the verdict of its own comparison, by the command as by the screen.
        assert set(_marks(app)) >= {*steps.asked}
        for step, mark in _marks(app).items():
            assert not mark.startswith("✓")
            assert steps.asked or not mark, "no step is held against another step's"
            if steps.asked:
                told = workbench.compare_dumps(*paths, step=Selection.parse(step))
                answer = fmt.comparison_answer(told)
                assert mark.split("  ")[0].split(" ")[0] == answer.word, mark
                assert steps.found[step]["counts"] == told["counts"]
                assert steps.found[step]["first"] == (told["first_divergence"] and told["first_divergence"]["name"])
        if len(steps.asked) > 1:
            assert steps.progress() in top
            assert not steps.open

        # Pane 7 calls nothing clean where two are compared, and what it lists of reading is in the documents.
        listed = _lines(app.debugger.query_one("#findings", FindingsPane))
        assert not any("CLEAN" in line for line in listed)
        diagnosed = workbench.diagnose(paths[0])
        for line in listed:
            if told_of := re.match(r"(?:› )?(?:ERROR|WARN|INFO) +([DL]\d\d) (.+?)(?: · |…|$)", line):
                assert any(
                    one["id"] == told_of[1] and one["claim"].startswith(told_of[2]) for one in diagnosed["findings"]
                ), line
        grave = [one for one in diagnosed["findings"] if one["severity"] in ("warning", "error")]
        if any("no warning and no error" in said for said in listed):
            assert not grave
        else:
            assert grave or any("WARN" in line or "ERROR" in line for line in listed)

        # The saved answer is the one on the screen, and says which steps it is about.
        await press(app, pilot, "2", "e", "enter")
        (written,) = in_tmp.glob("rldbg-comparison-*.json")
        saved = json.loads(written.read_text())
        assert saved["counts"] == shown["counts"]
        assert (saved["first_divergence"] and saved["first_divergence"]["name"]) == (first and first["name"])
        assert [one["step"] for one in saved.get("steps", [])] == sorted((*steps.asked, *steps.alone))


@pytest.mark.long
async def test_a_step_that_was_not_compared_says_so_and_so_does_what_is_saved(in_tmp: Path) -> None:
    engine = DeskEngine()
    engine.gate.clear()
    paths = FIXTURES / "nexrl/self_hosted_fp32", FIXTURES / "nexrl/self_hosted_bf16"
    app = RldbgApp(*paths, engine=engine)
    async with app.run_test(size=(160, 48)) as pilot:
        await until(pilot, lambda: "1 of 2 steps compared, now step 1" in screen(app))
        assert _marks(app)[1].startswith("not compared")
        await pilot.press("2", "e", "enter")
        await until(pilot, lambda: list(in_tmp.glob("rldbg-comparison-*.json")))
        (written,) = in_tmp.glob("rldbg-comparison-*.json")
        await until(pilot, lambda: written.read_text().endswith("}\n"))
        await pilot.press("ctrl+c")
        await until(pilot, lambda: "1 of 2 steps compared ·" in screen(app))
        assert _marks(app)[1].startswith("not compared")
    saved = json.loads(written.read_text())
    assert [(one["step"], one["verdict"]) for one in saved["steps"]] == [(0, "DIFF"), (1, None)]
    async with opened(written, engine=DeskEngine()) as (again, pilot):
        await rest(again, pilot)
        assert "1 of 2 steps compared" in screen(again)
        assert _marks(again)[1].startswith("not compared")
        assert _marks(again)[0].startswith("DIFF")
