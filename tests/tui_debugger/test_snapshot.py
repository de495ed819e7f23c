"""What `e` wrote opens again; what rldbg did not write, or a later one did, is an error that says so."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from replay_core.errors import DumpError, NotADumpError
from replay_core.export.outcome import exit_code
from tests.replay_core.documents.test_schema import SCHEMA
from tests.tui_debugger.driving import A, B, opened, press, screen, toasts, until
from tests.tui_debugger.handout.documents import genuine
from tests.tui_debugger.scripted import ScriptedEngine, document
from tui_debugger import paths, snapshot
from tui_debugger.cli import run
from tui_debugger.handout.html_page import page
from tui_debugger.handout.kinds import KINDS

#: Documents of the engine, recorded for the pictures.
ANSWERS = Path(__file__).parents[2] / "docs" / "images" / "answers"


def _saved(folder: Path, content: Any) -> Path:
    path = folder / "saved.json"
    path.write_text(json.dumps(content))
    return path


@pytest.mark.long
async def test_what_is_written_goes_to_the_file_that_is_named_and_overwrites_none(in_tmp: Path) -> None:
    async with opened(A, B) as (app, pilot):
        await press(app, pilot, "e", "ctrl+u", *"answer.md", "enter")
        await until(pilot, lambda: "wrote" in "".join(toasts(app)))
        assert (in_tmp / "answer.md").read_text().startswith("### DIFF: first diverging")
        (in_tmp / "mine.json").write_text("mine")
        await press(app, pilot, "e", "ctrl+u", *"mine.json", "enter")
        await until(pilot, lambda: "there is a file already, which stays: mine.json" in toasts(app)[-1])
        await press(app, pilot, "e", "ctrl+u", *"answer.doc", "enter")
        await until(pilot, lambda: "neither a form" in toasts(app)[-1])
        await press(app, pilot, "e", "ctrl+u", *"nowhere/answer.html", "enter")
        await until(pilot, lambda: "cannot export" in toasts(app)[-1])
    assert (in_tmp / "mine.json").read_text() == "mine"
    assert sorted(path.name for path in in_tmp.iterdir()) == ["answer.md", "mine.json"]


@pytest.mark.long
async def test_an_exported_comparison_opens_on_its_first_divergence(in_tmp: Path) -> None:
    async def reopen(path: Path) -> str:
        async with opened(path) as (app, _):
            return screen(app)

    async with opened(A, B) as (app, pilot):
        await press(app, pilot, "e", "enter")
    (written,) = in_tmp.glob("rldbg-comparison-*.json")
    shown = await reopen(written)
    assert "DIFF  first at layers.0.self_attn.o_proj.inputs.0" in shown
    assert "saved 2026-11-20" in shown


@pytest.mark.long
async def test_a_comparison_judged_by_hand_says_so_when_it_is_opened_again(in_tmp: Path) -> None:
    given = {"atol": 2.0, "rtol": None, "file": None, "exact": False}
    lenient = {**document("comparison_same"), "tolerance": given}

    async def reopen(path: Path) -> tuple[str, list[str]]:
        async with opened(path, size=(80, 24)) as (app, pilot):
            shown = screen(app)
            await press(app, pilot, "escape")
            assert "JUDGED BY" in screen(app).splitlines()[0], "there are no figures to judge by the table"
            assert not any("table's own tolerances again" in toast for toast in toasts(app))
            return shown, toasts(app)

    async with opened(A, B, engine=ScriptedEngine(rejudge=lenient)) as (app, pilot):
        await press(app, pilot, "R", "2", "enter", "e", "enter")
    (written,) = in_tmp.glob("rldbg-comparison-*.json")
    shown, said = await reopen(written)
    assert "JUDGED BY atol 2" in shown.splitlines()[0]
    assert "judged by atol 2" in "".join(shown.splitlines()[1:3])
    assert any("a saved comparison has no figures" in toast for toast in said)


async def test_a_saved_comparison_of_a_selection_says_so(tmp_path: Path) -> None:
    saved = {**document("comparison_same"), "selection": {"step": "3", "name": "layers.0.*"}}
    async with opened(_saved(tmp_path, saved)) as (app, _):
        assert "only step 3, name layers.0.*" in screen(app)


@pytest.mark.long
async def test_what_is_computed_from_a_saved_document_is_not_called_saved(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with opened(_saved(tmp_path, document("matrix")), engine=engine) as (app, pilot):
        await press(app, pilot, *"jjjjjj", "enter")
        assert "compare" in engine.kinds()
        assert "DIFF  first at" in screen(app)
        assert "saved 2026" not in screen(app)
        assert "judged by the table" in screen(app)
    async with opened(_saved(tmp_path, document("diagnosis_shifted")), engine=engine) as (app, pilot):
        assert "saved 2026" in screen(app)
        engine.answers["diagnose"] = document("diagnosis_shifted")
        await press(app, pilot, "E")
        assert "diagnose" in engine.kinds()
        assert "saved 2026" not in screen(app)


@pytest.mark.long
async def test_a_saved_single_replay_says_whether_its_cell_agrees(in_tmp: Path) -> None:
    async def reopen(path: Path) -> str:
        async with opened(path) as (app, _):
            return screen(app)

    async with opened(A) as (app, pilot):
        await press(app, pilot, "p", "b", "r", "e", "enter")
    (written,) = in_tmp.glob("rldbg-replay-*.json")
    kept = json.loads(written.read_text())
    assert set(SCHEMA["$defs"]["replay"]["required"]) <= set(kept)
    shown = await reopen(written)
    assert "DIFFERS  0 agree · 1 differ of 1 cell\n" in shown
    assert "replay packed, no block mask" in shown.splitlines()[0]
    assert "attention=eager,flash" not in shown
    assert "BASELINE   each row alone" in shown


def test_a_full_disk_leaves_no_half_of_a_document(tmp_path: Path) -> None:
    class Full(io.StringIO):
        name = str(tmp_path / "half.json")

        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    Path(Full.name).write_text('{"kind":')
    with pytest.raises(OSError, match="No space left"):
        snapshot._write(Full(), "{}")
    assert list(tmp_path.iterdir()) == []


def test_an_export_from_a_folder_that_is_gone_goes_to_the_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert paths.here() == paths.state_dir()


async def test_a_saved_matrix_shows_its_cells(tmp_path: Path) -> None:
    async with opened(_saved(tmp_path, document("matrix"))) as (app, _):
        shown = screen(app)
    assert "1 differ" in shown
    assert "attention=eager,fa2 packing=off,on block_mask=on,off" in shown


@pytest.mark.long
async def test_a_saved_record_and_run_open(tmp_path: Path) -> None:
    async def run(name: str) -> str:
        async with opened(_saved(tmp_path, document(name))) as (app, _):
            return screen(app)

    assert "old_logprobs" in await run("record")
    assert "step 3" in await run("run_a")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"schema_version": 2, "kind": "comparison"}, "schema from the future"),
        ({"schema_version": 1, "kind": "info"}, "is damaged"),
        ({"schema_version": 1, "kind": "comparison"}, "is damaged"),
    ],
)
def test_what_cannot_be_shown_is_said(tmp_path: Path, content: dict[str, Any], said: str) -> None:
    path = _saved(tmp_path, content)
    assert snapshot.is_document(path)
    with pytest.raises(DumpError, match=said):
        snapshot.read(path)


@pytest.mark.parametrize("values", [["eager", "eager"], ["eager"], ["\x1b[2J", 3]], ids=str)
def test_a_matrix_of_axes_that_nobody_could_ask_for_is_damaged(tmp_path: Path, values: list[Any]) -> None:
    saved = document("matrix")
    saved["matrix"]["axes"] = {"attention": values}
    with pytest.raises(DumpError, match="is damaged"):
        snapshot.read(_saved(tmp_path, saved))


@pytest.mark.long
@pytest.mark.parametrize("step", ["\u00b2", "9" * 5000], ids=["superscript", "digits"])
async def test_a_selection_that_is_no_number_opens_on_the_divergence(tmp_path: Path, step: str) -> None:
    saved = {**document("comparison"), "selection": {"step": step}}
    async with opened(_saved(tmp_path, saved)) as (app, _):
        assert app.is_running
        assert app.debugger.stage.state.tensors.comparison is not None


@pytest.mark.long
async def test_points_that_are_no_numbers_are_left_out_of_a_saved_scatter(tmp_path: Path) -> None:
    saved = document("parity")
    for number, value in enumerate(["nan", "inf", 1e308, -1e308]):
        saved["batches"][0]["scatter"]["points"][number][0] = value
    async with opened(_saved(tmp_path, saved)) as (app, _):
        assert "A=B" in screen(app)


@pytest.mark.long
async def test_a_saved_document_that_cannot_be_drawn_is_at_fault_and_not_the_screen(tmp_path: Path) -> None:
    async with opened(_saved(tmp_path, document("comparison"))) as (app, _):
        assert app._is_saved_document_at_fault(ValueError("of its content"))
        assert not app._is_saved_document_at_fault(AssertionError("a bug"))
    async with opened(A) as (app, _):
        assert not app._is_saved_document_at_fault(ValueError("of a dump that was read"))


def test_other_json_is_no_document(tmp_path: Path) -> None:
    assert not snapshot.is_document(_saved(tmp_path, {"step": 3, "loss": 0.1}))
    assert not snapshot.is_document(tmp_path / "none.json")
    assert not snapshot.is_document(tmp_path)


@pytest.mark.long
async def test_a_diagnosis_is_written_from_the_findings_and_opens_again(in_tmp: Path) -> None:
    async def reopen(path: Path, engine: ScriptedEngine) -> tuple[str, str]:
        async with opened(path, engine=engine) as (app, pilot):
            first = screen(app)
            await press(app, pilot, "7", "enter")
            return first, screen(app)

    engine = ScriptedEngine(diagnose=document("diagnosis_shifted"))
    async with opened(A, engine=engine) as (app, pilot):
        await press(app, pilot, "7", "e", "enter")
    (written,) = in_tmp.glob("rldbg-*.json")
    assert json.loads(written.read_text())["kind"] == "diagnosis"
    there = ScriptedEngine()
    first, went = await reopen(written, there)
    assert "saved 2026" in first
    assert "step 3" in went
    assert "diagnose" not in there.kinds(), "what was saved is shown, not found again"

    gone = ScriptedEngine(open=NotADumpError("there is no such file or directory", file="/runs/demo/alone"))
    first, _ = await reopen(written, gone)
    assert "saved 2026" in first


@pytest.mark.parametrize("name", ["samples", "mismatch", "comparison"])
def test_a_page_of_any_kind_is_printed_where_no_screen_shows_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "page.html"
    made = genuine()[name]
    file.write_text(page(made), encoding="utf-8")
    assert run([str(file)]) == int(exit_code(made))
    _, report = KINDS[name]
    assert report is not None
    assert capsys.readouterr().out.strip() == report(made).strip()


def test_a_document_for_programs_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _saved(tmp_path, {"schema_version": 1, "kind": "info", "tool": "rldbg"})
    assert run([str(path)]) in (2, 3)
    assert str(path) in capsys.readouterr().err
