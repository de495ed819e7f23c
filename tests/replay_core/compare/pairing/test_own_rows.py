"""Samples of sliced ranks in micro-batches of their own: as many as they need, trimmed, or end to end in packs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from replay_core.compare import Comparison, compare_runs
from replay_core.compare.judging.verdict import Verdict
from replay_core.dumps import open_run
from replay_core.recorder import Recorder

LENGTHS, WIDTH, FEATURES, TP = (12, 5, 9, 7), 12, 16, 2
#: Of each of two data-parallel ranks, the samples of its micro-batches.
PLANS = {
    "one and two": [[[0, 2]], [[3], [1]]],
    "one and three": [[[0]], [[1], [3], [2]]],
    "two and one": [[[3], [2, 1]], [[0]]],
    "as many": [[[2, 0]], [[3, 1]]],
}
NAME = "layers.0.mlp.up_proj.output"


def _batch(*, left: bool) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(3)
    mask_BT = (torch.arange(WIDTH)[None] < torch.tensor(LENGTHS)[:, None]).long()
    ids_BT = torch.randint(5, 99, (4, WIDTH), generator=drawn) * mask_BT
    batch = {
        "input_ids": ids_BT, "attention_mask": mask_BT, "position_ids": torch.arange(WIDTH).expand(4, WIDTH) * mask_BT,
        "log_probs": -torch.rand(4, WIDTH, generator=drawn) * mask_BT - 0.1 * mask_BT,
        NAME: torch.randn(4, WIDTH, FEATURES, generator=drawn),
    }  # fmt: skip
    if left:
        batch = {
            name: torch.stack([row.roll(WIDTH - length, 0) for row, length in zip(one, LENGTHS, strict=True)])
            for name, one in batch.items()
        }
    return batch


def _laid(batch: dict[str, Tensor], rows: list[int], lay: str, *, left: bool) -> dict[str, Tensor]:
    """Some samples: padded as they are, trimmed to the longest, or end to end."""
    own = {name: one[rows] for name, one in batch.items()}
    if lay == "packed":
        where = own.pop("attention_mask").bool()
        made = {name: one[where][None] for name, one in own.items()}
        bounds = [0, *torch.tensor(LENGTHS)[rows].cumsum(0).tolist()]
        return {**made, "cu_seqlens": torch.tensor(bounds, dtype=torch.int32)}
    long = max(LENGTHS[row] for row in rows) if lay == "trimmed" else WIDTH
    return {name: (one[:, WIDTH - long :] if left else one[:, :long]).contiguous() for name, one in own.items()}


def _record(record: Any, made: dict[str, Tensor], micro: int, **more: Tensor) -> None:
    values = {name: one for name, one in made.items() if name != NAME}
    record("forward_data", {**values, **more}, micro=micro)
    record("modules", {NAME: made[NAME]}, micro=micro)


def _whole(folder: Path, *, left: bool = False) -> Path:
    with Recorder(folder) as recorder, recorder.step(0) as record:
        _record(record, _batch(left=left), 0)
    return folder


def _ranks(
    folder: Path, plan: list[list[list[int]]], lay: str, *, left: bool = False, wrong: int | None = None
) -> Path:
    """wrong: the rank whose slice of the first tokens of its first micro-batch is another."""
    batch = _batch(left=left)
    for data, micros in enumerate(plan):
        for tensor in range(TP):
            rank = data * TP + tensor
            with Recorder(folder) as recorder, recorder.step(0, rank=rank) as record:
                for micro, rows in enumerate(micros):
                    made = _laid(batch, rows, lay, left=left)
                    made[NAME] = made[NAME].chunk(TP, -1)[tensor].clone()
                    if rank == wrong and not micro:
                        made[NAME][:, :2] *= 1.5
                    _record(record, made, micro)
    return folder


def _compared(a: Path, b: Path) -> Comparison:
    return compare_runs(open_run(a), open_run(b))


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("lay", ["padded", "trimmed", "packed"])
@pytest.mark.parametrize("plan", PLANS)
def test_slices_of_samples_in_other_micro_batches_are_one_process_s(plan: str, lay: str, left: bool, tmp_path: Path):
    compared = _compared(_whole(tmp_path / "a", left=left), _ranks(tmp_path / "b", PLANS[plan], lay, left=left))
    assert compared.agrees, [(row.name, row.verdict, row.reason) for row in compared.tensors]
    assert not compared.counts["MISSING"]
    (row,) = (row for row in compared.tensors if row.name == NAME)
    assert row.figures is not None
    assert row.figures.compared == sum(LENGTHS) * FEATURES, "every token, and no padding"


@pytest.mark.parametrize("lay", ["padded", "trimmed", "packed"])
def test_a_slice_that_is_another_is_found_with_its_rank(lay: str, tmp_path: Path):
    compared = _compared(_whole(tmp_path / "a"), _ranks(tmp_path / "b", PLANS["one and two"], lay, wrong=3))
    first = compared.first
    assert first is not None
    assert first.name == NAME
    assert first.token is not None
    assert first.token[0] == 3, "the sample that rank 3 has first"


@pytest.mark.parametrize("lay", ["trimmed", "packed"])
def test_a_sample_twice_and_another_lost_is_no_agreement(lay: str, tmp_path: Path):
    compared = _compared(_whole(tmp_path / "a"), _ranks(tmp_path / "b", [[[0, 2]], [[3], [3]]], lay))
    assert compared.counts["MISSING"]
    said = [row.reason for row in compared.tensors if row.verdict is Verdict.MISSING]
    assert any("in no record of the other run" in one for one in said), said


def test_ranks_that_hold_no_slices_are_paired_sample_by_sample_as_ever(tmp_path: Path):
    batch = _batch(left=False)
    with Recorder(tmp_path / "b") as recorder:
        for rank, rows in enumerate(([0, 2], [3, 1])):
            with recorder.step(0, rank=rank) as record:
                _record(record, _laid(batch, rows, "trimmed", left=False), 0)
    compared = _compared(_whole(tmp_path / "a"), tmp_path / "b")
    assert compared.agrees
    assert not any("row of its own" in note for note in compared.notes)


@pytest.mark.parametrize("lay", ["padded", "packed"])
def test_shares_of_queries_keys_and_values_are_laid_together_within_each_group(lay: str, tmp_path: Path):
    """[q; k; v] of 8, 4 and 4: a rank has half of each, and a group of ranks some of the samples."""
    fused, batch = "layers.0.self_attn.qkv_proj.output", _batch(left=False)
    with Recorder(tmp_path / "a") as recorder, recorder.step(0) as record:
        record("forward_data", {name: one for name, one in batch.items() if name != NAME}, micro=0)
        record("modules", {fused: batch[NAME]}, micro=0)
    for rank in range(4):
        with Recorder(tmp_path / "b") as recorder, recorder.step(0, rank=rank) as record:
            for micro, rows in enumerate(PLANS["one and two"][rank // TP]):
                made = _laid(batch, rows, lay, left=False)
                shares = [one.chunk(TP, -1)[rank % TP] for one in made.pop(NAME).split([8, 4, 4], -1)]
                record("forward_data", made, micro=micro)
                record("modules", {fused: torch.cat(shares, -1)}, micro=micro)
    compared = _compared(tmp_path / "a", tmp_path / "b")
    assert compared.agrees, [(row.name, row.verdict, row.reason) for row in compared.tensors]
