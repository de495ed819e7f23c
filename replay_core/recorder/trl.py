"""TRL's GRPOTrainer, recorded and driven without a fork: a subclass made of it, whatever version is installed.

    trainer = recording(GRPOTrainer, recorder)(model=..., reward_funcs=..., args=..., train_dataset=...)

and again, without sampling or rewards:

    rollouts = RolloutReplay("dump", scope="full")
    trainer = recording(GRPOTrainer, Recorder("again"), rollouts)(...)

A step is TRL's `global_step`. Recorded are `trajectory` (what `_generate_and_score_completions` returned, a record
per generation, with rewards and group ids), `forward_data` and `loss` (a record per micro-batch), `gradient` before it
is clipped, `optimizer` (the norm after) and `training_metrics` (what is logged).
"""

from __future__ import annotations

import inspect
from typing import Any

from replay_core.errors import RequestError
from replay_core.recorder import hooks
from replay_core.recorder.manifest import computed_as
from replay_core.recorder.recorder import Recorder, StepRecorder
from replay_core.records import MEAN_OVER_RANKS

#: Fields of a trajectory that the trainer does not want back.
_OURS = frozenset({"step", "rank", "micro_idx", "prompt_text", "completion_text", "rng_after", "rewards", "group_id"})
_EACH_REWARD = "rewards_per_func"
#: What TRL calls a loss -> how the clipped loss is reduced; other ones are named and cannot be replayed.
_REDUCTIONS = {"grpo": "sequence_mean", "bnpo": "token_mean", "dr_grpo": "token_sum", "dapo": "token_sum"}


def recording(trainer_class: Any, recorder: Recorder, rollouts: Any = None, *, checkpoints: bool | None = False) -> Any:
    """A subclass of TRL's GRPOTrainer that records and, with `rollouts`, trains on what was recorded.

    Args:
        rollouts: a `RolloutReplay` of scope "full": advantages and old logprobs are part of what TRL generates.
        checkpoints: save the weights that compute each recorded step; None saves those of small models.

    Raises:
        RequestError: the replay's scope is not "full".
    """
    if rollouts is not None and rollouts.scope != "full":
        raise RequestError(
            "TRL's batch holds advantages and logprobs beside the rollout",
            expected='RolloutReplay(..., scope="full")',
            found=f"scope={rollouts.scope!r}",
        )

    class Recording(trainer_class):  # type: ignore[misc]  # the class is the caller's
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._rldbg = _TrainerSteps(recorder, self, checkpoints)
            self.add_callback(_callback(self._rldbg))
            self._rldbg.watch_clipping()
            model = self.accelerator.unwrap_model(self.model)
            held = _forward(trainer_class)
            flags = {**computed_as(model, _mixed(self.args), **held), "loss": clipped_loss(self)}
            recorder.note(model=model, trainer=trainer_class.__qualname__, seed=self.args.seed, flags=flags)
            self._rollouts = rollouts
            if rollouts is not None and rollouts.rank is None:
                self._rollouts = rollouts.of_rank(self.accelerator.process_index, self.accelerator.num_processes)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            self._rldbg.at(self.state.global_step)
            return super().training_step(*args, **kwargs)

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            if not self.model.training:
                return super()._generate_and_score_completions(inputs)
            record = self._rldbg.at(self.state.global_step)
            number = self._rldbg.next_generation()
            if self._rollouts is not None:
                return _recorded(self._rollouts, record.step, number, self.accelerator.device)
            self._rldbg.rewards = None
            batch = super()._generate_and_score_completions(inputs)
            fields = _described(self, inputs, batch, self._rldbg.rewards)
            record("trajectory", fields, micro=number, alignment=_alignment(fields))
            return batch

        def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
            # Of every process: [all samples, reward functions].
            self._rldbg.rewards = super()._calculate_rewards(*args, **kwargs)
            return self._rldbg.rewards

        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            answer = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            self._rldbg.scored = answer
            return answer

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            self._rldbg.scored = None
            loss = super()._compute_loss(model, inputs)
            if self.model.training:
                self._rldbg.micro_batch(inputs, loss)
                self._rldbg.trained_by(model)
            return loss

    Recording.__name__ = f"Recording{trainer_class.__name__}"
    Recording.__qualname__ = Recording.__name__
    return Recording


