"""Packed rows: what says where samples begin (cu_seqlens, position ids), what is padding, and samples that leak."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np

from replay_core import pages
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.compared import BOTH, compared, disagrees, distance, figures_of
from replay_core.diagnose.finding import Evidence, Finding, Where, error, finding, listed, share, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.gap import DISAGREE, Gap, gap, packed_signature
from replay_core.diagnose.rule import Skip, given, rule, skip_if
from replay_core.diagnose.rules.staleness import versions
from replay_core.samples.batch import Batch

#: Samples that begin where the one before them ends, which as many left pads do not do by chance.
RUN_ON = 3
_LONGEST = ("max_seqlen", "max_seqlen_q", "max_length_q", "max_seq_len")


@rule("D17", "packing metadata contradicts itself", link="packing", scope="batch",
      needs=("cu_seqlens|position_ids|segment_ids",),
      explains=("D16", "D09", "D14", "D24"), lasts=True,
      source="transformers _is_packed_sequence; ms-swift#4736")  # fmt: skip
def metadata(batch: StepBatch) -> Iterator[Finding]:
    """cu_seqlens starts at 0, rises, and ends on the number of tokens; max_seqlen is its largest step; position ids
    count 0, 1, 2 ... in every sample and begin again with the next; segment ids change where samples do.
    A forward's own position ids are 0 where its cu_seqlens say that samples begin.
    Any violation is an error; position ids that count left padding are a warning, and an
    error where engine and trainer disagree as well.
    """
    wrong = _cu_seqlens(batch)
    if wrong is not None:
        name, what, evidence = wrong
        yield error(
            what,
            batch.laid.where(name),
            *evidence,
            cause="lengths of another batch, padding counted in, or a boundary lost when samples were joined",
        )
        return
    if (run_on := _positions_of_packs(batch)) is not None:
        yield run_on
        return
    yield from _positions(batch)
    yield from _segments(batch)


def _cu_seqlens(batch: StepBatch) -> tuple[str, str, list[Evidence]] | None:
    for sheet, _ in batch.columns.sheets:
        for part in sheet.parts:
            ref = part.held.find("cu_seqlens")
            if ref is None:
                continue
            bounds = np.asarray(pages.array(ref)).reshape(-1)
            shown_bounds = shown("cu_seqlens", str(bounds[:8].tolist()), None, part.held.record.path.name)
            if bounds.size < 2 or bounds[0] != 0:
                return "cu_seqlens", "cu_seqlens does not begin with 0", [shown_bounds]
            if (np.diff(bounds) <= 0).any():
                return "cu_seqlens", "cu_seqlens does not rise", [shown_bounds]
            total = int(part.lengths.sum())
            if part.has_tokens and bounds[-1] != total:
                return (
                    "cu_seqlens",
                    f"cu_seqlens ends at {int(bounds[-1])}, and there are {total} tokens",
                    [shown_bounds, shown("tokens", total)],
                )
            longest = part.held.find(*_LONGEST)
            if longest is not None and longest.numel == 1:
                stated = int(np.asarray(pages.array(longest)).reshape(-1)[0])
                if stated != int(np.diff(bounds).max()):
                    return (
                        "cu_seqlens",
                        f"max_seqlen is {stated}, and the longest sample has {int(np.diff(bounds).max())} tokens",
                        [shown_bounds, shown("max_seqlen", stated, str(int(np.diff(bounds).max())))],
                    )
    return None


def _positions_of_packs(batch: StepBatch) -> Finding | None:
    """Position ids of a forward's packed row that do not begin with 0 where its cu_seqlens say that samples begin."""
    for sheet, _ in batch.columns.sheets:
        for part in sheet.parts:
            bounds_ref, ref = part.held.find("cu_seqlens"), part.held.find("position_ids")
            if bounds_ref is None or ref is None:
                continue
            bounds = np.asarray(pages.array(bounds_ref)).reshape(-1)
            positions = np.asarray(pages.array(ref)).reshape(-1)
            if len(bounds) < 3 or len(positions) != bounds[-1]:
                continue  # of padded rows, or of an image's three axes
            later = positions[bounds[1:-1]][_holds_samples(part, bounds)]
            off = int((later != 0).sum())
            if not off or 2 * off < len(later):
                continue
            return error(
                "position ids do not begin again with every sample of a pack: "
                + ("they run on through it" if (np.diff(positions) == 1).all() else "cu_seqlens say where they should"),
                Where.of(part.held.record, ref.name, 0, int(bounds[1])),
                shown("samples after the first that do not begin with 0", share(off, len(later)), "0"),
                shown("position id of the second one's first token", int(later[0]), "0"),
                shown("cu_seqlens", str(bounds[:8].tolist()), None, part.held.record.path.name),
                cause="positions are made for the packed row as a whole, and not for each sample of it: an attention "
                "that finds samples by their positions (transformers) lets each see those before it, and absolute "
                "positions are wrong",
            )  # fmt: skip
    return None


