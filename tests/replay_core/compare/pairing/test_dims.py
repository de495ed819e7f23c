"""What sglang's dumper has said of dimensions: its own tests' cases, and ranks put together by them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.compare import Comparison, compare_runs
from replay_core.compare.pairing.dims import Cut, Dim, Dims, parsed
from replay_core.dumps import open_run
from replay_core.errors import DumpError
from tests.builders import there
from tests.replay_core.compare.ranks.recorded import random

TP = (Cut("tp"),)
GRAMMAR = {
    "b s h d": Dims((Dim(("b",)), Dim(("s",)), Dim(("h",)), Dim(("d",)))),
    "b s[cp:zigzag] h[tp] d": Dims((Dim(("b",)), Dim(("s",), (Cut("cp", "zigzag"),)), Dim(("h",), TP), Dim(("d",)))),
    "s[cp:natural]": Dims((Dim(("s",), (Cut("cp", "natural"),)),)),
    "h[tp:partial]": Dims((Dim(("h",), (Cut("tp", None, True),)),)),
    "h[tp:sharded]": Dims((Dim(("h",), TP),)),
    "s[cp:zigzag+partial]": Dims((Dim(("s",), (Cut("cp", "zigzag", True),)),)),
    "t[cp:zigzag,sp]": Dims((Dim(("t",), (Cut("cp", "zigzag"), Cut("sp"))),)),
    "t 1 h 1 d": Dims((Dim(("t",)), Dim(("1",)), Dim(("h",)), Dim(("1",)), Dim(("d",)))),
    "t (num_heads*head_dim)[tp]": Dims((Dim(("t",)), Dim(("num_heads", "head_dim"), TP))),
    "(a*b*c)": Dims((Dim(("a", "b", "c")),)),
    "(a*b)[cp:zigzag]": Dims((Dim(("a", "b"), (Cut("cp", "zigzag"),)),)),
    "t h #   dp:=foo  ": Dims((Dim(("t",)), Dim(("h",))), frozenset(), "foo"),
    "t h[tp] # dp:=moe_dp ep:replicated": Dims((Dim(("t",)), Dim(("h",), TP)), frozenset({"ep"}), "moe_dp"),
}
REFUSED = (
    "", "   ", "h h", "h[]", "h[tp[x]]", "h[xyz]", "h[tp:foobar]", "s[cp:zigzag+natural]", "h[tp:partial+partial]",
    "h[tp,tp]", "1[tp]", "(a*a)", "(a*1)", "(a)", "t num_heads (num_heads*head_dim)", "(a*b) (c*a)",
    "b s h[tp] d # tp:replicated", "b s # xyz:replicated", "b s # ep:replicated ep:replicated", "b s # ep:replicatd",
    "b s # dp:=foo dp:=bar",
)  # fmt: skip


@pytest.mark.parametrize("text", GRAMMAR)
def test_a_statement_means_what_sglangs_tests_say(text: str) -> None:
    assert parsed(text) == GRAMMAR[text]


@pytest.mark.parametrize("text", REFUSED)
def test_a_statement_that_sglang_refuses_is_refused(text: str) -> None:
    with pytest.raises(DumpError, match="dims"):
        parsed(text)


def dumped(path: Path, rank: int, value: torch.Tensor, dims: str | None, **place: int) -> None:
    """A file as sglang's dumper writes it."""
    path.mkdir(exist_ok=True)
    meta: dict[str, Any] = {"step": 0, "rank": rank, "dump_index": 1, "name": "layers.0.output"}
    meta |= {"dims": dims, "megatron_parallel_info": place} if dims is not None else {}
    name = f"step=0___rank={rank}___dump_index=1___name=layers.0.output.pt"
    torch.save({"value": value.contiguous(), "meta": meta}, path / name)


def put(tmp_path: Path, dims: str, whole: torch.Tensor, *ranks: tuple[torch.Tensor, dict[str, int]]) -> Comparison:
    dumped(tmp_path / "a", 0, whole, None)
    for rank, (value, place) in enumerate(ranks):
        sized = {f"{axis}_rank": number for axis, number in place.items()}
        sized |= {f"{axis}_size": 1 + max(other[axis] for _, other in ranks) for axis in place}
        dumped(tmp_path / "b", rank, value, dims, **sized)
    return compare_runs(open_run(tmp_path / "a"), open_run(tmp_path / "b"))


WHOLE = random(4, 8, 16, 32)
TURN3 = ((1, 0, 1), (0, 1, 0), (1, 1, 0), (0, 0, 0), (0, 1, 1), (1, 0, 0), (0, 0, 1), (1, 1, 1))


def three(ep: int, cp: int, tp: int) -> tuple[torch.Tensor, dict[str, int]]:
    part = WHOLE.chunk(2, 1)[ep].chunk(2, 2)[cp].chunk(2, 3)[tp]
    return part, {"ep": ep, "cp": cp, "tp": tp}


