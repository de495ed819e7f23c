"""Every advantage a framework computes is named and clean; what looks like one and is not, is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.replay_core.diagnose.batches import (
    END,
    GROUPS,
    PROMPT,
    Fields,
    causes,
    grpo,
    healthy,
    masks,
    of,
    rewards,
    seen,
    set_advantages,
)


def _by_group(values_B: Any, each: Callable[[Any], Any]) -> Any:
    return np.concatenate([each(values_B[group == GROUPS]) for group in range(4)])


def _whitened(batch: Fields, values_B: Any, ddof: int) -> Any:
    tokens_B = masks(batch).sum(1)
    tokens = np.repeat(values_B, tokens_B)
    return (values_B - tokens.mean()) / np.sqrt(tokens.var(ddof=ddof) + 1e-8)


def _opo(batch: Fields) -> Any:
    scores_B, tokens_B = rewards(batch), masks(batch).sum(1)
    base_G = [np.average(scores_B[group == GROUPS], weights=tokens_B[group == GROUPS]) for group in range(4)]
    return scores_B - np.array(base_G)[GROUPS]


def _remax(batch: Fields) -> Any:
    batch["reward_baselines"] = np.array([0.3, 0.1, 0.5, 0.2], dtype=np.float32)[GROUPS]
    return rewards(batch) - batch["reward_baselines"]


def _lead(scores: Any) -> Any:
    lead = np.zeros(len(scores))
    lead[scores.argmax()] = np.sort(scores)[-1] - np.sort(scores)[-2]
    return lead


VARIANTS: dict[str, Callable[[Fields], Any]] = {
    "whitened over the tokens of the batch, std over n - 1": lambda batch: _whitened(batch, rewards(batch), 1),
    "r - group mean, whitened over the tokens of the batch, std over n - 1": lambda batch: _whitened(
        batch, _by_group(rewards(batch), lambda each: each - each.mean()), 1
    ),
    # Of groups of one size, r - the others' mean is a multiple of r - group mean, and whitening takes the factor away.
    "r - group mean, whitened over the tokens of the batch, std over n": lambda batch: _whitened(
        batch, _by_group(rewards(batch), lambda each: each - (each.sum() - each) / 3), 0
    ),
    "weighted by length (OPO)": _opo,
    "(ReMax)": _remax,
    "(pass@k)": lambda batch: _by_group(rewards(batch), _lead),
    "clipped to -1 and 1": lambda batch: np.clip(grpo(rewards(batch), GROUPS), -1, 1),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_known_variant_is_named_and_no_warning(name: str, tmp_path: Path) -> None:
    batch = healthy()
    set_advantages(batch, VARIANTS[name](batch))
    found = seen(tmp_path, batch)
    assert causes(found) == []
    stated = of(found, "D04")
    assert stated is not None
    assert name in stated.claim


def test_a_variant_off_by_a_factor_is_none(tmp_path: Path) -> None:
    batch = healthy()
    set_advantages(batch, 1.01 * _opo(batch))
    assert [(one.id, one.severity) for one in causes(seen(tmp_path, batch))] == [("D04", "warning")]


def test_most_advantages_at_the_bound_are_no_clipped_variant(tmp_path: Path) -> None:
    batch = healthy()
    set_advantages(batch, np.clip(grpo(rewards(batch), GROUPS), -0.05, 0.05))
    assert [one.id for one in causes(seen(tmp_path, batch))] == ["D04"]


def test_a_reward_where_the_mask_no_longer_is_counts_all_the_same(tmp_path: Path) -> None:
    batch = healthy()
    keep = masks(batch) & (batch["responses"] != END)
    batch["response_mask"] = keep.astype(np.int64)
    batch["attention_mask"][:, PROMPT:] = keep
    for name in ("old_log_probs", "rollout_log_probs", "ref_log_prob", "advantages", "returns"):
        batch[name] = batch[name] * keep
    found = seen(tmp_path, batch)
    assert [one.id for one in causes(found)] == ["D19"]
    stated = of(found, "D04")
    assert stated is not None
    assert stated.severity == "info"


def test_a_turned_sign_is_found_where_groups_are_prompts(tmp_path: Path) -> None:
    batch = healthy()
    del batch["uid"]
    set_advantages(batch, -batch["advantages"][:, 0])
    (cause,) = causes(seen(tmp_path, batch))
    assert cause.id == "D04"
    assert "wrong sign" in cause.claim


def test_advantages_of_zero_without_rewards_are_said(tmp_path: Path) -> None:
    batch = healthy()
    for name in ("token_level_scores", "token_level_rewards", "uid"):
        del batch[name]
    assert causes(seen(tmp_path / "healthy", batch)) == []
    set_advantages(batch, [0.0] * 16)
    (cause,) = causes(seen(tmp_path / "zero", batch))
    assert (cause.id, cause.severity) == ("D01", "error")
    assert "every advantage is 0" in cause.claim


# ---- the same samples in two files


def test_a_batch_that_lies_there_twice_is_counted_once(tmp_path: Path) -> None:
    from tests.fixtures import FIXTURES
    from tests.replay_core.diagnose.batches import look

    found = look(FIXTURES / "faults" / "healthy")
    cut = of(found, "D20")
    assert cut is not None
    assert cut.claim.startswith("7 of 16")
    assert "batch.pt holds the same 16 samples as batch.dp: counted once" in found.notes


def test_a_copy_beside_its_original_is_counted_once_and_another_batch_is_not(tmp_path: Path) -> None:
    from tests.replay_core.diagnose.batches import look, save

    save(tmp_path, healthy(), "a.pt")
    save(tmp_path, healthy(), "b.pt")
    found = look(tmp_path)
    assert "b.pt holds the same 16 samples as a.pt: counted once" in found.notes
    assert of(found, "D20").claim.startswith("7 of 16")  # type: ignore[union-attr]
    other = healthy()
    for name in ("input_ids", "responses"):
        other[name] = np.where(other[name] > 10, other[name] - 1, other[name])
    save(tmp_path, other, "b.pt")
    found = look(tmp_path)
    assert not [note for note in found.notes if "counted once" in note]
    assert of(found, "D20").claim.startswith("14 of 32")  # type: ignore[union-attr]
