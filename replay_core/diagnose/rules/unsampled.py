"""Tokens in the loss that no engine sampled, and sampled ones that are not in it."""

from __future__ import annotations

import numpy as np

from replay_core import pages
from replay_core.diagnose.algorithm import RESPONSE_LIMITS, stated_number
from replay_core.diagnose.batch import StepBatch, mask_name, passes
from replay_core.diagnose.case import Case
from replay_core.diagnose.columns import Column
from replay_core.diagnose.compared import BOTH
from replay_core.diagnose.finding import Finding, error, finding, listed, share, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.gap import Gap, gap, unsampled
from replay_core.diagnose.kinship import whose
from replay_core.diagnose.rule import Skip, given, rule
from replay_core.records import Record


@rule("D41", "tokens count that no engine sampled", link="masks", scope="batch", needs=(*BOTH, "mask"),
      explains=("L10", "D09", "D12", "D14", "D24", "D42"), lasts=True,
      source="rllm#272, verl multi-turn masks: tool output and prompts are given, not sampled")  # fmt: skip
def never_sampled(batch: StepBatch) -> Finding | None:
    """Tokens in the loss whose rollout log-probability is exactly 0 while the trainer's mean over them is below -1: the
    engine fills in 0 where it sampled nothing, in prompts and tool output. Two and more are an error; whole responses
    of them may be demonstrations: worth knowing, and a warning where importance weights are recorded, where they share
    a group with sampled ones, or have a negative advantage, as no demonstration has. (Of top-p or a
    greedy engine, 0 is a token that was left alone; the trainer then finds it probable.)

    An error, too, where it is exactly 0 at the end token of .9 of the responses that end on one (8 and more) and at 1 %
    of the other tokens at most, while the trainer's mean there is below -.01. And where engine and trainer part (.05
    nats) at the end token of responses that were cut off (4 and more), and nowhere else: it was written over the last
    token that was sampled.
    """
    rollout, trainer = given(batch.columns.of("rollout_logprobs")), given(batch.trainer)
    both_N = batch.pair(rollout, trainer)
    alien_N = unsampled(rollout, trainer, both_N)
    if (filled := _ends_filled(batch, both_N)) is not None:
        return filled
    if not alien_N.any():
        return _ends_replaced(batch)
    if whose(batch, rollout, trainer) is not None:
        raise Skip("rollout log-probabilities are another sample's (D79): what is 0 is where that one has ended")
    if gap(batch).is_shifted:
        raise Skip("log-probabilities are shifted (D08): what is filled in with 0 lies beside its place")
    at = int(np.flatnonzero(alien_N)[0])
    name = mask_name(batch)
    # Every epoch holds the same: a token counts once.
    times = passes(batch)
    holders, tokens = int((batch.flat.count(alien_N) > 0).sum()) // times, int(alien_N.sum()) // times
    where, cause = _one_early(batch, alien_N, rollout) or _given(batch, alien_N, both_N)
    whole_B = batch.flat.count(alien_N) == batch.flat.count(both_N)
    if whole_B[batch.flat.count(alien_N) > 0].all():
        # Answers that are given whole are demonstrations: where nothing weighs them by the engine, nothing is wrong.
        amid, worse = _amid_others(batch, alien_N), _pushed_down(batch, alien_N)
        return finding(
            "warning" if amid or worse or batch.has("is_weights") else "info",
            f"{share(holders, len(batch) // times)} responses are of no engine: their rollout log-probabilities are "
            "all 0",
            batch.laid.where("rollout_logprobs", at=at),
            shown("tokens of them", tokens, None, rollout.source),
            shown("mean trainer log-probability there", float(trainer.values_N[alien_N].mean()), None, trainer.source),
            shown("of them beside sampled answers to their prompt", share(amid // times, holders)),
            shown("of them with a negative advantage", share(worse // times, holders), "none of a demonstration"),
            cause="the engine's numbers of these samples are missing and were filled with 0, or rows of tool output "
            "are in the loss: a demonstration is nothing to be pushed away from"
            if worse
            else "demonstrations among the samples (SFT mixed in, LUFFY), which no engine wrote; or the engine's "
            "numbers of these samples are missing and were filled with 0",
        )
    return error(
        f"{tokens} tokens are in the loss that no engine sampled{where}",
        batch.laid.where(name, at=at),
        shown("share of counted tokens", float(alien_N.sum() / both_N.sum()), "< 0.001", rollout.source),
        shown("samples that hold them", share(holders, len(batch) // times)),
        shown("mean trainer log-probability there", float(trainer.values_N[alien_N].mean()), None, trainer.source),
        cause=cause,
    )


#: Responses with an end token, their share without a number of it, that of other tokens, and what is not certain.
ENDS, ALL, OTHERS, CERTAIN = 8, 0.9, 0.01, -0.01


def _ends_filled(batch: StepBatch, both_N: Array) -> Finding | None:
    """End tokens, and only they, without a number of the engine."""
    rollout, trainer, end = given(batch.columns.of("rollout_logprobs")), given(batch.trainer), batch.eos_id
    if end is None or batch.tokens_N is None:
        return None
    last_B = batch.flat.last(both_N)
    ends_N = both_N & (batch.tokens_N == end) & (batch.flat.position_N == np.repeat(last_B, batch.flat.lengths_B))
    zero_N = both_N & (rollout.values_N == 0)
    filled_N, rest_N = ends_N & zero_N, both_N & ~ends_N
    if filled_N.sum() < max(ENDS, ALL * ends_N.sum()) or (zero_N & rest_N).sum() > OTHERS * rest_N.sum():
        return None
    mean = float(trainer.values_N[filled_N].mean())
    if not mean < CERTAIN or not rest_N.any():
        return None
    return error(
        f"rollout log-probabilities of the end token (EOS, {end}) are exactly 0, in "
        f"{share(int(filled_N.sum()), int(ends_N.sum()))} responses that end on it",
        batch.laid.where("rollout_logprobs", at=filled_N),
        shown("mean trainer log-probability there", mean, None, trainer.source),
        shown("other tokens with exactly 0", share(int((zero_N & rest_N).sum()), int(rest_N.sum()))),
        cause="the engine returns none for the token that stops it, or the list is one short and was filled with 0: "
        "ratios and importance weights are wrong at each end; or the end is appended and was never sampled",
    )


#: How far apart the two are at an end that was written over another token, and how many of those tell.
PART, CUT = 0.05, 4


def replaced_N(batch: StepBatch, between: Gap) -> Array | None:
    """End tokens of responses that were cut off, where engine and trainer part there alone [N]; else None."""
    end, cut_B, tokens_N = batch.eos_id, batch.truncated_flag_B, batch.tokens_N
    if tokens_N is None:
        return None
    far_N = np.zeros(between.both_N.size, dtype=bool)
    far_N[between.both_N] = np.abs(between.d) > PART
    last_N = batch.flat.position_N == np.repeat(batch.flat.last(between.both_N), batch.flat.lengths_B)
    if cut_B is None:
        # Nobody says what was cut off: it has as many tokens as the limit that is stated, or as the longest.
        counts_B = batch.flat.count(between.both_N)
        limit = stated_number(batch.laid.stated, *RESPONSE_LIMITS)
        cut_B = counts_B == (limit if limit is not None and limit in counts_B else counts_B.max(initial=0))
    if end is None:
        # Nor what ends a response: the one token that all of those that part there end on.
        ended = np.unique(tokens_N[far_N & last_N])
        if ended.size != 1:
            return None
        end = int(ended[0])
    ends_N = between.both_N & last_N & (tokens_N == end)
    of_cut_N = ends_N & np.repeat(cut_B, batch.flat.lengths_B)
    # An engine that favours the end token does so where it wrote it, too.
    if of_cut_N.sum() < CUT or (ends_N & ~of_cut_N).sum() < CUT or (far_N & ~of_cut_N).any():
        return None
    return of_cut_N if 2 * (far_N & of_cut_N).sum() > of_cut_N.sum() else None


def _ends_replaced(batch: StepBatch) -> Finding | None:
    """Responses that were cut off and end on an end token whose number is another token's."""
    between = gap(batch)
    ends_N = replaced_N(batch, between)
    if ends_N is None:
        return None
    rollout, trainer = given(batch.columns.of("rollout_logprobs")), given(batch.trainer)
    count, end = int(ends_N.sum()), int(given(batch.tokens_N)[ends_N][0])
    return error(
        f"an end token (EOS, {end}) that no engine sampled ends {share(count, len(batch))} responses, all of "
        + (
            "them cut off at the limit"
            if batch.truncated_flag_B is not None
            else "them as long as any, or as the limit"
        ),
        batch.laid.where(mask_name(batch), at=ends_N),
        shown("mean trainer log-probability there", float(trainer.values_N[ends_N].mean()), None, trainer.source),
        shown("mean rollout log-probability there", float(rollout.values_N[ends_N].mean()), None, rollout.source),
        shown("other tokens further apart than 0.05 nats", 0),
        cause="an end token is written over the last token of what was cut off: the engine's number there is that of "
        "the token it sampled. The policy is taught to stop where it did not",
    )


def _amid_others(batch: StepBatch, alien_N: Array) -> int:
    """How many of the responses that no engine sampled share their group (or prompt) with one that was."""
    given_B, group_B = batch.flat.count(alien_N) > 0, batch.group_B
    if group_B is None:
        return 0
    return int(np.isin(group_B[given_B], group_B[~given_B]).sum())


def _pushed_down(batch: StepBatch, alien_N: Array) -> int:
    """How many of the responses that no engine sampled have a negative advantage on average."""
    column = batch.columns.of("advantages")
    if column is not None:
        known_N = alien_N & column.said_N & np.isfinite(column.values_N)
        return int((np.nan_to_num(batch.flat.mean(np.where(known_N, column.values_N, 0.0), known_N)) < 0).sum())
    advantage_B = batch.advantage_B
    return 0 if advantage_B is None else int((advantage_B[batch.flat.count(alien_N) > 0] < 0).sum())


def _share(rows: Array, batch: StepBatch) -> str:
    """How many samples these rows are, each counted once."""
    return share(len(rows) // passes(batch), len(batch) // passes(batch))


def _one_early(batch: StepBatch, alien_N: Array, rollout: Column) -> tuple[str, str] | None:
    """Whether the tokens are the first that count in their rows, whose last sampled ones do not."""
    trained_N = given(batch.trained_N)
    holders = np.flatnonzero(batch.flat.count(alien_N))
    starts, first_B, last_B = batch.flat.starts_B, batch.flat.first(trained_N), batch.flat.last(trained_N)
    behind = (starts + last_B + 1)[holders]
    inside = last_B[holders] + 1 < batch.flat.lengths_B[holders]
    if not inside.all() or not alien_N[(starts + first_B)[holders]].all() or alien_N.sum() != len(holders):
        return None
    if not (rollout.said_N[behind] & (np.nan_to_num(rollout.values_N[behind]) != 0)).all():
        return None
    return (
        f": in {_share(holders, batch)} rows the mask stands one token too early, with the last token of the "
        "prompt in it and the last sampled one (EOS) out of it",
        "the mask of these rows is made of another prompt length, or shifted as labels are where it is not to be: the "
        "end is never trained, and a token that was given is",
    )


def _given(batch: StepBatch, alien_N: Array, counted_N: Array) -> tuple[str, str]:
    """Where the tokens lie that were not sampled, as the rest of a claim, and who wrote them there."""
    holders = np.flatnonzero(batch.flat.count(alien_N))
    once = int(alien_N.sum()) == len(holders)
    at_N = np.flatnonzero(alien_N)
    ids = None if batch.tokens_N is None else np.unique(batch.tokens_N[at_N])
    last_B = batch.flat.last(counted_N)
    ends = once and bool((batch.flat.position_N[at_N] == last_B[batch.flat.sample_N[at_N]]).all())
    if ends and ids is not None and len(ids) == 1:
        longest = int(batch.flat.count(counted_N).max())
        full = bool((batch.flat.count(counted_N)[holders] == longest).all())
        return (
            f": the last of {_share(holders, batch)} responses, which is always {int(ids[0])}",
            f"an end token (EOS, {int(ids[0])}) is appended to responses that "
            + ("were cut off at the limit" if full else "did not end by themselves")
            + ", and trained on: the engine never sampled it there. Leave it out of the mask, or do not append it",
        )
    # Places from the end of what counts, sample by sample: a run of zeros that reaches it in each that holds one.
    left_N = last_B[batch.flat.sample_N[at_N]] - batch.flat.position_N[at_N]
    each = [np.sort(left_N[batch.flat.sample_N[at_N] == sample]) for sample in holders]
    ends_each = all(np.array_equal(one, np.arange(len(one))) for one in each)
    if ends_each and len(holders) >= 2:
        return (
            f": rollout log-probabilities are exactly 0 on the last tokens of {_share(holders, batch)} responses",
            "the engine's log-probabilities of the last tokens are missing and were filled with 0 (a list that is "
            "shorter than the response, padded with a placeholder; the last chunk of a stream that was not recorded); "
            "or tool output, or an end that was appended, is left in the loss mask: the engine was given these tokens",
        )
    # Places from the beginning of what counts: runs of several lengths are no header that all answers begin with.
    rank_N = np.cumsum(counted_N) - np.repeat((np.cumsum(counted_N) - counted_N)[batch.flat.starts_B],
                                              batch.flat.lengths_B)  # fmt: skip
    heads = [np.sort(rank_N[at_N[batch.flat.sample_N[at_N] == sample]]) for sample in holders]
    begins_each = all(np.array_equal(one, np.arange(1, len(one) + 1)) for one in heads)
    if begins_each and len(holders) < len(batch) and len({len(one) for one in heads}) > 1:
        return (
            f": rollout log-probabilities are exactly 0 on the first tokens of {_share(holders, batch)} responses, of "
            "some more and of some less",
            "what the engine said of the first part of these responses is lost: a rollout that was interrupted (an "
            "update of the weights, a limit of tokens) and continued keeps its tokens and loses their "
            "log-probabilities, or text that was given (a prefix to continue, an earlier turn) is in the loss mask",
        )
    first_B = batch.flat.first(counted_N)
    heads_N = alien_N & (batch.flat.position_N == np.repeat(first_B, batch.flat.lengths_B))
    runs = np.flatnonzero(alien_N & ~np.roll(alien_N, 1))
    if heads_N.sum() == len(holders) == len(runs) and len(holders) >= 0.8 * len(batch):
        return (
            ": the first of each response",
            "a part of the prompt, or what every answer is made to begin with (a forced <think>, a role's header), is "
            "in the loss mask: the engine was given these tokens",
        )
    sampled_B = np.repeat(batch.flat.first(counted_N & ~alien_N), batch.flat.lengths_B)
    if (batch.flat.position_N[at_N] > sampled_B[at_N]).all() and (sampled_B[at_N] >= 0).all():
        return (
            ": they stand inside of responses, between sampled ones",
            "tool output (what an environment wrote between the policy's turns) is left in the loss mask: the engine "
            "was given these tokens",
        )
    return "", "tool output or a part of the prompt is left in the loss mask: the engine was given these tokens"


#: Rows that begin late before it is no odd one, and the share of the rows past which it is a rule of the recipe.
LATE_ROWS, LATE_SHARE = 4, 0.5
#: Of all rows, those that begin at either token: others have nothing in the loss.
ALL_ROWS = 0.8


@rule("D41", "the first sampled token is left out in some rows", link="masks", scope="case",
      source="a mask made of another prompt length, or shifted in a part of the rows")  # fmt: skip
def begins_late(case: Case) -> Finding | None:
    """Rows whose mask begins at the second token that the engine sampled: its log-probability of the one before is not
    0. A warning where in each of a step's batches (half of the steps and more) 4 rows and more do, and at most half of
    them, while the others begin at the first. A forced beginning is in every row, and no engine gives it a number.
    """
    seen, found = 0, []
    for batch in case.batches():
        if not batch.has("rollout_logprobs") or batch.trained_N is None:
            continue
        seen += 1
        # What was sampled stands in the micro-batches once more.
        whole = [record for record in batch.columns.records if record.key.micro is None] or batch.columns.records
        grids = [both for record in whole if (both := _beginnings(record)) is not None]
        late_B, first_B = (np.concatenate(each) for each in zip(*grids, strict=True)) if grids else _begins(batch)
        if late_B.sum() >= LATE_ROWS and late_B.mean() <= LATE_SHARE and (late_B | first_B).mean() >= ALL_ROWS:
            found.append(
                (batch.step, np.flatnonzero(late_B), len(late_B), batch.laid.where(mask_name(batch), sample=0))
            )
    if not seen:
        raise Skip("needs a mask and the engine's log-probabilities")
    if 2 * len(found) < seen or not found:
        return None
    _, at, rows, place = found[0]
    every = np.unique(np.concatenate([np.diff(at) for _, at, _, _ in found]))
    return warning(
        f"the first sampled token is not in the loss in {share(len(at), rows)} rows, and in the others it is"
        + (f": one of every {int(every[0])}" if every.size == 1 and every[0] > 1 else ""),
        place,
        shown("rows whose mask begins at the second sampled token", len(at), "0"),
        shown("first of them", listed(at[:6])),
        shown("steps that show it", share(len(found), seen)),
        cause="the mask of these rows is made of another prompt length or shifted by one: how an answer begins is not "
        "trained there",
        steps=[step for step, *_ in found],
    )


def _beginnings(record: Record) -> tuple[Array, Array] | None:
    """Of a grid, rows whose mask begins at the second sampled token, and at the first [B]; None of others."""
    mask = next((ref for ref in record.tensors() if ref.canonical in ("response_mask", "loss_mask")), None)
    sampled = next((ref for ref in record.tensors() if ref.canonical == "rollout_logprobs"), None)
    if mask is None or sampled is None or mask.shape != sampled.shape or len(mask.shape) != 2:
        return None
    if not (mask.is_readable and sampled.is_readable and mask.numel):
        return None
    mask_BT, sampled_BT = pages.array(mask) != 0, np.nan_to_num(pages.array(sampled).astype(np.float64)) != 0
    known_B = mask_BT.any(axis=1) & sampled_BT.any(axis=1)
    by_B = mask_BT.argmax(axis=1) - sampled_BT.argmax(axis=1)
    return known_B & (by_B == 1), known_B & (by_B == 0)


def _begins(batch: StepBatch) -> tuple[Array, Array]:
    """The same of rows of prompt and response [B]."""
    rollout, trained_N = given(batch.columns.of("rollout_logprobs")), given(batch.trained_N)
    known_N = rollout.said_N & (np.nan_to_num(rollout.values_N) != 0)
    sampled_B, first_B = batch.flat.first(known_N), batch.flat.first(trained_N)
    known_B = (batch.flat.count(known_N) > 0) & (batch.flat.count(trained_N) > 0)
    return known_B & (first_B == sampled_B + 1), known_B & (first_B == sampled_B)


@rule("D77", "the mask is turned around", link="masks", scope="batch",
      needs=("rollout_logprobs", "mask", "response"), lasts=True,
      explains=("D07", "D09", "D10", "D11", "D12", "D14", "D19", "D20", "D24", "D28", "D41", "D48", "D92", "L08",
                "L10"),
      source="RAGEN#71: the gradient went to the environment's tokens and to none of the policy's")  # fmt: skip
def turned_around(batch: StepBatch) -> Finding | None:
    """All tokens in the loss (4 and more) have a rollout log-probability of exactly 0, which the engine fills in
    where it sampled nothing, and as many of the responses that are not in it have another: an error.
    """
    rollout, trained_N = given(batch.columns.of("rollout_logprobs")), given(batch.trained_N)
    known_N = rollout.said_N & np.isfinite(rollout.values_N)
    counted_N = known_N & trained_N
    left_N = known_N & ~trained_N & given(batch.response_N) & (rollout.values_N != 0)
    if counted_N.sum() < 4 or rollout.values_N[counted_N].any() or left_N.sum() < counted_N.sum():
        return None
    name = mask_name(batch)
    return error(
        f"the mask is inverted: the {int(counted_N.sum())} tokens in the loss are those that no engine sampled, and "
        "none that it sampled counts",
        batch.laid.where(name, at=counted_N),
        shown("sampled tokens in the loss", 0, "> 0", rollout.source),
        shown("sampled tokens that are left out", int(left_N.sum()), "0"),
        cause="1 and 0 are swapped: the mask of the environment's turns (tool output, states) is used as the loss mask",
    )
