"""Golden documents: what left the machine once must leave it again. RLDBG_REGOLD=1 rewrites them; read the diff."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).with_name("golden")


def check(name: str, document: Any, **roots: Path) -> None:
    """Hold a document against tests/golden/<name>.json; `roots` are folders whose place does not matter."""
    _hold(GOLDEN / f"{name}.json", json.dumps(normalised(document, roots), indent=1) + "\n")


def check_text(name: str, text: str, **roots: Path) -> None:
    """Hold a report against tests/golden/<name>.txt."""
    _hold(GOLDEN / f"{name}.txt", str(normalised(text, roots)) + "\n")


def _hold(file: Path, found: str) -> None:
    if os.environ.get("RLDBG_REGOLD") == "1":
        file.parent.mkdir(exist_ok=True)
        file.write_text(found, encoding="utf-8")
    assert found == file.read_text(encoding="utf-8"), f"{file} differs; RLDBG_REGOLD=1 rewrites it"


def normalised(value: Any, roots: dict[str, Path]) -> Any:
    """The document without what differs from run to run: when, by which version, where, and a float's last digits."""
    if isinstance(value, dict):
        fixed = {"created": "2026-01-01T00:00:00Z", "tool": "rldbg 0"}
        return {name: fixed[name] if name in fixed else normalised(inner, roots) for name, inner in value.items()}
    if isinstance(value, list):
        return [normalised(inner, roots) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, str):
        for name, root in roots.items():
            value = value.replace(str(root), f"<{name}>")
    return value
