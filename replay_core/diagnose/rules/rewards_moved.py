"""Rows that were put in another order between two records of a step, and rewards that stayed where they were."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np

from replay_core import pages
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.finding import Finding, Where, error, share, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import Skip, rule
from replay_core.diagnose.sheets import Sheet, marked
from replay_core.records import TensorRef

#: Samples whose reward is another one, before it is no slip; different rewards that make an order.
FEWEST, SEVERAL = 4, 4
#: How near two records of one number are, as a share of the largest.
CLOSE = 1e-5
#: What a record may call what a sample is paid, the surest first; and what is made of it.
_PAID: tuple[tuple[str, ...], ...] = (("reward", "token_scores", "token_rewards"), ("advantages",))
#: What tells equal answers apart, and has nothing to do with what they are paid.
_OWN = ("sample_id", "rollout_logprobs")

_Values = tuple[TensorRef, Array]


@rule("D162", "rewards stay behind when rows are reordered", link="rewards", scope="batch",
      needs=("tokens",), lasts=True,
      explains=("D04", "D28", "D53", "D56", "D85", "D100", "D123", "D130", "L08"),
      source="a batch that is balanced by length behind its rewards, which are not moved with it")  # fmt: skip
def stayed_behind(batch: StepBatch) -> Finding | None:
    """Rewards (else token scores, token rewards), and advantages, of the same samples in two records of a step, joined
    by their tokens and the engine's log-probabilities: an error where 4 samples and more have another one, and row by
    row, as they stand, both records say the same; or all of both are the same 4 different numbers and more, in another
    order. Answers that stand in a record twice tell nothing. Rewards that are changed on purpose (a KL, a scale, a
    penalty) are other numbers in every order.
    """
    sheets = [
        sheet
        for sheet, _ in batch.columns.sheets
        if sheet.has_tokens and sheet.padding_known and sheet.answers is None and len(sheet) == len(batch)
    ]
    looked = False
    for names in _PAID:
        held = [(sheet, values) for sheet in sheets if (values := _each(sheet, names)) is not None]
        for (a, (ref, a_B)), (b, (other, b_B)) in combinations(held, 2):
            at_a, at_b = _joined(a, b)
            if len(at_a) < FEWEST:
                continue
            looked = True
            close = CLOSE * max(float(np.abs(a_B).max(initial=0.0)), 1e-6)
            apart_J = np.abs(a_B[at_a] - b_B[at_b]) > close
            if apart_J.sum() < FEWEST or (np.abs(a_B[at_a] + b_B[at_b]) <= close).all():
                continue  # each sample has its own, with the other sign: those of two come in such pairs
            in_place = bool((np.abs(a_B - b_B) <= close).all())
            is_sorted = bool((np.abs(np.sort(a_B) - np.sort(b_B)) <= close).all())
            if not in_place and not (is_sorted and np.unique(np.round(a_B, 6)).size >= SEVERAL):
                continue
            first = int(np.flatnonzero(apart_J)[0])
            part, row = b.index[at_b[first]]
            count = int(apart_J.sum())
            return error(
                f"samples have other samples' {names[0]}: {share(count, len(at_a))} have another one in {b.name} "
                f"({other.name}) than in {a.name} ({ref.name}), although "
                + ("row by row both are the same: the rows were reordered, and that was not" if in_place
                   else "they are the same numbers, in another order"),
                Where.of(b.parts[part].held.record, other.name, row),
                shown("samples with another one, joined by their tokens", count, "0", f"{ref.name} and {other.name}"),
                shown("rows with another one, as they stand", int((np.abs(a_B - b_B) > close).sum())),
                shown("rows that are the same sample in both", sum(x == y for x, y in zip(at_a, at_b, strict=True))),
                shown(f"that sample's in {a.name}, and in {b.name}",
                      f"{a_B[at_a[first]]:.4g}, {b_B[at_b[first]]:.4g}"),
                cause=f"the batch was reordered (balanced by length, sorted, shuffled, gathered) between these records "
                f"and the {names[0]} was not moved with its samples: each is trained with another one's",
                next_step="reorder all tensors of the batch by one index (or compute rewards behind the reordering), "
                "and print ids beside rewards before and after",
            )  # fmt: skip
    if not looked:
        raise Skip("needs rewards or advantages of the same samples in two records of a step")
    return None


def _each(sheet: Sheet, names: tuple[str, ...]) -> _Values | None:
    """One number per sample of the first of these tensors that the sheet has: itself, or the sum of its row."""
    for name in names:
        refs = sheet.refs(name)
        if not refs or any(ref.is_text or ref.rows is not None for ref in refs):
            continue
        found = []
        for part, ref in zip(sheet.parts, refs, strict=True):
            if len(ref.shape) not in (1, 2) or ref.shape[0] != len(part) or part.packs is not None:
                break
            rows = np.asarray(pages.array(ref), dtype=np.float64)
            found.append(rows if rows.ndim == 1 else rows.sum(1))
        if len(found) < len(sheet.parts):
            continue
        values_B = np.array([found[part][row] for part, row in sheet.index])
        if np.isfinite(values_B).all() and np.ptp(values_B) > 0:
            return refs[0], values_B
    return None


def _joined(a: Sheet, b: Sheet) -> tuple[list[int], list[int]]:
    """The places of the same samples in both, of those that stand once in each."""
    shared = [name for name in _OWN if a.refs(name) and b.refs(name)]
    for names in (shared, []):
        keys_a, keys_b = marked(a, names), marked(b, names)
        once_a, once_b = ({key for key, times in Counter(keys).items() if times == 1} for keys in (keys_a, keys_b))
        place = {key: at for at, key in enumerate(keys_b) if key in once_b}
        pairs = [(at, place[key]) for at, key in enumerate(keys_a) if key in once_a and key in place]
        # What two records call one may be rounded in one of them: then tokens alone tell.
        if len(pairs) >= max(FEWEST, len(a) // 4) or not names:
            break
    return [x for x, _ in pairs], [y for _, y in pairs]
