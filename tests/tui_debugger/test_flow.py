"""The flow: open, see the first divergence, flip flags, replay, export; and every way it can go wrong."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from textual.command import CommandList

from replay_core.errors import ChildDiedError, RldbgError, TruncatedError
from tests.tui_debugger.driving import A, B, opened, press, rest, screen, toasts, until
from tests.tui_debugger.scripted import ScriptedEngine, document, replayed
from tui_debugger import remembered
from tui_debugger.answer import answer_of
from tui_debugger.app import RldbgApp
from tui_debugger.busy import Busy
from tui_debugger.flows import errands
from tui_debugger.panes.log import LogPane
from tui_debugger.panes.tensors import TensorRows
from tui_debugger.state import Part

FIRST = "layers.0.self_attn.o_proj.inputs.0"


async def test_a_pair_opens_on_its_first_diverging_tensor() -> None:
    engine = ScriptedEngine()
    async with opened(A, B, engine=engine) as (app, _):
        state = app.session.state
        assert state.tensors.row is not None
        assert state.tensors.row.name == FIRST
        top = screen(app).splitlines()[1]
        assert "DIFF  first at " + FIRST in top
        assert "sample 1 position 0 · a=0.0123 b=-0.0456 · origin layers.0.self_attn" in top
        assert engine.last("inspect").params["at_a"] == [1, 0, 17]


async def test_steps_are_compared_until_one_diverges() -> None:
    def answer(job: object) -> dict[str, object]:
        return document("comparison" if job.params["step"] == 2 else "comparison_same")  # type: ignore[attr-defined]

    engine = ScriptedEngine(compare=answer)
    async with opened(A, B, engine=engine) as (app, _):
        assert [job.params["step"] for job in engine.jobs if job.kind == "compare"] == [0, 1, 2]
        assert app.session.state.opened.steps.verdicts == {0: "SAME", 1: "SAME", 2: "DIFF", 3: "SAME"}
        assert "step 1  SAME" in screen(app)


async def test_flags_flip_and_a_replay_shows_the_first_diverging_tensor() -> None:
    engine = ScriptedEngine()
    async with opened(A, engine=engine) as (app, pilot):
        await press(app, pilot, "p", "b", "r")
        (plan,) = [job.params["plan"] for job in engine.jobs if job.kind == "replay"]
        assert (plan["flags"]["packing"], plan["flags"]["block_mask"]) == (True, False)
        assert {"step": 0, "rank": 0, "micro": 0, "model": "checkpoint"}.items() <= plan.items()
        assert app.session.state.tensors.row is not None
        assert app.session.state.tensors.row.name == FIRST
        assert "loading random:llama-tiny" in app.debugger.query_one(LogPane).kept
        assert "peak 846 MiB" in screen(app)


async def test_what_the_replay_says_beyond_its_tensors_is_answered_first() -> None:
    """One sample past the limit of a worst token, in tensors that are all CLOSE."""
    answer = replayed({"packing": True, "dtype": "bfloat16"})
    cell = answer["cells"][-1]
    cell["agreement"] = {**cell["agreement"], "agrees": False, "first_divergence": None, "off": [2]}
    engine = ScriptedEngine(replay=answer, compare=document("comparison_same"))
    async with opened(A, engine=engine) as (app, pilot):
        await press(app, pilot, "p", "r")
        assert "DIFF  samples 2 are off, each held to its row alone" in screen(app)
        assert app.session.state.opened.steps.verdicts == {0: "DIFF"}


async def test_why_a_cell_differs_is_on_the_first_screen_of_80_columns() -> None:
    answer = replayed({"packing": True})
    cell = answer["cells"][-1]
    cell["agreement"] = {**cell["agreement"], "agrees": False, "off": [1]}
    cell["cause"] = {"kind": "other_samples", "sentence": "sample 1 off: sees other samples: changing sample 0 moves 8"}
    engine = ScriptedEngine(replay=answer, compare=document("comparison"))
    async with opened(A, engine=engine, size=(80, 24)) as (app, pilot):
        await press(app, pilot, "p", "r")
        assert "sample 1 off: sees other samples: changing sample 0 moves 8" in "".join(screen(app).splitlines()[1:4])
        assert any("sees other samples" in line for line in app.debugger.query_one(LogPane).kept), "whole in the log"


async def test_a_recording_and_a_padded_batch_that_disagree_are_said() -> None:
    answer = replayed({"packing": True})
    for cell in answer["cells"]:
        cell["recorded"] = document("matrix")["cells"][6]["recorded"]
    control = answer["cells"][1]
    control["agreement"] = {**control["agreement"], "agrees": False}
    control["cause"] = {"kind": "padding", "sentence": "padded: sample 1 off: tokens see padding"}
    engine = ScriptedEngine(replay=answer, compare=document("comparison_same"))
    async with opened(A, engine=engine) as (app, pilot):
        await press(app, pilot, "p", "r")
        shown = answer_of(app.session.state)
        assert shown.where.endswith("as well: padded: sample 1 off: tokens see padding")
        assert any("log_probs is not what each row alone computes" in note for note in shown.notes)


async def test_a_setting_that_cannot_run_is_told_with_its_reason() -> None:
    answer = replayed({"attention": "fa2"})
    gone = document("matrix")["cells"][5]
    answer["cells"][-1] = {**gone, "error": {**gone["error"], "message": "no flash_attn here"}}
    async with opened(A, engine=ScriptedEngine(replay=answer)) as (app, pilot):
        await press(app, pilot, "r")
        assert any("unavailable: no flash_attn here" in toast for toast in toasts(app))
        assert "ERROR" in screen(app).splitlines()[1]


async def test_a_running_replay_is_shown_and_ctrl_c_cancels_it() -> None:
    engine = ScriptedEngine()
    engine.gate = asyncio.Event()
    async with opened(A, engine=engine) as (app, pilot):
        await pilot.press("r")
        await until(pilot, lambda: "RUN  replaying padded, sdpa, float32 · 0 of 4 rows" in screen(app))
        await until(pilot, lambda: "host 700 MiB" in screen(app) or "host 740 MiB" in screen(app))
        await pilot.press("q")
        assert app.is_running
        await pilot.press("ctrl+c")
        await rest(app, pilot)
        assert app.session.state.job.busy is None
        assert "cancelled" in screen(app)
        assert app.is_running


async def test_q_leaves_with_0_and_stops_the_children() -> None:
    engine = ScriptedEngine()
    async with opened(A, B, engine=engine) as (app, pilot):
        await pilot.press("q")
        await until(pilot, lambda: app.return_code is not None)
        assert app.return_code == 0
    assert engine.stopped


@pytest.mark.long
async def test_a_replay_without_a_model_says_which_key_helps() -> None:
    engine = ScriptedEngine(open={**document("run_a"), "models": {}})
    async with opened(A, engine=engine) as (app, pilot):
        await press(app, pilot, "r")
        assert any("press M" in toast for toast in toasts(app))
        await press(app, pilot, "M", *"random:llama-tiny", "enter", "r")
        assert engine.last("replay").params["plan"]["model"] == "random:llama-tiny"


@pytest.mark.parametrize(
    "error",
    [
        TruncatedError(
            "the file ends early", file="/x/[a].pt", expected="96 bytes", found="12 bytes", hint="copy it again"
        ),
        ChildDiedError("the child process was killed by SIGKILL (9) before it answered"),
    ],
)
async def test_an_error_is_one_toast_and_the_session_goes_on(error: RldbgError) -> None:
    engine = ScriptedEngine(record=error)
    async with opened(A, engine=engine) as (app, pilot):
        assert len(toasts(app)) == 1
        assert error.message in toasts(app)[0]
        assert error.message in screen(app)
        assert "ERROR" in screen(app).splitlines()[1]
        engine.answers.clear()
        await press(app, pilot, "1", "down", "down")
        assert "advantages" in screen(app)


async def test_a_directory_that_is_no_dump_leaves_the_screen_alive() -> None:
    async with opened(Path("/nowhere")) as (app, pilot):
        assert "no dialect recognises this as a dump" in screen(app)
        await press(app, pilot, "r", "c", "escape", "d", "e", "y", "v", "z", "z")
        assert app.is_running


async def test_compare_with_opens_a_second_dump() -> None:
    async with opened(A) as (app, pilot):
        await press(app, pilot, "c", *str(B), "enter")
        assert app.session.state.opened.b_path == B
        assert "DIFF  first at" in screen(app)


async def test_diverging_tensors_are_walked_and_d_returns_to_the_first() -> None:
    async with opened(A, B) as (app, pilot):
        state = app.session.state
        first = state.tensors.selected
        await press(app, pilot, "right_square_bracket", "right_square_bracket")
        assert state.tensors.selected == first + 2
        await press(app, pilot, "left_square_bracket")
        assert state.tensors.selected == first + 1
        await press(app, pilot, "g", "d")
        assert state.tensors.selected == first


@pytest.mark.long
async def test_a_filter_narrows_counts_and_is_cleared_by_esc() -> None:
    async with opened(A, B) as (app, pilot):
        await press(app, pilot, "slash", *"mlp", "enter")
        assert "8 of 34 shown" in screen(app)
        await press(app, pilot, "slash", *"([", "enter")
        assert app.session.state.tensors.filter_error
        await press(app, pilot, "escape")
        assert len(app.session.state.tensors.shown) == 34


@pytest.mark.long
@pytest.mark.parametrize("ends", [True, False])
async def test_a_comparison_that_still_runs_is_exported_when_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    monkeypatch.chdir(tmp_path)

    async with opened(A, B) as (app, pilot):
        state = app.session.state
        state.tensors.live, state.job.busy = True, Busy("comparing step 0")
        await pilot.press("e", "enter", "e", "enter")
        await until(pilot, lambda: "comparing step 0 · written when it has ended" in toasts(app))
        assert list(tmp_path.iterdir()) == []
        state.tensors.live, state.job.busy = not ends, None
        await until(pilot, lambda: any(("wrote" if ends else "nothing was written") in said for said in toasts(app)))
        await rest(app, pilot)
    assert len(list(tmp_path.glob("rldbg-comparison-*.json"))) == int(ends)


@pytest.mark.long
async def test_export_writes_the_comparison_and_the_replay(in_tmp: Path) -> None:
    async with opened(A) as (app, pilot):
        await press(app, pilot, "p", "b", "r", "e", "enter", "e", "enter")
        assert app.is_running
    kinds = sorted(json.loads(path.read_text())["kind"] for path in in_tmp.glob("*.json"))
    assert kinds == ["comparison", "comparison", "replay", "replay"]
    replay = json.loads(next(in_tmp.glob("rldbg-replay-*.json")).read_text())
    assert replay["baseline"] == 0
    assert [cell["part"] for cell in replay["cells"]] == ["reference", "control", "cell"]
    assert replay["cells"][-1]["agreement"]["agrees"] is False


async def test_names_are_data_and_never_markup() -> None:
    record = document("record")
    record["fields"][0]["name"] = "x[bold]y[/bold][0]"
    record["fields"][0]["canonical"] = "x[bold]y[/bold][0]"
    async with opened(A, engine=ScriptedEngine(record=record)) as (app, pilot):
        assert "x[bold]y[/bold][0]" in screen(app)
        await press(app, pilot, "2", "enter", "y")
        await press(app, pilot, "2", "G", "k", "enter")
        assert "[b]Answer[/b]" in screen(app)


async def test_copy_says_where_the_text_went() -> None:
    async with opened(A, B) as (app, pilot):
        await press(app, pilot, "y")
        assert "copied.txt" in toasts(app)[-1]
        assert FIRST in app.clipboard


@pytest.mark.long
async def test_holding_a_key_inspects_only_the_rows_that_matter() -> None:
    engine = ScriptedEngine()
    async with opened(A, B, engine=engine) as (app, pilot):
        await press(app, pilot, *["j"] * 12)
        inspected: Any = app.session.state.inspection.document
        assert app.session.state.tensors.row is not None
        assert inspected["a"]["name"] == app.session.state.tensors.row.name


@pytest.mark.long
async def test_a_hundred_thousand_tensors_do_not_stop_the_screen() -> None:
    comparison = document("comparison")
    entry = comparison["tensors"][0]
    comparison["tensors"] += [{**entry, "name": f"extra.{i}"} for i in range(100_000)]
    async with opened(A, B, engine=ScriptedEngine(compare=comparison)) as (app, pilot):
        await press(app, pilot, "G")
        assert "extra.99999" in screen(app)
        assert "100,034" in screen(app)


@pytest.mark.long
async def test_the_palette_runs_an_action_by_name() -> None:
    async with opened(A, B) as (app, pilot):
        await press(app, pilot, "g", "colon")
        await pilot.press(*"packing")
        found = app.screen.query_one(CommandList)
        first = lambda: str(found.get_option_at_index(0).prompt) if found.option_count else ""  # noqa: E731
        await until(pilot, lambda: "packing" in first().lower())
        await pilot.press("enter")
        await rest(app, pilot)
        assert app.session.state.replay.flags["packing"] is True


async def test_v_switches_between_the_comparison_and_the_record() -> None:
    async with opened(A, B) as (app, pilot):
        await press(app, pilot, "v")
        assert "Tensors · of step 0" in screen(app)
        assert "READY" in screen(app).splitlines()[1]
        await press(app, pilot, "v")
        assert "DIFF  first at" in screen(app)


async def test_at_asks_for_an_index_and_inspects_there() -> None:
    engine = ScriptedEngine()
    async with opened(A, B, engine=engine) as (app, pilot):
        await press(app, pilot, "enter", "at", *"1,2,3", "enter")
        assert engine.last("inspect").params["at"] == [1, 2, 3]
        await press(app, pilot, "at", *"x", "enter")
        assert "not an index" in toasts(app)[-1]


@pytest.mark.long
async def test_z_gives_a_pane_the_screen_and_esc_takes_it_back() -> None:
    async with opened(A, B) as (app, pilot):
        await press(app, pilot, "3", "z")
        assert "2 Tensors" not in screen(app)
        assert "3 Inspect" in screen(app)
        await press(app, pilot, "escape")
        assert "2 Tensors" in screen(app)


async def test_a_pair_without_a_divergence_selects_the_first_difference() -> None:
    close = document("comparison_same")
    entry = close["tensors"][5]
    entry["verdict"] = "CLOSE"
    close["counts"].update(SAME=33, CLOSE=1)
    close["first_difference"] = {**entry, "index": {"sample": 0, "position": 2}, "a": 1.0, "b": 1.0001}
    async with opened(A, B, engine=ScriptedEngine(compare=close)) as (app, _):
        assert app.session.state.tensors.selected == 5
        assert "bitwise they part first at " + entry["name"] in screen(app)


@pytest.mark.long
async def test_an_error_goes_when_something_else_is_asked_and_what_is_cancelled_is_said() -> None:
    engine = ScriptedEngine(open={**document("run_a"), "models": {}})
    engine.gate = asyncio.Event()
    async with opened(A, engine=engine) as (app, pilot):
        await press(app, pilot, "r")
        assert "ERROR  no model to replay with" in screen(app).splitlines()[1]
        await press(app, pilot, "M", *"random:llama-tiny", "enter")
        assert "ERROR" not in screen(app).splitlines()[1]
        await pilot.press("r")
        await until(pilot, lambda: "RUN  replaying" in screen(app))
        await pilot.press("ctrl+c")
        await rest(app, pilot)
        assert "CANCELLED  replaying padded, sdpa, float32" in screen(app).splitlines()[1]
        assert "cancelled: replaying padded, sdpa, float32" in toasts(app)


async def test_a_look_that_gives_way_to_a_replay_is_not_told_as_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never_ends(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(ScriptedEngine, "_inspect", never_ends)
    app = RldbgApp(A, engine=(engine := ScriptedEngine()))
    async with app.run_test() as pilot:
        await until(pilot, lambda: "inspect" in engine.kinds(), "the look")
        monkeypatch.undo()
        await pilot.press("r")
        await until(pilot, lambda: "replay" in engine.kinds(), "the replay")
        await rest(app, pilot)
        assert not [one for one in toasts(app) if one.startswith("cancelled")]


@pytest.mark.long
async def test_what_a_matrix_took_is_not_what_a_replay_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errands, "_WORTH_S", 0.0)
    engine = ScriptedEngine()
    async with opened(A, engine=engine) as (app, pilot):
        await press(app, pilot, "m", "r", "escape")
        assert remembered.took("matrix", A, None) is not None
        engine.gate = asyncio.Event()
        await pilot.press("r")
        await until(pilot, lambda: "RUN  replaying" in screen(app))
        assert app.session.state.job.busy is not None
        assert app.session.state.job.busy.usual_s is None
        engine.gate.set()
        await rest(app, pilot)
        await press(app, pilot, "r")
        assert remembered.took("replaying padded, sdpa, float32", A, None) is not None


async def test_a_comparison_that_fails_leaves_the_tensors_that_were_there() -> None:
    engine = ScriptedEngine(compare=TruncatedError("the file ends early"))
    async with opened(A, engine=engine) as (app, pilot):
        before = [row.name for row in app.session.state.tensors.rows]
        await press(app, pilot, "c", *str(B), "enter")
        assert "ERROR  the file ends early" in screen(app).splitlines()[1]
        assert "Comparing." not in screen(app)
        assert [row.name for row in app.session.state.tensors.rows] == before


async def test_a_record_that_cannot_be_read_leaves_head_and_pane_at_the_step_before() -> None:
    def answer(job: Any) -> Any:
        return TruncatedError("the file ends early") if job.params["key"]["step"] == 3 else None

    async with opened(A, engine=ScriptedEngine(record=answer)) as (app, pilot):
        await press(app, pilot, "1", "G")
        assert "ERROR  the file ends early" in screen(app).splitlines()[1]
        assert "Tensors · of step 0" in screen(app)
        assert "step 0" in screen(app).splitlines()[0]


@pytest.mark.parametrize("size", [(80, 24), (160, 48)], ids=str)
async def test_the_log_shows_what_came_while_it_was_hidden_and_wraps_to_its_width(size: tuple[int, int]) -> None:
    line = " ".join(f"word{i}" for i in range(40))
    async with opened(A, size=size) as (app, pilot):
        app.debugger.log_line(line)
        await press(app, pilot, "4")
        assert "word0 word1" in screen(app)
        assert "word39" in screen(app)
        await pilot.resize_terminal(60, 24)
        await press(app, pilot)
        assert "word39" in screen(app), "a line is wrapped to the width there is now"


async def test_the_worst_is_under_the_cursor_when_the_worst_come_first() -> None:
    async with opened(A, B) as (app, pilot):
        await press(app, pilot, "S")
        state = app.session.state
        assert state.tensors.selected == state.tensors.shown[0]
        assert state.tensors.row is not None
        assert state.tensors.row.name == "layers.1.input_layernorm.output"


@pytest.mark.long
async def test_the_head_of_a_column_pressed_twice_sorts_by_it() -> None:
    async with opened(A, B) as (app, pilot):
        head = app.debugger.query_one("#tensor-rows")
        await pilot.click(head, offset=(head.size.width - 25, 0), times=2)
        await rest(app, pilot)
        assert app.session.state.tensors.sort == "worst first"
        await pilot.click(head, offset=(15, 0), times=2)
        await rest(app, pilot)
        assert app.session.state.tensors.sort == "name"
        await pilot.click(head, offset=(15, 0), times=2)
        await rest(app, pilot)
        assert app.session.state.tensors.sort == "order of computation"


@pytest.mark.parametrize("width", [60, 80, 160])
async def test_work_that_says_nothing_is_seen_to_run_and_how_to_stop_it(width: int) -> None:
    engine = ScriptedEngine()
    engine.gate = asyncio.Event()
    async with opened(A, engine=engine, size=(width, 24)) as (app, pilot):
        await pilot.press("r")
        await until(pilot, lambda: "RUN  replaying" in screen(app))
        seen: set[str] = set()
        await until(pilot, lambda: seen.add(screen(app).splitlines()[2]) or len(seen) > 2, "something that moves")  # type: ignore[func-returns-value]
        assert all("ctrl+c cancels" in line for line in seen)
        await pilot.press("ctrl+c")
        await rest(app, pilot)


@pytest.mark.long
async def test_d_leads_to_the_first_divergence_from_any_screen_and_esc_back_to_it() -> None:
    async with opened(A, B) as (app, pilot):
        for key, name in (("m", "matrix"), ("C", "trends"), ("P", "parity")):
            await press(app, pilot, "G", key)
            assert app.screen is not app.debugger
            await press(app, pilot, "J")
            await until(pilot, lambda: "not ruled: no weights" in "".join(toasts(app)), "what the referee lacks")
            await press(app, pilot, "d")
            await until(pilot, lambda: app.screen is app.debugger, "the debugger's screen")
            await rest(app, pilot)
            assert app.session.state.tensors.row is not None
            assert app.session.state.tensors.row.is_first
            assert f"rldbg  {name} ›" in screen(app).splitlines()[0]
            await press(app, pilot, "escape")
            await until(pilot, lambda name=name: getattr(app.screen, "KEYS_OF", "") == name, f"the {name} screen again")  # type: ignore[misc]
            await press(app, pilot, "escape")
            await until(pilot, lambda: "›" not in screen(app).splitlines()[0], "the trail is gone")


@pytest.mark.parametrize("size", [(80, 24), (160, 48)], ids=str)
async def test_where_a_matrix_without_tokens_is_worst_is_said_whole_and_a_number_has_no_place(
    size: tuple[int, int],
) -> None:
    answer = document("comparison")
    apart = [row for row in answer["tensors"] if row["verdict"] == "DIFF"]
    for row, raw in ((apart[0], [151_935, 4095]), (apart[1], [])):
        row["metrics"]["worst_token"] = None
        row["index"] = {"sample": None, "position": None, "raw_a": raw, "raw_b": raw, "sample_b": None}
    async with opened(A, B, engine=ScriptedEngine(compare=answer), size=size) as (app, pilot):
        await press(app, pilot, "2")
        assert "[151935,4095]" in screen(app)
        assert "[]" not in screen(app)


async def test_no_name_is_cut_while_what_both_sides_have_alike_takes_its_cells() -> None:
    answer = document("comparison")
    name = "layers.0.self_attn.inputs.position_embeddings.0"
    answer["tensors"][1]["name"] = name
    async with opened(A, B, engine=ScriptedEngine(compare=answer), size=(200, 60)) as (app, _):
        assert name in screen(app)


async def test_a_short_name_leaves_its_cells_to_where_it_is() -> None:
    answer = document("comparison")
    for row in answer["tensors"]:
        row["a_key"] = {"step": 0, "rank": None, "micro": None, "stage": "prepared_trajectories"}
    answer["tensors"][0]["a_key"] = {"step": 0, "rank": 1, "micro": 0, "stage": "forward_data"}
    answer["tensors"][1]["name"] = "input_ids"
    answer["tensors"][2]["name"] = long = "layers.0.self_attn.inputs.position_embeddings.0"
    async with opened(A, B, engine=ScriptedEngine(compare=answer), size=(80, 24)) as (app, _):
        rows = app.debugger.query_one(TensorRows)
        short_line, long_line = (rows.line(row, 78) for row in (1, 2))
        assert " input_ids " in short_line.plain
        assert " prepared_trajectories " in short_line.plain
        assert "layers.0." in long_line.plain
        assert long not in long_line.plain
        assert short_line.cell_len == long_line.cell_len == 78


async def test_a_tensor_that_is_selected_and_not_read_yet_is_named_under_the_glass() -> None:
    async with opened(A, B) as (app, pilot):
        app.session.state.inspection.document = None
        app.debugger.redraw(Part.TENSORS)
        await rest(app, pilot)
        shown = screen(app)
        assert "Nothing selected" not in shown
        assert "Not read yet" in shown


@pytest.mark.long
async def test_a_long_list_is_as_wide_as_its_longest_names_and_counts_in_thousands() -> None:
    answer = document("comparison_same")
    entry = answer["tensors"][0]
    answer["tensors"] = [{**entry, "name": f"layers.{i}.p"} for i in range(12_000)]
    answer["tensors"][-1] = last = {**entry, "name": "layers.11999.mlp.down_proj.weight", "verdict": "CLOSE"}
    answer["counts"].update(SAME=11_999, CLOSE=1, total=12_000)
    async with opened(A, B, size=(80, 24), engine=ScriptedEngine(compare=answer)) as (app, pilot):
        assert "1 CLOSE · 11,999 SAME of 12,000" in screen(app)
        await press(app, pilot, "G")
        assert last["name"] in screen(app)


async def test_what_was_told_for_information_gives_its_room_to_the_next_and_an_error_stays() -> None:
    async with opened(A, B, size=(80, 24)) as (app, pilot):
        app._tell("it broke", "error")
        await press(app, pilot, "S", "S", "S")
        told = toasts(app)
        assert told.count("it broke") == 1
        assert [one for one in told if one.startswith("sorted")] == ["sorted: order of computation"]


async def test_a_wide_name_leaves_the_figures_in_their_columns() -> None:
    answer = document("comparison")
    wide = answer["tensors"][3]
    wide["name"] = "层" * 40
    async with opened(A, B, size=(80, 24), engine=ScriptedEngine(compare=answer)) as (app, _):
        rows = app.debugger.query_one(TensorRows)
        lines = [rows.line(row, 78) for row in (3, 4)]
        assert [line.cell_len for line in lines] == [78, 78]
