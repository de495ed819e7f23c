"""Weights that are cut along two axes of ranks, and tokens that a pipeline's ranks share: healthy layouts, of which a
rank that holds something else is still found.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.compare import Comparison, compare_runs
from replay_core.dumps import open_run
from tests.replay_core.compare.ranks.recorded import random, write

IDS = torch.randint(2, 99, (4, 16), generator=torch.Generator().manual_seed(3))
LAYERS = 2
UP = [random(16, 8, seed=layer) for layer in range(LAYERS)]
DOWN = [random(8, 16, seed=10 + layer) for layer in range(LAYERS)]
WIDE = [random(4, 16, 16, seed=20 + layer) for layer in range(LAYERS)]
STREAM = [random(4, 16, 8, seed=30 + layer) for layer in range(LAYERS)]

Rank = dict[str, dict[str, Any]]


def rank(
    *, dp: tuple[int, int] = (0, 1), tp: tuple[int, int] = (0, 1), layers: range = range(LAYERS),
    is_sharded: bool = False, sp: bool = False,
) -> Rank:  # fmt: skip
    """What a rank records of these layers: samples by dp, features and rows by tp, weights once more by dp."""
    own = torch.arange(4).chunk(dp[1])[dp[0]]

    def shard(x: torch.Tensor) -> torch.Tensor:
        return x.chunk(dp[1])[dp[0]].contiguous() if is_sharded else x.contiguous()

    modules, weights = {}, {}
    for layer in layers:
        stream = STREAM[layer][own]
        modules[f"layers.{layer}.up.output"] = WIDE[layer][own].chunk(tp[1], 2)[tp[0]].contiguous()
        modules[f"layers.{layer}.output"] = (stream.chunk(tp[1], 1)[tp[0]] if sp else stream).contiguous()
        weights[f"layers.{layer}.up.weight"] = shard(UP[layer].chunk(tp[1])[tp[0]])
        weights[f"layers.{layer}.down.weight"] = shard(DOWN[layer].chunk(tp[1], 1)[tp[0]])
    return {
        "batch_inputs": {"input_ids": IDS[own].contiguous()},
        "modules": modules,
        "gradient": {f"grad.{name}": 2 * x for name, x in weights.items()},
        "param": {f"param.{name}": x for name, x in weights.items()},
    }


TWO = range(2)
DP2 = [rank(dp=(dp, 2)) for dp in TWO]
TP2 = [rank(tp=(tp, 2)) for tp in TWO]
SHARDED = {
    "tp in dp": [rank(dp=(dp, 2), tp=(tp, 2), is_sharded=True) for dp in TWO for tp in TWO],
    "dp in tp": [rank(dp=(dp, 2), tp=(tp, 2), is_sharded=True) for tp in TWO for dp in TWO],
}
STAGES = [
    rank(dp=(dp, 2), tp=(tp, 2), layers=range(stage, stage + 1), sp=True) for stage in TWO for dp in TWO for tp in TWO
]
ROWS = {many: [rank(dp=(dp, many), is_sharded=True) for dp in range(many)] for many in (2, 4)}
#: Of two of these no rank of either run has any weight whole.
OF_SLICES = {
    "sharded tp in dp": SHARDED["tp in dp"], "stages of sp in dp": STAGES, "tp2": TP2, "fsdp2": ROWS[2],
    "fsdp4": ROWS[4], "tp in dp": [rank(dp=(dp, 2), tp=(tp, 2)) for dp in TWO for tp in TWO],
}  # fmt: skip
CASES: dict[str, tuple[list[Rank], list[Rank]]] = {
    **{f"one against {name}": ([rank()], ranks) for name, ranks in SHARDED.items()},
    **{f"dp2 against {name}": (DP2, ranks) for name, ranks in SHARDED.items()},
    "tp2 against stages of sp in dp": (TP2, STAGES),
    "one against stages of sp in dp": ([rank()], STAGES),
    **{f"{a} against {b}": (OF_SLICES[a], OF_SLICES[b]) for a, b in (
        ("sharded tp in dp", "stages of sp in dp"), ("tp2", "sharded tp in dp"), ("fsdp2", "sharded tp in dp"),
        ("fsdp4", "sharded tp in dp"), ("fsdp2", "tp2"), ("tp in dp", "sharded tp in dp"),
    )},
}  # fmt: skip


def both(folder: Path, a: list[Rank], b: list[Rank]) -> Comparison:
    return compare_runs(open_run(write(folder / "a", *a)), open_run(write(folder / "b", *b)))


@pytest.mark.parametrize("case", CASES)
def test_layouts_of_two_cuts_agree(case: str, tmp_path: Path) -> None:
    found = both(tmp_path, *CASES[case])
    assert {row.name: row.reason for row in found.tensors if row.verdict.value not in ("SAME", "CLOSE")} == {}
    names = {row.name for row in found.tensors}
    assert names >= {*rank()["modules"], *rank()["gradient"], *rank()["param"]}
    assert not found.skipped


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stage", ["modules", "gradient", "param"])
def test_what_a_rank_of_them_has_otherwise_is_found(case: str, stage: str, tmp_path: Path) -> None:
    a, b = CASES[case]
    name = list(b[-1][stage])[-1]
    wrong = {**b[-1], stage: {**b[-1][stage], name: b[-1][stage][name] + 1}}
    found = both(tmp_path, a, [*b[:-1], wrong])
    assert name in {row.name for row in found.tensors if row.verdict.diverges}


@pytest.mark.parametrize("case", ["one against tp in dp", "dp2 against tp in dp"])
def test_a_gradient_that_two_ranks_have_exchanged_is_another(case: str, tmp_path: Path) -> None:
    a, b = CASES[case]
    name = "grad.layers.0.up.weight"
    other = {1: 2, 2: 1}
    ranks = [
        {**own, "gradient": {**own["gradient"], name: b[other.get(at, at)]["gradient"][name]}}
        for at, own in enumerate(b)
    ]
    assert name in {row.name for row in both(tmp_path, a, ranks).tensors if row.verdict.diverges}


def only_weights(ranks: list[Rank]) -> list[Rank]:
    return [{"param": own["param"]} for own in ranks]


TP4 = [rank(tp=(tp, 4)) for tp in range(4)]


@pytest.mark.parametrize("others", [TP4, ROWS[4], only_weights(TP4)], ids=["tp4", "fsdp4", "tp4, weights alone"])
@pytest.mark.parametrize("one", [[rank()], TP2, ROWS[2], DP2], ids=["one", "tp2", "fsdp2", "dp2"])
def test_slices_of_ranks_of_one_axis_lie_in_their_turn(one: list[Rank], others: list[Rank], tmp_path: Path) -> None:
    """Slices of all layers that two ranks have exchanged are no other layout, where no other axis is there."""
    one = one if "batch_inputs" in others[0] else only_weights(one)
    healthy = both(tmp_path / "healthy", one, others)
    assert not [row.name for row in healthy.tensors if row.verdict.diverges]
    exchanged = [others[{1: 2, 2: 1}.get(at, at)] for at in range(4)]
    ranks = [
        {**own, **{stage: wrong[stage] for stage in ("gradient", "param") if stage in own}}
        for own, wrong in zip(others, exchanged, strict=True)
    ]
    found = both(tmp_path / "exchanged", one, ranks)
    assert len([row.name for row in found.tensors if row.verdict.diverges]) >= 2
