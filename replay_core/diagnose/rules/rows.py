"""What of a batch belongs to another sample, to none, or to one and the same for all."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from replay_core import pages
from replay_core.diagnose.algorithm import of_loss
from replay_core.diagnose.batch import StepBatch, mask_name
from replay_core.diagnose.case import Case
from replay_core.diagnose.columns import Column
from replay_core.diagnose.finding import Finding, Where, error, finding, share, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.kinship import odd_one, of_rows, whose
from replay_core.diagnose.passes import before_any_update_N
from replay_core.diagnose.rule import Skip, given, rule, skip_if
from replay_core.diagnose.sheets import Sheet, marked
from replay_core.records import Record

#: Samples that tell what is of all rows from what one odd row has.
SAMPLES = 4


@rule("D79", "rollout log-probabilities are another sample's", link="rollout_logprobs", scope="batch",
      needs=("rollout_logprobs", "trainer_logprobs", "mask|response"), lasts=True,
      explains=("L10", "D08", "D09", "D10", "D11", "D12", "D14", "D15", "D16", "D24"),
      source="rows of a batch that is sorted, balanced or rolled, and one tensor of it that is not")  # fmt: skip
def another_row(batch: StepBatch) -> Finding | None:
    """Every sample's rollout log-probabilities beside the trainer's of every sample (of 512 and fewer, over the tokens
    that both have, 3 and more): an error where most of the samples, 4 and more, have another's, a fifth as far away as
    their own and within .03 nats. Where the policy's first forward agrees with the rollout in those rows, and the old
    ones do not, it is the old ones that have another's.
    """
    rollout, trainer = given(batch.columns.of("rollout_logprobs")), given(batch.trainer)
    odd = odd_one(batch)
    if odd is not None and odd.suspect.name != "rollout_logprobs":
        raise Skip(f"it is {odd.suspect.name} that are another quantity (D92)")
    found_B = whose(batch, rollout, trainer)
    if found_B is None:
        return None
    what, cause = of_rows(found_B)
    if odd is None:
        cause += "; nothing else is recorded that tells which of the two it is: the trainer's old ones may be"
    first = int((found_B >= 0).argmax())
    if odd is None and _policy_agrees(batch, rollout, trainer, found_B):
        return error(
            f"old log-probabilities are {what}: the policy's first forward agrees with the rollout's",
            batch.laid.where("old_logprobs", sample=first),
            shown("samples with another's", int((found_B >= 0).sum()), "0", trainer.source),
            shown(f"sample {first} has those of", int(np.flatnonzero(found_B == first)[0]), str(first), rollout.source)
            if (found_B == first).any()
            else shown("sample", first),
            cause=of_rows(found_B)[1],
        )
    return error(
        f"rollout log-probabilities are {what}",
        batch.laid.where("rollout_logprobs", sample=first),
        shown("samples with another's", int((found_B >= 0).sum()), "0", rollout.source),
        shown(f"sample {first} has those of", int(found_B[first]), str(first), trainer.source),
        cause=cause,
    )


def _policy_agrees(batch: StepBatch, rollout: Column, old: Column, found_B: Array) -> bool:
    """Whether the policy before any update is near to the rollout, and far from the old ones, in the rows that part."""
    policy = batch.columns.of("policy_logprobs")
    if policy is None or old.name != "old_logprobs":
        return False
    moved_N = np.repeat(found_B >= 0, batch.flat.lengths_B) & before_any_update_N(batch)
    moved_N &= batch.pair(policy, rollout) & batch.pair(policy, old)
    if moved_N.sum() < SAMPLES:
        return False
    to_rollout, to_old = (
        float(np.abs(policy.values_N - other.values_N)[moved_N].mean()) for other in (rollout, old)
    )  # fmt: skip
    return to_rollout < 0.5 * to_old


@rule("D80", "log-probabilities are all 0", link="logprobs", scope="batch", lasts=True,
      needs=("old_logprobs|policy_logprobs", "mask|response"),
      explains=("D09", "D14", "D15", "D21", "D24", "D28", "D50", "D60", "L08", "L10", "L16"),
      source="a tensor of zeros that is allocated and never filled, or log_probs - log_probs.detach()")  # fmt: skip
def all_zero(batch: StepBatch) -> Finding | None:
    """Old or policy log-probabilities exactly 0 on all counted tokens (8 and more), which is a probability of 1: an
    error. (Of a policy that is sure of everything some are a little below 0.) Not where the rollout's are, too.
    """
    counted_N = batch.trained_N if batch.trained_N is not None else given(batch.response_N)
    rollout = batch.columns.of("rollout_logprobs")
    for name in ("old_logprobs", "policy_logprobs"):
        column = batch.columns.of(name)
        if column is None:
            continue
        known_N = counted_N & column.said_N
        if known_N.sum() < 8 or column.values_N[known_N].any():
            continue
        if rollout is not None and not rollout.values_N[known_N & rollout.said_N].any():
            continue
        word = "old" if name == "old_logprobs" else "policy"
        return error(
            f"{word} log-probabilities are exactly 0 on all {int(known_N.sum())} tokens that count: a probability of 1",
            batch.laid.where(name, at=known_N),
            shown("tokens with exactly 0", int(known_N.sum()), "0", column.source),
            cause="the tensor was allocated and never filled, or holds a difference (log_probs - log_probs.detach()) "
            "or a masked copy; the ratio is then the probability itself",
        )
    return None


@rule("D81", "the mask ends at one place in every longer response", link="masks", scope="batch",
      needs=("rollout_logprobs", "mask"), lasts=True, explains=("D19", "D20", "D28", "L09"),
      source="a mask that is cut to a length of its own, or covers a part of the response")  # fmt: skip
def ends_early(batch: StepBatch) -> Finding | None:
    """Tokens the engine sampled after the last that counts, in 4 samples and more and a quarter of all: an error where
    each of these samples counts its first k tokens and no sample counts more than k. (Turns of an agent end anywhere.)
    A warning where masks without a hole end at one and the same token (or before it) in all of these samples, which
    counts nowhere else, and what was sampled behind it differs: 3 texts and more, of 2 tokens on average.
    """
    rollout, trained_N = given(batch.columns.of("rollout_logprobs")), given(batch.trained_N)
    sampled_N = rollout.said_N & (np.nan_to_num(rollout.values_N) != 0)
    counts_B, sampled_B = batch.flat.count(trained_N), batch.flat.count(sampled_N)
    if batch.response_N is not None:
        sampled_B = batch.flat.count(sampled_N & batch.response_N)
    heard_B = counts_B > 0
    cut_B = heard_B & (sampled_B > counts_B)
    if cut_B.sum() < SAMPLES or 4 * cut_B.sum() < len(batch):
        return None
    ends = np.unique(counts_B[cut_B])
    whole_N = trained_N & sampled_N
    if ends.size > 1 or counts_B.max() > ends[0] or (batch.flat.count(whole_N) != counts_B).any():
        if (marked_off := _at_a_mark(batch, sampled_N, cut_B)) is not None:
            return marked_off
        return None
    name = mask_name(batch)
    behind_B = batch.flat.last(sampled_N) <= batch.flat.last(trained_N)
    if behind_B[cut_B].all():
        word = "token" if ends[0] == 1 else f"{int(ends[0])} tokens"
        return error(
            f"only the last {word} of each response {'is' if ends[0] == 1 else 'are'} in the loss: all before "
            f"{'it' if ends[0] == 1 else 'them'} never {'counts' if ends[0] == 1 else 'count'}, in "
            f"{share(int(cut_B.sum()), len(batch))} samples",
            batch.laid.where(name, sample=cut_B),
            shown("tokens that count, at most", int(ends[0]), f"{int(sampled_B.max())}, as sampled", rollout.source),
            shown("sampled tokens that do not count", int((sampled_B - counts_B)[cut_B].sum()), "0"),
            cause="the mask marks where responses end (the reward's place, the last index), and not all that was "
            "sampled: the answer itself is not trained",
        )
    return error(
        f"the mask ends after {int(ends[0])} tokens in every longer response: the rest of "
        f"{share(int(cut_B.sum()), len(batch))} samples never counts, their end tokens among it",
        batch.laid.where(name, sample=cut_B),
        shown("tokens that count, at most", int(ends[0]), f"{int(sampled_B.max())}, as sampled", rollout.source),
        shown("sampled tokens that do not count", int((sampled_B - counts_B)[cut_B].sum()), "0"),
        cause="the mask covers only the first part (half) of the responses: it is cut to a length of its own, to the "
        "shortest, or to the prompt's",
    )


#: Different texts behind a mark, which a template's tail does not make.
TAILS = 3


def _at_a_mark(batch: StepBatch, sampled_N: Array, cut_B: Array) -> Finding | None:
    """Masks of one run of tokens each, which end at one and the same token, or before it, wherever there is one, while
    what was sampled right behind it differs from sample to sample.
    """
    tokens_N, trained_N = batch.tokens_N, given(batch.trained_N)
    if tokens_N is None:
        return None
    last, after, tails, inside = set(), set(), set(), []
    behind_tails: list[Array] = []
    left = 0
    for sample, span in enumerate(batch.flat.spans):
        counted = span.start + np.flatnonzero(trained_N[span])
        if counted.size and counted[-1] - counted[0] + 1 != counted.size:
            return None
        if not cut_B[sample]:
            inside.append(tokens_N[counted])
            continue
        end, tail = int(counted[-1]), slice(int(counted[-1]) + 1, span.stop)
        # What is not sampled is another's turn; a mask that reaches the end of its row is cut off at nothing.
        if tail.start >= tail.stop or not sampled_N[tail].all() or not sampled_N[counted].all():
            return None
        inside.append(tokens_N[counted[:-1]])
        last.add(int(tokens_N[end]))
        after.add(int(tokens_N[end + 1]))
        tails.add(tokens_N[tail].tobytes())
        behind_tails.append(tokens_N[tail])
        left += span.stop - (end + 1)
    cut = int(cut_B.sum())
    mark = next((each for each in (last, after) if len(each) == 1), None)
    if mark is None or len(tails) < TAILS or left < 2 * cut:
        return None
    token = next(iter(mark))
    behind = set(np.unique(np.concatenate(behind_tails)).tolist())
    if token in (batch.eos_id, batch.pad_id) or len(behind) < 2:
        return None  # an end, and what fills up the row
    if any((each == token).any() for each in inside):
        return None
    name = mask_name(batch)
    return warning(
        f"the mask ends at the token {token} in every response that holds it: what the policy sampled behind it (an "
        f"answer after its mark) never counts, in {share(cut, len(batch))} samples",
        batch.laid.where(name, sample=cut_B),
        shown("samples whose mask ends at it", cut, None, name),
        shown("different texts behind it", len(tails)),
        shown("sampled tokens that do not count", left, "0"),
        cause="the mask is cut at a mark in the text (the answer's, the end of thinking): the part that is rewarded is "
        "not trained, the end token with it",
    )


@rule("D82", "all prompts of a batch are one", link="groups", scope="batch", needs=("tokens", "group", "response"),
      lasts=True, explains=("D42", "D43", "D64", "D75", "L17"),
      source="a data loader that is built anew for every row, or an index that is never moved")  # fmt: skip
def one_prompt(batch: StepBatch) -> Finding | None:
    """Groups that are named (3 and more) whose prompts are one and the same, to the last token: a warning."""
    prompt_B, group_B = batch.prompt_B, given(batch.group_B)
    if prompt_B is None or not batch.group_is_named:
        raise Skip("needs named groups, and where prompts end")
    skip_if((batch.flat.first(given(batch.response_N)) <= 1).all(), "no prompt stands before the tokens that count")
    groups = np.unique(group_B).size
    if groups < 3 or np.unique(prompt_B).size > 1:
        return None
    return warning(
        f"all {groups} groups of the batch have the same prompt",
        batch.laid.where("input_ids", sample=0),
        shown("distinct prompts", 1, str(groups), f"token ids of {batch.name}"),
        shown("groups", groups),
        cause="the data loader gives one row over and over (built anew in the loop, an index that is not moved, one "
        "seed for all workers), or a prompt was repeated over the batch instead of within its group",
    )


@rule("D83", "a sequence's ratio differs within a response", link="ratio", scope="batch",
      needs=("is_ratio",), lasts=True, explains=("D24", "D28", "D50", "L16"),
      source="GSPO (arXiv 2507.18071): one ratio stands for a response")  # fmt: skip
def by_token(batch: StepBatch) -> Finding | None:
    """The run states GSPO or ratios by sequence, and in half of the responses whose recorded ratio is not 1 it differs
    from token to token by 1e-3 and more: an error.
    """
    skip_if(not batch.laid.algorithm.is_by_sequence, "the run states no ratio by sequence")
    ratio = given(batch.columns.of("is_ratio"))
    known_N = ratio.said_N & np.isfinite(ratio.values_N)
    known_N = known_N if batch.trained_N is None else known_N & batch.trained_N
    moved_B = batch.flat.count(known_N & (np.abs(ratio.values_N - 1) > 1e-3)) > 0
    moved_B &= batch.flat.count(known_N) > 1
    skip_if(moved_B.sum() < SAMPLES, "the ratio has not moved from 1")
    low_B, high_B = batch.flat.extremes(ratio.values_N, known_N)
    differ_B = moved_B & (high_B - low_B > 1e-3)
    if 2 * differ_B.sum() < moved_B.sum():
        return None
    worst = int(np.where(differ_B, high_B - low_B, 0.0).argmax())
    return error(
        f"the run states ratios by sequence, and they are token ratios: they differ within "
        f"{share(int(differ_B.sum()), int(moved_B.sum()))} responses",
        batch.laid.where("is_ratio", sample=worst),
        shown("ratios of one response differ by", float((high_B - low_B)[worst]), "0", ratio.source),
        cause="the importance ratio is taken per token as in GRPO: the mean over the response's log ratios is missing, "
        "and GSPO's narrow clip range cuts nearly every token off",
    )


#: Of a batch, the share of rows that are trained on twice, and of those that are never, before it is no filling up.
SHARE = 0.25


@rule("D88", "part of the batch is trained on twice, part never", link="masks", scope="batch", lasts=True,
      needs=("tokens",), explains=("D14", "D60", "L16", "L08"),
      source="every mini-batch of an epoch holds other samples")  # fmt: skip
def twice_or_never(batch: StepBatch) -> Finding | None:
    """The rows that micro-batches of one epoch hold beside those of the batch, where there are as many: an error where
    a quarter of the batch is in none of them, and as many rows are there twice and more often than in the batch.
    """
    sheets = [sheet for sheet, _ in batch.columns.sheets if sheet.has_tokens]
    of_micros = [sheet for sheet in sheets if all(part.held.record.key.micro is not None for part in sheet.parts)]
    wholes = [sheet for sheet in sheets if all(part.held.record.key.micro is None for part in sheet.parts)]
    pairs = [
        (whole, held) for whole in wholes for each in of_micros for held in _by_epoch(each) if len(whole) == len(held)
    ]
    skip_if(not pairs, "needs the micro-batches of one epoch, as many rows as the batch")
    for whole, held in pairs:
        shared = [name for name in ("advantages", "group_id", "sample_id") if whole.refs(name) and held.refs(name)]
        due, had = Counter(marked(whole, shared)), Counter(marked(held, shared))
        # The first epoch that tells stands for all: rows are drawn anew in each.
        never = sum(count for key, count in due.items() if not had[key])
        again = sum(count - due[key] for key, count in had.items() if due[key] and count >= 2 * due[key])
        if min(never, again) < SHARE * len(whole) or any(key not in due for key in had):
            continue
        often = max(count / due[key] for key, count in had.items())
        drawn = len({count / due[key] for key, count in had.items()}) > 2
        return error(
            f"{share(never, len(whole))} samples of the batch are in no mini-batch of an epoch, and others are in it "
            f"up to {often:.3g} times: "
            + ("rows are drawn with replacement" if drawn else "the same mini-batch is trained on again"),
            batch.laid.where("input_ids", sample=0),
            shown("samples that are never trained on", never, "0", held.parts[0].held.record.path.name),
            shown("rows that are there once more", again, "0"), shown("rows of the epoch", len(held)),
            cause="the sampler of mini-batches draws each row anew (replacement=True, randint for a permutation), "
            "where every epoch is to hold each row once"
            if drawn
            else "the loop takes the first mini-batch every time (an index that is not moved, an iterator that is "
            "made anew)",
        )  # fmt: skip
    return None


def _by_epoch(sheet: Sheet) -> Iterator[Sheet]:
    """The samples of each of its epochs."""
    epochs: dict[int | None, list[int]] = defaultdict(list)
    for sample, (part, _) in enumerate(sheet.index):
        epochs[sheet.parts[part].held.record.key.epoch].append(sample)
    yield from (sheet.of(samples) for samples in epochs.values()) if len(epochs) > 1 else (sheet,)


@rule("D88", "part of the batch is never trained on", link="masks", scope="case", lasts=True, explains=("D28",),
      source="every row of a batch is in one micro-batch of each of its epochs")  # fmt: skip
def never_trained(case: Case) -> Finding | None:
    """The rows that micro-batches of a step's update hold beside those of the batch, both recorded by one rank: a
    warning where a quarter of the batch and more is in none of them, in each of 2 steps and more, and over the run
    about as many of these as of the others have advantages other than 0 and tokens that count (half as many and more):
    a filter leaves out those without. Not where it is those that were cut off. Steps of several updates are left aside:
    a limit on the KL may end an epoch.

    An error, in 2 steps and more and in all that are recorded so, where the micro-batches of a step and rank are
    together as many rows as its batch and all hold the tokens of the first, and the same log-probabilities of the
    policy (of one update: a pass after an update has others), while a quarter of the batch is in none of them.
    """
    if (same := _one_micro_batch(case)) is not None:
        return same
    told = [(batch, one) for batch in case.batches() if (one := _left_out(batch)) is not None]
    skip_if(len(told) < 2, "needs 2 steps of one update whose batch and micro-batches are recorded by one rank")
    never, taught, rows, all_taught = (sum(getattr(one, name) for _, one in told) for name in
                                       ("never", "taught", "rows", "all_taught"))  # fmt: skip
    if any(one.never < SHARE * one.rows for _, one in told) or 2 * taught * rows < never * all_taught or not taught:
        return None
    batch, first = told[0]
    divisor = of_loss(batch.laid.flags, "divisor")
    # A rank that holds the whole batch and trains on its share of it, where the others record nothing.
    is_share = not divisor and all(one.rows % (one.rows - one.never) == 0 for _, one in told if one.rows > one.never)
    return finding(
        "info" if is_share else "warning",
        f"a part of every batch is never trained on: {share(first.never, first.rows)} samples are in none of the "
        f"{first.micros} micro-batches of the step's update",
        batch.laid.where("input_ids", sample=0),
        shown("samples in no micro-batch, over all steps", share(never, rows), "0"),
        shown("of them with an advantage other than 0", taught, "0"),
        shown("steps compared, each with such samples", len(told)),
        *([shown("divisor that is stated", divisor, f"{first.micros} micro-batches")] if divisor else []),
        cause="a micro-batch is dropped (a loop that ends one early, a last one that is short and left out, a part of "
        "the batch that went to no rank), or was not recorded: what it would have taught is lost, and a loss that is "
        "divided by all micro-batches is too small besides",
        steps=[each.step for each, _ in told],
    )


def _one_micro_batch(case: Case) -> Finding | None:
    """Micro-batches of a step that are all the first one, while its batch holds other rows."""
    steps: dict[tuple[int, int | None], list[Record]] = defaultdict(list)
    for record in case.records():
        if record.key.step is not None and record.key.stage not in ("param", "gradient") and not record.is_flat:
            steps[record.key.step, record.key.rank].append(record)
    looked, found = 0, list[tuple[int, int, int, int, Record]]()
    for (step, _), records in steps.items():
        whole = next((ids for one in records if one.key.micro is None and (ids := _ids_of(one)) is not None), None)
        micros = [one for one in records if one.key.micro is not None and _ids_of(one) is not None]
        parts = [given(_ids_of(one)) for one in micros]
        if whole is None or len(parts) < 2 or sum(map(len, parts)) != len(whole):
            continue
        looked += 1
        logps = [_field_of(one, "policy_logprobs") for one in micros]
        same = all(part.shape == parts[0].shape and (part == parts[0]).all() for part in parts)
        if not same or any(each is None or not np.array_equal(each, given(logps[0])) for each in logps):
            continue
        held = {row.tobytes() for row in parts[0]}
        never = sum(row.tobytes() not in held for row in whole.astype(parts[0].dtype)[:, : parts[0].shape[1]])
        if whole.shape[1] == parts[0].shape[1] and never >= SHARE * len(whole):
            found.append((step, never, len(whole), len(parts), micros[1]))
    if len(found) < 2 or len(found) < looked:
        return None
    step, never, rows, count, record = found[0]
    return error(
        f"all {count} micro-batches of a step are the first one: {share(never, rows)} samples of the batch are never "
        "trained on",
        Where.of(record, next(ref.name for ref in record.tensors() if ref.canonical in ("response_ids", "input_ids"))),
        shown("samples of the batch in no micro-batch", never, "0"),
        shown("micro-batches with one another's tokens and log-probabilities", count, "none"),
        shown("steps compared, all of them so", len(found)),
        cause="the loop takes the first micro-batch each time (an index that is not moved, an iterator that is made "
        "anew): what it teaches counts so many times, and the rest is lost",
        steps=sorted({each[0] for each in found}),
    )


def _ids_of(record: Record) -> Array | None:
    ids = _field_of(record, "response_ids")
    return _field_of(record, "input_ids") if ids is None else ids


def _field_of(record: Record, name: str) -> Array | None:
    """A field of rows [B, T]; None where the record has none."""
    ref = next((one for one in record.tensors() if (one.canonical or one.name) == name), None)
    if ref is None or len(ref.shape) != 2 or ref.is_text or not ref.is_readable:
        return None
    values: Array = pages.array(ref)
    return values


class _LeftOut(Struct, frozen=True):
    """Samples of a step's batch, those in no micro-batch, and how many of either could teach something."""

    rows: int
    never: int
    taught: int
    all_taught: int
    micros: int


