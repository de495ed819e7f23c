"""Pairs of a better and a worse answer (DPO and the like), row by row: their masks, and what their loss is made of."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import numpy as np
from msgspec import Struct

from replay_core import naming, pages
from replay_core.diagnose.algorithm import Algorithm
from replay_core.diagnose.batch import StepBatch, mask_name
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Evidence, Finding, Where, error, finding, listed, share, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import given, rule, skip_if
from replay_core.diagnose.two_sides import sides_of
from replay_core.errors import RldbgError
from replay_core.records import Record, TensorRef
from replay_core.regexes import regex
from replay_core.samples.batch import IGNORED

#: Pairs, and losses of them, before they tell; and how near recomputed rewards and losses are.
PAIRS, LOSSES, CLOSE, EXACT = 4, 3, 1e-3, 2e-5
#: How many times nearer to its reference a policy is when rows are put right, and nats that it is off at least before.
NEARER, OFF = 5.0, 0.5
#: How near a number of the policy is to the reference's before any update: of one kernel, and in bf16. And how many
#: pairs, and which share of them, have to be another's.
SAME, FEWEST_MOVED, MOVED = (2e-4, 2e-2), 3, 0.25
#: Pairs, nats and the correlation below which policy and reference have nothing to do with each other.
UNRELATED, APART, GOES_WITH = 32, 0.3, 0.3
#: What a pair's number in the data is called.
_NUMBERS = ("index", "indices", "idx", "pair_id", "pair_ids", "sample_id", "sample_ids", "id", "ids")
_SIDE = r"(?:^|[._/ ])(?P<of>policy|ref|reference)?_?(?P<side>chosen|rejected)_?"
_LOGPS = regex(_SIDE + r"(?:logps|log_?probs?|logprobs)$", re.IGNORECASE)
_SIDES_OF = regex(r"chosen|rejected|(?:^|[._/ ])(?:kl|old|rollout)", re.IGNORECASE)
_WHOLE = regex(
    r"(?:^|[./])(?:policy_)?(?P<of>ref_|reference_)?(?:completion_|sequence_|seq_|target_|answer_)?"
    r"(?:logps|log_?probs?|logprobs)(?:_sum)?$", re.IGNORECASE,
)  # fmt: skip
REWARDS = regex(
    r"(?:^|[._/ ])(?:(?:rewards?|scores?)[_/])?(?P<side>chosen|rejected)(?:_(?:rewards?|scores?))?$", re.IGNORECASE
)
_REF_FIRST = regex(r"(?:^|[._/ ])(?P<of>ref|reference)_(?P<side>chosen|rejected)", re.IGNORECASE)


@rule("D153", "the prompt counts in one half of the pairs alone", link="masks", scope="case", lasts=True,
      explains=("D72", "D154", "D58"),
      source="OpenRLHF#294: masks of 2n rows are made with n prompt lengths")  # fmt: skip
def one_half(case: Case) -> Finding | None:
    """Rows in pairs (the i-th of the first half and of the second, or two that follow each other) that begin with the
    same tokens: an error where the mask of each of one side begins inside of what both share (after its second token),
    and that of each of the other at the first or second token, in all batches and 4 pairs and more: there the prompt's
    tokens are in the answer's log-probability.
    """
    found: list[tuple[StepBatch, str, Array, int]] = []
    pairs = looked = 0
    for batch in case.batches():
        if batch.tokens_N is None or batch.trained_N is None or len(batch) < 2 or len(batch) % 2:
            continue
        looked += 1
        told = _half(batch)
        if told is None:
            continue
        found.append((batch, *told))
        pairs += len(batch) // 2
    skip_if(not looked, "needs rows in pairs, their tokens and their mask")
    if len(found) < looked or pairs < PAIRS or len({which for _, which, *_ in found}) > 1:
        return None
    batch, which, counted_B, prompt = found[0]
    first_B = batch.flat.first(given(batch.trained_N))
    return error(
        f"the mask counts the prompt in {which} of the pairs alone: the log-probability of one answer holds its "
        "prompt's, the other's does not",
        batch.laid.where(mask_name(batch), sample=counted_B),
        shown("pairs that show it", share(pairs, pairs)),
        shown("first token that counts in these rows", int(first_B[counted_B].min()), f">= {prompt}"),
        shown("prompt tokens in the others, which count in none", prompt),
        cause="masks of twice as many rows are made with one prompt length for each pair (the lengths are not repeated "
        "for the second half, or zip ends early): margins are off by the prompt's log-probability, another in each "
        "pair",
        steps=[each.step for each, *_ in found],
    )  # fmt: skip


def _half(batch: StepBatch) -> tuple[str, Array, int] | None:
    """Which half counts the prompt, its rows [B], and the prompt's tokens in the first pair; None for none."""
    rows, half = np.arange(len(batch)), len(batch) // 2
    first_B = batch.flat.first(given(batch.trained_N))
    for a, b, names in (
        (rows[:half], rows[half:], ("the first half", "the second half (the rejected ones)")),
        (rows[0::2], rows[1::2], ("the first rows", "the second rows (the rejected ones)")),
    ):
        shared = np.array([_shared(batch, int(i), int(j)) for i, j in zip(a, b, strict=True)])
        for with_prompt, without, name in ((b, a, names[1]), (a, b, names[0])):
            inside = (first_B[without] > 1) & (first_B[without] <= shared)
            if inside.all() and (first_B[with_prompt] <= 1).all():
                marked_B = np.zeros(len(batch), dtype=bool)
                marked_B[with_prompt] = True
                return name, marked_B, int(first_B[without][0])
    return None


