"""Whether what engine and trainer disagree by grows with the left padding of a sample, over the steps of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.flat import Array
from replay_core.diagnose.gap import Gap

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
