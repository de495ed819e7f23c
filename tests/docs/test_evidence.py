"""What the code cites of docs/evidence.md stands there, and nothing cites notes that are not in the repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("replay_core", "tui_debugger", "tests", "benchmarks", "docs")
TEXTS = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".md", ".json", ".txt", ".toml") and "data" not in path.relative_to(ROOT / folder).parts
]
CITED = re.compile(r"evidence\.md#([\w-]+)")
SECTIONS = set(re.findall(r"^## (\S+)$", (ROOT / "docs/evidence.md").read_text(encoding="utf-8"), flags=re.MULTILINE))


def citations() -> set[tuple[str, str]]:
    return {
        (str(path.relative_to(ROOT)), anchor)
        for path in TEXTS
        for anchor in CITED.findall(path.read_text(encoding="utf-8"))
        if path.name not in (Path(__file__).name, "evidence.md")
    }


@pytest.mark.parametrize(("path", "anchor"), sorted(citations()))
def test_a_cited_section_of_the_evidence_exists(path: str, anchor: str) -> None:
    assert anchor in SECTIONS, f"{path} cites docs/evidence.md#{anchor}; it has {', '.join(sorted(SECTIONS))}"
