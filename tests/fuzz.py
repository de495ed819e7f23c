"""Mutated files of every kind that rldbg reads, for as long as one likes: `make fuzz SECONDS=1200`.

    python -m tests.fuzz SECONDS [SEED] [TARGET,TARGET]

The corpus lies in `tests/data/fuzz`, a folder for a target. What comes of a mutant is an answer or an error of
rldbg's, in two seconds and half a gigabyte, with nothing executed. A mutant that breaks this is kept, and its place is
told. Exit code 1 where there is one.
"""

from __future__ import annotations

import contextlib
import io
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from replay_core import pages
from replay_core.compare.judging.tolerance import load_tolerances
from replay_core.dumps import open_run
from replay_core.errors import RldbgError
from replay_core.executors import wire
from tests.replay_core.dumps.containers.fuzzing import FORBIDDEN, is_harmless
from tui_debugger import cli, settings

CORPUS = Path(__file__).parent / "data" / "fuzz"
MOST_S, MOST_MIB, HUNG_S = 2.0, 512, 20
_RECORDS, _TOUCHED = 100, 1 << 22
#: What formats trip over, put where it does not belong.
WORDS = [
    b"-1", b"9" * 400, b"1e999", b"null", b"NaN", b'"\\ud800"', b"[", b"{", b"}", b"]", b"\0", b"inf", b"\r", b"true",
    b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\xff" * 8, b"\0\0\0\0\0\1\0\0", b"[" * 200,
    b"R", b"b", b"\x94", b"\x8f", b"(", b"t",
]  # fmt: skip


@dataclass
class Figures:
    """What came of one target."""

    tried: int = 0
    refused: int = 0
    executed: int = 0
    hung: int = 0
    over_budget: int = 0
    internal: int = 0
    slowest_s: float = 0.0
    kept: list[str] = field(default_factory=list)

    @property
    def is_bad(self) -> bool:
        return bool(self.executed or self.hung or self.over_budget or self.internal)


class _Watch:
    """Hears what runs while a mutant is opened: the harness's own doings beside that are none of its."""

    def __init__(self) -> None:
        self.is_on = False
        self.heard: list[str] = []

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_on and event in FORBIDDEN and not is_harmless(event, arguments):
            self.heard.append(f"{event} {arguments!r:.80}")


_WATCH = _Watch()


class HungError(BaseException):
    """It takes too long to wait for."""


def _dump(path: Path) -> None:
    for record in open_run(path).records[:_RECORDS]:
        with contextlib.suppress(RldbgError):
            for ref in record.tensors()[:_RECORDS]:
                if ref.is_readable and ref.nbytes <= _TOUCHED:
                    pages.array(ref).tobytes()


def _native(path: Path) -> None:
    """The mutant is the index of a dump."""
    (path.parent / "manifest.json").write_text(
        '{"format": "rldbg-dump", "schema_version": 1, "models": {}, "flags": {}}'
    )
    (path.parent / "index_rank0.jsonl").write_bytes(path.read_bytes())
    _dump(path.parent)


def _document(path: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        if cli.run(["compare", str(path)]) not in range(5):
            raise AssertionError(said.getvalue()[:300])


def _wire(path: Path) -> None:
    for line in path.read_bytes().split(b"\n"):
        wire.told(line)
        wire.read_log(line)


def _config(path: Path) -> None:
    settings.read_settings(path)
    load_tolerances(path)


TARGETS: dict[str, Callable[[Path], None]] = {
    "zip": _dump, "legacy": _dump, "pickle": _dump, "safetensors": _dump, "numpy": _dump, "jsonl": _dump,
    "parquet": _dump, "msgpack": _dump, "log": _dump, "metrics": _dump, "curves": _dump, "native": _native,
    "document": _document, "wire": _wire, "config": _config,
}  # fmt: skip


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Bytes flipped, cut, doubled, moved, and words put in."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4, 16))):
        at = chance.randrange(len(changed) + 1)
        kind = chance.randrange(7)
        if kind == 0:
            changed[at : at + 1] = bytes([chance.randrange(256)])
        elif kind == 1:
            word = chance.choice(WORDS)
            changed[at : at + len(word)] = word
        elif kind == 2:
            changed[at:at] = chance.choice(WORDS)
        elif kind == 3:
            del changed[at : at + chance.randrange(1, 64)]
        elif kind == 4:
            start = chance.randrange(len(changed) + 1)
            changed[at:at] = changed[start : start + chance.randrange(1, 64)]
        elif kind == 5:
            changed[at:at] = changed[max(0, at - chance.randrange(1, 16)) : at] * chance.choice((2, 30, 2000))
        else:
            del changed[at:]
    return bytes(changed[: 1 << 20])


def _hung(_signal: int, _frame: Any) -> NoReturn:
    raise HungError


def run(seconds: float, seed: int, targets: list[str]) -> dict[str, Figures]:
    """The figures of each target, all of which take turns until the time is over."""
    chance, figures = random.Random(seed), {target: Figures() for target in targets}
    corpus = {target: sorted((CORPUS / target).iterdir()) for target in targets}
    kept_in = Path(tempfile.mkdtemp(prefix="rldbg-fuzz-"))
    with tempfile.TemporaryDirectory() as folder:
        for target in targets:  # what reading imports is imported before anybody watches
            for path in corpus[target]:
                _one(TARGETS[target], Path(folder), path.name, path.read_bytes(), Figures())
        sys.addaudithook(_WATCH)
        signal.signal(signal.SIGALRM, _hung)
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            target = targets[sum(one.tried for one in figures.values()) % len(targets)]
            path, one = chance.choice(corpus[target]), figures[target]
            data = mutated(path.read_bytes(), chance)
            if what := _one(TARGETS[target], Path(folder), path.name, data, one):
                name = f"{target}-{one.tried}-{path.name}"
                (kept_in / name).write_bytes(data)
                one.kept.append(f"{kept_in / name}: {what}")
    return figures


def _one(opens: Callable[[Path], None], folder: Path, name: str, data: bytes, figures: Figures) -> str | None:
    """What is wrong with what came of a mutant."""
    place = Path(tempfile.mkdtemp(dir=folder))
    path = place / name
    path.write_bytes(data)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    what = None
    signal.alarm(HUNG_S)
    _WATCH.heard.clear()
    _WATCH.is_on = True
    try:
        opens(path)
    except RldbgError:
        figures.refused += 1
    except HungError:
        figures.hung += 1
        what = "hung"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        figures.internal += 1
        what = f"{type(error).__name__}: {error!s:.200}"
    finally:
        signal.alarm(0)
        _WATCH.is_on = False
    if _WATCH.heard:
        figures.executed += 1
        what = _WATCH.heard[0]
    took, grown = time.thread_time() - began, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    figures.tried += 1
    figures.slowest_s = max(figures.slowest_s, took)
    if what is None and (took > MOST_S or grown > MOST_MIB):
        figures.over_budget += 1
        what = f"took {took:.1f} s, {grown:.0f} MiB"
    for left in (*place.rglob("*"),):
        left.unlink()
    place.rmdir()
    return what


def main(words: list[str]) -> int:
    seconds, seed = float(words[0]), int(words[1]) if len(words) > 1 else int(time.time())
    figures = run(seconds, seed, words[2].split(",") if len(words) > 2 else list(TARGETS))
    columns = ("tried", "refused", "executed", "hung", "over_budget", "internal", "slowest_s")
    lines = [f"seed {seed}", f"{'target':12}" + "".join(f"{name:>12}" for name in columns)]
    for target, one in figures.items():
        cells = (
            f"{getattr(one, name):12.2f}" if name == "slowest_s" else f"{getattr(one, name):12,}" for name in columns
        )
        lines.append(f"{target:12}" + "".join(cells))
    lines += [kept for one in figures.values() for kept in one.kept]
    sys.stdout.write("\n".join(lines) + "\n")
    return int(any(one.is_bad for one in figures.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