def _holds_samples(part: Batch, bounds: Array) -> Array:
    """Which pieces of a pack after its first are samples: a piece of one token over and over is padding at its end."""
    ref = part.held.find("input_ids", "tokens")
    tokens = np.zeros(0) if ref is None else np.asarray(pages.array(ref)).reshape(-1)
    pieces = list(pairwise(bounds[1:].tolist()))
    if len(tokens) != bounds[-1]:
        return np.array([at < len(pieces) - 1 for at in range(len(pieces))])
    return np.array([bool(np.ptp(tokens[start:end])) for start, end in pieces])


def _positions(batch: StepBatch) -> Iterator[Finding]:
    column = batch.columns.of("position_ids")
    if column is None or not batch.spine.has_tokens or not batch.spine.padding_known:
        if column is None and batch.columns.ref("cu_seqlens") is None and batch.columns.ref("segment_ids") is None:
            raise Skip("position_ids do not lie on the tokens")
        return
    off_N = column.said_N & (column.values_N != batch.flat.position_N)
    if not off_N.any():
        return
    at = int(np.flatnonzero(off_N)[0])
    place = batch.laid.where("position_ids", at=at)
    first_B = np.full(len(batch), np.nan)
    starts = batch.flat.starts_B[batch.flat.lengths_B > 0]
    first_B[batch.flat.lengths_B > 0] = column.values_N[starts]
    steps_N = np.diff(column.values_N, prepend=np.nan)
    inside_N = (batch.flat.position_N > 0) & column.said_N
    counted = bool((steps_N[inside_N] == 1).all())
    if counted and batch.spine.parts[0].packs is None and not _run_on(batch, first_B):
        yield finding(
            # Of rotary embeddings a distance alone counts: it is an error where the two sides show it.
            "error" if disagrees(batch) and not _is_of_older_weights(batch) else "warning",
            "position ids count padding: samples do not begin at 0",
            place,
            shown("position of the first token", float(column.values_N[at]), "0", column.source),
            shown("samples that begin elsewhere", int((first_B != 0).sum()), "0"),
            cause="positions are 0, 1, 2 ... over the padded row; they have to count the attended tokens",
        )
        return
    if _only_tails(batch, off_N):
        yield warning(
            "position ids stop counting before samples end",
            place,
            shown("tokens with another position", int(off_N.sum()), "0", column.source),
            cause="the tail of each sample is padding to whoever made the positions, and tokens to the attention mask",
        )
        return
    if (again := _begins_inside(batch, column.values_N, off_N)) is not None:
        at, count, of_response = again
        yield error(
            "position ids begin again at 0 inside of samples"
            + (": where the response begins, they do not go on from the prompt's" if of_response else ""),
            batch.laid.where("position_ids", at=at),
            shown("position id", 0, str(int(batch.flat.position_N[at])), column.source),
            shown("samples in which they begin again", share(count, len(batch)), "none"),
            shown("tokens with another position", int(off_N.sum()), "0"),
            cause="prompt and response are numbered on their own (an arange for each, joined by a cat): every response "
            "token stands where the prompt's tokens stand, for whoever looks at distances"
            if of_response
            else "a part of each sample is numbered on its own: its tokens stand where earlier ones of the same sample "
            "do",
        )
        return
    yield error(
        "position ids do not begin again with every sample",
        place,
        shown("position id", float(column.values_N[at]), str(int(batch.flat.position_N[at])), column.source),
        shown("tokens with another position", int(off_N.sum()), "0"),
        cause="positions run on through the pack, or begin again inside a sample: attention then mixes samples",
    )


