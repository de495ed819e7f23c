"""Open a file, find out which container it is, read it: the room's door."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from replay_core.budget import reading
from replay_core.dumps.containers.json_lines import read_json
from replay_core.dumps.containers.loading import Loading
from replay_core.dumps.containers.msgpack_file import read_msgpack
from replay_core.dumps.containers.numpy_file import is_npz, read_npy, read_npz
from replay_core.dumps.containers.parquet_file import read_parquet
from replay_core.dumps.containers.pickle_machine import Machine
from replay_core.dumps.containers.region import Region
from replay_core.dumps.containers.safetensors_file import read_safetensors
from replay_core.dumps.containers.settle import settle
from replay_core.dumps.containers.sniff import HEAD, kind_of
from replay_core.dumps.containers.torch_legacy import read_torch_legacy, read_unsettled
from replay_core.dumps.containers.torch_zip import read_torch_zip
from replay_core.errors import DumpError, RldbgError, TruncatedError
from replay_core.file_spans import open_regular
from replay_core.records import FileBytes, TensorRef


def _read_plain_pickle(loading: Loading) -> Any:
    """The tree of a `pickle.dump` of anything, its tensors nested torch streams; what follows it is a problem.

    Raises:
        DumpError: it is damaged or unsafe.
    """
    machine = Machine(loading)
    value = machine.run(loading.region.start)
    loading.refuse_strangers()
    if machine.end < loading.region.end:
        left = f"{loading.region.end - machine.end:,} bytes"
        loading.problems.append(f"only the file's first pickle is read: {left} follow it")
    return settle(loading, value)


_READERS: dict[str, Callable[[Loading], Any]] = {
    "torch_zip": read_torch_zip,
    "torch_legacy": read_torch_legacy,
    "pickle": _read_plain_pickle,
    "npy": read_npy,
    "npz": read_npz,
    "json": read_json,
    "msgpack": read_msgpack,
    "parquet": read_parquet,
}


class Content(NamedTuple):
    """What a file holds: nested dict, list, tuple, number, text and None, the tensors as `TensorRef`s.

    A framework's record object is `{"__class__": name, "state": …}`. Bytes of 256 and more are uint8 tensors.
    """

    container: str
    tree: Any
    notes: tuple[str, ...] = ()
    """What was left out on purpose."""
    problems: tuple[str, ...] = ()
    """What a reader must know before trusting the tree."""
    metadata: Mapping[str, str] = MappingProxyType({})
    """safetensors' `__metadata__`."""
    is_whole: bool = True
    """False of the first rows of a file that may hold more."""


def read_container(path: Path | str, *, inert: Iterable[str] = (), most_rows: int | None = None) -> Content:
    """Read a file's structure. No tensor's bytes are read and nothing the file names is run.

    Args:
        path: a torch zip, a torch legacy stream, a pickle or safetensors.
        inert: further classes (`package.module.Class`) to keep as `{"__class__": …, "state": …}`.
        most_rows: of a file of JSON lines, only so many of them.

    Raises:
        NotADumpError: the file is none of these.
        UnsafeFileError: the pickle names something that is not on the allow-list.
        DumpError: it is damaged, or cannot be opened.
    """
    if not isinstance(path, Path) or not path.is_absolute():
        path = Path(os.path.abspath(path))
    return _opened(path, None, frozenset(inert), most_rows)


def read_nested(ref: TensorRef, *, inert: Iterable[str] = ()) -> Content:
    """Read the file that a uint8 tensor's bytes are, offsets absolute in the outer file.

    Raises:
        DumpError: as `read_container`; or the tensor is not plain bytes of a file.
    """
    source = ref.source
    if ref.dtype != "uint8" or not isinstance(source, FileBytes) or source.strides is not None:
        raise DumpError("only plain bytes of a file can hold another file", tensor=ref.name or None, found=ref.dtype)
    return _opened(source.path, (source.offset, source.nbytes), frozenset(inert))


def _opened(path: Path, part: tuple[int, int] | None, inert: frozenset[str], most_rows: int | None = None) -> Content:
    fd, size = open_regular(path)
    try:
        offset, nbytes = part or (0, size)
        region = Region(path, fd, offset, offset + nbytes)
        if offset + nbytes > size:
            raise region.truncated(offset + nbytes, size)
        with reading(path):
            return _read(Loading(region, inert, torch_stream=_read_torch_stream, most_rows=most_rows))
    except RldbgError:
        raise
    except OSError as error:
        raise DumpError(f"cannot read the file: {error.strerror}", file=str(path)) from None
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
        struct.error,
    ) as error:
        # The last fence: bytes that no check foresaw are still the bytes' fault.
        raise DumpError(f"the file is damaged: {type(error).__name__}: {error}", file=str(path)) from error
    finally:
        os.close(fd)


def _head(region: Region) -> bytes:
    if region.end == region.start:
        raise TruncatedError("the file is empty", file=str(region.path), expected="a dump", found="0 bytes")
    return region.read(region.start, min(HEAD, region.end - region.start))


def _read(loading: Loading) -> Content:
    kind = kind_of(_head(loading.region), str(loading.region.path))
    if kind == "torch_zip" and is_npz(loading.region):
        kind = "npz"
    metadata: dict[str, str] = {}
    if kind == "safetensors":
        tree, metadata = read_safetensors(loading)
    else:
        tree = _READERS[kind](loading)
    return Content(kind, tree, tuple(loading.notes), tuple(loading.problems), metadata, not loading.is_cut)


def _read_torch_stream(loading: Loading) -> Any:
    """A torch file nested in a pickle's bytes, for the builders: a legacy storage stays a storage."""
    kind = kind_of(_head(loading.region), str(loading.region.path))
    if kind == "torch_legacy":
        return read_unsettled(loading)
    if kind == "torch_zip":
        return read_torch_zip(loading)
    raise loading.malformed("a nested torch file that is a plain pickle", expected="a torch zip or legacy stream")
