"""Which tokens count in the loss: none, padding among them, or never the end of a response."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from replay_core import pages
from replay_core.diagnose.advantage_variants import made_with_all
from replay_core.diagnose.algorithm import filters_overlong
from replay_core.diagnose.batch import StepBatch, mask_name, passes
from replay_core.diagnose.case import Case
from replay_core.diagnose.columns import Column
from replay_core.diagnose.finding import Finding, Where, error, finding, info, listed, look_at, share, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.gap import gap
from replay_core.diagnose.log_steps import numbers, severity_of, steps_of, steps_told
from replay_core.diagnose.rule import Skip, given, rule, skip_if
from replay_core.diagnose.rules.tokens import truncated
from replay_core.diagnose.signals import Point, RunLog
from replay_core.records import Inline, Record, TensorRef
from replay_core.samples.batch import Batch

#: Of a response, the share that a mask may leave out at its end before it ends too early.
LEFT_OUT = 0.5


@rule("D07", "the loss has no tokens, or a part of them", link="masks", scope="batch", needs=("mask",),
      explains=("D01", "D02", "D03", "D19", "D21", "D23", "D28", "D81", "L01"),
      source="trl#3248, TTRL#33; docs/evidence.md#loss-of-zero")  # fmt: skip
def empty_loss(batch: StepBatch) -> Finding | None:
    """Tokens the mask keeps: none in the whole batch is an error, as is none in a micro-batch whose loss is NaN; none
    in some samples is a warning (info where just those were cut off, which trainers filter on purpose; an error where
    just those were not, 2 and more of either): where
    advantages are recomputed and only fit with the rewards of those, that they still enter the baseline is said. A mask
    that ends before the middle of most responses, or counts more tokens than `response_length`, is a warning. So are
    samples of some ranks that are all left out, and none of the others'. Holes inside a response are
    normal (tool output).
    """
    trained_N = given(batch.trained_N)
    skip_if(not batch.flat.lengths_B.sum(), "samples have no tokens")
    counts_B = batch.flat.count(trained_N)
    name = mask_name(batch)
    column = batch.columns.of(name)
    source = column.source if column else None
    empty_B = counts_B == 0
    place = batch.laid.where(name, sample=int(np.flatnonzero(empty_B)[0]) if empty_B.any() else 0)
    if empty_B.all():
        return error(
            "the mask keeps no token: the loss is 0 whatever the policy does",
            place,
            shown("tokens in the loss", 0, "> 0", source),
            shown("samples", len(batch)),
            cause="the mask is built for another length than the logits, or every sample was filtered out",
        )
    if (divided := _divided_by_none(batch, counts_B)) is not None:
        return divided
    if empty_B.any():
        cut_B = truncated(batch)
        # A trainer that masks them out of its attention too leaves no response to measure, only ids.
        cut_B = _unheard_B(batch) if cut_B is None else cut_B | _unheard_B(batch)
        if min(empty_B.sum(), (~empty_B).sum()) >= 2 and (cut_B == ~empty_B).all():
            return error(
                "the filter of cut-off responses is turned around: it masks the complete ones and leaves those that "
                f"were cut off in the loss, all {int(cut_B.sum())} of them",
                place,
                shown("complete responses in the loss", 0, str(int(empty_B.sum())), source),
                shown("cut-off responses in the loss", share(int(cut_B.sum()), int(cut_B.sum())), "none"),
                cause="the condition of the overlong filter (mask_truncated_completions) is negated, or is_truncated "
                "is read as is_finished: what is trained on never ends",
            )
        on_purpose = bool(cut_B[empty_B].all()) and not bool(cut_B[~empty_B].any())
        on_purpose = on_purpose or (filters_overlong(batch.laid.algorithm) and _are_long(batch, empty_B))
        if not on_purpose and _are_copies(batch, empty_B):
            return info(
                f"{share(int(empty_B.sum()), len(batch))} samples have no token in the loss: copies of others that "
                "fill the batch up",
                place,
                shown("samples without a counted token", int(empty_B.sum()), "0", source),
                cause="a batch is filled up with copies to a size that ranks or micro-batches divide: they are masked",
            )
        with_them = None if on_purpose or _dropped(batch, empty_B) else made_with_all(batch, empty_B)
        if with_them is not None and not _is_pattern(empty_B):
            return warning(
                "responses that are masked as a whole still enter their group's mean and std: "
                f"{share(int(empty_B.sum()), len(batch))} samples have no token in the loss, and advantages of the "
                "others are made with their rewards",
                place,
                shown("samples without a counted token", int(empty_B.sum()), "0", source),
                shown("advantages of the others, all rows in their groups", with_them),
                shown("advantages of the others, without those rows", "no known variant"),
                cause="they were rejected (a filter, a quality check, an environment that failed) by their mask alone: "
                "the baseline is of answers that are not trained on, and a group's advantages no longer add up to 0. "
                "Leave them out of the group as well; where nothing was rejected on purpose, the mask is wrong",
            )
        if (ranks := _of_ranks(batch, empty_B)) is not None:
            named = f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"
            return warning(
                f"{named} trains on nothing: all of its samples, {share(int(empty_B.sum()), len(batch))}, have no "
                "token in the loss, and all of the other ranks' have",
                place,
                shown("samples without a counted token", int(empty_B.sum()), "0", source),
                shown("ranks they are of", listed(ranks), "none"),
                cause="the mask of that rank is emptied: it is made of another rank's rows, or of another part of the "
                "sequence, or is left at 0 where the batch is handed out; its gradients are 0, and still counted in "
                "the mean over ranks",
            )
        return finding(
            "info" if on_purpose or _dropped(batch, empty_B) else "warning",
            f"{share(int(empty_B.sum()), len(batch))} samples have no token in the loss"
            + (": those that were cut off" if on_purpose else _in_a_pattern(empty_B)),
            place,
            shown("samples without a counted token", int(empty_B.sum()), "0", source),
            cause="cut-off responses are masked (mask_truncated_completions, overlong filtering)"
            if on_purpose
            else _why_empty(batch, empty_B),
        )
    return _ends_early(batch, trained_N, counts_B, name, source)


def _are_copies(batch: StepBatch, empty_B: Array) -> bool:
    """Whether each of these rows has the tokens of a row that counts, and they stand at the end (verl's and SkyRL's
    padding to the number of ranks).
    """
    tokens_N = batch.tokens_N
    if tokens_N is None or empty_B[: int(np.argmax(empty_B))].any() or not empty_B[int(np.argmax(empty_B)) :].all():
        return False
    rows = [tokens_N[span].tobytes() for span in batch.flat.spans]
    return {row for row, empty in zip(rows, empty_B, strict=True) if empty} <= {
        row for row, empty in zip(rows, empty_B, strict=True) if not empty
    }


def _are_long(batch: StepBatch, empty_B: Array) -> bool:
    """Whether each of these responses is longer than most of the others: an agent is cut off by its turns as well, and
    before the limit where what comes next would not fit.
    """
    response_N = batch.response_N
    lengths_B = batch.flat.lengths_B if response_N is None else batch.flat.count(response_N)
    return bool(lengths_B[empty_B].min() > np.median(lengths_B[~empty_B])) if not empty_B.all() else False


#: Samples of a rank that are all left out, before it is the rank.
OF_A_RANK = 3


def _of_ranks(batch: StepBatch, empty_B: Array) -> list[int] | None:
    """The ranks whose samples have no token in the loss, where those of all other ranks have; else None."""
    rows = batch.laid.rows_by_micro()
    held: dict[int, list[int]] = {}
    for (rank, _), samples in rows.items():
        if rank is not None:
            held.setdefault(rank, []).extend(samples)
    if len(held) < 2 or sum(map(len, held.values())) != len(batch):
        return None
    shares = {rank: float(empty_B[samples].mean()) for rank, samples in held.items() if samples}
    bare = sorted(rank for rank, part in shares.items() if part == 1)
    if not bare or set(shares.values()) != {0.0, 1.0} or min(len(held[rank]) for rank in bare) < OF_A_RANK:
        return None
    return bare


def _divided_by_none(batch: StepBatch, counts_B: Array) -> Finding | None:
    """A micro-batch without a token in the loss whose loss is no number."""
    rows = batch.laid.rows_by_micro()
    for scalar in batch.columns.scalars("pg_loss", "loss"):
        samples = rows.get(scalar.place)
        if not samples or np.isfinite(scalar.value):
            continue
        # The micro-batch's own mask may have lost what the rollout's keeps.
        own = [
            ref for record in batch.columns.records
            if (record.key.rank, record.key.micro) == scalar.place for ref in record.tensors()
            if ref.canonical in ("loss_mask", "response_mask") and ref.is_readable
        ]  # fmt: skip
        if counts_B[samples].any() and not any(not pages.array(ref).any() for ref in own):
            continue
        # A metric may be 0/0 where the loss that is differentiated is not.
        is_taught = any(
            np.isfinite(other.value) for other in batch.columns.scalars("loss", "grad_norm")
            if other.place == scalar.place
        )  # fmt: skip
        return finding(
            "warning" if is_taught else "error",
            f"a micro-batch has no token in the loss, and divides by it: {scalar.name} is 0/0 (NaN) where the mask of "
            f"all {len(samples)} samples is empty",
            batch.laid.where_record(scalar.record, scalar.name),
            shown("tokens of the micro-batch in the loss", 0, "> 0", scalar.record.path.name),
            shown(scalar.name, str(scalar.value), "a number"),
            cause="the mean over no token is 0/0: leave such a micro-batch out, divide by max(tokens, 1), or by the "
            "tokens of the whole update; and see why its samples were masked",
        )
    return None


def _is_pattern(empty_B: Array) -> bool:
    """Whether the rows without a token lie in a pattern (every second, one half): an index made it, not a filter."""
    at = np.flatnonzero(empty_B)
    steps = np.unique(np.diff(at))
    return len(at) > 2 and steps.size == 1


def _in_a_pattern(empty_B: Array) -> str:
    """What it adds that these rows are as far from each other."""
    if not _is_pattern(empty_B):
        return ""
    apart = int(np.diff(np.flatnonzero(empty_B))[0])
    if apart == 1:
        return ", side by side"
    return f", every {apart}{'nd' if apart == 2 else 'rd' if apart == 3 else 'th'} row"


def _why_empty(batch: StepBatch, empty_B: Array) -> str:
    """Why samples have no token in the loss: their lengths tell whether a limit cut the mask, their rows an index."""
    long_B = batch.flat.lengths_B
    if min(empty_B.sum(), (~empty_B).sum()) >= 2 and long_B[empty_B].min() >= long_B[~empty_B].max():
        return "the mask is cut at a length that these samples' prompts alone fill: they are the longest ones"
    if _is_pattern(empty_B):
        return (
            "an index leaves them out, since their rows follow a pattern and their lengths do not: a stride or a slice "
            "of the batch, a mask that is laid over it in another order of rows. They were sampled and rewarded, and "
            "teach nothing"
        )
    return (
        "a filter or an environment rejected them by their mask and says so nowhere, or the mask lies at another place "
        "than the tokens (another row, another part of the sequence). Which: look whether the rows it keeps begin and "
        "end where the response does"
    )


def _dropped(batch: StepBatch, empty_B: Array) -> bool:
    """Whether the trainer itself says that it left just these samples out."""
    for name, wanted in (("sample_mask", True), ("remove_sample", False)):
        kept_B = batch.columns.per_sample(name)
        if kept_B is not None:
            return bool((((kept_B != 0) == wanted) == ~empty_B).all())
    return False


def _ends_early(batch: StepBatch, trained_N: Array, counts_B: Array, name: str, source: str | None) -> Finding | None:
    stated_B = batch.columns.per_sample("response_length")
    place = batch.laid.where(name, sample=0)
    if stated_B is not None and (counts_B > stated_B).any():
        worst = int((counts_B - stated_B).argmax())
        return warning(
            f"the mask counts more tokens than the response has in {int((counts_B > stated_B).sum())} samples",
            batch.laid.where(name, sample=worst),
            shown("tokens in the loss", int(counts_B[worst]), f"<= {int(stated_B[worst])}", source),
            cause="the mask covers prompt or padding, or lies shifted against the tokens",
            next_step=look_at(place),
        )
    if batch.response_N is None:
        return None
    # Where the mask says what a sample holds, its end is cut off of it too, and stands behind it.
    beyond_B = np.array([int((tail != batch.pad_id).sum()) for tail in _tails(batch)], dtype=np.int64)
    response_B = batch.flat.count(batch.response_N) + beyond_B
    after_B = batch.flat.lengths_B - 1 - batch.flat.last(trained_N) + beyond_B
    early_B = (response_B >= 4) & (after_B > LEFT_OUT * response_B)
    if _last_id(batch, trained_N, early_B) is not None:
        return None  # behind one and the same token in all of them: it is their end
    if batch.name and early_B.mean() >= 0.8 and (counts_B[early_B] == counts_B[early_B][0]).all() and len(batch) >= 4:
        return finding(
            "error" if counts_B[early_B][0] <= 1 else "warning",
            f"the mask ends after {int(counts_B[early_B][0])} tokens of every response, however long it is",
            place,
            shown(
                "tokens in the loss of each sample",
                int(counts_B[early_B][0]),
                "as many as the response has",
                source,
            ),
            shown("mean response length", float(response_B.mean())),
            cause="mask and logits have different lengths, and both were cut to the shorter",
        )
    return None


def _last_id(batch: StepBatch, chosen_N: Array, of_B: Array) -> int | None:
    """The id of these samples' last chosen token, where it is one and the same in all of them, of two and more."""
    last_B = batch.flat.last(chosen_N)
    at_B = (batch.flat.starts_B + last_B)[of_B & (last_B >= 0)]
    ids = set() if batch.tokens_N is None else {int(id) for id in batch.tokens_N[at_B]}
    return ids.pop() if len(ids) == 1 and at_B.size >= 2 else None