def _begins_inside(batch: StepBatch, positions_N: Array, off_N: Array) -> tuple[int, int, bool] | None:
    """(first token, samples, whether it is the response's first in all) where positions of samples begin with 0 and
    begin again with 0 once inside, and count by 1 else; None where they do not in most of the samples that are off.
    """
    place_N = batch.flat.position_N
    ends, first, of_response = 0, -1, True
    begins_B = None if batch.response_N is None else batch.flat.first(batch.response_N)
    bad = np.unique(batch.flat.sample_N[off_N])
    for sample in bad:
        own = positions_N[batch.flat.spans[sample]]
        jumps = np.flatnonzero(np.diff(own) != 1) + 1
        if own[0] != 0 or len(jumps) != 1 or own[jumps[0]] != 0:
            continue
        ends += 1
        at = int(batch.flat.starts_B[sample] + jumps[0])
        first = at if first < 0 else first
        of_response &= begins_B is not None and int(place_N[at]) == int(begins_B[sample])
    return (first, ends, of_response) if ends and ends > 0.9 * len(bad) else None


def _run_on(batch: StepBatch, first_B: Array) -> bool:
    """Whether samples begin at 0, or where the sample before them in some order ends, and the most there: rows that are
    recorded apart, and were one pack when their positions were made.
    """
    for order in batch.laid.orders:
        first, ends = first_B[order], (first_B + batch.flat.lengths_B)[order]
        later = first[1:] != 0
        if later.sum() >= RUN_ON and 2 * later.sum() >= later.size and (first[1:] == ends[:-1])[later].all():
            return True
    return False


def _is_of_older_weights(batch: StepBatch) -> bool:
    """Whether samples of older weights are stated, or weighed, so that these may be why engine and trainer disagree."""
    return batch.laid.algorithm.is_off_policy or batch.has("is_weights")


def _only_tails(batch: StepBatch, off_N: Array) -> bool:
    """Whether every wrong position lies in one run up to its sample's end that holds one value."""
    column = given(batch.columns.of("position_ids"))
    first_B = batch.flat.first(off_N)
    tail_N = batch.flat.position_N >= np.repeat(first_B, batch.flat.lengths_B)
    low_B, high_B = batch.flat.extremes(column.values_N, off_N)
    constant_B = np.isnan(low_B) | (low_B == high_B)
    return bool((tail_N == off_N).all() and constant_B.all() and (first_B > 0).all())


def _segments(batch: StepBatch) -> Iterator[Finding]:
    column = batch.columns.of("segment_ids")
    if column is None or not batch.spine.padding_known:
        return
    low_B, high_B = batch.flat.extremes(column.values_N, column.said_N)
    mixed_B = low_B != high_B
    if not np.nansum(mixed_B & ~np.isnan(low_B)):
        return
    sample = int(np.flatnonzero(mixed_B & ~np.isnan(low_B))[0])
    yield error(
        "segment ids change inside a sample",
        batch.laid.where("segment_ids", sample=sample),
        shown("segments in one sample", f"{low_B[sample]:g} to {high_B[sample]:g}", "one", column.source),
        cause="segment ids and sample lengths were made from different batches",
    )


#: Rows before their beginnings are compared.
FEWEST = 4


@rule("D34", "padding is attended to", link="tokens", scope="batch", needs=("tokens", "response", "attention_mask"),
      lasts=True,
      explains=("D09", "D10", "D11", "D12", "D14", "D15", "D16", "D19", "D20", "D24", "D26", "D42", "D82", "D94",
                "L10"),
      source="transformers: no attention_mask, or ids.ne(pad) of another pad id, attends to left padding")  # fmt: skip
