"""Causes that look alike, and healthy runs that look ill: what tells them apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from replay_core.diagnose.case import Case
from replay_core.diagnose.engine import diagnose
from replay_core.diagnose.signals import Signals
from replay_core.dumps import open_run
from tests.builders import write_dump
from tests.replay_core.diagnose.batches import Fields, healthy, of, seen, set_advantages, set_rewards
from tests.replay_core.diagnose.logs import diagnosed, trl, verl, worrying


def copied() -> Fields:
    """The healthy batch, whose groups each hold their first response four times."""
    batch = healthy()
    for name, value in batch.items():
        if isinstance(value, np.ndarray) and len(value) == 16:
            batch[name] = value[np.repeat(np.arange(0, 16, 4), 4)]
    return batch


def test_a_trainer_that_gathers_the_next_token_is_told_by_the_token_after(tmp_path: Path) -> None:
    batch = copied()
    tokens, width = batch["input_ids"], batch["old_log_probs"].shape[1]
    # In every group the third token of two of the four responses is another; what comes before it is shared.
    start = tokens.shape[1] - width
    tokens[2::4, start + 2] = 900
    tokens[3::4, start + 2] = 900
    batch["responses"] = tokens[:, start:].copy()
    shifted = np.roll(tokens, -1, axis=1)[:, start:]
    batch["old_log_probs"] = (-1.0 - (shifted * 37 % 101) / 15 * batch["response_mask"]).astype(np.float32)
    finding = of(seen(tmp_path, batch, "D09"), "D09")
    assert finding is not None
    assert "depends on the token after it" in finding.claim


def test_texts_that_are_the_same_are_said_before_equal_rewards(tmp_path: Path) -> None:
    same, other = copied(), healthy()
    for batch in (same, other):
        set_rewards(batch, np.ones(16))
        set_advantages(batch, np.zeros(16))
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, two = of(seen(tmp_path / "a", same, "D01"), "D01"), of(seen(tmp_path / "b", other, "D01"), "D01")
    assert one is not None
    assert two is not None
    assert "same text" in one.claim
    assert "greedy" in one.cause
    assert "same text" not in two.claim


def test_a_ratio_that_is_not_exponentiated_is_an_error(tmp_path: Path) -> None:
    batch = healthy()
    batch["log_probs"] = batch["old_log_probs"].copy()
    batch["prob_ratio"] = np.zeros_like(batch["old_log_probs"])
    finding = of(seen(tmp_path, batch, "D14"), "D14")
    assert finding is not None
    assert "exponential is missing" in finding.claim


def test_places_that_a_ratio_leaves_at_zero_were_masked_whether_or_not_a_mask_is_beside_it(tmp_path: Path) -> None:
    right_BT = np.repeat([[1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]], 16, axis=0).astype(np.float32)
    far_BT = right_BT.copy()
    far_BT[::2] *= 30
    said = []
    for name, ratio_BT in (("right", right_BT), ("far", far_BT)):
        run = open_run(write_dump(tmp_path / name, {"loss": {"prob_ratio": ratio_BT}}))
        said.append([one.id for one in diagnose(Case(run, Signals.of(run)), ["D24"]).findings])
    assert said == [[], ["D24"]]


def test_a_token_of_the_pads_id_that_was_sampled_is_told_from_padding(tmp_path: Path) -> None:
    batch = healthy()
    hole = int(np.flatnonzero(batch["response_mask"][0])[1]) + batch["attention_mask"].shape[1]
    hole -= batch["response_mask"].shape[1]
    batch["attention_mask"] = batch["attention_mask"].copy()
    batch["attention_mask"][0, hole] = 0
    finding = of(seen(tmp_path, batch, "D18"), "D18")
    assert finding is not None
    assert finding.claim == "1 padding token is in the loss"
    assert "ids != pad" in finding.cause


def test_a_penalty_of_zero_is_a_warning_where_its_coefficient_is_not(tmp_path: Path) -> None:
    def said(**metrics: float) -> str | None:
        found = of(diagnosed(tmp_path, trl([{"kl": None, **metrics}] * 12)), "D46")
        return None if found is None else found.severity

    assert said(**{"train/kl_penalty": 0.0}) == "info"
    assert said(**{"train/kl_penalty": 0.0, "kl_coef": 0.05}) == "warning"
    assert said(**{"actor/reward_kl_penalty": 0.0, "actor/reward_kl_penalty_coeff": 0.001}) == "warning"
    assert said(kl_loss=0.0) == "warning"


def test_a_reward_that_falls_by_a_fifth_is_worth_knowing_and_by_half_a_warning(tmp_path: Path) -> None:
    for last, severity in ((0.56, "info"), (0.35, "warning")):
        steps = [{"critic/score/mean": 0.7 + (last - 0.7) * n / 29} for n in range(30)]
        finding = of(diagnosed(tmp_path, verl(steps)), "L08")
        assert finding is not None
        assert finding.severity == severity


def test_a_watchdog_that_tells_of_a_failed_kernel_is_no_wait(tmp_path: Path) -> None:
    line = (
        "[rank2]:[E314 ProcessGroupNCCL.cpp:1896] [PG ID 0 PG GUID 0 Rank 2] Process group watchdog thread terminated "
        "with exception: CUDA error: device-side assert triggered\n"
    )
    finding = of(diagnosed(tmp_path, trl([{}] * 5) + line), "L06")
    assert finding is not None
    assert "vocabulary" in finding.cause


def test_an_engine_that_died_is_named_by_its_own_frames(tmp_path: Path) -> None:
    text = (
        "Traceback (most recent call last):\n"
        '  File "/app/vllm/v1/engine/core.py", line 684, in run_engine_core\n'
        "    engine_core.run_busy_loop()\n"
        "RuntimeError: Worker failed, see the stack trace above\n"
    )
    finding = of(diagnosed(tmp_path, trl([{}] * 5) + text), "L06")
    assert finding is not None
    assert "engine died" in finding.cause
    assert worrying(diagnosed(tmp_path, trl([{}] * 5))) == []
