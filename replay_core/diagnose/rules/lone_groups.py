"""Groups without another response: no baseline, and a spread that is no number."""

from __future__ import annotations

import numpy as np

from replay_core.diagnose.advantage_variants import are_raw
from replay_core.diagnose.algorithm import OF_GROUPS
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.broken import first_broken
from replay_core.diagnose.finding import Finding, error, finding, share, shown, warning
from replay_core.diagnose.rule import Skip, given, rule
from replay_core.diagnose.signals import RunLog
from replay_core.diagnose.unbaselined import severity_of_raw, why_raw


@rule("D05", "groups of one response: no baseline", link="groups", scope="batch", needs=("group",),
      explains=("D01", "D03", "D04", "D24"), lasts=True,
      source="Search-R1#88; verl compute_grpo_outcome_advantage leaves a group of one its raw reward")  # fmt: skip
def groups_of_one(batch: StepBatch) -> Finding | None:
    """Groups with a single response. All of them is an error where most of their prompts repeat, or the advantage is
    the raw reward and an estimator with a baseline is stated; of prompts that stand alone it is a warning where an
    estimator of groups is stated, else worth knowing. Some of them is a warning. Silent where a critic gives the
    baseline (values are recorded), where REINFORCE is stated, and where groups are inferred from prompts alone.
    """
    group_B = given(batch.group_B)
    if not batch.group_is_named or len(group_B) < 2:
        raise Skip("groups are not named in the dump" if len(group_B) >= 2 else "there is one sample")
    sizes_G = np.bincount(group_B)
    lone = int((sizes_G == 1).sum())
    if not lone:
        return None
    if batch.columns.ref("values") is not None or batch.laid.algorithm.estimator == "gae":
        raise Skip("a critic's values are the baseline")
    if batch.columns.ref("reward_baselines") is not None or batch.laid.algorithm.estimator == "remax":
        raise Skip("a greedy response is the baseline (ReMax)")
    prompt_B, raw = batch.prompt_B, are_raw(batch)
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
    if every and batch.laid.algorithm.estimator in ("reinforce", "reinforce++"):
        raise Skip("REINFORCE takes its baseline of the batch, or none")
    if every and (repeat or raw):
        cause = "the group id is made per sample (a uid drawn after repeating the prompts), so nothing is subtracted"
        claim = f"every sample is a group of its own ({share(lone, sizes_G.size)}): there is no baseline"
        # Of prompts that stand alone nothing was meant to be subtracted, unless an estimator of groups is stated.
        meant = not repeat and severity_of_raw(batch.laid.algorithm) == "info"
        return finding("info" if meant else "error", claim, place, evidence=evidence,
                      cause=why_raw(batch.laid.algorithm) if meant else cause)  # fmt: skip
    elif every:
        claim = "one response per prompt: a baseline within groups is impossible"
        cause = "n = 1 in the rollout settings; REINFORCE with a batch baseline or a critic is meant to run so"
        of_groups = batch.laid.algorithm.estimator in OF_GROUPS
        return finding("warning" if of_groups else "info", claim, place, evidence=evidence, cause=cause)
    else:
        claim = f"{share(lone, sizes_G.size)} groups have a single response"
        cause = "responses of a group were dropped or filtered after grouping, or ids of one prompt differ"
        return warning(claim, place, evidence=evidence, cause=cause)


@rule("D06", "NaN advantages from a group without a spread", link="groups", scope="batch",
      needs=("group", "advantage"), lasts=True,
      explains=("D20", "D01", "D03", "D18", "D04", "L06", "L08", "L09", "L10", "D26", "D57", "D09", "D05",
               "D21", "D23", "D28"),
      source="DeepAnalyze#116: torch.std of one value is NaN")  # fmt: skip
def nan_from_small_groups(batch: StepBatch) -> Finding | None:
    """Non-finite advantages exactly in groups of one, or of equal rewards: 0 / 0, or a std with n - 1 = 0.

    A NaN in any other group has another cause and is D21's.
    """
    column, group_B, reward_B = given(batch.columns.of("advantages")), given(batch.group_B), batch.reward_B
    if not batch.group_is_named:
        raise Skip("groups are not named in the dump")
    bad_B = batch.flat.count(column.said_N & ~np.isfinite(column.values_N)) > 0
    if not bad_B.any():
        return None
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
        return None
    place = batch.laid.where("advantages", sample=int(np.flatnonzero(bad_B)[0]))
    lone = bool((sizes_G[bad_G] == 1).all())
    return error(
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
def spread_is_nan(log: RunLog) -> Finding | None:
    """NaN in the spread of rewards, as the first signal that is not finite, is a group of one: an error, info where
    nothing but single reward functions is broken.
    """
    broken = first_broken(log)
    if broken is None or not broken.is_spread:
        return None
    return finding(
        "info" if {series.signal for series, _ in broken.every} == {"reward_function_std"} else "error",
        f"{broken.series.name} is NaN",
        broken.point.where(broken.series.name),
        evidence=broken.evidence,
        cause=_SPREAD_CAUSES[broken.series.signal],
        next_step="sample at least two completions per prompt, or use a biased std; "
        "rldbg record -- YOUR COMMAND shows the groups",
        steps=broken.steps,
    )
