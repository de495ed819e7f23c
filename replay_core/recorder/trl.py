"""TRL's GRPOTrainer, recorded and driven without a fork: a subclass made of it, whatever version is installed.

    trainer = recording(GRPOTrainer, recorder)(model=..., reward_funcs=..., args=..., train_dataset=...)

and again, without sampling or rewards:

    rollouts = RolloutReplay("dump", scope="full")
    trainer = recording(GRPOTrainer, Recorder("again"), rollouts)(...)

A step is TRL's `global_step`. Recorded are `trajectory` (what `_generate_and_score_completions` returned, a record
per generation), `forward_data` and `loss` (a record per micro-batch), `gradient` as the optimizer sees it (clipped)
and `training_metrics` (what is logged).
"""

from __future__ import annotations

from typing import Any

from replay_core.errors import RequestError
from replay_core.recorder.recorder import Recorder, StepRecorder

#: Fields of a trajectory that the trainer does not want back.
_OURS = frozenset({"step", "rank", "micro_idx", "prompt_text", "completion_text", "rng_after"})


def recording(trainer_class: Any, recorder: Recorder, rollouts: Any = None, *, checkpoints: bool = False) -> Any:
    """A subclass of TRL's GRPOTrainer that records and, with `rollouts`, trains on what was recorded.

    Args:
        rollouts: a `RolloutReplay` of scope "full": advantages and old logprobs are part of what TRL generates.
        checkpoints: save the weights that compute each recorded step.

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
            self._rldbg = _Steps(recorder, self, checkpoints)
            self.add_callback(_callback(self._rldbg))
            recorder.note(model=self.model, trainer=trainer_class.__qualname__, seed=self.args.seed)
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
            batch = super()._generate_and_score_completions(inputs)
            record("trajectory", _described(self, inputs, batch), micro=number)
            return batch

        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            answer = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            self._rldbg.scored = answer
            return answer

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            self._rldbg.scored = None
            loss = super()._compute_loss(model, inputs)
            if self.model.training:
                self._rldbg.micro_batch(inputs, loss)
            return loss

    Recording.__name__ = f"Recording{trainer_class.__name__}"
    Recording.__qualname__ = Recording.__name__
    return Recording


class _Steps:
    """The step a trainer is in, and the numbers of its generations and micro-batches."""

    def __init__(self, recorder: Recorder, trainer: Any, checkpoints: bool) -> None:
        self._recorder, self._trainer, self._checkpoints = recorder, trainer, checkpoints
        self._open: StepRecorder | None = None
        self._generations = self._micros = 0
        #: What the policy's own logprobs and entropies were in the loss being computed.
        self.scored: Any = None

    def at(self, step: int) -> StepRecorder:
        if self._open is None or self._open.step != step:
            self.end()
            self._open = self._recorder.open_step(step, rank=self._trainer.accelerator.process_index)
            self._generations = self._micros = 0
            if self._checkpoints and self._trainer.accelerator.is_main_process:
                model = self._trainer.accelerator.unwrap_model(self._trainer.model)
                self._recorder.checkpoint(step, model, self._trainer.processing_class)
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
        record("forward_data", fields, micro=micro)
        record("loss", loss=loss, micro=micro)

    def gradients(self) -> None:
        if self._open is not None:
            self._open.gradients(self._trainer.accelerator.unwrap_model(self._trainer.model))

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


def _callback(steps: _Steps) -> Any:
    from transformers import TrainerCallback

    class StepCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types here
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            steps.gradients()

        def on_log(self, _args: Any, _state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
            steps.metrics(dict(logs or {}))

        def on_train_end(self, *_: Any, **__: Any) -> None:
            steps.close()

    return StepCallback()


def _described(trainer: Any, inputs: Any, batch: dict[str, Any]) -> dict[str, Any]:
    import torch

    fields: dict[str, Any] = {name: value for name, value in batch.items() if value is not None}
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
    wanted = {name: batch[name] for name in batch if name not in _OURS}
    return {name: value.to(device) if hasattr(value, "to") else value for name, value in wanted.items()}
