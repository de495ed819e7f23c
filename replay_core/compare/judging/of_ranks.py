"""The verdict of a tensor of several ranks: every copy is judged, and where they part, why is asked."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from replay_core import naming, pages
from replay_core.compare.judging import (
    algebra,
    attention_again,
    attention_made,
    attention_otherwise,
    contributions,
    experts_returned,
    first_tokens,
    flat_slices,
    key_order,
    limits,
    logits_otherwise,
    odd_rows,
    own_norm,
    own_rows,
    parts_otherwise,
    router_balance,
    row_parallel,
    row_parallel_otherwise,
    steps_of_weights,
    subspaces,
    token_rows,
    token_weights,
    vocabulary,
)
from replay_core.compare.judging.algebra import Ranked
from replay_core.compare.judging.faults import UNEXPECTED, Fault, whose
from replay_core.compare.judging.verdict import Verdict
from replay_core.compare.pairing.align import MicroBatchPair, TensorPair
from replay_core.compare.pairing.own_clip import clipped_alone
from replay_core.compare.pairing.own_copies import is_same, other_copies
from replay_core.compare.pairing.ranks import (
    MAY_BE_PARTS,
    HeldByRanks,
    Together,
    in_sections,
    laid_of,
    named,
    sections,
    standing_for,
)
from replay_core.errors import DumpError
from replay_core.records import Inline, Parts, TensorRef
from replay_core.regexes import regex

if TYPE_CHECKING:
    from replay_core.compare.judging.tensors import TensorVerdict

JudgeCopy = Callable[[TensorPair, MicroBatchPair], "TensorVerdict"]

#: Tensors of a micro-batch that an explanation may lean on: those just before.
_KEPT = 6
_WORST = (Verdict.SAME, Verdict.PADDING, Verdict.CLOSE, Verdict.DIFF, Verdict.NAN, Verdict.SHAPE)
_NUMBER = regex(r"\d{1,9}")
#: CPU seconds of a comparison in which attention was made again in vain, before it is asked no more.
_MOST_IN_VAIN = 10.0
#: Elements that are added up in memory.
_MOST = 1 << 26
#: A weight is another's where it is off that one by this part of what it is off its own; and of so many elements.
_NEARER, _FEWEST_NEAR = 0.1, 64
#: An output is off by no more than its weight where it is by this times as large a part of itself.
_AS_MUCH = 3.0
#: Names of weights that are several in one.
_FUSED = regex(r"qkv|query_key_value|c_attn|in_proj|gate_up|up_gate|fc1|w1\d|kv_proj|gate_and_up", re.IGNORECASE)
#: The number of an expert in a weight's name.
_EXPERT = regex(r"(?<=\.)(?:\w*expert\w*)\.\d{1,9}(?=\.)|(?<=expert)s?_?\d{1,9}(?=\.)", re.IGNORECASE)
#: What a model returned, as one of several that are numbered.
_RETURNED = regex(r"^(forward\.output\..*\.)(\d{1,9})$")
#: Kinds of what is said of samples and tokens that is no number of theirs to be scaled or moved.
_NO_NUMBERS = ("ids", "positions", "mask", "loss", "note", "metric")
_OF_EXPERT = regex(r"\.experts?\.")
_ROUTER = regex(r"(?:^|\.)(?:\w*router|gate|wg)$")
#: One of a list of modules within a layer, whatever it is called: an expert, where ranks have other ones of it each.
_ONE_OF_LIST = regex(r"(?<=\.)\w+\.\d{1,9}\.output$")


class OfRanks:
    """Looks at the rows of steps that are spread over ranks, in order of computation."""

    def __init__(self) -> None:
        #: Of a micro-batch, tensors that all ranks hold alike and right, and those they hold parts of.
        self._whole: dict[Any, list[tuple[str, TensorRef]]] = defaultdict(list)
        self._parts: dict[Any, list[tuple[str, HeldByRanks]]] = defaultdict(list)
        #: Of a step: the token ids that each rank was given; the ranks whose loss is a mean over their own samples.
        self._tokens: dict[int | None, list[token_rows.Given]] = defaultdict(list)
        self._seen: set[int] = set()
        #: Tensors with their numbers left out -> the sections of which every rank has its share.
        self._sections: dict[str, tuple[int, ...]] = {}
        #: Modules that are several in one (see `_fused`) whose slices in turn were found to be the other run's.
        self._in_turn: set[str] = set()
        #: Of a step: what its one loss left at the logits, of the other run, and which tokens are whose.
        self._left: dict[int | None, tuple[TensorRef, HeldByRanks]] = {}
        self._mean: set[int | None] = set()
        #: By role and name, which ranks' losses were parts of a sum, and what it was divided by.
        self._sums_of_losses: dict[tuple[str | None, str], tuple[tuple[int, ...], int]] = {}
        #: Of a step: by what factor of its own each rank's gradients are scaled, and those that no factor explains.
        self._scaled: dict[int | None, dict[int, float]] = {}
        self._unscaled: dict[int | None, list[tuple[TensorVerdict, TensorRef, HeldByRanks, Together]]] = defaultdict(
            list
        )
        #: Of a step: what its losses say of the means they are, until a gradient that is off is explained by it.
        self._own_means: dict[int | None, Fault] = {}
        #: Of a step: the first activation that is off, and by how much at each token, until a weight explains it.
        self._in_vain = 0.0
        self._first_off: dict[int | None, tuple[TensorVerdict, NDArray[np.float64] | None]] = {}
        #: Of a micro-batch, slices that ranks hold alike with the other run; and of a step, those before its first
        #: activation that is off, with what each rank holds of it.
        self._slices: dict[Any, list[HeldByRanks]] = defaultdict(list)
        #: Of a micro-batch: the outputs of layers whose experts are each on some of the ranks; of each what its experts
        #: put out, and whose they are.
        self._clips: dict[Any, tuple[str, float] | None] = {}
        self._of_experts: dict[Any, dict[str, list[tuple[int, TensorRef]]]] = defaultdict(dict)
        #: Of a step: what ranks have of the tokens in a module's output, by the module around it.
        self._inputs: dict[int | None, dict[str, list[HeldByRanks]]] = defaultdict(lambda: defaultdict(list))
        #: Of a step: weights whose gradient is off; and the first activation that is off, in whatever way, with what
        #: the ranks hold of it, until its weight says whose samples it was made of.
        self._off_gradients: dict[int | None, set[str]] = defaultdict(set)
        self._dealt: dict[int | None, tuple[TensorVerdict, HeldByRanks] | None] = {}
        #: Of a step and a role: what its micro-batches gave a head whose logits agree. Of a micro-batch: its last
        #: outputs.
        self._heads: dict[tuple[int | None, str | None], list[token_weights.GivenToHead]] = defaultdict(list)
        self._last: dict[Any, list[TensorRef]] = defaultdict(list)
        #: Of this step, by role and name: the first activation that is off, and what the ranks hold of it.
        self._off_micro: dict[tuple[str | None, str], tuple[TensorVerdict, TensorRef]] = {}
        #: Of this step, by role and name: what the micro-batch before held of it, of the other run.
        self._micro_before: dict[tuple[str | None, str], tuple[int | None, TensorRef]] = {}
        #: By role and name, weights of the step before this one.
        self._weights: dict[tuple[str | None, str], steps_of_weights.Before] = {}
        self._steps_gradients: dict[tuple[int | None, str | None, str], bool] = {}
        self._noises: dict[tuple[int | None, str | None, str], float] = {}
        #: Of this step, by role: its weights with those of the step before, and their rows.
        self._moved: dict[str | None, list[tuple[TensorVerdict, flat_slices.Moved]]] = defaultdict(list)
        #: Of a step: what is said of ranks whose modules put out another dtype.
        self._dtypes: dict[int | None, Fault] = {}
        #: Steps in which something is off that is no gradient and no weight.
        self._forward_off: set[int | None] = set()
        #: By role and name, gradients of the step before this one: whose step it was, and the ranks' own.
        self._gradients: dict[tuple[str | None, str], tuple[int, TensorRef]] = {}
        self._step: int | None = None
        self._into_first: dict[int | None, tuple[HeldByRanks, list[HeldByRanks], TensorRef | None, TensorRef]] = {}
        #: Of a micro-batch, what went into attention and is the other run's; and of a step, what did before its first
        #: activation that is off.
        self._into_attention: dict[Any, list[HeldByRanks]] = defaultdict(list)
        self._attended: dict[int | None, list[HeldByRanks]] = {}

        #: Causes that were not looked for to their end, and why.
        self.notes: list[str] = []

    def _asked(self, row: TensorVerdict, look: Callable[..., None], *args: Any) -> None:
        """Look for a cause; an error that nobody thought of leaves what was judged as it is."""
        try:
            look(row, *args)
        except UNEXPECTED as error:
            self.notes.append(
                f"what {row.name} of step {row.key.step} says of the ranks could not be looked for: "
                f"{type(error).__name__}: {error}"
            )

    @np.errstate(invalid="ignore", over="ignore", divide="ignore")
    def finish(self) -> None:
        """Look for what only all weights of a step tell, once all of them were looked at."""
        for of_role in self._moved.values():
            first = next((row for row, _ in of_role if row.verdict.diverges), None)
            if first is not None:
                self._asked(first, self._explain_slices, of_role)
        self._moved.clear()

    # What is not finite is told as such, and arithmetic with it says nothing.
    @np.errstate(invalid="ignore", over="ignore", divide="ignore")
    def look(self, row: TensorVerdict, pair: TensorPair, micro_pair: MicroBatchPair, judge: JudgeCopy) -> None:
        """Say of a judged row what its ranks hold; its verdict becomes that of the rank that is furthest off."""
        together = micro_pair.together
        assert together is not None
        assert pair.a is not None
        assert pair.b is not None
        ours, theirs = (pair.a, pair.b) if together.which == "a" else (pair.b, pair.a)
        held = together.held.get(id(ours[1]))
        if row.key.step != self._step:
            self.finish()
            # Of a step before this one nobody asks what its micro-batches held.
            self._step = row.key.step
            for known in (self._off_micro, self._last, self._heads, self._into_attention, self._micro_before):
                known.clear()
            self._clips.clear()
        self._note_tokens(together, row)
        if held is None:
            if row.skipped is None and not row.verdict.diverges:
                row.skipped = f"what ranks {named(together.ranks)} of {together.which} hold of it each is not known"
            return
        self._note_inputs(row, held, together)
        self._note_head(row, theirs[1], micro_pair)
        row.ranks = algebra.ranked(together, held)
        if row.verdict in (Verdict.DIFF, Verdict.SHAPE) and naming.is_module_tensor(row.name):
            self._dealt.setdefault(row.key.step, (row, held))
        if row.name.startswith("param.") and held.is_cut:
            self._asked(row, self._explain_dealt, held, together)
        self._note_dtypes(row, theirs[1], held)
        if row.skipped is not None or row.verdict is Verdict.SHAPE or row.by_digest:
            return
        try:
            if ours[1].is_text:
                _judge_texts(row, pair, micro_pair, held, together, judge)
                return
            if row.verdict is not Verdict.SAME and own_norm.is_of_parts(row.name, together):
                row.ranks.restates = own_norm.OF_PARTS
                return
            whole = theirs[1]
            if row.verdict is Verdict.DIFF and (again := self._in_sections(row, whole, held)) is not None:
                held, whole = again
                together.held[id(ours[1])] = held
                sides = (ours[0], standing_for(held)), (theirs[0], whole)
                pair = TensorPair(pair.name, *(sides if together.which == "a" else sides[::-1]))
                _take(row, judge(pair, micro_pair))
            if naming.meaning(row.name).kind == "loss" and not held.is_cut and not whole.shape:
                own = self._of_own_tokens(row, whole, held, micro_pair, together)
                if own is not None:
                    self._own_means[row.key.step] = own
            is_mean = (
                not row.verdict.diverges and together.samples > 1 and naming.meaning(row.name).kind == "loss"
                and next(other_copies(held), None) is not None
            )  # fmt: skip
            if is_mean:
                of_own = algebra.explain(row.name, whole, together, held)
                is_mean = self._are_parts(row, of_own, pair, micro_pair, held, judge)
            if not is_mean and (not row.verdict.diverges or not held.is_cut):
                _judge_copies(row, pair, micro_pair, held, together, judge)
            if row.verdict in (Verdict.DIFF, Verdict.NAN):
                if row.name.startswith("grad."):
                    self._off_gradients[row.key.step].add(row.name.removeprefix("grad."))
                self._asked(row, self._explain, pair, micro_pair, held, judge)
                if row.verdict.diverges:
                    self._asked(row, self._note_first, theirs[1], ours[1], held, micro_pair)
            if row.name.startswith("grad."):
                called = row.key.step, row.key.role, row.name.removeprefix("grad.")
                self._steps_gradients[called] = row.verdict.diverges or self._steps_gradients.get(called, False)
                if row.figures is not None:
                    self._noises[called] = max(row.figures.total.rel_l2, self._noises.get(called, 0.0))
            if row.name.startswith("param."):
                self._asked(row, self._explain_step, whole, held, together)
                self._asked(row, self._explain_first_sum, held, micro_pair)
                self._asked(row, self._explain_made_of, held, micro_pair)
                self._asked(row, self._explain_first, held)
                if row.verdict is Verdict.DIFF and row.key.step in self._forward_off:
                    row.ranks.off = algebra.off_by_rank(whole, held)
        except DumpError as error:
            row.skipped, row.damaged = error.message, error.file
            return
        self._asked(row, self._note_micro, whole, ours[1])
        self._asked(row, self._keep, whole, held)
        if row.name.startswith("grad.") and row.key.step is not None:
            self._gradients[row.key.role, row.name] = row.key.step, ours[1]

    def _in_sections(
        self, row: TensorVerdict, whole: TensorRef, held: HeldByRanks
    ) -> tuple[HeldByRanks, TensorRef] | None:
        """Slices of a weight that is several in one (q, k and v), of each of which a rank has a share, and the other
        run's, which may be laid together of slices too; None where neither is laid so.
        """
        pattern = _NUMBER.sub("#", row.name.removeprefix("grad.").removeprefix("param."))
        if not _FUSED.search(row.name) or not all(ref.is_readable for ref in (whole, *held.parts)):
            return None
        inner = _slices_within(held)
        if inner is not None:
            of_groups = _in_sections_of_groups(whole, held, inner)
            if of_groups is None:
                return None
            # The weight and its gradient are cut as what it puts out is, which few digits of these may not tell.
            laid, sizes = of_groups
            self._sections[pattern] = self._sections[_fused(row.name, inner[0])] = sizes
            return laid, whole
        # Samples may be dealt to ranks whose other run has slices of the features of each.
        source = whole.source if isinstance(whole.source, Parts) else None
        is_across = source is not None and held.is_cut and len(whole.shape) == len(source.parts[0].shape) > 2 and (
            source.axis == len(whole.shape) - 1 != held.axis
        )  # fmt: skip
        is_cut = held.is_cut and not is_across
        there = laid_of(whole, None if is_across else held.axis)
        cut = held if is_cut else there
        if cut is None:
            return None
        module = _fused(row.name, cut)
        known = self._sections.get(pattern) or self._sections.get(module)
        for sizes in (known,) if known is not None else sections(cut):
            again = in_sections(held, sizes) if is_cut else held
            other = in_sections(there, sizes) if there is not None else None
            if again is None or (there is not None and other is None):
                continue
            made = whole if other is None else standing_for(other).with_(name=whole.name, canonical=whole.canonical)
            own, in_turn = standing_for(again), whole if other is not None else standing_for(held)
            if known is not None or algebra.is_near(made, own) or (
                algebra.is_nearer(made, own, in_turn) if other is None else algebra.is_nearer(own, made, in_turn)
            ):  # fmt: skip
                self._sections[pattern] = self._sections[module] = sizes
                return again, made
        return None

    def _explain(
        self, row: TensorVerdict, pair: TensorPair, micro_pair: MicroBatchPair, held: HeldByRanks, judge: JudgeCopy
    ) -> None:
        together = micro_pair.together
        assert together is not None
        assert pair.a is not None
        assert pair.b is not None
        laid, whole = (pair.a[1], pair.b[1]) if together.which == "a" else (pair.b[1], pair.a[1])
        kind = naming.meaning(row.name).kind
        if kind in MAY_BE_PARTS and held.is_cut and len(set(held.stretches)) < len(held.stretches):
            made = _summed_in_groups(held, laid)
            if made is not None and algebra.is_near(whole, made):
                row.ranks = algebra.ranked(together, held)
                row.ranks.relation = "parts"
                said = f"the sum of what ranks {named(held.ranks)} of {together.which} hold, slice by slice"
                self._judge_as(row, (made,), 1.0, said, pair, micro_pair, judge)
                return
        if held.summed and self._is_stated_sum(row, whole, held, pair, micro_pair, judge):
            return
        if _is_of_a_later_stage(row, pair, micro_pair, held, judge):
            return
        if kind == "activation" and not row.name.startswith("grad."):
            ids = micro_pair.a.find("input_ids") or micro_pair.b.find("input_ids")
            looked_up = own_rows.of_own_words(whole, held, ids)
            if looked_up is not None:
                row.ranks = algebra.ranked(together, held)
                row.ranks.relation = "parts"
                said = f"the rows that ranks {named(held.ranks)} of {together.which} hold of their own words each"
                self._judge_as(row, (looked_up,), 1.0, said, pair, micro_pair, judge)
                return
        found = row.ranks = algebra.explain(row.name, whole, together, held)
        is_of_gradients = row.name.startswith("grad.") or row.name == "grad_norm"
        clip = self._own_clip(row, micro_pair) if is_of_gradients and row.key.micro is None else None
        if clip is not None:
            which, clipped_by = clip
            scaled = 1 / clipped_by if which == together.which else clipped_by
            found.fault, found.parted = None, ()
            said = f"times {scaled:.4g}, for {which}'s gradients are recorded behind a clipping of its trainer's own"
            self._judge_as(row, (laid,), scaled, said, pair, micro_pair, judge)
            if row.skipped is None:
                _judge_copies(row, pair, micro_pair, held, together, judge, scaled)
                row.reason = row.reason if row.reason.startswith(said) else f"{said}: {row.reason}"
            if not row.verdict.diverges:
                return
            row.ranks = found = algebra.explain(row.name, whole, together, held)
        if kind == "loss" and found.relation == "all" and not held.is_cut:
            self._as_parts_before(row, found, pair, micro_pair, held, judge)
        if self._are_parts(row, found, pair, micro_pair, held, judge):
            return
        if (times := self._of_own_mean(row, found, together)) is not None:
            found.fault, found.parted = None, ()
            said = f"times {times:g}, for the losses of ranks or groups are means over their own samples"
            self._judge_as(row, (laid,), times, said, pair, micro_pair, judge)
            if row.skipped is None:
                _judge_copies(row, pair, micro_pair, held, together, judge, times)
                row.reason = row.reason if row.reason.startswith(said) else f"{said}: {row.reason}"
            return
        fault = found.fault
        if kind == "positions":
            own = algebra.own_positions(row.name, held) or attention_again.counted_positions(row.name, held)
            fault = own or fault
        if kind == "logprob" and (lost := contributions.at_the_ends(row.name, whole, held)) is not None:
            fault = lost
        if naming.makes_logits(row.name) and not row.name.startswith("grad."):
            fault = vocabulary.counted_padding(row.name, whole, held) or fault
        if kind == "ids" and row.name != "input_ids":
            fault = contributions.labels_at_the_ends(row.name, whole, held) or fault
            fault = fault or own_rows.of_ids(row.name, whole, held, found.parted)
            if fault is None and row.verdict.diverges:
                fault = own_rows.in_another_turn(row.name, whole, held, together.ranks)
        is_of_samples = not naming.is_module_tensor(row.name) and not row.name.startswith(("grad.", "param."))
        if is_of_samples and kind not in _NO_NUMBERS and (fault is None or fault.kind == "apart"):
            fault = own_rows.normalised_apart(row.name, whole, held, found.parted) or fault
            fault = own_rows.of_samples(row.name, whole, held, found.parted) or fault
        if kind == "loss" and fault is None and not held.is_cut and not whole.shape:
            fault = self._of_own_tokens(row, whole, held, micro_pair, together)
        if fault is None and naming.is_module_tensor(row.name) and len(held.ranks) < len(together.ranks):
            fault = algebra.other_samples(row.name, whole, held)
        is_of_ranks = row.name.startswith("grad.") or (kind == "activation" and len(held.ranks) > 1)
        if is_of_ranks and fault is None and algebra.is_rounded(whole, held):
            what = f"{row.name.removeprefix('grad.')}'s gradient" if row.name.startswith("grad.") else row.name
            fault = Fault(
                "rounded", held.ranks,
                f"{what} is float32 and on {whose(held.ranks)} every value is one "
                "of bfloat16, which the other run's are not: it was reduced or kept in bfloat16 (half precision)",
            )  # fmt: skip
        if kind == "activation" and fault is None:
            fault = algebra.tokens_in_another_order(row.name, whole, held)
        if row.name.startswith("grad.") and naming.makes_logits(row.name) and (fault is None or fault.kind == "apart"):
            fault = contributions.other_tokens_count(row.name, whole, held) or fault
        if kind == "activation" and (fault is None or fault.kind == "apart"):
            fault = algebra.rounded_on_some(row.name, whole, held) or fault
            first, _ = self._first_off.get(row.key.step, (None, None))
            is_first = first is None or naming.module_of(first.name) == naming.module_of(row.name)
            # Elsewhere a constant of each channel is as often a bias that is left out, or rows that are all alike.
            if is_first and _ROUTER.search(naming.module_of(row.name)):
                fault = own_rows.own_constant(row.name, whole, held, found.parted) or fault
        if fault is None or fault.kind == "apart":
            fault = self._from_before(row, whole, laid, held, found.parted) or fault
        before = self._gradients.get((row.key.role, row.name))
        if before is not None and before[0] < (row.key.step or 0) and (fault is None or fault.kind == "apart"):
            fault = contributions.with_the_last(row.name, whole, laid, before[1], held.ranks, together.ranks) or fault
        if row.name.startswith("grad.") and (fault is None or fault.kind in ("apart", "too little")):
            fault = self._of_a_gradient(row, whole, micro_pair, together, held) or fault
            if fault is None or fault.kind == "apart":
                fault = self._of_other_tokens(row, (laid, whole), micro_pair, together, held) or fault
        is_lookup = row.name.endswith(naming.EMBEDDINGS) or token_rows.is_lookup(whole, self._tokens[row.key.step])
        is_open = row.name.startswith("grad.") and (fault is None or fault.kind == "apart")
        if is_open and len(held.ranks) > 1 and not is_lookup:
            what = f"{row.name.removeprefix('grad.')}'s gradient"
            fault = odd_rows.of_rows(what, whole, held, found.parted) or fault
        if row.name.startswith("grad.") and fault is None:
            micros = len({given.micro for given in self._tokens[row.key.step]})
            fault = self._own_means.pop(row.key.step, None) or algebra.by_micros(row.name, found, micros)
        if fault is None and row.name.startswith("grad.") and row.name.endswith(".bias") and _FUSED.search(row.name):
            other = micro_pair.b if together.which == "a" else micro_pair.a
            beside = next((ref for _, ref in other.named(f"{row.name.removesuffix('.bias')}.weight")), None)
            if held.is_cut and _fused(row.name, held, of_all_layers=False) in self._in_turn:
                fault = algebra.cut_across(row.name.removeprefix("grad.").removesuffix(".bias"), held, whole, beside)
        if row.name.startswith("param.") and (fault is None or fault.kind == "apart"):
            fault = self._of_another(row, laid, whole, micro_pair, together, held) or fault
            was_off = row.name.removeprefix("param.") in self._off_gradients[row.key.step]
            if fault is None and not held.is_cut and len(whole.shape) == 2 and whole.numel <= _MOST and not was_off:
                off_OI = pages.array(laid).astype(np.float64) - pages.array(whole).astype(np.float64)
                fault = subspaces.of_a_slices_channels(row.name.removeprefix("param."), off_OI.T, row.name, held)
            if fault is None and row.key.step not in self._forward_off:  # else how far it is off tells more
                fault = algebra.of_a_share(row.name.removeprefix("param."), whole, held)
        if len(whole.shape) == 2 and not held.is_cut and (row.key.stage == "modules" or kind == "logprob"):
            fault = self._of_vocabulary(row, whole, held, micro_pair, together) or fault
        if kind == "logprob" and (fault is None or fault.kind == "apart"):
            fault = self._of_logits(row, whole, held, micro_pair, together) or fault
        if together.astray is not None and row.name == "input_ids":
            fault = Fault(together.astray.kind, together.astray.ranks, together.astray.sentence)
        is_first = len(self._off_gradients[row.key.step]) == 1 and row.key.step not in self._forward_off
        if fault is None and is_first and row.name.startswith("grad."):
            what = f"{row.name.removeprefix('grad.')}'s gradient"
            fault = algebra.summed_in_part(what, whole, held, max(together.samples, self._shares_of(row.key.step)))
        if kind == "loss":
            found.parted = _off_their_own(pair, micro_pair, held) or found.parted
        found.fault = fault
        if fault is not None:
            row.reason = f"{fault.sentence}; {row.reason}"
        if row.name.startswith("grad.") and (fault is None or fault.kind == "apart"):
            self._note_scaled(row, whole, held, together)

    def _explain_dealt(self, row: TensorVerdict, weight: HeldByRanks, together: Together) -> None:
        """Whether the step's first activation that is off is the output of this weight, of which ranks that were given
        the same samples do not hold every slice: the samples are dealt by another number than the rank of a group.
        """
        known = self._dealt.get(row.key.step)
        name = row.name.removeprefix("param.").removesuffix(".weight")
        if known is None or known[0].name != f"{name}.output" or known[0].ranks is None or weight.axis != 0:
            return
        first, output = known
        self._dealt[row.key.step] = None
        is_open = first.ranks is not None and (first.ranks.fault is None or first.ranks.fault.kind == "apart")
        if first.ranks is None or not is_open or weight.ranks != together.ranks or len(set(weight.stretches)) < 2:
            return
        # Of FSDP and the like every rank has all channels of the output; a lookup's rows are words.
        widths = {ref.shape[0] for ref in weight.parts}
        is_cut_alike = len(widths) == 1 and all(_own_width(ref) in widths for ref in output.parts)
        if not is_cut_alike and not f"{name}.weight".endswith(naming.EMBEDDINGS):
            return
        fault = token_rows.dealt_otherwise(first.name, weight, self._tokens[row.key.step])
        if fault is not None:
            first.ranks.fault, first.reason = fault, f"{fault.sentence}; {first.reason}"

    def _note_scaled(self, row: TensorVerdict, whole: TensorRef, held: HeldByRanks, together: Together) -> None:
        """Explain a gradient as it was before each rank scaled its own: one that is not summed gives each rank a norm
        of its own, and clipping by it scales all the others.
        """
        step, factors = row.key.step, row.ranks.factors if row.ranks is not None else {}
        if len(factors) == len(held.ranks) and min(factors.values()) > 0:
            apart = max(factors.values()) - min(factors.values())
            if factors.keys() == set(together.ranks) and apart > 1e-4 * max(factors.values()):
                self._scaled.setdefault(step, factors)
        else:
            self._unscaled[step].append((row, whole, held, together))
        if step not in self._scaled:
            return
        scaled = self._scaled[step]
        for other, of_one, own, among in self._unscaled.pop(step, []):
            if own.ranks != tuple(scaled) or not all(ref.is_readable and ref.numel <= _MOST for ref in own.parts):
                continue
            parts = tuple(
                _times((ref,), 1 / scaled[rank]) for rank, ref in zip(own.ranks, own.parts, strict=True)
            )  # fmt: skip
            found = algebra.explain(other.name, of_one, among, replace(own, parts=parts))
            if found.fault is None or other.ranks is None:
                continue
            said = ", ".join(f"{factor:.4g} on rank {rank}" for rank, factor in scaled.items())
            fault = other.ranks.fault = replace(
                found.fault, sentence=f"{found.fault.sentence}, once the factor is taken off by which each rank's "
                f"gradients are scaled besides ({said}): the norm it clips by is of its own"
            )  # fmt: skip
            other.reason = f"{fault.sentence}; {other.reason}"

    def _as_parts_before(
        self, row: TensorVerdict, found: Ranked, pair: TensorPair, micro_pair: MicroBatchPair, held: HeldByRanks,
        judge: JudgeCopy,
    ) -> None:  # fmt: skip
        """Take ranks' losses for parts of a sum where they were that in another micro-batch, and are so to what noise
        leaves of a sum that cancels.
        """
        known = self._sums_of_losses.get((row.key.role, row.name))
        if known is None or max(known[0]) >= len(held.parts):
            return
        made = _times([held.parts[number] for number in known[0]], 1 / known[1])
        assert pair.a is not None
        assert pair.b is not None
        mine, other = (pair.a, pair.b) if found.which == "a" else (pair.b, pair.a)
        sides = ((mine[0], made), other)
        judged = judge(TensorPair(pair.name, *(sides if found.which == "a" else sides[::-1])), micro_pair)
        if judged.skipped is None and not judged.verdict.diverges:
            found.relation = "mean" if known[1] > 1 else "parts"
            found.summands, found.times = known

    def _are_parts(
        self, row: TensorVerdict, found: Ranked, pair: TensorPair, micro_pair: MicroBatchPair, held: HeldByRanks,
        judge: JudgeCopy,
    ) -> bool:  # fmt: skip
        """Whether ranks hold parts of a sum or mean that is the whole, of what may be such; judged so, if they do."""
        if found.relation not in ("parts", "mean") or naming.meaning(row.name).kind not in MAY_BE_PARTS:
            return False
        row.ranks, found.fault = found, None
        is_mean = found.relation == "mean"
        if is_mean:
            self._mean.add(row.key.step)
        parts = [held.parts[number] for number in found.summands]
        ranks = [held.ranks[number] for number in found.summands]
        divided = f", divided by {found.times}," if 1 < found.times < len(parts) else ""
        of_them = "mean" if is_mean and not divided else "sum"
        said = f"the {of_them}{divided} of what ranks {named(ranks)} of {found.which} hold"
        self._judge_as(row, parts, 1 / found.times, said, pair, micro_pair, judge)
        if naming.meaning(row.name).kind == "loss" and row.skipped is None and row.verdict.diverges:
            row.ranks.parted = _off_their_own(pair, micro_pair, held) or row.ranks.parted
        elif naming.meaning(row.name).kind == "loss" and row.skipped is None:
            self._sums_of_losses[row.key.role, row.name] = found.summands, found.times
        return True

    @staticmethod
    def _of_own_tokens(
        row: TensorVerdict, whole: TensorRef, held: HeldByRanks, micro_pair: MicroBatchPair, together: Together
    ) -> Fault | None:
        """Whether the ranks' losses are means over their own tokens, or each has the whole of what is beside them, as
        the log-probabilities of these say.
        """
        other = micro_pair.b if together.which == "a" else micro_pair.a
        refs = [other.find("policy_logprobs"), *(together.logprobs.get(rank) for rank in held.ranks)]
        if any(ref is None or not ref.is_readable or ref.numel > _MOST for ref in refs):
            return None
        values = [pages.array(ref).astype(np.float64) for ref in refs if ref is not None]
        numbers = [float(pages.array(part).reshape(-1)[0]) for part in (whole, *held.parts)]
        return contributions.own_means(
            row.name, numbers[0], numbers[1:], held.ranks, values[1:]
        ) or contributions.whole_of_each(row.name, numbers[0], numbers[1:], held.ranks, values)

    def _is_stated_sum(
        self, row: TensorVerdict, whole: TensorRef, held: HeldByRanks, pair: TensorPair, micro_pair: MicroBatchPair,
        judge: JudgeCopy,
    ) -> bool:  # fmt: skip
        """Whether parts of which the dump says that their sum counts add up to the whole; judged so, if they do."""
        assert micro_pair.together is not None
        parts = [held.parts[number] for number in held.summed]
        if any(ref.shape != whole.shape for ref in parts) or whole.numel > _MOST:
            return False
        made = _summed(parts)
        total = whole.with_(dtype="float64", source=Inline(made.tobytes()), digest=None)
        if not algebra.is_near(whole, total):
            return False
        found = row.ranks = algebra.ranked(micro_pair.together, held)
        found.relation, found.summands = "parts", held.summed
        said = f"the sum of what ranks {named(held.ranks[number] for number in held.summed)} of {found.which} hold"
        self._judge_as(row, parts, 1.0, said, pair, micro_pair, judge)
        return True

    @staticmethod
    def _judge_as(
        row: TensorVerdict, parts: Sequence[TensorRef], times: float, said: str, pair: TensorPair,
        micro_pair: MicroBatchPair, judge: JudgeCopy,
    ) -> None:  # fmt: skip
        """Judge the ranks' sum, times a number, in the place of what each holds."""
        if parts[0].numel > _MOST:
            row.skipped = f"{said} would be judged, and it is too large to be made: {parts[0].numel:,} elements"
            return
        whole = _times(parts, times)
        assert pair.a is not None
        assert pair.b is not None
        mine = ((pair.a if micro_pair.together and micro_pair.together.which == "a" else pair.b)[0], whole)
        is_a = micro_pair.together is not None and micro_pair.together.which == "a"
        other = judge(TensorPair(pair.name, *((mine, pair.b) if is_a else (pair.a, mine))), micro_pair)
        _take(row, other)
        row.reason = f"{said}: {row.reason}"

    def _own_clip(self, row: TensorVerdict, micro_pair: MicroBatchPair) -> tuple[str, float] | None:
        place = row.place[:2]
        if place not in self._clips:
            self._clips[place] = clipped_alone(micro_pair)
        return self._clips[place]

    def _of_own_mean(self, row: TensorVerdict, found: Ranked, together: Together) -> float | None:
        """By what a gradient at a module's output is to be multiplied, which is larger by the number of ranks whose
        losses are means of their own; None where it is not.
        """
        there = together.whole_of
        own = together.samples if together.shares == "samples" and row.key.step in self._mean else 1
        others = there.samples if there is not None and there.own_mean else 1
        if own == others or naming.meaning(row.name).region == "all":
            return None
        expected, every = own / others, list(found.factors.values())
        is_so = len(every) == len(found.ranks) and all(abs(one - expected) <= 1e-3 * expected for one in every)
        return 1 / expected if is_so else None

    def _note_first(
        self, row: TensorVerdict, whole: TensorRef, laid: TensorRef, held: HeldByRanks, micro_pair: MicroBatchPair
    ) -> None:
        """Keep the first activation of a step that is off, and say of it what its tokens alone tell."""
        if not naming.is_module_tensor(row.name):
            return
        known, _ = self._first_off.get(row.key.step, (None, None))
        # What was off when it was judged may have been explained since, by the weights it was computed with.
        if known is not None and known.verdict.diverges and not self._is_before_first(row):
            return
        off_NH = None
        ids = micro_pair.a.find("input_ids") or micro_pair.b.find("input_ids")
        self._into_first[row.key.step] = held, self._slices[row.place[:2]], ids, whole
        self._attended[row.key.step] = self._into_attention[row.place[:2]]
        if row.ranks is not None and (row.ranks.fault is None or row.ranks.fault.kind == "apart"):
            fault = self._of_first(row, whole, laid, held) if held.is_cut else None
            fault = fault or contributions.of_gathered(
                row.name, whole, held, row.ranks.parted, self._slices[row.place[:2]]
            )
            cast = self._dtypes.get(row.key.step)
            fault = fault or (cast if cast is not None and set(row.ranks.parted) <= set(cast.ranks) else None)
            fault = fault or algebra.not_dropped(row.name, whole, held)
            fault = fault or self._attention_otherwise(
                row.name, whole, held, self._attended[row.key.step], row.ranks.parted, None
            )
            fault = fault or own_rows.of_rows(row.name, whole, held, row.ranks.parted)
            if fault is not None:
                row.ranks.fault = fault
                row.reason = f"{fault.sentence}; {row.reason}"
            elif whole.shape == laid.shape and len(whole.shape) >= 2 and whole.numel <= 1 << 22:
                off = pages.array(laid).astype(np.float64) - pages.array(whole).astype(np.float64)
                off_NH = off.reshape(-1, whole.shape[-1]) if np.isfinite(off).all() else None
                if off_NH is not None and held.axis in (None, 0, 1):
                    there_NH = pages.array(whole).astype(np.float64).reshape(off_NH.shape)
                    fault = subspaces.of_other_shards(row.name, there_NH + off_NH, there_NH, held.ranks)
                    if fault is not None:
                        row.ranks.fault, off_NH = fault, None
                        row.reason = f"{fault.sentence}; {row.reason}"
        self._first_off[row.key.step] = row, off_NH

    def _attention_otherwise(
        self, name: str, whole: TensorRef, held: HeldByRanks, given: Sequence[HeldByRanks], parted: Sequence[int],
        through: tuple[NDArray[Any], NDArray[Any]] | None,
    ) -> Fault | None:  # fmt: skip
        """What attention does otherwise: asked step by step, until it was in vain for so long."""
        if self._in_vain > _MOST_IN_VAIN:
            return None
        begun = time.thread_time()
        fault = attention_otherwise.otherwise(name, whole, held, given, parted, through)
        if fault is None:
            self._in_vain += time.thread_time() - begun
        return fault

    def _is_before_first(self, row: TensorVerdict) -> bool:
        """Whether what a model returned of its first layers is off, where what it returned in the end is the first that
        nothing explains.
        """
        first, _ = self._first_off[row.key.step]
        is_returned = first.name == "forward.output.logits" and first.place == row.place
        is_open = first.ranks is not None and (first.ranks.fault is None or first.ranks.fault.kind == "apart")
        return (
            is_returned
            and is_open
            and row.name.startswith("forward.output.")
            and _RETURNED.search(row.name) is not None
        )

    def _of_first(self, row: TensorVerdict, whole: TensorRef, laid: TensorRef, held: HeldByRanks) -> Fault | None:
        """What the tokens that are off say of the first activation that is, of which ranks have some each."""
        if (fault := key_order.of_keys(row.name, whole, laid, held)) is not None:
            return fault
        if row.name in self._of_experts[row.place[:2]] and row.ranks is not None:
            experts = self._of_experts[row.place[:2]][row.name]
            # Tokens that one rank's experts turned away are 0 as well, also on that rank.
            fault = (
                contributions.weighed_otherwise(row.name, whole, laid, experts)
                or contributions.of_own_experts(row.name, whole, held)
                or experts_returned.of_returned(row.name, whole, laid, held, experts)
            )
            if fault is not None:
                return fault
        parted = row.ranks.parted if row.ranks is not None else ()
        slices = reversed(self._slices[row.place[:2]])
        found = (key_order.of_one_key(row.name, held, one, parted) for one in slices)
        if (fault := next((fault for fault in found if fault is not None), None)) is not None:
            return fault
        place = row.place[:2]
        return attention_again.of_seen_keys(
            row.name, whole, held, self._slices[place], parted, None, self._into_attention[place]
        )

    def _explain_first_sum(self, row: TensorVerdict, held: HeldByRanks, micro_pair: MicroBatchPair) -> None:
        """Whether the step's first activation that is off is the output of this weight, and not the sum it should be
        of what its slices make.
        """
        first, off_NH = self._first_off.get(row.key.step, (None, None))
        name = row.name.removeprefix("param.").removesuffix(".weight")
        if first is None or first.ranks is None or first.name != f"{name.removesuffix('.bias')}.output":
            return
        output, slices, ids, whole = self._into_first[row.key.step]
        together = micro_pair.together
        side = micro_pair.a if together is not None and together.which == "a" else micro_pair.b
        bias = next((ref for _, ref in side.named(f"param.{name}.bias")), None)
        if not held.is_cut:
            fault = None
            # A weight that is off itself explains as much; after its step it is, by what the output made of it.
            if len(held.parts[0].shape) == 2 and output.axis == 1 and not _is_off_alike(first, row):
                weight = pages.array(held.parts[0]).astype(np.float64)
                has_bias = bias is not None and bias.shape == weight.shape[:1]
                added = pages.array(bias).astype(np.float64) if bias is not None and has_bias else np.zeros(len(weight))
                of_one = (
                    key_order.of_one_key(first.name, output, one, first.ranks.parted, (weight, added))
                    for one in reversed(slices)
                    if not row.verdict.diverges
                )
                fault = next((one for one in of_one if one is not None), None)
                if fault is None and (first.ranks.fault is None or first.ranks.fault.kind == "apart"):
                    fault = attention_again.of_seen_keys(
                        first.name, whole, output, slices, first.ranks.parted, (weight, added),
                        self._attended.get(row.key.step, ()),
                    )  # fmt: skip
            if row.name.endswith(".bias") and first.ranks.fault is None and not row.verdict.diverges:
                of_groups = [
                    row_parallel.beside_its_bias(first.name, slice_, own, held.parts[0])
                    for slice_, own in algebra.in_groups(whole, output)
                ]
                kinds = {one and one.kind for one in of_groups}
                if len(kinds) == 1 and (fault := of_groups[0]) is not None:
                    fault = replace(fault, ranks=output.ranks)  # of every group
            if fault is not None:
                first.ranks.fault = fault
                first.reason = f"{fault.sentence}; {first.reason}"
                self._first_off[row.key.step] = first, None
            return
        if held.axis == 0:
            # What the weight itself is off by explains as much; it may have been recorded after its step.
            if (
                _is_off_alike(first, row)
                or ids is None
                or off_NH is None
                or not ids.is_readable
                or ids.numel != len(off_NH)
            ):
                return
            ids_N = pages.array(ids).reshape(-1).astype(np.int64)
            if vocabulary.is_lookup(pages.array(whole).astype(np.float64).reshape(off_NH.shape), ids_N, held):
                size_N = np.abs(off_NH).max(1)
                off_N = size_N > 1e-3 * size_N.max()
                fault = vocabulary.looked_up_unmasked(first.name, off_NH, ids_N, held) or vocabulary.of_words(
                    first.name, off_N, ids_N, held
                )
                if fault is not None:
                    first.ranks.fault = fault
                    first.reason = f"{fault.sentence}; {first.reason}"
                    self._first_off[row.key.step] = first, None
            return
        of_parts = (
            row_parallel.of_parts(first.name, output, inputs, held, bias)
            for inputs in (*reversed(slices), *row_parallel.gated(slices))
        )
        straight = (
            told(first.name, whole, output, fused, held)
            for fused in reversed(slices) if _FUSED.search(fused.parts[0].name)
            for told in (row_parallel.cut_straight, attention_again.cut_straight)
        )  # fmt: skip
        for fault in chain(of_parts, straight):
            if fault is not None:
                first.ranks.fault = fault
                first.reason = f"{fault.sentence}; {first.reason}"
                self._first_off[row.key.step] = first, None
                return

    def _explain_step(self, row: TensorVerdict, whole: TensorRef, held: HeldByRanks, together: Together) -> None:
        """What the optimizer's step before a weight that is off did otherwise."""
        place, step = (row.key.role, row.name), row.key.step
        before = self._weights.get(place)
        if step is None or row.ranks is None:
            return
        if before is None or before.step != step:
            if row.verdict.diverges:
                self._weights.pop(place, None)
            else:
                self._weights[place] = steps_of_weights.Before(step, whole, held, None)
        if before is not None and before.step == step - 1:
            moved = flat_slices.Moved(row.name.removeprefix("param."), whole, before.whole, held, before.held)
            self._moved[row.key.role].append((row, moved))
        if before is None or before.step >= step or not row.verdict.diverges:
            return
        name = row.name.removeprefix("param.")
        called = before.step, row.key.role, name
        before = replace(
            before, gradient_is_off=self._steps_gradients.get(called), gradient_noise=self._noises.get(called, 0.0)
        )  # fmt: skip
        is_open = row.ranks.fault is None or row.ranks.fault.kind == "apart"
        parted = row.ranks.parted or held.ranks
        fault = is_open and steps_of_weights.of_the_step(name, step, whole, held, parted, before, together.ranks)
        if fault:
            row.ranks.fault, row.reason = fault, f"{fault.sentence}; {row.reason}"

    def _explain_slices(self, first: TensorVerdict, of_role: Sequence[tuple[TensorVerdict, flat_slices.Moved]]) -> None:
        """Whether the optimizer keeps slices of all weights laid end to end, and which of them went wrong: what is said
        of each weight by itself follows from that.
        """
        step = first.key.step
        assert step is not None
        if any(self._steps_gradients.get((step - 1, first.key.role, one.name)) for _, one in of_role):
            return
        ranks = of_role[0][1].held.ranks
        fault = flat_slices.of_the_step([one for _, one in of_role], step - 1, step, ranks)
        if fault is None:
            return
        for row, _ in of_role:
            if row.ranks is not None and row.ranks.fault is not None:
                row.ranks.fault = None
        assert first.ranks is not None
        first.ranks.fault, first.reason = fault, f"{fault.sentence}; {first.reason}"

    def _explain_made_of(self, row: TensorVerdict, held: HeldByRanks, micro_pair: MicroBatchPair) -> None:
        """Whether the step's first activation that is off is made of another attention, or another part."""
        first, _ = self._first_off.get(row.key.step, (None, None))
        name = row.name.removeprefix("param.").removesuffix(".weight")
        if first is None or first.ranks is None or first.name != f"{name}.output" or row.name.endswith(".bias"):
            return
        is_open = first.ranks.fault is None or first.ranks.fault.kind == "apart"
        into = [one for one in self._attended.get(row.key.step, []) if one.ranks == held.ranks]
        laid = standing_for(held) if held.is_cut else held.parts[0]
        if not is_open or len(laid.shape) != 2 or not laid.is_readable or laid.numel > _MOST >> 2:
            return
        if _is_off_alike(first, row):
            return
        output, slices, _, whole = self._into_first[row.key.step]
        width = whole.shape[-1] if whole.shape else 0
        if width not in laid.shape:
            return
        together = micro_pair.together
        side = micro_pair.a if together is not None and together.which == "a" else micro_pair.b
        bias = next((ref for _, ref in side.named(f"param.{name}.bias")), None)
        weight = pages.array(laid).astype(np.float64)
        if width != laid.shape[0]:
            weight = np.ascontiguousarray(weight.T)  # as Conv1D keeps it: [in, out]
        has_bias = bias is not None and bias.shape == weight.shape[:1] and bias.is_readable
        added = pages.array(bias).astype(np.float64) if bias is not None and has_bias else np.zeros(len(weight))
        fault = None
        if into:
            fault = self._attention_otherwise(first.name, whole, output, into, first.ranks.parted, (weight, added))
        fault = fault or row_parallel_otherwise.of_parts(first.name, whole, output, slices, weight, added)
        fault = fault or first_tokens.of_values(first.name, whole, output, slices, first.ranks.parted, weight, added)
        if fault is not None:
            first.ranks.fault, first.reason = fault, f"{fault.sentence}; {first.reason}"
            self._first_off[row.key.step] = first, None

    def _explain_first(self, row: TensorVerdict, held: HeldByRanks) -> None:
        """Whether what is off in the step's first activation came through a rank's slice of this weight."""
        first, off_NH = self._first_off.get(row.key.step, (None, None))
        if first is None or first.ranks is None or off_NH is None:
            return
        # A gathered shard is all ranks'; where every rank has the weight, a rank that alone is off has another copy.
        is_of_some = not held.is_cut and 0 < len(first.ranks.parted) < len(held.ranks)
        if first.name == f"{row.name.removeprefix('param.').removesuffix('.weight')}.output" and not is_of_some:
            fault = subspaces.of_a_slices_channels(first.name, off_NH, row.name, held)
            if fault is not None:
                first.ranks.fault, first.reason = fault, f"{fault.sentence}; {first.reason}"
                self._first_off[row.key.step] = first, None
                return
        if row.verdict.diverges:
            return
        told = subspaces.through_a_slice if held.is_cut else subspaces.added_by_each
        if (fault := told(first.name, off_NH, row.name, held)) is not None:
            first.ranks.fault = fault
            first.reason = f"{fault.sentence}; {first.reason}"
            self._first_off[row.key.step] = first, None

    def _from_before(
        self, row: TensorVerdict, whole: TensorRef, laid: TensorRef, held: HeldByRanks, parted: Sequence[int]
    ) -> Fault | None:
        place = row.place[:2]
        if row.name.startswith(("grad.", "param.")) or whole.numel < 8:
            return None
        for called, before in reversed(self._whole[place]):
            if (
                not held.is_cut
                and (fault := contributions.not_summed_into(row.name, whole, held, before, called)) is not None
            ):
                return fault
        if not held.is_cut and "norm" in naming.module_of(row.name).rpartition(".")[2]:
            for called, parts in reversed(self._parts[place]):
                for _, before in reversed(self._whole[place]):
                    if (fault := contributions.norm_of_parts(row.name, whole, held, before, parts, called)) is not None:
                        return fault
        for called, parts in reversed(self._parts[place]):
            if (fault := contributions.missing_from(row.name, whole, laid, held, parts, called)) is not None:
                return fault
            if not held.is_cut and (
                fault := parts_otherwise.of_parts(row.name, whole, held, parts, called, parted)
            ) is not None:  # fmt: skip
                return fault
        if not held.is_cut and naming.is_module_tensor(row.name) and parted:
            each = [ref for rank, ref in zip(held.ranks, held.parts, strict=True) if rank in parted]
            if algebra.are_alike(each):
                return parts_otherwise.of_outputs(row.name, whole, each[0], self._whole[place], tuple(parted))
        return None

    def _of_a_gradient(
        self, row: TensorVerdict, whole: TensorRef, micro_pair: MicroBatchPair, together: Together, held: HeldByRanks
    ) -> Fault | None:
        """What a gradient of an embedding or of a head says of the tokens that are in it."""
        what = f"{row.name.removeprefix('grad.')}'s gradient"
        if row.name.endswith(naming.EMBEDDINGS):
            side = micro_pair.a if together.which == "a" else micro_pair.b
            for _, ref in side.ending(*naming.HEADS, "grad.output.weight"):
                other = together.held.get(id(ref))
                if (
                    other is not None and ref.name.startswith("grad.")
                    and (fault := contributions.tied_apart(what, whole, held, other)) is not None
                ):  # fmt: skip
                    return fault
        given = self._tokens[row.key.step]
        is_lookup = row.name.endswith(naming.EMBEDDINGS) or token_rows.is_lookup(whole, given)
        places = held.stretches if held.is_cut else [()] * len(held.ranks)
        if not all(
            algebra.are_alike([ref for ref, other in zip(held.parts, places, strict=True) if other == place])
            for place in set(places)
        ):
            # Each has its own: none of them is what all made of it.
            return token_rows.reduced_of_some(what, whole, held, given) if is_lookup else None
        if is_lookup:
            return token_rows.of_rows(what, whole, held, given)
        if row.name.endswith(".weight"):
            around = row.name.removeprefix("grad.").removesuffix(".weight").rpartition(".")[0]
            # What feeds a layer stands beside it, or beside the module around it (a block's norm).
            known = self._inputs[row.key.step]
            said = f"{row.name.removeprefix('grad.').removesuffix('.weight')}.output"
            for scores in (one for one in known[around] if one.parts[0].name.endswith(said)):
                given_it = [*known[around], *known[around.rpartition(".")[0]]]
                if (fault := router_balance.of_own_tokens(what, whole, held, scores, given_it)) is not None:
                    return fault
            for inputs in (*known[around], *known[around.rpartition(".")[0]]):
                for slice_, mine, into in algebra.of_groups(whole, held, inputs):
                    if (fault := contributions.without_inputs(what, slice_, mine, into)) is not None:
                        return fault
        if naming.is_head(row.name):
            side = micro_pair.a if together.which == "a" else micro_pair.b
            laid = next((ref for _, ref in side.named(row.name)), None)
            heads = self._heads[row.key.step, row.key.role]
            is_first = row.key.step not in self._forward_off
            fault = None if laid is None else token_weights.explain(what, whole, laid, heads, is_first=is_first)
            if fault is not None:
                return fault
        left = self._left.get(row.key.step)
        if naming.is_head(row.name) and left is not None and left[1].axis in (0, 1):
            return contributions.without_tokens(what, whole, held, left[0], left[1].stretches, left[1].axis or 0)
        return None

    @staticmethod
    def _of_other_tokens(
        row: TensorVerdict, own: tuple[TensorRef, TensorRef], micro_pair: MicroBatchPair, together: Together,
        held: HeldByRanks,
    ) -> Fault | None:  # fmt: skip
        """Whether an expert's gradient is made of the tokens of another expert."""
        if held.is_cut or not _EXPERT.search(row.name):
            return None
        side, other = (micro_pair.a, micro_pair.b) if together.which == "a" else (micro_pair.b, micro_pair.a)
        pattern = _NUMBER.sub("#", row.name)

        def others() -> Iterator[tuple[str, TensorRef, tuple[int, ...]]]:
            for (name, _), (_, ref) in other.tensors.items():
                if name != row.name and _NUMBER.sub("#", name) == pattern and _EXPERT.sub("#", name) == in_layer:
                    mine = next((together.held.get(id(one)) for _, one in side.named(name)), None)
                    yield name, ref, mine.ranks if mine is not None else ()

        in_layer = _EXPERT.sub("#", row.name)
        what = f"{row.name.removeprefix('grad.')}'s gradient"
        if (fault := contributions.with_another(what, own, others(), held.ranks)) is not None:
            return fault
        return subspaces.other_tokens(what, own, others(), held.ranks)

    @staticmethod
    def _of_another(
        row: TensorVerdict, laid: TensorRef, whole: TensorRef, micro_pair: MicroBatchPair, together: Together,
        held: HeldByRanks,
    ) -> Fault | None:  # fmt: skip
        """Whether a weight is the other run's weight of another number: an expert that belongs to another rank."""
        other = micro_pair.b if together.which == "a" else micro_pair.a
        pattern = _NUMBER.sub("#", row.name)
        for (name, _), (_, ref) in other.tensors.items():
            if name == row.name or ref.shape != laid.shape or _NUMBER.sub("#", name) != pattern:
                continue
            if is_same(laid, ref) or _is_nearer(laid, ref, whole):
                what, another = row.name.removeprefix("param."), name.removeprefix("param.")
                theirs = f"{what} on {whose(held.ranks)} is the other run's {another}"
                side = micro_pair.a if together.which == "a" else micro_pair.b
                own = next((together.held.get(id(ref)) for _, ref in side.named(name)), None)
                ranks = tuple(sorted({*held.ranks, *(own.ranks if own else ())}))
                more = f", which is {whose(own.ranks)}'s" if own is not None and own.ranks != held.ranks else ""
                return Fault("another's", ranks, theirs + more)
        return None

    @staticmethod
    def _of_vocabulary(
        row: TensorVerdict, whole: TensorRef, held: HeldByRanks, micro_pair: MicroBatchPair, together: Together
    ) -> Fault | None:
        """What the slices of the logits say of what is said of every token's target [sample, position]: the logits are
        those that, by the other run's values, make its log-probabilities.
        """
        side, other = (micro_pair.a, micro_pair.b) if together.which == "a" else (micro_pair.b, micro_pair.a)
        of_samples = [
            (name, cut, facing[1]) for (name, stage), (_, ref) in side.tensors.items()
            if (cut := together.held.get(id(ref))) is not None and cut.axis == len(whole.shape)
            and (facing := other.tensors.get((name, stage))) is not None and not name.startswith("grad.")
            and facing[1].shape[:-1] == whole.shape and facing[1].numel <= 1 << 27
        ]  # fmt: skip
        called = [one for one in of_samples if naming.makes_logits(one[0])]
        said = [pages.array(ref).astype(np.float64).reshape(-1) for ref in (whole, *held.parts)]
        candidates = []
        for name in ("target_ids", "labels", "input_ids"):
            if (targets := other.find(name)) is not None and targets.shape == whole.shape:
                ids = pages.array(targets).astype(np.int64)
                candidates += [] if name == "input_ids" else [ids.reshape(-1)]
                candidates.append(np.roll(ids, -1, 1).reshape(-1))
        for _, cut, other_logits in called or of_samples[-1:]:
            logits = pages.array(other_logits).astype(np.float64).reshape(-1, other_logits.shape[-1])
            found = vocabulary.targets_of(said[0], logits, candidates)
            if found is not None:
                told, targets_N, sign = found
                return vocabulary.explain(row.name, [sign * one[told] for one in said], logits[told], cut, targets_N)
        return None

    @staticmethod
    def _of_logits(
        row: TensorVerdict, whole: TensorRef, held: HeldByRanks, micro_pair: MicroBatchPair, together: Together
    ) -> Fault | None:
        """Whether log-probabilities of ranks are what the other run's logits make under a temperature or a cap."""
        side, other = (micro_pair.a, micro_pair.b) if together.which == "a" else (micro_pair.b, micro_pair.a)
        if len(whole.shape) != 2 or row.ranks is None or not row.ranks.parted:
            return None
        called = [
            (name, ref) for (name, _), (_, ref) in other.tensors.items()
            if naming.makes_logits(name) and not name.startswith("grad.") and ref.shape[:-1] == whole.shape
            and ref.is_readable and ref.numel <= _MOST >> 2
        ]  # fmt: skip
        ids = [other.find(name) for name in ("target_ids", "labels", "input_ids")]
        candidates = [
            made.reshape(-1) for ref in ids if ref is not None and ref.shape == whole.shape
            for values in (pages.array(ref).astype(np.int64),) for made in (values, np.roll(values, -1, 1))
        ]  # fmt: skip
        said_N = pages.array(whole).astype(np.float64).reshape(-1)
        laid = standing_for(held)
        for name, ref in called[:2]:
            logits_NV = pages.array(ref).astype(np.float64).reshape(said_N.size, -1)
            known = logits_otherwise.made_of(said_N, logits_NV, candidates)
            if known is None:
                continue
            made, told = known
            places = np.full(said_N.size, -1)
            places[told] = np.arange(told.size)
            every = []
            if not held.is_cut or held.axis not in (0, 1):
                own = pages.array(held.parts[held.ranks.index(row.ranks.parted[0])]).astype(np.float64).reshape(-1)
                if own.size != said_N.size:
                    return None
                every.append(logits_otherwise.OfTokens(row.ranks.parted, np.arange(told.size), own[told]))
            elif laid.shape == whole.shape:
                here_N = pages.array(laid).astype(np.float64).reshape(-1)
                grid = np.arange(said_N.size).reshape(whole.shape)
                for rank, stretches in zip(held.ranks, held.stretches, strict=True):
                    if rank in row.ranks.parted:
                        mine = np.concatenate([np.arange(at, at + long) for at, long in stretches])
                        rows = np.take(grid, mine, held.axis).reshape(-1)
                        rows = rows[places[rows] >= 0]
                        every.append(logits_otherwise.OfTokens((rank,), places[rows], here_N[rows]))
            mine_too = next((one for (_, _), (_, one) in side.tensors.items() if one.name.endswith(name)), None)
            cut = together.held.get(id(mine_too)) if mine_too is not None else None
            if mine_too is not None and not _are_logits_alike(ref, mine_too, cut, row.ranks.parted):
                return None  # then these are what is off
            slices = cut if cut is not None and cut.axis == 2 else None
            return logits_otherwise.explain(row.name, made, every, slices) if every else None
        return None

    def _note_inputs(self, row: TensorVerdict, held: HeldByRanks, together: Together) -> None:
        """Keep what may have gone into a layer whose gradient is asked for, and which layers have experts."""
        if not naming.is_module_tensor(row.name) or row.name.startswith("grad."):
            return
        if (found := _OF_EXPERT.search(row.name)) is not None and len(held.ranks) < len(together.ranks):
            self._of_experts[row.place[:2]].setdefault(f"{row.name[: found.start()]}.output", [])
        is_of_some = len(held.ranks) == 1 < len(together.ranks) and held.parts[0].is_readable
        if is_of_some and (found := _ONE_OF_LIST.search(row.name)) is not None:
            around = row.name[: found.start() - 1]
            if _OF_EXPERT.search(row.name) or (_NUMBER.search(around) and len(held.parts[0].shape) == 2):
                self._of_experts[row.place[:2]].setdefault(f"{around}.output", []).append(
                    (held.ranks[0], held.parts[0])
                )
        if held.is_cut and together.shares in ("samples", "tokens") and held.axis in (0, 1):
            self._inputs[row.key.step][row.name.rpartition(".output")[0].rpartition(".")[0]].append(held)

    def _note_head(self, row: TensorVerdict, whole: TensorRef, micro_pair: MicroBatchPair) -> None:
        """Keep what a head was given, whose gradient may be asked for the weights of its tokens."""
        together = micro_pair.together
        if together is None or not naming.is_module_tensor(row.name) or row.name.startswith("grad."):
            return
        place = row.place[:2]
        if not whole.is_readable:
            return
        if not naming.makes_logits(row.name) or row.verdict.diverges or row.skipped is not None or len(whole.shape) < 2:
            self._last[place] = [*self._last[place][1 - _KEPT :], whole]
            return
        fed = next((one for one in reversed(self._last[place]) if one.shape[:-1] == whole.shape[:-1]), None)
        other = micro_pair.b if together.which == "a" else micro_pair.a
        targets = tuple(token_weights.targets(other, whole.shape[:-1]))
        if fed is not None and targets:
            head = token_weights.GivenToHead(
                row.key.micro or 0, whole, fed, targets, together.ranks, together.cuts, together.micros
            )
            self._heads[row.key.step, row.key.role].append(head)
            del self._last[place]  # the model returns these logits once more

    def _note_dtypes(self, row: TensorVerdict, whole: TensorRef, held: HeldByRanks) -> None:
        """Keep the first module of a step whose output ranks have in several dtypes."""
        others = tuple(rank for rank, ref in zip(held.ranks, held.parts, strict=True) if ref.dtype != whole.dtype)
        if naming.is_module_tensor(row.name) and 0 < len(others) < len(held.ranks):
            dtype = next(ref.dtype for ref in held.parts if ref.dtype != whole.dtype)
            said = f"{row.name} is {dtype} on {whose(others)} and {whole.dtype} on all others, as in the other run"
            fault = Fault("precision", others, f"{said}: what these computed is off by that (autocast, or a cast)")
            self._dtypes.setdefault(row.key.step, fault)

    def _note_micro(self, row: TensorVerdict, whole: TensorRef, laid: TensorRef) -> None:
        """Whether what ranks put out in the step's first micro-batch that is off is the other run's of another one."""
        if row.verdict.diverges and not row.name.startswith(("grad.", "param.")) and row.key.stage != "optimizer":
            self._forward_off.add(row.key.step)
        if not naming.is_module_tensor(row.name) or row.name.startswith("grad.") or row.ranks is None:
            return
        self._note_micro_before(row, whole, laid)
        first, own = self._off_micro.setdefault((row.key.role, row.name), (row, laid))
        if first is row or first.ranks is None or not first.verdict.diverges or first.key.micro == row.key.micro:
            return
        known, _ = self._first_off.get(row.key.step, (None, None))
        if known is not first or first.ranks.fault is not None or not _is_readable_as(own, whole):
            return
        if not algebra.is_near(whole, own):
            return
        fault = Fault(
            "other micro-batch", first.ranks.parted or first.ranks.ranks,
            f"{row.name} of {whose(first.ranks.parted or first.ranks.ranks)} in micro-batch {first.key.micro} is the "
            f"other run's of micro-batch {row.key.micro}",
        )  # fmt: skip
        first.ranks.fault, first.reason = fault, f"{fault.sentence}; {first.reason}"

    def _note_micro_before(self, row: TensorVerdict, whole: TensorRef, laid: TensorRef) -> None:
        """Whether the step's first activation that is off is what the other run has in the micro-batch before."""
        place = row.key.role, row.name
        micro, before = self._micro_before.get(place, (None, None))
        self._micro_before[place] = row.key.micro, whole
        first, _ = self._first_off.get(row.key.step, (None, None))
        if before is None or row.ranks is None or first is not row or not row.verdict.diverges:
            return
        if row.ranks.fault is not None and row.ranks.fault.kind != "apart":
            return
        if not _is_readable_as(laid, before) or algebra.is_near(whole, before) or not algebra.is_near(before, laid):
            return
        those = row.ranks.parted or row.ranks.ranks
        row.ranks.fault = fault = Fault(
            "other micro-batch", those,
            f"{row.name} of {whose(those)} in micro-batch {row.key.micro} is the other run's of micro-batch {micro}, "
            "the one before: what went into it was another micro-batch's",
        )  # fmt: skip
        row.reason = f"{fault.sentence}; {row.reason}"

    def _shares_of(self, step: int | None) -> int:
        """Among how many groups of ranks a step's tokens are shared, each with its own."""
        by_rank: dict[int, list[bytes]] = defaultdict(list)
        for one in self._tokens[step]:
            by_rank[one.rank].append(one.ids.tobytes())
        return len(set(map(tuple, by_rank.values())))

    def _note_tokens(self, together: Together, row: TensorVerdict) -> None:
        if together.ids is None or id(together) in self._seen:
            return
        self._seen.add(id(together))
        for rank, ref in zip(together.ranks, together.ids, strict=True):
            micros = together.micros.get(rank) or (row.key.micro or 0,)
            self._tokens[row.key.step] += token_rows.in_micros(ref, rank, micros)

    def _keep(self, row: TensorVerdict, whole: TensorRef, held: HeldByRanks) -> None:
        is_in_turn = held.is_cut and not row.verdict.diverges and len(held.stretches[0]) == 1
        is_of_rows = not naming.is_module_tensor(row.name) or held.axis == len(whole.shape) - 1
        if is_in_turn and is_of_rows and _FUSED.search(row.name):
            self._in_turn.add(_fused(row.name, held, of_all_layers=False))
        if row.name.startswith("grad.") and row.name.endswith("logits") and held.is_cut:
            self._left[row.key.step] = (whole, held)
        place = row.place[:2]
        if attention_made.goes_into(row.name) and not row.verdict.diverges and not row.name.startswith("grad."):
            self._into_attention[place] = [*self._into_attention[place][1 - _KEPT :], held]
        if held.is_cut and naming.is_module_tensor(row.name) and not row.verdict.diverges:
            self._slices[place] = [*self._slices[place][1 - _KEPT :], held]
        if held.is_cut or row.ranks is None or not naming.is_module_tensor(row.name) or not whole.shape:
            return
        if row.ranks.relation == "parts":
            self._parts[place] = [*self._parts[place][1 - _KEPT :], (row.name, held)]
        elif not row.verdict.diverges:
            self._whole[place] = [*self._whole[place][1 - _KEPT :], (row.name, whole)]