@rule("D07", "logits and mask lengths disagree", link="masks", scope="case", source="docs/evidence.md#loss-of-zero")
def lengths_disagree(case: Case) -> Iterator[Finding]:
    """Captured samples with masked positions beside a log whose loss counted none (`num_masked` 0).

    The fallback cut completions and mask to length 1, so what counts is position 0 alone: micros whose
    position 0 is masked have a loss, all others 0.0000. Skipped without both a capture and its log.
    """
    captures = [record for record in case.records() if not record.is_flat and _masked_at(record)]
    logs = [record for record in case.records() if captures and _counted(record) is not None]
    if not captures or not logs:
        raise Skip("needs captured samples (masked tokens and completions) and the log of the same run")
    masks = _masked_at(captures[0])
    for path in sorted({record.path for record in logs}):
        mine = sorted((record for record in logs if record.path == path), key=lambda record: record.key.order)
        if len(mine) != len(masks):
            continue
        silent = [number for number, record in enumerate(mine) if _counted(record) == 0]
        if not silent or any(not masks[number][0] for number in silent):
            continue
        explained = sum((_counted(record) == 0) != masks[number][1] for number, record in enumerate(mine))
        yield error(
            "logits/mask lengths disagree: masked-position count 0 while masks exist",
            None,
            shown("micros whose loss counted no position", len(silent), "0", path.name),
            shown("masked positions captured in the first of them", masks[silent[0]][0], None, captures[0].path.name),
            shown("micros explained by position 0 alone", share(explained, len(mine))),
            cause="the forward returned logits of the last position only, and completions and mask "
            "were cut to length 1",
            next_step="rldbg show " + str(captures[0].path) + f" sample.{silent[0]}.tokens",
            steps=tuple(sorted({mine[number].key.step or 0 for number in silent})),
        )


