"""The labelled faults of `benchmarks/faults.py`: none missed, none false.

Every fault is written to disk as a trainer would record it, and compared as any two dumps are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.faults import BF16, HARMLESS, REAL, Fault, Tensor, batch
from replay_core.compare.judging.verdict import Verdict
from tests.builders import compare_paths, row_of, write_pair


def compared(fault: Fault, directory: Path) -> tuple[Any, Any]:
    a, b = fault.make()
    around = {"batch_inputs": batch()} if fault.batch else {}
    comparison = compare_paths(*write_pair(directory, {**around, "modules": a}, {**around, "modules": b}))
    return comparison, row_of(comparison, fault.tensor)


@pytest.mark.parametrize("fault", HARMLESS, ids=str)
def test_harmless_differences_are_no_divergence(fault: Fault, tmp_path: Path):
    comparison, row = compared(fault, tmp_path)
    assert row.verdict is fault.says, row.reason
    assert comparison.first is None
    assert all(comparison.counts[word] == 0 for word in ("DIFF", "NAN", "SHAPE", "MISSING", "skipped"))


@pytest.mark.parametrize("fault", REAL, ids=str)
def test_real_faults_are_found(fault: Fault, tmp_path: Path):
    comparison, row = compared(fault, tmp_path)
    assert row.verdict is fault.says, row.reason
    if fault.says is not Verdict.MISSING and "mask" not in fault.tensor:
        assert comparison.first is row


def test_a_leak_is_placed_at_the_first_token_of_the_second_sample(tmp_path: Path):
    comparison, row = compared(next(fault for fault in REAL if "leak" in fault.name), tmp_path)
    assert comparison.first is row
    assert row.token == (1, 0)
    sample, position, rel_l2 = row.worst_token
    assert (sample, rel_l2 > 0.5) == (1, True)
    assert position < 8


@pytest.mark.long
def test_eager_against_sdpa_in_bf16_is_noise_from_end_to_end(tmp_path: Path):
    """A real model, ragged pads on both sides: every module output, logprobs and entropy."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.06,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(BF16).eval()
    inputs = batch()
    recorded = []
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        outputs = forward(model, **inputs)
        recorded.append({"batch_inputs": inputs, **outputs})
    comparison = compare_paths(*write_pair(tmp_path, *recorded, flags={"effective": {"dtype": "bfloat16"}}))
    assert comparison.first is None, comparison.first
    assert comparison.counts["CLOSE"] >= 40


def forward(model: Any, input_ids: Tensor, attention_mask: Tensor) -> dict[str, dict[str, Tensor]]:
    """Outputs of all leaf modules, logprobs and entropy of one forward."""
    outputs: dict[str, Tensor] = {}
    hooks = [
        part.register_forward_hook(lambda _part, _inputs, out, name=name: outputs.update({f"{name}.output": out}))
        for name, part in model.named_modules()
        if not list(part.children()) and isinstance(part, torch.nn.Linear) and name != "lm_head"
    ]
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(input_ids, attention_mask=attention_mask, position_ids=positions, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    logp = torch.log_softmax(logits.float(), -1)
    chosen = logp[:, :-1].gather(2, input_ids[:, 1:, None])[..., 0]
    entropy = -(logp.exp() * logp).sum(-1)
    return {"modules": outputs, "forward_data": {"log_probs": chosen, "entropy": entropy[:, :-1]}}
