"""What the papers name exists: files, links, commands and their options; and nobody's private notes are cited."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from tests.test_architecture import CORE_FLOORS
from tui_debugger.commands.group import cli

ROOT = Path(__file__).resolve().parents[2]
PAPERS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "tests/data/README.md"]
#: Rooms as a paper names their files: `dumps/opening.py` is replay_core's.
FOLDERS = ("", "replay_core", "tui_debugger", "tests", "docs")
NAMED = re.compile(r"`((?:[\w.]+/)+[\w.]*|\w+\.(?:py|toml|md))`")
LINKED = re.compile(r"\]\((?!https?:|#)([^)#]+)(?:#([\w-]+))?\)")


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_every_file_that_a_paper_names_exists(name: str) -> None:
    named = set(NAMED.findall((ROOT / name).read_text(encoding="utf-8")))
    ours = {path for path in named if not path.startswith(".")}
    assert ours
    lost = {path for path in ours if not any((ROOT / folder / path).exists() for folder in FOLDERS)}
    assert lost - {"config.toml"} == set()


@pytest.mark.parametrize("paper", PAPERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(paper: Path) -> None:
    for target, section in LINKED.findall(paper.read_text(encoding="utf-8")):
        found = (paper.parent / target).resolve()
        assert found.exists(), f"{paper.name} links to {target}"
        if section and found.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", found.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert section in {re.sub(r"[^\w-]", "", one.lower().replace(" ", "-")) for one in headings}


def test_the_architecture_names_every_room() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rooms = [room for floor in CORE_FLOORS for room in floor if list((ROOT / "replay_core").glob(f"{room}*"))]
    assert [room for room in rooms if not re.search(rf"(^|[\s·,]){room}($|[\s·,])", text)] == []


def test_the_architecture_is_two_hundred_lines_at_most() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()) <= 200


def _commands() -> list[str]:
    text = "\n".join(re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL))
    lines = re.sub(r"\s+#.*", "", text).replace(" && ", "\n").splitlines()
    return [line.split(" | ")[0] for line in lines if line.startswith("rldbg ")]


@pytest.mark.parametrize("line", _commands())
def test_every_command_of_the_readme_has_the_options_it_is_given(line: str) -> None:
    words = shlex.split(line)[1:]
    words = words[: words.index("--")] if "--" in words else words
    context = click.Context(cli)
    named = next((word for word in words if not word.startswith("-")), "ui")
    command = cli.get_command(context, named if named in cli.list_commands(context) else "ui")
    assert command is not None
    known = {option for one in (command, cli) for part in one.params for option in (*part.opts, *part.secondary_opts)}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known


def _without_links(path: Path) -> str:
    """A text without its links to files that are there."""
    link = re.compile(r"\[[^\]\n]*\]\(([\w./-]+)(?:#[\w-]*)?\)")
    text = path.read_text(encoding="utf-8")
    return link.sub(lambda found: "" if (path.parent / found[1]).exists() else found[0], text)


@pytest.mark.long
def test_nobodys_private_notes_are_cited() -> None:
    """Evidence is cited where it lies in this repository, or in public."""
    notes = "compare|replay|ecosystem|stories|terminal|referee|seed_systems"
    private = re.compile(rf"(?i:seed[ _-]?00\d|text 00\d)|(?<![\w/-])(?:{notes})\.md")
    texts = [
        path
        for folder in ("replay_core", "tui_debugger", "tests", "benchmarks", "docs")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md", ".json", ".txt") and path != Path(__file__)
    ]
    cited = [
        f"{path.relative_to(ROOT)}: {found[0]}" for path in texts if (found := private.search(_without_links(path)))
    ]
    assert cited == []
