"""Rollouts of an earlier step that come again as if they were new: a buffer that nobody refills."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.columns import Column
from replay_core.diagnose.finding import Finding, Where, finding, listed, share, shown
from replay_core.diagnose.rule import Skip, rule

#: Share of a step's samples that an earlier step has before it is no replay of some; values by which one is known; and
#: steps that repeat before it is no step taken once more after a crash, and that do not before it is no test on one
#: batch.
SHARE, FEWEST, STEPS = 0.9, 2, 2


@rule("D75", "samples of an earlier step come again", link="tokens", scope="case", lasts=True,
      explains=("D09", "D12", "D31", "D43", "D56", "L17"),
      source="a rollout buffer, queue or file that is not advanced; old log-probabilities are of the policy that "
      "sampled (PPO)")  # fmt: skip
def trained_on_again(case: Case) -> Finding | None:
    """Nine tenths and more of a step's samples have the tokens and, bit for bit, the engine's log-probabilities of an
    earlier step's, and other old log-probabilities: those were taken anew, as of a new batch. An error in 2 steps and
    more of a run that has 2 of new samples, else a warning; worth knowing in a run that states that its samples are
    older. Later passes over one rollout (TRL's num_iterations, mini-batches that count as steps) keep their old
    log-probabilities and are none.
    """
    seen: dict[bytes, tuple[int, bytes]] = {}
    found: list[tuple[int, int, int, int]] = []
    where: Where | None = None
    looked = 0
    off_policy = False
    for batch in case.batches():
        rollout, old = batch.columns.of("rollout_logprobs"), batch.columns.of("old_logprobs")
        if batch.step is None or batch.tokens_N is None or rollout is None or old is None:
            continue
        drawn, taken = _keys(batch, rollout), _keys(batch, old)
        looked += 1
        origins = [
            seen[key][0] for key, now in zip(drawn, taken, strict=True)
            if key is not None and now is not None and key in seen and seen[key][0] < batch.step and seen[key][1] != now
        ]  # fmt: skip
        for key, now in zip(drawn, taken, strict=True):
            if key is not None and now is not None:
                seen.setdefault(key, (batch.step, now))
        known = sum(key is not None for key in drawn)
        if known and len(origins) >= SHARE * known:
            found.append((batch.step, max(origins), len(origins), known))
            where = where or batch.laid.where("rollout_logprobs", sample=0)
            off_policy = off_policy or batch.laid.algorithm.is_off_policy
    if looked < 2:
        raise Skip("needs tokens, rollout and old log-probabilities of 2 steps")
    if not found:
        return None
    steps = sorted({step for step, *_ in found})
    _, origin, again, known = found[0]
    return finding(
        "info" if off_policy else "error" if min(len(steps), looked - len(found)) >= STEPS else "warning",
        f"the rollouts of step {origin} are trained on again in step{'s' if len(steps) > 1 else ''} {listed(steps)}: "
        "nothing new is sampled",
        where,
        evidence=[
            shown("samples with an earlier one's tokens and engine's log-probabilities", share(again, known), "0"),
            shown("of them with other old log-probabilities than then", again),
        ],
        cause="the rollout buffer is not refilled (a queue or file that is not advanced, a cache that is not "
        "cleared): old log-probabilities are taken anew each time, so the ratio starts at 1 and does not correct for "
        "the weights that sampled. What engine and trainer disagree by grows with the samples' age, and tells nothing "
        "of the engine",
        steps=steps,
    )  # fmt: skip


def _keys(batch: StepBatch, column: Column) -> list[bytes | None]:
    """Each sample's tokens and values of that tensor as one digest; None where it has too few to be known by."""
    found: list[bytes | None] = []
    assert batch.tokens_N is not None
    for start, length in zip(batch.flat.starts_B, batch.flat.lengths_B, strict=True):
        span = slice(int(start), int(start + length))
        values = column.values_N[span][column.said_N[span]].astype(np.float32)
        values = values[values != 0]
        digest = blake2b(batch.tokens_N[span].tobytes() + b"|" + values.tobytes(), digest_size=16).digest()
        found.append(digest if values.size >= FEWEST else None)
    return found
