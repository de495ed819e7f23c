"""The first tokens of every response, or prompt, by what stands before them: samples that share it share a place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.flat import Array


def places_of(batch: StepBatch, followed: int) -> Iterator[tuple[int, int, int]]:
    """(key of all tokens before, key of these and the token, its index in the flat arrays), sample by sample, of the
    first `followed` tokens of each response; nothing where no tokens or no responses are known.
    """
    tokens_N, response_N = batch.tokens_N, batch.response_N
    if tokens_N is None or response_N is None:
        return
    heads_B = batch.flat.first(response_N)
    for start, head, length in zip(batch.flat.starts_B, heads_B, batch.flat.lengths_B, strict=True):
        before = hash(tokens_N[start : start + head].tobytes())
        for at in range(int(start + head), int(start + min(length, head + followed))):
            here = hash((before, int(tokens_N[at])))
            yield before, here, at
            before = here


def prompt_places_of(batch: StepBatch, followed: int) -> Iterator[tuple[int, int]]:
    """(key of a token and all before it, its index in the flat arrays), sample by sample, of the first `followed`
    tokens of each prompt after its very first; nothing where no tokens or no responses are known.
    """
    tokens_N, response_N = batch.tokens_N, batch.response_N
    if tokens_N is None or response_N is None:
        return
    for start, head in zip(batch.flat.starts_B, batch.flat.first(response_N), strict=True):
        here = 0
        for at in range(int(start), int(start + min(head, followed))):
            here = hash((here, int(tokens_N[at])))
            if at > start:
                yield here, at


#: Tokens of a response that are followed: places are shared at its beginning.
FOLLOWED = 64
#: Different tokens of a place, beyond the first, that tell; how far apart (rms, nats) they have to be.
FEWEST, SPREAD = 6, 0.03
#: What a line may leave of the differences within places, and of the rollout's own range there, and how many standard
#: errors it has to be off 1: other weights leave much of either.
LEFT, ERRORS = 0.2, 4.0
#: A slope that is nearer to 1 is that of one temperature.
NEAR = 0.1


class Contexts(Struct, frozen=True):
    """Tokens drawn in one place: what two models say of them differs by one factor where a temperature differs.
    log p_T = log p / T - log Z(place), and log Z is one number of a place, as is what top-p, top-k and min-p keep.

    Over `tokens` different tokens beyond each place's first: the slope of the rollout on the trainer within places,
    its standard error, and the rms that it leaves over the rms of the difference within places, or of the rollout there
    where that is less.
    """

    tokens: int = 0
    slope: float = 1.0
    error: float = np.inf
    left: float = 1.0

    @property
    def temperature(self) -> float | None:
        """The rollout's temperature over the trainer's, None where no other than 1 is told."""
        is_off = abs(self.slope - 1) > max(NEAR, ERRORS * self.error)
        return 1 / self.slope if is_off and self.left < LEFT and self.slope > 0 else None

    @property
    def is_one_temperature(self) -> bool:
        """Whether the slope is 1 as surely as can be: no temperature explains what differs."""
        return abs(self.slope - 1) + 2 * self.error < NEAR


def contexts(batch: StepBatch, trainer_N: Array, rollout_N: Array, both_N: Array) -> Contexts:
    """Places that samples share, over the first 64 tokens of their responses."""
    places = defaultdict[int, dict[int, int]](dict)
    for prefix, here, at in places_of(batch, FOLLOWED):
        if both_N[at]:
            places[prefix].setdefault(here, at)
    shared = [list(found.values()) for found in places.values() if len(found) > 1]
    tokens = sum(len(found) - 1 for found in shared)
    if tokens < FEWEST:
        return Contexts()
    x = np.concatenate([trainer_N[found] - trainer_N[found].mean() for found in shared])
    y = np.concatenate([rollout_N[found] - rollout_N[found].mean() for found in shared])
    squares = float(x @ x)
    if not squares > tokens * SPREAD**2:
        return Contexts()
    slope = float(x @ y) / squares
    rest = float(((y - slope * x) ** 2).sum())
    before = min(float(((y - x) ** 2).sum()), float(y @ y))
    error = float(np.sqrt(rest / max(tokens - 1, 1) / squares))
    return Contexts(tokens, slope, error, float(np.sqrt(rest / max(before, 1e-18))))


#: Places at which two samples part before their numbers tell; how far apart numbers of two tokens are at least, and
#: those of one token at most, in shares of that.
PARTED, NUMBERS, ONE = 3, 0.05, 0.05


def is_of_its_tokens(batch: StepBatch, values_N: Array, known_N: Array) -> bool | None:
    """Whether numbers are of the tokens at their places, as a forward makes them: tokens that differ after one
    beginning have numbers that differ, and one token after one beginning has one, whatever follows. None where too few
    samples share a beginning.
    """
    after: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for prefix, here, at in places_of(batch, FOLLOWED):
        if known_N[at]:
            after[prefix][here].append(at)
    parted = [[float(values_N[found[0]]) for found in each.values()] for each in after.values() if len(each) > 1]
    shared = [float(np.ptp(values_N[found])) for each in after.values() for found in each.values() if len(found) > 1]
    if len(parted) < PARTED:
        return None
    apart = float(np.median([np.ptp(each) for each in parted]))
    if apart < NUMBERS:
        return False
    return not shared or float(np.mean(shared)) < ONE * apart