def _shared(batch: StepBatch, one: int, other: int) -> int:
    """How many tokens two rows begin with that are the same."""
    tokens_N, spans = given(batch.tokens_N), batch.flat.spans
    a, b = tokens_N[spans[one]], tokens_N[spans[other]]
    size = min(len(a), len(b))
    unlike = np.flatnonzero(a[:size] != b[:size])
    return int(unlike[0]) if unlike.size else size


class Pairs(Struct, frozen=True):
    """One micro-batch's pairs: log-probabilities of policy and reference by side, rewards and loss where they are
    there. Those that are made without a reference have none of it.
    """

    record: Record
    names: dict[tuple[str, str], str]
    logps: dict[tuple[str, str], Array]
    rewards: dict[str, Array]
    loss: float | None
    tokens: dict[str, Array]
    """Tokens of each side's answers that count, where rows say so."""
    numbers: dict[str, float] = {}
    """What else the micro-batch has one number of."""
    is_summed: bool = False
    """Whether its log-probabilities are summed up here, of those of tokens."""
    looks: tuple[Record, ...] = ()

    @property
    def has_ref(self) -> bool:
        return ("ref", "chosen") in self.logps and ("ref", "rejected") in self.logps

    def margin(self, *, by_token: bool = False, with_ref: bool = True) -> Array:
        """What the policy prefers the better answer by, over its reference."""
        sides = {
            side: (self.logps["policy", side] - (self.logps["ref", side] if with_ref else 0.0))
            / (self.tokens[side] if by_token else 1.0)
            for side in ("chosen", "rejected")
        }
        made: Array = sides["chosen"] - sides["rejected"]
        return made

    def where(self, of: str, side: str) -> Where:
        return Where.of(self.record, self.names[of, side])

    @property
    def counts_tokens(self) -> bool:
        return len(self.tokens) == 2 and all(bool((each > 0).all()) for each in self.tokens.values())


def micro_batches(case: Case) -> list[list[Record]]:
    """The records that speak of one micro-batch each: its forward, and the loss that was made of it."""
    found: dict[Any, list[Record]] = {}
    for record in case.records():
        key = record.key
        if key.stage == "training_metrics":
            continue
        own = (key.step, key.rank, key.micro, key.role, key.epoch, key.minibatch)
        found.setdefault(own, []).append(record)
    made: list[list[Record]] = []
    for every in found.values():
        # Without a number of the micro-batch, several records of one stage are of several.
        stages = {record.key.stage for record in every}
        made += [every] if len(stages) == len(every) else [[record] for record in every]
    return made


def _every_ref(records: list[Record]) -> list[tuple[Record, TensorRef]]:
    found = []
    for record in records:
        try:
            found += [(record, ref) for ref in record.tensors() if not ref.is_text and ref.is_readable]
        except RldbgError:
            continue
    return found


def numbers_of_pairs(case: Case) -> list[Pairs]:
    """Every micro-batch's pairs of the run."""
    return [one for records in micro_batches(case) if (one := pairs_of(records)) is not None]


