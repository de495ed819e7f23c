"""How far two settings may be apart in float64 that compute the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers as hf

from replay_core.replay import why
from replay_core.replay.batch import MicroBatch
from replay_core.replay.bench import SAME, ReplayBench, worst
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
    moved_N = why._moved_by_last_places(bench, alone, batch, alone_ND, 0)
    assert moved_N is not None
    return worst(moved_N), bench.apart(flags, alone, batch)


def beyond(distance: dict[int, float], moved: dict[int, float], monkeypatch: pytest.MonkeyPatch, **config: int) -> Any:
    """What is left of how far 400 tokens are off, and what is allowed them, where last places move some so far."""
    causal_lm = SimpleNamespace(config=SimpleNamespace(_attn_implementation="eager", **config))
    bench: Any = ReplayBench(cast(Any, None), LoadedModel(causal_lm, "made here"), 1.0)
    laid = [torch.full((400,), 1e-6) for _ in range(2)]
    for of_N, known in zip(laid, (distance, moved), strict=True):
        for token, value in known.items():
            of_N[token] = value
    monkeypatch.setattr(why, "_moved_by_last_places", lambda *_: laid[1])
    return worst(cast(Any, why._beyond_last_places)(bench, None, None, None, laid[0])), bench.same


def test_what_last_places_do_is_allowed_and_a_token_of_a_mixture_near_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    assert beyond({5: 3e-5}, {9: 1e-5}, monkeypatch) == (pytest.approx(3e-5), pytest.approx(4e-5))
    assert beyond({5: 0.3}, {5: 0.4, 9: 1e-5}, monkeypatch, num_experts=4) == (pytest.approx(1e-6), pytest.approx(4e-5))
    assert beyond({5: 0.3}, {5: 0.4}, monkeypatch) == (pytest.approx(0.3), SAME), "no mixture sends a token elsewhere"
    assert beyond({5: 0.3, 7: 0.2}, {5: 0.4}, monkeypatch, num_experts=4)[0] == pytest.approx(0.3), "token 7 is no tie"
    many = dict.fromkeys(range(20), 0.3)
    assert beyond(many, many, monkeypatch, num_experts=4)[0] == pytest.approx(0.3), "nor are there many ties"


@pytest.mark.long
def test_a_state_that_is_kept_in_float32_is_allowed_what_its_last_places_do() -> None:
    moved, apart = moved_by_last_places(_WITH_A_STATE)
    assert moved > SAME / 20
    assert apart < why._TWO_ROUNDINGS * moved


def test_a_model_that_computes_in_float64_is_allowed_no_more_than_before() -> None:
    moved, _ = moved_by_last_places(_PLAIN)
    assert 0 < why._TWO_ROUNDINGS * moved < SAME
