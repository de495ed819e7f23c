"""What engine and trainer disagree by, collected over the steps of a run where one step is too little to tell by.

A log-probability is of one token by the logits of one place. Where the token `by` places on is the same one, both can
be told from the other side of engine and trainer, which is right: logits that are `by` places off give what the other
side gives `by` places on; and a neighbour's token is the right one there, while everywhere else it is not.

Of tokens drawn from q the mean of -log q is the mean entropy of q. Of tokens drawn from p, which goes as q^s, it is
less by about (s - 1) times the variance of log q: log q is more of what is drawn the colder p is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.finding import Evidence, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.gap import DISAGREE, UNSURE, Gap

#: How far off is looked for.
OFF_BY = (1, -1, 2, -2)
#: Places where the neighbour's token is the same before they say anything, and the share of them that has to agree.
FEWEST, SHARE = 8, 0.9
#: How near is near, as a share of the usual difference; and how much larger the difference has to be without it.
NEAR, FARTHER = 0.15, 5.0


@dataclass(slots=True)
class Misplaced:
    """What equal neighbours of a run's tokens tell: by (kind, by), differences with the explanation and without it."""

    apart: dict[tuple[str, int], tuple[list[Array], list[Array]]] = field(default_factory=dict)

    def take(self, batch: StepBatch, between: Gap) -> None:
        tokens_N, sample_N = batch.tokens_N, batch.flat.sample_N
        if tokens_N is None:
            return
        ours_N, theirs_N, both_N = between.trainer.values_N, between.rollout.values_N, between.both_N
        for by in OFF_BY:
            here = np.arange(max(0, -by), len(tokens_N) - max(0, by))
            here = here[(sample_N[here] == sample_N[here + by]) & both_N[here]]
            same = tokens_N[here] == tokens_N[here + by]
            own = np.abs(ours_N[here] - theirs_N[here])
            there = here[same & both_N[here + by]]
            there = there[theirs_N[there + by] < UNSURE]
            self._add("logits", by, np.abs(ours_N[there] - theirs_N[there + by]),
                      np.abs(ours_N[there] - theirs_N[there]))  # fmt: skip
            self._add("token", by, own[same & (theirs_N[here] < UNSURE)], own[~same])

    def _add(self, kind: str, by: int, explained: Array, left: Array) -> None:
        found = self.apart.setdefault((kind, by), ([], []))
        found[0].append(explained)
        found[1].append(left)

    def told(self) -> tuple[str, str, list[Evidence]] | None:
        """Words, cause and figures of what explains the places where it can be told; None where nothing does."""
        for (kind, by), (every, others) in self.apart.items():
            explained, left = np.concatenate(every), np.concatenate(others)
            if len(explained) < FEWEST or len(left) < FEWEST:
                continue
            usual = float(np.median(left))
            if (explained <= NEAR * usual).mean() < SHARE or usual < FARTHER * float(np.median(explained)):
                continue
            figures = [
                shown("places where the neighbour's token is the same", len(explained)),
                shown("median |d| there, if gathered so", float(np.median(explained))),
                shown("median |d| " + ("there as recorded" if kind == "logits" else "elsewhere"), usual, "as small"),
            ]
            words, cause = _WORDS[kind, by > 0]
            return words.format("one place" if abs(by) == 1 else f"{abs(by)} places"), cause, figures
        return None


_WORDS = {
    ("logits", True): (
        "the trainer gathers each token from the logits {} too late",
        "logits and labels are not shifted against each other: the logits at a token predict the one after it, and are "
        "asked for the token itself. Take logits[:, :-1] beside labels[:, 1:]",
    ),
    ("logits", False): (
        "the trainer gathers each token from the logits {} too early",
        "logits are shifted against the labels twice (the model or the loss shifts them already), or the response's "
        "slice begins too early",
    ),
    ("token", True): (
        "the trainer gathers the token {} further on",
        "labels are shifted twice, or rolled, before the gather: the log-probability is of a later token, by the "
        "logits of this one",
    ),
    ("token", False): (
        "the trainer gathers the token {} before",
        "labels are not shifted, or the wrong way round, before the gather: the log-probability is of an earlier "
        "token, by the logits of this one",
    ),
}
#: Fewer tokens tell nothing, nor does a difference that would be less than that many standard errors.
DRAWN, ERRORS = 64, 5.0
#: Of the difference that another temperature makes, what noise makes of it at the most, and what counts as one; and how
#: many standard errors that one is.
NONE, SOME, SURE = 0.15, 0.25, 3.0


@dataclass(slots=True)
class Surprise:
    """-log q - entropy of a run's tokens, q the trainer's: whether they were drawn from q."""

    parts: list[Array] = field(default_factory=list)

    def take(self, between: Gap) -> None:
        entropy = between.batch.columns.of("entropy")
        if entropy is not None:
            known_N = between.also(entropy)
            self.parts.append(-between.trainer.values_N[known_N] - entropy.values_N[known_N])

    @property
    def mean(self) -> float:
        return float(np.concatenate(self.parts).mean())

    def is_drawn(self, gain: float) -> bool | None:
        """Whether the trainer's distribution is the one that tokens were drawn from, where the other one is at `gain`
        times its temperature; False where the other one is as likely as not, None where neither is told.
        """
        left_K = np.concatenate(self.parts) if self.parts else np.zeros(0)
        if left_K.size < DRAWN:
            return None
        error = float(left_K.std()) / left_K.size**0.5
        expected = (1 - 1 / gain) * float(left_K.var())
        if abs(expected) < ERRORS * error:
            return None
        share = self.mean / expected
        if abs(share) < NONE:
            return True
        return False if share > SOME and abs(self.mean) > SURE * error else None


