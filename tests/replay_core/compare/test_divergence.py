from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from replay_core import naming
from replay_core.compare.divergence import Origin, order_of
from replay_core.recorder import Recorder
from replay_core.records import RecordKey
from tests.builders import compare_fields, compare_paths
from tests.fixtures import FIXTURES


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
        assert compared.origin is not None
        assert compared.origin.module == f"layers.{broken[0]}.{broken[1]}"
        assert compared.first is not None
        assert compared.first.name == f"layers.{broken[0]}.{broken[1]}.output"


def test_without_recorded_inputs_no_module_is_accused(tmp_path: Path):
    right, wrong = ({k: v for k, v in modules(broken_from=b).items() if "output" in k} for b in (None, (0, "mlp")))
    compared = compare_fields(tmp_path, right, wrong)
    assert compared.first is not None
    assert compared.origin == Origin(None, "not told: no input was recorded")


def test_the_origin_produced_the_first_tensor_or_nothing_is_accused(tmp_path: Path):
    right = {
        "layers.0.inputs.0": torch.ones(2, 3),
        "layers.0.inputs.cos": torch.ones(2, 3),
        "layers.0.input_layernorm.inputs.0": torch.ones(2, 3),
        "layers.0.input_layernorm.output": torch.ones(2, 3),
    }
    wrong = {name: 2 * value if name.endswith(("cos", "output")) else value for name, value in right.items()}
    compared = compare_fields(tmp_path, right, wrong)
    assert compared.first is not None
    assert compared.first.name == "layers.0.inputs.cos"
    assert compared.origin == Origin(None, "handed in from outside; no recorded module produced it")


def test_what_a_part_is_given_was_made_by_the_module_around_it(tmp_path: Path):
    """Attention is no module of its own in many models: queries agree, what o_proj is given does not."""
    names = ("self_attn.inputs.0", "self_attn.q_proj.output", "self_attn.o_proj.inputs.0", "self_attn.output.0")
    right = {f"layers.0.{name}": torch.ones(2, 3) for name in names}
    wrong = {
        name: 2 * value if name.endswith(("o_proj.inputs.0", "output.0")) else value for name, value in right.items()
    }
    compared = compare_fields(tmp_path, right, wrong)
    assert compared.first is not None
    assert compared.first.name == "layers.0.self_attn.o_proj.inputs.0"
    assert compared.origin == Origin("layers.0.self_attn", "its inputs agree, its output does not")


def test_the_genuine_dumps_of_two_kernels_name_no_module_that_comes_later():
    a, b = (FIXTURES / "sglang_dumper" / name for name in ("baseline_sdpa_fp32", "target_eager_bf16"))
    compared = compare_paths(a, b)
    assert compared.first is not None
    assert compared.first.name == "layers.0.inputs.position_embeddings.0"
    assert compared.origin is not None
    assert compared.origin.module is None
    assert compared.origin.why.startswith("handed in from outside")


MODEL = [
    "embed_tokens.weight",
    *(
        f"layers.{layer}.{name}.weight"
        for layer in range(12)
        for name in (
            "input_layernorm", "self_attn.q_proj", "self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj",
            "mlp.down_proj",
        )
    ),
    "norm.weight",
    "lm_head.weight",
]  # fmt: skip


def test_names_of_a_model_sort_as_a_forward_comes_to_them():
    for prefix in ("", "model.", "param.", "grad."):
        names = [prefix + name for name in MODEL]
        assert sorted(sorted(names), key=naming.called) == names
    gpt = [
        "wte",
        "wpe",
        "h.2.ln_1",
        "h.2.attn.c_attn",
        "h.2.attn.c_proj",
        "h.2.ln_2",
        "h.2.mlp.c_fc",
        "h.10.ln_1",
        "ln_f",
    ]
    assert sorted(sorted(gpt), key=naming.called) == gpt
    inside = [
        "layers.2.inputs.0",
        "layers.2.mlp.inputs.0",
        "layers.2.mlp.output",
        "layers.2.output",
        "layers.10.inputs.0",
    ]
    assert sorted(sorted(inside), key=naming.called) == inside


