"""What a dump holds: a record's headers, ten thousand names, a slice of a tensor larger than memory, a scan of it.

*Listing a record* is `Record.tensors()` of an open run in a warm process: the file is opened anew, its directory and
pickle are checked and read, every tensor is named and aligned. A run's records are one pickle many times over, which is
worked out once; what a record costs whose pickle no other has is printed beside it, as are opening the run (which
dialect is it?) and the container alone.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.inputs import Inputs, record_of
from benchmarks.racing import Result, Side, child, race
from replay_core.dumps import open_run
from replay_core.dumps.containers import known_pickles, read_container

NAMES = 10_000
#: A sparse file: as large as it says, no bytes on the disk.
GIANT_BYTES = 4 << 30

_SCAN = """
import sys
from replay_core.dumps import open_run
from replay_core.measure.statistics import statistics
assert statistics(open_run(sys.argv[1]).records[0].tensors()[0]).mean == 0
"""


def rows(inputs: Inputs) -> Iterator[Result]:
    for dump, what in ((inputs.modules(), "many large tensors"), (inputs.small(), "a few small ones")):
        file = record_of(dump) if "many" in what else next((dump / "batch_inputs").glob("*.pt"))
        yield from _record(file, what, 8 if "many" in what else 4)
    yield _names(inputs)
    yield from _giant(inputs)


def _record(file: Path, what: str, bar: float) -> Iterator[Result]:
    record = open_run(file).records[0]
    fields = len(record.tensors())

    def headers() -> int:
        record.release()
        return len(record.tensors())

    def anew() -> int:
        known_pickles.forget()
        return headers()

    def theirs() -> int:
        return len(torch.load(str(file), mmap=True, weights_only=True))

    title = f"listing a .pt record of {fields} fields ({what})"
    their_name = "torch.load(FILE, mmap=True, weights_only=True), torch already imported"
    sides = (
        (bar, "Record.tensors(): one file's headers, safety pass, names, alignment", headers),
        (None, "Record.tensors() of a pickle like no other's of the process", anew),
        (None, "open_run(FILE) besides, asking every dialect", lambda: len(open_run(file).records[0].tensors())),
        (None, "the container alone", lambda: read_container(file)),
    )
    for limit, name, ours in sides:
        yield race(title, Side(name, ours), Side(their_name, theirs), bar=limit, rounds=30)


def _names(inputs: Inputs) -> Result:
    root = inputs.folder / "names"
    folder = root / "forward_data"
    if not folder.exists():
        folder.mkdir(parents=True)
        for number in range(NAMES):
            (folder / f"step_{number // 16:06d}_rank{number // 4 % 4}_micro{number % 4}.pt").touch()

    def names() -> int:
        return len(open_run(root).records)

    result = race(
        f"the names of {NAMES:,} files",
        Side("open_run(DIRECTORY)", names),
        Side("sorted(Path.iterdir()) and a regular expression are no bar; shown for scale", lambda: _plainly(folder)),
        bar=None,
        rounds=10,
    )
    result.limits.append(("seconds to list them", result.ours.wall_s, 0.1))
    return result


def _plainly(folder: Path) -> int:
    return len(sorted(folder.iterdir()))


def _giant(inputs: Inputs) -> Iterator[Result]:
    file = inputs.folder / "giant.safetensors"
    width = 1024
    count = GIANT_BYTES // (4 * width)
    header = f'{{"x":{{"dtype":"F32","shape":[{count},{width}],"data_offsets":[0,{GIANT_BYTES}]}}}}'.encode()
    with open(file, "wb") as opened:
        opened.write(len(header).to_bytes(8, "little") + header)
        opened.truncate(8 + len(header) + GIANT_BYTES)
    ref = open_run(file).records[0].tensors()[0]

    def part() -> float:
        from replay_core import pages

        return float(pages.part(ref, [(500_000, 500_004), (0, 8)]).sum())

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = race(
        "4 x 8 values of a 4 GB tensor (sparse file)",
        Side("pages.part, which `show --slice` reads by", part),
        Side("safetensors' get_slice", lambda: _their_slice(file)),
        bar=None,
        rounds=10,
    )
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    result.limits.append(("MiB that slicing left resident", grown, 16))
    yield result
    scale = min(1.0, inputs.scale)
    began = time.perf_counter()
    peak = child([sys.executable, "-c", _SCAN, str(file)], expect=0) if scale >= 1 else float("nan")
    wall = time.perf_counter() - began
    if scale >= 1:
        scanned = Side("statistics of all of it, in a process of its own", int, wall, wall)
        result = Result("scanning a 4 GB tensor (sparse file)", scanned, scanned, None, 0.0)
        result.limits.append(("MiB resident at most", peak, 100))
        yield result


def _their_slice(file: Path) -> float:
    from safetensors import safe_open

    with safe_open(str(file), "pt") as opened:
        return float(opened.get_slice("x")[500_000:500_004, :8].sum())