def _masked_at(record: Record) -> list[tuple[int, bool]]:
    """Of every captured sample: masked positions of its first row, and whether position 0 is one."""

    found = []
    number = 0
    while record.get(f"sample.{number}.tokens") is not None and record.get(f"sample.{number}.completions") is not None:
        tokens, filled = given(record.get(f"sample.{number}.tokens")), given(record.get(f"sample.{number}.completions"))
        masked_BS = pages.array(tokens) != pages.array(filled)
        found.append((int(masked_BS[0].sum()), bool(masked_BS[:, 0].any())))
        number += 1
    return found


def _counted(record: Record) -> float | None:
    """Positions a logged micro-batch's loss counted: 0 where the log warns so, 1 where it has a loss; None else."""
    if record.key.stage != "loss" or record.get("pg_loss") is None:
        return None
    ref = record.get("num_masked") or record.get("metrics.num_masked")
    if ref is not None and isinstance(ref.source, Inline):
        return float(ref.source.value)
    return 1.0


@rule("D07", "no token counts", link="masks", scope="signals",
      needs=("num_masked|masks_in_input|grad_norm|event:warning",),
      source="trl#3248; docs/evidence.md#grpo-notes")  # fmt: skip
def no_token_counts(log: RunLog) -> Iterator[Finding]:
    """No token of a micro-batch counts in the loss: it is an empty sum.

    num_masked = 0 while the input holds masks (its own count; else other micro-batches of the run that do train) is a
    lost mask: logits and mask had different lengths and both were cut to the shorter. Without any mask in the input it
    is the data. A gradient of 0 in a step whose completions are all cut is mask_truncated_completions. Rewards that
    differ rule out D01. So is a gradient, loss and entropy of exactly 0 in half of the steps and more: the mean entropy
    over tokens that count is never 0.
    """
    lost = [point for point in log.micros("num_masked") if point.value == 0]
    none = log.warnings("No masks in batch", "No masked positions")
    empty = [point for point in log.micros("masks_in_input") if point.value == 0]
    if lost:
        yield _lost_mask(log, lost)
    if none or (empty and not lost):
        points = [told.point for told in none] or empty
        warned = [shown("warning", told.text[:120], None, f"line {told.point.line}") for told in none[:1]]
        yield error(
            "the batch holds no masked position: nothing is trained on",
            points[0].where("masks_in_X"),
            *(warned or [shown("masks_in_X", 0.0, "> 0", f"line {points[0].line}")]),
            cause="the data mask nothing: mask token, mask probability or dataset are not what the trainer expects",
            next_step="look at one batch of the data; rldbg record -- YOUR COMMAND",
            steps=steps_of(points),
        )
    known = [step for step in steps_told(log) if step.grad is not None and step.is_dead is not None]
    uncut = [step for step in known if step.grad == 0 and not step.is_dead and not step.is_cut]
    entropy = log.get("entropy")
    silent = {point.step for point in entropy.points if point.value == 0} if entropy is not None else set()
    # A mean over counted tokens that is never 0 is 0: there are none.
    none_counts = [step for step in uncut if step.step in silent and not step.loss]
    if none_counts and entropy is not None and 2 * len(none_counts) >= len(known):
        yield error(
            f"no token counts in the loss: {entropy.name}, a mean over counted tokens, is exactly 0 with loss and "
            f"gradient",
            none_counts[0].point.where(entropy.name),
            entropy.shown(0.0, "> 0"),
            *numbers(grad_norm=0.0, loss=none_counts[0].loss),
            cause="the loss mask is all 0: it is of another shape or meaning (padding for response), is cut off, or is "
            "multiplied away; rewards differ within groups, so that advantages are not the reason",
            next_step="rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump --rule D07",
            steps=steps_of(none_counts),
        )
    cut = [step for step in known if step.grad == 0 and not step.is_dead and step.is_cut]
    if cut:
        first = cut[0]
        yield finding(
            severity_of(len(cut), len(known)),
            "every completion is cut, and no gradient is left",
            first.point.where("grad_norm"),
            *numbers(truncated=first.truncated, grad_norm=0.0, loss=first.loss, reward_std=first.group_std),
            cause="truncated completions are masked out (mask_truncated_completions): no token is trained",
            next_step="raise the limit of tokens, or train on truncated completions",
            steps=steps_of(cut),
        )


