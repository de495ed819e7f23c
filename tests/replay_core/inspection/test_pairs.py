from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core import workbench
from replay_core.errors import RequestError
from tests.builders import there, write_pair


def named(path: Path, name: str) -> Any:
    return {
        "path": str(path),
        "key": {"step": 0, "micro": 0, "rank": 0, "role": "actor", "stage": "modules"},
        "name": name,
    }


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """x differs at [2, 150]; c is complex; w is wider in b; t is a text; e is empty."""
    x = torch.arange(600.0).reshape(3, 200)
    y = x.clone()
    y[2, 150] += 9
    a = {"x": x, "c": torch.tensor([1 + 2j, 3j]), "w": torch.ones(2, 3), "t": "one", "e": torch.zeros(0, 3), "s": 2.5}
    b = {"x": y, "c": torch.tensor([1 + 2j, 4j]), "w": torch.ones(2, 4), "t": "two", "e": torch.zeros(0, 3), "s": 3.5}
    return write_pair(tmp_path, {"modules": a}, {"modules": b})


def test_the_window_opens_where_the_two_differ(pair: tuple[Path, Path]):
    document = workbench.inspect(*(named(path, "x") for path in pair), count=8)
    window = document["window"]
    place = window["index"].index([2, 150])
    assert (there(window["a"])[place], there(window["b"])[place], there(window["d"])[place]) == (550.0, 559.0, 9.0)
    assert len(window["a"] or ()) == 8
    assert there(document["verdict"])["verdict"] == "DIFF"


def test_two_tensors_of_other_names_get_no_verdict_of_another_pair(tmp_path: Path):
    old, new = torch.zeros(2, 3), torch.ones(2, 3)
    sides = ({"modules": {"old": old, "new": new}} for _ in range(2))
    a, b = write_pair(tmp_path, *sides)
    document = workbench.inspect(named(a, "old"), named(b, "new"))
    assert document["verdict"] is None
    assert there(document["window"]["d"])[:3] == [1.0, 1.0, 1.0]
    assert there(workbench.inspect(named(a, "old"), named(b, "old"))["verdict"])["verdict"] == "SAME"
    assert workbench.inspect(named(a, "old"), named(a, "new"))["verdict"] is None


@pytest.mark.parametrize("at", [[0, 0], [2, 199], [1, 100]])
def test_a_place_asked_for_is_in_the_window(at: list[int], pair: tuple[Path, Path]):
    window = workbench.inspect(*(named(path, "x") for path in pair), at=at, count=16)["window"]
    assert at in window["index"]
    assert there(window["a"])[window["index"].index(at)] == at[0] * 200 + at[1]
    assert len(window["a"] or ()) == len(window["b"] or ()) == 16


@pytest.mark.parametrize("at", [[3, 0], [0, -1], [0], [0, 0, 0]])
def test_a_place_outside_is_a_wrong_request(at: list[int], pair: tuple[Path, Path]):
    with pytest.raises(RequestError, match="outside the tensor"):
        workbench.inspect(named(pair[0], "x"), at=at)


@pytest.mark.parametrize("name", ["c", "w", "t", "e", "s"])
def test_everything_a_field_can_be_can_be_inspected(name: str, pair: tuple[Path, Path]):
    document = workbench.inspect(*(named(path, name) for path in pair))
    assert there(document["a"])["name"] == there(document["b"])["name"] == name
    workbench.inspect(named(pair[0], name))


def test_a_name_that_is_not_there_says_what_is(pair: tuple[Path, Path]):
    with pytest.raises(RequestError) as caught:
        workbench.inspect(named(pair[0], "z"))
    assert "x, c, w, t, e, s" in str(caught.value.expected)


def test_a_difference_names_the_token_and_the_channel(tmp_path: Path):
    mask = torch.ones(3, 8, dtype=torch.long)
    mask[0, :3] = 0
    hidden = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(0))
    wrong = hidden.clone()
    wrong[0, 4, 9] += 2
    ids = {"input_ids": mask, "attention_mask": mask}
    paths = write_pair(
        tmp_path, {"batch_inputs": ids, "modules": {"norm.output": hidden}},
        {"batch_inputs": ids, "modules": {"norm.output": wrong}},
    )  # fmt: skip
    by_row = workbench.difference(*(named(path, "norm.output") for path in paths), cells=1000)
    worst = max(by_row["strip"], key=lambda cell: cell["max_abs"])
    # Three pads stand in front of sample 0: slot 4 is its second token.
    assert worst["token"] == {"sample": 0, "position": 1}
    assert len(by_row["strip"]) == int(mask.sum())
    by_channel = workbench.difference(*(named(path, "norm.output") for path in paths), axis="channel", cells=16)
    assert max(by_channel["strip"], key=lambda cell: cell["rel_l2"])["start"] == 9
    assert by_channel["compared"] == int(mask.sum()) * 16


@pytest.mark.parametrize(
    ("names", "options", "says"),
    [(("x", "x"), {"axis": "diagonal"}, "no axis"), (("w", "w"), {}, "laid over each other"),
     (("t", "t"), {}, "no numbers"), (("x", "w"), {}, "are not a pair"), (("e", "e"), {}, "no element"),
     (("x", "x"), {"cells": 0}, "at least one cell")],
)  # fmt: skip
def test_a_difference_that_cannot_be_taken_says_why(
    names: tuple[str, str], options: Any, says: str, pair: tuple[Path, Path]
):
    with pytest.raises(RequestError, match=says):
        workbench.difference(*(named(path, name) for path, name in zip(pair, names, strict=True)), **options)


@pytest.fixture
def layouts(tmp_path: Path) -> tuple[Path, Path]:
    """The same tokens padded on the left in a, packed in b: ids, and hidden states of 4 channels."""
    padded = torch.tensor([[0, 0, 1, 2, 3], [4, 5, 6, 7, 8]])
    packed = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    sides = ({"modules": {"ids": one, "h": one[..., None] * torch.ones(4)}} for one in (padded, packed))
    return write_pair(tmp_path, *sides)


def test_elements_of_two_layouts_are_not_set_beside_each_other_by_their_raw_index(layouts: tuple[Path, Path]):
    ids = [named(path, "ids") for path in layouts]
    unknown = workbench.inspect(*ids, judge=False)["window"]
    assert (there(unknown["a"])[:3], unknown["b"], unknown["d"]) == ([0, 0, 1], None, None)
    known = workbench.inspect(*ids, judge=False, at_a=[0, 2], at_b=[0, 0])["window"]
    assert (known["index"], known["a"], known["b"], known["d"]) == ([[0, 2]], [1], [1], [0.0])
    states = [named(path, "h") for path in layouts]
    assert workbench.inspect(*states, judge=False, at_a=[0, 2, 1], at_b=[0, 0, 1])["window"]["d"] == [0.0] * 4
