"""What `e` wrote opens again; what rldbg did not write, or a later one did, is an error that says so."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from replay_core.errors import DumpError, NotADumpError, RequestError
from tests.tui_debugger.driving import A, B, opened, press, screen
from tests.tui_debugger.scripted import ScriptedEngine, document
from tui_debugger import snapshot
from tui_debugger.commands.ui import require_terminal


def _saved(folder: Path, content: Any) -> Path:
    path = folder / "saved.json"
    path.write_text(json.dumps(content))
    return path


def test_an_exported_comparison_opens_on_its_first_divergence(in_tmp: Path) -> None:
    async def save() -> None:
        async with opened(A, B) as (app, pilot):
            await press(app, pilot, "e")

    async def reopen(path: Path) -> str:
        async with opened(path) as (app, _):
            return screen(app)

    asyncio.run(save())
    (written,) = in_tmp.glob("rldbg-comparison-*.json")
    shown = asyncio.run(reopen(written))
    assert "DIFF  first at layers.0.self_attn.o_proj.inputs.0" in shown
    assert "saved 2026-11-20" in shown


def test_a_saved_matrix_shows_its_cells(tmp_path: Path) -> None:
    async def run() -> str:
        async with opened(_saved(tmp_path, document("matrix"))) as (app, _):
            return screen(app)

    shown = asyncio.run(run())
    assert "1 differ" in shown
    assert "attention=eager,fa2 packing=off,on block_mask=on,off" in shown


def test_a_saved_record_and_run_open(tmp_path: Path) -> None:
    async def run(name: str) -> str:
        async with opened(_saved(tmp_path, document(name))) as (app, _):
            return screen(app)

    assert "old_logprobs" in asyncio.run(run("record"))
    assert "step 3" in asyncio.run(run("run_a"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"schema_version": 2, "kind": "comparison"}, "written by another rldbg"),
        ({"schema_version": 1, "kind": "info"}, "cannot show this document"),
        ({"schema_version": 1, "kind": "comparison"}, "is not whole"),
    ],
)
def test_what_cannot_be_shown_is_said(tmp_path: Path, content: dict[str, Any], said: str) -> None:
    path = _saved(tmp_path, content)
    assert snapshot.is_document(path)
    with pytest.raises(DumpError, match=said):
        snapshot.read(path)


def test_other_json_is_no_document(tmp_path: Path) -> None:
    assert not snapshot.is_document(_saved(tmp_path, {"step": 3, "loss": 0.1}))
    assert not snapshot.is_document(tmp_path / "none.json")
    assert not snapshot.is_document(tmp_path)


def test_a_diagnosis_is_written_from_the_findings_and_opens_again(in_tmp: Path) -> None:
    async def save() -> None:
        engine = ScriptedEngine(diagnose=document("diagnosis_shifted"))
        async with opened(A, engine=engine) as (app, pilot):
            await press(app, pilot, "7", "e")

    async def reopen(path: Path, engine: ScriptedEngine) -> tuple[str, str]:
        async with opened(path, engine=engine) as (app, pilot):
            first = screen(app)
            await press(app, pilot, "7", "enter")
            return first, screen(app)

    asyncio.run(save())
    (written,) = in_tmp.glob("rldbg-*.json")
    assert json.loads(written.read_text())["kind"] == "diagnosis"
    there = ScriptedEngine()
    first, went = asyncio.run(reopen(written, there))
    assert "saved 2026" in first
    assert "step 3" in went
    assert "diagnose" not in there.kinds(), "what was saved is shown, not found again"

    gone = ScriptedEngine(open=NotADumpError("there is no such file or directory", file="/runs/demo/alone"))
    first, _ = asyncio.run(reopen(written, gone))
    assert "saved 2026" in first


def test_a_document_the_screen_cannot_show_is_refused_before_it_opens(tmp_path: Path) -> None:
    path = _saved(tmp_path, {"schema_version": 1, "kind": "info", "tool": "rldbg"})
    with pytest.raises(DumpError, match="cannot show this document") as caught:
        snapshot.check_kind(path)
    assert caught.value.hint == f"python -m json.tool {path}"
    snapshot.check_kind(_saved(tmp_path, document("matrix")))


@pytest.mark.parametrize(("kind", "command"), [("comparison", "rldbg compare "), ("replay", "python -m json.tool ")])
def test_without_a_terminal_the_hint_names_what_shows_the_document(kind: str, command: str, tmp_path: Path) -> None:
    path = _saved(tmp_path, {"schema_version": 1, "kind": kind, "tool": "rldbg 0.1.0"})
    with pytest.raises(RequestError, match="the screen needs a terminal") as error:
        require_terminal(path, None)
    assert error.value.hint == f"{command}{path}"
