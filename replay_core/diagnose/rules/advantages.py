"""Groups and advantages: who is measured against whom, recomputed and named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from replay_core.diagnose.algorithm import OF_GROUPS
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.broken import first_broken
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding
from replay_core.diagnose.flat import Array
from replay_core.diagnose.lines import MEAN, baseline_of, scale_of, solved
from replay_core.diagnose.rule import Skip, given, rule
from replay_core.diagnose.signals import RunLog
from replay_core.diagnose.stating import finding, listed, share, shown
from replay_core.objectives import advantages

if TYPE_CHECKING:
    from replay_core.documents.diagnosis import Severity

#: How close a recomputed advantage has to be, by the precision it was stored in.
CLOSE = {"float64": 1e-5, "float32": 1e-4, "bfloat16": 2e-2, "float16": 4e-3}
_EPSILONS = (1e-4, 1e-6, 1e-8, 0.0)


@rule("D05", "groups of one response: no baseline", link="groups", scope="batch", needs=("group",),
      explains=("D01", "D03", "D04", "D24"), lasts=True,
      source="Search-R1#88; verl compute_grpo_outcome_advantage leaves a group of one its raw reward")  # fmt: skip
def groups_of_one(batch: StepBatch) -> Iterator[Finding]:
    """Groups with a single response. All of them is an error where most of their prompts repeat or the advantage is the
    raw reward; some of them is a warning. Silent where a critic gives the baseline (values are recorded), where
    REINFORCE is stated, and where groups are inferred from prompts alone.
    """
    group_B = given(batch.group_B)
    if not batch.group_is_named or len(group_B) < 2:
        raise Skip("groups are not named in the dump" if len(group_B) >= 2 else "there is one sample")
    sizes_G = np.bincount(group_B)
    lone = int((sizes_G == 1).sum())
    if not lone:
        return
    if batch.columns.ref("values") is not None or batch.laid.algorithm.estimator == "gae":
        raise Skip("a critic's values are the baseline")
    if batch.columns.ref("reward_baselines") is not None or batch.laid.algorithm.estimator == "remax":
        raise Skip("a greedy response is the baseline (ReMax)")
    prompt_B, raw = batch.prompt_B, _is_raw(batch)
    # A prompt may be drawn twice by chance; an id that is drawn per sample leaves most of them repeated.
    repeat = prompt_B is not None and 2 * int((np.bincount(prompt_B) > 1).sum()) > int(prompt_B.max()) + 1
    every = lone == sizes_G.size
    evidence = [shown("groups of one", lone, "0", f"group ids of {batch.name}"), shown("groups", sizes_G.size)]
    if prompt_B is not None:
        evidence.append(shown("different prompts", int(prompt_B.max()) + 1))
    if raw is not None:
        evidence.append(shown("advantages equal the raw rewards", raw, "False"))
    place = batch.laid.where(
        "group_id" if batch.columns.ref("group_id") else None, sample=int(np.flatnonzero(sizes_G[group_B] == 1)[0])
    )
    if every and batch.laid.algorithm.estimator.startswith("reinforce"):
        raise Skip("REINFORCE takes its baseline of the batch, or none")
    if every and (repeat or raw):
        cause = "the group id is made per sample (a uid drawn after repeating the prompts), so nothing is subtracted"
        claim = f"every sample is a group of its own ({share(lone, sizes_G.size)}): there is no baseline"
        yield finding("error", claim, place, evidence=evidence, cause=cause)
    elif every:
        claim = "one response per prompt: a baseline within groups is impossible"
        cause = "n = 1 in the rollout settings; REINFORCE with a batch baseline or a critic is meant to run so"
        yield finding("warning", claim, place, evidence=evidence, cause=cause)
    else:
        claim = f"{share(lone, sizes_G.size)} groups have a single response"
        cause = "responses of a group were dropped or filtered after grouping, or ids of one prompt differ"
        yield finding("warning", claim, place, evidence=evidence, cause=cause)


def _is_raw(batch: StepBatch) -> bool | None:
    """Whether advantages are the rewards themselves; None where that cannot be told."""
    advantage_B, reward_B = batch.advantage_B, batch.reward_B
    if advantage_B is None or reward_B is None:
        return None
    both_B = np.isfinite(advantage_B) & np.isfinite(reward_B)
    if not both_B.any() or not np.abs(reward_B[both_B]).max() > 0:
        return None
    return bool(np.allclose(advantage_B[both_B], reward_B[both_B], rtol=1e-4, atol=1e-6))


def _moving(batch: StepBatch) -> float | None:
    """What is subtracted from every reward of the batch, where that is one number and not 0."""
    advantage_B, reward_B = batch.advantage_B, batch.reward_B
    if advantage_B is None or reward_B is None:
        return None
    apart_B = (reward_B - advantage_B)[np.isfinite(reward_B) & np.isfinite(advantage_B)]
    size = max(float(np.abs(reward_B[np.isfinite(reward_B)]).max(initial=0.0)), 1e-6)
    same = len(apart_B) >= 4 and float(np.ptp(apart_B)) <= 1e-5 * size and float(np.abs(apart_B).max()) > 1e-5 * size
    return float(apart_B.mean()) if same else None


@rule("D06", "NaN advantages from a group without a spread", link="groups", scope="batch",
      needs=("group", "advantage"), lasts=True,
      explains=("D20", "D01", "D03", "D18", "D04", "L06", "L08", "L09", "L10", "D26", "D57", "D09", "D05",
               "D21", "D23", "D28"),
      source="DeepAnalyze#116: torch.std of one value is NaN")  # fmt: skip
def nan_from_small_groups(batch: StepBatch) -> Iterator[Finding]:
    """Non-finite advantages exactly in groups of one, or of equal rewards: 0 / 0, or a std with n - 1 = 0.

    A NaN in any other group has another cause and is D21's.
    """
    column, group_B, reward_B = given(batch.columns.of("advantages")), given(batch.group_B), batch.reward_B
    if not batch.group_is_named:
        raise Skip("groups are not named in the dump")
    bad_B = batch.flat.count(column.said_N & ~np.isfinite(column.values_N)) > 0
    if not bad_B.any():
        return
    values = batch.columns.of("values")
    if values is not None and not np.isfinite(values.values_N[values.said_N]).all():
        raise Skip("values are not finite (D21), and advantages are made of them: no group's std is in it")
    sizes_G = np.bincount(group_B)
    flat_G = sizes_G == 1
    if reward_B is not None and np.isfinite(reward_B).all():
        low_G, high_G = np.full(sizes_G.size, np.inf), np.full(sizes_G.size, -np.inf)
        np.minimum.at(low_G, group_B, reward_B)
        np.maximum.at(high_G, group_B, reward_B)
        flat_G = flat_G | (high_G == low_G)
    bad_G = np.unique(group_B[bad_B])
    if not flat_G[bad_G].all():
        return
    place = batch.laid.where("advantages", sample=int(np.flatnonzero(bad_B)[0]))
    lone = bool((sizes_G[bad_G] == 1).all())
    yield finding(
        "error",
        f"advantages are NaN in {share(len(bad_G), sizes_G.size)} groups, "
        + ("each of one response" if lone else "each without a spread of rewards"),
        place,
        evidence=[
            shown("samples with a non-finite advantage", int(bad_B.sum()), "0", column.source),
            shown("size of the first such group", int(sizes_G[bad_G[0]]), ">= 2"),
        ],
        cause="the std of one value with n - 1 is 0 / 0" if lone else "a std of 0 is divided by, without an epsilon",
    )


_SPREAD_CAUSES = {
    "reward_std": "a group of one sample: its unbiased std is 0/0; n must be at least 2",
    "reward_function_std": "a reward over fewer than two samples: its unbiased std is 0/0",
    "advantage_max": "a group of one sample (unbiased std is 0/0), or a reward that is no number",
    "advantage_min": "a group of one sample (unbiased std is 0/0), or a reward that is no number",
}


@rule("D06", "the spread of rewards is not a number", link="advantages", scope="signals",
      needs=("reward_std|reward_function_std|advantage_max",), source="DeepAnalyze#116")  # fmt: skip
def spread_is_nan(log: RunLog) -> Iterator[Finding]:
    """NaN in the spread of rewards, as the first signal that is not finite, is a group of one: an error, info where
    nothing but single reward functions is broken.
    """
    broken = first_broken(log)
    if broken is None or not broken.is_spread:
        return
    yield finding(
        "info" if {series.signal for series, _ in broken.every} == {"reward_function_std"} else "error",
        f"{broken.series.name} is NaN",
        broken.point.where(broken.series.name),
        evidence=broken.evidence,
        cause=_SPREAD_CAUSES[broken.series.signal],
        next_step="sample at least two completions per prompt, or use a biased std; "
        "rldbg record -- YOUR COMMAND shows the groups",
        steps=broken.steps,
    )


def variants(reward_B: Array, group_B: Array, tokens_B: Array | None = None) -> Iterator[tuple[str, Array]]:
    """Every advantage a framework computes from rewards, groups and numbers of tokens, by what it is called."""
    for unbiased in (True, False):
        divisor = "n - 1" if unbiased else "n"
        for epsilon in _EPSILONS:
            add = f" + {epsilon:g}" if epsilon else ""
            scaled: list[tuple[str, Callable[..., Array]]] = [
                (f"(r - group mean) / (group std{add}), std over {divisor}", advantages.group_normalised),
                (f"(r - group mean) / (batch std{add}), std over {divisor}", advantages.group_centred_over_batch_std),
                (f"r - group mean, over its batch std{add}, std over {divisor}", advantages.group_centred_batch_scaled),
            ]
            with np.errstate(invalid="ignore", divide="ignore"):
                for name, compute in scaled:
                    yield name, compute(reward_B, group_B, unbiased=unbiased, epsilon=epsilon)
                yield (
                    f"(r - mean of the group's others) / (their std{add}), std over {divisor} of them",
                    advantages.leave_one_out_normalised(reward_B, group_B, unbiased=unbiased, epsilon=epsilon),
                )
                yield (
                    f"(r - batch mean) / (batch std{add}), std over {divisor}",
                    advantages.normalised(reward_B, unbiased=unbiased, epsilon=epsilon),
                )
    centred_B = advantages.group_centred(reward_B, group_B)
    yield "r - group mean (Dr. GRPO)", centred_B
    yield "r - mean of the group's others (RLOO)", advantages.leave_one_out(reward_B, group_B)
    yield (
        "(r - group mean) x responses / responses with a reward (GPG)",
        advantages.group_centred_upweighted(reward_B, group_B),
    )
    yield "the lead of a group's best over its second (pass@k)", advantages.best_margin(reward_B, group_B)
    if tokens_B is None or not tokens_B.sum() > 1:
        return
    yield "r - group mean weighted by length (OPO)", advantages.length_weighted_centred(reward_B, group_B, tokens_B)
    others_B = advantages.leave_one_out(reward_B, group_B)
    for unbiased in (True, False):
        for what, scores_B in (
            ("r", reward_B),
            ("r - group mean", centred_B),
            ("r - mean of the group's others", others_B),
        ):
            name = f"{what}, whitened over the tokens of the batch, std over {'n - 1' if unbiased else 'n'}"
            yield name, advantages.whitened(scores_B, tokens_B, unbiased=unbiased)


def in_groups(reward_B: Array, group_B: Array) -> Iterator[tuple[str, Array]]:
    """The variants whose baseline is the group's alone."""
    yield from (one for one in variants(reward_B, group_B) if "batch" not in one[0])