def _fused(name: str, cut: HeldByRanks, *, of_all_layers: bool = True) -> str:
    """A module that is several in one, whatever its layer: its weight, its bias and what they put out are cut alike,
    which gradients of few digits alone do not tell.
    """
    pattern = name.removeprefix("grad.").removeprefix("param.")
    pattern = _NUMBER.sub("#", pattern) if of_all_layers else pattern
    total = sum(long for stretches in set(cut.stretches) for _, long in stretches)
    return f"{naming.module_of(pattern).removesuffix('.weight').removesuffix('.bias')} of {total}"


def _own_width(output: TensorRef) -> int | None:
    """How many channels a rank has of an output, which may be laid together of those of ranks with the same samples."""
    if not output.shape:
        return None
    laid = laid_of(output, len(output.shape) - 1)
    return (output if laid is None else laid.parts[0]).shape[-1]


def _is_off_alike(output: TensorVerdict, weight: TensorVerdict) -> bool:
    """Whether a weight is off by as large a part of itself as its output is, or nearly."""
    if not weight.verdict.diverges or weight.figures is None or output.figures is None:
        return weight.verdict.diverges
    return output.figures.total.rel_l2 <= _AS_MUCH * weight.figures.total.rel_l2


def _is_of_a_later_stage(
    row: TensorVerdict, pair: TensorPair, micro_pair: MicroBatchPair, held: HeldByRanks, judge: JudgeCopy
) -> bool:
    """Whether what a rank alone returns is, by its values, what the other run returns under a later number (its hidden
    states): a stage of a pipeline counts its own from 0. Judged so, if it is.
    """
    together = micro_pair.together
    assert together is not None
    place = _RETURNED.search(row.name)
    if place is None or len(held.ranks) > 1 or held.ranks == together.ranks[:1]:
        return False
    (mine, other) = (pair.a, micro_pair.b) if together.which == "a" else (pair.b, micro_pair.a)
    assert mine is not None
    for (name, stage), theirs in other.tensors.items():
        head, _, number = name.rpartition(".")
        if stage != row.key.stage or f"{head}." != place[1] or not number.isdigit() or int(number) <= int(place[2]):
            continue
        if theirs[1].shape != mine[1].shape or not theirs[1].is_readable or not algebra.is_near(theirs[1], mine[1]):
            continue
        sides = (mine, theirs) if together.which == "a" else (theirs, mine)
        _take(row, judge(TensorPair(pair.name, *sides), micro_pair))
        row.reason = f"as {name} of the other run, for a stage of a pipeline counts its own from 0: {row.reason}"
        return True
    return False


