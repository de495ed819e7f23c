"""What engine and trainer disagree by, by how many tokens stand before: over the steps of a run.

Two that hold one set of weights and see one prompt agree on what has little before it where they encode positions, or
look back, differently. Another prompt tells most at the first tokens of a response. Other weights tell everywhere.
"""

from __future__ import annotations

import math

import numpy as np
from msgspec import Struct, field

from replay_core.diagnose.finding import Evidence, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.gap import BADLY, DISAGREE, UNSURE, Gap, twins_of

#: Tokens that neither side is sure of, before they tell; and on either side of an edge.
TOKENS, BESIDE = 64, 8
#: What one forward by one set of weights comes to before the edge (mean; bf16), tokens on either side of it, and the
#: share that is off behind it: by that many times what is usual before it, and more than float32 leaves.
EXACT, AROUND, OFF, TIMES, FLOAT = 0.02, 16, 0.5, 8, 1e-5
#: Rank correlation of |d| with the tokens before, over a run: other weights come to .22 at the most, other rotary bases
#: to .3 and more; with the place in the response as well, where both know the prompt.
GROWS, GROWS_IN_RESPONSE = 0.28, 0.4
#: Times the others' difference that the first tokens of a response have where the prompt is another.
FIRST, OTHER_PROMPT = 3, 1.25
#: Correlation of the two sides below which no precision explains them.
UNLIKE = 0.95

Told = tuple[str, str, list[Evidence]]


