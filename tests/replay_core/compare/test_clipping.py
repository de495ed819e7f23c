"""Gradients that are all multiples of the other run's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from replay_core.compare import compare_runs
from replay_core.compare.parallel import parallel
from replay_core.dumps import open_run
from tests.replay_core.compare.ranks.recorded import compared, random, write

NAMES = [f"layers.{layer}.{part}.weight" for layer in (0, 1) for part in ("q_proj", "up_proj", "down_proj")]
RIGHT = {f"grad.{name}": (1 + at) * random(8, 8, seed=at) for at, name in enumerate([*NAMES, "lm_head", "embed"])}


def layer_of(name: str) -> str:
    return name.split(".")[2] if "layers" in name else ""


def said(made: dict[str, Tensor], folder: Path) -> list[tuple[str, str]]:
    ids = torch.arange(16).reshape(2, 8)
    given = {"forward_data": {"input_ids": ids}}
    result = compared(folder, {**given, "gradient": RIGHT}, *[{**given, "gradient": made}] * 2)
    found = parallel(result.tally.of_ranks, result.together)
    return [(one.fault.kind, one.fault.sentence) for one in found.faults] if found is not None else []


@pytest.mark.parametrize("factor", [2 / 3, 0.41, 3.0])
def test_one_factor_of_all(factor: float, tmp_path: Path) -> None:
    ((kind, sentence),) = said({name: factor * one for name, one in RIGHT.items()}, tmp_path)
    assert kind == "scaled"
    assert f"{factor:.4g}" in sentence


def test_each_layer_by_its_own_norm(tmp_path: Path) -> None:
    norms = {
        layer: torch.stack([one.norm() for name, one in RIGHT.items() if layer_of(name) == layer]).norm()
        for layer in ("0", "1", "")
    }
    made = {name: one / norms[layer_of(name)] for name, one in RIGHT.items()}
    ((kind, sentence),) = said(made, tmp_path)
    assert kind == "clipped apart"
    assert "layer by layer" in sentence


def test_each_tensor_by_its_own_norm(tmp_path: Path) -> None:
    ((kind, sentence),) = said({name: one / one.norm() for name, one in RIGHT.items()}, tmp_path)
    assert kind == "clipped apart"
    assert "tensor by tensor" in sentence


def test_nothing_is_said_where_one_is_no_multiple(tmp_path: Path) -> None:
    made = {name: 0.5 * one for name, one in RIGHT.items()}
    made["grad.embed"] = random(8, 8, seed=77)
    assert not [kind for kind, _ in said(made, tmp_path) if kind in ("scaled", "clipped apart")]


def test_nothing_is_said_where_all_agree(tmp_path: Path) -> None:
    assert not said(dict(RIGHT), tmp_path)


def test_gradients_of_zeros_say_nothing(tmp_path: Path) -> None:
    made = {name: one / one.norm() for name, one in RIGHT.items()}
    zeros = {"grad.layers.2.q_proj.weight": torch.zeros(8, 8), "grad.layers.2.up_proj.weight": torch.zeros(8, 8)}
    ids = torch.arange(16).reshape(2, 8)
    given = {"forward_data": {"input_ids": ids}}
    result = compared(
        tmp_path, {**given, "gradient": {**RIGHT, **zeros}}, *[{**given, "gradient": {**made, **zeros}}] * 2
    )
    found = parallel(result.tally.of_ranks, result.together)
    assert found is not None
    assert [one.fault.kind for one in found.faults] == ["clipped apart"]


@pytest.mark.parametrize("is_other", [False, True])
def test_the_ranks_may_be_the_first_run(is_other: bool, tmp_path: Path) -> None:
    given = {"forward_data": {"input_ids": torch.arange(16).reshape(2, 8)}}
    clipped = {name: one / one.norm() for name, one in RIGHT.items()}
    of_ranks, other = (RIGHT, clipped) if is_other else (clipped, RIGHT)
    a = write(tmp_path / "a", *[{**given, "gradient": of_ranks}] * 2)
    b = write(tmp_path / "b", {**given, "gradient": other})
    result = compare_runs(open_run(a), open_run(b))
    found = parallel(result.tally.of_ranks, result.together)
    assert found is not None
    (fault,) = (one.fault for one in found.faults)
    assert fault.kind == "clipped apart"
    assert ("that ranks 0 and 1 are compared with are clipped" in fault.sentence) is is_other


def test_gradients_that_are_all_zeros_end_no_comparison(tmp_path: Path) -> None:
    zeros = {name: 0 * one for name, one in RIGHT.items()}
    result = compared(tmp_path, {"gradient": zeros}, *[{"gradient": RIGHT}] * 2)
    assert parallel(result.tally.of_ranks, result.together) is not None
