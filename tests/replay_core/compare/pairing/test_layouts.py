"""Healthy layouts of ranks: of tensors whose tokens lie on any axis, of meshes in any order, of several micro-batches;
and that a rank which holds something else is found in each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.compare import Comparison, compare_runs
from replay_core.dumps import open_run
from replay_core.recorder import Recorder
from tests.builders import there
from tests.replay_core.compare.ranks.recorded import random, write

IDS = torch.randint(2, 99, (4, 16), generator=torch.Generator().manual_seed(3))
HEADS, FIRST, STREAM = random(4, 4, 16, 6), random(16, 4, 8, seed=1), random(4, 16, 8, seed=2)
WIDE, WEIGHT = random(4, 16, 12, seed=4), random(12, 8, seed=5)
ZIGZAG = [torch.cat((chunks[rank], chunks[-1 - rank])) for chunks in [torch.arange(16).chunk(4)] for rank in range(2)]

Ranks = list[dict[str, Any]]


def held(samples: slice, tokens: torch.Tensor, tp: tuple[int, int] = (0, 1), *, sp: bool = False) -> dict[str, Any]:
    """What a rank records: with heads before tokens, tokens before samples, a residual stream (under sp a share of its
    tokens), and slices of an output and a weight.
    """
    own, many = tp
    mine = tokens.chunk(many)[own] if sp else tokens
    modules = {
        "layers.0.core.output": HEADS[samples].chunk(many, 1)[own][:, :, tokens],
        "layers.0.first.output": FIRST[tokens][:, samples],
        "layers.0.output": STREAM[samples][:, mine],
        "layers.0.up.output": WIDE[samples][:, tokens].chunk(many, 2)[own],
    }
    return {
        "batch_inputs": {"input_ids": IDS[samples][:, tokens].contiguous()},
        "modules": {name: values.contiguous() for name, values in modules.items()},
        "gradient": {"grad.layers.0.up.weight": WEIGHT.chunk(many)[own].contiguous()},
    }


ALL, TOKENS = slice(None), torch.arange(16)
HALVES = [slice(0, 2), slice(2, 4)]
ONE = [held(ALL, TOKENS)]
LAYOUTS: dict[str, Ranks] = {
    "cp in zigzag": [held(ALL, tokens) for tokens in ZIGZAG],
    "sp in cp in zigzag": [held(ALL, tokens, (tp, 2), sp=True) for tokens in ZIGZAG for tp in range(2)],
    "tp in dp": [held(half, TOKENS, (tp, 2)) for half in HALVES for tp in range(2)],
    "dp in tp": [held(half, TOKENS, (tp, 2)) for tp in range(2) for half in HALVES],
    "tp in cp in zigzag": [held(ALL, tokens, (tp, 2)) for tokens in ZIGZAG for tp in range(2)],
}
PAIRS = [
    *(("one", case) for case in LAYOUTS), ("tp in dp", "dp in tp"), ("tp in dp", "tp in cp in zigzag"),
    ("dp in tp", "tp in cp in zigzag"), ("cp in zigzag", "tp in dp"),
]  # fmt: skip


def both(directory: Path, a: Ranks, b: Ranks) -> Comparison:
    return compare_runs(open_run(write(directory / "a", *a)), open_run(write(directory / "b", *b)))


def ranks_of(case: str) -> Ranks:
    return ONE if case == "one" else LAYOUTS[case]


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_layouts_of_one_step_agree(a: str, b: str, tmp_path: Path) -> None:
    found = both(tmp_path, ranks_of(a), ranks_of(b))
    assert {row.name: row.reason for row in found.tensors if row.verdict.value not in ("SAME", "CLOSE")} == {}
    assert {row.name for row in found.tensors} >= {*ONE[0]["modules"], *ONE[0]["gradient"]}
    assert not found.skipped


@pytest.mark.parametrize(("a", "b"), PAIRS)
@pytest.mark.parametrize("name", [*ONE[0]["modules"], *ONE[0]["gradient"]])
def test_what_the_last_rank_of_them_has_otherwise_is_found(a: str, b: str, name: str, tmp_path: Path) -> None:
    ranks = ranks_of(b)
    stage = "gradient" if name.startswith("grad.") else "modules"
    wrong = {**ranks[-1], stage: {**ranks[-1][stage], name: ranks[-1][stage][name] + 1}}
    found = both(tmp_path, ranks_of(a), [*ranks[:-1], wrong])
    assert name in {row.name for row in found.tensors if row.verdict.diverges}


def test_a_stale_slice_is_its_ranks_where_data_parallel_ranks_come_first(tmp_path: Path) -> None:
    ranks = LAYOUTS["dp in tp"]
    stale = {**ranks[2], "gradient": {name: 1.1 * values for name, values in ranks[2]["gradient"].items()}}
    row = there(both(tmp_path, ONE, [*ranks[:2], stale, ranks[3]]).first)
    assert there(row.ranks).parted == (2,)


# ---- several micro-batches


#: Of a rank its samples, and the layers of its stage.
Stage = tuple[slice, tuple[str, ...]]


def accumulated(
    directory: Path, micros: int, ranks: Sequence[Stage], odd: float = 0.0, temperature: float = 1.0
) -> Path:
    """A step in so many micro-batches; of every rank, which samples it has, and which modules its stage has.

    odd: what is added to the last layer's output of the last rank's last micro-batch.
    """
    for rank, (samples, layers) in enumerate(ranks):
        with Recorder(directory) as recorder, recorder.step(0, rank=rank) as record:
            rows = torch.arange(4)[samples].chunk(micros)
            for micro, own in enumerate(rows):
                outputs = {f"layers.{layer}.output": STREAM[own] + int(layer) for layer in layers}
                if rank == len(ranks) - 1 and micro == micros - 1:
                    outputs[f"layers.{layers[-1]}.output"] = outputs[f"layers.{layers[-1]}.output"] + odd
                record("batch_inputs", {"input_ids": IDS[own].contiguous()}, micro=micro)
                record("modules", outputs, micro=micro)
                if layers[-1] == "1":
                    # A share of the tokens' sum and a largest value, of each micro-batch alone; a setting of them all.
                    loss = STREAM[own].abs().sum() / STREAM.abs().sum()
                    said = {"loss": loss, "most": STREAM[own].max(), "temperature": torch.tensor(temperature)}
                    record("loss", said, micro=micro)
            record("gradient", {f"grad.layers.{layer}.norm.weight": WEIGHT[0] + int(layer) for layer in layers})
    return directory


MICROS: dict[str, list[Stage]] = {
    "a pipeline": [(ALL, ("0",)), (ALL, ("1",))],
    "a pipeline of two ranks a stage": [(half, (layer,)) for layer in "01" for half in HALVES],
    "data parallel": [(half, ("0", "1")) for half in HALVES],
}
WHOLE: list[Stage] = [(ALL, ("0", "1"))]


@pytest.mark.parametrize("case", MICROS)
def test_micro_batches_of_ranks_face_the_one_of_the_other_run(case: str, tmp_path: Path) -> None:
    a, b = accumulated(tmp_path / "a", 1, WHOLE), accumulated(tmp_path / "b", 2, MICROS[case])
    found = compare_runs(open_run(a), open_run(b))
    assert {row.name: row.reason for row in found.tensors if row.verdict.value not in ("SAME", "CLOSE")} == {}
    assert {row.name for row in found.tensors} >= {"layers.0.output", "layers.1.output", "temperature", "loss"}
    row = next(row for row in found.tensors if row.name == "layers.1.output")
    assert [there(side)[1].shape for side in (row.a, row.b)] == [(4, 16, 8)] * 2
    # A largest value is no way's: a note, for the gradients that follow from all of it agree.
    assert any("most is not compared" in note and "said of each micro-batch" in note for note in found.notes)
    assert not found.skipped
    assert found.agrees
    assert any("are put together" in note for note in found.notes)


@pytest.mark.parametrize("which", ["a", "b"])
def test_a_setting_of_all_micro_batches_is_never_their_sum(which: str, tmp_path: Path) -> None:
    said = {"a": 1.0, "b": 1.0, which: 2.0}
    a = accumulated(tmp_path / "a", 1, WHOLE, temperature=said["a"])
    b = accumulated(tmp_path / "b", 2, MICROS["data parallel"], temperature=said["b"])
    found = compare_runs(open_run(a), open_run(b))
    assert [row.name for row in found.tensors if row.verdict.value == "DIFF"] == ["temperature"]


def test_what_no_run_lays_together_is_skipped_by_name(tmp_path: Path) -> None:
    """Of every micro-batch its text, its gradient and an expert's rows; all of them differ."""
    for directory, seed, ranks in ((tmp_path / "a", 0, HALVES), (tmp_path / "b", 9, [ALL])):
        for rank, samples in enumerate(ranks):
            with Recorder(directory) as recorder, recorder.step(0, rank=rank) as record:
                for micro, own in enumerate(torch.arange(4)[samples].chunk(2 * (3 - len(ranks)))):
                    number = seed + 2 * rank + micro
                    record("batch_inputs", {"input_ids": IDS[own], "prompt_text": f"text {number}"}, micro=micro)
                    rows = {"layers.0.output": STREAM[own], "layers.0.mlp.experts.0.output": random(3, 8, seed=number)}
                    record("modules", rows, micro=micro)
                    record("gradient", {"grad.layers.0.norm.weight": random(8, seed=number)}, micro=micro)
    found = compare_runs(open_run(tmp_path / "a"), open_run(tmp_path / "b"))
    assert {row.name for row in found.skipped} >= {
        "prompt_text", "layers.0.mlp.experts.0.output", "grad.layers.0.norm.weight",
    }  # fmt: skip
    assert found.agrees is None
    assert "layers.0.output" in {row.name for row in found.tensors}


