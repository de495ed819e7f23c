"""What stages of a pipeline hand to each other is held against what one process has between two layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.compare import Comparison, compare_runs
from replay_core.dumps import open_run
from tests.builders import there
from tests.replay_core.compare.ranks.recorded import compared, random, write

IDS = torch.randint(2, 99, (4, 16), generator=torch.Generator().manual_seed(3))
FIRST, BETWEEN, LAST, LOGITS = (random(4, 16, width) for width in (8, 8, 8, 96))


def given(**modules: torch.Tensor) -> dict[str, Any]:
    named = {name.replace("__", "."): values for name, values in modules.items()}
    return {"batch_inputs": {"input_ids": IDS}, "modules": named}


WHOLE = given(
    model__layers__0__inputs__0=FIRST, model__layers__0__output=BETWEEN, model__layers__1__inputs__0=BETWEEN,
    model__layers__1__output=LAST, model__output=LAST, lm_head__output=LOGITS,
)  # fmt: skip


def stages(handed_on: torch.Tensor, handed_in: torch.Tensor) -> list[dict[str, Any]]:
    return [
        given(model__layers__0__inputs__0=FIRST, model__layers__0__output=BETWEEN, model__output=handed_on),
        given(
            model__inputs__2=handed_in, model__layers__1__inputs__0=handed_in, model__layers__1__output=LAST,
            model__output=LAST, lm_head__output=LOGITS,
        ),
    ]  # fmt: skip


def verdicts(found: Comparison) -> dict[str, str]:
    return {row.name: row.verdict.value for row in found.tensors}


def test_the_module_around_the_layers_returns_on_each_stage_what_its_last_layer_did(tmp_path: Path) -> None:
    found = compared(tmp_path, WHOLE, *stages(BETWEEN, BETWEEN))
    assert set(verdicts(found).values()) == {"SAME"}
    assert "model.output" in verdicts(found)
    assert any("model.output of rank 0 (as layers.0.output)" in note for note in found.notes)
    assert any("model.inputs.2 of rank 1 (as layers.1.inputs.0)" in note for note in found.notes)


def test_a_stage_that_hands_on_something_else_parts_where_the_next_begins(tmp_path: Path) -> None:
    found = compared(tmp_path, WHOLE, *stages(BETWEEN + 1, BETWEEN))
    row = there(found.first)
    assert row.name == "layers.1.inputs.0"
    assert there(row.ranks).parted == (0,)


def test_a_last_stage_is_held_against_the_final_output(tmp_path: Path) -> None:
    first, last = stages(BETWEEN, BETWEEN)
    last["modules"]["model.output"] = LAST + 1
    found = compared(tmp_path, WHOLE, first, last)
    assert there(found.first).name == "model.output"


@pytest.mark.parametrize("off", [0.0, 1.0])
def test_what_one_stage_returned_and_the_next_was_given_is_nothing_that_one_process_lacks(
    off: float, tmp_path: Path
) -> None:
    whole = given(forward__output__logits=LOGITS)
    first, last = given(forward__output__hidden=BETWEEN), given(forward__output__logits=LOGITS)
    last["batch_inputs"] = {**last["batch_inputs"], "hidden": BETWEEN + off}
    found = compared(tmp_path, whole, first, last)
    missing = {name for name, verdict in verdicts(found).items() if verdict == "MISSING"}
    assert missing == ({"hidden", "forward.output.hidden"} if off else set())
    assert any("has nothing that it could be compared with" in note for note in found.notes) == (not off)


@pytest.mark.parametrize("off", [0.0, 1.0])
def test_what_a_stage_returns_is_its_last_layers_output_where_layers_are_recorded(off: float, tmp_path: Path) -> None:
    layers = {"layers.0.output": BETWEEN, "layers.1.inputs.0": BETWEEN, "layers.1.output": LAST}
    outputs = {"forward.output.logits": LOGITS}
    whole = given(**layers, **outputs)
    first = given(**{"layers.0.output": BETWEEN, "forward.output.hidden": BETWEEN + off})
    last = given(**{"layers.1.inputs.0": BETWEEN + off, "layers.1.output": LAST}, **outputs)
    last["batch_inputs"] = {**last["batch_inputs"], "inputs_embeds": BETWEEN + off}
    found = compared(tmp_path, whole, first, last)
    assert "MISSING" not in verdicts(found).values()
    assert verdicts(found)["layers.1.inputs.0"] == ("DIFF" if off else "SAME")


@pytest.mark.parametrize("off", [0.0, 1.0])
def test_a_model_that_returns_one_tensor_hands_on_its_last_layers_output(off: float, tmp_path: Path) -> None:
    layers = {"layers.0.output": BETWEEN, "layers.1.output": LAST}
    whole = given(**layers, **{"forward.output": LOGITS})
    first = given(**{"layers.0.output": BETWEEN, "forward.output": BETWEEN})
    last = given(**{"layers.1.output": LAST, "forward.output": LOGITS + off})
    last["batch_inputs"] = {**last["batch_inputs"], "hidden": BETWEEN}
    found = compared(tmp_path, whole, first, last)
    assert not {"MISSING", "SHAPE"} & set(verdicts(found).values())
    assert verdicts(found)["forward.output"] == ("DIFF" if off else "SAME")


@pytest.mark.parametrize("name", ["forward.output", "lm_out.output", "head.output", "unembed.output"])
def test_words_past_the_other_runs_vocabulary_are_none_of_its_logits(name: str, tmp_path: Path) -> None:
    logits = random(4, 16, 61)
    padded = torch.cat([logits, random(4, 16, 3, seed=1)], -1)
    # What a model returns are words where its head put out as many.
    names = ("unembed.output", name) if name == "forward.output" else (name,)
    ranks = [given(**dict.fromkeys(names, own.contiguous())) for own in padded.chunk(2, -1)]
    found = compared(tmp_path, given(**dict.fromkeys(names, logits)), *ranks)
    assert verdicts(found)[name] == "SAME"
    assert any("a padded vocabulary" in note for note in found.notes)


@pytest.mark.parametrize("name", ["forward.output", "lm_backbone.layers.0.mlp.output", "layers.0.o_proj.output"])
def test_channels_past_the_other_runs_are_none_of_a_padded_vocabulary(name: str, tmp_path: Path) -> None:
    whole = random(4, 16, 15)
    ranks = [given(**{name: one}) for one in (whole[..., :8].contiguous(), random(4, 16, 8, seed=3))]
    found = compared(tmp_path, given(**{name: whole}), *ranks)
    assert verdicts(found)[name] in ("SHAPE", "DIFF")


@pytest.mark.parametrize(("factor", "expected"), [(1.0, "SAME"), (1.5, "DIFF")])
def test_stages_that_are_cut_otherwise_are_held_against_each_other_layer_by_layer(
    factor: float, expected: str, tmp_path: Path
) -> None:
    layers = [random(4, 16, 8, seed=seed) for seed in range(4)]

    def cut(first: int, *, times: float = 1.0) -> list[dict[str, Any]]:
        outputs = [{f"model__layers__{layer}__output": values} for layer, values in enumerate(layers)]
        outputs[2] = {"model__layers__2__output": layers[2] * times}
        return [given(**{k: v for one in part for k, v in one.items()}) for part in (outputs[:first], outputs[first:])]

    a, b = write(tmp_path / "a", *cut(2)), write(tmp_path / "b", *cut(3, times=factor))
    found = verdicts(compare_runs(open_run(a), open_run(b)))
    assert len(found) >= 4
    assert "MISSING" not in found.values()
    assert found["layers.2.output"] == expected
