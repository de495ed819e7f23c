"""Logs and dumps as they lie on disks: NUL bytes, UTF-16, reprs of tensors, masks that are zero to the last entry."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_core import workbench
from replay_core.recorder import Recorder
from tests.builders import save_file
from tests.replay_core.diagnose.batches import (
    PAD,
    PROMPT,
    Fields,
    causes,
    healthy,
    look,
    masks,
    of,
    save,
    seen,
    why_skipped,
)
from tests.replay_core.diagnose.logs import verl
from tests.replay_core.diagnose.test_micro_batches import record

VERL = "step:1 - actor/pg_loss:0.1 - actor/grad_norm:0.2\nstep:2 - actor/pg_loss:nan - actor/grad_norm:nan\n"

LOGS = {
    "NUL bytes between lines": (VERL.replace("\n", "\n\0\0\0\n", 1).encode(), "D21"),
    "UTF-16, as PowerShell writes it": (VERL.encode("utf-16"), "D21"),
    "reprs of tensors": (b"step 3: {'train/loss': tensor(nan, device='cuda:0'), 'train/kl': tensor(.1)}\n", "D21"),
    "a gradient that breaks before the loss": (
        b"{'loss': 0.1, 'grad_norm': nan}\n{'loss': nan, 'grad_norm': nan}\n{'loss': nan, 'grad_norm': nan}\n",
        "D21",
    ),
    "a gradient that alone is broken": (b"{'loss': 0.1, 'grad_norm': nan}\n{'loss': 0.2, 'grad_norm': nan}\n", "D22"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOGS)
def test_a_log_is_read_as_it_lies_there(name: str, tmp_path: Path) -> None:
    content, id = LOGS[name]
    (tmp_path / "train.log").write_bytes(content)
    document = workbench.diagnose(tmp_path / "train.log")
    assert [one["id"] for one in document["findings"] if one["severity"] == "error"] == [id]


def test_metrics_in_a_jsonl_of_any_name_are_metrics(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    file.write_text('{"step": 1, "loss": 0.5, "grad_norm": 0.3}\n{"step": 2, "loss": NaN, "grad_norm": 0.4}\n')
    document = workbench.diagnose(file)
    assert document["dialect"] == "metrics"
    assert document["findings"][0]["id"] == "D21"
    assert document["findings"][0]["steps"] == [2]


def _trl(folder: Path, keep: list[bool]) -> Path:
    """TRL's inputs of 4 completions that fill their limit, some of them masked out."""
    ids = torch.arange(10, 90).reshape(4, 20)
    mask = torch.zeros(4, 16, dtype=torch.int64)
    for row, kept in enumerate(keep):
        if kept:  # it ended: 9, and padding after it
            mask[row, : 8 + row] = 1
            ids[row, 4 + 7 + row] = 9
            ids[row, 4 + 8 + row :] = 0
    inputs = {
        "prompt_ids": ids[:, :4].contiguous(),
        "prompt_mask": torch.ones(4, 4, dtype=torch.int64),
        "completion_ids": ids[:, 4:].contiguous(),
        "completion_mask": mask,
        "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5]),
    }
    save_file(folder / "compute_loss_step000000_micro0.pt", {"global_step": 0, "micro": 0, "inputs": inputs})
    return folder


def test_a_completion_mask_of_zeros_is_an_empty_loss(tmp_path: Path) -> None:
    document = workbench.diagnose(_trl(tmp_path, [False] * 4))
    first = document["findings"][0]
    assert (first["id"], first["severity"]) == ("D07", "error")


def test_completions_cut_off_and_masked_out_are_no_warning(tmp_path: Path) -> None:
    document = workbench.diagnose(_trl(tmp_path, [True, False, True, True]), rules=["D07"])
    (only,) = document["findings"]
    assert only["severity"] == "info"


def _tripped(document: Any) -> list[str]:
    return [f"{one['id']}: {one['why']}" for one in document["skipped"] if "failed on this input" in one["why"]]


LOST = {"critic/score/mean": float("nan"), "critic/score/max": float("nan"), "critic/score/min": float("nan")}


