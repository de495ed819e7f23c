"""What a run states of its loss and its penalties, beside what it makes; and what it keeps of its optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of

ROWS, PROMPT, ANSWER = 8, 5, 12


def _optimizer(folder: Path, names: dict[str, str], *, lost: bool) -> None:
    """Ten updates of Adam; the state is lost before the fifth. `names`: what is recorded of it, and as what."""
    weight = torch.nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))
    target = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.Adam([weight], lr=1e-2)
    with Recorder(folder) as recorder:
        for step in range(10):
            if step == 5 and lost:
                optimizer = torch.optim.Adam([weight], lr=1e-2)
            optimizer.zero_grad()
            ((weight - target) ** 2).sum().backward()
            optimizer.step()
            state = {name: value.clone() for name, value in optimizer.state[weight].items()}
            kept: dict[str, Any] = {
                recorded: int(state[name]) if name == "step" else state[name] for name, recorded in names.items()
            }
            with recorder.step(step) as record:
                record("optimizer", kept)
        recorder.note(resumed_at=5, resumed_from="checkpoints/step_5")


@pytest.mark.parametrize("lost", [True, False])
@pytest.mark.parametrize("name", ["adam_step", "optimizer_step", "num_updates", "state.step", "optim_steps"])
def test_a_state_that_is_lost_is_told_by_one_counter_for_all(name: str, lost: bool, tmp_path: Path) -> None:
    _optimizer(tmp_path / "d", {"step": name}, lost=lost)
    found = of(look(tmp_path / "d", "D161"), "D161")
    assert (found is not None) == lost
    if found is not None:
        assert "from 5 back to 1" in found.claim
        assert "resumed from checkpoints/step_5" in found.claim


@pytest.mark.parametrize("lost", [True, False])
def test_a_state_that_is_lost_is_told_by_its_moments_alone(lost: bool, tmp_path: Path) -> None:
    _optimizer(tmp_path / "d", {"exp_avg_sq": "exp_avg_sq.weight"}, lost=lost)
    found = of(look(tmp_path / "d", "D161"), "D161")
    assert (found is not None) == lost
    assert found is None or (list(found.steps) == [5] and "second moments" in found.claim)


@pytest.mark.parametrize(
    ("names", "says"),
    [(("scheduler.last_epoch",), "the learning rate's schedule"), (("ema.num_updates",), "moving average"),
     (("consumed_samples",), "the data's position")],
)  # fmt: skip
def test_what_goes_along_with_an_optimizer_may_be_lost_too(names: tuple[str, ...], says: str, tmp_path: Path) -> None:
    with Recorder(tmp_path / "d") as recorder:
        for step in range(8):
            with recorder.step(step) as record:
                record("training_metrics", {"adam_step": step + 1, **dict.fromkeys(names, (step % 4 + 1) * 16)})
    found = of(look(tmp_path / "d", "D161"), "D161")
    assert found is not None
    assert says in found.claim


def _losses(folder: Path, flags: dict[str, Any], make: Any, *, counted: bool = True) -> None:
    """Four micro-batches an update, of answers of other lengths in each. `make(sums_B, lengths_B, update_tokens)`."""
    draw = np.random.default_rng(0)
    with Recorder(folder, flags=flags) as recorder:
        for step in range(3):
            parts = []
            for micro in range(4):
                lengths_B = draw.integers(1 + 2 * micro, 4 + 2 * micro, ROWS)
                mask_BT = (np.arange(ANSWER) < lengths_B[:, None]).astype(np.int64)
                loss_BT = (draw.normal(0.3, 1, (ROWS, ANSWER)) * mask_BT).astype(np.float32)
                ids_BS = draw.integers(3, 20, (ROWS, PROMPT + ANSWER))
                parts.append((ids_BS, mask_BT, loss_BT, lengths_B))
            tokens = int(sum(part[3].sum() for part in parts))
            with recorder.step(step) as record:
                for micro, (ids_BS, mask_BT, loss_BT, lengths_B) in enumerate(parts):
                    whole = np.concatenate([np.ones((ROWS, PROMPT), np.int64), mask_BT], axis=1)
                    record("forward_data", input_ids=ids_BS, attention_mask=whole, completion_mask=mask_BT,
                           completion_ids=ids_BS[:, PROMPT:], micro=micro,
                           advantages=draw.normal(0, 1, ROWS).astype(np.float32))  # fmt: skip
                    record("loss", {"loss": float(make(loss_BT.sum(1), lengths_B, tokens)), "per_token_loss": loss_BT,
                                    **({"num_items_in_batch": float(tokens)} if counted else {})},
                           micro=micro)  # fmt: skip


def _own_mean(sums_B: Any, lengths_B: Any, tokens: int) -> float:
    return float(sums_B.sum() / lengths_B.sum() / 4)


def _of_update(sums_B: Any, lengths_B: Any, tokens: int) -> float:
    return float(sums_B.sum() / tokens)


def _of_rows(sums_B: Any, lengths_B: Any, tokens: int) -> float:
    return float((sums_B / lengths_B).mean() / 4)


@pytest.mark.parametrize(
    ("flags", "make", "says"),
    [
        ({"loss_type": "dapo", "num_generations": 4}, _own_mean, True),
        ({"loss_type": "dapo", "num_generations": 4}, _of_update, False),
        ({"loss_type": "cispo", "num_generations": 4}, _of_rows, True),
        ({"loss_type": "grpo", "num_generations": 4}, _of_rows, False),
        ({"loss_type": "grpo", "num_generations": 4}, _of_update, True),
        ({"loss_type": "bnpo", "num_generations": 4}, _own_mean, False),
        ({"loss_type": "bnpo", "num_generations": 4}, _of_rows, True),
        ({"calculate_per_token_loss": True}, _of_rows, True),
        ({"token_level_loss": False}, _of_rows, False),
        ({"token_level_loss": False}, _of_update, True),
        ({"loss_agg_mode": "token-mean"}, _of_update, False),
        ({"loss_aggregation_mode": "seq-mean-token-mean"}, _of_update, True),
        # What is kept to divide by is what a mean over tokens means.
        ({"loss_agg_mode": "token-mean"}, _own_mean, True),
    ],
)  # fmt: skip
def test_a_loss_that_is_made_otherwise_than_stated(
    flags: dict[str, Any], make: Any, says: bool, tmp_path: Path
) -> None:
    _losses(tmp_path / "d", flags, make)
    found = of(look(tmp_path / "d", "D28"), "D28")
    assert found is not None
    assert (found.severity != "info") == says


def _paid(folder: Path, how: str, *, recorded: str = "", flags: dict[str, Any] | None = None) -> None:
    """Answers paid 1 and -1, less a penalty that begins at 8 tokens and is 1 at 12."""
    draw = np.random.default_rng(2)
    stated = {"max_response_length": 12, "max_prompt_length": 8,
              "overlong_buffer": {"enable": True, "len": 4, "penalty_factor": 1.0}}  # fmt: skip
    with Recorder(folder, flags=stated if flags is None else flags) as recorder:
        for step in range(3):
            prompts_B, lengths_B = draw.integers(2, 9, 32), draw.integers(2, 13, 32)
            ids_BS, mask_BS = np.zeros((32, 20), np.int64), np.zeros((32, 20), np.int64)
            for row, (prompt, length) in enumerate(zip(prompts_B, lengths_B, strict=True)):
                ids_BS[row, 8 - prompt : 8 + length] = draw.integers(3, 20, prompt + length)
                mask_BS[row, 8 - prompt : 8 + length] = 1
            size_B = {
                "right": lengths_B,
                "prompt": prompts_B + lengths_B,
                "one": lengths_B + 1,
                "text": lengths_B - 1,
            }.get(how, lengths_B)
            penalty_B = -np.clip((size_B - 8) / 4, 0, 1)
            penalty_B = {"sign": -penalty_B, "factor": 0.5 * penalty_B}.get(how, penalty_B)
            acc_B = draw.integers(0, 2, 32)
            worth_B = acc_B if recorded == "plain" else 2 * acc_B - 1
            response_BS = mask_BS.copy()
            response_BS[:, :8] = 0
            with recorder.step(step) as record:
                record("trajectory", {
                    "input_ids": ids_BS, "attention_mask": mask_BS, "response_mask": response_BS,
                    "acc": acc_B.astype(np.float32), "rewards": (worth_B + penalty_B).astype(np.float32),
                    **({"overlong_penalty": np.abs(penalty_B).astype(np.float32)} if recorded == "apart" else {}),
                })  # fmt: skip


@pytest.mark.parametrize("recorded", ["", "plain", "apart"])
@pytest.mark.parametrize(("how", "says"), [("right", ""), ("prompt", "prompt and response together"),
                                           ("one", "one token more")])  # fmt: skip
def test_a_penalty_that_is_made_otherwise_than_stated(how: str, says: str, recorded: str, tmp_path: Path) -> None:
    _paid(tmp_path / "d", how, recorded=recorded)
    found = of(look(tmp_path / "d", "D175"), "D175")
    assert (found is not None) == bool(says)
    assert found is None or says in found.claim


def test_a_penalty_that_counts_no_end_token_is_worth_knowing(tmp_path: Path) -> None:
    _paid(tmp_path / "d", "text")
    found = of(look(tmp_path / "d", "D175"), "D175")
    assert found is not None
    assert (found.severity, "one token fewer" in found.claim) == ("info", True)


def test_a_penalty_with_the_wrong_sign(tmp_path: Path) -> None:
    _paid(tmp_path / "d", "sign")
    found = of(look(tmp_path / "d", "D175"), "D175")
    assert found is not None
    assert "wrong sign" in found.claim


def test_a_penalty_that_is_switched_off_is_none(tmp_path: Path) -> None:
    _paid(tmp_path / "d", "prompt", flags={
        "max_response_length": 12, "overlong_buffer": {"enable": False, "len": 4, "penalty_factor": 1.0}})  # fmt: skip
    assert of(look(tmp_path / "d", "D175"), "D175") is None
