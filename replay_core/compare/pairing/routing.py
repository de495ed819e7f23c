"""Tokens that the routers of two sides sent to other experts though neither is wrong: their scores were next to equal.

A router takes the k greatest scores. Where two of them are nearer to each other than noise moves them, either choice
is right, and what follows of that token is another computation on either side: it says nothing, from that layer on. A
choice that the sides' own scores do not explain is a difference like any other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from replay_core import naming
from replay_core.compare.pairing.align import Rowwise, ShapesDifferError, TensorPair
from replay_core.compare.pairing.micro_batch_pair import MicroBatchPair, Rerouted
from replay_core.errors import DumpError
from replay_core.records import TensorRef

#: Of routers that choose by more than the recorded scores (a bias, groups), the share of tokens that noise may reroute.
MOST_UNEXPLAINED = 0.1

#: What the module that chooses experts is called.
ROUTERS = ("gate", "router")


class _Router(Struct, frozen=True):
    """A router's pair of choices [tokens, k] and the pair of scores [tokens, experts] that it chose by."""

    choices: TensorPair
    scores: TensorPair


def rerouted(pairs: Sequence[TensorPair], micro_pair: MicroBatchPair) -> list[Rerouted]:
    """What every router of a computation sent elsewhere, in order of computation."""
    found = []
    for router in _routers(pairs):
        try:
            one = _of(router, micro_pair)
        except (ShapesDifferError, DumpError):
            continue
        if one is not None:
            found.append(one)
    return found


def _routers(pairs: Sequence[TensorPair]) -> list[_Router]:
    of_module: dict[str, list[tuple[TensorPair, TensorRef]]] = {}
    for pair in pairs:
        if pair.a is None or pair.b is None or not naming.is_module_tensor(pair.name) or naming.is_input(pair.name):
            continue
        module = naming.module_of(pair.name)
        if module.rpartition(".")[2] in ROUTERS and len(pair.a[1].shape) == len(pair.b[1].shape) == 2:
            of_module.setdefault(module, []).append((pair, pair.a[1]))
    found = []
    for outputs in of_module.values():
        choices = [(pair, ref) for pair, ref in outputs if ref.dtype.startswith("int")]
        if len(choices) == 1:
            chosen = choices[0][1].shape[1]
            scores = [pair for pair, ref in outputs if ref is not choices[0][1] and ref.shape[1] > chosen]
            if len(scores) == 1:
                found.append(_Router(choices[0][0], scores[0]))
    return found


def _of(router: _Router, micro_pair: MicroBatchPair) -> Rerouted | None:
    rows, chosen_a, chosen_b = _values(router.choices, micro_pair)
    if rows.tokens is None or not (chosen_a != chosen_b).any():
        return None
    scored, scores_a, scores_b = _values(router.scores, micro_pair)
    if scored.tokens is None or not np.array_equal(scored.tokens, rows.tokens):
        return None
    took_a, took_b = _taken(chosen_a, scores_a), _taken(chosen_b, scores_b)
    elsewhere = (took_a != took_b).any(axis=1)
    is_moved = (scores_a != scores_b).any(axis=1)
    by_scores = _are_greatest(took_a, scores_a) & _are_greatest(took_b, scores_b)
    if not (elsewhere & ~by_scores).any() or np.count_nonzero(elsewhere) <= MOST_UNEXPLAINED * elsewhere.size:
        explained = elsewhere & is_moved
    else:
        explained = elsewhere & is_moved & by_scores
    in_turn = ~elsewhere & is_moved & (chosen_a != chosen_b).any(axis=1)
    if not (explained | in_turn).any():
        return None
    assert router.choices.a is not None
    ref = router.choices.a[1]
    name = naming.module_of(router.choices.name)
    return Rerouted(name, ref.order or 0, ref.shape[1], rows.tokens[explained], rows.tokens[in_turn], rows.tokens.size)


def _values(pair: TensorPair, micro_pair: MicroBatchPair) -> tuple[Rowwise, NDArray[np.float64], NDArray[np.float64]]:
    assert pair.a is not None
    assert pair.b is not None
    rows = Rowwise(pair.a[1], pair.b[1], micro_pair)
    chunks = list(rows.counted())
    a, b = (np.concatenate([chunk[side].astype(np.float64) for chunk in chunks]) for side in (0, 1))
    return rows, a, b


def _taken(chosen: NDArray[np.float64], scores: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which experts every token took [tokens, experts]."""
    taken = np.zeros(scores.shape, bool)
    np.put_along_axis(taken, np.clip(chosen, 0, scores.shape[1] - 1).astype(np.intp), True, axis=1)
    return taken


def _are_greatest(taken: NDArray[np.bool_], scores: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Of every token, whether no expert it left has a greater score than one it took."""
    least = np.where(taken, scores, np.inf).min(axis=1)
    most = np.where(taken, -np.inf, scores).max(axis=1)
    return np.asarray(least >= most)


def said(found: Sequence[Rerouted]) -> list[str]:
    """One sentence for every router that sent tokens elsewhere."""
    return [
        f"{one.router}: {one.tokens.size:,} of {one.of:,} tokens took other experts, their scores nearer to each other "
        "than the sides are: what follows of them is not compared"
        for one in found
        if one.tokens.size
    ]
