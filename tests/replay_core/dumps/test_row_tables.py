"""Rollout logs of which there is no genuine file here, in the form their frameworks' sources give them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from replay_core.dumps import open_run
from replay_core.errors import DumpError
from replay_core.records import Run


def written(root: Path, name: str, *rows: dict[str, Any]) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def keys(run: Run) -> list[tuple[int | None, int | None, str | None]]:
    return [(record.key.step, record.key.micro, record.key.role) for record in run.records]


AREAL = {
    "task_id": "t", "sample_idx": 0, "seqlen": 9, "prompt_len": 4, "head_version": 3, "tail_version": 3,
    "version_rle": [[3, 5]], "reward": 1.0, "prompt": "p", "completion": "c",
}  # fmt: skip


def test_areals_text_rollouts_are_a_record_per_task(tmp_path: Path) -> None:
    for task in ("a", "b"):
        written(tmp_path, f"rollout/3/{task}.jsonl", AREAL, {**AREAL, "sample_idx": 1})
    written(tmp_path, "eval-rollout/3/c.jsonl", AREAL)
    run = open_run(tmp_path)
    assert run.dialect == "areal"
    assert keys(run) == [(3, None, "eval"), (3, 0, "rollout"), (3, 1, "rollout")]
    names = {ref.canonical: ref.shape for ref in run.records[1].tensors()}
    assert names["prompt_text"] == names["response_text"] == names["reward"] == (2,)


def test_rolls_both_forms_are_columns_per_step(tmp_path: Path) -> None:
    columns = {"responses": ["x", "y"], "scores": [0.5, 1.0], "domain": ["m", "m"], "global_step": 1}
    written(tmp_path, "a/rollout_data.jsonl", columns, {**columns, "global_step": 2})
    written(tmp_path, "b/rollout_dump_data.step_7.jsonl", {**columns, "global_step": 7})
    run = open_run(tmp_path)
    assert run.dialect == "roll"
    assert run.steps() == [1, 2, 7]
    assert {ref.canonical: ref.shape for ref in run.records[0].tensors()}["reward"] == (2,)


def test_ms_swifts_completions_are_columns_per_step(tmp_path: Path) -> None:
    row = {"step": 1, "prompt": ["p", "p"], "completion": ["c", "d"], "acc": [0.0, 1.0], "advantages": [-1.0, 1.0]}
    written(tmp_path, "completions.jsonl", row, {**row, "step": 2})
    run = open_run(tmp_path)
    assert (run.dialect, run.steps()) == ("ms_swift", [1, 2])
    assert {ref.canonical: ref.shape for ref in run.records[1].tensors()}["advantages"] == (2,)


def test_verls_validation_rollouts_are_nobodys_training(tmp_path: Path) -> None:
    row = {"input": "p", "output": "c", "gts": "1", "score": 0.5, "step": 4}
    written(tmp_path, "train/4.jsonl", row)
    written(tmp_path, "validation/4.jsonl", row)
    assert keys(open_run(tmp_path)) == [(4, None, "rollout"), (4, None, "eval")]


def test_a_shard_of_rollouts_holds_many_steps(tmp_path: Path) -> None:
    row = {"sample_idx": 0, "prompt_idx": 0, "prompt_tokens": [1, 2], "response_tokens": [3], "logprobs": [-1.0],
           "request_info": {"step": 99}}  # fmt: skip
    written(tmp_path, "r_rollouts_000000.jsonl", *({"step": step, **row} for step in (1, 1, 2)))
    written(tmp_path, "r_rollouts_000001.jsonl", {"step": 2, **row}, {"step": 3, **row})
    run = open_run(tmp_path)
    assert keys(run) == [(1, None, "rollout"), (2, 0, "rollout"), (2, 1, "rollout"), (3, None, "rollout")]
    assert [ref.shape for record in run.records for ref in record.tensors() if ref.name == "sample_idx"] == [
        (2,), (1,), (1,), (1,),
    ]  # fmt: skip
    assert any("micro numbers them" in note for note in run.notes)


def test_a_damaged_row_is_a_problem_of_its_record(tmp_path: Path) -> None:
    row = {"token_ids": [[1, 2]], "token_loss_mask": [[0, 1]], "generation_logprobs": [[0.0, -1.0]], "idx": 0}
    written(tmp_path, "train_data_step3.jsonl", row, row)
    with open(tmp_path / "train_data_step3.jsonl", "a") as file:
        file.write('{"token_ids": [[1}\n')
    (record,) = open_run(tmp_path).records
    assert record.tensors()[0].shape == (2, 2)
    assert "line 3" in record.problems[0].what


def test_any_other_lines_of_arrays_open_too(tmp_path: Path) -> None:
    written(tmp_path, "mine.jsonl", {"tokens": [1, 2, 3], "reward": 0.5}, {"tokens": [4], "reward": 1.0})
    run = open_run(tmp_path / "mine.jsonl")
    (record,) = run.records
    assert {ref.canonical: (ref.shape, ref.rows) for ref in record.tensors()} == {
        "input_ids": ((4,), (3, 1)),
        "reward": ((2,), None),
    }


def test_a_folder_of_such_lines_opens_too(tmp_path: Path) -> None:
    for rank in (0, 1):
        written(tmp_path, f"step_3/rank{rank}.jsonl", {"tokens": [1, 2], "reward": 0.5}, {"tokens": [4], "reward": 1.0})
    written(tmp_path, "events.jsonl", {"time": 1.0, "event": "start"})
    run = open_run(tmp_path)
    assert run.dialect == "file"
    assert [(record.key.step, record.key.rank) for record in run.records] == [(3, 0), (3, 1)]
    assert run.records[1].tensors()[0].rows == (2, 1)


@pytest.mark.parametrize("content", [b"", b'"input": "a", "output'])
def test_a_file_that_shows_nothing_is_what_its_neighbours_are(content: bytes, tmp_path: Path) -> None:
    written(tmp_path, "rollout/1.jsonl", {"input": "a", "output": "b", "score": 1.0, "step": 1})
    (tmp_path / "rollout/2.jsonl").write_bytes(content)
    run = open_run(tmp_path)
    assert [record.key.step for record in run.records] == [1, 2]
    with pytest.raises(DumpError, match="no row"):
        run.records[1].tensors()


def test_completions_of_an_evaluation_are_nobodys_training(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"step": [5], "prompt": ["a"], "completion": ["b"], "advantage": [0.5]})
    for mode in ("train", "eval"):
        (tmp_path / "completions" / mode).mkdir(parents=True)
        parquet.write_table(table, tmp_path / "completions" / mode / "completions_00005.parquet")
    assert [(r.key.step, r.key.role) for r in open_run(tmp_path).records] == [(5, "rollout"), (5, "eval")]


def test_miles_trajectories_and_dashboard_columns_are_rows_of_a_rollout(tmp_path: Path) -> None:
    row = {"sample_index": 7, "group_index": 2, "status": "completed", "prompt": "p", "messages": [], "reward": 0.5}
    (tmp_path / "trajectory").mkdir()
    (tmp_path / "trajectory/3.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({**row, "sample_index": 8}) + "\n")
    pq = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    (tmp_path / "dashboard_columns").mkdir()
    pq.write_table(
        pa.table({"tokens": [[1, 2, 3], [4]], "loss_mask": [[1, 1], [1]], "reward": [0.5, 0.0]}),
        tmp_path / "dashboard_columns/rollout_3.parquet",
    )
    run = open_run(tmp_path)
    assert {record.path.suffix: record.key.step for record in run.records} == {".jsonl": 3, ".parquet": 3}
    assert "miles" in run.dialect
    by_suffix = {record.path.suffix: {ref.canonical: ref for ref in record.tensors()} for record in run.records}
    assert by_suffix[".jsonl"]["sample_id"].shape == (2,)
    assert (by_suffix[".parquet"]["input_ids"].rows, by_suffix[".parquet"]["response_mask"].rows) == ((3, 1), (2, 1))