def test_counts_of_each_micro_batch_are_no_settings(tmp_path: Path) -> None:
    for directory, micros, ranks in ((tmp_path / "a", 1, [ALL]), (tmp_path / "b", 2, HALVES)):
        for rank, samples in enumerate(ranks):
            with Recorder(directory) as recorder, recorder.step(0, rank=rank) as record:
                for micro, own in enumerate(torch.arange(4)[samples].chunk(micros)):
                    record("batch_inputs", {"input_ids": IDS[own]}, micro=micro)
                    record("loss", {"num_tokens": torch.tensor(16 * len(own))}, micro=micro)
    found = compare_runs(open_run(tmp_path / "a"), open_run(tmp_path / "b"))
    assert [row.name for row in found.skipped] == ["num_tokens"]
    assert found.agrees is None


@pytest.mark.parametrize("case", MICROS)
def test_what_is_off_in_one_micro_batch_of_one_rank_is_found(case: str, tmp_path: Path) -> None:
    a, b = accumulated(tmp_path / "a", 1, WHOLE), accumulated(tmp_path / "b", 2, MICROS[case], odd=1.0)
    row = there(compare_runs(open_run(a), open_run(b)).first)
    assert row.name == "layers.1.output"
    assert there(row.ranks).parted == (len(MICROS[case]) - 1,)


