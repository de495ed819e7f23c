"""Masks that begin too early: in one answer of each pair, and at the template's token of later turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from replay_core.recorder import Recorder
from tests.replay_core.diagnose.runs import RESPONSE, Fields, recorded, told

PROMPT, WIDTH = 6, 14
Pairs = Callable[[Fields], None]


def _pairs(path: Path, change: Pairs | None = None, *, beside: bool = False) -> Path:
    """Steps of a preference loss: chosen answers, then rejected ones (or side by side), to the same prompts."""
    with Recorder(path, flags={"beta": 0.1, "loss_type": "sigmoid"}) as recorder:
        for step in range(4):
            draw = torch.Generator().manual_seed(step)
            ids = torch.randint(5, 60, (16, WIDTH), generator=draw)
            ids[8:, :PROMPT] = ids[:8, :PROMPT]
            ends = PROMPT + torch.randint(4, WIDTH - PROMPT + 1, (16,), generator=draw)
            attended = torch.arange(WIDTH) < ends[:, None]
            mask = attended.long()
            mask[:, :PROMPT] = 0
            fields = {"input_ids": ids * attended, "attention_mask": attended.long(), "loss_mask": mask}
            if change is not None:
                change(fields)
            logps = -torch.rand(16, WIDTH, generator=draw) * fields["attention_mask"]
            fields |= {"log_probs": logps, "ref_log_probs": logps.clone()}
            if beside:
                order = torch.arange(16).view(2, 8).T.reshape(-1)
                fields = {name: value[order] for name, value in fields.items()}
            with recorder.step(step) as record:
                record("forward_data", fields, micro=0)
    return path


def _rejected_count_the_prompt(fields: Fields) -> None:
    fields["loss_mask"][8:] = fields["attention_mask"][8:]
    fields["loss_mask"][8:, 0] = 0


@pytest.mark.parametrize("beside", [False, True])
def test_one_answer_of_each_pair_counts_the_prompt(tmp_path: Path, beside: bool) -> None:
    (found,) = told(_pairs(tmp_path / "run", _rejected_count_the_prompt, beside=beside), "D153")
    assert found.severity == "error"
    assert ("the second rows" if beside else "the second half") in found.claim


def _other_prompts(fields: Fields) -> None:
    """Rows without a prompt (plain text) behind rows with one, of other texts: no pairs."""
    _rejected_count_the_prompt(fields)
    fields["input_ids"][8:] = fields["input_ids"][8:].flip(1).clamp(min=5) * fields["attention_mask"][8:]


@pytest.mark.parametrize("change", [None, _other_prompts])
def test_masks_that_both_leave_it_out_are_right(tmp_path: Path, change: Pairs | None) -> None:
    assert told(_pairs(tmp_path / "run", change), "D153") == []


NEWLINE = 61


def _turns(step: int, fields: Fields, *, opens: int | None, prompt: int = NEWLINE, engine: bool = False) -> None:
    """Longer responses have a tool's two tokens inside; prompts end with a token of the template."""
    mask, one = fields["response_mask"], fields["advantages"].sum(1) / fields["response_mask"].sum(1)
    called = mask.sum(1) >= 6
    mask[called, 2:4] = 0
    if opens is not None:
        fields["responses"][called, 4] = opens
    fields["prompts"][:, -1] = prompt
    fields["input_ids"] = torch.cat([fields["prompts"], fields["responses"]], 1)
    fields["advantages"] = one[:, None] * mask
    fields["returns"] = fields["advantages"].clone()
    assert mask.shape[1] == RESPONSE
    if engine:
        fields["rollout_log_probs"] = fields["rollout_log_probs"] * mask
    else:
        del fields["rollout_log_probs"]


def test_the_template_counts_at_later_turns(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", lambda step, fields: _turns(step, fields, opens=NEWLINE))
    (found,) = told(path, "D138")
    assert found.severity == "warning"
    assert found.claim.startswith("the first token that counts in each later turn is the template's: token 61 in all")


def _begins_alike(step: int, fields: Fields) -> None:
    """The policy begins each of its turns with one token, the first one, too."""
    fields["responses"][:, 0] = NEWLINE
    _turns(step, fields, opens=NEWLINE)


@pytest.mark.parametrize(
    "change",
    [
        lambda step, fields: _turns(step, fields, opens=None),
        lambda step, fields: _turns(step, fields, opens=NEWLINE, prompt=62),
        lambda step, fields: _turns(step, fields, opens=NEWLINE, engine=True),
        _begins_alike,
    ],
)
def test_turns_that_the_policy_begins_are_quiet(tmp_path: Path, change: Callable[[int, Fields], None]) -> None:
    assert told(recorded(tmp_path / "run", change), "D138") == []
