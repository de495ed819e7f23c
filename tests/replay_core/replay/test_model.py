import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from replay_core.dumps import open_run
from replay_core.errors import ModelError, UnavailableError
from replay_core.pages import array
from replay_core.replay import model
from tests.fixtures import FIXTURES


def test_the_genuine_small_model_replays(replay):
    cell = replay(model=str(FIXTURES / "trl" / "tiny_qwen2"))
    assert cell["outcome"] == "ran"
    assert cell["effective"]["dtype"] == "float32"


def test_a_model_that_is_not_there_names_what_is_near(replay, recorded):
    with pytest.raises(ModelError, match="not a directory") as refused:
        replay(model=str(recorded / "checkpoints" / "step_000001"))
    assert "step_000000" in refused.value.hint


def test_a_directory_without_a_config_is_no_model(replay, tmp_path):
    with pytest.raises(ModelError, match="holds no model"):
        replay(model=str(tmp_path))


def test_a_directory_without_weights_says_so(replay, recorded, tmp_path):
    shutil.copy(recorded / "checkpoints" / "step_000000" / "config.json", tmp_path)
    with pytest.raises(ModelError, match="holds no weights") as refused:
        replay(model=str(tmp_path))
    assert refused.value.expected == "*.safetensors"
    assert "config.json" in refused.value.found


def test_missing_weights_are_never_filled_with_random_numbers(replay, recorded, tmp_path):
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(recorded / "checkpoints" / "step_000000", broken)
    weights = load_file(broken / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="lacks 1 of the model's weights") as refused:
        replay(model=str(broken))
    assert "layers.1.mlp.up_proj" in refused.value.expected


def test_a_cut_off_weight_file_is_one_clear_error(replay, recorded, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(recorded / "checkpoints" / "step_000000", broken)
    whole = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="cannot be loaded"):
        replay(model=str(broken))


def test_pickled_weights_need_a_word_from_the_user(replay, recorded, tmp_path):
    from safetensors.torch import load_file

    pickled = tmp_path / "pickled"
    pickled.mkdir()
    source = recorded / "checkpoints" / "step_000000"
    shutil.copy(source / "config.json", pickled)
    torch.save(load_file(source / "model.safetensors"), pickled / "pytorch_model.bin")
    with pytest.raises(ModelError, match="are pickles"):
        replay(model=str(pickled))
    assert replay(model=str(pickled), allow_pickled_weights=True)["outcome"] == "ran"


def test_a_vocabulary_too_small_for_the_batch_is_refused(replay, recorded, tmp_path):
    small = tmp_path / "small"
    shutil.copytree(recorded / "checkpoints" / "step_000000", small)
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**config, "vocab_size": 64}))
    with pytest.raises(ModelError, match="vocabulary is too small") as refused:
        replay(model=str(small))
    assert refused.value.expected == "token ids 0..63"
    assert refused.value.found.startswith("token ids ")


def test_an_unknown_random_architecture_names_those_that_exist(replay):
    with pytest.raises(ModelError, match="no random architecture") as refused:
        replay(model="random:lama-tiny")
    assert "random:llama-tiny" in str(refused.value)


def test_eager_runs_where_an_architecture_has_no_sdpa_and_nobody_pinned_a_kernel(replay):
    from transformers import Gemma2ForCausalLM

    if Gemma2ForCausalLM._supports_sdpa:
        pytest.skip("this transformers offers sdpa for gemma2: no architecture is left that refuses it")
    cell = replay("attention=sdpa", model="random:gemma2-tiny")
    assert cell["effective"]["attention"].startswith("eager")
    assert "gemma2 has no sdpa attention: eager is run in its place" in cell["notes"]
    with pytest.raises(UnavailableError, match="gemma2 does not run with attention=sdpa-math"):
        replay("attention=sdpa-math", model="random:gemma2-tiny")


def test_random_weights_follow_the_seed_and_not_the_dtype(replay):
    def embedding(flags="", **plan):
        cell = replay(flags, model="random:llama-tiny", capture="embed_tokens", **plan)
        (record,) = open_run(Path(cell["dump"])).select(stage="modules")
        return array(record.get("embed_tokens.output"))

    first = embedding()
    assert (first == embedding()).all()
    assert (first != embedding(seed=1)).any()
    rounded = embedding("dtype=bf16")
    assert (first.astype(rounded.dtype) == rounded).all()


@pytest.mark.long
def test_a_readers_share_of_the_machine_does_not_limit_the_weights_of_a_model():
    """An 8B in bfloat16 is 16 GB, mapped: more than half of many machines."""
    ended = subprocess.run(
        [sys.executable, "-c", _LIMITED_LOAD, str(FIXTURES / "trl" / "tiny_qwen2")], capture_output=True, text=True
    )  # fmt: skip
    assert ended.stdout.split() == ["limited", "lifted"], ended.stderr


_LIMITED_LOAD = """
import resource, sys
import numpy as np
from replay_core import budget
hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
budget.limit_process()
print("limited" if resource.getrlimit(resource.RLIMIT_DATA)[0] != hard else "free")
from replay_core.replay.batch import MicroBatch
from replay_core.replay.model import load
from replay_core.replay.plan import ReplayPlan
plan = ReplayPlan(dump="", step=0, rank=0, micro=0, model=sys.argv[1], out="")
load(plan, sys.argv[1], [], MicroBatch(np.zeros((1, 2), np.int64), np.ones((1, 2), bool)))
print("lifted" if resource.getrlimit(resource.RLIMIT_DATA)[0] == hard else "still limited")
"""


def test_a_factorys_model_keeps_its_frequencies_and_what_it_was_built_with_in_float32() -> None:
    config = AutoConfig.for_model(
        "llama", hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=64,
    )  # fmt: skip
    single = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    frequencies = single.model.rotary_emb.inv_freq.clone()
    cast = model._in_dtype(single, "bfloat16")
    assert cast.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(cast.model.rotary_emb.inv_freq, frequencies)

    half = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    half.lm_head.float()
    kept = model._in_dtype(half, "bfloat16")
    assert (kept.lm_head.weight.dtype, kept.model.rotary_emb.inv_freq.dtype) == (torch.float32, torch.float32)
    assert model._kept(kept, "bfloat16") == ["not in bfloat16, as the factory built them: lm_head.weight"]
    assert model._in_dtype(half, "float32").model.embed_tokens.weight.dtype == torch.float32


def test_a_text_model_that_names_a_part_it_lacks_has_a_backbone_all_the_same() -> None:
    config = AutoConfig.for_model(
        "llama4_text", hidden_size=32, intermediate_size=64, intermediate_size_mlp=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, vocab_size=64, head_dim=16, num_local_experts=2, pad_token_id=0,
    )  # fmt: skip
    causal_lm = AutoModelForCausalLM.from_config(config)
    model._name_backbone(causal_lm)
    assert causal_lm.base_model is causal_lm.model
