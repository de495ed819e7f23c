"""Documents that were written once, read again: checked against the published schema, never trusted. No numpy."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn, cast

from replay_core.budget import reading
from replay_core.documents.embedding import extracted, is_page
from replay_core.documents.kinds import Document
from replay_core.documents.version import SCHEMA_VERSION
from replay_core.errors import DumpError
from replay_core.file_spans import regular

#: Made of the documents' types, by `schema.py`.
SCHEMA_PATH = Path(__file__).with_name("schema.json")
#: Two million tensors' rows are less.
MAX_BYTES = 1 << 31

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "integer": (int,),
    "number": (int, float),
}


def is_document(path: Path) -> bool:
    """Whether a file begins as a document of rldbg's does: cheap, and no promise that it is whole."""
    try:
        with regular(path) as file:
            head = file.read(256)
    except DumpError:
        return False
    return is_page(head) or (head.lstrip().startswith(b"{") and b'"schema_version"' in head and b'"kind"' in head)


def read_document(path: Path) -> Document:
    """The document a file holds: JSON, or a page that was made of it.

    Raises:
        DumpError: it cannot be read, is not JSON, is of another schema, or lacks what its kind must have.
    """
    with reading(path):
        with regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_BYTES:
                raise DumpError("the document is too large", file=str(path), expected=f"at most {MAX_BYTES:,} bytes")
            stored = file.read(size)
        data: bytes | bytearray = extracted(stored, path) if is_page(stored) else stored
        del stored
        try:
            text = data.decode()
            del data  # of a large one there is no room for both
        except UnicodeDecodeError:
            raise DumpError(
                "the document is not UTF-8",
                file=str(path),
                expected="a JSON document or a page that rldbg wrote",
                found="other bytes",
                hint="rldbg show FILE reads a file of tensors",
            ) from None
        try:
            document = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            hint = "was it written whole?"
            raise DumpError(f"the document is not JSON: {error}", file=str(path), hint=hint) from None
        return checked(document, path)


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def checked(document: Any, path: Path) -> Document:
    """The document, if the schema knows it.

    Raises:
        DumpError: says which field, what was expected and what was found.
    """
    version = document.get("schema_version") if isinstance(document, dict) else None
    if isinstance(version, bool) or not isinstance(version, int):
        raise DumpError("the file is no document of rldbg's", file=str(path), expected="a schema_version")
    if version > SCHEMA_VERSION:
        tool = document.get("tool")
        raise DumpError(
            "the document is of a schema from the future",
            file=str(path),
            expected=f"schema_version {SCHEMA_VERSION}",
            found=f"schema_version {version}" + (f", written by {tool}" if isinstance(tool, str) else ""),
            hint="pip install --upgrade rldbg",
        )
    schema = json.loads(SCHEMA_PATH.read_text(encoding="utf-8"))
    kinds = [entry["$ref"].rpartition("/")[2] for entry in schema["oneOf"]]
    kind = document.get("kind")
    if kind not in kinds:
        raise DumpError(
            "the document is of a kind that rldbg does not know",
            file=str(path),
            expected=", ".join(kinds),
            found=str(kind),
        )
    try:
        problem = _Schema(schema["$defs"]).problem(document, schema["$defs"][kind], kind)
        if problem is None and kind == "comparison":
            problem = _miscounted(document)
    except RecursionError:
        problem = "objects within objects, deeper than any document is"
    if problem is not None:
        raise DumpError("the document is damaged", file=str(path), found=problem)
    return cast(Document, document)


def checked_part(value: Any, kind: str, path: Path) -> Any:
    """A part of a document that lies in a file of its own, if the schema knows it.

    Raises:
        DumpError: says which field, what was expected and what was found.
    """
    definitions = json.loads(SCHEMA_PATH.read_text(encoding="utf-8"))["$defs"]
    try:
        problem = _Schema(definitions).problem(value, definitions[kind], kind)
    except RecursionError:
        problem = "objects within objects, deeper than any document is"
    if problem is not None:
        raise DumpError("the file is damaged", file=str(path), found=problem)
    return value


def _miscounted(document: dict[str, Any]) -> str | None:
    """What a comparison's counts say that its tensors do not, or None. The exit code rests on the counts."""
    found = Counter(row["verdict"] for row in document["tensors"])
    found["total"] = len(document["tensors"])
    for word, count in document["counts"].items():
        if count != found[word]:
            return f"comparison.counts.{word} is {count}, and the tensors listed are {found[word]}"
    first = document["first_divergence"]
    if first is not None and not found[first["verdict"]]:
        return f"comparison.first_divergence is {first['verdict']}, and no tensor listed is"
    return next((said for other in document["others"] if (said := _miscounted(other))), None)


class _Schema:
    """As much of JSON Schema as our own schema uses."""

    def __init__(self, definitions: dict[str, Any]) -> None:
        self._definitions = definitions

    def problem(self, value: Any, schema: dict[str, Any], where: str) -> str | None:
        """What is wrong with a value, or None."""
        if "$ref" in schema:
            found = self.problem(value, self._definitions[schema["$ref"].rpartition("/")[2]], where)
            if found is not None:
                return found
        if "anyOf" in schema and (found := self._none_of(value, schema["anyOf"], where)) is not None:
            return found
        if "const" in schema and value != schema["const"]:
            return f"{where} is {_short(value)}, not {schema['const']!r}"
        if "enum" in schema and value not in schema["enum"]:
            return f"{where} is {_short(value)}"
        types = schema.get("type")
        if types is not None and not _is(value, [types] if isinstance(types, str) else types):
            return f"{where} is {_short(value)}, not {types}"
        if isinstance(value, float) and value - value != 0.0:
            return f"{where} is {value}, no number of JSON"
        if "minimum" in schema and isinstance(value, (int, float)) and value < schema["minimum"]:
            return f"{where} is {value}, below {schema['minimum']}"
        if isinstance(value, dict):
            return self._object(value, schema, where)
        return self._array(value, schema, where) if isinstance(value, list) else None

    def _none_of(self, value: Any, schemas: list[dict[str, Any]], where: str) -> str | None:
        """What is wrong with a value that may be any of these; in its own parts where it can only be one of them."""
        problems = [self.problem(value, one, where) for one in schemas]
        if None in problems:
            return None
        inside = [problem for problem in problems if problem is not None and not problem.startswith(f"{where} is ")]
        return inside[0] if len(inside) == 1 else f"{where} is {_short(value)}"

    def _object(self, value: dict[str, Any], schema: dict[str, Any], where: str) -> str | None:
        for name in schema.get("required", ()):
            if name not in value:
                return f"{where} has no {name}"
        described = schema.get("properties", {})
        beyond = schema.get("additionalProperties", True)
        for name, inner in value.items():
            one = described.get(name, beyond)
            if one is False:
                return f"{where} has {name[:40]!r}, which nobody wrote"
            found = self.problem(inner, one, f"{where}.{name[:40]}") if isinstance(one, dict) else None
            if found is not None:
                return found
        return None

    def _array(self, value: list[Any], schema: dict[str, Any], where: str) -> str | None:
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            return f"{where} has {len(value)} entries"
        items = schema.get("items")
        if items is None:
            return None
        found = (self.problem(inner, items, f"{where}[{number}]") for number, inner in enumerate(value))
        return next((one for one in found if one is not None), None)


def _is(value: Any, types: list[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    return any(isinstance(value, _TYPES[name]) for name in types)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
