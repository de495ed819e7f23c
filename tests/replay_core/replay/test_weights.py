"""Weights that are no single directory of safetensors: adapters, shards; and the step they belong to."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from replay_core.errors import ModelError, UnavailableError
from replay_core.pages import array
from replay_core.replay import adapters, fit
from replay_core.replay.references import step_of
from tests.builders import shards_of
from tests.replay_core.replay.conftest import VOCABULARY
from tests.replay_core.replay.test_run import run_of


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def logprobs(doc):
    return array(run_of(doc["cells"][0]).select(stage="forward_data")[0].get("log_probs"))


@pytest.fixture
def whole(ask, tmp_path):
    llama().save_pretrained(tmp_path / "whole")
    return logprobs(ask(plan={"model": str(tmp_path / "whole"), "capture": "none"}))


@pytest.fixture
def adapter(tmp_path):
    """A LoRA adapter in PEFT's files, its base beside it, and the base with the adapter merged in float64."""
    base = llama()
    base.save_pretrained(tmp_path / "base")
    generator = torch.Generator().manual_seed(3)
    tensors, merged = {}, {name: value.double() for name, value in base.state_dict().items()}
    for layer in (0, 1):
        for part in ("q_proj", "v_proj"):
            name = f"model.layers.{layer}.self_attn.{part}"
            a, b = torch.randn(4, 32, generator=generator), torch.randn(32, 4, generator=generator)
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
            merged[f"{name}.weight"] += (8 / 4) * (b.double() @ a.double())
    (tmp_path / "lora").mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": str(tmp_path / "base")}
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "lora" / "adapter_model.safetensors")
    base.load_state_dict({name: value.float() for name, value in merged.items()})
    base.save_pretrained(tmp_path / "merged")
    return tmp_path / "lora"


@pytest.mark.long
def test_an_adapter_is_its_base_plus_the_low_rank_product(ask, adapter):
    doc = ask("packing=on", plan={"model": str(adapter), "capture": "none"})
    assert [cell["agreement"]["agrees"] for cell in doc["cells"]] == [None, True, True]
    assert any("rank 4 beside 4 modules" in note for note in doc["notes"])
    merged = logprobs(ask(plan={"model": str(adapter.parent / "merged"), "capture": "none"}))
    assert logprobs(doc) == pytest.approx(merged, abs=2e-4)
    base = logprobs(ask(plan={"model": str(adapter.parent / "base"), "capture": "none"}))
    assert abs(logprobs(doc) - base).max() > 0.1


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_adapter_computes_what_peft_computes(ask, adapter):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(adapter.parent / "base", attn_implementation="sdpa")
    theirs = peft.PeftModel.from_pretrained(base, adapter).eval()
    doc = ask("rows_per_forward=1", plan={"model": str(adapter), "capture": "none", "temperature": 1.0})
    inputs = run_of(doc["cells"][0]).select(stage="batch_inputs")[0]
    bounds = array(inputs.get("cu_seqlens"))
    ids = torch.from_numpy(array(inputs.get("input_ids")).copy())[:, bounds[0] : bounds[1]]
    with torch.no_grad():
        expected = theirs(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    assert logprobs(doc)[0, : bounds[1] - 1] == pytest.approx(expected.numpy(), abs=1e-5)


def test_the_base_may_be_named_and_a_missing_one_says_how(ask, adapter):
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "no/such-base"}))
    with pytest.raises(ModelError) as refused:
        ask(plan={"model": str(adapter), "capture": "none"})
    assert "--base-model" in refused.value.hint
    doc = ask(plan={"model": str(adapter), "base": str(adapter.parent / "base"), "capture": "none"})
    assert doc["cells"][0]["outcome"] == "ran"


@pytest.mark.parametrize("odd", [{"use_dora": True}, {"peft_type": "IA3"}])
def test_another_kind_of_adapter_is_unavailable_and_not_half_computed(ask, adapter, odd):
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, **odd}))
    doc = ask(plan={"model": str(adapter), "capture": "none"})
    assert {cell["outcome"] for cell in doc["cells"]} == {"unavailable"}
    assert "merge it" in doc["cells"][0]["error"]["hint"]


