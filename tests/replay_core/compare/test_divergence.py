from __future__ import annotations

import random
from pathlib import Path

import torch

from replay_core.compare.divergence import order_of
from replay_core.records import RecordKey
from tests.builders import compare_fields


def test_names_sort_by_the_phase_they_are_computed_in():
    def at(name: str, stage: str = "tensors", order: int = 0, micro: int | None = 0, rank: int = 0) -> tuple[int, ...]:
        return order_of(RecordKey(0, micro, rank, stage=stage), name, order)

    expected = [
        at("trajectories.input_ids", "trajectory", micro=None),
        at("advantages", "datums", micro=None),
        at("input_ids"),
        at("layers.0.mlp.output", "modules", 3),
        at("layers.1.mlp.output", "modules", 4),
        at("layers.1.mlp.output", "modules", 4, rank=1),
        at("policy_logprobs", "forward_data"),
        at("loss", "loss"),
        at("grad.w", "gradient", 9),
        at("input_ids", micro=1),
        at("grad_norm", "gradient", micro=None),
        at("param.w", "param", micro=None),
        order_of(RecordKey(1, 0, 0), "input_ids", 0),
    ]
    shuffled = random.Random(0).sample(expected, len(expected))
    assert sorted(shuffled) == expected


LAYER = ("self_attn.q_proj", "self_attn.o_proj", "self_attn", "mlp")


def modules(*, broken_from: tuple[int, str] | None) -> dict[str, torch.Tensor]:
    """Two layers of recorded inputs and outputs; from one module on everything is wrong."""
    fields: dict[str, torch.Tensor] = {}
    wrong = False
    for layer in range(2):
        for module in LAYER:
            name = f"layers.{layer}.{module}"
            # self_attn takes the layer's input, which was right before its parts went wrong.
            given = wrong and not (module == "self_attn" and broken_from and broken_from[0] == layer)
            fields[f"{name}.inputs.0"] = torch.full((2, 3), 2.0 if given else 1.0)
            wrong = wrong or (layer, module) == broken_from
            fields[f"{name}.output"] = torch.full((2, 3), 2.0 if wrong else 1.0)
    return fields


def test_the_origin_is_the_smallest_module_that_turns_right_into_wrong(tmp_path: Path):
    for number, broken in enumerate([(0, "self_attn.o_proj"), (1, "mlp"), (1, "self_attn.q_proj")]):
        compared = compare_fields(tmp_path / str(number), modules(broken_from=None), modules(broken_from=broken))
        assert compared.origin == f"layers.{broken[0]}.{broken[1]}"
        assert compared.first is not None
        assert compared.first.name == f"layers.{broken[0]}.{broken[1]}.output"


def test_without_recorded_inputs_no_module_is_accused(tmp_path: Path):
    right, wrong = ({k: v for k, v in modules(broken_from=b).items() if "output" in k} for b in (None, (0, "mlp")))
    compared = compare_fields(tmp_path, right, wrong)
    assert compared.first is not None
    assert compared.origin is None


def test_a_mask_or_bookkeeping_is_never_first(tmp_path: Path):
    a = {"loss_mask": torch.ones(2, 3), "timestamp": 1.0, "x": torch.ones(2)}
    b = {"loss_mask": torch.zeros(2, 3), "timestamp": 2.0, "x": torch.ones(2)}
    compared = compare_fields(tmp_path, a, b)
    assert compared.first is None
    assert compared.counts["DIFF"] == 1
    assert compared.notes_not_compared == 1
