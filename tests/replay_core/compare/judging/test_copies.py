"""Ranks that should hold one tensor and hold two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from replay_core.compare import rejudge
from replay_core.compare.judging.tensors import Judge, TensorVerdict
from replay_core.compare.judging.tolerance import Tolerances
from replay_core.compare.judging.verdict import Verdict
from replay_core.compare.pairing.align import MicroBatchPair, Side, TensorPair
from replay_core.dumps import open_run
from replay_core.records import Record, RecordKey, TensorRef
from tests.builders import as_rank, compare_paths, save_file

NAME = "param.layers.0.mlp.up_proj.weight"


def held(directory: Path, *ranks: torch.Tensor) -> TensorRef:
    """A tensor as the first rank holds it, the other ranks' beside it."""
    refs = []
    for rank, values in enumerate(ranks):
        (record,) = open_run(save_file(directory / f"{rank}.pt", {"w": values})).records
        refs.append(record.tensors()[0])
    return refs[0].with_(copies=tuple(refs[1:]))


def judged(directory: Path, a: TensorRef, b: TensorRef) -> TensorVerdict:
    run = open_run(save_file(directory / "run.pt", {"w": torch.ones(1)}))
    key = RecordKey(stage="param")
    pair = TensorPair(NAME, *((Record(key, directory, lambda: []), ref) for ref in (a, b)))
    return Judge(run, run).judge(pair, MicroBatchPair(key, Side(), Side()))


def weight(change: float = 0.0) -> torch.Tensor:
    values = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    values[2, 3] += change
    return values


def test_ranks_whose_copies_part_are_a_divergence_though_the_first_ones_agree(tmp_path: Path) -> None:
    a = held(tmp_path / "a", weight())
    for which, ref in (("whole", a), ("replicated", held(tmp_path / "b0", weight(), weight(), weight()))):
        parted = held(tmp_path / which, weight(), weight(), weight(1))
        row = judged(tmp_path, ref, parted)
        assert row.verdict is Verdict.DIFF
        assert row.reason == (
            "replicated, and its copies differ in b: 1 of 2 others are not the first rank's, "
            "in up to 1 of 128 elements; the first: bitwise equal"
        )


def test_ranks_whose_copies_are_alike_are_one_tensor(tmp_path: Path) -> None:
    a, b = held(tmp_path / "a", weight(), weight()), held(tmp_path / "b", weight(), weight(), weight())
    assert judged(tmp_path, a, b).verdict is Verdict.SAME


def test_a_gradient_that_was_not_summed_over_the_ranks_is_named_by_its_values(tmp_path: Path) -> None:
    whole, part = weight(), torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    a = held(tmp_path / "a", whole, whole)
    said = judged(tmp_path, a, held(tmp_path / "b", part, whole - part)).reason
    assert "copies of b, counted as ranks from 0" in said
    assert "is not summed over ranks 0 and 1: each holds a part, and the parts add up to the whole" in said
    said = judged(tmp_path, held(tmp_path / "c", part, whole - part), a).reason
    assert "copies of a, counted as ranks from 0" in said
    assert "is not summed over ranks 0 and 1" in said


@pytest.mark.parametrize("other", ["another", "alike"])
def test_copies_that_do_not_add_up_are_not_said_to_be_parts_of_a_sum(tmp_path: Path, other: str) -> None:
    whole, part = weight(), torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    ranks = {
        "another": (part, whole + part),
        "alike": (whole / 2, whole / 2),
    }[other]
    row = judged(tmp_path, held(tmp_path / "a", whole), held(tmp_path / "b", *ranks))
    assert row.verdict.diverges
    assert "add up" not in row.reason


def test_runs_whose_ranks_part_alike_agree(tmp_path: Path) -> None:
    a, b = (held(tmp_path / which, weight(), weight(1)) for which in "ab")
    assert judged(tmp_path, a, b).verdict is Verdict.SAME


@pytest.mark.parametrize(("off", "verdict"), [(0.0, Verdict.SAME), (0.5, Verdict.DIFF)])
def test_replicated_files_of_torch_are_held_against_the_whole(off: float, verdict: Verdict, tmp_path: Path) -> None:
    from torch.distributed.tensor import DTensor, Replicate

    (tmp_path / "ranks").mkdir()
    for rank in range(2):
        with as_rank(rank, 2) as mesh:
            local = torch.arange(6.0).reshape(2, 3) + off * rank
            whole = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
            torch.save({"w": whole}, tmp_path / f"ranks/model_world_size_2_rank_{rank}.pt")
    whole = save_file(tmp_path / "whole.pt", {"w": torch.arange(6.0).reshape(2, 3)})
    compared = compare_paths(tmp_path / "ranks", whole)
    (row,) = compared.tensors
    assert row.verdict is verdict
    lenient = Tolerances().with_overrides(9.0, 9.0)
    assert rejudge(compared, lenient).tensors[0].verdict is verdict
