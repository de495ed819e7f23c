"""What a user can get wrong: each is a named outcome of its own cell, and everything else goes on."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BloomConfig, BloomForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from replay_core.errors import ModelError, RequestError
from replay_core.recorder import Recorder
from tests.replay_core.replay.conftest import VOCABULARY, small_batch


def llama(**settings) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "vocab_size": VOCABULARY, "initializer_range": 0.2, **settings}))


def saved(model, path: Path) -> str:
    model.save_pretrained(path)
    return str(path)


def changed(path: str, change) -> str:
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def dumped(path: Path, ids_BS, mask_BS, response=None) -> str:
    fields = {"input_ids": torch.from_numpy(ids_BS), "attention_mask": torch.from_numpy(mask_BS.astype(np.int64))}
    if response is not None:
        fields["response_mask"] = torch.from_numpy(response)
    with Recorder(path).step(0) as record:
        record("forward_data", micro=0, temperature=1.0, **fields)
    return str(path)


def outcomes(doc) -> list[str]:
    return [cell["outcome"] for cell in doc["cells"]]


def test_weights_of_another_shape_are_named(ask, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    model = changed(saved(llama(), tmp_path / "m"), lambda tensors: tensors.update({name: torch.zeros(3, 3)}))
    with pytest.raises(ModelError) as refused:
        ask(plan={"model": model})
    assert (refused.value.tensor, refused.value.expected, refused.value.found) == (name, "[64, 32]", "[3, 3]")


@pytest.mark.long
def test_a_model_of_pictures_and_words_is_told_from_broken_weights(ask, tmp_path):
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    words = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
             "num_attention_heads": 4, "num_key_value_heads": 2,
             "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}}  # fmt: skip
    pictures = {"depth": 1, "hidden_size": 32, "num_heads": 4, "intermediate_size": 64, "out_hidden_size": 32}
    config = Qwen2_5_VLConfig(text_config=words, vision_config=pictures)
    path = saved(Qwen2_5_VLForConditionalGeneration(config), tmp_path / "vl")
    with pytest.raises(ModelError, match="none of a language model alone") as refused:
        ask(plan={"model": path})
    assert refused.value.found == "Qwen2_5_VLForConditionalGeneration"
    assert "shard" not in refused.value.hint


@pytest.mark.long
def test_weights_that_are_not_finite_are_named_and_not_taken_for_a_leak(ask, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"

    def spoil(tensors):
        tensors[name][0, 0] = float("nan")

    doc = ask("packing=on", plan={"model": changed(saved(llama(), tmp_path / "m"), spoil)})
    assert outcomes(doc) == ["ran"] * 3
    assert all(name in cell["not_finite"] for cell in doc["cells"])
    assert all(name in cell["cause"]["sentence"] for cell in doc["cells"] if cell["agreement"]["agrees"] is False)
    assert all(cell["observer"]["bitwise"] for cell in doc["cells"]), "NaN that both forwards have is no difference"


def test_a_pack_of_a_model_that_takes_no_positions_is_one_sequence_and_that_is_said(ask, tmp_path):
    bloom = BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4))
    doc = ask(matrix="attention=eager packing=off,on", plan={"model": saved(bloom, tmp_path / "bloom")})
    assert outcomes(doc) == ["ran"] * 4
    assert "BloomModel drops position_ids: nothing tells it" in " ".join(doc["cells"][-1]["notes"])
    assert [cell["agreement"]["agrees"] for cell in doc["cells"][2:]] == [True, False]
    assert doc["cells"][-1]["cause"]["kind"] == "other_samples"


def test_rows_past_a_table_of_positions_fail_with_both_numbers(ask, tmp_path):
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=16))
    doc = ask(plan={"model": saved(gpt2, tmp_path / "gpt2")})
    first, *others = outcomes(doc)
    assert (first, set(others)) == ("failed", {"unavailable"}), "what the reference cannot do no cell is asked for"
    error = doc["cells"][0]["error"]
    assert (error["expected"], error["found"]) == ("at most 16 tokens", "24 tokens")


@pytest.mark.long
def test_rows_past_rotary_positions_run_and_it_is_said(ask, tmp_path):
    doc = ask("packing=on", plan={"model": saved(llama(max_position_embeddings=8), tmp_path / "short")})
    assert outcomes(doc) == ["ran"] * 3
    assert any("pass the 8 positions" in note for note in doc["notes"])


@pytest.mark.long
@pytest.mark.parametrize("padding_id", [-1, VOCABULARY + 5])
def test_an_impossible_id_in_padding_costs_the_padded_cell_only(ask, tmp_path, padding_id):
    batch = small_batch()
    ids_BS = batch.ids_BS.copy()
    ids_BS[0, 0] = padding_id
    dump = dumped(tmp_path / "dump", ids_BS, batch.valid_BS, batch.response_BS)
    doc = ask("packing=on", plan={"dump": dump, "model": saved(llama(), tmp_path / "m")})
    assert [(cell["part"], cell["outcome"]) for cell in doc["cells"]] == [
        ("reference", "ran"), ("control", "failed"), ("cell", "ran"),
    ]  # fmt: skip
    assert doc["cells"][1]["error"]["found"] == str(padding_id)
    assert doc["cells"][2]["agreement"]["agrees"] is True


@pytest.mark.long
def test_an_impossible_token_is_refused_also_by_a_model_that_is_held(ask, tmp_path):
    batch, model = small_batch(), saved(llama(), tmp_path / "m")
    ask(plan={"model": model})
    ids_BS = batch.ids_BS.copy()
    ids_BS[0, 5] = -100
    with pytest.raises(ModelError, match="negative token ids") as refused:
        ask(plan={"model": model, "dump": dumped(tmp_path / "dump", ids_BS, batch.valid_BS)})
    assert f"0..{VOCABULARY - 1}" in refused.value.expected


@pytest.mark.long
def test_a_batch_without_any_response_token_is_compared_on_every_token(ask, tmp_path):
    batch = small_batch()
    dump = dumped(tmp_path / "dump", batch.ids_BS, batch.valid_BS, np.zeros_like(batch.response_BS))
    doc = ask("packing=on", plan={"dump": dump, "model": saved(llama(), tmp_path / "m")})
    assert [cell["agreement"]["agrees"] for cell in doc["cells"]] == [None, True, True]
    assert any("marks no token at all" in note for note in doc["notes"])
    assert doc["cells"][-1]["segments"][0]["valid"]["logp_max"] is not None


@pytest.mark.long
def test_one_row_that_is_masked_whole_is_an_empty_segment(ask, tmp_path):
    batch = small_batch()
    mask_BS = batch.valid_BS.copy()
    mask_BS[1] = False
    dump = dumped(tmp_path / "dump", batch.ids_BS, mask_BS)
    doc = ask("packing=on", plan={"dump": dump, "model": saved(llama(), tmp_path / "m")})
    assert [cell["agreement"]["agrees"] for cell in doc["cells"]] == [None, True, True]
    assert [row["tokens"] for row in doc["cells"][-1]["segments"]] == [14, 0, 9]


FACTORIES = """
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from tests.replay_core.replay.test_bad_input import llama

