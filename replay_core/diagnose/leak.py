"""The signature of a leaking pack: the first sample of every pack agrees with its reference, no later one does."""

from __future__ import annotations

import numpy as np

from replay_core.diagnose.batch import Batch
from replay_core.diagnose.flat import Array

#: How far apart clean and leaking samples are.
APART = 5.0
#: A leak moves what it touches by this much at least, in fp32 too.
LEAKS = 1e-3
#: One clean sample is chance among fewer than this.
FEWEST_ALONE = 6
#: A clean sample's mean |d| stays below this however noisy the precision.
CLEAN = 0.015


def packed_signature(batch: Batch, by_sample_B: Array) -> tuple[Array, str] | None:
    """(samples that agree, how packs are known) where mean |d| per sample lies as a leak's does, else None.

    Every order the batch is known in is tried: as stored, and micro-batch by micro-batch.
    """
    for order in batch.orders:
        values_B = by_sample_B[order]
        known_B = ~np.isnan(values_B)
        if known_B.sum() < 4 or not known_B[0]:
            continue
        for starts_B, how in _starts(batch, order, values_B):
            later_B = known_B & ~starts_B
            first_B = known_B & starts_B
            if not later_B.any() or not first_B.any():
                continue
            # Of two samples of equal tokens, records may disagree which is which: a first one may then be off, too.
            clean, dirty = float(np.quantile(values_B[first_B], 0.9, method="lower")), values_B[later_B]
            # A short later sample may see little of what it should not: a few may pass, the most may not.
            off = float((dirty > max(APART * float(np.median(values_B[first_B])), 1e-5)).mean())
            apart = float(np.median(dirty)) > max(APART * clean, LEAKS)
            # Of those that agree, most are first ones: else something other than packing spares them.
            agree = values_B <= max(APART * clean, 1e-5)
            if clean < CLEAN and off >= 0.8 and apart and float(starts_B[agree].mean()) >= 0.6:
                agree_B = np.zeros(len(values_B), dtype=bool)
                agree_B[order[starts_B]] = True
                return agree_B, how
    return None


def _starts(batch: Batch, order: Array, values_B: Array) -> list[tuple[Array, str]]:
    """Where packs may begin, in this order: as recorded, else every k-th sample, else rows filled up to a length."""
    total = len(order)
    recorded_B = batch.pack_B
    if recorded_B is not None:
        packs_B = recorded_B[order]
        return [(np.concatenate([[True], packs_B[1:] != packs_B[:-1]]), "as recorded")]
    found = [(np.arange(total) % size == 0, f"every {size} samples (inferred)") for size in range(2, total // 2 + 1)]
    if total >= FEWEST_ALONE:
        found.append((np.arange(total) == 0, "all samples in one (inferred)"))
    clean_B = values_B < CLEAN
    lengths_B = batch.lengths_B[order]
    if clean_B[0] and clean_B.sum() >= 2 and not clean_B.all() and _is_filling(clean_B, lengths_B):
        found.append((clean_B, "rows filled up to one length (inferred)"))
    return found


def _is_filling(starts_B: Array, lengths_B: Array) -> bool:
    """Whether one length of row explains these starts: every pack fits it, and none would with the sample after it."""
    packs = np.cumsum(starts_B) - 1
    sums = np.bincount(packs, weights=lengths_B)
    following = lengths_B[starts_B][1:]
    return bool(sums.max() < (sums[:-1] + following).min())
