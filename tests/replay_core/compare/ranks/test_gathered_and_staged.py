"""What ranks hold of all tokens though they compute some, what stages of a pipeline return, and who sees otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from replay_core import workbench
from replay_core.compare import compare_runs
from replay_core.compare.parallel import parallel
from replay_core.dumps import open_run
from replay_core.export.outcome import exit_code
from replay_core.recorder import Recorder
from tests.builders import there
from tests.replay_core.compare.ranks.recorded import Step, compared, random, write

IDS = torch.randint(2, 99, (4, 16), generator=torch.Generator().manual_seed(3))
HIDDEN, KEYS = random(4, 16, 8), random(4, 16, 4, 6, seed=4)
CHUNKS = torch.arange(16).chunk(4)
ZIGZAG = [torch.cat((CHUNKS[0], CHUNKS[3])), torch.cat((CHUNKS[1], CHUNKS[2]))]
GATHERED = torch.cat(ZIGZAG)


def rank(rows: list[int], at: Tensor, keys: Tensor, *, states_positions: bool = False) -> Step:
    """states_positions: beside its tokens, as ranks with some of them do."""
    given = {"input_ids": IDS[rows][:, at].contiguous()}
    if states_positions:
        given["position_ids"] = at[None].expand(len(rows), -1).contiguous()
    modules = {
        "layers.0.attn.core.inputs.1": keys[rows].contiguous(),
        "layers.0.output": HIDDEN[rows][:, at].contiguous(),
    }
    return {"forward_data": given, "modules": modules}


def shared(rows: list[list[int]], keys: Tensor, heads: int = 1) -> list[Step]:
    """Groups of samples, each of two ranks that share their tokens in zigzag; heads: among how many keys' are cut."""
    return [
        rank(own, at, keys.chunk(heads, 2)[part], states_positions=True)
        for own in rows for at in ZIGZAG for part in range(heads)
    ]  # fmt: skip


def by_heads(keys: Tensor) -> list[Step]:
    """Ranks that compute tokens in order and have all tokens of some heads (Ulysses)."""
    halves = torch.arange(16).chunk(2)
    return [
        rank([0, 1, 2, 3], at, part, states_positions=True) for at, part in zip(halves, keys.chunk(2, 2), strict=True)
    ]


EVERY = torch.arange(16)
LAID: dict[str, tuple[list[Step], list[Step]]] = {
    "one process": ([rank([0, 1, 2, 3], EVERY, KEYS)], shared([[0, 1, 2, 3]], KEYS[:, GATHERED])),
    "samples too": ([rank([0, 1, 2, 3], EVERY, KEYS)], shared([[0, 1], [2, 3]], KEYS[:, GATHERED])),
    "ranks with samples": (
        [rank([0, 1], EVERY, KEYS), rank([2, 3], EVERY, KEYS)], shared([[0, 1], [2, 3]], KEYS[:, GATHERED]),
    ),
    "heads too": ([rank([0, 1, 2, 3], EVERY, KEYS)], shared([[0, 1, 2, 3]], KEYS[:, GATHERED], heads=2)),
    "heads of all tokens": (shared([[0, 1, 2, 3]], KEYS[:, GATHERED]), by_heads(KEYS)),
    "laid in turn": ([rank([0, 1, 2, 3], EVERY, KEYS)], shared([[0, 1, 2, 3]], KEYS)),
}  # fmt: skip


@pytest.mark.parametrize("case", LAID)
def test_keys_that_were_gathered_are_laid_as_tokens_follow_each_other(case: str, tmp_path: Path) -> None:
    of_a, of_b = LAID[case]
    a, b = write(tmp_path / "a", *of_a), write(tmp_path / "b", *of_b)
    result = compare_runs(open_run(a), open_run(b))
    assert result.agrees, [(row.name, row.reason) for row in result.tensors if row.verdict.diverges]
    assert exit_code(workbench.compare_dumps(a, b)) == 0
    assert any("position_ids, which b alone has" in note for note in result.notes) == (case != "heads of all tokens")


def test_keys_that_are_others_are_off(tmp_path: Path) -> None:
    wrong = KEYS[:, GATHERED].clone()
    wrong[:, 5] += 1
    result = compared(tmp_path, rank([0, 1, 2, 3], EVERY, KEYS), *shared([[0, 1, 2, 3]], wrong))
    assert [row.name for row in result.tensors if row.verdict.diverges] == ["layers.0.attn.core.inputs.1"]


