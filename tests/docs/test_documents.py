"""docs/documents.md names the keys that its documents have."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "replay_core" / "documents" / "schema.json"
PAGE = ROOT / "docs" / "documents.md"

#: What every document begins with; the page's first table has them.
OF_ALL = {"schema_version", "kind", "tool", "created"}


def keys_within(name: str) -> set[str]:
    """Every key that a document of the kind can hold, at any depth."""
    definitions = json.loads(SCHEMA.read_text())["$defs"]
    keys: set[str] = set()
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            definition = definitions[name]
            keys |= set(definition.get("properties", {}))
            waiting += re.findall(r'"#/\$defs/(\w+)"', json.dumps(definition))
    return keys - OF_ALL


def named_in_section(heading: str) -> set[str]:
    """The words in code marks under a heading of the page."""
    page = PAGE.read_text()
    section = page.split(f"\n## {heading}", 1)[1].split("\n## ", 1)[0]
    return set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]*)`", section))))


def test_every_key_of_a_samples_document_stands_in_its_section():
    keys = keys_within("samples")
    assert {"turns", "texts", "counted", "worst"} <= keys
    assert keys - named_in_section("samples") == set()
