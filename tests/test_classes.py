"""What a class may be: one thing, whole by itself, under a name of its own."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from tests.sources import statements

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("replay_core", "tui_debugger")
#: Public members a class may have, those of its bases counted. What textual defines or calls by name is not ours.
MOST_MEMBERS = 25
_HOOKS = ("on_", "watch_", "render_", "validate_", "compute_")


@dataclass
class Written:
    """A class as it stands in a source file."""

    where: str
    bases: tuple[str, ...]
    """Their dotted names."""
    members: set[str] = field(default_factory=set)


@cache
def classes(root: Path) -> dict[str, Written]:
    """Every class of the packages, by its dotted name."""
    found: dict[str, Written] = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            module = ".".join(path.relative_to(root).with_suffix("").parts)
            known = {node.name: f"{module}.{node.name}" for node in tree.body if isinstance(node, ast.ClassDef)}
            known |= dict(_imported(tree))
            for node in statements(tree.body):
                if isinstance(node, ast.ClassDef):
                    bases = [ast.unparse(base).split("[")[0] for base in node.bases]
                    where = f"{path.relative_to(root)}:{node.lineno}"
                    members = _methods(node) if _is_record(node) else _methods(node) | set(_attributes(node))
                    found[f"{module}.{node.name}"] = Written(where, tuple(known.get(b, b) for b in bases), members)
    return found


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in statements(tree.body):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def _is_record(node: ast.ClassDef) -> bool:
    """Whether it is figures or keys under their names: as many as what it records has, and nothing changes them."""
    said = " ".join(map(ast.unparse, [*node.decorator_list, *node.bases, *node.keywords]))
    return "frozen=True" in said or "TypedDict" in said or "NamedTuple" in said


def _methods(node: ast.ClassDef) -> set[str]:
    return {part.name for part in node.body if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    for part in node.body:
        yield from (target.id for target in _targets(part) if isinstance(target, ast.Name))
        for inner in statements(part.body) if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)) else ():
            for target in _targets(inner):
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    yield target.attr


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    listed = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    for target in listed:
        yield from target.elts if isinstance(target, ast.Tuple) else [target]


def public_members(name: str, known: dict[str, Written]) -> set[str]:
    """The public members of a class and its bases, but for what a library defines or calls."""
    own: set[str] = set()
    foreign: set[str] = set()
    waiting = [name]
    while waiting:
        here = waiting.pop()
        if here in known:
            own |= known[here].members
            waiting += known[here].bases
        elif here.startswith("textual."):
            module, _, base = here.rpartition(".")
            foreign |= set(dir(getattr(importlib.import_module(module), base)))
    return {one for one in own - foreign if not one.startswith(("_", *_HOOKS)) and one != "compose"}


def broad_classes(root: Path) -> list[str]:
    known = classes(root)
    counted = {name: len(public_members(name, known)) for name in known}
    return [f"{known[name].where} {name}: {n} public members" for name, n in counted.items() if n > MOST_MEMBERS]


def test_no_class_has_more_public_members_than_one_thing_needs():
    broad = broad_classes(ROOT)
    assert not broad, "\n".join(broad)


def test_no_class_of_the_screen_waits_for_a_sibling_to_define_what_it_calls():
    stubs = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted((ROOT / "tui_debugger").rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if "raise NotImplementedError" in line
    ]
    assert not stubs, f"composed, not inherited: {stubs}"


def namesakes(root: Path) -> list[str]:
    """The names that two classes have, with where both stand."""
    by_name: dict[str, list[str]] = {}
    for name, written in classes(root).items():
        by_name.setdefault(name.rpartition(".")[2], []).append(written.where)
    return [f"{name}: {', '.join(where)}" for name, where in by_name.items() if len(where) > 1]


def test_no_two_classes_have_one_name():
    assert not namesakes(ROOT), "\n".join(namesakes(ROOT))


def test_planted_namesakes_are_found(tmp_path: Path):
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "planted.py").write_text("class One:\n    pass\n")
    assert namesakes(tmp_path) == ["One: replay_core/planted.py:1, tui_debugger/planted.py:1"]


@pytest.mark.parametrize("split", [False, True], ids=["in one class", "over its bases"])
def test_a_planted_broad_class_is_found(tmp_path: Path, split: bool):
    methods = [f"    def do_{number}(self): ..." for number in range(MOST_MEMBERS + 1)]
    text = "class One:\n" + "\n".join(methods[: 20 if split else None])
    text += "\nclass Two(One):\n    pass\n" + ("\n".join(methods[20:]) if split else "")
    (tmp_path / "tui_debugger").mkdir()
    (tmp_path / "tui_debugger" / "planted.py").write_text(text)
    assert any(".Two: 26 public members" in said for said in broad_classes(tmp_path))