def _off_their_own(pair: TensorPair, micro_pair: MicroBatchPair, held: HeldByRanks) -> tuple[int, ...]:
    """Ranks whose number is not what the same rank of the other run has, where that run's ranks stand for one process;
    nothing where these are not the same ranks.
    """
    together = micro_pair.together
    if together is None or together.whole_of is None or pair.a is None or pair.b is None:
        return ()
    there = together.whole_of.by_name.get(pair.name)
    if there is None or there.ranks != held.ranks or any(ref.numel != 1 for ref in (*held.parts, *there.parts)):
        return ()
    numbers = [
        tuple(float(pages.array(ref).reshape(-1)[0]) for ref in both)
        for both in zip(held.parts, there.parts, strict=True)
    ]  # fmt: skip
    return tuple(
        rank for rank, (one, other) in zip(held.ranks, numbers, strict=True)
        if abs(one - other) > limits.SCALAR[1] * max(abs(one), abs(other))
    )  # fmt: skip


def _judge_copies(
    row: TensorVerdict,
    pair: TensorPair,
    micro_pair: MicroBatchPair,
    held: HeldByRanks,
    together: Together,
    judge: JudgeCopy,
    times: float = 1.0,
) -> None:
    """Let the row be what the rank that is furthest off comes to, where ranks hold different bytes.

    times: what each copy is multiplied by before it is judged.
    """
    assert pair.a is not None
    assert pair.b is not None
    parted: list[int] = []
    for rank, ref in other_copies(held):
        ours = pair.a if together.which == "a" else pair.b
        copy = ref if times == 1 else _times((ref,), times)
        mine = (ours[0], copy.with_(name=ours[1].name, canonical=ours[1].canonical))
        sides = (mine, pair.b) if together.which == "a" else (pair.a, mine)
        other = judge(TensorPair(pair.name, *sides), micro_pair)
        if other.skipped is not None:
            row.skipped, row.damaged = other.skipped, other.damaged
            return
        if other.verdict.diverges:
            parted.append(rank)
        if _WORST.index(other.verdict) > _WORST.index(row.verdict):
            before = row.verdict
            _take(row, other)
            row.note = f"as rank {rank} holds it; rank {held.ranks[0]}'s is {before.value}"
    if row.ranks is not None:
        row.ranks.parted = tuple(parted)


