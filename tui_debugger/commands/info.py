"""`rldbg info`: versions, paths, devices and the terminal: what to paste into a bug report."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import click

import replay_core
from replay_core.documents.version import SCHEMA_VERSION
from replay_core.export.documents import stamp
from tui_debugger.commands import document_output, finish

if TYPE_CHECKING:
    from replay_core.documents.info import InfoDocument

PACKAGES = ("textual", "rich", "numpy", "ml-dtypes", "torch", "transformers", "flash-attn", "safetensors")


@click.command("info")
@document_output
def command(as_json: bool, output: Path | None) -> int:
    """Print versions, paths, devices and what the terminal can do."""
    return finish(_info(), _report, as_json=as_json, output=output)


def _info() -> InfoDocument:
    from replay_core.telemetry.devices import gpus
    from tui_debugger import paths

    doc: InfoDocument = {
        "schema_version": SCHEMA_VERSION,
        "kind": "info",
        **stamp(),
        "rldbg": replay_core.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "gpus": gpus(),
        "packages": {name: _version(name) for name in PACKAGES},
        "paths": paths.described(),
        "terminal": {
            "stdin": sys.stdin.isatty(),
            "stdout": sys.stdout.isatty(),
            "encoding": sys.stdout.encoding,
            **{name: os.environ.get(name) for name in ("TERM", "COLORTERM", "TMUX", "NO_COLOR", "LANG", "LC_ALL")},
        },
    }
    return doc


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _report(doc: InfoDocument) -> str:
    lines = [f"rldbg {doc['rldbg']}  python {doc['python']}  {doc['platform']}  {doc['cpu_count']} cpus"]
    lines.append("gpus       " + (", ".join(gpu["name"] for gpu in doc["gpus"]) or "none"))
    for title in ("packages", "paths", "terminal"):
        lines.append(title)
        lines += [f"  {name:<14}{'-' if value is None else value}" for name, value in doc[title].items()]
    return "\n".join(lines)
