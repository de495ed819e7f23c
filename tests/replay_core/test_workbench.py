from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
import torch

from replay_core import desk, workbench
from replay_core.errors import RequestError, SelectionError
from replay_core.jobs import Event, Job, Partial, Progress
from replay_core.records import RecordKey, Selection
from tests.builders import there, write_dump, write_pair
from tests.replay_core.documents.test_schema import validate


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two layers; b's second one is wrong."""
    a = {f"layers.{layer}.mlp.output": torch.ones(2, 3) for layer in range(2)}
    return write_pair(tmp_path, {"modules": a}, {"modules": {**a, "layers.1.mlp.output": torch.zeros(2, 3)}})


def test_the_first_divergence_comes_before_the_document(pair: tuple[Path, Path]):
    events: list[Event] = []
    document = workbench.compare_dumps(*pair, on_event=events.append)
    partial = next(event for event in events if isinstance(event, Partial))
    assert (
        there(partial.document["first_divergence"])["name"]
        == there(document["first_divergence"])["name"]
        == "layers.1.mlp.output"
    )
    last = [event for event in events if isinstance(event, Progress)][-1]
    assert last.done == last.total == 2


@pytest.mark.parametrize("kind", ["open", "record", "inspect", "compare", "diagnose"])
def test_a_job_that_lacks_a_parameter_is_a_wrong_request(kind: str):
    with pytest.raises(RequestError, match="lacks the parameter"):
        desk.perform(Job(kind))


def test_a_job_nobody_knows_is_a_wrong_request():
    with pytest.raises(RequestError, match="no job 'nothing'"):
        desk.perform(Job("nothing"))


def test_jobs_answer_as_the_functions_do(pair: tuple[Path, Path]):
    asked = {"a": str(pair[0]), "b": str(pair[1]), "step": "0"}
    by_job = desk.perform(Job("compare", asked))
    by_function = workbench.compare_dumps(*pair, step=Selection.parse(0))
    assert {**by_job, "created": ""} == {**by_function, "created": ""}
    key = RecordKey(0, 0, 0, "actor", "modules").to_mapping()
    record = desk.perform(Job("record", {"path": str(pair[0]), "key": key, "stats": True}))
    assert [field["stats"]["mean"] for field in record["fields"]] == [1.0, 1.0]


def test_a_key_that_is_not_there_is_a_wrong_request(pair: tuple[Path, Path]):
    with pytest.raises(SelectionError, match="no record of step 5"):
        workbench.show_record(pair[0], RecordKey(5))


def test_opening_by_names_reads_no_header(pair: tuple[Path, Path]):
    next((pair[0] / "modules").glob("*.pt")).write_bytes(b"rubbish")
    assert workbench.open_dump(pair[0])["unreadable"] == 0
    document = workbench.open_dump(pair[0], headers=True)
    assert (document["unreadable"], len(document["problems"])) == (1, 1)


def test_two_dumps_are_judged_again_without_being_read(tmp_path: Path):
    a = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    paths = write_pair(tmp_path, {"modules": {"x": a}}, {"modules": {"x": a * 1.01}})
    first = workbench.compare_dumps(*paths)
    assert first["counts"]["DIFF"] == 1
    for path in paths:
        shutil.rmtree(path)
    lenient = desk.perform(Job("rejudge", {"a": str(paths[0]), "b": str(paths[1]), "rtol": 0.02}))
    assert (lenient["counts"]["CLOSE"], lenient["first_divergence"]) == (1, None)
    again = workbench.rejudge(*paths)
    assert again["first_divergence"] == first["first_divergence"]
    with pytest.raises(RequestError, match="--atol is no tolerance"):
        workbench.rejudge(*paths, atol=float("nan"))
    with pytest.raises(RequestError, match="not compared last"):
        workbench.rejudge(paths[1], paths[0])


def test_a_comparison_says_what_a_person_had_it_judged_by(pair: tuple[Path, Path], tmp_path: Path):
    assert workbench.compare_dumps(*pair)["tolerance"] is None
    given = {"atol": 2.0, "rtol": None, "file": None, "exact": False}
    assert workbench.compare_dumps(*pair, atol=2.0)["tolerance"] == given
    assert desk.perform(Job("rejudge", {"a": str(pair[0]), "b": str(pair[1]), "exact": True}))["tolerance"] == {
        "atol": None, "rtol": None, "file": None, "exact": True,
    }  # fmt: skip
    assert workbench.rejudge(*pair)["tolerance"] is None
    rules = tmp_path / "mine.toml"
    rules.write_text('[[tolerance]]\nname = "*"\nreason = "known"\nrtol = 0.1\n')
    document = workbench.compare_dumps(*pair, tolerance_file=rules)
    assert document["tolerance"] == {"atol": None, "rtol": None, "file": str(rules), "exact": False}
    validate(document)


def test_what_lies_around_another_first_divergence_is_not_shown_beside_this_one(tmp_path: Path):
    a = {"x": torch.ones(2, 3), "y": torch.ones(2, 3)}
    a_path, b_path = write_pair(tmp_path, {"modules": a}, {"modules": {"x": a["x"] * 1.3, "y": a["y"] * 3}})
    document = workbench.compare_dumps(a_path, b_path)
    assert there(document["first_divergence"])["name"] == "x"
    assert there(there(document["first_divergence"])["around"])["b"][0] == pytest.approx(1.3)
    again = workbench.rejudge(a_path, b_path, rtol=0.5)
    assert there(again["first_divergence"])["name"] == "y"
    assert there(again["first_divergence"])["around"] is None


def test_a_diagnosis_is_a_job_of_the_reader(pair: tuple[Path, Path]):
    events: list[Event] = []
    document = desk.perform(Job("diagnose", {"path": str(pair[0]), "rules": ["D21", "D08"]}), events.append)
    assert document["kind"] == "diagnosis"
    assert document["checked"] == ["D21"]
    assert [one["id"] for one in document["skipped"]] == ["D08"]
    both = desk.perform(Job("diagnose", {"paths": [str(path) for path in pair], "rules": ["D21"]}))
    assert both["checked"] == ["D21"]


def test_an_unknown_rule_is_refused_before_anything_is_read(tmp_path: Path):
    with pytest.raises(RequestError, match="D00"):
        workbench.diagnose(tmp_path / "nothing", rules=["D00"])


def test_a_tensor_that_one_record_of_the_selection_holds_names_its_record(tmp_path: Path) -> None:
    dump = write_dump(
        tmp_path / "dump",
        {"forward_data": {"log_probs": torch.zeros(2, 3)}, "loss": {"loss": torch.tensor(1.0)}},
    )
    shown = workbench.show_tensor(dump, "log_probs", step=Selection.parse(0))
    assert shown["a"]["key"]["stage"] == "forward_data"
    with pytest.raises(SelectionError, match="2 records match"):
        workbench.show_tensor(dump, "nothing_of_this_name", step=Selection.parse(0))


def test_a_step_of_ten_thousand_metrics_is_shown_in_a_second(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1, **{f"metric_{number}": 0.5 for number in range(10_000)}}) + "\n")
    began = time.thread_time()
    assert len(workbench.show_record(path, None, stats=True)["fields"]) >= 10_000
    assert time.thread_time() - began < 4  # it was the square of their number: forty