def checkpoint(directory: Path, scaled: tuple[str, ...], shards: int) -> Path:
    """Weights as transformers saves them, some of them scaled."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    tensors = {f"model.{name}": torch.full((4, 4), 2.0 if name.startswith(scaled or ("-",)) else 1.0) for name in MODEL}
    for shard in range(shards):
        held = dict(list(tensors.items())[shard::shards])
        last = f"-{shard + 1:05d}-of-{shards:05d}" if shards > 1 else ""
        save_file(held, directory / f"model{last}.safetensors")
    return directory


@pytest.mark.parametrize("shards", [1, 3])
def test_the_first_weight_that_differs_is_the_first_that_is_used(shards: int, tmp_path: Path):
    """The format sorts by the alphabet: layers.10 stands before layers.2, lm_head before all of them."""
    base = checkpoint(tmp_path / "base", (), shards)
    later = checkpoint(tmp_path / "later", ("layers.10.", "layers.2.mlp", "lm_head"), shards)
    compared = compare_paths(base, later)
    assert [row.name for row in compared.tensors] == [f"param.{name}" for name in MODEL]
    assert compared.first is not None
    assert compared.first.name == "param.layers.2.mlp.gate_proj.weight"


@pytest.mark.parametrize(("stage", "what", "first"), [("param", "param", 2), ("gradient", "grad", 10)])
def test_our_own_recordings_know_no_order_of_weights_and_gradients_either(
    stage: str, what: str, first: int, tmp_path: Path
):
    """A model registers its parameters as somebody wrote them down; a backward reaches the last layer first."""
    registered = sorted(MODEL) if what == "param" else MODEL
    right = {f"{what}.{name}": torch.ones(3) for name in registered}
    wrong = {name: 2 * value if ".10." in name or ".2." in name else value for name, value in right.items()}
    compared = compare_fields(tmp_path, right, wrong, stage=stage)
    assert compared.first is not None
    assert f".{first}." in compared.first.name


STRANGE = ["tok.weight", "pos.weight", "trunk.0.up.weight", "trunk.1.up.weight", "fin.weight", "unembed.weight"]


@pytest.mark.parametrize(
    ("stage", "what", "expected"), [("param", "param", STRANGE), ("gradient", "grad", STRANGE[::-1])]
)
def test_parameters_of_names_nobody_knows_stand_as_the_model_registers_them(
    stage: str, what: str, expected: list[str], tmp_path: Path
) -> None:
    right = {f"{what}.{name}": torch.ones(3) for name in STRANGE}
    compared = compare_fields(tmp_path, right, {name: 2 * value for name, value in right.items()}, stage=stage)
    assert [row.name for row in compared.tensors] == [f"{what}.{name}" for name in expected]


def test_gradients_of_names_nobody_knows_stand_as_their_modules_were_called(tmp_path: Path) -> None:
    """Registered the other way round: the order in which a forward called them is the better one."""
    for side, factor in (("a", 1.0), ("b", 2.0)):
        with Recorder(tmp_path / side).step(0, rank=0) as step:
            step("modules", micro=0, **{f"{name.rpartition('.')[0]}.output": torch.ones(2, 3) for name in STRANGE})
            step("gradient", {f"grad.{name}": factor * torch.ones(3) for name in STRANGE[::-1]}, micro=None)
    compared = compare_paths(tmp_path / "a", tmp_path / "b")
    names = [row.name for row in compared.tensors if row.name.startswith("grad.")]
    assert names == [f"grad.{name}" for name in STRANGE[::-1]]


def test_a_safetensors_file_of_module_tensors_is_in_the_order_of_computation(tmp_path: Path):
    names = [f"layers.{layer}.{part}" for layer in (2, 10) for part in ("inputs.0", "mlp.output", "output")]
    for side, scale in (("a", 1.0), ("b", 2.0)):
        save_file({name: torch.full((2, 3), scale) for name in names}, tmp_path / f"{side}.safetensors")
    compared = compare_paths(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert [row.name for row in compared.tensors] == names


def test_a_mask_or_bookkeeping_is_never_first(tmp_path: Path):
    a = {"loss_mask": torch.ones(2, 3), "timestamp": 1.0, "x": torch.ones(2)}
    b = {"loss_mask": torch.zeros(2, 3), "timestamp": 2.0, "x": torch.ones(2)}
    compared = compare_fields(tmp_path, a, b)
    assert compared.first is None
    assert compared.counts["DIFF"] == 1
    assert compared.notes_not_compared == 1
