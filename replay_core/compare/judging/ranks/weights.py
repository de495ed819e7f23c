"""A weight that is off: another one's, or off in the channels or the share of a rank."""

from __future__ import annotations

import numpy as np

from replay_core import pages
from replay_core.compare.judging import algebra, subspaces
from replay_core.compare.judging.faults import Fault, is_open
from replay_core.compare.judging.ranks import other_numbers
from replay_core.compare.judging.ranks.off_in_steps import OffInSteps
from replay_core.compare.judging.ranks.row import MOST, RowOfRanks


def of_weights(off: OffInSteps, of: RowOfRanks, fault: Fault | None) -> Fault | None:
    if not of.is_weight or not is_open(fault):
        return fault
    held, laid, whole, called = of.held, of.laid, of.whole, of.name.removeprefix("param.")
    fault = other_numbers.of_another(of) or fault
    was_off = called in off.gradients(of.step)
    if fault is None and not held.is_cut and len(whole.shape) == 2 and whole.numel <= MOST and not was_off:
        off_OI = pages.array(laid).astype(np.float64) - pages.array(whole).astype(np.float64)
        fault = subspaces.of_a_slices_channels(called, off_OI.T, of.name, held)
    if fault is None and not off.in_forward(of.step):  # else how far it is off tells more
        fault = algebra.of_a_share(called, whole, held)
    return fault