def _in_sections_of_groups(
    whole: TensorRef, held: HeldByRanks, inner: list[HeldByRanks]
) -> tuple[HeldByRanks, tuple[int, ...]] | None:
    """The parts of several groups of ranks, of each of which the slices are shares of several in one (q, k and v), and
    the sizes of these. None where they are not.
    """
    for sizes in sections(inner[0]):
        made = [in_sections(one, sizes) for one in inner]
        parts = tuple(standing_for(one) for one in made if one is not None)
        if len(parts) < len(inner):
            continue
        again = replace(held, parts=parts)
        if algebra.is_near(whole, standing_for(again)):
            return again, sizes
    return None


def _slices_within(held: HeldByRanks) -> list[HeldByRanks] | None:
    """Of parts that are of samples or tokens each, the slices that each was laid together of along its last axis; None
    where they were not.
    """
    axes = {len(part.shape) - 1 for part in held.parts}
    if not held.is_cut or len(axes) != 1 or held.axis in axes:
        return None
    found = [laid_of(part, *axes) for part in held.parts]
    return [one for one in found if one is not None] if all(found) else None


def _judge_texts(
    row: TensorVerdict,
    pair: TensorPair,
    micro_pair: MicroBatchPair,
    held: HeldByRanks,
    together: Together,
    judge: JudgeCopy,
) -> None:
    """Let the row be what the first rank whose text differs has, and name every such rank. Where a rank holds the texts
    of its own samples, those of all ranks are the other run's: in the order of the samples, where token ids say whose
    these are, else one rank after the other; in another order nobody knows here whose text is whose, and the row is not
    compared.
    """
    whole = pair.b if together.which == "a" else pair.a
    assert whole is not None
    each: list[Any] = [getattr(ref.source, "value", None) for ref in held.parts]
    said = getattr(whole[1].source, "value", None)
    if isinstance(said, list) and all(isinstance(one, list) and len(one) != len(said) for one in each):
        places = _places_of(each, held, together, len(said))
        if places is not None and row.ranks is not None:
            strange = [
                rank for rank, own, mine in zip(held.ranks, each, places, strict=True)
                if [str(text) for text in own] != [str(said[at]) for at in mine]
            ]  # fmt: skip
            row.ranks.parted, row.verdict = tuple(strange), Verdict.DIFF if strange else Verdict.SAME
            row.reason = (
                f"of {whose(strange)}: other texts than the other run has of the same samples" if strange
                else "the texts of all ranks are the other run's of the same samples"
            )  # fmt: skip
            return
        laid = [str(text) for one in each for text in one]
        theirs, known = Counter(laid), Counter(map(str, said))
        if laid == [str(text) for text in said]:
            row.verdict, row.reason = Verdict.SAME, "the texts of all ranks together are the other run's"
        elif theirs == known:
            row.skipped = "the ranks hold the other run's texts in another order: whose text is whose is not told"
        elif theirs.total() != known.total():
            row.skipped = "each rank holds the texts of its own samples, and together they are not as many"
        elif row.ranks is not None:
            strange = [
                rank for rank, one in zip(held.ranks, each, strict=True) if any(str(text) not in known for text in one)
            ]
            row.ranks.parted, row.verdict = tuple(strange), Verdict.DIFF
            row.reason = f"texts of {whose(strange)} that the other run has not" if strange else (
                "the same texts, each another number of times"
            )  # fmt: skip
        return
    is_off = row.verdict is Verdict.DIFF
    _judge_copies(row, pair, micro_pair, held, together, judge)
    if row.skipped is not None or row.verdict is not Verdict.DIFF or row.ranks is None:
        return
    first = [] if not is_off else [
        rank for rank, ref in zip(held.ranks, held.parts, strict=True) if is_same(held.parts[0], ref)
    ]  # fmt: skip
    row.ranks.parted = tuple(sorted({*first, *row.ranks.parted}))
    row.reason = f"of {whose(row.ranks.parted)}: {row.reason}"


