"""What a gradient that is off says: of the tokens in it, of the rows that are off, of the means it was divided by."""

from __future__ import annotations

from collections import defaultdict

from replay_core import naming
from replay_core.compare.judging import algebra, contributions, odd_rows, router_balance, token_rows, token_weights
from replay_core.compare.judging.faults import Fault, is_open
from replay_core.compare.judging.ranks import other_numbers
from replay_core.compare.judging.ranks.heads import HeadsOfStep
from replay_core.compare.judging.ranks.losses import OwnMeans
from replay_core.compare.judging.ranks.off_in_steps import OffInSteps
from replay_core.compare.judging.ranks.row import RowOfRanks
from replay_core.compare.judging.ranks.tokens_given import TokensGiven
from replay_core.compare.pairing.ranks import HeldByRanks
from replay_core.records import TensorRef


class Gradients:
    """Asked of a gradient that is off, from what its step's forward pass was given."""

    def __init__(self, tokens: TokensGiven, off: OffInSteps, own_means: OwnMeans) -> None:
        self._tokens, self._off, self._own_means = tokens, off, own_means
        self._heads = HeadsOfStep()
        #: Of a step: what ranks have of the tokens in a module's output, by the module around it.
        self._inputs: dict[int | None, dict[str, list[HeldByRanks]]] = defaultdict(lambda: defaultdict(list))
        #: Of a step: what its one loss left at the logits, of the other run, and which tokens are whose.
        self._left: dict[int | None, tuple[TensorRef, HeldByRanks]] = {}

    def begin_step(self) -> None:
        self._heads.begin_step()

    def note_forward(self, of: RowOfRanks) -> None:
        """Keep what may have gone into a layer whose gradient is asked for, or into a head."""
        held, together = of.held, of.together
        is_cut = held.is_cut and together.shares in ("samples", "tokens") and held.axis in (0, 1)
        if is_cut and naming.is_module_tensor(of.name) and not of.is_gradient:
            self._inputs[of.step][of.name.rpartition(".output")[0].rpartition(".")[0]].append(held)
        self._heads.note(of)

    def note_left(self, of: RowOfRanks) -> None:
        """Keep what a loss left at the logits."""
        if of.is_gradient and of.name.endswith("logits") and of.held.is_cut:
            self._left[of.step] = (of.whole, of.held)

    def of_tokens(self, of: RowOfRanks, fault: Fault | None) -> Fault | None:
        """Of which tokens it was made: not of all, or of another expert's."""
        if of.is_gradient and (fault is None or fault.kind in ("apart", "too little")):
            fault = self._of_its_tokens(of) or fault
            if is_open(fault):
                fault = other_numbers.of_other_tokens(of) or fault
        return fault

    def of_rows(self, of: RowOfRanks, fault: Fault | None) -> Fault | None:
        """Which of its rows are off. Those of a lookup are words, of which tokens tell more."""
        if of.is_gradient and is_open(fault) and len(of.held.ranks) > 1 and not self._is_lookup(of):
            fault = odd_rows.of_rows(of.what, of.whole, of.held, of.found.parted) or fault
        return fault

    def of_means(self, of: RowOfRanks, fault: Fault | None) -> Fault | None:
        """By which number it was divided otherwise."""
        if of.is_gradient and fault is None:
            micros = self._tokens.micros(of.step)
            fault = self._own_means.take(of.step) or algebra.by_micros(of.name, of.found, micros)
        return fault

    def of_summed_in_part(self, of: RowOfRanks, fault: Fault | None) -> Fault | None:
        """Among how few ranks it was summed: asked of the first that is off, for others may follow from it."""
        is_first = len(self._off.gradients(of.step)) == 1 and not self._off.in_forward(of.step)
        if fault is None and is_first and of.is_gradient:
            shares = max(of.together.samples, self._tokens.shares(of.step))
            fault = algebra.summed_in_part(of.what, of.whole, of.held, shares)
        return fault

    def _is_lookup(self, of: RowOfRanks) -> bool:
        given = self._tokens.of_step(of.step)
        return of.name.endswith(naming.EMBEDDINGS) or token_rows.is_lookup(of.whole, given)

    def _of_its_tokens(self, of: RowOfRanks) -> Fault | None:
        """What a gradient of an embedding or of a head says of the tokens that are in it."""
        held, whole = of.held, of.whole
        if (fault := _of_tied(of)) is not None:
            return fault
        given, is_lookup = self._tokens.of_step(of.step), self._is_lookup(of)
        places = held.stretches if held.is_cut else [()] * len(held.ranks)
        if not all(
            algebra.are_alike([ref for ref, other in zip(held.parts, places, strict=True) if other == place])
            for place in set(places)
        ):
            # Each has its own: none of them is what all made of it.
            return token_rows.reduced_of_some(of.what, whole, held, given) if is_lookup else None
        if is_lookup:
            return token_rows.of_rows(of.what, whole, held, given)
        if of.name.endswith(".weight") and (fault := self._of_inputs(of)) is not None:
            return fault
        if not naming.is_head(of.name):
            return None if self._off.in_forward(of.step) else self._heads.through_last_norm(of)
        laid = next((ref for _, ref in of.side.named(of.name)), None)
        if laid is not None:
            is_first = not self._off.in_forward(of.step)
            fault = token_weights.explain(of.what, whole, laid, self._heads.given(of), is_first=is_first)
            if fault is not None:
                return fault
        left = self._left.get(of.step)
        if left is None or left[1].axis not in (0, 1):
            return None
        return contributions.without_tokens(of.what, whole, held, left[0], left[1].stretches, left[1].axis or 0)

    def _of_inputs(self, of: RowOfRanks) -> Fault | None:
        """Whether a layer's gradient lacks what went into it on some ranks, or a router's is of their own balance."""
        weight = of.name.removeprefix("grad.").removesuffix(".weight")
        around = weight.rpartition(".")[0]
        # What feeds a layer stands beside it, or beside the module around it (a block's norm).
        known = self._inputs[of.step]
        for scores in (one for one in known[around] if one.parts[0].name.endswith(f"{weight}.output")):
            given_it = [*known[around], *known[around.rpartition(".")[0]]]
            fault = router_balance.of_own_tokens(of.what, of.whole, of.held, scores, given_it)
            if fault is not None:
                return fault
        for inputs in (*known[around], *known[around.rpartition(".")[0]]):
            for slice_, mine, into in algebra.of_groups(of.whole, of.held, inputs):
                if (fault := contributions.without_inputs(of.what, slice_, mine, into)) is not None:
                    return fault
        return None


def of_logits(of: RowOfRanks, fault: Fault | None) -> Fault | None:
    """What a loss left at the logits: of other tokens than count."""
    if of.is_gradient and naming.makes_logits(of.name) and is_open(fault):
        fault = contributions.other_tokens_count(of.name, of.whole, of.held) or fault
    return fault


def _of_tied(of: RowOfRanks) -> Fault | None:
    """Whether an embedding's gradient lacks its head's, which is tied to it."""
    if not of.name.endswith(naming.EMBEDDINGS):
        return None
    for _, ref in of.side.ending(*naming.HEADS, "grad.output.weight"):
        other = of.together.held.get(id(ref))
        if (
            other is not None and (ref.canonical or ref.name).startswith("grad.")
            and (fault := contributions.tied_apart(of.what, of.whole, of.held, other)) is not None
        ):  # fmt: skip
            return fault
    return None
