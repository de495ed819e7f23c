"""Ranks of one run put together to what one process of the other holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.compare import compare_runs
from replay_core.compare.parallel import parallel
from replay_core.dumps import open_run
from tests.builders import there
from tests.replay_core.compare.ranks.recorded import compared, gradients, random, write

IDS = torch.randint(2, 99, (4, 16), generator=torch.Generator().manual_seed(3))
HIDDEN = random(4, 16, 8)


def given(ids: torch.Tensor, hidden: torch.Tensor) -> dict[str, Any]:
    return {"batch_inputs": {"input_ids": ids.contiguous()}, "modules": {"layers.0.output": hidden.contiguous()}}


def taken(at: list[int], axis: int = 1) -> dict[str, Any]:
    places = torch.tensor(at)
    return given(IDS.index_select(axis, places), HIDDEN.index_select(axis, places))


CUTS = {
    "tokens in their order": [taken(list(range(8))), taken(list(range(8, 16)))],
    "tokens in zigzag": [taken([0, 1, 2, 3, 12, 13, 14, 15]), taken([4, 5, 6, 7, 8, 9, 10, 11])],
    "samples in their order": [taken([0, 1], 0), taken([2, 3], 0)],
    "samples in turn": [taken([0, 2], 0), taken([1, 3], 0)],
    "samples unevenly": [taken([0, 1, 2], 0), taken([3], 0)],
    "four ranks of tokens": [taken(list(range(at, at + 4))) for at in range(0, 16, 4)],
}


@pytest.mark.parametrize("case", CUTS)
def test_tokens_and_samples_are_put_together_as_the_ids_say(case: str, tmp_path: Path) -> None:
    found = compared(tmp_path, given(IDS, HIDDEN), *CUTS[case])
    assert {row.name: row.verdict.value for row in found.tensors} == {"input_ids": "SAME", "layers.0.output": "SAME"}
    assert found.elements == IDS.numel() + HIDDEN.numel()
    assert found.records_paired == 1
    assert not found.records_b_only


@pytest.mark.parametrize("kind", ["apart", "constant"])
@pytest.mark.parametrize("case", CUTS)
def test_a_rank_that_computed_something_else_is_found_whatever_the_cut(case: str, kind: str, tmp_path: Path) -> None:
    """What is off depends on the token, and nothing says why; or it is one vector, which is told as that."""
    ranks = CUTS[case]
    last = ranks[-1]
    right = last["modules"]["layers.0.output"]
    off = random(*right.shape, seed=5) if kind == "apart" else 1
    wrong = {**last, "modules": {"layers.0.output": right + off}}
    found = compared(tmp_path, given(IDS, HIDDEN), *ranks[:-1], wrong)
    row = there(found.first)
    assert there(row.ranks).parted == (len(ranks) - 1,)
    assert there(there(row.ranks).fault).kind == kind


def test_groups_of_ranks_each_with_samples_of_its_own_hold_slices_within(tmp_path: Path) -> None:
    """Tensor parallelism in data parallelism: logits are cut by samples among groups and by words within one."""
    logits, weight = random(4, 16, 6, seed=7), random(6, 8, seed=8)

    def part(group: int, rank: int) -> dict[str, Any]:
        held = taken([2 * group, 2 * group + 1], 0)
        held["modules"]["logits.output"] = logits[2 * group : 2 * group + 2, :, 3 * rank : 3 * rank + 3].contiguous()
        return held | {"gradient": {"grad.lm_head.weight": weight[3 * rank : 3 * rank + 3].contiguous()}}

    one = given(IDS, HIDDEN)
    one["modules"]["logits.output"] = logits
    one |= {"gradient": {"grad.lm_head.weight": weight}}
    found = compared(tmp_path, one, *(part(group, rank) for group in range(2) for rank in range(2)))
    assert {row.verdict.value for row in found.tensors} == {"SAME"}
    assert found.elements == sum(map(torch.numel, (IDS, HIDDEN, logits, weight)))


def of(tokens: int, cut: torch.Tensor, *, zigzag: bool = False) -> dict[str, Any]:
    """A rank of two that share the sequence, and what it holds of a module's output."""
    chunks = IDS.chunk(4, 1)
    mine = (chunks[tokens], chunks[3 - tokens]) if zigzag else chunks[2 * tokens : 2 * tokens + 2]
    return {"batch_inputs": {"input_ids": torch.cat(mine, 1)}, "modules": {"layers.0.output": cut.contiguous()}}


