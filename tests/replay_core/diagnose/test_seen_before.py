"""An engine that is off in prompts it has seen, and samples that are one version old."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.replay_core.diagnose.batches import look
from tests.replay_core.diagnose.runs import GRPO, PROMPT, RESPONSE, Fields, recorded, told


class _Prompts:
    """Half of each step's prompts come from earlier steps; what the engine gives is off where `off` says so."""

    def __init__(self, off: str, size: float = 0.3) -> None:
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.off, self.size = off, size

    def __call__(self, step: int, fields: Fields) -> None:
        draw = torch.Generator().manual_seed(step)
        mask = fields["response_mask"]
        apart = 0.003 * torch.randn(mask.shape, generator=draw)
        for group in range(6):
            rows = slice(5 * group, 5 * group + 5)
            again = bool(step) and group % 2 == 0
            if again:
                prompt, attention = self.kept[(group + step) % len(self.kept)]
                fields["prompts"][rows], fields["attention_mask"][rows, :PROMPT] = prompt, attention
            if (self.off == "seen" and again) or self.off == "all" or (self.off == "some" and group == 1 and step):
                apart[rows] += self.size * torch.randn(5, RESPONSE, generator=draw)
        fields["input_ids"] = torch.cat([fields["prompts"], fields["responses"]], 1)
        fields["position_ids"] = (fields["attention_mask"].cumsum(1) - 1).clamp(min=0)
        self.kept += [(fields["prompts"][5 * at], fields["attention_mask"][5 * at, :PROMPT]) for at in (1, 3, 5)]
        fields["rollout_log_probs"] = (fields["old_log_probs"] + apart) * mask
        fields["weight_version"] = torch.full((len(mask),), step)


def test_a_prefix_cache_that_outlives_the_weights(tmp_path: Path) -> None:
    diagnosis = look(recorded(tmp_path, _Prompts("seen")))
    first = diagnosis.findings[0]
    assert first.id == "D149"
    assert first.severity == "error"
    assert "prefix cache" in first.claim
    assert all(one.downstream_of for one in diagnosis.findings if one.id in ("D09", "D12"))


@pytest.mark.parametrize("off", ["", "all", "some"])
def test_prompts_that_come_again(off: str, tmp_path: Path) -> None:
    assert not told(recorded(tmp_path, _Prompts(off)), "D149")


def test_answers_that_a_buffer_hands_out_again_are_old_and_no_cache_is(tmp_path: Path) -> None:
    kept: list[Fields] = []

    def again(step: int, fields: Fields) -> None:
        draw = torch.Generator().manual_seed(step)
        apart = 0.003 * torch.randn(fields["response_mask"].shape, generator=draw)
        fields["rollout_log_probs"] = (fields["old_log_probs"] + apart) * fields["response_mask"]
        new = {name: value.clone() if isinstance(value, torch.Tensor) else [*value] for name, value in fields.items()}
        for group in (0, 3) if kept else ():
            here, there = slice(5 * group, 5 * group + 5), slice(5 * group + 5, 5 * group + 10)
            for name, value in fields.items():
                value[here] = kept[-1][name][there]
            moved = 0.2 * torch.randn(5, RESPONSE, generator=draw)
            now = (fields["old_log_probs"][here] + moved).clamp(max=-1e-4)
            fields["old_log_probs"][here] = now * fields["response_mask"][here]
        kept.append(new)

    assert not told(recorded(tmp_path, again), "D149")


def _old(step: int, fields: Fields, *, grows: bool = False) -> None:
    draw = torch.Generator().manual_seed(step)
    mask = fields["response_mask"]
    fields["weight_version"] = torch.full((len(mask),), max(step - 1, 0))
    size = (0.08 * step if grows else 0.2) if step else 0.0
    noise = size * torch.randn(mask.shape, generator=draw)
    fields["old_log_probs"] = (fields["rollout_log_probs"] + noise).clamp(max=-1e-4) * mask


def test_one_version_old_and_nothing_corrects(tmp_path: Path) -> None:
    (finding,) = told(recorded(tmp_path, _old), "D31")
    assert "one weight version old" in finding.claim
    assert finding.severity == "warning"


@pytest.mark.parametrize(
    "flags", [{"use_tis": True, "tis_clip": 2.0}, {"max_head_offpolicyness": 1}, {"actor.use_decoupled_loss": True}]
)
def test_an_async_run_that_is_meant(flags: dict[str, Any], tmp_path: Path) -> None:
    assert not told(recorded(tmp_path, _old, flags={**GRPO, **flags}), "D31")


def test_what_grows_with_the_steps_is_no_age(tmp_path: Path) -> None:
    assert not told(recorded(tmp_path, lambda step, fields: _old(step, fields, grows=True), steps=7), "D31")
