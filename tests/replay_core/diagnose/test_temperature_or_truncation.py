"""What the engine renormalises, what it makes colder, and what padding does: told apart by places and by widths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import causes, look, of
from tests.replay_core.diagnose.bigram import Bigram

PROMPTS = [[5, 6], [7], [8, 9, 10], [11, 3]]


def _recorded(directory: Path, *, spread: float, vocab: int, scale: float = 1.0, **drawn: Any) -> Path:
    lm = Bigram(7, vocab, spread)
    rollout = lm.rollout(PROMPTS, each=6, **drawn)
    noise_BT = lm.draw.normal(0, 0.004, rollout.response_BT.shape) * rollout.response_BT
    trainer_BT = rollout.logprobs(lm, scale).astype(np.float32)
    with Recorder(directory).step(0) as record:
        record("trajectory", **rollout.tensors(
            rollout_log_probs=(rollout.sampled_BT + noise_BT).astype(np.float32),
            old_log_probs=trainer_BT))  # fmt: skip
    return directory


POLICIES = [pytest.param(0.4, 14, id="untrained"), pytest.param(1.2, 40, id="of many tokens"),
            pytest.param(2.5, 60, id="trained")]  # fmt: skip


@pytest.mark.parametrize(("spread", "vocab"), POLICIES)
@pytest.mark.parametrize("temperature", [0.4, 0.75, 1.3])
def test_a_temperature_is_measured(tmp_path: Path, spread: float, vocab: int, temperature: float) -> None:
    (found,) = causes(look(_recorded(tmp_path / "d", spread=spread, vocab=vocab, temperature=temperature)))
    assert found.id == "D10"
    assert f"{temperature:.1f}" in found.claim or abs(float(found.evidence[0].value or 0) - temperature) < 0.05


@pytest.mark.parametrize(("spread", "vocab"), POLICIES)
@pytest.mark.parametrize("cut", [{"top_p": 0.6}, {"top_p": 0.8}, {"top_k": 3}, {"top_k": 5}], ids=str)
def test_what_is_kept_is_no_temperature(tmp_path: Path, spread: float, vocab: int, cut: dict[str, Any]) -> None:
    (found,) = causes(look(_recorded(tmp_path / "d", spread=spread, vocab=vocab, **cut)))
    assert found.id == "D11"
    if "top_p" in cut:
        least = next(one.value for one in found.evidence if one.name.startswith("probability kept, least"))
        assert float(least or 0) > cut["top_p"] - 0.02


@pytest.mark.parametrize(("spread", "vocab"), POLICIES[2:])
def test_numbers_of_the_likeliest_token_are_not_renormalised(tmp_path: Path, spread: float, vocab: int) -> None:
    lm = Bigram(7, vocab, spread)
    with Recorder(tmp_path / "d") as recorder:
        for step in range(3):
            rollout = lm.rollout(PROMPTS, each=12)
            best_BT = lm.log_table().max(1)[rollout.ids_BS[:, :-1]] * rollout.response_BT
            with recorder.step(step) as record:
                record("trajectory", **rollout.tensors(
                    rollout_log_probs=best_BT.astype(np.float32),
                    old_log_probs=rollout.logprobs(lm).astype(np.float32)))  # fmt: skip
    found = causes(look(tmp_path / "d"))[0]
    assert found.id == "D09"
    assert "those of the likeliest token of each place" in found.claim


@pytest.mark.parametrize(("spread", "vocab"), POLICIES)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_one_temperature_on_both_sides_is_fine(tmp_path: Path, spread: float, vocab: int, temperature: float) -> None:
    path = _recorded(tmp_path / "d", spread=spread, vocab=vocab, temperature=temperature, scale=temperature)
    assert causes(look(path)) == []


@pytest.mark.parametrize(("spread", "vocab"), POLICIES)
@pytest.mark.parametrize("temperature", [0.5, 0.8])
@pytest.mark.parametrize("divides", [True, False], ids=["trainer divides its logits", "trainer at 1"])
def test_a_temperature_after_the_softmax_is_told(
    tmp_path: Path, spread: float, vocab: int, temperature: float, divides: bool
) -> None:
    lm = Bigram(7, vocab, spread)
    rollout = lm.rollout(PROMPTS, each=6, temperature=temperature)
    divided_BT = rollout.logprobs(lm) / temperature
    trainer_BT = rollout.logprobs(lm, temperature if divides else 1.0)
    with Recorder(tmp_path / "d", flags={"temperature": temperature}).step(0) as record:
        record("trajectory", **rollout.tensors(
            rollout_log_probs=divided_BT.astype(np.float32), old_log_probs=trainer_BT.astype(np.float32)))  # fmt: skip
    (found,) = [one for one in causes(look(tmp_path / "d")) if one.link != "tokens"]
    assert found.id == "D10"
    assert "after the softmax" in found.claim
    assert f"({temperature:.2f})" in found.claim


def _padded(directory: Path, per_pad: float, *, flat: float = 0.0, seed: int = 0) -> Path:
    """Four steps of eight prompts: the trainer's numbers move by so much for each left pad."""
    lm, recorder = Bigram(seed, 30, 1.0), Recorder(directory)
    draw = np.random.default_rng(seed)
    for step in range(4):
        prompts = [[int(t) for t in draw.integers(3, 30, size=size)] for size in draw.integers(2, 8, size=7)] + [
            [4] * 9
        ]
        rollout = lm.rollout(prompts[:7] if step else prompts, each=3, limit=12)
        pads_B = rollout.attention_BS.argmax(1)
        scale_BT = (flat + per_pad * pads_B)[:, None] * rollout.response_BT
        trainer_BT = rollout.logprobs(lm) + draw.normal(0, 1, scale_BT.shape) * scale_BT
        with recorder.step(step) as record:
            record("trajectory", **rollout.tensors(
                rollout_log_probs=rollout.sampled_BT, old_log_probs=trainer_BT.astype(np.float32)))  # fmt: skip
    return directory


def test_a_difference_that_grows_with_padding_is_of_positions(tmp_path: Path) -> None:
    found = of(look(_padded(tmp_path / "d", 0.04, flat=0.05), "D09"), "D09")
    assert found is not None
    assert "more left padding" in found.claim
    assert "position ids" in found.cause


@pytest.mark.parametrize("seed", range(3))
def test_a_difference_that_does_not_grow_is_not(tmp_path: Path, seed: int) -> None:
    found = of(look(_padded(tmp_path / "d", 0.0, flat=0.2, seed=seed), "D09"), "D09")
    assert found is not None
    assert "padding" not in found.claim