def _places_of(each: list[Any], held: HeldByRanks, together: Together, count: int) -> list[list[int]] | None:
    """Of every rank's texts, of which of the other run's samples each is; None where the token ids do not say."""
    if together.whose is None:
        return None
    own = dict(zip(together.ranks, together.whose, strict=True))
    places = [[at for start, long in own[rank] for at in range(start, start + long)] for rank in held.ranks]
    if any(len(texts) != len(mine) for texts, mine in zip(each, places, strict=True)):
        return None
    return places if {at for mine in places for at in mine} == set(range(count)) else None


def _is_nearer(one: TensorRef, other: TensorRef, own: TensorRef) -> bool:
    """Whether a weight is another's but for a step or two of its own, and nothing of what it should be."""
    if one.numel > _MOST or one.numel < _FEWEST_NEAR or not all(ref.is_readable for ref in (one, other, own)):
        return False
    values, theirs, right = (pages.array(ref).astype(np.float64) for ref in (one, other, own))
    return float(np.linalg.norm(values - theirs)) <= _NEARER * float(np.linalg.norm(values - right))


def _are_logits_alike(whole: TensorRef, laid: TensorRef, held: HeldByRanks | None, parted: Sequence[int]) -> bool:
    """Whether ranks' own logits are the other run's."""
    own = [laid] if held is None or held.is_cut else [
        ref for rank, ref in zip(held.ranks, held.parts, strict=True) if rank in parted
    ]  # fmt: skip
    return all(ref.is_readable and ref.shape == whole.shape and algebra.is_near(whole, ref) for ref in own)


