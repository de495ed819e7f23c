"""What engine and trainer disagree by, collected over the steps of a run where one step is too little to tell by.

A log-probability is of one token by the logits of one place. Where the token `by` places on is the same one, both can
be told from the other side of engine and trainer, which is right: logits that are `by` places off give what the other
side gives `by` places on; and a neighbour's token is the right one there, while everywhere else it is not.

Of tokens drawn from q the mean of -log q is the mean entropy of q. Of tokens drawn from p, which goes as q^s, it is
less by about (s - 1) times the variance of log q: log q is more of what is drawn the colder p is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from msgspec import Struct, field

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.finding import Evidence, listed, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.gap import DISAGREE, UNSURE, Gap, also

#: How far off is looked for.
OFF_BY = (1, -1, 2, -2)
#: Places where the neighbour's token is the same before they say anything, and the share of them that has to agree.
FEWEST, SHARE = 8, 0.9
#: How near is near, as a share of the usual difference; and how much larger the difference has to be without it.
NEAR, FARTHER = 0.15, 5.0


class Misplaced(Struct):
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
            # Where most tokens agree anyway, those of equal neighbours tell nothing by agreeing, too.
            if (
                usual <= DISAGREE
                or (explained <= NEAR * usual).mean() < SHARE
                or usual < FARTHER * float(np.median(explained))
            ):
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


class Surprise(Struct):
    """-log q - entropy of a run's tokens, q the trainer's: whether they were drawn from q."""

    parts: list[Array] = field(default_factory=list)

    def take(self, between: Gap) -> None:
        entropy = between.batch.columns.of("entropy")
        if entropy is not None:
            known_N = also(between, entropy)
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
#: What is left of a difference without padding, at most, before padding may be its cause.
LEANS = 0.8


class Growth(Struct):
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
        pads = np.array(self.pads)
        widths = np.unique(pads)
        if len(pads) < PROMPTS or widths.size < WIDTHS:
            return False
        means = self.by_width
        if means[int(widths[0])] > LEAST * means[int(widths[-1])]:
            return False
        return self._by_chance <= CHANCE

    @property
    def is_open(self) -> bool:
        """Whether most samples are padded, and those that are least have less of it, by more than chance does in one
        of four: then padding is one cause of what no place tells.
        """
        pads = np.array(self.pads)
        several = len(pads) >= WIDTHS and np.unique(pads).size > 1 and float((pads > 0).mean()) >= 0.5
        means = self.by_width
        return several and means[min(means)] <= LEANS * means[max(means)] and self._by_chance <= 0.25

    @property
    def _by_chance(self) -> float:
        """How often chance would order differences by padding as much."""
        a, b = _ranks(np.array(self.pads)), _ranks(np.array(self.apart))
        draw = np.random.default_rng(0)
        found = float(a @ b)
        return sum(float(a @ draw.permutation(b)) >= found for _ in range(DRAWS)) / DRAWS

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


class Partway(Struct):
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


#: Steps that make a growth; what one set of weights comes to in them (nats per token); and how many times the first
#: step's figure the last ones have to be.
STEPS, AGREES, TIMES_FIRST = 4, 0.01, 10.0
#: And how many times it where (nearly) every step has more than those before it, as chance and rounding do not make it;
#: the largest step is then past what one set of weights comes to.
ORDERLY, FEWER_TIMES = 0.7, 5.0
#: How much more the later half of the updates leaves than the earlier one, and Kendall's tau over all steps.
GROWS, ORDERED = 1.25, 0.4
#: Steps from which an engine that is never updated is told from one that samples some updates late, of which half
#: and more are after the oldest; and how much more the last third of them leaves than the middle one.
ENOUGH, STILL = 12, 1.15
#: Updates that the samples of an asynchronous run are behind, at most, where it records no versions of its weights.
OLDEST = 6
#: Of the rows that agree, the mismatch over that of those that do not; and the share of either that makes it a part.
APART, PART = 0.1, 0.1


class WeightsLeftBehind(Struct, frozen=True):
    """`first` and `last`: mean |d| of the first step and of the later half; `rows`: those of the last step that part,
    of how many; `prompts`: the same of prompts, where it is all rows of some and none of others.
    """

    first: float
    last: float
    rows: tuple[int, int]
    is_growing: bool = False
    """Whether it grows to the last step, over more steps than samples of an asynchronous run are old."""
    prompts: tuple[int, int] | None = None
    ranks: tuple[list[int], list[int]] | None = None
    """The ranks whose rows part, and those whose rows agree, in every later step, where each rank does either."""

    @property
    def is_in_part(self) -> bool:
        return self.rows[0] < self.rows[1]

    @property
    def where(self) -> str:
        """In words, which rows part; nothing where all of them do."""
        if self.ranks is not None:
            off, fine = (f"rank{'s' * (len(each) > 1)} {listed(each)}" for each in self.ranks)
            return f", in the rows of {off} alone, while those of {fine} agree"
        if self.prompts is not None:
            return f", in all rows of {self.prompts[0]} of {self.prompts[1]} prompts and in none of the others"
        return f", in a part of the rows ({self.rows[0]} of {self.rows[1]}), while the others agree"


def parting(
    by_step: Sequence[Array], prompts_B: Array | None, ranks: Sequence[Array | None] = ()
) -> WeightsLeftBehind | None:
    """Of mean |d| per sample [B] by step, NaN where nothing is compared, and of the last step's prompts [B]; of each
    step's ranks [B], where they are known.

    Weights that the engine never gets leave none of it in the first step and ever more later. Other precision, another
    template or a temperature show in the first step as well; weights of a fixed age no longer grow once the run is
    older than they are. None where it comes to rest.
    """
    known = [each[np.isfinite(each)] for each in by_step]
    if len(known) < STEPS or any(each.size == 0 for each in known):
        return None
    first = float(known[0].mean())
    if first > AGREES:
        return None
    limit = max(DISAGREE, TIMES_FIRST * first)
    off = [each > limit / 3 for each in known]
    shares = [float(each.mean()) for each in off[1:]]
    in_part = float(np.median(shares)) <= 1 - PART and all(
        mine.any() and float(each[~mine].mean()) < APART * float(each[mine].mean())
        for each, mine in zip(known[1:], off[1:], strict=True)
        if not mine.all()
    )
    in_part = in_part and max(shares) < 1 and min(shares) >= PART
    means = [first, *(float(each[mine].mean() if in_part else each.mean())
                      for each, mine in zip(known[1:], off[1:], strict=True))]  # fmt: skip
    later = means[1:]
    half = len(later) // 2
    early, late = float(np.median(later[: max(half, 1)])), float(np.median(later[half:]))
    signs = [float(np.sign(b - a)) for a, b in combinations(means, 2)]
    order = float(np.mean(signs))
    orderly = not in_part and order >= ORDERLY and late >= FEWER_TIMES * first and max(later) > DISAGREE
    if not (late >= limit or orderly) or late < GROWS * early or order < ORDERED or min(later) < 2 * first:
        return None
    if comes_to_rest(later):
        return None
    growing = len(known) >= ENOUGH
    if not in_part:
        return WeightsLeftBehind(first, late, (known[-1].size, known[-1].size), growing)
    return WeightsLeftBehind(
        first, late, (int(off[-1].sum()), known[-1].size), growing, _of_prompts(by_step[-1], limit / 3, prompts_B),
        _of_ranks(by_step[1:], limit / 3, ranks[1:]),
    )  # fmt: skip


def comes_to_rest(later: Sequence[float]) -> bool:
    """Whether the last third of the steps after the first leaves no more than the middle third, and what comes after
    the oldest samples that asynchronous runs take no more than what came just before: what weights of a fixed age come
    to. Fewer than six steps do not tell.
    """
    third = len(later) // 3
    if third < 2:
        return False
    if len(later) >= OLDEST + 3 and np.median(later[OLDEST:]) > GROWS * np.median(later[OLDEST - 3 : OLDEST]):
        return False
    return float(np.median(later[-third:])) <= STILL * float(np.median(later[third:-third]))


#: Of steps between two that agree, how many times as far apart they are as the agreeing ones at least.
TIMES_SYNCED = 10.0


def synced_every(means: Sequence[float]) -> int | None:
    """Every how many steps engine and trainer agree (AGREES), the first among them, while they part in all others
    (DISAGREE, and 10 times that); None where they do not so twice and more after the first step.
    """
    at = [number for number, mean in enumerate(means) if mean <= AGREES]
    every = at[1] - at[0] if len(at) >= 3 else 0
    if every < 2 or at != list(range(0, len(means), every)):
        return None
    fresh = max(means[number] for number in at)
    parted = min(mean for number, mean in enumerate(means) if number % every)
    return every if parted > max(DISAGREE, TIMES_SYNCED * fresh) else None


def _of_prompts(by_sample_B: Array, limit: float, prompts_B: Array | None) -> tuple[int, int] | None:
    if prompts_B is None:
        return None
    heard_B = np.isfinite(by_sample_B)
    off, fine = set(prompts_B[heard_B & (by_sample_B > limit)]), set(prompts_B[heard_B & (by_sample_B <= limit)])
    return None if off & fine else (len(off), len(off | fine))


#: The share of a rank's rows that part before it is the rank that does: sure tokens agree whatever the weights.
MOST = 0.5


def _of_ranks(
    by_step: Sequence[Array], limit: float, ranks: Sequence[Array | None]
) -> tuple[list[int], list[int]] | None:
    off: dict[int, list[float]] = {}
    for by_sample_B, rank_B in zip(by_step, ranks, strict=False):
        if rank_B is None:
            return None
        for rank in np.unique(rank_B):
            mine_B = (rank_B == rank) & np.isfinite(by_sample_B)
            if mine_B.any():
                off.setdefault(int(rank), []).append(float((by_sample_B[mine_B] > limit).mean()))
    part = sorted(rank for rank, shares in off.items() if np.median(shares) >= MOST)
    fine = sorted(rank for rank, shares in off.items() if not any(shares))
    return (part, fine) if part and fine and len(part) + len(fine) == len(off) else None