_BATCH_MEAN = "r - batch mean, one baseline for all groups"


def _another_estimator(batch: StepBatch, name: str, *, several: bool) -> tuple[str, str] | None:
    """Claim and cause where the estimator that agrees is not the one that is stated; None where it is, or none is."""
    stated, scaled = batch.laid.algorithm.estimator, batch.laid.algorithm.is_scaled
    if not several:
        return None
    if name == _BATCH_MEAN and stated in OF_GROUPS:
        return (
            f"advantages are not centred by the group: they are {name}",
            f"{stated} measures a response against its own group: the mean is taken over the wrong axis",
        )
    if name.startswith("(r - batch mean)") and stated in OF_GROUPS:
        return (
            f"advantages are normalised over the whole batch, not within the group: {name}",
            f"{stated} measures a response against its own group; the group is lost on the way, or another estimator "
            "is configured",
        )
    if stated == "reinforce++" and name.startswith("r - group mean (Dr. GRPO)"):
        return (
            "advantages are not normalised over the batch, and REINFORCE++ is stated: they are r - group mean",
            "the global normalisation (mean and std over the batch) does not reach the advantages",
        )
    if stated == "rloo" and name.startswith("r - group mean (Dr. GRPO)"):
        return (
            "the leave-one-out baseline includes the sample itself: advantages are (n - 1) / n of RLOO's",
            "the mean is taken over the whole group, own reward included, and not over the others",
        )
    if stated == "grpo" and batch.laid.algorithm.is_on_of_group and "/ (batch std" in name:
        return (
            f"advantages are divided by the std of the whole batch, and the run states the group's: {name}",
            "the std is taken over the wrong axis: groups of small and of large spread no longer count alike",
        )
    if stated == "grpo" and scaled is True and name.startswith("r - group mean (Dr. GRPO)"):
        return (
            "advantages are not divided by the group's std, and the run states that they are",
            "the setting that divides by the std does not reach the advantages",
        )
    return None


