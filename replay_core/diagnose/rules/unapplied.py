"""Settings that a run states and that what it records shows were never applied: one table of settings and checks.

A setting is told by the run's own words, and a check by a figure that the setting, applied, cannot leave: it says
whether a step tells, and whether it contradicts. Settings whose value can be solved for have rules of their own: the
loss's aggregation (D28), the KL's and the entropy's coefficients (D49), the clip range (D50), gamma and lambda (D44),
caps of weights (D59), the critic's range (D91), estimators (D04, D29), temperatures (D10).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from msgspec import Struct

from replay_core.diagnose.algorithm import (
    GROUP_SIZE,
    Algorithm,
    entropy_bonus,
    filter_metric,
    filters_groups,
    filters_overlong,
    kl_in_rewards,
    whitens,
)
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Evidence, Finding, Where, finding, share, shown
from replay_core.diagnose.flat import ranges_G
from replay_core.diagnose.rule import rule, skip_if
from replay_core.diagnose.rules.tokens import truncated
from replay_core.diagnose.surrogates import FLOOR, logged_of

#: By how much a bound may be missed (rounding); tokens that tell; from where on policy and reference are apart.
CLOSE, FEWEST, MOVED = 1e-3, 8, 1e-4


class _Shows(Struct, frozen=True):
    """What a step tells of a setting: the figures, where to look, and whether they contradict it."""

    contradicts: bool
    evidence: tuple[Evidence, ...] = ()
    where: Where | None = None
    is_sure: bool = True
    """Whether nothing that is right looks so, too."""


class _Setting(Struct, frozen=True):
    """A setting as it is stated (in words, with the number that `value` gives, if it is on), and what a step tells of
    it (None: nothing).
    """

    link: str
    value: Callable[[Algorithm], float | str | None]
    words: str
    told: Callable[[StepBatch], _Shows | None]
    claim: str
    cause: str


def _past_the_clip(batch: StepBatch) -> _Shows | None:
    column, bound = batch.columns.of("advantages"), batch.laid.algorithm.advantage_clip
    if column is None or not bound:
        return None
    counted_N = column.said_N & np.isfinite(column.values_N)
    counted_N &= batch.trained_N if batch.trained_N is not None else True
    size_N = np.where(counted_N, np.abs(column.values_N), 0.0)
    past_N = size_N > bound * (1 + CLOSE)
    if not counted_N.any():
        return None
    at = int(size_N.argmax())
    return _Shows(
        bool(past_N.any()),
        (shown("largest |advantage|", float(size_N[at]), f"<= {bound:g}", column.source),
         shown("tokens past the bound", share(int(past_N.sum()), int(counted_N.sum())), "none")),
        batch.laid.where("advantages", at=at),
    )  # fmt: skip


def _unpenalised(batch: StepBatch) -> _Shows | None:
    rewards, scores = batch.columns.of("token_rewards"), batch.columns.of("token_scores")
    ref, policy = batch.columns.of("ref_logprobs"), batch.trainer
    if rewards is None or scores is None or ref is None or policy is None:
        return None
    both_N = batch.pair(policy, ref) & rewards.said_N & scores.said_N
    apart = np.abs(policy.values_N - ref.values_N)[both_N]
    if both_N.sum() < FEWEST or float(apart.mean()) < MOVED:
        return None
    taken = np.abs(rewards.values_N - scores.values_N)[both_N]
    return _Shows(
        not taken.any(),
        (shown("largest |token reward - token score|", float(taken.max()), "> 0", rewards.source),
         shown("mean |policy - ref|", float(apart.mean()))),
        batch.laid.where("token_rewards", sample=0),
    )  # fmt: skip


def _unfiltered(batch: StepBatch) -> _Shows | None:
    group_B, reward_B = batch.group_B, batch.reward_B
    if group_B is None or reward_B is None or not batch.group_is_named or not np.isfinite(reward_B).all():
        return None
    sizes_G = np.bincount(group_B)
    # Parts of groups, as one rank of several may hold them, tell nothing of the whole.
    whole = batch.laid.algorithm.number(*GROUP_SIZE)
    if sizes_G.min() < 2 or np.unique(sizes_G).size > 1 or (whole is not None and sizes_G[0] != whole):
        return None
    equal_G = ranges_G(reward_B, group_B) <= 1e-6 * max(float(np.abs(reward_B).max()), 1e-12)
    # A group that the mask leaves out is filtered out; GRPO's own advantages of it are 0, as a filter may set them.
    counted_B = np.ones(len(batch), dtype=bool) if batch.trained_N is None else batch.flat.count(batch.trained_N) > 0
    equal_G &= np.bincount(group_B, weights=counted_B) > 0
    column = batch.columns.of("advantages")
    pushed_B = counted_B
    if column is not None:
        pushed_N = column.said_N & (np.nan_to_num(column.values_N) != 0)
        pushed_N &= batch.trained_N if batch.trained_N is not None else True
        pushed_B = batch.flat.count(pushed_N) > 0
    elif (advantage_B := batch.advantage_B) is not None:
        pushed_B = counted_B & (np.nan_to_num(advantage_B) != 0)
    pushed = int((equal_G & (np.bincount(group_B, weights=pushed_B) > 0)).sum())
    return _Shows(
        bool(equal_G.any()),
        (shown("groups without a spread that count", share(int(equal_G.sum()), sizes_G.size), "none",
               f"rewards of {batch.name}"),
         shown("of them with advantages other than 0", pushed)),
        batch.laid.where(batch.columns.reward_name, sample=int(equal_G[group_B].argmax())),
        is_sure=pushed > 0,
    )  # fmt: skip


def _filtered_by_another(batch: StepBatch) -> _Shows | None:
    """Groups that the stated metric does not tell apart, and the reward does: a filter on that metric leaves none."""
    metric = filter_metric(batch.laid.algorithm)
    group_B, reward_B = batch.group_B, batch.reward_B
    metric_B = None if metric is None else batch.columns.per_sample(metric)
    if metric_B is None or group_B is None or reward_B is None or not batch.group_is_named:
        return None
    if not (np.isfinite(metric_B).all() and np.isfinite(reward_B).all()) or np.allclose(metric_B, reward_B):
        return None
    sizes_G = np.bincount(group_B)
    if sizes_G.min() < 2 or np.unique(sizes_G).size > 1:
        return None
    advantage_B = batch.advantage_B
    counted_B = np.ones(len(batch), dtype=bool) if batch.trained_N is None else batch.flat.count(batch.trained_N) > 0
    pushed_B = counted_B if advantage_B is None else counted_B & (np.nan_to_num(advantage_B) != 0)
    close = 1e-6 * max(float(np.abs(reward_B).max()), 1e-12)
    odd_G = (ranges_G(metric_B, group_B) <= 1e-6) & (ranges_G(reward_B, group_B) > close)
    odd_G &= np.bincount(group_B, weights=pushed_B) > 0
    worst = int(odd_G.argmax())
    return _Shows(
        bool(odd_G.any()),
        (shown(f"groups of one {metric} that count", share(int(odd_G.sum()), sizes_G.size), "none",
               f"{metric} and rewards of {batch.name}"),
         shown(f"{metric} of the first of them", float(metric_B[group_B == worst][0])),
         shown("its rewards apart by", float(ranges_G(reward_B, group_B)[worst]))),
        batch.laid.where(batch.columns.reward_name, sample=int((group_B == worst).argmax())),
    )  # fmt: skip


def _cut_and_counted(batch: StepBatch) -> _Shows | None:
    # Where nothing says so, it is told by the end token, as far as that is known.
    cut_B, trained_N = truncated(batch) if batch.eos_id is not None else batch.truncated_flag_B, batch.trained_N
    if cut_B is None or trained_N is None or not cut_B.any():
        return None
    counted_B = cut_B & (batch.flat.count(trained_N) > 0)
    first = int(counted_B.argmax())
    return _Shows(
        bool(counted_B[cut_B].all()),
        (shown("responses that are cut off, and count", share(int(counted_B.sum()), int(cut_B.sum())), "none"),),
        batch.laid.where("response_mask", sample=first),
    )


def _unwhitened(batch: StepBatch) -> _Shows | None:
    column = batch.columns.of("advantages")
    if column is None or batch.trained_N is None or batch.advantage_B is not None:
        return None
    inside = column.values_N[batch.trained_N & column.said_N & np.isfinite(column.values_N)]
    if inside.size < 4 * FEWEST:
        return None
    std = float(inside.std())
    # A micro-batch's or a rank's own whitening leaves about as much.
    return _Shows(
        not 0.5 < std < 2.0,
        (shown("std of the advantages", std, "about 1", column.source), shown("their mean", float(inside.mean()))),
        batch.laid.where("advantages", sample=0),
    )


def _without_bonus(batch: StepBatch) -> _Shows | None:
    loss, pg = (logged_of(batch, name, fewest=1) for name in ("loss", "pg_loss"))
    entropy = batch.columns.of("entropy")
    if loss is None or pg is None or loss.values_M.shape != pg.values_M.shape:
        return None
    if entropy is not None:
        each = entropy.values_N[entropy.said_N]
    elif (sampled := batch.trainer) is not None and batch.trained_N is not None:
        # What was sampled from a policy has its entropy as the mean of -log p.
        each = -sampled.values_N[sampled.said_N & batch.trained_N]
    else:
        return None
    each = each[np.isfinite(each)]
    if not each.size:
        return None
    mean, weight = float(each.mean()), entropy_bonus(batch.laid.algorithm) or 0.0
    if weight * mean < 100 * FLOOR:
        return None
    left = float(np.abs(loss.values_M - pg.values_M).max())
    return _Shows(
        left <= FLOOR and not batch.columns.scalars("kl_loss"),
        (shown("largest |loss - pg_loss|", left, f"about {weight * mean:.3g}"), shown("mean entropy", mean)),
        batch.laid.where("entropy" if entropy is not None else "policy_logprobs", sample=0),
        is_sure=False,  # a trainer may log the policy's loss as its loss, and add the terms up after that
    )


_SETTINGS = (
    _Setting("advantages", lambda one: one.advantage_clip, "advantages are clipped at {:g}", _past_the_clip,
             "advantages exceed the clip that is stated for them",
             "the clamp on advantages is missing, or comes before what scales them"),
    _Setting("rewards", kl_in_rewards, "the KL is subtracted from the rewards, times {:g}", _unpenalised,
             "token rewards are the token scores: the KL penalty that is stated is not in them",
             "the penalty is computed and not applied, its coefficient is 0 where it is used, or rewards are recorded "
             "before it: nothing holds the policy near its reference"),
    _Setting("groups", filters_groups, "groups without a spread are filtered out", _unfiltered,
             "groups without a spread of rewards count in the loss, and a filter is stated",
             "the filter (dynamic sampling) looks at another figure, runs before the rewards are final, or gives up "
             "and takes what is there: these groups have no gradient, and dilute the others'"),
    _Setting("groups", filter_metric, "groups are filtered by {}", _filtered_by_another,
             "groups that the filter's metric does not tell apart are trained on: what differs in them is what shapes "
             "the reward (length, format), not the answer",
             "the filter (dynamic sampling) looks at the shaped reward instead of the metric that is stated: a group "
             "whose answers are all wrong passes on its length penalty alone, and is normalised to full size"),
    _Setting("masks", filters_overlong, "responses that are cut off do not count", _cut_and_counted,
             "responses that were cut off are trained on, and a filter is stated",
             "the mask of cut responses is not applied to the loss mask"),
    _Setting("advantages", whitens, "advantages are whitened", _unwhitened,
             "advantages are not whitened, and the run states that they are",
             "the switch does not reach the advantages: their size is the rewards'"),
    _Setting("loss", entropy_bonus, "the loss holds {:g} times the entropy", _without_bonus,
             "the entropy bonus that is stated is not in the loss",
             "the term is computed, logged, and left out where the loss is summed up"),
)  # fmt: skip


@rule("D102", "a setting is stated and not applied", link="advantages", scope="case", lasts=True,
      explains=("D28", "D01", "D03", "D73", "D20", "L08", "L10", "D25"),
      source="verl algorithm.filter_groups, use_kl_in_reward; DAPO 2503.14476; arXiv 1707.06347")  # fmt: skip
def not_applied(case: Case) -> Iterator[Finding]:
    """Settings that the run states, each held against what it cannot leave: a bound of advantages against the largest
    one; a KL in the rewards against token rewards that are the token scores, where policy and reference differ; a
    filter of groups against whole groups of equal rewards; one that states its metric against groups of one such figure
    and several rewards; a filter of cut responses against their counted tokens;
    whitening against a std of .5 to 2; an entropy bonus against a loss that is pg_loss alone. An error where half of
    the steps that tell contradict it, a warning where that is one of several, where such groups have no advantages
    (a filter may set them to 0, and so does GRPO), and of the bonus (the loss may be logged before it).
    """
    ballot: dict[int, list[tuple[StepBatch, _Shows]]] = {}
    words: dict[int, str] = {}
    for batch in case.batches():
        for at, setting in enumerate(_SETTINGS):
            stated = setting.value(batch.laid.algorithm)
            if stated and (told := setting.told(batch)) is not None:
                words[at] = setting.words.format(stated)
                ballot.setdefault(at, []).append((batch, told))
    skip_if(not ballot, "no such setting is stated, or what it would show in is not recorded")
    for at, every in sorted(ballot.items()):
        against = [(batch, told) for batch, told in every if told.contradicts]
        if not against or 2 * len(against) < len(every):
            continue
        first = against[0][1]
        yield finding(
            "error"
            if len(against) >= min(2, len(case.steps())) and any(told.is_sure for _, told in against)
            else "warning",
            _SETTINGS[at].claim,
            first.where,
            *first.evidence, shown("stated", words[at]),
            shown("steps that contradict it", share(len(against), len(every)), "none"),
            link=_SETTINGS[at].link,
            cause=_SETTINGS[at].cause,
            steps=[batch.step for batch, _ in against],
        )  # fmt: skip
