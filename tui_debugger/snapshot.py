"""What `e` writes, the document on the screen and the replay it came from, and how such a file is opened again."""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from replay_core.errors import DumpError, RequestError
from replay_core.replay.axes import Axes
from tui_debugger import paths
from tui_debugger.state import State
from tui_debugger.steps_compared import ALONE

if TYPE_CHECKING:
    from replay_core.documents.kinds import Document
    from replay_core.documents.replay import CellEntry
    from replay_core.documents.run import RunDocument

#: Documents the screen can show again.
KINDS = ("comparison", "replay", "parity", "diagnosis", "run", "record")

#: Bytes looked at to tell a document from a dump that happens to be JSON.
_HEAD = 4096


def is_document(path: Path) -> bool:
    """Whether a file says of itself that rldbg wrote it."""
    if path.suffix not in (".json", ".html") or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except OSError:
        return False
    if path.suffix == ".html":
        from replay_core.documents.embedding import is_page  # no dump is one

        return is_page(head)
    return b'"schema_version"' in head and (b'"rldbg"' in head or b'"kind"' in head)


def kind_of(path: Path) -> str | None:
    """The kind that a document's head names; None where it names none."""
    with path.open("rb") as file:
        found = re.search(rb'(?:"kind":\s*|"rldbg:kind" content=)"([a-z_]+)"', file.read(_HEAD))
    return found.group(1).decode() if found else None


def _unshown(path: Path, kind: str) -> DumpError:
    return DumpError(
        "the screen cannot show this document", file=str(path), expected=" | ".join(KINDS), found=kind,
        hint=f"rldbg {path} | less",
    )  # fmt: skip


def read(path: Path) -> Document:
    """A saved document.

    Raises:
        DumpError: it is not as the schema says, or of a kind the screen does not show.
    """
    from replay_core.documents.reopening import read_document  # every document's type: 10 ms that no dump pays

    document = read_document(path)
    if document.get("kind") not in KINDS:
        raise _unshown(path, str(document.get("kind")))
    if document["kind"] == "replay" and document["matrix"]:
        try:
            Axes.parse(axes_text(document["matrix"]["axes"]))
        except RequestError as error:
            raise DumpError("the document is damaged", file=str(path), found=error.message) from None
    return document


def is_number(text: str) -> bool:
    """Whether a selection's text is one number, and none of hundreds of digits."""
    return text.isdecimal() and len(text) < 19


#: The parts of a record's key.
KEY = ("step", "micro", "rank", "role", "stage", "epoch", "minibatch")


def side_as_run(document: Mapping[str, Any], side: str) -> RunDocument:
    """A side of a saved comparison as a run of the records it names."""
    keys: list[dict[str, Any]] = []
    other = ALONE["b" if side == "a" else "a"]
    steps = [one["step"] for one in document.get("steps") or [] if one["why"] != other]
    for entry in document["tensors"]:
        key = entry.get(f"{side}_key")
        if key is not None and key not in keys[-8:]:
            keys.append(key)
    unique = list({json.dumps(key, sort_keys=True): key for key in keys}.values())
    # Of the other steps it says what they came to, not what they hold.
    unique += [{"step": step} for step in steps if step not in {key.get("step") for key in unique}]
    return _run(document[side], unique)


def plan_as_run(document: Mapping[str, Any]) -> RunDocument:
    """The recording a saved replay took its micro-batch from."""
    plan = document["plan"]
    key = {name: plan.get(name) for name in ("step", "rank", "micro", "role")}
    return _run({"path": plan["dump"], "dialect": "saved replay", "flags": None}, [key])


def record_as_run(document: Mapping[str, Any]) -> RunDocument:
    return _run({"path": document["path"], "dialect": "saved record", "flags": None}, [document["key"]])


def diagnosis_as_run(document: Mapping[str, Any]) -> RunDocument:
    """The run a saved diagnosis is about, where its files are gone: the records its findings point to."""
    found = [{name: one["where"].get(name) for name in KEY} for one in document["findings"]]
    keys = [key for key in found if key["step"] is not None]
    return _run(document, list({json.dumps(key, sort_keys=True): key for key in keys}.values()))


