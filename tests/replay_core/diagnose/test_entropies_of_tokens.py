"""Entropies of other logits than the log-probabilities': before the temperature, or a token off."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.replay_core.diagnose.batches import look
from tests.replay_core.diagnose.runs import EOS, GRPO, RESPONSE, Fields, recorded, told

CHOICES = 30
STATED = {**GRPO, "rollout.temperature": 0.6, "actor.entropy_coeff": 0.01, "model.vocab_size": CHOICES}


def _sampled(step: int, fields: Fields, how: str = "") -> None:
    draw = torch.Generator().manual_seed(step)
    mask = fields["response_mask"]
    rows = len(mask)
    logits = torch.randn(rows, RESPONSE, CHOICES, generator=draw) * 3
    drawn = (logits / 0.6).log_softmax(-1)
    at = torch.multinomial(drawn.exp().reshape(-1, CHOICES), 1, generator=draw).reshape(rows, RESPONSE)
    fields["responses"] = torch.where((fields["responses"] != EOS) & (mask > 0), at + 5, fields["responses"])
    fields["input_ids"] = torch.cat([fields["prompts"], fields["responses"]], 1)
    # What an update moves between the two forwards.
    noise = 0.02 * torch.randn(logits.shape, generator=draw) if how == "an update later" else 0.0
    of = (logits if how in ("raw", "both raw") else logits / 0.6 + noise).log_softmax(-1)
    said = of if how == "both raw" else drawn
    fields["old_log_probs"] = said.gather(-1, at[..., None])[..., 0] * mask
    fields["rollout_log_probs"] = fields["old_log_probs"].clone()
    entropy = -(of.exp() * of).sum(-1) * mask
    if how == "one sample":
        entropy = -fields["old_log_probs"]
    fields["entropys"] = torch.roll(entropy, 1, 1) * mask if how == "shifted" else entropy
    if how == "bf16":
        for name in ("entropys", "old_log_probs"):
            fields[name] = fields[name].to(torch.bfloat16).float()


def _run(path: Path, how: str = "", **flags: object) -> Path:
    return recorded(path, lambda step, fields: _sampled(step, fields, how), flags={**STATED, **flags})


def test_before_the_temperature(tmp_path: Path) -> None:
    (finding,) = told(_run(tmp_path, "raw"), "D148")
    assert "temperature of 0.6" in finding.claim
    assert finding.where.tensor == "entropys"


def test_of_the_token_before(tmp_path: Path) -> None:
    (finding,) = told(_run(tmp_path, "shifted"), "D148")
    assert "of the token" in finding.claim


def test_a_metric_alone_is_worth_knowing(tmp_path: Path) -> None:
    path = _run(tmp_path, "raw", **{"actor.entropy_coeff": 0.0})
    assert not told(path, "D148")
    assert [one.severity for one in look(path, "D148").findings] == ["info"]


@pytest.mark.parametrize("how", ["", "an update later", "both raw", "bf16", "one sample"])
def test_entropies_of_the_same_logits(how: str, tmp_path: Path) -> None:
    assert not look(_run(tmp_path, how), "D148").findings