#: Prompts, and widths of padding among them, before a trend is one; how often chance may come to as much.
PROMPTS, WIDTHS, CHANCE, DRAWS = 12, 3, 0.01, 4000
#: Of the most padded prompts' difference, the share that the least padded ones may have.
LEAST = 0.5


@dataclass(slots=True)
class Growth:
    """Prompts of a run: left pads, and mean |d| over the samples of each."""

    pads: list[int] = field(default_factory=list)
    apart: list[float] = field(default_factory=list)
    counted: list[bool] = field(default_factory=list)
    """Whether recorded positions of a padded sample begin at its padding's width, not at 0."""

    def take(self, batch: StepBatch, between: Gap) -> None:
        """Samples of one prompt are one observation: their differences are alike."""
        pads_B, prompt_B = batch.laid.left_pads_B, batch.prompt_B
        if pads_B is None or prompt_B is None:
            return
        positions = batch.columns.of("position_ids")
        for prompt in np.unique(prompt_B):
            mine = np.flatnonzero(prompt_B == prompt)
            known = between.by_sample_B[mine]
            if np.isfinite(known).any():
                self.pads.append(int(pads_B[mine[0]]))
                self.apart.append(float(np.nanmean(known)))
                if positions is not None and pads_B[mine[0]]:
                    begins = positions.values_N[batch.flat.starts_B[mine[0]]]
                    self.counted.append(bool(begins == pads_B[mine[0]]))

    @property
    def by_width(self) -> dict[int, float]:
        """mean |d| by left pads."""
        pads, apart = np.array(self.pads), np.array(self.apart)
        return {int(width): float(apart[pads == width].mean()) for width in np.unique(pads)}

    @property
    def is_told(self) -> bool:
        """Whether more padding makes more of it: by ranks, and more than chance would."""
        pads, apart = np.array(self.pads), np.array(self.apart)
        widths = np.unique(pads)
        if len(pads) < PROMPTS or widths.size < WIDTHS:
            return False
        means = self.by_width
        if means[int(widths[0])] > LEAST * means[int(widths[-1])]:
            return False
        a, b = _ranks(pads), _ranks(apart)
        draw = np.random.default_rng(0)
        found = float(a @ b)
        by_chance = sum(float(a @ draw.permutation(b)) >= found for _ in range(DRAWS))
        return by_chance <= CHANCE * DRAWS

    @property
    def are_positions_counted(self) -> bool:
        """Whether recorded positions count the padding, in every padded sample."""
        return bool(self.counted) and all(self.counted)


def _ranks(values: Array) -> Array:
    """Ranks about their mean; equal values share one."""
    _, at, counts = np.unique(values, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - (counts - 1) / 2
    ranks: Array = middle[at.reshape(-1)]
    ranks -= ranks.mean()
    return ranks


#: Tokens of a place over the run before it tells, places on either side, and how much further apart each place before
#: is than each behind.
TOKENS, PLACES, TIMES = 24, 2, 3.0
#: Places of a response that are looked at.
WIDTH = 8192


@dataclass(slots=True)
class Partway:
    """Sums of |d| of tokens that are not sure, by place in the response, and how many they are of."""

    sums: Array = field(default_factory=lambda: np.zeros(0))
    counts: Array = field(default_factory=lambda: np.zeros(0))

    def take(self, batch: StepBatch, between: Gap) -> None:
        inside_N = batch.response_N if batch.response_N is not None else between.both_N
        place_N = batch.flat.position_N - np.repeat(batch.flat.first(inside_N), batch.flat.lengths_B)
        place, size = place_N[between.both_N], np.abs(between.d)
        # A token that either policy is sure of agrees under all weights.
        known = (place >= 0) & (place < WIDTH) & (between.trainer.values_N[between.both_N] < UNSURE)
        width = max(len(self.sums), int(place[known].max(initial=-1)) + 1)
        self.sums = np.pad(self.sums, (0, width - len(self.sums)))
        self.counts = np.pad(self.counts, (0, width - len(self.counts)))
        np.add.at(self.sums, place[known], size[known])
        np.add.at(self.counts, place[known], 1)

    def told(self) -> tuple[int, float, float] | None:
        """(place from which on they agree, mean |d| before it, mean |d| from it on); None where there is no such."""
        known = int(np.argmax(np.append(self.counts, 0) < TOKENS))
        means = self.sums[:known] / self.counts[:known]
        for at in range(PLACES, known - PLACES + 1):
            if means[:at].min() > max(DISAGREE, TIMES * float(means[at:].max())):
                return at, float(means[:at].mean()), float(means[at:].mean())
        return None
