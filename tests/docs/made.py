"""The pages of the site that are made of the code, as mkdocs loads the script that makes them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType


def made_pages() -> ModuleType:
    """`docs/made_pages.py`: a folder that is no package."""
    path = Path(__file__).resolve().parents[2] / "docs/made_pages.py"
    spec = importlib.util.spec_from_file_location("made_pages", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
