"""A document that was written is the same document when it is read; one that is damaged says where."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core import desk, workbench
from replay_core.documents.reopening import is_document, read_document
from replay_core.errors import DumpError
from replay_core.export.documents import write_document
from replay_core.jobs import Job
from replay_core.records import Selection
from tests.builders import write_pair
from tests.fixtures import FIXTURES


@pytest.fixture
def written(tmp_path: Path) -> tuple[Any, Path]:
    a = {"x": torch.tensor([1.0, float("nan")]), "y": torch.ones(2, 3)}
    doc = workbench.compare_dumps(*write_pair(tmp_path, {"modules": a}, {"modules": {**a, "y": torch.zeros(2, 3)}}))
    write_document(doc, tmp_path / "snapshot.json")
    return doc, tmp_path / "snapshot.json"


def test_a_snapshot_reopens_as_it_was_written(written: tuple[Any, Path]):
    doc, path = written
    assert is_document(path)
    assert workbench.reopen(path) == doc
    assert desk.perform(Job("reopen", {"path": str(path)})) == doc


@pytest.mark.long
def test_every_kind_of_document_reopens(tmp_path: Path):
    run = FIXTURES / "nexrl/self_hosted_fp32"
    documents: list[Any] = [
        workbench.open_dump(run, headers=True),
        workbench.show_record(run, None, step=Selection.parse(0), stage="datums", stats=True),
        workbench.compare_dumps(run, FIXTURES / "nexrl/self_hosted_bf16"),
    ]
    for number, doc in enumerate(documents):
        write_document(doc, tmp_path / f"{number}.json")
        assert workbench.reopen(tmp_path / f"{number}.json") == doc


def test_a_schema_from_the_future_is_refused_by_its_name(written: tuple[Any, Path]):
    doc, path = written
    path.write_text(json.dumps({**doc, "schema_version": 2, "tool": "rldbg 9.9"}))
    with pytest.raises(DumpError) as refused:
        read_document(path)
    assert "schema from the future" in str(refused.value)
    assert "schema_version 2, written by rldbg 9.9" in str(refused.value)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda doc: doc.pop("coverage"), "comparison has no coverage"),
        (lambda doc: doc["counts"].update(total=-1), "comparison.counts.total is -1, below 0"),
        (lambda doc: doc["tensors"][0].update(verdict="FINE"), "comparison.tensors[0].verdict is 'FINE'"),
        (lambda doc: doc["tensors"][0].pop("reason"), "comparison.tensors[0] has no reason"),
        (lambda doc: doc.update(surprise=1), "'surprise', which nobody wrote"),
        (lambda doc: doc.update(kind="poem"), "of a kind that rldbg does not know"),
        (lambda doc: doc.update(schema_version="1"), "is no document of rldbg's"),
        (lambda doc: doc["counts"].update(DIFF=9), "comparison.counts.DIFF is 9, and the tensors listed are"),
        (lambda doc: doc["counts"].update(total=0), "comparison.counts.total is 0, and the tensors listed are"),
        (lambda doc: doc.update(notes="text"), "comparison.notes is 'text', not array"),
        (lambda doc: doc["first_difference"].pop("why"), "comparison.first_difference has no why"),
        (lambda doc: doc["tensors"][0].update(a={}), "comparison.tensors[0].a is {}"),
    ],
)
def test_a_damaged_document_says_where(spoil: Any, says: str, written: tuple[Any, Path]):
    doc, path = written
    spoil(doc)
    path.write_text(json.dumps(doc))
    with pytest.raises(DumpError) as refused:
        read_document(path)
    assert says in str(refused.value)
    assert str(path) in str(refused.value)


def test_a_number_too_large_for_a_float_is_no_number(written: tuple[Any, Path]):
    """Else it is infinite here, and the page that is made of the document cannot be written."""
    doc, path = written
    path.write_text(re.sub(r": \d+\.\d+", ": 1e999", json.dumps(doc), count=1))
    with pytest.raises(DumpError, match="is inf"):
        read_document(path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "nonsense", '{"schema_version": NaN}', "\x00"])
def test_what_is_no_document_is_refused(text: str, tmp_path: Path):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(DumpError):
        read_document(path)


def test_a_document_of_documents_without_end_is_refused(written: tuple[Any, Path]):
    doc, path = written
    for _ in range(300):
        doc = {**doc, "others": [doc]}
    path.write_text(json.dumps(doc))
    with pytest.raises(DumpError, match=r"deeper than any document|not JSON"):
        read_document(path)


def test_a_document_that_breaks_off_is_no_document(written: tuple[Any, Path]):
    _, path = written
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DumpError, match="not JSON"):
        read_document(path)
    with pytest.raises(DumpError, match="cannot open"):
        read_document(path.with_name("nothing.json"))
