"""A policy that fits on a page, really sampled and really trained: the next token depends on the last one alone.

lm = Bigram(seed=1)
rollout = lm.rollout(prompts, each=4)
rollout.logprobs(lm), lm.learn(rollout, advantages_B, lr=2.0)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

EOS, PAD = 2, 0


@dataclass
class Rollout:
    """Samples of padded prompts and responses: ids [B, S], masks [B, S] and, of tokens 1 to S - 1, [B, T]."""

    ids_BS: Any
    attention_BS: Any
    response_BT: Any
    group_B: Any
    sampled_BT: Any
    """What the sampler gave each token, renormalised over what it may draw."""

    def logprobs(self, lm: Bigram, temperature: float = 1.0) -> Any:
        """log p of every token behind the first [B, T], 0 where no response is."""
        log_BTV = lm.log_table(temperature)[self.ids_BS[:, :-1]]
        taken_BT = np.take_along_axis(log_BTV, self.ids_BS[:, 1:, None], axis=2)[..., 0]
        return taken_BT * self.response_BT

    def tensors(self, **more: Any) -> dict[str, Any]:
        """What a trainer records of it."""
        named = {
            "input_ids": self.ids_BS,
            "attention_mask": self.attention_BS,
            "response_mask": self.response_BT.astype(np.int64),
            "group_id": self.group_B,
        }
        return {
            name: torch.from_numpy(np.ascontiguousarray(value)) if isinstance(value, np.ndarray) else value
            for name, value in (named | more).items()
        }

    def only(self, rows: Any) -> Rollout:
        return Rollout(*(each[rows] for each in (
            self.ids_BS, self.attention_BS, self.response_BT, self.group_B, self.sampled_BT)))  # fmt: skip

    def on_tokens(self, each_B: Any) -> Any:
        """One number per sample, on its response's tokens [B, T]."""
        return (np.asarray(each_B)[:, None] * self.response_BT).astype(np.float32)


class Bigram:
    """`table_VV`: logits of the next token, by the last."""

    def __init__(self, seed: int = 0, vocab: int = 14, spread: float = 1.2) -> None:
        self.draw = np.random.default_rng(seed)
        self.table_VV = self.draw.normal(0, spread, (vocab, vocab))
        self.table_VV[:, PAD] = -30.0

    def log_table(self, temperature: float = 1.0) -> Any:
        logits_VV = self.table_VV / temperature
        return logits_VV - np.log(np.exp(logits_VV).sum(1, keepdims=True))

    def rollout(
        self, prompts: list[list[int]], each: int = 4, limit: int = 9, temperature: float = 1.0, top_p: float = 1.0,
        top_k: int = 0, min_p: float = 0.0,
    ) -> Rollout:  # fmt: skip
        """`each` responses to each prompt, left-padded prompts and right-padded responses."""
        logs_VV = self.log_table(temperature)
        kept_VV = _kept(np.exp(logs_VV), top_p, top_k, min_p)
        logs_VV = np.where(kept_VV, logs_VV, -np.inf)
        logs_VV = logs_VV - np.log(np.exp(logs_VV).sum(1, keepdims=True))
        width = max(map(len, prompts))
        ids, attention, response, group, sampled = [], [], [], [], []
        for number, prompt in enumerate(prompts):
            for _ in range(each):
                row, logs = list(prompt), list[float]()
                while len(logs) < limit and (not logs or row[-1] != EOS):
                    token = int(self.draw.choice(len(logs_VV), p=np.exp(logs_VV[row[-1]])))
                    logs.append(logs_VV[row[-1], token])
                    row.append(token)
                left, right = width - len(prompt), limit - len(logs)
                ids.append([PAD] * left + row + [PAD] * right)
                attention.append([0] * left + [1] * len(row) + [0] * right)
                response.append([0] * (width - 1) + [1] * len(logs) + [0] * right)
                sampled.append([0.0] * (width - 1) + logs + [0.0] * right)
                group.append(number)
        return Rollout(
            np.array(ids), np.array(attention), np.array(response, dtype=np.float32), np.array(group),
            np.array(sampled, dtype=np.float32),
        )  # fmt: skip

    def learn(self, rollout: Rollout, weights_BT: Any, lr: float) -> None:
        """One step up the gradient of sum(weights * log p) / tokens."""
        grad_VV, probabilities_VV = np.zeros_like(self.table_VV), np.exp(self.log_table())
        for row, weights, mask in zip(rollout.ids_BS, weights_BT, rollout.response_BT, strict=True):
            for at in np.flatnonzero(mask):
                last, token = row[at], row[at + 1]
                grad_VV[last] -= weights[at] * probabilities_VV[last]
                grad_VV[last, token] += weights[at]
        self.table_VV += lr * grad_VV / max(rollout.response_BT.sum(), 1)


def _kept(p_VV: Any, top_p: float, top_k: int, min_p: float) -> Any:
    order_VV = np.argsort(-p_VV, axis=1)
    sorted_VV = np.take_along_axis(p_VV, order_VV, 1)
    keep_VV = np.cumsum(sorted_VV, axis=1) - sorted_VV < top_p
    if top_k:
        keep_VV[:, top_k:] = False
    keep_VV &= sorted_VV >= min_p * sorted_VV[:, :1]
    kept_VV = np.zeros_like(keep_VV)
    np.put_along_axis(kept_VV, order_VV, keep_VV, 1)
    return kept_VV
