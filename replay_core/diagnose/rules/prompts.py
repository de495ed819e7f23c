"""The prompts: of one group they are one, of two steps they are two, none begins twice, and all are whole."""

from __future__ import annotations

import math
import sys
from collections import Counter
from hashlib import blake2b
from itertools import groupby, pairwise, takewhile
from statistics import median

import numpy as np
from msgspec import Struct

from replay_core import pages
from replay_core.budget import stored_bytes
from replay_core.diagnose.advantage_variants import in_groups, matching, tolerance
from replay_core.diagnose.algorithm import GROUP_SIZE, settings_of, stated_by
from replay_core.diagnose.answers import answers_of, asked_of, members_of
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.columns import Column
from replay_core.diagnose.compared import distance
from replay_core.diagnose.finding import Finding, Where, error, finding, listed, share, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.gap import DISAGREE
from replay_core.diagnose.passes import are_passes, keys_of
from replay_core.diagnose.rule import Skip, given, rule, skip_if
from replay_core.diagnose.sheets import Sheet
from replay_core.diagnose.signals import RunLog
from replay_core.diagnose.trajectories import beginnings_N
from replay_core.records import RecordKey
from replay_core.regexes import regex

#: Steps with the same prompts before it is no chance, and no data set of one batch.
SAME = 3
#: And before it is more than a test on one batch.
LONG = 5
#: Switches of a data loader that shuffles in every pass.
_SHUFFLES = ("shuffle", "shuffle_dataset", "shuffle_data", "rollout_shuffle")


@rule("D42", "a group mixes prompts", link="groups", scope="batch", needs=("group|advantages",),
      explains=("D01", "D03", "D04", "D05"), lasts=True,
      source="Search-R1#88: an id made by place, or per worker; the baseline is then another prompt's")  # fmt: skip
def mixed_groups(batch: StepBatch) -> Finding | None:
    """Groups, as the dump names them, that hold different prompts, while one prompt's samples lie in several groups. In
    half of the groups and more it is an error. A warning where each group holds the same number of prompts, each of
    them as often and twice at least, and none the beginning of another: several groups under one id. Prompts that
    differ within their group and nowhere repeat are normal (turns of a conversation, a clock in the system prompt).

    A table of texts names no groups: rows of one size, one after the other, are one where a known variant makes the
    advantages of their rewards (2 such groups with a spread and more), and none does of equal prompts. Where half of
    them hold several prompts, each of which stands in several, it is an error.
    """
    if batch.tokens_N is None:
        return _blocks_of_rows(batch)
    skip_if(not batch.group_is_named, "groups are not named in the dump")
    group_B, prompt_B = batch.group_B, batch.prompt_B
    if group_B is None or prompt_B is None or batch.response_N is None:
        raise Skip("a sample has no prompt")
    if not batch.flat.count(given(batch.response_N)).all():
        raise Skip("a sample has no response that is known: its prompt has no end")
    prompt_B = _begun_B(batch, group_B, prompt_B)
    pairs = np.unique(np.stack([group_B, prompt_B]), axis=1)
    prompts_G, groups_P = np.bincount(pairs[0]), np.bincount(pairs[1])
    mixed = int((prompts_G > 1).sum())
    if mixed and 2 * mixed >= prompts_G.size and not (groups_P > 1).any():
        return _whole_groups(batch, group_B, prompt_B)
    if mixed < 2 or 2 * mixed < prompts_G.size or not (groups_P > 1).any():
        return None
    first = int(np.flatnonzero(prompts_G > 1)[0])
    members = np.flatnonzero(group_B == first)
    return error(
        f"{share(mixed, prompts_G.size)} groups mix prompts: responses are measured against answers to other questions",
        batch.laid.where("group_id" if batch.columns.ref("group_id") else None, sample=int(members[0])),
        shown("different prompts in the first such group", int(prompts_G[first]), "1", f"groups of {batch.name}"),
        shown("its samples", listed(members)),
        shown("prompts whose samples lie in several groups", int((groups_P > 1).sum()), "0"),
        cause="the group id is made by place, or before the batch was shuffled, or repeats over workers",
    )


def _begun_B(batch: StepBatch, group_B: Array, prompt_B: Array) -> Array:
    """The prompt [B] that each sample's begins with and another of its group is: a later turn of a conversation asks
    what its first turn did.
    """
    keys_N, heads_B = beginnings_N(batch), batch.flat.first(given(batch.response_N))
    begun_B, starts_B = prompt_B.copy(), batch.flat.starts_B
    roots: dict[int, dict[int, dict[int, int]]] = {}
    for row in np.argsort(heads_B, kind="stable"):
        start, head = int(starts_B[row]), int(heads_B[row])
        known = roots.setdefault(int(group_B[row]), {})
        found = (at.get(int(keys_N[start + size - 1])) for size, at in known.items())
        root = next((prompt for prompt in found if prompt is not None), None)
        if root is None:
            known.setdefault(head, {})[int(keys_N[start + head - 1])] = root = int(prompt_B[row])
        begun_B[row] = root
    return np.unique(begun_B, return_inverse=True)[1].reshape(-1)


