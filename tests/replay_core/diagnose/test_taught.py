"""A teacher's log-probabilities that are of other tokens, or at another temperature, or broken in some rows, and
advantages that point away from it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.replay_core.diagnose.runs import EOS, RESPONSE, Fields, recorded, told

DISTILLED = {"algorithm.adv_estimator": "on_policy_distillation", "data.max_response_length": RESPONSE}
#: Candidates at each place.
CHOICES = 12


def _distilled(step: int, fields: Fields, how: str = "", *, temperature: float = 1.0, unlike: float = 0.5) -> None:
    """A policy that samples from logits, and a teacher whose logits are near them, in one way or another."""
    draw = torch.Generator().manual_seed(step)
    mask = fields["response_mask"]
    rows = len(mask)
    ours = torch.randn(rows, RESPONSE, CHOICES, generator=draw) * 1.5
    theirs = ours + unlike * torch.randn(rows, RESPONSE, CHOICES, generator=draw)
    tempered = (ours / temperature).log_softmax(-1)
    at = torch.multinomial(tempered.exp().reshape(-1, CHOICES), 1, generator=draw).reshape(rows, RESPONSE)
    written = (fields["responses"] != EOS) & (mask > 0)
    fields["responses"] = torch.where(written, at + 5, fields["responses"])
    fields["input_ids"] = torch.cat([fields["prompts"], fields["responses"]], 1)

    def of(logits: torch.Tensor) -> torch.Tensor:
        return logits.log_softmax(-1).gather(-1, at[..., None])[..., 0] * mask

    policy = of(ours / temperature)
    teacher = of(theirs if how == "raw" else theirs / (0.5 if how == "surer" else temperature))
    if how == "shifted":
        teacher = torch.roll(teacher, 1, 1) * mask
    if how == "broken":
        teacher[::6] = (-8 - torch.rand(RESPONSE, generator=draw)) * mask[::6]
    if how == "dislikes":
        teacher[::6] = teacher[::6] - 3.0 * torch.rand(RESPONSE, generator=draw) * mask[::6]
    fields["old_log_probs"], fields["rollout_log_probs"] = policy, policy.clone()
    fields["teacher_log_probs"] = teacher
    advantages: Any = policy - teacher if how == "away" else teacher - policy
    if how == "whitened":
        kept = advantages[mask > 0]
        advantages = (advantages - kept.mean()) / kept.std()
    if how == "cut off":
        advantages = advantages.clamp(-0.5, 0.5)
    fields["advantages"] = advantages * mask
    fields["returns"] = fields["advantages"].clone()
    fields["token_level_scores"] = fields["token_level_rewards"] = torch.zeros(rows, RESPONSE)


def _run(path: Path, how: str = "", flags: dict[str, Any] | None = None, **more: float) -> Path:
    return recorded(
        path, lambda step, fields: _distilled(step, fields, how, **more), flags=DISTILLED if flags is None else flags
    )


@pytest.mark.parametrize(
    ("how", "words"),
    [("shifted", "shifted by +1 token"), ("broken", "the teacher finds every token improbable")],
)
def test_a_teacher_of_other_tokens(how: str, words: str, tmp_path: Path) -> None:
    (finding,) = told(_run(tmp_path, how), "D146")
    assert words in finding.claim
    assert finding.evidence
    assert finding.where.tensor == "teacher_log_probs"


def test_a_teacher_that_agrees_little_is_shifted_all_the_same(tmp_path: Path) -> None:
    (finding,) = told(_run(tmp_path, "shifted", unlike=1.2), "D146")
    assert "shifted by +1 token" in finding.claim


def test_a_teacher_at_another_temperature(tmp_path: Path) -> None:
    flags = {**DISTILLED, "rollout.temperature": 0.5}
    (finding,) = told(_run(tmp_path, "raw", flags, temperature=0.5, unlike=0.1), "D146")
    assert "0.5 is stated" in finding.claim


@pytest.mark.parametrize("how", ["", "dislikes", "whitened", "cut off", "surer"])
def test_a_teacher_that_is_one(how: str, tmp_path: Path) -> None:
    assert not told(_run(tmp_path, how), "D146", "D147")


def test_both_at_the_stated_temperature(tmp_path: Path) -> None:
    flags = {**DISTILLED, "rollout.temperature": 0.5}
    assert not told(_run(tmp_path, "", flags, temperature=0.5), "D146", "D147")


def test_away_from_the_teacher(tmp_path: Path) -> None:
    (finding,) = told(_run(tmp_path, "away"), "D147")
    assert finding.severity == "error"
    assert "driven away" in finding.claim


def test_what_is_not_stated_to_distil_is_a_warning(tmp_path: Path) -> None:
    (finding,) = told(_run(tmp_path, "away", {"algorithm.adv_estimator": "other"}), "D147")
    assert finding.severity == "warning"
