"""Two runs that name the dimensions of a tensor otherwise: the cases of sglang's own axis aligner's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.compare import Comparison, compare_runs
from replay_core.compare.pairing.axes import laid_alike
from replay_core.compare.pairing.dims import parsed, written
from replay_core.dumps import open_run
from replay_core.errors import DumpError
from tests.replay_core.compare.pairing.test_dims import GRAMMAR
from tests.replay_core.compare.ranks.recorded import random

NOTHING = (None, None)
#: sglang lays the first as the second, here the second is laid as the first: what either becomes, None where it stays.
ALIKE: dict[tuple[str, str], tuple[str | None, str | None]] = {
    ("t h d", "t h d"): NOTHING,
    ("t h d", "t d h"): (None, "t h d"),
    ("t h[tp] d", "t d h[tp]"): (None, "t h[tp] d"),
    ("t 1 h", "t h"): ("t h", None),
    ("t 1 h", "1 t h"): ("t h", "t h"),
    ("t 1 h d", "t d h"): ("t h d", "t h d"),
    ("t h", "t 1 h"): (None, "t h"),
    ("1 t 1 h", "t h"): ("t h", None),
    ("1 t 1 h", "1 t h"): ("t h", "t h"),
    ("a b c d", "d c b a"): (None, "a b c d"),
    ("t (n*d)[tp]", "t n[tp] d"): (None, "t (n*d)[tp]"),
    ("t n[tp] d", "t (n*d)[tp]"): ("t (n*d)[tp]", None),
    ("t (a*b)", "t (a*b)"): NOTHING,
    ("(a*b) c", "a b c"): (None, "(a*b) c"),
    ("(a*b) c", "b a c"): (None, "(a*b) c"),
    ("c (a*b)", "a b c"): (None, "c (a*b)"),
    ("t 1 (a*b)", "t a b"): ("t (a*b)", "t (a*b)"),
    ("t (a*b*c)", "t a b c"): (None, "t (a*b*c)"),
    ("t a b c", "t (a*b*c)"): ("t (a*b*c)", None),
    ("c (a*b)", "(a*b) c"): (None, "c (a*b)"),
}
REFUSED = {
    ("t h d", "t h e"): "name other dimensions",
    ("t (a*b)", "t c d"): "name other dimensions",
    ("(a*b) c", "a (b*c)"): "dims fuse",
    ("(a*b) c", "(b*a) c"): "dims fuse",
    ("t (a*b)", "t a b[tp]"): "is cut within",
}


@pytest.mark.parametrize("pair", ALIKE, ids=" / ".join)
def test_statements_are_laid_alike_as_sglangs_tests_have_it(pair: tuple[str, str]) -> None:
    found = tuple(turn and written(turn.dims) for turn in laid_alike(*pair))
    assert found == ALIKE[pair]


@pytest.mark.parametrize("pair", REFUSED, ids=" / ".join)
def test_statements_that_cannot_be_laid_alike_say_why(pair: tuple[str, str]) -> None:
    with pytest.raises(DumpError, match=REFUSED[pair]):
        laid_alike(*pair)


@pytest.mark.parametrize("text", GRAMMAR)
def test_what_is_written_is_read_as_it_was(text: str) -> None:
    assert parsed(written(parsed(text))) == GRAMMAR[text]


def dumped(path: Path, value: torch.Tensor, dims: str, rank: int = 0, **place: int) -> None:
    path.mkdir(exist_ok=True)
    meta: dict[str, Any] = {"step": 0, "rank": rank, "dump_index": 1, "name": "layers.0.output", "dims": dims}
    meta["megatron_parallel_info"] = place
    name = f"step=0___rank={rank}___dump_index=1___name=layers.0.output.pt"
    torch.save({"value": value.contiguous(), "meta": meta}, path / name)


def compared(tmp_path: Path) -> Comparison:
    return compare_runs(open_run(tmp_path / "a"), open_run(tmp_path / "b"))


X = random(4, 1, 8, 16)
VALUES: dict[str, tuple[str, torch.Tensor, str, torch.Tensor]] = {
    "rearrange": ("t h d", X[:, 0], "t d h", X[:, 0].transpose(1, 2)),
    "squeeze": ("t 1 h d", X, "t h d", X[:, 0]),
    "squeeze then swap": ("t 1 h d", X, "t d h", X[:, 0].transpose(1, 2)),
    "squeeze of the second": ("t h d", X[:, 0], "t 1 h d", X),
    "fused and separate": ("t (h*d)", X.reshape(4, -1), "t h d", X[:, 0]),
    "separate and fused": ("t h d", X[:, 0], "t (h*d)", X.reshape(4, -1)),
    "fused in another order": ("t (h*d)", X.reshape(4, -1), "h d t", X[:, 0].permute(1, 2, 0)),
    "fused of what lies otherwise": ("(h*t) d", X[:, 0].transpose(0, 1).reshape(32, 16), "t h d", X[:, 0]),
    "three in one": ("(t*h*d)", X.reshape(-1), "d h t", X[:, 0].permute(2, 1, 0)),
}


@pytest.mark.parametrize("case", VALUES)
def test_values_face_each_other_by_the_names_of_their_dimensions(case: str, tmp_path: Path) -> None:
    dims_a, a, dims_b, b = VALUES[case]
    dumped(tmp_path / "a", a, dims_a)
    dumped(tmp_path / "b", b, dims_b)
    found = compared(tmp_path)
    assert found.agrees
    assert found.elements == X.numel()


@pytest.mark.parametrize("case", VALUES)
def test_one_element_that_differs_is_found_whatever_the_turn(case: str, tmp_path: Path) -> None:
    dims_a, a, dims_b, b = VALUES[case]
    wrong = b.contiguous().clone()
    wrong.reshape(-1)[7] += 1
    dumped(tmp_path / "a", a, dims_a)
    dumped(tmp_path / "b", wrong, dims_b)
    found = compared(tmp_path)
    assert found.agrees is False
    assert found.first is not None
    assert found.first.value_b == pytest.approx(found.first.value_a + 1)
    assert found.first.value_b == wrong.reshape(-1)[7]


def test_other_names_are_said_and_the_tensors_are_compared_as_they_lie(tmp_path: Path) -> None:
    dumped(tmp_path / "a", X[:, 0], "t h d")
    dumped(tmp_path / "b", X[:, 0], "t h e")
    found = compared(tmp_path)
    assert found.agrees
    assert any("name other dimensions" in note for note in found.notes)


@pytest.mark.parametrize("which", ["a", "b"])
def test_ranks_whose_dimensions_stand_in_another_order_are_put_together(which: str, tmp_path: Path) -> None:
    one, many = ("a", "b") if which == "b" else ("b", "a")
    dumped(tmp_path / one, X[:, 0], "t h d")
    for rank, part in enumerate(X[:, 0].chunk(2, 1)):
        dumped(tmp_path / many, part.permute(2, 1, 0), "d h[tp] t", rank, tp_rank=rank, tp_size=2)
    assert compared(tmp_path).agrees
    for rank, part in enumerate(X[:, 0].chunk(2, 1)):
        dumped(tmp_path / many, part.permute(2, 1, 0) + rank, "d h[tp] t", rank, tp_rank=rank, tp_size=2)
    assert compared(tmp_path).agrees is False


def test_ranks_with_heads_apart_face_one_process_that_has_them_as_one(tmp_path: Path) -> None:
    dumped(tmp_path / "a", X.reshape(4, -1), "t (h*d)")
    for rank, part in enumerate(X[:, 0].chunk(2, 1)):
        dumped(tmp_path / "b", part, "t h[tp] d", rank, tp_rank=rank, tp_size=2)
    assert compared(tmp_path).agrees
