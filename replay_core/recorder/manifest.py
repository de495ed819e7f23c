"""The dump's manifest.json: what a replay needs to know, kept whole while several ranks write it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from replay_core.errors import DumpError, RequestError
from replay_core.recorder.command_line import as_kept, redacted
from replay_core.recorder.file_lock import FileLock
from replay_core.recorder.patience import disk_call
from replay_core.recorder.writer import PRIVATE, replace_whole

#: Version of the dump's own layout (docs/dump-format.md); a reader refuses a newer one.
FORMAT_VERSION = 1

#: Seconds that another process may hold the manifest before this one goes on without its note.
LOCK_S = 5.0
#: Temporary names of the manifest.
_TEMPORARY = ".manifest.json.*.tmp"

#: Libraries whose version changes numbers.
_LIBRARIES = (
    "torch", "transformers", "numpy", "accelerate", "trl", "peft", "deepspeed", "flash_attn", "vllm", "sglang",
    "triton", "liger_kernel", "verl", "openrlhf", "megatron",
)  # fmt: skip
#: Variables that choose kernels, their order of summation, or seeds.
_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "OMP_NUM_THREADS",
    "MKL_NUM_THREADS", "PYTHONHASHSEED", "TORCH_COMPILE_DISABLE", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "ATTN_BACKEND", "VLLM_ATTENTION_BACKEND", "NVIDIA_TF32_OVERRIDE",
)  # fmt: skip


class LockedError(DumpError):
    """Another process holds the manifest for longer than anybody needs to write it."""


class Manifest:
    """`manifest.json` of one dump directory. Every change is read, made and written under a lock.

    Args:
        mode: permissions of the file.

    Raises:
        OSError: the directory cannot be written.
        RequestError: it holds other files and no manifest.
        DumpError: the manifest there is not one, or is of a newer version; or it is locked.
    """

    def __init__(self, directory: Path, facts: Mapping[str, Any], mode: int = PRIVATE) -> None:
        self._path, self._mode = directory / "manifest.json", mode
        #: Whether the last who wanted the lock got it: the next does not wait for one that is held for good.
        self._was_free = True
        with disk_call():
            directory.mkdir(parents=True, exist_ok=True, mode=mode | (mode & 0o444) >> 2)
            there = self._path.exists()
        if not there:
            with self._locked():
                if not self._path.exists():
                    _refuse_strangers(directory)
                    self._write({**_born(), **facts})
        self.read()

    def read(self) -> dict[str, Any]:
        """What the manifest says now."""
        try:
            with disk_call():
                text = self._path.read_text()
            content = json.loads(text)
        except (OSError, ValueError) as error:
            raise DumpError(f"the manifest cannot be read: {error}", file=str(self._path)) from None
        version = content.get("schema_version") if isinstance(content, dict) else None
        if not isinstance(version, int) or version > FORMAT_VERSION:
            raise DumpError(
                "the manifest is not one this recorder can extend",
                file=str(self._path),
                expected=f"schema_version <= {FORMAT_VERSION}",
                found=str(version),
                hint="record into a new directory",
            )
        return dict(content)

    def update(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Change the manifest in place: `change` is given its content, another rank's words included.

        Raises:
            LockedError: another process holds it and does not let go.
            DumpError, OSError: it cannot be read, or written.
        """
        with self._locked():
            content = self.read()
            before = json.dumps(content)
            change(content)
            if json.dumps(content) != before:
                self._write(content)

    def _write(self, content: dict[str, Any]) -> None:
        replace_whole(self._path, json.dumps(redacted(content), indent=1).encode(), mode=self._mode)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        lock = FileLock(self._path.with_name(".manifest.lock"), self._mode)
        self._was_free = lock.take(LOCK_S if self._was_free else 0.0)
        if not self._was_free:
            raise LockedError(
                "the manifest is locked by another process",
                file=str(self._path),
                expected=f"its lock within {LOCK_S:g} s",
                hint="end whoever holds it (fuser .manifest.lock), or record into a new directory",
            )
        try:
            for left in self._path.parent.glob(_TEMPORARY) if lock.is_certain else ():
                # Only who has the lock writes one: this one's writer was killed.
                left.unlink(missing_ok=True)
            yield
        finally:
            lock.release()


def _refuse_strangers(directory: Path) -> None:
    others = sorted(
        entry.name for entry in directory.iterdir() if entry.name != "checkpoints" and not entry.name.startswith(".")
    )
    if others:
        raise RequestError(
            "the directory holds other files and is no native dump",
            file=str(directory),
            expected="an empty directory or one with a manifest.json",
            found=", ".join(others[:4]) + (" …" if len(others) > 4 else ""),
            hint="record into a new directory",
        )


def _born() -> dict[str, Any]:
    return {
        "format": "rldbg-dump",
        "schema_version": FORMAT_VERSION,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "models": {},
        "environment": environment(),
        "determinism": determinism(),
        "git_commit": _git_commit(),
        "command": as_kept(sys.argv),
    }


def environment() -> dict[str, Any]:
    """Versions of Python, the platform and the libraries that are loaded, and the variables that change numbers."""
    loaded = {name: sys.modules[name] for name in _LIBRARIES if name in sys.modules}
    versions = {name: str(getattr(module, "__version__", "unknown")) for name, module in loaded.items()}
    found: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform(), **versions}
    torch = sys.modules.get("torch")
    if torch is not None:
        found["cuda"] = torch.version.cuda
        found["threads"] = torch.get_num_threads()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            found["device"] = torch.cuda.get_device_name()
    variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    return {**found, "variables": variables} if variables else found


def determinism() -> dict[str, Any] | None:
    """torch's switches that decide whether a run can be repeated bit for bit, and the seed it was given."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    return {
        "seed": torch.initial_seed(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "tf32_matmul": torch.backends.cuda.matmul.allow_tf32,
        "bf16_reduction": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    }


def model_facts(model: Any) -> dict[str, Any]:
    """What the manifest keeps of a model: its class, weights' name, effective attention and dtypes, its mode."""
    config = getattr(model, "config", None)
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()})
    facts = {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "name_or_path": getattr(config, "_name_or_path", None) or None,
        "attention": getattr(config, "_attn_implementation", None),
        "dtype": dtypes[0] if len(dtypes) == 1 else dtypes,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "training": bool(getattr(model, "training", False)),
        "compiled": hasattr(model, "_orig_mod"),
    }
    return {name: value for name, value in facts.items() if value is not None}


def computed_as(
    model: Any, mixed: str | None = None, *, logits: str | None = None, positions: str | None = None
) -> dict[str, Any]:
    """The settings a model computes with, in the words of a replay's flags.

    Args:
        mixed: the dtype of an autocast.
        logits: how its head's logits are held in training (`whole`, `rows`, `fused`), where that is known.
        positions: `library` where the trainer gives no position_ids.
    """
    facts = model_facts(model)
    dtype = mixed or (facts["dtype"] if isinstance(facts.get("dtype"), str) else None)
    known = {"attention": facts.get("attention"), "dtype": dtype, "logits": logits, "position_ids": positions}
    return {name: value for name, value in known.items() if value is not None}


def config_hash(config: Any) -> str | None:
    if config is None:
        return None
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()


def _git_commit() -> str | None:
    try:
        answer = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