def attended(batch: StepBatch) -> Finding | None:
    """Rows of one width (4 and more) that the attention mask counts from the first column to the last, all of whose
    responses begin in one column, and which begin with runs of one token, of several lengths (2 and more in some),
    that stands nowhere else but in runs that end a row and are not in the loss: it fills the rows up on the left. An
    error where it ends rows, too, or is the pad token that the run states, and where engine and trainer disagree by
    over .03, or have nothing to compare; else a warning. Right padding alone may be attended to: nothing that counts
    sees it.
    """
    tokens_N, response_N = given(batch.tokens_N), given(batch.response_N)
    lengths_B, heads_B = batch.flat.lengths_B, batch.flat.first(response_N)
    if len(batch) < FEWEST or np.unique(lengths_B).size > 1 or np.unique(heads_B).size > 1 or not heads_B[0] > 1:
        raise Skip("needs rows of one width, all counted by the attention mask, whose responses begin in one column")
    rows_BS = tokens_N.reshape(len(batch), -1)
    begins, counts = np.unique(rows_BS[rows_BS[:, 0] == rows_BS[:, 1], 0], return_counts=True)
    if not begins.size:
        return None
    pad = int(begins[counts.argmax()])
    left_B, right_B = _run_B(rows_BS == pad), _run_B((rows_BS == pad)[:, ::-1])
    if np.unique(left_B).size < 2 or left_B.max() >= heads_B[0]:
        return None
    places_S = np.arange(rows_BS.shape[1])
    ends_BS = places_S >= rows_BS.shape[1] - right_B[:, None]
    fills_BS = (places_S < left_B[:, None]) | ends_BS
    counted_N = batch.trained_N
    if ((rows_BS == pad) & ~fills_BS).any() or (counted_N is not None and (counted_N & ends_BS.reshape(-1)).any()):
        return None
    stated = batch.laid.algorithm.number("pad_token_id", "pad_id")
    is_sure = bool((right_B > 0).any()) or stated == pad
    between = distance(batch)
    return finding(
        "error" if is_sure and not (between is not None and between <= DISAGREE) else "warning",
        f"padding is attended to: the attention mask is 1 over the token {pad}, which fills "
        f"{share(int((left_B > 0).sum()), len(batch))} rows up on the left",
        batch.laid.where("attention_mask", sample=int(left_B.argmax())),
        shown("its runs at the left, by length", listed(np.unique(left_B)), "masked out"),
        shown("rows that end in it", share(int((right_B > 0).sum()), len(batch))),
        *([] if between is None else [shown("mean |trainer - rollout|", between, f"< {DISAGREE} nats")]),
        *([] if stated is None else [shown("pad token that the run states", int(stated))]),
        cause="the attention mask is made of ones, or by another pad id than the rows are padded with: a prompt's "
        "tokens see its padding, and positions count it; the more padding, the further from the engine's",
    )


def _run_B(is_BS: Array) -> Array:
    """How many columns from the first on hold, row by row."""
    run_B: Array = np.where(is_BS.all(axis=1), is_BS.shape[1], (~is_BS).argmax(axis=1))
    return run_B


_LEAKS_INTO = ("L10", "D09", "D12", "D13", "D14", "D15", "D24")
_SOURCE = "transformers masking_utils: packed position ids only count without mask and cache; functionary#132"


@rule("D16", "the trainer's packs leak", link="logprobs", scope="batch", needs=BOTH, explains=_LEAKS_INTO, lasts=True,
      source=_SOURCE)  # fmt: skip
def leaking(batch: StepBatch) -> Finding | None:
    """mean |d| per sample: the first sample of every pack agrees (below a fifth of the others, at least 5 times
    apart), every later one does not. Packs are as recorded, else every k-th sample, else what filling rows up to
    one length gives. An error. Only the first sample of a pack sees no other's tokens: no other cause spares just
    those. But weights of another age may, where packs are inferred: silent where the later samples name older weights,
    or, after step 0, where a run that is off-policy on purpose records no versions.
    """
    between = gap(batch)
    if _is_of_unsampled(batch, between):
        return None
    later = batch.step not in (None, 0) and between.leak is not None and "inferred" in between.leak[1]
    if between.leak is not None and not later and not _of_other_ages(batch, *between.leak):
        return _leak(batch, between, *between.leak)
    return None


#: Mean log-probability of tokens that are no certain ones.
NOT_SURE = -0.1