def _lost_mask(log: RunLog, lost: list[Point]) -> Finding:
    """Micro-batches whose loss counted no position: whether masks exist says why."""
    inputs, losses, stds = (
        {point.place: point for point in log.micros(name)} for name in ("masks_in_input", "pg_loss", "reward_std")
    )
    places = {point.place for point in lost}
    elsewhere = [point for place, point in losses.items() if point.value != 0 and place not in places]
    first = lost[0]
    count = inputs.get(first.place)
    exist = count.value > 0 if count is not None else bool(elsewhere)
    evidence = [shown("num_masked", 0.0, "> 0", f"line {first.line}")]
    if count is not None:
        evidence.append(shown("masks_in_X", count.value, None, f"line {count.line}"))
    elif elsewhere:
        evidence.append(shown("micro-batches whose masks count", len(elsewhere), None, f"line {elsewhere[0].line}"))
    for name, said, expected in (("reward std", stds, "not the cause"), ("pg_loss", losses, None)):
        if first.place in said:
            evidence.append(shown(name, said[first.place].value, expected, f"line {said[first.place].line}"))
    evidence.append(shown("micro-batches", share(len(lost), max(len(losses), len(lost))), None, "log"))
    return error(
        "logits/mask lengths disagree: masked-position count 0 while masks exist"
        if exist
        else "masked-position count 0: no token counts in the loss",
        first.where("num_masked"),
        *evidence,
        cause="the forward pass returns logits of the last position only (no targets given), and a fallback cuts "
        "completions and mask to that length: the loss is 0 unless position 0 is masked"
        if exist
        else "the input holds no masked position, or the mask is cut to the length of the logits; the log does not "
        "say how many masks the input holds",
        next_step="print logits.shape beside mask.shape before the loss: they must agree in length; "
        "rldbg record -- YOUR COMMAND shows both",
        steps=steps_of(lost),
    )


@rule("D48", "the mask is shifted", link="masks", scope="batch", needs=("tokens", "mask", "response"),
      explains=("D07", "D09", "D17", "D18", "D19", "D20", "D28", "D41"), lasts=True,
      source="verl#3562: a mask about the token at its index beside log-probabilities of the next")  # fmt: skip
def mask_shifted(batch: StepBatch) -> Finding | None:
    """How many tokens after the response's first one the mask begins, the same in nine of ten samples (4 and more) and
    not 0: an error where it also ends as many later (in padding) or counts the prompt, a warning where the first
    tokens of every response are left out although the engine sampled them.
    """
    trained_N, response_N = given(batch.trained_N), given(batch.response_N)
    name = mask_name(batch)
    rollout = batch.columns.of("rollout_logprobs")
    heard_B = batch.flat.count(trained_N) > 0
    skip_if(heard_B.sum() < 4, "needs four samples with a token in the loss")
    late_B = (batch.flat.first(trained_N) - batch.flat.first(response_N) + _left_out_B(batch))[heard_B]
    by, most = _commonest(late_B)
    if not by and rollout is not None and _begins(batch, rollout) is not None:
        # Where only the mask says what is response, the engine does, too: it sampled what it gives a number.
        late_B = (batch.flat.first(trained_N) - given(_begins(batch, rollout)))[heard_B]
        by, most = _commonest(late_B)
        # From its second token on a row is all the engine's: it gives the prompt's tokens numbers, too.
        inside = bool((given(_begins(batch, rollout)) > 1).all())
        if 0 < by <= 8 and most >= 0.9 and inside and _stray(batch, name) is None:
            return _begins_late(batch, by, late_B, name)
        by = by if _stray(batch, name) is not None else 0
    if not by or abs(by) > 8 or most < 0.9:
        return None
    ends_late = _stray(batch, name) is not None or bool(_left_out_B(batch).any())
    beyond_N = _padding_held_N(batch)
    ends_late = ends_late or (beyond_N is not None and bool((beyond_N & trained_N).any()))
    if by > 0 and not ends_late:
        head_B = batch.flat.first(response_N) + by
        first_N = response_N & (batch.flat.position_N < np.repeat(head_B, batch.flat.lengths_B))
        sampled_N = first_N if rollout is None else first_N & rollout.said_N & (rollout.values_N != 0)
        if rollout is None or sampled_N.sum() < 0.9 * first_N.sum():
            return None  # a beginning that the engine was given
    column = batch.columns.of(name)
    places, side = f"{abs(by)} token{'s' * (abs(by) > 1)}", "late" if by > 0 else "early"
    those = share(int((late_B == by).sum()), int(heard_B.sum()))
    return finding(
        "error" if by < 0 or ends_late else "warning",
        f"the mask is shifted by {by:+d}: it begins {places} {side} in {those} samples",
        batch.laid.where(name, sample=heard_B),
        shown("first counted token - first token of the response", by, "0", column.source if column else None),
        shown("the mask reaches beyond the response", ends_late),
        cause="mask and tokens are about different places: one is about the token at its index, the other about the "
        "next (a roll or a slice is off by one)",
    )


def _commonest(values_B: Array) -> tuple[int, float]:
    """The commonest of these numbers, and its share."""
    each, counts = np.unique(values_B, return_counts=True)
    return int(each[counts.argmax()]), float(counts.max() / len(values_B))


def _begins_late(batch: StepBatch, by: int, late_B: Array, name: str) -> Finding:
    column = batch.columns.of(name)
    return warning(
        f"the mask is shifted by {by:+d}: it begins {by} token{'s' * (by > 1)} late in "
        f"{share(int((late_B == by).sum()), len(late_B))} samples, and leaves out what the engine sampled first",
        batch.laid.where(name, sample=0),
        shown("first counted token - first sampled token", by, "0", column.source if column else None),
        cause="labels and log-probabilities are about different places (a slice is off by one): the first token of "
        "every response is never trained",
    )


