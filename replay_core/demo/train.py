"""Trains the demo's policy with GRPO and records every tensor of every step. No supervised warm start: reward alone."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
import transformers
from msgspec import Struct
from msgspec.structs import asdict, replace

from replay_core import progress_bars
from replay_core.demo import faults, task
from replay_core.demo.policy import Rollout, build_policy, sample, score, score_packed
from replay_core.errors import SelectionError
from replay_core.jobs import LogLine, OnEvent, Partial, Progress, ignore
from replay_core.objectives import advantages, kl, policy_loss, reductions
from replay_core.recorder import Recorder, StepRecorder
from replay_core.rollouts import RolloutReplay

if TYPE_CHECKING:
    from replay_core.documents.replay import PlanEntry

#: Enough for the mean reward to rise from about 0.15 to above 0.5.
STEPS = 12


class Recipe(Struct, frozen=True):
    """Every number of the training run. `prompts` problems a step, `group` responses to each."""

    steps: int = STEPS
    prompts: int = 16
    group: int = 8
    rows_per_micro: int = 16
    learning_rate: float = 5e-3
    kl_coefficient: float = 0.001
    clip_low: float = 0.2
    clip_high: float = 0.2
    largest_grad_norm: float = 1.0
    seed: int = 0

    @property
    def loss(self) -> dict[str, Any]:
        """The loss as a replay states it (`replay.losses.Loss`)."""
        clips = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        return {"kind": "grpo", **clips, "kl": self.kl_coefficient, "reduction": "token_sum"}

    @property
    def optimizer(self) -> dict[str, Any]:
        """The optimizer as a replay states it (`replay.optimizing.Optimizer`)."""
        betas = {"beta1": 0.9, "beta2": 0.95}
        clip = {"max_grad_norm": self.largest_grad_norm}
        return {"kind": "adamw", "lr": self.learning_rate, **betas, "weight_decay": 0.0, **clip}


class TrainedDemo(TypedDict):
    """What was recorded, and the micro-batch to replay: of the last step, the one whose rows have the most
    different lengths; `rewards` are means per step."""

    dump: str
    steps: int
    step: int
    micro: int
    plan: PlanEntry
    """What is worth a look: the micro-batch packed without the mask between its samples."""
    rewards: list[float]
    reward_first: float
    reward_last: float
    seconds: float


def train_demo(
    directory: Path,
    on_event: OnEvent = ignore,
    *,
    steps: int = STEPS,
    seed: int = 0,
    rollouts: RolloutReplay | None = None,
    fault: str | None = None,
) -> TrainedDemo:
    """Train, record into `directory`, and say what to look at.

    With `rollouts` nothing is sampled: every step trains on what was recorded. With `fault` the trainer makes that
    mistake (`faults.FAULTS`).

    One optimizer step per step, so the checkpoint of a step computes all of its micro-batches. The same
    seed and thread count give the same bytes.

    Raises:
        RequestError: there is no such fault.
    """
    faults.check(fault)
    began = time.monotonic()
    recipe = Recipe(steps=steps, seed=seed)
    flags = {"attention": "sdpa", "packing": False, "dtype": "float32", "temperature": 1.0, "loss": recipe.loss,
             "optimizer": recipe.optimizer}  # fmt: skip
    rewards: list[float] = []
    # Saving a checkpoint draws a bar, once a step.
    with Recorder(directory, flags=flags, config=asdict(recipe)) as recorder, progress_bars.hidden(transformers):
        trainer = _Trainer(recipe, recorder, rollouts, fault)
        for step in range(recipe.steps):
            on_event(Progress(step, recipe.steps, "training steps"))
            rewards.append(trainer.step(step))
            on_event(LogLine(f"step {step}  reward {rewards[-1]:.3f}  e.g. {trainer.example}"))
            on_event(Partial({"rewards": list(rewards)}))
    on_event(Progress(recipe.steps, recipe.steps, "training steps"))
    return {
        "dump": str(directory),
        "steps": recipe.steps,
        "step": recipe.steps - 1,
        "micro": trainer.most_varied_micro,
        "plan": {
            "dump": str(directory),
            "step": recipe.steps - 1,
            "rank": 0,
            "micro": trainer.most_varied_micro,
            "model": "checkpoint",
            "flags": {"packing": True, "block_mask": False},
        },
        "rewards": rewards,
        "reward_first": rewards[0],
        "reward_last": rewards[-1],
        "seconds": round(time.monotonic() - began, 3),
    }


class _Trainer:
    """The GRPO loop of one rank."""

    def __init__(
        self, recipe: Recipe, recorder: Recorder, rollouts: RolloutReplay | None, fault: str | None = None
    ) -> None:
        self.recipe = recipe
        self.fault = fault
        self.rollouts = rollouts
        self.recorder = recorder
        self.policy = build_policy(recipe.seed)
        self.reference = build_policy(recipe.seed).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.problems = random.Random(recipe.seed)
        self.generator = torch.Generator().manual_seed(recipe.seed)
        # Its own, so that a run that samples nothing still shuffles alike.
        self.shuffler = torch.Generator().manual_seed(recipe.seed)
        self.example = ""
        self.most_varied_micro = 0

    def step(self, step: int) -> float:
        """Sample, score, update once. Returns the mean reward."""
        recipe = self.recipe
        self.recorder.checkpoint(step, self.policy)
        groups = task.draw(recipe.prompts, self.problems)
        problems = [problem for problem in groups for _ in range(recipe.group)]
        rollout = self._rollout(step, problems)
        responses = [rollout.response(row) for row in range(len(problems))]
        rewards_B = torch.tensor([task.reward(*pair) for pair in zip(problems, responses, strict=True)])
        written_B = torch.tensor([len(response) - (task.END in response) for response in responses])
        rewards_B = faults.judged(rewards_B, written_B, self.fault)
        rollout = replace(rollout, response_mask_BS=faults.loss_mask(rollout, task.END, self.fault))
        group_ids_B = torch.arange(len(problems)) // recipe.group
        mask_BT = rollout.response_mask_BS[:, 1:]
        advantages_BT = advantages.group_normalised(rewards_B, group_ids_B)[:, None] * mask_BT
        with torch.no_grad():
            old_logprobs_BT = self._score(rollout.input_ids_BS, rollout.attention_mask_BS)[0] * mask_BT
            ref_logprobs_BT = score(self.reference, rollout.input_ids_BS, rollout.attention_mask_BS)[0] * mask_BT
        self.example = f"{problems[0].text}{task.text(responses[0])}"

        # The whole batch, not a rank's part of it; under the names NexRL's own readers look for, too.
        with self.recorder.step(step, rank=None) as record:
            record(
                "trajectory",
                _masks(rollout),
                rewards=rewards_B,
                rollout_log_probs=rollout.logprobs_BT,
                advantages=advantages_BT,
                group_ids=group_ids_B,
                prompt_text=[problem.text for problem in problems],
                response_text=[task.text(response) for response in responses],
                num_trajectories=len(problems),
                trajectories=[
                    _trajectory(rollout, row, float(rewards_B[row]), *divmod(row, recipe.group))
                    for row in range(len(problems))
                ],
            )
            record("old_log_probs", _masks(rollout), old_log_probs=old_logprobs_BT)
            record("ref_log_probs", _masks(rollout), ref_log_probs=ref_logprobs_BT)
        with self.recorder.step(step, rank=0) as record:
            self.optimizer.zero_grad(set_to_none=True)
            # Every micro-batch mixes groups, so that its rows have different lengths.
            micros = torch.randperm(len(problems), generator=self.shuffler).split(recipe.rows_per_micro)
            lengths = [len(rollout.attention_mask_BS[rows_B].sum(1).unique()) for rows_B in micros]
            self.most_varied_micro = lengths.index(max(lengths))
            metrics = [
                self._micro(record, micro, rows_B, rollout, advantages_BT, old_logprobs_BT, ref_logprobs_BT)
                for micro, rows_B in enumerate(micros)
            ]
            gradients = {f"grad.{name}": weight.grad.clone() for name, weight in self.policy.named_parameters()}
            norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), recipe.largest_grad_norm)
            record("gradient", gradients, grad_norm=norm)
            # As loss scalers do: an update whose norm is not finite is left out.
            if torch.isfinite(norm):
                self.optimizer.step()
            record(
                "training_metrics",
                metrics={
                    "reward_mean": float(rewards_B.mean()),
                    "right_answers": sum(task.is_right(*pair) for pair in zip(problems, responses, strict=True)),
                    "response_length_mean": sum(map(len, responses)) / len(responses),
                    "grad_norm": float(norm),
                    **{name: sum(micro[name] for micro in metrics) for name in metrics[0]},
                },
            )
        return float(rewards_B.nanmean())

    def _rollout(self, step: int, problems: list[task.Exercise]) -> Rollout:
        if self.rollouts is None:
            engine = self.reference if self.fault == "stale-weights" else self.policy
            temperature = faults.SAMPLED_AT if self.fault == "temperature" else 1.0
            prompts = [problem.tokens for problem in problems]
            rollout = sample(engine, prompts, self.generator, temperature=temperature)
            if self.fault == "logprob-shift":
                late_BT = torch.cat([torch.zeros(len(prompts), 1), rollout.logprobs_BT[:, :-1]], 1)
                rollout = replace(rollout, logprobs_BT=late_BT)
            return rollout
        batch = self.rollouts.batch(step)
        if batch is None:
            raise SelectionError(f"step {step} was not recorded", file=str(self.rollouts.path))
        fields = ("input_ids", "attention_mask", "response_mask", "rollout_log_probs")
        return Rollout(*(batch[field] for field in fields))

    def _score(self, input_ids_BS: torch.Tensor, attention_mask_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.fault == "packing-leak":
            return score_packed(self.policy, input_ids_BS, attention_mask_BS, faults.PACK)
        return score(self.policy, input_ids_BS, attention_mask_BS)

    def _micro(
        self,
        record: StepRecorder,
        micro: int,
        rows_B: torch.Tensor,
        rollout: Rollout,
        advantages_BT: torch.Tensor,
        old_logprobs_BT: torch.Tensor,
        ref_logprobs_BT: torch.Tensor,
    ) -> dict[str, float]:
        """Forward, loss and backward of one micro-batch; what it adds to the step's metrics."""
        recipe = self.recipe
        mask_BT = rollout.response_mask_BS[rows_B, 1:]
        # Divided by the tokens of the whole step, so that the micro-batch losses add up to the step's token mean.
        tokens = int(rollout.response_mask_BS.sum())
        logprobs_BT, entropy_BT = self._score(rollout.input_ids_BS[rows_B], rollout.attention_mask_BS[rows_B])
        logprobs_BT, entropy_BT = logprobs_BT * mask_BT, entropy_BT * mask_BT
        old_BT, ref_BT, advantage_BT = old_logprobs_BT[rows_B], ref_logprobs_BT[rows_B], advantages_BT[rows_B]
        ratio_BT = policy_loss.ratio(logprobs_BT, old_BT)
        clips = {"clip_low": recipe.clip_low, "clip_high": recipe.clip_high}
        token_loss_BT = policy_loss.clipped(ratio_BT, advantage_BT, **clips)
        pg_loss = reductions.masked_sum(token_loss_BT, mask_BT) / tokens
        kl_loss = reductions.masked_sum(kl.k3(logprobs_BT, ref_BT), mask_BT) / tokens
        loss = pg_loss + recipe.kl_coefficient * kl_loss
        loss.backward()
        clipped_BT = policy_loss.is_clipped(ratio_BT, advantage_BT, **clips)
        clip_fraction = reductions.masked_sum(clipped_BT.float(), mask_BT) / tokens
        record(
            "forward_data",
            _masks(rollout, rows_B),
            old_log_probs=old_BT,
            ref_log_probs=ref_BT,
            advantages=advantage_BT,
            log_probs=logprobs_BT,
            entropy=entropy_BT,
            trajectory_rows=rows_B,
            temperature=1.0,
            micro=micro,
        )
        record(
            "loss",
            prob_ratio=ratio_BT * mask_BT,
            token_loss=token_loss_BT * mask_BT,
            response_mask=rollout.response_mask_BS[rows_B],
            pg_loss=pg_loss,
            kl_loss=kl_loss,
            loss=loss,
            clip_fraction=clip_fraction,
            tokens_of_step=tokens,
            micro=micro,
        )
        entropy = reductions.masked_sum(entropy_BT.detach(), mask_BT) / tokens
        parts = {"loss": loss, "pg_loss": pg_loss, "kl": kl_loss, "clip_fraction": clip_fraction, "entropy": entropy}
        return {name: float(value.detach()) for name, value in parts.items()}


def _trajectory(rollout: Rollout, row: int, reward: float, group: int, run: int) -> dict[str, Any]:
    """A row without its padding, as NexRL's dumper writes it."""
    valid_S = rollout.attention_mask_BS[row] == 1
    return {
        "tokens": rollout.input_ids_BS[row][valid_S].tolist(),
        "loss_mask": rollout.response_mask_BS[row][valid_S].tolist(),
        "reward": reward,
        "is_val": False,
        "extra_fields": {"group_id": str(group), "run_id": run, "task_id": group},
    }


def _masks(rollout: Rollout, rows_B: Any = slice(None)) -> dict[str, torch.Tensor]:
    return {
        "input_ids": rollout.input_ids_BS[rows_B],
        "attention_mask": rollout.attention_mask_BS[rows_B],
        "response_mask": rollout.response_mask_BS[rows_B],
    }
