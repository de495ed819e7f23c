"""From scores to a loss, each step of it made here as trainers make it, with one step made otherwise: which is named.

Nothing of the rules is used: batches are made of numbers, advantages and losses of loops over their tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_core.diagnose.case import Case
from replay_core.diagnose.engine import diagnose
from replay_core.diagnose.finding import Finding
from replay_core.dumps import open_run
from replay_core.recorder import Recorder

PROMPT, WIDTH = 5, 12
COMMON = {"temperature": 1.0, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2}


class Made:
    """A run of a few steps of 24 samples in groups of 4 on 2 ranks; `wrong` is the one thing that is made otherwise."""

    def __init__(self, algorithm: str, wrong: str = "", *, seed: int = 0, dtype: str = "float32", **settings: Any):
        self.rng, self.algorithm, self.wrong = np.random.default_rng(seed), algorithm, wrong
        self.dtype = getattr(torch, dtype)
        self.size, self.gamma, self.lam, self.ranks = 4, 1.0, 0.95, 2
        self.beta, self.eps, self.unbiased, self.updates, self.mean = 0.05, 1e-6, True, 1, "token-mean"
        self.kl_type, self.cap, self.clip, self.rewards_of = "low_var_kl", 0.0, (0.2, 0.2), "real"
        self.told: dict[str, Any] = {}
        self.kl_times, self.equal, self.shared = 1.0, False, False
        self.untold: tuple[str, ...] = ()
        self.__dict__.update(settings)

    def flags(self) -> dict[str, Any]:
        names = {"ppo": "gae", "rpp": "reinforce_plus_plus", "rppb": "reinforce_plus_plus_baseline", "cispo": "grpo",
                 "gspo": "grpo", "drgrpo": "grpo", "tis": "grpo"}  # fmt: skip
        told: dict[str, Any] = {
            "adv_estimator": names.get(self.algorithm, self.algorithm), "algorithm": self.algorithm,
            "loss_agg_mode": self.mean, "clip_ratio_low": self.clip[0], "clip_ratio_high": self.clip[1],
            "rollout_n": self.size,
        }  # fmt: skip
        if self.algorithm in ("ppo", "rpp"):
            told |= {"gamma": self.gamma, "lam": self.lam, "use_kl_in_reward": True, "kl_coef": self.beta,
                     "kl_penalty": "kl", "rollout_n": 1}  # fmt: skip
        if self.algorithm == "cispo":
            told["policy_loss"] = "cispo"
        if self.algorithm == "gspo":
            told |= {"policy_loss": "gspo", "importance_sampling_level": "sequence"}
        if self.algorithm == "drgrpo":
            told |= {"norm_adv_by_std_in_grpo": False, "loss_agg_mode": "seq-mean-token-sum-norm",
                     "loss_scale_factor": WIDTH}  # fmt: skip
        if self.algorithm == "tis":
            told["tis_imp_ratio_cap"] = 2.0
        if self.algorithm in ("grpo", "cispo", "tis"):
            told["norm_adv_by_std_in_grpo"] = True
        if self.algorithm == "grpo":
            told |= {"use_kl_loss": True, "kl_loss_coef": self.beta, "kl_loss_type": self.kl_type}
        return {name: value for name, value in (told | self.told).items() if name not in self.untold}

    def write(self, path: Path, steps: int = 3, *, stated: bool = True) -> Path:
        with Recorder(path, flags=self.flags() if stated else {}) as recorder:
            for step in range(steps):
                self._step(recorder, step)
        return path

    def _step(self, recorder: Recorder, step: int) -> None:
        rng, total = self.rng, 24
        length = np.full(total, WIDTH) if self.equal else rng.integers(4, WIDTH + 1, total)
        mask = (np.arange(WIDTH) < length[:, None]).astype(float)
        group = np.arange(total) // self.size
        if self.algorithm in ("ppo", "rpp"):
            group = np.arange(total)
        prompts = rng.integers(10, 90, (int(group.max()) + 1, PROMPT))[group]
        ids = np.concatenate([prompts, np.where(mask > 0, rng.integers(10, 90, (total, WIDTH)), 0)], 1)
        old = -rng.exponential(0.8, (total, WIDTH)) - 0.01
        rollout = old + rng.normal(0, 0.3 if self.algorithm == "tis" else 1e-3, old.shape)
        rollout = np.minimum(rollout, -1e-3)
        ref = old + rng.normal(0, 0.2, old.shape) * (step > 0)
        new = old + rng.normal(0, 0.25, old.shape)
        score = rng.random(total) if self.rewards_of == "real" else rng.integers(0, 2, total).astype(float)
        raw = score
        if self.wrong == "capped":
            score = np.minimum(raw, 0.2)
        if self.wrong == "all 0":
            score = 0 * raw
        if self.wrong == "squashed":
            raw = np.exp(rng.normal(1.5, 2.0, total))
            raw[0] = 1e6
            score = raw / (raw + 20)
        scores = np.zeros((total, WIDTH))
        scores[np.arange(total), length - 1] = score
        beta = self.beta * {"beta": 10, "no beta": 1e-5}.get(self.wrong, 1)
        penalty = np.abs(old - ref) if self.wrong == "abs in rewards" else old - ref
        rewards = scores - beta * penalty * mask if self.algorithm in ("ppo", "rpp") else scores
        values = returns = None
        if self.algorithm == "ppo":
            values = rng.normal(0.4, 0.2, (total, WIDTH)) * mask
            read = np.roll(values, 1, 0) if self.wrong == "values of other rows" else values
            advantages = np.zeros((total, WIDTH))
            for row in range(total):
                run = 0.0
                for t in reversed(range(length[row])):
                    after = read[row, t + 1] if t + 1 < length[row] else 0.0
                    run = rewards[row, t] + self.gamma * after - read[row, t] + self.gamma * self.lam * run
                    advantages[row, t] = run
            returns = (advantages + values) * mask
            advantages = self._whitened(advantages, mask)
        elif self.algorithm == "rpp":
            gamma = 0.9 if self.wrong == "gamma" else self.gamma
            advantages = np.zeros((total, WIDTH))
            for row in range(total):
                run = 0.0
                for t in reversed(range(length[row])):
                    run = rewards[row, t] + gamma * run
                    advantages[row, t] = run
            advantages = self._whitened(advantages, mask)
        else:
            each = self._of_groups(score, group)
            advantages = each[:, None] * mask
            if self.algorithm == "rppb":
                advantages = self._whitened(advantages, mask)
        if self.wrong == "one rank is 0":
            advantages[total // 2 :] = 0
        if self.wrong == "one rank is half":
            advantages[total // 2 :] *= 0.5
        if self.wrong == "negative halved":
            advantages = np.where(advantages < 0, 0.5 * advantages, advantages)
        if self.wrong == "bound":
            advantages = np.clip(advantages, -0.6, 0.6)
        weights = np.minimum(np.exp(old - rollout), 2.0) * mask if self.algorithm == "tis" else None
        logs = new - old
        if self.algorithm == "gspo" and self.wrong != "ratio of tokens":
            logs = ((logs * mask).sum(1) / length)[:, None] * np.ones(WIDTH)
        ratio = np.exp(logs)
        low, high = (0.6, 0.6) if self.wrong == "wide" else self.clip
        if self.algorithm == "cispo" and self.wrong != "ppo for cispo":
            loss = -np.clip(ratio, 1 - low, 1 + high) * advantages * new
        else:
            loss = np.maximum(-advantages * ratio, -advantages * np.clip(ratio, 1 - low, 1 + high))
        if self.wrong == "weight alone":
            loss = -np.minimum(ratio, 1 + high) * advantages
        if self.wrong == "unclipped":
            loss = -advantages * ratio
        if self.wrong == "no ratio":
            loss = -advantages * new
        if weights is not None:
            loss = loss * {"weights unused": 1.0, "weights twice": weights**2}.get(self.wrong, weights)
        k = new - ref
        kl = {"k2": 0.5 * k * k, "abs": np.abs(k), "low_var_kl": np.exp(-k) + k - 1}[
            "abs" if self.wrong == "abs" else self.kl_type
        ]
        kl = kl * mask

        def mean(some: np.ndarray, rows: slice) -> float:
            inside = (some * mask)[rows]
            if self.algorithm == "drgrpo" and self.wrong != "mean for constant":
                return float(inside.sum() / (len(inside) * WIDTH))
            if self.shared:
                return float(inside.sum() * self.ranks / mask.sum())
            return float(inside.sum() / mask[rows].sum())

        def padded(some: np.ndarray) -> torch.Tensor:
            return torch.tensor(np.concatenate([np.zeros((len(some), PROMPT - 1)), some], 1)).to(self.dtype)

        part = total // self.ranks
        with_kl = self.algorithm == "grpo"
        for rank in range(self.ranks):
            rows = slice(rank * part, (rank + 1) * part)
            tokens = torch.tensor(ids[rows])
            attention = torch.tensor(np.concatenate([np.ones((part, PROMPT)), mask[rows]], 1)).long()
            response = torch.tensor(np.concatenate([np.zeros((part, PROMPT)), mask[rows]], 1)).long()
            with recorder.step(step, rank=rank) as record:
                fields: dict[str, Any] = {
                    "rewards": torch.tensor(score[rows]).float(), "uid": [f"s{step}g{one}" for one in group[rows]],
                    "rollout_log_probs": padded((rollout * mask)[rows]).float(), "advantages": padded(advantages[rows]),
                    "old_log_probs": padded((old * mask)[rows]).float(),
                }  # fmt: skip
                if self.algorithm in ("ppo", "rpp"):
                    fields |= {"token_level_scores": padded(scores[rows]).float(),
                               "token_level_rewards": padded(rewards[rows]).float()}  # fmt: skip
                if self.algorithm in ("ppo", "rpp", "grpo"):
                    fields["ref_log_prob"] = padded((ref * mask)[rows]).float()
                if self.wrong in ("capped", "capped, stated", "all 0", "squashed"):
                    fields["raw_rewards"] = torch.tensor(raw[rows]).float()
                record("trajectory", input_ids=tokens, attention_mask=attention, response_mask=response, **fields)
                if values is not None and returns is not None:
                    record("values", role="critic", values=padded(values[rows]), returns=padded(returns[rows]))
                half = part // 2
                for micro in range(2):
                    at = slice(rank * part + micro * half, rank * part + (micro + 1) * half)
                    here = slice(micro * half, (micro + 1) * half)
                    record(
                        "forward_data", input_ids=tokens[here], attention_mask=attention[here],
                        response_mask=response[here], log_probs=padded((new * mask)[at]).float(),
                        advantages=padded(advantages[at]), old_log_probs=padded((old * mask)[at]).float(), micro=micro,
                        epoch=1,
                    )  # fmt: skip
                    terms: dict[str, Any] = {
                        "prob_ratio": padded((ratio * mask)[at]).float(),
                        "elementwise_loss": padded((loss * mask)[at]).float(), "pg_loss": torch.tensor(mean(loss, at)),
                    }  # fmt: skip
                    if weights is not None:
                        terms["rollout_is_weights"] = padded(weights[at]).float()
                    if with_kl:
                        slots = (kl * mask)[at].sum() / (half * WIDTH)
                        of_kl = float(slots) if self.wrong == "padded kl" else self.kl_times * mean(kl, at)
                        terms |= {"kl": padded(kl[at]).float(), "kl_loss": torch.tensor(of_kl)}
                    record("loss", terms, micro=micro, epoch=1)
                    if values is not None and returns is not None:
                        said = values + rng.normal(0, 0.02, values.shape)
                        squares = 0.5 * (said - returns)[at] ** 2
                        critic = float(squares.mean() if self.wrong == "padded critic" else
                                       (squares * mask[at]).sum() / mask[at].sum())  # fmt: skip
                        record("loss", {"values": padded(said[at]).float(), "loss": torch.tensor(critic)}, micro=micro,
                               epoch=1, role="critic")  # fmt: skip

    def _of_groups(self, score: np.ndarray, group: np.ndarray) -> np.ndarray:
        made = np.zeros(len(score))
        for one in np.unique(group):
            r = score[group == one]
            centred = r - r.mean()
            if self.algorithm == "rloo":
                centred = centred * len(r) / (len(r) - 1)
            over = self.algorithm in ("grpo", "cispo", "tis", "gspo") or self.wrong == "over std"
            spread = r.std(ddof=int(self.unbiased)) + self.eps
            made[group == one] = centred / spread if over else centred
        return made

    def _whitened(self, some: np.ndarray, mask: np.ndarray) -> np.ndarray:
        if self.wrong == "raw":
            return some
        out = np.zeros(some.shape)
        parts = [slice(row, row + 1) for row in range(len(some))] if self.wrong == "by response" else (
            [slice(0, 12), slice(12, 24)] if self.wrong == "by rank" else [slice(0, len(some))])  # fmt: skip
        for part in parts:
            inside = mask[part] > 0
            x = some[part][inside]
            out[part][inside] = (x - x.mean()) / (x.std(ddof=int(self.unbiased)) + 1e-8)
        return out


#: What recomputes a step.
RULES = ("D04", "D28", "D29", "D44", "D49", "D50", "D51", "D52", "D59", "D61", "D62", "D91", "D107", "D108")


def found(path: Path) -> list[Finding]:
    return [one for one in diagnose(Case(open_run(path)), RULES).findings if one.severity != "info"]


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("algorithm", "wrong", "id", "words"),
    [
        ("rpp", "gamma", "D107", "returns are discounted with gamma 0.9, and the run states 1"),
        ("rpp", "raw", "D107", "not whitened over the batch, and the run states REINFORCE++"),
        ("rpp", "by response", "D107", "whitened response by response"),
        ("rpp", "by rank", "D107", "whitened rank by rank"),
        ("rpp", "negative halved", "D107", "negative advantages are 0.5 times"),
        ("rpp", "beta", "D51", "weighs 0.5, and the run states 0.05, 10 times as much"),
        ("rpp", "abs in rewards", "D51", "is |log r|, and the run states k1"),
        ("ppo", "raw", "D107", "not whitened over the batch, and the run states GAE"),
        ("ppo", "by response", "D107", "whitened response by response"),
        ("ppo", "values of other rows", "D44", "GAE takes the values of other rows: those of the row before"),
        ("ppo", "padded critic", "D62", "padding"),
        ("rppb", "raw", "D04", "not whitened over the batch, and the run states reinforce++ with a baseline"),
        ("rloo", "over std", "D04", "normalised by the group's std, and the run states RLOO"),
        ("grpo", "negative halved", "D04", "negative advantages are 0.5 times"),
        ("grpo", "one rank is 0", "D04", "advantages of rank 1 are 0"),
        ("grpo", "one rank is half", "D04", "advantages of rank 1 are 0.5 times"),
        ("grpo", "bound", "D04", "cut off at -0.6 and 0.6"),
        ("grpo", "abs", "D29", "|log r"),
        ("grpo", "padded kl", "D28", "the KL loss is averaged over padding"),
        ("grpo", "wide", "D50", "and the run states 0.2 and 0.2: 3 times as wide"),
        ("grpo", "capped", "D108", "rewards are cut off: they are at most 0.2"),
        ("cispo", "ppo for cispo", "D50", "and the run states CISPO"),
        ("cispo", "weight alone", "D50", "the bounded ratio times the advantage"),
        ("gspo", "ratio of tokens", "D50", "and the run states a ratio for each response (GSPO)"),
        ("tis", "weights unused", "D50", "recorded and stated, and not applied to the loss"),
        ("tis", "weights twice", "D50", "the importance weight stands in it twice"),
        ("drgrpo", "mean for constant", "D28", "and the run states seq-mean-token-sum-norm with a constant of 12"),
    ],
)
def test_the_step_that_is_made_otherwise_is_named(
    algorithm: str, wrong: str, id: str, words: str, seed: int, tmp_path: Path
) -> None:
    every = found(Made(algorithm, wrong, seed=seed).write(tmp_path / "dump"))
    assert every, "nothing is said"
    assert (every[0].id, words in every[0].claim) == (id, True), [(one.id, one.claim) for one in every]


HEALTHY: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {}), ("grpo", {"eps": 1e-4, "unbiased": False}), ("grpo", {"rewards_of": "binary"}),
    ("grpo", {"kl_type": "k2"}), ("grpo", {"dtype": "bfloat16"}), ("grpo", {"clip": (0.2, 0.28)}),
    ("rloo", {}), ("rloo", {"rewards_of": "binary"}), ("drgrpo", {}), ("cispo", {}), ("gspo", {"clip": (3e-3, 4e-3)}),
    ("tis", {}), ("rppb", {}), ("rppb", {"unbiased": False}), ("rpp", {}), ("rpp", {"gamma": 0.97}),
    ("rpp", {"unbiased": False}), ("ppo", {}), ("ppo", {"gamma": 0.98, "lam": 0.9}), ("ppo", {"ranks": 1}),
    ("rpp", {"ranks": 1}),
]  # fmt: skip


@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize(("algorithm", "settings"), HEALTHY)
def test_what_trainers_make_is_well(algorithm: str, settings: dict[str, Any], stated: bool, tmp_path: Path) -> None:
    every = found(Made(algorithm, seed=7, **settings).write(tmp_path / "dump", stated=stated))
    assert not [one.claim for one in every]
