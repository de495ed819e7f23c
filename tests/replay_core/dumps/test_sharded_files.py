"""Weights that ranks wrote in pieces are the whole ones, value for value; what lies about itself is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from replay_core import pages
from replay_core.dumps import open_run
from replay_core.dumps.boxes import laid_out
from replay_core.records import Inline, TensorRef
from tests.fixtures import FIXTURES


@pytest.mark.parametrize(("folder", "whole"), [("checkpoint", "checkpoint_full.pt"), ("fsdp1", "fsdp1_full.pt")])
def test_the_pieces_of_two_ranks_are_the_tensor_that_torch_makes_of_them(folder: str, whole: str) -> None:
    (record,) = open_run(FIXTURES / "torch" / folder).records
    expected = torch.load(FIXTURES / "torch" / whole, weights_only=True)
    found = {ref.name: ref for ref in record.tensors()}
    assert expected.keys() <= found.keys()
    for name, tensor in expected.items():
        assert np.array_equal(pages.array(found[name]), tensor.numpy()), name


def test_a_piece_that_is_not_there_costs_its_tensors_and_is_said(tmp_path: Path) -> None:
    copy = shutil.copytree(FIXTURES / "torch/checkpoint/step-3", tmp_path / "step-3")
    (copy / "__1_0.distcp").unlink()
    run = open_run(tmp_path)
    (record,) = run.records
    unreadable = [ref.name for ref in record.tensors() if not ref.is_readable]
    assert "model.embed_tokens.weight" in unreadable
    assert any("__1_0.distcp" in problem.where for problem in record.problems)
    assert record.key.step == 3


@pytest.mark.parametrize("where", ["../outside", "/etc/passwd", ".."])
def test_a_tensordict_whose_names_lead_out_of_its_folder_reads_nothing_there(where: str, tmp_path: Path) -> None:
    (tmp_path / "outside.memmap").write_bytes(bytes(4))
    batch = tmp_path / "batch"
    batch.mkdir()
    said = {"dtype": "torch.float32", "shape": [1], "is_nested": False}
    (batch / "meta.json").write_text(json.dumps({where: said, "x": said, "_type": "tensordict._td.TensorDict"}))
    (batch / "x.memmap").write_bytes(bytes(2))
    (record,) = open_run(batch).records
    (only,) = record.tensors()
    assert (only.name, only.is_readable) == ("x", False)
    assert "leads out" in record.problems[0].what


def test_rows_of_a_nested_tensor_are_as_long_as_the_folder_says(tmp_path: Path) -> None:
    said = {"dtype": "torch.float32", "shape": [2, 1], "is_nested": True}
    (tmp_path / "meta.json").write_text(json.dumps({"obs": said, "_type": "tensordict._td.TensorDict"}))
    (tmp_path / "obs.memmap").write_bytes(np.arange(5, dtype=np.float32).tobytes())
    (tmp_path / "obs.shape.memmap").write_bytes(np.array([2, 3]).tobytes())
    (record,) = open_run(tmp_path).records
    (obs,) = record.tensors()
    assert obs.rows == (2, 3)
    assert pages.array(obs).tolist() == [0, 1, 2, 3, 4]


def test_boxes_fill_a_tensor_or_it_is_unreadable() -> None:
    def piece(value: float, rows: int, columns: int) -> TensorRef:
        return TensorRef("", "float32", (rows, columns), Inline([value] * (rows * columns)))

    pieces: dict[tuple[int, ...], TensorRef]
    pieces = {(0, 0): piece(1, 1, 2), (0, 2): piece(2, 1, 1), (1, 0): piece(3, 2, 2), (1, 2): piece(4, 2, 1)}
    assert pages.array(laid_out(pieces, (3, 3), "float32")).tolist() == [[1, 1, 2], [3, 3, 4], [3, 3, 4]]
    wrongs: list[dict[tuple[int, ...], TensorRef]] = [
        {**pieces, (1, 2): piece(4, 1, 1)},
        {(0, 0): piece(1, 1, 2)},
        {**pieces, (1, 1): piece(5, 2, 2)},
        {},
    ]
    for wrong in wrongs:
        assert not laid_out(wrong, (3, 3), "float32").is_readable
