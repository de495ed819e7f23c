"""A policy that is really trained to call a tool or to answer at once, and what a run of it counts in each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Prompts of a step, answers to each, turns that an agent may take.
PROMPTS, EACH, LIMIT = 16, 8, 12


@dataclass
class World:
    """What answers are worth. Chances may depend on the step: `lambda step: ...`."""

    tool: Callable[[int], float] = lambda step: 0.75
    """The chance that an answer is right with the tool."""
    alone: Callable[[int], float] = lambda step: 0.3
    fails: Callable[[int], float] = lambda step: 0.02
    """The chance that a call fails: the answer is then as good as one without."""
    breaks: Callable[[int], float] = lambda step: 0.01
    """The chance that an environment breaks: nothing is earned, whatever the answer."""
    cancels: Callable[[int], float] = lambda step: 0.02
    drawn: int = 1
    """Groups that are drawn at most for each that is kept (dynamic sampling)."""
    rate: float = 0.5
    begins: float = 0.0
    """The logit of a call, at first."""


@dataclass
class Counts:
    """One step's figures."""

    reward: float
    calls: float
    failed: float
    broken: int
    cancelled: int
    trainable: int
    dropped: int
    drawn: int
    total: int = PROMPTS * EACH


def train(world: World, steps: int, seed: int) -> list[Counts]:
    """REINFORCE with the group's mean as baseline over one logit by kind of prompt."""
    draw = np.random.default_rng(seed)
    logits_K = np.full(4, world.begins)
    found = []
    for step in range(1, steps + 1):
        kept: list[tuple[Any, ...]] = []
        dropped, tried = 0, 0
        while len(kept) < PROMPTS and tried < PROMPTS * world.drawn:
            tried += 1
            kind = int(draw.integers(4))
            p = 1 / (1 + np.exp(-logits_K[kind]))
            calls_G = draw.random(EACH) < p
            failed_G = calls_G & (draw.random(EACH) < world.fails(step))
            # Prompts differ in how hard they are.
            ease = float(draw.beta(1.2, 1.2)) - 0.5
            chance_G = np.where(calls_G & ~failed_G, world.tool(step), world.alone(step)) + ease
            broken_G = draw.random(EACH) < world.breaks(step)
            reward_G = ((draw.random(EACH) < chance_G) & ~broken_G).astype(float)
            if world.drawn > 1 and reward_G.std() == 0:
                dropped += 1
                continue
            kept.append((kind, p, calls_G, failed_G, broken_G, reward_G))
        for kind, p, calls_G, _, _, reward_G in kept:
            advantage_G = reward_G - reward_G.mean()
            logits_K[kind] += world.rate * float((advantage_G * (calls_G - p)).mean())
        every = [np.concatenate([one[at] for one in kept]) for at in range(2, 6)] if kept else [np.zeros(1)] * 4
        calls, failed, broken, rewards = every
        found.append(
            Counts(
                reward=float(rewards.mean()),
                calls=float(calls.mean()),
                failed=float(failed.sum() / max(1, calls.sum())),
                broken=int(broken.sum()),
                cancelled=int(draw.binomial(PROMPTS * EACH, world.cancels(step))),
                trainable=sum(EACH for one in kept if one[5].std() > 0),
                dropped=dropped,
                drawn=tried,
            )
        )
    return found


def prime(run: list[Counts], age: int = 1) -> str:
    """The run as prime-rl's console has it."""
    return "".join(
        f"10:{step // 60:02}:{step % 60:02} SUCCESS Step {step} |    53s | Reward {one.reward:.4f} | "
        f"Trainable {one.trainable}/{one.total} ({one.trainable / one.total:.1%}) | Turns {1 + one.calls:.1f} | "
        f"Branches 1.0 | Max Off-Policy {age} | Error {one.broken / one.total:.1%} | "
        f"Cancelled {one.cancelled / one.total:.1%} | Truncation 3.0%\n"
        for step, one in enumerate(run)
    )
