"""One prefix, one number: what a model says of the same tokens in two steps tells whether its weights moved.

A step's samples repeat prompts, and the first tokens of answers: what stands before a token, and the token, are the
same. A frozen model gives it the same number in every step, a model that is trained another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.columns import Column
from replay_core.diagnose.finding import Finding, Where, error, finding, shown, warning
from replay_core.diagnose.passes import keys_of
from replay_core.diagnose.places import places_of, prompt_places_of
from replay_core.diagnose.rule import Skip, rule, skip_if
from replay_core.diagnose.rules.right_answers import lost_grades
from replay_core.diagnose.trajectories import trajectory_B

#: Tokens of a response that are followed, and places that are remembered.
FOLLOWED, MOST = 24, 200_000
#: Shared places, and steps, before their numbers say anything.
FEWEST, STEPS = 8, 3
#: Two forwards of one set of weights: equal in float32 up to this; and what no noise explains, in nats, where a step
#: does not show its own noise (bf16 beside other neighbours: docs/tolerances.md).
SAME, NOISE, LEAST = 3e-6, 0.05, 2e-3

#: Pairs of steps between which a model stands still, before it is one that is exchanged and not one that is trained.
STANDING = 3


class _Memory(Struct):
    """What a tensor says of places that come again: by step, |now - when first seen|, and the range within a step."""

    first: dict[int, float] = field(default_factory=dict)
    apart: dict[int, list[float]] = field(default_factory=dict)
    noise: list[float] = field(default_factory=list)
    where: Where | None = None
    last: dict[int, tuple[int, float]] = field(default_factory=dict)
    """When each place was last seen, and what it said."""
    since: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    """By the step when last seen and this one, |now - then|."""

    def take(self, step: int, here: dict[int, list[float]]) -> None:
        for place, values in here.items():
            if len(values) > 1:
                self.noise.append(max(values) - min(values))
            if place in self.last:
                then, said = self.last[place]
                self.since.setdefault((then, step), []).append(abs(values[0] - said))
            if place in self.last or len(self.last) < MOST:
                self.last[place] = (step, values[0])
            before = self.first.get(place)
            if before is not None:
                self.apart.setdefault(step, []).append(abs(values[0] - before))
            elif len(self.first) < MOST:
                self.first[place] = values[0]

    @property
    def known(self) -> bool:
        return len(self.apart) >= STEPS - 1 and sum(map(len, self.apart.values())) >= FEWEST

    @property
    def largest(self) -> float:
        return max(max(each) for each in self.apart.values())

    @property
    def typical(self) -> float:
        """The median difference of the last half of the steps."""
        later = sorted(self.apart)[len(self.apart) // 2 :]
        return float(np.median([one for step in later for one in self.apart[step]]))

    @property
    def exchanged(self) -> int | None:
        """The one step in which it became another, by every place: what moved was seen on both sides of it, and
        what was seen on one side stood. None where it moves on, or never, or no one step is told.
        """
        moved = [span for span, each in self.since.items() if float(np.median(each)) > self.floor]
        still = [span for span in self.since if span not in moved]
        if not moved:
            return None
        at = set(range(max(then for then, _ in moved) + 1, min(step for _, step in moved) + 1))
        at -= {step for then, now in still for step in range(then + 1, now + 1)}
        return min(at) if len(at) == 1 and len(still) >= STANDING else None

    @property
    def floor(self) -> float:
        """What noise explains: the step's own, where it shows."""
        if len(self.noise) < FEWEST:
            return NOISE
        return max(LEAST, 5 * float(np.median(self.noise)), float(np.quantile(self.noise, 0.9)))