def pairs_of(records: list[Record]) -> Pairs | None:
    names: dict[tuple[str, str], str] = {}
    logps: dict[tuple[str, str], Array] = {}
    rewards: dict[str, Array] = {}
    numbers: dict[str, float] = {}
    mask, holder = None, None
    every = _every_ref(records)
    for record, ref in every:
        if len(ref.shape) == 1 and ref.numel > 1 and (said := _LOGPS.search(ref.name)) is not None:
            first = _REF_FIRST.search(ref.name)
            of = "ref" if first is not None or (said["of"] or "").lower().startswith("ref") else "policy"
            names[of, said["side"].lower()] = ref.name
            logps[of, said["side"].lower()] = np.asarray(pages.array(ref), dtype=np.float64)
            holder = holder or record
        elif len(ref.shape) == 1 and ref.numel > 1 and (said := REWARDS.search(ref.name)) is not None:
            rewards[said["side"].lower()] = np.asarray(pages.array(ref), dtype=np.float64)
        elif ref.numel == 1 and ref.dtype != "bool":
            numbers[ref.canonical or ref.name] = float(np.asarray(pages.array(ref)).reshape(-1)[0])
        elif (ref.canonical or ref.name) in ("loss_mask", "response_mask") and len(ref.shape) == 2:
            mask = np.asarray(pages.array(ref))
    tokens = _counted(every, mask)
    is_recorded = ("policy", "chosen") in logps
    if len(logps) < 4 and (summed := _summed(every, mask)) is not None:
        # What is recorded as a sum goes before what is summed here.
        holder, names, logps = holder or summed[0], summed[1] | names, summed[2] | logps
        tokens = tokens or summed[3]
    if ("policy", "chosen") not in logps or ("policy", "rejected") not in logps:
        return None
    if ("ref", "chosen") not in logps or ("ref", "rejected") not in logps:
        logps = {key: values for key, values in logps.items() if key[0] == "policy"}
    if holder is None or len({values.size for values in logps.values()}) > 1:
        return None
    half = logps["policy", "chosen"].size
    of_tokens = {ref.name for _, ref in every if len(ref.shape) == 2}
    is_summed = not is_recorded and names["policy", "chosen"] in of_tokens
    if tokens and {each.size for each in tokens.values()} != {half}:
        tokens = {}
    rewards = {side: values for side, values in rewards.items() if values.size == half}
    return Pairs(
        holder, names, logps, rewards, numbers.get("loss"), tokens, numbers, is_summed,
        tuple(record for record in records if record is not holder),
    )  # fmt: skip