def _left_out(batch: StepBatch) -> _LeftOut | None:
    """What the micro-batches of a step of one update leave out; None of other steps."""
    sheets = [sheet for sheet, _ in batch.columns.sheets if sheet.has_tokens]
    whole = next((one for one in sheets if all(part.held.record.key.micro is None for part in one.parts)), None)
    held = next((one for one in sheets if all(part.held.record.key.micro is not None for part in one.parts)), None)
    trained_N, advantages = batch.trained_N, batch.columns.of("advantages")
    if batch.step is None or whole is not batch.spine or held is None or trained_N is None or advantages is None:
        return None
    keys = [part.held.record.key for part in held.parts]
    ranks = {part.held.record.key.rank for part in whole.parts}
    if None in ranks or {key.rank for key in keys} != ranks or len(ranks) > 1:
        return None
    if len({(key.epoch, key.minibatch) for key in keys}) > 1 or len(held) > len(whole):
        return None
    had = Counter(marked(held, []))
    taught_B = batch.flat.count(trained_N & advantages.said_N & (np.nan_to_num(advantages.values_N) != 0)) > 0
    never_B = np.zeros(len(batch), dtype=bool)
    for sample, key in enumerate(marked(whole, [])):
        never_B[sample] = not had[key]
        had[key] -= bool(had[key])
    if any(had.values()):
        return None
    cut_B = batch.truncated_flag_B
    if cut_B is not None and cut_B[never_B].all() and not cut_B[~never_B].any():
        never_B[:] = False  # filtered out
    return _LeftOut(len(batch), int(never_B.sum()), int((never_B & taught_B).sum()), int(taught_B.sum()), len(keys))