def halves(values: torch.Tensor, axis: int, number: int) -> torch.Tensor:
    return values.chunk(2, axis)[number]


def every(cut: torch.Tensor) -> dict[str, Any]:
    return given(IDS, cut)


PART = random(4, 16, 8, seed=9)
#: How sglang's unsharder tests lay tensors out, in its words (dims), and the ranks in the order of its axes.
LAID_OUT = {
    "b s h[tp], tp 4": [every(part) for part in HIDDEN.chunk(4, 2)],
    "b s h # tp:replicated": [every(HIDDEN), every(HIDDEN)],
    "b s h[tp:partial]": [every(PART), every(HIDDEN - PART)],
    "b s[cp] h": [of(cp, halves(HIDDEN, 1, cp)) for cp in range(2)],
    "b s[cp:zigzag] h": [
        of(cp, torch.cat([HIDDEN.chunk(4, 1)[cp], HIDDEN.chunk(4, 1)[3 - cp]], 1), zigzag=True) for cp in range(2)
    ],
    "b s[cp] h # tp:replicated": [of(cp, halves(HIDDEN, 1, cp)) for cp in range(2) for _ in range(2)],
    "b s[cp] h[tp]": [of(cp, halves(halves(HIDDEN, 1, cp), 2, tp)) for cp in range(2) for tp in range(2)],
    "b s[cp] h[tp:partial]": [
        of(cp, halves(part, 1, cp)) for cp in range(2) for part in (PART, HIDDEN - PART)
    ],
    "b[dp] s h[tp]": [
        given(halves(IDS, 0, dp), halves(halves(HIDDEN, 0, dp), 2, tp)) for dp in range(2) for tp in range(2)
    ],
}  # fmt: skip


@pytest.mark.parametrize("dims", LAID_OUT)
def test_layouts_of_sglangs_unsharder_are_told_by_shapes_and_ids(dims: str, tmp_path: Path) -> None:
    found = compared(tmp_path, given(IDS, HIDDEN), *LAID_OUT[dims])
    assert found.agrees, there(found.first).reason
    assert {row.name for row in found.tensors} == {"input_ids", "layers.0.output"}
    assert found.elements == IDS.numel() + HIDDEN.numel()


@pytest.mark.parametrize("dims", LAID_OUT)
def test_what_is_wrong_on_the_last_rank_is_found_in_each_of_these_layouts(dims: str, tmp_path: Path) -> None:
    ranks = LAID_OUT[dims]
    wrong = {**ranks[-1], "modules": {"layers.0.output": ranks[-1]["modules"]["layers.0.output"] + 1}}
    found = compared(tmp_path, given(IDS, HIDDEN), *ranks[:-1], wrong)
    assert not found.agrees
    assert there(found.first).name == "layers.0.output"


def test_a_sequence_that_is_cut_one_token_early_is_said_to_be(tmp_path: Path) -> None:
    found = compared(tmp_path, given(IDS, HIDDEN), taken(list(range(8))), taken(list(range(7, 15))))
    row = there(found.first)
    assert row.name == "input_ids"
    said = "rank 1 holds tokens 7 to 14 where 8 to 15 are left for it (1 too early)"
    assert said in there(there(row.ranks).fault).sentence


