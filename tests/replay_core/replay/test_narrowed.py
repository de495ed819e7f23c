"""Masks that are too narrow in every setting of a model, and models that are narrow by their config."""

import numpy as np
import pytest
import torch
import transformers as hf

from replay_core.replay.batch import MicroBatch
from replay_core.replay.bench import ReplayBench
from replay_core.replay.flags import Flags
from replay_core.replay.interventions import in_dtype
from replay_core.replay.model import LoadedModel
from replay_core.replay.narrowed import narrowed, windows_of
from replay_core.replay.plan import ReplayPlan

SIZE = 24
COMMON = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS = {
    "llama": lambda: hf.LlamaConfig(**COMMON),
    "mistral": lambda: hf.MistralConfig(**COMMON, sliding_window=5),
    # Attention sinks; scores that are capped; positions as a bias of the scores.
    "gpt_oss": lambda: hf.GptOssConfig(
        **COMMON, head_dim=8, num_local_experts=2, num_experts_per_tok=1, **SLIDING
    ),
    "gemma2": lambda: hf.Gemma2Config(
        **COMMON, head_dim=8, query_pre_attn_scalar=8, attn_logit_softcapping=2.0, **SLIDING
    ),
    "bloom": lambda: hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2),
    "lfm2": lambda: hf.Lfm2Config(**COMMON, layer_types=["conv", "full_attention"]),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(
        **COMMON, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
}  # fmt: skip


def made(architecture):
    torch.manual_seed(5)
    return hf.AutoModelForCausalLM.from_config(CONFIGS[architecture](), dtype=torch.float32).eval()


def asked(model, attention="eager", dtype=torch.float64):
    loaded = LoadedModel(model, "made here")
    plan = ReplayPlan(
        dump="", out="", step=0, rank=0, micro=0, model="made here",
        flags=Flags.parse(f"dtype=float32 attention={attention}"),
    )  # fmt: skip
    ids = np.random.default_rng(2).integers(4, 60, (1, SIZE))
    with in_dtype(loaded, dtype):
        bench = ReplayBench(plan, loaded, 1.0)
        return narrowed(bench.observer(plan.flags, MicroBatch(ids, np.ones_like(ids, dtype=bool))))


def hiding(model, rule):
    """Every attention of the model is given a mask in which these pairs are hidden as well."""

    def before(_module, args, kwargs):
        hidden_BSD = kwargs.get("hidden_states", args[0] if args else None)
        at = torch.arange(hidden_BSD.shape[1])
        hidden, mask = rule(at[:, None], at[None]), kwargs["attention_mask"]
        if mask is None:  # torch's own attention is told to be causal
            mask = (at[None] <= at[:, None])[None, None]
        out = mask & ~hidden if mask.dtype is torch.bool else mask.masked_fill(hidden, torch.finfo(mask.dtype).min)
        return args, {**kwargs, "attention_mask": out}

    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_pre_hook(before, with_kwargs=True)
    return model


@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def test_a_model_that_sees_what_its_config_says_loses_nothing(architecture, dtype):
    assert asked(made(architecture), dtype=dtype) is None


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss", "gemma2", "qwen3_moe"])
def test_a_window_that_the_config_does_not_name_is_told_in_the_first_layer_that_has_no_other(architecture):
    found = asked(hiding(made(architecture), lambda query, key: query - key >= 9))
    first = 0 if architecture in ("llama", "qwen3_moe") else 1
    assert (found["module"], found["beyond"], found["itself"]) == (f"layers.{first}.self_attn", 9, False)
    assert found["pairs"] == 15 * 16 // 2


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt_oss", "lfm2"])
def test_an_own_key_that_is_hidden_from_its_token_is_told_whatever_windows_there_are(architecture):
    found = asked(hiding(made(architecture), lambda query, key: (query == key) & (query > 0)))
    assert (found["itself"], found["pairs"], found["query"]) == (True, SIZE - 1, 1)


def test_a_window_that_is_narrower_than_the_config_says_is_told_and_one_as_wide_is_not():
    narrower = asked(hiding(made("mistral"), lambda query, key: query - key >= 3))
    assert (narrower["query"], narrower["key"], narrower["beyond"]) == (3, 0, None)
    assert asked(hiding(made("mistral"), lambda query, key: query - key >= 5)) is None


def test_shares_that_torchs_own_attention_keeps_to_itself_are_read_as_well():
    assert asked(made("llama"), "sdpa") is None
    found = asked(hiding(made("llama"), lambda query, key: (key == 0) & (query > 0)), "sdpa")
    assert (found["query"], found["key"], found["pairs"]) == (1, 0, SIZE - 1)


def test_windows_and_blocks_are_what_the_config_names_and_no_number_of_layers_or_experts_is_one():
    class Config:
        def __init__(self, **named):
            self.named = named

        def to_dict(self):
            return self.named

    module = "layers.1.self_attn"
    assert windows_of(Config(sliding_window=7, attention_chunk_size=8), module) == ([7], [8])
    assert windows_of(Config(attn_config={"window": [3, 4]}), module) == ([3, 4], [])
    of_layers = {"0": {"sliding_window": 3}, "1": {"sliding_window": 9}}
    assert windows_of(Config(per_layer_config=of_layers), module) == ([3, 9], []), "each layer may have one of its own"
    others = {"max_window_layers": 2, "num_local_experts": 4, "mamba_chunk_size": 8, "sliding_window_pattern": 2}
    assert windows_of(Config(**others, use_sliding_window=True, sliding_window=None), module) == ([], [])
    full = ["sliding_attention", "full_attention"]
    assert windows_of(Config(sliding_window=7, layer_types=full), module) == ([], [])
    assert windows_of(Config(sliding_window=7, layer_types=full), "layers.0.self_attn") == ([7], [])
    assert windows_of(Config(index_topk=16), module) is None, "keys are chosen in ways that no window tells"
    assert windows_of(Config(indexer_n_heads=4, indexer_budget=16), module) is None
    assert windows_of(Config(indexer_n_heads=None, index_name="wiki", sliding_window=7), module) == ([7], [])
