"""Value heads as their frameworks define them, and controls as a configuration gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from replay_core.errors import ModelError, RequestError
from replay_core.parity.config import CriticConfig, read_config
from replay_core.parity.critics import HEAD_BIAS, HEAD_WEIGHT, CriticBatch, ValueHead
from replay_core.parity.deepspeed_critic import DeepSpeedCritic
from replay_core.parity.training import order
from replay_core.parity.worker import make_critic
from tests.replay_core.parity.conftest import write_config


def test_a_head_is_a_linear_layer_after_dropout_in_the_weights_dtype():
    head = ValueHead(8, 0.5, bias=True, seed=1).to(torch.bfloat16).eval()
    hidden_BSD = torch.randn(2, 3, 8)
    expected = torch.nn.functional.linear(hidden_BSD.to(torch.bfloat16), head.summary.weight, head.summary.bias)
    assert head(hidden_BSD).dtype == torch.bfloat16
    assert torch.equal(head(hidden_BSD), expected)
    head.train()
    assert not torch.equal(head(hidden_BSD), head(hidden_BSD))


def test_one_seed_draws_one_weight_with_and_without_a_bias():
    with_bias, without = ValueHead(8, 0.0, bias=True, seed=3), ValueHead(8, 0.0, bias=False, seed=3)
    assert torch.equal(with_bias.summary.weight, without.summary.weight)
    assert not torch.equal(with_bias.summary.weight, ValueHead(8, 0.0, bias=True, seed=4).summary.weight)


def critic(directory: Path, **changes: Any) -> DeepSpeedCritic:
    made = make_critic(read_config(write_config(directory, "critic", "torch", **changes), {}))
    assert isinstance(made, DeepSpeedCritic)
    return made


def test_value_head_init_fills_the_weight_and_zeroes_the_bias(tmp_path: Path):
    made = critic(tmp_path, model={"value_head_bias": True, "value_head_init": 0.02})
    state = made.state()
    assert torch.equal(state[HEAD_WEIGHT], torch.full((1, 64), 0.02))
    assert state[HEAD_BIAS].tolist() == [0.0]
    assert made.engine.startswith("torch ")


def test_values_are_of_the_state_after_each_token_but_the_last(tmp_path: Path):
    made = critic(tmp_path)
    ids_BS = torch.randint(1, 500, (2, 9))
    ones_BS = torch.ones_like(ids_BS)
    batch = CriticBatch("x", ids_BS, ones_BS, ones_BS)
    with torch.no_grad():
        values_BT = made.values(batch)
        hidden_BSD = made._causal_lm.base_model(input_ids=ids_BS).last_hidden_state
    assert values_BT.shape == (2, 8)
    torch.testing.assert_close(values_BT, hidden_BSD[:, :-1] @ made.state()[HEAD_WEIGHT][0])


def test_a_checkpoints_own_head_is_used_and_one_without_is_said(tmp_path: Path):
    bare = critic(tmp_path / "one", model={"value_head_init": 0.0})
    assert any("the checkpoint has none" in note for note in bare.notes)
    model = tmp_path / "model"
    bare._causal_lm.save_pretrained(model)
    with pytest.raises(ModelError, match="no value head"):
        critic(tmp_path / "two", pretrain=str(model), model={"value_head": "checkpoint"})
    weights = load_file(model / "model.safetensors")
    weight = torch.randn(1, 64)
    save_file({**weights, HEAD_WEIGHT: weight, HEAD_BIAS: torch.tensor([0.25])}, model / "model.safetensors")
    changes = {"value_head": "checkpoint", "value_head_init": 0.0, "value_head_bias": True}
    state = critic(tmp_path / "three", pretrain=str(model), model=changes).state()
    assert torch.equal(state[HEAD_WEIGHT], weight)
    assert state[HEAD_BIAS].tolist() == [0.25]
    save_file({**weights, HEAD_WEIGHT: torch.randn(1, 32)}, model / "model.safetensors")
    with pytest.raises(ModelError, match="does not fit") as refused:
        critic(tmp_path / "four", pretrain=str(model), model=changes)
    assert refused.value.tensor == HEAD_WEIGHT


def config(directory: Path, environment: dict[str, str], **changes: Any) -> CriticConfig:
    return read_config(write_config(directory, "c", "megatron", **changes), environment)


def test_a_critics_own_variables_go_before_the_environment_and_that_before_its_arguments(tmp_path: Path):
    environment = {"CRITIC_DROPOUT_PROB": "0.2", "CRITIC_DATA_SHUFFLE": "0"}
    named = config(tmp_path, environment, system_envs={"CRITIC_DROPOUT_PROB": 0.3})
    assert (named.dropout, named.shuffle, named.value_head_init) == (0.3, False, 0.01)
    assert named.sources["summary_dropout_prob"] == "CRITIC_DROPOUT_PROB in system_envs"
    assert named.sources["data_shuffle"] == "CRITIC_DATA_SHUFFLE in the environment"
    assert named.sources["value_head_init"] == "critic.model_args.value_head_init"


def test_seeds_that_are_not_named_are_inherited(tmp_path: Path):
    alone = config(tmp_path, {}, seed=5)
    assert (alone.seed, alone.training_seed, alone.data_seed) == (5, 5, 5)
    named = config(tmp_path, {}, seed=5, training={"seed": 6, "data_seed": 7})
    assert (named.seed, named.training_seed, named.data_seed) == (5, 6, 7)


def test_a_backends_own_defaults_are_trls_and_megatrons(tmp_path: Path):
    import yaml

    for backend, dropout, bias in (("deepspeed", 0.1, True), ("megatron", 0.0, False)):
        path = write_config(tmp_path, backend, backend)
        content = yaml.safe_load(path.read_text())
        content["critic"]["model_args"] = {}
        path.write_text(yaml.safe_dump(content))
        made = read_config(path, {})
        assert (made.dropout, made.value_head_bias, made.shuffle) == (dropout, bias, True)


def test_a_configuration_of_something_else_is_refused(tmp_path: Path):
    file = tmp_path / "other.yaml"
    for text, says in (("a: [1", "cannot be read"), ("- 1", "no mapping"), ("seed: 1", "not one of a critic")):
        file.write_text(text)
        with pytest.raises(RequestError, match=says) as refused:
            read_config(file, {})
        assert refused.value.file == str(file)


def test_a_configuration_crosses_to_the_child_whole(tmp_path: Path):
    made = config(tmp_path, {}, value_clip=0.2)
    assert CriticConfig.from_mapping(made.to_mapping()) == made


def test_an_epoch_holds_every_row_once_shuffled_or_not():
    plain = order(6, 4, shuffle=False, seed=0)
    assert [next(plain) for _ in range(3)] == [[0, 1, 2, 3], [4, 5], [0, 1, 2, 3]]
    first, second = order(6, 4, shuffle=True, seed=9), order(6, 4, shuffle=True, seed=9)
    rows = [next(first), next(first)]
    assert rows == [next(second), next(second)]
    assert sorted([*rows[0], *rows[1]]) == list(range(6))