def _memories(batches: Iterable[StepBatch]) -> dict[str, _Memory]:
    found: dict[str, _Memory] = {}
    seen: set[bytes] = set()
    for batch in batches:
        columns: dict[str, Column | None] = {
            "policy": batch.trainer, "reference": batch.columns.of("ref_logprobs"),
            "critic": batch.columns.of("values"), "engine": batch.columns.of("rollout_logprobs"),
        }  # fmt: skip
        wanted = batch.step is not None and any(columns.values())
        places = [(here, at) for _, here, at in places_of(batch, FOLLOWED)] if wanted else None
        if not places or batch.step is None:
            continue
        prompts = list(prompt_places_of(batch, FOLLOWED))
        passed_N, now = _passed_again(batch, seen), batch.columns.of("policy_logprobs")
        for name, column in columns.items():
            if column is None:
                continue
            here: dict[int, list[float]] = {}
            again = name == "policy" and now is not None
            for place, at in places:
                told = now if again and now is not None and passed_N[at] else column
                if told.said_N[at] and np.isfinite(told.values_N[at]):
                    here.setdefault(place, []).append(float(told.values_N[at]))
            memory = found.setdefault(name, _Memory())
            memory.where = memory.where or batch.laid.where(column.name, sample=0)
            memory.take(batch.step, here)
        # Prompts begin alike (a template), and some trainers score them, too; others leave 0 there.
        policy, here = batch.trainer, {}
        for place, at in prompts if policy is not None else ():
            if policy is not None and policy.said_N[at] and np.isfinite(policy.values_N[at]) and policy.values_N[at]:
                here.setdefault(place, []).append(float(policy.values_N[at]))
        if policy is not None and here:
            memory = found.setdefault("policy on prompts", _Memory(where=batch.laid.where(policy.name, sample=0)))
            memory.take(batch.step, here)
    return found


def _passed_again(batch: StepBatch, seen: set[bytes]) -> NDArray[np.bool_]:
    """Tokens [N] of samples that an earlier step holds, too, with the same old log-probabilities: those are kept, and
    what the policy says now stands in its forward. `seen` takes the samples of this step.
    """
    keys = [None if key is None else blake2b(key, digest_size=16).digest() for key in keys_of(batch)]
    again_B = np.array([key is not None and key in seen for key in keys], dtype=bool)
    seen.update(key for key in keys if key is not None)
    found: NDArray[np.bool_] = np.repeat(again_B, batch.flat.lengths_B)
    return found


def policy_stands(batches: Iterable[StepBatch]) -> bool:
    """Whether the policy gives the same tokens the same log-probability in every step (8 places, 3 steps and more)."""
    memories = _memories(batches)
    found = [memory for name in ("policy", "policy on prompts") if (memory := memories.get(name)) and memory.known]
    return bool(found) and all(memory.largest <= SAME for memory in found) and _spread(found[0])


#: A critic is warmed up over fewer steps than that.
WARM_UP = 20


@rule("D55", "a model that should stand moves, or one that should move stands", link="optimizer", scope="case",
      explains=("D45", "D46", "L08"),
      source="one prefix has one number under one set of weights; TR-DPO and ProRL move their reference on "
          "purpose")  # fmt: skip
def standing(case: Case) -> Iterator[Finding]:
    """What policy, reference and critic say of the same tokens after the same tokens in several steps (8 places and
    more, over 3 steps). A reference whose numbers change by more than noise (the range within a step, else .05 nats)
    moves: a warning; where every place that moved since it was last seen was seen on both sides of one step, and none
    on one side did (3 pairs of steps and more), it is another from that step on. A policy or critic whose numbers are
    the same to 3e-6 in every step stands still: a warning, info for a policy whose critic changes over fewer than 20
    steps (a warm-up of the critic); of samples that are passed over again in a later step, it is the policy's own
    forward that counts, where it is recorded. An error for a policy whose engine's numbers change by more than noise:
    what is recorded of the policy is stale.

    Fewer places (6 and more, over 3 steps, prompts' among them) tell a reference that is the policy of the step before:
    what it says is ten times as near to that as to what it said then. A warning.
    """
    if (refreshed := _policy_before(case)) is not None:
        yield refreshed
        return
    memories = {name: memory for name, memory in _memories(case.batches()).items() if memory.known}
    skip_if(not memories, "no prompt and first token of a response come again in another step")
    ref, policy, critic = (memories.get(name) for name in ("reference", "policy", "critic"))
    if ref is not None and ref.typical > ref.floor:
        exchanged = ref.exchanged
        yield warning(
            "the reference moves with the policy: it is the policy itself"
            if policy is not None and abs(policy.typical - ref.typical) <= SAME
            else f"the reference is another from step {exchanged} on: it gives the same tokens other log-probabilities "
            "than before, and stands still before and after"
            if exchanged is not None
            else "the reference moves: it gives the same tokens other log-probabilities in later steps",
            ref.where,
            shown("median |now - before| of the same place, nats", ref.typical, f"< {ref.floor:.2g}"),
            shown("the policy's, beside it", policy.typical if policy else None),
            shown("places that come again", sum(map(len, ref.apart.values()))),
            cause="the reference is loaded, or made of the policy, anew there: by a resume that takes the checkpoint "
            "for it, or on purpose (TR-DPO, ProRL)"
            if exchanged is not None
            else "the reference is updated with the policy: shared weights, a copy made anew in every step, or left "
            "in train mode; some recipes reset it on purpose (TR-DPO, ProRL)",
            steps=sorted(ref.apart) if exchanged is None else [exchanged],
        )
    asked = memories.get("policy on prompts")
    for name, memory, what in (("policy", policy or asked, "log-probability"), ("critic", critic, "value")):
        if memory is None or memory.largest > SAME or not _spread(memory):
            continue
        if name == "policy" and asked is not None and asked.largest > SAME:
            continue
        sampled = memories.get("engine")
        if name == "policy" and sampled is not None and sampled.typical > sampled.floor:
            yield error(
                "old log-probabilities are stale: the trainer's are of weights that stand, and the engine's move",
                memory.where,
                shown("largest |now - before| of the same place, trainer", memory.largest, f"> {SAME:g}"),
                shown("median |now - before| of the same place, engine", sampled.typical, None),
                cause="a copy of the policy that is not updated computes them (the reference, a checkpoint), or "
                "they are kept from an earlier step: the ratio is not 1 before an update",
                steps=sorted(memory.apart),
            )
            continue
        warms = name == "policy" and critic is not None and critic.largest > SAME and len(memory.apart) < WARM_UP
        yield finding(
            "info" if warms else "warning",
            f"the {name} never changes: it gives the same tokens the same {what} in every step",
            memory.where,
            shown("largest |now - before| of the same place", memory.largest, f"> {SAME:g}"),
            shown("places that come again", sum(map(len, memory.apart.values()))),
            shown("steps compared", len(memory.apart) + 1),
            cause="the critic learns alone: a warm-up of the critic has the policy wait for it"
            if warms
            else _unmoved(case, name),
            steps=sorted(memory.apart),
        )


