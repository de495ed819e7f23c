"""The documents that are handed out in tests: genuine ones of every kind, and one whose texts are hostile."""

from __future__ import annotations

import copy
import json
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from replay_core import workbench
from replay_core.desk import perform
from replay_core.executors.in_process import InProcess
from tests.tui_debugger.scripted import DOCUMENTS

DATA = Path(__file__).parents[2] / "data"
NEXRL = DATA / "nexrl"

#: What stands in names and texts of dumps that somebody sends: each would do something where it is not escaped.
_HOSTILE = (
    "</script><script>document.title='owned'</script>",
    '"><img src=x onerror="document.title=1">',
    "</template></style></title><svg onload=alert(1)>",
    "a|b`c`|*bold*_it_[x](javascript:alert(1))<!-- @someone #1 https://example.com www.example.com",
    "\u202egnp.exe\u202c\u0000\u001b[31m\u200b\ud800",
    "```\n```\n# heading\n| a | b |\n|---|---|",
    "]]>&amp;<![CDATA[",
)
#: A text of a megabyte in every place takes seconds: one document has it.
LONG = 100_000
HOSTILE = (*_HOSTILE, pytest.param("A" * 1_000_000, marks=pytest.mark.long))


_SAVED = (
    "comparison", "comparison_same", "matrix", "diagnosis", "diagnosis_log", "diagnosis_shifted", "parity",
    "record", "run_a", "inspect_one", "ruling_lacking",
)  # fmt: skip
#: Names of `genuine`: known without making the documents, which takes a second.
NAMES = (*_SAVED, "compared", "mismatch", "samples", "run", "gathering", "ruling", "weights")


@lru_cache(1)
def genuine() -> dict[str, Any]:
    """Name -> document: saved ones that rldbg made, and such as are made in no time."""
    found = {name: json.loads((DOCUMENTS / f"{name}.json").read_text(encoding="utf-8")) for name in _SAVED}
    found["compared"] = workbench.compare_dumps(NEXRL / "self_hosted_fp32", NEXRL / "self_hosted_bf16")
    found["mismatch"] = workbench.mismatch(DATA / "faults/temperature_mismatch")
    found["samples"] = workbench.samples(DATA / "slime", by="mismatch", shown=(2, 3))
    found["run"] = workbench.open_dump(NEXRL / "self_hosted_fp32", headers=True)
    with tempfile.TemporaryDirectory() as units:
        sides = {"a": str(NEXRL / "self_hosted_fp32"), "b": str(NEXRL / "self_hosted_bf16")}
        found["gathering"] = workbench.work_units("compare", sides, Path(units), None, InProcess(perform))
    # Pages of a real ruling and of real weights: what is inside them is read as a colleague's rldbg reads it.
    found |= {name: workbench.reopen(Path(__file__).with_name(f"{name}.html")) for name in ("ruling", "weights")}
    assert tuple(found) == NAMES
    return found


def spoilt(document: Any, text: str) -> Any:
    """The document with every text of a dump replaced: names, paths, sentences, keys of settings."""
    kept = {"schema_version", "kind", "tool", "created"}
    words = {"SAME", "CLOSE", "DIFF", "NAN", "SHAPE", "MISSING", "PADDING", "skipped", "NOISE", "SUSPECT", "BUG"}
    words |= {"error", "warning", "info", "ran", "failed", "unavailable", "crashed", "nan", "inf", "-inf", "arrived"}
    words |= {"recording", "reference", "control", "cell", "model", "response", "valid", "all", "a", "b", "both"}

    def inner(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: one if name in kept else inner(one) for name, one in value.items()}
        if isinstance(value, list):
            return [inner(one) for one in value]
        return text if isinstance(value, str) and value not in words else value

    return inner(copy.deepcopy(document))


def hostile_texts() -> tuple[Any, ...]:
    """The texts alone."""
    return _HOSTILE