def _run(side: Mapping[str, Any], keys: Sequence[Mapping[str, Any]]) -> RunDocument:
    steps = sorted({key["step"] for key in keys if key.get("step") is not None})
    whole = [{**dict.fromkeys(KEY), **key} for key in keys]
    records = [{"key": key, "path": side["path"], "fields": None, "problems": []} for key in whole]
    run = {
        "kind": "run", "path": side["path"], "dialect": side["dialect"], "steps": steps, "records": records,
        "problems": [], "notes": [], "flags": side.get("flags"), "models": {}, "checked": "names", "unreadable": 0,
    }  # fmt: skip
    # Without a stamp: nobody has listed it, so it is not written.
    return cast("RunDocument", run)


def cells_of(document: Mapping[str, Any]) -> list[CellEntry]:
    """The cells of a saved replay. Where an older screen wrote one replay without their parts, `asked` tells them."""
    told = [{"part": "cell" if cell.get("asked") else "reference", **cell} for cell in document["cells"]]
    return cast("list[CellEntry]", told)


def axes_text(axes: Mapping[str, list[Any]]) -> str:
    """The axes of a saved matrix as they are written."""

    def word(value: Any) -> str:
        return "all" if value is None else ("off", "on")[value] if isinstance(value, bool) else str(value)

    return " ".join(f"{name}={','.join(map(word, values))}" for name, values in axes.items())


def documents(state: State, *, findings: bool = False) -> list[Document]:
    """The documents behind what is shown: none while nothing is open. `findings`: the diagnosis is looked at."""
    matrix: list[Document] = [state.replay.matrix.document] if state.replay.matrix.document is not None else []
    diagnosis: list[Document] = [state.opened.health.document] if state.opened.health.document is not None else []
    if diagnosis and (findings or state.opened.is_log):
        return diagnosis
    if state.tensors.shows_record or state.tensors.comparison is None:
        shown = state.tensors.record or state.opened.a
        return [*([] if shown is None or "schema_version" not in shown else [shown]), *matrix, *diagnosis]
    comparison = state.tensors.comparison
    if steps := state.opened.steps.entries():
        comparison = {**comparison, "steps": steps}
    if matrix:
        return [comparison, *matrix]
    return [comparison] if state.replay.document is None else [comparison, state.replay.document]


def as_json(document: Document) -> str:
    """The document as it is opened again."""
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_each(
    folder: Path, documents: Iterable[Document], made: Callable[[Document], str] = as_json, ending: str = "json"
) -> list[Path]:
    """Write every document, as what is `made` of it, to a file of its own; nothing is overwritten."""
    return [write_new(folder, document["kind"], made(document), ending) for document in documents]


def write_as(file: Path, documents: Sequence[Document], made: Callable[[Document], str]) -> list[Path]:
    """Write the first document to `file`, any further one beside it with its kind in the name.

    Raises:
        FileExistsError: a file is there; nothing is overwritten.
        OSError: the folder is not there, or cannot be written.
    """
    rest = [file.with_name(f"{file.stem}-{document['kind']}{file.suffix}") for document in documents[1:]]
    written = [file, *rest][: len(documents)]
    for path in written:
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    for path, document in zip(written, documents, strict=True):
        text = made(document)  # before there is a file: what cannot be made leaves none
        with path.open("x", encoding="utf-8") as opened:
            _write(opened, text)
    return written


def write_new(folder: Path, kind: str, text: str, ending: str) -> Path:
    """Write a text under a name that nothing has yet, in the state folder where `folder` cannot be written."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    place = paths.writable_or_state(folder)
    number = 0
    while True:
        tail = f"-{number}" if number else ""
        path = place / f"rldbg-{kind}-{stamp}{tail}.{ending}"
        try:
            with path.open("x", encoding="utf-8") as file:
                _write(file, text)
        except FileExistsError:
            number += 1
        else:
            return path


def _write(file: TextIO, text: str) -> None:
    try:
        file.write(text)
        file.flush()
    except OSError:
        # A full disk: half a document would be refused when it is opened.
        Path(file.name).unlink(missing_ok=True)
        raise
