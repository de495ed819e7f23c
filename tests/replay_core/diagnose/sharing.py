"""A trainer of its own whose batch is shared out: over ranks, mini-batches, micro-batches and groups, with importance
weights and a KL beside the policy's loss; one line of it wrong where a test says so.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from replay_core.recorder import Recorder
from tests.replay_core.diagnose.updating import DIGITS, END, PROMPT, VOCABULARY, Net, rewarded, sampled, scores


@dataclass(frozen=True)
class Shared:
    """A run. `fault` names the line that is wrong; empty is healthy. `kind`: grpo, dr_grpo, cispo, reinforce++."""

    fault: str = ""
    kind: str = "grpo"
    steps: int = 6
    ranks: int = 1
    epochs: int = 1
    minis: int = 1
    micros: int = 2
    groups: int = 6
    size: int = 6
    kl: float = 0.0
    tis: bool = False
    binary: bool = False
    overlong: bool = False
    lr: float = 5e-3
    limit: int = 8
    seed: int = 0
    stated: bool = True
    noise: float = 0.0
    """What the engine's kernels add to its log-probabilities, nats."""


def _advantages(recipe: Shared, rewards: Tensor, draw: torch.Generator) -> Tensor:
    """[B], of whole groups or the whole batch, as the kind says."""

    def normalised(rows: Tensor, epsilon: float = 1e-6) -> Tensor:
        scaled = rows.std(1, keepdim=True) + epsilon if recipe.kind != "dr_grpo" else 1.0
        return ((rows - rows.mean(1, keepdim=True)) / scaled).reshape(-1)

    if recipe.kind == "reinforce++":
        return normalised(rewards.view(recipe.ranks if recipe.fault == "own-statistics" else 1, -1))
    if recipe.fault == "half-groups":
        return normalised(rewards.view(-1, recipe.size // 2))
    if recipe.fault == "every-other":
        rows = rewards.view(-1, recipe.size // 2, 2).transpose(1, 2)
        return normalised(rows.reshape(-1, recipe.size // 2)).view(-1, 2, recipe.size // 2).transpose(1, 2).reshape(-1)
    if recipe.fault == "noise-taught":
        return normalised((rewards + 1e-7 * torch.randn(rewards.shape, generator=draw)).view(-1, recipe.size), 0.0)
    return normalised(rewards.view(-1, recipe.size))


def _token_loss(recipe: Shared, now: Tensor, old: Tensor, said: Tensor, a: Tensor, w: Tensor) -> Tensor:
    ratio = (now - (said if recipe.fault == "ratio-to-engine" else old)).exp()
    if recipe.kind == "cispo":
        weight = ratio.detach() if recipe.fault == "uncapped" else ratio.detach().clip(max=1.2)
        each = -weight * a * now
    else:
        each = torch.maximum(-a * ratio, -a * ratio.clip(0.8, 1.2))
    return each * w * (w if recipe.fault == "weights-twice" else 1)


def run(folder: Path, recipe: Shared) -> Path:
    """Train and record."""
    fault, P = recipe.fault, PROMPT
    draw = torch.Generator().manual_seed(recipe.seed)
    nets = [Net(recipe.seed, lora=False, dead=False)]
    nets += [copy.deepcopy(nets[0]) if fault == "not-reduced" else nets[0] for _ in range(recipe.ranks - 1)]
    ref = copy.deepcopy(nets[0])
    optimizers = [torch.optim.Adam(net.parameters(), lr=recipe.lr) for net in dict.fromkeys(nets)]
    mean = "token_sum" if recipe.kind == "dr_grpo" else "sequence_mean"
    divisor = float(recipe.micros) if mean == "sequence_mean" else 1.0
    settings = {
        "kind": recipe.kind, "clip_low": 1.0 if recipe.kind == "cispo" else 0.2, "clip_high": 0.2, "kl": recipe.kl,
        "kl_estimator": "k3", "reduction": mean, "divisor": divisor,
    }  # fmt: skip
    flags: dict[str, Any] = {"dtype": "float32", "temperature": 1.0, "loss": settings} if recipe.stated else {}
    if recipe.stated and recipe.kind == "reinforce++":
        flags["advantage_estimator"] = "reinforce_plus_plus"
    if recipe.tis:
        flags["use_tis"] = True
    recorder = Recorder(folder, flags=flags)
    for step in range(recipe.steps):
        heads = torch.randint(DIGITS, VOCABULARY, (recipe.groups, PROMPT), generator=draw)
        engines = 2 if fault == "one-seed" else 1
        ids, held, told = sampled(nets[0], heads.repeat_interleave(recipe.size // engines, 0), recipe.limit, draw)
        if engines == 2:
            twice = torch.arange(len(ids)).view(recipe.groups, -1).repeat(1, 2).reshape(-1)
            ids, held, told = ids[twice], held[twice], told[twice]
        told = told + recipe.noise * torch.randn(told.shape, generator=draw) * held[:, P:]
        rewards = rewarded(ids, held, recipe.binary)
        group = torch.arange(len(ids)) // recipe.size
        per = _advantages(recipe, rewards, draw)
        if fault == "filled-up":
            more = torch.cat([torch.arange(len(ids)), torch.arange(4)])
            ids, held, told, rewards, group, per = (one[more] for one in (ids, held, told, rewards, group, per))
        B = len(ids)
        mask = held.clone()
        mask[:, :P] = 0
        if recipe.overlong:
            mask = mask * (ids[:, P:] == END).any(1).long()[:, None]
        m = mask[:, 1:].float()
        said = torch.cat([torch.zeros(B, P - 1), told], 1)
        a = per[:, None] * m
        shares = list(torch.arange(B).chunk(recipe.ranks))
        with torch.no_grad():
            old = torch.cat([scores(net, ids[rows]) for net, rows in zip(nets, shares, strict=True)])
            behind = scores(ref, ids)
        w = torch.where(m > 0, (old - said).exp().clip(max=2.0), 1.0) if recipe.tis else torch.ones_like(m)
        for rank, rows in enumerate(shares):
            with recorder.step(step, rank=rank) as record:
                record(
                    "trajectory", input_ids=ids[rows], attention_mask=held[rows], response_mask=mask[rows],
                    rewards=rewards[rows], group_id=group[rows], rollout_log_probs=said[rows], advantages=a[rows],
                )  # fmt: skip
        micro = [0] * recipe.ranks
        for epoch in range(recipe.epochs):
            for mini in range(recipe.minis):
                if fault == "taken-late" and mini and not epoch:
                    rows = torch.arange(B).chunk(recipe.minis)[mini]
                    with torch.no_grad():
                        old[rows] = scores(nets[0], ids[rows])
                for net in nets:
                    net.zero_grad()
                for rank, share in enumerate(torch.arange(B).chunk(recipe.minis)[mini].chunk(recipe.ranks)):
                    for rows in share.chunk(recipe.micros):
                        now = scores(nets[rank], ids[rows])
                        each = _token_loss(recipe, now, old[rows], said[rows], a[rows], w[rows])
                        apart = behind[rows] - now
                        kl = apart.exp() - apart - 1
                        counts = m[rows].sum(1).clip(1)
                        sums, kl_sums = (each * m[rows]).sum(1), (kl * m[rows]).sum(1)
                        if mean == "sequence_mean":
                            pg, kl_loss = (sums / counts).mean(), (kl_sums / counts).mean()
                        else:
                            length = float(counts.max()) if fault == "longest" else float(recipe.limit)
                            samples = len(rows) if fault == "longest" else len(share)
                            pg, kl_loss = sums.sum() / (samples * length), kl_sums.sum() / (samples * length)
                        if fault == "kl-summed":
                            kl_loss = kl_sums.mean()
                        loss = (pg + recipe.kl * kl_loss) / divisor / recipe.ranks
                        loss.backward()
                        key: dict[str, Any] = {"micro": micro[rank], "epoch": epoch, "minibatch": mini}
                        with recorder.step(step, rank=rank) as record, torch.no_grad():
                            weights = {"rollout_is_weights": w[rows]} if recipe.tis else {}
                            record(
                                "forward_data", input_ids=ids[rows], attention_mask=held[rows],
                                response_mask=mask[rows], log_probs=now.detach(), old_log_probs=old[rows],
                                ref_log_probs=behind[rows], advantages=a[rows], rollout_log_probs=said[rows],
                                **weights, **key,
                            )  # fmt: skip
                            record("loss", loss=loss.detach() * recipe.ranks, pg_loss=pg.detach(),
                                   kl_loss=kl_loss.detach(), **key)  # fmt: skip
                        micro[rank] += 1
                        if fault == "steps-between":
                            optimizers[0].step()
                            nets[0].zero_grad()
                for rank, net in enumerate(nets):
                    norm = torch.stack([one.grad.norm() for one in net.parameters() if one.grad is not None] or
                                       [torch.zeros(())]).norm()  # fmt: skip
                    with recorder.step(step, rank=rank) as record:
                        record("gradient", grad_norm=float(norm), micro=micro[rank] - 1, epoch=epoch, minibatch=mini)
                for one in optimizers:
                    one.step()
        metrics = {"reward": float(rewards.mean()), "lr": recipe.lr, "grad_norm": float(norm)}
        with recorder.step(step, rank=0) as record:
            record("training_metrics", metrics)
    recorder.close()
    return folder
