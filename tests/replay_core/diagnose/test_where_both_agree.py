"""Records of one step are laid where what they both hold agrees, and what is told of them is what they show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_core.dumps.opening import open_run
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.runs import EOS, GRPO, PROMPT, RESPONSE, Fields, batch, recorded, told

ALONE = ("responses", "response_mask", "old_log_probs", "advantages")
PARTS = ("prompts", "responses", "response_mask", "rollout_log_probs", "old_log_probs", "advantages", "uid")
#: Experts, and layers that have some.
EXPERTS, LAYERS = 12, 2


def _whole_prompts(fields: Fields, draw: torch.Generator) -> None:
    """Prompts without padding: every slot of them is a token."""
    fields["prompts"] = torch.randint(5, 60, fields["prompts"].shape, generator=draw)


def _in_two_records(path: Path, change: Any) -> Path:
    """A run whose trajectory holds the samples, and whose forward holds what `change` makes of them."""
    with Recorder(path, flags=GRPO) as recorder:
        for step in range(4):
            fields = batch(step)
            _whole_prompts(fields, torch.Generator().manual_seed(step))
            trajectory, forward = change(fields)
            with recorder.step(step) as record:
                record("trajectory", trajectory)
                record("forward_data", forward)
    return path


def test_a_forward_of_answers_alone_lies_at_the_tokens_of_the_trajectory(tmp_path: Path) -> None:
    def apart(fields: Fields) -> tuple[Fields, Fields]:
        forward = {name: fields[name] for name in ALONE} | {"log_probs": fields["old_log_probs"].clone()}
        return {name: fields[name] for name in PARTS}, forward

    assert not told(_in_two_records(tmp_path, apart), "D92", "D35", "D14", "L16", "D24")


@pytest.mark.parametrize(("by", "words"), [(1, "those of the token before"), (-1, "those of the token after")])
def test_routing_that_is_replayed_one_token_off_is_that_of_the_token_beside(
    by: int, words: str, tmp_path: Path
) -> None:
    def routed(fields: Fields) -> tuple[Fields, Fields]:
        fields["input_ids"] = torch.cat([fields["prompts"], fields["responses"]], 1)
        fields["attention_mask"] = torch.cat([torch.ones_like(fields["prompts"]), fields["response_mask"]], 1)
        shape = (*fields["input_ids"].shape, LAYERS)
        first = torch.randint(0, EXPERTS, shape)
        experts = torch.stack([first, (first + torch.randint(1, EXPERTS, shape)) % EXPERTS], -1)
        held = {name: fields[name] for name in ("input_ids", "attention_mask", *PARTS)}
        return held | {"routed_experts": experts}, held | {"routed_experts": torch.roll(experts, by, 1)}

    (finding,) = told(_in_two_records(tmp_path, routed), "D30")
    assert words in finding.claim
    assert "beside other tokens" in (finding.cause or "")


def test_an_end_that_is_masked_as_padding_is_told_of_columns_of_responses(tmp_path: Path) -> None:
    with Recorder(tmp_path, flags=GRPO) as recorder:
        for step in range(4):
            fields = batch(step)
            _whole_prompts(fields, torch.Generator().manual_seed(step))
            mask = fields["response_mask"].bool()
            written = mask & (fields["responses"] != EOS)
            ends = mask & ~written
            fields["responses"] = torch.where(written, fields["responses"], EOS)
            for name in ("rollout_log_probs", "old_log_probs"):
                fields[name] = torch.where(ends, torch.full_like(fields[name], -0.1), fields[name])
            fields["response_mask"] = written.long()
            with recorder.step(step) as record:
                record("trajectory", {name: fields[name] for name in PARTS})
    (finding,) = told(tmp_path, "D19")
    assert "is masked out as padding" in finding.claim


def test_responses_whose_masks_end_apart_are_not_of_one_length(tmp_path: Path) -> None:
    """Nothing says what of the prompts is padding: all columns are then taken for tokens."""

    def bare(_: int, fields: Fields) -> None:
        for name in ("attention_mask", "input_ids"):
            del fields[name]

    assert not told(recorded(tmp_path, bare), "D94")


def test_a_reference_that_is_exchanged_once_is_told_of_that_step(tmp_path: Path) -> None:
    """The same prompts and answers in every step: what a reference says of them stands, but for the one exchange."""
    same = batch(0)
    said = -(same["responses"] % 7 + 1) / 4 * same["response_mask"]

    def exchanged(step: int, fields: Fields) -> None:
        fields.update(
            {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in same.items()}
        )
        fields["old_log_probs"] = said * (1 + 0.1 * step)
        fields["rollout_log_probs"] = fields["old_log_probs"].clone()
        fields["ref_log_probs"] = said * (1.0 if step < 5 else 1.5)

    findings = told(recorded(tmp_path, exchanged, steps=10), "D55")
    (finding,) = [one for one in findings if "reference" in one.claim]
    assert "another from step 5 on" in finding.claim
    assert list(finding.steps) == [5]


@pytest.mark.parametrize(
    ("stem", "fields", "steps"),
    [
        ("distill-", ("input_ids", "loss"), [3, 4, 5, 6]),
        ("shard-", ("input_ids", "loss"), [None]),
        ("distill-", ("input_ids",), [None]),
    ],
)
def test_numbered_files_of_the_same_fields_are_a_step_each(
    stem: str, fields: tuple[str, ...], steps: list[int | None], tmp_path: Path
) -> None:
    """But what counts within a step, or holds nothing that an update has one of, is no step."""
    held = {"input_ids": np.arange(PROMPT * RESPONSE).reshape(PROMPT, RESPONSE), "loss": np.float64(0.5)}
    for number in range(3, 7):
        np.savez(tmp_path / f"{stem}{number:03}.npz", **{name: held[name] for name in fields})
    assert sorted({record.key.step for record in open_run(tmp_path).records}, key=str) == steps
