"""A trainer of its own: a small net of the last two tokens, trained by torch's autograd in micro-batches and recorded
as the recorder's page says, its settings stated; one line of it wrong where a test says so.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from replay_core.recorder import Recorder

PAD, END, DIGITS, VOCABULARY, WIDTH = 0, 1, 4, 12, 16
PROMPT = 4


@dataclass(frozen=True)
class Recipe:
    """A run. `fault` names the line that is wrong; empty is healthy. `mean`: the reduction that is stated and made."""

    fault: str = ""
    steps: int = 7
    micros: int = 2
    epochs: int = 1
    groups: int = 4
    size: int = 6
    kl: float = 0.0
    mean: str = "sequence_mean"
    lr: float = 2e-3
    adam: bool = True
    max_norm: float = 0.0
    lora: bool = False
    overlong: bool = False
    filtered: bool = False
    checkpoints: bool = False
    pg: bool = True
    limit: int = 8
    seed: int = 0
    ranks: int = 1
    off_policy: bool = False
    one_batch: bool = False


class Net(nn.Module):
    """Next-token logits [B, S, V] of the token and the one before it."""

    def __init__(self, seed: int, lora: bool, dead: bool) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.tokens = nn.Embedding(VOCABULARY, WIDTH)
            self.mix, self.head = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)
            if lora:
                self.requires_grad_(False)
                self.lora_A = nn.Parameter(torch.zeros(3, WIDTH) if dead else torch.randn(3, WIDTH) / 4)
                self.lora_B = nn.Parameter(torch.zeros(VOCABULARY, 3))
        self.lora = lora

    def forward(self, ids: Tensor) -> Tensor:
        before = torch.cat([ids[:, :1], ids[:, :-1]], 1)
        h = torch.tanh(self.mix(torch.cat([self.tokens(ids), self.tokens(before)], -1)))
        out: Tensor = self.head(h)
        if self.lora:
            out = out + 4 * h @ self.lora_A.T @ self.lora_B.T
        out = out.clone()
        out[..., PAD] = -30
        return out

    def save_pretrained(self, folder: Path, safe_serialization: bool) -> None:
        folder.mkdir(parents=True)
        save_file({name: value.clone() for name, value in self.state_dict().items()}, folder / "model.safetensors")


def scores(net: Net, ids: Tensor) -> Tensor:
    every = net(ids)[:, :-1].log_softmax(-1)
    return every.gather(-1, ids[:, 1:, None])[..., 0]


def sampled(net: Net, prompts: Tensor, limit: int, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids [B, P + R], which are there [B, P + R], and the engine's log-probabilities [B, R]: in bfloat16."""
    engine = copy.deepcopy(net).to(torch.bfloat16)
    ids, held = prompts, torch.ones_like(prompts)
    said = []
    writing = torch.ones(len(ids), dtype=torch.bool)
    with torch.no_grad():
        for _ in range(limit):
            every = engine(ids)[:, -1].float().log_softmax(-1)
            token = torch.multinomial(every.exp(), 1, generator=draw)
            said.append(torch.where(writing, every.gather(-1, token)[:, 0], torch.zeros(len(ids))))
            ids = torch.cat([ids, torch.where(writing, token[:, 0], PAD)[:, None]], 1)
            held = torch.cat([held, writing.long()[:, None]], 1)
            writing = writing & (token[:, 0] != END)
    return ids, held, torch.stack(said, 1)


def rewarded(ids: Tensor, held: Tensor, filtered: bool) -> Tensor:
    """The share of tokens that go on counting, or whether there is one such token."""
    inside = held[:, PROMPT:]
    goes_on = ((ids[:, PROMPT:] == ids[:, PROMPT - 1 : -1] + 1) & (inside == 1)).sum(1)
    return (goes_on > 1).float() if filtered else goes_on / inside.sum(1)


def _reduced(each: Tensor, mask: Tensor, mean: str, tokens: float) -> Tensor:
    if mean == "token_sum":
        return (each * mask).sum() / tokens
    if mean == "token_mean":
        return (each * mask).sum() / mask.sum().clip(1)
    return ((each * mask).sum(1) / mask.sum(1).clip(1)).mean()


def _batches(recipe: Recipe, net: Net) -> Iterator[dict[str, Tensor]]:
    """The rollouts of every step, as the policy then is."""
    draw = torch.Generator().manual_seed(recipe.seed)
    kept: dict[str, Tensor] = {}
    groups = recipe.groups * (8 if recipe.filtered else 1)
    for step in range(recipe.steps):
        if (recipe.fault == "reused" and step > 1) or (recipe.one_batch and step):
            yield kept
            continue
        heads = torch.randint(DIGITS, VOCABULARY, (groups, PROMPT), generator=draw)
        heads[:, :2] = torch.tensor([2, 3])  # a template
        prompts = heads.repeat_interleave(recipe.size, 0)
        ids, held, said = sampled(net, prompts, recipe.limit, draw)
        rewards = rewarded(ids, held, recipe.filtered)
        keep = torch.arange(groups)
        if recipe.filtered:
            apart = rewards.view(groups, -1).std(1) > 1e-6
            wanted = ~apart if recipe.fault == "filter-turned" else apart
            keep = torch.cat([wanted.nonzero()[:, 0], (~wanted).nonzero()[:, 0]])[: recipe.groups]
        rows = (keep[:, None] * recipe.size + torch.arange(recipe.size)).reshape(-1)
        kept = {"ids": ids[rows], "held": held[rows], "said": said[rows], "rewards": rewards[rows]}
        yield kept


