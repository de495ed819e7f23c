"""Recording a script that knows nothing of it: what torch's own hooks can see, and what they could not.

`rldbg record -- python train.py`, or RLDBG_RECORD=dir where rldbg is installed, starts here, before the script's first
line. An optimizer step ends a step; where a script trains on what it sampled, the next sampling does, and the optimizer
steps between are its mini-batches. A micro-batch is the number of a role's model call within the step: the policy's and
the reference's call on one batch have one number.
Of each step are recorded the inputs of every outermost model call (`batch_inputs`), its outputs where they are small
(`modules`), those of the modules within that were asked for, the value of every backward (`loss`), the gradient's norm
before clipping (`gradient`) and after (`optimizer`), the gradients and parameters asked for, and the weights that
compute it, of a small model or if asked for.
TRL's GRPOTrainer is recorded by its own subclass instead, which sees rollouts and advantages too.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.abc
import importlib.util
import json
import os
import shlex
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase, translate
from typing import Any, cast

from replay_core.errors import RequestError
from replay_core.objectives.likelihood import divided_by
from replay_core.recorder import hooks, seams
from replay_core.recorder.manifest import computed_as
from replay_core.recorder.recorder import Recorder, StepRecorder
from replay_core.recorder.settings import Settings
from replay_core.recorder.values import Snapshots, is_storable
from replay_core.records import MEAN_OVER_RANKS

#: Where torch.distributed.pipelining calls a stage with zeros, before its first micro-batch.
_SHAPES = frozenset({"_shape_inference", "_forward_metadata_inference", "_prepare_forward_infra"})
#: Functions that sample token by token: their model calls are counted, not recorded.
_SAMPLERS = frozenset({"generate", "_sample", "sample", "_generate", "generate_step", "beam_search"})
#: Calls of a step whose losses are still looked for.
_MOST_CALLS = 1024
#: An output larger than this is left out and counted, unless outputs are asked for.
_SMALL_OUTPUT = 64 << 20
_LOGITS = "forward.output.logits"


_started = False


def start() -> None:
    """Arrange for recording to begin when torch, or TRL's trainer, has been imported.

    What goes wrong here is said, and never an error of the script's.
    """
    global _started
    if _started:
        return
    _started = True
    try:
        watch = _Watch(os.environ["RLDBG_RECORD"], json.loads(os.environ.get("RLDBG_RECORD_OPTIONS", "{}")))
    except Exception as error:
        _say(f"nothing is recorded: {error}")
        return
    watched = {
        "torch": watch.begin,
        "transformers.trainer": watch.take_trainer,
        "trl.trainer.grpo_trainer": watch.take_trl,
        "trl.trainer.dpo_trainer": watch.take_dpo,
    }
    sys.meta_path.insert(0, _AfterImport(watched))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function right after a module was executed for the first time."""

    def __init__(self, watched: dict[str, Callable[[Any], None]]) -> None:
        self._watched = watched

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        after = self._watched.pop(name, None)
        if after is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            try:
                after(module)
            except Exception as error:
                _say(f"{name} is not recorded: {error}")

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _Watch:
    """What is seen of one process."""

    def __init__(self, directory: str, options: Mapping[str, Any]) -> None:
        self._directory, self._options = directory, dict(options)
        self._modules = self._options.pop("modules", None)
        self._gradients = self._options.pop("gradients", None)
        self._params = self._options.pop("params", None)
        self._outputs = self._options.pop("outputs", False)
        #: Whether the weights of every recorded step are kept; None: those of a small model.
        self._checkpoints: bool | None = self._options.pop("checkpoints", None)
        self._guard = seams.Guard(_say)
        self._roots: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        #: Ids of the weights that optimizers were given; they live as long as their optimizers.
        self._optimized: set[int] = set()
        self._trainer: str | None = None
        self._forget()

    def _forget(self) -> None:
        """At the start, and in a forked child: what its parent saw and writes is the parent's."""
        self._process = os.getpid()
        self._recorder: Recorder | None = None
        self._refused: str | None = None
        self._step: StepRecorder | None = None
        #: Optimizers that stepped since the last call of a model, and gradients recorded in the step by role.
        self._stepped: list[Any] = []
        self._gradients_of: Counter[str] = Counter()
        #: Optimizers that are stepping, one within the other.
        self._updating: list[Any] = []
        #: Weights whose gradients were recorded when they were about to be clipped, and the step's weights kept.
        self._clipped: set[int] = set()
        self._kept: int | None = None
        #: What a Trainer divides a micro-batch's sum of losses by; the dtype of the last autocast.
        self._tokens: float | None = None
        self._autocast: str | None = None
        self._trained_on: set[str] = set()
        #: Where the actor's weights came from, and their size in GiB: it may be gone when that is said.
        self._actor: tuple[str | None, float] = (None, 0.0)
        #: The loss that the model gave for its labels, the labels that count, what is divided by; and the loss that a
        #: backward began at, which may be another.
        self._likelihood: tuple[Any, Any, float | None] | None = None
        self._began: tuple[Any, tuple[Any, Any, float | None]] | None = None
        #: The loss as a replay forms it, where a trainer that is known says so; the completions of its batch.
        self._loss_flags: dict[str, Any] | None = None
        self._by_rows = False
        self._completions: Any = None
        #: The prompts sampled from since the last training call, and whether this step trains on what came of them.
        self._prompts: Any = None
        self._trains_on_samples = False
        self._minibatch = 0
        #: Of each role: its calls, its last call with gradients, the calls with gradients and what they put out (the
        #: numbers of autograd's nodes), the micro-batches that have a loss.
        self._calls_of: Counter[str] = Counter()
        self._graded: dict[str, int] = {}
        self._put_out: dict[str, dict[int, frozenset[int]]] = {}
        self._lost_of: dict[str, set[int]] = {}
        self._number = self._calls = 0
        self._ended = False
        self._scaled: tuple[weakref.ref[Any], Any, Any] | None = None
        #: What the modules within the model that is called put out, and what took it; the hooks while it is called.
        self._within: tuple[dict[str, Any], Snapshots] | None = None
        self._hooked = contextlib.ExitStack()
        #: The gradients that losses left at the logits of calls whose record may not be whole yet, and their keys.
        self._at_logits: dict[int, tuple[Any, StepRecorder, dict[str, Any]]] = {}
        self._seen: Counter[str] = Counter()
        self._unseen: Counter[str] = Counter()

    def begin(self, torch: Any) -> None:
        """torch is there: wrap what can be seen of it. Not in rldbg itself, which replays in the same environment."""
        if "replay_core.workbench" in sys.modules:
            return
        from torch.optim import optimizer

        settings = Settings().with_(asynchronous=True, on_error="warn").with_(**self._options)
        self._settings = settings
        seams.outermost_calls(torch, self._begins, self._called, self._has_ended, self._guard)
        seams.backwards(torch, self._backward, self._guard)
        seams.optimized_weights(torch, lambda weights: self._optimized.update(map(id, weights)), self._guard)
        seams.scaled_losses(torch, self._loss_scaled, self._guard)
        seams.clipping(torch, self._before_clipping, self._guard)
        seams.autocasts(torch, self._autocast_entered, self._guard)
        seams.hard_exit(self._end, self._guard)
        optimizer.register_optimizer_step_pre_hook(lambda it, *_: self._guard(self._before_update, it))
        optimizer.register_optimizer_step_post_hook(lambda it, *_: self._guard(self._after_update, it))
        atexit.register(self._end)

    def take_trl(self, module: Any) -> None:
        """TRL's trainer is recorded from within; the general hooks stand aside once one is made."""
        from replay_core.recorder import trl

        original: Any = module.GRPOTrainer
        watch = self

        class Announced(original):  # type: ignore[misc]  # TRL's class
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                watch._trainer = original.__qualname__
                super().__init__(*args, **kwargs)
                watch._guard(watch._told_trainer, self.accelerator.unwrap_model(self.model), trl.clipped_loss(self))

        Announced.__name__ = Announced.__qualname__ = original.__name__
        late = cast(Recorder, _Late(self._open))
        module.GRPOTrainer = trl.recording(Announced, late, checkpoints=self._checkpoints)

    def take_trainer(self, module: Any) -> None:
        """transformers' Trainer, and all that are made of it, divide a sum of losses by a number no model call sees."""
        original = module.Trainer.training_step

        @functools.wraps(original)
        def training_step(trainer: Any, model: Any, inputs: Any, num_items_in_batch: Any = None, *more: Any) -> Any:
            self._guard(self._told_tokens, trainer, num_items_in_batch)
            try:
                return original(trainer, model, inputs, num_items_in_batch, *more)
            finally:
                self._tokens = None

        module.Trainer.training_step = training_step

    def take_dpo(self, module: Any) -> None:
        """TRL's DPOTrainer: what its loss is made of beside the two models' calls, which the general hooks see."""
        from replay_core.recorder.trl import preference_loss

        original = module.DPOTrainer._compute_loss
        # Before 1.0 a row's log-probabilities were made at once, of whole logits.
        self._by_rows = "selective_log_softmax" in original.__code__.co_names

        @functools.wraps(original)
        def compute_loss(trainer: Any, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
            self._guard(self._told_preference, preference_loss, trainer, inputs)
            try:
                return original(trainer, model, inputs, *more, **named)
            finally:
                self._completions = None

        module.DPOTrainer._compute_loss = compute_loss

    def _told_preference(self, described: Callable[[Any], dict[str, Any]], trainer: Any, inputs: Any) -> None:
        self._loss_flags, self._completions = described(trainer), inputs.get("completion_mask")

    def _told_trainer(self, model: Any, loss: dict[str, Any]) -> None:
        self._weighed(model)
        self._loss_flags = loss
        self._trained_on.add("input_ids")

    def _told_tokens(self, trainer: Any, number: Any) -> None:
        if number is not None:
            across = getattr(trainer.args, "average_tokens_across_devices", False)
            self._tokens = float(number) / (trainer.accelerator.num_processes if across else 1)

    def _autocast_entered(self, dtype: str) -> None:
        if dtype != self._autocast:
            self._autocast = dtype
            if self._recorder is not None:
                self._recorder.note(autocast=dtype)

    def _open(self) -> Recorder:
        if self._process != os.getpid():
            self._forget()
        if self._refused is not None:
            raise RequestError(self._refused)
        if self._recorder is None:
            try:
                self._recorder = Recorder(self._directory, settings=self._settings)
            except RequestError as error:
                self._refused = str(error)
                raise
            self._recorder.note(recorded_by="rldbg record")
        return self._recorder

    def _current(self) -> StepRecorder:
        recorder = self._open()
        if self._step is None:
            self._step = recorder.open_step(self._number, rank=seams.rank_now())
        return self._step

    def _begins(self, module: Any) -> None:
        """Listen to the modules within a model that is about to be called."""
        self._within = None
        if self._modules is None or self._trainer is not None or next(module.parameters(), None) is None:
            return
        import torch

        if _is_for_shapes() or (not torch.is_grad_enabled() and _is_within(_SAMPLERS)):
            return
        model = hooks.bare(module)
        chosen, kind = _matching(self._modules, dict(model.named_modules())), type(model).__qualname__
        # Hooks within a compiled region would be compiled into it.
        if not chosen.keys() - {""} or any(_is_compiled(one) for one in module.modules()):
            self._unseen[f"what --modules {self._modules} asks for, in a call of {kind}"] += 1
            return
        self._open()
        self._after_optimizers()
        step = self._current()
        if not step.wants("modules"):
            return
        snapshots = step.recorder.snapshots()
        seen = hooks.catching(step.guarded, snapshots, model, translate(f"*{self._modules}*"))
        self._within = self._hooked.enter_context(seen), snapshots

    def _has_ended(self) -> None:
        self._hooked.close()

    def _called(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        if self._trainer is None and output is not None and next(module.parameters(), None) is not None:
            import torch

            self._call(torch, module, args, kwargs, output)

    def _call(self, torch: Any, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        if _is_for_shapes():
            self._unseen["calls in which a pipeline only asked for shapes"] += 1
            return
        if not torch.is_grad_enabled() and _is_within(_SAMPLERS):
            self._unseen["calls while sampling"] += 1
            self._sampled(hooks.named_arguments(module, args, kwargs).get("input_ids"))
            return
        self._open()
        self._after_optimizers()
        given = hooks.recordable(hooks.named_arguments(module, args, kwargs))
        if not _is_masked(given) and hasattr(hooks.bare(module), "config"):
            given["attention_mask"] = torch.ones_like(given["input_ids"])  # without one, every slot is attended to
        outputs = {name: value for name, value in hooks.tensors_of("forward.output", output) if is_storable(value)}
        called = _called_as(given, outputs)
        if self._by_rows and called.get("logits") == "whole":
            called["logits"] = "rows"
        size = sum(tensor.numel() * tensor.element_size() for tensor in outputs.values())
        if size > _SMALL_OUTPUT and not self._outputs:
            self._unseen[f"outputs above {_SMALL_OUTPUT >> 20} MB (--outputs records them)"] += 1
            outputs = {}
        within, snapshots = self._within or ({}, self._open().snapshots())
        self._within = None
        if module not in self._roots:
            self._meet(module, {"batch_inputs": given, "modules": {**within, **outputs}}, called)
        step = self._current()
        role = self._roots[module]
        micro = self._calls_of[role]
        self._calls_of[role] += 1
        if self._completions is not None and self._completions.shape == getattr(given.get("input_ids"), "shape", None):
            given["completion_mask"] = self._completions
        if torch.is_grad_enabled():
            self._graded[role] = micro
            every = (value for _, value in hooks.tensors_of("forward.output", output))
            put_out = self._put_out.setdefault(role, {})
            put_out[micro] = seams.sequence_numbers(every)
            if len(put_out) > _MOST_CALLS:  # no optimizer ends the step
                del put_out[next(iter(put_out))]
            if role == "actor":
                self._train_on(given)
            self._keep_weights(module, role, step)
            self._trained_on.update({"input_ids", "labels"} & given.keys())
            if self._tokens is not None and "labels" in given:
                given["tokens_of_step"] = self._tokens
            loss = outputs.get("forward.output.loss")
            if "labels" in given and loss is not None:
                self._likelihood = loss.detach(), (given["labels"] != -100).sum().detach(), self._tokens
        self._calls += 1
        self._seen["model calls"] += 1
        place: dict[str, Any] = {"micro": micro, "role": role, "minibatch": self._optimizer_step()}
        step("batch_inputs", given, **place)
        if within or (outputs and step.wants("modules")):
            step.admit("modules", {**within, **outputs}, snapshots, **place)
        if torch.is_grad_enabled():
            self._record_at_logits()
            logits = outputs.get(_LOGITS)
            if role == "actor" and logits is not None and logits.requires_grad and not self._is_formed(given):
                logits.register_hook(lambda gradient: self._guard(self._left_at_logits, gradient, step, place))

    def _is_formed(self, given: Mapping[str, Any]) -> bool:
        """Whether a replay can form the loss of a call: the labels' likelihood, or a loss that its trainer named."""
        return "labels" in given if self._loss_flags is None else len(self._loss_flags) > 1

    def _left_at_logits(self, gradient: Any, step: StepRecorder, place: dict[str, Any]) -> None:
        """Several backwards of one call add up."""
        before = self._at_logits.get(place["micro"])
        self._at_logits[place["micro"]] = gradient if before is None else before[0] + gradient, step, place

    def _record_at_logits(self) -> None:
        """What losses left at the logits is whole when the next call is made, or its gradients are used."""
        for gradient, step, place in self._at_logits.values():
            step("loss_gradient", {f"grad.{_LOGITS}": gradient}, **place)
            self._seen["losses' gradients at the logits"] += 1
        self._at_logits.clear()

    def _sampled(self, ids: Any) -> None:
        """A sampler reads its prompts: what trained on the samples before is over."""
        if getattr(ids, "ndim", 0) == 2 and ids.shape[1] > 1:
            if self._stepped:
                self._finish_step()
            self._prompts = ids

    def _train_on(self, given: Mapping[str, Any]) -> None:
        """Whether the first training call since a sampling begins with prompts that were sampled from: then one step is
        all that is trained on them, whatever the optimizer steps.
        """
        ids: Any = given.get("input_ids")
        prompts, self._prompts = self._prompts, None
        if prompts is None or "labels" in given or getattr(ids, "ndim", 0) != 2 or ids.shape[1] <= prompts.shape[1]:
            return
        begun = ids[:, : prompts.shape[1]]
        self._trains_on_samples = bool((begun[:, None] == prompts[None].to(ids.device)).all(-1).any(-1).all())

    def _optimizer_step(self) -> int | None:
        return self._minibatch if self._trains_on_samples else None

    def _meet(self, module: Any, records: Mapping[str, Mapping[str, Any]], called: dict[str, str]) -> None:
        """A model called for the first time: give it a role, and say what recording it will take."""
        weights = list(module.parameters())
        trained = any(weight.requires_grad for weight in weights)
        if self._optimized:
            # A copy of the policy kept as its reference may still ask for gradients: no optimizer has its weights.
            trained = trained and any(id(weight) in self._optimized for weight in weights)
        taken = set(self._roots.values())
        role = next(
            (name for name in (("actor", "critic") if trained else ("ref", "reward")) if name not in taken), None
        )
        self._roots[module] = role or f"model{len(self._roots)}"
        recorder = self._open()
        model = hooks.bare(module)
        if self._roots[module] == "actor":
            self._weighed(model)
            said: dict[str, Any] = {} if self._loss_flags is None else {"loss": self._loss_flags}
            if hooks.is_averaged(module):
                said["gradients"] = MEAN_OVER_RANKS
            recorder.note(flags={**computed_as(model, self._autocast, **called), **said})
        recorder.note(model=model, roles={name: type(root).__qualname__ for root, name in self._roots.items()})
        if len(self._roots) == 1 and seams.rank_now() == 0:
            from replay_core.recorder.forecast import Forecast

            named = dict(module.named_parameters())
            each: dict[str, list[Any]] = {stage: [*fields.values()] for stage, fields in records.items() if fields}
            if trained:
                each["loss"] = [None]
            if not self._is_formed(records["batch_inputs"]):
                each["loss_gradient"] = [one for name, one in records["modules"].items() if name == _LOGITS]
                each["gradient"] = [None, *_matching(self._gradients, named).values()]
            if trained and self._params is not None:
                each["param"] = [*_matching(self._params, named).values()]
            _say(f"{Forecast.of_records(self._settings, recorder.directory, each)}")

    def _weighed(self, model: Any) -> None:
        size = sum(weight.numel() * weight.element_size() for weight in model.parameters()) / 2**30
        self._actor = getattr(getattr(model, "config", None), "_name_or_path", None), size

    def _keep_weights(self, module: Any, role: str, step: StepRecorder) -> None:
        """Keep the weights that compute a step, at its first call. Every rank comes here: shards are gathered."""
        model = hooks.bare(module)
        if role != "actor" or self._kept == self._number or not step.active or not hasattr(model, "save_pretrained"):
            return
        self._kept = self._number
        if hooks.is_small(model) if self._checkpoints is None else self._checkpoints:
            state = hooks.whole_state(model)
            if seams.rank_now() == 0:
                self._open().checkpoint(self._number, model, state=state)
            self._seen["checkpoints"] += 1

    def _before_clipping(self, weights: list[Any]) -> None:
        """Gradients are recorded as the backward left them, which is what a replay computes."""
        if self._trainer is None and self._roots and not self._clipped & set(map(id, weights)):
            self._clipped.update(map(id, weights))
            self._record_gradients(weights)

    def _before_update(self, optimizer: Any) -> None:
        if self._trainer is not None:
            return
        self._open()
        # A step that raised is over, and no hook says so.
        self._updating = [*filter(_is_stepping, self._updating), optimizer]
        if len(self._updating) > 1:
            # Of one that keeps another for its share (ZeroRedundancyOptimizer), or calls the step of the class it is
            # made of: its gradients are recorded.
            return
        if any(stepped() is optimizer for stepped in self._stepped):
            self._after_optimizers()
        step = self._current()
        minibatch = self._optimizer_step()
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        if self._clipped & set(map(id, weights)):
            for role, (named, micro) in self._by_role(weights).items():
                norm = hooks.norm(weight.grad for weight in named.values())
                if norm is not None:
                    step("optimizer", {"clipped_grad_norm": norm}, role=role, micro=micro, minibatch=minibatch)
            self._clipped.difference_update(map(id, weights))
        else:
            self._record_gradients(weights)
        if self._params is not None:
            for role, (named, micro) in self._by_role(weights).items():
                params: dict[str, Any] = {}
                self._chosen(params, "param", self._params, named, "--params")
                step("param", params, role=role, micro=micro, minibatch=minibatch)

    def _record_gradients(self, weights: list[Any]) -> None:
        self._record_at_logits()
        step = self._current()
        for role in self._by_role(weights):
            # Optimizers that share a model (one for matrices, one for the rest) have a record each.
            self._gradients_of[role] += 1
        for role, (named, micro) in self._by_role(weights).items():
            gradients = {name: weight.grad for name, weight in named.items()}
            fields: dict[str, Any] = {}
            if (norm := hooks.norm(gradients.values())) is not None:
                fields["grad_norm"] = norm
            self._chosen(fields, "grad", self._gradients, gradients, "--gradients")
            if fields:
                step("gradient", fields, role=role, micro=micro, minibatch=self._optimizer_step())

    def _by_role(self, weights: list[Any]) -> dict[str, tuple[dict[str, Any], int | None]]:
        """The weights of an update by the role of the model they are in and their names there, and the update's number
        among those of the role; weights of no model that was called are the actor's.
        """
        found: dict[str, tuple[dict[str, Any], int | None]] = {}
        known = {weight: (role, name) for root, role in self._roots.items() for name, weight in root.named_parameters()}
        for at, weight in enumerate(weights):
            role, name = known.get(weight, ("actor", f"parameter{at}"))
            found.setdefault(role, ({}, self._gradients_of[role] - 1 or None))[0][name] = weight
        return found

    def _chosen(
        self, fields: dict[str, Any], prefix: str, pattern: str | None, named: Mapping[str, Any], option: str
    ) -> None:
        chosen = _matching(pattern, named)
        fields.update({f"{prefix}.{name}": value for name, value in chosen.items()})
        if pattern is not None and not chosen:
            self._unseen[f"what {option} {pattern} asks for, in an update of {', '.join([*named][:2])} …"] += 1

    def _after_update(self, optimizer: Any) -> None:
        """The step is over at the next call of a model: until then another optimizer may take its part of it."""
        self._updating = [*filter(_is_stepping, self._updating)]
        if self._updating:
            return
        if self._trainer is None and self._step is not None:
            self._stepped.append(weakref.ref(optimizer))

    def _after_optimizers(self) -> None:
        """The model is called again: the step is over, or one of its optimizer steps."""
        if not self._trains_on_samples:
            self._finish_step()
        elif self._stepped:
            self._minibatch += 1
            self._stepped.clear()
            self._clipped.clear()

    def _finish_step(self) -> None:
        if self._stepped and self._step is not None and self._recorder is not None:
            self._recorder.end_step(self._step)
            self._seen["steps"] += 1
            if self._trains_on_samples:
                self._seen["optimizer steps on samples"] += self._minibatch + 1
            self._number, self._step = self._number + 1, None
            self._calls = self._minibatch = 0
            self._trains_on_samples = False
            for known in (
                self._stepped,
                self._gradients_of,
                self._clipped,
                self._calls_of,
                self._graded,
                self._put_out,
                self._lost_of,
            ):
                known.clear()

    def _loss_scaled(self, loss: Any, scaled: Any, scale: Any) -> None:
        self._scaled = (weakref.ref(scaled), loss.detach(), scale)

    def _backward(self, loss: Any) -> None:
        if self._trainer is not None:
            return
        self._open()
        if not self._calls:
            # No call told where the last step ended: the model is called within what was compiled.
            self._finish_step()
        role = seams.trained_by(loss, self._roots, sorted(self._graded)) or "actor"
        fields = {"loss": loss}
        if self._scaled is not None:
            scaled, unscaled, scale = self._scaled
            fields = {"loss": unscaled} if scaled() is loss else {"scaled_loss": loss}
            fields["loss_scale"] = scale
            self._scaled = None
        self._seen["losses"] += 1
        if self._likelihood is not None:
            self._began, self._likelihood = (loss.detach(), self._likelihood), None
        # Two losses after one call have a number each. Where a pipeline calls for all micro-batches before it goes back
        # (GPipe), each loss is of the call it was made from.
        known = self._lost_of.setdefault(role, set())
        micro = self._graded.get(role, 0)
        put_out = self._put_out.get(role, {})
        if len(put_out) > 1 and (made_from := seams.made_from(loss, put_out)) is not None:
            micro = made_from
        micro = micro if micro not in known else max(*known, self._calls_of[role] - 1) + 1
        known.add(micro)
        self._calls_of[role] = max(self._calls_of[role], micro + 1)
        self._current()("loss", fields, micro=micro, role=role, minibatch=self._optimizer_step())

    def _end(self) -> None:
        if self._process == os.getpid() and not self._ended:
            self._ended = True
            self._guard(self._record_at_logits)
            self._finish_step()
            if self._recorder is not None:
                self._recorder.close()
            self._report()

    def _report(self) -> None:
        """At the end one rank says what is there and what no hook could see; each says what went wrong."""
        if seams.rank_now() == 0:
            self._report_seen()
        if self._refused is not None:
            _say(f"nothing was recorded: {self._refused.splitlines()[0]}")
        if self._recorder is not None and self._recorder.lost:
            first = self._recorder.lost[0]
            _say(f"lost: {len(self._recorder.lost)} records, the first ({first.key}): {first.why}")
        if self._guard.failures:
            _say(f"failed: {self._guard.failures} times something could not be looked at")

    def _report_seen(self) -> None:
        if self._trainer is not None and self._recorder is not None:
            _say(f"{self._trainer} was recorded with its rollouts into {self._directory}")
            if self._modules is not None:
                _say(f"not seen: what --modules {self._modules} asks for, of {self._trainer}")
            self._report_replay(self._recorder)
        elif self._seen["model calls"]:
            counts = ", ".join(f"{count} {what}" for what, count in self._seen.items())
            _say(f"saw {counts}; the records are in {self._directory}")
            unseen = [f"{what} ({count})" for what, count in self._unseen.items()]
            unseen += [f"inside the compiled {name}" for root, name in self._roots.items() if _is_compiled(root)]
            if not self._seen["losses"]:
                unseen.append("losses (no backward began at a single number)")
            if not self._seen["steps"]:
                unseen.append("updates (no torch optimizer stepped)")
            unseen.append("rewards, advantages, ratios, masks applied outside the model: plain functions leave no hook")
            _say("not seen: " + "; ".join(unseen))
            if self._recorder is not None:
                self._report_replay(self._recorder)
        elif self._refused is None and not os.path.exists(os.path.join(self._directory, "manifest.json")):
            # A launcher calls no model; the processes it started recorded theirs.
            hidden = ", or inside what torch.compile was given" if _compiled_graphs() else ""
            _say(f"no model was recorded: no torch module with parameters was called outside sampling{hidden}")

    def _report_replay(self, recorder: Recorder) -> None:
        """What a replay of the recording can show, and what it cannot."""
        if recorder.newest is None:
            _say("a replay needs a recorded step, and --steps and --every left out every one")
            return
        if "input_ids" not in self._trained_on:
            _say("a replay needs token ids, and no call of a trained model was given input_ids")
            return
        name, size = self._actor
        weights = (
            "with the weights of every step"
            if recorder.nearest_checkpoint(recorder.newest)
            else f"with the weights training began from ({name}); --checkpoints keeps each step's ({size:.1f} GiB)"
            if name
            else f"with weights you name (--model); --checkpoints keeps each step's ({size:.1f} GiB)"
        )
        line = f"rldbg replay {shlex.quote(self._directory)} --step {recorder.newest}"
        foreign = self._foreign_loss()
        formed = "labels" in self._trained_on and foreign is None
        if self._loss_flags is not None:
            formed = len(self._loss_flags) > 1
        if lacking := [name for name in _REPLAY_IMPORTS if importlib.util.find_spec(name) is None]:
            # Recording needs none of them: without a word here, the line's first answer would be exit code 4.
            weights += f" (after pip install 'rldbg[replay]': {', '.join(lacking)} not installed here)"
        if not formed and self._seen["losses' gradients at the logits"]:
            _say(f"{line} --backward carries back what its loss left at the logits, {weights}")
            return
        if formed:
            _say(f"{line} --backward runs a step again, {weights}")
            return
        _say(f"{line} runs its forwards again, {weights}")
        if self._loss_flags is not None:
            _say(f"its loss ({self._loss_flags['kind']}) is recorded as a number; --backward cannot form it")
        elif foreign is not None:
            began, given = foreign
            _say(f"--backward cannot form its loss: it is {began:.4g} where the model gave {given:.4g} for the labels")
        else:
            _say("its loss is a plain function's: with recorder.step(n) as record: record('loss', advantages=...)")

    def _foreign_loss(self) -> tuple[float, float] | None:
        """The last loss that a backward began at, and what the model gave, where one is no part of the other."""
        if self._began is None:
            return None
        loss, (given, marked, tokens) = self._began
        began, gave = float(loss), float(given)
        return (began, gave) if divided_by(gave, began, int(marked), tokens) is None else None


class _Late:
    """A recorder that is opened when it is first used: importing TRL alone writes nothing."""

    def __init__(self, opened: Callable[[], Recorder]) -> None:
        self._opened = opened

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened(), name)


def _matching(pattern: str | None, named: Mapping[str, Any]) -> dict[str, Any]:
    """What a glob, anywhere in the name, chooses of named tensors that are there; no pattern chooses none."""
    if pattern is None:
        return {}
    wanted = f"*{pattern}*"
    return {name: value for name, value in named.items() if value is not None and fnmatchcase(name, wanted)}


def _is_masked(given: Mapping[str, Any]) -> bool:
    """Whether a call says which slots hold tokens, or is given none."""
    if getattr(given.get("input_ids"), "ndim", 0) != 2:
        return True
    return any(name in given for name in ("attention_mask", "position_ids", "cu_seq_lens_q", "cu_seqlens"))


def _called_as(given: Mapping[str, Any], outputs: Mapping[str, Any]) -> dict[str, str]:
    """How a language model is called: who counts its positions, and how its logits are held (TRL's fused head, or a row
    of them for every token).
    """
    ids, logits = given.get("input_ids"), outputs.get("forward.output.logits")
    found = {} if "position_ids" in given or ids is None else {"positions": "library"}
    if given.get("fused_lm_head") is True:
        return {**found, "logits": "fused"}
    return (
        {**found, "logits": "whole"}
        if logits is not None and ids is not None and ids.shape == logits.shape[:2]
        else found
    )


def _is_compiled(module: Any) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _compiled_graphs() -> bool:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["stats"]["unique_graphs"])


def _is_for_shapes() -> bool:
    """Whether a stage is called with made-up values, by a pipeline that has not begun."""
    return "torch.distributed.pipelining" in sys.modules and _is_within(_SHAPES)


def _is_within(functions: frozenset[str]) -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name in functions:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _is_stepping(optimizer: Any) -> bool:
    """Whether a method of the optimizer is being run, beside what torch wraps around its step to call the hooks."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name != "wrapper" and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


#: What a replay imports that recording does not, and the extra `replay` brings.
_REPLAY_IMPORTS = ("transformers", "safetensors", "xxhash", "psutil")


def _say(text: str) -> None:
    sys.stderr.write(f"rldbg: {text}\n")
