"""The floor of a model on a batch: how far rounding alone moves its log-probabilities (docs/referee.md).

Nothing but the tokens is given. Every operation of the model's own code is computed in fp64 and then moved by a random
rounding error of its dtype, run by run; the floor of a token is the rms of its log-probability's moves over the runs.
Two right forwards in one dtype differ by sqrt(2) of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from replay_core.referee import limits
from replay_core.referee.arithmetic import Noise
from replay_core.referee.recorded import Recorded
from replay_core.referee.shadow import Shadow
from replay_core.referee.weights import SideModel
from replay_core.replay.versions import set_attention

Array = NDArray[Any]


class _TokensAlone(Recorded):
    """Samples of which nothing but the tokens is recorded."""

    def __init__(self, ids_BL: Array, valid_BL: Array, about_BL: Array) -> None:
        self.modules, self.problems, self.batch = {}, [], None
        self._about = about_BL & valid_BL
        self._about[:, :1] = False
        self._rows, self._ids = (int(ids_BL.shape[0]), int(ids_BL.shape[1])), ids_BL.astype(np.int64)
        self.sizes = valid_BL.sum(axis=1).astype(np.int64)
        self.positions_BL = None

    def logprobs(self) -> tuple[str, Array, NDArray[np.bool_], str]:
        return "policy_logprobs", np.zeros(self._about.shape), self._about, "float32"


def rounding_floor(
    causal_lm: Any,
    dtype: str,
    ids_BL: Array,
    valid_BL: Array,
    about_BL: Array,
    temperature: float = 1.0,
    runs: int = limits.FLOOR_RUNS,
) -> Array:
    """The floor, nats, of the log-probability of every token of `about_BL`, sample by sample [N].

    Args:
        causal_lm: the model in `dtype`; what rounds is its code as eager attention runs it.
        ids_BL, valid_BL: samples from their first token on, padded on the right.
        about_BL: tokens that have one before them.
    """
    width = int(valid_BL.sum(axis=1).max())
    ids_BL, valid_BL, about_BL = ids_BL[:, :width], valid_BL[:, :width], about_BL[:, :width]
    set_attention(causal_lm, "eager")
    if hasattr(causal_lm, "set_experts_implementation"):
        causal_lm.set_experts_implementation("eager")  # fused experts are kernels of their own dtypes
    shadow = Shadow(
        SideModel(causal_lm, "", dtype, []),
        _TokensAlone(ids_BL, valid_BL, about_BL),
        temperature,
        is_forced=False,
        is_narrow=True,
    )
    shadow.judge()
    name = next(name for name, claim in shadow.claims.items() if claim.kind == "logprobs")
    squares = torch.zeros_like(shadow.claims[name].truth)
    for seed in range(runs):
        squares += shadow.perturb(Noise(seed, limits.ACCUMULATION))[name].double().square()
    floor_N: Array = (squares / runs).sqrt()[:, 0].numpy()
    return floor_N