def run(folder: Path, recipe: Recipe) -> Path:
    """Train and record."""
    fault, P = recipe.fault, PROMPT
    net = Net(recipe.seed, recipe.lora, fault == "lora-dead")
    ref = copy.deepcopy(net)
    trained = [each for each in net.parameters() if each.requires_grad]
    held_by = [copy.deepcopy(each) for each in trained] if fault == "other-parameters" else trained
    optimizer: Any = (torch.optim.Adam if recipe.adam else torch.optim.SGD)(held_by, lr=recipe.lr)
    divisor = 1.0 if recipe.mean == "token_sum" else float(recipe.micros)
    loss_settings = {
        "kind": "grpo", "clip_low": 0.2, "clip_high": 0.2, "kl": recipe.kl, "kl_estimator": "k3",
        "reduction": recipe.mean, "divisor": divisor,
    }  # fmt: skip
    flags: dict[str, Any] = {"dtype": "float32", "temperature": 1.0, "loss": loss_settings}
    if recipe.off_policy:
        flags["max_staleness"] = 4
    if recipe.filtered:
        flags["dynamic_sampling"] = True
    recorder = Recorder(folder, flags=flags)
    for step, batch in enumerate(_batches(recipe, net)):
        if recipe.checkpoints:
            recorder.checkpoint(step, net)
        ids, held, rewards = batch["ids"], batch["held"], batch["rewards"]
        B = len(ids)
        said = torch.cat([torch.zeros(B, P - 1), batch["said"]], 1)
        cut = (ids[:, P:] != END).all(1)
        mask = held.clone()
        mask[:, :P] = 0
        if recipe.overlong:
            left_out = ~cut if fault == "overlong-turned" else cut
            mask = mask * (~left_out).long()[:, None]
        group = torch.arange(B) // recipe.size
        each = rewards.view(-1, recipe.size)
        per = ((each - each.mean(1, keepdim=True)) / (each.std(1, keepdim=True) + 1e-4)).reshape(-1)
        m = mask[:, 1:].float()
        advantages = per[:, None] * m
        with torch.no_grad():
            old, behind = scores(net, ids), scores(ref, ids)
        rate = recipe.lr * (40 if fault == "rate-leaps" and step >= 2 else 1)
        for one in optimizer.param_groups:
            one["lr"] = rate
        with recorder.step(step, rank=0) as record:
            record(
                "trajectory", input_ids=ids, attention_mask=held, response_mask=mask, rewards=rewards, group_id=group,
                rollout_log_probs=said, advantages=advantages, truncated=cut,
            )  # fmt: skip
            record("old_log_probs", old_log_probs=old)
            micro = 0
            for epoch in range(recipe.epochs):
                if fault != "never-zeroed":
                    net.zero_grad()
                parts = list(torch.arange(B).chunk(recipe.micros))
                if fault == "micro-dropped":
                    parts = parts[:-1]
                for rows in parts:
                    now = scores(net, ids[rows])
                    ratio = (now - old[rows]).exp()
                    a = advantages[rows]
                    token_loss = torch.maximum(-a * ratio, -a * ratio.clip(0.8, 1.2))
                    apart = behind[rows] - now
                    kl = apart.exp() - apart - 1
                    made = "token_mean" if fault == "own-tokens" else recipe.mean
                    pg = _reduced(token_loss, m[rows], made, float(m.sum()))
                    kl_loss = _reduced(kl, m[rows], made, float(m.sum()))
                    loss = (pg + recipe.kl * kl_loss) / (1.0 if fault == "undivided" else divisor)
                    loss.backward()
                    key: dict[str, Any] = {"micro": micro, "epoch": epoch, "minibatch": 0}
                    with torch.no_grad():
                        record(
                            "forward_data", input_ids=ids[rows], attention_mask=held[rows], response_mask=mask[rows],
                            log_probs=now.detach(), old_log_probs=old[rows], ref_log_probs=behind[rows], advantages=a,
                            rollout_log_probs=said[rows], **key,
                        )  # fmt: skip
                        more = {"pg_loss": pg.detach(), "kl_loss": kl_loss.detach()} if recipe.pg else {}
                        record("loss", loss=loss.detach(), **more, **key)
                    micro += 1
                grads = [one.grad for one in trained if one.grad is not None]
                norm = float(torch.stack([one.norm() for one in grads]).norm())
                named = {
                    f"grad.{name}": one.grad.clone() for name, one in net.named_parameters() if one.grad is not None
                }
                record("gradient", **named, grad_norm=norm, micro=micro - 1, epoch=epoch, minibatch=0)
                if recipe.max_norm:
                    nn.utils.clip_grad_norm_(trained, recipe.max_norm)
                if held_by is not trained:
                    for one, real in zip(held_by, trained, strict=True):
                        one.grad = None if real.grad is None else real.grad.clone()
                optimizer.step()
            metrics = {"reward": float(rewards.mean()), "lr": rate, "grad_norm": norm, "loss": float(loss.detach())}
            record("training_metrics", metrics)
    recorder.close()
    return folder