def _begins(batch: StepBatch, rollout: Column) -> Array | None:
    """The first token of each sample that the engine gives a number, None where it gives prompts one, too, or where its
    numbers lie beside the trainer's.
    """
    first_B = batch.flat.first(rollout.said_N & (rollout.values_N != 0))
    if not first_B.all() or batch.trainer is None:
        return None
    try:
        return None if gap(batch).is_shifted else first_B
    except Skip:
        return None


def _left_out_B(batch: StepBatch) -> Array:
    """Slots between prompt and response that hold no token [B]: a mask that says what a sample holds begins late."""
    found = np.zeros(len(batch), dtype=np.int64)
    heads_B = batch.flat.first(given(batch.response_N))
    for sample, (part, row) in enumerate(batch.spine.index):
        layout, whole = batch.spine.parts[part].layout, batch.flat.lengths_B[sample]
        if layout is None or batch.spine.parts[part].width is None or not 0 < heads_B[sample] < whole:
            continue
        at = np.flatnonzero(layout.sample_BS[row] >= 0)
        if at.size == whole:
            found[sample] = at[heads_B[sample]] - at[heads_B[sample] - 1] - 1
    return found


@rule("D58", "prompt tokens are in the loss", link="masks", scope="batch", needs=("tokens", "mask", "response"),
      explains=("D07", "D09", "D14", "D17", "D18", "D19", "D28", "D41", "D44", "D48", "D79", "D80", "D92"), lasts=True,
      source="a loss mask made of the attention mask")  # fmt: skip
def prompt_trained(batch: StepBatch) -> Finding | None:
    """Tokens that count before the response begins: an error where they are half of the prompt and more in four of five
    samples. Where a response begins something other than the mask says: the layout, or, where the mask counts from the
    first or second token on, the first number of the engine. Where neither does, an error if the mask counts from there
    on in every sample and what the answers of each group (2 and more that differ) have in common is 2 tokens and more
    on average, and another in each group: a prompt.
    """
    trained_N, response_N = given(batch.trained_N), given(batch.response_N)
    if (shared := _prompts_shared(batch)) is not None:
        name = mask_name(batch)
        return error(
            f"prompt tokens are in the loss: the mask counts from each sample's first tokens on, and {min(shared)} "
            "tokens and more there are the same in all answers of a group",
            batch.laid.where(name, sample=0),
            shown("tokens that all answers of a group begin with", min(shared), "0 that count", name),
            shown("groups", len(shared)), shown("tokens in the mask", int(trained_N.sum())),
            cause="the loss mask is the attention mask, or is not multiplied by the response's",
        )  # fmt: skip
    prompt_B = batch.flat.count(~response_N)
    counted_B = batch.flat.count(trained_N & ~response_N)
    heard_B = prompt_B > 1
    # The first token of all has no log-probability, and no mask of next tokens counts it.
    bad_B = heard_B & (2 * counted_B >= prompt_B - 1) & (counted_B > 0)
    if not heard_B.any() or bad_B.sum() < 0.8 * heard_B.sum():
        return None
    name = mask_name(batch)
    return error(
        f"prompt tokens are in the loss: {int(counted_B.sum())} of them count, in "
        f"{share(int(bad_B.sum()), len(batch))} samples",
        batch.laid.where(name, at=trained_N & ~response_N),
        shown("prompt tokens in the mask", int(counted_B.sum()), "0", f"{name} of {batch.name}"),
        shown("tokens in the mask", int(trained_N.sum())),
        cause="the loss mask is the attention mask, or is not multiplied by the response's",
    )


#: Tokens that answers of every group do not share by chance, on average, and groups that tell.
SHARED, GROUPS = 2, 2


def _prompts_shared(batch: StepBatch) -> list[int] | None:
    """How many counted tokens all answers of each group begin with, where they can be nothing but prompts."""
    tokens_N, response_N, group_B = batch.tokens_N, batch.response_N, batch.group_B
    trained_N = given(batch.trained_N)
    if tokens_N is None or response_N is None or group_B is None or not batch.group_is_named:
        return None
    if (batch.flat.first(trained_N) > 1).any() or (batch.flat.first(response_N) > 1).any():
        return None
    rows = [tokens_N[span] for span in batch.flat.spans]
    heads, found = set(), []
    for group in np.unique(group_B):
        mine = [rows[sample] for sample in np.flatnonzero(group_B == group)]
        if len({row.tobytes() for row in mine}) < 2:
            return None
        width = min(map(len, mine))
        same = np.all([row[:width] == mine[0][:width] for row in mine], axis=0)
        shared = width if same.all() else int(same.argmin())
        if shared < 2:
            return None
        heads.add(mine[0][:shared].tobytes())
        found.append(shared - 1)
    told = len(found) >= GROUPS and len(heads) == len(found) and np.mean(found) >= SHARED
    return found if told else None


@rule("D18", "padding counts in the loss", link="masks", scope="batch", needs=("mask",),
      explains=("D07", "D09", "D14", "D17", "D19", "D24", "D28", "D41", "D78"), lasts=True,
      source="a mask built from the padded length; it dilutes every mean and leaves mismatch figures "
      "unchanged")  # fmt: skip
def padding_trained(batch: StepBatch) -> Finding | None:
    """Mask entries set where attention_mask holds no token, or on pad ids after a response has ended. Any is an error;
    a warning where they are less than a hundredth, between tokens that are attended to: the policy sampled the pad id.

    Where the pad id is also the end token, the first one of a response counts as its end.
    """
    for name in ("loss_mask", "response_mask"):
        stray = _stray(batch, name)
        if stray is not None:
            count, sample, is_hole = stray
            return _padding(batch, count, batch.laid.where(name, sample=sample), name, is_hole=is_hole)
    if batch.tokens_N is None:
        return None
    beyond_N = _padding_held_N(batch)
    trained_N = batch.trained_N
    if beyond_N is None or trained_N is None:
        return None
    bad_N = beyond_N & trained_N
    if bad_N.any():
        name = mask_name(batch)
        return _padding(batch, int(bad_N.sum()), batch.laid.where(name, at=bad_N), name)
    return None


#: Share of the counted tokens that a policy may come to sample of an id that it has no use for.
RARE = 0.01