def test_positions_that_are_no_places_are_missing(tmp_path: Path) -> None:
    ranks = shared([[0, 1, 2, 3]], KEYS[:, GATHERED])
    ranks[1]["forward_data"]["position_ids"] = ranks[1]["forward_data"]["position_ids"] - 4  # type: ignore[index]
    result = compared(tmp_path, rank([0, 1, 2, 3], EVERY, KEYS), *ranks)
    assert [row.name for row in result.tensors if row.verdict.value == "MISSING"] == ["position_ids"]


def staged(folder: Path, micros: list[list[int]], stages: int, off: float = 0.0, *, counts_on: bool = False) -> Path:
    """A model of four layers that returns what each put out, on so many stages. off: of what the last returns.
    counts_on: a stage numbers its own on from those of the stage before.
    """
    states = [random(4, 16, 8, seed=20 + layer) for layer in range(4)]
    for micro, rows in enumerate(micros):
        for number, layers in enumerate(torch.arange(4).chunk(stages)):
            own = [states[int(layer)][rows].contiguous() for layer in layers]
            is_last = number == stages - 1
            first = int(layers[0]) if counts_on else 0
            made: dict[str, Any] = {f"forward.output.hidden_states.{at}": one for at, one in enumerate(own, first)}
            if is_last:
                made[f"forward.output.hidden_states.{first + len(own) - 1}"] = own[-1] + off
                made["forward.output.logits"] = own[-1] @ random(8, 12, seed=3)
            elif not counts_on:
                made["forward.output.hidden"] = own[-1]
            given: dict[str, Any] = {"attention_mask": torch.ones(len(rows), 16, dtype=torch.int64)}
            if number:
                given["hidden_states"] = states[int(layers[0]) - 1][rows].contiguous()
            else:
                given["input_ids"] = IDS[rows]
            with Recorder(folder) as recorder, recorder.step(0, rank=number) as record:
                record("batch_inputs", given, micro=micro)
                record("modules", made, micro=micro)
    return folder


@pytest.mark.parametrize("counts_on", [False, True])
@pytest.mark.parametrize("stages", [2, 4])
def test_what_stages_return_one_by_one_is_numbered_as_of_one_process(
    stages: int, counts_on: bool, tmp_path: Path
) -> None:
    a = staged(tmp_path / "a", [[0, 1, 2, 3]], 1)
    b = staged(tmp_path / "b", [[0, 1, 2, 3]], stages, counts_on=counts_on)
    assert exit_code(workbench.compare_dumps(a, b)) == 0
    names = {row.name for row in compare_runs(open_run(a), open_run(b)).tensors}
    assert {f"forward.output.hidden_states.{number}" for number in range(4)} <= names


@pytest.mark.parametrize("counts_on", [False, True])
def test_and_one_that_is_off_is_found_under_its_number(counts_on: bool, tmp_path: Path) -> None:
    a = staged(tmp_path / "a", [[0, 1, 2, 3]], 1)
    b = staged(tmp_path / "b", [[0, 1, 2, 3]], 2, off=0.5, counts_on=counts_on)
    result = compare_runs(open_run(a), open_run(b))
    assert [row.name for row in result.tensors if row.verdict.diverges] == ["forward.output.hidden_states.3"]


def test_stages_whose_micro_batches_are_others_agree(tmp_path: Path) -> None:
    a, b = staged(tmp_path / "a", [[0], [1], [2], [3]], 2), staged(tmp_path / "b", [[0, 1], [2, 3]], 2)
    doc = workbench.compare_dumps(a, b)
    assert exit_code(doc) == 0, doc["counts"]
    assert not (doc.get("parallel") or {"faults": []})["faults"]


def faults(folder: Path, one: Step, *ranks: Step) -> list[tuple[str, list[int], str]]:
    doc = workbench.compare_dumps(write(folder / "a", one), write(folder / "b", *ranks))
    found = doc.get("parallel")
    return [(one["kind"], one["ranks"], one["sentence"]) for one in found["faults"]] if found else []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_rank_that_computes_its_slice_in_half_precision_is_told(dtype: torch.dtype, tmp_path: Path) -> None:
    made, given = random(2, 8, 32, seed=5), {"input_ids": IDS[:2, :8].contiguous()}

    def of(output: Tensor) -> Step:
        weight = {"param.layers.0.q_proj.weight": random(output.shape[-1], 8, seed=6)}
        return {"forward_data": given, "modules": {"layers.0.q_proj.output": output.contiguous()}, "param": weight}

    halves = made[..., :16], (made[..., 16:] * 1.001).to(dtype).float()
    (kind, ranks, sentence), *_ = faults(tmp_path, of(made), *map(of, halves))
    assert (kind, ranks) == ("rounded", [1])
    assert str(dtype).removeprefix("torch.") in sentence


