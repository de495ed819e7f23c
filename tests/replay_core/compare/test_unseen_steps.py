"""What a bias that the loss does not see went through before the first recorded step is noise; what is wrong is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from replay_core.compare import Comparison, compare_runs
from replay_core.compare.unseen_steps import drift
from replay_core.dumps import open_run
from tests.builders import there
from tests.replay_core.compare.bias_models import WIDTH, trained

BIAS, OUTPUT = "self_attn.k_proj.bias", "self_attn.k_proj.output"
#: Which steps are recorded, of how many.
RECORDED: dict[str, tuple[int, Callable[[int], bool]]] = {
    "from the third on": (6, lambda step: step >= 2),
    "from the thirteenth on": (15, lambda step: step >= 12),
    "one in the middle": (4, lambda step: step == 3),
    "every third": (7, lambda step: step % 3 == 0),
    "every fifth": (16, lambda step: step % 5 == 0),
}

Own = dict[str, nn.Parameter]


def _compared(a: Path, b: Path) -> Comparison:
    return compare_runs(open_run(a), open_run(b))


@pytest.mark.parametrize("case", RECORDED)
def test_what_unrecorded_steps_made_of_such_a_bias_is_no_difference(case: str, tmp_path: Path):
    steps, is_recorded = RECORDED[case]
    a = trained(tmp_path / "a", steps=steps, is_recorded=is_recorded, halves=False)
    compared = _compared(a, trained(tmp_path / "b", steps=steps, is_recorded=is_recorded, halves=True))
    assert compared.first is None, (compared.first.name, compared.first.reason)
    assert compared.agrees
    said = [row.reason for row in compared.tensors if row.name == OUTPUT and "unrecorded steps" in row.reason]
    assert said, "the keys were off by more than the table allows, and ruled"
    assert "one constant for each channel" in said[0]


@pytest.mark.parametrize(
    ("is_fused", "is_transposed"), [(False, False), (True, False), (True, True)],
    ids=["alone", "with queries and values", "with them, stored [in, out], from 0 on"],
)  # fmt: skip
def test_weights_recorded_as_their_step_begins_made_the_outputs_of_that_step(
    is_fused: bool, is_transposed: bool, tmp_path: Path
):
    """Of a projection that is three in one the keys' third alone is excused."""
    bias = "self_attn.c_attn.bias" if is_fused else BIAS
    how: dict[str, Any] = {
        "steps": 3,
        "is_recorded": lambda _: True,
        "is_fused": is_fused,
        "are_before": True,
        "is_transposed": is_transposed,
    }
    a = trained(tmp_path / "a", halves=False, **how)
    compared = _compared(a, trained(tmp_path / "b", halves=True, **how))
    row = next(row for row in compared.tensors if row.name == f"param.{bias}" and row.key.step == 2)
    assert there(row.figures).max_abs > 1e-5, "the keys' bias went another way"
    assert compared.first is None, (compared.first.name, compared.first.reason)
    for third in range(3 if is_fused else 0):
        if third == 1:
            continue  # what is added to every key softmax does not see

        def shifted(one: nn.Parameter, third: int = third) -> None:
            one[third * WIDTH : third * WIDTH + 4] += 3e-3 * torch.tensor([1.0, -1.0, 1.0, -1.0])

        wrong = trained(tmp_path / f"wrong{third}", halves=True, after_step=_at(0, bias, shifted), **how)
        first = there(_compared(a, wrong).first)
        assert (first.name, first.key.step) == ("self_attn.c_attn.output", 1)


def _at(when: int, name: str, change: Callable[[nn.Parameter], object]) -> Callable[[int, Own], None]:
    def after(step: int, own: Own) -> None:
        if step == when:
            with torch.no_grad():
                change(own[name])

    return after


@pytest.mark.parametrize(
    ("what", "name", "change"),
    [
        ("scaled", BIAS, lambda one: one.mul_(1.05)),
        ("shifted", BIAS, lambda one: one.add_(0.01)),
        ("lost", BIAS, lambda one: one.zero_()),
        ("another order", BIAS, lambda one: one.copy_(one.flip(0))),
        ("another row's", "self_attn.k_proj.weight", lambda one: one[3].copy_(one[4])),
        ("a bias that is seen", "self_attn.v_proj.bias", lambda one: one.mul_(1.02)),
    ],
)
def test_what_went_wrong_before_the_records_is_found_in_the_first(
    what: str, name: str, change: Callable[[nn.Parameter], object], tmp_path: Path
):
    a = trained(tmp_path / "a", steps=5, is_recorded=lambda step: step >= 3, halves=False)
    b = trained(
        tmp_path / "b", steps=5, is_recorded=lambda step: step >= 3, halves=True, after_step=_at(2, name, change)
    )
    first = _compared(a, b).first
    assert first is not None, what
    assert first.key.step == 3
    assert first.name == f"{name.rpartition('.')[0]}.output"


def test_a_bias_that_stands_still_is_found_when_it_should_have_moved(tmp_path: Path):
    a = trained(tmp_path / "a", steps=6, is_recorded=lambda step: step >= 3, halves=False)
    b = trained(tmp_path / "b", steps=6, is_recorded=lambda step: step >= 3, halves=True, frozen=BIAS)
    first = _compared(a, b).first
    assert first is not None
    assert first.name == f"param.{BIAS}"
    assert first.key.step == 4, "the first step between two records"


def test_nothing_is_behind_the_first_step_of_a_run(tmp_path: Path):
    """A bias that is another in step 0 was loaded so."""
    a = trained(tmp_path / "a", steps=2, is_recorded=lambda _step: True, halves=False)
    b = trained(tmp_path / "b", steps=2, is_recorded=lambda _step: True, halves=True)
    assert _compared(a, b).first is None
    off = torch.rand(WIDTH, generator=torch.Generator().manual_seed(0)) * 2e-3 - 1e-3
    moved = _at(-1, BIAS, lambda one: one.add_(off))
    c = trained(tmp_path / "c", steps=2, is_recorded=lambda _step: True, halves=True, after_step=moved)
    first = _compared(a, c).first
    assert first is not None
    assert (first.key.step, first.name) == (0, OUTPUT)


def test_few_steps_may_all_point_one_way_and_many_do_not():
    assert [drift(steps) for steps in (1, 8, 200)] == [2, 16, 80]
