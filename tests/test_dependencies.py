"""Which library is imported where: the tree, pyproject.toml and docs/dependencies.md say the same."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from replay_core.errors import EXTRAS
from tests.sources import inner

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("replay_core", "tui_debugger")
#: Distributions that are not called as what is imported of them.
IMPORTED_AS = {"nvidia-ml-py": "pynvml", "pyyaml": "yaml", "megatron-core": "megatron", "ml-dtypes": "ml_dtypes"}
#: What a library of an extra brings with it, imported beside it.
BROUGHT = {"huggingface_hub": "transformers"}
#: The trainer's own: asked where it is there, for its recordings, and brought by nothing of ours.
OF_TRAINERS = {"trl"}
#: Loaded by another library, never by name.
BY_OTHERS = {"flash-attn"}


@cache
def imports() -> dict[str, set[str]]:
    """Top-level module -> the packages of ours that import it; what only a type checker sees is left out."""
    found: dict[str, set[str]] = {}
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            for name in _imported(ast.parse(file.read_text(encoding="utf-8")).body):
                if name not in sys.stdlib_module_names and name not in PACKAGES:
                    found.setdefault(name, set()).add(package)
    return found


def _imported(body: list[ast.stmt]) -> set[str]:
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
        for part in inner(node):
            names |= _imported(part)
    return names


def declared() -> dict[str, set[str]]:
    """Distribution -> the extras that bring it; the base is ""."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    found: dict[str, set[str]] = {}
    for extra, requirements in groups.items():
        for requirement in requirements:
            name = re.split(r"[\s<>=!~;\[]", requirement, maxsplit=1)[0]
            if name != "rldbg" and extra not in ("test", "docs"):
                found.setdefault(name, set()).add(extra)
    return found


def page() -> dict[str, tuple[str, set[str]]]:
    """Distribution -> its extra ("" for the base) and the packages that the page says import it."""
    text = (ROOT / "docs/dependencies.md").read_text(encoding="utf-8")
    found: dict[str, tuple[str, set[str]]] = {}
    for section, column in (("## Base", None), ("## Extras", 1)):
        for line in text.split(section, 1)[1].split("\n## ", 1)[0].splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if line.startswith("|") and cells[0] not in ("library", "---"):
                named = next((cell for cell in cells if "replay_core" in cell or "tui_debugger" in cell), "")
                found[cells[0]] = (cells[column].strip("`") if column else "", set(re.findall(r"`(\w+)`", named)))
    return found


def test_what_is_imported_is_declared_and_what_is_declared_is_imported():
    names = {IMPORTED_AS.get(name, name.replace("-", "_")) for name in declared()} - {"flash_attn"}
    assert {BROUGHT.get(name, name) for name in imports()} - OF_TRAINERS == names


def test_the_page_of_dependencies_says_what_the_tree_does():
    told = page()
    assert {name: {extra} for name, (extra, _) in told.items()} == declared()
    found = imports()
    for name, (_, packages) in told.items():
        assert packages == found.get(IMPORTED_AS.get(name, name.replace("-", "_")), set()), name


def test_every_library_of_an_extra_has_its_hint():
    modules = {IMPORTED_AS.get(name, name): extras for name, extras in declared().items() if name not in BY_OTHERS}
    assert {name: {extra} for name, extra in EXTRAS.items()} == {n: e for n, e in modules.items() if e != {""}}


_WITHOUT = """
import importlib.abc, sys

missing = set(sys.argv.pop(1).split(","))


class Refusal(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


sys.meta_path.insert(0, Refusal())
from tui_debugger.cli import run

sys.exit(run(sys.argv[1:]))
"""


def without(missing: set[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _WITHOUT, ",".join(sorted(missing)), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.long
def test_the_base_opens_shows_compares_and_diagnoses_without_any_extra(small_dump: Path):
    missing = set(EXTRAS)
    one = ["--step", "0", "--stage", "forward_data"]
    commands = (["ls", "{}"], ["show", "{}", *one], ["compare", "{}", "{}"], ["diagnose", "{}"], ["info"])
    for command in commands:
        arguments = [word.format(small_dump) for word in command]
        answer = without(missing, *arguments, "--json")
        assert answer.returncode in (0, 1), (command, answer.stderr)
        assert json.loads(answer.stdout)["kind"]


@pytest.mark.long
def test_a_child_without_torch_says_which_extra_it_needs(small_dump: Path, tmp_path: Path):
    """The children of a command are processes of their own: they find the refusal as `sitecustomize`."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    code = "import sys; from tui_debugger.cli import run; sys.exit(run(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "replay", str(small_dump), "--model", "random:llama-tiny"]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
    answer = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env={**os.environ, "PYTHONPATH": path}
    )
    assert "pip install 'rldbg[replay]'" in answer.stderr + answer.stdout, answer.stderr
    assert answer.returncode == 4