def test_micro_batches_of_other_samples_are_not_put_together(tmp_path: Path) -> None:
    """Both ranks have the first two samples: half of what the other run has is in no micro-batch."""
    b = accumulated(tmp_path / "b", 2, [(HALVES[0], ("0", "1"))] * 2)
    found = compare_runs(open_run(accumulated(tmp_path / "a", 1, WHOLE)), open_run(b))
    assert not any("micro-batches 0 and 1 of b are put together" in note for note in found.notes)


@pytest.mark.parametrize("are_ids_swapped", [True, False])
def test_a_stage_that_was_handed_another_micro_batch_has_other_samples(are_ids_swapped: bool, tmp_path: Path) -> None:
    """The later stage takes up its tokens in another turn than its activations, or one activation for both."""
    a = accumulated(tmp_path / "a", 1, WHOLE)
    for rank in range(2):
        with Recorder(tmp_path / "b") as recorder, recorder.step(0, rank=rank) as record:
            for micro, rows in enumerate(torch.arange(4).chunk(2)):
                own = rows if not (rank and are_ids_swapped) else (rows + 2) % 4
                handed = rows if not rank or are_ids_swapped else torch.arange(2)
                record("batch_inputs", {"input_ids": IDS[own].contiguous()}, micro=micro)
                record("modules", {f"layers.{rank}.output": STREAM[handed] + rank}, micro=micro)
            record("gradient", {f"grad.layers.{rank}.norm.weight": WEIGHT[0] + rank})
    found = compare_runs(open_run(a), open_run(tmp_path / "b"))
    row = there(found.first)
    assert row.name == "layers.1.output"
    fault = there(there(row.ranks).fault)
    assert (fault.kind, fault.ranks) == ("other samples", (1,))
