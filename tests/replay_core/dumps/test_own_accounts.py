"""Scripts that write an account of their run in a form of their own: which rows of it are metrics."""

import json
from pathlib import Path

import pytest

from replay_core import workbench
from replay_core.dumps.opening import open_run
from replay_core.errors import NotADumpError

ROWS: list[dict[str, object]] = [
    {"step": 10 * n, "loss": 0.01 * n, "reward": 0.5, "grad_norm": 0.2} for n in range(1, 7)
]
HEAD: dict[str, object] = {"type": "config", "argv": ["train.py", "--steps", "60"], "args": {"lr": 1e-5, "steps": 60}}


def _lines(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["steps", "history", "rows_of_mine"])
def test_the_one_list_of_rows_in_a_mapping_is_the_log(tmp_path: Path, name: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"total_steps": 6, name: ROWS, "seeds": [1, 2, 3]}))
    assert open_run(path).dialect == "metrics"
    assert open_run(path).steps() == [10, 20, 30, 40, 50, 60]


def test_two_lists_of_rows_in_a_mapping_are_not_guessed_at(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"one": ROWS, "other": ROWS}))
    assert open_run(path).dialect == "file"


def test_tasks_of_an_evaluation_are_no_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    path.write_text(json.dumps({"model": "m", "tasks": [{"task": f"t{n}", "acc": n / 5} for n in range(5)]}))
    assert open_run(path).dialect == "file"


def test_a_first_row_that_tells_of_the_run_does_not_hide_the_rows_behind_it(tmp_path: Path) -> None:
    path = _lines(tmp_path / "mine.jsonl", [HEAD, {"type": "meta", "seed": 7}, *ROWS])
    run = open_run(path)
    assert run.dialect == "metrics"
    assert run.steps() == [10, 20, 30, 40, 50, 60]
    assert [ref.line for ref in run.records[0].tensors() if ref.name == "loss"] == [3]
    assert run.facts["args"] == HEAD["args"]


def test_a_first_row_of_numbers_alone_is_one_of_metrics(tmp_path: Path) -> None:
    path = _lines(tmp_path / "metrics.jsonl", [{"loss": 0.5}, {"loss": 0.4, "step": 1}])
    assert len(open_run(path).records) == 2


def test_rows_of_answers_without_a_step_are_an_error_that_says_so(tmp_path: Path) -> None:
    answers = [{"ts": 1.5 + n, "task": f"t{n}", "marks": {"form": 1.0, "sum": 0.5}} for n in range(6)]
    path = _lines(tmp_path / "answers.jsonl", answers)
    with pytest.raises(NotADumpError, match="no metric was read of this file") as caught:
        workbench.diagnose(path)
    assert "6 rows of ts, task, marks.form, marks.sum; none of them is a step" in str(caught.value.found)
    assert '"step": 1' in str(caught.value.expected)
    assert "rldbg show answers.jsonl" in str(caught.value.hint)


def test_a_rule_that_is_asked_for_by_name_is_not_refused(tmp_path: Path) -> None:
    path = _lines(tmp_path / "answers.jsonl", [{"a": 1.5, "b": {"c": 1}}] * 4)
    assert workbench.diagnose(path, rules=["D39"])["checked"] == ["D39"]
