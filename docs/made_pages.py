"""The pages of the site that are made while it is built, of the code: commands, schema, configuration, Python.

mkdocs calls the functions below by their names. Nothing here is written into the tree.
"""

from __future__ import annotations

import inspect
import json
import re
from importlib import import_module, resources
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
#: Links that leave the pages: to files of the repository.
_OUT = re.compile(
    r"\[([^\]]*)\]\((?:\.\./)+(?!integrations|tutorials|reference)(README|ARCHITECTURE|tests|SECURITY|CONTRIBUTING)[^)]*\)"
)


def made() -> dict[str, str]:
    """Path -> text of every page that nobody wrote."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    return {
        "index.md": re.sub(r"\[([^\]]*)\]\((?:[A-Z]+\.md|LICENSE|tests/[^)]*|integrations/)\)", r"\1", readme),
        "reference/commands.md": commands(),
        "reference/schema.md": schema(),
        "reference/configuration.md": configuration(),
        "reference/python.md": python(),
    }


def commands() -> str:
    """Every command's own help."""
    from tui_debugger.command_table import COMMANDS, HIDDEN
    from tui_debugger.commands.group import cli

    parts = ["# Commands\n", _help(cli, "rldbg")]
    for name in sorted(set(COMMANDS) - set(HIDDEN)):
        command: click.Command = import_module(COMMANDS[name]).command
        parts.append(f"## rldbg {name}\n\n{_help(command, f'rldbg {name}')}")
    return "\n".join(parts)


def _help(command: click.Command, name: str) -> str:
    with click.Context(command, info_name=name, max_content_width=100, terminal_width=100) as context:
        return f"```text\n{command.get_help(context)}\n```\n"


def schema() -> str:
    """Every type of the JSON documents: its keys, their types and what they mean."""
    text = (resources.files("replay_core.documents") / "schema.json").read_text(encoding="utf-8")
    types: dict[str, dict[str, Any]] = json.loads(text)["$defs"]
    parts = ["# The JSON schema\n", "Every kind and part of a document. A key in *italics* may be absent.\n"]
    for name, one in types.items():
        parts.append(f"## {name}\n\n{one.get('description', '')}\n")
        if "properties" not in one:
            parts.append(f"{_type(one)}\n")
            continue
        parts += ["| key | type | |", "|---|---|---|"]
        for key, value in one["properties"].items():
            shown = f"`{key}`" if key in one.get("required", ()) else f"*`{key}`*"
            parts.append(f"| {shown} | {_type(value)} | {_cell(value.get('description', ''))} |")
        parts.append("")
    return "\n".join(parts)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _type(one: dict[str, Any]) -> str:
    """A type of the schema in words; types of their own are links."""
    if "$ref" in one:
        name = one["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in one or "enum" in one:
        return _cell(", ".join(f"`{json.dumps(value)}`" for value in one.get("enum", [one.get("const")])))
    for several in ("anyOf", "oneOf"):
        if several in one:
            return " or ".join(dict.fromkeys(_type(part) for part in one[several]))
    said = one.get("type", "anything")
    if said == "array":
        return f"list of {_type(one.get('items', {}))}"
    return " or ".join(said) if isinstance(said, list) else str(said)


def configuration() -> str:
    """What `config.toml` may hold: its own words, and the names of all keys."""
    from tui_debugger import settings
    from tui_debugger.actions import ACTIONS

    rows = [f"| `{one.name}` | `{one.all_keys}` | {', '.join(one.screens)} | {_cell(one.help)} |" for one in ACTIONS]
    told, _, example = (inspect.getdoc(settings) or "").partition("\n\n")
    head = f"# Configuration\n\n{told}\n\n`rldbg info` says where it is looked for.\n\n```toml\n{example}\n```\n"
    keys = "## Names of keys\n\n| name | keys | screens | |\n|---|---|---|---|\n"
    return f"{head}\n{keys}" + "\n".join(rows) + "\n"


def python() -> str:
    """The public members of what a trainer imports, with their docstrings."""
    from replay_core.recorder import Recorder
    from replay_core.rollouts import MockRolloutWorker, RolloutBatch, RolloutReplay

    parts = ["# Recorder and RolloutReplay\n"]
    for one in (Recorder, RolloutReplay, RolloutBatch, MockRolloutWorker):
        parts.append(f"## {one.__name__}\n\n```python\nfrom {one.__module__.rpartition('.')[0]} import {one.__name__}")
        parts.append(f"\n{one.__name__}{inspect.signature(one)}\n```\n\n{_doc(one)}")
        for name, member in inspect.getmembers(one):
            if name.startswith("_") or not (inspect.isfunction(member) or isinstance(member, property)):
                continue
            signature = "" if isinstance(member, property) else str(inspect.signature(member))
            parts.append(f"### {one.__name__}.{name}\n\n```python\n{name}{signature}\n```\n\n{_doc(member)}")
    return "\n".join(parts)


def _doc(one: Any) -> str:
    return f"```text\n{inspect.getdoc(one) or ''}\n```\n"


def on_files(files: Any, config: Any) -> Any:
    """Add the made pages to those that lie there."""
    from mkdocs.structure.files import File

    for path, text in made().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_of_page: Any) -> str:
    """A link to a file that is no page of the site stays as its words; each kind of document leads to its keys."""
    text = _OUT.sub(r"\1", markdown)
    return with_keys(text) if page.file.src_path == "documents.md" else text


def with_keys(text: str) -> str:
    """The page of documents with a link under each kind's heading to its section of the schema, which is made here: in
    the repository there is no such page to lead to."""

    def linked(heading: re.Match[str]) -> str:
        kinds = [kind.strip() for kind in heading[1].split(",")]
        links = ", ".join(f"[`{kind}`](reference/schema.md#{kind})" for kind in kinds)
        return f"{heading[0]}\n\nEvery key and its type: {links}."

    return re.sub(r"^## ([a-z, ]+):.*$", linked, text, flags=re.MULTILINE)
