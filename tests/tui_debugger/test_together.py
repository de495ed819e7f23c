"""Several paths on the screen: parts of one run, or two runs to compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from replay_core import workbench
from replay_core.jobs import Job
from tests.fixtures import FIXTURES
from tests.tui_debugger.driving import A, opened, screen
from tests.tui_debugger.scripted import ScriptedEngine
from tui_debugger import remembered
from tui_debugger.state import Opened
from tui_debugger.together import are_one_run, folder_of, named, sides


def _run(dialect: str, *kinds: tuple[str, str]) -> dict[str, Any]:
    return {"dialect": dialect, "records": [{"key": {"role": role, "stage": stage}} for role, stage in kinds]}


ROLLOUT, BATCH, LOG = ("rollout", "trajectory"), ("actor", "batch_inputs"), ("actor", "optimizer")


@pytest.mark.parametrize(
    ("a", "b", "one"),
    [
        (_run("slime", ROLLOUT), _run("slime", BATCH), True),
        (_run("slime", BATCH), _run("slime", BATCH), False),
        (_run("slime", ROLLOUT, BATCH), _run("slime", BATCH), False),
        (_run("verl", ROLLOUT), _run("slime", BATCH), False),
        (_run("verl", BATCH), _run("log", LOG), True),
        (_run("log", LOG), _run("log", LOG), False),
        (_run("verl"), _run("log", LOG), False),
    ],
)
def test_two_paths_are_one_run_where_one_framework_wrote_records_of_different_kinds(a: Any, b: Any, one: bool) -> None:
    assert are_one_run(a, b) is one
    assert are_one_run(b, a) is one


@pytest.mark.parametrize(
    ("a", "b", "one"),
    [
        ("slime/rollout_data", "slime/train_data", True),
        ("verl/rollout_data_dir", "verl/rollout_dump", True),
        ("verl/train_batch_step1.dp", "verl/metrics_step1.json", True),
        ("nexrl/self_hosted_fp32", "nexrl/self_hosted_bf16", False),
        ("sglang_dumper/baseline_sdpa_fp32", "sglang_dumper/target_eager_bf16", False),
        ("verl/train_batch_step1.dp", "slime/train_data", False),
    ],
)
def test_genuine_dumps_are_told_apart(a: str, b: str, one: bool) -> None:
    assert are_one_run(*(workbench.open_dump(FIXTURES / path) for path in (a, b))) is one


def test_every_job_about_a_names_the_other_directories_of_its_run() -> None:
    opened = Opened(a_path=Path("/run/rollouts"), more=("/run/train",))
    assert named(opened, "/run/rollouts") == {"path": "/run/rollouts", "more": ["/run/train"]}
    assert named(opened, "/other") == {"path": "/other"}
    assert sides(opened, "/run/rollouts", "/other") == {"a": "/run/rollouts", "b": "/other", "more_a": ["/run/train"]}


def test_a_replay_reads_the_directory_its_record_lies_in() -> None:
    opened = Opened(a_path=Path("/run/rollouts"), more=("/run/train",))
    assert folder_of(opened, ["/run/train/step_1.pt"]) == "/run/train"
    assert folder_of(opened, ["/elsewhere/step_1.pt"]) is None


@pytest.mark.long
async def test_the_screen_shows_both_directories_and_inspects_in_both() -> None:
    engine = ScriptedEngine()

    async with opened(A, engine=engine, more=[Path("/runs/demo/log")]) as (app, _):
        assert f"A {A} + log" in screen(app)
    for kind in ("open", "record"):
        assert engine.last(kind).params["more"] == ["/runs/demo/log"]
    assert engine.last("inspect").params["a"]["more"] == ["/runs/demo/log"]
    assert engine.last("diagnose").params["paths"] == [str(A), "/runs/demo/log"]


def test_a_record_of_either_directory_can_be_looked_at() -> None:
    from replay_core import desk

    paths = [FIXTURES / "slime" / name for name in ("rollout_data", "train_data")]
    where = {"path": str(paths[0]), "more": [str(paths[1])]}
    run = desk.perform(Job("open", where))
    stages = {record["key"]["stage"] for record in run["records"]}
    assert {"trajectory", "batch_inputs"} <= stages
    for record in run["records"]:
        shown = desk.perform(Job("record", {**where, "key": record["key"]}))
        name = next(field["name"] for field in shown["fields"] if field["value"] is None)
        assert desk.perform(Job("inspect", {"a": {**where, "key": record["key"], "name": name}}))["a"]["name"] == name


def test_a_run_of_two_directories_is_remembered_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir()
    b.mkdir()
    remembered.keep_place(a, None, {"tensor": "x"}, [str(b)])
    assert remembered.place(a, None, [str(b)])["tensor"] == "x"
    assert remembered.place(a, b) == {}
    assert [names for names, _ in remembered.recent()] == [[str(a), f"+{b}"]]
