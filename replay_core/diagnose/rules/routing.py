"""Which experts saw a token: the trainer has to route as the engine did."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from replay_core import pages
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.finding import Finding
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import Skip, rule
from replay_core.diagnose.stating import finding, shown
from replay_core.records import Record, TensorRef

#: Names of recorded routing: [tokens, layers, k] or [B, T, layers, k].
ROUTING = (
    "routed_experts",
    "rollout_routed_experts",
    "rollout_expert_indices",
    "routing_matrices",
    "train_routed_experts",
)
#: Share of tokens that may differ (Megatron-LM#4168: 10 % of routers, 94 % of tokens is the bug).
DIFFER = 0.05


def _routing(batch: StepBatch) -> list[tuple[Record, TensorRef]]:
    return [
        (record, ref)
        for record in batch.columns.records
        for ref in record.tensors()
        if ref.name.rpartition(".")[2] in ROUTING and len(ref.shape) >= 3 and ref.is_readable and not ref.is_text
    ]


@rule("D30", "experts are routed differently", link="logprobs", scope="batch",
      explains=("D09", "D14"),
      source="Megatron-LM#4168 (10 % of routers, 94 % of tokens); slime validate_*")  # fmt: skip
def routing(batch: StepBatch) -> Iterator[Finding]:
    """Recorded routing: a layer whose experts are all 0 for every token is an error (layers of another pipeline stage
    were not gathered); between two records of the same shape, more than 5 % of tokens with another set of experts
    is a warning. Skipped without recorded routing.
    """
    recorded = _routing(batch)
    if not recorded:
        raise Skip("no routing is recorded (routed_experts): only mixtures of experts have one")
    for record, ref in recorded:
        experts = np.asarray(pages.array(ref))
        tokens = experts.reshape(-1, *experts.shape[-2:])
        empty = [layer for layer in range(tokens.shape[1]) if tokens.shape[0] and not tokens[:, layer].any()]
        if empty and len(tokens) >= 4 and (tokens.shape[2] > 1 or len(empty) < tokens.shape[1]):
            place = batch.laid.where_record(record, ref.name)
            yield finding(
                "error",
                f"layer {empty[0]} has no routing: every token went to expert 0, {len(empty)} layers in all",
                place,
                evidence=[
                    shown("layers that are all 0", len(empty), "0", record.path.name),
                    shown("layers", tokens.shape[1]),
                ],
                cause="routing of another pipeline stage or rank was not gathered before it was recorded",
            )
            return
    yield from _compared(batch, recorded)


def _compared(batch: StepBatch, recorded: list[tuple[Record, TensorRef]]) -> Iterator[Finding]:
    for number, (record, ref) in enumerate(recorded):
        for other, theirs in recorded[number + 1 :]:
            if ref.shape != theirs.shape or ref is theirs or not _of_the_same(record, other):
                continue
            different = _differ(np.asarray(pages.array(ref)), np.asarray(pages.array(theirs)))
            if different <= DIFFER:
                continue
            place = batch.laid.where_record(other, theirs.name)
            yield finding(
                "warning",
                f"{different:.0%} of tokens are routed to other experts in {theirs.name} than in {ref.name}",
                place,
                evidence=[
                    shown(
                        "share of tokens routed differently",
                        different,
                        "<= 0.05",
                        f"{record.path.name}, {other.path.name}",
                    )
                ],
                cause="the trainer routes live where the engine routed otherwise: replay the recorded routing (R3)",
                next_step=batch.laid.mismatch_command()
                if batch.has("rollout_logprobs") and batch.trainer is not None
                else None,
            )
            return


def _of_the_same(record: Record, other: Record) -> bool:
    """Whether two records are of the same samples: another micro-batch's tokens go where they go."""
    a, b = record.key, other.key
    return all(
        getattr(a, part) == getattr(b, part) or (part == "rank" and None in (a.rank, b.rank))
        for part in ("rank", "micro", "minibatch")
    )


def _differ(a: Array, b: Array) -> float:
    """Share of tokens with another set of experts in any layer."""
    mine, theirs = np.sort(a, axis=-1), np.sort(b, axis=-1)
    same = (mine == theirs).reshape(-1, int(np.prod(a.shape[-2:]))).all(axis=1)
    return float((~same).mean())
