"""SKILL.md: every command, exit code and JSON path in it is true, and who only follows it finds planted faults."""

from __future__ import annotations

import json
import re
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest

from replay_core.documents.reopening import SCHEMA_PATH
from replay_core.errors import ExitCode
from tests.builders import write_pair
from tests.fixtures import FIXTURES
from tui_debugger.cli import run
from tui_debugger.command_table import COMMANDS
from tui_debugger.commands.skill import SKILL

TEXT = SKILL.read_text(encoding="utf-8")
SCHEMA: Any = json.loads(SCHEMA_PATH.read_text(encoding="utf-8"))
#: Kinds of documents, of which a path names one first.
KINDS = {entry["$ref"].rpartition("/")[2] for entry in SCHEMA["oneOf"]}
#: Title of a section -> its command.
STEPS = dict(re.findall(r"## (\d)\. .*?```sh\n(rldbg .*?)\n```", TEXT, re.DOTALL))
PATHS = [path for path in re.findall(r"`([a-z_]+\.[\w.\[\]]+)`", TEXT) if path.partition(".")[0] in KINDS]


def test_the_command_prints_where_it_lies(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["skill"]) == 0
    assert Path(capsys.readouterr().out.strip()).read_text(encoding="utf-8") == TEXT
    assert TEXT.startswith("---\nname: rldbg\ndescription: ")


def test_every_command_of_it_is_understood():
    assert len(STEPS) == 9
    for line in STEPS.values():
        words = shlex.split(line)
        command: click.Command = import_module(COMMANDS[words[1]]).command
        with click.Context(command, resilient_parsing=True) as context:
            command.make_parser(context).parse_args(words[2:])


def test_every_path_leads_into_the_schema():
    assert len(PATHS) > 30
    for path in PATHS:
        kind, _, rest = path.partition(".")
        _follow(SCHEMA["$defs"][kind], [one for one in re.split(r"\.|(\[\d*\])", rest) if one], path)


def _follow(schema: Any, words: list[str], path: str) -> None:
    found = [schema]
    for word in words:
        found = [_resolved(one) for one in found]
        found = [inner for one in found for inner in (one, *map(_resolved, one.get("anyOf", ())))]
        if word.startswith("["):
            found = [one["items"] for one in found if "items" in one]
        else:
            found = [one["properties"][word] for one in found if word in one.get("properties", {})]
        assert found, f"{path}: the schema has no {word}"


def _resolved(schema: Any) -> Any:
    return SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def test_the_exit_codes_are_those_there_are():
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", TEXT, re.MULTILINE)} == {int(code) for code in ExitCode}


class Agent:
    """What only reads SKILL.md: runs a section's command with what it was given, and reads by the section's paths."""

    def __init__(self, capsys: pytest.CaptureFixture[str], **given: Path | str) -> None:
        self.capsys, self.given, self.code = capsys, given, -1
        self.document: Any = {}

    def follow(self, section: str) -> None:
        line = re.sub(r'"?\$([A-Z]+)"?', lambda name: shlex.quote(str(self.given.get(name[1], ""))), STEPS[section])
        self.code = run([word for word in shlex.split(line)[1:] if word])
        self.document = json.loads(self.capsys.readouterr().out)

    def read(self, path: str) -> Any:
        assert path in PATHS, "an agent knows the paths of SKILL.md alone"
        value: Any = self.document
        for word in re.split(r"\.|\[(\d+)\]", path.partition(".")[2]):
            if word:
                value = value[int(word)] if word.isdecimal() else value[word]
        return value


@pytest.mark.parametrize(
    ("dump", "words"),
    [("packing_contaminated", "crosses samples"), ("temperature_mismatch", "temperature"), ("nan_inf", "not finite"),
     ("zero_std_all_groups", "same reward")],
)  # fmt: skip
def test_an_agent_finds_the_fault_of_a_dump(dump: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    agent = Agent(capsys, DUMP=FIXTURES / "faults" / dump)
    agent.follow("2")
    assert agent.code == 0
    agent.follow("3")
    assert agent.code == ExitCode.DIVERGES
    assert agent.read("diagnosis.findings[0].severity") == "error"
    assert words in agent.read("diagnosis.findings[0].claim")


def test_an_agent_finds_the_setting_of_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    agent = Agent(capsys, DUMP=FIXTURES / "faults" / "temperature_mismatch")
    agent.follow("7")
    assert agent.code == ExitCode.DIVERGES
    assert agent.read("mismatch.causes[0].named") is True
    assert agent.read("mismatch.causes[0].side") == "engine"
    assert "temperature 0.6" in agent.read("mismatch.causes[0].name")


def test_an_agent_finds_nothing_in_a_healthy_dump(capsys: pytest.CaptureFixture[str]) -> None:
    agent = Agent(capsys, DUMP=FIXTURES / "faults" / "healthy")
    agent.follow("3")
    assert agent.code == ExitCode.AGREES


def test_an_agent_finds_where_two_dumps_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    good = {
        f"layers.{layer}.{name}": torch.full((2, 3), 1.0 + layer)
        for layer in range(3)
        for name in ("mlp.inputs.0", "mlp.output")
    }
    bad = {name: value + 1 if name >= "layers.1.mlp.output" else value for name, value in good.items()}
    a, b = write_pair(tmp_path, {"modules": good}, {"modules": bad})
    agent = Agent(capsys, A=a, B=b)
    agent.follow("4")
    assert agent.code == ExitCode.DIVERGES
    assert agent.read("comparison.first_divergence.name") == "layers.1.mlp.output"
    assert agent.read("comparison.first_divergence.origin") == "layers.1.mlp"
    assert (agent.read("comparison.first_divergence.a"), agent.read("comparison.first_divergence.b")) == (2.0, 3.0)


@pytest.mark.slow
def test_an_agent_finds_the_setting_the_module_and_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["demo", "--text", "--dir", str(tmp_path / "demo"), "--json"])
    packed = json.loads(capsys.readouterr().out)
    agent = Agent(capsys, DUMP=tmp_path / "demo/run", STEP="3")
    agent.follow("6")
    cells = [cell for cell in agent.document["cells"] if cell["part"] == "cell"]
    assert ([cell["agreement"]["agrees"] for cell in cells], agent.read("replay.matrix.breaking")) == (
        [True] * len(cells),
        [],
    )
    leaks = [cell for cell in packed["cells"] if cell["agreement"] and cell["agreement"]["agrees"] is False]
    assert [cell["cause"]["kind"] for cell in leaks] == ["other_samples"]
    a, b = (packed["cells"][number]["dump"] for number in (0, 2))
    agent = Agent(capsys, A=a, B=b, WEIGHTS=tmp_path / "demo/run/checkpoints/step_000011")
    agent.follow("4")
    assert agent.read("comparison.first_divergence.origin") == "layers.0.self_attn"
    agent.follow("5")
    assert agent.code == ExitCode.DIVERGES
    assert (agent.read("ruling.ruling"), agent.read("ruling.side")) == ("BUG", "b")
    assert agent.read("ruling.hypothesis") == "samples of a row see each other"
