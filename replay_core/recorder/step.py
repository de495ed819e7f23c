"""StepRecorder: what a trainer calls within one step."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay_core.errors import RequestError
from replay_core.recorder import hooks
from replay_core.recorder.examination import examine
from replay_core.recorder.index import KEY_FIELDS
from replay_core.recorder.values import Snapshots

if TYPE_CHECKING:
    from replay_core.recorder.recorder import Recorder


@dataclass(slots=True)
class Held:
    """A record on its way to the disk: its key, its fields on the host, and the copies that may still arrive."""

    key: dict[str, Any]
    fields: dict[str, Any]
    snapshots: Snapshots


def number(part: str, value: Any) -> int:
    """A part of a key as the plain number that files and index spell; a NumPy or torch integer is one too.

    Raises:
        RequestError: it is no whole number from 0.
    """
    try:
        found = operator.index(value)
    except TypeError:
        found = -1
    if found < 0:
        raise RequestError(f"{part} is a whole number from 0", expected="0, 1, 2 ...", found=f"{part}={value!r}")
    return found


def optional(part: str, value: Any) -> int | None:
    """As `number`; None where the part is not known."""
    return None if value is None else number(part, value)


class StepRecorder:
    """Writes the records of one (step, rank, role). `active` is False where the settings leave the step out."""

    def __init__(self, recorder: Recorder, step: int, rank: int | None, role: str, *, active: bool = True) -> None:
        if not str(role).isidentifier():
            raise RequestError("a role is one plain word", expected="actor, critic, ref, rollout, reward", found=role)
        self.step, self.rank, self.role = number("step", step), optional("rank", rank), role
        self.active = active
        self.recorder = recorder
        self._running: dict[tuple[int | None, int | None, int], int] = {}

    def __call__(
        self,
        stage: str,
        fields: Mapping[str, Any] | None = None,
        *,
        micro: int | None = None,
        epoch: int | None = None,
        minibatch: int | None = None,
        role: str | None = None,
        **more: Any,
    ) -> Path | None:
        """Take one record. Returns its file; None where none is written (left out, held back, no full level).

        `fields` and keyword arguments are its tensors, numbers, texts, or nested lists and dicts of
        them, in order of computation. Tensors are copied to the host, detached; a view is stored as
        its own bytes, never with the storage it shares.

        Args:
            stage: the dump point: forward_data, loss, trajectory ...
            micro: the running number of the forward within (step, rank), across epochs and mini-batches.
            role: another role than the step's.

        Raises:
            RecordExistsError: a record of this key is already on disk.
            RequestError: `stage` would leave the dump directory, a field's name is taken by the key, or a
                value is of a kind no record can hold (unless on_error is "warn").
            DumpError: an earlier record could not be written.
        """
        if not self.active or not self.recorder.settings.wants_stage(stage):
            return None
        snapshots = self.recorder.snapshots()
        together = {**(fields or {}), **more}
        return self.admit(stage, together, snapshots, micro=micro, epoch=epoch, minibatch=minibatch, role=role)

    record = __call__

    def admit(
        self,
        stage: str,
        fields: Mapping[str, Any],
        snapshots: Snapshots,
        *,
        micro: int | None = None,
        epoch: int | None = None,
        minibatch: int | None = None,
        role: str | None = None,
    ) -> Path | None:
        """Take one record whose tensors may be snapshots of `snapshots` already; else as calling the object."""
        role = role or self.role
        key: dict[str, Any] = {"step": self.step, "rank": self.rank, "role": role, "micro": micro, "stage": stage}
        key.update(epoch=epoch, minibatch=minibatch)
        with self.recorder.guarded(key):
            key.update({part: optional(part, key[part]) for part in ("micro", "epoch", "minibatch")})
            if not stage.isidentifier() or not role.isidentifier():
                raise RequestError(
                    "a stage, and a role, is one plain word",
                    expected="forward_data, loss, modules ...",
                    found=f"{role}/{stage}",
                )
            taken = set(KEY_FIELDS) & set(fields)
            if taken:
                raise RequestError("the key already names these fields", tensor=", ".join(sorted(taken)))
            kept = {name: snapshots.take(value, name) for name, value in fields.items()}
            snapshots.forget()
            return self.recorder.admit(Held(key, kept, snapshots))
        return None

    def running(self, epoch: int | None, minibatch: int | None, micro: int) -> int:
        """The number of a forward across epochs and mini-batches, for a trainer whose own `micro` starts anew in each.

        Numbers are given in the order of the first asking; the same three always have the same number.
        """
        return self._running.setdefault((epoch, minibatch, micro), len(self._running))

    def modules(
        self, model: Any, pattern: str | None = None, *, micro: int | None = None, inputs: bool = False, **key: Any
    ) -> AbstractContextManager[None]:
        """Within it, outputs of the model's modules are caught in call order; recorded as `modules` when it ends.

        Args:
            pattern: a regular expression on module names; None is every module that runs.
            inputs: catch what goes into the modules too.

        Raises:
            RequestError: the pattern chooses no module.
        """
        return hooks.record_modules(self, model, pattern, inputs=inputs, micro=micro, **key)

    def gradients(self, model: Any, *, micro: int | None = None, **fields: Any) -> Path | None:
        """Record the gradients as they stand, of parameters that `target_param_pattern` chooses: `grad.<name>`."""
        if not self.active or not self.recorder.settings.wants_stage("gradient"):
            return None
        return self("gradient", {**hooks.gradients(model, self.recorder.settings), **fields}, micro=micro)

    def params(self, model: Any, *, micro: int | None = None, **fields: Any) -> Path | None:
        """Record the parameters that `target_param_pattern` chooses: `param.<name>`."""
        if not self.active or not self.recorder.settings.wants_stage("param"):
            return None
        return self("param", {**hooks.parameters(model, self.recorder.settings), **fields}, micro=micro)

    def accumulating(self, model: Any, *, micro: int, **key: Any) -> AbstractContextManager[None]:
        """Around a backward: gradients right after they accumulate, before anything else sees them, as `gradient`.

        What is recorded is each parameter's whole gradient so far, in the order the backward reached them.
        """
        return hooks.record_accumulation(self, model, micro=micro, **key)

    def examine(
        self, model: Any, again: Callable[[], Any] | None = None, *, micro: int | None = None, rng: Any = None
    ) -> dict[str, Any] | None:
        """Before the optimizer step: if a gradient is not finite, find out what made it so. See `examination`."""
        return examine(self, model, again, micro=micro, rng=rng) if self.active else None
