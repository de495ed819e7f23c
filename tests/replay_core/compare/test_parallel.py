"""Steps that were really trained in parallel (gloo, on processors), recorded under torchrun, against one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from replay_core.compare import Comparison, compare_runs
from replay_core.compare.parallel import parallel
from replay_core.documents.schema import schema
from replay_core.dumps import open_run
from replay_core.recorder import Recorder
from tests.builders import there
from tests.replay_core.compare.ranks.recorded import compared as compared_steps
from tests.replay_core.compare.ranks.recorded import gradients, random
from tui_debugger.cli import run as run_rldbg
from tui_debugger.reports.comparison import comparison_report

ROOT = Path(__file__).resolve().parents[3]
TRAINER = Path(__file__).with_name("ranks") / "trainer.py"
RECORD = ("-m", "tui_debugger", "record", "--gradients", "*", "--params", "*", "--outputs", "--no-checkpoints", "--dir")


def run(folder: Path, *words: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *words], cwd=folder, env=environment, check=True, capture_output=True, timeout=240)


def pretrained(folder: Path, *options: str) -> str:
    run(folder, str(TRAINER), "pretrain", str(folder / "weights.pt"), *options)
    return str(folder / "weights.pt")


def record(folder: Path, name: str, mode: str, weights: str, ranks: int, *options: str) -> Path:
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    run(folder, *RECORD, name, "--", sys.executable, *launcher, str(TRAINER), mode, weights, *options)
    return folder / name


def compared(a: Path, b: Path, capfd: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    capfd.readouterr()
    code = run_rldbg(["compare", str(a), str(b), "--json"])
    return code, json.loads(capfd.readouterr().out)


def kinds(doc: dict[str, Any]) -> set[tuple[str, tuple[int, ...]]]:
    return {(fault["kind"], tuple(fault["ranks"])) for fault in doc["parallel"]["faults"]}


@pytest.mark.long
def test_a_norm_whose_gradient_was_not_summed_is_named_and_the_same_step_done_right_agrees(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    weights = pretrained(tmp_path)
    one = record(tmp_path, "one", "one", weights, 1)
    code, doc = compared(one, record(tmp_path, "right", "sp", weights, 2), capfd)
    assert code == 0
    assert doc["counts"]["total"] == doc["counts"]["SAME"] + doc["counts"]["CLOSE"]
    assert not doc["parallel"]["faults"]
    held = {row["name"]: row["ranks"]["relation"] for row in doc["tensors"]}
    assert held["grad.layers.1.mlp.down_proj.weight"] == held["param.lm_head.weight"] == "slices"
    assert held["grad.norm.weight"] == held["forward.output.logprobs"] == "all"
    compared_stages = {row["a_key"]["stage"] for row in doc["tensors"]}
    assert {"batch_inputs", "modules", "loss", "gradient", "param"} <= compared_stages
    code, doc = compared(one, record(tmp_path, "wrong", "sp", weights, 2, "--fault", "norm_unsummed"), capfd)
    assert code == 1
    assert kinds(doc) == {("not summed", (0, 1))}
    jsonschema.Draft202012Validator(schema()).validate(doc)
    said = comparison_report(doc)  # type: ignore[arg-type]
    assert "norm.weight's gradient is not summed over ranks 0 and 1: each holds a part" in said


#: Fault -> (mode, options of both runs, what is to be named).
FAULTS: dict[str, tuple[str, tuple[str, ...], tuple[str, tuple[int, ...]]]] = {
    "double_sum": ("dp", (), ("too much", (0, 1))),
    "one_missing": ("cp", (), ("missing", (1,))),
    "one_apart": ("dp", (), ("missing", (1,))),
    "mean_for_sum": ("cp", (), ("too little", (0, 1))),
    "shard_order": ("tp", (), ("order", (0, 1))),
    "unreduced": ("tp", (), ("not summed", (0, 1))),
    "forward_missing": ("tp", (), ("missing", (1,))),
    "vocab_without_max": ("tp", (), ("own maximum", (0, 1))),
    "vocab_local_sum": ("tp", (), ("own vocabulary", (0, 1))),
    "cp_boundary": ("cp", (), ("boundary", (1,))),
    "cp_order": ("cp", ("--zigzag",), ("order", (0, 1))),
    "dp_same_data": ("dp", (), ("same samples", (0, 1))),
    "clip_local": ("tp", ("--clip", "0.3"), ("clipped apart", (0, 1))),
    "no_update": ("tp", (), ("zeros", (1,))),
    "dropout_differs": ("tp", ("--dropout", "0.2"), ("masks differ", (0, 1))),
    "dropout_equal": ("cp", ("--dropout", "0.2"), ("masks alike", (0, 1))),
    "tied_unsummed": ("pp", ("--tied",), ("not summed", (0, 1))),
    "ep_experts": ("ep", ("--experts", "4"), ("another's", (0, 1))),
    "ep_router": ("ep", ("--experts", "4", "--batch", "2", "--seq", "8"), ("other tokens", (0, 1))),
    "cp_keys_order": ("cp", (), ("keys order", (0, 1))),
}


@pytest.mark.slow
def test_planted_faults_are_named_with_their_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bases: dict[tuple[str, ...], tuple[str, Path]] = {}
    missed = {}
    for fault, (mode, options, wanted) in FAULTS.items():
        shaped = tuple(word for word in options if word != "--zigzag")
        if shaped not in bases:
            folder = tmp_path / f"base{len(bases)}"
            folder.mkdir()
            weights = pretrained(folder, *shaped)
            bases[shaped] = weights, record(folder, "one", "one", weights, 1, *shaped)
        weights, one = bases[shaped]
        code, doc = compared(one, record(tmp_path, fault, mode, weights, 2, *options, "--fault", fault), capfd)
        if code != 1 or wanted not in kinds(doc):
            missed[fault] = code, kinds(doc)
    assert not missed


@pytest.mark.slow
@pytest.mark.parametrize("mode", [
    "tp", "dtensor", "cp", "cp --zigzag", "dp", "fsdp", "pp --tied", "ep --experts 4", "tp --dp 2", "cp --dp 2",
    "cp --zigzag --dp 2", "pp --dp 2", "pp --tied --dp 2",
])  # fmt: skip
def test_steps_that_were_trained_right_in_parallel_agree_with_one_process(
    mode: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mode, *options = mode.split()
    ranks = 4 if "--dp" in options else 2
    shaped = options[: options.index("--dp")] if "--dp" in options else options
    shaped = [word for word in shaped if word != "--zigzag"]
    weights = pretrained(tmp_path, *shaped)
    one = record(tmp_path, "one", "one", weights, 1, *shaped)
    code, doc = compared(one, record(tmp_path, "two", mode, weights, ranks, *options), capfd)
    assert code == 0, doc["first_divergence"]
    assert doc["counts"]["total"] == doc["counts"]["SAME"] + doc["counts"]["CLOSE"]
    stages = {row["a_key"]["stage"] for row in doc["tensors"]}
    assert {"batch_inputs", "modules", "gradient", "param"} <= stages
    assert doc["coverage"]["records_only_in_a"] == doc["coverage"]["records_only_in_b"] == 0


@pytest.mark.slow
def test_runs_of_other_numbers_of_ranks_agree_and_a_planted_fault_of_either_is_found(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    weights = pretrained(tmp_path)
    right = {
        "tp2": record(tmp_path, "tp2", "tp", weights, 2), "tp4": record(tmp_path, "tp4", "tp", weights, 4),
        "dp2": record(tmp_path, "dp2", "dp", weights, 2), "dp4": record(tmp_path, "dp4", "dp", weights, 4),
        "cp2": record(tmp_path, "cp2", "cp", weights, 2, "--zigzag"),
    }  # fmt: skip
    for a, b in (("tp2", "tp4"), ("dp4", "dp2"), ("dp2", "tp4"), ("cp2", "dp4"), ("tp2", "cp2")):
        code, doc = compared(right[a], right[b], capfd)
        assert code == 0, (a, b, doc["first_divergence"])
        assert doc["counts"]["total"] == doc["counts"]["SAME"] + doc["counts"]["CLOSE"]
    for fault, mode, ranks, other in (("unreduced", "tp", 4, "tp2"), ("shard_order", "tp", 2, "tp4"),
                                      ("double_sum", "dp", 4, "dp2"), ("one_missing", "cp", 2, "dp4")):  # fmt: skip
        wrong = record(tmp_path, fault, mode, weights, ranks, "--fault", fault)
        for sides in ((right[other], wrong), (wrong, right[other])):
            code, doc = compared(*sides, capfd)
            assert (code, doc["counts"]["MISSING"]) == (1, 0), (fault, doc["counts"])
            assert doc["counts"]["DIFF"] + doc["counts"]["NAN"] > 0


def test_the_rank_that_parts_first_is_the_origin_and_the_others_receive(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = random(12, 8)
    gradients(tmp_path, whole, [whole, random(12, 8, seed=1)])
    code, doc = compared(tmp_path / "a", tmp_path / "b", capfd)
    assert code == 1
    assert doc["parallel"]["parted"] == [{"rank": 1, "name": "grad.norm.weight", "step": 0, "origin": True}]
    assert doc["parallel"]["sentence"] == "rank 1 of b parts first, in grad.norm.weight; no other does"
    assert "  ranks   norm.weight's gradient: rank 1 parts" in comparison_report(doc)  # type: ignore[arg-type]


def _faults(found: Comparison) -> set[tuple[str, tuple[int, ...]]]:
    return {(one.fault.kind, one.fault.ranks) for one in there(parallel(found.tensors, found.together)).faults}


#: Gradients of one process: of weights that two ranks hold slices of, and of one that both hold.
_WEIGHTS = {f"grad.layers.{number}.mlp.up_proj.weight": random(8, 16, seed=number) for number in range(3)}
_NORM, _PART = random(32, seed=7), random(32, seed=8)


@pytest.mark.parametrize(
    ("factors", "norms", "expected"),
    [
        ((1.3964, 1.4002), [_NORM, _NORM], {("clipped apart", (0, 1))}),
        ((1.4, 1.4), [_NORM, _NORM], {("scaled", (0, 1))}),
        ((1.4, 1.4), [1.1 * _NORM, 1.1 * _NORM], set()),
        ((1.3964, 1.4002), [_PART, _NORM - _PART], {("not summed", (0, 1))}),
        ((1.3964, 1.4002), [_PART, _NORM], {("apart", (0,))}),
    ],
    ids=[
        "near each other",
        "one factor",
        "one factor but for one",
        "for one is not summed",
        "for one is another on one rank",
    ],
)
def test_gradients_that_each_rank_scales_by_a_factor_of_its_own(
    factors: tuple[float, float], norms: list[torch.Tensor], expected: set[Any], tmp_path: Path
) -> None:
    """Ranks clip by the norm of what they hold; that is a consequence where one gradient is another on each."""
    given = {"batch_inputs": {"input_ids": torch.arange(32).reshape(2, 16)}}
    ranks = [
        {**given, "gradient": {
            **{name: factor * one.chunk(2)[rank] for name, one in _WEIGHTS.items()}, "grad.norm.weight": factor * norm,
        }} for rank, (factor, norm) in enumerate(zip(factors, norms, strict=True))
    ]  # fmt: skip
    whole = {**given, "gradient": {**_WEIGHTS, "grad.norm.weight": _NORM}}
    assert _faults(compared_steps(tmp_path, whole, *ranks)) == expected


@pytest.mark.parametrize(("second", "is_apart"), [(1.408, True), (1.2, True), (1.421, False)])
def test_rows_of_gathered_shards_are_each_scaled_by_their_ranks_factor(
    second: float, is_apart: bool, tmp_path: Path
) -> None:
    held = {name: one * torch.tensor([1.421, second]).repeat_interleave(4)[:, None] for name, one in _WEIGHTS.items()}
    found = _faults(compared_steps(tmp_path, {"gradient": _WEIGHTS}, *[{"gradient": held}] * 2))
    assert found == {("clipped apart" if is_apart else "scaled", (0, 1))}


def test_ranks_that_part_after_a_step_that_nothing_explains_are_no_cause(tmp_path: Path) -> None:
    """Its gradients made their weights."""
    whole, wrong = random(8, 16), random(8, 16) + 0.1 * random(8, 16, seed=1)
    stepped = random(8, 16, seed=2)
    off = stepped.clone()
    off[4:] += 0.01

    def write(name: str, ranks: int, gradient: torch.Tensor, weight: torch.Tensor) -> Path:
        for rank in range(ranks):
            with Recorder(tmp_path / name) as recorder:
                for step, fields in enumerate(({"grad.w": gradient}, {"param.w": weight})):
                    with recorder.step(step, rank=rank) as record:
                        rows = {key: one.chunk(ranks)[rank].contiguous() for key, one in fields.items()}
                        record("gradient" if not step else "param", rows)
        return tmp_path / name

    one = write("one", 1, whole, stepped)
    assert _faults(compare_runs(open_run(one), open_run(write("both", 2, wrong, off)))) == set()
    assert _faults(compare_runs(open_run(one), open_run(write("later", 2, whole, off)))) == {("apart", (1,))}


@pytest.mark.parametrize("is_other", [False, True])
def test_what_a_step_computes_after_one_that_diverged_is_no_cause(is_other: bool, tmp_path: Path) -> None:
    """The second step's gradient is not summed; where the first step's is another, nobody knows by which weights."""
    first, whole, part = random(8, 16, seed=3), random(32), random(32, seed=1)

    def written(folder: Path, gradient: torch.Tensor, *norms: torch.Tensor) -> Path:
        for rank, norm in enumerate(norms):
            with Recorder(folder) as recorder:
                for step, (name, value) in enumerate({"mlp.up_proj": gradient, "norm": norm}.items()):
                    with recorder.step(step, rank=rank) as record:
                        record("gradient", {f"grad.layers.0.{name}.weight": value}, micro=None)
        return folder

    a = written(tmp_path / "a", first, whole)
    b = written(tmp_path / "b", random(8, 16, seed=4) if is_other else first, part, whole - part)
    found = compare_runs(open_run(a), open_run(b))
    assert {row.key.step for row in found.tensors if row.verdict.diverges} == ({0, 1} if is_other else {1})
    assert _faults(found) == (set() if is_other else {("not summed", (0, 1))})


@pytest.mark.parametrize(
    ("off", "fault"), [((0,), ("apart", (0,))), ((0, 1), ("apart", (1,)))], ids=["one rank's copy", "a gathered shard"]
)
def test_channels_that_are_off_on_one_rank_alone_are_of_its_own_copy(
    off: tuple[int, ...], fault: tuple[str, tuple[int, ...]], tmp_path: Path
) -> None:
    """Both ranks have the weight; what rank 1's half of its rows makes is off on one of them, or on both."""
    weight, ids = random(16, 8), torch.randint(2, 99, (4, 16), generator=torch.Generator().manual_seed(3))
    output = random(4, 16, 16, seed=1)
    wrong = torch.cat([output[..., :8], output[..., 8:] + random(4, 16, 8, seed=2)], -1)

    def of(rows: slice, values: torch.Tensor) -> dict[str, Any]:
        return {
            "batch_inputs": {"input_ids": ids[rows]}, "modules": {"layers.0.mlp.up_proj.output": values[rows]},
            "param": {"param.layers.0.mlp.up_proj.weight": weight},
        }  # fmt: skip

    ranks = [of(slice(2 * rank, 2 * rank + 2), wrong if rank in off else output) for rank in range(2)]
    assert _faults(compared_steps(tmp_path, of(slice(0, 4), output), *ranks)) == {fault}


@pytest.mark.parametrize(("times", "kind"), [(0.0, "zeros"), (-1.0, "apart")])
def test_a_shard_that_was_never_loaded_is_told_as_zeros(times: float, kind: str, tmp_path: Path) -> None:
    weight, ids = random(64, 32), torch.randint(2, 99, (4, 16), generator=torch.Generator().manual_seed(3))
    other = torch.cat([weight[:32], times * weight[32:]])
    hidden = random(4, 16, 32, seed=1)

    def of(rows: slice, weight: torch.Tensor) -> dict[str, Any]:
        return {
            "batch_inputs": {"input_ids": ids[rows]},
            "modules": {"layers.0.mlp.up_proj.output": hidden[rows] @ weight.T},
            "param": {"param.layers.0.mlp.up_proj.weight": weight},
        }  # fmt: skip

    ranks = [of(slice(2 * rank, 2 * rank + 2), other) for rank in range(2)]
    assert _faults(compared_steps(tmp_path, of(slice(0, 4), weight), *ranks)) == {(kind, (1,))}
