"""Outputs of a layer of experts that are right at some tokens and off at others: the layer's weights make the ones, and
the others went to other experts, or to none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from replay_core import naming, pages
from replay_core.compare.judging.faults import Fault, is_open, whose
from replay_core.compare.judging.ranks.row import RowOfRanks, say_first
from replay_core.regexes import regex

if TYPE_CHECKING:
    from replay_core.compare.judging.tensors import TensorVerdict

_OF_EXPERTS = regex(r"\.?(?:\w+\.)?(?:experts?|router)(?:[._]|$)")
#: A token is right where it is off by this part of what the worst one is off; and so many are, at least, of all.
_RIGHT, _SOME, _FEWEST = 1e-4, 0.02, 3
_MOST = 1 << 26


class RoutedTokens:
    """Keeps what the first layer of a step that is off at some tokens alone would say, until weights or gradients tell
    that it has experts.
    """

    def __init__(self) -> None:
        self._waits: tuple[TensorVerdict, Fault, tuple[str, ...]] | None = None

    def begin_step(self) -> None:
        """Forget the step before this one."""
        self._waits = None

    def note(self, of: RowOfRanks, *, forward_is_off: bool) -> None:
        """Take the next row of a step that was judged. forward_is_off: whether anything before it is off."""
        if self._waits is not None:
            row, fault, heads = self._waits
            if of.name.startswith(heads) and _OF_EXPERTS.match(of.name[len(heads[0]) :]) is not None:
                self._waits = None
                if row.ranks is not None and is_open(row.ranks.fault):
                    say_first(row, fault)
            return
        if of.kind == "activation" and of.row.verdict.diverges and not forward_is_off and not naming.is_input(of.name):
            module = naming.module_of(of.name)
            if (told := _of_some_tokens(of)) is not None:
                self._waits = of.row, told, tuple(f"{kind}{module}." for kind in ("grad.", "param."))


def _of_some_tokens(of: RowOfRanks) -> Fault | None:
    """What the output of a layer with experts says that is off at some tokens alone."""
    whole, laid = of.whole, of.laid
    if laid.shape != whole.shape or len(whole.shape) < 2 or whole.numel > _MOST:
        return None
    if not whole.is_readable or not laid.is_readable:
        return None
    there, here = (pages.array(ref).astype(np.float64).reshape(-1, whole.shape[-1]) for ref in (whole, laid))
    off_N = np.abs(here - there).max(1)
    # Padding is no token, and may be anything.
    is_token_N = there.any(1) | here.any(1)
    is_off_N = off_N > _RIGHT * off_N.max()
    off, right = int((is_off_N & is_token_N).sum()), int((~is_off_N & is_token_N).sum())
    if not np.isfinite(off_N).all() or not off or right < max(_FEWEST, _SOME * (off + right)):
        return None
    none = int((is_off_N & ~here.any(1)).sum())
    why = (
        f"{none} of these are 0: they were given to no expert (dropped beyond an expert's capacity, of each rank's own "
        "tokens, or lost on their way to or from the ranks that have the experts)"
    ) if none else (
        "these went to other experts than there, or to fewer (a routing that was replayed of other tokens, tokens "
        "dropped beyond an expert's capacity, a router that draws by itself), or one expert's weights are others"
    )  # fmt: skip
    return Fault(
        "routed otherwise", of.held.ranks,
        f"{of.name}, a layer of experts, is off at {off} of {off + right} tokens on {whose(of.held.ranks)} and right "
        f"at all others, so that its weights make the same: {why}",
    )  # fmt: skip
