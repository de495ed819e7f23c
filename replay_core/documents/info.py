"""`rldbg info`: what to paste into a bug report."""

from __future__ import annotations

from typing import Literal, TypedDict

from replay_core.documents.parts import Count, Versioned


class GpuEntry(TypedDict):
    """A GPU, and its memory in MiB."""

    name: str
    total_mib: Count
    free_mib: Count
    driver: str


class InfoDocument(Versioned):
    """Versions, paths, devices and the terminal."""

    kind: Literal["info"]
    rldbg: str
    python: str
    platform: str
    cpu_count: int | None
    gpus: list[GpuEntry]
    packages: dict[str, str | None]
    paths: dict[str, str]
    terminal: dict[str, str | bool | None]
