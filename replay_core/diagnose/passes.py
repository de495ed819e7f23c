"""Which samples of a step are those of an earlier one, passed over once more: their old log-probabilities are of then.

Trainers that take several optimizer steps of one rollout may count each of them as a step (TRL: num_iterations,
steps_per_generation). Their samples come again, with old log-probabilities that are kept, to the last bit: between
those and the policy's lies an update. What is forwarded anew never has the same bits on all tokens.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from replay_core.diagnose.batch import StepBatch, batches_of, worked_out_once
from replay_core.diagnose.flat import Array
from replay_core.diagnose.sheets import TELL_TWINS, marked
from replay_core.records import Record

#: Earlier steps that are looked through: passes over one rollout follow each other.
BACK = 8
#: |log ratio| that two forwards of one set of weights do not come to, in bf16 neither.
STOOD = 0.02
#: A response whose tokens are fewer may be drawn twice by chance, and old log-probabilities of a sure token are 0.
FEWEST = 2


@worked_out_once
def are_passes(batch: StepBatch) -> bool:
    """Whether the rows are those of several epochs over what was sampled: their records say so; what was sampled is
    recorded and holds each sample fewer times, all of them on one rank; or copies, of one old log-probability to the
    last bit, have others of the policy, which an update in between alone gives.
    """
    keys = batch.laid.keys_of("input_ids")
    if any(key is not None and key.epoch for key in keys):
        return True
    once = batch.once
    if once is batch:
        return False
    were_sampled_once = any(
        len(sheet) == len(once) and all(part.held.record.key.stage == "trajectory" for part in sheet.parts)
        for sheet, _ in batch.columns.sheets
    )
    is_on_one_rank = len({key.rank for key in keys if key is not None}) < 2
    return (were_sampled_once and is_on_one_rank) or _moved_between_copies(batch)


def _moved_between_copies(batch: StepBatch) -> bool:
    old, policy = batch.columns.of("old_logprobs"), batch.columns.of("policy_logprobs")
    if old is None or policy is None:
        return False
    known: dict[tuple[bytes, bytes], list[Array]] = {}
    names = [name for name in TELL_TWINS if batch.spine.refs(name)]
    for sample, key in enumerate(marked(batch.spine, names)):
        span = batch.flat.spans[sample]
        known.setdefault((key, old.values_N[span].tobytes()), []).append(policy.values_N[span])
    several = [rows for rows in known.values() if len(rows) > 1]
    moved = [np.nanmax(np.abs(rows[0] - rows[-1]), initial=0.0) > STOOD for rows in several]
    return len(moved) > 1 and 2 * sum(map(bool, moved)) > len(moved)


def keys_of(batch: StepBatch, name: str = "old_logprobs") -> list[bytes | None]:
    """Each sample's tokens and log-probabilities of that name as one digest; None where it has too few to be known
    by.
    """
    column, tokens_N = batch.columns.of(name), batch.tokens_N
    if column is None or tokens_N is None:
        return [None] * len(batch)
    found: list[bytes | None] = []
    for span in batch.flat.spans:
        values = column.values_N[span][column.said_N[span]].astype(np.float32)
        values = values[values != 0]
        digest = blake2b(tokens_N[span].tobytes() + b"|" + values.tobytes(), digest_size=16).digest()
        found.append(digest if values.size >= FEWEST else None)
    return found


def before_any_update_N(batch: StepBatch) -> Array:
    """Tokens [N] whose policy's log-probabilities are surely of the first optimizer step over their samples."""
    known = batch.columns.worked_out
    if "before_any_update_N" not in known:
        first_N = np.repeat(batch.laid.first_update_B("policy_logprobs"), batch.flat.lengths_B)
        policy, old = batch.columns.of("policy_logprobs"), batch.columns.of("old_logprobs")
        if policy is not None and old is not None:
            both_N = first_N & batch.pair(policy, old)
            # Earlier steps are read where there is something that they may explain.
            if float(np.abs(policy.values_N - old.values_N)[both_N].max(initial=0.0)) > STOOD:
                first_N = first_N & ~np.repeat(from_earlier_steps_B(batch), batch.flat.lengths_B)
        known["before_any_update_N"] = first_N
    found: Array = known["before_any_update_N"]
    return found


def from_earlier_steps_B(batch: StepBatch) -> Array:
    """Which samples [B] an earlier step of the run holds with the same old log-probabilities, to the last bit."""
    mine, run = keys_of(batch), batch.laid.run
    found_B = np.zeros(len(batch), dtype=bool)
    if run is None or batch.step is None or not any(mine):
        return found_B
    by_step: dict[int, list[Record]] = {}
    for record in run.records:
        step = record.key.step
        if step is not None and batch.step - BACK <= step < batch.step and record.key.stage != "training_metrics":
            by_step.setdefault(step, []).append(record)
    for step in sorted(by_step, reverse=True):
        if all(record.is_flat for record in by_step[step]):
            continue
        theirs: set[bytes | None] = set()
        for earlier in batches_of(step, by_step[step], [], run):
            theirs.update(keys_of(earlier))
            earlier.release()
        found_B |= np.array([key is not None and key in theirs for key in mine])
        if found_B.all():
            break
    return found_B