def test_ranks_that_were_given_the_same_samples_are_said_to_be(tmp_path: Path) -> None:
    found = compared(tmp_path, given(IDS, HIDDEN), taken([0, 1], 0), taken([0, 1], 0))
    (together,) = found.together
    assert there(together.astray).sentence.startswith("ranks 0 and 1 of b were given the same 2 samples")
    assert not found.agrees or found.counts["MISSING"]


def test_the_ranks_may_be_the_first_run(tmp_path: Path) -> None:
    whole = random(6, 4)
    a, b = (
        write(tmp_path / "a", *({"gradient": {"grad.w": half}} for half in whole.chunk(2))),
        write(tmp_path / "b", {"gradient": {"grad.w": whole}}),
    )
    found = compare_runs(open_run(a), open_run(b))
    assert found.agrees
    assert there(found.tensors[0].ranks).which == "a"


def test_shapes_that_do_not_add_up_are_a_difference_of_shapes(tmp_path: Path) -> None:
    found = gradients(tmp_path, random(12, 8), [random(5, 8), random(5, 8)])
    assert there(found.first).verdict.value == "SHAPE"


def test_runs_of_as_many_ranks_are_compared_rank_by_rank(tmp_path: Path) -> None:
    step = [{"gradient": {"grad.w": half}} for half in random(6, 4).chunk(2)]
    found = compare_runs(open_run(write(tmp_path / "a", *step)), open_run(write(tmp_path / "b", *step)))
    assert [row.ranks for row in found.tensors] == [None, None]
    assert found.agrees


def test_stages_of_a_pipeline_have_each_their_own_tensors(tmp_path: Path) -> None:
    first, second = random(3, 4), random(4, 4)
    one = {"gradient": {"grad.layers.0.w": first, "grad.layers.1.w": second}}
    ranks = ({"gradient": {"grad.layers.0.w": first}}, {"gradient": {"grad.layers.1.w": second}})
    found = compared(tmp_path, one, *ranks)
    assert found.agrees
    assert [there(row.ranks).ranks for row in found.tensors] == [(1,), (0,)]


@pytest.mark.parametrize(("whole", "ranks"), [(0, (3, 3)), (4, (0, 0)), (4, (0, 4)), (4, (4, 0))])
def test_an_expert_without_rows_here_or_there_is_no_error(whole: int, ranks: tuple[int, int], tmp_path: Path) -> None:
    rows, name = random(4, 8), "layers.0.up.output"
    one = given(IDS, HIDDEN)
    one["modules"][name] = rows[:whole]
    several = [given(IDS, HIDDEN) for _ in ranks]
    for step, many in zip(several, ranks, strict=True):
        step["modules"][name] = rows[:many].contiguous()
    found = compared(tmp_path, one, *several)
    verdict = next(row.verdict.value for row in found.tensors if row.name == name)
    assert verdict == ("SAME" if sum(ranks) == whole else "SHAPE")


@pytest.mark.parametrize("wide", [0, 1])
def test_slices_of_several_dtypes_are_read_in_one_or_not_at_all(wide: int, tmp_path: Path) -> None:
    """Whole numbers have one width; of fractions the values of one rank would be read as the bytes of another."""
    ranks = [taken([0, 1], 0), taken([2, 3], 0)]
    ranks[wide]["batch_inputs"]["input_ids"] = ranks[wide]["batch_inputs"]["input_ids"].int()
    assert compared(tmp_path / "ids", given(IDS, HIDDEN), *ranks).agrees
    ranks[wide]["modules"]["layers.0.output"] = ranks[wide]["modules"]["layers.0.output"].bfloat16()
    found = compared(tmp_path / "values", given(IDS, HIDDEN), *ranks)
    assert [row.name for row in found.skipped] == ["layers.0.output"]
    assert "several dtypes: bfloat16, float32" in there(found.skipped[0].skipped)
    assert found.agrees is None


