"""The page from symptom to command: every command of it is understood, and every page it names is there."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path

import click

from tui_debugger.command_table import COMMANDS

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "which-command.md").read_text(encoding="utf-8")


def test_every_command_of_it_is_understood_and_every_maker_of_answers_is_there():
    lines = re.findall(r"\| `(rldbg .*?)` \|", TEXT)
    for line in lines:
        words = shlex.split(line)
        command: click.Command = import_module(COMMANDS[words[1]]).command
        with click.Context(command, resilient_parsing=True) as context:
            command.make_parser(context).parse_args(words[2:])
    named = {shlex.split(line)[1] for line in lines}
    makers = {
        name
        for name, module in COMMANDS.items()
        if "as_json" in {one.name for one in import_module(module).command.params}
    }
    assert makers - named <= {"demo", "ls", "show", "info"}, "each has a symptom"


def test_every_page_it_names_is_there():
    for place in re.findall(r"\]\((.*?)\)", TEXT):
        page, _, section = place.partition("#")
        assert (DOCS / page).exists(), place
        headings = re.findall(r"^#+ (.+)$", (DOCS / page).read_text(encoding="utf-8") if section else "", re.MULTILINE)
        assert not section or section in {one.lower().replace(" ", "-") for one in headings}, place
