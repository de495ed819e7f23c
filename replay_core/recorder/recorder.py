"""Recorder: a native dump (docs/dump-format.md) from inside a plain PyTorch training loop.

    recorder = Recorder("dump")
    recorder.checkpoint(step, model)                     # the weights that compute this step
    with recorder.step(step, rank=0) as record:
        record("forward_data", micro=0, input_ids=ids_BS, attention_mask=mask_BS, log_probs=logprobs_BR)

A record is one file, committed when its final name exists. Nothing is ever overwritten: a second
write of a key raises RecordExistsError.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from replay_core.errors import RequestError
from replay_core.recorder.writer import append_line, commit, replace_whole

#: Version of the dump's own layout (docs/dump-format.md); a reader refuses a newer one.
FORMAT_VERSION = 1


class Recorder:
    """Writes one native dump directory. Each rank has its own Recorder on the same directory.

    Args:
        directory: where the dump goes; made if absent, extended if it is a native dump already.
        model: directory or hub id of the weights, when one set computes every step.
        flags: settings the run was computed with (attention, dtype, packing ...), kept in the manifest.
        config: anything JSON-able that configures the run; only its hash is kept.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        model: str | None = None,
        flags: Mapping[str, Any] | None = None,
        config: Any = None,
    ) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._manifest_path = self.directory / "manifest.json"
        if self._manifest_path.exists():
            self._manifest = json.loads(self._manifest_path.read_text())
        else:
            if any(entry.name != "checkpoints" for entry in self.directory.iterdir()):
                raise RequestError(
                    "the directory holds other files and is no native dump",
                    file=str(self.directory),
                    expected="an empty directory or one with a manifest.json",
                    hint="record into a new directory",
                )
            self._manifest = {
                "format": "rldbg-dump",
                "schema_version": FORMAT_VERSION,
                "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "models": {},
                "flags": dict(flags or {}),
                "environment": _environment(),
                "git_commit": _git_commit(),
                "config_hash": _hash(config),
            }
            if model is not None:
                self._manifest["models"]["*"] = str(model)
            self._write_manifest()

    @contextmanager
    def step(self, step: int, *, rank: int | None = 0, role: str = "actor") -> Iterator[StepRecorder]:
        """Record one training step of one rank and role."""
        yield StepRecorder(self, step, rank, role)

    def note_model(self, step: int, reference: str) -> None:
        """Say which weights (a directory, relative to the dump or absolute, or a hub id) compute a step."""
        # Another rank may have added a step since this one looked.
        self._manifest["models"] = {**json.loads(self._manifest_path.read_text())["models"], str(step): str(reference)}
        self._write_manifest()

    def checkpoint(self, step: int, model: Any, tokenizer: Any = None) -> Path:
        """Save the weights that compute `step` (before its optimizer step) as a Hugging Face directory.

        A model with `save_pretrained` is saved by it. The manifest then points replay at it.
        """
        target = self.directory / "checkpoints" / f"step_{step:06d}"
        if target.exists():
            raise RequestError(f"a checkpoint of step {step} is already on disk", file=str(target))
        unfinished = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        model.save_pretrained(unfinished, safe_serialization=True)
        if tokenizer is not None:
            tokenizer.save_pretrained(unfinished)
        os.replace(unfinished, target)
        self.note_model(step, str(target.relative_to(self.directory)))
        return target

    def _write_manifest(self) -> None:
        replace_whole(self._manifest_path, json.dumps(self._manifest, indent=1).encode())

    def _commit(self, key: dict[str, Any], fields: dict[str, Any]) -> Path:
        import torch

        rank = "" if key["rank"] is None else f"_rank{key['rank']}"
        micro = "" if key["micro"] is None else f"_micro{key['micro']}"
        role = Path() if key["role"] == "actor" else Path(key["role"])
        name = role / key["stage"] / f"step_{key['step']:06d}{rank}{micro}.pt"
        content = {"step": key["step"], "rank": key["rank"], "micro_idx": key["micro"]}
        content.update({part: key[part] for part in ("epoch", "minibatch") if key[part] is not None})
        content.update(fields)
        target: Path = self.directory / name
        commit(target, lambda file: torch.save(content, file))
        described = [_describe(field, value, order) for order, (field, value) in enumerate(fields.items())]
        line = {"key": key, "file": str(name), "fields": described}
        index = self.directory / f"index_rank{key['rank'] if key['rank'] is not None else 0}.jsonl"
        append_line(index, json.dumps(line).encode())
        return target


