"""An RL trainer of its own: copies digits, judged, in any of the common algorithms, with one fault planted or none.

Every fault is a line that is wrong where it is made; what is recorded is what then happened. Formulas are written
out here once more: nothing of `replay_core` is used.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.diagnose.policy import (
    BOS,
    DIGITS,
    END,
    PAD,
    TOOL,
    VOCABULARY,
    TinyPolicy,
    Written,
    rounded,
    token_logprobs,
    write,
)  # fmt: skip

torch.set_num_threads(1)


@dataclass(frozen=True)
class Recipe:
    """A run. `fault` names the line that is wrong; empty is healthy."""

    name: str
    fault: str = ""
    algorithm: str = "grpo"
    prompts: int = 8
    group: int = 4
    steps: int = 20
    kept: int = 5
    minibatches: int = 1
    epochs: int = 1
    micros: int = 2
    temperature: float = 1.0
    lr: float = 5e-4
    warmup: int = 0
    kl: float = 0.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    reduction: str = "token"
    limit: int = 12
    judge: str = "shaped"
    lag: int = 0
    old: str = "trainer"
    lora: bool = False
    experts: int = 0
    tools: bool = False
    engine: torch.dtype = torch.bfloat16
    entropy: float = 0.0
    warm: int = 240
    seed: int = 0


@dataclass
class Micro:
    """One forward and backward: the rows it took, and what came of them."""

    epoch: int
    minibatch: int
    rows: Tensor
    tensors: dict[str, Tensor]
    numbers: dict[str, float]


@dataclass
class StepKept:
    """All that one step computed. Per-token tensors are [B, R], about the response's own tokens."""

    step: int
    written: Written
    fields: dict[str, Any]
    micros: list[Micro]
    metrics: dict[str, float]


@dataclass
class Trained:
    """A run: steps that were recorded whole, and the metrics of all."""

    recipe: Recipe
    kept: list[StepKept] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)


def _answer(prompt: list[int]) -> list[int]:
    return [token for token in prompt if token in DIGITS]


def _draw(rng: random.Random, count: int) -> list[list[int]]:
    return [[BOS, *(rng.choice(DIGITS) for _ in range(rng.randint(3, 6)))] for _ in range(count)]


