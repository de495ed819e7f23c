"""Losses, KL and whatever else is one number of many log-probabilities, in the noise that these leave of it.

A mean of differences cancels: a limit on its own relative error says nothing. What every token's noise f_t leaves of a
number s is sqrt(sum (ds/dlogp_t)^2 f_t^2), to first order and with the tokens' roundings independent. A number is ruled
only where its formula makes of the recorded log-probabilities what was recorded of it: then it is known to be that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from replay_core import pages
from replay_core.errors import RldbgError
from replay_core.objectives import kl, reductions
from replay_core.referee import limits
from replay_core.referee.arithmetic import SIGNIFICAND, ulp
from replay_core.referee.recorded import Recorded
from replay_core.referee.ruled import RuledScalar
from replay_core.replay.losses import resolve

Formula = Callable[[torch.Tensor], torch.Tensor]
#: A formula is the trainer's where it gives what was recorded to so much of it: sums in float32.
_SAME = 1e-4
#: What trainers call the mean of old - new log-probabilities over the response's tokens.
_MEAN_KL = tuple(f"{head}{name}" for head in ("", "metrics.") for name in ("ppo_kl", "approx_kl", "actor/ppo_kl",
                 "policy/approx_kl"))  # fmt: skip


def ruled_scalars(
    recorded: Recorded, truth_BT: torch.Tensor, noise_BT: torch.Tensor, logprobs_BT: torch.Tensor
) -> list[RuledScalar]:
    """The recorded numbers whose formula is known.

    Args:
        truth_BT, logprobs_BT: log-probabilities of the whole model in fp64 and as recorded, 0 where none is.
        noise_BT: the rms of what rounding does to each.
    """
    found = []
    for name, formula in _formulas(recorded):
        ref = recorded.find(name)
        if ref is None or ref.numel != 1 or not ref.dtype.startswith(("float", "bfloat")):
            continue
        said = float(np.asarray(pages.array(ref)).reshape(-1)[0])
        try:
            made = float(formula(logprobs_BT))
        except RldbgError:
            continue
        if not abs(made - said) <= _SAME * abs(said) + 1e-7:
            continue
        with torch.enable_grad():
            at = truth_BT.clone().requires_grad_(True)
            value = formula(at)
            (slope_BT,) = torch.autograd.grad(value, at, allow_unused=True)
        if slope_BT is None:
            continue
        dtype = getattr(torch, ref.dtype, torch.float32)
        unit = float(ulp(torch.tensor(said), dtype if dtype in SIGNIFICAND else torch.float32))
        floor = float(((slope_BT * noise_BT).square().sum() + unit * unit / 12).sqrt())
        truth = float(value.detach())
        word = "NOISE" if abs(said - truth) <= limits.SCALAR * floor else "SUSPECT"
        found.append(RuledScalar(name, said, truth, floor, word))
    return found


def _formulas(recorded: Recorded) -> Iterator[tuple[str, Formula]]:
    mask_BT, old_BT, ref_BT, advantages_BT = (
        None if found is None else torch.from_numpy(found.astype(np.float64))[:, 1:]
        for found in (recorded.tokens_BL("response_mask", "loss_mask"), recorded.tokens_BL("old_logprobs"),
                      recorded.tokens_BL("ref_logprobs"), recorded.tokens_BL("advantages"))
    )  # fmt: skip
    if mask_BT is None:
        return
    if old_BT is not None:
        for name in _MEAN_KL:
            yield name, lambda logp_BT: reductions.token_mean(kl.k1(old_BT, logp_BT), mask_BT)
    ref = recorded.find("tokens_of_step")
    of_step = None if ref is None else float(np.asarray(pages.array(ref)).reshape(-1)[0])
    settings = (recorded.run.flags or {}).get("loss")
    try:
        loss, _ = resolve(None, settings if isinstance(settings, dict) else None, of_step)
    except RldbgError:
        return
    needs = [mask_BT] if loss.kind == "nll" else [old_BT, advantages_BT]
    if any(one is None for one in needs) or loss.kind in ("value", "dpo"):
        return
    for name in ("pg_loss", "kl_loss", "loss"):
        if name == "kl_loss" and not loss.kl:
            continue

        def formula(logp_BT: Any, name: str = name) -> Any:
            made = loss.value(logp_BT, old_BT, ref_BT, advantages_BT, mask_BT)
            return made[name if name in made else "loss"]

        yield name, formula
