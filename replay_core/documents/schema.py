"""The JSON schema of the documents, made from their types: `python -m replay_core.documents.schema` prints it.

A TypedDict is a closed object, a text under a key its description, a `Says` beside a type a piece of the schema.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from replay_core.documents.kinds import Document
from replay_core.documents.version import SCHEMA_VERSION

PATH = Path(__file__).with_name("schema.json")

_SIMPLE: dict[Any, str] = {
    str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"
}  # fmt: skip


def schema() -> dict[str, Any]:
    """The schema of every kind of document, JSON Schema 2020-12."""
    definitions: dict[str, Any] = {}
    kinds = [_of(kind, definitions) for kind in get_args(Document)]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"https://rldbg.dev/schema/{SCHEMA_VERSION}",
        "title": f"Documents of rldbg, schema version {SCHEMA_VERSION}",
        "description": "Every document that leaves rldbg: `--json`, `--output`, the screen's export. Units stand in "
        "the field names; a figure without one is in the tensor's own unit or a plain ratio.",
        "oneOf": kinds,
        "$defs": dict(sorted(definitions.items())),
    }


def _of(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of a type; TypedDicts and what has a title go into `definitions`, once."""
    if kind in _SIMPLE:
        return {"type": _SIMPLE[kind]}
    if kind is Any:
        return {}
    if is_typeddict(kind):
        return _defined(_name(kind), lambda: _object(kind, definitions), definitions)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        piece = inner[1].piece
        title = piece.get("title")
        if title is None:
            return {**_of(inner[0], definitions), **piece}
        return _defined(title, lambda: {**_of(inner[0], definitions), **piece}, definitions)
    if origin is Literal:
        return {"const": inner[0]} if len(inner) == 1 else {"enum": list(inner)}
    if origin in (Union, types.UnionType):
        return _any_of([_of(one, definitions) for one in inner])
    if origin in (list, Sequence):
        return {"type": "array", "items": _of(inner[0], definitions)}
    if origin is dict:
        values = _of(inner[1], definitions)
        return {"type": "object", **({"additionalProperties": values} if values else {})}
    raise TypeError(f"a document cannot hold {kind!r}")


def _defined(name: str, made: Callable[[], dict[str, Any]], definitions: dict[str, Any]) -> dict[str, Any]:
    if name not in definitions:
        # First, that a document which holds its own kind comes to an end.
        definitions[name] = {}
        definitions[name] = made()
    return {"$ref": f"#/$defs/{name}"}


def _any_of(parts: list[dict[str, Any]]) -> dict[str, Any]:
    plain = [part["type"] for part in parts if set(part) == {"type"}]
    others = [part for part in parts if set(part) != {"type"}]
    words = [{"type": plain if len(plain) > 1 else plain[0]}] if plain else []
    return words[0] if not others else {"anyOf": [*others, *words]}


def _object(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    said = _said(kind)
    properties = {}
    for name, hint in hints.items():
        about = {"description": said[name]} if name in said else {}
        properties[name] = {**about, **_of(hint, definitions)}
    return {
        "description": " ".join((inspect.getdoc(kind) or "").split()),
        "type": "object",
        "additionalProperties": False,
        "required": [name for name in hints if name in kind.__required_keys__],
        "properties": properties,
    }


def _name(kind: Any) -> str:
    return str(kind.__name__).removesuffix("Document").lower() if kind in get_args(Document) else str(kind.__name__)


def _said(kind: Any) -> dict[str, str]:
    """Key -> the text under it, those of the classes it comes from included."""
    texts: dict[str, str] = {}
    body = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(body, ast.ClassDef)
    # Their own `__bases__` are dict alone.
    bases = [vars(sys.modules[kind.__module__])[ast.unparse(base)] for base in body.bases]
    for base in bases:
        texts |= _said(base) if is_typeddict(base) else {}
    for key, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(key, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            texts[ast.unparse(key.target)] = " ".join(str(text.value.value).split())
    return texts


if __name__ == "__main__":
    sys.stdout.write(json.dumps(schema(), indent=1, ensure_ascii=False) + "\n")
