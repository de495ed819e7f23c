"""Recorder: a native dump (docs/dump-format.md) from inside a training loop.

    recorder = Recorder("dump")
    recorder.checkpoint(step, model)                     # the weights that compute this step
    with recorder.step(step, rank=0) as record:
        record("forward_data", micro=0, input_ids=ids_BS, attention_mask=mask_BS, log_probs=logprobs_BR)

A record is one file, committed when its final name exists. Nothing is ever overwritten: a second
write of a key raises RecordExistsError.
"""

from __future__ import annotations

import contextlib
import operator
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from replay_core import hashes
from replay_core.errors import DumpError, RecordExistsError, RequestError, RldbgError
from replay_core.recorder import examination, formats, hooks
from replay_core.recorder.backlog import Backlog, Pressure
from replay_core.recorder.blackbox import BlackBox
from replay_core.recorder.ending import close_at_exit, commit_on_crash
from replay_core.recorder.file_lock import FileLock, is_let_go
from replay_core.recorder.forecast import Forecast
from replay_core.recorder.index import KEY_FIELDS, Identity, RankClaim, content_of, file_of, identity, line_of
from replay_core.recorder.manifest import LockedError, Manifest, config_hash, model_facts
from replay_core.recorder.patience import Patience, disk_call, is_given_up, tell
from replay_core.recorder.rotation import Rotation
from replay_core.recorder.settings import Settings
from replay_core.recorder.values import Digests, HeldRecord, Snapshots
from replay_core.recorder.writer import PRIVATE, SHARED, append_line, commit
from replay_core.records import weights_noted


