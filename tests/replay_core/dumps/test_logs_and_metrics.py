"""Text logs and metrics files as runs of scalars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from replay_core.dumps import log_text, metric_tables, open_run
from replay_core.dumps.containers import read_container
from replay_core.dumps.metric_lines import metric_line
from replay_core.errors import BudgetError, DumpError, NotADumpError
from replay_core.records import Inline, Record, RecordKey
from tests.fixtures import FIXTURES


def scalars(record: Record) -> dict[str, object]:
    return {ref.canonical or ref.name: ref.source.value for ref in record.tensors() if isinstance(ref.source, Inline)}


@pytest.mark.parametrize(
    ("line", "step", "values"),
    [
        ("{'loss': 0.01, 'grad_norm': 1e-3, 'epoch': 0.1}", None, {"loss": 0.01, "grad_norm": 0.001, "epoch": 0.1}),
        ("{'loss': '0.01', 'learning_rate': '1e-06', 'step': 4}", 4, {"loss": 0.01, "learning_rate": 1e-06}),
        ("step:3 - actor/pg_loss:0.01 - actor/grad_norm:np.float64(0.8)", 3,
         {"actor/pg_loss": 0.01, "actor/grad_norm": 0.8}),
        ("(pid=3) step 12: {'train/loss': -0.5, 'train/kl': 0.001}", 12, {"train/loss": -0.5, "train/kl": 1e-3}),
        ("nothing of the kind", None, {}),
        ("step:99999999999999999999 - a:1", None, {}),
    ],
)  # fmt: skip
def test_a_metric_line_of_any_trainer(line: str, step: int | None, values: dict[str, float]) -> None:
    assert metric_line(line) == (step, values)


def test_a_log_is_a_run_of_scalars(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("config: ...\nstep:1 - actor/pg_loss:0.5\nstep:2 - actor/pg_loss:0.25\n")
    run = open_run(tmp_path)
    assert (run.dialect, run.steps()) == ("log", [1, 2])
    assert scalars(run.records[1]) == {"metrics.actor/pg_loss": 0.25}


def test_a_log_that_ends_inside_a_step_says_so(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(
        "iter 0: loss 0.1 (main 0.1, critic 0.0), time 5ms\n[Micro 0] 1. Iteration start: mem=0MB, time=0.000s\n"
    )
    run = open_run(tmp_path)
    assert [problem.what for problem in run.problems] == ["the log ends inside step 1"]


def test_trainer_state_in_checkpoints_repeats_the_runs_own(tmp_path: Path) -> None:
    history = [{"loss": 0.5, "step": 1}, {"loss": 0.25, "step": 2}, {"train_runtime": 9.0, "step": 2}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}, indent=2))
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "trainer_state.json").write_text(json.dumps({"log_history": history[:1]}))
    run = open_run(tmp_path)
    assert run.steps() == [1, 2]
    assert len(run.records) == 2
    assert "repeats" in run.notes[0]
    assert scalars(run.records[1]) == {"loss": 0.25, "step": 2, "metrics.train_runtime": 9.0}


def test_metrics_by_line_keep_their_steps(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 5, "loss": NaN}\n{"step": 6, "loss": 0.5}\n{"step": 7, "lo')
    run = open_run(tmp_path)
    assert run.steps() == [5, 6]
    assert "cut short" in run.problems[0].what


def test_rows_without_a_step_are_numbered_and_said_so(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text(json.dumps([{"loss": 0.5}, {"loss": 0.25}]))
    run = open_run(tmp_path)
    assert run.steps() == [0, 1]
    assert "numbered" in run.notes[0]


def test_a_json_of_something_else_is_no_metrics(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text(json.dumps({"a": {"b": [1]}}))
    (tmp_path / "metrics_step3.json").write_text(json.dumps({"actor/loss": 1.5}))
    run = open_run(tmp_path)
    assert [(record.path.name, record.key.step) for record in run.records] == [("metrics_step3.json", 3)]


def test_ms_swifts_rows_name_their_step_beside_the_last(tmp_path: Path) -> None:
    rows = [{"loss": 0.5, "global_step/max_steps": f"{step}/547"} for step in (9, 10)]
    (tmp_path / "logging.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = open_run(tmp_path)
    assert run.steps() == [9, 10]
    assert run.notes == []
    (tmp_path / "logging.jsonl").unlink()
    (tmp_path / "metrics.json").write_text(json.dumps(rows))
    assert open_run(tmp_path).steps() == [9, 10]


def test_a_row_of_a_metrics_file_says_its_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 5, "loss": 0.5}\n{"step": 6, "loss": 0.25}\n')
    lines = [ref.line for record in open_run(tmp_path).records for ref in record.tensors() if ref.name == "loss"]
    assert lines == [1, 2]


def test_a_text_of_another_program_holds_no_metric(tmp_path: Path) -> None:
    (tmp_path / "nginx.log").write_text("GET /index.html 200\nstarted in 0.3 s\n")
    with pytest.raises(NotADumpError, match="there is no metric in this text") as caught:
        open_run(tmp_path / "nginx.log")
    assert "step 3 | loss 0.1" in str(caught.value.expected)
    (tmp_path / "weights.bin").write_bytes(bytes(range(200, 256)) * 40)
    with pytest.raises(NotADumpError, match="no container"):
        open_run(tmp_path / "weights.bin")


def test_a_line_that_is_no_json_costs_its_own_step_though_steps_are_read_together(tmp_path: Path) -> None:
    lines = [f'{{"step": {step}, "loss": 0.5}}' for step in range(600)]
    lines[300] = '{"step": 300, "loss": 0.5.5}'
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    records = open_run(tmp_path).records
    for step, record in enumerate(records):
        assert record.key.step == step
        if step == 300:
            with pytest.raises(DumpError, match="no metrics of step 300"):
                record.tensors()
        else:
            assert [(ref.name, ref.line) for ref in record.tensors()] == [("step", step + 1), ("loss", step + 1)]
            assert record.problems == ()


def test_what_one_record_ends_in_costs_none_of_those_that_are_read_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.log").write_text("".join(f"{{'loss': {step}.5}}\n" for step in range(20)))
    read = log_text._read

    def ends(log: Any, key: RecordKey) -> Any:
        if key.step == 7:
            raise ValueError("of a kind that nobody foresaw")
        return read(log, key)

    monkeypatch.setattr(log_text, "_read", ends)
    failed = []
    for step, record in enumerate(open_run(tmp_path).records):
        try:
            assert record.tensors()[0].source == Inline(step + 0.5)
        except DumpError:
            failed.append(step)
    assert failed == [7]


def test_a_text_that_only_begins_like_json_is_not_decoded_to_its_end(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("[Micro 0] 1. Loss: pg_loss=1\niter 1: loss 0.5, time 1ms\n" * 10_000 + '{"a": 1}\n')
    with pytest.raises(DumpError, match="none of the first 1,000 lines of the file is JSON; it was not read further"):
        read_container(log)


def test_verls_file_logger_keeps_a_steps_metrics_under_data(tmp_path: Path) -> None:
    file = FIXTURES / "verl_0_9_1/file_logger/qwen2-tiny.jsonl"
    (tmp_path / "ppo").mkdir()
    (tmp_path / "ppo" / file.name).write_bytes(file.read_bytes())
    for path in (file, tmp_path):
        run = open_run(path)
        assert (run.dialect, run.steps()) == ("metrics", [1, 2, 3])
        said = scalars(run.records[1])
        assert (said["metrics.actor/pg_loss"], said["metrics.actor/grad_norm"]) == (0.02, 0.7)


def test_metrics_in_rooms_are_read_as_paths(tmp_path: Path) -> None:
    rows = [{"step": n, "actor": {"pg_loss": 0.5 * n, "clip": {"high": 0.1}}, "reward": {"overall": 1}} for n in (1, 2)]
    path = tmp_path / "experiment_log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for opened in (path, tmp_path):
        run = open_run(opened)
        assert (run.steps(), scalars(run.records[1])) == (
            [1, 2],
            {"step": 2, "metrics.actor/pg_loss": 1.0, "metrics.actor/clip/high": 0.1, "metrics.reward/overall": 1},
        )  # fmt: skip


def test_a_table_of_one_run_as_wandb_exports_it_loses_the_runs_name(tmp_path: Path) -> None:
    path = tmp_path / "wandb_export_2026-05-03.csv"
    path.write_text('"Step","a run - 2 - train/loss","a run - 2 - train/loss__MIN"\n"4","0.5","0.25"\n')
    assert scalars(open_run(path).records[0]) == {"step": 4, "metrics.train/loss": 0.5, "metrics.train/loss__MIN": 0.25}
    path.write_text('"Step","run-7 - train/loss","run-7 - train/lr"\n"4","0.5","0.25"\n"5","","0.125"\n')
    assert [scalars(one) for one in open_run(tmp_path).records] == [
        {"step": 4, "metrics.train/loss": 0.5, "metrics.train/lr": 0.25}, {"step": 5, "metrics.train/lr": 0.125}
    ]  # fmt: skip
    path.write_text('"Step","a - train/loss","b - train/loss"\n"4","0.5","0.25"\n')
    assert scalars(open_run(path).records[0]) == {
        "step": 4,
        "metrics.a - train/loss": 0.5,
        "metrics.b - train/loss": 0.25,
    }


def test_rows_before_a_damaged_one_of_a_table_are_kept_and_the_damage_is_told(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,train/loss\n1,0.5\n2,0.25\n" + '"' * 400_001)
    run = open_run(path)
    assert [scalars(one) for one in run.records] == [
        {"step": 1, "metrics.train/loss": 0.5},
        {"step": 2, "metrics.train/loss": 0.25},
    ]
    assert [problem.what for problem in run.problems] == [
        "the table cannot be read from line 4 on: field larger than field limit (131072)"
    ]


def test_a_table_longer_than_what_is_read_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_tables, "_MOST_BYTES", 1 << 20)
    path = tmp_path / "metrics.csv"
    path.write_text("step,train/loss\n" + "1,0.5\n" * 200_000)
    assert [problem.what for problem in open_run(path).problems] == [
        "a table of metrics is read up to 1 MiB: what follows is not"
    ]


@pytest.mark.long
def test_a_log_whose_every_line_names_another_metric_of_one_step_is_read_and_its_record_refused(tmp_path: Path):
    log = tmp_path / "train.log"
    log.write_text("step:1 - loss:1.0\n" + "".join(f"step:1 - loss{number}:1.0\n" for number in range(45_000)))
    (record,) = open_run(log).records
    with pytest.raises(BudgetError, match="more than what is stored"):
        record.tensors()
