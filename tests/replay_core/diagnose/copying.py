"""A trainer of its own: a table of next tokens that learns to copy, really trained, recorded as the recorder's page
says, what is about a whole step beside the samples; one line of it wrong where a test says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from replay_core.recorder import Recorder

Array = Any
PAD, END, DIGITS, VOCABULARY = 0, 1, 4, 8


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def gae(rewards: Array, values: Array, mask: Array, gamma: float, lam: float, end: float = 0.0) -> Array:
    """Advantages by the textbook's loop, row by row. end: the share of the last value that stands after the end."""
    out = np.zeros(rewards.shape)
    for row, counts in enumerate(mask):
        (at,) = np.nonzero(counts)
        coming, after = 0.0, end * values[row, at[-1]]
        for t in at[::-1]:
            coming = rewards[row, t] + gamma * after - values[row, t] + gamma * lam * coming
            after = values[row, t]
            out[row, t] = coming
    return out


def gradient(table: Array, before: Array, after: Array, a: Array) -> Array:
    """Of the table, by the log-probabilities of these tokens, each times what it is worth."""
    push = -softmax(table[before]) * a[..., None]
    np.put_along_axis(push, after[..., None], np.take_along_axis(push, after[..., None], -1) + a[..., None], -1)
    out = np.zeros_like(table)
    np.add.at(out, before.reshape(-1), push.reshape(-1, VOCABULARY))
    return out


def tensors(fields: dict[str, Array]) -> dict[str, torch.Tensor]:
    return {
        name: torch.from_numpy(np.ascontiguousarray(value, np.int64 if value.dtype.kind == "i" else np.float32))
        for name, value in fields.items()
    }


