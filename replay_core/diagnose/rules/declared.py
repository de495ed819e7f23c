"""Numbers that a run declares, held against the same numbers as the data show them.

Where a setting can be read off what is recorded, no symptom is needed: a group has as many answers as it has, a rate is
what was logged, a response as long as it is. Settings that leave no number of their own are held against what they
forbid (D102); those that are solved for have rules of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from replay_core.diagnose.algorithm import GROUP_SIZE, RESPONSE_LIMITS, learning_rate
from replay_core.diagnose.batch import GROUP_NAMES, StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, finding, listed, share, shown, warning
from replay_core.diagnose.printed import half_a_digit
from replay_core.diagnose.rule import given, rule, skip_if
from replay_core.diagnose.rules.tokens import truncated
from replay_core.diagnose.sheets import marked

#: By how much a rate may be off (a display's digits), steps that tell, and responses that were cut before it is a
#: limit.
CLOSE, STEPS, CUT = 0.02, 3, 8
#: By how many times a rate is off before training is another one.
OTHERWISE = 1.25
#: A log-probability of the trainer under which the engine's 0 was not sampled.
SURE = -0.01
#: How runs state how often they go through a batch, and in how many parts.
_EPOCHS = ("ppo_epochs", "num_iterations", "num_ppo_epochs", "epochs_per_batch")
_PARTS = ("ppo_mini_batches", "mini_batches", "num_mini_batches", "n_minibatch", "num_minibatches", "ppo_n_minibatches")


@rule("D124", "the data show another number than is declared", link="groups", scope="case", lasts=True,
      explains=("D01", "D04", "D05", "D20", "L08", "L14", "L16", "D24", "D28"),
      source="a setting that is overridden, or does not reach the place where it counts")  # fmt: skip
def otherwise(case: Case) -> Iterator[Finding]:
    """Numbers that a run states, beside the same as recorded, over 3 steps and more: a warning where every group of
    every step has one other number of answers than is stated (one rank's records, or more answers than stated); where
    responses of one turn are longer than their limit, or 8 and more are cut off at one length that is below it; where
    each step has another number of epochs or mini-batches than is stated, as its records count them (epochs over the
    steps in a row that hold the same rows, mini-batches where each step has the first one), or most steps have more
    mini-batches and not all of them as many; and where the logged learning rate rises over the stated one by a
    fiftieth, or rests at another one (worth knowing where they are less than 1.25 times apart).
    """
    looked = [False]
    yield from _groups(case, looked)
    yield from _lengths(case, looked)
    yield from _passes(case, looked)
    yield from _rate(case, looked)
    skip_if(not looked[0], "nothing that is stated is a number that the data show")


def _groups(case: Case, looked: list[bool]) -> Iterator[Finding]:
    stated = case.algorithm.number(*GROUP_SIZE)
    sizes: set[int] = set()
    steps: list[int] = []
    where: Where | None = None
    ranks: set[int | None] = set()
    if not stated or stated < 2:
        return
    for batch in case.batches():
        if batch.group_B is None or batch.step is None or not batch.group_is_named:
            continue
        name = next((one for one in ("input_ids", "advantages") if batch.columns.ref(one) is not None), "input_ids")
        keys = batch.laid.keys_of(name)
        ranks |= {None if key is None else key.rank for key in keys}
        # Every epoch over the batch may be recorded, with a number or without.
        batch = batch.once
        if batch.group_B is None:
            continue
        sizes |= set(np.bincount(batch.group_B[_once_each(batch)]).tolist())
        steps += [] if batch.step is None else [batch.step]
        where = where or batch.laid.where(batch.columns.reward_name, sample=0)
        prompts = batch.prompt_B
        if prompts is not None and np.unique(prompts).size != np.unique(batch.group_B).size:
            return  # groups that mix prompts, or share them, have rules of their own (D42, D65)
    looked[0] = looked[0] or bool(steps)
    if len(set(steps)) < STEPS or len(sizes) != 1 or stated in sizes:
        return
    (size,) = sizes
    # A rank of several may hold a part of each group.
    if size < 2 or (size < stated and (len(ranks) > 1 or _world(case) > 1)):
        return
    yield warning(
        f"groups hold {size} answers, and the run states {stated:g}",
        where,
        shown("answers of a group, in every step", size, f"{stated:g}"),
        shown("steps", len(set(steps))),
        cause="the number that is configured does not reach the sampler or the grouping; a filter drops as many of "
        "each group; or other ranks hold the rest: the baseline is that of fewer (or more) answers",
        next_step="print the group ids of the first rows, and the number of answers asked of the engine",
        steps=sorted(set(steps)),
    )


def _world(case: Case) -> float:
    """How many ranks the run states, or was started with."""
    return max(case.algorithm.number(name) or 1 for name in ("world_size", "dp_size", "started_ranks"))


def _once_each(batch: StepBatch) -> np.ndarray:
    """Samples [S], each row of the record that names the groups once: several passes over a batch are of the same
    rows, whatever the passes hold beside them.
    """
    for name in GROUP_NAMES:
        for sheet, places in batch.columns.sheets:
            if sheet.refs(name) is None:
                continue
            times = Counter(places)
            if None in times or len(set(times.values())) != 1:
                return np.arange(len(batch))  # some rows are another's twin: which pass they are of is not known
            return np.unique(np.array(places, dtype=np.int64), return_index=True)[1]
    return np.arange(len(batch))


def _lengths(case: Case, looked: list[bool]) -> Iterator[Finding]:
    limit = case.algorithm.number(*RESPONSE_LIMITS)
    if not limit:
        return
    longest, cut_at = 0, dict[int, int]()
    long_steps: list[int] = []
    cut_steps: list[int] = []
    where: Where | None = None
    total = 0
    for batch in case.batches():
        if batch.response_N is None or batch.tokens_N is None:
            continue
        if batch.trained_N is not None and _has_gaps(batch.response_N, batch.trained_N, batch.flat.sample_N):
            return  # of several turns, each may be as long
        looked[0] = True
        counts_B = batch.flat.count(_sampled_N(batch))
        if counts_B.max(initial=0) > limit + 1:
            if counts_B.max() > longest:
                where = batch.laid.where("input_ids", sample=int(counts_B.argmax()))
            long_steps += [] if batch.step is None else [batch.step]
        longest = max(longest, int(counts_B.max(initial=0)))
        cut_B = truncated(batch) if batch.eos_id is not None else batch.truncated_flag_B
        total += len(counts_B)
        if cut_B is not None and cut_B.any():
            for size in counts_B[cut_B].tolist():
                cut_at[int(size)] = cut_at.get(int(size), 0) + 1
            cut_steps += [] if batch.step is None else [batch.step]
            if not long_steps:
                where = where or batch.laid.where("input_ids", sample=int(cut_B.argmax()))
    if long_steps:
        yield warning(
            f"responses are longer than their limit: up to {longest} tokens, and the run states {limit:g}",
            where,
            shown("longest response", longest, f"<= {limit:g}"),
            link="tokens",
            cause="the engine is given another limit than the run states (a default, a limit of prompt and response "
            "together), or prompt tokens are counted into responses",
            steps=long_steps,
        )
    elif len(cut_at) == 1 and sum(cut_at.values()) >= CUT and len(set(cut_steps)) >= STEPS:
        ((size, many),) = cut_at.items()
        if size == longest and size < limit - 1:
            yield warning(
                f"responses are cut off at {size} tokens, and the run states a limit of {limit:g}",
                where,
                shown("responses that are cut off at it", share(many, total)),
                shown("longest response", longest, f"{limit:g}"),
                link="tokens",
                cause="the engine is given another limit than the run states (a default of its own, a limit of prompt "
                "and response together, of a model's context)",
                next_step="print the sampling parameters that the engine is called with",
                steps=sorted(set(cut_steps)),
            )


def _sampled_N(batch: StepBatch) -> np.ndarray:
    """Tokens of responses without those that the engine was given between sampled ones, as a tool's: where its
    log-probabilities are exactly 0 there, and the trainer's are not.
    """
    response_N: np.ndarray = given(batch.response_N)
    rollout, trainer = batch.columns.of("rollout_logprobs"), batch.trainer
    if rollout is None or trainer is None:
        return response_N
    given_N = rollout.said_N & trainer.said_N & (rollout.values_N == 0) & (trainer.values_N < SURE)
    sampled_N: np.ndarray = response_N & ~given_N
    return sampled_N


def _has_gaps(response_N: np.ndarray, trained_N: np.ndarray, sample_N: np.ndarray) -> bool:
    """Whether tokens that do not count stand between such that do."""
    inside = np.flatnonzero(response_N)
    counts, samples = trained_N[inside], sample_N[inside]
    begins = (~counts[:-1]) & counts[1:] & (samples[:-1] == samples[1:])
    return bool(begins.any())


def _passes(case: Case, looked: list[bool]) -> Iterator[Finding]:
    per_step: dict[int, tuple[set[int], set[int]]] = {}
    for record in case.records():
        key = record.key
        if key.stage not in ("forward_data", "loss") or key.step is None or key.role == "critic":
            continue
        epochs, parts = per_step.setdefault(key.step, (set(), set()))
        if key.epoch is not None:
            epochs.add(key.epoch)
        if key.minibatch is not None:
            parts.add(key.minibatch)
    last = max(per_step, default=0)
    for which, names, what in ((0, _EPOCHS, "epochs"), (1, _PARTS, "mini-batches")):
        stated = case.algorithm.number(*names)
        # The last step may be cut off.
        numbers = {step: each[which] for step, each in per_step.items() if each[which] and step != last}
        if not stated or len(numbers) < STEPS:
            continue
        told = {step: len(each) for step, each in numbers.items()}
        if which == 1 and (uneven := _uneven(told, stated)) is not None:
            looked[0] = True
            yield uneven
        if len({min(each) for each in numbers.values()}) > 1:
            # Optimizer steps may be counted as steps: what a batch has is then over the steps that hold its rows.
            told = _by_batch(case, numbers, last) if which == 0 else {}
        if len(told) < STEPS:
            continue
        looked[0] = True
        if len(set(told.values())) != 1 or next(iter(told.values())) == stated:
            continue
        count = next(iter(told.values()))
        yield warning(
            f"each batch is trained on in {count} {what}, and the run states {stated:g}",
            Where(step=min(told)),
            shown(f"{what} of a step, as its records count them", count, f"{stated:g}"),
            shown("steps", len(told)),
            link="optimizer",
            cause=f"the number of {what} that is configured does not reach the loop: the policy is updated "
            f"{count / stated:.3g} times as often as meant on each batch",
            next_step="count the optimizer steps of one batch",
            steps=sorted(told),
        )


def _uneven(told: dict[int, int], stated: float) -> Finding | None:
    """Steps with as many mini-batches as stated and more, most of them with more, and not all with one number."""
    counts = sorted(told.values())
    more = sum(count > stated for count in counts)
    if counts[0] == counts[-1] or counts[0] < stated or 2 * more <= len(counts):
        return None
    return warning(
        f"steps have {counts[0]} to {counts[-1]} updates, and the run states {stated:g} mini-batches",
        Where(step=max(told, key=lambda step: told[step])),
        shown("mini-batches of a step, as its records count them", listed([told[step] for step in sorted(told)], 8),
              f"{stated:g}"),
        shown("steps with more than stated", share(more, len(counts))),
        link="optimizer",
        cause="mini-batches have a fixed number of rows, and a batch has a row for each turn: more turns are more "
        "updates, each at the full learning rate and further off the policy that sampled",
        next_step="cut each batch into the stated number of parts, or state the rows of a mini-batch by trajectories",
        steps=sorted(step for step, count in told.items() if count > stated),
    )  # fmt: skip


def _by_batch(case: Case, numbers: dict[int, set[int]], last: int) -> dict[int, int]:
    """How many of these numbers each batch has, by its first step: steps in a row that hold the same rows are of one
    batch. Without the batch that the last step is of, which may be cut off.
    """
    first: dict[int, int] = {}
    #: By step: what is recorded of one batch need not join (a mask that leaves tokens out), and any of it tells.
    rows: dict[int, list[set[bytes]]] = {}
    for batch in case.batches():
        if batch.step is not None and batch.spine.has_tokens:
            rows.setdefault(batch.step, []).append(set(marked(batch.spine, [])))
    for step in sorted(rows):
        goes_on = any(now == before for now in rows[step] for before in rows.get(step - 1, ()))
        first[step] = first[step - 1] if goes_on else step
    each: dict[int, set[int]] = {}
    for step, found in numbers.items():
        if step in first and first[step] != first.get(last):
            each.setdefault(first[step], set()).update(found)
    return {step: len(found) for step, found in each.items()}


def _rate(case: Case, looked: list[bool]) -> Iterator[Finding]:
    stated, series = learning_rate(case.algorithm), case.log.get("learning_rate")
    if not stated or series is None or len(series.finite) < STEPS or "critic" in series.name:
        return
    looked[0] = True
    values = series.finite
    # What rests below it may be what a schedule has come to, where the run began before.
    rests = max(values) - min(values) <= 1e-9 * max(values) and series.points[0].step in (0, 1)
    most = max(values)
    top = next(point for point in series.points if point.value == most)
    untold = half_a_digit(series.name, top.path, top.line)
    if not (most - untold > (1 + CLOSE) * stated or (rests and 0 < most < (1 - CLOSE) * stated - untold)):
        return
    steps = [point.step for point in series.points if point.value - untold > (1 + CLOSE) * stated or rests]
    yield finding(
        "warning" if max(most / stated, stated / most) >= OTHERWISE else "info",
        f"the learning rate is {most:.4g}, {most / stated:.3g} times what the run states ({stated:.4g})"
        + ("" if rests else f", from step {steps[0]} on" if steps else ""),
        series.place,
        series.shown(most, f"<= {stated:.4g}"),
        shown("steps", listed(steps)),
        link="optimizer",
        cause="the rate that is configured does not reach the optimizer: another group's or a default stands in its "
        "place, it is scaled (by ranks, by the batch), or a scheduler multiplies it again",
        next_step="print optimizer.param_groups of the first step",
        steps=[step for step in steps if step is not None],
    )
