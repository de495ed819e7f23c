"""An engine's ranks in tensor parallel are ruled as the one model that they are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from replay_core import workbench
from replay_core.documents.ruling import RulingDocument
from replay_core.dumps import open_run
from replay_core.recorder import Recorder
from replay_core.referee.recorded import Recorded, ruled_first
from tests.engine import Engine, Part, tiny_llama

LENGTHS = (14, 9, 17)
Plant = Callable[[list[Engine]], None]


class _Together:
    """All-reduce between threads, each of which is a rank: sums in float32, in the order of ranks."""

    def __init__(self, ranks: int) -> None:
        self.given: list[Tensor] = [torch.empty(0)] * ranks
        self.barrier = threading.Barrier(ranks)

    def all_reduce(self, rank: int) -> Callable[[Tensor], Tensor]:
        def add(mine: Tensor) -> Tensor:
            self.given[rank] = mine
            self.barrier.wait(60)
            whole = torch.stack([one.float() for one in self.given]).sum(0).to(mine.dtype)
            self.barrier.wait(60)
            return whole

        return add


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("weights") / "model")


def _served(weights: Path, folder: Path, ranks: int, plant: Plant | None = None) -> Path:
    """Every rank a thread that runs its part of the model and records what it has."""
    theirs = LlamaForCausalLM.from_pretrained(weights, dtype=torch.bfloat16)
    together = _Together(ranks)
    engines = [Engine(theirs, Part(rank, ranks, together.all_reduce(rank))).eval() for rank in range(ranks)]
    if plant is not None:
        with torch.no_grad():
            plant(engines)
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(1, 96, (length,), generator=generator) for length in LENGTHS]
    bounds = [0, *accumulate(LENGTHS)]
    ids, positions = torch.cat(rows), torch.cat([torch.arange(length) for length in LENGTHS])

    def serve(rank: int) -> None:
        with Recorder(folder) as recorder, recorder.step(0, rank=rank) as step, torch.no_grad():
            with step.modules(engines[rank], inputs=True, micro=0):
                engines[rank](ids, positions, bounds)
            step("forward_data", input_ids=ids, position_ids=positions, cu_seqlens=torch.tensor(bounds), micro=0)

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(serve, range(ranks)))
    return folder


def _ruled(weights: Path, dump: Path) -> RulingDocument:
    return workbench.referee(dump, weights_a=str(weights))


def test_columns_of_every_rank_make_up_a_tensor_and_heads_of_keys_that_several_hold_stand_once(
    weights: Path, tmp_path: Path
):
    run = open_run(_served(weights, tmp_path / "b", 4))
    recorded = Recorded(run, *ruled_first(run.records))
    tokens = recorded.grid_shape
    assert [rank.place.rank for rank in recorded.ranks] == [0, 1, 2, 3]
    for name, width in (("q_proj", 64), ("k_proj", 32), ("v_proj", 32)):
        grid = recorded.grid_of(f"layers.0.self_attn.{name}.output", (*tokens, width))
        assert grid is not None
        assert grid.shape == (*tokens, width)
    assert recorded.grid_of("layers.0.self_attn.q_proj.output", (*tokens, 80)) is None


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_compute_rightly_are_noise_and_every_part_is_ruled(weights: Path, tmp_path: Path, ranks: int):
    doc = _ruled(weights, _served(weights, tmp_path / "b", ranks))
    assert doc["ruling"] == "NOISE", doc["sentence"]
    coverage = doc["a"]["coverage"]
    assert coverage is not None
    assert coverage["misfit"] == []
    ruled = {one["tensor"] for one in doc["a"]["tensors"]}
    assert {f"layers.{layer}.{name}" for layer in (0, 1) for name in (
        "self_attn.q_proj.output", "self_attn.k_proj.output", "self_attn.o_proj.inputs.0", "self_attn.o_proj.output",
        "mlp.gate_proj.output", "mlp.down_proj.inputs.0", "mlp.down_proj.output")} <= ruled  # fmt: skip
    assert any("put together" in note for note in doc["a"]["notes"])


def _swapped_parts(engines: list[Engine]) -> None:
    first, second = (one.model.layers[1].mlp.down_proj for one in engines)
    first.weight, second.weight = second.weight, first.weight


def _one_rank_scaled(engines: list[Engine]) -> None:
    engines[1].model.layers[0].self_attn.qkv_proj.weight[3] *= 1.05


def _one_ranks_norm_is_stale(engines: list[Engine]) -> None:
    engines[1].model.layers[1].input_layernorm.weight *= 1.02


def _added_later(engines: list[Engine]) -> None:
    """As sglang does: the MLP's product stays a summand of its rank, and is added behind the MLP."""
    for engine in engines:
        mlp = engine.model.layers[0].mlp
        all_reduce, mlp.down_proj.all_reduce = mlp.down_proj.all_reduce, None
        mlp.register_forward_hook(lambda _module, _args, out, add=all_reduce: add(out))


@pytest.mark.long
def test_summands_that_are_added_behind_a_module_are_ruled_as_their_sum(weights: Path, tmp_path: Path):
    doc = _ruled(weights, _served(weights, tmp_path / "b", 2, _added_later))
    assert doc["ruling"] == "NOISE", doc["sentence"]
    assert "layers.0.mlp.down_proj.output: ranks hold a summand each, and their sum is ruled" in doc["a"]["notes"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("plant", "module", "words"),
    [
        (_swapped_parts, "layers.1.mlp.down_proj", ""),
        (_one_rank_scaled, "layers.0.self_attn.q_proj", "channel 35"),
        (_one_ranks_norm_is_stale, "layers.1.input_layernorm", "1.02"),
    ],
    ids=["shards swapped", "a rank's rows", "a rank's norm"],
)
def test_the_fault_of_one_rank_is_named_by_its_module(
    weights: Path, tmp_path: Path, plant: Plant, module: str, words: str
):
    doc = _ruled(weights, _served(weights, tmp_path / "b", 2, plant))
    assert (doc["ruling"], doc["module"]) == ("BUG", module), doc["sentence"]
    assert words in (doc["what"] or ""), doc["what"]
