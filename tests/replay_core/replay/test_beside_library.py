"""Where a factory's code computes something else than the library, whose the recording is, it is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from replay_core.export.outcome import exit_code
from tests.replay_core.replay.test_guesses import _LEARNED, _ROTARY, Trainer, answer

_BUILD = """
import pathlib

import torch
from transformers import AutoModelForCausalLM


def build():
    folder = pathlib.Path(__file__).parent / "dump" / "checkpoints" / "step_000001"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.{dtype}).eval()
    change(model)
    return model
"""
_OTHER_BASE = """
def change(model):
    frequencies = model.base_model.rotary_emb.inv_freq
    frequencies.copy_(500.0 ** (-torch.arange(frequencies.numel()).float() / frequencies.numel()))
"""
_TABLE_MOVED = """
def change(model):
    model.base_model.wpe.weight.data = model.base_model.wpe.weight.data.roll(1, 0)
"""
_OFFSET_LOST = """
def change(model):
    model.base_model.embed_positions.offset = 0
"""
_WIDER = """
def change(model):
    torch.manual_seed(7)
    for layer in model.base_model.layers:
        for name, shape in (("gate_proj", (32, 48)), ("up_proj", (32, 48)), ("down_proj", (48, 32))):
            setattr(layer.mlp, name, torch.nn.Linear(*shape, bias=False))
"""
_COMPUTED = hf.XGLMConfig(
    vocab_size=64, d_model=32, ffn_dim=64, num_layers=2, attention_heads=4, max_position_embeddings=64, init_std=0.2
)
_ADAPTER = """
def change(model):
    torch.manual_seed(7)
    for layer in model.base_model.layers:
        down, up = (torch.randn(*shape).{dtype}() for shape in ((4, 32), (32, 4)))
        layer.self_attn.q_proj.register_forward_hook(
            lambda _module, args, put, down=down, up=up: put + {scale} * args[0] @ down.T @ up.T
        )
"""


@pytest.mark.parametrize(
    ("config", "code", "kind", "said"),
    [
        (_ROTARY, _OTHER_BASE, "positions", "first in rotary_emb; where no token is rotated by its position"),
        (_LEARNED, _TABLE_MOVED, "positions", "first in wpe"),
        (_COMPUTED, _OFFSET_LOST, "positions", "first in embed_positions"),
        (_ROTARY, _ADAPTER.format(dtype="float", scale=0.1), "maths", "first in layers.0.self_attn.q_proj"),
        (_ROTARY, _WIDER, "maths", "first in layers.0.mlp.gate_proj"),
    ],
    ids=["another base", "a table moved", "an offset lost", "an adapter", "of another width"],
)
@pytest.mark.long
def test_what_a_factory_computes_otherwise_than_the_library_is_named(
    config: Any, code: str, kind: str, said: str, tmp_path: Path
) -> None:
    doc = _answer(tmp_path, config, code, "float32", lambda trainer: trainer.padded())
    cause = doc["cells"][doc["baseline"]]["cause"]
    assert cause["kind"] == kind, cause
    assert "recorded log_probs is what the library's own model of the checkpoint gives" in cause["sentence"]
    assert said in cause["sentence"]
    assert exit_code(doc) == 1


@pytest.mark.parametrize("scale", [0.1, 0.2], ids=["as trained", "of another scale"])
def test_what_a_hook_holds_in_half_precision_is_asked_in_a_finer_one(scale: float, tmp_path: Path) -> None:
    """A hook's own tensors are in bfloat16, which torch multiplies with nothing else: in float32 it ran nowhere."""

    def recorded(trainer: Trainer) -> torch.Tensor:
        names: dict[str, Any] = {"torch": torch}
        exec(_ADAPTER.format(dtype="bfloat16", scale=0.1), names)
        trainer.model.to(torch.bfloat16)
        names["change"](trainer.model)
        return trainer.padded().float()

    code = _ADAPTER.format(dtype="bfloat16", scale=scale)
    doc = _answer(tmp_path, _ROTARY, code, "bfloat16", recorded)
    assert exit_code(doc) == (scale != 0.1), doc["cells"]
    if scale != 0.1:
        cause = doc["cells"][doc["baseline"]]["cause"]
        assert cause["kind"] == "maths", cause


def _answer(folder: Path, config: Any, code: str, dtype: str, recorded: Callable[[Trainer], torch.Tensor]) -> Any:
    name = f"policy_{abs(hash((code, dtype)))}"
    (folder / f"{name}.py").write_text(_BUILD.format(dtype=dtype) + code)
    asked = {"model": f"factory:{name}:build", "forward_path": str(folder)}
    return answer(folder / "dump", config, recorded, dtype, **asked)
