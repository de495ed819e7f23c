"""Where the user was is there again, and what cannot be read is as good as none."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.tui_debugger.driving import A, B, opened, press, screen
from tests.tui_debugger.scripted import ScriptedEngine, document
from tui_debugger import paths, remembered


@pytest.mark.long
async def test_a_tensor_is_selected_again_while_the_divergence_is_the_same() -> None:
    async def again(engine: ScriptedEngine | None = None) -> Any:
        async with opened(A, B, engine=engine) as (app, _):
            return app.session.state.tensors.row

    async with opened(A, B) as (app, pilot):
        await press(app, pilot, "right_square_bracket", "right_square_bracket")
        app._keep_place()
        left = app.session.state.tensors.row.name if app.session.state.tensors.row else ""
    row = await again()
    assert row.name == left
    assert not row.is_first

    # Another first divergence is news: it is what the eye must meet.
    other = document("comparison")
    entry = next(entry for entry in other["tensors"] if entry["name"].endswith("down_proj.output"))
    other["first_divergence"] = {**other["first_divergence"], **{n: entry[n] for n in ("name", "a_key", "b_key")}}
    row = await again(ScriptedEngine(compare=other))
    assert row.is_first
    assert row.name.endswith("down_proj.output")


async def test_recent_runs_are_offered_where_nothing_is_open() -> None:
    with tempfile.TemporaryDirectory(prefix="rr") as short:  # a path that a pane has room for
        tmp_path = Path(short)
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            remembered.keep_place(tmp_path / name, None, {"tensor": None})
        remembered.keep_place(tmp_path / "gone", None, {})

        async with opened() as (app, pilot):
            lines = screen(app)
            assert str(tmp_path / "two") in lines
            assert "gone" not in lines
            assert lines.index("two") < lines.index("/one")
            assert "demo" in lines
            assert "rldbg record" in lines
            await press(app, pilot, "enter")
            assert app.session.state.opened.a_path == tmp_path / "two"


def test_a_spoilt_file_is_as_good_as_none() -> None:
    folder = paths.private_dir(paths.state_dir())
    for text in ("", "{", "[]", '{"version": 99, "runs": {"/a": {}}}', '{"version": 1, "runs": null}'):
        (folder / "session.json").write_text(text)
        assert remembered.recent() == []
        assert remembered.place(A, B) == {}
        assert remembered.theme() is None


def test_only_the_newest_runs_are_kept(tmp_path: Path) -> None:
    for number in range(remembered.RUNS_KEPT + 5):
        (tmp_path / str(number)).mkdir()
        remembered.keep_place(tmp_path / str(number), None, {})
    kept = [Path(names[0]).name for names, _ in remembered.recent()]
    assert len(kept) == remembered.RUNS_KEPT
    assert kept[0] == str(remembered.RUNS_KEPT + 4)


@pytest.mark.long
async def test_who_comes_back_to_a_tensor_has_that_tensor_under_the_glass() -> None:
    async with opened(A, B) as (app, pilot):
        await press(app, pilot, "j", "j")
        row = app.session.state.tensors.row
        assert row is not None
    async with opened(A, B) as (app, pilot):
        state = app.session.state
        assert state.tensors.row is not None
        assert state.tensors.row.name == row.name
        document = state.inspection.document
        assert document is not None
        assert document["kind"] == "tensor"
        assert document["a"]["name"] == row.name, "the sheet is of the line under the cursor"
