"""Losses that are made rightly, and otherwise than most: shares of an update, constants, tokens kept in 16 bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of
from tests.replay_core.diagnose.logs import diagnosed_path, verl
from tests.replay_core.diagnose.runs import RESPONSE, Fields, recorded, told

PROMPT, ANSWER, GROUPS, SIZE = 3, 12, 2, 4
CONSTANT = {"loss": {"kind": "grpo"}, "max_response_length": ANSWER}
#: (the summed loss of each row, tokens of each row, rows of the update) -> the loss of a micro-batch.
Make = Callable[[Any, Any, int], float]


def _of_constant(sums_B: Any, lengths_B: Any, rows: int) -> float:
    """Dr. GRPO: each row's sum over the longest answer, the mean over the update's rows."""
    return float(sums_B.sum() / ANSWER / rows)


def _by_share(sums_B: Any, lengths_B: Any, rows: int) -> float:
    """verl's of batches of any size: the mean over the micro-batch's tokens, times its share of the rows."""
    return float(sums_B.sum() / lengths_B.sum() * len(sums_B) / rows)


def _updates(
    folder: Path, make: Make, *, parts: int = 3, flags: dict[str, Any] | None = None, stored: torch.dtype | None = None,
    steps: int = 4, lengths: tuple[int, int] = (2, ANSWER + 1), size: float = 1.0,
) -> Path:  # fmt: skip
    """One update a step, in unlike micro-batches, whose policy has not moved: the loss of a token is -advantage."""
    draw = np.random.default_rng(4)
    rows = GROUPS * SIZE
    with Recorder(folder, flags=flags or {}) as recorder:
        for step in range(steps):
            lengths_B = draw.integers(*lengths, rows)
            mask_BT = (np.arange(ANSWER) < lengths_B[:, None]).astype(np.int64)
            ids_BS = draw.integers(3, 20, (rows, PROMPT + ANSWER))
            # Rows of prompt and answer, and numbers of the tokens behind their first.
            wide_BS = np.concatenate([np.zeros((rows, PROMPT), np.int64), mask_BT], 1)
            mask_BT = wide_BS[:, 1:]
            logps_BT = (-draw.random(mask_BT.shape) * mask_BT).astype(np.float32)
            rewards_B = draw.integers(0, 7, rows) / 7.0
            by_group = rewards_B.reshape(GROUPS, SIZE)
            a_B = size * (by_group - by_group.mean(1, keepdims=True)).reshape(-1) / (by_group.std() + 1e-6)
            a_BT = a_B[:, None] * mask_BT
            with recorder.step(step) as record:
                for micro, at in enumerate(np.array_split(np.arange(rows), parts)):
                    fields = {
                        "input_ids": ids_BS[at], "response_mask": wide_BS[at], "log_probs": logps_BT[at],
                        "attention_mask": np.maximum(wide_BS[at], np.arange(PROMPT + ANSWER) < PROMPT),
                        "old_log_probs": logps_BT[at], "advantages": a_BT[at].astype(np.float32),
                    }  # fmt: skip
                    kept = {
                        name: torch.from_numpy(value).to(stored)
                        if stored is not None and value.dtype == np.float32
                        else value
                        for name, value in fields.items()
                    }
                    record("forward_data", **kept, micro=micro)
                    record("loss", {"pg_loss": make(-a_BT[at].sum(1), lengths_B[at], rows)}, micro=micro)
    return folder


def _worries(folder: Path) -> list[str]:
    return [one.claim for one in look(folder, "D28").findings if one.id == "D28" and one.severity != "info"]


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_a_mean_by_the_share_of_the_samples_is_a_known_reduction(parts: int, tmp_path: Path) -> None:
    _updates(tmp_path / "d", _by_share, parts=parts, flags={"actor.loss_agg_mode": "token-mean"})
    assert _worries(tmp_path / "d") == []


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("stored", [None, torch.bfloat16])
def test_a_sum_over_a_constant_is_no_padding_that_counts(
    parts: int, stored: torch.dtype | None, tmp_path: Path
) -> None:
    _updates(tmp_path / "d", _of_constant, parts=parts, flags=CONSTANT, stored=stored)
    assert _worries(tmp_path / "d") == []


@pytest.mark.parametrize("make", [_by_share, _of_constant, lambda sums, lengths, rows: sums.sum() / lengths.sum()])
def test_tokens_kept_in_16_bits_are_rounded_and_their_loss_is_not(make: Make, tmp_path: Path) -> None:
    _updates(tmp_path / "d", make, stored=torch.bfloat16)
    assert _worries(tmp_path / "d") == []


def test_a_factor_is_told_of_tokens_kept_in_16_bits_as_well(tmp_path: Path) -> None:
    _updates(
        tmp_path / "d", lambda sums, lengths, rows: 8 * float(sums.sum() / lengths.sum()), stored=torch.float16, parts=2
    )
    assert _worries(tmp_path / "d")


def test_answers_of_one_length_are_no_factor(tmp_path: Path) -> None:
    """Each row's own sum over a constant that its length is, too: a share of the step's tokens, times some number."""
    _updates(tmp_path / "d", _of_constant, lengths=(ANSWER, ANSWER + 1), parts=8, flags=CONSTANT)
    assert _worries(tmp_path / "d") == []


def test_losses_next_to_nothing_tell_no_reduction(tmp_path: Path) -> None:
    """Importance weights that are not recorded are in them."""
    _updates(tmp_path / "d", lambda sums, lengths, rows: 1.002 * _of_constant(sums, lengths, rows), size=1e-5)
    assert _worries(tmp_path / "d") == []


def _nothing_paid(step: int, fields: Fields) -> None:
    """GAE with gamma and lambda of 1 over answers of which a step's all earn 0: returns are 0, but for rounding."""
    mask = fields["response_mask"]
    draw = torch.Generator().manual_seed(step)
    values = torch.randn(mask.shape, generator=draw) * mask
    scores = fields["token_level_scores"] * (0 if step % 2 else 1)
    returns = scores.sum(1, keepdim=True) * mask
    rounded = 3e-8 * torch.randn(mask.shape, generator=draw) * mask
    fields |= {
        "token_level_scores": scores, "token_level_rewards": scores.clone(), "values": values,
        "returns": returns + rounded, "advantages": returns - values,
    }  # fmt: skip


