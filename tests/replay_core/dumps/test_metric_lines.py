"""Lines of metrics, as trainers print them and as people paste them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay_core.dumps.metric_lines import is_aside, metric_line


@pytest.mark.parametrize(
    ("line", "step", "values"),
    [
        ("{'loss': -0.0, 'kl': 'nan', 'x': None, 'y': [1, 2]}", None, {"loss": -0.0, "kl": math.nan}),
        ('{"loss": 0.5, "global_step/max_steps": "9/547", "percentage": "1.65%"}', 9, {"loss": 0.5}),
        ("'loss': 0.5, 'global_step/max_steps': '5/3766'}", 5, {"loss": 0.5}),
        ("{'train/loss': 0.5, 'train/global_step': 7}", 7, {"train/loss": 0.5}),
        ("{'loss': tensor(0.5, device='cuda:0'), 'reward': np.float64(-1e-3)}", None, {"loss": 0.5, "reward": -0.001}),
        ("2026-01-01 INFO trainer: {'loss': 0.5, 'memory(GiB)': 56.74}", None, {"loss": 0.5, "memory(GiB)": 56.74}),
        ("step:3 - actor/pg_loss:np.float64(nan) - timing_s/gen:1.5 [repeated 2x]", 3,
         {"actor/pg_loss": math.nan, "timing_s/gen": 1.5}),
        ("✨ Global step 5: {'policy_loss': 0.1}", 5, {"policy_loss": 0.1}),
        ("rollout 4: {'rollout/raw_reward': 0.25}", 4, {"rollout/raw_reward": 0.25}),
        ("Step 12 | Time: 5.30s | Mismatch KL: 0.0011 | Throughput: 1,234 tokens/s", 12,
         {"Time": 5.3, "Mismatch KL": 0.0011, "Throughput": 1234.0}),
        (" iteration       10/     100 | lm loss: 1.2E+00 | grad norm: 0.441 |", 10,
         {"lm loss": 1.2, "grad norm": 0.441}),
        ("step:  1  loss:  8.1376  grad_norm: 0.5  memory:  1.2GiB(1.5%)  tps: 1,234", 1,
         {"loss": 8.1376, "grad_norm": 0.5, "memory": 1.2, "tps": 1234.0}),
    ],
)  # fmt: skip
def test_a_line_of_metrics_is_read(line: str, step: int | None, values: dict[str, float]) -> None:
    found_step, found = metric_line(line)
    assert found_step == step
    assert found == pytest.approx(values, nan_ok=True)


@pytest.mark.parametrize(
    "line",
    [
        "{'learning_rate': 1e-06, 'max_grad_norm': 1.0, 'beta': 0.04}",
        "GET /index.html?step=3 200 0.3",
        "{'a': 'b'}",
        "                 'target_kl': 0.1,",
        "step 3 of the setup: {ok}",
        "'loss' is nan",
        "iter 3: loss 0.1 (main 0.1, critic 0.0), time 5ms",
        "",
    ],
)
def test_a_configuration_and_a_foreign_line_are_no_metrics(line: str) -> None:
    assert metric_line(line) == (None, {})


def test_an_evaluation_begins_no_step() -> None:
    assert is_aside({"eval_loss": 0.5, "eval_runtime": 3.0})
    assert is_aside({"train_runtime": 0.5, "train_loss": 3.0})
    assert not is_aside({"loss": 0.5, "eval_reward": 1.0})


@given(st.text(max_size=300))
def test_no_line_is_too_strange(line: str) -> None:
    step, values = metric_line(line)
    assert values or step is None or step >= 0


def test_a_hostile_line_takes_no_time() -> None:
    for line in ("{'" + "a" * 60000, "step:1" + " - a" * 15000, "'a':" * 15000, "step 1 |" + "a:" * 30000,
                 "step:  1  loss:" + "  a:" * 12000, "('" * 30000):  # fmt: skip
        assert metric_line(line) is not None