@lru_cache(maxsize=8)
def warm_start(seed: int, experts: int, steps: int) -> TinyPolicy:
    """A policy that has seen some answers: it solves part of the task."""
    policy = TinyPolicy(seed, experts=experts)
    rng, optimizer = random.Random(seed), torch.optim.AdamW(policy.parameters(), lr=4e-3)
    for _ in range(steps):
        rows = [(prompt, [*_answer(prompt), END]) for prompt in _draw(rng, 48)]
        width = max(len(a) + len(b) for a, b in rows)
        head = max(len(a) for a, _ in rows)
        ids = torch.tensor([[PAD] * (head - len(a)) + a + b + [PAD] * (width - len(b)) for a, b in rows])
        held = (ids != PAD).long()
        logits = policy(ids, held)[:, :-1]
        target = ids[:, 1:].masked_fill(held[:, 1:] == 0, -100)
        target[:, : head - 1] = -100
        loss = functional.cross_entropy(logits.reshape(-1, VOCABULARY), target.reshape(-1), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return policy


class Trainer:
    """One run of a recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.fault = recipe, recipe.fault
        start = warm_start(recipe.seed, recipe.experts, recipe.warm)
        self.policy = copy.deepcopy(start)
        if self.fault in ("dropout", "dropout-update"):
            for block in self.policy.blocks:
                block.dropout.p = 0.15  # type: ignore[union-attr]
        self.reference = copy.deepcopy(start).requires_grad_(False)
        if self.fault == "other-reference":
            self.reference = TinyPolicy(recipe.seed + 7, experts=recipe.experts).requires_grad_(False)
        self.critic = TinyPolicy(recipe.seed + 1, out=1) if recipe.algorithm == "ppo" else None
        self.adapters: dict[str, tuple[Tensor, Tensor]] = {}
        trained = list(self.policy.parameters())
        if recipe.lora:
            self.policy.requires_grad_(False)
            draw = torch.Generator().manual_seed(recipe.seed)
            for name, weight in self.policy.named_parameters():
                if weight.ndim == 2 and ("qkv" in name or "head" in name or "out" in name):
                    down = torch.randn(4, weight.shape[1], generator=draw) * 0.2
                    self.adapters[name] = (torch.zeros(weight.shape[0], 4, requires_grad=True), down.requires_grad_())
            trained = [each for pair in self.adapters.values() for each in pair]
        if self.fault == "wrong-parameters":
            trained = list(copy.deepcopy(self.policy).parameters())
        self.optimizer = torch.optim.AdamW(trained, lr=recipe.lr, weight_decay=0.0)
        self.trained = trained if self.fault != "wrong-parameters" else list(self.policy.parameters())
        if self.critic is not None:
            self.critic_optimizer = torch.optim.AdamW(self.critic.parameters(), lr=4e-3)
        self.rng, self.draw = random.Random(recipe.seed), torch.Generator().manual_seed(recipe.seed)
        self.shuffle = torch.Generator().manual_seed(recipe.seed + 5)
        self.versions: list[TinyPolicy] = []
        self.fixed_prompts = _draw(random.Random(3), recipe.prompts)

    # ---- weights

    def merged(self) -> TinyPolicy:
        """The weights that compute: the base with its adapter."""
        if not self.adapters:
            return self.policy
        whole = copy.deepcopy(self.policy)
        state = dict(whole.named_parameters())
        for name, (up, down) in self.adapters.items():
            state[name].data += (up @ down).detach()
        return whole

    def logits(self, ids: Tensor, held: Tensor, **how: Any) -> Tensor:
        if not self.adapters:
            out: Tensor = self.policy(ids, held, **how)
            return out
        weights: dict[str, Tensor] = dict(self.policy.named_parameters())
        for name, (up, down) in self.adapters.items():
            weights[name] = weights[name] + up @ down
        return torch.func.functional_call(self.policy, weights, (ids, held), how)  # type: ignore[no-any-return]

    # ---- one step

    def _engine(self, step: int) -> tuple[TinyPolicy, int]:
        now = rounded(self.merged(), self.recipe.engine)
        self.versions.append(now)
        at = step - self.recipe.lag
        if self.fault == "stale-engine":
            at = 0
        if self.fault == "sync-stops" and step >= 3:
            at = 2
        if self.fault == "adapter-lost":
            return rounded(self.policy, self.recipe.engine), step
        at = max(at, 0)
        if self.fault == "coarse-engine":
            for weight in now.parameters():
                scale = weight.abs().max() / 7
                weight.data = (weight / scale).round() * scale
        return self.versions[at] if self.fault != "coarse-engine" else now, at

    def _prompts(self) -> list[list[int]]:
        if self.fault == "same-prompts":
            return self.fixed_prompts
        return _draw(self.rng, self.recipe.prompts)

    def _judged(self, step: int, prompts: list[list[int]], written: Written) -> tuple[Tensor, dict[str, float]]:
        shaped, exact, form = [], [], []
        for row, prompt in enumerate(prompts):
            said = written.ids_BS[row, written.prompt_width :][written.response_BR[row] == 1].tolist()
            said = [token for token in said if token != TOOL]
            wanted = _answer(prompt)
            ended = bool(said) and said[-1] == END
            right = 0
            for a, b in zip(said, wanted, strict=False):
                if a != b:
                    break
                right += 1
            exact.append(float(ended and said[:-1] == wanted))
            form.append(float(ended and 2 <= len(said) <= 10))
            shaped.append(right / len(wanted) * 0.8 + 0.2 * exact[-1])
        shaped_B, exact_B, form_B = (torch.tensor(each) for each in (shaped, exact, form))
        lengths_B = written.response_BR.sum(1).float()
        fault, reward_B = self.fault, shaped_B if self.recipe.judge == "shaped" else exact_B
        if self.recipe.judge == "sum":
            reward_B = shaped_B + 0.2 * form_B
        if fault == "constant-judge":
            reward_B = torch.full_like(reward_B, 0.7)
        elif fault == "judge-of-prompts":
            reward_B = torch.tensor([len(prompt) / 10 for prompt in prompts])
        elif fault == "judge-nan":
            reward_B = reward_B.masked_fill(torch.arange(len(prompts)) == 5, torch.nan)
        elif fault == "judge-of-length":
            reward_B = lengths_B / 14
        elif fault == "judge-of-brevity":
            reward_B = -lengths_B / 14
        elif fault == "judge-of-form":
            early_B = torch.tensor([
                float(len(said := written.ids_BS[row][written.held_BS[row] == 1].tolist()) and said[-1] == END)
                * (1.0 - (said[len(prompts[row])] in DIGITS)) for row in range(len(prompts))
            ])  # fmt: skip
            reward_B, form_B = early_B, early_B
        elif fault in ("half-cut", "all-cut"):
            reward_B = torch.where(written.ended_B, reward_B + 0.3, torch.zeros_like(reward_B))
        elif fault == "scores-by-length":  # sorted for the judge, and never put back
            reward_B = reward_B[lengths_B.argsort(stable=True)]
        elif fault == "judge-breaks" and step >= self.recipe.steps // 2:
            reward_B = torch.zeros_like(reward_B)
        return reward_B, {"accuracy": float(exact_B.mean()), "format": float(form_B.mean())}

    def _advantages(self, reward_B: Tensor, group_B: Tensor, mask_BR: Tensor) -> Tensor:
        """One advantage per response, by the algorithm and its fault."""
        recipe, fault = self.recipe, self.fault
        if fault == "groups-by-place":
            group_B = torch.arange(len(group_B)) % recipe.prompts
        elif fault == "whole-batch-group":
            group_B = torch.zeros_like(group_B)
        if fault == "lone-groups":
            return reward_B.clone()
        out_B = torch.zeros_like(reward_B)
        for group in group_B.unique():
            inside = group_B == group
            r = reward_B[inside]
            if recipe.algorithm == "rloo":
                out_B[inside] = r - (r.sum() - r) / (len(r) - 1)
            elif recipe.algorithm in ("drgrpo", "rpp-baseline") or fault == "no-std":
                out_B[inside] = r - r.mean()
            elif recipe.algorithm == "rpp":
                out_B[inside] = r
            elif fault == "nan-groups":
                out_B[inside] = (r - r.mean()) / r.std()
            else:
                out_B[inside] = (r - r.mean()) / (r.std() + 1e-6)
        if recipe.algorithm in ("rpp", "rpp-baseline"):
            counts = mask_BR.sum(1)
            mean = (out_B * counts).sum() / counts.sum()
            var = (((out_B - mean) ** 2) * counts).sum() / (counts.sum() - 1)
            out_B = (out_B - mean) / (var + 1e-8).sqrt()
        if fault == "zero-advantages":
            out_B = torch.zeros_like(out_B)
        elif fault == "turned-advantages":
            out_B = -out_B
        elif fault == "raw-advantages":
            out_B = reward_B.clone()
        elif fault == "rolled-advantages":
            out_B = out_B.roll(1)
        elif fault == "normalised-twice":
            out_B = out_B * (1 + reward_B) * 1.7
        return out_B

    def _gae(self, reward_BR: Tensor, value_BR: Tensor, mask_BR: Tensor) -> tuple[Tensor, Tensor]:
        gamma, lam, fault = 1.0, 0.95, self.fault
        advantage, follows, returns = torch.zeros_like(value_BR), torch.zeros(len(value_BR)), None
        next_value = torch.zeros(len(value_BR))
        for t in reversed(range(value_BR.shape[1])):
            used = next_value if fault != "gae-without-next" else torch.zeros_like(next_value)
            delta = reward_BR[:, t] + gamma * used - value_BR[:, t]
            now = delta + gamma * lam * follows
            counts = mask_BR[:, t] != 0
            follows, next_value = torch.where(counts, now, follows), torch.where(counts, value_BR[:, t], next_value)
            advantage[:, t] = torch.where(counts, now, 0.0)
        returns = (advantage + value_BR) * mask_BR
        if fault == "targets-are-advantages":
            returns = advantage.clone()
        elif fault == "targets-shifted":
            returns = returns.roll(1, 1) * mask_BR
        elif fault == "targets-are-rewards":
            returns = reward_BR * mask_BR
        whitened = advantage
        if fault != "gae-not-masked":
            inside = advantage[mask_BR != 0]
            whitened = (advantage - inside.mean()) / (inside.var() + 1e-8).sqrt() * mask_BR
        return whitened, returns

    def _scored(self, ids: Tensor, held: Tensor, width: int, *, update: bool) -> tuple[Tensor, Tensor]:
        """The trainer's own log-probabilities of the response [B, R], and entropy."""
        fault, how = self.fault, {}
        seen = held
        if fault == "positions-count-padding":
            how["positions_BS"] = torch.arange(ids.shape[1])[None].expand(ids.shape)
        elif fault == "padding-attended":
            seen = torch.ones_like(held)
            how["positions_BS"] = (held.cumsum(-1) - 1).clip(0)
        elif fault == "other-template":
            ids = ids.clone()
            first = held.argmax(1)
            ids[torch.arange(len(ids)), first] = VOCABULARY - 1
        self.policy.train(fault == "dropout" or (fault == "dropout-update" and update))
        temperature = 1.0 if fault == "temperature" else self.recipe.temperature
        logits = self._packed(ids, held) if fault == "packing-leak" else self.logits(ids, seen, **how)
        logprobs, entropy = token_logprobs(logits, ids, temperature)
        return logprobs[:, width - 1 :], entropy[:, width - 1 :]

    def _packed(self, ids: Tensor, held: Tensor, size: int = 3) -> Tensor:
        """Three samples a row without a block mask."""
        logits = torch.zeros(*ids.shape, VOCABULARY)
        for first in range(0, len(ids), size):
            inside = held[first : first + size] == 1
            flat = ids[first : first + size][inside][None]
            counts = inside.sum(1).tolist()
            places = torch.cat([torch.arange(count) for count in counts])[None]
            out = self.logits(flat, torch.ones_like(flat), positions_BS=places)[0]
            start = 0
            for row, count in enumerate(counts, first):
                logits[row, inside[row - first]] = out[start : start + count]
                start += count
        return logits

    def step(self, step: int) -> StepKept:
        recipe, fault = self.recipe, self.fault
        prompts = [prompt for prompt in self._prompts() for _ in range(recipe.group)]
        group_B = torch.arange(len(prompts)) // recipe.group
        engine, version = self._engine(step)
        sampled_at = 0.6 if fault == "temperature" else recipe.temperature
        limit = {"all-cut": 4, "half-cut": 6}.get(fault, recipe.limit)
        asked = [[BOS, *prompt] for prompt in prompts] if fault == "engine-doubles-bos" else prompts
        written = write(
            engine, asked, limit, self.draw, temperature=sampled_at, top_p=0.7 if fault == "top-p" else 1.0,
            top_k=3 if fault == "top-k" else 0, raw=fault == "temperature-raw-engine", ends=fault != "never-stops",
            tool_at=2 if recipe.tools or fault == "tools-counted" else None,
        )  # fmt: skip
        if fault == "engine-doubles-bos":  # what the trainer sees has one
            first = written.held_BS.argmax(1)
            rows = torch.arange(len(prompts))
            written.ids_BS[rows, first], written.held_BS[rows, first] = PAD, 0
            written.ids_BS, written.held_BS = written.ids_BS[:, 1:], written.held_BS[:, 1:]
            written.prompt_width -= 1
        ids, held, width = written.ids_BS.clone(), written.held_BS.clone(), written.prompt_width
        mask_BR, rollout_BR = written.response_BR.clone(), written.logprobs_BR.clone()
        if recipe.tools:
            mask_BR = mask_BR * (ids[:, width:] != TOOL)
        reward_B, judged = self._judged(step, prompts, written)
        reward_BR = shaped_BR = torch.zeros_like(rollout_BR)
        last_B = held[:, width:].sum(1) - 1
        reward_BR[torch.arange(len(prompts)), last_B.clip(0)] = reward_B
        if fault == "doubled-bos":  # the template has one, and the tokenizer adds its own
            rows, first = torch.arange(len(prompts)), held.argmax(1)
            ids, held = functional.pad(ids, (1, 0), value=PAD), functional.pad(held, (1, 0))
            ids[rows, first], held[rows, first] = BOS, 1
            width += 1
        trained_ids = ids.clone()
        if fault == "retokenised":
            for row in range(0, len(prompts), 4):
                at = width + 1
                if held[row, at]:
                    trained_ids[row, at] = (int(trained_ids[row, at]) - 3) % 10 + 4
        if fault == "pads-counted":
            mask_BR = torch.ones_like(mask_BR)
        elif fault == "end-untrained":
            mask_BR = mask_BR * (ids[:, width:] != END)
        elif fault == "mask-shifted":
            mask_BR = mask_BR.roll(1, 1)
            mask_BR[:, 0] = 0
        elif fault == "mask-cut":
            mask_BR = mask_BR * (torch.arange(mask_BR.shape[1]) < 1)
        elif fault == "mask-empty":
            mask_BR = torch.zeros_like(mask_BR)
        if fault == "logprobs-shifted":
            rollout_BR = torch.cat([torch.zeros(len(prompts), 1), rollout_BR[:, :-1]], 1) * held[:, width:]
        counted = mask_BR.float()
        self.policy.eval()
        with torch.no_grad():
            old_BR, _ = self._scored(trained_ids, held, width, update=False)
            ref_BR = token_logprobs(self.reference(trained_ids, held), trained_ids, recipe.temperature)[0][
                :, width - 1 :
            ]
            if fault == "reference-follows":
                ref_BR = old_BR.clone()
        if recipe.old == "engine":
            old_BR = rollout_BR.clone()
        if fault == "old-of-next":
            old_BR = old_BR + 0  # filled after the update below
        values_BR = returns_BR = None
        if self.critic is not None:
            with torch.no_grad():
                values_BR = self.critic(trained_ids, held)[..., 0][:, width - 1 : -1] * held[:, width:]
            beta = -recipe.kl if fault == "kl-rewarded" else recipe.kl
            shaped_BR = reward_BR - (beta * (old_BR - ref_BR) * counted if recipe.kl else 0)
            advantage_BR, returns_BR = self._gae(shaped_BR, values_BR, counted)
            if fault == "gae-turned":
                advantage_BR = -advantage_BR
            elif fault == "values-kept":
                advantage_BR = returns_BR * counted
            elif fault == "gae-late":
                advantage_BR = torch.roll(advantage_BR, 1, 1) * counted
        else:
            advantage_B = self._advantages(reward_B, group_B, counted)
            advantage_BR = advantage_B[:, None] * counted
        weights_BR = None
        if recipe.lag:
            weights_BR = (old_BR - rollout_BR).exp().clip(max=2.0) * counted
        micros = self._update(
            step, trained_ids, held, width, counted, old_BR, ref_BR, advantage_BR, weights_BR, values_BR, returns_BR
        )
        if fault == "old-of-next":
            with torch.no_grad():
                old_BR, _ = self._scored(trained_ids, held, width, update=False)
            for micro in micros:
                micro.tensors["old"] = old_BR[micro.rows]
        heard = counted != 0
        d = (old_BR - rollout_BR)[heard]
        lengths = written.response_BR.sum(1).float()
        last = micros[-1].numbers
        stds = torch.stack([reward_B[group_B == group].std() for group in group_B.unique()])
        groups_named = group_B + step * recipe.prompts
        if fault == "mixed-groups":
            groups_named = torch.arange(len(prompts)) % recipe.prompts
        elif fault == "lone-groups":
            groups_named = torch.arange(len(prompts))
        mean = {
            name: sum(micro.numbers[name] for micro in micros) / len(micros)
            for name in ("entropy", "kl", "clip_fraction", "ratio_max")
        }
        metrics = {
            "reward": float(reward_B.mean()), "reward_std": float(stds.mean()), "reward_max": float(reward_B.max()),
            "reward_min": float(reward_B.min()), "frac_zero_std": float((stds < 1e-6).float().mean()),
            "accuracy": judged["accuracy"], "format": judged["format"],
            "length": float(lengths.mean()), "length_max": float(lengths.max()),
            "truncated": float((~written.ended_B).float().mean()), **mean,
            "loss": sum(micro.numbers["loss"] for micro in micros) / len(micros),
            "pg_loss": sum(micro.numbers["pg_loss"] for micro in micros) / len(micros),
            "grad_norm": last["grad_norm"], "lr": last["lr"], "mean_abs_d": float(d.abs().mean()) if d.numel() else 0.0,
            "k3": float((d.exp() - d - 1).mean()) if d.numel() else 0.0,
            "prob_diff": float((old_BR.exp() - rollout_BR.exp())[heard].abs().mean()) if d.numel() else 0.0,
            "advantage_max": float(advantage_BR[heard].max()) if d.numel() else 0.0,
            "advantage_min": float(advantage_BR[heard].min()) if d.numel() else 0.0,
        }  # fmt: skip
        if self.critic is not None:
            metrics["value_loss"] = sum(micro.numbers["value_loss"] for micro in micros) / len(micros)
            assert returns_BR is not None
            assert values_BR is not None
            off, spread = (returns_BR - values_BR)[heard].var(), returns_BR[heard].var()
            metrics["explained_variance"] = float(1 - off / (spread + 1e-9))
        fields = {
            "trained_ids": trained_ids, "held": held, "mask": mask_BR, "rollout": rollout_BR, "old": old_BR,
            "ref": ref_BR if (recipe.kl or recipe.algorithm != "drgrpo") else None, "advantages": advantage_BR,
            "returns": returns_BR, "values": values_BR, "reward": reward_B, "reward_tokens": reward_BR,
            "shaped_tokens": shaped_BR if self.critic is not None else reward_BR,
            "groups": groups_named, "samples": torch.arange(len(prompts)) + step * len(prompts),
            "truncated": ~written.ended_B, "weights": weights_BR, "ids": ids,
            "version": torch.full((len(prompts),), version), "width": width, "temperature": recipe.temperature,
        }  # fmt: skip
        return StepKept(step, written, fields, micros, metrics)

    def _token_loss(self, logprobs: Tensor, old: Tensor, advantage: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        recipe = self.recipe
        ratio = (old - logprobs if self.fault == "ratio-inverted" else logprobs - old).exp()
        if recipe.algorithm == "gspo":
            mean = ((logprobs - old) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clip(1)
            ratio = (logprobs - logprobs.detach() + mean.detach()).exp()
        low, high = 1 - recipe.clip_low, 1 + recipe.clip_high
        if recipe.algorithm == "cispo":
            loss = -ratio.clamp(low, high).detach() * advantage * logprobs
        else:
            larger = torch.minimum if self.fault == "smaller-loss" else torch.maximum
            clipped = ratio if self.fault == "not-clipped" else ratio.clamp(low, high)
            loss = larger(-advantage * ratio, -advantage * clipped)
        if self.fault == "loss-turned":
            loss = -loss
        return loss, ratio

    def _reduced(self, values: Tensor, mask: Tensor, tokens: int, samples: int) -> Tensor:
        """The micro-batch's share of the update's loss."""
        recipe, total = self.recipe, (values * mask).sum()
        if self.fault == "divides-by-slots":
            return total / values.numel()
        if self.fault == "summed-over-samples":
            return ((values * mask).sum(1) / mask.sum(1).clip(1)).sum()
        if recipe.algorithm == "drgrpo":
            out = total / (samples * recipe.limit)
        elif recipe.reduction == "sequence":
            out = ((values * mask).sum(1) / mask.sum(1).clip(1)).sum() / samples
        elif recipe.reduction == "micro-token":
            out = total / mask.sum().clip(1)
        else:
            out = total / max(tokens, 1)
        if self.fault == "times-world-size":
            out = out * 8
        elif self.fault == "accumulation-twice":
            out = out / recipe.micros
        elif self.fault == "accumulation-forgotten":
            out = out * recipe.micros
        return out

    def _rate(self, step: int) -> float:
        if self.fault == "rate-zero":
            return 0.0
        if self.fault == "warmup-too-long":
            return self.recipe.lr * (step + 1) / 2e6
        return self.recipe.lr * min(1.0, (step + 1) / max(self.recipe.warmup, 1))

    def _update(
        self, step: int, ids: Tensor, held: Tensor, width: int, mask: Tensor, old: Tensor, ref: Tensor,
        advantage: Tensor, weights: Tensor | None, values: Tensor | None, returns: Tensor | None,
    ) -> list[Micro]:  # fmt: skip
        recipe, fault, micros = self.recipe, self.fault, []
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(step)
        for epoch in range(recipe.epochs):
            order = torch.randperm(len(ids), generator=self.shuffle)
            for number, rows_mini in enumerate(order.chunk(recipe.minibatches)):
                self.optimizer.zero_grad()
                for weight in self.trained:
                    weight.grad = None
                tokens, made = int(mask[rows_mini].sum()), []
                for rows in rows_mini.chunk(recipe.micros):
                    logprobs, entropy = self._scored(ids[rows], held[rows], width, update=True)
                    token_loss, ratio = self._token_loss(logprobs, old[rows], advantage[rows], mask[rows])
                    if weights is not None:
                        token_loss = token_loss * weights[rows]
                    apart = ref[rows] - logprobs
                    if fault == "kl-turned":
                        apart = -apart
                    kl = apart.exp() - apart - 1 if fault != "kl-k1-turned" else apart
                    pg = self._reduced(token_loss, mask[rows], tokens, len(rows_mini))
                    kl_loss = (kl * mask[rows]).sum() / max(tokens, 1)
                    loss = pg + (-recipe.kl if fault == "kl-subtracted" else recipe.kl) * kl_loss
                    if recipe.entropy or fault == "entropy-bonus":
                        bonus = 0.25 if fault == "entropy-bonus" else recipe.entropy
                        loss = loss - bonus * (entropy * mask[rows]).sum() / max(tokens, 1)
                    if fault == "detached":
                        loss = loss.detach().requires_grad_()
                    scale = 65536.0 if fault == "never-unscaled" else 1.0
                    (loss * scale).backward()
                    here = mask[rows] != 0
                    clipped = ((ratio > 1 + recipe.clip_high) & (advantage[rows] > 0)) | (
                        (ratio < 1 - recipe.clip_low) & (advantage[rows] < 0)
                    )
                    numbers = {
                        "loss": float(loss.detach()), "pg_loss": float(pg.detach()), "kl_loss": float(kl_loss.detach()),
                        "kl": float(kl.detach()[here].mean()) if here.any() else 0.0,
                        "entropy": float(entropy.detach()[here].mean()) if here.any() else 0.0,
                        "clip_fraction": float(clipped[here].float().mean()) if here.any() else 0.0,
                        "ratio_max": float(ratio.detach()[here].max()) if here.any() else 1.0, "tokens": float(tokens),
                    }  # fmt: skip
                    tensors = {
                        "logprobs": logprobs.detach(), "entropy": entropy.detach(), "ratio": ratio.detach(),
                        "token_loss": token_loss.detach(), "kl": kl.detach() * mask[rows], "old": old[rows],
                        "ref": ref[rows], "advantages": advantage[rows], "mask": mask[rows],
                    }  # fmt: skip
                    if self.critic is not None and returns is not None:
                        now = self.critic(ids[rows], held[rows])[..., 0][:, width - 1 : -1]
                        error = 0.5 * ((now - returns[rows]) ** 2 * mask[rows]).sum() / max(tokens, 1)
                        numbers["value_loss"] = float(error.detach())
                        error.backward()
                    made.append(Micro(epoch, number, rows, tensors, numbers))
                norm = self._apply(step)
                for micro in made:
                    micro.numbers |= {"grad_norm": norm, "lr": self._rate(step)}
                micros += made
        return micros

    def _apply(self, step: int) -> float:
        fault = self.fault
        grads = [weight.grad for weight in self.trained if weight.grad is not None]
        if fault == "gradient-nan" and step >= 3:
            for grad in grads:
                grad += torch.nan
        largest = 1e9 if fault in ("rate-too-high", "never-clipped") else 1.0
        norm = torch.nn.utils.clip_grad_norm_(self.trained, largest) if grads else torch.tensor(0.0)
        if fault == "norm-after-clipping":
            for grad in grads:
                grad *= 2.0**0.5 / torch.sqrt(sum((each**2).sum() for each in grads))  # type: ignore[arg-type]
            norm = torch.sqrt(sum((each**2).sum() for each in grads))  # type: ignore[arg-type]
        if torch.isfinite(norm):
            self.optimizer.step()
        if self.critic is not None:
            if fault != "critic-frozen":
                self.critic_optimizer.step()
            self.critic_optimizer.zero_grad()
        if fault == "weights-break" and step == self.recipe.steps // 2:
            for weight in self.policy.parameters():
                weight.data += 0.5 * torch.randn(weight.shape, generator=self.draw)
        return float(norm)


def train(recipe: Recipe) -> Trained:
    """Run the recipe. Steps are numbered from 1; the first `kept` are recorded whole."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        trainer, out = Trainer(recipe), Trained(recipe)
        for step in range(recipe.steps):
            done = trainer.step(step)
            out.metrics.append(done.metrics)
            if step < recipe.kept:
                out.kept.append(done)
        return out
