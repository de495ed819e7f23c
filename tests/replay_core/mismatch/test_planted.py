"""Faults really planted between a sampler and a trainer that share no code with rldbg (`benchmarks/mismatch.py`), on a
briefly trained policy: each is named, a healthy pair is not, and another model is no answer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import mismatch as bench
from replay_core import workbench
from replay_core.demo.train import train_demo
from replay_core.errors import ModelError

PLANTS = {plant.name: plant for plant in bench.plants()}
#: One of each family; `python -m benchmarks.mismatch` runs all.
SOME = (
    "healthy bf16", "temperature 0.7", "top_p 0.8", "older by 1", "trainer older by 1", "stale prefix", "adapter off",
    "int8 rows", "padding seen by the engine", "positions anew", "older by 1 and temperature 0.8",
    "older by 2, bf16 both", "bf16 engine", "shift +1", "first token twice", "prompt unseen",
    "joint: temperature 0.9 + top-p 0.9", "joint: int8 per row + temperature 1.2 + top-k 20",
    "joint: trainer older + engine 0.8",
)  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bench.trained("qwen2", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def healthy(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dump of a pair in bfloat16 that differs by its kernels alone."""
    return bench.recorded(models, "qwen2", PLANTS["healthy bf16"], tmp_path_factory.mktemp("healthy") / "dump")


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_a_planted_cause_is_named_with_its_side(name: str, models: Path) -> None:
    outcome = bench.run("qwen2", PLANTS[name], models)
    assert outcome.is_right, (outcome.headline, outcome.named)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["healthy bf16", "routed otherwise 10 %", "older by 1"])
def test_a_mixture_of_experts_too(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = bench.trained("moe", tmp_path_factory.mktemp("moe"))
    outcome = bench.run("moe", PLANTS[name], folder)
    assert outcome.is_right, (outcome.headline, outcome.named)


@pytest.mark.long
def test_a_temperature_is_named_by_its_value_and_leaves_rounding(models: Path) -> None:
    outcome = bench.run("qwen2", PLANTS["temperature 0.7"], models)
    assert outcome.is_right, outcome.headline
    assert outcome.named[0]["name"] == "temperature 0.7 (against 1)"
    assert float(outcome.named[0]["left"]["mean"]) < 1e-5


@pytest.mark.slow
def test_older_weights_and_a_temperature_are_named_together_and_nothing_beside(models: Path) -> None:
    outcome = bench.run("qwen2", PLANTS["joint: weights of step 2 + temperature 0.9"], models)
    assert outcome.is_right, (outcome.headline, outcome.named)


@pytest.mark.slow
def test_a_bfloat16_engine_beside_a_float32_trainer_is_normal_and_no_cause(models: Path) -> None:
    outcome = bench.run("qwen2", PLANTS["bf16 engine"], models)
    assert outcome.is_right, (outcome.headline, outcome.named)
    assert "normal for an engine in bfloat16 beside a trainer in float32" in outcome.headline


@pytest.mark.long
def test_weights_of_another_model_are_said_and_nothing_is_guessed(healthy: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    bench.policy("qwen2", seed=9).save_pretrained(other)
    doc: dict[str, Any] = dict(workbench.mismatch(healthy, step=3, model=str(other)))
    assert doc["agrees"] is None
    assert doc["lacks"][0].startswith(f"the model of this step: {other} is ")
    assert not any(one["named"] for one in doc["causes"])


@pytest.mark.long
def test_a_vocabulary_too_small_for_the_tokens_is_a_wrong_request(healthy: Path, tmp_path: Path) -> None:
    import transformers

    config = transformers.Qwen2Config(vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                      num_key_value_heads=2, intermediate_size=16)  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "small")
    with pytest.raises(ModelError, match="vocabulary"):
        workbench.mismatch(healthy, step=3, model=str(tmp_path / "small"))


@pytest.mark.slow
def test_an_engine_that_no_update_reached_has_the_first_weights_and_without_them_nothing_is_named(
    tmp_path: Path,
) -> None:
    """A temperature flattens any two distributions towards each other: it takes most of the gap, and is no cause."""
    run = tmp_path / "run"
    train_demo(run, steps=7, fault="stale-weights")
    doc = workbench.mismatch(run)
    assert [one["name"] for one in doc["causes"] if one["named"]] == ["weights of step 0 (older)"]
    shutil.rmtree(run / "checkpoints" / "step_000000")
    doc = workbench.mismatch(run)
    assert not any(one["named"] for one in doc["causes"])
    assert doc["agrees"] is False
    assert "nothing that was tried" in doc["headline"]
