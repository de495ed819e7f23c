"""What the code cites of docs/evidence.md stands there, and nothing cites notes that are not in the repository."""

from __future__ import annotations

import re
from pathlib import Path

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


def test_every_cited_section_of_the_evidence_exists() -> None:
    cited = [
        (str(path.relative_to(ROOT)), anchor)
        for path in TEXTS
        for anchor in CITED.findall(path.read_text(encoding="utf-8"))
        if path != Path(__file__)
    ]
    assert [one for one in cited if one[1] not in SECTIONS] == [], f"docs/evidence.md has {', '.join(sorted(SECTIONS))}"
