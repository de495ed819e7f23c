"""Mistakes the demo's trainer can be told to make, each really made while it trains. No torch at import.

A fault is one line of a trainer that is wrong, as people write it: what is recorded is what then happened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replay_core.errors import RequestError

if TYPE_CHECKING:
    import torch

    from replay_core.demo.policy import Rollout

#: Every fault, and what the trainer does wrong.
FAULTS = {
    "zero-reward-variance": "the judge gives every response the same score",
    "packing-leak": "the trainer packs four samples into a row and lets attention cross them",
    "temperature": "the engine samples at temperature 0.6, the trainer scores at 1",
    "logprob-shift": "the engine's log-probabilities are cut one token early",
    "stale-weights": "the engine keeps the weights it started with",
    "pad-in-mask": "the loss mask is made from the padded length",
    "nan": "the judge divides by the length of an empty answer",
    "eos-untrained": "the loss mask leaves out the end of every response",
}

#: The temperature the engine samples at when it is another than the trainer's.
SAMPLED_AT = 0.6
#: Samples in a row of the trainer that packs.
PACK = 4


def check(name: str | None) -> str | None:
    """The name of a fault, or None.

    Raises:
        RequestError: there is no such fault.
    """
    if name is None or name in FAULTS:
        return name
    raise RequestError(f"there is no fault {name!r}", expected=", ".join(FAULTS), hint="rldbg demo --help")


def judged(rewards_B: torch.Tensor, written_B: torch.Tensor, fault: str | None) -> torch.Tensor:
    """The judge's scores. `written_B` are the tokens each response wrote before its end."""
    if fault == "zero-reward-variance":
        return rewards_B * 0 + 0.5
    if fault == "nan":
        # A score per token: 0 / 0 for an answer that ends at once.
        return rewards_B * written_B / written_B
    return rewards_B


def loss_mask(rollout: Rollout, end: int, fault: str | None) -> Any:
    """The mask [B, S] of the tokens that the trainer takes into its loss."""
    mask_BS = rollout.response_mask_BS
    if fault == "pad-in-mask":
        mask_BS = mask_BS.clone()
        mask_BS[:, int(mask_BS.any(0).nonzero()[0]) :] = 1
    elif fault == "eos-untrained":
        mask_BS = mask_BS * (rollout.input_ids_BS != end)
    return mask_BS
