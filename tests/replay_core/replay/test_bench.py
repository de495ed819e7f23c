"""How far two settings may be apart in float64 that compute the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as hf

from replay_core.replay import why
from replay_core.replay.batch import MicroBatch
from replay_core.replay.bench import SAME, ReplayBench
from replay_core.replay.flags import Flags
from replay_core.replay.model import LoadedModel
from replay_core.replay.plan import ReplayPlan

_SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3}  # fmt: skip
_PLAIN = hf.Qwen3Config(**_SIZES)
#: Its linear attention keeps a state in float32, whatever its weights are in.
_WITH_A_STATE = hf.Qwen3NextConfig(
    **_SIZES, num_experts=0, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16,
    linear_value_head_dim=16, layer_types=["linear_attention", "linear_attention"],
)  # fmt: skip


def moved_by_last_places(config: hf.PreTrainedConfig) -> tuple[float, float]:
    """How far a token is moved by the last places of its embeddings, and by 9 tokens of padding before it."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    flags = Flags.parse("dtype=float32 attention=eager")
    plan = ReplayPlan(dump="", out="", step=0, rank=0, micro=0, model="made here", flags=flags)
    bench = ReplayBench(plan, LoadedModel(model, "made here"), 1.0)
    ids_BS = np.random.default_rng(2).integers(4, 60, (1, 120))
    batch = MicroBatch(ids_BS, np.arange(120)[None] >= 9)
    alone = Flags.parse("dtype=float32 attention=eager rows_per_forward=1")
    alone_ND = bench.hidden(alone, batch)
    return why._of_last_places(bench, alone, batch, alone_ND), bench.apart(flags, alone, batch)


@pytest.mark.long
def test_a_state_that_is_kept_in_float32_is_allowed_what_its_last_places_do() -> None:
    moved, apart = moved_by_last_places(_WITH_A_STATE)
    assert moved > SAME / 20
    assert apart < why._TWO_ROUNDINGS * moved


def test_a_model_that_computes_in_float64_is_allowed_no_more_than_before() -> None:
    moved, _ = moved_by_last_places(_PLAIN)
    assert 0 < why._TWO_ROUNDINGS * moved < SAME
