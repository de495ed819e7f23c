"""What engine and trainer disagree by, by what stands before a token, by whose way it goes, by ranks; and what padding
and micro-batches are taken for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_core.diagnose.finding import Diagnosis, Finding
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of

ROWS, PROMPT, RESPONSE = 24, 10, 10
Array = Any


class _Batch:
    """Rows of random tokens, prompts of 4 to 10 and responses of 6 to 10, and what the trainer gives them."""

    def __init__(self, step: int, seed: int) -> None:
        self.draw = draw = np.random.default_rng(100 * seed + step)
        self.head_B = np.repeat(draw.integers(4, PROMPT + 1, ROWS // 4), 4)
        self.size_B = draw.integers(6, RESPONSE + 1, ROWS)
        self.ids_BS = draw.integers(10, 60, (ROWS, PROMPT + RESPONSE))
        for row in range(0, ROWS, 4):
            self.ids_BS[row : row + 4, :PROMPT] = self.ids_BS[row, :PROMPT]
        column = np.arange(PROMPT + RESPONSE)
        self.held_BS = (column >= PROMPT - self.head_B[:, None]) & (column < PROMPT + self.size_B[:, None])
        self.ids_BS[~self.held_BS] = 0
        self.mask_BT = self.held_BS[:, PROMPT:].astype(np.int64)
        self.before_BT = self.head_B[:, None] + np.arange(RESPONSE)
        self.place_BT = np.broadcast_to(np.arange(RESPONSE), (ROWS, RESPONSE))
        self.trainer_BT = -draw.uniform(0.4, 3.0, (ROWS, RESPONSE))

    def tensors(self, **more: Array) -> dict[str, Any]:
        named = {"input_ids": self.ids_BS, "attention_mask": self.held_BS.astype(np.int64),
                 "response_mask": self.mask_BT, "group_id": np.arange(ROWS) // 4} | more  # fmt: skip
        return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in named.items()}


def _apart(folder: Path, seed: int, by: Callable[[_Batch], Array], *, ref: bool = False) -> Diagnosis:
    """Five steps whose engine is apart from the trainer by `by` [B, T]."""
    with Recorder(folder) as recorder:
        for step in range(5):
            batch = _Batch(step, seed)
            rollout = np.minimum(batch.trainer_BT + by(batch), -1e-4)
            with recorder.step(step) as record:
                more = {"ref_log_probs": batch.trainer_BT.astype(np.float32)} if ref else {}
                record("trajectory", batch.tensors(
                    rollout_log_probs=rollout.astype(np.float32), old_log_probs=batch.trainer_BT.astype(np.float32),
                    **more))  # fmt: skip
    return look(folder)


def _noise(batch: _Batch) -> Array:
    return batch.draw.normal(0, 0.8, batch.trainer_BT.shape)


def _told(folder: Path, seed: int, by: Callable[[_Batch], Array]) -> Finding:
    found = of(_apart(folder, seed, by), "D09")
    assert found is not None
    return found


@pytest.mark.parametrize("seed", range(4))
def test_a_window_is_exact_until_it_is_full(tmp_path: Path, seed: int) -> None:
    one = _told(tmp_path, seed, lambda batch: np.where(batch.before_BT >= 8, _noise(batch), 0.0))
    assert "exact where fewer than 8 tokens stand before" in one.claim
    assert "window" in one.cause


@pytest.mark.parametrize("seed", range(4))
def test_positions_tell_more_the_further_on(tmp_path: Path, seed: int) -> None:
    one = _told(tmp_path, seed, lambda batch: _noise(batch) * (0.2 + 0.25 * batch.place_BT))
    assert "more, the more tokens stand before" in one.claim
    assert "rope" in one.cause
    # Nothing in the numbers parts them from another prompt: the headline names neither.
    assert "before any update" in one.claim
    assert not [word for word in ("position", "rope", "prompt") if word in one.claim]


@pytest.mark.parametrize("seed", range(4))
def test_other_weights_tell_everywhere(tmp_path: Path, seed: int) -> None:
    def other(batch: _Batch) -> Array:
        batch.held_BS[:, :PROMPT] = True  # prompts of one length: no padding that could tell
        return _noise(batch)

    one = _told(tmp_path, seed, other)
    assert "the engine's forward is not the trainer's, by its weights or by its model" in one.claim
    assert "quantised" not in one.cause.partition(". Not")[0]


@pytest.mark.parametrize("seed", range(4))
def test_another_prompt_tells_at_the_first_tokens(tmp_path: Path, seed: int) -> None:
    one = _told(tmp_path, seed, lambda batch: _noise(batch) * np.where(batch.place_BT < 3, 1.5, 0.15))
    assert "the prompts differ" in one.claim


@pytest.mark.parametrize("seed", range(3))
def test_left_padding_is_never_passed_over(tmp_path: Path, seed: int) -> None:
    one = _told(tmp_path, seed, lambda batch: _noise(batch) * (1.0 + 0.1 * (PROMPT - batch.head_B[:, None])))
    assert "padding" in one.claim


def test_rounding_is_none_of_it(tmp_path: Path) -> None:
    found = _apart(tmp_path, 0, lambda batch: batch.draw.normal(0, 0.004, batch.trainer_BT.shape))
    assert not [one for one in found.findings if one.severity != "info"]


def _moved(folder: Path, seed: int, engine: Callable[[Array, Array], Array]) -> Finding | None:
    """Six steps in which the trainer moves from the reference; `engine` makes what it samples with of both."""
    with Recorder(folder) as recorder:
        for step in range(6):
            batch = _Batch(step, seed)
            ref = batch.trainer_BT - 0.5
            way = batch.draw.normal(0, 0.05 * step, ref.shape) * batch.draw.uniform(0.3, 1.5, ref.shape)
            policy = ref + way
            rollout = engine(ref, policy) + batch.draw.normal(0, 0.002 * (step > 0), ref.shape)
            named = {"rollout": rollout, "old": policy, "ref": ref}
            with recorder.step(step) as record:
                record("trajectory", batch.tensors(**{
                    f"{name}_log_probs": np.minimum(value, -1e-4).astype(np.float32) for name, value in named.items()
                }))  # fmt: skip
    return of(look(folder), "D12")


@pytest.mark.parametrize("seed", range(3))
def test_an_adapter_that_is_applied_twice_is_no_old_one(tmp_path: Path, seed: int) -> None:
    draw = np.random.default_rng(seed)
    # Beyond small steps a softmax is no line: the engine is further on, by another factor on each token.
    twice = _moved(
        tmp_path / "twice", seed, lambda ref, policy: policy + (policy - ref) * draw.uniform(0.1, 4, ref.shape)
    )
    assert twice is not None
    assert "the same way" in twice.claim
    old = _moved(tmp_path / "old", seed, lambda ref, policy: ref + 0.0 * policy)
    assert old is not None
    assert "the same way" not in old.claim


def _two_ranks(folder: Path, *, empty: bool = False, weights: Callable[[int, int], Array] | None = None) -> Diagnosis:
    """Rank 0 has all of its rows in one micro-batch, rank 1 in two."""
    with Recorder(folder) as recorder:
        for step in range(5):
            batch = _Batch(step, 3)
            batch.mask_BT[12:] *= 0 if empty else 1
            lp = batch.trainer_BT.astype(np.float32)
            every = batch.tensors(rollout_log_probs=lp, log_probs=lp)
            for rank, parts in ((0, [(0, 12)]), (1, [(12, 18), (18, 24)])):
                begin, end = parts[0][0], parts[-1][1]
                with recorder.step(step, rank=rank) as record:
                    record("trajectory", {name: value[begin:end] for name, value in every.items()
                                          if name != "log_probs"})  # fmt: skip
                    for micro, (a, b) in enumerate(parts):
                        record("forward_data", {name: value[a:b] for name, value in every.items()
                                                if name != "rollout_log_probs"}, micro=micro)  # fmt: skip
                    if weights is not None:
                        record("param", {"w": torch.from_numpy(weights(step, rank))})
    return look(folder)


def test_a_rank_with_fewer_micro_batches_lacks_none(tmp_path: Path) -> None:
    assert of(_two_ranks(tmp_path / "whole"), "D39") is None
    # A record that is gone is missed all the same.
    for file in (tmp_path / "whole").glob("forward_data/step_000002_rank1_micro0*"):
        file.unlink()
    assert of(look(tmp_path / "whole"), "D39") is not None


def test_a_rank_without_a_token_in_the_loss_is_named(tmp_path: Path) -> None:
    one = of(_two_ranks(tmp_path, empty=True), "D07")
    assert one is not None
    assert one.claim.startswith("rank 1 trains on nothing")


def test_weights_that_are_recorded_after_an_update_drift_apart_too(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    base, ways = draw.normal(size=200), draw.normal(size=(2, 200))
    apart = _two_ranks(tmp_path / "apart", weights=lambda step, rank: base + 0.01 * (step + 1) * ways[rank])
    assert of(apart, "D66") is not None
    shards = _two_ranks(tmp_path / "shards", weights=lambda step, rank: ways[rank] + 0.01 * step)
    assert of(shards, "D66") is None


@pytest.mark.parametrize(("decay", "told"), [(0.08, True), (1e-5, False)])
def test_weights_that_shrink_by_one_factor(tmp_path: Path, decay: float, told: bool) -> None:
    draw = np.random.default_rng(1)
    weights = [draw.normal(size=400)]
    for _ in range(5):
        weights.append((1 - decay) * weights[-1] + 0.01 * draw.normal(size=400))
    found = of(_two_ranks(tmp_path, weights=lambda step, rank: weights[step]), "D110")
    assert (found is not None) == told


@pytest.mark.parametrize(("experts", "told"), [(2, True), (6, False)])
def test_a_router_that_sends_all_tokens_one_way(tmp_path: Path, experts: int, told: bool) -> None:
    batch = _Batch(0, 0)
    draw = np.random.default_rng(2)
    chosen = np.argsort(draw.random((ROWS, PROMPT + RESPONSE, 3, experts)), -1)[..., :2]
    with Recorder(tmp_path, flags={"num_experts": 6}) as recorder, recorder.step(0) as record:
        record("trajectory", batch.tensors(rollout_log_probs=batch.trainer_BT.astype(np.float32),
                                           routed_experts=chosen))  # fmt: skip
    assert (of(look(tmp_path), "D111") is not None) == told
