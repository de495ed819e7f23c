"""docs/documents.md names the keys that its documents have."""

import json
import re
from pathlib import Path

from tests.docs.made import made_pages

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


def test_every_kind_of_document_stands_on_the_page_and_leads_to_its_section_of_the_schema_on_the_site():
    definitions = json.loads(SCHEMA.read_text())["$defs"]
    kinds = {name for name, one in definitions.items() if "const" in one.get("properties", {}).get("kind", {})}
    first_table = re.search(r"\| `kind` \|(.*)\|", PAGE.read_text())
    assert first_table is not None
    assert set(re.findall(r"`(\w+)`", first_table[1])) == kinds
    made = made_pages()
    linked = re.findall(r"\[`(\w+)`\]\(reference/schema\.md#(\w+)\)", made.with_keys(PAGE.read_text()))
    assert {name for name, _ in linked} == kinds
    assert len(linked) == len(kinds)
    headings = set(re.findall(r"^## (\w+)$", made.schema(), flags=re.MULTILINE))
    assert {anchor for _, anchor in linked} <= headings
