"""What parts samples whose prompt the engine has seen before from those that it has not."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.compared import gap_of
from replay_core.diagnose.finding import Finding, Where, error, share, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.gap import DISAGREE
from replay_core.diagnose.rule import rule, skip_if

#: Samples of either kind in a step, steps that have both, the share of each that has to be on its side, and how many
#: times the new ones' distance those seen before have.
SAMPLES, STEPS, SHARE, TIMES = 4, 2, 0.9, 5.0


class _Parted(Struct, frozen=True):
    """A step's samples: those whose prompt an earlier step had, and how far engine and trainer are apart in each."""

    step: int | None
    where: Where
    seen: Array
    new: Array
    command: str


def _prompts(batch: StepBatch) -> tuple[list[bytes], list[bytes]] | None:
    """The prompts, and the whole samples."""
    if batch.tokens_N is None or batch.response_N is None:
        return None
    heads_B = batch.flat.first(batch.response_N)
    starts_B = batch.flat.starts_B
    tokens_N: Any = batch.tokens_N
    prompts = [tokens_N[start : start + head].tobytes() for start, head in zip(starts_B, heads_B, strict=True)]
    return prompts, [tokens_N[span].tobytes() for span in batch.flat.spans]


@rule("D149", "the engine is off where it has seen the prompt before", link="rollout_logprobs", scope="case",
      lasts=True,
      explains=("D09", "D12", "D13", "D14", "D24", "D31", "L10"),
      source="SkyRL#2246, NeMo-RL#4018, prime-rl#1651, lmdeploy#4917: a prefix cache that outlives the "
      "weights")  # fmt: skip
def cached(case: Case) -> Finding | None:
    """mean |trainer - rollout| of each sample, parted by whether an earlier step of the dump has its prompt. An error
    where, in 2 steps and more that have 4 samples and more of each kind, and in all such steps, nine of ten samples
    seen before are over .03 nats, nine of ten new ones are not, and the former have 5 times the latter's median: what
    the engine keeps of a prompt is of the weights that it had then. Answers that an earlier step has as well are left
    out: a buffer hands them out again, with the log-probabilities of the weights that sampled them.
    """
    before: set[bytes] = set()
    whole: set[bytes] = set()
    parted: list[_Parted] = []
    at: int | None = None
    here: set[bytes] = set()
    answered: set[bytes] = set()
    for batch in case.batches():
        both = _prompts(batch)
        if both is None or batch.step is None:
            continue
        prompts, samples = both
        if batch.step != at:
            before |= here
            whole |= answered
            here, answered, at = set(), set(), batch.step
        here |= set(prompts)
        answered |= set(samples)
        between = gap_of(batch)
        if between is None:
            continue
        d_B = between.by_sample_B
        seen_B = np.array([one in before for one in prompts])
        heard_B = np.isfinite(d_B) & np.array([one not in whole for one in samples])
        if min((seen_B & heard_B).sum(), (~seen_B & heard_B).sum()) >= SAMPLES:
            place = batch.laid.where("rollout_logprobs", sample=seen_B & heard_B)
            command = batch.laid.mismatch_command()
            parted.append(_Parted(batch.step, place, d_B[seen_B & heard_B], d_B[~seen_B & heard_B], command))
    skip_if(len(parted) < STEPS, f"needs {STEPS} steps with prompts of earlier ones beside new ones")
    if not all(_is_parted(one) for one in parted):
        return None
    first = parted[0]
    old, new = (np.concatenate([getattr(one, name) for one in parted]) for name in ("seen", "new"))
    return error(
        f"engine and trainer part in samples whose prompt was sampled from before ({np.median(old):.2g} nats per "
        "token), "
        f"and agree in those of new prompts ({np.median(new):.2g}): the engine's prefix cache holds keys of older "
        "weights",
        first.where,
        shown("samples of prompts seen before that are off", share(int((old > DISAGREE).sum()), old.size), "none"),
        shown("samples of new prompts that are", share(int((new > DISAGREE).sum()), new.size), "none"),
        shown("mean |trainer - rollout| of those seen before", float(old.mean()), f"< {DISAGREE} nats"),
        shown("of new ones", float(new.mean())),
        shown("steps that have both, and show it", len(parted)),
        cause="the prefix cache (radix cache, automatic prefix caching) is not emptied when weights are updated: what "
        "a prompt left there stays that of the weights that read it",
        next_step="reset the prefix cache after each weight update (reset_prefix_cache, flush_cache), or switch it "
        f"off, and look again: {first.command}",
        steps=[one.step for one in parted],
    )  # fmt: skip


def _is_parted(one: _Parted) -> bool:
    off, agree = float((one.seen > DISAGREE).mean()), float((one.new <= DISAGREE).mean())
    return off >= SHARE and agree >= SHARE and float(np.median(one.seen)) > TIMES * float(np.median(one.new))
