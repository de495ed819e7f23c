"""A number of a config whose layers differ is that of the layer, or the greatest."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as hf

from replay_core.replay.batch import MicroBatch
from replay_core.replay.bench import ReplayBench
from replay_core.replay.cell import BatchReplay
from replay_core.replay.flags import Flags
from replay_core.replay.model import LoadedModel
from replay_core.replay.plan import ReplayPlan
from replay_core.replay.stated import stated
from replay_core.replay.why import is_mixture

HEADS = "num_attention_heads"


class OfLayers:
    """As transformers 5 has them: no number for all layers."""

    def __init__(self, *numbers):
        self.per_layer_config = [SimpleNamespace(num_attention_heads=one) for one in numbers]

    @property
    def num_attention_heads(self):
        raise RuntimeError("'num_attention_heads' is a per-layer attribute and may vary across layers")


@pytest.mark.parametrize(
    ("config", "module", "expected"),
    [
        (SimpleNamespace(num_attention_heads=8), "", 8),
        (SimpleNamespace(num_attention_heads=8), "layers.3.self_attn", 8),
        (SimpleNamespace(num_attention_heads=[8, None, 4]), "", 8),
        (SimpleNamespace(num_attention_heads=[8, None, 4]), "model.layers.2.self_attn", 4),
        (SimpleNamespace(num_attention_heads=[8, None, 4]), "layers.1.self_attn", None),
        (OfLayers(2, 16, 4), "", 16),
        (OfLayers(2, 16, 4), "layers.0.self_attn", 2),
        (SimpleNamespace(), "", None),
        (SimpleNamespace(num_attention_heads=True), "", None),
    ],
)
def test_the_number_is_that_of_the_layer_or_the_greatest(config, module, expected):
    assert stated(config, HEADS, module) == expected


def test_a_model_whose_layers_have_other_numbers_of_heads_is_replayed(tmp_path):
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
        HEADS: 4, "num_key_value_heads": 2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    model = LoadedModel(hf.LlamaForCausalLM(hf.LlamaConfig(**sizes)).eval(), "made here")
    model.config.per_layer_config = {1: {HEADS: 2}}
    flags = Flags.parse("dtype=float32 attention=eager")
    plan = ReplayPlan(dump="", out=str(tmp_path), step=0, rank=0, micro=0, model="made here", flags=flags)
    ids = np.random.default_rng(2).integers(4, 60, (2, 7))
    batch = MicroBatch(ids, np.ones_like(ids, dtype=bool))
    with torch.no_grad():
        answer = BatchReplay(plan, flags, batch, model, 1.0, lambda _event: None).compute()
    assert torch.isfinite(answer.logprobs).all()
    if getattr(model.config, "is_heterogeneous", False):  # an older transformers has no numbers of layers
        heads = ReplayBench(plan, model, 1.0).observer(flags, batch).heads
        assert (heads("layers.0.self_attn"), heads("layers.1.self_attn")) == (
            ("layers.0.self_attn", 4), ("layers.1.self_attn", 2),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (hf.LlamaConfig(), False),
        (hf.MixtralConfig(num_local_experts=4), True),
        (hf.DbrxConfig(), True),  # named within its own config of the feed-forward part
    ],
)
def test_experts_are_found_wherever_a_config_names_them(config, expected):
    model = SimpleNamespace(config=config)
    assert is_mixture(model) is expected
