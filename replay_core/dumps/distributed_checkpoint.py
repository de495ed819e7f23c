"""torch.distributed.checkpoint: a folder of `.metadata` and `__{rank}_{n}.distcp`. torchtitan, FSDP2, Megatron, NeMo.

`.metadata` is a pickle that says of every tensor its size, its pieces, and where in which file a piece lies; a piece is
a torch file within the .distcp file. The folder is one record of stage `param`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from replay_core import naming
from replay_core.dumps.boxes import laid_out
from replay_core.dumps.containers import read_nested
from replay_core.dumps.containers.torch_rebuild import text_of_place
from replay_core.dumps.dialect import Dialect, Index, any_of
from replay_core.dumps.fields import flatten
from replay_core.dumps.listing import Folder, is_file, listing
from replay_core.dumps.peeking import content_of
from replay_core.errors import DumpError, RldbgError
from replay_core.records import Fields, FileBytes, Problem, RecordKey, TensorRef, Unreadable
from replay_core.regexes import regex

_METADATA = ".metadata"
_FILE = regex(r"__\d{1,6}_\d{1,6}\.distcp")
_STEP = regex(r"(?:global_step|checkpoint|step|iter)[_=-]?(\d{1,18})")
_KIND = "torch.distributed.checkpoint.metadata.TensorStorageMetadata"


def _folders(path: Path) -> Iterator[tuple[Folder, str]]:
    for folder in listing(path).folders:
        if is_file(path):
            # One file of it stands for the folder: none says what it holds without the others.
            if path.name == _METADATA or _FILE.fullmatch(path.name):
                yield folder, path.name
        elif _METADATA in folder.names and ".distcp" in folder.suffixes:
            yield folder, _METADATA


def index(path: Path) -> Index:
    found = Index([])
    for folder, entry in _folders(path):
        steps = [int(m.group(1)) for part in folder.path.split("/")[-3:] if (m := _STEP.fullmatch(part))]
        key = RecordKey(steps[-1] if steps else None, None, None, "actor", "param")
        found.files.append((key, folder.file(entry)))
        found.beside += [folder.file(name) for name in folder.names if _FILE.fullmatch(name)]
    return found


def read(key: RecordKey, path: Path) -> list[TensorRef]:
    metadata = path.with_name(_METADATA)
    said = _state(content_of(metadata).tree)
    tensors, places = said.get("state_dict_metadata"), said.get("storage_data")
    if not isinstance(tensors, dict) or not isinstance(places, dict):
        raise DumpError("the metadata of a distributed checkpoint names no tensors", file=str(metadata))
    pieces = _Pieces(metadata, places)
    fields: list[TensorRef] = []
    # {"model": state} nests what a model of Hugging Face's calls `model.` itself.
    nested = any(str(name).startswith(("model.model.", "model.lm_head.")) for name in tensors)
    for name, kind in tensors.items():
        held = _tensor(str(name), kind, pieces)
        plain = str(name).removeprefix("model.") if nested else str(name)
        for ref in flatten({plain: held}):
            of_a_weight = isinstance(held, TensorRef) and not plain.startswith("optim")
            fields.append(ref.with_(canonical=naming.canonical(f"param.{ref.name}" if of_a_weight else ref.name)))
    fields.sort(key=lambda ref: naming.called(ref.canonical or ref.name))
    return Fields([ref.with_(order=order) for order, ref in enumerate(fields)], list(pieces.problems.values()))


def _state(value: Any) -> dict[str, Any]:
    state = value.get("state") if isinstance(value, dict) else None
    return state if isinstance(state, dict) else {}


class _Pieces:
    """What the .distcp files of a checkpoint hold, each place read once: a hostile list names one a thousand times."""

    def __init__(self, metadata: Path, places: Mapping[Any, Any]) -> None:
        self._metadata, self._places = metadata, places
        self._held: dict[tuple[str, int, int], Any] = {}
        self.problems: dict[str, Problem] = {}

    def of(self, name: str, start: tuple[int, ...] | None) -> Any:
        """What was saved under a name, or of a tensor its piece from `start`; None where it cannot be read."""
        said = _state(self._places.get(text_of_place(name, start)))
        file, offset, length = (said.get(part) for part in ("relative_path", "offset", "length"))
        if not isinstance(file, str) or type(offset) is not int or type(length) is not int:
            return None
        place = (file, max(offset, 0), max(length, 0))
        if place not in self._held:
            self._held[place] = self._read(*place)
        return self._held[place]

    def _read(self, file: str, offset: int, length: int) -> Any:
        if os.path.basename(file) != file or file in ("", ".", ".."):
            what = f"the metadata leads out of the directory: {file[:80]!r}"
            self.problems.setdefault(file, Problem(str(self._metadata), what))
            return None
        source = FileBytes(self._metadata.with_name(file), offset, length)
        try:
            return read_nested(TensorRef(file, "uint8", (source.nbytes,), source)).tree
        except RldbgError as error:
            self.problems.setdefault(file, Problem(str(source.path), error.message))
            return None


def _tensor(name: str, kind: Any, held: _Pieces) -> Any:
    """The tensor, or what else was saved under that name."""
    if not isinstance(kind, dict) or kind.get("__class__") != _KIND:
        return held.of(name, None)
    said, pieces = _state(kind), dict[tuple[int, ...], TensorRef]()
    shape, chunks = said.get("size"), said.get("chunks")
    if not _is_shape(shape) or not isinstance(chunks, list):
        return TensorRef("", "none", (), Unreadable("the metadata says neither its size nor its pieces"))
    for chunk in map(_state, chunks):
        start = chunk.get("offsets")
        if not _is_shape(start):
            return TensorRef("", "none", shape, Unreadable("a piece without a place"))
        piece = held.of(name, start)
        if not isinstance(piece, TensorRef) or piece.shape != chunk.get("sizes"):
            return TensorRef("", "none", shape, Unreadable(f"the piece at {list(start)} cannot be read"))
        pieces[start] = piece
    first = next(iter(pieces.values()), None)
    return laid_out(pieces, shape, "none" if first is None else first.dtype)


def _is_shape(value: Any) -> TypeGuard[tuple[int, ...]]:
    return isinstance(value, tuple) and all(type(length) is int and length >= 0 for length in value)


DIALECT = Dialect("distributed checkpoint", "names", any_of(_folders), index, read)
