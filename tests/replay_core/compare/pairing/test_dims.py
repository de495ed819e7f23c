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
    tmp_path.mkdir(exist_ok=True)
    dumped(tmp_path / "a", 0, whole, None)
    for rank, (value, place) in enumerate(ranks):
        sized = {f"{axis}_rank": number for axis, number in place.items()}
        sized |= {f"{axis}_size": 1 + max(other[axis] for _, other in ranks) for axis in place}
        dumped(tmp_path / "b", rank, value, dims, **sized)
    return compare_runs(open_run(tmp_path / "a"), open_run(tmp_path / "b"))


def bounds(path: Path, rank: int, lengths: list[int], name: str = "cu_seqlens_q") -> None:
    """The lengths of a pack's sequences, as Megatron's bounds or sglang's lengths."""
    value = torch.tensor([0, *lengths]).cumsum(0) if name == "cu_seqlens_q" else torch.tensor(lengths)
    meta = {"step": 0, "rank": rank, "dump_index": 2, "name": name}
    torch.save({"value": value, "meta": meta}, path / f"step=0___rank={rank}___dump_index=2___name={name}.pt")


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


def packed_share(value: torch.Tensor, lengths: list[int], cp: int, size: int, axis: int, zigzag: bool) -> torch.Tensor:
    """What a context-parallel rank has of a pack: of each sequence its own share."""
    mine = []
    for sequence in value.split(lengths, axis):
        if zigzag:
            chunks = sequence.chunk(2 * size, axis)
            mine += [chunks[cp], chunks[2 * size - 1 - cp]]
        else:
            mine.append(sequence.chunk(size, axis)[cp])
    return torch.cat(mine, axis)


#: sglang's cases of a pack: dims, its shape, the axis of tokens, the sequences' lengths, ranks, and whether in zigzag.
PACKS: dict[str, tuple[str, tuple[int, ...], int, list[int], int, bool]] = {
    "single_seq": ("t[cp:zigzag]", (100,), 0, [100], 2, True),
    "multi_seq": ("t[cp:zigzag]", (164,), 0, [100, 64], 2, True),
    "with_a_padded_tail": ("t[cp:zigzag]", (256,), 0, [100, 64, 92], 2, True),
    "with_hidden_dim": ("t[cp:zigzag] h", (100, 8), 0, [100], 2, True),
    "with_leading_batch_dim": ("b t[cp:zigzag] h", (2, 164, 4), 1, [100, 64], 2, True),
    "thd_cp3_single_seq": ("t[cp:zigzag]", (120,), 0, [120], 3, True),
    "concat_single_seq": ("t[cp]", (6,), 0, [6], 2, False),
    "concat_multi_seq": ("t[cp:natural]", (256,), 0, [100, 64, 92], 2, False),
    "concat_with_hidden_dim": ("t[cp] h", (10, 4), 0, [6, 4], 2, False),
    "concat_with_leading_batch_dim": ("b t[cp] h", (2, 10, 4), 1, [6, 4], 2, False),
}


@pytest.mark.parametrize("name", ["cu_seqlens_q", "seq_lens"])
@pytest.mark.parametrize("case", PACKS)
def test_a_pack_that_ranks_share_is_put_together_sequence_by_sequence(case: str, name: str, tmp_path: Path) -> None:
    dims, shape, axis, lengths, size, zigzag = PACKS[case]
    whole = random(*shape)
    dumped(tmp_path / "a", 0, whole, None)
    for cp in range(size):
        part = packed_share(whole, lengths, cp, size, axis, zigzag)
        dumped(tmp_path / "b", cp, part, dims, cp_rank=cp, cp_size=size)
        bounds(tmp_path / "b", cp, lengths, name)
    found = compare_runs(open_run(tmp_path / "a"), open_run(tmp_path / "b"))
    assert not found.problems
    assert found.first is None, there(found.first).reason
    assert found.elements == whole.numel()
    dumped(tmp_path / "b", size - 1, part.roll(1, axis), dims, cp_rank=size - 1, cp_size=size)
    assert compare_runs(open_run(tmp_path / "a"), open_run(tmp_path / "b")).first is not None


def test_a_pack_in_zigzag_whose_rank_shares_its_tokens_again(tmp_path: Path) -> None:
    """t[cp:zigzag,sp]: each sequence in zigzag, and what a rank has of all of them among those beside it."""
    whole, lengths = random(32, 8), [16, 16]
    dumped(tmp_path / "a", 0, whole, None)
    for rank, (cp, sp) in enumerate(product(range(2), repeat=2)):
        part = packed_share(whole, lengths, cp, 2, 0, zigzag=True).chunk(2)[sp]
        dumped(tmp_path / "b", rank, part, "t[cp:zigzag,sp] h", cp_rank=cp, cp_size=2, sp_rank=sp, sp_size=2)
        bounds(tmp_path / "b", rank, lengths)
    found = compare_runs(open_run(tmp_path / "a"), open_run(tmp_path / "b"))
    assert not found.problems
    assert found.first is None, there(found.first).reason


#: sglang's cases of parts of a sum: dims, and of each rank its place and its share of the whole.
SUMS: dict[str, tuple[str, torch.Tensor, list[tuple[torch.Tensor, dict[str, int]]]]] = {
    "basic_tp2_reduce": (
        "h[tp:partial] d", WHOLE[0, 0],
        [(WHOLE[0, 0] * 0.6, {"tp": 0}), (WHOLE[0, 0] * 0.4, {"tp": 1})],
    ),
    "tp4_reduce": ("h[tp:partial] d", WHOLE[0, 0], [(WHOLE[0, 0] * 0.25, {"tp": tp}) for tp in range(4)]),
    "multi_axis_concat_then_reduce": (
        "b s[cp] h[tp:partial]", WHOLE[0],
        [(WHOLE[0].chunk(2, 1)[cp] * (0.3, 0.7)[tp], {"cp": cp, "tp": tp}) for cp, tp in product(range(2), repeat=2)],
    ),
    "reduce_scrambled_ranks": (
        "h[tp:partial] d", WHOLE[0, 0],
        [(WHOLE[0, 0] * part, {"tp": tp}) for part, tp in ((0.1, 2), (0.2, 0), (0.3, 3), (0.4, 1))],
    ),
    "fully_replicated": (
        "b h d # cp:replicated tp:replicated", WHOLE[0],
        [(WHOLE[0], {"cp": cp, "tp": tp}) for cp, tp in product(range(2), repeat=2)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SUMS)
def test_parts_of_a_sum_are_judged_by_their_sum(case: str, tmp_path: Path) -> None:
    dims, whole, ranks = SUMS[case]
    found = put(tmp_path / "right", dims, whole, *ranks)
    assert not found.problems
    assert found.agrees, there(found.first).reason
    value, place = ranks[-1]
    assert put(tmp_path / "wrong", dims, whole, *ranks[:-1], (value * 3, place)).agrees is False


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
