"""Batches with one thing wrong: a genuine healthy one, changed as the fault would have changed it, and diagnosed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from replay_core import pages
from replay_core.diagnose.case import Case
from replay_core.diagnose.engine import diagnose
from replay_core.diagnose.finding import Diagnosis, Finding
from replay_core.dumps import open_run
from replay_core.records import Inline
from tests.builders import save_file
from tests.fixtures import FIXTURES

Fields = dict[str, Any]

#: The healthy batch's prompts are this wide, its responses that; its ends and its padding.
PROMPT, RESPONSE, END, PAD = 20, 24, 2, 3


def healthy() -> Fields:
    """The genuine healthy batch: 16 responses to 4 prompts, bf16 engine and fp32 trainer."""
    (record,) = open_run(FIXTURES / "faults" / "healthy" / "batch.pt").records
    fields: Fields = {}
    for ref in record.tensors():
        text = ref.is_text and isinstance(ref.source, Inline)
        fields[ref.name] = list(ref.source.value) if text else np.array(pages.array(ref))  # type: ignore[union-attr]
    return fields


def save(directory: Path, fields: Fields, name: str = "batch.pt") -> Path:
    """The batch as a trainer's torch.save leaves it."""
    content = {
        key: torch.from_numpy(np.ascontiguousarray(value)) if isinstance(value, np.ndarray) else value
        for key, value in fields.items()
    }
    return save_file(directory / name, content)


def look(path: Path, *rules: str) -> Diagnosis:
    """The diagnosis of what lies there."""
    return diagnose(Case(open_run(path)), rules)


def seen(directory: Path, fields: Fields, *rules: str) -> Diagnosis:
    """The diagnosis of a batch."""
    return look(save(directory, fields), *rules)


def causes(diagnosis: Diagnosis) -> list[Finding]:
    """Findings of warning and above that nothing else explains."""
    return [one for one in diagnosis.findings if one.severity != "info" and one.downstream_of is None]


def of(diagnosis: Diagnosis, id: str) -> Finding | None:
    """The first finding of that id, or None."""
    return next((one for one in diagnosis.findings if one.id == id), None)


def why_skipped(diagnosis: Diagnosis, id: str) -> str:
    """Why a rule could not look; empty where it could."""
    return next((one.why for one in diagnosis.skipped if one.id == id), "")


def masks(fields: Fields) -> Any:
    return fields["response_mask"].astype(bool)


def rewards(fields: Fields) -> Any:
    """One reward per sample."""
    return fields["token_level_scores"].sum(1)


def set_rewards(fields: Fields, values: Any) -> None:
    """Each sample's reward at its last token, and the advantages that GRPO makes of them."""
    mask_BT = masks(fields)
    fields["token_level_scores"] = np.zeros_like(fields["token_level_scores"])
    for row, value in enumerate(values):
        fields["token_level_scores"][row, np.flatnonzero(mask_BT[row])[-1]] = value
    fields["token_level_rewards"] = fields["token_level_scores"].copy()


def set_advantages(fields: Fields, values: Any) -> None:
    """Each sample's advantage, on every token that counts."""
    spread = np.asarray(values, dtype=np.float32)[:, None] * masks(fields)
    fields["advantages"], fields["returns"] = spread, spread.copy()


def noise(fields: Fields, scale: float, seed: int = 0) -> Any:
    """Differences of that many nats on tokens that count."""
    draw = np.random.default_rng(seed).normal(0, scale, fields["old_log_probs"].shape)
    return (draw * masks(fields)).astype(np.float32)


#: The group of each sample of the healthy batch.
GROUPS = np.repeat(np.arange(4), 4)


def grpo(rewards_B: Any, groups_B: Any, *, epsilon: float = 1e-6, ddof: int = 1) -> Any:
    """Written out by hand, not with the formula under test."""
    out = np.zeros(len(rewards_B))
    for group in np.unique(groups_B):
        inside = groups_B == group
        spread = rewards_B[inside].std(ddof=ddof) if inside.sum() > 1 else np.nan
        out[inside] = (rewards_B[inside] - rewards_B[inside].mean()) / (spread + epsilon)
    return out