class ByContext(Struct):
    """|d| of tokens that one side at least is not sure of, their places in the sequence and in the response."""

    sizes: list[Array] = field(default_factory=list)
    before: list[Array] = field(default_factory=list)
    places: list[Array] = field(default_factory=list)
    alike: list[float] = field(default_factory=list)
    has_one_number: bool = False
    """Whether a token after one prefix has one number on the trainer's side: dropout gives it another each time."""

    def take(self, between: Gap) -> None:
        batch, both_N = between.batch, between.both_N
        inside_N = batch.response_N if batch.response_N is not None else both_N
        head_N = np.repeat(batch.flat.first(inside_N), batch.flat.lengths_B)
        unsure = np.minimum(between.trainer.values_N[both_N], between.rollout.values_N[both_N]) < UNSURE
        self.sizes.append(np.abs(between.d)[unsure])
        self.before.append(batch.flat.position_N[both_N][unsure])
        self.places.append((batch.flat.position_N - head_N)[both_N][unsure])
        self.alike.append(between.correlation)
        self.has_one_number |= twins_of(between).known

    def told(self, *, sure: bool = False) -> Told | None:
        """Words, cause and figures of what the places tell; None where they tell nothing. `sure`: what is left where
        they tell nothing in particular, other weights, is not said.
        """
        if not self.sizes:
            return None
        sizes, before, places = (np.concatenate(each) for each in (self.sizes, self.before, self.places))
        if len(sizes) < TOKENS or float(sizes.mean()) < BADLY:
            return None
        told = self._growing(sizes, before, places)
        return told or (None if sure else self._everywhere(sizes, places))

    def edge(self) -> Told | None:
        """What it tells that all is exact up to so many tokens of context, and nearly nothing behind."""
        if not self.sizes:
            return None
        sizes, before, places = (np.concatenate(each) for each in (self.sizes, self.before, self.places))
        # Where all prompts are as long, the place in the response is all that is told.
        if len(sizes) < TOKENS or np.unique(before - places).size < 2:
            return None
        for place in np.unique(before)[1:]:
            ahead = sizes[before < place]
            usual = float(np.median(ahead)) if len(ahead) >= AROUND else math.inf
            if float(np.median(sizes[before == place])) > TIMES * usual + FLOAT:
                edge = int(place)
                break
        else:
            return None
        ahead, behind = sizes[before < edge], sizes[before >= edge]
        off = float((behind > TIMES * usual + FLOAT).mean())
        if len(behind) < AROUND or ahead.mean() > EXACT or off < OFF:
            return None
        if behind.mean() < max(DISAGREE, TIMES * ahead.mean()):
            return None
        overlap = places[before >= edge].min() < places[before < edge].max()
        if np.unique(before[before < edge]).size < 2 or not overlap:
            return None  # the place in the response tells as much
        return (
            f": exact where fewer than {edge} tokens stand before, and off from there on: one side sees less of the "
            "context",
            f"attention looks back no further than {edge - 1} tokens on one side (a sliding window, a chunked "
            "attention, a context that is cut), and over all of them on the other; weights, prompts and precision are "
            "the same, or the first tokens would differ",
            [shown(f"mean |d| with fewer than {edge} tokens before", float(ahead.mean()), None,
                   f"{len(ahead)} tokens"),
             shown("mean |d| behind them", float(behind.mean()), "as before")],
        )  # fmt: skip

    @staticmethod
    def _growing(sizes: Array, before: Array, places: Array) -> Told | None:
        by_before, by_place = _rank_correlation(sizes, before), _rank_correlation(sizes, places)
        if by_before < GROWS or by_place < GROWS_IN_RESPONSE:
            return None
        third = np.quantile(places, (1 / 3, 2 / 3))
        return (
            ", in every step from the first on, before any update, and more, the more tokens stand before: no old "
            "weights",
            "no temperature and no precision either. The two encode positions differently (another rope_theta, rope "
            "scaling or position ids), one looks back less far (a sliding window), or one is given another prompt (a "
            "BOS, a template, a prompt that is cut), or they compute otherwise (another router of experts, other "
            "weights, which show at the first tokens as well). Print the engine's prompt ids beside the trainer's",
            [shown("rank correlation of |d| with the tokens before", by_before, f"< {GROWS:g}"),
             shown("mean |d| of first and last third of responses",
                   f"{sizes[places <= third[0]].mean():.3g}, {sizes[places > third[1]].mean():.3g}", "alike")],
        )  # fmt: skip

    @property
    def is_of_the_prompt(self) -> bool:
        """Whether the first tokens of responses are further apart than the others, over the run."""
        if not self.sizes:
            return False
        sizes, places = np.concatenate(self.sizes), np.concatenate(self.places)
        first, others = sizes[places < FIRST], sizes[places >= FIRST]
        return min(len(first), len(others)) >= BESIDE and float(first.mean()) > 2 * float(others.mean())

    def _everywhere(self, sizes: Array, places: Array) -> Told | None:
        first, others = sizes[places < FIRST], sizes[places >= FIRST]
        alike = float(np.median(self.alike))
        if min(len(first), len(others)) < BESIDE or alike > UNLIKE or first.mean() > OTHER_PROMPT * others.mean():
            return None
        return (
            ", in every step from the first on, before any update, and on the first tokens as on the others: the "
            "engine's forward is not the trainer's, by its weights or by its model",
            "no weights that an update left behind. The engine was loaded with another checkpoint (or one that was "
            "converted wrongly) and no update replaces it; or its model is set up otherwise than the trainer's "
            "(experts per token, activation, norm)"
            + ("" if self.has_one_number else ", or dropout is left on in the trainer's forward")
            + "; or it is given another prompt (a BOS more, another template), which as a rule tells most at the first "
            "tokens. Precision leaves the two alike",
            [shown(f"mean |d| of the first {FIRST} tokens and of the others",
                   f"{first.mean():.3g}, {others.mean():.3g}"),
             shown("median correlation of the two", alike, f"> {UNLIKE:g} of a quantised engine")],
        )  # fmt: skip


def _rank_correlation(a: Array, b: Array) -> float:
    """Spearman's, ties sharing a rank."""
    ranks = []
    for values in (a, b):
        _, at, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[at.reshape(-1)])
    x, y = ranks
    return float(np.corrcoef(x, y)[0, 1]) if x.std() > 0 and y.std() > 0 else 0.0