def _rewards(batch: StepBatch) -> Iterator[tuple[str, Array]]:
    """What the advantages may have been computed from."""
    if batch.reward_B is not None:
        yield "rewards", batch.reward_B
    for name in ("token_rewards", "token_scores"):
        scores_B = batch.summed(name)
        if scores_B is not None:
            yield name, scores_B


def matching(advantage_B: Array, candidates: Iterator[tuple[str, Array]], close: Array) -> str | None:
    for name, other_B in candidates:
        if _agree(advantage_B, other_B, close):
            return name
    return None


def _agree(a_B: Array, b_B: Array, close_B: Array) -> bool:
    # Where a group has no spread, 0 / 0 without an epsilon is no reason to refuse a variant: frameworks skip it.
    b_B = np.where(np.isfinite(b_B) | (close_B < 1), b_B, 0.0)
    return bool(np.isfinite(b_B).all() and (np.abs(a_B - b_B) <= close_B * np.maximum(1, np.abs(b_B))).all())


def tolerance(reward_B: Array, group_B: Array, close: float) -> Array:
    """How close each advantage has to be: float32 rounds a mean, and a small std makes that large."""
    centred_B = advantages.group_centred(reward_B, group_B)
    count_G = np.bincount(group_B)
    std_B = np.sqrt(np.bincount(group_B, weights=centred_B**2) / count_G)[group_B]
    rounding_B = 2**-22 * np.maximum(np.abs(reward_B), 1e-12)
    # Equal rewards: what is left after subtracting the mean is rounding, whatever it is divided by.
    return np.where(std_B <= 4 * rounding_B, 1.0, close + rounding_B / np.maximum(std_B, 1e-12))


def _is_rounded(values_B: Array) -> bool:
    """Whether numbers in float32 have no more than bfloat16's bits: they were computed in it."""
    bits_B = values_B.astype(np.float32).view(np.uint32)
    several = np.unique(np.abs(np.round(values_B, 6))).size > 4
    return several and bool(((bits_B & 0xFFFF) == 0).all())


def _zeroed(candidates: Iterator[tuple[str, Array]], kept_B: Array) -> Iterator[tuple[str, Array]]:
    for name, values_B in candidates:
        yield name, values_B[kept_B]


@rule("D04", "advantages are not what rewards and groups give", link="advantages", scope="batch",
      needs=("rewards", "group", "advantage"),
      explains=("D02", "D23", "D28", "D73"),
      source="DeepSeekMath eq. 4.1.2; verl core_algos, trl, slime; RLOO 2402.14740; REINFORCE++ "
      "2501.03262")  # fmt: skip
def advantages_recomputed(batch: StepBatch) -> Iterator[Finding]:
    """Recomputes (r - mean) / (std + e) for e in {1e-4, 1e-6, 1e-8, 0}, std over n and n - 1, in the group and in the
    batch, without the std (Dr. GRPO), leave-one-out (RLOO), OPO, GPG, pass@k, ReMax's recorded baseline, REINFORCE++
    whitened over tokens, each as it is or clipped: one must agree to 1e-4 (2e-2 in bf16).

    Where one does, it is named (info). Where none does in any step, all steps together are held against what a mistake
    makes of them (the other D04).
    Where a known variant agrees, but groups whose rewards differ by less than 1e-4 of what the batch's do,
    have advantages over 0.1: a warning, noise is taught (not where most rewards of the batch differ).
    Skipped where advantages change from token to token (GAE), and where all groups are of one (D05). Where every
    sample stands equally often, a batch was trained on for several epochs: each counts once.
    """
    try:
        found = list(_recomputed(batch))
        if not found or found[0].severity == "info" or batch.once is batch:
            yield from found
            return
    except Unlike as unlike:
        if batch.once is batch:
            raise Skip(_OVER_ALL) from unlike
    try:
        yield from _recomputed(batch.once)
    except Unlike as unlike:
        raise Skip(_OVER_ALL) from unlike


_OVER_ALL = "no known variant agrees: what they are instead is judged over all steps"


class Unlike(Exception):  # noqa: N818 - it is no error, it is an answer
    """Advantages that no known variant has: of the samples that have one, which those are, and how close is close."""

    def __init__(self, heard_B: Array, kept_B: Array, close: Array, stored: float) -> None:
        super().__init__("advantages are no known variant")
        self.heard_B, self.kept_B, self.close, self.stored = heard_B, kept_B, close, stored


def _recomputed(batch: StepBatch) -> Iterator[Finding]:
    advantage_B, group_B, reward_B = batch.advantage_B, given(batch.group_B), given(batch.reward_B)
    if advantage_B is None:
        raise Skip("advantages change from token to token: a critic's (GAE)")
    kept_B = np.isfinite(advantage_B)
    if not kept_B.all() and batch.trained_N is not None:
        # Samples without a counted token have no advantage; their rewards still belong to their group.
        unheard_B = batch.flat.count(batch.trained_N) == 0
        if (~kept_B & ~unheard_B).any():
            raise Skip("some advantages are not finite (D21)")
    if not kept_B.any() or not np.isfinite(reward_B).all():
        raise Skip("advantages or rewards are not finite (D21)")
    if np.bincount(group_B).max() < 2:
        raise Skip("every group has one response (D05)")
    column = batch.columns.of("advantages")
    stored = CLOSE.get("float32" if column is None else "bfloat16" if _is_rounded(advantage_B[kept_B]) else
                       column.dtype, 1e-4)  # fmt: skip
    close = tolerance(reward_B, group_B, stored)[kept_B]
    if (close >= 1).all():
        raise Skip("no group has a spread of rewards (D01, D03): what is left is rounding, which every variant gives")
    heard_B = advantage_B[kept_B]
    for what, candidate_B in _rewards(batch):
        known = list(_zeroed(_known(batch, candidate_B, group_B), kept_B))
        name = matching(heard_B, iter(known), close) or matching(heard_B, _clipped(heard_B, known), close)
        if name is not None:
            if not np.abs(heard_B).max() > 0:
                return  # zeros agree with every variant
            told = _another_estimator(batch, name, several=np.bincount(group_B).min() > 1)
            if told is not None:
                claim, cause = told
                yield finding(
                    "error", claim, batch.laid.where("advantages"),
                    evidence=[
                        shown("the estimator that agrees", name, None, what),
                        shown("estimator that is stated", batch.laid.algorithm.estimator),
                    ],
                    cause=cause,
                )  # fmt: skip
                return
            if noisy := list(_noise_taught(batch, heard_B, candidate_B[kept_B], group_B[kept_B], name)):
                yield from noisy
                return
            yield finding(
                "info",
                f"advantages are {name}",
                batch.laid.where("advantages"),
                evidence=[shown("computed from", what), shown("agree to", stored)],
                cause="the variant that was recomputed and agrees; nothing is wrong",
                next_step="rldbg diagnose --explain D04",
            )
            return
    raise Unlike(heard_B, kept_B, close, stored)


