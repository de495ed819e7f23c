"""What `e` writes: the document on the screen, and the replay it came from."""

from __future__ import annotations

import json
import time
from pathlib import Path

from replay_core.jobs import Document
from tui_debugger import paths
from tui_debugger.state import State


def documents(state: State) -> list[Document]:
    """The documents behind what is shown: none while nothing is open."""
    if state.shows_record or state.comparison is None:
        shown = state.record or state.a
        return [] if shown is None else [shown]
    return [state.comparison, replay_document(state)] if state.cells else [state.comparison]


def replay_document(state: State) -> Document:
    """The cells of the last replay as one document; the first, each row alone, is the baseline."""
    head = {k: v for k, v in (state.comparison or {}).items() if k in ("schema_version", "tool", "created")}
    cells = [
        {"agreement": None, "segments": None, **cell.document, "asked": number > 0}
        for number, cell in enumerate(state.cells)
    ]
    notes = list(dict.fromkeys(note for cell in state.cells for note in cell.document.get("notes") or []))
    return {**head, "kind": "replay", "baseline": 0, "plan": state.plan, "cells": cells, "notes": notes}


def write_new(folder: Path, document: Document) -> Path:
    """Write a document under a name that nothing has yet, in the state folder where `folder` cannot be written."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    place = paths.writable_or_state(folder)
    number = 0
    while True:
        tail = f"-{number}" if number else ""
        path = place / f"rldbg-{document.get('kind', 'document')}-{stamp}{tail}.json"
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            number += 1
        else:
            return path
