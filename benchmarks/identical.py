"""Two identical dumps, page cache warm, against memcmp over the same bytes."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator

from benchmarks.inputs import Inputs, record_of
from benchmarks.racing import Result, Side, child, race
from replay_core import workbench
from replay_core.dumps import open_run
from replay_core.records import FileBytes

LIMIT_S, LIMIT_BYTES = 0.35, 1.7e9


def rows(inputs: Inputs) -> Iterator[Result]:
    a, b = inputs.modules(), inputs.copy()
    compared = record_of(a).stat().st_size + record_of(b).stat().st_size
    memcmp = Side(f"memcmp over {compared / 1e9:.2f} GB of both maps", _Memcmp(inputs).run)
    inside = Side("workbench.compare_dumps in a warm process", lambda: workbench.compare_dumps(a, b))
    yield race("identical dumps, warm cache", inside, memcmp, bar=0.8, rounds=7)
    # The maps of the peer stand, each page of them: whoever opens a file has none, and pays for one or copies.
    anew = Side("the same, the files opened and mapped in the time that counts", lambda: _Memcmp(inputs).run())
    yield race("identical dumps, warm cache, against maps made anew", inside, anew, bar=None, rounds=7)

    words = [sys.executable, "-m", "tui_debugger", "compare", str(a), str(b)]
    whole = Side("the whole command `rldbg compare A B`", lambda: child(words, expect=0))
    result = race("identical dumps, start included", whole, memcmp, bar=None, rounds=3)
    result.limits.append((f"seconds for {compared / 1e9:.2f} GB", whole.wall_s, LIMIT_S))
    if compared < 0.9 * LIMIT_BYTES:
        result.notes.append(f"the bar is for {LIMIT_BYTES / 1e9:.1f} GB; run with --scale 1")
    yield result


class _Memcmp:
    """memcmp over the tensors' bytes of both dumps, as mapped files: what no comparer can beat on one core."""

    def __init__(self, inputs: Inputs) -> None:
        self._call = ctypes.CDLL(None).memcmp
        self._call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self._maps = []
        self._addresses = []
        spans = []
        for dump in (inputs.modules(), inputs.copy()):
            file = record_of(dump)
            with open(file, "rb") as opened:
                # A private map lets ctypes take its address; nothing is written to it.
                mapped = mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            self._maps.append(mapped)
            self._addresses.append(ctypes.addressof(ctypes.c_char.from_buffer(mapped)))
            sources = [ref.source for ref in open_run(dump).records[0].tensors()]
            spans.append([(source.offset, source.nbytes) for source in sources if isinstance(source, FileBytes)])
        assert spans[0] == spans[1]
        self._spans = spans[0]

    def run(self) -> None:
        a, b = self._addresses
        assert not any(self._call(a + offset, b + offset, nbytes) for offset, nbytes in self._spans)