def raises():
    raise ValueError("no such experiment")

def leaves():
    raise SystemExit(3)

def returns_a_number():
    return 3

def maskless():
    AttentionInterface.register("maskless", sdpa_attention_forward)
    model = llama()
    model.set_attn_implementation("maskless")
    return model
"""


@pytest.fixture
def factory(tmp_path):
    (tmp_path / "users_factories.py").write_text(FACTORIES)
    return lambda name: {"model": f"factory:users_factories:{name}", "forward_path": str(tmp_path)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "raised ValueError: no such experiment"),
        ("leaves", "raised SystemExit: 3"),
        ("returns_a_number", "returned no model"),
    ],
)
def test_a_factory_that_fails_is_a_failed_cell(ask, factory, name, message):
    doc = ask(plan=factory(name))
    first, *others = outcomes(doc)
    assert (first, set(others)) == ("failed", {"unavailable"}), "what the reference cannot do no cell is asked for"
    assert message in doc["cells"][0]["error"]["message"]


@pytest.mark.long
def test_a_factory_without_a_function_is_a_wrong_request(ask):
    with pytest.raises(RequestError) as refused:
        ask(plan={"model": "factory:users_factories"})
    assert refused.value.found == "users_factories"


@pytest.mark.slow
def test_an_attention_registered_without_its_mask_is_named(ask, factory):
    doc = ask("attention=own packing=on", plan={**factory("maskless"), "capture": "none"})
    _, padded, packed = doc["cells"]
    assert (padded["cause"]["kind"], padded["cause"]["off"]) == ("padding", [0, 2])
    assert (packed["cause"]["kind"], packed["cause"]["off"]) == ("other_samples", [1, 2])
    assert any("'maskless' is registered without its mask function" in note for note in doc["notes"])
    assert padded["effective"]["attn_implementation"] == "maskless"


@pytest.mark.long
def test_what_one_cell_alone_cannot_do_is_that_cells_failure(ask, monkeypatch):
    from replay_core.replay import cell

    def refuse(size, out, cap):
        if "cell1" in out.name:
            raise RequestError("capturing these modules takes more room than there is")

    monkeypatch.setattr(cell, "need_room", refuse)
    assert outcomes(ask("packing=on", plan={"capture_level": "full"})) == ["ran", "failed", "ran"]


@pytest.mark.long
def test_documents_of_bad_input_fit_the_schema(ask, factory):
    from jsonschema import Draft202012Validator

    schema = json.loads((Path(__file__).parents[3] / "replay_core/documents/schema.json").read_text())
    Draft202012Validator(schema).validate(ask(plan=factory("raises")))


@pytest.mark.parametrize(
    "odd", [{"hidden_size": "x"}, {"num_attention_heads": [1]}, {"rope_parameters": 3}, {"vocab_size": None}]
)
def test_a_config_of_wrong_types_is_an_error_of_the_config(ask, tmp_path, odd):
    path = saved(llama(), tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps({**config, **odd}))
    with pytest.raises(ModelError):
        ask(plan={"model": path})