@dataclass(frozen=True, slots=True)
class Lost:
    """A record that could not be written while `on_error` is "warn", and why."""

    key: str
    why: str


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
        if not _is_a_word(role):
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
        alignment: Mapping[str, str] | None = None,
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
            alignment: of fields whose shape does not tell it, what their token axis means: response, prompt, full,
                next (about the token after), sample (one per sample).

        Raises:
            RecordExistsError: a record of this key is already on disk.
            RequestError: `stage` would leave the dump directory, a field's name is taken by the key, or a
                value is of a kind no record can hold (unless on_error is "warn").
            DumpError: an earlier record could not be written.
        """
        with self.guarded({"stage": stage, "micro": micro}):
            if not self.wants(stage):
                return None
            together = {**(fields or {}), **more}
            snapshots = self.recorder.snapshots()
            key: dict[str, Any] = {"micro": micro, "epoch": epoch, "minibatch": minibatch, "role": role}
            return self.admit(stage, together, snapshots, alignment=alignment, **key)
        return None

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
        alignment: Mapping[str, str] | None = None,
    ) -> Path | None:
        """Take one record whose tensors may be snapshots of `snapshots` already; else as calling the object."""
        role = role or self.role
        key: dict[str, Any] = {"step": self.step, "rank": self.rank, "role": role, "micro": micro, "stage": stage}
        key.update(epoch=epoch, minibatch=minibatch)
        with self.recorder.guarded(key):
            key.update({part: optional(part, key[part]) for part in ("micro", "epoch", "minibatch")})
            if not _is_a_word(stage) or not _is_a_word(role):
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
            return self.recorder.admit(HeldRecord(key, kept, snapshots, dict(alignment or {})))
        return None

    def running(self, epoch: int | None, minibatch: int | None, micro: int) -> int:
        """The number of a forward across epochs and mini-batches, for a trainer whose own `micro` starts anew in each.

        Numbers are given in the order of the first asking; the same three always have the same number.
        """
        return self._running.setdefault((epoch, minibatch, micro), len(self._running))

    @contextmanager
    def modules(
        self,
        model: Any,
        pattern: str | None = None,
        *,
        micro: int | None = None,
        inputs: bool = False,
        gradients: bool = False,
        **key: Any,
    ) -> Iterator[None]:
        """Within it, outputs of the model's modules are caught in call order; recorded as `modules` when it ends.

        Args:
            pattern: a regular expression on module names; None is every module that runs.
            inputs: catch what goes into the modules too.
            gradients: catch the gradients of outputs too, of a backward within: `grad.layers.0.mlp.output`.

        Raises:
            RequestError: the pattern chooses no module.
        """
        with contextlib.ExitStack() as caught:
            seen: dict[str, Any] | None = None
            with self.guarded({"stage": "modules", "micro": micro}):
                if self.wants("modules"):
                    snapshots = self.recorder.snapshots()
                    seen = caught.enter_context(
                        hooks.catching(self.guarded, snapshots, model, pattern, inputs=inputs, gradients=gradients)
                    )
            yield
        if seen is not None:
            self.admit("modules", seen, snapshots, micro=micro, **key)

    def gradients(
        self, model: Any, *, micro: int | None = None, epoch: int | None = None, minibatch: int | None = None,
        role: str | None = None, **fields: Any,
    ) -> Path | None:  # fmt: skip
        """Record the gradients as they stand, of parameters that `target_param_pattern` chooses: `grad.<name>`."""
        with self.guarded({"stage": "gradient", "micro": micro}):
            if self.wants("gradient"):
                found = hooks.gradients(model, self.recorder.settings)
                return self("gradient", found, micro=micro, epoch=epoch, minibatch=minibatch, role=role, **fields)
        return None

    def params(
        self, model: Any, *, micro: int | None = None, epoch: int | None = None, minibatch: int | None = None,
        role: str | None = None, **fields: Any,
    ) -> Path | None:  # fmt: skip
        """Record the parameters that `target_param_pattern` chooses: `param.<name>`."""
        with self.guarded({"stage": "param", "micro": micro}):
            if self.wants("param"):
                found = hooks.parameters(model, self.recorder.settings)
                return self("param", found, micro=micro, epoch=epoch, minibatch=minibatch, role=role, **fields)
        return None

    @contextmanager
    def accumulating(self, model: Any, *, micro: int, **key: Any) -> Iterator[None]:
        """Around a backward: gradients right after they accumulate, before anything else sees them, as `gradient`.

        What is recorded is each parameter's whole gradient so far, in the order the backward reached them.
        """
        with contextlib.ExitStack() as caught:
            seen: dict[str, Any] | None = None
            with self.guarded({"stage": "gradient", "micro": micro}):
                if self.wants("gradient"):
                    snapshots = self.recorder.snapshots()
                    seen = caught.enter_context(
                        hooks.accumulating(self.guarded, snapshots, model, self.recorder.settings)
                    )
            yield
        if seen is not None:
            self.admit("gradient", seen, snapshots, micro=micro, **key)

    def examine(
        self, model: Any, again: Callable[[], Any] | None = None, *, micro: int | None = None, rng: Any = None
    ) -> dict[str, Any] | None:
        """Before the optimizer step: None while every gradient is finite; else an incident, which the manifest keeps
        and the black box commits on.

        Args:
            again, rng: as of `examination.rerun`; without `again` nothing is run a second time.

        Returns:
            trigger "non-finite gradient", step, rank, micro, parameters (names), kind (persistent | transient | failed
            | not rerun), first (the first module output that is not finite), weights (digest), checkpoint.
        """
        with self.guarded({"part": "examine", "micro": micro}):
            return self._examine(model, again, micro, rng)
        return None

    def _examine(
        self, model: Any, again: Callable[[], Any] | None, micro: int | None, rng: Any
    ) -> dict[str, Any] | None:
        bad = examination.not_finite(examination.gradients_of(model)) if self.active else []
        if not bad:
            return None
        recorder = self.recorder
        incident: dict[str, Any] = {
            "trigger": "non-finite gradient",
            "step": self.step,
            "rank": self.rank,
            "micro": micro,
            "parameters": [name.removeprefix("grad.") for name in bad],
            "kind": "not rerun",
            "weights": examination.weights_digest(model),
            "checkpoint": recorder.nearest_checkpoint(self.step),
        }
        if again is not None:
            snapshots = recorder.snapshots(whole=True)  # their values are looked at

            def keep(seen: dict[str, Any], gradients: dict[str, Any]) -> None:
                self.admit("modules", seen, snapshots, micro=micro, role=examination.RERUN)
                self("gradient", gradients, micro=micro, role=examination.RERUN)

            incident.update(examination.rerun(model, again, rng, snapshots, self.guarded, keep))
        if recorder.black_box is not None:
            recorder.commit_held(incident)
        else:
            recorder.note(incident=incident)
        return incident

    def guarded(self, key: Mapping[str, Any]) -> AbstractContextManager[None]:
        return self.recorder.guarded({"step": self.step, **key})

    def wants(self, stage: str) -> bool:
        """Whether records of a stage are kept of this step and rank."""
        settings = self.recorder.settings
        return self.active and settings.wants_rank(self.rank) and settings.wants_stage(stage)


class Recorder:
    """Writes one native dump directory. Each rank has its own Recorder on the same directory.

    Args:
        directory: where the dump goes; made if absent, extended if it is a native dump already.
        model: directory or hub id of the weights, when one set computes every step.
        flags: settings the run was computed with (attention, dtype, packing ...), kept in the manifest.
        config: anything JSON-able that configures the run; only its hash is kept.
        settings: what to record and how; `options` are single settings instead of or on top of it.
        black_box: keep steps in memory and write them only when something goes wrong.

    Raises:
        RequestError: a setting is wrong, the directory cannot be written or holds something else.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        model: str | None = None,
        flags: Mapping[str, Any] | None = None,
        config: Any = None,
        settings: Settings | None = None,
        black_box: BlackBox | None = None,
        **options: Any,
    ) -> None:
        self.directory = Path(directory)
        self.settings = (settings or Settings()).with_(**options)
        self.black_box = black_box
        #: The step being recorded, of the innermost open `step`.
        self.current: StepRecorder | None = None
        #: The last recorded step that ended; until one has, the first.
        self.newest: int | None = None
        #: Records given up while `on_error` is "warn".
        self.lost: list[Lost] = []
        self._claims: dict[tuple[str, int | None], RankClaim] = {}
        self._taken: set[Identity] = set()
        self._failure: BaseException | None = None
        #: Threads of a trainer (a backward has its own) may record at once.
        self._claiming = threading.Lock()
        self._process = os.getpid()
        #: Permissions of every file.
        self._mode = SHARED if self.settings.share else PRIVATE
        self._patience = Patience(self.settings.patience_s)
        self._backlog = Backlog(self.settings.queue_bytes, self._failed, self._patience)
        self._rotation = Rotation(self.directory, self.settings)
        #: Whether this process saves checkpoints: then it takes them away too.
        self._checkpointed = False
        self._manifest: Manifest | None = None
        models = {} if model is None else {"*": str(model)}
        self._facts = {"models": models, "flags": dict(flags or {}), "config_hash": config_hash(config)}
        if self.settings.enabled:
            self._begin()
            close_at_exit(self)
            if black_box is not None:
                commit_on_crash(self)

    def _begin(self) -> None:
        """Make the dump, or extend it. With on_error "warn" a disk that cannot take it now is asked again later."""
        with self.guarded({"part": "manifest.json"}) if self.settings.on_error == "warn" else contextlib.nullcontext():
            try:
                self._opened()
            except OSError as error:
                raise RequestError(
                    f"the directory cannot be recorded into: {error.strerror or error}",
                    file=str(self.directory),
                    expected="a directory this user may write, on a disk with room",
                ) from None

    def _opened(self) -> Manifest:
        if self._manifest is None:
            self._manifest = self._patience.run(lambda: Manifest(self.directory, self._facts, self._mode))
            _sweep(self.directory / "checkpoints")
        return self._manifest

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pressure(self) -> Pressure:
        """How the disk keeps up with the trainer (asynchronous recording)."""
        return self._backlog.pressure

    @contextmanager
    def step(self, step: int, *, rank: int | None = 0, role: str = "actor") -> Iterator[StepRecorder]:
        """Record one training step of one rank and role. A step the settings leave out records nothing."""
        before = self.current
        opened = self.open_step(step, rank=rank, role=role)
        failure: BaseException | None = None
        try:
            yield opened
        except BaseException as error:
            failure = error
            raise
        finally:
            self.end_step(opened, failure)
            self.current = before

    def open_step(self, step: int, *, rank: int | None = 0, role: str = "actor") -> StepRecorder:
        """As `step`, for a trainer whose loop no `with` can go around. `end_step` belongs to it."""
        # Of a step that is none nothing is recorded.
        self.current = StepRecorder(self, 0, None, "actor", active=False)
        with self.guarded({"step": step, "rank": rank, "role": role}):
            wanted = self.settings.wants_step(number("step", step))
            self.current = StepRecorder(self, step, rank, role, active=wanted)
            self.newest = step if wanted and self.newest is None else self.newest
        return self.current

    def end_step(self, step: StepRecorder, failure: BaseException | None = None) -> None:
        """The step is complete: the black box looks at it, steps that are too old go."""
        if self.current is step:
            self.current = None
        if not step.active:
            return
        self.newest = step.step
        if self.black_box is not None:
            # A trigger of the user's own may fail.
            with self.guarded({"step": step.step, "part": "black box"}):
                incident = self.black_box.close(step.step, failure)
                if incident is not None:
                    self.commit_held(incident)
        if self.settings.max_keep is not None:
            ended = {"step": step.step, "part": "max_keep"}
            with self.guarded(ended):
                self._do(lambda: self._rotate(step), 0, ended)

    def _rotate(self, step: StepRecorder) -> None:
        self._rotation.close(step.step, step.rank, step.role)
        if self._manifest is None or not self._checkpointed:
            return
        spare = self._rotation.spare_checkpoints(self._manifest.read()["models"])
        if spare:
            # First the word, then the weights: a reader is never pointed at half of them.
            def change(manifest: dict[str, Any]) -> None:
                for number in spare:
                    manifest["models"].pop(number, None)

            self._update(change)
        for directory in spare.values():
            shutil.rmtree(directory, ignore_errors=True)

    def commit_held(self, why: dict[str, Any]) -> None:
        """Write what the black box holds, and say in the manifest why."""
        if self.black_box is None:
            return
        for held in self.black_box.release():
            with self.guarded(held.key):
                self._submit(held)
        self.note(incident=why)

    def commit_box(self, trigger: str, what: str) -> None:
        """As `commit_held`, if the black box holds anything; on the disk when it returns: the process may end next."""
        if self.black_box is not None and self.black_box.steps and self._process == os.getpid():
            self.commit_held(self.black_box.incident(trigger, what, self.black_box.steps[-1]))
            self.flush()

    def note_model(self, step: int, reference: str) -> None:
        """Say which weights (a directory, relative to the dump or absolute, or a hub id) compute a step."""
        with self.guarded({"step": step, "part": "note_model"}):
            noted = {str(number("step", step)): str(reference)}
            self._update(lambda manifest: manifest["models"].update(noted))

    def note(
        self,
        *,
        incident: Mapping[str, Any] | None = None,
        model: Any = None,
        flags: Mapping[str, Any] | None = None,
        **facts: Any,
    ) -> None:
        """Keep facts in the manifest: tokenizer, seeds, parallel layout ... JSON-able.

        Args:
            incident: something that went wrong; added to the manifest's list.
            model: the model itself; its class, effective attention, dtype and size are kept.
            flags: settings the run is computed with; what the Recorder was given stays.
        """

        def change(manifest: dict[str, Any]) -> None:
            if incident is not None:
                manifest.setdefault("incidents", []).append(dict(incident))
            if model is not None:
                manifest.setdefault("model_facts", {}).update(model_facts(model))
            if flags:
                manifest["flags"] = {**flags, **manifest.get("flags", {})}
            if facts:
                manifest.setdefault("facts", {}).update(facts)

        self._update(change)

    def checkpoint(self, step: int, model: Any, tokenizer: Any = None, *, state: Any = None) -> Path:
        """Save the weights that compute `step` (before its optimizer step) as a Hugging Face directory.

        A model with `save_pretrained` is saved by it. The manifest then points replay at it.

        Args:
            state: its whole state dict, where the model itself holds shards alone.
        """
        target = self.directory / "checkpoints"
        with self.guarded({"step": step, "part": "checkpoint"}):
            target /= f"step_{number('step', step):06d}"
            if self.settings.wants_step(step):
                self._save(target, int(step), model, tokenizer, state)
        return target

    def _save(self, target: Path, step: int, model: Any, tokenizer: Any, state: Any) -> None:
        unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        reference = str(target.relative_to(self.directory))

        def change(manifest: dict[str, Any]) -> None:
            manifest["models"][str(step)] = reference
            manifest.setdefault("model_facts", {}).update(model_facts(model))

        # As long as it is held the folder belongs to somebody who lives.
        lock = FileLock(unfinished.with_suffix(".lock"), self._mode)

        def begin() -> None:
            self._opened()
            with disk_call():
                if target.exists():
                    raise RequestError(
                        f"a checkpoint of step {step} is already on disk",
                        file=str(target),
                        hint="after a restart record into a new directory, or count steps on from the last",
                    )
                target.parent.mkdir(exist_ok=True)
            lock.take()

        def end() -> None:
            with disk_call():
                if self._mode == PRIVATE:
                    unfinished.chmod(0o700)
                os.replace(unfinished, target)

        def tidy() -> None:
            with disk_call():
                shutil.rmtree(unfinished, ignore_errors=True)
            lock.release()

        self._patience.run(begin)
        try:
            # In the trainer's own thread: gathering shards may need its device.
            whole = {} if state is None else {"state_dict": state}
            model.save_pretrained(unfinished, safe_serialization=True, **whole)
            if tokenizer is not None:
                tokenizer.save_pretrained(unfinished)
            self._patience.run(end)
        finally:
            with contextlib.suppress(DumpError):  # of a disk that does not answer it was said, or is by the next call
                self._patience.run(tidy)
        self._checkpointed = True
        self._update(change)

    def nearest_checkpoint(self, step: int) -> str | None:
        """The weights noted for a step, or for the last step before it."""
        if self.settings.enabled:
            with self.guarded({"step": step, "part": "nearest_checkpoint"}):
                step = number("step", step)
                models = self._patience.run(lambda: self._opened().read())["models"]
                noted = weights_noted(models, step)
                return None if noted is None or (noted[0] or 0) > step else noted[1]
        return None

    def forecast(self, model: Any = None, *, rows: int = 0, tokens: int = 0, micros: int = 1) -> Forecast:
        """What a step will take on disk, before the first byte is written; see `Forecast.of`."""
        return Forecast.of(self.settings, self.directory, model, rows=rows, tokens=tokens, micros=micros)

    def flush(self) -> None:
        """Wait until everything recorded so far is on disk.

        Raises:
            DumpError: with on_error "raise", a record of before could not be written.
        """
        with self.guarded({"part": "what waits to be written"}):
            self._backlog.flush()
        self._raise_failure()

    def close(self) -> None:
        """Write what waits, let go of the directory, and say what was lost. Safe to call twice."""
        if self._process != os.getpid():
            return
        try:
            with self.guarded({"part": "what waits to be written"}):
                self._finish()
        finally:
            self._let_go()
        if self.lost:
            self.note(lost=[{"key": entry.key, "why": entry.why} for entry in self.lost])
        self._raise_failure()

    def _finish(self) -> None:
        """Write what waits; where the disk answers nothing more, each record that is given up for that is listed."""
        try:
            self._backlog.close()
        except DumpError as error:
            given_up = self._backlog.give_up()
            if self.settings.on_error == "raise":
                raise
            for what in given_up:
                self._give_up(what, error)

    def _let_go(self) -> None:
        """Of every role and rank. Where the disk answers nothing more the locks' files stay, and bind nobody."""
        with self._claiming:
            claims = list(self._claims.values())
            self._claims.clear()
        if not claims:
            return
        try:
            self._patience.run(lambda: [claim.release() for claim in claims])
        except DumpError:
            for claim in claims:
                claim.release.detach()

    @contextmanager
    def guarded(self, key: Mapping[str, Any]) -> Iterator[None]:
        """Within it, an error is the trainer's to see or, with on_error "warn", a record given up."""
        try:
            yield
        except Exception as error:
            if self.settings.on_error == "raise":
                if isinstance(error, OSError):
                    raise _told(error) from error
                raise
            self._give_up(_spelled(key), error)

    def admit(self, held: HeldRecord) -> Path | None:
        """Take a record: its key is now used. Its file, or None where it is held back or has none."""
        key = held.key
        self._raise_failure()
        claim = self._claims.get((key["role"], key["rank"])) if self._process == os.getpid() else None
        if claim is None:
            claim = self._patience.run(lambda: self._claim(key["role"], key["rank"]))
        known = identity(key)
        target = self.directory / file_of(key, self.settings.format)
        if known in self._taken or known in claim.known:
            restarts = key["epoch"] is not None or key["minibatch"] is not None
            raise RecordExistsError(
                "a record of this key is already on disk; nothing recorded is ever overwritten",
                file=str(target),
                found=_spelled(key),
                hint="micro runs on across mini-batches and epochs: micro=record.running(epoch, minibatch, micro)"
                if restarts
                else "give the second write its own micro number, or record into a new directory",
            )
        self._taken.add(known)
        if self.black_box is not None:
            self.black_box.hold(held)
            return None
        try:
            return self._submit(held)
        except Exception:
            # Nothing was written: the key is free for another try.
            self._taken.discard(known)
            raise

    def snapshots(self, *, whole: bool = False) -> Snapshots:
        is_kept = (
            whole or self.settings.level == "full" or self.settings.whole is not None or self.black_box is not None
        )
        owned = self.settings.asynchronous or self.black_box is not None
        # SHA-256 takes longer than a copy: that is the writer's work.
        is_told = not is_kept and hashes.taken() == "xxh3"
        return Snapshots(owned=owned, told=self.settings.level if is_told else None)

    def _submit(self, held: HeldRecord) -> Path | None:
        whole = self.settings.chosen(held.key, held.fields)
        # At level full a record of no field is a file, too.
        file = file_of(held.key, self.settings.format) if whole or self.settings.level == "full" else None
        self._do(lambda: self._write(held, whole, file), held.snapshots.nbytes, held.key)
        return self.directory / file if file else None

    def _do(self, job: Any, nbytes: int, key: Mapping[str, Any]) -> None:
        if self.settings.asynchronous:
            spelled = _spelled(key)
            self._backlog.put(lambda: self._attempt(job, spelled), nbytes, spelled)
        else:
            self._patience.run(job)

    def _attempt(self, job: Any, key: str) -> None:
        try:
            job()
        except Exception as error:
            if self.settings.on_error == "raise":
                raise
            if not is_given_up():  # or it is among the lost already
                self._give_up(key, error)

    def _write(self, held: HeldRecord, whole: Mapping[str, Any], file: Path | None) -> None:
        held.snapshots.ready()
        claim = self._claim(held.key["role"], held.key["rank"])
        stats = self.settings.level == "stats"
        digests = Digests(held.fields, beside=file is not None)
        if file is not None:
            content = content_of(held.key, whole, held.alignment)
            form = self.settings.format
            commit(self.directory / file, lambda out: formats.write(form, content, out), mode=self._mode)
        known = digests.taken()
        said: dict[str, Any] = {"shards": held.snapshots.shards, "digests": known, "alignment": held.alignment}
        line = line_of(held.key, file, held.fields, whole, stats=stats, **said)
        # A line without a file is the record itself; one with a file is made again from it if there is no room for it.
        with contextlib.suppress(*([] if file is None else [OSError])):
            append_line(claim.index, line, durable=file is None, mode=self._mode)

    def _claim(self, role: str, rank: int | None) -> RankClaim:
        if self._process != os.getpid():
            # A fork: what the parent had taken, it still holds.
            self._process = os.getpid()
            self._claims, self._claiming = {}, threading.Lock()
        with self._claiming:
            if (role, rank) not in self._claims:
                self._opened()
                self._claims[role, rank] = RankClaim(self.directory, role, rank, self._mode)
            return self._claims[role, rank]

    def _update(self, change: Callable[[dict[str, Any]], None]) -> None:
        if not self.settings.enabled:
            return
        part = {"part": "manifest.json"}
        with self.guarded(part):
            try:
                self._patience.run(lambda: self._opened().update(change))
            except LockedError as error:
                # A note is not worth a trainer, whatever is asked of records.
                self._give_up(_spelled(part), error)

    def _failed(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise (_told(failure) if isinstance(failure, OSError) else failure)

    def _give_up(self, key: str, error: Exception) -> None:
        why = error.message if isinstance(error, RldbgError) else f"{type(error).__name__}: {error}"
        if not self.lost:
            tell(f"rldbg: a record is lost, training goes on: {why} ({key}); recorder.lost lists every one")
        self.lost.append(Lost(key, why))


def _is_a_word(name: object) -> bool:
    """Whether a stage or a role may be called so: what lies in `checkpoints` is no record."""
    return isinstance(name, str) and name.isidentifier() and name != "checkpoints"


def _sweep(checkpoints: Path) -> None:
    """Take away what killed processes left unfinished."""
    for lock in checkpoints.glob(".step_*.lock"):
        if is_let_go(lock):
            shutil.rmtree(lock.with_suffix(".tmp"), ignore_errors=True)
            with contextlib.suppress(OSError):
                lock.unlink(missing_ok=True)


def _spelled(key: Mapping[str, Any]) -> str:
    return ", ".join(f"{part} {value}" for part, value in key.items() if value is not None)


def _told(error: BaseException) -> RldbgError:
    """An error of the operating system in our words."""
    assert isinstance(error, OSError)
    return DumpError(
        f"a record cannot be written: {error.strerror or error}",
        file=str(error.filename) if error.filename else None,
        hint='free some room, or train on without records: Recorder(..., on_error="warn")',
    )
