"""D94, D95, D78, D52, D59: what lengths, rows and lines tell, of the genuine healthy batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.replay_core.diagnose.batches import END, Fields, healthy, masks, noise, of, seen
from tests.replay_core.diagnose.batches import set_advantages as give
from tests.replay_core.diagnose.batches import set_rewards as pay


def _of_one_length(ends: bool, length: int = 7) -> Fields:
    fields = healthy()
    fields["response_mask"] = (np.arange(fields["responses"].shape[1]) < length) * np.ones((16, 1), dtype=np.int64)
    fields["attention_mask"][:, -fields["responses"].shape[1] :] = fields["response_mask"]
    if ends:
        fields["input_ids"][:, 20 + length - 1] = END
        fields["responses"][:, length - 1] = END
    return fields


def test_responses_of_one_length_that_end_anyhow(tmp_path: Path) -> None:
    fields = _of_one_length(ends=False)
    # Half of the answers have the same last token: of so few different ones D20 does not say that all were cut off.
    fields["input_ids"][:8, 26] = fields["responses"][:8, 6] = 9
    fields["input_ids"][8:, 26] = fields["responses"][8:, 6] = [10, 10, 11, 11, 12, 12, 13, 13]
    fields["truncated"] = np.zeros(16, dtype=np.int64)
    found = of(seen(tmp_path, fields, "D94"), "D94")
    assert found is not None
    assert "no response ends by itself: all 16 are cut off at 7 tokens" in found.claim


def test_answers_of_one_length_end_on_the_end_token(tmp_path: Path) -> None:
    assert of(seen(tmp_path, _of_one_length(ends=True), "D94"), "D94") is None
    assert of(seen(tmp_path, healthy(), "D94"), "D94") is None


def test_an_end_token_of_no_name_that_stops_nothing(tmp_path: Path) -> None:
    fields = _of_one_length(ends=True)
    fields["truncated"] = np.zeros(16, dtype=np.int64)
    assert of(seen(tmp_path / "good", fields, "D94"), "D94") is None
    for at in (3, 5):
        fields["input_ids"][:, 20 + at] = fields["responses"][:, at] = END
    found = of(seen(tmp_path / "bad", fields, "D94"), "D94")
    assert found is not None
    assert (found.severity, "goes on after the end token" in found.claim) == ("error", True)


def _twice(fields: Fields) -> Fields:
    """Both halves of a batch of 32: what is of a length comes again."""
    return {name: [*value, *value] if isinstance(value, list) else np.concatenate([value, value])
            for name, value in fields.items()}  # fmt: skip


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_rewards_of_the_length_alone(sign: float, tmp_path: Path) -> None:
    fields = healthy()
    pay(fields, sign * np.log(masks(fields).sum(1)))
    fields = _twice(fields)
    fields["responses"][16:, 0] = 5
    fields["input_ids"][16:, 20] = 5
    found = of(seen(tmp_path, fields, "D95"), "D95")
    assert found is not None
    assert ("long" if sign > 0 else "short") + " answers are paid" in found.claim


def test_rewards_with_a_length_penalty_are_no_function_of_it(tmp_path: Path) -> None:
    fields = healthy()
    draw = np.random.default_rng(0)
    pay(fields, draw.integers(0, 2, 16) - 0.01 * masks(fields).sum(1))
    fields = _twice(fields)
    fields["token_level_scores"][16:] = fields["token_level_scores"][16:][::-1]
    assert of(seen(tmp_path, fields, "D95"), "D95") is None


@pytest.mark.parametrize(("by", "words"), [(1, "1 row before"), (4, "4 rows before"), (-1, "1 row after")])
def test_advantages_that_end_with_another_row(by: int, words: str, tmp_path: Path) -> None:
    fields = healthy()
    give(fields, np.random.default_rng(1).normal(size=16))
    fields["advantages"] = np.roll(fields["advantages"], by, 0) * masks(fields)
    found = of(seen(tmp_path, fields, "D78"), "D78")
    assert found is not None
    assert "belong to other samples" in found.claim
    assert words in found.claim


# ---- a critic


def _with_critic() -> tuple[Fields, Any]:
    """Values, returns by GAE (gamma 1, lambda 0.95), and raw advantages [B, T], written out by hand."""
    fields = healthy()
    mask, draw = masks(fields), np.random.default_rng(3)
    values = (0.5 + 0.3 * np.cumsum(draw.normal(size=mask.shape), 1)) * mask
    rewards = np.zeros(mask.shape)
    rewards[np.arange(16), mask.sum(1) - 1] = draw.integers(0, 2, 16)
    raw, follows, after = np.zeros(mask.shape), np.zeros(16), np.zeros(16)
    for t in reversed(range(mask.shape[1])):
        now = rewards[:, t] + after - values[:, t] + 0.95 * follows
        follows, after = np.where(mask[:, t], now, follows), np.where(mask[:, t], values[:, t], after)
        raw[:, t] = np.where(mask[:, t], now, 0)
    fields["values"], fields["returns"] = values.astype(np.float32), ((raw + values) * mask).astype(np.float32)
    fields["token_level_scores"] = fields["token_level_rewards"] = rewards.astype(np.float32)
    return fields, raw


def _whitened(raw: Any, mask: Any) -> Any:
    return (raw - raw[mask].mean()) / raw[mask].std() * mask


CRITIC = {
    "the sign is wrong": lambda raw, mask, _: -_whitened(raw, mask),
    "values are not subtracted": lambda raw, mask, fields: _whitened(fields["returns"], mask),
    "they are the values": lambda raw, mask, fields: fields["values"],
    "the token before": lambda raw, mask, _: np.pad(raw[:, :-1], ((0, 0), (1, 0))) * mask,
    "those of the row before": lambda raw, mask, _: np.roll(raw, 1, 0) * mask,
    "added up along the response": lambda raw, mask, _: np.cumsum(raw, 1) * mask,
    "absolute values": lambda raw, mask, _: np.abs(_whitened(raw, mask)),
    "only positive ones": lambda raw, mask, _: np.maximum(_whitened(raw, mask), 0),
    "only their signs": lambda raw, mask, _: np.sign(_whitened(raw, mask)),
    "only the last token": lambda raw, mask, _: raw * (np.cumsum(mask, 1) == mask.sum(1, keepdims=True)) * mask,
}


@pytest.mark.parametrize("words", CRITIC)
def test_an_exact_line_of_a_mistake_is_named(words: str, tmp_path: Path) -> None:
    fields, raw = _with_critic()
    fields["advantages"] = CRITIC[words](raw, masks(fields), fields).astype(np.float32)
    found = of(seen(tmp_path, fields, "D52"), "D52")
    assert found is not None
    assert words in found.claim, found.claim


@pytest.mark.parametrize("made", [lambda raw, mask: raw, _whitened, lambda raw, mask: (raw - raw[mask].mean()) * mask])
def test_raw_centred_and_whitened_are_right(made: Any, tmp_path: Path) -> None:
    fields, raw = _with_critic()
    fields["advantages"] = made(raw, masks(fields)).astype(np.float32)
    assert of(seen(tmp_path, fields, "D52"), "D52") is None


# ---- importance weights


@pytest.mark.parametrize(("words", "made"), [
    ("the exponential is missing", lambda d, mask: d),
    ("the weight of the token before", lambda d, mask: np.pad(np.exp(d)[:, :-1], ((0, 0), (1, 0)))),
])  # fmt: skip
def test_weights_that_are_something_else(words: str, made: Any, tmp_path: Path) -> None:
    fields = healthy()
    fields["rollout_log_probs"] = (fields["old_log_probs"] + noise(fields, 0.2)).astype(np.float32)
    d = fields["old_log_probs"] - fields["rollout_log_probs"]
    fields["rollout_is_weights"] = (made(d, masks(fields)) * masks(fields)).astype(np.float32)
    found = of(seen(tmp_path, fields, "D59"), "D59")
    assert found is not None
    assert words in found.claim, found.claim