def _unmoved(case: Case, name: str) -> str:
    """Why no update reaches a model: of the reasons those that the logged learning rate and gradients leave."""
    prefix = "critic_" if name == "critic" else ""
    rates, grads = case.log.get(f"{prefix}learning_rate"), case.log.get(f"{prefix}grad_norm")
    has_rate = rates is not None and bool(rates.finite) and min(rates.finite) > 0
    has_gradient = grads is not None and bool(grads.finite) and min(grads.finite) > 0
    others = ", ".join(["a learning rate of 0"] * (not has_rate) + ["a loss that is detached"] * (not has_gradient))
    told = " and ".join(["the learning rate is not 0"] * has_rate + ["gradients are not"] * has_gradient)
    return (
        "no update reaches it: the optimizer is not stepped, or holds other parameters than the model that is run "
        "(made before it was wrapped, moved or given its adapter)"
        + (f"; {told}" if told else "")
        + (f"; or {others}" if others else "")
        + ("; or updates too small for its precision" if not told else "")
    )


#: Places and steps that tell a reference made of the policy before, and how much nearer it is to that.
AFTER, AFTER_STEPS, NEARER, MOVED = 6, 3, 0.1, 1e-3


def _policy_before(case: Case) -> Finding | None:
    """A reference that in every step says what the policy said in the step before, and not what it said itself."""
    before: dict[int, tuple[float, float]] = {}
    moved: list[float] = []
    left: list[float] = []
    steps: list[int] = []
    where: Where | None = None
    for batch in case.batches():
        ref, policy = batch.columns.of("ref_logprobs"), batch.trainer
        if ref is None or policy is None or batch.step is None:
            continue
        here: dict[int, tuple[float, float]] = {}
        places = [(place, at) for _, place, at in places_of(batch, FOLLOWED)] + list(prompt_places_of(batch, FOLLOWED))
        for place, at in places:
            said = float(ref.values_N[at]), float(policy.values_N[at])
            if np.isfinite(said).all() and all(said):
                here.setdefault(place, said)
        shared = [place for place in here if place in before]
        changed = [place for place in shared if abs(here[place][0] - before[place][0]) > SAME]
        if changed:
            moved += [abs(here[place][0] - before[place][0]) for place in shared]
            left += [abs(here[place][0] - before[place][1]) for place in shared]
            steps.append(batch.step)
            where = where or batch.laid.where(ref.name, sample=0)
        before = here
    if len(moved) < AFTER or len(steps) < AFTER_STEPS:
        return None
    if np.mean(left) > NEARER * np.mean(moved) or np.mean(moved) < MOVED:
        return None
    return warning(
        "the reference is the policy of the step before: it is refreshed in every step, and the KL to it measures one "
        "update, however far the policy goes",
        where,
        shown("mean |reference - policy of the step before|, nats", float(np.mean(left))),
        shown("mean |reference - reference of the step before|", float(np.mean(moved)), "0"),
        shown("places that come again", len(moved)),
        cause="the reference's weights are synchronised with the policy's in every step (shared weights, a sync of all "
        "models): nothing holds the policy near its first weights; some recipes reset it now and then (TR-DPO, ProRL)",
        steps=steps,
    )


