"""A capsule: one file that shows a difference by itself, for a colleague or an upstream issue. No torch.

A zip of a slice of the model (config and safetensors), the batch as a native dump in safetensors, what both sides put
out, and what was found where it was made. It is opened as what it is, a stranger's file: only the names below, each
once, within bounds; no pickle, no code, and no config that asks for either.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from replay_core import pages
from replay_core.documents.reopening import checked_part
from replay_core.documents.replay import CapsuleEntry
from replay_core.dumps import open_run
from replay_core.dumps.containers.json_lines import read_object
from replay_core.dumps.containers.reading import read_container
from replay_core.errors import DumpError, RequestError
from replay_core.file_spans import regular
from replay_core.recorder.writer import replace_whole
from replay_core.records import Run
from replay_core.replay.flags import Flags
from replay_core.replay.segments import Floats, tokens_of

#: Of the file, and of everything in it.
MOST_BYTES, MOST_INSIDE = 25 << 20, 64 << 20
FORMAT, VERSION = "rldbg-capsule", 1
NOTE, OUTPUTS, SCRIPT = "capsule.json", "outputs.safetensors", "repro.py"
_RECORD = "run/forward_data/step_000000_rank0_micro0.safetensors"
#: Everything a capsule may hold.
NAMES = (NOTE, OUTPUTS, "model/config.json", "model/model.safetensors", "run/manifest.json",
         "run/index_rank0.jsonl", _RECORD)  # fmt: skip
#: Of a model's config: each asks for code that is not the library's, or for kernels from elsewhere.
_ASKING = (
    "auto_map", "custom_pipelines", "quantization_config", "kernel_config", "attn_implementation",
    "_attn_implementation", "experts_implementation", "_experts_implementation", "trust_remote_code",
)  # fmt: skip
SIDES = ("reference", "cell")
#: What a capsule's entries may be packed by; a zip knows others, each with errors of its own.
_PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
#: Of its JSON files.
_MOST_JSON = 1 << 24


def is_capsule(path: Path) -> bool:
    """Whether a file is a zip whose first entry is a capsule's note: cheap, and no promise that it is whole."""
    try:
        with regular(path) as file:
            head = file.read(64)
    except (DumpError, OSError):
        return False
    return head.startswith(b"PK\x03\x04") and head[30 : 30 + len(NOTE)] == NOTE.encode()


def pack(folder: Path, note: Mapping[str, Any], outputs: Mapping[str, Floats], file: Path) -> int:
    """Write the capsule of a folder that holds model/ and run/; its size.

    Raises:
        RequestError: it is larger than a capsule may be, or cannot be written.
    """
    whole = folder / "packed.zip"
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr(NOTE, json.dumps({"format": FORMAT, "version": VERSION, **note}, indent=1, allow_nan=False))
        packed.writestr(OUTPUTS, _safetensors(outputs))
        for name in NAMES[2:]:
            data = (folder / name).read_bytes()
            packed.writestr(name, _nameless(data) if name == "run/manifest.json" else data)
    data = whole.read_bytes()
    whole.unlink()
    if len(data) > MOST_BYTES:
        raise RequestError("the capsule is too large", expected=f"at most {MOST_BYTES >> 20} MiB",
                           found=f"{len(data) / 2**20:.1f} MiB")  # fmt: skip
    try:
        replace_whole(file, data)
    except OSError as error:
        raise RequestError("the capsule cannot be written", file=str(file), found=error.strerror) from None
    return len(data)


def _nameless(manifest: bytes) -> bytes:
    """A dump's manifest without what it says of the machine and the command."""
    kept = json.loads(manifest)
    return json.dumps(
        {name: kept[name] for name in ("format", "schema_version", "created", "models", "flags")}
    ).encode()


