"""A rank's contribution and an expert's tokens, told by what a difference or a gradient is made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from replay_core.compare import Comparison
from replay_core.compare.parallel import Parallel, parallel
from tests.builders import there
from tests.replay_core.compare.ranks.recorded import compared, random

RANKS, HIDDEN, WIDE, TOKENS = 4, 16, 32, 24


def found(compared: Comparison) -> Parallel:
    return there(parallel(compared.tensors, compared.together))


def kinds(compared: Comparison) -> set[tuple[str, tuple[int, ...]]]:
    return {(one.fault.kind, one.fault.ranks) for one in found(compared).faults}


def parts_of(weight_HW: Tensor) -> list[Tensor]:
    """What each rank adds: its slice of the inputs through its slice of the weight."""
    inputs_NW = random(TOKENS, WIDE, seed=5)
    slices = zip(inputs_NW.chunk(RANKS, 1), weight_HW.chunk(RANKS, 1), strict=True)
    return [x @ w.T for x, w in slices]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("times", [0.0, 2.0, 0.5])
def test_a_contribution_that_is_missing_within_a_forward_is_the_ranks_whose_slice_it_came_through(
    times: float, transposed: bool, tmp_path: Path
) -> None:
    weight_HW = random(HIDDEN, WIDE)
    parts, before = parts_of(weight_HW), random(TOKENS, HIDDEN, seed=9)
    right, wrong = before + sum(parts), before + sum(parts) + (times - 1) * parts[2]
    whole = weight_HW.T.contiguous() if transposed else weight_HW
    cut = [one.contiguous() for one in whole.chunk(RANKS, 0 if transposed else 1)]
    one = {"modules": {"layers.0.output": right}, "param": {"param.layers.0.mlp.down.weight": whole}}
    ranks = [{"modules": {"layers.0.output": wrong}, "param": {"param.layers.0.mlp.down.weight": w}} for w in cut]
    assert kinds(compared(tmp_path, one, *ranks)) == {("contribution", (2,))}


@pytest.mark.parametrize("how", ["all ranks", "anything"])
def test_what_did_not_come_through_one_ranks_slice_is_nobodys_contribution(how: str, tmp_path: Path) -> None:
    weight_HW = random(HIDDEN, WIDE)
    parts, before = parts_of(weight_HW), random(TOKENS, HIDDEN, seed=9)
    off = 0.1 * sum(parts) if how == "all ranks" else random(TOKENS, HIDDEN, seed=7)
    one = {"modules": {"layers.0.output": before + sum(parts)}, "param": {"param.layers.0.mlp.down.weight": weight_HW}}
    ranks = [
        {"modules": {"layers.0.output": before + sum(parts) + off},
         "param": {"param.layers.0.mlp.down.weight": w.contiguous()}}
        for w in weight_HW.chunk(RANKS, 1)
    ]  # fmt: skip
    assert not any(kind == "contribution" for kind, _ in kinds(compared(tmp_path, one, *ranks)))


def experts(tokens: list[Tensor], seed: int) -> dict[str, Tensor]:
    """Gradients of experts' weights, each made of what went into its tokens and what came back to them."""
    return {
        f"grad.layers.1.mlp.experts.{number}.up.weight": random(WIDE, len(x), seed=seed + number) @ x
        for number, x in enumerate(tokens)
    }


def routed() -> list[Tensor]:
    return [random(6 + number, HIDDEN, seed=20 + number) for number in range(4)]


def test_experts_that_were_given_another_ranks_tokens_are_named(tmp_path: Path) -> None:
    """Four experts on two ranks; each is given the tokens of the one of its number on the other rank."""
    tokens = routed()
    right, wrong = experts(tokens, 0), experts([tokens[2], tokens[3], tokens[0], tokens[1]], 50)
    names = list(right)
    ranks = [{"gradient": {name: wrong[name] for name in mine}} for mine in (names[:2], names[2:])]
    said = found(compared(tmp_path, {"gradient": right}, *ranks))
    assert {(one.fault.kind, one.fault.ranks) for one in said.faults} == {("other tokens", (0, 1))}
    assert "experts.3.up.weight's gradient on rank 1 is made of the tokens that the other run gave to " in (
        said.faults[0].fault.sentence
    )
    assert said.faults[0].tensors == 4


def test_an_experts_gradient_of_its_own_tokens_is_not_another_experts(tmp_path: Path) -> None:
    tokens = routed()
    right, wrong = experts(tokens, 0), experts(tokens, 50)
    names = list(right)
    ranks = [{"gradient": {name: wrong[name] for name in mine}} for mine in (names[:2], names[2:])]
    assert not any(kind == "other tokens" for kind, _ in kinds(compared(tmp_path, {"gradient": right}, *ranks)))