class StepRecorder:
    """Writes the records of one (step, rank, role)."""

    def __init__(self, recorder: Recorder, step: int, rank: int | None, role: str) -> None:
        self._recorder = recorder
        self._key = {"step": int(step), "rank": rank, "role": role}

    def __call__(
        self,
        stage: str,
        fields: Mapping[str, Any] | None = None,
        *,
        micro: int | None = None,
        epoch: int | None = None,
        minibatch: int | None = None,
        **more: Any,
    ) -> Path:
        """Write one record and return its file.

        `fields` and keyword arguments are its tensors, numbers, texts, or nested lists and dicts of
        them, in order of computation. Tensors are copied to the host, detached; a view is stored as
        its own bytes, never with the storage it shares.

        Raises:
            RecordExistsError: a record of this key is already on disk.
            RequestError: `stage` would leave the dump directory, or a field's name is taken by the key.
        """
        together = {**(fields or {}), **more}
        if not stage.isidentifier():
            raise RequestError("a stage is one plain word", expected="forward_data, loss, modules ...", found=stage)
        taken = {"step", "rank", "micro_idx", "epoch", "minibatch"} & set(together)
        if taken:
            raise RequestError("the key already names these fields", tensor=", ".join(sorted(taken)))
        key = {**self._key, "micro": micro, "stage": stage, "epoch": epoch, "minibatch": minibatch}
        return self._recorder._commit(key, {name: _detached(value, name) for name, value in together.items()})

    record = __call__


def _detached(value: Any, name: str) -> Any:
    """A value as it is stored: tensors on the host, dense, detached, each owning just its own bytes."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_meta:
            kind = "meta" if value.is_meta else str(value.layout).removeprefix("torch.")
            raise RequestError(
                "only dense tensors can be recorded",
                tensor=name,
                found=f"a {kind} tensor",
                hint="record value.to_dense()",
            )
        host = value.detach().cpu().resolve_conj().resolve_neg()
        # torch.save stores the whole storage behind a view.
        own = host.untyped_storage().nbytes() == host.numel() * host.element_size() and host.is_contiguous()
        return host if own else host.contiguous().clone()
    if isinstance(value, Mapping):
        return {str(key): _detached(inner, f"{name}.{key}") for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_detached(inner, f"{name}.{position}") for position, inner in enumerate(value)]
    return value


def _describe(name: str, value: Any, order: int) -> dict[str, Any]:
    import torch

    if not isinstance(value, torch.Tensor):
        return {"name": name, "dtype": type(value).__name__, "shape": None, "digest": None, "order": order}
    digest = "blake2b:" + hashlib.blake2b(_raw(value), digest_size=16).hexdigest()
    return {
        "name": name,
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "digest": digest,
        "order": order,
    }


def _raw(tensor: Any) -> Any:
    """A contiguous host tensor's bytes, not copied. numpy has no bfloat16; a view as uint8 refuses odd strides."""
    nbytes = tensor.numel() * tensor.element_size()
    return (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr()) if nbytes else b""


def _environment() -> dict[str, Any]:
    loaded = [name for name in ("torch", "transformers", "numpy") if name in sys.modules]
    versions: dict[str, Any] = {name: sys.modules[name].__version__ for name in loaded}
    return {"python": platform.python_version(), "platform": platform.platform(), **versions}


def _git_commit() -> str | None:
    try:
        answer = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def _hash(config: Any) -> str | None:
    if config is None:
        return None
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()
