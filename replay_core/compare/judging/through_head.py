"""With what weight each part of a step's tokens stands in the gradient of the norm before a head whose logits were not
recorded: one that is the embedding (tied), or that is fused with its loss.

The logits are made again of the norm's output h and the head's weight E, and make the recorded log-probabilities. What
the loss leaves at a token's logits goes back to the norm through E:

    u_t  =  c_t (softmax(z_t) - onehot(y_t)) E

The gradient of the norm's bias b is the sum of u_t, that of its weight w the sum of u_t (h_t - b) / w. c is what losses
of policies weigh tokens by: one number for all that count, times advantages, times ratios where these are not clipped,
by the tokens of all or of the sample. Which of these makes the other run's gradient is asked first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

from replay_core import pages
from replay_core.compare.judging import token_weights
from replay_core.compare.judging.faults import Fault
from replay_core.compare.judging.products import NEAR, Array
from replay_core.compare.pairing.micro_batch_pair import Side
from replay_core.records import TensorRef

#: How far ratios may be from 1 before they are clipped, below and above.
_CLIPS = ((0.2, 0.2), (0.2, 0.28), (0.1, 0.1), (0.3, 0.3))
#: What may be left of the other run's gradient; elements of logits that are made.
_LEFT, _MOST = 2e-3, 1 << 25


class GivenToLast(Struct, frozen=True):
    """What a micro-batch's last module put out, the other run's tensors beside it, and who has which of its tokens."""

    name: str
    output: TensorRef
    side: Side
    given: token_weights.GivenToHead


def explain(
    what: str, name: str, whole: TensorRef, laid: TensorRef, head: TensorRef, norm: tuple[Array, Array],
    ends: Sequence[GivenToLast],
) -> Fault | None:  # fmt: skip
    """Whose tokens, or which micro-batches', are missing from a norm's gradient, or are in it twice.

    name: the gradient's, whole of the other run and laid of the ranks, [H]. head: a weight [V, H]. norm: the norm's
    weight and bias.

    Raises:
        DumpError: the bytes of one cannot be read.
    """
    if len(head.shape) != 2 or head.shape[1:] != whole.shape or laid.shape != whole.shape or not ends:
        return None
    if sum(one.output.numel for one in ends) // whole.numel * head.shape[0] > _MOST:
        return None
    words_VH = pages.array(head).astype(np.float64)
    backs, loads = [], []
    for one in ends:
        h_NH = pages.array(one.output).astype(np.float64).reshape(-1, whole.numel)
        left_NV = _left(h_NH @ words_VH.T, one)
        weights = _weights(one.side, one.output.shape[:-1])
        if left_NV is None or weights is None:
            return None
        back_NH = left_NV @ words_VH
        backs.append(back_NH if name.endswith(".bias") else back_NH * (h_NH - norm[1]) / norm[0])
        loads.append(weights)
    back_NH = np.concatenate(backs)
    there_H, here_H = (pages.array(ref).astype(np.float64) for ref in (whole, laid))
    if not (np.isfinite(back_NH).all() and np.isfinite(here_H).all()):
        return None
    for by in loads[0].keys() & set.intersection(*(set(one) for one in loads)):
        c_N = np.concatenate([one[by] for one in loads])
        made_H = c_N @ back_NH
        times = float(made_H @ there_H) / max(float(made_H @ made_H), 1e-300)
        if np.linalg.norm(times * made_H - there_H) <= _LEFT * np.linalg.norm(there_H):
            return token_weights.of_parts(
                what,
                [one.given for one in ends],
                times * c_N[:, None] * back_NH,
                here_H,
                "the norm's outputs and the head",
            )
    return None


def _left(logits_NV: Array, one: GivenToLast) -> Array | None:
    """softmax(z) - onehot(y), where these logits make the log-probabilities that were recorded."""
    said = one.side.find("policy_logprobs")
    if said is None or said.shape != one.output.shape[:-1] or not said.is_readable:
        return None
    said_N = pages.array(said).astype(np.float64).reshape(-1)
    logits_NV = logits_NV - logits_NV.max(1, keepdims=True)
    weights_NV = np.exp(logits_NV)
    sums_N = weights_NV.sum(1)
    for targets_N in one.given.targets:
        own_N = np.clip(targets_N, 0, logits_NV.shape[1] - 1)
        made_N = logits_NV[np.arange(own_N.size), own_N] - np.log(sums_N)
        counts_N = (said_N != 0) & (targets_N >= 0)
        if counts_N.any() and np.abs(made_N - said_N)[counts_N].max() <= NEAR * np.abs(said_N).max():
            left_NV = weights_NV / sums_N[:, None]
            left_NV[np.arange(own_N.size), own_N] -= 1
            return np.asarray(left_NV)
    return None


def _weights(side: Side, lead: tuple[int, ...]) -> dict[str, Array] | None:
    """What losses of policies may weigh tokens by, but for one number."""
    policy, old, advantages, mask = (
        _read(side, name, lead) for name in ("policy_logprobs", "old_logprobs", "advantages", "response_mask")
    )
    if policy is None:
        return None
    counts = (policy != 0 if mask is None else mask != 0).astype(np.float64)
    found = dict(_by_token(policy, old, advantages, counts))
    per_sample = counts / np.maximum(counts.sum(-1, keepdims=True), 1)
    found |= {f"{words} of a sample": c / np.where(counts > 0, counts, 1) * per_sample for words, c in found.items()}
    return {words: c.reshape(-1) for words, c in found.items()}


def _by_token(policy: Array, old: Array | None, advantages: Array | None, counts: Array) -> Iterator[tuple[str, Array]]:
    yield "alike", counts
    if advantages is None:
        return
    yield "advantages", counts * advantages
    if old is None:
        return
    ratios = np.where(counts > 0, np.exp(np.clip(policy - old, -20, 20)), 0.0)
    yield "ratios", counts * advantages * ratios
    for below, above in _CLIPS:
        is_clipped = np.where(advantages > 0, ratios > 1 + above, ratios < 1 - below)
        yield f"ratios clipped at {below:g} and {above:g}", counts * advantages * ratios * ~is_clipped


def _read(side: Side, name: str, lead: tuple[int, ...]) -> Array | None:
    ref = side.find(name)
    if ref is None or ref.shape != lead or not ref.is_readable:
        return None
    values = pages.array(ref).astype(np.float64)
    return np.where(np.isfinite(values), values, 0.0)
