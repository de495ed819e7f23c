"""What an inference engine's model computes, recorded from within its worker: vLLM, sglang, any module that is called.

An engine runs forwards that no trainer numbers: each that is recorded is a step of its own, counted from 0.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from replay_core.recorder import hooks, seams
from replay_core.recorder.recorder import Recorder
from replay_core.recorder.weights import record_weights


class EngineForwards:
    """The next forwards of a model: what it is given (`batch_inputs`) and what its modules give (`modules`).

    When the last is recorded the hooks are gone and the dump is closed. A forward that is replayed from a CUDA graph
    calls no module: the engine has to run eagerly (`enforce_eager=True`, `--disable-cuda-graph`).

    Args:
        modules: a regular expression on module names; None is every module that runs.
        forwards: how many are recorded.
        rank: of the worker; None is the process group's.

    Raises:
        RequestError: the directory holds something else, or the pattern is none.
    """

    def __init__(
        self,
        model: Any,
        directory: str | os.PathLike[str],
        *,
        modules: str | None = None,
        forwards: int = 1,
        rank: int | None = None,
    ) -> None:
        self._model, self._pattern, self._left = model, modules, forwards
        self._rank = seams.rank_now() if rank is None else rank
        self._recorder = Recorder(directory, model=model, on_error="warn")
        self._recorder.note(recorded_by="an inference engine's worker")
        self._number, self._is_open = 0, False
        self._within = contextlib.ExitStack()
        self._handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True),
        ]

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._is_open:
            self._end()  # a forward that raised: what there is of it stays a step
        self._is_open = True
        record = self._within.enter_context(self._recorder.step(self._number, rank=self._rank, role="rollout"))
        record("batch_inputs", hooks.recordable(hooks.named_arguments(module, args, kwargs)), micro=0)
        self._within.enter_context(record.modules(self._model, self._pattern, micro=0))

    def _after(self, _module: Any, _args: Any, _kwargs: Any, _output: Any) -> None:
        self._end()
        self._left -= 1
        if self._left <= 0:
            self.remove()

    def _end(self) -> None:
        self._within.close()
        self._number, self._is_open = self._number + 1, False

    def remove(self) -> None:
        """Take the hooks off again and close the dump."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._recorder.close()


def record_forwards(model: Any, directory: str | os.PathLike[str], **options: Any) -> None:
    """Record the next forwards of an engine's model, as `EngineForwards`: one line in a worker.

    Raises:
        RequestError: as `EngineForwards`.
    """
    EngineForwards(model, directory, **options)


def sglang_hook(config: Mapping[str, Any]) -> Callable[[Any, Any, Any], None]:
    """A hook factory for sglang's `--forward-hooks`, on its decoder (`"target_modules": ["model"]`): of the outer model
    it only `forward` is called, which no hook sees, so the head is in neither records nor digests.

    The server's first forward puts `record_forwards` in its place; those after it are recorded.

    Args:
        config: `directory` and the options of `EngineForwards`; `weights`: a directory for the digests of the weights
            at every `every`-th forward (100), whose number is the step, for `rldbg weights`.
    """
    given = dict(config)
    weights, every = given.pop("weights", None), int(given.pop("every", 100))
    directory = given.pop("directory", None)
    seen = 0

    def hook(model: Any, _args: Any, _output: Any) -> None:
        nonlocal seen
        if seen == 0 and directory is not None:
            record_forwards(model, directory, **given)
        if weights is not None and seen % every == 0:
            record_weights(model, weights, step=seen, rank=seams.rank_now())
        seen += 1

    return hook
