"""Small recorded runs made of formulas of their own (rewards, groups, advantages, values, masks), one thing changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from replay_core.diagnose.finding import Diagnosis, Finding
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look

Fields = dict[str, Any]
Change = Callable[[int, Fields], None]

PROMPT, RESPONSE, EOS = 5, 9, 2
GRPO = {"algorithm.adv_estimator": "grpo", "data.max_response_length": RESPONSE}


def batch(step: int, *, groups: int = 6, size: int = 5, seed: int = 0) -> Fields:
    """A step in verl's fields: prompts padded on the left, responses that end in EOS, GRPO's advantages."""
    torch.manual_seed(1000 * seed + step)
    rows = groups * size
    prompt_length = torch.randint(2, PROMPT + 1, (groups,)).repeat_interleave(size)
    length = torch.randint(3, RESPONSE, (rows,))
    prompts = torch.randint(5, 60, (groups, PROMPT)).repeat_interleave(size, 0)
    prompt_mask = torch.arange(PROMPT) >= PROMPT - prompt_length[:, None]
    mask = torch.arange(RESPONSE) < length[:, None]
    responses = torch.randint(5, 60, (rows, RESPONSE))
    responses[torch.arange(rows), length - 1] = EOS
    responses, prompts = responses * mask, prompts * prompt_mask
    attention = torch.cat([prompt_mask, mask], 1).long()
    scores = torch.tensor([0.0, 0.1, 0.25, 0.5, 0.55, 1.0])[torch.randint(0, 6, (rows,))]
    scores[::size], scores[1::size] = 1.0, 0.1
    token_scores = torch.zeros(rows, RESPONSE)
    token_scores[torch.arange(rows), length - 1] = scores
    logps = -torch.rand(rows, RESPONSE) * 2 * mask
    by_group = scores.view(groups, size)
    centred = by_group - by_group.mean(1, keepdim=True)
    advantages = (centred / (by_group.std(1, keepdim=True) + 1e-6)).view(-1, 1) * mask
    return {
        "prompts": prompts, "responses": responses, "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": attention, "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "response_mask": mask.long(), "token_level_scores": token_scores, "token_level_rewards": token_scores.clone(),
        "rollout_log_probs": logps, "old_log_probs": logps.clone(), "advantages": advantages,
        "returns": advantages.clone(), "uid": [f"{step}-{row // size}" for row in range(rows)],
    }  # fmt: skip


def scores_of(fields: Fields) -> torch.Tensor:
    return fields["token_level_scores"].sum(1)


def recorded(
    path: Path, change: Change | None = None, *, flags: Mapping[str, Any] | None = None, steps: int = 5,
    stored: torch.dtype = torch.float32, **sizes: int,
) -> Path:  # fmt: skip
    """A run of these batches, each changed."""
    with Recorder(path, flags=dict(GRPO if flags is None else flags)) as recorder:
        for step in range(steps):
            fields = batch(step, **sizes)
            if change is not None:
                change(step, fields)
            with recorder.step(step) as record:
                record("batch_inputs", {name: _stored(value, stored) for name, value in fields.items()}, alignment={
                    name: "response" for name, value in fields.items()
                    if isinstance(value, torch.Tensor) and value.shape[-1:] == (RESPONSE,)
                })  # fmt: skip
    return path


def _stored(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def told(path: Path, *rules: str) -> list[Finding]:
    """Warnings and errors of these rules."""
    found: Diagnosis = look(path, *rules)
    return [one for one in found.findings if one.severity != "info"]
