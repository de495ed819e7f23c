"""Attention that is made again in each way it may have been computed: as long as that is worth its time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from replay_core.compare.judging import attention_otherwise
from replay_core.compare.judging.faults import Fault
from replay_core.compare.pairing.ranks import HeldByRanks
from replay_core.records import TensorRef

#: CPU seconds of a comparison in which attention was made again in vain, before it is asked no more.
_MOST_IN_VAIN = 10.0


class AttentionInTime:
    """Asks step by step what attention does otherwise, until it was in vain for so long."""

    def __init__(self) -> None:
        self._in_vain = 0.0

    def otherwise(
        self, name: str, whole: TensorRef, held: HeldByRanks, given: Sequence[HeldByRanks], parted: Sequence[int],
        through: tuple[NDArray[Any], NDArray[Any]] | None, heads_of: Sequence[Sequence[int]] = (),
    ) -> Fault | None:  # fmt: skip
        if self._in_vain > _MOST_IN_VAIN:
            return None
        begun = time.thread_time()
        fault = attention_otherwise.otherwise(name, whole, held, given, parted, through, heads_of)
        if fault is None:
            self._in_vain += time.thread_time() - begun
        return fault