@pytest.mark.parametrize(
    ("steps", "id"),
    [
        ([{**LOST, "response_length/clip_ratio": 0.4 + 0.01 * n} for n in range(12)], "D20"),
        ([{"critic/advantages/max": 3e7, "critic/advantages/min": -2e7, "critic/score/mean": 0.5}] * 12, "D73"),
        ([{"critic/vf_explained_var": -0.9, "critic/vf_loss": 0.1 if n < 5 else float("nan")} for n in range(12)], ""),
        ([{**LOST, "val-core/math/acc": 0.0}] * 12, ""),
    ],
    ids=["a reward that is NaN", "advantages of 1e7", "a loss that is NaN later", "no reward"],
)
def test_no_rule_trips_over_numbers_that_are_none_or_huge(steps: list[Any], id: str, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(verl(steps))
    document = workbench.diagnose(log)
    assert _tripped(document) == []
    assert not id or id in [one["id"] for one in document["findings"]]


def test_no_claim_says_what_the_log_does_not(tmp_path: Path) -> None:
    def claims(step: dict[str, float]) -> dict[str, str]:
        (tmp_path / "train.log").write_text(verl([step] * 12))
        return {one["id"]: one["claim"] for one in workbench.diagnose(tmp_path / "train.log")["findings"]}

    assert set(claims({"response_length/clip_ratio": 41.0})) == {"L30"}, "no 4100% of the responses"
    assert set(claims({"actor/pg_clipfrac": 18.0})) == {"L30"}
    assert claims({"actor/grad_norm": float("inf")})["D22"].startswith("grad_norm is infinite at every step")
    for seconds in (0.0, float("nan")):
        assert "D37" not in claims({"timing_s/step": seconds}), "no first step is slower than others"


def _no_token(batch: Fields) -> None:
    batch["attention_mask"] = np.zeros_like(batch["attention_mask"])


def _one_id(batch: Fields) -> None:
    batch |= {"input_ids": np.int64(7), "cu_seqlens": np.array([0, 20, 44])}


@pytest.mark.parametrize("change", [_no_token, _one_id])
def test_no_rule_trips_over_a_batch_of_nothing(change: Callable[[Fields], None], tmp_path: Path) -> None:
    batch = healthy()
    change(batch)
    assert _tripped(workbench.diagnose(save(tmp_path, batch))) == []


def test_prompts_as_texts_beside_ids_that_no_mask_divides_are_read_as_texts(tmp_path: Path) -> None:
    with Recorder(tmp_path / "d") as recorder:
        for step in range(3):
            ids_BS = torch.arange(96).reshape(12, 8) + step
            with recorder.step(step) as record:
                record("trajectory", input_ids=ids_BS, prompt_text=[f"How much is {n} + {n}?" for n in range(12)])
    assert _tripped(workbench.diagnose(tmp_path / "d")) == []


def test_padding_in_the_mask_of_samples_of_one_token(tmp_path: Path) -> None:
    batch = healthy()
    keep = np.zeros_like(batch["response_mask"])
    keep[:, 0] = 1
    batch["responses"] = np.where(keep > 0, batch["responses"], PAD)
    batch["input_ids"][:, PROMPT:] = batch["responses"]
    batch["attention_mask"][:, PROMPT:] = keep
    batch["response_mask"] = keep
    sums = batch["token_level_scores"].sum(1)
    for name in ("token_level_scores", "token_level_rewards"):
        batch[name] = np.zeros_like(batch[name])
        batch[name][:, 0] = sums
    for name in ("old_log_probs", "rollout_log_probs", "ref_log_prob", "advantages", "returns"):
        batch[name] = batch[name] * masks(batch)
    assert [one.id for one in causes(seen(tmp_path, batch)) if one.id != "D17"] == []


def test_a_copy_with_a_nan_is_d21s_alone(tmp_path: Path) -> None:
    from tests.replay_core.diagnose.batches import save

    batch = healthy()
    save(tmp_path, batch, "a.pt")
    batch["advantages"][3] = np.nan
    batch["extra"] = batch["advantages"]
    save(tmp_path, batch, "b.pt")
    found = look(tmp_path)
    assert of(found, "D35") is None
    assert causes(found)[0].id == "D21"


def test_a_full_width_mask_of_the_next_token_is_looked_at(tmp_path: Path) -> None:
    """A replay writes its mask as wide as its tokens, and about the next one: its last column is about none."""

    def wide(_step: int, batch: dict[str, Any]) -> None:
        batch["response_mask"] = torch.nn.functional.pad(batch["response_mask"][:, 1:], (0, 1))

    recorder = record(tmp_path / "run", fields=wide)
    found = look(recorder, "D18")
    assert "D18" in found.checked, why_skipped(found, "D18")
    assert not found.findings