def _counted(every: list[tuple[Record, TensorRef]], mask: Array | None) -> dict[str, Array]:
    """How many tokens of each answer count: as a mask of both halves says, or one of each side."""
    if mask is not None and len(mask) % 2 == 0:
        counts = (mask != 0).sum(1).astype(np.float64)
        return {"chosen": counts[: len(counts) // 2], "rejected": counts[len(counts) // 2 :]}
    found: dict[str, Array] = {}
    for wanted in ("loss_mask", "response_mask", "labels", "attention_mask"):
        for _, ref in every:
            said = sides_of(ref.name)
            if said is None or len(ref.shape) != 2 or ref.rows is not None or naming.canonical(said[0]) != wanted:
                continue
            values = np.asarray(pages.array(ref))
            # The label of a row's first token is none that a causal model gives.
            counts = values[:, 1:] != IGNORED if wanted == "labels" else values != 0
            found["chosen" if said[1] else "rejected"] = counts.sum(1).astype(np.float64)
        if len(found) == 2:
            # A mask of all tokens counts those of an answer where the prompt stands beside it.
            beside = any(ref.name.rpartition(".")[2] == "prompt_input_ids" for _, ref in every)
            return found if wanted != "attention_mask" or beside else {}
    return {}


_OF_POLICY, _OF_REF = ("policy_logprobs", "rollout_logprobs", "old_logprobs"), ("ref_logprobs",)


def _summed(
    every: list[tuple[Record, TensorRef]], mask: Array | None
) -> tuple[Record, dict[tuple[str, str], str], dict[tuple[str, str], Array], dict[str, Array]] | None:
    """Log-probabilities of answers, of those of their tokens: of each side under a name of its own, or of rows whose
    halves are the sides, or of one number of each row of such halves. None where neither stands there.
    """
    names: dict[tuple[str, str], str] = {}
    logps: dict[tuple[str, str], Array] = {}
    holder: Record | None = None
    for record, ref in every:
        said = sides_of(ref.name)
        if said is None or len(ref.shape) != 2 or ref.rows is not None:
            continue
        canonical = naming.canonical(said[0])
        of = "ref" if canonical in _OF_REF else "policy" if canonical in _OF_POLICY else None
        if of is not None and (values := _filled(ref)) is not None:
            side = "chosen" if said[1] else "rejected"
            counts = _counting_side(every, side, values)
            names[of, side], holder = ref.name, holder or record
            logps[of, side] = np.where(counts, values, 0.0).sum(1)
    if holder is not None:
        return holder, names, logps, _counted(every, None)
    ids = next((ref for _, ref in every if ref.canonical == "input_ids" and len(ref.shape) == 2), None)
    if ids is None or ids.rows is not None or ids.shape[0] % 2 or ids.shape[0] < 2:
        return None
    order = _paired_rows(np.asarray(pages.array(ids)))
    if order is None:
        return None
    for record, ref in every:
        of = "ref" if ref.canonical in _OF_REF else "policy" if ref.canonical == "policy_logprobs" else None
        if of is None and ref.canonical == "rollout_logprobs" and ref.name.startswith(("log", "policy")):
            of = "policy"
        whole = _WHOLE.search(ref.name)
        of = of or (None if whole is None else "ref" if whole["of"] else "policy")
        if of is None or not ref.shape or ref.shape[0] != ids.shape[0] or len(ref.shape) > 2 or ref.rows is not None:
            continue
        values = np.asarray(pages.array(ref), dtype=np.float64)
        if values.ndim == 2:
            if mask is None or mask.shape[0] != len(values) or mask.shape[1] - values.shape[1] not in (0, 1):
                continue
            counts = mask[:, mask.shape[1] - values.shape[1] :] != 0
            values = np.where(counts, values, 0.0).sum(1)
        for side, rows in zip(("chosen", "rejected"), order, strict=True):
            names[of, side], logps[of, side] = ref.name, values[rows]
        holder = holder or record
    if holder is None:
        return None
    tokens = {}
    if mask is not None and len(mask) == ids.shape[0]:
        tokens = {side: (mask[rows] != 0).sum(1).astype(np.float64) for side, rows in
                  zip(("chosen", "rejected"), order, strict=True)}  # fmt: skip
    return holder, names, logps, tokens


def _filled(ref: TensorRef) -> Array | None:
    values = np.asarray(pages.array(ref), dtype=np.float64)
    return values if np.isfinite(values).all() else None


def _counting_side(every: list[tuple[Record, TensorRef]], side: str, values: Array) -> Array:
    """Which of a side's log-probabilities are of tokens that count: all where no mask fits them."""
    for wanted in ("loss_mask", "response_mask"):
        for _, ref in every:
            said = sides_of(ref.name)
            if said is None or ("chosen" if said[1] else "rejected") != side or naming.canonical(said[0]) != wanted:
                continue
            mask = np.asarray(pages.array(ref))
            if mask.ndim == 2 and mask.shape[0] == len(values) and mask.shape[1] - values.shape[1] in (0, 1):
                counts: Array = mask[:, mask.shape[1] - values.shape[1] :] != 0
                return counts
    return np.ones(values.shape, dtype=bool)


def _paired_rows(ids_BS: Array) -> tuple[Array, Array] | None:
    """The rows of better and worse answers: those that begin alike, the halves or two that follow each other. None
    where neither order makes pairs of all rows.
    """
    rows, half = np.arange(len(ids_BS)), len(ids_BS) // 2
    ways = [(rows[:half], rows[half:]), (rows[0::2], rows[1::2])]
    alike = [(ids_BS[a][:, :3] == ids_BS[b][:, :3]).all(axis=1) for a, b in ways]
    # Rows that are padded on the left begin alike as they are as long.
    told = [float(each.mean()) for each in alike]
    if half > 1 and max(told) > 0.5 and abs(told[0] - told[1]) > 0.25:
        return ways[int(np.argmax(told))]
    return None


def _rows_of(record: Record) -> Pairs | None:
    """Answers of no pairs (KTO): one number each of policy and reference."""
    try:
        refs = [
            ref for ref in record.tensors() if not ref.is_text and ref.is_readable and len(ref.shape) == 1
            and ref.rows is None  # a number of an answer, not of its tokens
        ]  # fmt: skip
    except RldbgError:
        return None
    names: dict[tuple[str, str], str] = {}
    logps: dict[tuple[str, str], Array] = {}
    for ref in refs:
        said = _WHOLE.search(ref.name) if ref.numel > 1 and not _SIDES_OF.search(ref.name) else None
        if said is not None:
            of = "ref" if said["of"] else "policy"
            names[of, "row"] = ref.name
            logps[of, "row"] = np.asarray(pages.array(ref), dtype=np.float64)
    if len(logps) < 2 or logps["policy", "row"].size != logps["ref", "row"].size:
        return None
    return Pairs(record, names, logps, {}, None, {})


@rule("D154", "the loss of pairs is made of other numbers than is stated", link="loss", scope="case", lasts=True,
      explains=("D72", "L08"),
      source="DPO (arXiv 2305.18290): -log sigmoid(beta ((pc - rc) - (pr - rr))); trl#6879, "
      "LlamaFactory#7509")  # fmt: skip
def made_otherwise(case: Case) -> Finding | None:
    """Recorded log-probabilities of better and worse answers, of the policy and its reference, beside the recorded
    loss and rewards of pairs.

    References of other rows: the policy is over half a nat from its reference in the median, and a fifth of that and
    less from the one of the next row, the row before, the turned batch or the other side, in all records, 4 pairs and
    more: an error. So it is where, before the first update, the policy's two numbers of a pair are those that the
    reference has of another pair of the whole dump (3 pairs and a quarter of them and more, and fewer of its own); and
    a warning where policy and reference lie over .3 nats from each other in the median, and do not go with each other
    over 32 pairs and more (their correlation is below .3), as those of one pair do.

    One model's numbers that are, before the first update, the other's divided by the answer's tokens, in each answer of
    4 pairs and more of several lengths: an error.

    Rewards that are those of the other side, beta (log policy - log reference) of the rejected under the chosen one's
    name: an error.

    A loss, stated as DPO's (sigmoid, or nothing else stated) with its beta, that beta and the stated label smoothing do
    not make in 3 records and more (to 1e-4), while one known mistake makes all of them: chosen and rejected swapped,
    the reference left out, another label smoothing, a beta of 1 or its inverse, or log-probabilities divided by their
    tokens (which some state: then nothing is said): an error.
    """
    own_model = case.begins and case.algorithm.value("ref_model", "reference_model") is None
    every = [one for one in numbers_of_pairs(case) if one.has_ref]
    if not every:
        rows = [one for record in case.records() if (one := _rows_of(record)) is not None]
        skip_if(not rows, "needs log-probabilities of chosen and rejected answers, of policy and reference")
        return (_of_other_pairs(rows) if own_model else None) or _unrelated(rows)
    if sum(one.logps["policy", "chosen"].size for one in every) < PAIRS:
        return None
    for told in (
        _of_another_scale(every), _of_other_rows(every),
        _of_other_pairs(every) if own_model else None, _unrelated(every),
        _rewards_swapped(every, case.algorithm), _other_loss(every, case.algorithm),
    ):  # fmt: skip
        if told is not None:
            return told
    return None


def steps_of_pairs(every: list[Pairs]) -> list[int | None]:
    return list(dict.fromkeys(one.record.key.step for one in every))


def _of_other_rows(every: list[Pairs]) -> Finding | None:
    other = {"chosen": "rejected", "rejected": "chosen"}
    ways: dict[str, Callable[[Pairs, str], Array]] = {
        "the next row": lambda one, side: np.roll(one.logps["ref", side], 1),
        "the row before": lambda one, side: np.roll(one.logps["ref", side], -1),
        "the batch turned around": lambda one, side: one.logps["ref", side][::-1],
        "the other answer of the pair": lambda one, side: one.logps["ref", other[side]],
    }
    for side in ("chosen", "rejected"):
        plain = [float(np.median(np.abs(one.logps["policy", side] - one.logps["ref", side]))) for one in every]
        if min(plain) < OFF:
            continue
        for what, way in ways.items():
            right = [float(np.median(np.abs(one.logps["policy", side] - way(one, side)))) for one in every]
            if all(NEARER * near < far for near, far in zip(right, plain, strict=True)):
                return error(
                    f"the reference's log-probabilities of {side} answers are those of {what}: the policy is "
                    f"{median(plain):.3g} nats from its own row's and {median(right):.3g} from these",
                    every[0].where("ref", side),
                    shown("median |policy - reference| of a row", median(plain), "near 0 at first"),
                    shown(f"of {what}", median(right)),
                    shown("records that agree", len(every)),
                    link="ref",
                    cause="reference log-probabilities are computed in another order (a shuffled or sorted loader, a "
                    "cache from before the shuffle, a gather over ranks) than the pairs are trained in",
                    steps=steps_of_pairs(every),
                )
    return None


def _first_of(every: list[Pairs]) -> list[Pairs]:
    """Those before the first update of the dump."""
    least = min((one.record.key.step for one in every if one.record.key.step is not None), default=None)
    first = [one for one in every if one.record.key.step == least and not one.record.key.epoch]
    # An update of its own lies between two mini-batches of one step.
    return [one for one in first if not one.record.key.minibatch]


def _of_another_scale(every: list[Pairs]) -> Finding | None:
    """Pairs of which one model's number is the other's divided by the answer's tokens, before the first update."""
    first = [one for one in _first_of(every) if one.counts_tokens]
    if not first:
        return None
    both = ("chosen", "rejected")
    policy_R, ref_R = (np.concatenate([one.logps[of, side] for one in first for side in both])
                       for of in ("policy", "ref"))  # fmt: skip
    tokens_R = np.concatenate([one.tokens[side] for one in first for side in both])
    if len(tokens_R) < 2 * PAIRS or not (np.isfinite(policy_R).all() and np.isfinite(ref_R).all()):
        return None
    # Answers of one length say nothing of what their numbers are divided by.
    if len(np.unique(tokens_R)) < 2 or float(np.median(np.abs(policy_R - ref_R))) < OFF:
        return None
    for who, whose, mean_R, sum_R in (
        ("the reference", "the policy", ref_R, policy_R), ("the policy", "the reference", policy_R, ref_R),
    ):  # fmt: skip
        # A mean is as near as its sum is, divided by the tokens; in bf16 as well.
        off_R = np.abs(mean_R - sum_R / tokens_R)
        if off_R.max() > max(SAME[0], 1e-2 * float(np.median(np.abs(mean_R)))):
            continue
        return error(
            f"{who}'s log-probabilities of answers are means over tokens, {whose}'s are sums: before the first update "
            f"each of {len(tokens_R)} is {whose}'s divided by the answer's tokens",
            first[0].where("ref", "chosen"),
            shown("median |policy - reference| of an answer", float(np.median(np.abs(policy_R - ref_R))), "0 at first"),
            shown(f"greatest |{who} - {whose} / tokens|", float(off_R.max())),
            shown("answers", len(tokens_R)),
            link="ref",
            cause="one model's log-probabilities are averaged over tokens (`average_log_prob`, a mean in the step that "
            "computes the reference beforehand) and the other's summed up: margins are not 0 before the first update, "
            "and grow with the length of the answers",
            steps=steps_of_pairs(every),
            next_step="reduce both in one function, as sums for DPO",
        )
    return None


_SIDES = ("chosen", "rejected", "row")
_SHUFFLED = (
    "reference log-probabilities are computed in another order (a shuffled or sorted loader, a cache from before the "
    "shuffle, a gather over ranks) than that of the pairs they are attached to: margins are differences of two answers "
    "that have nothing to do with each other"
)


def _both(one: Pairs, of: str) -> Array:
    """The two numbers of each pair [B, 2], or the one of a row of no pair."""
    return np.stack([one.logps[of, side] for side in _SIDES if (of, side) in one.logps], axis=1)


def _at(one: Pairs) -> Where:
    return one.where(*next(key for key in one.names if key[0] == "ref"))


def _of_other_pairs(every: list[Pairs]) -> Finding | None:
    """Pairs whose reference is the policy before the first update, and that of another pair."""
    first = _first_of(every)
    if not first:
        return None
    refs_R2 = np.concatenate([_both(one, "ref") for one in every])
    policy_B2, own_B2 = (np.concatenate([_both(one, of) for one in first]) for of in ("policy", "ref"))
    if not np.isfinite(refs_R2).all() or not np.isfinite(policy_B2).all() or len(policy_B2) < PAIRS:
        return None
    # Where two numbers have to agree, chance has no part in it.
    for close in SAME if policy_B2.shape[1] > 1 else SAME[:1]:
        own_B = (np.abs(policy_B2 - own_B2) <= close).all(axis=1)
        near_B = np.array([int(np.abs(refs_R2 - row).max(axis=1).argmin()) for row in policy_B2])
        others_B = ~own_B & (np.abs(refs_R2[near_B] - policy_B2) <= close).all(axis=1)
        moved = int(others_B.sum())
        if moved < max(FEWEST_MOVED, MOVED * len(policy_B2)) or moved <= int(own_B.sum()):
            continue
        row = int(np.flatnonzero(others_B)[0])
        names = _numbers_of(first), _numbers_of(every)
        whose = f"{names[1][near_B[row]]}" if names[1] and names[0] else f"row {near_B[row]} of all"
        mine = f"pair {names[0][row]}" if names[0] and names[1] else f"row {row}"
        return error(
            f"the reference's log-probabilities belong to other pairs: before the first update {moved} of "
            f"{len(policy_B2)} pairs have in the policy what the reference has of another pair, and {int(own_B.sum())} "
            "what it has of them",
            _at(first[0]),
            shown(f"policy of {mine}", listed(f"{value:.4f}" for value in policy_B2[row])),
            shown("its reference", listed(f"{value:.4f}" for value in own_B2[row]), "the same"),
            shown(f"the reference of {whose}", listed(f"{value:.4f}" for value in refs_R2[near_B[row]])),
            shown("pairs of the first step with another's", share(moved, len(policy_B2)), "0"),
            link="ref", cause=_SHUFFLED, steps=steps_of_pairs(every),
            next_step="attach reference log-probabilities by the pairs' index, or compute them without shuffling",
        )  # fmt: skip
    return None


def _numbers_of(every: list[Pairs]) -> list[int]:
    """The numbers of all pairs in the data, where every record has them; else nothing."""
    found: list[int] = []
    for one in every:
        size = next(iter(one.logps.values())).size
        refs = [
            ref for ref in one.record.tensors() if ref.name in _NUMBERS and ref.shape == (size,) and not ref.is_text
        ]
        if not refs:
            return []
        found += np.asarray(pages.array(refs[0])).astype(int).tolist()
    return found


def _unrelated(every: list[Pairs]) -> Finding | None:
    """Policy and reference of pairs that do not go with each other, as a model and its copy always do."""
    policy_B2, ref_B2 = (np.concatenate([_both(one, of) for one in every]) for of in ("policy", "ref"))
    finite_B = np.isfinite(policy_B2).all(axis=1) & np.isfinite(ref_B2).all(axis=1)
    policy_B2, ref_B2 = policy_B2[finite_B], ref_B2[finite_B]
    if len(policy_B2) < UNRELATED:
        return None
    apart = np.median(np.abs(policy_B2 - ref_B2), axis=0)
    spreads = policy_B2.std(axis=0), ref_B2.std(axis=0)
    if apart.min() < APART or min(map(float, (*spreads[0], *spreads[1]))) < APART:
        return None
    # A reference that is constant, or another model altogether, has another level or spread.
    if (np.maximum(spreads[0] / spreads[1], spreads[1] / spreads[0]) > 2).any():
        return None
    with_ref = [float(np.corrcoef(policy_B2[:, at], ref_B2[:, at])[0, 1]) for at in range(policy_B2.shape[1])]
    if max(with_ref) >= GOES_WITH:
        return None
    return finding(
        "warning",
        "the reference's log-probabilities do not go with the pairs they stand beside: over "
        f"{len(policy_B2)} pairs policy and reference are not correlated "
        f"({listed(f'{each:.2f}' for each in with_ref)})",
        _at(every[0]),
        *(shown(f"correlation of policy and reference{of}", each, f">= {GOES_WITH:g}")
          for of, each in zip((", chosen", ", rejected") if len(with_ref) > 1 else ("",), with_ref, strict=True)),
        shown("median |policy - reference|", float(apart[0])),
        shown("pairs", len(policy_B2)),
        link="ref", cause=_SHUFFLED, steps=steps_of_pairs(every),
        next_step="attach reference log-probabilities by the pairs' index, or compute them without shuffling",
    )  # fmt: skip


def _rewards_swapped(every: list[Pairs], algorithm: Algorithm) -> Finding | None:
    beta = algorithm.number("beta", "dpo_beta", "kl_beta")
    told = [one for one in every if len(one.rewards) == 2]
    if beta is None or len(told) < LOSSES:
        return None

    def made(one: Pairs, side: str) -> Array:
        values: Array = beta * (one.logps["policy", side] - one.logps["ref", side])
        return values

    def alike(a: Array, b: Array) -> bool:
        return bool(np.abs(a - b).max() <= CLOSE * max(float(np.abs(a).max()), 1e-6))

    swapped = all(
        alike(one.rewards["chosen"], made(one, "rejected")) and alike(one.rewards["rejected"], made(one, "chosen"))
        for one in told
    )
    # Before the first update both are 0, and tell nothing.
    told = [one for one in told if not alike(one.rewards["chosen"], made(one, "chosen"))]
    if not swapped or len(told) < LOSSES:
        return None
    one = told[0]
    return error(
        "chosen and rejected are swapped: the rewards of chosen answers are those of the rejected ones' "
        "log-probabilities",
        one.where("policy", "chosen"),
        shown("mean reward under the chosen one's name", float(one.rewards["chosen"].mean()),
              f"{float(made(one, 'chosen').mean()):.6g}"),
        shown("records that agree", len(told)),
        cause="the two halves of the joined batch are split in the wrong order, or a collator joins rejected answers "
        "first",
        steps=steps_of_pairs(told),
    )  # fmt: skip


def dpo_loss(z: Array, smoothing: float) -> float:
    """The mean loss of margins (times beta), with a share of the labels turned."""
    return float(((1 - smoothing) * np.logaddexp(0.0, -z) + smoothing * np.logaddexp(0.0, z)).mean())


class _PairLoss(Struct, frozen=True):
    """A way to make the loss of pairs: what it does, why that may be, and its losses."""

    what: str
    cause: str
    made: list[float]


def _mistakes(every: list[Pairs], beta: float, smoothing: float) -> Iterator[_PairLoss]:
    margins = [one.margin() for one in every]
    yield _PairLoss(
        "of the margin turned around: chosen and rejected are swapped, and the policy learns to prefer the worse",
        "the two halves of the joined batch are split in the wrong order, or the margin is negated",
        [dpo_loss(-beta * z, smoothing) for z in margins],
    )
    yield _PairLoss(
        "without the reference: its log-probabilities have no part in the margin",
        "the reference-free loss is switched on, or its log-probabilities are 0 where the loss is made",
        [
            dpo_loss(beta * (one.logps["policy", "chosen"] - one.logps["policy", "rejected"]), smoothing)
            for one in every
        ],
    )
    for other in sorted({0.0, 0.05, 0.1, 0.2, 0.3} - {smoothing}):
        yield _PairLoss(
            f"with a label smoothing of {other:g}, and {smoothing:g} is stated",
            "the setting does not reach the loss: a default stands in its place",
            [dpo_loss(beta * z, other) for z in margins],
        )
    for times, words in (
        (1.0, "1"),
        (1 / beta, f"{1 / beta:g}, its inverse"),
        (beta * beta, f"{beta * beta:g}, its square"),
    ):
        if abs(times - beta) > CLOSE * beta:
            yield _PairLoss(
                f"with a beta of {words}, and {beta:g} is stated",
                "the margin is not multiplied by beta, is divided by it, or is multiplied twice",
                [dpo_loss(times * z, smoothing) for z in margins],
            )
    if all(
        one.tokens and min(map(float, one.tokens["chosen"])) > 0 and min(map(float, one.tokens["rejected"])) > 0
        for one in every
    ):
        yield _PairLoss(
            "of means over tokens: log-probabilities are divided by their answers' lengths, and none is stated",
            "the average log-probability is taken where the sum is meant: margins are as many times smaller, and beta "
            "is worth less the longer answers are",
            [dpo_loss(beta * one.margin(by_token=True), smoothing) for one in every],
        )  # fmt: skip


def _other_loss(every: list[Pairs], algorithm: Algorithm) -> Finding | None:
    beta = algorithm.number("beta", "dpo_beta", "kl_beta")
    kind = algorithm.word("loss_type", "dpo_loss_type", "pref_loss")
    told = [one for one in every if one.loss is not None and np.isfinite(one.loss)]
    if not beta or kind not in ("", "sigmoid", "dpo") or len(told) < LOSSES:
        return None
    extra = ("rpo_alpha", "sft_coef", "pref_ftx", "nll_loss_coef", "dpo_ftx", "ld_alpha", "sft_loss_weight", "gamma")
    switches = ("reference_free", "average_log_prob", "length_normalized", "length_normalization", "use_weighting")
    if any(algorithm.number(name) for name in extra) or any(algorithm.is_on(name) for name in switches):
        return None
    smoothing = algorithm.number("label_smoothing") or 0.0

    def makes(made: list[float]) -> bool:
        return all(abs(value - given(one.loss)) <= EXACT * abs(value) for value, one in zip(made, told, strict=True))

    def nears(value: float, one: Pairs) -> bool:
        return abs(value - given(one.loss)) <= 5 * EXACT * abs(value)

    right = [dpo_loss(beta * one.margin(), smoothing) for one in told]
    # Margins near 0 tell nothing: there all ways come to ln 2.
    if sum(not nears(value, one) for value, one in zip(right, told, strict=True)) < LOSSES:
        return None
    way = next((way for way in _mistakes(told, beta, smoothing) if makes(way.made)), None)
    if way is None:
        return None
    one = told[0]
    evidence: list[Evidence] = [
        shown("loss", one.loss, f"{right[0]:.6g}", one.record.path.name),
        shown("made this way", way.made[0]),
        shown("records that agree", len(told)),
    ]
    return finding(
        "error",
        f"the loss of pairs is made {way.what}",
        Where.of(next((each for each in (one.record, *one.looks) if each.get("loss") is not None), one.record), "loss"),
        *evidence,
        cause=way.cause,
        steps=steps_of_pairs(told),
    )