def test_returns_of_answers_that_earn_nothing_are_no_other_targets(tmp_path: Path) -> None:
    flags = {"algorithm.adv_estimator": "gae", "data.max_response_length": RESPONSE}
    assert not told(recorded(tmp_path, _nothing_paid, flags=flags), "D44")


def test_values_that_are_on_their_way_are_not_past_their_target(tmp_path: Path) -> None:
    """Returns rise faster than a slow critic follows: it was far from them, and comes from there."""
    steps = [
        {"critic/values/mean": -0.7 + 0.004 * at, "critic/returns/mean": 0.2 + 0.25 * min(at / 20, 1.0),
         "actor/entropy": 0.4 + 0.01 * (at % 3)}
        for at in range(40)
    ]  # fmt: skip
    (tmp_path / "train.log").write_text(verl(steps))
    assert of(diagnosed_path(tmp_path / "train.log"), "D63") is None
    away = [step | {"critic/values/mean": 0.2 - 0.3 * (at % 9)} for at, step in enumerate(steps)]
    (tmp_path / "train.log").write_text(verl(away))
    assert of(diagnosed_path(tmp_path / "train.log"), "D63") is not None


def test_a_kl_of_tokens_in_16_bits_is_no_other_estimator_than_the_stated_one(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    with Recorder(tmp_path / "d", flags={"kl_loss_type": "low_var_kl", "kl_loss_coef": 0.1}) as recorder:
        for step in range(5):
            with recorder.step(step) as record:
                for micro in range(2):
                    ids_BS, mask_BT = draw.integers(3, 20, (6, 9)), np.ones((6, 6), np.int64)
                    ref_BT = -draw.exponential(2, (6, 6))
                    now_BT = ref_BT + 0.01 * (1 + step) * draw.normal(0, 1, (6, 6))
                    d_BT = ref_BT - now_BT
                    record("forward_data", input_ids=ids_BS, attention_mask=np.ones_like(ids_BS), response_mask=mask_BT,
                           log_probs=torch.from_numpy(now_BT).bfloat16(), micro=micro,
                           ref_log_probs=torch.from_numpy(ref_BT).bfloat16())  # fmt: skip
                    record("loss", {"kl_loss": float((np.exp(d_BT) - d_BT - 1).mean())}, micro=micro)
    found = of(look(tmp_path / "d", "D29"), "D29")
    assert found is None or found.severity == "info"


def test_a_loss_of_0_is_explained_by_samples_without_an_advantage(tmp_path: Path) -> None:
    draw = np.random.default_rng(2)
    with Recorder(tmp_path / "d") as recorder:
        for step in range(8):
            teaches = step % 2
            rewards_B = np.array([0.0, 1.0, 0.0, 1.0]) if teaches else np.zeros(4)
            mask_BT = np.ones((4, 5), np.int64)
            with recorder.step(step) as record:
                record("trajectory", input_ids=draw.integers(3, 20, (4, 8)), attention_mask=np.ones((4, 8), np.int64),
                       response_mask=mask_BT, rewards=rewards_B.astype(np.float32),
                       advantages=((rewards_B - rewards_B.mean())[:, None] * mask_BT).astype(np.float32))  # fmt: skip
                record("training_metrics", {"loss": 0.1 * teaches, "grad_norm": 0.3 * teaches})
    assert of(diagnosed_path(tmp_path / "d"), "L01") is None
    lines = [{"loss": 0.1 * (step % 2), "grad_norm": 0.3 * (step % 2), "step": step} for step in range(8)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    alone = of(diagnosed_path(tmp_path / "log.jsonl"), "L01")
    assert alone is not None
    assert alone.severity == "warning"
