"""Transplants: what a table of them says, which modules of many are grafted, and a deep model with one fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from replay_core import workbench
from replay_core.jobs import Event, Progress
from replay_core.recorder import Recorder
from replay_core.referee import grafting
from replay_core.referee.ruled import Graft

LAYERS = 5


def table(**comes: float) -> list[Graft]:
    return [Graft(f"{name.replace('__', '.')}.output", share, None) for name, share in comes.items()]


def test_a_module_that_brings_most_at_once_carries_it() -> None:
    said, module = grafting.told(table(layers__2=0.17, layers__3__mlp=0.84, layers__3=0.99))
    assert (said, module) == ("layers.3.mlp carries 84.0% of what the log-probabilities differ by", "layers.3.mlp")


def test_what_comes_in_little_by_little_is_carried_by_no_module() -> None:
    said, module = grafting.told(table(layers__2=0.42, layers__3=0.47, layers__4__mlp=0.09, layers__4=0.51, norm=1.0))
    assert module is None
    assert "little by little, as rounding does, 47.0% with layers.3, 51.0% with layers.4" in said


def test_nothing_that_brings_half_is_said_so() -> None:
    assert grafting.told(table(layers__0=0.1, norm=0.2)) == (
        "no module's output brings half of what the log-probabilities differ by", None,
    )  # fmt: skip
    assert grafting.told([])[1] is None


def names_of(layers: int, experts: int = 0) -> list[str]:
    inner = ["norm", *[f"mlp.experts.{one}" for one in range(experts)], "mlp"]
    blocks = [f"layers.{at}.{part}" for at in range(layers) for part in [*inner, ""]]
    return [f"{one.rstrip('.')}.output" for one in ["embed", *blocks, "head"]]


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("wrong", [0, 1, 10, 19])
def test_of_many_modules_the_layers_are_bisected_and_what_lies_in_the_one_is_grafted(wrong: int, experts: int) -> None:
    asked = []

    def share(name: str) -> float:
        asked.append(name)
        assert "experts" not in name, "no layer"
        return float(int(name.split(".")[1]) >= wrong)

    chosen = grafting._chosen(names_of(20, experts), share)
    assert len(asked) <= 5
    inside = [one for one in names_of(20, experts) if one.startswith(f"layers.{wrong}.")]
    assert chosen == ["embed.output", *inside, "head.output"]
    assert len(set(asked) | set(chosen)) <= grafting._expected(names_of(20, experts))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1, pad_token_id=0, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("weights") / "model"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def recorded(weights: Path, out: Path, dtype: torch.dtype, wrong: str | None = None, factor: float = 1.0) -> Path:
    """A forward of two rows of 16 tokens; what the module `wrong` puts out is `factor` times what it should be."""
    model = LlamaForCausalLM.from_pretrained(weights, dtype=dtype, attn_implementation="eager").eval()
    if wrong is not None:
        model.get_submodule(wrong).register_forward_hook(lambda _module, _args, put: put * factor)
    ids = torch.randint(1, 128, (2, 16), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    with Recorder(out) as recorder, recorder.step(0) as step, torch.no_grad():
        with step.modules(model, micro=0):
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        logprobs = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        step("forward_data", input_ids=ids, attention_mask=mask, log_probs=logprobs, micro=0)
    return out


@pytest.fixture(scope="module")
def right(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(weights, tmp_path_factory.mktemp("right") / "dump", torch.float32)


@pytest.mark.long
@pytest.mark.parametrize("wrong", [
    "model.layers.3.mlp.down_proj",
    pytest.param("model.layers.0.input_layernorm", marks=pytest.mark.slow),
    pytest.param("model.norm", marks=pytest.mark.slow),
])  # fmt: skip
def test_the_one_wrong_module_of_many_is_found_by_few_grafts(
    weights: Path, right: Path, tmp_path: Path, wrong: str
) -> None:
    told: list[Event] = []
    b = recorded(weights, tmp_path / "b", torch.float32, wrong, 1.5)
    given: dict[str, Any] = {"weights_a": str(weights), "weights_b": str(weights), "graft": True}
    graft = workbench.referee(right, b, on_event=told.append, **given)["graft"]
    assert graft is not None
    assert graft["module"] == wrong.removeprefix("model."), graft["sentence"]
    steps = [one for one in told if isinstance(one, Progress) and one.what.startswith("graft ")]
    assert len(steps) == len(graft["grafts"]) < 25
    assert all(one.total is not None and one.done < one.total < 30 for one in steps), "of how many there will be"


@pytest.mark.long
def test_rounding_alone_is_laid_to_no_module(weights: Path, right: Path, tmp_path: Path) -> None:
    b = recorded(weights, tmp_path / "b", torch.bfloat16)
    doc = workbench.referee(right, b, weights_a=str(weights), weights_b=str(weights), graft=True)
    assert doc["ruling"] == "NOISE"
    assert doc["graft"] is not None
    assert doc["graft"]["module"] is None, doc["graft"]["sentence"]
    assert "neither side's log-probabilities are off by more than rounding leaves" in doc["graft"]["sentence"]
