"""A trainer's dump and an engine's of the same model meet module by module, in compare and before the referee."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from replay_core import workbench
from replay_core.compare import compare_runs
from replay_core.dumps import open_run
from replay_core.recorder import Recorder
from tests.engine import Engine, tiny_llama

LENGTHS = (14, 9, 17)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("weights") / "model")


def _rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(1, 96, (length,), generator=generator) for length in LENGTHS]


@pytest.fixture(scope="module")
def trained(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a trainer records: transformers' model, padded."""
    model = LlamaForCausalLM.from_pretrained(weights, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    ids = nn.utils.rnn.pad_sequence(_rows(), batch_first=True)
    mask = (ids > 0).long()
    folder = tmp_path_factory.mktemp("trained") / "dump"
    with Recorder(folder) as recorder, recorder.step(0) as step, torch.no_grad():
        with step.modules(model, inputs=True, micro=0):
            model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), use_cache=False)
        step("forward_data", input_ids=ids, attention_mask=mask, micro=0)
    return folder


def _served(weights: Path, folder: Path, factor: float = 1.0) -> Path:
    """What an engine's hooks record: the samples one after the other."""
    theirs = LlamaForCausalLM.from_pretrained(weights, dtype=torch.bfloat16)
    engine = Engine(theirs).eval()
    with torch.no_grad():
        engine.model.layers[1].mlp.gate_up_proj.weight[100:104] *= factor
    bounds = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    ids, positions = torch.cat(_rows()), torch.cat([torch.arange(length) for length in LENGTHS])
    with Recorder(folder) as recorder, recorder.step(0) as step, torch.no_grad():
        with step.modules(engine, inputs=True, micro=0):
            engine(ids, positions, bounds)
        step("forward_data", input_ids=ids, position_ids=positions, cu_seqlens=torch.tensor(bounds), micro=0)
    return folder


MEETING = {
    "embed_tokens.output", "norm.inputs.0", "norm.output",
    *(f"layers.{layer}.{name}" for layer in (0, 1) for name in (
        "input_layernorm.output", "self_attn.q_proj.output", "self_attn.k_proj.output", "self_attn.v_proj.output",
        "self_attn.o_proj.inputs.0", "self_attn.o_proj.output", "post_attention_layernorm.inputs.0",
        "post_attention_layernorm.output", "mlp.gate_proj.output", "mlp.up_proj.output", "mlp.down_proj.inputs.0",
        "mlp.down_proj.output", "mlp.output")),
}  # fmt: skip


def test_an_engines_modules_meet_a_trainers_one_by_one(weights: Path, trained: Path, tmp_path: Path):
    compared = compare_runs(open_run(trained), open_run(_served(weights, tmp_path / "b")))
    met = {row.name for row in compared.tensors if row.a is not None and row.b is not None and row.figures is not None}
    assert met >= MEETING
    near = {
        row.name: row.figures.total.rel_l2
        for row in compared.tensors
        if row.name in MEETING and row.figures is not None
    }
    assert max(near.values()) < 0.03, "the same numbers, but for bf16 and other kernels"


@pytest.mark.long
def test_the_referee_rules_an_engine_beside_a_trainer(weights: Path, trained: Path, tmp_path: Path):
    doc = workbench.referee(trained, _served(weights, tmp_path / "b"), weights_a=str(weights), weights_b=str(weights))
    assert doc["ruling"] == "NOISE", doc["sentence"]
    assert doc["b"] is not None
    assert {one["tensor"] for one in doc["b"]["tensors"]} >= MEETING - {"embed_tokens.output"}


@pytest.mark.long
def test_a_fault_in_a_fused_projection_is_named_by_the_trainers_name(weights: Path, trained: Path, tmp_path: Path):
    wrong = _served(weights, tmp_path / "b", factor=1.05)
    doc = workbench.referee(trained, wrong, weights_a=str(weights), weights_b=str(weights))
    assert (doc["ruling"], doc["side"], doc["module"]) == ("BUG", "b", "layers.1.mlp.up_proj"), doc["sentence"]
    assert doc["what"] is not None
    assert doc["what"].startswith("channels 4, 5, 6, 7"), doc["what"]
