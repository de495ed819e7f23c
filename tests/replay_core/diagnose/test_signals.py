"""Signals: one series per signal, whatever the framework calls it, with the line each value stands on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from replay_core.diagnose.series import series_block
from replay_core.diagnose.signal_names import ORDER, SIGNALS, named
from replay_core.diagnose.signals import Signals
from replay_core.dumps import open_run
from tests.builders import write_dump
from tests.fixtures import FIXTURES
from tests.replay_core.diagnose.logs import part_of, trl, verl, written


@pytest.mark.parametrize(
    ("raw", "signal", "framework", "formula"),
    [
        ("actor/grad_norm", "grad_norm", "verl", ""),
        ("train/train_rollout_logprob_abs_diff", "logprob_diff", "slime", "mean|d|"),
        ("token_mult_prob_error", "mult_prob_error", "NeMo-RL", "mean(e^|d|)"),
        ("mismatch_kl/all/mean", "rollout_k3", "prime-rl", "k3"),
        ("completions/clipped_ratio", "truncated", "TRL", ""),
        ("metrics.actor/kl_loss", "kl", "verl", ""),
        ("rewards/accuracy/std", "reward_function_std", "TRL", ""),
        ("timing_s/update_actor", "phase_seconds", "verl", ""),
        ("timing_s/step", "step_seconds", "verl", ""),
        ("Peak Mem.", "memory_gb", "prime-rl", ""),
        ("train/reward", "reward", None, ""),
        ("learning_rate_group_0", "learning_rate", None, ""),
        ("lr-AdamW", "learning_rate", None, ""),
        ("rl/grad_l2", "grad_norm", None, ""),
        ("gen/mean_tokens", "response_length", None, ""),
        ("rl/groups_without_spread", "frac_zero_std", None, ""),
        ("gen/weight_lag", "weight_lag", None, ""),
        ("rl/vllm_vs_hf_logp", "logprob_diff", None, ""),
        ("memory/max_allocated_gb", "memory_gb", None, ""),
        ("acc@train", "reward_function", None, ""),
        ("rollout/ep_rew_mean", "reward", None, ""),
        ("env/all/correct", "reward_function", "", ""),
    ],
)
def test_a_frameworks_name_is_known(raw: str, signal: str, framework: str | None, formula: str) -> None:
    name = named(raw)
    assert name is not None
    assert (name.signal, name.framework, name.formula) == (signal, framework, formula)


@pytest.mark.parametrize(
    "raw",
    [
        "eval/runtime",
        "eval_samples_per_second",
        "val/reward_std",
        "weights",
        "max_grad_norm",
        "",
        "lr_scheduler/factor",
        "grad_norm/layers.0",
    ],
)
def test_an_evaluations_metric_and_a_strange_name_are_no_signal(raw: str) -> None:
    assert named(raw) is None


@pytest.mark.parametrize(
    ("raw", "signal"),
    [("eval_loss", "held_out_loss"), ("val/loss", "held_out_loss"), ("critic_score_mean", "reward")],
)
def test_an_evaluations_loss_is_none_of_training_and_a_column_may_have_lost_its_slashes(raw: str, signal: str) -> None:
    name = named(raw)
    assert name is not None
    assert name.signal == signal


def test_a_bare_kl_is_k3_only_among_trls_names(tmp_path: Path) -> None:
    among = part_of(tmp_path, trl([{}])).get("kl")
    alone = part_of(tmp_path, "{'loss': 0.1, 'kl': 0.2, 'step': 1}\n").get("kl")
    assert among is not None
    assert alone is not None
    assert (among.formula, alone.formula) == ("k3", "")


def test_every_signal_of_the_order_exists() -> None:
    assert set(ORDER) <= set(SIGNALS)


def test_a_value_keeps_its_line_its_step_and_its_name(tmp_path: Path) -> None:
    part = part_of(tmp_path, "config\n" + verl([{}, {"actor/grad_norm": 0.5}], first=4))
    series = part.get("grad_norm")
    assert series is not None
    assert (series.name, series.framework) == ("actor/grad_norm", "verl")
    assert [(point.step, point.value, point.line) for point in series.points] == [(4, 0.21, 2), (5, 0.5, 3)]


def test_micro_batches_stand_beside_their_steps(tmp_path: Path) -> None:
    lines = [
        f"[Micro {micro}] 4. Loss computed: mem=0MB, time=0.1s, pg_loss={value}, kl=0.0, total=0.0"
        for micro, value in enumerate((0.5, -0.1))
    ]
    text = "\n".join([*lines, "iter 3: loss 0.2 (main 0.2, critic 0.0), time 5ms"]) + "\n"
    part = part_of(tmp_path, text)
    assert [(p.step, p.micro, p.value, p.line) for p in part.micros("pg_loss")] == [(3, 0, 0.5, 1), (3, 1, -0.1, 2)]
    series = part.get("pg_loss")
    assert series is not None
    assert series.values == [0.2]
    loss = part.get("loss")
    assert loss is not None
    assert loss.points[0].line == 3


def test_a_metrics_file_and_a_log_of_one_run_are_one_part(tmp_path: Path) -> None:
    rows = [{"loss": 0.12345, "grad_norm": 0.5, "step": 1}, {"loss": 0.2, "grad_norm": 0.6, "step": 2}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    written(tmp_path, "{'loss': 0.1235, 'reward': 0.5, 'step': 1}\n")
    signals = Signals.of(open_run(tmp_path))
    assert signals is not None
    (part,) = signals.logs
    assert part.has("grad_norm")
    assert part.has("reward")
    written(tmp_path, "{'loss': 0.9, 'reward': 0.5, 'step': 1}\n")
    signals = Signals.of(open_run(tmp_path))
    assert signals is not None
    assert len(signals.logs) == 2


def test_a_dumps_recorded_metrics_are_signals(tmp_path: Path) -> None:
    fields = {"metrics": {"grad_norm": 0.5, "actor/entropy": 0.25, "note": "x"}}
    signals = Signals.of(open_run(write_dump(tmp_path / "dump", {"training_metrics": fields}, micro=None)))
    assert signals is not None
    assert signals.logs[0].has("grad_norm")
    assert signals.logs[0].has("entropy")
    assert not signals.logs[0].has("kl")


def test_a_dump_without_metrics_has_no_signals(tmp_path: Path) -> None:
    import torch

    dump = write_dump(tmp_path / "dump", {"forward_data": {"log_probs": torch.zeros(1, 3)}})
    assert Signals.of(open_run(dump)) is None


def test_the_series_of_a_document_are_json(tmp_path: Path) -> None:
    steps = [{"loss": 0.1 + n % 3 / 100, "timing_s/step": 60.0} for n in range(12)]
    steps[5]["actor/grad_norm"] = float("nan")
    signals = Signals.of(open_run(written(tmp_path, verl(steps))))
    assert signals is not None
    block = {one["name"]: one for one in series_block(signals)}
    norm = block["actor/grad_norm"]
    assert (norm["signal"], norm["framework"], norm["marks"]) == ("grad_norm", "verl", [5])
    assert norm["steps"] == list(range(1, 13))
    assert norm["sparkline"][5] == "×"
    assert block["timing_s/gen"]["share"] == pytest.approx(35 / 55)
    assert block["timing_s/step"]["share"] is None
    json.dumps([{**one, "values": None} for one in block.values()], allow_nan=False)


def test_the_notes_expectations_stand_beside_what_was_seen_corrected() -> None:
    signals = Signals.of(open_run(FIXTURES / "grpo_notes" / "train_547c4bf_normal.log"))
    assert signals is not None
    rows = {row["what"]: row for one in series_block(signals) for row in one["expected"]}
    assert rows["sampling, per micro-batch"]["expected"] == [0.5, 1.0]
    # 4 micro-batches are logged; the seed's range is for 16.
    assert rows["iteration without compile"]["expected"] == [8000, 16000]
    assert rows["iteration without compile"]["holds"] is True
    assert "either sign" in (rows["policy-gradient loss"]["correction"] or "")
    assert rows["policy-gradient loss"]["holds"] is None


def test_signals_of_genuine_runs_are_found() -> None:
    for path, signal, steps in (
        ("trl/base", "reward_std", 3), ("verl", "prob_diff", 1), ("nexrl/self_hosted_fp32", "grad_norm", 2),
    ):  # fmt: skip
        signals = Signals.of(open_run(FIXTURES / path))
        assert signals is not None
        series = signals.logs[0].get(signal)
        assert series is not None
        assert len(series.points) >= steps