def _blocks_of_rows(batch: StepBatch) -> Finding | None:
    """Rows of a table of texts whose advantages are those of blocks of rows, while the blocks mix prompts."""
    texts, reward_B = batch.columns.texts("prompt_text"), batch.reward_B
    advantage_B = batch.columns.per_sample("advantages")
    if texts is None or reward_B is None or advantage_B is None:
        raise Skip("needs tokens and groups, or prompts, rewards and advantages of a table of texts")
    if not (np.isfinite(reward_B).all() and np.isfinite(advantage_B).all()):
        raise Skip("rewards or advantages are not finite (D21)")
    prompt_B = np.unique(np.array(texts), return_inverse=True)[1].reshape(-1)
    total, rows = len(texts), np.arange(len(texts))
    if _made_in(prompt_B, reward_B, advantage_B) is not None:
        return None
    for size in (size for size in range(2, total // 2 + 1) if total % size == 0):
        block_B = rows // size
        pairs = np.unique(np.stack([block_B, prompt_B]), axis=1)
        prompts_G, blocks_P = np.bincount(pairs[0]), np.bincount(pairs[1])
        mixed = int((prompts_G > 1).sum())
        # One prompt asked once in each of several rows is no group either; those that lie in several blocks are split.
        if 2 * mixed < prompts_G.size or 2 * (blocks_P > 1).sum() < blocks_P.size:
            continue
        name = _made_in(block_B, reward_B, advantage_B)
        if name is None:
            continue
        return error(
            f"groups mix prompts: advantages are made in blocks of {size} rows one after the other, and "
            f"{share(mixed, prompts_G.size)} blocks hold several prompts",
            batch.laid.where("advantages", sample=block_B == np.argmax(prompts_G > 1)),
            shown("different prompts in the first such block", int(prompts_G[prompts_G > 1][0]), "1"),
            shown("prompts whose rows lie in several blocks", int((blocks_P > 1).sum()), "0"),
            shown("the estimator that agrees, within blocks", name),
            cause="the rows were shuffled or interleaved (a sampler that repeats the list of prompts and not each of "
            "them, a gather over ranks), and are taken for groups by their place: a response is measured against "
            "answers to other questions",
        )
    return None


def _made_in(group_B: Array, reward_B: Array, advantage_B: Array) -> str | None:
    """The known variant that makes the advantages within these groups; None where none does, or fewer than two of them
    have a spread.
    """
    spread_G = [float(np.ptp(reward_B[group_B == group])) for group in np.unique(group_B)]
    if sum(spread > 1e-6 for spread in spread_G) < 2:
        return None
    return matching(advantage_B, in_groups(reward_B, group_B), tolerance(reward_B, group_B, 1e-4))


def _whole_groups(batch: StepBatch, group_B: Array, prompt_B: Array) -> Finding | None:
    """Several groups of responses under one id: prompts that are each whole, and none a later turn of another."""
    often_P = np.bincount(prompt_B)
    prompts_G = np.array([np.unique(prompt_B[group_B == group]).size for group in np.unique(group_B)])
    if prompts_G.min() != prompts_G.max() or often_P.min() != often_P.max() or often_P[0] < 2:
        return None
    tokens_N, heads_B = given(batch.tokens_N), batch.flat.first(given(batch.response_N))
    firsts = np.unique(prompt_B, return_index=True)[1]
    texts = sorted(
        tuple(tokens_N[batch.flat.starts_B[at] : batch.flat.starts_B[at] + heads_B[at]].tolist()) for at in firsts
    )
    if any(after[: len(before)] == before for before, after in pairwise(texts)):
        return None
    return warning(
        f"every group mixes prompts: {int(prompts_G[0])} of them, with {int(often_P[0])} responses each, lie under "
        "one group id",
        batch.laid.where("group_id" if batch.columns.ref("group_id") else None, sample=0),
        shown("different prompts in each group", int(prompts_G[0]), "1", f"groups of {batch.name}"),
        shown("responses of each prompt", int(often_P[0])),
        cause="the id is not unique (a counter per worker, an index modulo something, a hash that is cut short): the "
        "baseline is a mean over answers to different questions",
    )


#: How often a cycle of several steps has to come again, to the last step, before it is a loader that goes back.
CYCLES = 2


def _in_order(turns: list[list[bytes]], by: int) -> bool:
    """Whether every step has its prompts in the order of the step that is so many before it."""
    return all(turns[at] == turns[at - by] for at in range(by, len(turns)))


#: Words for what is trained on.
_DATA = regex(r"(?:^|_)(?:data|dataset|train_data|train_size|train_samples|prompt_data)(?:_|$)")
_OF_A_STEP = regex(r"batch|per_|rollout|step|unique|group")
_SO_MANY = regex(r"\b(\d{1,9})(?: \w+)? (?:prompts|problems|questions|examples|samples|rows|items)\b")


def _states_so_many(case: Case, count: int) -> bool:
    """Whether the run states, as a number or in words, that its data are so many prompts."""
    for name, values in settings_of(stated_by(case.run)).items():
        if _DATA.search(name.lower()) is None or _OF_A_STEP.search(name.lower()):
            continue
        for value in values:
            said = {int(one) for one in _SO_MANY.findall(value)} if isinstance(value, str) else {value}
            if count in said:
                return True
    return False


@rule("D43", "steps have the prompts of other steps", link="tokens", scope="case",
      source="a sampler that is never advanced, or seeded anew; a resume without the data loader's state")  # fmt: skip
def same_prompts(case: Case) -> Finding | None:
    """The same set of prompts in every step, over 3 steps and more: worth knowing, since a run on one batch is a way to
    test a trainer, and nothing in a dump tells it from a loader that stands still; over 5 and more a warning, unless
    each step has them in an order of its own (a small data set that is shuffled), or the run states a data set of as
    many prompts. A warning is a
    set that 3 steps and more to the last have, after others. Sets that come again once in the same order, in 3 steps
    and more, before new ones or none, are worth knowing, and a warning where the run states that it shuffles: a small
    data set that it does not shuffle looks so, too. A warning where a cycle of several steps comes again twice and
    more, in the same order, to the last of 5 steps and more, and the run states that it shuffles. Steps that train on
    the rollouts of an earlier one are left out.
    """
    steps: list[int] = []
    sets: list[frozenset[bytes]] = []
    turns: list[list[bytes]] = []
    rollouts: set[bytes] = set()
    where = None
    for batch in case.batches():
        prompts, answers = asked_of(batch), answers_of(batch)
        if batch.step is None or prompts is None or answers is None or batch.step in steps:
            continue
        whole = blake2b(repr((prompts, answers)).encode(), digest_size=16).digest()
        if whole in rollouts:
            continue
        rollouts.add(whole)
        sets.append(frozenset(prompts))
        turns.append([prompt for prompt, _ in groupby(prompts)])
        steps.append(batch.step)
        where = where or batch.laid.where("input_ids" if batch.tokens_N is not None else "prompt_text", sample=0)
    skip_if(len(steps) < SAME, f"needs the prompts of {SAME} steps")
    at = next((at for at, each in enumerate(sets) if each in sets[:at]), len(sets))
    by = at - max((back for back, each in enumerate(sets[:at]) if at < len(sets) and each == sets[at]), default=0)
    again = next((more for more in range(len(sets) - at) if sets[at + more] != sets[at + more - by]), len(sets) - at)
    every = at == by == 1
    count = len(sets[min(at, len(sets) - 1)])
    after, shuffles = sets[at + again :], any(map(case.algorithm.is_on, _SHUFFLES))
    # A loader that stands still hands them over in one order; rows that a trainer reordered part the groups.
    by_group = every and all(len(each) == count for each in turns)
    shuffled = by_group and len({tuple(each) for each in turns}) > len(turns) / 2
    # Parts of a small data set that nobody shuffles take turns as well.
    cycles = by > 1 and at == by and again == len(sets) - at >= CYCLES * by and len(steps) >= LONG
    if shuffles and cycles and _in_order(turns, by):
        return warning(
            f"the prompts begin again every {by} steps: the same {len(frozenset[bytes]().union(*sets))} of them, in "
            f"the same order, in all {len(steps)} steps",
            where,
            shown("steps with prompts of an earlier one", share(again, len(steps)), "none"),
            shown("steps before they come again", by), shown("prompts of a step", count),
            cause="the data loader goes back to its beginning (an iterator or a sampler that is made or seeded anew, a "
            f"state that is restored again and again) after {by} steps, and the run states that it shuffles: the "
            "policy learns a few prompts by heart",
            steps=steps[at:],
        )  # fmt: skip
    is_whole = every and _states_so_many(case, count)
    # One prompt alone may be drawn twice.
    if again < (LONG if count == 1 and not every else SAME) - (by == 1):
        return None
    if after if by == 1 else by < SAME or again > by or any(each in sets[:at] for each in after):
        return None
    return finding(
        "warning"
        if (len(steps) >= LONG and not shuffled and not is_whole if every else by == 1 or shuffles)
        else "info",
        f"every step has the same prompts ({count} of them, {len(steps)} steps)"
        + (", in an order of its own" if shuffled else "")
        if every
        else f"steps {listed(steps[at - 1 :])} have the same prompts ({count} of them): they are drawn no more"
        if by == 1
        else f"the prompts begin again at step {steps[at]}: steps {listed(steps[at : at + again])} have those of steps "
        f"{listed(steps[at - by : at - by + again])}, in the same order",
        where,
        shown("steps with prompts of an earlier one", share(again, len(steps))),
        shown("prompts", count),
        cause="the data are one batch, shuffled again for each step: right where so few prompts are meant"
        if shuffled
        else "the run states a data set of as many prompts: each step is a pass over all of it"
        if is_whole
        else "the data loader is made or seeded anew in every step, or never advanced; or the data are one batch"
        if every
        else "the data loader stands still: an iterator that is made anew in every step, or an index that is not "
        "advanced; the policy is trained on one batch again and again"
        if by == 1
        else "the data loader begins at its first prompts again: a run that resumed without the loader's state; or a "
        "data set of so few prompts that is not shuffled",
        steps=steps if every else steps[at - (by == 1) : at + again],
    )


@rule("D47", "prompts begin twice", link="tokens", scope="batch", needs=("tokens",),
      explains=("D09", "D12", "D27"), lasts=True,
      source="transformers chat templates that write BOS, tokenised with add_special_tokens=True")  # fmt: skip
def doubled_beginning(batch: StepBatch) -> Finding | None:
    """Every sample begins with one token twice, which stands nowhere else: a doubled BOS. An error. The trainer's rows
    alone have it where the engine disagrees by more than precision comes to (.03 nats per token).
    """
    tokens_N, starts_B, lengths_B = given(batch.tokens_N), batch.flat.starts_B, batch.flat.lengths_B
    skip_if(len(batch) < 2 or (lengths_B < 3).any(), "needs two samples of three tokens and more")
    begins_B = tokens_N[starts_B]
    if (begins_B != begins_B[0]).any() or (tokens_N[starts_B + 1] != begins_B).any() or begins_B[0] == batch.pad_id:
        return None
    elsewhere = int((tokens_N == begins_B[0]).sum()) - 2 * len(batch)
    if elsewhere > 0.1 * len(batch):
        return None
    apart = distance(batch)
    alone = apart is not None and apart > DISAGREE
    return error(
        f"every prompt begins with token {int(begins_B[0])} twice: a doubled BOS"
        + (", in the trainer's rows alone: the engine's log-probabilities are of other prompts" if alone else ""),
        batch.laid.where("input_ids", at=int(starts_B[0]) + 1),
        shown("samples that begin so", share(len(batch), len(batch)), "none", f"token ids of {batch.name}"),
        shown("the token elsewhere", elsewhere),
        *([] if apart is None else [shown("mean |trainer - rollout|", apart, f"< {DISAGREE} nats")]),
        cause="the chat template writes the token, and the tokenizer adds its own (add_special_tokens=True)",
    )


#: Groups before it is no chance; nats of a response under which drawing it twice is none.
GROUPS, IMPROBABLE = 4, -1.0


@rule("D64", "all responses of a group are one", link="tokens", scope="batch",
      needs=("group", "tokens", "response", "rollout_logprobs|trainer_logprobs"),
      explains=("D01", "D03", "D26", "D43", "D55"), lasts=True,
      source="vLLM and SGLang: a seed in the sampling parameters is every sample's own")  # fmt: skip
def one_response(batch: StepBatch) -> Finding | None:
    """Groups of two and more responses that are token for token the same, in 9 of 10 groups (4 and more), while
    responses differ between groups and are improbable (mean log-probability of a response below -1): an error. A policy
    that is sure of its answer writes it again and again.
    """
    # The epochs of a batch are one drawing; without them, equal samples were drawn that often.
    if are_passes(batch):
        batch = batch.once
    response_N = given(batch.response_N)
    said = batch.columns.of("rollout_logprobs") or given(batch.trainer)
    texts = given(answers_of(batch))
    several = [members for members in members_of(batch) if len(members) > 1]
    same = [members for members in several if len({texts[sample] for sample in members}) == 1]
    if len(several) < GROUPS or len(set(texts)) < 2:
        return None
    if len(same) < 0.9 * len(several):
        return None  # what stands in a group twice is told of all steps together
    mean = float(np.mean(batch.flat.sum(np.where(said.said_N & response_N, np.nan_to_num(said.values_N), 0.0))))
    skip_if(not mean < IMPROBABLE, "responses are so probable that drawing them twice is no wonder")
    return error(
        f"all responses of a group are identical, in {share(len(same), len(several))} groups: nothing is sampled",
        batch.laid.where("input_ids", sample=same[0][0]),
        shown("groups of one response, drawn several times", share(len(same), len(several)), "none"),
        shown("mean log-probability of a response, nats", mean, None, said.source),
        shown("samples of the first such group", listed(same[0])),
        cause="every sample of a group is drawn with the same seed, greedily, or one response is copied n times",
    )


#: Without log-probabilities: responses to a group, groups, and steps before they tell; of the groups that hold one
#: response, the share that another response of the run outdoes.
DRAWN, MANY, IN_STEPS, OUTDONE = 3, 12, 3, 0.25


@rule("D64", "all responses of a group are one", link="tokens", scope="case",
      explains=("D01", "D03", "D26", "D43", "D55"), lasts=True,
      source="vLLM and SGLang: a seed in the sampling parameters is every sample's own")  # fmt: skip
def one_response_by_text(case: Case) -> Finding | None:
    """Of samples without log-probabilities: groups (or prompts) of 3 responses and more that are one, in 9 of 10 groups
    (12 and more, over 3 steps), while groups differ, and a quarter of them earn less than the best of the run: a
    warning. A policy that is sure of its right answers writes them again and again, and teaches nothing either.

    An error, with log-probabilities, where every response of 9 of 10 groups of a step (of those with several) stands in
    it twice or more, each equally often, in half of the steps or in any one of 4 groups and more, and the chance of
    that is under e^-20 by the responses' own probabilities, in 4 groups and more. Groups of the stated size were drawn
    so, groups of so many times that size hold copies.
    """
    if (copies := _copies(case)) is not None:
        return copies
    same = known = outdone = 0
    found: set[bytes] = set()
    steps: list[int | None] = []
    where: Where | None = None
    paid: list[tuple[Array, list[int]]] = []
    for batch in case.batches():
        answers = answers_of(batch)
        if answers is None or batch.has("rollout_logprobs") or batch.has("trainer_logprobs"):
            continue
        several = [members for members in members_of(batch) if len(members) >= DRAWN]
        ones = [members for members in several if len({answers[sample] for sample in members}) == 1]
        known, same = known + len(several), same + len(ones)
        found |= {answers[members[0]] for members in ones}
        if ones:
            steps.append(batch.step)
            where = where or batch.laid.where("response_text", sample=ones[0][0])
        if batch.reward_B is not None:
            paid.append((batch.reward_B, [members[0] for members in ones]))
    skip_if(known < MANY, f"needs {MANY} groups of {DRAWN} responses, without log-probabilities")
    if same < 0.9 * known or len(steps) < IN_STEPS or len(found) < 2:
        return None
    best = max((float(np.nanmax(rewards_B)) for rewards_B, _ in paid if np.isfinite(rewards_B).any()), default=math.inf)
    outdone = sum(int((rewards_B[heads] < best - 1e-6).sum()) for rewards_B, heads in paid)
    if paid and outdone < OUTDONE * same:
        return None
    return warning(
        f"all responses of a group are identical, in {share(same, known)} groups: nothing is sampled, and no group has "
        "a spread",
        where,
        shown("groups of one response, drawn several times", share(same, known), "few"),
        shown("of them with less than the best reward of the run", share(outdone, same)),
        shown("different responses among them", len(found)),
        cause="every sample of a group is drawn with the same seed, greedily (temperature 0), or one response is "
        "copied n times. (Of a policy that has come to one answer for each prompt the same is seen; its "
        "log-probabilities would tell)",
        steps=steps,
    )


#: The logarithm of a chance that no run has.
CHANCE = -20.0


def _is_sampled(sheet: Sheet) -> bool:
    """Whether a sheet holds what was sampled, once: the rollouts, or the whole input of each rank's update."""
    keys = [part.held.record.key for part in sheet.parts]
    whole = len({key.rank for key in keys}) == len(keys)
    return all(key.stage == "trajectory" or (key.stage == "batch_inputs" and whole) for key in keys)


class _Copies(Struct, frozen=True):
    """A step in whose groups every response stands several times."""

    batch: StepBatch
    times: int
    members: list[int]
    groups: int
    several: int
    chance: float
    source: str


def _copies(case: Case) -> Finding | None:
    """Groups in which every response stands k times: what ranks draw with one seed."""
    looked = 0
    found: list[_Copies] = []
    for each in case.batches():
        if not all(each.has(name) for name in ("group", "tokens", "response")):
            continue
        # The epochs of a batch are one drawing; without them, equal samples were drawn that often.
        batch = each.once if are_passes(each) else each
        said, texts = batch.columns.of("rollout_logprobs") or batch.trainer, answers_of(batch)
        if said is None or texts is None:
            continue
        # A group of one response tells nothing of copies.
        several = [members for members in members_of(batch) if len({texts[sample] for sample in members}) > 1]
        looked += bool(several)
        if (one := _drawn_twice(batch, several, texts, said)) is not None:
            found.append(one)
    sure = [one for one in found if one.groups >= GROUPS and one.chance <= CHANCE]
    told = found if 2 * len(found) >= looked else sure
    if sum(one.groups for one in told) < GROUPS or sum(one.chance for one in told) > CHANCE:
        return None
    return _of_copies(max(told, key=lambda one: one.groups), told)


def _drawn_twice(batch: StepBatch, several: list[list[int]], texts: list[bytes], said: Column) -> _Copies | None:
    response_N = given(batch.response_N)
    # A trainer's rows may be those of several epochs: what was sampled must stand as often.
    if not any(_is_sampled(sheet) and len(sheet) == len(batch) for sheet, _ in batch.columns.sheets):
        return None
    sums_B = batch.flat.sum(np.where(said.said_N & response_N, np.nan_to_num(said.values_N), 0.0))
    doubled, chance = [], 0.0
    for members in several:
        each = Counter(texts[sample] for sample in members)
        times = math.gcd(*each.values())
        if times < 2:
            continue
        doubled.append((times, members))
        of_text = {texts[sample]: float(sums_B[sample]) for sample in members}
        # Each of the others draws this text with its probability.
        chance += sum(min(0.0, math.log(len(members)) + logp) for logp in of_text.values())
    if not doubled or len(doubled) < 0.9 * len(several):
        return None
    of_rank: dict[int | None, list[bytes]] = {}
    for sample, key in enumerate(batch.laid.keys_of("input_ids")):
        of_rank.setdefault(None if key is None else key.rank, []).append(texts[sample])
    copies = Counter(tuple(sorted(held)) for held in of_rank.values())
    if len(of_rank) > 1 and min(copies.values()) > 1:
        return None  # ranks that hold the same samples are D65's: those of a tensor-parallel group do on purpose
    return _Copies(batch, *doubled[0], len(doubled), len(several), chance, said.source)


def _of_copies(one: _Copies, told: list[_Copies]) -> Finding:
    batch, times, members = one.batch, one.times, one.members
    groups, several = sum(each.groups for each in told), sum(each.several for each in told)
    # Groups of the stated size were drawn so; larger ones were put together of copies.
    stated = batch.laid.algorithm.number(*GROUP_SIZE)
    gathered, drawn = (stated is not None and len(members) == each for each in (times * (stated or 0), stated))
    return error(
        f"every response of a group stands in it {times} times, in {share(groups, several)} groups"
        + (f": {times} engines draw the same samples" if drawn else "")
        + (
            f", of {len(members)} in place of the {stated:g} that are stated: the batch holds copies"
            if gathered
            else ""
        ),
        batch.laid.where("input_ids", sample=members[0]),
        shown("groups in which each response stands several times", share(groups, several), "none"),
        shown("log of the chance of it, by the responses' probabilities", sum(each.chance for each in told), None,
              one.source),
        shown("samples of the first such group", listed(members)),
        cause="the batch was put together with itself, or a gather duplicated what every rank had: others that were "
        "drawn may be missing"
        if gathered
        else "the replicas of the engine (one for each data-parallel rank) share a random seed: a group is "
        f"{times} times smaller than it looks"
        if drawn
        else "the replicas of the engine (one for each data-parallel rank) share a random seed, or a gather holds "
        f"each sample {times} times: a group is {times} times smaller than it looks",
        steps=[each.batch.step for each in told if each.batch.step is not None],
    )  # fmt: skip


@rule("D75", "samples stand in a batch twice", link="tokens", scope="batch",
      needs=("group", "tokens", "response", "rollout_logprobs"), lasts=True,
      source="a batch that is repeated to fill it up; a gather of what every rank already has")  # fmt: skip
def stands_twice(batch: StepBatch) -> Finding | None:
    """Samples that have the tokens and, bit for bit, the rollout log-probabilities of one of another group: a quarter
    of the batch and more, of responses whose mean log-probability is below -1, is a warning. An engine's numbers of two
    drawings of one text agree but for their batch; the epochs of a batch are one.

    A warning, too, where the last rows of the batch are its first ones, in order, bit for bit, count tokens, and leave
    groups of one size without them. And where a quarter and more of the rows have a twin in their own group, more than
    their probabilities explain, whose groups are not of one response (D64).
    """
    if are_passes(batch):
        batch = batch.once
    group_B, said = given(batch.group_B), given(batch.columns.of("rollout_logprobs"))
    if (filled := _filled_up(batch, group_B, said)) is not None:
        return filled
    keys: dict[bytes, set[int]] = {}
    each = []
    for start, length in zip(batch.flat.starts_B, batch.flat.lengths_B, strict=True):
        span = slice(int(start), int(start + length))
        told_T = np.where(said.said_N[span], said.values_N[span], 0.0)
        key = given(batch.tokens_N)[span].tobytes() + told_T.tobytes()
        each.append(key)
        keys.setdefault(key, set()).add(int(group_B[len(each) - 1]))
    twice_B = np.array([len(keys[key]) > 1 for key in each], dtype=bool)
    heard_N = said.said_N & given(batch.response_N)
    sums_B = batch.flat.sum(np.where(heard_N, np.nan_to_num(said.values_N), 0.0))
    twice_B &= sums_B < IMPROBABLE
    # Groups of one prompt may draw one text twice: as often as it is probable, times those that draw.
    prompt_B = batch.prompt_B
    if prompt_B is not None:
        theirs_B = np.unique(np.stack([prompt_B, group_B]), axis=1, return_inverse=True, return_counts=True)
        others_B = np.bincount(prompt_B)[prompt_B] - theirs_B[2][theirs_B[1].reshape(-1)]
        if twice_B.sum() <= 3 * _by_chance(others_B, sums_B) + 2:
            return _twice_in_its_group(batch, group_B, each, sums_B, said)
    if twice_B.sum() < 4 or twice_B.mean() < 0.25:
        return _twice_in_its_group(batch, group_B, each, sums_B, said)
    return warning(
        f"{share(int(twice_B.sum()), len(batch))} samples stand in the batch twice, under another group",
        batch.laid.where("input_ids", sample=twice_B),
        shown("samples with the tokens and log-probabilities of another group's", int(twice_B.sum()), "0", said.source),
        shown("different samples", len(keys), str(len(batch))),
        cause="the batch was filled up by repeating it, ranks drew the same prompts with the same seed, or a gather "
        "duplicated what they had: the batch is smaller than it looks",
    )


def _by_chance(others_B: Array, sums_B: Array) -> float:
    """How many samples have a twin by chance, of log-probabilities and of as many others drawn to their prompt."""
    return float(np.minimum(1.0, np.maximum(others_B, 0) * np.exp(np.minimum(sums_B, 0.0))).sum())


#: The log-probability of rows that come again in their order, before it is no chance.
IN_ORDER = -14.0


def _twice_in_its_group(
    batch: StepBatch, group_B: Array, each: list[bytes], sums_B: Array, said: Column
) -> Finding | None:
    """Rows that are copies of others of their group: what doubles a batch under the ids that it had."""
    # Later passes over one rollout are recorded as micro-batches of their own.
    micro_of = {row: micro for (_, micro), samples in batch.laid.rows_by_micro().items() for row in samples}
    # So are they where rows say what the policy gave them in a pass: after an update that is another number.
    passes = keys_of(batch, "policy_logprobs") if batch.has("policy_logprobs") else [None] * len(each)
    rows = [
        (group, key, micro_of.get(row), passes[row])
        for row, (group, key) in enumerate(zip(group_B.tolist(), each, strict=True))
    ]
    counts = Counter(rows)
    twice_B = np.array([counts[row] > 1 for row in rows], dtype=bool) & (sums_B < IMPROBABLE)
    sizes = np.bincount(group_B)
    half = len(rows) // 2
    # Of two halves that are one, each row has its twin at its own place: chance draws all of them in their order.
    doubled = 2 * half == len(rows) and rows[:half] == rows[half:] and float(sums_B[:half].sum()) < IN_ORDER
    chance = 0.0 if doubled else _by_chance(sizes[group_B] - 1, sums_B)
    if twice_B.sum() < 4 or twice_B.mean() < 0.25 or twice_B.sum() <= 3 * chance + 2:
        return None
    different = np.bincount(np.array([group for group, *_ in counts]), minlength=sizes.size)
    # A group of one response over and over is how its engine samples.
    if 2 * int((different[sizes > 1] > 1).sum()) < int((sizes > 1).sum()):
        return None
    by_rank = _by_rank(batch) if doubled else None
    return warning(
        f"ranks {listed(by_rank)} hold the same {half // (len(by_rank) // 2)} samples each: all {half} stand in the "
        f"batch twice"
        if by_rank
        else f"the second half of the batch is a copy of the first: {half} samples stand in it twice, under the same "
             f"groups"
        if doubled
        else f"{share(int(twice_B.sum()), len(batch))} samples stand in their group twice, to the last bit of their "
        "log-probabilities",
        batch.laid.where("input_ids", sample=half if doubled else twice_B),
        shown("samples with the tokens and log-probabilities of another of their group", int(twice_B.sum()), "0",
              said.source),
        shown("different samples", len(counts), str(len(batch))),
        shown("samples of a group", listed(sorted({int(size) for size in sizes if size}))),
        cause="the sampler does not know the rank: data-parallel ranks take the same rows (no DistributedSampler, "
              "one seed "
        "and no shard), so that they train on one half of what the batch counts; ranks of one tensor-parallel group "
        "hold "
        "the same samples on purpose"
        if by_rank
        else "a gather duplicated what every rank had, the batch was filled up or concatenated with itself, or the "
        "engine drew with one seed more than once: a group has fewer answers than it counts, and these weigh double",
    )  # fmt: skip


def _by_rank(batch: StepBatch) -> list[int] | None:
    """The ranks, where the samples of the batch's first half are those of some, and those of its second of as many
    others.
    """
    keys = batch.laid.keys_of("input_ids")
    if any(key is None or key.rank is None for key in keys):
        return None
    half = len(keys) // 2
    first, second = ({key.rank for key in part if key is not None and key.rank is not None}
                     for part in (keys[:half], keys[half:]))  # fmt: skip
    return sorted(first | second) if not first & second and len(first) == len(second) else None


def _filled_up(batch: StepBatch, group_B: Array, said: Column) -> Finding | None:
    """Rows at the end that are those at the beginning: what pads a batch to a size that ranks divide."""
    trained_N = batch.trained_N
    if trained_N is None:
        return None
    spans = batch.flat.spans
    said_N, tokens_N = np.where(said.said_N, said.values_N, 0.0), given(batch.tokens_N)
    rows = [tokens_N[span].tobytes() + said_N[span].tobytes() + b"%d" % group_B[n] for n, span in enumerate(spans)]
    # As many as stand at the end again: the row that the last one is tells how many.
    more = rows.index(rows[-1]) + 1
    if 2 * more > len(rows) or rows[:more] != rows[-more:]:
        return None
    sizes, before = (np.unique(np.bincount(each)[np.unique(each)]) for each in (group_B, group_B[:-more]))
    heard_N = said.said_N & given(batch.response_N) & trained_N
    counted_B, sums_B = batch.flat.count(heard_N), batch.flat.sum(np.where(heard_N, said_N, 0.0))
    if before.size > 1 or sizes.size < 2 or not counted_B[-more:].all() or not sums_B[-more:].mean() < IMPROBABLE:
        return None
    return warning(
        f"the last {more} samples of the batch are its first {more}, and count: rows that fill it up are trained on",
        batch.laid.where("input_ids", sample=len(rows) - more),
        shown("rows at the end that are those at the beginning", more, "0", said.source),
        shown("tokens of them that count", int(counted_B[-more:].sum()), "0"),
        shown("samples of a group without them", int(before[0])),
        cause="the batch was padded with copies to a size that ranks or micro-batches divide, and they were neither "
        "taken out nor masked: these samples count twice",
    )


@rule("D65", "ranks hold the same samples", link="tokens", scope="case", explains=("D75",),
      source="a sampler whose seed does not know the rank")  # fmt: skip
def ranks_alike(case: Case) -> Finding | None:
    """The tokens of all samples of two ranks the same in every one of 3 steps and more: a warning where they go by
    other group or sample ids on each rank, the run states data parallel ranks and no others, or every recorded matrix
    of the weights (or gradients) is whole and the same on each rank. Ranks of one tensor-parallel group hold the same
    samples on purpose, and parts of the weights.

    A warning, too, where in all of 3 steps and more every prompt (of 2 and more, not the same in all steps) stands in
    as many groups of other ids, in two or more: each rank samples its own answers to the prompts of all.
    """
    if (asked := _asked_alike(case)) is not None:
        return asked
    alike: list[int] = []
    first: StepBatch | None = None
    ranks: list[int] = []
    unsure = False
    for batch in case.batches():
        keys = _owners(batch)
        if batch.step is None or batch.tokens_N is None or any(key is None or key.rank is None for key in keys):
            continue
        by_rank: dict[int, list[tuple[bytes, str]]] = {}
        names = next((found for name in ("group_id", "uid", "sample_id") if (found := batch.columns.texts(name))), None)
        for sample, key in enumerate(keys):
            start = batch.flat.starts_B[sample]
            tokens = batch.tokens_N[start : start + batch.flat.lengths_B[sample]].tobytes()
            if key is not None and key.rank is not None:
                by_rank.setdefault(key.rank, []).append((tokens, names[sample] if names else ""))
        skip_if(len(by_rank) < 2, "samples are of one rank")
        contents = {tuple(sorted(tokens for tokens, _ in rows)) for rows in by_rank.values()}
        if len(contents) > 1:
            return None
        named = {tuple(sorted({name for _, name in rows})) for rows in by_rank.values()}
        algorithm = batch.laid.algorithm
        split = max(algorithm.number(name) or 1 for name in _SPLIT)
        whole = max(algorithm.number(name) or 1 for name in _WHOLE)
        if len(named) < len(by_rank) and (split > 1 or whole < 2):
            replicas = split == 1 and _are_replicas(case, set(by_rank))
            skip_if(replicas is False, "ranks that hold the same samples may be of one tensor-parallel group")
            unsure = unsure or replicas is None
        alike.append(batch.step)
        first, ranks = first or batch, sorted(by_rank)
    if first is None or len(alike) < SAME:
        raise Skip(f"needs the samples of two ranks in {SAME} steps")
    return finding(
        "info" if unsure else "warning",
        f"ranks {listed(ranks)} hold the same samples: they train on identical batches in all {len(alike)} steps"
        + (
            ", as ranks of one tensor-parallel group do; of data-parallel ranks it is a sampler that is not sharded"
            if unsure
            else f", each of which stands in the whole batch {len(ranks)} times"
        ),
        first.laid.where("input_ids", sample=0),
        shown("steps in which their tokens are the same", share(len(alike), len(alike)), "none"),
        cause="the sampler's seed does not know the rank: data-parallel ranks draw the same prompts with the same seed",
        steps=alike,
    )


def _owners(batch: StepBatch) -> list[RecordKey | None]:
    """The key of the record that each sample is of: of its own, as twins on two ranks tell nothing apart elsewhere."""
    own = [batch.spine.parts[part].held.record.key for part, _ in batch.spine.index]
    return [*own] if all(key.rank is not None for key in own) else batch.laid.keys_of("input_ids")


def _asked_alike(case: Case) -> Finding | None:
    """Prompts that all stand in as many groups, two or more, in every step."""
    sets: list[frozenset[bytes]] = []
    steps: list[int] = []
    times, ranks, where = 0, [0], None
    sizes: set[int] = set()
    meant: float | None = None
    split = copied = True
    for batch in case.batches():
        prompts = asked_of(batch)
        if batch.step is None or prompts is None or batch.group_B is None or not batch.group_is_named:
            continue
        pairs = set(zip(batch.group_B.tolist(), prompts, strict=True))
        groups = Counter(prompt for _, prompt in pairs)
        often = set(groups.values())
        if len(pairs) > len(np.unique(batch.group_B)) or len(groups) < 2 or len(often) > 1 or often == {1}:
            return None
        sets.append(frozenset(groups))
        steps.append(batch.step)
        sizes.update(np.bincount(batch.group_B).tolist())
        keys = _owners(batch)
        owners: dict[bytes, set[tuple[int, int | None]]] = {}
        for prompt, group, key in zip(prompts, batch.group_B.tolist(), keys, strict=True):
            owners.setdefault(prompt, set()).add((group, None if key is None else key.rank))
        split = split and all(len({rank for _, rank in each}) == len(each) for each in owners.values())
        copied = copied and _are_copies(batch, prompts)
        if where is None:
            ranks = sorted({key.rank for key in keys if key is not None and key.rank is not None})
            where = batch.laid.where("input_ids" if batch.tokens_N is not None else "prompt_text", sample=0)
            times, meant = often.pop(), batch.laid.algorithm.number(*GROUP_SIZE)
    if len(set(steps)) < SAME or len(set(sets)) < 2:
        return None
    size = next(iter(sizes)) if len(sizes) == 1 else None
    each_step = f"in all {len(sets)} steps"
    is_of_ranks = split and len(ranks) == times
    is_part = size is not None and meant is not None and size * times == meant
    if is_part and not copied and not is_of_ranks:
        return error(
            f"groups hold {size} answers, and the run states {meant:g}: the answers of each prompt are split into "
            f"{times} groups, {each_step}",
            where,
            shown("answers of a group", size, f"{meant:g}"), shown("groups of each prompt", times, "1"),
            link="groups",
            cause="group ids are made of another number than the answers of a prompt (a count of pairs, of a rank's "
            "rows): each group has a baseline and a spread of its own, of fewer answers than meant",
            next_step="print prompt and group id of the first rows side by side",
            steps=sorted(set(steps)),
        )  # fmt: skip
    if copied and is_of_ranks:
        return None  # ranks that hold one batch: `ranks_alike` says so of all they have
    told = [shown("groups of each prompt", times, "1"), shown("different prompts of the first step", len(sets[0]))]
    if copied:
        return warning(
            f"each prompt stands in {times} groups of the batch with the same answers, {each_step}: the batch holds "
            f"every sample {times} times",
            where,
            *told,
            cause="the batch is repeated to fill it up, or a gather adds what every rank already has: it is smaller "
            "than it looks",
            steps=sorted(set(steps)),
        )
    return finding(
        "info" if is_part else "warning",
        f"each prompt stands in {times} groups of the batch, {each_step}"
        + (f": ranks {listed(ranks)} are given the same ones" if is_of_ranks else ""),
        where,
        *told,
        *([] if meant is None else [shown("answers of a group", listed(sorted(sizes)), f"{meant:g}")]),
        cause="each rank holds a part of every group, under ids of its own: a baseline that a rank makes for itself is "
        "of fewer answers than the run states"
        if is_part
        else "the sampler is not sharded: every data-parallel rank draws the same prompts (a seed or an "
        "index that does not know the rank, no DistributedSampler); the batch has fewer prompts than it should"
        if is_of_ranks
        else "ranks (or workers) that draw the same prompts, as a sampler that is not sharded does; prompts that are "
        "repeated before they are grouped; or group ids that split the answers of one prompt: each has fewer answers "
        "to compare with than it could",
        steps=sorted(set(steps)),
    )


def _are_copies(batch: StepBatch, prompts: list[bytes]) -> bool:
    """Whether the groups of each prompt hold the same answers."""
    answers, group_B = answers_of(batch), given(batch.group_B)
    if answers is None:
        return False
    held: dict[bytes, dict[int, list[bytes]]] = {}
    for prompt, group, answer in zip(prompts, group_B.tolist(), answers, strict=True):
        held.setdefault(prompt, {}).setdefault(group, []).append(answer)
    alike = [len({tuple(sorted(each)) for each in groups.values()}) == 1 for groups in held.values()]
    several = len({answer for groups in held.values() for each in groups.values() for answer in each})
    return all(alike) and several > len(held)


def _are_replicas(case: Case, ranks: set[int]) -> bool | None:
    """Whether each of these ranks recorded the same weights, or gradients, under the same names, in whole matrices: a
    tensor-parallel group splits the projections, and a pipeline the layers. None where none recorded any.
    """
    by_rank: dict[int, dict[str, bytes]] = {}
    step: int | None = None
    for record in case.records():
        rank = record.key.rank
        if record.key.stage not in ("param", "gradient") or rank not in ranks or rank is None:
            continue
        step = record.key.step if step is None else step
        if record.key.step != step or stored_bytes(record.path) > LARGE:
            continue
        for ref in record.tensors():
            if ref.is_readable and not ref.is_text and len(ref.shape) > 1 and _SPLIT_ONES.search(ref.name):
                digest = blake2b(pages.array(ref).tobytes(), digest_size=16).digest()
                by_rank.setdefault(rank, {})[f"{record.key.stage} {record.key.micro} {ref.name}"] = digest
    held = list(by_rank.values())
    if not held:
        return None
    return by_rank.keys() == ranks and bool(held[0]) and all(each == held[0] for each in held)


#: Matrices that tensor parallelism splits, and files of weights that are read for it at most.
_SPLIT_ONES = regex(
    r"(?i)qkv|[qkvo]_?proj|(?:up|gate|down)(?:_proj)?\.|mlp|fc[12]|dense|linear|w[123o]\b|c_attn|c_proj|\.[qkvo]\.weight"
    r"|lm_head|\.head\.weight"
)
LARGE = 1 << 26
#: Settings under which ranks hold the same samples, and those of ranks that do not.
_SPLIT = ("tensor_parallel_size", "tensor_model_parallel_size", "tp_size", "tp", "context_parallel_size", "cp_size",
          "pipeline_model_parallel_size", "pp_size", "ulysses_sequence_parallel_size", "sp_size")  # fmt: skip
_WHOLE = ("ranks", "world_size", "dp_size", "data_parallel_size", "num_ranks")
#: Share of prompts that are as long as the limit from which it is the limit, not the prompts, that ends them.
AT_LIMIT = 0.9


#: Prompts that tell of a lost beginning, and as many that still have it.
CUT = 3


@rule("L28", "prompts are cut", link="tokens", scope="case", lasts=True,
      explains=("L08", "L17", "D01", "D03", "D20"),
      source="verl data.truncation (left, right, middle) and max_prompt_length")  # fmt: skip
def beginnings_lost(case: Case) -> Finding | None:
    """Recorded prompts of which all shorter than the longest (3 and more different ones) begin with one token, as a BOS
    or a chat template makes it, and 3 and more of the longest do not: they were cut from the left. A warning, an error
    where their length is the limit that is stated.

    A warning, too, where a fifth of the prompts and more (8 different ones) have one end, which stands nowhere else in
    any, and 4 and more have ends of their own: they were cut on the right. Each step's are then the longest of it, by
    tokens all of one length; by texts longer than what stands before the end in 9 of 10 others.
    """
    if (cut := _ends_lost(case)) is not None:
        return cut
    prompts: dict[bytes, tuple[int, int]] = {}
    where: dict[tuple[int, int], Where] = {}
    steps: dict[tuple[int, int], set[int]] = {}
    for batch in case.batches():
        if batch.tokens_N is None or batch.response_N is None or batch.step is None or _are_padded(batch):
            continue
        for sample, (start, head) in enumerate(
            zip(batch.flat.starts_B, batch.flat.first(batch.response_N), strict=True)
        ):
            if head <= 0:
                continue
            begins = (int(head), int(batch.tokens_N[start]))
            prompts[batch.tokens_N[start : start + head].tobytes()] = begins
            where.setdefault(begins, batch.laid.where("input_ids", sample=sample))
            steps.setdefault(begins, set()).add(batch.step)
    skip_if(not prompts, "needs prompts and their steps")
    longest = max(length for length, _ in prompts.values())
    shorter = [token for length, token in prompts.values() if length < longest]
    odd = [one for one in prompts.values() if one[0] == longest and shorter and one[1] != shorter[0]]
    if len(set(shorter)) != 1 or len(shorter) < CUT or len(odd) < CUT:
        return None
    stated = case.algorithm.number("max_prompt_length", "prompt_max_len", "max_input_length")
    return finding(
        "error" if stated == longest else "warning",
        f"prompts are cut from the left to {longest} tokens: {len(odd)} of the longest lack the beginning "
        f"({shorter[0]}) that all others have",
        where[odd[0]],
        shown("different prompts that begin otherwise, all of them of the largest length", len(odd), "none"),
        shown("different shorter prompts, which all begin with it", len(shorter)),
        shown("largest length of a prompt, tokens", longest),
        *([] if stated is None else [shown("limit that is stated", stated)]),
        cause="max_prompt_length is too small for these prompts, and they are truncated from the left: their beginning "
        "(BOS, system prompt, the first words of the question) is lost, and with it what is asked",
        next_step="raise max_prompt_length, or filter prompts that are longer",
        steps=sorted(set().union(*(steps[one] for one in odd))),
    )


def _are_padded(batch: StepBatch) -> bool:
    """Whether rows of one width, whose responses begin in one column, begin with their padding: one token, twice and
    more, in two rows and more. No mask tells it from the prompt.
    """
    if batch.tokens_N is None or batch.response_N is None or not len(batch):
        return False
    starts_B, heads_B = batch.flat.starts_B, batch.flat.first(batch.response_N)
    if np.ptp(batch.flat.lengths_B) or np.ptp(heads_B) or heads_B[0] < 2:
        return False
    first_B, second_B = batch.tokens_N[starts_B], batch.tokens_N[starts_B + 1]
    counts = Counter(first_B[first_B == second_B].tolist())
    return max(counts.values(), default=0) >= 2


#: Prompts that have an end and the share of all that they are, those that lack it, and how often a cut text is longer.
WHOLE, OF_ALL, LACK, LONGER = 8, 0.2, 4, 0.9


def _ends_lost(case: Case) -> Finding | None:
    """Prompts without the end that others have, as a chat template makes it: the longest of their steps."""
    by_step: dict[int, set[str]] = {}
    places: dict[str, Where] = {}
    in_tokens = True
    for batch in case.batches():
        asked, has_ids = asked_of(batch), batch.tokens_N is not None and batch.response_N is not None
        if asked is None or batch.step is None or (places and in_tokens != has_ids):
            continue
        in_tokens = has_ids
        for sample, prompt in enumerate(asked):
            # A token is a letter here: what an end is, is the same of both.
            ids = np.frombuffer(prompt, np.int64) if in_tokens else np.zeros(0, np.int64)
            skip_if(ids.size > 0 and not 0 <= ids.min() <= ids.max() <= sys.maxunicode, "token ids are none")
            text = "".join(map(chr, ids)) if in_tokens else prompt.decode("utf-8", "replace")
            by_step.setdefault(batch.step, set()).add(text)
            if text not in places:
                places[text] = batch.laid.where("input_ids" if in_tokens else "prompt_text", sample=sample)
    size = 1 if in_tokens else 2
    if len(places) < WHOLE + LACK or not all(places):
        return None
    ends = Counter(text[-size:] for text in places)
    some = sorted(text[::-1] for text in places if text[-size:] == ends.most_common(1)[0][0])
    both = takewhile(lambda pair: pair[0] == pair[1], zip(some[0], some[-1], strict=False))
    end = "".join(letter for letter, _ in both)[::-1]
    whole = {text for text in places if text.endswith(end)}
    lack = places.keys() - whole
    own = Counter(text[-size:] for text in lack)
    if len(whole) < max(WHOLE, OF_ALL * len(places)) or len(lack) < LACK or 2 * max(own.values()) > len(lack):
        return None
    if any(end in text[:-1] for text in places) or (not in_tokens and end[-size:].isalnum()):
        return None
    steps = sorted(step for step, texts in by_step.items() if texts & lack)
    pairs = [(cut, text) for step in steps for cut in by_step[step] & lack for text in by_step[step] & whole]
    longer = [len(cut) >= len(text) if in_tokens else len(cut) > len(text) - len(end) for cut, text in pairs]
    lengths = {len(text) for text in lack}
    if in_tokens and lengths == {len(text) for text in places}:
        return None  # all are as long: no limit cuts some of them, they end in what they are about
    if (in_tokens and len(lengths) > 1) or (longer and sum(longer) < (1 if in_tokens else LONGER) * len(longer)):
        return None
    if not longer and not by_step.keys() - set(steps):
        return None
    told = f"token {ord(end[-1])}" if in_tokens else repr(end[-20:])
    return warning(
        f"prompts are cut on the right: {len(lack)} of {len(places)} different ones, the longest of their steps, lack "
        f"the end ({told}) that all others have",
        next(places[text] for text in places if text in by_step[steps[0]] & lack),
        shown("different prompts without it", len(lack), "none"),
        shown("different prompts that end in it", len(whole)),
        shown("length of those without it", listed(sorted(lengths), 4), None, "tokens" if in_tokens else "characters"),
        cause="max_prompt_length is too small for these prompts, and they are truncated on the right: the end of the "
        "question and of the chat template is lost, and the policy goes on with the question instead of answering it",
        next_step="raise max_prompt_length, or filter prompts that are longer (truncation='error' names them)",
        steps=steps,
    )


@rule("L28", "prompts are cut", link="tokens", scope="signals", needs=("prompts_at_limit",), lasts=True,
      explains=("L08", "L17"),
      source="verl data.truncation (left, right, middle) and prompt_length/clip_ratio")  # fmt: skip
def prompts_cut(log: RunLog) -> Finding | None:
    """The share of prompts that are as long as the limit: 0.9 and more (median) in 3 steps and more is a warning. A
    limit that leaves nothing over in nearly every prompt is one that cuts them, or data that were cut to it before.
    """
    series = given(log.get("prompts_at_limit"))
    values = series.finite
    skip_if(len(values) < SAME, f"needs the share of prompts at the limit in {SAME} steps")
    now = median(values)
    if now < AT_LIMIT:
        return None
    return warning(
        f"prompts are cut: {now:.0%} of them are exactly as long as the limit",
        series.between(over=AT_LIMIT - 1e-09),
        series.shown(now, f"< {AT_LIMIT:g}"),
        cause="max_prompt_length is too small for these prompts, and they are truncated: their beginning (from the "
        "left) or their question is lost",
        next_step="raise max_prompt_length, or filter prompts that are longer; rldbg record -- YOUR COMMAND shows them",
    )