def two(cp: int, tp: int) -> tuple[torch.Tensor, dict[str, int]]:
    return WHOLE[0].chunk(2, 1)[cp].chunk(2, 2)[tp], {"cp": cp, "tp": tp}


def zigzag(cp: int) -> torch.Tensor:
    chunks = WHOLE[0].chunk(4, 1)
    return torch.cat([chunks[cp], chunks[3 - cp]], 1)


Layout = tuple[str, torch.Tensor, list[tuple[torch.Tensor, dict[str, int]]]]
LAID_OUT: dict[str, Layout] = {
    "tp4_concat": ("b h[tp] d", WHOLE[0], [(part, {"tp": at}) for at, part in enumerate(WHOLE[0].chunk(4, 1))]),
    "scrambled_world_ranks": ("h[tp] d", WHOLE[0, 0], [(WHOLE[0, 0].chunk(4)[at], {"tp": at}) for at in (2, 0, 3, 1)]),
    "cp_tp_concat": ("b s[cp] h[tp]", WHOLE[0], [two(*at) for at in product(range(2), repeat=2)]),
    "cp_tp_scrambled": ("b s[cp] h[tp]", WHOLE[0], [two(*at) for at in ((1, 1), (0, 0), (1, 0), (0, 1))]),
    "cp_tp_ep_three_axis": ("b e[ep] s[cp] h[tp]", WHOLE, [three(*at) for at in product(range(2), repeat=3)]),
    "cp_tp_ep_scrambled_three_axis": ("b e[ep] s[cp] h[tp]", WHOLE, [three(*at) for at in TURN3]),
    "replicated_tp_sharded_cp": (
        "b s[cp] d # tp:replicated", WHOLE[0],
        [(WHOLE[0].chunk(2, 1)[cp], {"cp": cp, "tp": tp}) for cp in range(2) for tp in range(2)],
    ),
    "zigzag": ("b s[cp:zigzag] d", WHOLE[0], [(zigzag(cp), {"cp": cp}) for cp in range(2)]),
    "zigzag_then_sp": (
        "b s[cp:zigzag,sp] d", WHOLE[0],
        [(zigzag(cp).chunk(2, 1)[sp], {"cp": cp, "sp": sp}) for cp in range(2) for sp in range(2)],
    ),
    "squeezed": ("t 1 h[tp]", WHOLE[0, 0], [(WHOLE[0, 0].chunk(2, 1)[at][:, None], {"tp": at}) for at in (1, 0)]),
    "fused": ("t (a*b)[tp]", WHOLE[0, 0], [(WHOLE[0, 0].chunk(2, 1)[at], {"tp": at}) for at in (1, 0)]),
}  # fmt: skip


@pytest.mark.parametrize("case", LAID_OUT)
def test_ranks_are_put_together_as_their_dump_says(case: str, tmp_path: Path) -> None:
    dims, whole, ranks = LAID_OUT[case]
    found = put(tmp_path, dims, whole, *ranks)
    assert not found.problems
    assert found.agrees, there(found.first).reason
    assert found.elements == whole.numel()


@pytest.mark.parametrize("case", LAID_OUT)
def test_a_rank_that_is_wrong_is_found_in_each_layout(case: str, tmp_path: Path) -> None:
    dims, whole, ranks = LAID_OUT[case]
    value, place = ranks[-1]
    assert not put(tmp_path, dims, whole, *ranks[:-1], (value + 1, place)).agrees


def halves(at: int) -> torch.Tensor:
    return WHOLE[0, 0].chunk(2)[at]


CONTRADICTED: dict[str, tuple[str, Callable[[int], torch.Tensor], str]] = {
    "not cut where it is": ("h d", halves, "expected shape [16, 32]"),
    "another dimension": ("h d[tp]", halves, "found shape [8, 64]"),
    "another number of dimensions": ("b h[tp] d", halves, "expected 3 dimensions"),
    "no dims": ("h[xyz] d", halves, "'xyz' in 'h[xyz]' is no axis of ranks"),
    "packed zigzag": ("t[tp:zigzag] d", halves, "needs the lengths of its sequences"),
}


@pytest.mark.parametrize("case", CONTRADICTED)
def test_a_statement_that_the_tensors_do_not_bear_out_is_a_problem(case: str, tmp_path: Path) -> None:
    dims, part, said = CONTRADICTED[case]
    found = put(tmp_path, dims, WHOLE[0, 0], *((part(at), {"tp": at}) for at in range(2)))
    (problem,) = found.problems
    assert said in problem.what
    assert "layers.0.output" in problem.what
    assert problem.where.endswith("name=layers.0.output.pt")
