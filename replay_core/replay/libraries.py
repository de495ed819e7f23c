"""transformers, imported beside flash-attention packages that may be installed and broken.

transformers imports flash_attn when it is imported itself: one that was built for another torch would take every
replay with it. So each is tried first; a broken one is hidden from this process, and why is kept in BROKEN.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys

#: The packages of flash attention 2 (and 4, which lies inside it) and 3.
_FLASH = ("flash_attn", "flash_attn_interface")


def _hidden() -> dict[str, str]:
    broken: dict[str, str] = {}
    for package in _FLASH:
        if package in sys.modules or importlib.util.find_spec(package) is None:
            continue
        try:
            importlib.import_module(package)
        except Exception as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
            broken[package] = f"{type(error).__name__}: {first}"
            # None makes the import system say that there is no such module, to everybody.
            sys.modules[package] = None  # type: ignore[assignment]
    return broken


#: package -> the error that importing it raised.
BROKEN = _hidden()

import transformers  # noqa: E402 - after the broken packages are out of its way

# transformers imports its parts when they are asked for. This one is half of it and every model asks for it: here,
# where nothing looks for garbage meanwhile (`collecting.importing`). What is broken in it is told where it is used.
with contextlib.suppress(Exception):
    importlib.import_module("transformers.modeling_utils")

__all__ = ["BROKEN", "transformers"]
