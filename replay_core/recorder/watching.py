"""Recording a script that knows nothing of it: what torch's own hooks can see, and what they could not.

`rldbg record -- python train.py`, or RLDBG_RECORD=dir where rldbg is installed, starts here, before the script's first
line. An optimizer step ends a step. Of each
step are recorded the inputs of every outermost model call (`batch_inputs`), its outputs where they are small
(`modules`), the value of every backward (`loss`), the gradient's norm and the gradients and parameters asked for.
TRL's GRPOTrainer is recorded by its own subclass instead, which sees rollouts and advantages too.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.util
import json
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, cast

from replay_core.recorder import hooks
from replay_core.recorder.recorder import Recorder
from replay_core.recorder.settings import Settings
from replay_core.recorder.step import StepRecorder

#: Functions that sample token by token: their model calls are counted, not recorded.
_SAMPLERS = frozenset({"generate", "_sample", "sample", "_generate", "generate_step", "beam_search"})
#: An output larger than this is left out and counted, unless outputs are asked for.
_SMALL_OUTPUT = 64 << 20


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
    watched = {"torch": watch.begin, "trl.trainer.grpo_trainer": watch.take_trl}
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
        self._modules_pattern = self._options.pop("modules", None)
        self._gradients = self._options.pop("gradients", None)
        self._params = self._options.pop("params", None)
        self._outputs = self._options.pop("outputs", False)
        self._rank = int(os.environ.get("RANK", "0"))
        self._process = os.getpid()
        self._recorder: Recorder | None = None
        self._step: StepRecorder | None = None
        self._number = self._micro = self._depth = 0
        self._roots: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._seen: Counter[str] = Counter()
        self._unseen: Counter[str] = Counter()
        self._trainer: str | None = None

    def begin(self, torch: Any) -> None:
        """torch is there: hang its global hooks. Not in rldbg itself, which replays under the same environment."""
        if "replay_core.workbench" in sys.modules:
            return
        from torch.nn.modules import module
        from torch.optim import optimizer

        settings = Settings().with_(asynchronous=True, on_error="warn").with_(**self._options)
        self._settings = settings
        module.register_module_forward_pre_hook(self._enter)
        module.register_module_forward_hook(self._leave, with_kwargs=True, always_call=True)
        optimizer.register_optimizer_step_pre_hook(self._before_update)
        optimizer.register_optimizer_step_post_hook(self._after_update)
        self._wrap_backward(torch)
        atexit.register(self._report)

    def take_trl(self, module: Any) -> None:
        """TRL's trainer is recorded from within; the general hooks stand aside once one is made."""
        from replay_core.recorder import trl

        original: Any = module.GRPOTrainer
        watch = self

        class Announced(original):  # type: ignore[misc]  # TRL's class
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                watch._trainer = original.__qualname__
                super().__init__(*args, **kwargs)

        Announced.__name__ = Announced.__qualname__ = original.__name__
        module.GRPOTrainer = trl.recording(Announced, cast(Recorder, _Late(self._open)))

    def _open(self) -> Recorder:
        if self._recorder is None or self._process != os.getpid():
            self._process = os.getpid()
            self._recorder = Recorder(self._directory, settings=self._settings)
            self._recorder.note(recorded_by="rldbg record", command_line=sys.argv)
        return self._recorder

    def _current(self) -> StepRecorder:
        if self._step is None:
            self._step = self._open().open_step(self._number, rank=self._rank)
            self._micro = 0
        return self._step

    def _enter(self, _module: Any, _args: Any) -> None:
        self._depth += 1

    def _leave(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and self._trainer is None and output is not None:
            import torch

            if next(module.parameters(), None) is not None:
                self._call(torch, module, args, kwargs, output)

    def _call(self, torch: Any, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        if not torch.is_grad_enabled() and _is_sampling():
            self._unseen["calls while sampling"] += 1
            return
        if module not in self._roots:
            self._meet(module, args, kwargs)
        step = self._current()
        micro, self._micro = self._micro, self._micro + 1
        role = self._roots[module]
        self._seen["model calls"] += 1
        given = hooks.named_arguments(module, args, kwargs)
        step("batch_inputs", hooks.recordable(given), micro=micro, role=role)
        outputs = dict(hooks.tensors_of("forward.output", output))
        size = sum(tensor.numel() * tensor.element_size() for tensor in outputs.values())
        if size <= _SMALL_OUTPUT or self._outputs:
            step("modules", outputs, micro=micro, role=role)
        else:
            self._unseen[f"outputs above {_SMALL_OUTPUT >> 20} MB (--outputs records them)"] += 1

    def _meet(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A model called for the first time: give it a role, and say what recording it will take."""
        trained = any(parameter.requires_grad for parameter in module.parameters())
        taken = set(self._roots.values())
        role = next(
            (name for name in (("actor", "critic") if trained else ("ref", "reward")) if name not in taken), None
        )
        self._roots[module] = role or f"model{len(self._roots)}"
        recorder = self._open()
        recorder.note(model=module, roles={name: type(root).__qualname__ for root, name in self._roots.items()})
        shapes = [tuple(value.shape) for value in (*args, *kwargs.values()) if getattr(value, "ndim", 0) == 2]
        rows, tokens = shapes[0] if shapes else (0, 0)
        stages = {"batch_inputs", *(["gradient"] if self._gradients else []), *(["param"] if self._params else [])}
        pattern = self._gradients or self._params or ""
        looking = self._settings.with_(stages=frozenset(stages), target_param_pattern=pattern)
        if len(self._roots) == 1:
            from replay_core.recorder.forecast import Forecast

            _say(f"{Forecast.of(looking, recorder.directory, module, rows=rows, tokens=tokens, micros=1)}")

    def _before_update(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self._trainer is not None:
            return
        step = self._current()
        named = self._names(optimizer)
        fields: dict[str, Any] = {
            "grad_norm": _norm([weight.grad for weight in named.values() if weight.grad is not None])
        }
        self._chosen(fields, "grad", self._gradients, {name: weight.grad for name, weight in named.items()})
        step("gradient", fields)
        if self._params is not None:
            weights: dict[str, Any] = {}
            self._chosen(weights, "param", self._params, named)
            step("param", weights)

    def _chosen(self, fields: dict[str, Any], prefix: str, pattern: str | None, named: Mapping[str, Any]) -> None:
        import re

        if pattern is not None:
            found = {name: value for name, value in named.items() if value is not None and re.search(pattern, name)}
            fields.update({f"{prefix}.{name}": value for name, value in found.items()})

    def _names(self, optimizer: Any) -> dict[str, Any]:
        known = {weight: name for root in self._roots for name, weight in root.named_parameters()}
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        return {known.get(weight, f"parameter{at}"): weight for at, weight in enumerate(weights)}

    def _after_update(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self._trainer is None and self._step is not None:
            self._open().end_step(self._step)
            self._seen["steps"] += 1
            self._number, self._step = self._number + 1, None

    def _wrap_backward(self, torch: Any) -> None:
        original, watch = torch.Tensor.backward, self

        def backward(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if watch._trainer is None and tensor.numel() == 1 and watch._step is not None:
                watch._seen["losses"] += 1
                watch._step("loss", loss=tensor, micro=max(watch._micro - 1, 0))
            return original(tensor, *args, **kwargs)

        torch.Tensor.backward = backward

    def _report(self) -> None:
        """At the end: what is there, and what no hook could see."""
        if self._trainer is not None and self._recorder is not None:
            _say(f"{self._trainer} was recorded with its rollouts into {self._directory}")
        elif self._seen["model calls"]:
            counts = ", ".join(f"{count} {what}" for what, count in self._seen.items())
            _say(f"recorded {counts} into {self._directory}")
            unseen = [f"{what} ({count})" for what, count in self._unseen.items()]
            compiled = [name for root, name in self._roots.items() if hasattr(root, "_orig_mod")]
            unseen += [f"inside the compiled {name}" for name in compiled]
            if not self._seen["losses"]:
                unseen.append("losses (no Tensor.backward was called)")
            if not self._seen["steps"]:
                unseen.append("updates (no torch optimizer stepped)")
            unseen.append("rewards, advantages, ratios, masks applied outside the model: plain functions leave no hook")
            _say("not seen: " + "; ".join(unseen))
            _say("one line in the loop records them: with recorder.step(n) as record: record('loss', advantages=...)")
        else:
            _say("nothing was recorded: no torch module with parameters was called outside sampling")


class _Late:
    """A recorder that is opened when it is first used: importing TRL alone writes nothing."""

    def __init__(self, opened: Callable[[], Recorder]) -> None:
        self._opened = opened

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened(), name)


def _is_sampling() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name in _SAMPLERS:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _norm(gradients: list[Any]) -> float | None:
    import torch

    norms = [torch.linalg.vector_norm(gradient.detach().float()) for gradient in gradients if not gradient.is_sparse]
    return float(torch.linalg.vector_norm(torch.stack([norm.cpu() for norm in norms]))) if norms else None


def _say(text: str) -> None:
    sys.stderr.write(f"rldbg: {text}\n")
