"""The warm child's model: kept while nothing that makes it changes, loaded anew otherwise."""

import shutil

import pytest
from msgspec.structs import replace

from replay_core.dumps import open_run
from replay_core.errors import ModelError
from replay_core.replay.flags import Flags
from replay_core.replay.held import Holder
from replay_core.replay.plan import ReplayPlan
from tests.replay_core.replay.conftest import small_batch


@pytest.fixture
def held(recorded):
    """(a holder that loaded the recorded checkpoint, its plan, the run)."""
    holder, run = Holder(), open_run(recorded)
    plan = ReplayPlan(str(recorded), 0, 0, 0, "checkpoint", "out")
    model, was_held = holder.model(plan, run, small_batch())
    assert not was_held
    return holder, plan, run, model


@pytest.mark.parametrize("flags", ["attention=eager", "packing=on", "use_cache=on", "compile=aot_eager"])
def test_a_flag_that_leaves_the_weights_alone_costs_no_load(held, flags):
    holder, plan, run, model = held
    again, was_held = holder.model(replace(plan, flags=Flags.parse(flags)), run, small_batch())
    assert was_held
    assert again is model


@pytest.mark.parametrize("change", [{"flags": Flags.parse("dtype=bfloat16")}, {"model": "random:llama-tiny"}])
def test_another_dtype_or_model_is_loaded(held, change):
    holder, plan, run, model = held
    again, was_held = holder.model(replace(plan, **change), run, small_batch())
    assert not was_held
    assert again is not model


def test_a_random_model_of_another_seed_is_another_model(held):
    holder, plan, run, _ = held
    plan = replace(plan, model="random:llama-tiny")
    first, _ = holder.model(plan, run, small_batch())
    assert holder.model(replace(plan, seed=1), run, small_batch())[0] is not first


def test_weights_that_were_written_again_are_loaded_again(held, tmp_path):
    holder, plan, run, model = held
    folder = shutil.copytree(model.reference, tmp_path / "copy")
    plan = replace(plan, model=str(folder))
    holder.model(plan, run, small_batch())
    assert holder.model(plan, run, small_batch())[1]
    (folder / "model.safetensors").touch()
    assert not holder.model(plan, run, small_batch())[1]


def test_a_wrong_name_costs_no_held_model_but_a_load_that_fails_leaves_none(held, tmp_path):
    holder, plan, run, _ = held
    with pytest.raises(ModelError, match="no random architecture"):
        holder.model(replace(plan, model="random:nosuch"), run, small_batch())
    assert holder.model(plan, run, small_batch())[1]
    with pytest.raises(ModelError):
        holder.model(replace(plan, model=str(tmp_path)), run, small_batch())
    assert not holder.model(plan, run, small_batch())[1]


FACTORY = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from sizes_of_{name} import LAYERS

def build():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=64, num_attention_heads=4,
                                        num_hidden_layers=LAYERS))
"""


@pytest.mark.long
@pytest.mark.parametrize("is_named", [True, False], ids=["a folder", "the current directory"])
def test_a_factory_edited_between_two_flips_is_run_anew(held, tmp_path, monkeypatch, is_named):
    holder, plan, run, _ = held
    name = f"edited_{is_named}".lower()
    (tmp_path / f"{name}.py").write_text(FACTORY.format(name=name))
    sizes = tmp_path / f"sizes_of_{name}.py"
    sizes.write_text("LAYERS = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    plan = replace(plan, model=f"factory:{name}:build", forward_path=str(tmp_path) if is_named else None)
    assert holder.model(plan, run, small_batch())[0].config.num_hidden_layers == 1
    assert holder.model(plan, run, small_batch())[1]
    # As long as before, and within the same second: what bytecode is told by.
    sizes.write_text("LAYERS = 2\n")
    model, was_held = holder.model(plan, run, small_batch())
    assert (was_held, model.config.num_hidden_layers) == (False, 2)
    assert holder.model(plan, run, small_batch())[1]