def _padding(batch: StepBatch, count: int, place: Where, name: str, *, is_hole: bool = False) -> Finding:
    trained_N = given(batch.trained_N)
    if not is_hole and (moved := _of_another_row(batch, name)) is not None:
        whose, rows, lost = moved
        return error(
            f"the mask is another row's: each row has that of the row {whose}, so that {count} padding "
            f"token{' is' if count == 1 else 's are'} in the loss and {lost} of the responses' own are not",
            place,
            shown("rows whose mask is as long as the response of the row " + whose, share(rows, len(batch))),
            shown("padding tokens in the mask", count, "0", f"{name} and attention_mask of {batch.name}"),
            shown("tokens of responses outside of it", lost, "0"),
            cause="the mask was rolled, sorted or gathered in another order than the tokens: it ends too early in some "
            "rows and reaches into padding in others",
        )
    return finding(
        "warning" if is_hole and count < RARE * int(trained_N.sum()) else "error",
        f"{count} padding token{' is' if count == 1 else 's are'} in the loss",
        place,
        shown("padding tokens in the mask", count, "0", f"{name} and attention_mask of {batch.name}"),
        shown("tokens in the mask", int(trained_N.sum())),
        cause="attention_mask is 0 between tokens that are attended to: it is made of the ids (ids != pad), and the "
        "policy sampled that id; such a token is trained on and nobody sees it"
        if is_hole
        else "the mask is made from the padded length, not from where the response ends",
    )


#: Rows whose masks have other lengths than their own responses, before another row's are no chance.
MOVED_ROWS = 6


def _of_another_row(batch: StepBatch, name: str) -> tuple[str, int, int] | None:
    """(which row's, rows, tokens lost) where every row of a grid is masked as long as the response of the row beside
    it is, and not as its own.
    """
    for sheet, _ in batch.columns.sheets:
        masks, attended = sheet.refs(name), sheet.refs("attention_mask")
        if not masks or not attended or any(len(ref.shape) != 2 for ref in (*masks, *attended)):
            continue
        grids = [(pages.array(m) != 0, pages.array(a) != 0) for m, a in zip(masks, attended, strict=True)]
        if any(len(m) != len(a) or m.shape[1] > a.shape[1] for m, a in grids):
            return None
        counts_B = np.concatenate([m.sum(1) for m, _ in grids])
        if any(m.shape[1] == a.shape[1] for m, a in grids):
            return None  # of whole rows, whose prompts it cannot tell
        own_B = np.concatenate([a[:, a.shape[1] - m.shape[1] :].sum(1) for m, a in grids])
        lost = sum(int((a[:, a.shape[1] - m.shape[1] :] & ~m).sum()) for m, a in grids)
        other_B = counts_B != own_B
        for by, whose in ((1, "before"), (-1, "after")):
            if other_B.sum() >= MOVED_ROWS and (counts_B == np.roll(own_B, by)).all():
                return whose, int(other_B.sum()), lost
    return None


def _stray(batch: StepBatch, name: str) -> tuple[int, int, bool] | None:
    """(entries, sample, whether that one has tokens on both sides of empty slots) of a mask set where the batch holds
    no token.
    """
    for sheet, places in batch.columns.sheets:
        total, first, is_hole = 0, None, False
        for number, part in enumerate(sheet.parts):
            ref = part.held.find(name)
            found = None if ref is None or not part.padding_known else _outside(part, ref)
            if found is None:
                continue
            total += found[0]
            if first is None:
                row = sheet.index.index((number, found[1]))
                first = places.index(row) if row in places else 0
                held = np.flatnonzero(part.layout.sample_BS[found[1]] >= 0) if part.layout is not None else np.arange(0)
                is_hole = held.size > 0 and held[-1] - held[0] + 1 > held.size
        if first is not None:
            return total, first, bool(is_hole)
    return None


@rule("D19", "the end of a response is never trained", link="masks", scope="batch", needs=("tokens", "mask"),
      explains=("D20", "D07"), lasts=True,
      source="verl#3562, trl#2708: the mask is shifted, or pad and end token share an id")  # fmt: skip
def end_untrained(batch: StepBatch) -> Finding | None:
    """End tokens in responses, and how many of them the mask keeps. None of them (of at least 2) is an error.

    Also where the mask cut the end token out of the attended tokens: then it stands in the column just after them, or
    (of rows whose padding nothing tells) alone between the mask and a run of another id. No finding where all these
    masks end with one and the same id: that is the end, and what follows is the chat template's (a newline).

    And where the engine says of responses (16 and more) that they stopped by themselves, and no id ends half of them:
    what they stopped at is not there. Or where the trainer itself says that the pad id is what ends them: it gives it
    the slot after the last token with a probability over 1/2 in half of the rows that have one (8 and more), and no
    token that counts has that id; not where masks end in four ids at the most, which are what the engine
    stops at, and it has no log-probability of a token there.
    """
    tokens_N, response_N, trained_N, eos = given(batch.tokens_N), batch.response_N, given(batch.trained_N), batch.eos_id
    name = mask_name(batch)
    if eos is not None and response_N is not None:
        ends_N = response_N & (tokens_N == eos)
        heard_B = batch.flat.count(trained_N) > 0
        ends_N &= np.repeat(heard_B, batch.flat.lengths_B)
        count, kept = int(ends_N.sum()), int((ends_N & trained_N).sum())
        # What follows the token that ends every mask is padding that nothing tells, or the template's.
        follows = _ends_before(batch, trained_N, np.flatnonzero(batch.flat.count(ends_N)), eos)
        if count >= 2 and not kept and not follows:
            return _untrained(batch, eos, count, batch.laid.where(name, at=ends_N))
        if count:
            return None
    beyond = [after for after in _after_B(batch) if after is not None and after != batch.pad_id]
    if len(beyond) >= 2 and len(set(beyond)) == 1 and trained_N.any():
        holders = [number for number, after in enumerate(_after_B(batch)) if after == beyond[0]]
        if _ends_before(batch, trained_N, np.array(holders), beyond[0]):
            return None
        sample = holders[0]
        return _untrained(batch, beyond[0], len(beyond), batch.laid.where(name, sample=sample))
    if (told := _end_before_padding(batch, trained_N)) is not None:
        return _untrained(batch, *told[:2], batch.laid.where(name, at=told[2]))
    if (padded := _padded_with_end(batch, trained_N)) is not None:
        return padded
    if response_N is not None and (stripped := _stopped_at_nothing(batch, response_N)) is not None:
        return stripped
    if eos is None:
        raise Skip("no end token can be told: no response ends before the longest does, and nothing says which stopped")
    return None