class _TrainerSteps:
    """The step a trainer is in, and the numbers of its generations and micro-batches."""

    def __init__(self, recorder: Recorder, trainer: Any, checkpoints: bool | None) -> None:
        self._recorder, self._trainer = recorder, trainer
        self._checkpoints = hooks.is_small(trainer.model) if checkpoints is None else checkpoints
        self._open: StepRecorder | None = None
        self._generations = self._micros = 0
        #: What the policy's own logprobs and entropies were in the loss being computed.
        self.scored: Any = None
        #: What the reward functions gave, before they were made advantages of.
        self.rewards: Any = None
        self._is_clipped = self._is_known = False

    def watch_clipping(self) -> None:
        """Gradients are recorded as the backward left them: TRL clips them before it tells a callback."""
        accelerator = self._trainer.accelerator
        original = accelerator.clip_grad_norm_

        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
            if not self._is_clipped:
                accelerator.unscale_gradients()
                self._record_gradients()
                self._is_clipped = True
            return original(*args, **kwargs)

        accelerator.clip_grad_norm_ = clip_grad_norm_

    def at(self, step: int) -> StepRecorder:
        if self._open is None or self._open.step != step:
            self.end()
            self._open = self._recorder.open_step(step, rank=self._trainer.accelerator.process_index)
            self._generations = self._micros = 0
            if self._checkpoints and self._open.active:
                model = self._trainer.accelerator.unwrap_model(self._trainer.model)
                state = hooks.whole_state(model)
                if self._trainer.accelerator.is_main_process:
                    self._recorder.checkpoint(step, model, self._trainer.processing_class, state=state)
        return self._open

    def next_generation(self) -> int:
        self._generations += 1
        return self._generations - 1

    def micro_batch(self, inputs: Any, loss: Any) -> None:
        record = self.at(self._trainer.state.global_step)
        micro, self._micros = self._micros, self._micros + 1
        logps, entropies = (*self.scored, None)[:2] if isinstance(self.scored, tuple) else (None, None)
        fields = {name: value for name, value in inputs.items() if value is not None}
        if logps is not None:
            fields["per_token_logps"] = logps
        if entropies is not None:
            fields["entropies"] = entropies
        fields["temperature"] = getattr(self._trainer, "temperature", None)
        tokens = _tokens(self._trainer, inputs)
        if tokens is not None:
            fields["tokens_of_step"] = tokens
        record("forward_data", fields, micro=micro, alignment=_alignment(fields))
        record("loss", loss=loss, micro=micro)

    def trained_by(self, wrapped: Any) -> None:
        """The model as it is called: what wraps it says whose gradient the recorded one is."""
        if not self._is_known:
            self._is_known = True
            if hooks.is_averaged(wrapped):
                self._recorder.note(flags={"gradients": MEAN_OVER_RANKS})

    def _model(self) -> Any:
        return self._trainer.accelerator.unwrap_model(self._trainer.model)

    def _record_gradients(self) -> None:
        if self._open is not None and self._open.active:
            model = self._model()
            norm = hooks.norm(weight.grad for weight in model.parameters())
            self._open.gradients(model, grad_norm=norm)

    def gradients(self) -> None:
        """The optimizer steps next."""
        if not self._is_clipped:
            self._record_gradients()
        elif self._open is not None and self._open.active:
            norm = hooks.norm(weight.grad for weight in self._model().parameters())
            self._open("optimizer", clipped_grad_norm=norm)
        self._is_clipped = False

    def metrics(self, logs: dict[str, Any]) -> None:
        numbers = {name: value for name, value in logs.items() if isinstance(value, (int, float))}
        # The last log of a run sums up all of it and belongs to no step.
        if self._open is not None and "train_runtime" not in numbers:
            self._open("training_metrics", metrics=numbers)

    def end(self) -> None:
        if self._open is not None:
            self._recorder.end_step(self._open)
            self._open = None

    def close(self) -> None:
        self.end()
        self._recorder.flush()