@pytest.mark.parametrize("odd", [{"alpha_pattern": [1, 2]}, {"lora_alpha": {}}])
def test_settings_of_an_adapter_that_are_of_the_wrong_type_are_the_adapters_error(ask, adapter, odd):
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, **odd}))
    with pytest.raises(ModelError, match="adapter's config cannot be used") as refused:
        ask(plan={"model": str(adapter), "capture": "none"})
    assert refused.value.file == str(adapter / "adapter_config.json")


def test_a_config_nested_without_end_is_an_error_of_its_file(adapter):
    for name, read in (("adapter_config.json", adapters.settings), ("config.json", fit.need_layers)):
        (adapter / name).write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")
        with pytest.raises(ModelError) as refused:
            read(adapter)
        assert refused.value.file == str(adapter / name)


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora", "corda", "loftq"])
def test_an_adapter_that_changed_its_base_is_refused_by_the_name_of_its_start(adapter, start):
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "init_lora_weights": start}))
    with pytest.raises(UnavailableError, match=f"initialised with {start}"):
        adapters.settings(adapter)
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "init_lora_weights": "orthogonal"}))
    assert adapters.settings(adapter)["init_lora_weights"] == "orthogonal"


def test_an_adapter_on_the_embeddings_is_refused_for_what_it_is(adapter):
    save_file({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 8)},
              adapter / "adapter_model.safetensors")  # fmt: skip
    with pytest.raises(UnavailableError, match="on the embeddings"):
        adapters.attach(llama(), adapter, adapters.settings(adapter))


def test_beside_an_adapter_the_base_is_frozen(adapter):
    model = llama()
    adapters.attach(model, adapter, adapters.settings(adapter))
    names = adapters.trained(model)
    assert len(names) == 8
    assert all(".lora_" in name for name in names)
    assert adapters.trained(llama()) is None


def test_an_adapter_of_another_base_is_refused(ask, adapter):
    with pytest.raises(ModelError, match="does not fit the base"):
        ask(plan={"model": str(adapter), "base": "random:llama-tiny", "capture": "none"})


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoint_shards_are_put_together_without_a_process_group(ask, tmp_path, whole):
    import torch.distributed.checkpoint as dcp

    model = llama()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    model.config.save_pretrained(tmp_path / "dcp" / "huggingface")
    plan = {"model": str(tmp_path / "dcp"), "capture": "none"}
    with pytest.raises(ModelError, match="pickle") as refused:
        ask(plan=plan)
    assert "--allow-pickled-weights" in refused.value.hint
    doc = ask(plan={**plan, "allow_pickled_weights": True})
    assert (logprobs(doc) == whole).all()


@pytest.mark.long
def test_a_file_per_rank_is_put_together_and_runs_nothing(ask, tmp_path, whole):
    folder = tmp_path / "global_step_100" / "actor"
    folder.mkdir(parents=True)
    for rank in (0, 1):
        torch.save(shards_of(llama().state_dict(), rank, 2), folder / f"model_world_size_2_rank_{rank}.pt")
    llama().config.save_pretrained(folder / "huggingface")
    doc = ask(plan={"model": str(folder), "capture": "none"})
    assert (logprobs(doc) == whole).all()
    assert "weights of step 100, batch of step 0" in doc["notes"][0]
    (folder / "model_world_size_2_rank_1.pt").unlink()
    with pytest.raises(ModelError) as refused:
        ask(plan={"model": str(folder), "capture": "none", "seed": 1})
    assert refused.value.file.startswith(str(folder))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_shards_without_a_config_say_where_one_belongs(ask, tmp_path):
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": llama().state_dict()}, checkpoint_id=tmp_path / "a" / "b" / "dcp", no_dist=True)
    with pytest.raises(ModelError) as refused:
        ask(plan={"model": str(tmp_path / "a" / "b" / "dcp"), "allow_pickled_weights": True})
    assert "config.json" in refused.value.expected


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("/runs/global_step_100/actor", 100), ("/runs/global_step_100/actor/huggingface", 100), ("/r/checkpoint-7", 7),
        ("/r/iter_0000020", 20), ("/r/checkpoints/step_000137", 137), ("/models/llama-3-8b", None),
    ],
)  # fmt: skip
def test_the_step_of_weights_is_read_off_their_path(path, step):
    assert step_of(path) == step
