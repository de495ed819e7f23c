"""A document of which a test says only what it is about, made whole: the least that the schema asks for besides."""

from __future__ import annotations

import json
from typing import Any

from replay_core.documents.reopening import SCHEMA_PATH

_DEFINITIONS: Any = json.loads(SCHEMA_PATH.read_text(encoding="utf-8"))["$defs"]
_LEAST = {"string": "", "integer": 0, "number": 0.0, "boolean": False, "null": None}


def whole(given: Any) -> Any:
    """The document with every key that its kind must have, objects within it included."""
    stamp = {"schema_version": 1, "kind": "", "tool": "rldbg 0.1.0", "created": "2026-11-20T12:00:00Z"}
    return dict(_filled({**stamp, **given}, _DEFINITIONS[given["kind"]]))


def _resolved(schema: Any) -> Any:
    return _DEFINITIONS[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def _filled(value: Any, schema: Any) -> Any:
    kinds: dict[Any, str] = {dict: "object", list: "array"}
    kind = kinds.get(type(value))
    choices = [_resolved(one) for one in [schema, *_resolved(schema).get("anyOf", ())]]
    fitting = next((one for one in choices if one.get("type") == kind), None) if kind else None
    if fitting is None:
        return value
    if isinstance(value, list):
        return [_filled(one, fitting["items"]) for one in value]
    described = fitting.get("properties", {})
    least = {name: _least(described[name]) for name in fitting.get("required", ()) if name not in value}
    inner = {name: _filled(one, described[name]) if name in described else one for name, one in value.items()}
    return {**inner, **least}


def _least(schema: Any) -> Any:
    schema = _resolved(schema)
    for word in ("const", "enum", "anyOf"):
        if word in schema:
            found = schema[word]
            return found if word == "const" else found[0] if word == "enum" else _least(found[-1])
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if "null" in types:
        return None
    if types[0] == "object":
        return {name: _least(schema["properties"][name]) for name in schema.get("required", ())}
    return [] if types[0] == "array" else _LEAST[types[0]]
