"""What a source file of the project is made of."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Every statement, those inside functions, classes and branches too; no expression is looked at."""
    for node in body:
        yield node
        for part in inner(node):
            yield from statements(part)


def inner(node: ast.stmt) -> list[list[ast.stmt]]:
    """The blocks of statements right inside one."""
    blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
    return blocks + [part.body for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ()))]
