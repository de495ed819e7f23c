"""Builds the kernel of a pair's figures into a wheel (and beside the source of an editable install), where there is a C
compiler. Where there is none, the wheel is one for every platform, and numpy does what the kernel does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_SOURCE = Path("replay_core/native.c")
_OPTIONS = (
    "-O3",
    "-D_FILE_OFFSET_BITS=64",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
)


def compiled(source: Path, library: Path) -> bool:
    """Whether something here compiles the source to the library, which is then whole."""
    asked = os.environ.get("CC", "cc").split()
    compiler = next((found for name in (asked[0], "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None or sys.platform == "win32":
        return False
    part = library.with_suffix(f".{os.getpid()}.tmp")
    try:
        subprocess.run([compiler, *_OPTIONS, str(source), "-o", str(part)], check=True, capture_output=True)
        os.replace(part, library)
    except (OSError, subprocess.CalledProcessError):
        part.unlink(missing_ok=True)
        return False
    return True


class KernelHook(BuildHookInterface):  # type: ignore[type-arg, misc]
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        library = _SOURCE.with_name("native.kernel")
        if not compiled(self.root / _SOURCE, self.root / library):
            self.app.display_warning("nothing here compiles C: numpy will compare, at a quarter of the speed")
            return
        build_data["artifacts"].append(str(library))
        build_data["pure_python"] = False
        # Of a platform, and of no Python's version: nothing in it knows Python.
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
