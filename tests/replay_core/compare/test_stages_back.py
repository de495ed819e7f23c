"""Where a backward goes wrong: told by which gradients agree, in its order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from replay_core.compare.parallel import parallel
from tests.builders import there
from tests.replay_core.compare.ranks.recorded import compared, random

IDS = torch.randint(2, 40, (2, 16), generator=torch.Generator().manual_seed(3))
OUT = random(2, 16, 8)
#: The layers of a model of two, and its head.
NAMES = (
    "embed_tokens", "layers.0.input_layernorm", "layers.0.q_proj", "layers.1.input_layernorm", "layers.1.q_proj",
    "norm", "lm_head",
)  # fmt: skip
WHOLE = {name: random(8 if "norm" in name else 12, *(() if "norm" in name else (8,)), seed=seed)
         for seed, name in enumerate(NAMES)}  # fmt: skip


def step(gradients: Mapping[str, Tensor], **more: Any) -> dict[str, Any]:
    return {
        "batch_inputs": {"input_ids": IDS}, "modules": {"layers.0.output": OUT},
        "gradient": {f"grad.{name}.weight": values.contiguous() for name, values in gradients.items()}, **more,
    }  # fmt: skip


def told(folder: Path, one: Mapping[str, Any], *ranks: Mapping[str, Any]) -> tuple[set[tuple[str, Any]], Any]:
    found = compared(folder, one, *ranks)
    said = there(parallel(found.tensors, found.together))
    return {(one.fault.kind, one.fault.ranks) for one in said.faults}, said.origins


def others(names: tuple[str, ...], seed: int = 40) -> dict[str, Tensor]:
    return {name: random(*WHOLE[name].shape, seed=seed + at) for at, name in enumerate(names)}


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_stage_that_went_back_with_another_gradient_is_named(is_tied: bool, tmp_path: Path) -> None:
    """A head that is the embedding too has the sum of both: what the first stage made wrong is in the last one's."""
    whole = {**WHOLE, "lm_head": WHOLE["embed_tokens"]} if is_tied else WHOLE
    first = others(NAMES[:3])
    last = {name: whole[name] for name in NAMES[3:]}
    if is_tied:
        last["lm_head"] = first["embed_tokens"]
    stages = step(first), {**step(last), "batch_inputs": {"hidden_states": OUT}, "modules": {"layers.1.output": OUT}}
    one = step(whole)
    one["modules"] = {"layers.0.output": OUT, "layers.1.output": OUT}
    assert told(tmp_path, one, *stages) == ({("went back otherwise", (0,))}, (0,))


@pytest.mark.parametrize("from_layer", [True, False])
def test_a_layer_whose_parts_are_not_summed_in_the_backward_is_named(from_layer: bool, tmp_path: Path) -> None:
    """Its own gradients agree; the norm in front of it, and all before, do not."""
    wrong = others(NAMES[:4] if from_layer else NAMES[2:4])
    held = {**WHOLE, **wrong}
    ranks = [
        step({name: values.chunk(2)[rank] if "q_proj" in name else values for name, values in held.items()})
        for rank in (0, 1)
    ]
    expected = {("went back in parts", (0, 1))} if from_layer else set()
    assert told(tmp_path, step(WHOLE), *ranks)[0] == expected


@pytest.mark.parametrize("apart", [0.0, 0.01])
def test_what_a_layer_hands_back_in_parts_is_named_where_all_is_clipped_by_its_norm(
    apart: float, tmp_path: Path
) -> None:
    """The head's own gradient is off by one factor alone; with more than that it is off itself."""
    wrong = {**others(NAMES[:6]), "lm_head": 1.25 * (WHOLE["lm_head"] + apart * random(12, 8, seed=77))}
    ranks = [
        step({name: values.chunk(2)[rank] if name == "lm_head" else values for name, values in wrong.items()})
        for rank in (0, 1)
    ]
    expected = set() if apart else {("went back in parts", (0, 1))}
    assert {one for one in told(tmp_path, step(WHOLE), *ranks)[0] if one[0] == "went back in parts"} == expected


def test_a_layer_that_two_stages_have_is_named(tmp_path: Path) -> None:
    first = {name: WHOLE[name] for name in NAMES[:3]}
    last = {name: WHOLE[name] for name in NAMES[1:]}
    one = step(WHOLE)
    one["modules"] = {"layers.0.output": OUT, "layers.1.output": OUT}
    wrong = {"layers.0.output": random(2, 16, 8, seed=9), "layers.1.output": random(2, 16, 8, seed=10)}
    stages = step(first), {**step(last), "modules": wrong}
    assert ("layer twice", (1,)) in told(tmp_path, one, *stages)[0]