#: Responses that the engine says stopped, before their last tokens tell whether the end is one of them.
STOPPED = 16
#: So many ends a model may have: Llama 3.1 has three.
ENDS = 4


def _stopped_at_nothing(batch: StepBatch, response_N: Array) -> Finding | None:
    """Responses that stopped by themselves (`finish_reason`), and end in whatever token came last."""
    words = batch.columns.texts("finish_reason")
    if words is None or batch.spine.parts[0].packs is not None:
        return None
    stopped_B = np.array([word in ("stop", "eos") for word in words]) & (batch.flat.count(response_N) > 0)
    if stopped_B.sum() < STOPPED or any(after not in (None, batch.pad_id) for after in _after_B(batch)):
        return None
    last_B = batch.flat.starts_B + batch.flat.last(response_N)
    ids, counts = np.unique(given(batch.tokens_N)[last_B[stopped_B]], return_counts=True)
    if 2 * counts.max() >= stopped_B.sum() or ids.size <= ENDS:
        return None
    return error(
        f"the end token (EOS) is stripped from the responses: {share(int(stopped_B.sum()), len(batch))} stopped by "
        f"themselves, and they end in {ids.size} different tokens: the policy never learns to stop",
        batch.laid.where("input_ids", at=int(last_B[np.flatnonzero(stopped_B)[0]])),
        shown("responses whose finish_reason is stop", int(stopped_B.sum())),
        shown("tokens that they end in", ids.size, f"<= {ENDS}", f"token ids of {batch.name}"),
        shown("share of the commonest", float(counts.max() / stopped_B.sum()), ">= 0.5"),
        cause="the engine, or what decodes and encodes its text again, leaves the end token out of the token ids "
        "(skip_special_tokens, a stop token that is not included): append it, with its log-probability",
    )


#: Rows with padding after their last token, and the log-probability of a pad that is what the policy ends with.
PADDED, EXPECTED = 8, math.log(0.5)


def _padded_with_end(batch: StepBatch, trained_N: Array) -> Finding | None:
    """A pad id that the policy expects after the last token of its responses, and that counts nowhere."""
    pad = batch.pad_id
    if pad is None or batch.tokens_N is None or (batch.tokens_N[trained_N] == pad).any():
        return None
    said: list[float] = []
    sampled: list[float] = []
    for sheet, _ in batch.columns.sheets:
        for part in sheet.parts:
            ref = part.held.find("old_logprobs", "policy_logprobs")
            if ref is None or part.ids_BS is None or part.layout is None or part.width is None:
                continue
            # About next tokens, or of the columns that hold the responses: others would have to say where they begin.
            begins = {(len(part), part.width - 1): 1}
            answers = part.held.find("response_ids")
            if answers is not None and answers.rows is None and part.response_starts is not None:
                begins[len(part), answers.shape[-1]] = part.width - answers.shape[-1]
            if (begin := begins.get((ref.shape[0], ref.shape[-1]))) is None or len(ref.shape) != 2:
                continue
            scores_BT = pages.array(ref)
            engine = part.held.find("rollout_logprobs")
            engine_BT = None if engine is None or engine.shape != ref.shape else pages.array(engine)
            for row, held in enumerate(part.layout.sample_BS >= 0):
                after = int(np.flatnonzero(held)[-1]) + 1 if held.any() else len(held)
                if begin <= after < len(held) and part.ids_BS[row, after] == pad:
                    said.append(float(scores_BT[row, after - begin]))
                    sampled.append(0.0 if engine_BT is None else float(engine_BT[row, after - begin]))
        if said:
            break
    # What is filled with 0 says nothing.
    expected = [each for each in said if EXPECTED < each < 0]
    if len(said) < PADDED or 2 * len(expected) < len(said):
        return None
    if 2 * np.count_nonzero(sampled) < len(sampled) and _stops_elsewhere(batch, trained_N, len(said)):
        return None  # and the engine says nothing of a token there
    name = mask_name(batch)
    return error(
        f"the end token (EOS) is the pad token, {pad}, and is masked out as padding in every response: it is in the "
        "loss of none, and the policy never learns to stop",
        batch.laid.where(name, sample=0),
        shown(f"rows that {pad} follows", len(said)),
        shown("of them it has a probability over 1/2, by the trainer", len(expected), "none of padding"),
        shown("its mean log-probability there", float(np.mean(said))),
        shown(f"tokens {pad} in the loss", 0, "one in each of these rows", name),
        cause="pad_token_id is eos_token_id, and masks are made of the ids (ids != pad): the end of the response goes "
        "with its padding. Make them of the lengths, or pad with another id",
    )


def _stops_elsewhere(batch: StepBatch, trained_N: Array, rows: int) -> bool:
    """Whether masks end in a few ids (four times as many rows, and more), as where the engine stops at strings: the end
    token that would follow is not sampled then. The text before an end that was masked out ends in anything.
    """
    last_B = batch.flat.last(trained_N)
    ends = np.unique(given(batch.tokens_N)[(batch.flat.starts_B + last_B)[last_B >= 0]]).size
    return ends <= ENDS and rows >= 4 * ends


#: Rows whose mask ends before one id and padding.
ENDED = 4


def _end_before_padding(batch: StepBatch, trained_N: Array) -> tuple[int, int, int] | None:
    """Of whole rows whose padding nothing tells: the one id that stands between the last counted token and a run of
    another up to the row's end, in every row whose mask ends so early, and counts nowhere; in how many rows, and where.
    """
    tokens_N = given(batch.tokens_N)
    if batch.spine.padding_known:
        return None
    found, rows, first = [], [], 0
    each = zip(batch.flat.starts_B, batch.flat.lengths_B, batch.flat.last(trained_N), strict=True)
    for row, (start, length, last) in enumerate(each):
        tail = tokens_N[start + last + 1 : start + length]
        if last < 0 or tail.size < 2:
            continue
        if (tail[1:] != tail[-1]).any() or tail[0] == tail[-1]:
            return None
        found.append((int(tail[0]), int(tail[-1])))
        rows.append(row)
        first = first or int(start + last + 1)
    if len(found) < ENDED or len(set(found)) > 1 or (tokens_N[trained_N] == found[0][0]).any():
        return None
    if _ends_before(batch, trained_N, np.array(rows), found[0][0]):
        return None
    return found[0][0], len(found), first


