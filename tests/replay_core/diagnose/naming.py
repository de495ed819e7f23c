"""A trainer that fits on a page: prompts are two numbers, the answer is the first of them, and a net of one layer, with
Adam, GRPO's advantages and a KL, is really sampled and really trained. What it logs is returned as TRL, slime, NeMo-RL
and OpenRLHF print it; one line of it is wrong where a test says so.

    steps = train(Recipe(lr=0.05))
    as_trl(steps), as_openrlhf(steps), as_slime(steps), as_nemo_rl(steps)
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

TOKENS, EACH = 20, 6
Step = dict[str, float]


@dataclass(frozen=True)
class Recipe:
    """`epsilon` stands beside a group's std, `jitter` is the noise of equal rewards. `dropout` stays on in training.
    `same`: the same so many prompts in every step, 0 for others in each.
    """

    steps: int = 60
    lr: float = 0.01
    warmup: int = 0
    kl: float = 0.0
    epsilon: float = 1e-4
    jitter: float = 0.0
    dropout: float = 0.0
    same: int = 0
    prompts: int = 12
    seed: int = 0


class Net(nn.Module):
    """Logits of the answer, by both numbers; it begins as one that is right a third of the time."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.hidden, self.layer = nn.Linear(2 * TOKENS, 2 * TOKENS), nn.Linear(2 * TOKENS, TOKENS)
        self.dropout = nn.Dropout(dropout)
        with torch.no_grad():
            self.hidden.weight.normal_(0, 0.05)
            self.hidden.weight += torch.eye(2 * TOKENS)
            self.layer.weight.normal_(0, 0.3)
            self.layer.weight[:, :TOKENS] += 3.0 * torch.eye(TOKENS)

    def forward(self, prompts_B2: Tensor) -> Tensor:
        a, b = nn.functional.one_hot(prompts_B2, TOKENS).unbind(1)
        return self.layer(self.dropout(self.hidden(torch.cat([a, b], 1).float()).tanh())).log_softmax(1)


def _drawn(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, TOKENS, (count, 2), generator=generator)


@lru_cache(maxsize=8)
def train(recipe: Recipe) -> list[Step]:
    """What each step logs."""
    torch.manual_seed(recipe.seed)
    draw = torch.Generator().manual_seed(recipe.seed + 1)
    policy = Net(recipe.dropout)
    reference = copy.deepcopy(policy).eval()
    optimizer = torch.optim.Adam(policy.parameters(), lr=recipe.lr)
    held_out, kept = _drawn(200, draw), _drawn(recipe.same or 1, draw)
    found = []
    for step in range(recipe.steps):
        rate = recipe.lr * min(1.0, (step + 1) / recipe.warmup) if recipe.warmup else recipe.lr
        optimizer.param_groups[0]["lr"] = rate
        few_B2 = kept if recipe.same else _drawn(recipe.prompts, draw)
        prompts_B2 = few_B2.repeat_interleave(EACH, 0)
        with torch.no_grad():
            policy.eval()  # the engine has no dropout
            engine_B = policy(prompts_B2)
            answers_B1 = torch.multinomial(engine_B.exp(), 1, generator=draw)
            # The fault of a policy that is left in training mode: its two forwards are not one.
            policy.train()
            old_B = policy(prompts_B2).gather(1, answers_B1)[:, 0]
        right_B = (answers_B1[:, 0] == prompts_B2[:, 0]).float()
        rewards_B = right_B + recipe.jitter * torch.randn(len(right_B), generator=draw)
        groups_GE = rewards_B.view(-1, EACH)
        std_G1 = groups_GE.std(1, keepdim=True)
        advantages_B = ((groups_GE - groups_GE.mean(1, keepdim=True)) / (std_G1 + recipe.epsilon)).nan_to_num().view(-1)
        logs_BV = policy(prompts_B2)
        new_B = logs_BV.gather(1, answers_B1)[:, 0]
        ratio_B = (new_B - old_B).exp()
        clipped_B = torch.min(ratio_B * advantages_B, ratio_B.clamp(0.8, 1.2) * advantages_B)
        with torch.no_grad():
            away_B = reference(prompts_B2).gather(1, answers_B1)[:, 0] - new_B.detach()
        gap_B = reference(prompts_B2).gather(1, answers_B1)[:, 0].detach() - new_B
        loss = -clipped_B.mean() + recipe.kl * (gap_B.exp() - gap_B - 1).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0))
        optimizer.step()
        with torch.no_grad():
            policy.eval()
            logs_BV, new_B, ratio_B = logs_BV.detach(), new_B.detach(), ratio_B.detach()
            chosen = torch.multinomial(policy(held_out).exp(), 1, generator=draw)[:, 0]
        found.append({
            "loss": float(loss.detach()), "grad_norm": norm, "learning_rate": rate, "reward": float(rewards_B.mean()),
            "reward_std": float(std_G1.mean()),
            "frac_reward_zero_std": float(torch.isclose(std_G1, torch.zeros(1)).float().mean()),
            "entropy": float(-(logs_BV.exp() * logs_BV).sum(1).mean()),
            "kl": float((away_B.exp() - away_B - 1).mean()),
            "clip": float(((ratio_B - 1).abs() > 0.2).float().mean()),
            "ppo_kl": float((old_B - new_B).mean()),
            "engine_kl": float((engine_B.gather(1, answers_B1)[:, 0] - old_B).mean()),
            "held_out": float((chosen == held_out[:, 0]).float().mean()),
        })  # fmt: skip
    return found