@pytest.mark.parametrize(("off", "expected"), [("gate", {("router's loss", (0, 1))}), ("norm", set())])
def test_a_loss_that_is_another_from_a_router_on_is_told(off: str, expected: set[Any], tmp_path: Path) -> None:
    names = ("layers.0.gate", "norm")
    whole = {name: random(8, 8, seed=at) for at, name in enumerate(names)}
    wrong = {name: values * 1.3 + random(8, 8, seed=9) if off in name else values for name, values in whole.items()}
    a, b = step(whole, loss={"loss": 3.0}), step(wrong, loss={"loss": 3.5})
    assert told(tmp_path, a, b, b)[0] == expected


@pytest.mark.parametrize(("off", "is_told"), [
    (("router", "before"), True), (("router",), False), (("experts.0", "router", "before"), False),
    (("before",), False),
])  # fmt: skip
def test_a_router_whose_experts_went_back_right_is_named(off: tuple[str, ...], is_told: bool, tmp_path: Path) -> None:
    """What comes back to it through the weights of its experts' outputs is lost on the way, and all before is off."""
    layer = [f"layers.1.mlp.{name}" for name in ("experts.0.w1", "experts.1.w1", "router")]
    before = ["embed_tokens", "layers.0.input_layernorm", "layers.1.input_layernorm"]
    names = [*before, *layer, "norm"]
    whole = {name: random(8, 8, seed=at) for at, name in enumerate(names)}
    is_off = {name for name in layer if any(one in name for one in off)} | set(before if "before" in off else ())
    wrong = {name: random(8, 8, seed=50 + at) if name in is_off else whole[name] for at, name in enumerate(names)}
    a, b = ({**step(of), "optimizer": {"grad_norm": norm}} for of, norm in ((whole, 1.0), (wrong, 1.5)))
    assert (("router's gradient", (0, 1)) in told(tmp_path, a, b, b)[0]) is is_told


@pytest.mark.parametrize(("off", "expected"), [
    (("v_proj",), {("went back in parts", (0, 1))}), (("k_proj", "v_proj"), {("went back in parts", (0, 1))}),
    (("q_proj", "k_proj", "v_proj", "o_proj"), set()), ((), set()),
])  # fmt: skip
def test_a_layer_beside_others_through_which_a_part_is_lost_is_named(
    off: tuple[str, ...], expected: set[Any], tmp_path: Path
) -> None:
    """What is before is off as well; the norm of the gradients, which is made of all, says nothing of the forward."""
    layers = [f"layers.1.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    names = ["embed_tokens", "layers.0.input_layernorm", "layers.0.mlp", "layers.1.input_layernorm", *layers, "norm"]
    whole = {name: random(8, 8, seed=at) for at, name in enumerate(names)}
    is_off = {name for name in names[:4] if off} | {name for name in layers if name.endswith(off or ("none",))}
    wrong = {name: random(8, 8, seed=50 + at) if name in is_off else whole[name] for at, name in enumerate(names)}
    a, b = ({**step(of), "optimizer": {"grad_norm": norm}} for of, norm in ((whole, 1.0), (wrong, 1.5)))
    assert told(tmp_path, a, b, b)[0] == expected


@pytest.mark.parametrize("is_same", [False, True])
def test_a_module_that_is_called_once_more_with_other_values_is_named(is_same: bool, tmp_path: Path) -> None:
    """A checkpoint computes a layer again, and it puts out what it did."""
    first, second = random(2, 16, 8, seed=1), random(2, 16, 8, seed=2)
    modules = {"layers.0.output": OUT, "layers.0.mlp.output": first, "layers.1.output": first}
    more = {
        "layers.0.mlp[1].output": first if is_same else second, "layers.0[1].output": OUT if is_same else second,
    }  # fmt: skip
    one = {**step(WHOLE), "modules": modules}
    wrong = {**step(WHOLE), "modules": {**modules, "layers.1.output": second, **more}}
    found = told(tmp_path, one, wrong, wrong)[0]
    assert (("called again", (0, 1)) in found) is not is_same


def test_a_tied_weight_is_told_by_its_parts_where_gradients_are_recorded_under_the_weights_own_names(
    tmp_path: Path,
) -> None:
    """The stage of a record says that it holds gradients; its names need not."""
    own = {name: values for name, values in WHOLE.items() if name != "lm_head"}
    head, embed = random(12, 8, seed=20), random(12, 8, seed=21)
    whole = {**own, "embed_tokens": head + embed, "lm_head": head + embed}
    stages = (
        {"embed_tokens": embed, **{n: v for n, v in own.items() if n.startswith("layers.0")}},
        {**{n: v for n, v in own.items() if n.startswith(("layers.1", "norm"))}, "lm_head": head},
    )

    def bare(gradients: Mapping[str, Tensor]) -> dict[str, Any]:
        return {**step({}), "gradient": {f"{name}.weight": values.contiguous() for name, values in gradients.items()}}

    assert told(tmp_path, bare(whole), *map(bare, stages))[0] == {("not summed", (0, 1))}
