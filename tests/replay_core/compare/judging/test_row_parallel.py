"""A layer that is a gate and what it gates in one, whose ranks took the halves of their own slice for these."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from replay_core.compare.judging import row_parallel
from replay_core.compare.judging.faults import Fault
from replay_core.compare.parallel import parallel
from tests.builders import there
from tests.replay_core.compare.ranks.in_memory import alike, as_ref, cut
from tests.replay_core.compare.ranks.recorded import Step, compared, random

WIDE, HIDDEN = 16, 8
IDS = torch.arange(2, 14).reshape(2, 6)
X, GATE, UP, DOWN = random(2, 6, HIDDEN), random(WIDE, HIDDEN, seed=1), random(WIDE, HIDDEN, seed=2), random(
    HIDDEN, WIDE, seed=3
)  # fmt: skip
FUSED, WEIGHT = X @ torch.cat([GATE, UP]).T, torch.cat([GATE, UP])
RIGHT = (silu(X @ GATE.T) * (X @ UP.T)) @ DOWN.T


def halves(fused: Tensor) -> Tensor:
    gate, up = fused.chunk(2, -1)
    return silu(gate) * up


def straight(ranks: int) -> Tensor:
    """What all ranks hold where each takes its slice in turn for a gate and what it gates."""
    parts = zip(FUSED.chunk(ranks, -1), DOWN.chunk(ranks, 1), strict=True)
    return torch.stack([halves(own) @ columns.T for own, columns in parts]).sum(0)


def shares(values: Tensor, axis: int, ranks: int) -> list[Tensor]:
    gate, up = values.chunk(2, axis)
    return [torch.cat(own, axis) for own in zip(gate.chunk(ranks, axis), up.chunk(ranks, axis), strict=True)]


def step(fused: Tensor, weight: Tensor, output: Tensor, down: Tensor) -> Step:
    name = "layers.0.mlp"
    return {
        "batch_inputs": {"input_ids": IDS},
        "modules": {f"{name}.gate_up_proj.output": fused.contiguous(), f"{name}.down_proj.output": output},
        "param": {
            f"param.{name}.gate_up_proj.weight": weight.contiguous(),
            f"param.{name}.down_proj.weight": down.contiguous(),
        },
    }


CASES: dict[str, tuple[bool, Tensor, set[tuple[str, tuple[int, ...]]]]] = {
    "in turn, and taken so": (True, straight(2), {("order", (0, 1))}),
    "a share of both": (False, RIGHT, set()),
    "a share of both, and wrong otherwise": (False, RIGHT + random(2, 6, HIDDEN, seed=4), set()),
    "in turn, and wrong otherwise": (True, RIGHT + random(2, 6, HIDDEN, seed=4), set()),
}


@pytest.mark.parametrize("case", CASES)
def test_a_gate_that_is_cut_straight_is_told_by_the_layer_behind(case: str, tmp_path: Path) -> None:
    is_in_turn, output, expected = CASES[case]
    fused, weights = ([*FUSED.chunk(2, -1)], [*WEIGHT.chunk(2)]) if is_in_turn else (
        shares(FUSED, -1, 2), shares(WEIGHT, 0, 2)
    )  # fmt: skip
    ranks = [step(fused[rank], weights[rank], output, DOWN.chunk(2, 1)[rank]) for rank in range(2)]
    found = compared(tmp_path, step(FUSED, WEIGHT, RIGHT, DOWN), *ranks)
    assert {(one.fault.kind, one.fault.ranks) for one in there(parallel(found.tensors, found.together)).faults} == (
        expected
    )


def told(output: Tensor, fused: Tensor = FUSED, whole: Tensor = RIGHT, ranks: int = 2) -> Fault | None:
    return row_parallel.cut_straight(
        "down.output", as_ref(whole), alike(*[output] * ranks), cut(fused.chunk(ranks, -1), len(fused.shape) - 1,
        "gate_up.output"), cut(DOWN.chunk(ranks, 1), 1),
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_gate_with_what_is_no_gate_are_named(ranks: int) -> None:
    fault = there(told(straight(ranks), ranks=ranks))
    assert (fault.kind, fault.ranks) == ("order", tuple(range(ranks)))
    assert f"gate_up is cut among ranks 0{' and 1' if ranks == 2 else ', 1, 2 and 3'} in turn" in fault.sentence


def test_a_gate_may_stand_last() -> None:
    """Its halves change places: in the whole, and in what each rank takes."""
    swapped = torch.cat(FUSED.chunk(2, -1)[::-1], -1)
    parts = [silu(own[..., 8:]) * own[..., :8] for own in swapped.chunk(2, -1)]
    output = sum(part @ columns.T for part, columns in zip(parts, DOWN.chunk(2, 1), strict=True))
    assert isinstance(output, Tensor)
    assert there(told(output, swapped)).kind == "order"


@pytest.mark.parametrize("output", [RIGHT, RIGHT * (1 + 1e-3), straight(2) / 2, RIGHT * torch.nan])
def test_an_output_that_halves_of_slices_do_not_make_is_not_explained(output: Tensor) -> None:
    assert told(output) is None
    assert told(output, whole=RIGHT * torch.nan) is None


@pytest.mark.parametrize("rows", [0, 5])
def test_a_layer_of_other_tokens_is_not_asked(rows: int) -> None:
    """An expert's, which was given some of them or none."""
    assert told(straight(2), random(rows, 2 * WIDE)) is None


def layer(output: Tensor) -> Step:
    name = "layers.0.mlp"
    return {
        "batch_inputs": {"input_ids": IDS},
        "modules": {f"{name}.act.output": halves(FUSED), f"{name}.down_proj.output": output},
        "param": {f"param.{name}.down_proj.weight": DOWN},
    }


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_output_that_is_not_finite_is_no_sum_of_parts_and_no_error(value: float, tmp_path: Path) -> None:
    off = RIGHT.clone()
    off[0, 1, 2] = value
    one = layer(RIGHT)
    ranks = []
    for rank in range(2):
        own = {stage: dict(fields) for stage, fields in layer(off).items()}
        own["modules"]["layers.0.mlp.act.output"] = halves(FUSED).chunk(2, -1)[rank].contiguous()
        own["param"]["param.layers.0.mlp.down_proj.weight"] = DOWN.chunk(2, 1)[rank].contiguous()
        ranks.append(own)
    found = compared(tmp_path, one, *ranks)
    assert {one.fault.kind for one in there(parallel(found.tensors, found.together)).faults} == {"apart"}