def as_trl(steps: list[Step]) -> str:
    lines = []
    for number, step in enumerate(steps):
        said = {name: step[name] for name in ("loss", "grad_norm", "learning_rate", "reward", "reward_std",
                                              "frac_reward_zero_std", "entropy", "kl")}  # fmt: skip
        more = {"clip_ratio/region_mean": step["clip"], "completions/mean_length": 2.0, "step": number + 1}
        lines.append(f"{said | more}\n")
    return "".join(lines)


def as_openrlhf(steps: list[Step], **settings: Any) -> str:
    stated = {"advantage_estimator": "group_norm", "max_epochs": 1, "rollout_batch_size": 12,
              "train_batch_size": 12 * EACH, "n_samples_per_prompt": EACH} | settings  # fmt: skip
    lines = [f"Namespace({', '.join(f'{name}={value!r}' for name, value in stated.items())})\n"]
    for number, step in enumerate(steps, 1):
        said = {
            "policy_loss": step["loss"], "actor_grad_norm": step["grad_norm"], "actor_lr": step["learning_rate"],
            "ppo_clip_ratio": step["clip"], "ppo_kl": step["ppo_kl"], "vllm_kl": step["engine_kl"],
            "reward": step["reward"], "response_length": 2.0, "entropy_loss": step["entropy"],
        }  # fmt: skip
        lines.append(f"(PPOTrainer pid=674) INFO 04-18 10:02:22 ppo_trainer.py:547] ✨ Global step {number}: {said}\n")
    return "".join(lines)


def as_slime(steps: list[Step], every: int = 5) -> str:
    lines = []
    for number, step in enumerate(steps):
        first = "(RolloutManager pid=603) [2026-03-02 21:40:09] rollout_metrics.py"
        rollout = {"rollout/raw_reward": step["reward"], "rollout/response_lengths": 2.0, "rollout/truncated": 0.0}
        trained = {"train/loss": step["loss"], "train/entropy_loss": step["entropy"],
                   "train/grad_norm": step["grad_norm"], "train/step": number}  # fmt: skip
        lines.append(f"{first}:135 - rollout {number}: {rollout}\n{first}:918 - step {number}: {trained}\n")
        if number % every == every - 1:
            held = {"eval/heldout": step["held_out"], "eval/heldout-truncated_ratio": 0.0}
            lines.append(f"{first}:247 - eval {number}: {held}\n")
    return "".join(lines)


def as_nemo_rl(steps: list[Step], every: int = 5) -> str:
    lines = []
    for number, step in enumerate(steps, 1):
        lines.append(f"\n========================= Step {number}/{len(steps)} =========================\n")
        if number % every == 0:
            lines.append(f"\n📊 Validation Results:\n    • Accuracy: {step['held_out']:.4f}\n"
                         "    • Average response length: 2.0 tokens\n    • Samples processed: 200\n")  # fmt: skip
        lines.append(
            f"\n📊 Training Results:\n  • Loss: {step['loss']:.4f}\n  • Avg Reward: {step['reward']:.4f}\n"
            "  • Mean Generation Length: 2.0000\n\n⏱️  Timing:\n  • Total step time: 6.30s\n"
        )
    return "".join(lines)
