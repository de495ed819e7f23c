"""The whole road with both real backends: what is planted is named, what is equal is equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from replay_core import workbench
from replay_core.errors import ModelError, RequestError, RldbgError
from replay_core.parity.config import SHIPPED
from tests.replay_core.documents.test_schema import validate
from tests.replay_core.parity.conftest import Parity, needs_deepspeed, needs_megatron, write_config

pytestmark = needs_megatron


@pytest.mark.long
def test_the_same_weights_agree_where_it_counts_and_only_the_padding_parts(parity: Parity, tmp_path: Path):
    document = parity(steps=5, data=("random", "padded", "stale"))
    validate(document)
    assert (document["cause"], document["agrees"]) == ("padding", True)
    assert document["backends"] == ["torch", "megatron"]
    by_name = {batch["name"]: batch for batch in document["batches"]}
    for batch in by_name.values():
        masked = batch["eval"]["masked"]
        assert masked["pearson"] == pytest.approx(1.0, abs=1e-9)
        assert masked["max_abs"] <= 1e-5
        assert [step["step"] for step in batch["steps"]] == [1, 2, 3, 4, 5]
        for step in batch["steps"]:
            assert step["masked"]["max_abs"] <= 1e-5
            assert step["drift_a"] > 1e-3, "nothing was trained"
            assert step["loss_a"] == pytest.approx(step["loss_b"], rel=1e-5)
    assert by_name["random"]["causes"][0]["kind"] == "equal"
    assert by_name["padded"]["eval"]["unmasked"]["pearson"] < 0.9
    assert document["comparison"]["module_tensors"] > 100
    assert document["first_divergence"] is None
    compared = workbench.compare_dumps(Path(document["a"]["dump"]), Path(document["b"]["dump"]))
    assert compared["first_divergence"] is None
    assert compared["counts"]["PADDING"] > 0
    assert document["a"]["weights"] == document["b"]["weights"]
    log = (tmp_path / "out" / "critic_output_megatron.log").read_text()
    header, _, rest = log.partition("=" * 40 + "\n")
    entries = [json.loads(part) for part in rest.split("-" * 40 + "\n") if part.strip()]
    assert "Backend: megatron" in header
    assert [entry["global_step"] for entry in entries] == [0] * 3 + sorted([1, 2, 3, 4, 5] * 3)
    assert entries[0]["values_shape"] == [8, 47]


PLANTED: dict[str, tuple[Any, Any, str]] = {
    "dropout on one side": ({}, {"model": {"summary_dropout_prob": 0.1}}, "dropout"),
    "dropout by variable": ({"system_envs": {"CRITIC_DROPOUT_PROB": "0.1"}}, {}, "dropout"),
    "a bias on one head": ({"model": {"value_head_bias": True, "value_head_offset": 0.03}}, {}, "offset"),
    "a bias that only trains": ({"model": {"value_head_bias": True}}, {}, "offset"),
    "a scaled head": ({}, {"model": {"value_head_scale": 1.02}}, "scale"),
    "rows not shuffled on one side": ({"model": {"data_shuffle": 0}}, {}, "order"),
    "another data seed": ({}, {"training": {"data_seed": 7}}, "order"),
    "a head drawn on one side": ({}, {"model": {"value_head_init": 0.0}}, "weights"),
    "heads from two seeds": (
        {"model": {"value_head_init": 0.0}, "seed": 1, "training": {"data_seed": 42, "seed": 42}},
        {"model": {"value_head_init": 0.0}, "seed": 2, "training": {"data_seed": 42, "seed": 42}},
        "weights",
    ),
    "another backbone": ({}, {"model": {"random_seed": 3}}, "weights"),
    "all positions shifted": ({"model": {"position_offset": 1}}, {}, "positions"),
    "a gap before the response": ({"model": {"position_gap": 2}}, {}, "positions"),
    "an epsilon": ({}, {"model": {"rms_norm_eps": 1e-5}}, "norm"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", PLANTED)
def test_each_planted_change_is_its_own_cause(parity: Parity, name: str):
    a, b, cause = PLANTED[name]
    document = parity(a, b)
    assert document["cause"] == cause, document["why"]
    assert document["agrees"] is False
    others = {one["kind"] for one in document["also"]}
    assert others <= {"padding"}, document["also"]


@pytest.mark.long
def test_an_epsilon_is_found_at_the_first_norm_and_the_epsilons_are_read_back(parity: Parity):
    document = parity({}, {"model": {"rms_norm_eps": 1e-5}}, steps=0)
    first = document["first_divergence"]
    assert first["name"] == "layers.0.input_layernorm.output"
    assert first["origin"] == "layers.0.input_layernorm"
    assert document["a"]["readback"]["norm_eps"] == [1e-6]
    assert document["b"]["readback"]["norm_eps"] == [1e-5]


@pytest.mark.long
def test_bfloat16_on_both_sides_is_noise(parity: Parity):
    document = parity({"model": {"dtype": "bf16"}}, {"model": {"dtype": "bf16"}}, steps=0, data=("random",))
    assert document["cause"] in ("noise", "equal"), document["why"]
    assert document["eval"]["masked"]["pearson"] > 0.999


@pytest.mark.long
def test_the_environment_reaches_both_heads(parity: Parity, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CRITIC_DROPOUT_PROB", "0.25")
    monkeypatch.setenv("VALUE_HEAD_INIT", "0.02")
    document = parity(steps=0, data=("random",))
    for side in "ab":
        readback = document[side]["readback"]
        assert readback["head_dropout"] == 0.25
        assert readback["head_weight_mean"] == pytest.approx(0.02)
        assert "environment" in readback["sources"]["summary_dropout_prob"]
    assert document["cause"] == "dropout"
    rows = {row["component"]: row for row in document["randomness"]}
    assert rows["head dropout"]["a"] == rows["head dropout"]["b"] == 0.25
    assert rows["value head init"]["a"].startswith("all 0.02")


@pytest.mark.long
def test_labels_are_the_backends_own_whatever_their_order(parity: Parity):
    document = parity(backends=("megatron", "torch"), steps=0, data=("random",))
    assert document["backends"] == ["megatron", "torch"]
    assert document["a"]["engine"].startswith("megatron-core")
    assert document["a"]["readback"]["positions"] == "slots of the row"


@pytest.mark.long
def test_the_dumps_of_a_run_say_the_same_when_they_are_read_again(parity: Parity):
    document = parity({}, {"model": {"value_head_scale": 1.02}}, steps=2)
    again = workbench.recorded_parity(Path(document["a"]["dump"]), Path(document["b"]["dump"]))
    validate(again)
    assert again["cause"] == "scale"
    assert again["backends"] == document["backends"]
    assert again["eval"] == document["eval"]
    assert [step["loss_a"] for step in again["steps"]] == [step["loss_a"] for step in document["steps"]]


@pytest.mark.long
def test_left_padding_is_attention_since_only_one_side_hides_it(parity: Parity, tmp_path: Path):
    import torch

    from tests.builders import write_dump

    ids_BS = torch.randint(1, 500, (4, 24), generator=torch.Generator().manual_seed(0))
    mask_BS = (torch.arange(24)[None] >= torch.tensor([0, 5, 9, 3])[:, None]).long()
    response_BS = mask_BS * (torch.arange(24)[None] >= 14)
    fields = {"input_ids": ids_BS, "attention_mask": mask_BS, "response_mask": response_BS}
    dump = write_dump(tmp_path / "left", {"batch_inputs": fields})
    document = parity(data=(str(dump),), steps=0)
    assert document["cause"] == "attention", document["why"]
    assert document["batches"][0]["kind"] == "recorded"


def test_real_text_has_its_worst_tokens_and_is_padded(parity: Parity):
    document = parity({}, {"model": {"value_head_scale": 1.1}}, data=("text",), steps=0)
    assert document["cause"] == "scale"
    worst = document["batches"][0]["worst"]
    assert len(worst) == 10
    assert abs(worst[0]["d"]) == document["eval"]["masked"]["max_abs"]
    assert [abs(one["d"]) for one in worst] == sorted((abs(one["d"]) for one in worst), reverse=True)


def test_values_that_never_vary_have_no_correlation_and_it_is_said(parity: Parity):
    zero = {"model": {"value_head_scale": 0.0}}
    document = parity(zero, zero, steps=0, data=("random",))
    masked = document["eval"]["masked"]
    assert masked["pearson"] is None
    assert "constant correlates with nothing" in masked["undefined"]
    assert document["cause"] == "equal"


@pytest.mark.parametrize(
    ("b", "says"),
    [
        ({"model": {"vocab_size": 600}}, "differ in vocab_size"),
        ({"pretrain": "random:llama-small"}, "differ in hidden_size"),
        ({"strategy": {"tensor_model_parallel_size": 4}}, "more processes"),
        ({"pretrain": "/no/such/model"}, "cannot be read"),
        ({"model": {"value_head": "checkpoint"}}, "no value head"),
        ({"model": {"summary_dropout_prob": 1.5}}, "summary_dropout_prob cannot be used"),
        ({"model": {"value_head_init": "much"}}, "value_head_init cannot be used"),
        ({"model": {"position_gap": 3}}, "counts slots"),
        ({"value_loss_reduction": "mine"}, "value_loss_reduction cannot be used"),
    ],
)
def test_a_wrong_configuration_is_refused_by_name(parity: Parity, b: Any, says: str):
    with pytest.raises(RequestError, match=says) as refused:
        parity({}, b, steps=0, data=("random",))
    assert refused.value.file


def test_tokens_past_the_vocabulary_and_rows_without_a_token_are_refused(parity: Parity, tmp_path: Path):
    import torch

    from tests.builders import write_dump

    ones = torch.ones(2, 6, dtype=torch.long)
    fields = {"input_ids": ones * 600, "attention_mask": ones, "response_mask": ones}
    large = write_dump(tmp_path / "large", {"batch_inputs": fields})
    with pytest.raises(RldbgError, match="vocabulary"):
        parity(data=(str(large),))
    empty = write_dump(tmp_path / "empty", {"batch_inputs": {**fields, "input_ids": ones, "response_mask": ones * 0}})
    with pytest.raises(RldbgError, match="every row is masked"):
        parity(data=(str(empty),))


@needs_deepspeed
@pytest.mark.slow
def test_under_deepspeed_the_same_critic_trains_the_same(parity: Parity):
    document = parity(backends=("deepspeed", "torch"), steps=3, data=("padded",))
    assert document["a"]["engine"].startswith("DeepSpeed")
    assert document["cause"] == "equal", document["why"]
    assert all(step["masked"]["max_abs"] <= 1e-6 for step in document["steps"])


def test_a_missing_backend_is_unavailable_and_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import importlib.util

    from replay_core.errors import UnavailableError
    from replay_core.parity import megatron_critic
    from replay_core.parity.config import read_config

    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(UnavailableError, match="needs megatron-core") as refused:
        megatron_critic.need(read_config(write_config(tmp_path, "b", "megatron")))
    assert "rldbg[parity]" in str(refused.value)


def test_a_model_directory_without_a_config_is_refused(parity: Parity, tmp_path: Path):
    (tmp_path / "model").mkdir()
    with pytest.raises(ModelError, match="cannot be read"):
        parity({"pretrain": str(tmp_path / "model")}, {})


def test_the_shipped_configurations_are_a_pair():
    assert sorted(path.name for path in SHIPPED.glob("*.yaml")) == ["critic_deepspeed.yaml", "critic_megatron.yaml"]
