"""A name of a module has one value: one that is given again further down changes what stood above it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def given_again(source: str) -> list[str]:
    """The names that a module's own statements assign more than once, with the line of the second time."""
    seen: set[str] = set()
    found = []
    for name in _assigned(ast.parse(source)):
        if name.id in seen:
            found.append(f"{name.lineno}: {name.id}")
        seen.add(name.id)
    return found


def _assigned(module: ast.Module) -> Iterator[ast.Name]:
    for statement in module.body:
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets = [statement.target]
        else:
            continue
        yield from (
            node
            for target in targets
            for node in ast.walk(target)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        )


@pytest.mark.parametrize("package", ["replay_core", "tui_debugger", "tests", "benchmarks"])
def test_no_name_of_a_module_is_given_another_value(package: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{each}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for each in given_again(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


def test_a_name_that_is_given_again_is_found_in_a_row_of_names_too() -> None:
    assert given_again("LONG, FAR = 1, 2\ndef f():\n    FAR = 3\nNEAR, FAR = 4, 5\n") == ["4: FAR"]
