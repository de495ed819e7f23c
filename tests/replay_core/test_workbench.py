from __future__ import annotations

from pathlib import Path

import pytest
import torch

from replay_core import workbench
from replay_core.errors import RequestError, SelectionError
from replay_core.jobs import Event, Job, Partial, Progress
from replay_core.records import RecordKey
from tests.builders import write_pair


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two layers; b's second one is wrong."""
    a = {f"layers.{layer}.mlp.output": torch.ones(2, 3) for layer in range(2)}
    return write_pair(tmp_path, {"modules": a}, {"modules": {**a, "layers.1.mlp.output": torch.zeros(2, 3)}})


def test_the_first_divergence_comes_before_the_document(pair: tuple[Path, Path]):
    events: list[Event] = []
    document = workbench.compare_dumps(*pair, on_event=events.append)
    partial = next(event for event in events if isinstance(event, Partial))
    assert partial.document["first_divergence"]["name"] == document["first_divergence"]["name"] == "layers.1.mlp.output"
    last = [event for event in events if isinstance(event, Progress)][-1]
    assert last.done == last.total == 2


@pytest.mark.parametrize("kind", ["open", "record", "inspect", "compare", "diagnose"])
def test_a_job_that_lacks_a_parameter_is_a_wrong_request(kind: str):
    with pytest.raises(RequestError, match="lacks the parameter"):
        workbench.perform(Job(kind))


def test_a_job_nobody_knows_is_a_wrong_request():
    with pytest.raises(RequestError, match="no job 'nothing'"):
        workbench.perform(Job("nothing"))


def test_jobs_answer_as_the_functions_do(pair: tuple[Path, Path]):
    asked = {"a": str(pair[0]), "b": str(pair[1]), "step": "0"}
    by_job = workbench.perform(Job("compare", asked))
    assert {**by_job, "created": ""} == {**workbench.compare_dumps(*pair), "created": ""}
    key = RecordKey(0, 0, 0, "actor", "modules").to_mapping()
    record = workbench.perform(Job("record", {"path": str(pair[0]), "key": key, "stats": True}))
    assert [field["stats"]["mean"] for field in record["fields"]] == [1.0, 1.0]


def test_a_key_that_is_not_there_is_a_wrong_request(pair: tuple[Path, Path]):
    with pytest.raises(SelectionError, match="no record of step 5"):
        workbench.show_record(pair[0], RecordKey(5))


def test_opening_by_names_reads_no_header(pair: tuple[Path, Path]):
    next((pair[0] / "modules").glob("*.pt")).write_bytes(b"rubbish")
    assert workbench.open_dump(pair[0])["unreadable"] == 0
    document = workbench.open_dump(pair[0], headers=True)
    assert (document["unreadable"], len(document["problems"])) == (1, 1)


def test_a_diagnosis_is_a_job_of_the_reader(pair: tuple[Path, Path]):
    events: list[Event] = []
    document = workbench.perform(Job("diagnose", {"path": str(pair[0]), "rules": ["D21", "D08"]}), events.append)
    assert document["kind"] == "diagnosis"
    assert document["checked"] == ["D21"]
    assert [one["id"] for one in document["skipped"]] == ["D08"]
    both = workbench.perform(Job("diagnose", {"paths": [str(path) for path in pair], "rules": ["D21"]}))
    assert both["checked"] == ["D21"]


def test_an_unknown_rule_is_refused_before_anything_is_read(tmp_path: Path):
    with pytest.raises(RequestError, match="D99"):
        workbench.diagnose(tmp_path / "nothing", rules=["D99"])
