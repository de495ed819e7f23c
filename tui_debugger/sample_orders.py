"""The orders that the samples of a step are put in: what `--by` takes, and what `b` goes through on the screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replay_core.documents.samples import SampleOrder

ORDERS: tuple[SampleOrder, ...] = ("order", "reward", "length", "mismatch", "clipped", "group")