def _callback(steps: _TrainerSteps) -> Any:
    from transformers import TrainerCallback

    class StepCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types here
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            steps.gradients()

        def on_log(self, _args: Any, _state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
            steps.metrics(dict(logs or {}))

        def on_train_end(self, *_: Any, **__: Any) -> None:
            steps.close()

    return StepCallback()


def _mixed(args: Any) -> str | None:
    return "bfloat16" if getattr(args, "bf16", False) else "float16" if getattr(args, "fp16", False) else None


def _forward(trainer_class: Any) -> dict[str, str]:
    """How the trainer calls its model, as far as a replay may have to do the same to the last bit; nothing of a
    trainer whose code cannot be read.
    """
    try:
        source = inspect.getsource(trainer_class._get_per_token_logps_and_entropies)
    except (AttributeError, OSError, TypeError):
        return {}
    found = {} if "position_ids=" in source.replace("image_position_ids=", "") else {"positions": "library"}
    return {**found, "logits": "fused"} if "fused_lm_head=True" in source else found


def clipped_loss(trainer: Any) -> dict[str, Any]:
    """GRPOTrainer's loss as a replay forms it; of one that it cannot form, the name alone."""
    kind = getattr(trainer, "loss_type", "grpo")
    odd = [
        name
        for name, usual in (("importance_sampling_level", "token"), ("top_entropy_quantile", 1.0), ("delta", None),
                            ("off_policy_mask_threshold", None), ("use_vllm", False), ("entropy_coef", 0.0))
        if (getattr(trainer, name, None) or getattr(trainer.args, name, usual) or usual) != usual
    ]  # fmt: skip
    if kind not in _REDUCTIONS or odd:
        return {"kind": " with ".join([kind, *odd])}
    reduction = _REDUCTIONS[kind]
    divisor = 1.0 if reduction == "token_sum" else float(trainer.args.gradient_accumulation_steps)
    return {
        "kind": "grpo", "clip_low": trainer.epsilon_low, "clip_high": trainer.epsilon_high, "kl": trainer.beta,
        "kl_estimator": "k3", "reduction": reduction, "divisor": divisor,
    }  # fmt: skip


def preference_loss(trainer: Any) -> dict[str, Any]:
    """DPOTrainer's loss as a replay forms it; of one that it cannot form, the name alone."""
    kinds = list(getattr(trainer, "loss_types", None) or [getattr(trainer, "loss_type", "sigmoid")])
    odd = [
        name
        for name, usual in (("f_divergence_type", "reverse_kl"), ("ld_alpha", None), ("use_weighting", False),
                            ("label_smoothing", 0.0), ("precompute_ref_logps", False), ("aux_loss_enabled", False),
                            ("use_liger_kernel", False))
        if (getattr(trainer, name, usual) or usual) != usual
    ]  # fmt: skip
    if kinds != ["sigmoid"] or (getattr(trainer, "loss_weights", None) or [1.0]) != [1.0] or odd:
        return {"kind": " with ".join(["+".join(map(str, kinds)), *odd])}
    # Its batches have no labels to be counted, so transformers divides by the micro-batches of a step.
    return {"kind": "dpo", "beta": float(trainer.beta), "divisor": float(trainer.args.gradient_accumulation_steps)}


def _tokens(trainer: Any, inputs: dict[str, Any]) -> float | None:
    """What a micro-batch's sum over tokens is divided by; None where the loss is a mean."""
    kind, micros = getattr(trainer, "loss_type", None), trainer.args.gradient_accumulation_steps
    micros = getattr(trainer, "current_gradient_accumulation_steps", micros)
    if kind == "dr_grpo":
        return float(len(inputs["completion_ids"]) * trainer.max_completion_length * micros)
    if kind != "dapo" or inputs.get("num_items_in_batch") is None:
        return None
    tokens = float(inputs["num_items_in_batch"]) / trainer.accelerator.num_processes
    # Newer versions count the whole generation, of which an optimizer step takes its part; 0.29 did not.
    source = inspect.getsource(super(type(trainer), trainer)._compute_loss)
    per_step = micros / trainer.args.steps_per_generation if "steps_per_generation" in source else 1
    return float(max(tokens, 1.0) * per_step)


def _alignment(fields: dict[str, Any]) -> dict[str, str]:
    """What the token axes of TRL's fields mean: prompts apart from responses, or one value per sample."""
    shape = getattr(fields.get("completion_ids"), "shape", None)
    if shape is None:
        return {}
    found: dict[str, str] = {name: "prompt" for name in ("prompt_ids", "prompt_mask") if name in fields}
    for name, value in fields.items():
        if name not in found and getattr(value, "shape", None) == shape:
            found[name] = "response"
        elif getattr(value, "shape", None) == shape[:1]:
            found[name] = "sample"
    return found


def _described(trainer: Any, inputs: Any, batch: dict[str, Any], rewards: Any) -> dict[str, Any]:
    import torch

    fields: dict[str, Any] = {name: value for name, value in batch.items() if value is not None}
    if rewards is not None:
        rows, first = len(inputs), trainer.accelerator.process_index * len(inputs)
        mine = rewards[first : first + rows]
        weights = trainer.reward_weights.to(rewards.device)
        fields["rewards"] = (mine * weights).nansum(dim=1)
        fields["group_id"] = torch.arange(first, first + rows) // trainer.num_generations
        named = getattr(trainer, "reward_func_names", range(rewards.shape[1]))
        fields[_EACH_REWARD] = {str(name): mine[:, column] for column, name in enumerate(named)}
    fields["prompt_text"] = [str(example.get("prompt")) for example in inputs]
    decode = getattr(trainer.processing_class, "batch_decode", None)
    if decode is not None and "completion_ids" in batch:
        fields["completion_text"] = decode(batch["completion_ids"], skip_special_tokens=False)
    # TRL shuffles the batch next; sampling used up random numbers that a driven run does not.
    fields["rng_after"] = torch.get_rng_state()
    return fields


def _recorded(rollouts: Any, step: int, number: int, device: Any) -> dict[str, Any]:
    import torch

    batch = rollouts.batch(step, micro=number)
    if batch is None:
        raise RequestError(f"the recording ends before step {step}", file=str(rollouts.path))
    torch.set_rng_state(batch["rng_after"])
    wanted = {name: batch[name] for name in batch if name not in _OURS and not name.startswith(_EACH_REWARD)}
    return {name: value.to(device) if hasattr(value, "to") else value for name, value in wanted.items()}