def _spread(memory: _Memory) -> bool:
    return bool(np.ptp(list(memory.first.values())) > 1e-3)


#: Pairs of equal answers before their rewards say anything; share of the batch's variance that they may have.
PAIRS, SHARED = 12, 0.5


def _may_be_moved(rewards_B: NDArray[np.float64], copies: list[int]) -> bool:
    """Whether rewards may be those of answers that were given so many times each, in another order: each value stands
    as often as some of the answers do together, and there are no more of them than of answers.
    """
    sums = 1
    for count in copies:
        sums |= sums << count
    _, counts = np.unique(np.round(rewards_B, 6), return_counts=True)
    return len(counts) <= len(copies) and all(sums >> int(count) & 1 for count in counts)


def _answers(batch: StepBatch) -> list[Any] | None:
    """Prompt and response of each sample: their tokens, else their texts; None where neither is recorded."""
    tokens_N = batch.tokens_N
    if tokens_N is not None:
        ends = zip(batch.flat.starts_B, batch.flat.lengths_B, strict=True)
        return [tokens_N[start : start + length].tobytes() for start, length in ends]
    asked, told = batch.columns.texts("prompt_text"), batch.columns.texts("response_text")
    return None if asked is None or told is None else list(zip(asked, told, strict=True))


#: Kinds of equal answers, and pairs of them that are left and agree, before a sentinel is no chance.
KINDS, LEFT_PAIRS = 4, 4


def _sentinel(spared: list[tuple[float, bool, int]], paid: set[float]) -> float | None:
    """The one number below 0 that stands for no score: without it equal answers agree, on several rewards of 0 and
    more, which those of other samples would not. (lowest of its step, whether the rest agrees, pairs in the rest.)
    """
    lowest = {round(low, 6) for low, *_ in spared}
    if len(lowest) != 1 or not all(agree for _, agree, _ in spared):
        return None
    (low,) = lowest
    pairs = sum(left for *_, left in spared)
    return low if low < 0 <= min(paid, default=-1.0) and len(paid) > 1 and pairs >= LEFT_PAIRS else None


@rule("D56", "equal answers get different rewards", link="rewards", scope="case",
      explains=("L08", "D04"), source="rewards returned in order of completion, not of submission")  # fmt: skip
