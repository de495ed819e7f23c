"""What rounding leaves of a step is along nothing: a bfloat16 weight that is scaled, cut off instead of rounded or
shifted after its step is off along itself, its signs or a constant, as a whole or line by line.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.compare import compare_runs
from replay_core.dumps import open_run
from replay_core.recorder import Recorder

NAME = "model.layers.0.mlp.up_proj.weight"
RATE = 1e-3
#: How far gradients are off: of Adam's, a few signs turn.
NOISE = {"sgd": 1e-2, "adamw": 2e-3}
Fault = Callable[[torch.Tensor], torch.Tensor]


def _cut_off(weight: torch.Tensor) -> torch.Tensor:
    """Rounded towards zero."""
    return (weight.view(torch.int32) & -65536).view(torch.float32)


def _rows_scaled(weight: torch.Tensor) -> torch.Tensor:
    return torch.cat([weight[:8] * 0.99, weight[8:]])


def _columns_scaled(weight: torch.Tensor) -> torch.Tensor:
    return torch.cat([weight[:, :8] * 0.99, weight[:, 8:]], 1)


def _alternating(weight: torch.Tensor) -> torch.Tensor:
    """Of all together nothing is left along the weight."""
    half = len(weight) // 2
    return torch.cat([weight[:half] * 0.994, weight[half:] * 1.006])


FAULTS: dict[str, Fault] = {
    "scaled by .9995": lambda weight: weight * 0.9995,
    "scaled by .999": lambda weight: weight * 0.999,
    "scaled by .998": lambda weight: weight * 0.998,
    "scaled by .995": lambda weight: weight * 0.995,
    "scaled by .99": lambda weight: weight * 0.99,
    "scaled by 1.002": lambda weight: weight * 1.002,
    "cut off": _cut_off,
    "shifted": lambda weight: weight + 3e-5,
    "rows scaled": _rows_scaled,
    "columns scaled": _columns_scaled,
    "half up, half down": _alternating,
}


def _as_is(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _run(
    folder: Path, noise: int, kind: str, fault: Fault = _as_is, *, size: int = 64, seed: int = 0, said: bool = False,
    ranks: int = 1,
) -> Path:  # fmt: skip
    """A bfloat16 weight after one step whose gradient is off by noise; `fault` strikes before the weight
    is rounded, on the last of the ranks, which all have one gradient.
    """
    of_both = torch.Generator().manual_seed(seed)
    weight = (torch.randn(size, size, generator=of_both) * 0.02).bfloat16()
    gradient = torch.randn(size, size, generator=of_both)
    own = torch.randn(size, size, generator=torch.Generator().manual_seed(1000 * seed + noise))
    gradient = (gradient + NOISE[kind] * own).bfloat16()
    after = weight.float() - RATE * (gradient.float() if kind == "sgd" else gradient.float().sign())
    ids = torch.randint(1, 99, (4, 8), generator=torch.Generator().manual_seed(1))
    flags: dict[str, Any] = {"dtype": "bfloat16", **({"optimizer": {"kind": kind, "lr": RATE}} if said else {})}
    for rank in range(ranks):
        with Recorder(folder, flags=flags) as recorder, recorder.step(0, rank=rank) as step:
            step("forward_data", {"input_ids": ids}, micro=0)
            step("gradient", {f"grad.{NAME}": gradient})
            stored = fault(after) if rank == ranks - 1 else after
            step("param", {f"param.{NAME}": stored.bfloat16()})
    return folder


def _of_weight(a: Path, b: Path) -> Any:
    return next(row for row in compare_runs(open_run(a), open_run(b)).tensors if row.name.startswith("param"))


#: What is smaller, where signs of an Adam's gradient turned, the table of limits itself calls no difference.
EACH = [*(("sgd", fault) for fault in FAULTS), ("adamw", "scaled by .995"), ("adamw", "scaled by .99")]


@pytest.mark.parametrize("said", [False, True])
@pytest.mark.parametrize(("kind", "fault"), EACH)
def test_a_weight_that_is_another_after_its_step_is_no_rounding(fault: str, kind: str, said: bool, tmp_path: Path):
    row = _of_weight(_run(tmp_path / "a", 1, kind, said=said), _run(tmp_path / "b", 2, kind, FAULTS[fault], said=said))
    assert row.verdict.value == "DIFF", row.reason


@pytest.mark.parametrize("said", [False, True])
def test_what_rounding_leaves_of_the_step_still_is(said: bool, tmp_path: Path):
    found = []
    for seed in range(10):
        a, b = (_run(tmp_path / f"{seed}{noise}", noise, "sgd", seed=seed, said=said) for noise in (1, 2))
        found.append(_of_weight(a, b))
    assert {row.verdict.value for row in found} == {"CLOSE"}, [row.reason for row in found]
    assert any(row.context.explained is not None for row in found), "nothing was cleared"


@pytest.mark.parametrize("fault", ["scaled by .99", "cut off"])
def test_replicas_that_part_where_their_gradients_do_not_are_no_rounding(fault: str, tmp_path: Path):
    alone = _run(tmp_path / "a", 1, "sgd")
    row = _of_weight(alone, _run(tmp_path / "b", 2, "sgd", FAULTS[fault], ranks=2))
    assert row.verdict.value == "DIFF", row.reason
    assert 1 in row.ranks.parted
    assert _of_weight(alone, _run(tmp_path / "c", 2, "sgd", ranks=2)).verdict.value == "CLOSE"


@pytest.mark.parametrize("size", [1, 4])
def test_a_number_that_is_fitted_to_a_few_elements_explains_nothing(size: int, tmp_path: Path):
    """A weight that is off by as much as it is large, along what its gradients are off."""
    for name, shift in (("a", 0.0), ("b", 0.01)):
        with Recorder(tmp_path / name, flags={"dtype": "bfloat16"}) as recorder, recorder.step(0) as step:
            step("gradient", {f"grad.{NAME}": torch.full((size,), 1 + shift, dtype=torch.bfloat16)})
            step("param", {f"param.{NAME}": torch.full((size,), 0.5 - 10 * shift, dtype=torch.bfloat16)})
    row = _of_weight(tmp_path / "a", tmp_path / "b")
    assert row.verdict.value == "DIFF", row.reason
