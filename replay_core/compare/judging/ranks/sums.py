"""Rows of which ranks hold parts: the parts' sum or mean is judged, if it is what the other run has."""

from __future__ import annotations

from replay_core import naming
from replay_core.compare.judging import algebra, own_rows
from replay_core.compare.judging.algebra import Ranked
from replay_core.compare.judging.ranks.losses import off_their_own
from replay_core.compare.judging.ranks.row import MOST, RowOfRanks
from replay_core.compare.judging.ranks.stand_ins import judge_as, judge_multiple, multiple, summed, summed_in_groups
from replay_core.compare.pairing.ranks import MAY_BE_PARTS, named
from replay_core.records import Inline


class SumsOfRanks:
    """Which losses were found to be parts of a sum, and what follows for later rows of the step."""

    def __init__(self) -> None:
        #: Steps in which the ranks' losses are means over their own samples.
        self._means: set[int | None] = set()
        #: By role and name, which ranks' losses were parts of a sum, and what it was divided by.
        self._of_losses: dict[tuple[str | None, str], tuple[tuple[int, ...], int]] = {}

    def judged_as_parts(self, of: RowOfRanks, found: Ranked) -> bool:
        """Whether ranks hold parts of a sum or mean that is the whole, of what may be such; judged so, if they do."""
        row, held = of.row, of.held
        if found.relation not in ("parts", "mean") or of.kind not in MAY_BE_PARTS:
            return False
        row.ranks, found.fault = found, None
        is_mean = found.relation == "mean"
        if is_mean:
            self._means.add(of.step)
        parts = [held.parts[number] for number in found.summands]
        ranks = [held.ranks[number] for number in found.summands]
        divided = f", divided by {found.times}," if 1 < found.times < len(parts) else ""
        of_them = "mean" if is_mean and not divided else "sum"
        said = f"the {of_them}{divided} of what ranks {named(ranks)} of {found.which} hold"
        judge_as(of, parts, 1 / found.times, said)
        if of.kind == "loss" and row.skipped is None and row.verdict.diverges:
            row.ranks.parted = off_their_own(of) or row.ranks.parted
        elif of.kind == "loss" and row.skipped is None:
            self._of_losses[row.key.role, row.name] = found.summands, found.times
        return True

    def recall_parts(self, of: RowOfRanks) -> None:
        """Take ranks' losses for parts of a sum where they were that in another micro-batch, and are so to what noise
        leaves of a sum that cancels.
        """
        found = of.found
        if of.kind != "loss" or found.relation != "all" or of.held.is_cut:
            return
        known = self._of_losses.get((of.row.key.role, of.name))
        if known is None or max(known[0]) >= len(of.held.parts):
            return
        made = multiple([of.held.parts[number] for number in known[0]], 1 / known[1])
        judged = of.judge(of.facing((of.ours[0], made)), of.micro_pair)
        if judged.skipped is None and not judged.verdict.diverges:
            found.relation = "mean" if known[1] > 1 else "parts"
            found.summands, found.times = known

    def judged_as_own_means(self, of: RowOfRanks) -> bool:
        """Whether what the ranks' losses leave is larger for being means of their own; judged as if not, if it is."""
        times = self._of_own_means(of)
        if times is None:
            return False
        judge_multiple(
            of, times, f"times {times:g}, for the losses of ranks or groups are means over their own samples"
        )
        return True

    def _of_own_means(self, of: RowOfRanks) -> float | None:
        """By what a gradient at a module's output is to be multiplied, which is larger by the number of ranks whose
        losses are means of their own; None where it is not.
        """
        together, found = of.together, of.found
        there = together.whole_of
        own = together.samples if together.shares == "samples" and of.step in self._means else 1
        others = there.samples if there is not None and there.own_mean else 1
        if own == others or naming.meaning(of.name).region == "all":
            return None
        expected, every = own / others, list(found.factors.values())
        is_so = len(every) == len(found.ranks) and all(abs(one - expected) <= 1e-3 * expected for one in every)
        return 1 / expected if is_so else None


def judged_slice_by_slice(of: RowOfRanks) -> bool:
    """Whether slices that several ranks have are parts of a sum each; judged so, if they are."""
    row, held = of.row, of.held
    if of.kind not in MAY_BE_PARTS or not held.is_cut or len(set(held.stretches)) == len(held.stretches):
        return False
    made = summed_in_groups(held, of.laid)
    if made is None or not algebra.is_near(of.whole, made):
        return False
    row.ranks = algebra.ranked(of.together, held)
    row.ranks.relation = "parts"
    said = f"the sum of what ranks {named(held.ranks)} of {of.together.which} hold, slice by slice"
    judge_as(of, (made,), 1.0, said)
    return True


def judged_as_stated(of: RowOfRanks) -> bool:
    """Whether parts of which the dump says that their sum counts add up to the whole; judged so, if they do."""
    held, whole = of.held, of.whole
    if not held.summed:
        return False
    parts = [held.parts[number] for number in held.summed]
    if any(ref.shape != whole.shape for ref in parts) or whole.numel > MOST:
        return False
    made = summed(parts)
    total = whole.with_(dtype="float64", source=Inline(made.tobytes()), digest=None)
    if not algebra.is_near(whole, total):
        return False
    found = of.row.ranks = algebra.ranked(of.together, held)
    found.relation, found.summands = "parts", held.summed
    said = f"the sum of what ranks {named(held.ranks[number] for number in held.summed)} of {found.which} hold"
    judge_as(of, parts, 1.0, said)
    return True


def judged_by_own_words(of: RowOfRanks) -> bool:
    """Whether ranks looked up the words that are theirs alone, and 0 for all others; judged together, if they did."""
    row, held = of.row, of.held
    if of.kind != "activation" or of.is_gradient:
        return False
    ids = of.micro_pair.a.find("input_ids") or of.micro_pair.b.find("input_ids")
    looked_up = own_rows.of_own_words(of.whole, held, ids)
    if looked_up is None:
        return False
    row.ranks = algebra.ranked(of.together, held)
    row.ranks.relation = "parts"
    said = f"the rows that ranks {named(held.ranks)} of {of.together.which} hold of their own words each"
    judge_as(of, (looked_up,), 1.0, said)
    return True