#: What is left of a group's spread of rewards beside the batch's, and how large advantages of it must not be.
NO_SPREAD, TAUGHT = 1e-4, 0.1


def _noise_taught(batch: StepBatch, heard_B: Array, reward_B: Array, group_B: Array, name: str) -> Iterator[Finding]:
    """Groups whose rewards differ by a ten-thousandth of what rewards of the batch differ by, and have advantages."""
    whole = float(np.ptp(reward_B))
    if not whole > 0 or np.unique(np.round(reward_B / whole, 3)).size > 0.5 * len(reward_B):
        return  # rewards that are all different are measured on a scale of their own
    groups = np.unique(group_B)
    spread_G = np.array([float(np.ptp(reward_B[group_B == group])) for group in groups])
    noisy_G = (spread_G > 0) & (spread_G < NO_SPREAD * whole)
    taught_G = np.array([float(np.abs(heard_B[group_B == group]).max()) > TAUGHT for group in groups])
    bad = groups[noisy_G & taught_G]
    if not len(bad):
        return
    sample = int(np.flatnonzero(given(batch.group_B) == bad[0])[0])
    yield finding(
        "warning",
        f"noise in the rewards is taught: {share(len(bad), len(groups))} groups have nearly equal rewards (apart by "
        f"{float(spread_G[noisy_G & taught_G].max()):.2g} at most), and advantages of full size",
        batch.laid.where("advantages", sample=sample),
        evidence=[
            shown("largest spread of rewards in such a group", float(spread_G[noisy_G & taught_G].max()),
                  f"0, or > {NO_SPREAD:g} x {whole:.3g}"),
            shown("largest |advantage| in one", float(np.abs(heard_B[np.isin(group_B, bad)]).max()), f"< {TAUGHT:g}"),
            shown("advantages are", name),
        ],
        cause="a tiny difference between rewards (rounding, a jitter, a time in the score) is divided by a std that is "
        "as tiny: round the rewards, raise the epsilon, or leave groups without a spread out",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Guess:
    """One mistake that makes all advantages of a batch; `key` is the same in every step it is made in."""

    severity: Severity
    key: str
    claim: str
    cause: str


@rule("D04", "advantages are made by a mistake", link="advantages", scope="case", explains=("L08",),
      source="DeepSeekMath eq. 4.1.2; RLOO 2402.14740; a moving baseline is 0 in its first step alone")  # fmt: skip
def made_by_mistake(case: Case) -> Iterator[Finding]:
    """Steps whose advantages no known variant makes of rewards and groups, against a closed family of mistakes; the one
    that makes those of most steps is said.

    In every group with a spread A = (r - b) / s is solved for b and s: b is held against 0, the batch's mean, the
    group's first, last, best, worst, second best and median reward, its sum over another count; s against the std, the
    variance, 1 / std, the range, a factor or an epsilon on top of each. Further: the sign, absolute values, signs
    alone, a clamp, a constant that is added, one for all, another grouping, another order of rows or of rewards, a
    division by the length, parts that are 0 or of the other sign. An error where a mistake is sure, a warning where it
    may be meant or none is found; the raw rewards only where every step has them.

    Where the dump names no groups equal prompts are one: there only the sign, and lines, are judged. Skipped where a KL
    in the rewards explains all of it, where groups are parts of larger ones, where rewards are sums of functions whose
    weights are not recorded.
    """
    ballot: dict[str, list[tuple[StepBatch, Guess, Unlike]]] = {}
    looked = 0
    raw: list[StepBatch] = []
    whys: list[str] = []
    for batch in case.batches():
        if not all(batch.has(need) for need in ("rewards", "group", "advantage")):
            continue
        is_raw = _is_raw(batch)
        looked += is_raw is not None
        if is_raw:
            raw.append(batch)
        unlike, of = _unlike(batch), batch
        if unlike is not None and batch.once is not batch:
            unlike, of = _unlike(batch.once), batch.once
        if unlike is None:
            continue
        try:
            for guess in _guesses(of, unlike):
                ballot.setdefault(guess.key, []).append((batch, guess, unlike))
        except Skip as skip:
            whys.append(str(skip))
    if raw and len(raw) == looked:
        kind = raw[0].laid.algorithm.estimator
        yield finding(
            "info" if kind.startswith("reinforce") else "error",
            "advantages are the raw rewards: nothing is subtracted",
            raw[0].laid.where("advantages", sample=0),
            evidence=[shown("steps in which they are", len(raw), "0")],
            cause="no baseline is computed",
            steps=[batch.step for batch in raw if batch.step is not None],
        )
        return
    if not ballot:
        raise Skip(whys[0] if whys else "a known variant makes the advantages, or rewards, groups and advantages are "
                   "not recorded together")  # fmt: skip
    found = max(ballot.values(), key=len)
    batch, guess, unlike = found[0]
    reward_B, group_B = given(batch.reward_B), given(batch.group_B)
    column, kept_B = batch.columns.of("advantages"), unlike.kept_B
    source = column.source if column else None
    evidence = [shown("steps it makes", len(found), None, source), shown("agree to", unlike.stored)]
    if len(kept_B) == len(reward_B):
        expected_B = advantages.group_normalised(reward_B, group_B)[kept_B]
        worst = int(np.abs(unlike.heard_B - expected_B).argmax())
        evidence += [
            shown("sample", int(np.flatnonzero(kept_B)[worst])),
            shown("advantage there", float(unlike.heard_B[worst]), f"{float(expected_B[worst]):.6g}"),
        ]
    yield finding(
        guess.severity,
        guess.claim,
        batch.laid.where("advantages", sample=int(np.flatnonzero(kept_B)[0]) if len(kept_B) == len(batch) else 0),
        evidence=[*evidence, shown("groups", listed(np.bincount(group_B), 4))],
        cause=guess.cause,
        steps=[each.step for each, _, _ in found if each.step is not None],
    )


def _unlike(batch: StepBatch) -> Unlike | None:
    try:
        for _ in _recomputed(batch):
            return None
    except Unlike as unlike:
        return unlike
    except Skip:
        pass
    return None


def _guesses(batch: StepBatch, unlike: Unlike) -> Iterator[Guess]:
    """Every mistake that makes the advantages of the batch, the likeliest first; what says least comes last and is for
    batches that nothing else explains.

    Raises:
        Skip: nothing explains them, and something that is not recorded may.
    """
    heard_B, kept_B, close = unlike.heard_B, unlike.kept_B, unlike.close
    if not batch.group_is_named:
        if (turned := _turned(batch, heard_B, kept_B, close)) is not None:
            yield turned
            return
        raise Skip("groups are not named in the dump, and equal prompts as groups explain no known variant")
    if batch.trained_N is not None and not batch.trained_N.any():
        raise Skip("no token counts (D07): advantages are masked out with it")
    if not np.abs(heard_B).max() > 0:
        yield Guess(
            "error", "zero", "all advantages are 0 although rewards differ within groups",
            "advantages are computed from other rewards than these, or are masked or cleared before they are stored",
        )  # fmt: skip
        return
    if _is_raw(batch):
        raise Skip("advantages are the raw rewards in some steps alone: a baseline that begins at 0")
    if (turned := _turned(batch, heard_B, kept_B, close)) is not None:
        yield turned
        return
    weight = _kl_in_rewards(batch, heard_B, kept_B)
    if weight is not None:
        raise Skip(f"advantages are made of rewards less {weight:.3g} x KL to the reference, as some trainers do")
    every = [
        *_from_equal(batch, unlike), *_from_lines(batch, unlike), *_from_values(batch, unlike),
        *_from_groupings(batch, unlike), *_from_order(batch, unlike), *_from_parts(batch, unlike),
    ]  # fmt: skip
    # That a line is none of those known says less than what makes it.
    yield from sorted(every, key=lambda one: one.key in ("baseline", "scale"))
    if every:
        return
    if np.unique(np.bincount(given(batch.group_B))).size > 1:
        raise Skip("groups have different sizes: part of the batch may not be in the dump")
    if batch.columns.reward_functions_FB is not None:
        raise Skip("rewards are a sum of functions, whose weights (and a penalty) are not recorded")
    yield Guess(
        "warning", "none", "advantages are no variant that rewards and groups give",
        "another normalisation, rewards that were shaped (KL, length) after they were recorded, or a wrong grouping",
    )  # fmt: skip


def _from_equal(batch: StepBatch, unlike: Unlike) -> Iterator[Guess]:
    """Groups of equal rewards whose rounding is divided by a std of 0, where a known variant makes all others."""
    reward_B, group_B, heard_B = given(batch.reward_B), given(batch.group_B), unlike.heard_B
    spread_B = _std_B(reward_B, group_B)
    equal_B = (spread_B - 1e-6 <= 1e-6 * np.maximum(np.abs(reward_B), 1e-12))[unlike.kept_B]
    if not equal_B.any() or equal_B.all() or not np.abs(heard_B[equal_B]).max() > 0.1:
        return
    for name, values_B in _zeroed(_known(batch, reward_B, group_B), unlike.kept_B):
        if np.isfinite(values_B).all() and _agree(heard_B[~equal_B], values_B[~equal_B], unlike.close[~equal_B]):
            yield Guess(
                "error",
                "equal",
                f"groups of equal rewards have advantages, up to {np.abs(heard_B[equal_B]).max():.3g}: what "
                f"rounding leaves of them is divided by a std of 0 without an epsilon; the others are {name}",
                "the std of equal rewards is 0 but for rounding, and no epsilon is added to it: noise is taught",
            )
            return


#: An epsilon beside a std that no recipe has.
LARGE_EPSILON = 0.05
_OF_ONE = (
    "one response of the group stands for all of them, or the mean counts one too many or too few: an index, a padded "
    "row or a reduction over the wrong axis"
)


def _from_lines(batch: StepBatch, unlike: Unlike) -> Iterator[Guess]:
    """The group's baseline and scale, solved for and named."""
    kept_B = unlike.kept_B
    reward_B, group_B = given(batch.reward_B)[kept_B], given(batch.group_B)[kept_B]
    lines = solved(unlike.heard_B, reward_B, group_B, unlike.stored)
    if lines is None:
        return
    baseline, scale = baseline_of(lines), scale_of(lines)
    name, k, epsilon = scale if scale is not None else ("", 1.0, 0.0)
    if baseline != MEAN and scale is None and not lines.has_middle:
        return  # of two rewards any two numbers are a line
    of_one = scale is not None and not name
    over = "" if of_one else f", over {name}" if scale is not None else ", over a scale that rewards do not give"
    if k != 1 and scale is not None and baseline != MEAN:
        over += f", times {1 / k:.4g}"
    if bool((lines.scale_G < 0).all()) and baseline == MEAN:
        yield Guess(
            "error", "turned", f"advantages have the wrong sign: they fall with the reward within every group{over}",
            "the sign is turned twice, or not at all",
        )  # fmt: skip
    elif baseline == MEAN and scale is None:
        if not lines.has_middle or batch.columns.reward_functions_FB is not None:
            return
        yield Guess(
            "warning", "scale", "advantages are r - group mean, over a scale that rewards and groups do not give",
            "they are divided by the std of other samples or of shaped rewards, or scaled per group",
        )  # fmt: skip
    elif baseline == MEAN and epsilon:
        if epsilon < LARGE_EPSILON:
            return
        yield Guess(
            "warning", "epsilon", f"advantages are (r - group mean) / ({name} + {epsilon:.3g}): the epsilon is no "
            "longer small beside the std",
            "an epsilon of another size than is meant (1e-6 to 1e-4), or a constant that is added to the std: groups "
            "of small spread hardly count",
        )  # fmt: skip
    elif baseline == MEAN and (of_one or name.startswith("the group's std")):
        if abs(k - 1) > 1e-2:
            what = f"r - group mean{over}"
            yield Guess(
                "warning", f"times {1 / k:.2g}",
                f"advantages are {1 / k:.4g} times what they should be: {1 / k:.4g} x ({what})",
                "a factor too many: they are scaled once more after they were normalised, or summed over ranks",
            )  # fmt: skip
    elif baseline == MEAN:
        yield Guess(
            "error", name, f"advantages are divided by {name}",
            "another figure stands for the group's std: groups of small and of large spread do not count alike",
        )  # fmt: skip
    elif baseline == "0":
        yield Guess(
            "error", "no baseline",
            f"nothing is subtracted from the rewards: advantages are r{over}, there is no baseline",
            "the group's mean is not taken away: every answer is pushed up, whatever the others are",
        )  # fmt: skip
    elif baseline is not None and "batch" in baseline:
        # One mean and one std for all samples is another estimator, or samples that are not in the dump.
        whole = float(np.ptp(lines.scale_G)) <= lines.close * abs(float(lines.scale_G[0]))
        if whole and batch.laid.algorithm.estimator not in OF_GROUPS | {""}:
            return
        yield Guess(
            "warning" if whole and not batch.laid.algorithm.estimator else "error", baseline,
            f"advantages are not centred by the group: the baseline is {baseline}{over}",
            "the mean is taken over the wrong axis: a response is measured against answers to other prompts, and easy "
            "prompts are pushed up, hard ones down",
        )  # fmt: skip
    elif baseline is not None:
        yield Guess(
            "error", baseline, f"the baseline is {baseline}, not the group's mean: advantages are r - that{over}",
            _OF_ONE,
        )  # fmt: skip
    elif lines.has_middle and np.unique(np.bincount(group_B)).size == 1:
        if np.ptp(lines.baseline_G) <= lines.close * float(lines.range_G.min()):
            return  # one baseline for all: moving, or of samples that are not in the dump
        yield Guess(
            "warning", "baseline", f"advantages are not centred by their group: they are r - a baseline that is no "
            f"mean of its rewards{over}",
            "the baseline is made of other rewards (another group's, an earlier step's, shaped ones), or over another "
            "axis",
        )  # fmt: skip


def _from_values(batch: StepBatch, unlike: Unlike) -> Iterator[Guess]:
    """What is made of right advantages afterwards: absolute values, signs, ranks, a clamp, a constant, lengths."""
    heard_B, kept_B, close = unlike.heard_B, unlike.kept_B, unlike.close
    reward_B, group_B = given(batch.reward_B), given(batch.group_B)
    known = [
        (name, values_B) for name, values_B in _zeroed(_known(batch, reward_B, group_B), kept_B)
        if np.isfinite(values_B).all() and np.ptp(values_B) > 0
    ]  # fmt: skip
    # Of one size all advantages are anything: at least one group has three different rewards.
    several = any(np.unique(np.round(reward_B[group_B == group], 9)).size > 2 for group in np.unique(group_B))
    if float(np.ptp(heard_B)) <= 1e-6 * float(np.abs(heard_B).max()):
        yield Guess(
            "warning", "one number", f"all advantages are one number ({heard_B[0]:.4g}), although rewards differ",
            "a constant stands for them: no answer is told from another",
        )  # fmt: skip
        return
    if several and known:
        centred_B = advantages.group_centred(reward_B, group_B)[kept_B]
        # What rounding leaves of equal rewards has a sign, too.
        nothing_B = np.abs(centred_B) <= 1e-6 * max(float(np.abs(reward_B).max()), 1e-12)
        if _agree(heard_B[~nothing_B], np.sign(centred_B)[~nothing_B], close[~nothing_B]):
            yield Guess(
                "error", "sign alone", "only the sign of the advantages is left: they are -1, 0 and 1",
                "a sign (or a comparison) is taken: how much better an answer is no longer counts",
            )  # fmt: skip
    for name, values_B in known:
        turned = int((values_B < -close).sum())
        # Of a handful of values, or of one size, another formula may have the same.
        told = np.unique(np.round(np.abs(values_B), 4)).size > 3 and turned > 3
        if told and _agree(heard_B, np.abs(values_B), close):
            yield Guess(
                "error", "absolute", f"no advantage is negative: they are {name}, without their sign",
                "an absolute value (or a root of a square) is taken: what is worse than the others is pushed up, too",
            )  # fmt: skip
            break
    low, high = float(heard_B.min()), float(heard_B.max())
    for name, values_B in known:
        cut_B = np.clip(values_B, low, high)
        lost = float((np.abs(cut_B - values_B) > close).mean())
        inside = np.unique(np.round(heard_B[(heard_B > low) & (heard_B < high)], 9)).size
        # A handful of values lies within any two bounds.
        if lost > CUT_OFF and inside >= 3 and _agree(heard_B, cut_B, close):
            where = "below 0: none is negative" if low == 0 else f"at {low:.4g} and {high:.4g}"
            yield Guess(
                "warning", "cut off", f"advantages are cut off {where}, {lost:.0%} of them: they are {name}, clamped",
                "a clamp: what it cuts off teaches less or nothing, and the mean is no longer 0",
            )  # fmt: skip
            break
    for name, values_B in known:
        moved = float((heard_B - values_B).mean())
        spread = values_B - values_B.mean()
        gain = float(spread @ (heard_B - heard_B.mean())) / max(float(spread @ spread), 1e-30)
        off = float(heard_B.mean()) - gain * float(values_B.mean())
        if not gain > 0:
            continue
        if abs(moved) > 1e-2 and abs(off) > 1e-2 and _agree(heard_B, gain * values_B + off, close):
            yield Guess(
                "warning", "moved",
                f"advantages are normalised once more over the batch and moved: {gain:.4g} x ({name}) + {off:.4g}"
                if abs(gain - 1) > 1e-3
                else f"a constant is added to the advantages: they are {name}, {off:+.4g}",
                "their mean is not 0: every token is pushed one way, whatever its reward",
            )  # fmt: skip
            break
    for name, values_B in known:
        size = float(values_B @ values_B)
        times = float(values_B @ heard_B) / size
        if (
            batch.columns.reward_functions_FB is None
            and times > 0
            and abs(times - 1) > 1e-2
            and _agree(heard_B / times, values_B, close)
        ):
            yield Guess(
                "warning", f"times {times:.2g}",
                f"advantages are {times:.4g} times what they should be: {times:.4g} x {name}",
                "a factor too many: they are scaled once more after they were normalised, or summed over ranks",
            )  # fmt: skip
            break
    if batch.trained_N is None:
        return
    tokens_B = np.maximum(batch.flat.count(batch.trained_N), 1)[kept_B]
    if np.unique(tokens_B).size < 2:
        return
    if matching(heard_B, ((name, values_B / tokens_B) for name, values_B in known), close) is not None:
        yield Guess(
            "warning", "over length",
            f"advantages are divided by the length of their response: they are {known[0][0]}, over its tokens",
            "the mean over a response's tokens is taken in the advantage already: a loss that averages over tokens "
            "divides by the length twice, and long responses count for less",
        )  # fmt: skip
    elif matching(heard_B / tokens_B, iter(known), close / tokens_B) is not None:
        yield Guess(
            "warning", "times length",
            "advantages are multiplied by the length of their response: a sum over its tokens stands in them",
            "they are added up over a response's tokens instead of standing once: long responses count for more",
        )  # fmt: skip


def _from_groupings(batch: StepBatch, unlike: Unlike) -> Iterator[Guess]:
    reward_B = given(batch.reward_B)
    for how, other_B in _groupings(batch):
        found = matching(unlike.heard_B, _zeroed(_known(batch, reward_B, other_B), unlike.kept_B), unlike.close)
        if found is not None:
            yield Guess(
                "error", f"groups: {how}", f"advantages are computed in the wrong groups: {found}, with {how}",
                "samples are grouped by their place in a batch that was reordered, not by their prompt",
            )  # fmt: skip


def _from_order(batch: StepBatch, unlike: Unlike) -> Iterator[Guess]:
    """Right advantages in another order, or of rewards in another order."""
    heard_B, kept_B, close = unlike.heard_B, unlike.kept_B, unlike.close
    reward_B, group_B = given(batch.reward_B), given(batch.group_B)
    if np.unique(np.round(heard_B, 6)).size < 4:
        return
    is_sorted = False
    for name, values_B in _zeroed(_known(batch, reward_B, group_B), kept_B):
        if (
            np.isfinite(values_B).all()
            and _agree(np.sort(heard_B), np.sort(values_B), np.full(len(heard_B), close.min()))
            and len(heard_B) > 2
        ):
            yield Guess(
                "error", "other samples",
                f"advantages belong to other samples: as {name} they are right, in another order",
                "the batch was reordered after the advantages were computed",
            )  # fmt: skip
            is_sorted = True
            break
    if not kept_B.all():
        return
    for how, order_B in orders(len(reward_B), int(group_B.max()) + 1):
        found = matching(heard_B, _known(batch, reward_B[order_B], group_B), close)
        if found is not None:
            yield Guess(
                "error", f"rewards: {how}",
                f"advantages are made of other samples' rewards: they are {found}, of the rewards {how}",
                "rewards come back in another order than the samples, as where parts of several ranks or workers "
                "are put together one by one instead of one after the other",
            )  # fmt: skip
            return
    if not is_sorted and (moved := _moved_rows(batch, unlike)) is not None:
        yield moved


#: Samples that tell one order of the rows from another; of them, the share that has the advantage of the row it was
#: moved from, and the most that may have its own.
TELLING, MOVED, STAYED = 8, 0.8, 0.1


def _moved_rows(batch: StepBatch, unlike: Unlike) -> Guess | None:
    """Rows of advantages that were rolled, where some no longer are what they were: a row that is masked by another's
    length is cut, and its mean is smaller.
    """
    heard_B, close = unlike.heard_B, unlike.close
    reward_B, group_B = given(batch.reward_B), given(batch.group_B)
    for name, values_B in _known(batch, reward_B, group_B):
        if not np.isfinite(values_B).all():
            continue
        own_B = np.abs(heard_B - values_B) <= close
        if own_B.mean() > MOVED:
            continue
        for how, order_B in orders(len(reward_B), int(group_B.max()) + 1):
            there_B = values_B[order_B]
            telling_B = np.abs(there_B - values_B) > 10 * close
            if telling_B.sum() < TELLING or own_B[telling_B].mean() > STAYED:
                continue
            moved_B = np.abs(heard_B - there_B) <= close
            if moved_B[telling_B].mean() >= MOVED and moved_B.mean() >= MOVED:
                return Guess(
                    "error", "other samples",
                    f"advantages belong to other samples: as {name} they are right, with the rows {how}",
                    "the batch was reordered (rolled, shuffled, gathered from ranks) after the advantages were "
                    "computed",
                )  # fmt: skip
    return None


def _from_parts(batch: StepBatch, unlike: Unlike) -> Iterator[Guess]:
    """A variant that makes the advantages of some groups, where all of the others' are 0 or turned."""
    told = _in_some_groups(batch, unlike.heard_B, unlike.kept_B, unlike.close)
    if told is not None:
        yield Guess("error", "part", *told)


def _in_some_groups(batch: StepBatch, heard_B: Array, kept_B: Array, close: Array) -> tuple[str, str] | None:
    """Claim and cause where a variant has the advantages of a third of the groups and more, and in all of the
    others, though rewards differ, they are 0, or of the other sign.
    """
    reward_B, group_B = given(batch.reward_B)[kept_B], given(batch.group_B)[kept_B]
    spread_G = np.array([float(np.ptp(reward_B[group_B == group])) for group in np.unique(group_B)])
    several_G = spread_G > 1e-6 * max(float(np.abs(reward_B).max()), 1e-12)
    if several_G.sum() < 3:
        return None
    names = np.unique(group_B)[several_G]
    for name, values_B in _zeroed(_known(batch, given(batch.reward_B), given(batch.group_B)), kept_B):
        if not np.isfinite(values_B).all():
            continue

        def are(expected_B: Array) -> Array:
            off_B = np.abs(heard_B - expected_B) > close * np.maximum(1, np.abs(values_B))  # noqa: B023
            return np.array([not off_B[group_B == group].any() for group in names])

        right_G = are(values_B)
        if not len(names) <= 3 * right_G.sum() < 3 * len(names):
            continue
        for what, other_B, cause in (
            ("0", np.zeros_like(values_B), "part of the batch is cleared: rows that are masked, filled in late, or "
            "left "
             "out by a loop that ends too early"),
            ("of the other sign", -values_B, "the sign is turned for a part of the batch"),
        ):  # fmt: skip
            if are(other_B)[~right_G].all():
                return (
                    f"advantages are {what} in {share(int((~right_G).sum()), len(names))} groups whose rewards differ; "
                    f"in the others they are {name}",
                    cause,
                )
    return None


#: Of a batch's advantages, the share that a bound may cut off before it is what training is about.
CUT_OFF = 0.25


def _std_B(reward_B: Array, group_B: Array) -> Array:
    centred_B = advantages.group_centred(reward_B, group_B)
    sizes_G = np.bincount(group_B)
    std_G = np.sqrt(np.bincount(group_B, weights=centred_B**2) / np.maximum(sizes_G - 1, 1))
    scale_B: Array = std_G[group_B] + 1e-6
    return scale_B


def _kl_in_rewards(batch: StepBatch, heard_B: Array, kept_B: Array) -> float | None:
    """The weight with which the KL of a response is in its reward, where that explains every advantage.

    In a group (or the batch), any estimator of a mean baseline makes r - weight x KL = k A + b: with b and k of each
    group taken out, the weight is all that is left to solve for.
    """
    ref = batch.columns.of("ref_logprobs")
    ours = next((found for name in ("old_logprobs", "policy_logprobs", "rollout_logprobs")
                 if (found := batch.columns.of(name)) is not None), None)  # fmt: skip
    if ref is None or ours is None or batch.trained_N is None:
        return None
    both_N = batch.pair(ours, ref)
    far_B = batch.flat.sum(np.where(both_N, ours.values_N - ref.values_N, 0.0))[kept_B]
    if not np.isfinite(far_B).all() or not np.abs(far_B).max() > 1e-6:
        return None
    group_B, reward_B = given(batch.group_B)[kept_B], given(batch.reward_B)[kept_B]
    for groups_B in (group_B, np.zeros(len(group_B), dtype=np.int64)):
        if len(groups_B) - 2 * np.unique(groups_B).size < 4:
            continue
        left_B, along_B = (_apart_from(values_B, heard_B, groups_B) for values_B in (reward_B, far_B))
        size = float(along_B @ along_B)
        if not size > 1e-12:
            continue
        weight = float(along_B @ left_B) / size
        rest = np.abs(left_B - weight * along_B).max()
        if 1e-6 < weight < 10 and rest <= 1e-3 * max(float(np.abs(left_B).max()), 1e-9):
            return weight
    return None


def _apart_from(values_B: Array, other_B: Array, groups_B: Array) -> Array:
    """What is left of values when, in each group, their mean and their part along another are taken out."""
    centred_B, other_B = (advantages.group_centred(each_B, groups_B) for each_B in (values_B, other_B))
    along_G = np.bincount(groups_B, weights=centred_B * other_B)
    size_G = np.bincount(groups_B, weights=other_B**2)
    factor_G = np.where(size_G > 1e-12, along_G / np.maximum(size_G, 1e-12), 0.0)
    left_B: Array = centred_B - factor_G[groups_B] * other_B
    return left_B


def _turned(batch: StepBatch, heard_B: Array, kept_B: Array, close: Array) -> Guess | None:
    """Advantages that are a known variant with the sign turned."""
    reward_B, group_B = given(batch.reward_B), given(batch.group_B)
    flipped = matching(-heard_B, _zeroed(_known(batch, reward_B, group_B), kept_B), close)
    if flipped is None or not np.abs(heard_B).max() > 0:
        return None
    return Guess(
        "error", "turned", f"advantages have the wrong sign: they are -1 x {flipped}",
        "the sign is turned twice, or not at all",
    )  # fmt: skip


def made_with_all(batch: StepBatch, left_out_B: Array) -> str | None:
    """The variant that makes the advantages of the other rows where these count in their groups, and none does where
    they do not; None where both are so, or neither, or it cannot be told.
    """
    advantage_B, group_B, reward_B = batch.advantage_B, batch.group_B, batch.reward_B
    if advantage_B is None or group_B is None or reward_B is None or not batch.group_is_named:
        return None
    kept_B = ~left_out_B
    heard_B = advantage_B[kept_B]
    if not (np.isfinite(heard_B).all() and np.isfinite(reward_B).all()) or np.unique(np.round(heard_B, 6)).size < 4:
        return None
    column = batch.columns.of("advantages")
    stored = CLOSE.get("float32" if column is None else column.dtype, 1e-4)
    close = tolerance(reward_B, group_B, stored)[kept_B]
    # A group that is left without a spread has 0 either way: rounding of it tells nothing.
    groups_B = np.unique(group_B[kept_B], return_inverse=True)[1]
    alone = tolerance(reward_B[kept_B], groups_B, stored)
    name = matching(heard_B, ((each, values_B[kept_B]) for each, values_B in variants(reward_B, group_B)), close)
    if name is None or "(batch std" in name or "batch mean" in name or (close >= 1).all():
        return None
    return None if matching(heard_B, variants(reward_B[kept_B], groups_B), np.minimum(close, alone)) else name


def _known(batch: StepBatch, reward_B: Array, group_B: Array) -> Iterator[tuple[str, Array]]:
    """The variants of this batch: with its numbers of tokens, and the baseline that it records."""
    trained_N = batch.trained_N
    yield from variants(
        reward_B, group_B, None if trained_N is None else batch.flat.count(trained_N).astype(np.float64)
    )
    if (moved := _moving(batch)) is not None:
        is_mean = abs(moved - float(reward_B.mean())) <= 1e-4 * max(float(np.abs(reward_B).max()), 1e-9)
        yield (
            _BATCH_MEAN if is_mean else f"r - {moved:.4g}, one baseline for the whole batch (a moving mean)",
            reward_B - moved,
        )
    baseline_B = batch.columns.per_sample("reward_baselines")
    if baseline_B is not None:
        yield "r - the reward of a greedy response (ReMax)", reward_B - baseline_B


def _clipped(heard_B: Array, known: list[tuple[str, Array]]) -> Iterator[tuple[str, Array]]:
    """Variants cut off at the largest and smallest advantage, where most of the batch lies between the two."""
    low, high = float(heard_B.min()), float(heard_B.max())
    moving_B = heard_B[heard_B != 0]
    inside_B = (moving_B > low) & (moving_B < high)
    if not low < 0 < high or float(inside_B.mean()) < 0.5 or np.unique(moving_B[inside_B]).size < 3:
        return
    for name, values_B in known:
        yield f"{name}, clipped to {low:.4g} and {high:.4g}", np.clip(values_B, low, high)


def orders(samples: int, groups: int) -> Iterator[tuple[str, Array]]:
    """Orders that rewards may have come back in: dealt out over ranks, or put together again, turned or moved on."""
    each = np.arange(samples)
    for parts in sorted({2, 3, 4, 5, 6, 8, 16, groups, samples // groups}):
        if 1 < parts < samples and samples % parts == 0:
            yield f"of {parts} ranks, one of each in turn", each.reshape(parts, -1).T.reshape(-1)
            yield f"dealt out over {parts} ranks", each.reshape(-1, parts).T.reshape(-1)
    yield "from last to first", each[::-1]
    for by in sorted({1, samples // groups}):
        yield f"moved on by {by}", np.roll(each, by)
        yield f"moved back by {by}", np.roll(each, -by)


def _groupings(batch: StepBatch) -> Iterator[tuple[str, Array]]:
    """Other ways the same samples may have been put into groups."""
    group_B = given(batch.group_B)
    total, groups = len(group_B), int(group_B.max()) + 1
    if batch.prompt_B is not None:
        yield "equal prompts as groups", batch.prompt_B
    yield "the whole batch as one group", np.zeros(total, dtype=np.int64)
    for order in batch.laid.orders:
        place_B = np.argsort(order)
        if total % groups == 0:
            size = total // groups
            yield f"every {size} rows in a row as a group", place_B // size
            yield f"every {groups}th row as a group", place_B % groups
    for size in (2, 4, 8, 16):
        if total % size == 0 and size < total:
            yield f"every {size} rows in a row as a group", np.arange(total) // size
            yield f"every {total // size}th row as a group", np.arange(total) % (total // size)