NAMES = [f"layers.{layer}.{part}.weight" for layer in (0, 1) for part in ("q_proj", "up_proj", "down_proj")]
WEIGHTS = {name: random(8, 8, seed=30 + at) for at, name in enumerate(NAMES)}


def trained(weights: dict[str, Tensor], off: float) -> Step:
    """off: of the forward, and of all gradients."""
    return {
        "forward_data": {"input_ids": IDS},
        "modules": {"forward.output.hidden_states.1": HIDDEN + off * random(4, 16, 8, seed=8)},
        "gradient": {
            f"grad.{name}": one + off * random(8, 8, seed=50 + at) for at, (name, one) in enumerate(WEIGHTS.items())
        },
        "param": {f"param.{name}": one for name, one in weights.items()},
    }


@pytest.mark.parametrize("step", [0.0, 1e-3], ids=["before its step", "after it"])
def test_a_shard_that_was_another_before_the_step_is_told_by_its_size(step: float, tmp_path: Path) -> None:
    moved = {name: one + step * random(8, 8, seed=70 + at).sign() for at, (name, one) in enumerate(WEIGHTS.items())}
    moved[NAMES[4]] = moved[NAMES[4]].clone()
    moved[NAMES[4]][4:] *= 0.8
    ((kind, ranks, sentence),) = faults(tmp_path, trained(WEIGHTS, 0.0), *[trained(moved, 0.3)] * 2)
    assert (kind, ranks) == ("weight alone", [1])
    assert NAMES[4] in sentence
    assert "about 0.8 times" in sentence


def test_a_weight_that_one_rank_drew_with_another_seed_is_told_beside_the_rank_that_parts(tmp_path: Path) -> None:
    """A table that every rank has whole, and what it puts out, which is off on that rank alone."""
    table, made = NAMES[0], {one: random(16, 8, seed=seed) for one, seed in (("a", 1), ("b", 2))}

    def of(which: str, off: float) -> Step:
        weights = {**WEIGHTS, table: made[which]}
        step = trained(weights, off)
        looked_up = made[which][IDS % 16]
        return {**step, "modules": {f"{table.removesuffix('.weight')}.output": looked_up, **step["modules"]}}

    (kind, ranks, sentence), *others = faults(tmp_path, of("a", 0.0), of("a", 0.3), of("b", 0.3))
    assert (kind, ranks) == ("weight alone", [1])
    assert "nothing like it (as drawn with another seed)" in sentence
    assert {kind for kind, *_ in others} == {"apart"}


def test_weights_that_a_step_moved_otherwise_are_no_cause(tmp_path: Path) -> None:
    moved = {name: one + 1e-2 * random(8, 8, seed=70 + at) for at, (name, one) in enumerate(WEIGHTS.items())}
    assert not faults(tmp_path, trained(WEIGHTS, 0.0), *[trained(moved, 0.3)] * 2)


@pytest.mark.parametrize(("times", "besides"), [(0.5, 1.0), (0.5, 1.048), (2.0, 0.9)])
def test_experts_whose_gradients_are_times_the_ranks_are_told(times: float, besides: float, tmp_path: Path) -> None:
    names = [f"layers.{layer}.mlp.experts.{expert}.up.weight" for layer in (0, 1) for expert in (0, 1)]
    every = {name: random(8, 8, seed=at) for at, name in enumerate([*names, *NAMES])}
    factor = {name: besides * (times if name in names else 1.0) for name in every}
    one = {"gradient": {f"grad.{name}": value for name, value in every.items()}}
    two = {"gradient": {f"grad.{name}": factor[name] * value for name, value in every.items()}}
    given = {"forward_data": {"input_ids": IDS}}
    result = compared(tmp_path, {**given, **one}, *[{**given, **two}] * 2)
    found = there(parallel(result.tally.of_ranks, result.together)).faults
    said = [one.fault.sentence for one in found if "experts" in one.fault.sentence]
    assert said
    if besides != 1.0:
        assert f"are {'1/2' if times < 1 else '2'} times the other run's" in said[0]