def _is_readable_as(one: TensorRef, other: TensorRef) -> bool:
    return one.shape == other.shape and one.is_readable and other.is_readable and 8 <= one.numel <= _MOST


def _summed(refs: Sequence[TensorRef]) -> NDArray[np.float64]:
    """The sum of tensors of one shape, one after the other: of all ranks at once it would be as many times as large."""
    made = np.zeros(refs[0].shape)
    for ref in refs:
        made += pages.array(ref).astype(np.float64)
    return made


def _times(refs: Sequence[TensorRef], times: float) -> TensorRef:
    """The sum of tensors of one shape, times a number, as the first of them: in float32, as such a sum is made."""
    made = _summed(refs)
    made *= times
    return refs[0].with_(dtype="float32", source=Inline(made.astype("float32").tobytes()), digest=None)


def _summed_in_groups(held: HeldByRanks, laid: TensorRef) -> TensorRef | None:
    """Slices that several ranks have, each a part of them, added up; None where that is too much to be made."""
    if held.axis is None or laid.numel > _MOST:
        return None
    made = np.zeros(laid.shape)
    for ref, stretches in zip(held.parts, held.stretches, strict=True):
        own, before = pages.array(ref).astype(np.float64), 0
        for start, length in stretches:
            before_it = (slice(None),) * held.axis
            there, here = (*before_it, slice(start, start + length)), (*before_it, slice(before, before + length))
            made[there] += own[here]
            before += length
    return laid.with_(dtype="float64", source=Inline(made.tobytes()), digest=None)


def _take(row: TensorVerdict, other: TensorVerdict) -> None:
    """Let a row say what another said of the same pair, and of which values: those around them are read of these."""
    row.a, row.b = other.a, other.b
    row.verdict, row.reason, row.rule, row.suspect, row.context = (
        other.verdict,
        other.reason,
        other.rule,
        other.suspect,
        None,
    )
    row.figures, row.unmasked, row.worst_token = other.figures, other.unmasked, other.worst_token
    row.raw_a, row.raw_b, row.value_a, row.value_b = other.raw_a, other.raw_b, other.value_a, other.value_b
    row.token, row.skipped, row.damaged = other.token, other.skipped, other.damaged
