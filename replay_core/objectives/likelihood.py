"""The likelihood loss that a model gives for its labels, and the part of it that a trainer starts its backward from."""

from __future__ import annotations

from typing import Any

from replay_core.objectives.arrays import library


def divided_by(given: float, began: float, marked: int, tokens: float | None) -> float | None:
    """The whole number by which a trainer divided the loss `given` by its model (gradient accumulation); None where the
    backward `began` at another loss. 1 where a sum was divided by the step's `tokens`, of which `marked` are here.
    """
    if not given or not began:
        return 1.0
    times = given / began
    if tokens is not None:
        return 1.0 if min(abs(times - 1), abs(times * marked / tokens - 1)) < 1e-3 else None
    return float(round(times)) if times > 0.5 and abs(times - round(times)) < 1e-5 * times else None


def cross_entropy_sum(logprobs_BT: Any, mask_BT: Any) -> Any:
    """The negative log-likelihood of the marked tokens, summed in the order of torch's `cross_entropy`: transformers'
    `ForCausalLMLoss` gives it every slot of a row, the last one ignored. Torch tensors only.
    """
    functional = library(logprobs_BT).nn.functional
    each_N1 = functional.pad(logprobs_BT, (0, 1)).reshape(-1, 1)
    counted_N = functional.pad(mask_BT, (0, 1)).reshape(-1) != 0
    return functional.nll_loss(each_N1, counted_N.long() - 1, ignore_index=-1, reduction="sum")
