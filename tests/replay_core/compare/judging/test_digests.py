"""Records of level hash and stats: what was not recorded cannot be compared, but whether it is equal can be said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from replay_core import workbench
from replay_core.errors import NothingComparableError
from replay_core.export.outcome import exit_code
from replay_core.hashes import digest_of
from tests.builders import compare_paths, row_of, there, write_dump

LEVELS = ("hash", "stats", "full")


def fields(seed: int = 0) -> dict[str, object]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "layers.0.output": torch.randn(2, 8, 16, generator=generator).to(torch.bfloat16),
        "norm.output": torch.randn(2, 8, 16, generator=generator)[:, :, ::2],
        "mask": torch.tensor([True, False]),
        "loss": 0.5,
    }


@pytest.mark.parametrize("level_b", LEVELS)
@pytest.mark.parametrize("level_a", ["hash", "stats"])
def test_equal_values_are_the_same_at_every_level(tmp_path: Path, level_a: str, level_b: str) -> None:
    a = write_dump(tmp_path / "a", {"modules": fields()}, level=level_a)
    b = write_dump(tmp_path / "b", {"modules": fields()}, level=level_b)
    document = workbench.compare_dumps(a, b)
    assert document["counts"]["SAME"] == document["counts"]["total"] == 4
    assert document["coverage"]["tensors_by_digest"] == 3
    assert document["coverage"]["tensors_compared"] == 1  # the loss, a number
    assert document["coverage"]["elements_compared"] == 1
    assert exit_code(document) == 0
    said = {row["reason"] for row in document["tensors"] if row["name"] != "loss"}
    assert said == {"equal digests; values were not recorded on both sides"}


@pytest.mark.parametrize("sides", [("hash", "hash"), ("hash", "full"), ("full", "hash"), ("stats", "hash")])
def test_other_values_diverge_and_the_first_is_named(tmp_path: Path, sides: tuple[str, str]) -> None:
    other = {**fields(), "norm.output": fields(1)["norm.output"]}
    a = write_dump(tmp_path / "a", {"modules": fields()}, level=sides[0])
    b = write_dump(tmp_path / "b", {"modules": other}, level=sides[1])
    document = workbench.compare_dumps(a, b)
    assert there(document["first_divergence"])["name"] == there(document["first_difference"])["name"] == "norm.output"
    assert there(document["first_divergence"])["why"].startswith("digests differ; values were not recorded")
    assert document["counts"]["DIFF"] == 1
    assert exit_code(document) == 1


@pytest.mark.parametrize("level_b", ["stats", "full"])
def test_statistics_say_how_two_tensors_of_other_digests_look(tmp_path: Path, level_b: str) -> None:
    a = write_dump(tmp_path / "a", {"modules": {"norm.output": torch.tensor([3.0, 4.0])}}, level="stats")
    b = write_dump(tmp_path / "b", {"modules": {"norm.output": torch.tensor([6.0, 8.0])}}, level=level_b)
    row = row_of(compare_paths(a, b), "norm.output")
    assert row.verdict.value == "DIFF"
    assert "l2 5 against 10, mean 3.5 against 7, std 0.5 against 1, min 3 against 6, max 4 against 8" in row.reason


@pytest.mark.parametrize("level_b", ["stats", "full"])
def test_nan_that_only_one_side_counted_is_nan(tmp_path: Path, level_b: str) -> None:
    broken = torch.tensor([3.0, float("nan")])
    a = write_dump(tmp_path / "a", {"modules": {"norm.output": torch.tensor([3.0, 4.0])}}, level="stats")
    b = write_dump(tmp_path / "b", {"modules": {"norm.output": broken}}, level=level_b)
    row = row_of(compare_paths(a, b), "norm.output")
    assert row.verdict.value == "NAN"
    assert "nan 0 against 1" in row.reason


def test_shapes_and_dtypes_are_compared_though_values_are_not(tmp_path: Path) -> None:
    zeros = torch.zeros(4, 6)
    a = write_dump(tmp_path / "a", {"modules": dict.fromkeys(("x", "y", "z"), zeros)}, level="hash")
    changed = {"x": zeros[None], "y": zeros.reshape(6, 4), "z": zeros.to(torch.bfloat16)}
    b = write_dump(tmp_path / "b", {"modules": changed}, level="hash")
    compared = compare_paths(a, b)
    assert [row_of(compared, name).verdict.value for name in "xyz"] == ["SAME", "SHAPE", "DIFF"]
    assert "float32 against bfloat16" in row_of(compared, "z").reason


def test_texts_and_lists_at_level_hash_are_compared_by_digest(tmp_path: Path) -> None:
    a = write_dump(tmp_path / "a", {"datums": {"prompt": "one", "parts": [1, 2], "temperature": 1.0}}, level="hash")
    b = write_dump(tmp_path / "b", {"datums": {"prompt": "one", "parts": [1, 3], "temperature": 0.9}}, level="hash")
    compared = compare_paths(a, b)
    verdicts = {name: row_of(compared, name).verdict.value for name in ("prompt", "parts", "temperature")}
    assert verdicts == {"prompt": "SAME", "parts": "DIFF", "temperature": "DIFF"}
    assert not compared.skipped


def test_a_text_of_one_side_and_its_digest_on_the_other_are_skipped_and_counted(tmp_path: Path) -> None:
    content = {"prompt": "one", "x": torch.ones(3)}
    a = write_dump(tmp_path / "a", {"datums": content}, level="hash")
    b = write_dump(tmp_path / "b", {"datums": content}, level="full")
    document = workbench.compare_dumps(a, b)
    assert (document["counts"]["skipped"], document["counts"]["SAME"]) == (1, 1)
    assert exit_code(document) == 1


def test_a_number_that_is_no_number_keeps_its_kind_at_every_level(tmp_path: Path) -> None:
    for level in LEVELS:
        write_dump(tmp_path / level, {"loss": {"loss": float("nan")}}, level=level)
    for level in ("hash", "stats"):
        compared = compare_paths(tmp_path / "full", tmp_path / level)
        assert row_of(compared, "loss").verdict.value == "SAME"


def test_a_digest_of_another_making_is_not_taken_for_one(tmp_path: Path) -> None:
    a = write_dump(tmp_path / "a", {"modules": {"x": torch.ones(3)}}, level="hash")
    b = write_dump(tmp_path / "b", {"modules": {"x": torch.ones(3)}}, level="full")
    index = a / "index_rank0.jsonl"
    line = json.loads(index.read_text())
    for forged in ("blake2b:0123", 7, None, "sha256:", "xxh3:12"):
        line["fields"][0]["digest"] = forged
        index.write_text(json.dumps(line) + "\n")
        with pytest.raises(NothingComparableError):
            compare_paths(a, b)


def with_digests_of(kind: str, dump: Path, values: dict[str, torch.Tensor]) -> None:
    """Digests as versions before kept them (sha256), or as a device takes them (fold)."""
    index = dump / "index_rank0.jsonl"
    line = json.loads(index.read_text())
    for field in line["fields"]:
        raw = values[field["name"]].contiguous().view(torch.uint8).numpy().tobytes()
        field["digest"] = digest_of([raw], kind)
    index.write_text(json.dumps(line) + "\n")


@pytest.mark.parametrize("kind", ["sha256", "fold"])
def test_digests_of_two_kinds_say_nothing_of_each_other_and_either_is_held_against_values(
    kind: str, tmp_path: Path
) -> None:
    values = {"x": torch.arange(60_000.0), "y": torch.ones(3)}
    for name, level in (("before", "hash"), ("now", "hash"), ("whole", "full")):
        write_dump(tmp_path / name, {"modules": values}, level=level)
    with_digests_of(kind, tmp_path / "before", values)
    compared = compare_paths(tmp_path / "before", tmp_path / "whole")
    assert [row_of(compared, name).verdict.value for name in "xy"] == ["SAME", "SAME"]
    changed = values["x"].clone()
    changed[54_321] += 1
    other = write_dump(tmp_path / "other", {"modules": {"x": changed, "y": torch.zeros(3)}}, level="full")
    compared = compare_paths(tmp_path / "before", other)
    assert [row_of(compared, name).verdict.value for name in "xy"] == ["DIFF", "DIFF"]
    document = workbench.compare_dumps(tmp_path / "before", tmp_path / "before")
    assert document["counts"]["SAME"] == 2
    with pytest.raises(NothingComparableError, match="digests of two kinds"):
        workbench.compare_dumps(tmp_path / "before", tmp_path / "now")