@pytest.mark.parametrize(("rows", "expected"), [
    ([[0, 1], [1, 2]], ("same samples", (0, 1))), ([[0, 1], [2, 2]], ("same samples", (1,))),
    ([[0, 1], [2, 3]], None), ([[0, 1, 3], [2, 3, 0]], None),
    # Of four ranks those of the same samples look like a group that shares them.
    ([[0], [0], [2], [3]], ("same samples", (0, 1))), ([[0], [1], [2], [1]], ("same samples", (1, 3))),
    ([[0], [0], [3], [3]], ("same samples", (0, 1, 2, 3))), ([[1], [1], [1], [2]], ("same samples", (0, 1, 2))),
    ([[3], [1], [0], [2]], None), ([[0, 1], [0, 1], [2, 3], [2, 3]], None), ([[0, 2], [1, 3], [0, 2], [1, 3]], None),
])  # fmt: skip
def test_a_sample_that_is_on_two_ranks_and_another_on_none(
    rows: list[list[int]], expected: tuple[str, tuple[int, ...]] | None, tmp_path: Path
) -> None:
    """More samples than there are may be twice: a sampler makes the ranks' shares even."""
    found = compared(tmp_path, given(IDS, HIDDEN), *(taken(own, 0) for own in rows))
    told = {(one.fault.kind, one.fault.ranks) for one in there(parallel(found.tensors, found.together)).faults
            if one.fault.kind == "same samples"} if found.together else set()  # fmt: skip
    assert told == ({expected} if expected is not None else set())


def test_shards_that_replicas_did_not_average_lie_where_their_mean_is_the_other_runs(tmp_path: Path) -> None:
    """Four ranks, two shards and two replicas: no two shards are alike, so that only their mean says whose is which."""
    whole = random(8, 16)
    first, second = whole.chunk(2)
    apart = 0.9 * torch.cat([first - second, first - second])  # so that each is nearer to the other shard
    found = gradients(tmp_path, whole, [*(whole + apart).chunk(2), *(whole - apart).chunk(2)])
    fault = there(there(there(found.first).ranks).fault)
    assert fault.kind == "not averaged"
    assert "0 and 2; 1 and 3" in fault.sentence
    assert fault.ranks == (0, 1, 2, 3)


def test_a_mean_within_groups_of_ranks_alone_is_told_with_the_groups(tmp_path: Path) -> None:
    whole, apart = random(8, 16), random(8, 16, seed=1)
    found = gradients(tmp_path, whole, [whole + apart, whole + apart, whole - apart, whole - apart])
    fault = there(there(there(found.first).ranks).fault)
    assert fault.kind == "not averaged"
    assert "only within groups of them (0 and 1; 2 and 3)" in fault.sentence


#: A router is given all tokens in a row: one sample after the other, or one token of all samples after the other.
ROWS = {"samples first": lambda x: x.flatten(0, 1), "tokens first": lambda x: x.transpose(0, 1).flatten(0, 1)}
TURNS = {"in turn": [list(range(8)), list(range(8, 16))],
         "in zigzag": [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]}  # fmt: skip


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("rows", ROWS)
def test_what_a_router_is_given_in_a_row_lies_as_the_tokens_of_all_samples(
    rows: str, turn: str, tmp_path: Path
) -> None:
    scores, name = random(4, 16, 5, seed=11), "layers.0.mlp.router.output"
    scores[1, 2, 3] = -torch.inf  # an expert that this token may not be sent to

    def routed(at: list[int], off: float = 0.0) -> dict[str, Any]:
        made = taken(at)
        made["modules"][name] = (ROWS[rows](scores[:, at]) + off).contiguous()
        return made

    one = routed(list(range(16)))
    assert compared(tmp_path / "right", one, *map(routed, TURNS[turn])).agrees
    found = compared(tmp_path / "wrong", one, routed(TURNS[turn][0]), routed(TURNS[turn][1], off=1.0))
    row = there(found.first)
    assert (row.name, there(row.ranks).parted) == (name, (1,))
