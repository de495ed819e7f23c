"""k training steps of one critic on the value loss, on the same rows and targets as the other."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from msgspec import Struct, field

from replay_core.objectives.value_loss import REDUCTIONS, is_clipped, squared_error
from replay_core.parity.critics import Critic, CriticBatch
from replay_core.parity.sides import TrainedStep


class Targets(Struct, frozen=True):
    """What a batch's values are trained towards, [B, S - 1]: the same for both critics, from the first one's values."""

    returns_BT: torch.Tensor
    old_values_BT: torch.Tensor


class StepReport(Struct):
    """One optimizer step. loss is the mean over its micro-batches; rows are the pool's rows in the order trained."""

    step: int
    loss: float
    grad_norm: float | None
    clipped: float | None
    rows: list[int] = field(default_factory=list)


def pooled(batches: list[CriticBatch], targets: list[Targets]) -> tuple[CriticBatch, Targets]:
    """All batches' rows one under the other, padded on the right to the widest."""
    width = max(int(batch.ids_BS.shape[1]) for batch in batches)

    def whole(tensors: list[torch.Tensor], wide: int) -> torch.Tensor:
        return torch.cat([torch.nn.functional.pad(one, (0, wide - one.shape[1])) for one in tensors])

    batch = CriticBatch(
        "training rows",
        whole([one.ids_BS for one in batches], width),
        whole([one.attention_BS for one in batches], width),
        whole([one.response_BS for one in batches], width),
    )
    return batch, Targets(
        whole([one.returns_BT for one in targets], width - 1), whole([one.old_values_BT for one in targets], width - 1)
    )


def order(rows: int, size: int, *, shuffle: bool, seed: int) -> Iterator[list[int]]:
    """Mini-batches of row numbers without end, an epoch after the other. `shuffle`: a permutation per epoch, from the
    seed alone (CRITIC_DATA_SHUFFLE=1 in ROLL is deterministic too)."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        numbers = torch.randperm(rows, generator=generator).tolist() if shuffle else list(range(rows))
        for start in range(0, rows, size):
            yield numbers[start : start + size]


def train(critic: Critic, batch: CriticBatch, targets: Targets, steps: int) -> Iterator[StepReport]:
    """Train, and after each step say what it did.

    The loss of a micro-batch is the configuration's reduction over its rows; a step is the mean over micro-batches.
    """
    config = critic.config
    reduce = REDUCTIONS[config.reduction]
    size = config.per_device_batch * config.accumulation
    batches = order(int(batch.ids_BS.shape[0]), size, shuffle=config.shuffle, seed=config.data_seed)
    torch.manual_seed(config.training_seed)
    for step in range(1, steps + 1):
        critic.model.train()
        rows = next(batches)
        micros = [
            rows[start : start + config.per_device_batch] for start in range(0, len(rows), config.per_device_batch)
        ]
        losses, clipped = [], []
        for number, chosen in enumerate(micros):
            part, mask_BT = batch.rows(chosen), batch.rows(chosen).loss_mask
            returns_BT, old_BT = targets.returns_BT[chosen], targets.old_values_BT[chosen]
            values_BT = critic.values(part)
            loss = reduce(squared_error(values_BT, returns_BT, old_BT, config.value_clip), mask_BT)
            critic.backward(loss, of=len(micros), last=number == len(micros) - 1)
            losses.append(float(loss.detach()))
            if config.value_clip is not None:
                clips_BT = is_clipped(values_BT.detach(), returns_BT, old_BT, config.value_clip)
                clipped.append(float(clips_BT[mask_BT != 0].float().mean()) if bool(mask_BT.any()) else 0.0)
        norm = critic.step()
        mean = sum(losses) / len(losses)
        yield StepReport(step, mean, norm, sum(clipped) / len(clipped) if clipped else None, rows)


def to_mapping(report: StepReport) -> TrainedStep:
    return {
        "step": report.step, "loss": report.loss, "grad_norm": report.grad_norm, "clipped": report.clipped,
        "rows": report.rows,
    }  # fmt: skip