def run(
    folder: Path, fault: str = "", *, steps: int = 6, critic: bool = False, lr: float = 0.5,
    stated: dict[str, Any] | None = None,
    kind: str = "grpo", log: dict[str, str] | None = None, size: int = 8, baseline: str = "group",
) -> Path:  # fmt: skip
    """Train and record. `log`: what the metrics are called, by what they are."""
    rng = np.random.default_rng(3)
    table, base = rng.normal(0, 0.5, (VOCABULARY, VOCABULARY)), None
    table[:, PAD] = -9
    base = table.copy()
    head = rng.normal(0, 0.3, VOCABULARY)
    prompts = [[4, 5], [6, 4, 7], [5, 7, 6], [7, 5, 4], [6, 5]]
    facts = {"gamma": 1.0, "lam": 0.95, "lr": lr, **(stated or {})}
    recorder = Recorder(folder, flags={"dtype": "float32", "temperature": 1.0, "loss": {"kind": kind}})
    recorder.note(config=facts)
    moving = 0.0
    for step in range(steps):
        chosen = [prompts[(step + k) % 5] for k in range(3)] if fault != "same-prompts" else prompts[:3]
        asked = 1 if fault == "data-ends" and step >= steps // 2 else 3
        P, R = 4, 5
        B = asked * size
        ids, held, mask = (np.zeros((B, P + R), dtype=np.int64) for _ in range(3))
        for row in range(B):
            prompt = [2, *chosen[row // size]]
            ids[row, P - len(prompt) : P], held[row, P - len(prompt) : P] = prompt, 1
            for t in range(P, P + R):
                ids[row, t] = rng.choice(VOCABULARY, p=softmax(table[ids[row, t - 1]]))
                held[row, t] = mask[row, t] = 1
                if ids[row, t] == END:
                    break
        groups = np.repeat(np.arange(asked), size)
        rewards = np.array([
            float(np.mean([a == b for a, b in zip(ids[row, P:], chosen[row // size], strict=False)]))
            for row in range(B)
        ])  # fmt: skip
        if fault == "rewards-of-others":
            rewards = rng.permutation(rewards)
        before, after = ids[:, :-1], ids[:, 1:]

        def logprobs(weights: Array, before: Array = before, after: Array = after) -> Array:
            return np.take_along_axis(np.log(softmax(weights[before])), after[..., None], -1)[..., 0]

        behind = {"reference-follows": table, "reference-tempered": base / 0.5}.get(fault, base)
        old, ref = logprobs(table), logprobs(behind)
        m = mask[:, 1:].astype(float)
        fields: dict[str, Array] = {}
        if critic:
            values = head[before] * (0 if fault == "critic-zero" else 1)
            token_rewards = np.zeros(m.shape)
            last = m.shape[1] - 1 - m[:, ::-1].argmax(1)
            token_rewards[np.arange(B), m.shape[1] - 1 if fault == "reward-at-pad" else last] = rewards
            gamma, lam = (0.95, 1.0) if fault == "gamma-lambda" else (1.0, 0.95)
            # Behind an answer's end its row goes on.
            over = np.maximum.accumulate(m, 1) if fault == "gae-over-padding" else m
            a = gae(token_rewards, values, over, gamma, lam, float(fault == "bootstrapped")) * m
            returns = (a + values) * m
            if fault == "targets-late":
                returns = np.roll(returns, 1, 1)
            fields = {"values": values, "returns": returns, "token_level_rewards": token_rewards}
        else:
            each = rewards.reshape(asked, size)
            if baseline == "centred":
                per = (each - each.mean(1, keepdims=True)).reshape(-1)
            elif fault == "raw" or baseline == "none":
                per = rewards
            elif baseline == "moving":
                per = rewards - moving
                moving = 0.8 * moving + 0.2 * float(rewards.mean())
            else:
                per = ((each - each.mean(1, keepdims=True)) / (each.std(1, ddof=1, keepdims=True) + 1e-6)).reshape(-1)
            a = per[:, None] * m
            if baseline == "to-come":
                token_rewards = -0.05 * (old - ref) * m
                token_rewards[np.arange(B), m.shape[1] - 1 - m[:, ::-1].argmax(1)] += rewards
                a = np.cumsum(token_rewards[:, ::-1], 1)[:, ::-1] * m
                held_N = a[:, P - 1 :].reshape(-1) if fault == "whitened-over-padding" else a[m > 0]
                a = (a - held_N.mean()) / held_N.std() * m
        counted = held[:, 1:].astype(float) if fault == "prompts-trained" else m
        if fault == "prompts-trained":
            a = a.max(1, keepdims=True) * counted
        sign = -1.0 if fault == "sign" else 1.0
        total = float((-a * counted).sum())
        pg = sign * total / {
            "slots": B * (P + R - 1), "ranks": counted.sum() / 8, "slots-of-the-limit": B * R, "constant": B * 12,
            "constant-right": B * R,
        }.get(fault, counted.sum())  # fmt: skip
        now = old
        if fault == "dropout":
            kept = rng.random((*before.shape, VOCABULARY)) > 0.2
            now = np.take_along_axis(np.log(softmax(table[before] * kept / 0.8)), after[..., None], -1)[..., 0]
        if fault == "old-late":
            old = logprobs(table + lr * gradient(table, before, after, a * m) / m.sum())
        for rank in (0, 1) if fault == "ranks-alike" else (0,):
            with recorder.step(step, rank=rank) as record:
                batch = {
                    "input_ids": ids,
                    "attention_mask": held,
                    "response_mask": mask,
                    "rewards": rewards,
                    "group_id": groups,
                }
                if baseline == "to-come":
                    batch |= {"token_level_rewards": token_rewards, "advantages": a}
                if fault == "fewer-experts":
                    routed = np.stack([ids % 4, (ids + 1) % 4], -1)[:, :, None, :]
                    batch |= {"routed_experts": np.repeat(routed, 2, 2)}
                about = {"rollout_log_probs": "next", "token_level_rewards": "next", "advantages": "next"}
                sampled = {**batch, "rollout_log_probs": now if fault == "old-late" else old}
                record("trajectory", tensors(sampled), alignment={k: v for k, v in about.items() if k in sampled})
                micro = {"old_log_probs": old, "log_probs": now, "ref_log_probs": ref, "advantages": a}
                next_to = dict.fromkeys([*micro, *fields, "loss_mask"], "next")
                beside = {name: micro[name] for name in ("old_log_probs", "ref_log_probs")}
                record("old_log_probs", tensors(beside), alignment=dict.fromkeys(beside, "next"))
                if fields:
                    record("values", tensors(fields), role="critic", alignment=dict.fromkeys(fields, "next"))
                micro |= {"input_ids": ids, "attention_mask": held, "loss_mask": counted.astype(np.int64)}
                if fault == "fewer-experts":
                    micro["routed_experts"] = batch["routed_experts"][..., :1]
                record(
                    "forward_data", tensors(micro), micro=0, alignment={k: v for k, v in next_to.items() if k in micro}
                )
                record("loss", pg_loss=torch.tensor(pg), micro=0)
                record("param", tensors({"param.table": table, "param.other": base}))
                metrics = {
                    "reward": rewards.mean() * (8 if fault == "reward-summed" else 1), "reward_max": rewards.max(),
                    "pg": pg, "advantage": (a * counted).sum() / counted.sum(),
                    "kl": float(((old - ref) * m).sum() / m.sum()),
                    "value": float((fields["values"] * m).sum() / m.sum()) if fields else 0.0, "lr": lr,
                }  # fmt: skip
                record("training_metrics", {name: float(metrics[what]) for what, name in (log or {}).items()})
        if fault not in ("policy-stands",):
            table += sign * lr * gradient(table, before, after, a * m) / m.sum()
        if critic and fault != "critic-stands":
            for _ in range(20):
                off = (fields["returns"] - head[before]) * m
                np.add.at(head, before.reshape(-1), 0.02 * off.reshape(-1))
    recorder.close()
    return folder
