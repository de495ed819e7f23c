"""A kernel that computes in halves alone, as flash attention does: it is asked why in its own arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from replay_core.compare.judging import limits
from replay_core.replay import ahead, attention, shrinking

LEAKS = {"leak": False}


def _only_halves(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if query.dtype is not torch.bfloat16:
        raise RuntimeError("only float16 and bfloat16 are supported")
    if LEAKS["leak"] and mask is not None:
        mask = torch.ones_like(mask).tril() if mask.dtype is torch.bool else torch.zeros_like(mask).masked_fill(
            torch.ones_like(mask).tril() == 0, torch.finfo(mask.dtype).min
        )  # fmt: skip
    return sdpa_attention_forward(module, query, key, value, mask, **options)


@pytest.fixture
def half_only(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """fa2 is a kernel that knows bfloat16 alone; `leak` takes its samples for one."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register("only_halves", _only_halves)
    ALL_MASK_ATTENTION_FUNCTIONS.register("only_halves", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    monkeypatch.setitem(attention._IMPLEMENTATIONS, "fa2", "only_halves")
    monkeypatch.setattr(attention, "need", lambda _flags: None)
    monkeypatch.setitem(LEAKS, "leak", False)
    return LEAKS


@pytest.mark.long
def test_a_kernel_of_halves_that_is_right_is_no_cause(ask: Any, half_only: dict[str, bool]) -> None:
    doc = ask("attention=fa2 dtype=bfloat16 packing=on", why=True)
    cell = doc["cells"][-1]
    assert cell["outcome"] == "ran", cell["error"]
    assert cell["agreement"]["agrees"] is True
    assert cell["cause"]["kind"] == "rounding", cell["cause"]["sentence"]
    assert cell["cause"]["evidence"]["arithmetic"] == "bfloat16"


@pytest.mark.long
def test_a_large_model_is_asked_in_halves_ahead_and_afterwards(
    ask: Any, half_only: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "LARGE", 0)
    monkeypatch.setattr(shrinking, "_SHARE", 1.0)
    for table in (limits.WORST_ROW, limits.REL_L2):
        for column in table:
            monkeypatch.setitem(table[column], "bfloat16", 5e-4)
    right = ask("attention=fa2 dtype=bfloat16 packing=on")["cells"][-1]
    assert right["agreement"]["agrees"] is True, right["cause"]["sentence"]
    assert right["cause"]["kind"] == "rounding"
    half_only["leak"] = True
    wrong = ask("attention=fa2 dtype=bfloat16 packing=on")["cells"][-1]
    assert wrong["cause"]["kind"] == "other_samples", wrong["cause"]["sentence"]


@pytest.mark.long
def test_a_kernel_of_halves_that_takes_samples_for_one_is_told_so(ask: Any, half_only: dict[str, bool]) -> None:
    half_only["leak"] = True
    cell = ask("attention=fa2 dtype=bfloat16 packing=on")["cells"][-1]
    assert cell["agreement"]["agrees"] is False
    assert cell["cause"]["kind"] == "other_samples", cell["cause"]["sentence"]
