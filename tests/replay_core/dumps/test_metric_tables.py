"""Tables of metrics, whatever their columns are called: read where they are named; of several runs, apart."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from replay_core.diagnose.signals import RunLog, Signals
from replay_core.dumps import open_run
from replay_core.dumps.metric_tables import number
from replay_core.errors import NotADumpError

REWARDS = [0.31, 0.27, 0.35, 0.4]


def table(columns: Mapping[str, Sequence[object]], between: str = ",", quoted: bool = False) -> str:
    text = io.StringIO()
    said = csv.writer(text, delimiter=between, quoting=csv.QUOTE_ALL if quoted else csv.QUOTE_MINIMAL)
    said.writerow(columns)
    said.writerows(zip(*columns.values(), strict=True))
    return text.getvalue()


def logs_of(folder: Path, name: str, text: str) -> list[RunLog]:
    path = folder / name
    path.write_text(text)
    signals = Signals.of(open_run(path))
    assert signals is not None
    return signals.logs


def rewards_of(folder: Path, name: str, text: str) -> list[float]:
    (log,) = logs_of(folder, name, text)
    reward = log.get("reward")
    assert reward is not None
    return reward.values


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("adaptive_history.csv", table({"step": [1, 2, 3, 4], "beta": [0.1] * 4, "reward": REWARDS, "action": "abcd"})),
        ("curve.tsv", table({"Iteration": [1, 2, 3, 4], "Judge Score": REWARDS}, "\t")),
        ("curve.csv", table({"iter": [1, 2, 3, 4], "mean_reward": REWARDS}, ";")),
        ("quoted.csv", "\ufeff" + table({"Step": [1, 2, 3, 4], "RUN - train/reward": REWARDS}, quoted=True)),
        ("pandas.csv", table({"": [0, 1, 2, 3], "episode_reward": REWARDS})),
        ("spoken.csv", "# exp 3\n\n" + table({"update": [1, 2, 3, 4], "reward": REWARDS})),
        ("tidy.csv", "step,metric,value\n" + "".join(f"{n},reward,{r}\n{n},kl,0.1\n" for n, r in enumerate(REWARDS))),
        ("run-3-tag-mean_reward.csv", table({"Wall time": [1.7e9] * 4, "Step": [1, 2, 3, 4], "Value": REWARDS})),
        ("columns.json", json.dumps({"step": [1, 2, 3, 4], "reward": REWARDS})),
        ("rows.json", json.dumps([{"episode": n, "task_score": r} for n, r in enumerate(REWARDS)])),
        ("rows.jsonl", "".join(json.dumps({"episode": n, "agent_reward": r}) + "\n" for n, r in enumerate(REWARDS))),
        ("bare.jsonl", "".join(json.dumps({"step": n, "mean": r, "max": 1.0}) + "\n" for n, r in enumerate(REWARDS))),
        ("rooms.jsonl", "".join(json.dumps({"step": n, "own": {"reward": r}}) + "\n" for n, r in enumerate(REWARDS))),
        ("stepped.csv", table({"model_step": [5, 10, 15, 20], "reward": REWARDS})),
        ("epochs.csv", table({"epoch": [0, 0, 0, 1], "reward": REWARDS})),
    ],
)  # fmt: skip
def test_a_table_of_any_names_is_one_of_metrics(name: str, text: str, tmp_path: Path) -> None:
    assert rewards_of(tmp_path, name, text) == REWARDS


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("answers.csv", table({"step": [1, 2], "prompt": ["1+1?", "2+2?"], "completion": ["2", "four"]})),
        ("answers.jsonl", "".join(json.dumps({"step": n, "reward": 1.0, "text": "so " * 40}) + "\n" for n in range(5))),
        ("samples.jsonl", "".join(json.dumps({"step": 3, "sample": n, "reward": 1.0}) + "\n" for n in range(5))),
        ("board.csv", table({"rank": [1, 2, 3, 4], "model": "abcd", "score": REWARDS})),
        ("cells.csv", table({"x": [1.5, 2.5, 3.5, 4.5], "y": REWARDS})),
        ("numbers.csv", "1,2,3\n4,5,6\n7,8,9\n"),
    ],
)  # fmt: skip
def test_a_table_of_samples_or_of_no_names_is_none(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    try:
        run = open_run(tmp_path / name)
    except NotADumpError:
        return
    assert run.dialect != "metrics"


def test_figures_of_no_known_name_are_shown_where_a_log_has_few_others(tmp_path: Path) -> None:
    (log,) = logs_of(tmp_path, "own.csv", table({"step": [1, 2, 3], "tier": [0, 0, 1], "hops": [2.5, 2.25, 3.0]}))
    assert {series.name: series.signal for series in log.signals()} == {"tier": "other", "hops": "other"}


@pytest.mark.parametrize(
    "text",
    [
        table({"Step": [1, 2, 3, 4], "a - reward": REWARDS, "a - reward__MIN": REWARDS, "b - reward": REWARDS[::-1]}),
        "run,step,reward\n" + "".join(f"a,{n},{REWARDS[n]}\nb,{n},{REWARDS[3 - n]}\n" for n in range(4)),
    ],
)  # fmt: skip
def test_several_runs_of_one_table_are_told_apart(text: str, tmp_path: Path) -> None:
    first, second = logs_of(tmp_path, "export.csv", text)
    for log, run, values in ((first, "a", REWARDS), (second, "b", REWARDS[::-1])):
        reward = log.get("reward")
        assert reward is not None
        assert (reward.name, reward.values) == (f"{run} - reward", values)
        assert "lowest" not in {series.name for series in log.signals()}
    run_of = open_run(tmp_path / "export.csv")
    assert "export.csv holds 2 runs, each judged by itself: a, b" in run_of.notes


def test_runs_of_one_table_that_stand_one_behind_another_are_all_read(tmp_path: Path) -> None:
    text = "seed,step,reward\n" + "".join(f"{seed},{n},{REWARDS[n]}\n" for seed in (1, 2, 3) for n in range(4))
    every = logs_of(tmp_path, "seeds.csv", text)
    assert [(log.run, [series.values for series in log.signals()]) for log in every] == [
        (seed, [REWARDS]) for seed in ("1", "2", "3")
    ]


def test_runs_of_other_lengths_leave_cells_empty(tmp_path: Path) -> None:
    text = '"Step","a - reward","b - reward"\n"1","0.5",""\n"2","","0.25"\n"3","0.5","0.25"\n'
    first, second = logs_of(tmp_path, "export.csv", text)
    assert [[point.step for point in series.points] for log in (first, second) for series in log.signals()] == [
        [1, 3], [2, 3],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("cell", "value"), [("12.5%", 0.125), ("1,568,987.5", 1568987.5), (" 3 ", 3), ("nan?", None), ("", None)]
)
def test_a_cell_is_a_number_as_people_write_them(cell: str, value: float | None) -> None:
    assert number(cell) == value


def test_in_a_folder_a_table_needs_a_name_of_metrics(tmp_path: Path) -> None:
    (tmp_path / "prices.csv").write_text(table({"step": [1, 2, 3, 4], "reward": REWARDS}))
    with pytest.raises(NotADumpError):
        open_run(tmp_path)