def _why_untrained(batch: StepBatch, eos: int) -> str:
    """What leaves the end out: masks that begin with their responses are not shifted; of these, what pads the rows
    tells.
    """
    trained_N, response_N = given(batch.trained_N), batch.response_N
    if response_N is None:
        return "the mask is shifted by one and ends a token early, or drops the end because pad and end share an id"
    heard_B = (batch.flat.count(trained_N) > 0) & (batch.flat.count(response_N) > 0)
    late_B = (batch.flat.first(trained_N) - batch.flat.first(response_N))[heard_B]
    if late_B.size and (late_B != 0).all() and (late_B == late_B[0]).all():
        return "the mask is shifted by one: it begins a token away from its response, and ends a token early"
    if not late_B.size or (late_B != 0).any():
        return "the mask is shifted by one and ends a token early, or drops the end because pad and end share an id"
    stated = batch.laid.algorithm.value("pad_token_id", "pad_id")
    tails = [tail for tail in _tails(batch) if tail.size]
    shares = eos in (batch.pad_id, stated) or (bool(tails) and all((tail == eos).all() for tail in tails))
    if shares:
        return (
            f"pad and end token share the id {eos}, and the mask is made of ids (ids != pad): the end of each response "
            "goes with its padding. Not a shift: every mask begins with its response. Make masks of the lengths, or "
            "pad with another id"
        )
    return (
        "the mask ends a token early (lengths that do not count the end token, a slice that is one short). Not a "
        "shift: every mask begins with its response"
    )


def _ends_before(batch: StepBatch, trained_N: Array, samples: Array, after: int) -> bool:
    """Whether the masks of these samples, which `after` follows, all end with one id (of 2 samples and more) that is
    then the end token, as <|im_end|> before a newline. Not where the run states that `after` is the end.
    """
    stated = batch.laid.algorithm.value("eos_token_id", "eos_id")
    if after in (stated if isinstance(stated, list) else [stated]):
        return False
    of_B = np.zeros(len(batch), dtype=bool)
    of_B[samples] = True
    return _last_id(batch, trained_N, of_B) not in (None, after)


def _untrained(batch: StepBatch, eos: int, count: int, place: Where) -> Finding:
    count //= passes(batch)  # every epoch holds the same responses
    return error(
        f"the end token (EOS, {eos}) is in {count} responses and in the loss of none: the policy never learns to stop",
        place,
        shown("end tokens in responses", count, None, f"token ids of {batch.name}"),
        shown("end tokens in the loss", 0, "> 0", "the mask"),
        cause=_why_untrained(batch, eos),
    )


def _unheard_B(batch: StepBatch) -> Array:
    """Samples whose response was masked out whole, and was cut off at the limit [B]."""
    # Padding repeats one id: other ids to the last are text that no mask attends to.
    return np.array([tail.size >= 2 and tail[-1] != tail[-2] for tail in _tails(batch)], dtype=bool)


def _tails(batch: StepBatch) -> list[Array]:
    """The ids that follow each sample's last token in its row; none where samples are no rows."""
    each = [_row_tails(part) for part in batch.spine.parts]
    return [each[part][row] for part, row in batch.spine.index]


def _after_B(batch: StepBatch) -> list[int | None]:
    """The id in the column after each sample's last token, None where there is none."""
    return [int(tail[0]) if tail.size else None for tail in _tails(batch)]


def _padding_held_N(batch: StepBatch) -> Array | None:
    """Tokens that are padding by the look of them: one id that ends samples, twice and more, and stands nowhere
    else in responses, mostly after one and the same other id. None where nothing looks so.
    """
    tokens_N, response_N = batch.tokens_N, batch.response_N
    if tokens_N is None or response_N is None or len(batch) < 2:
        return None
    held_N = np.zeros(tokens_N.size, dtype=bool)
    tails, heads = [], []
    for start, length in zip(batch.flat.starts_B, batch.flat.lengths_B, strict=True):
        row = tokens_N[start : start + length]
        other = np.flatnonzero(row != row[-1]) if length else np.zeros(0, dtype=np.int64)
        run = length - 1 - int(other[-1]) if other.size else 0
        if run < 2:
            continue
        tail, head = int(row[-1]), int(row[other[-1]])
        ends_itself = tail == batch.eos_id
        tails.append(tail)
        heads.append(tail if ends_itself else head)
        held_N[start + length - run + ends_itself : start + length] = True
    if batch.pad_id is not None and set(tails) - {batch.pad_id}:
        return None  # what pads is known, and this is something else
    if len(tails) < 2 or len(set(tails)) > 1 or (response_N & ~held_N & (tokens_N == tails[0])).any():
        is_end = bool(tails) and len(set(tails)) == 1 and tails[0] == batch.eos_id
        if not is_end:
            return None
    most = max(heads.count(head) for head in set(heads))
    return held_N if most >= 2 and most >= 0.4 * len(heads) else None


def _outside(part: Batch, mask: TensorRef) -> tuple[int, int] | None:
    """Entries of a mask that are set where the record holds no token, and the first one's sample; None if none."""
    has_holes = part.layout is not None and bool((part.layout.sample_BS < 0).any())
    is_whole = mask.rows is None or (mask.rows == part.rows and has_holes)
    placed = part.place(mask) if is_whole and part.packs is None else None
    if placed is None or not placed.by_token or placed.axes != len(mask.shape):
        return None
    is_set = pages.array(mask).reshape(-1) != 0
    is_set[placed.rows] = False
    if mask.rows is None and part.layout is not None and part.width == mask.shape[1] + 1:
        # Of next tokens the slot before a row's first token is about that token: its own id is a left pad's.
        held_BS = part.layout.sample_BS >= 0
        before_B = held_BS.argmax(axis=1) - 1
        rows = np.flatnonzero(held_BS.any(axis=1) & (before_B >= 0))
        is_set[rows * mask.shape[1] + before_B[rows]] = False
    strays = np.flatnonzero(is_set)
    if not strays.size:
        return None
    ends = np.cumsum(mask.rows) if mask.rows is not None else np.arange(1, part.count + 1) * mask.shape[1]
    return strays.size, int(np.searchsorted(ends, strays[0], side="right"))


def _row_tails(part: Batch) -> list[Array]:
    """The ids in a row's slots after its sample's last token; none where samples are no rows of a grid."""
    ids_BS, layout = part.ids_BS, part.layout
    if ids_BS is None or layout is None or part.width is None:
        return [np.zeros(0, np.int64)] * len(part)
    ends = [int(at[-1]) + 1 if (at := np.flatnonzero(row >= 0)).size else part.width for row in layout.sample_BS]
    return [row[end:] for row, end in zip(ids_BS, ends, strict=True)]
