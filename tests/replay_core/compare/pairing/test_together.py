"""Steps that are cut twice, and two runs whose ranks share a step otherwise."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.compare import Comparison, compare_runs
from replay_core.compare.parallel import parallel
from replay_core.dumps import open_run
from tests.builders import there
from tests.replay_core.compare.ranks.recorded import Step, compared, random, write

IDS = torch.randint(2, 99, (4, 16), generator=torch.Generator().manual_seed(3))
HIDDEN, LOGITS = random(4, 16, 8), random(4, 16, 12, seed=4)
UP, NORM, QKV = random(24, 8, seed=5), random(8, seed=6), random(36, 8, seed=7)

#: Of a sequence of 16 tokens, what each of so many ranks has.
IN_ORDER = {count: torch.arange(16).chunk(count) for count in (1, 2, 4)}
ZIGZAG = {
    count: [torch.cat((chunks[rank], chunks[-1 - rank])) for rank in range(count)]
    for count in (2, 4) for chunks in [torch.arange(16).chunk(2 * count)]
}  # fmt: skip


def rank(
    samples: Sequence[int], tokens: torch.Tensor, part: int = 0, parts: int = 1, of_loss: float = 1.0
) -> dict[str, dict[str, Any]]:
    """What a rank records that has these samples, these tokens of them, and a part of the weights."""

    def mine(values: torch.Tensor) -> torch.Tensor:
        return values[list(samples)][:, tokens].contiguous()

    words = LOGITS.shape[-1] // parts
    return {
        "batch_inputs": {"input_ids": mine(IDS)},
        "modules": {
            "layers.0.output": mine(HIDDEN),
            "lm_head.output": mine(LOGITS)[..., part * words : (part + 1) * words].contiguous(),
        },
        "loss": {"loss": torch.tensor(of_loss)},
        "gradient": {
            "grad.layers.0.up.weight": UP.chunk(parts)[part].contiguous(), "grad.layers.0.norm.weight": NORM,
            "grad.layers.0.qkv.weight": torch.cat([of.chunk(parts)[part] for of in QKV.chunk(3)]).contiguous(),
        },
    }  # fmt: skip


def shared(
    samples: int, tokens: int, parts: int, *, zigzag: bool = False, beside: bool = False
) -> list[dict[str, Any]]:
    """The ranks of a step, those of one group following each other. beside: ranks of one sample group do not."""
    turn = ZIGZAG[tokens] if zigzag else IN_ORDER[tokens]
    groups = torch.arange(4).chunk(samples)
    places = [(group, at) for group in range(samples) for at in range(tokens)]
    if beside:
        places = [(group, at) for at in range(tokens) for group in range(samples)]
    every = samples * tokens
    shares = [(1 + number) / (every * (every + 1) / 2) for number in range(every)]
    return [
        rank(groups[group].tolist(), turn[at], part, parts, shares[number])
        for number, (group, at) in enumerate(places) for part in range(parts)
    ]  # fmt: skip


ONE = shared(1, 1, 1)[0]
RUNS: dict[str, dict[str, Any]] = {
    "cp in dp": {"samples": 2, "tokens": 2, "parts": 1},
    "cp in dp, zigzag": {"samples": 2, "tokens": 2, "parts": 1, "zigzag": True},
    "dp in cp": {"samples": 2, "tokens": 2, "parts": 1, "beside": True},
    "tp in cp": {"samples": 1, "tokens": 2, "parts": 2},
    "tp in cp in dp": {"samples": 2, "tokens": 2, "parts": 2},
    "tp in dp": {"samples": 2, "tokens": 1, "parts": 2},
    "tp": {"samples": 1, "tokens": 1, "parts": 4},
    "tp 2": {"samples": 1, "tokens": 1, "parts": 2},
    "cp 4": {"samples": 1, "tokens": 4, "parts": 1},
    "cp 4, zigzag": {"samples": 1, "tokens": 4, "parts": 1, "zigzag": True},
    "cp": {"samples": 1, "tokens": 2, "parts": 1},
    "dp": {"samples": 2, "tokens": 1, "parts": 1},
    "dp 4": {"samples": 4, "tokens": 1, "parts": 1},
}


def both(directory: Path, a: Sequence[Step], b: Sequence[Step]) -> Comparison:
    return compare_runs(open_run(write(directory / "a", *a)), open_run(write(directory / "b", *b)))


def off(steps: list[dict[str, Any]], number: int, stage: str, name: str) -> list[dict[str, Any]]:
    """The same ranks, one of which has another value of one tensor."""
    wrong = steps[number]
    changed = {**wrong[stage], name: wrong[stage][name] + 1}
    return [*steps[:number], {**wrong, stage: changed}, *steps[number + 1 :]]


@pytest.mark.parametrize("case", RUNS)
def test_ranks_that_share_samples_tokens_and_weights_are_put_together(case: str, tmp_path: Path) -> None:
    found = compared(tmp_path, ONE, *shared(**RUNS[case]))
    assert {row.name: row.verdict.value for row in found.tensors if row.verdict.value not in ("SAME", "CLOSE")} == {}
    assert len(found.tensors) == 7
    assert not found.skipped


@pytest.mark.parametrize("case", RUNS)
def test_token_ids_of_another_width_are_the_same_ids(case: str, tmp_path: Path) -> None:
    steps = shared(**RUNS[case])
    steps = [{**step, "batch_inputs": {"input_ids": step["batch_inputs"]["input_ids"].int()}} for step in steps]
    found = compared(tmp_path, ONE, *steps)
    assert len(found.tensors) == 7
    assert found.agrees
    assert there(compared(tmp_path / "off", ONE, *off(steps, len(steps) - 1, "modules", "layers.0.output")).first)


@pytest.mark.parametrize("case", RUNS)
@pytest.mark.parametrize("name", ["layers.0.output", "lm_head.output"])
def test_what_one_rank_of_them_has_otherwise_is_found(case: str, name: str, tmp_path: Path) -> None:
    steps = shared(**RUNS[case])
    row = there(compared(tmp_path, ONE, *off(steps, len(steps) - 1, "modules", name)).first)
    assert row.name == name
    assert there(row.ranks).parted


def test_groups_that_were_given_the_same_samples_are_named(tmp_path: Path) -> None:
    steps = [rank([0, 1], IN_ORDER[2][at]) for _ in range(2) for at in range(2)]
    found = compared(tmp_path, ONE, *steps)
    said = [one.astray for one in found.together if one.astray is not None]
    assert [(one.kind, one.ranks) for one in said] == [("same samples", (0, 1, 2, 3))]


@pytest.mark.parametrize(("share", "ranks"), [(0, (1,)), (1, (0,))])
@pytest.mark.parametrize("turn", [IN_ORDER[2], ZIGZAG[2]])
def test_a_rank_that_has_anothers_share_of_the_sequences_is_named(
    turn: list[torch.Tensor], share: int, ranks: tuple[int, ...], tmp_path: Path
) -> None:
    found = compared(tmp_path, ONE, *[rank(range(4), turn[share])] * 2)
    said = [one.astray for one in found.together if one.astray is not None]
    assert [(one.kind, one.ranks) for one in said] == [("same tokens", ranks)]


PAIRS = [
    ("tp 2", "tp"), ("tp", "tp 2"), ("dp", "dp 4"), ("cp", "cp 4, zigzag"), ("cp 4", "tp 2"), ("cp", "tp 2"),
    ("tp in cp", "cp in dp"), ("tp in dp", "tp"), ("dp 4", "tp in cp in dp"), ("cp in dp, zigzag", "tp"),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_two_runs_whose_ranks_share_a_step_otherwise_agree(a: str, b: str, tmp_path: Path) -> None:
    found = both(tmp_path, shared(**RUNS[a]), shared(**RUNS[b]))
    assert {row.name: row.verdict.value for row in found.tensors if row.verdict.value not in ("SAME", "CLOSE")} == {}
    assert len(found.tensors) == 7
    assert any("are put together" in note for note in found.notes)


@pytest.mark.parametrize(("a", "b"), PAIRS)
@pytest.mark.parametrize("which", ["a", "b"])
@pytest.mark.parametrize("place", [("modules", "layers.0.output"), ("gradient", "grad.layers.0.norm.weight")])
def test_a_value_of_one_rank_of_either_is_found(
    a: str, b: str, which: str, place: tuple[str, str], tmp_path: Path
) -> None:
    steps = {"a": shared(**RUNS[a]), "b": shared(**RUNS[b])}
    steps[which] = off(steps[which], len(steps[which]) - 1, *place)
    found = both(tmp_path, steps["a"], steps["b"])
    assert there(found.first).name == place[1]


@pytest.mark.parametrize(("zigzag", "wrong"), [(False, False), (True, False), (True, True)])
def test_sequence_parallelism_faces_context_parallelism(zigzag: bool, wrong: bool, tmp_path: Path) -> None:
    """Both have half of the tokens on every rank: one of them knows all token ids."""
    halves = [{"batch_inputs": {"input_ids": IDS}, "modules": {"layers.0.output": HIDDEN[:, at].contiguous()}}
              for at in IN_ORDER[2]]  # fmt: skip
    slices = shared(samples=1, tokens=2, parts=1, zigzag=zigzag)
    found = both(tmp_path, halves, off(slices, 1, "modules", "layers.0.output") if wrong else slices)
    rows = {row.name: row.verdict.value for row in found.tensors}
    assert rows["layers.0.output"] == ("DIFF" if wrong else "SAME")


def with_rows(steps: list[dict[str, Any]], *, by_token: bool) -> list[dict[str, Any]]:
    """The same ranks, which give a router their tokens in one row."""
    made = []
    for step in steps:
        own = step["modules"]["layers.0.output"]
        rows = (own.transpose(0, 1) if by_token else own).reshape(-1, own.shape[-1]).contiguous()
        made.append({**step, "modules": {**step["modules"], "layers.0.mlp.gate.inputs.0": rows}})
    return made


@pytest.mark.parametrize("case", ["cp in dp", "cp in dp, zigzag", "dp in cp", "dp", "dp 4", "cp", "cp 4, zigzag"])
@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("wrong", [False, True])
def test_tokens_in_one_row_are_laid_as_samples_and_tokens_are_shared(
    case: str, by_token: bool, wrong: bool, tmp_path: Path
) -> None:
    name = "layers.0.mlp.gate.inputs.0"
    steps = with_rows(shared(**RUNS[case]), by_token=by_token)
    one = with_rows([ONE], by_token=by_token)[0]
    found = compared(tmp_path, one, *(off(steps, len(steps) - 1, "modules", name) if wrong else steps))
    assert {row.name: row.verdict.value for row in found.tensors}[name] == ("DIFF" if wrong else "SAME")


def test_what_stages_return_under_numbers_of_their_own_faces_context_parallelism(tmp_path: Path) -> None:
    states = [random(4, 16, 8, seed=number) for number in (20, 21)]
    named = [f"forward.output.hidden_states.{number}" for number in (0, 1)]
    tokens = [
        {"batch_inputs": {"input_ids": IDS[:, at].contiguous()},
         "modules": {name: one[:, at].contiguous() for name, one in zip(named, states, strict=True)}}
        for at in ZIGZAG[2]
    ]  # fmt: skip
    stages = [
        {"batch_inputs": {"input_ids": IDS}, "modules": {named[0]: states[0]}},
        {"batch_inputs": {"input_ids": IDS, "hidden": states[0]}, "modules": {named[0]: states[1]}},
    ]
    found = both(tmp_path, tokens, stages)
    rows = {row.name: row.verdict.value for row in found.tensors}
    assert {rows[name] for name in named} == {"SAME"}
    assert "SHAPE" not in rows.values()


@pytest.mark.parametrize("which", ["a", "b"])
def test_a_gradient_that_one_of_the_two_has_not_summed_is_named(which: str, tmp_path: Path) -> None:
    steps = {"a": shared(**RUNS["dp"]), "b": shared(**RUNS["dp 4"])}
    parts = [random(8, seed=20 + number) for number in range(len(steps[which]) - 1)]
    parts.append(NORM - torch.stack(parts).sum(0))
    for step, part in zip(steps[which], parts, strict=True):
        step["gradient"] = {**step["gradient"], "grad.layers.0.norm.weight": part}
    row = there(both(tmp_path, steps["a"], steps["b"]).first)
    assert row.name == "grad.layers.0.norm.weight"
    assert "layers.0.norm.weight's gradient is not summed over ranks" in row.reason


def test_two_runs_of_which_nothing_tells_that_they_share_one_step_are_not_put_together(tmp_path: Path) -> None:
    steps = [{"gradient": {"grad.norm.weight": random(8, seed=number)}} for number in range(4)]
    found = both(tmp_path, steps[:2], steps)
    assert found.counts["MISSING"] == 2
    assert not found.together


def test_slices_of_q_k_and_v_in_one_weight_that_are_another_ranks_are_found(tmp_path: Path) -> None:
    steps = shared(**RUNS["tp 2"])
    name = "grad.layers.0.qkv.weight"
    first, second = (step["gradient"][name] for step in steps)
    for step, value in zip(steps, (second, first), strict=True):
        step["gradient"] = {**step["gradient"], name: value}
    assert there(compared(tmp_path, ONE, *steps).first).name == name


@pytest.mark.parametrize("turned", [False, True])
def test_slices_as_wide_in_both_runs_are_no_copies_that_differ(turned: bool, tmp_path: Path) -> None:
    """Two tensor-parallel ranks against the same twice over the samples: every rank has slices of one shape."""
    whole, ids = random(12, 8), torch.arange(8).reshape(2, 4)
    slices = [{"gradient": {"grad.w": part.contiguous()}} for part in whole.chunk(2)]
    one = [{"batch_inputs": {"input_ids": ids}, **part} for part in slices]
    two = [{"batch_inputs": {"input_ids": half}, **part} for half in ids.chunk(2) for part in slices]
    a, b = write(tmp_path / "a", *one), write(tmp_path / "b", *two)
    found = compare_runs(open_run(b if turned else a), open_run(a if turned else b))
    assert found.agrees, found.first
    wrong = [*two[:3], {**two[3], "gradient": {"grad.w": two[3]["gradient"]["grad.w"] + 1}}]
    c = write(tmp_path / "c", *wrong)
    found = compare_runs(open_run(c if turned else a), open_run(a if turned else c))
    assert found.agrees is False
    assert there(found.first).name == "grad.w"


def test_losses_that_are_means_in_one_run_and_parts_of_a_sum_in_the_other_agree(tmp_path: Path) -> None:
    ids = torch.arange(16).reshape(2, 8)
    means = [{"batch_inputs": {"input_ids": half}, "modules": {"forward.output.loss": torch.tensor(loss)}}
             for half, loss in zip(ids.chunk(2), (5.0, 6.0), strict=True)]  # fmt: skip
    parts = [{"batch_inputs": {"input_ids": half}, "modules": {"forward.output.loss": torch.tensor(loss)}}
             for half, loss in zip(ids.chunk(2, 1), (2.25, 3.25), strict=True)]  # fmt: skip
    a, b = write(tmp_path / "a", *means), write(tmp_path / "b", *parts)
    for sides in ((a, b), (b, a)):
        found = compare_runs(open_run(sides[0]), open_run(sides[1]))
        assert found.agrees, found.first


def replicas(count: int, wrong: int | None = None, off: float = 0.0, noise: float = 0.0) -> list[dict[str, Any]]:
    """Tensor-parallel ranks, each with a slice of a weight and the same activations but for noise, and for one."""
    made = []
    for number in range(count):
        own = HIDDEN * (1 + noise * random(4, 16, 8, seed=50 + number + 20 * count))
        own[2, 3, 4] += off * (number == wrong)
        made.append({
            "batch_inputs": {"input_ids": IDS}, "modules": {"layers.0.output": own},
            "gradient": {"grad.layers.0.up.weight": UP.chunk(count)[number].contiguous()},
        })  # fmt: skip
    return made


@pytest.mark.parametrize("noise", [0.0, 2e-7])
@pytest.mark.parametrize("turned", [False, True])
def test_an_error_of_one_copy_is_not_spread_over_all_ranks(noise: float, turned: bool, tmp_path: Path) -> None:
    """An error that is found beside one process is found beside more ranks than hold it."""
    wrong, right = replicas(8, 1, 0.01, noise), replicas(12, noise=noise)
    sides = (right, wrong) if turned else (wrong, right)
    assert there(both(tmp_path, *sides).first).name == "layers.0.output"
    assert both(tmp_path / "healthy", replicas(8, noise=noise), right).agrees


@pytest.mark.parametrize("whole", [[0], [0, 1]])
def test_a_weight_of_which_one_rank_lost_its_part_is_skipped_by_its_name(whole: list[int], tmp_path: Path) -> None:
    a = write(tmp_path / "a", *replicas(len(whole)))
    b = write(tmp_path / "b", *replicas(4))
    file = next((b / "gradient").glob("*rank3*"))
    os.truncate(file, file.stat().st_size // 2)
    for sides in ((a, b), (b, a)):
        found = compare_runs(open_run(sides[0]), open_run(sides[1]))
        (row,) = found.skipped
        assert row.name == "grad.layers.0.up.weight"
        assert f"what rank 3 of {'b' if sides[1] is b else 'a'} holds of it cannot be read" in there(row.skipped)
        assert found.agrees is None


def heads_of_keys(ranks: int, heads: Sequence[int], noise: float = 0.0) -> list[dict[str, Any]]:
    """Tensor-parallel ranks with two heads of keys between them, in two layers; heads: who has which in the first."""
    keys = [random(2, 8, 8, seed=60 + layer) for layer in (0, 1)]
    pulls = [random(2, 8, 8, seed=70 + layer) * (1 + noise) for layer in (0, 1)]
    right = [number * 2 // ranks for number in range(ranks)]
    return [
        {
            "batch_inputs": {"input_ids": IDS},
            "param": {"param.layers.0.k.weight": keys[0][heads[number]], "param.layers.1.k.weight": keys[1][own]},
            "gradient": {f"grad.layers.{layer}.k.weight": pulls[layer][own] for layer in (0, 1)},
        }
        for number, own in enumerate(right)
    ]  # fmt: skip


@pytest.mark.parametrize("turned", [False, True])
def test_heads_of_keys_that_several_ranks_share_are_slices_as_wide_in_both_runs(turned: bool, tmp_path: Path) -> None:
    two, four = heads_of_keys(2, (0, 1)), heads_of_keys(4, (0, 0, 1, 1), 1e-7)
    found = both(tmp_path / "healthy", *((four, two) if turned else (two, four)))
    assert found.agrees, found.first
    wrong = heads_of_keys(4, (0, 1, 0, 1))
    found = both(tmp_path, *((wrong, two) if turned else (two, wrong)))
    (fault,) = (one.fault for one in there(parallel(found.tensors, found.together)).faults)
    assert (fault.kind, fault.ranks) == ("order", (1, 2))
