"""Which settings cannot run on this machine, told without importing torch: what a person sees before asking.

A replay finds out for itself (`attention.need`); here only what the file system says is known, so that
silence means "not known to be unavailable". Standard library only.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

_PACKAGES = {"fa2": "flash_attn", "fa3": "flash_attn_interface", "fa4": "flash_attn.cute"}
_CUDA_ONLY = ("sdpa-efficient", "sdpa-cudnn", *_PACKAGES)


def unavailable(name: str, value: Any, flags: Mapping[str, Any]) -> str | None:
    """Why a flag cannot have this value here beside the others, or None when nothing is known against it."""
    if name == "device" and value == "cuda" and not has_gpu():
        return "no NVIDIA device here"
    if name == "attention":
        package = _PACKAGES.get(str(value))
        if package is not None and not _is_installed(package):
            return f"{package} is not installed"
        if value in _CUDA_ONLY and flags.get("device") != "cuda":
            return "runs on CUDA only"
        if package is not None and flags.get("dtype") == "float32":
            return "float16 and bfloat16 only"
    if name == "compile" and value == "inductor" and flags.get("device") != "cuda" and not _has_compiler():
        return "no C++ compiler here"
    return None


@lru_cache(maxsize=1)
def has_gpu() -> bool:
    """Whether the driver shows a device to this process."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


@cache
def _is_installed(package: str) -> bool:
    # Only the top package: finding a submodule would import its parent.
    top, _, rest = package.partition(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not rest:
        return spec is not None
    return any((Path(place) / rest).exists() for place in spec.submodule_search_locations or ())


@lru_cache(maxsize=1)
def _has_compiler() -> bool:
    return any(shutil.which(os.environ.get("CXX") or name) for name in ("g++", "clang++", "c++"))
