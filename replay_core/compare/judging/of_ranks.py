"""The verdict of a tensor of several ranks: every copy is judged, and where they part, why is asked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from replay_core.compare.judging import algebra, at_boundaries, own_norm
from replay_core.compare.judging.faults import UNEXPECTED, Fault, is_open
from replay_core.compare.judging.ranks import (
    batch_values,
    gradients,
    held_otherwise,
    log_probabilities,
    losses,
    module_values,
)
from replay_core.compare.judging.ranks.attention_in_time import AttentionInTime
from replay_core.compare.judging.ranks.clipped_by_shares import ClippedByShares
from replay_core.compare.judging.ranks.dealt_samples import DealtSamples
from replay_core.compare.judging.ranks.entropies import Entropies
from replay_core.compare.judging.ranks.experts_of_layers import ExpertsOfLayers
from replay_core.compare.judging.ranks.first_activation import FirstActivation
from replay_core.compare.judging.ranks.fused_weights import FusedWeights
from replay_core.compare.judging.ranks.losses import OwnMeans
from replay_core.compare.judging.ranks.off_in_steps import OffInSteps
from replay_core.compare.judging.ranks.optimizer_states import OptimizerStates
from replay_core.compare.judging.ranks.optimizer_steps import OptimizerSteps
from replay_core.compare.judging.ranks.orthogonalised import Orthogonalised
from replay_core.compare.judging.ranks.other_micro_batches import OtherMicroBatches
from replay_core.compare.judging.ranks.other_numbers import judged_as_later
from replay_core.compare.judging.ranks.output_dtypes import OutputDtypes
from replay_core.compare.judging.ranks.own_clips import OwnClips
from replay_core.compare.judging.ranks.routed_tokens import RoutedTokens
from replay_core.compare.judging.ranks.row import JudgeCopy, RowOfRanks, say_first
from replay_core.compare.judging.ranks.scaled_gradients import ScaledGradients
from replay_core.compare.judging.ranks.stand_ins import judge_copies, take
from replay_core.compare.judging.ranks.sums import (
    SumsOfRanks,
    judged_as_stated,
    judged_by_own_words,
    judged_slice_by_slice,
)
from replay_core.compare.judging.ranks.tensors_before import TensorsBefore
from replay_core.compare.judging.ranks.texts import judge_texts
from replay_core.compare.judging.ranks.tokens_given import TokensGiven
from replay_core.compare.judging.ranks.weights import of_weights
from replay_core.compare.judging.ranks.weights_of_first import WeightsOfFirst
from replay_core.compare.judging.verdict import Verdict
from replay_core.compare.pairing.align import MicroBatchPair, TensorPair
from replay_core.compare.pairing.own_copies import other_copies
from replay_core.compare.pairing.ranks import named
from replay_core.errors import DumpError

if TYPE_CHECKING:
    from replay_core.compare.judging.tensors import TensorVerdict

#: What may be wrong with a row, by what was found of it so far.
Question = Callable[[RowOfRanks, Fault | None], Fault | None]


class OfRanks:
    """Looks at the rows of steps that are spread over ranks, in order of computation."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._tokens, self._off, self._before = TokensGiven(), OffInSteps(), TensorsBefore()
        self._fused, self._clips, self._sums, self._own_means = FusedWeights(), OwnClips(), SumsOfRanks(), OwnMeans()
        self._experts, self._dtypes, self._dealt = ExpertsOfLayers(), OutputDtypes(), DealtSamples(self._tokens)
        self._gradients = gradients.Gradients(self._tokens, self._off, self._own_means)
        self._scaled, self._steps, self._entropies = ScaledGradients(), OptimizerSteps(), Entropies()
        attention = AttentionInTime()
        self._first = FirstActivation(self._before, self._experts, self._dtypes, attention)
        self._weights_of_first = WeightsOfFirst(self._first, attention)
        self._micro_batches = OtherMicroBatches(self._first)
        self._clipped, self._orthogonalised, self._states = ClippedByShares(), Orthogonalised(), OptimizerStates()
        self._routed = RoutedTokens()
        #: In the order they are asked: a later one may overrule what was found, as each says by itself.
        self._questions: tuple[Question, ...] = (
            batch_values.of_positions,
            batch_values.of_ends,
            batch_values.of_padded_words,
            batch_values.of_ids,
            batch_values.of_own_tokens,
            batch_values.of_samples,
            losses.of_losses,
            _of_norms,
            module_values.of_other_samples,
            module_values.of_halves,
            module_values.of_order,
            gradients.of_logits,
            partial(module_values.of_some_ranks, self._first),
            self._before.of_sums,
            self._steps.of_last_gradient,
            self._gradients.of_tokens,
            self._gradients.of_rows,
            self._gradients.of_means,
            self._fused.of_bias,
            partial(of_weights, self._off),
            log_probabilities.of_vocabulary,
            log_probabilities.of_logits,
            self._of_stretches,
            self._entropies.of_logits,
            self._of_own_words,
            batch_values.of_astray,
            self._gradients.of_summed_in_part,
            self._of_softmax,
        )
        #: Causes that were not looked for to their end, and why.
        self.notes: list[str] = []

    def _asked(self, row: TensorVerdict, look: Callable[..., None], *args: Any) -> None:
        """Look for a cause; an error that nobody thought of leaves what was judged as it is."""
        try:
            look(*args)
        except UNEXPECTED as error:
            self.notes.append(
                f"what {row.name} of step {row.key.step} says of the ranks could not be looked for: "
                f"{type(error).__name__}: {error}"
            )

    @np.errstate(invalid="ignore", over="ignore", divide="ignore")
    def finish(self) -> None:
        """Look for what only all weights of a step tell, once all of them were looked at."""
        for first, of_role in self._steps.taken():
            self._asked(first, self._steps.explain_slices, first, of_role)
        for row, fault, rows in (*self._clipped.finish(), *self._orthogonalised.finish()):
            for one in rows:
                if one.ranks is not None:
                    one.ranks.fault = None
            say_first(row, fault)
        if (of_state := self._states.finish()) is not None:
            say_first(*of_state)

    # What is not finite is told as such, and arithmetic with it says nothing.
    @np.errstate(invalid="ignore", over="ignore", divide="ignore")
    def look(self, row: TensorVerdict, pair: TensorPair, micro_pair: MicroBatchPair, judge: JudgeCopy) -> None:
        """Say of a judged row what its ranks hold; its verdict becomes that of the rank that is furthest off."""
        together = micro_pair.together
        assert together is not None
        assert pair.a is not None
        assert pair.b is not None
        held = together.held.get(id((pair.a if together.which == "a" else pair.b)[1]))
        if row.key.step != self._step:
            self.finish()
            self._begin_step(row.key.step)
        self._tokens.note(together, row)
        if held is None:
            if row.skipped is None and not row.verdict.diverges:
                row.skipped = f"what ranks {named(together.ranks)} of {together.which} hold of it each is not known"
            return
        recorded = RowOfRanks(row, pair, micro_pair, held, judge)
        self._note(recorded)
        if row.skipped is not None or row.verdict is Verdict.SHAPE or row.by_digest:
            return
        try:
            of = self._looked_at(recorded)
        except DumpError as error:
            row.skipped, row.damaged = error.message, error.file
            return
        if of is None:
            return
        self._asked(row, self._note_routed, of)
        self._asked(row, self._note_off, of, recorded)
        self._asked(row, self._keep, of)
        self._asked(row, self._clipped.note, recorded)
        self._asked(row, self._orthogonalised.note, recorded)
        self._asked(row, self._states.note, recorded)
        self._steps.keep_gradient(recorded)

    def _begin_step(self, step: int | None) -> None:
        # Of a step before this one nobody asks what its micro-batches held.
        self._step = step
        self._micro_batches.begin_step()
        self._gradients.begin_step()
        self._before.begin_step()
        self._routed.begin_step()
        self._entropies.begin_step()
        self._clips.forget()

    def _note(self, of: RowOfRanks) -> None:
        """Keep of a row, before it is looked at, what is asked of later ones."""
        self._experts.note(of)
        self._gradients.note_forward(of)
        of.row.ranks = algebra.ranked(of.together, of.held)
        self._dealt.note(of)
        if of.is_weight and of.held.is_cut:
            self._asked(of.row, self._dealt.explain, of)
        self._dtypes.note(of)

    def _note_routed(self, of: RowOfRanks) -> None:
        self._routed.note(of, forward_is_off=self._off.in_forward(of.step))

    def _note_off(self, of: RowOfRanks, recorded: RowOfRanks) -> None:
        self._off.note(of.row)
        self._micro_batches.note(of, recorded.laid)

    def _keep(self, of: RowOfRanks) -> None:
        """Keep of a row that was looked at what is asked of later ones."""
        self._fused.note_in_turn(of)
        self._gradients.note_left(of)
        self._before.keep(of)
        self._entropies.note(of)

    def _looked_at(self, recorded: RowOfRanks) -> RowOfRanks | None:
        """Look at a row whose ranks' values can be judged: the row as it was judged, in sections where its ranks hold
        such; None where there is no more to ask.
        """
        row, together, of = recorded.row, recorded.together, recorded
        if of.laid.is_text:
            judge_texts(of)
            return None
        if row.verdict is not Verdict.SAME and own_norm.is_of_parts(row.name, together):
            of.found.restates = own_norm.OF_PARTS
            return None
        if row.verdict is Verdict.DIFF and (again := self._fused.in_sections(of)) is not None:
            of = again
            together.held[id(recorded.laid)] = again.held
            take(row, of.judge(of.pair, of.micro_pair))
        self._own_means.note(of)
        if not self._judged_as_mean(of) and (not row.verdict.diverges or not of.held.is_cut):
            judge_copies(of)
        if of.kind == "loss" and not row.verdict.diverges and of.together.shares == "all":
            self._asked(row, _note_mean, of)
        if row.verdict is Verdict.CLOSE and of.kind == "gradient" and not of.is_gradient:
            self._asked(row, _judge_norm, of)
        if row.verdict in (Verdict.DIFF, Verdict.NAN):
            if of.is_gradient:
                self._off.note_gradient(row)
            self._asked(row, self._explain, of)
            if row.verdict.diverges:
                self._asked(row, self._first.note, of, recorded)
        if of.is_gradient:
            self._steps.note_gradient(of)
        if of.is_weight:
            self._explain_by_weight(of)
        return of

    def _of_own_words(self, of: RowOfRanks, fault: Fault | None) -> Fault | None:
        """Whether numbers of tokens are made of each rank's own words, where nothing else says why ranks differ."""
        if not is_open(fault):
            return fault
        return held_otherwise.of_own_words(of, is_first=not self._off.in_forward(of.step)) or fault

    def _of_stretches(self, of: RowOfRanks, fault: Fault | None) -> Fault | None:
        """Whether log-probabilities are off where ranks' stretches of the sequence end, or all of them one way."""
        is_off = self._off.in_forward(of.step)
        fault = log_probabilities.of_stretches(of, fault, forward_is_off=is_off)
        return log_probabilities.of_its_sum(of, fault, forward_is_off=is_off)

    def _of_softmax(self, of: RowOfRanks, fault: Fault | None) -> Fault | None:
        """Whether a head's gradient lacks what comes back of other ranks' words."""
        return log_probabilities.of_softmax(of, fault, forward_is_off=self._off.in_forward(of.step))

    def _judged_as_mean(self, of: RowOfRanks) -> bool:
        """Whether losses that agree are, of several ranks with samples of their own, a mean all the same."""
        is_mean = (
            not of.row.verdict.diverges and of.together.samples > 1 and of.kind == "loss"
            and next(other_copies(of.held), None) is not None
        )  # fmt: skip
        return is_mean and self._sums.judged_as_parts(of, algebra.explain(of.name, of.whole, of.together, of.held))

    def _explain_by_weight(self, of: RowOfRanks) -> None:
        row = of.row
        self._asked(row, self._steps.explain, of)
        self._asked(row, self._weights_of_first.explain_sum, of)
        self._asked(row, self._weights_of_first.explain_made_of, of)
        self._asked(row, self._weights_of_first.explain_slice, of)
        self._asked(row, self._entropies.explain, of)
        if row.verdict is Verdict.DIFF and self._off.in_forward(of.step):
            of.found.off = algebra.off_by_rank(of.whole, of.held)

    def _explain(self, of: RowOfRanks) -> None:
        """Say of a row that is off what its ranks hold: parts that are judged together, or what went wrong."""
        if judged_slice_by_slice(of) or judged_as_stated(of) or judged_as_later(of) or judged_by_own_words(of):
            return
        row = of.row
        row.ranks = algebra.explain(row.name, of.whole, of.together, of.held)
        if (otherwise := held_otherwise.explain(of)) is not None:
            row.ranks = algebra.ranked(of.together, of.held)
            row.ranks.parted = otherwise.ranks
            say_first(row, otherwise)
            return
        if self._clips.judged_without(of):
            return
        self._sums.recall_parts(of)
        if self._sums.judged_as_parts(of, of.found) or self._sums.judged_as_own_means(of):
            return
        fault = of.found.fault
        for question in self._questions:
            fault = question(of, fault)
        if of.kind == "loss":
            of.found.parted = losses.off_their_own(of) or of.found.parted
        of.found.fault = fault
        if fault is not None:
            say_first(row, fault)
            if at_boundaries.is_of_places(fault):  # what was put together since is off on all ranks alike
                of.found.parted = fault.ranks
        self._scaled.note(of, fault)


def _of_norms(of: RowOfRanks, fault: Fault | None) -> Fault | None:
    """Whether the squares of ranks' norms add up to the other run's, or are of gradients that are counted again."""
    if not is_open(fault):
        return fault
    summed = own_norm.not_summed(of.name, of.whole, of.held)
    return summed or own_norm.counted_again(of.name, of.whole, of.held, of.together) or fault


def _judge_norm(of: RowOfRanks) -> None:
    """Let a norm that is near the other run's diverge where it is off by exactly what is counted again in it."""
    if own_norm.counted_again(of.name, of.whole, of.held, of.together) is not None:
        of.row.verdict, of.row.suspect = Verdict.DIFF, False


def _note_mean(of: RowOfRanks) -> None:
    """Note of losses that are near the other run's that ranks with the same tokens have another each, whose mean it is:
    no tolerance tells, and it matters where gradients part.
    """
    if of.held.is_cut or of.found.relation != "all" or next(other_copies(of.held), None) is None:
        return
    made = algebra.explain(of.name, of.whole, of.together, of.held)
    if made.relation == "mean":
        of.found.relation, of.found.summands, of.found.times = made.relation, made.summands, made.times
