"""Every call of a model, recorded by two hooks on it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from replay_core.recorder.hooks import named_arguments, recordable, tensors_of
from replay_core.recorder.recorder import Recorder, StepRecorder
from replay_core.recorder.settings import need_pattern


class Calls:
    """Records every call of a model within a step: its inputs by argument name, and what it returned.

    Inputs are stage `batch_inputs`; outputs, where asked for, stage `modules` as `forward.output…`. `micro` is the
    call's running number within the step.

    Args:
        outputs: a regular expression on the outputs' names (`logits`, `loss`, `0`); None records no output, "" all.
        role: role of the records; None is the step's.
    """

    def __init__(self, recorder: Recorder, model: Any, *, outputs: str | None = None, role: str | None = None) -> None:
        if outputs is not None:
            need_pattern("outputs", outputs)
        self._recorder = recorder
        self._outputs, self._role = outputs, role
        self._step: StepRecorder | None = None
        self._micro = 0
        #: Calls that happened outside a recorded step, and so were not recorded.
        self.outside = 0
        self._handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after),
        ]

    def remove(self) -> None:
        """Take the hooks off again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        step = self._recorder.current
        if step is None:
            self.outside += 1
            return
        self._micro = self._micro + 1 if step is self._step else 0
        self._step = step
        with self._recorder.guarded({"step": step.step, "stage": "batch_inputs", "micro": self._micro}):
            step("batch_inputs", recordable(named_arguments(module, args, kwargs)), micro=self._micro, role=self._role)

    def _after(self, _module: Any, _args: Any, output: Any) -> None:
        step = self._recorder.current
        if step is None or self._outputs is None:
            return
        caught = {
            name: tensor
            for name, tensor in tensors_of("forward.output", output)
            if re.search(self._outputs, name.removeprefix("forward.output").lstrip("."))
        }
        if caught:
            step("modules", caught, micro=self._micro, role=self._role)
