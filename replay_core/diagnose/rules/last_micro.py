"""A gradient that is of the last micro-batch alone: the rows of the embedding tell which tokens took part in it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from msgspec import Struct

from replay_core import pages
from replay_core.budget import stored_bytes
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, error, listed, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import rule, skip_if
from replay_core.records import Record, TensorRef
from replay_core.regexes import regex
from replay_core.samples.batch import IGNORED

#: An embedding of tokens; updates that tell, tokens of each side in them, and bytes of a record that is read.
_EMBEDDING = regex(
    r"(?:embed_tokens|tok_embeddings|word_embeddings|wte|embed_in|token_embedding(?:s|_table)?"
    r"|(?:^|\.)(?:tokens|tok_emb|token_emb|emb|embed|embedding|embeddings))\.weight$"
)
#: Of tied heads: how many times the rest of a row that no micro-batch holds the rows of the last one's tokens are, and
#: those of earlier ones at most.
CLEAR, AS_NONE = 5.0, 2.0
UPDATES, TOKENS, LARGE = 2, 3, 1 << 29
#: Nats that a policy is from the old one before any update of a step: another sum's rounding.
STILL = 1e-5


class _TaughtTokens(Struct, frozen=True):
    """A micro-batch: its place in the order of the update, and the tokens of the rows that teach something."""

    micro: int
    tokens: Array
    moved: float
    """By how much its policy differs from the old one, at most; infinite where that is not known."""


def _taught(record: Record) -> _TaughtTokens | None:
    """The tokens that surely have a gradient: those that count and have an advantage, and stand before others that do
    (a token is an input of the next one's loss).
    """
    found = {ref.canonical or ref.name: ref for ref in record.tensors() if not ref.is_text and ref.is_readable}
    ids, advantages = found.get("input_ids"), found.get("advantages")
    mask = next((found[name] for name in ("response_mask", "loss_mask", "labels") if name in found), None)
    if ids is None or mask is None or record.key.micro is None or len(ids.shape) != 2:
        return None
    ids_BS, mask_BS = pages.array(ids).astype(np.int64), _counts(mask)
    if mask_BS.ndim != 2 or len(mask_BS) != len(ids_BS) or mask_BS.shape[1] > ids_BS.shape[1]:
        return None
    wide_BS = np.zeros(ids_BS.shape, dtype=bool)
    wide_BS[:, ids_BS.shape[1] - mask_BS.shape[1] :] = mask_BS
    if advantages is not None:
        a = pages.array(advantages).astype(np.float64)
        a_B = np.abs(np.nan_to_num(a)).reshape(len(a), -1).max(1) if len(a) == len(ids_BS) and a.size else None
        if a_B is None:
            return None
        wide_BS &= (a_B > 1e-3)[:, None]
    inside_BS = wide_BS[:, :-1] & wide_BS[:, 1:]
    return _TaughtTokens(record.key.micro, np.unique(ids_BS[:, :-1][inside_BS]), _moved(found))


def _counts(mask: TensorRef) -> Array:
    values = np.asarray(pages.array(mask))
    return values != IGNORED if mask.canonical == "labels" else values.astype(bool)


def _beside_softmax(grads_VD: Array, none: Array) -> Array:
    """Of each row, the size of what is not the direction that the softmax of a tied head gives all rows: that of those
    of tokens that no micro-batch holds.
    """
    mean_D = grads_VD[none].mean(0)
    size = float(np.linalg.norm(mean_D))
    if size > 0:
        grads_VD = grads_VD - np.outer(grads_VD @ (mean_D / size), mean_D / size)
    norms: Array = np.linalg.norm(grads_VD, axis=1)
    return norms


def _moved(found: dict[str, TensorRef]) -> float:
    """How far the policy is from the old one at most, where both are stored in single precision."""
    if "advantages" not in found and "old_logprobs" not in found:
        return 0.0  # demonstrations are of no policy: a step of theirs is one update
    now, old = found.get("policy_logprobs"), found.get("old_logprobs")
    if now is None or old is None or now.shape != old.shape or {now.dtype, old.dtype} != {"float32"}:
        return math.inf
    apart = np.abs(pages.array(now).astype(np.float64) - pages.array(old))
    return float(np.nan_to_num(apart, nan=math.inf).max()) if apart.size else math.inf


def _updates(case: Case) -> Iterator[tuple[Record, TensorRef, list[_TaughtTokens], list[Array]]]:
    """Every recorded gradient of an update, its embedding, its micro-batches in their order, and all tokens of each."""
    parts: dict[tuple[int | None, int | None, int | None], list[tuple[_TaughtTokens, Array]]] = {}
    for record in case.records():
        key = record.key
        if key.stage == "forward_data" and not key.rank and key.role != "critic" and key.step is not None:
            part = _taught(record)
            ids = next((ref for ref in record.tensors() if ref.canonical == "input_ids"), None)
            if part is not None and ids is not None:
                parts.setdefault((key.step, key.epoch, key.minibatch), []).append((part, np.unique(pages.array(ids))))
    every = [one for one in case.records() if one.key.stage == "gradient" and not one.key.rank]
    every = [one for one in every if one.key.role != "critic" and stored_bytes(one.path) <= LARGE]
    times = Counter((one.key.step, one.key.epoch, one.key.minibatch) for one in every)
    for record in every:
        key = record.key
        own = parts.get((key.step, key.epoch, key.minibatch))
        # Several gradients of one update may be each micro-batch's own. Without the name of its mini-batch those of a
        # step are one update where none of its micro-batches has moved from the policy at the step's beginning.
        if times[key.step, key.epoch, key.minibatch] > 1 or own is None:
            continue
        if key.minibatch is None and max(part.moved for part, _ in own) > STILL:
            continue
        embedding = next((ref for ref in record.tensors() if ref.is_readable and _EMBEDDING.search(ref.name)), None)
        if embedding is None or len(own) < 2 or len(embedding.shape) != 2:
            continue
        own.sort(key=lambda one: one[0].micro)
        if key.micro is None or key.micro == own[-1][0].micro:
            yield record, embedding, [part for part, _ in own], [every for _, every in own]


#: How much of the micro-batch before a recorded gradient of one has in it at most, of those that are their own: sums
#: that grow have all of it. And how near two copies of one gradient are.
OWN, COPY = 0.7, 1e-6
_OF_A_MICRO = regex(r"grad", re.IGNORECASE)


class _OwnGradients(Struct, frozen=True):
    """A weight's gradient in an update, and in each of its micro-batches."""

    record: Record
    ref: TensorRef
    micros: list[Array]
    source: str

    @property
    def is_of_the_last(self) -> bool:
        """Whether the update's is the last micro-batch's, and that of no other."""
        whole = np.asarray(pages.array(self.ref), dtype=np.float64)
        return _alike(whole, self.micros[-1]) and not any(_alike(whole, one) for one in self.micros[:-1])

    @property
    def shares(self) -> list[float]:
        """How much of each micro-batch's gradient is in the next one's."""
        pairs = [(a, b) for a, b in pairwise(self.micros) if a.any()]
        return [float((a * b).sum() / (a * a).sum()) for a, b in pairs]


def _alike(a: Array, b: Array) -> bool:
    return float(np.linalg.norm(a - b)) <= COPY * float(np.linalg.norm(a))


def _own_gradients(case: Case) -> Iterator[_OwnGradients]:
    """Updates whose micro-batches' own gradients of a weight are recorded beside the update's."""
    beside: dict[tuple[int | None, ...], dict[int, list[TensorRef]]] = {}
    whole: dict[tuple[int | None, ...], list[Record]] = {}
    for record in case.records():
        key = record.key
        place: tuple[int | None, ...] = (key.step, key.epoch, key.minibatch, key.rank)
        if key.role == "critic" or key.step is None or record.is_flat or stored_bytes(record.path) > LARGE:
            continue
        if key.stage == "gradient":
            whole.setdefault(place, []).append(record)
        elif key.micro is not None and key.stage in ("tensors", "loss", "loss_gradient"):
            refs = [ref for ref in record.tensors() if len(ref.shape) == 2 and _OF_A_MICRO.search(ref.name)]
            beside.setdefault(place, {}).setdefault(key.micro, []).extend(refs)
    for update, records in whole.items():
        micros = beside.get(update, {})
        if len(records) > 1 or len(micros) < 2:
            continue
        names = set.intersection(*({ref.name for ref in refs} for refs in micros.values()))
        for name in sorted(names):
            refs = [next(ref for ref in micros[micro] if ref.name == name) for micro in sorted(micros)]
            ends = re.sub(r"[^a-z0-9]+", "_", name.lower()).rpartition("grad_")[2]
            weight = next((
                ref for ref in records[0].tensors() if ref.is_readable and ref.shape == refs[0].shape
                and ends and ends in re.sub(r"[^a-z0-9]+", "_", ref.name.lower())
            ), None)  # fmt: skip
            if weight is not None and len({ref.shape for ref in refs}) == 1 and all(ref.is_readable for ref in refs):
                values = [np.asarray(pages.array(ref), dtype=np.float64) for ref in refs]
                yield _OwnGradients(records[0], weight, values, name)
                break


def _beside_its_own(case: Case) -> Finding | None:
    """Gradients of updates that are, number by number, what was recorded of their last micro-batch."""
    every = list(_own_gradients(case))
    told = [one for one in every if one.is_of_the_last]
    shares = [share for one in told for share in one.shares]
    # Of a sum that grows from micro-batch to micro-batch the last is the update's.
    if len(told) < UPDATES or len(told) < len(every) or not shares or float(np.median(shares)) > OWN:
        return None
    one, key = told[0], told[0].record.key
    total = np.sum(one.micros, axis=0)
    return error(
        f"gradients are those of the last of {len(one.micros)} micro-batches alone: {one.ref.name}'s is what its own "
        f"{one.source} says, and has nothing of the others'",
        Where(step=key.step, micro=key.micro, stage=key.stage, tensor=one.ref.name, path=str(one.record.path)),
        shown("updates that show it", len(told), "0"),
        shown("first: size of the update's", float(np.linalg.norm(one.micros[-1])), f"{np.linalg.norm(total):.4g}",
              f"the sum of its {len(one.micros)} micro-batches'"),
        shown("of the micro-batch before in the next one's", float(np.median(shares)), "1 of sums that grow"),
        cause=_CLEARED,
        next_step="clear gradients once, before an update's first backward",
        steps=sorted({each.record.key.step for each in told if each.record.key.step is not None}),
    )  # fmt: skip


_CLEARED = (
    "zero_grad() is called before every backward instead of once an update, or the backend keeps what a backward gives "
    "only at its accumulation boundary (DeepSpeed: set_gradient_accumulation_boundary): an update learns from one "
    "micro-batch of its mini-batch"
)


@rule("D139", "a gradient is of the last micro-batch alone", link="gradient", scope="case", lasts=True,
      explains=("D163", "D68", "L08", "L10"),
      source="torchtitan#3575, alpaca_farm#57, open-instruct#1498: zero_grad before every backward, or a backend that "
      "drops what is not at its boundary")  # fmt: skip
def of_the_last(case: Case) -> Finding | None:
    """Recorded gradients of updates of several micro-batches, whose embedding has a row for each token: an error where
    rows of tokens (3 and more, in 2 updates and more, in all that tell) that count in the loss with an advantage in
    earlier micro-batches, and are in none of the last, are exactly 0, while those of the last one's own are not. A tied
    head gives every row a gradient, nearly the same one: there rows tell by what they have beside it, which is that of
    tokens that no micro-batch holds (3 and more; twice as much at most), while the last one's own have 5 times as
    much.

    Where the gradients of micro-batches themselves are recorded beside the update's (`grad` and the end of a weight's
    name in theirs): an error where the update's is the last one's in all of 2 updates and more, and these are no sums
    that grow from one micro-batch to the next.
    """
    if (its_own := _beside_its_own(case)) is not None:
        return its_own
    told: list[tuple[Record, TensorRef, list[int], int]] = []
    looked, tied = 0, False
    for record, embedding, parts, every in _updates(case):
        grads_VD = pages.array(embedding).astype(np.float64)
        moved_V = np.any(grads_VD != 0, axis=1)
        size = len(moved_V)
        last = every[-1]
        earlier = np.setdiff1d(np.concatenate([part.tokens for part in parts[:-1]]), last)
        own = np.setdiff1d(parts[-1].tokens, np.concatenate(every[:-1]))
        earlier, own = earlier[(earlier >= 0) & (earlier < size)], own[(own >= 0) & (own < size)]
        if len(earlier) < TOKENS or not len(own):
            continue
        # A head that is tied, or a norm over all rows, leaves none of them 0.
        if moved_V.all():
            none = np.setdiff1d(np.arange(size), np.concatenate(every))
            if len(none) < TOKENS or len(own) < TOKENS:
                continue
            rest_V = _beside_softmax(grads_VD, none)
            least = float(np.median(rest_V[none]))
            if not float(np.median(rest_V[own])) > CLEAR * least:
                continue
            looked, tied = looked + 1, True
            if float(np.median(rest_V[earlier])) < AS_NONE * least:
                told.append((record, embedding, earlier.tolist(), len(parts)))
            continue
        looked += 1
        if moved_V[own].all() and not moved_V[earlier].any():
            told.append((record, embedding, earlier.tolist(), len(parts)))
    skip_if(not looked, "needs gradients of updates of several micro-batches, with an embedding, and their tokens")
    if len(told) < UPDATES or len(told) < looked:
        return None
    record, embedding, tokens, micros = told[0]
    key = record.key
    return error(
        f"gradients are those of the last of {micros} micro-batches alone: tokens that count in the others have none",
        Where(step=key.step, micro=key.micro, stage=key.stage, tensor=embedding.name, path=str(record.path)),
        shown("updates that show it", len(told), "0"),
        shown("updates that tell", looked),
        shown(
            "first: tokens of earlier micro-batches whose rows are "
            + ("those of tokens that none holds" if tied else "0"),
            listed(tokens, 6),
            "none",
        ),
        cause=_CLEARED,
        next_step="rldbg record --gradients . -- YOUR COMMAND   # then clear gradients once, before an update's first "
        "backward",
        steps=sorted({each.key.step for each, *_ in told if each.key.step is not None}),
    )
