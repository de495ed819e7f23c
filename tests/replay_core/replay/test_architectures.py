"""Random models hold whatever batch they are given."""

import pytest

from replay_core.errors import ModelError
from replay_core.replay.architectures import ARCHITECTURES, settings


@pytest.mark.parametrize(("largest", "vocabulary"), [(0, 64), (63, 64), (64, 128), (128_255, 128_256)])
def test_the_vocabulary_holds_the_largest_id_in_whole_blocks(largest, vocabulary):
    assert settings("llama-tiny", largest, 10)[1]["vocab_size"] == vocabulary


@pytest.mark.parametrize(("longest", "positions"), [(10, 4096), (4097, 4097)])
def test_rows_longer_than_usual_have_positions(longest, positions):
    assert settings("llama-tiny", 5, longest)[1]["max_position_embeddings"] == positions


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_is_one_transformers_can_build(name):
    from transformers import AutoConfig

    kind, sizes = settings(name, 100, 16)
    config = AutoConfig.for_model(kind, **sizes)
    assert config.num_attention_heads % config.num_key_value_heads == 0
    assert config.vocab_size == 128


def test_a_slip_of_the_pen_is_met_with_the_nearest_name():
    with pytest.raises(ModelError) as refused:
        settings("lama-tiny", 5, 5)
    assert refused.value.hint == "did you mean random:llama-tiny?"