def test_a_bias_that_each_rank_adds_before_the_sum_is_named(tmp_path: Path) -> None:
    weight_HW, bias_H = random(HIDDEN, WIDE), random(HIDDEN, seed=3)
    right = random(TOKENS, HIDDEN, seed=9) + sum(parts_of(weight_HW)) + bias_H
    given = {"input_ids": torch.arange(TOKENS)[None]}
    one = {"batch_inputs": given, "modules": {"layers.0.output": right[None]}, "param": {"param.layers.0.b": bias_H}}
    rank = {**one, "modules": {"layers.0.output": right[None] + 3 * bias_H}}
    assert kinds(compared(tmp_path, one, *[rank] * 4)) == {("too much", (0, 1, 2, 3))}


@pytest.mark.parametrize(("times", "kind"), [(1, "not summed"), (2, "not averaged")])
def test_slices_of_which_replicas_kept_their_own_are_named(times: int, kind: str, tmp_path: Path) -> None:
    """Two tensor-parallel ranks, twice: each of the four kept the gradient of its own samples."""
    own = [random(8, 12, seed=1), random(8, 12, seed=2)]
    whole = (own[0] + own[1]) / times
    ranks = [{"gradient": {"grad.w": replica.chunk(2)[tp].contiguous()}} for replica in own for tp in range(2)]
    found_kinds = kinds(compared(tmp_path, {"gradient": {"grad.w": whole}}, *ranks))
    assert found_kinds == {(kind, (0, 1, 2, 3))}


def test_what_is_off_for_the_words_of_one_rank_alone_is_that_ranks(tmp_path: Path) -> None:
    logits = random(2, 9, 12)
    labels = torch.arange(18).reshape(2, 9) % 12
    right = -logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    wrong = right + (labels >= 6) * random(2, 9, seed=4)
    given = {"input_ids": torch.arange(18).reshape(2, 9), "labels": labels}
    one = {"batch_inputs": given, "modules": {"forward.output.logits": logits, "forward.output.nll": right}}
    ranks = [
        {"batch_inputs": given,
         "modules": {"forward.output.logits": logits.chunk(2, -1)[rank].contiguous(), "forward.output.nll": wrong}}
        for rank in range(2)
    ]  # fmt: skip
    assert kinds(compared(tmp_path, one, *ranks)) == {("vocabulary slice", (1,))}


@pytest.mark.parametrize("is_whole", [True, False], ids=["gathered", "slices"])
@pytest.mark.parametrize("rows", [slice(8, 12), slice(7, 12)], ids=["one shard", "more than it"])
def test_a_stale_shard_is_told_by_the_channels_that_it_makes(is_whole: bool, rows: slice, tmp_path: Path) -> None:
    weight_OI, x_NI = random(16, 24), random(2, 12, 24, seed=1)
    stale_OI = weight_OI.clone()
    stale_OI[rows] *= 1.05
    held = [stale_OI] * RANKS if is_whole else list(stale_OI.chunk(RANKS))

    def step(weight: Tensor, kept: Tensor) -> dict[str, dict[str, Tensor]]:
        made = {"layers.0.mlp.up_proj.output": x_NI @ weight.T}
        return {"modules": made, "param": {"param.layers.0.mlp.up_proj.weight": kept.contiguous()}}

    told = kinds(compared(tmp_path, step(weight_OI, weight_OI), *(step(stale_OI, one) for one in held)))
    assert (("apart", (2,)) in told) is (rows == slice(8, 12))


SHARDS: dict[str, tuple[list[int | None], set[tuple[str, tuple[int, ...]]]]] = {
    "swapped": ([1, 0], {("order", (0, 1))}), "the first twice": ([0, 0], {("held twice", (0, 1))}),
    "another": ([0, None], set()),
}  # fmt: skip


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("case", SHARDS)
def test_shards_of_a_gathered_weight_that_are_other_ranks(case: str, has_bias: bool, tmp_path: Path) -> None:
    """Data-parallel ranks that compute with the same weight, gathered of shards of its rows."""
    stands, expected = SHARDS[case]
    weight_OI, x_BSI, bias_O = random(16, 24), random(4, 6, 24, seed=1), has_bias * random(16, seed=2)
    ids = torch.arange(24).reshape(4, 6)
    shards = [*weight_OI.chunk(2), random(8, 24, seed=9)]
    wrong_OI = torch.cat([shards[2 if one is None else one] for one in stands])

    def step(rows: slice, weight: Tensor) -> dict[str, dict[str, Tensor]]:
        made = (x_BSI @ weight.T + bias_O)[rows].contiguous()
        return {"batch_inputs": {"input_ids": ids[rows]}, "modules": {"layers.0.mlp.up.output": made}}

    halves = [slice(0, 2), slice(2, 4)]
    told = kinds(compared(tmp_path, step(slice(None), weight_OI), *(step(half, wrong_OI) for half in halves)))
    assert told == expected
