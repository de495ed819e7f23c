"""Tables of two columns that a trainer prints at every step."""

from __future__ import annotations

from pathlib import Path

import pytest

from replay_core.dumps import open_run
from replay_core.dumps.boxed_tables import BoxedTables

TABLE = """\
---------------------------------
| rollout/        |             |
|    ep_rew_mean  | 0.{n}1        |
| time/           |             |
|    iterations   | {n}           |
|    fps          | 12          |
| train/          |             |
|    loss         | -1.5e-03    |
---------------------------------
"""


def test_a_table_is_a_step_and_names_its_rooms(tmp_path: Path) -> None:
    path = tmp_path / "progress.log"
    path.write_text("Using cpu device\n" + TABLE.format(n=3) + "Eval num_timesteps=96\n" + TABLE.format(n=4))
    run = open_run(path)
    assert run.steps() == [3, 4]
    values = {ref.name: (ref.source.value, ref.line) for ref in run.records[0].tensors()}  # type: ignore[union-attr]
    assert values == {"rollout/ep_rew_mean": (0.31, 10), "time/fps": (12.0, 10), "train/loss": (-0.0015, 10)}


@pytest.mark.parametrize(
    "lines",
    [
        ["| loss | 0.5 |", "and so on", "--------"],
        ["| name | value |", "| ---- | ----- |", "--------"],
        ["| a | b | 0.5 |", "--------"],
        ["--------", "--------"],
    ],
    ids=["a row alone", "a page", "three columns", "empty"],
)
def test_what_is_not_framed_or_has_no_numbers_is_no_table(lines: list[str]) -> None:
    tables = BoxedTables()
    assert [tables.take(line)[1] for line in lines] == [{}] * len(lines)


def test_a_table_without_a_count_names_no_step() -> None:
    tables = BoxedTables()
    assert [tables.take(line) for line in ("| loss | nan |", "| epoch | 0.5 |")] == [(None, {})] * 2
    step, values = tables.take("=========")
    assert (step, sorted(values)) == (None, ["epoch", "loss"])


DRAWN = """\
20260314-09:12:45.412 StatsLogger INFO: Epoch 1/1 Step {n}/28 Train step {n}/28 done.
20260314-09:12:45.413 Stats Logger INFO: Stats (1/1):
╭───────────────────────────────┬──────────────╮
│ ppo_actor/task_reward/avg     │   7.5439e-01 │
│ ppo_actor/update/grad_norm    │   -0.0000e+00 │
╰───────────────────────────────┴──────────────╯
"""


def test_a_table_that_is_drawn_has_the_step_of_the_line_before(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(DRAWN.format(n=21) + "something else\n" + DRAWN.format(n=22), encoding="utf-8")
    run = open_run(path)
    assert run.steps() == [21, 22]
    values = {ref.name: ref.source.value for ref in run.records[0].tensors()}  # type: ignore[union-attr]
    assert values == {"ppo_actor/task_reward/avg": 0.75439, "ppo_actor/update/grad_norm": 0.0}


def test_a_line_between_the_rows_of_a_drawn_table_does_not_end_it() -> None:
    tables = BoxedTables()
    for line in ("┌──────┬─────┐", "│ loss │ 0.5 │", "├──────┼─────┤", "│ reward │ 1 │"):
        assert tables.take(line) == (None, {})
    assert tables.take("└──────┴─────┘") == (None, {"loss": 0.5, "reward": 1.0})
