"""A pickle met before: the same tree as the machine makes of it, and no shortcut past a check."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replay_core.dumps.containers import known_pickles, read_container
from replay_core.errors import DumpError
from tests.replay_core.dumps.containers.oracle import values


@pytest.fixture(autouse=True)
def _nothing_known() -> Iterator[None]:
    known_pickles.forget()
    yield
    known_pickles.forget()


def _save(path: Path, seed: int, **more: Any) -> Path:
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(6, 8, generator=generator)
    tree = {
        "base": base,
        "rows": base[2:4],
        "columns": base.t(),
        "ids": torch.randint(0, 9, (3, 5), generator=generator),
        "half": torch.randn(7, generator=generator).to(torch.bfloat16),
        "step": 3,
        "name": "grpo",
        **more,
    }
    torch.save(tree, path)
    return path


def _said(path: Path) -> dict[str, Any]:
    """Everything a reader learns of a file, the tensors' values included."""
    content = read_container(path)
    return {
        name: (value.dtype, value.shape, value.source, values(value).tolist()) if hasattr(value, "source") else value
        for name, value in content.tree.items()
    } | {"problems": content.problems, "notes": content.notes}


def _is_known(path: Path) -> bool:
    with zipfile.ZipFile(path) as opened:
        name = next(name for name in opened.namelist() if name.endswith("data.pkl"))
        return known_pickles.recipe(known_pickles.met_as(opened.read(name), False, frozenset())) is not None


def test_files_of_one_pickle_read_by_its_recipe_as_by_the_machine(tmp_path: Path) -> None:
    files = [_save(tmp_path / "run.pt", seed=0)]
    files[0].rename(tmp_path / "0.pt")
    files = [tmp_path / "0.pt"]
    for seed in (1, 2, 3):
        files.append(_save(tmp_path / "run.pt", seed).rename(tmp_path / f"{seed}.pt"))
    by_machine = []
    for file in files:
        known_pickles.forget()
        by_machine.append(_said(file))
    known_pickles.forget()
    assert [_said(file) for file in files] == by_machine
    assert _is_known(files[0])
    assert _said(files[0]) == by_machine[0]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=12), st.integers(0, 3))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_shapes_of_any_kind_read_the_same_the_third_time(
    tmp_path: Path, shapes: list[tuple[int, int]], numbers: int
) -> None:
    tree: dict[str, Any] = {f"t{n}": torch.arange(a * b, dtype=torch.float32).reshape(a, b) for n, (a, b) in
                            enumerate(shapes)}  # fmt: skip
    torch.save(tree | {f"n{n}": n for n in range(numbers)}, tmp_path / "x.pt")
    first, _, third = _said(tmp_path / "x.pt"), _said(tmp_path / "x.pt"), _said(tmp_path / "x.pt")
    assert third == first


def test_what_is_read_by_a_recipe_is_the_readers_own(tmp_path: Path) -> None:
    file = _save(tmp_path / "a.pt", 0)
    trees = [read_container(file).tree for _ in range(4)]
    trees[2]["base"].name, trees[2]["step"] = "renamed", 4
    assert trees[3]["base"].name == ""
    assert trees[3]["step"] == 3
    assert read_container(file).tree["base"].name == ""


def test_a_storage_shorter_than_the_pickle_says_is_refused_though_the_pickle_is_known(tmp_path: Path) -> None:
    file = _save(tmp_path / "a.pt", 0)
    for _ in range(3):
        read_container(file)
    with zipfile.ZipFile(file) as source, zipfile.ZipFile(tmp_path / "short.pt", "w") as target:
        for name in source.namelist():
            data = source.read(name)
            target.writestr(name, data[:8] if name.endswith("data/0") else data)
    with pytest.raises(DumpError, match="not the size"):
        read_container(tmp_path / "short.pt")


def test_a_known_pickle_that_does_not_match_its_checksum_is_a_problem_still(tmp_path: Path) -> None:
    file = _save(tmp_path / "a.pt", 0)
    for _ in range(3):
        read_container(file)
    data = file.read_bytes()
    with zipfile.ZipFile(file) as opened:
        crc = next(entry.CRC for entry in opened.infolist() if entry.filename.endswith("data.pkl"))
    (tmp_path / "b.pt").write_bytes(data.replace(crc.to_bytes(4, "little"), bytes(4)))
    assert any("checksum" in what for what in read_container(tmp_path / "b.pt").problems)


def test_a_nested_tree_is_read_anew_each_time(tmp_path: Path) -> None:
    file = _save(tmp_path / "a.pt", 0, inner={"deep": torch.ones(2)})
    for _ in range(3):
        tree = read_container(file).tree
    assert values(tree["inner"]["deep"]).tolist() == [1, 1]
    assert not _is_known(file)


def test_two_byte_orders_of_one_pickle_are_two_recipes(tmp_path: Path) -> None:
    file = _save(tmp_path / "a.pt", 0)
    for _ in range(3):
        assert not read_container(file).tree["base"].source.big_endian
    with zipfile.ZipFile(file) as source, zipfile.ZipFile(tmp_path / "big.pt", "w") as target:
        for name in source.namelist():
            target.writestr(name, b"big" if name.endswith("byteorder") else source.read(name))
    for _ in range(3):
        assert read_container(tmp_path / "big.pt").tree["base"].source.big_endian
