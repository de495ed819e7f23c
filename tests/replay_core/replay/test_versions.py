"""What transformers calls otherwise in its older versions is said in the word of the one that is installed."""

import pytest
import torch
import transformers

from replay_core.replay import versions


@pytest.mark.parametrize(
    ("version", "word"),
    [
        ("4.51.0", "torch_dtype"),
        ("4.55.4", "torch_dtype"),
        ("4.56.0", "dtype"),
        ("4.100.1", "dtype"),
        ("5.0.0.dev0", "dtype"),
    ],
)
def test_the_dtype_of_loading_has_the_word_of_the_version(
    monkeypatch: pytest.MonkeyPatch, version: str, word: str
) -> None:
    # That module's own: collected in another order, this test's transformers is another object.
    monkeypatch.setattr(f"{versions.__name__}.transformers.__version__", version)
    assert versions.loaded_in(torch.bfloat16) == {word: torch.bfloat16}


def tiny() -> "transformers.LlamaForCausalLM":
    config = transformers.LlamaConfig(
        vocab_size=17,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config)


def test_the_installed_version_loads_in_the_dtype_asked_for() -> None:
    given = versions.loaded_in(torch.bfloat16)
    model = transformers.AutoModelForCausalLM.from_config(tiny().config, **given)
    assert model.dtype == torch.bfloat16


def test_attention_changes_to_the_one_asked_for_and_the_model_still_answers_the_same() -> None:
    model = tiny().eval()
    ids_BT = torch.arange(6).reshape(1, 6)
    with torch.no_grad():
        before_BTV = model(ids_BT).logits
        versions.set_attention(model, "eager")
        after_BTV = model(ids_BT).logits
    assert model.config._attn_implementation == "eager"
    torch.testing.assert_close(before_BTV, after_BTV)


def test_a_model_older_than_the_setter_takes_it_by_its_config() -> None:
    class Older:
        """What a model of transformers 4.51 has of it: a config its modules read, and a check of it."""

        def __init__(self) -> None:
            self.config = tiny().config
            self.checked: list[str] = []

        def _autoset_attn_implementation(self, config: transformers.PretrainedConfig, check_device_map: bool) -> None:
            assert not check_device_map
            self.checked.append(config._attn_implementation)

    model = Older()
    versions.set_attention(model, "eager")
    assert model.config._attn_implementation == "eager"
    assert model.checked == ["eager"]


def test_a_name_that_no_model_has_is_refused_by_transformers() -> None:
    with pytest.raises((ValueError, ImportError)):
        versions.set_attention(tiny(), "no_such_attention")