def unpack(file: Path, folder: Path) -> tuple[dict[str, Any], CapsuleEntry]:
    """Lay a capsule out in a folder; (its note, the part of it that a document shows).

    Raises:
        DumpError: it is none, is damaged, asks for code, or is larger than a capsule may be.
    """
    with regular(file) as stream:
        try:
            with zipfile.ZipFile(stream) as packed:
                entries = packed.infolist()
                if sorted(one.filename for one in entries) != sorted(NAMES):
                    strange = next((one.filename for one in entries if one.filename not in NAMES), "too few, or twice")
                    raise _damaged(file, f"{', '.join(NAMES)}, each once", strange[:80])
                if any(one.compress_type not in _PACKED for one in entries):
                    raise _damaged(file, "entries stored or deflated", "another compression")
                if sum(one.file_size for one in entries) > MOST_INSIDE:
                    raise _damaged(file, f"at most {MOST_INSIDE >> 20} MiB inside", "more")
                for one in entries:
                    with packed.open(one) as held:
                        data = held.read(one.file_size + 1)
                    if len(data) != one.file_size:
                        raise _damaged(file, f"{one.file_size:,} bytes of {one.filename}", f"{len(data):,} or more")
                    place = folder / one.filename
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.write_bytes(data)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
            raise _damaged(file, "a zip that rldbg wrote", str(error)[:200]) from None
    try:
        outputs = read_container(folder / OUTPUTS).container
    except DumpError as error:
        raise _damaged(file, f"safetensors in {OUTPUTS}", error.message[:200]) from None
    if outputs != "safetensors":
        raise _damaged(file, f"safetensors in {OUTPUTS}", outputs)
    note = _object(file, folder / NOTE)
    if (note.get("format"), note.get("version")) != (FORMAT, VERSION):
        raise _damaged(file, f"{FORMAT} {VERSION}", f"{note.get('format')} {note.get('version')}"[:80])
    config = _object(file, folder / "model/config.json")
    asking = _asked_for(config)
    if asking:
        raise _damaged(file, "a config that transformers alone understands", f"{asking} in model/config.json")
    if _object(file, folder / "run/manifest.json").get("models") != {"*": "../model"}:
        raise _damaged(file, "the capsule's own model", "another in run/manifest.json")
    flags = note.get("flags")
    if (
        not isinstance(flags, dict)
        or set(flags) != set(SIDES)
        or not all(isinstance(one, dict) for one in flags.values())
    ):
        raise _damaged(file, f"the flags of {' and '.join(SIDES)}", str(flags)[:80])
    for one in flags.values():
        try:
            Flags.from_mapping(one)
        except (RequestError, TypeError) as error:
            raise _damaged(file, "flags that this rldbg knows", str(error)[:200]) from None
    said = note.get("told", {})
    if not isinstance(said, dict):
        raise _damaged(file, "an object of what was told", type(said).__name__)
    told = {**said, "file": str(file), "bytes": file.stat().st_size, "script": None,
            "as_made": {}}  # fmt: skip
    return note, checked_part(told, "CapsuleEntry", file)


def _asked_for(value: Any) -> str | None:
    if isinstance(value, dict):
        for name, inner in value.items():
            # What the library writes of itself says nothing.
            if name in _ASKING and inner is not None:
                return str(name)
            if found := _asked_for(inner):
                return found
    if isinstance(value, list):
        return next((found for one in value if (found := _asked_for(one))), None)
    return None


def _object(file: Path, path: Path) -> dict[str, Any]:
    try:
        return read_object(path, path.name, _MOST_JSON)
    except DumpError as error:
        raise _damaged(file, f"an object as JSON in {path.name}", error.message[:200]) from None


def _damaged(file: Path, expected: str, found: str) -> DumpError:
    return DumpError("the capsule is damaged", file=str(file), expected=expected, found=found)


def outputs_of(runs: Mapping[str, Run], final_hidden: str) -> dict[str, Floats]:
    """Side -> [N, D] the final hidden states, sample by sample."""
    return {side: tokens_of(run, final_hidden) for side, run in runs.items()}


def apart_from(folder: Path, now: Mapping[str, Floats]) -> dict[str, float | None]:
    """How far what came out here is from what came out there: relative L2 of the worst token; None: not comparable."""
    tree = read_container(folder / OUTPUTS).tree
    found: dict[str, float | None] = {}
    for side in SIDES:
        ref, here_ND = tree.get(side), now.get(side)
        with np.errstate(invalid="ignore"):  # a NaN that signals becomes one that does not
            there_ND = None if ref is None else np.asarray(pages.array(ref), dtype=np.float64)
        if here_ND is None or there_ND is None or there_ND.shape != here_ND.shape or not there_ND.size:
            found[side] = None
            continue
        norm = np.maximum(np.linalg.norm(there_ND, axis=-1), np.finfo(np.float64).tiny)
        worst = float((np.linalg.norm(here_ND - there_ND, axis=-1) / norm).max())
        found[side] = worst if np.isfinite(worst) else None
    return found


def _safetensors(values: Mapping[str, Floats]) -> bytes:
    header, start, parts = dict[str, Any](), 0, []
    for name, value in values.items():
        data = np.ascontiguousarray(value, dtype="<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [start, start + len(data)]}
        start += len(data)
        parts.append(data)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(parts)


def recorded(folder: Path) -> Run:
    """The batch of a capsule that was laid out."""
    return open_run(folder / "run")