def same_answers(case: Case) -> Finding | None:
    """Responses of one prompt whose tokens (or texts) are all equal, in the same step (12 pairs and more over the run):
    the variance of their rewards within such pairs, over the variance of rewards. Half of it and more is a warning:
    rewards do not follow what was answered. A judge that is a model wavers by less. Where a trajectory has a row for
    each turn, its rows are left out: what comes after them is paid, too. Steps before the first such pair
    that differs are left out: the mistake may begin later. Worth knowing alone where, in most such steps, the rewards
    cannot be those of the step's samples in another order: a value that stands three times belongs to three samples
    whose answers no others gave, or to an answer given three times. Where the one
    number below 0 is left out and equal answers then agree, on several rewards, it stands for a judge that failed.
    Where the step's
    lowest reward stands in at most half of the equal answers, and all others of them have one, a verifier may have
    failed on some rows; it has where it is known which answers are right, and of 16 wrong ones and more none has more
    than the lowest reward. A judge wavers so, or fails at times, beside a
    policy that has converged onto one answer.
    """
    within, count, agreed = 0.0, 0, 0
    squares: list[float] = []
    where: Where | None = None
    steps: list[int] = []
    orders: list[bool] = []
    lost: list[bool] = []
    spared: list[tuple[float, bool, int]] = []
    paid: set[float] = set()
    kinds = 0
    for batch in case.batches():
        rewards_B, answers = batch.reward_B, _answers(batch)
        if rewards_B is None or answers is None or not np.isfinite(rewards_B).all():
            continue
        if batch.spine.has_tokens and trajectory_B(batch) is not None:
            continue  # a row is one turn, and its reward what the turns after it earned, too
        same: dict[object, list[int]] = {}
        for sample, answer in enumerate(answers):
            same.setdefault(answer, []).append(sample)
        told = [each for each in same.values() if len(each) > 1]
        differ = any(np.ptp(rewards_B[each]) > 1e-6 for each in told)
        if not (differ or squares):
            agreed += sum(len(each) - 1 for each in told)
            continue
        for each in told:
            values = rewards_B[each]
            within += float(((values - values.mean()) ** 2).sum()) * 2
            count += len(each) - 1
            left = values[values > rewards_B.min() + 1e-6]
            if len(left):
                spared.append((float(rewards_B.min()), float(np.ptp(left)) <= 1e-6, len(left) - 1))
                paid |= {*np.round(left, 6).tolist()}
            if np.ptp(values) > 1e-6:
                low = values <= rewards_B.min() + 1e-6
                kinds += 1
                lost.append(2 * low.sum() <= len(values) and bool(low.any()) and float(np.ptp(values[~low])) <= 1e-6)
                where = where or batch.laid.where("reward", sample=each[int(np.abs(values - values.mean()).argmax())])
        if told:
            squares.append(float(rewards_B.var()))
        if differ:
            orders.append(_may_be_moved(rewards_B, [len(each) for each in same.values()]))
        if differ and batch.step is not None:
            steps.append(batch.step)
    if count + agreed < PAIRS or (squares and not np.mean(squares) > 1e-9):
        raise Skip(f"needs {PAIRS} pairs of equal answers to one prompt")
    share = within / (2 * count) / float(np.mean(squares)) if squares else 0.0
    moved = 2 * sum(orders) >= len(orders)
    sentinel = _sentinel(spared, paid) if kinds >= KINDS else None
    if count >= PAIRS and share >= SHARED and sentinel is not None:
        return warning(
            f"equal answers to one prompt get different rewards: some have {sentinel:g}, and all others of them one: a "
            "judge that failed is taken for a reward",
            where,
            shown("variance among equal answers / variance of rewards", share, f"< {SHARED:g}", "rewards and tokens"),
            shown(f"kinds of equal answers of which some have {sentinel:g}", kinds),
            shown("different rewards that the others have", len(paid)),
            cause=f"{sentinel:g} stands for no score (a judge that timed out, raised or was not parsed), and is "
            "trained on as the lowest reward: right answers are punished at random",
            next_step=f"count the samples with {sentinel:g} in the judge's log; score them again, or leave them out of "
            "the group and of the loss",
            steps=steps,
        )
    if count >= PAIRS and share >= SHARED and (grades := lost_grades(case)) is not None:
        return warning(
            f"right answers are scored {grades.low:g} at random: equal answers to one prompt get different rewards, "
            f"{grades.unpaid} of {grades.right} right ones have {grades.low:g}, and no wrong one has more",
            where,
            shown("variance among equal answers / variance of rewards", share, f"< {SHARED:g}", "rewards and tokens"),
            shown("pairs of equal answers", count),
            shown(f"right answers with {grades.low:g}", grades.unpaid, "0"),
            shown(f"wrong answers with more than {grades.low:g}", 0, f"of {grades.wrong}"),
            cause="the verifier fails on some rows (a time-out under load, an exception, a judge that wavers) and what "
            "it could not grade is taken for wrong. Rewards of other samples would pay wrong answers, too",
            next_step="count the time-outs and exceptions of the verifier; grade these rows again, or leave them out "
            "of the group and of the loss",
            steps=steps,
        )
    if count >= PAIRS and share >= SHARED:
        return finding(
            "warning" if moved else "info",
            "equal answers to one prompt get different rewards: "
            + (
                "some are not paid, or rewards belong to other samples"
                if moved and all(lost)
                else "rewards belong to other samples"
                if moved
                else "in no order would they give each answer one, so that the judge is no function of the answer"
            ),
            where,
            shown("variance among equal answers / variance of rewards", share, f"< {SHARED:g}", "rewards and tokens"),
            shown("pairs of equal answers", count),
            shown("pairs in the steps before, which agree", agreed),
            cause=(
                "the verifier fails on some rows (a time-out, an exception) and scores them as wrong: no more "
                "than half of the equal answers have the lowest reward, and all others one; or "
                if moved and all(lost)
                else ""
            )
            + "rewards come back in another order than the samples (order of completion, a pool of workers)"
            + ("" if agreed >= PAIRS // 2 else ", or the judge is random")
            if moved
            else "the judge wavers or failed at times (a model, a time-out, noise that is added), or rewards are of "
            "another step",
            steps=steps,
        )
    return None
