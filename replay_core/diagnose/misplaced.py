"""Log-probabilities that are gathered one or two places off: from the logits, or at the token, of a neighbour.

A log-probability is of one token by the logits of one place. Where the token `by` places on is the same one, both can
be told from the other side of engine and trainer, which is right: logits that are `by` places off give what the other
side gives `by` places on; and a neighbour's token is the right one there, while everywhere else it is not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.finding import Evidence, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.gap import Gap

#: How far off is looked for.
OFF_BY = (1, -1, 2, -2)
#: Places where the neighbour's token is the same before they say anything, and the share of them that has to agree.
FEWEST, SHARE = 8, 0.9
#: How near is near, as a share of the usual difference; and how much larger the difference has to be without it.
NEAR, FARTHER = 0.15, 5.0
#: Tokens that the right side is sure of agree whatever is gathered.
UNSURE = -0.3


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
