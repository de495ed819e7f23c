"""Whether a batch fits a model, asked of small models before any forward."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GPT2Config, LlamaConfig

from replay_core.errors import CellError, ModelError
from replay_core.replay import fit
from replay_core.replay.flags import Flags
from replay_core.replay.packing import arrange
from tests.builders import padded_batch

SMALL = {"vocab_size": 32, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def llama():
    config = LlamaConfig(hidden_size=8, intermediate_size=16, num_hidden_layers=1, max_position_embeddings=16, **SMALL)
    torch.manual_seed(0)
    return AutoModel.from_config(config).eval()


@pytest.fixture(scope="module")
def gpt2():
    torch.manual_seed(0)
    return AutoModel.from_config(GPT2Config(vocab_size=32, n_embd=8, n_layer=1, n_head=2, n_positions=16)).eval()


def batch_of(ids, mask=None):
    return padded_batch([ids], [mask or [1] * len(ids)])


def test_the_largest_and_the_smallest_id_decide(llama):
    fit.need_vocabulary(32, batch_of([0, 31]), "model")
    with pytest.raises(ModelError, match="vocabulary is too small") as refused:
        fit.need_vocabulary(32, batch_of([0, 32]), "model")
    assert (refused.value.expected, refused.value.found) == ("token ids 0..31", "token ids 0..32")
    with pytest.raises(ModelError, match="negative token ids"):
        fit.need_vocabulary(32, batch_of([-1, 3]), "model")


def test_padding_is_the_padded_cells_own_matter():
    batch = batch_of([5, 6, -100], [1, 1, 0])
    fit.need_vocabulary(32, batch, "model")
    fit.need_padding(32, arrange(batch, Flags(rows_per_forward=1)))
    with pytest.raises(CellError, match="padding holds ids") as refused:
        fit.need_padding(32, arrange(batch, Flags()))
    assert refused.value.found == "-100"


def test_a_table_of_positions_ends_and_rotary_positions_do_not(llama, gpt2):
    for model in (llama, gpt2):
        assert fit.need_positions(model, model.config, 16) is None
    with pytest.raises(CellError, match="a row of 17 tokens is longer"):
        fit.need_positions(gpt2, gpt2.config, 17)
    assert "17 tokens pass the 16 positions" in fit.need_positions(llama, llama.config, 17)


def test_a_model_that_drops_its_positions_is_found_out(llama, gpt2):
    class Deaf(torch.nn.Module):
        def forward(self, input_ids, **_dropped):
            return llama(input_ids)

    ids_1T = torch.arange(4, 12)[None]
    with torch.no_grad():
        assert fit.heeds_positions(llama, ids_1T)
        assert fit.heeds_positions(gpt2, ids_1T)
        assert not fit.heeds_positions(Deaf(), ids_1T)


def test_a_model_that_refuses_positions_of_no_batch_reads_them(gpt2):
    class CountedFromTheEnd(torch.nn.Module):
        def forward(self, input_ids, position_ids, **more):
            return gpt2(input_ids, position_ids=(position_ids.diff(prepend=position_ids[:, :1] - 1) - 1) * -9, **more)

    with torch.no_grad():
        assert fit.heeds_positions(CountedFromTheEnd(), torch.arange(4, 12)[None])


def test_attention_without_its_mask_is_named():
    assert fit.mask_note("sdpa") is None
    assert "registered without its mask function" in fit.mask_note("somebodys_own")


def test_the_first_weight_that_is_not_finite_is_named(llama):
    assert fit.not_finite(llama) is None
    weight = llama.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        kept = weight[0, 0].clone()
        weight[0, 0] = float("inf")
        assert fit.not_finite(llama) == "layers.0.mlp.up_proj.weight"
        weight[0, 0] = kept


@pytest.mark.parametrize("name", ["num_hidden_layers", "n_layer", "num_local_experts", "n_routed_experts", "depth"])
def test_a_config_of_more_parts_than_any_model_has_is_refused_before_one_is_built(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "text_config": {name: 10**9}}))
    with pytest.raises(ModelError, match="more parts than any model has") as refused:
        fit.need_layers(tmp_path)
    assert f"{name} of at most {'16,384' if 'expert' in name else '4,096'}" in str(refused.value)
    (tmp_path / "config.json").write_text(json.dumps({name: 60, "shared_expert_intermediate_size": 20480}))
    fit.need_layers(tmp_path)


def test_a_config_of_a_far_larger_model_than_is_stored_takes_no_memory(tmp_path):
    small = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                        num_attention_heads=2, num_key_value_heads=2)  # fmt: skip
    AutoModelForCausalLM.from_config(small).save_pretrained(tmp_path)
    fit.need_stored(AutoModelForCausalLM, small, tmp_path)
    for name, value in (("vocab_size", 10**11), ("hidden_size", 10**6), ("intermediate_size", 10**10)):
        with pytest.raises(ModelError, match="far larger model than its weights"):
            fit.need_stored(AutoModelForCausalLM, LlamaConfig(**{**small.to_dict(), name: value}), tmp_path)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("deepseek_v3", {"num_hidden_layers": 61, "n_routed_experts": 384, "num_experts_per_tok": 8}),  # Kimi-K2
        ("qwen3_moe", {"num_hidden_layers": 94, "num_experts": 128}),  # Qwen3-235B-A22B
        ("gpt_oss", {"num_hidden_layers": 36, "num_local_experts": 128}),  # 120b
        ("glm4_moe", {"num_hidden_layers": 92, "n_routed_experts": 160}),  # GLM-4.5
        ("doge", {"num_hidden_layers": 32, "num_experts": 16384}),  # 320M, whose experts are rows of a table
        ("switch_transformers", {"num_layers": 12, "num_experts": 2048}),
    ],
)
def test_the_largest_mixtures_there_are_may_be_asked_for(kind, sizes, tmp_path):
    AutoConfig.for_model(kind, **sizes).save_pretrained(tmp_path)
    fit.need_layers(tmp_path)


def test_layers_times_experts_are_bounded_too(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 4096, "num_local_experts": 4096}))
    with pytest.raises(ModelError, match="more parts than any model has") as refused:
        fit.need_layers(tmp_path)
    assert refused.value.expected == "num_hidden_layers times num_local_experts of at most 524,288"
