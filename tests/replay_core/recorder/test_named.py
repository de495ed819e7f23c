"""Recording in two passes: figures of everything and their comparison, then the values of what it named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core import workbench
from replay_core.dumps import open_run
from replay_core.errors import DumpError, RequestError
from replay_core.recorder import Recorder


def recorded(directory: Path, *, is_wrong: bool = False, **options: Any) -> Path:
    """Three steps of two ranks; one output of one of them off in one element, if wrong."""
    with Recorder(directory, level="stats", **options) as recorder:
        for rank in range(2):
            for step in range(3):
                torch.manual_seed(step)
                fields = {f"layers.{layer}.mlp.output": torch.randn(2, 6, 8) for layer in range(5)}
                if is_wrong and (step, rank) == (1, 1):
                    fields["layers.3.mlp.output"][0, 2, 3] += 1
                ids_BS = torch.arange(12).reshape(2, 6) + step
                with recorder.step(step, rank=rank) as record:
                    record("batch_inputs", micro=0, input_ids=ids_BS, attention_mask=torch.ones_like(ids_BS))
                    record("modules", fields, micro=0)
                    record("forward_data", micro=0, log_probs=-torch.rand(2, 6), texts=["a", "b"], note=1.5)
    return directory


@pytest.fixture
def named(tmp_path: Path) -> Path:
    doc = workbench.compare_dumps(recorded(tmp_path / "a"), recorded(tmp_path / "b", is_wrong=True))
    (tmp_path / "comparison.json").write_text(json.dumps(doc))
    return tmp_path / "comparison.json"


def test_the_second_pass_keeps_the_values_of_what_parted_and_the_figures_of_all_else(
    named: Path, tmp_path: Path
) -> None:
    a, b = recorded(tmp_path / "a2", whole=named), recorded(tmp_path / "b2", is_wrong=True, whole=str(named))
    files = sorted(str(file.relative_to(a)) for file in a.rglob("step_*"))
    assert files == ["batch_inputs/step_000001_rank1_micro0.pt", "modules/step_000001_rank1_micro0.pt"]
    doc = workbench.compare_dumps(a, b)
    first = doc["first_divergence"]
    assert first is not None
    assert first["index"] == {"sample": 0, "position": 2, "raw_a": [0, 2, 3], "raw_b": [0, 2, 3], "sample_b": None}
    assert first["b"] == pytest.approx(float(first["a"]) + 1)  # type: ignore[arg-type]
    before = workbench.compare_dumps(tmp_path / "a", tmp_path / "b")
    assert doc["counts"] == before["counts"], "what is not whole is compared by its digest, as in the first pass"
    assert doc["coverage"]["tensors_by_digest"] == 2 * 3 * 9 - 3, "numbers stand in the index themselves"


def test_a_field_that_is_not_whole_is_listed_in_its_place_and_says_why_it_cannot_be_read(
    named: Path, tmp_path: Path
) -> None:
    run = open_run(recorded(tmp_path / "a2", whole=named))
    record = next(one for one in run.records if (one.key.step, one.key.rank, one.key.stage) == (1, 1, "modules"))
    assert [ref.name for ref in record.tensors()] == [f"layers.{layer}.mlp.output" for layer in range(5)]
    assert [ref.is_readable for ref in record.tensors()] == [False, False, False, True, False]
    assert record.names == tuple(ref.name for ref in record.tensors())
    assert not run.problems


def test_nothing_that_differs_and_no_comparison_are_refused_before_anything_is_recorded(
    named: Path, tmp_path: Path
) -> None:
    doc = json.loads(named.read_text())
    same = tmp_path / "same.json"
    same.write_text(json.dumps({**doc, "tensors": [one for one in doc["tensors"] if one["verdict"] == "SAME"]}))
    torn = tmp_path / "torn.json"
    torn.write_text(json.dumps({**doc, "tensors": [{"verdict": "DIFF"}]}))
    cases: tuple[tuple[type[Exception], str, Path], ...] = (
        (RequestError, "names no tensor that differs", same),
        (DumpError, "damaged", torn),
        (DumpError, "no comparison", tmp_path / "a" / "manifest.json"),
        (DumpError, "cannot be read", tmp_path / "none.json"),
    )
    for kind, what, file in cases:
        with pytest.raises(kind, match=what):
            Recorder(tmp_path / "new", level="stats", whole=file)
    with pytest.raises(RequestError, match="whole"):
        Recorder(tmp_path / "new", whole=named)
    assert not (tmp_path / "new").exists()


def test_only_chosen_ranks_are_kept_and_all_may_call(tmp_path: Path) -> None:
    run = open_run(recorded(tmp_path / "a", ranks=[1]))
    assert {record.key.rank for record in run.records} == {1}
    with Recorder(tmp_path / "none", ranks=[1]) as recorder, recorder.step(0, rank=None) as record:
        record("loss", loss=1.0)
    assert len(open_run(tmp_path / "none").records) == 1
    with pytest.raises(RequestError, match="ranks"):
        Recorder(tmp_path / "wrong", ranks="0")