def _is_of_unsampled(batch: StepBatch, between: Gap) -> bool:
    """Whether what parts samples is that the engine's number of some tokens is 0, which the trainer is not sure of (D41
    says so): without these tokens none is.
    """
    alien_N = between.both_N & (between.rollout.values_N == 0)
    if alien_N.sum() < 2 or not float(between.trainer.values_N[alien_N].mean()) < NOT_SURE:
        return False
    d_N = np.zeros(between.both_N.size)
    d_N[between.both_N] = np.abs(between.d)
    return packed_signature(batch, batch.flat.mean(d_N, between.both_N & ~alien_N)) is None


def _of_other_ages(batch: StepBatch, clean_B: Array, how: str) -> bool:
    """Whether what spares every k-th sample may be its age: engines that take samples in turns have weights of several
    ages where a run is off-policy on purpose, or says so of its samples. Recorded packs are no guess.
    """
    if "inferred" not in how:
        return False
    known = versions(batch)
    if known is None or np.isnan(known[0]).all():
        return batch.step != 0 and batch.laid.algorithm.is_off_policy
    return bool(np.nanmax(known[0][~clean_B]) < np.nanmin(known[0][clean_B]))


#: Steps in which first samples of a handful of tokens each are spared by no luck, and their share of the steps.
STEPS, MOST = 3, 0.8
#: Samples of a first step that tell whether one is spared there.
SEVERAL = 4


@rule("D16", "the trainer's packs leak", link="logprobs", scope="case", explains=_LEAKS_INTO, lasts=True,
      source=_SOURCE)  # fmt: skip
def leaking_in_every_step(case: Case) -> Finding | None:
    """The same of later steps; and where first samples are too few, or hold too few tokens, to be sure of in one step:
    in four of five steps, 3 and more, packs of one way (all samples in one, every k-th) spare their first samples and
    no others. An error. Not of inferred packs where the run's first step (0 or 1) has nothing of it: before any update
    weights have one age, and samples that others take in turns are older later; a leak is there from the first.
    """
    found: dict[str, list[tuple[StepBatch, Gap, Array]]] = defaultdict(list)
    sure: list[tuple[StepBatch, Gap, Array, str]] = []
    looked, begins_clean = 0, False
    for batch in case.batches():
        try:
            between = compared(batch)
        except Skip:
            continue
        looked += 1
        if looked == 1 and batch.step in (0, 1):
            heard_B = between.by_sample_B[np.isfinite(between.by_sample_B)]
            begins_clean = heard_B.size >= SEVERAL and float(heard_B.max()) < DISAGREE
        if between.is_shifted or between.is_tempered or _is_of_unsampled(batch, between):
            continue
        told = packed_signature(batch, between.by_sample_B, few=True)
        if told is not None and not _of_other_ages(batch, *told):
            found[told[1]].append((batch, between, told[0]))
            if batch.step not in (None, 0) and between.leak is not None and "inferred" in between.leak[1]:
                sure.append((batch, between, *between.leak))
    if begins_clean:
        return None
    if sure:
        return _leak(*sure[0], steps=[batch.step for batch, *_ in sure])
    skip_if(looked < STEPS, f"needs log-probabilities of engine and trainer in {STEPS} steps")
    for how, every in found.items():
        if len(every) >= max(STEPS, MOST * looked):
            return _leak(*every[0], how, steps=[one.step for one, _, _ in every])
    return None


def _leak(batch: StepBatch, between: Gap, clean_B: Array, how: str, steps: Iterable[int | None] = ()) -> Finding:
    values_B = between.by_sample_B
    place = batch.laid.where(between.trainer.name, sample=~clean_B & ~np.isnan(values_B))
    return error(
        "the first sample of every pack agrees with the rollout, the ones after it do not: attention crosses samples",
        place,
        shown("mean |d| of the first samples", float(np.nanmean(values_B[clean_B])), None, between.trainer.source),
        shown("mean |d| of the later samples", float(np.nanmean(values_B[~clean_B])), "the same"),
        shown("samples that agree", listed(np.flatnonzero(clean_B))),
        shown("packs", how),
        *figures_of(between),
        cause="samples are packed without a block-diagonal mask (use_cache was on, a mask of ones was passed, or no "
        "position ids), or position ids do not begin again with each of them",
        next_step=batch.laid.replay_command(place, "--packing"),
        steps=steps,
    )
