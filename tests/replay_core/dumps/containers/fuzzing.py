"""Damaged files of every container, opened one after the other in a process of their own.

    python -m tests.replay_core.dumps.containers.fuzzing KIND[,KIND] COUNT SEED FOLDER

Prints one line of JSON, by kind: how many files were opened and refused, the slowest, the memory that was gained,
and whatever must not happen: an exception that is none of ours, an audit event of something being run.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import re
import resource
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from replay_core import pages
from replay_core.dumps import open_run
from replay_core.errors import RldbgError

#: What reading a file may never do. `pickle.find_class` is the C unpickler looking something up.
FORBIDDEN = frozenset(
    {"os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "exec", "compile", "pickle.find_class",
     "socket.connect", "shutil.rmtree", "os.remove", "os.rename", "ctypes.dlopen"}
)  # fmt: skip
_TOUCHED = 1 << 22


def _torch(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def _tree() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {
        "input_ids": torch.arange(12).reshape(3, 4),
        "log_probs": torch.randn(3, 3, generator=generator),
        "h": torch.randn(4, 2, generator=generator).bfloat16().t(),
        "rows": [torch.arange(3), torch.arange(5)],
        "meta": {"step": 3, "loss": 0.5, "name": "run", "none": None, "flags": [True, False]},
    } | {f"layer.{number}.weight": torch.full((2, 3), float(number)) for number in range(6)}


def _npz() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, input_ids=np.arange(6).reshape(2, 3), x=np.ones((2, 2), np.float32), names=np.array(["a", "bc"]))
    return buffer.getvalue()


def _npy() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.asfortranarray(np.arange(12.0).reshape(3, 4)))
    return buffer.getvalue()


def _safetensors() -> bytes:
    from safetensors.torch import save

    return save({"a": torch.arange(6).reshape(2, 3), "b": torch.ones(4).bfloat16()}, {"note": "x"})


def _jsonl() -> bytes:
    rows = [
        {"step": 1, "tokens": list(range(n)), "logprobs": [-0.5, None, float("nan")][:n], "text": "aé", "r": {"x": n}}
        for n in (3, 2, 1, 3)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _parquet() -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    table = {"step": [1, 1], "prompt": ["a", "b"], "tokens": [[1, 2], [3]], "advantage": [0.5, None]}
    pq.write_table(pa.table(table), buffer)
    return buffer.getvalue()


def _msgpack() -> bytes:
    import msgspec

    batch = [[1, 2, 3], [False, True, True], [0.1] * 3, [-0.1] * 3, [0, 1, 2], [3], [1.0] * 3, ["e"] * 3]
    return msgspec.msgpack.encode([batch, batch])


CONTAINERS: dict[str, list[Callable[[], bytes]]] = {
    "zip": [lambda: _torch(_tree())],
    "legacy": [lambda: _torch(_tree(), _use_new_zipfile_serialization=False)],
    "pickle": [
        lambda: pickle.dumps({**_tree(), "n": np.arange(4.0), "o": np.array(["a", None], dtype=object)}, 4),
        lambda: pickle.dumps({"a": [1, 2.5, 10**30, "tê", b"x"], "c": 1j, "s": {1, 2}}, 2),
    ],
    "safetensors": [_safetensors],
    "numpy": [_npz, _npy],
    "jsonl": [_jsonl],
    "parquet": [_parquet],
    "msgpack": [_msgpack],
}

_DTYPES = re.compile(rb"FloatStorage|LongStorage|BFloat16Storage|float32|int64|bfloat16|<f4|<f8|<i8|<U2|F32|I64|BF16")
_SHAPES = re.compile(rb"\[(\d)(?=[,\]])|\((\d)(?=, )|K([\x01-\x09])")
_STORAGES = re.compile(rb"data/\d|data_offsets|\.npy")


def damaged(data: bytes, count: int, seed: int) -> Iterator[bytes]:
    """`count` damaged forms: first the systematic ones, then random ones."""
    rng = random.Random(seed)
    systematic = [b"", *(data[: len(data) * part // 64] for part in range(1, 64))]
    systematic += [magic + data[len(magic) :] for magic in (b"\0" * 8, b"PK\5\6", b"\x80\x63", b"\x93NUMPX", b"PAR0")]
    for pattern, change in ((_DTYPES, b"Fl?"), (_SHAPES, b"-7"), (_STORAGES, b"gone")):
        for match in list(pattern.finditer(data))[:40]:
            start, end = match.span()
            kept = (change * 8)[: end - start] if pattern is not _SHAPES else _negative(match)
            systematic.append(data[:start] + kept + data[end:])
    yield from systematic[:count]
    for _ in range(count - len(systematic)):
        yield _mutated(data, rng)


def _negative(match: re.Match[bytes]) -> bytes:
    return b"J\xff\xff\xff\xff" if match.group(3) else match.group()[:1] + b"-" + match.group()[1:]


def _mutated(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(changed) or 1)
        kind = rng.randrange(6)
        if kind < 2:
            changed[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 2:
            number = rng.choice((2**32 - 1, 2**31, 2**31 - 1, 2**20, 0))
            changed[at : at + 4] = struct.pack(rng.choice(("<I", ">I")), number)
        elif kind == 3:
            changed[at : at + 8] = struct.pack("<Q", rng.choice((2**64 - 1, 2**62, 2**60, 2**40)))
        elif kind == 4:
            del changed[at : at + rng.randrange(1, 64)]
        else:
            start = rng.randrange(len(changed) or 1)
            changed[at:at] = changed[start : start + rng.randrange(1, 64)]
    return bytes(changed)


def _opened(path: Path) -> None:
    for record in open_run(path).records:
        for ref in record.tensors():
            if ref.is_readable and not ref.is_text and ref.nbytes <= _TOUCHED:
                pages.array(ref).tobytes()


def is_harmless(event: str, arguments: tuple[Any, ...]) -> bool:
    """An import of a module that is installed, or `ast.literal_eval` parsing a numpy header: it runs nothing."""
    if event == "exec":
        file = getattr(arguments[0], "co_filename", "")
        return any(file.startswith(root + os.sep) for root in (sys.prefix, sys.base_prefix, os.getcwd()))
    return event == "compile" and arguments[1] == "<unknown>"


def _import_everything(path: Path) -> None:
    """A damaged file may look like any container: what reading them imports is imported before anybody watches."""
    for makers in CONTAINERS.values():
        for make in makers:
            with suppress(ImportError, RldbgError):
                data = make()
                for content in (data, data[: len(data) // 2]):
                    path.write_bytes(content)
                    with suppress(RldbgError):
                        _opened(path)


def main(kind: str, count: int, seed: int, folder: Path) -> dict[str, Any]:
    """The report of one container."""
    path = folder / f"{kind}.bin"
    report: dict[str, Any] = {"files": 0, "refused": 0, "slowest_s": 0.0, "forbidden": [], "strange": []}
    originals = [make() for make in CONTAINERS[kind]]
    _import_everything(path)
    for data in originals:
        path.write_bytes(data)
        _opened(path)
    is_watching = False

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if is_watching and event in FORBIDDEN and not is_harmless(event, arguments):
            report["forbidden"].append(f"{event} {arguments!r:.80}")

    sys.addaudithook(watch)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number, data in enumerate(originals):
        for content in damaged(data, count // len(originals), seed + number):
            path.write_bytes(content)
            began, is_watching = time.process_time(), True
            try:
                _opened(path)
            except RldbgError:
                report["refused"] += 1
            except Exception as error:
                report["strange"].append(f"{type(error).__name__}: {error!s:.120} of {content[:64]!r}")
            is_watching = False
            report["slowest_s"] = max(report["slowest_s"], time.process_time() - began)
            report["files"] += 1
    report["grown_mib"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return report


if __name__ == "__main__":
    asked = sys.argv[1:]
    kinds = asked[0].split(",")
    reports = {kind: main(kind, int(asked[1]), int(asked[2]), Path(asked[3])) for kind in kinds}
    sys.stdout.write(json.dumps(reports) + "\n")
