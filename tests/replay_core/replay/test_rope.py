"""A row alone is computed as if no longer row had been before it."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from replay_core.replay.rope import forget_lengths
from tests.replay_core.replay.conftest import VOCABULARY


def growing() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8, initializer_range=0.2,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    )).eval()  # fmt: skip


def test_a_row_after_a_longer_one_is_computed_with_its_own_frequencies():
    model, long, short = growing(), torch.arange(24)[None] % 100 + 4, torch.arange(12)[None] + 40
    with torch.no_grad():
        alone = model.model(short).last_hidden_state
        forget_lengths(model.model)
        model.model(long)
        carried = model.model(short).last_hidden_state
        forget_lengths(model.model)
        again = model.model(short).last_hidden_state
    assert not torch.allclose(carried, alone, atol=1e-3), "the longer row's frequencies must show"
    assert torch.equal(again, alone)
