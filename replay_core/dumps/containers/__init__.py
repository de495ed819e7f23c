"""Files that hold tensors, read without torch and without running anything they carry.

`read_container(path)` answers with a `Content`: the file's structure, its tensors as `TensorRef`s that
say where the bytes lie. `read_nested(ref)` does the same for a file stored inside another one.
Exported lazily, so that naming the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replay_core.dumps.containers.reading import Content, read_container, read_nested

__all__ = ["Content", "read_container", "read_nested"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from replay_core.dumps.containers import reading

    return getattr(reading, name)
