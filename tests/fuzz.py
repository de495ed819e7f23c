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
import shutil
import signal
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from replay_core import pages
from replay_core.compare.judging.tolerance import load_tolerances
from replay_core.compare.pairing.renaming import Renames
from replay_core.dumps import open_run
from replay_core.errors import RldbgError
from replay_core.executors import wire
from replay_core.replay import capsule
from tests.replay_core.dumps.containers.fuzzing import FORBIDDEN, is_harmless
from tui_debugger import cli, settings

CORPUS = Path(__file__).parent / "data" / "fuzz"
MOST_S, MOST_MIB, HUNG_S = 2.0, 512, 20
_RECORDS, _TOUCHED = 100, 1 << 22
#: Bytes of a genuine folder that is copied for each of its mutants.
_SMALL = 130_000
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


def _names(path: Path) -> None:
    """A map of two engines' names, used on names."""
    rules = Renames.read(path)
    rules.applied({}, {})


def _capsule(path: Path) -> None:
    """A capsule laid out and looked into, up to where a model would run."""
    folder = path.parent / "laid out"
    folder.mkdir()
    capsule.unpack(path, folder)
    strange = [file for file in path.parent.rglob("*") if file.is_file() and not _is_of_a_capsule(file, folder)]
    if strange != [path]:
        raise AssertionError(f"{strange} were laid out")
    _dump(folder / "run")
    capsule.apart_from(folder, {side: np.zeros((2, 2)) for side in capsule.SIDES})


def _is_of_a_capsule(file: Path, folder: Path) -> bool:
    return folder in file.parents and str(file.relative_to(folder)) in capsule.NAMES


def _alone(source: Path, place: Path) -> tuple[Path, Path]:
    path = place / source.name
    return path, path


def _in_a_dump(source: Path, place: Path) -> tuple[Path, Path]:
    """The mutant is the index of a dump."""
    (place / "manifest.json").write_text('{"format": "rldbg-dump", "schema_version": 1, "models": {}, "flags": {}}')
    return place / "index_rank0.jsonl", place


def _in_a_genuine_folder(source: Path, place: Path) -> tuple[Path, Path]:
    """The mutant is one file of a dump that a framework wrote, the others of which are whole."""
    root = next(folder for folder in genuine_folders() if folder in source.parents)
    copy = place / root.name
    shutil.copytree(root, copy)
    return copy / source.relative_to(root), copy


@cache
def genuine_folders() -> tuple[Path, ...]:
    """The smaller ones of the frameworks' own outputs, outermost first."""
    kinds = [folder for folder in CORPUS.parent.iterdir() if folder.is_dir() and folder != CORPUS]
    outer = [inner for kind in kinds for inner in ([kind] if _size(kind) < _SMALL else sorted(kind.iterdir()))]
    return tuple(sorted(folder for folder in outer if folder.is_dir() and _size(folder) < _SMALL))


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@dataclass(frozen=True)
class Target:
    """What is done with a mutant."""

    opens: Callable[[Path], None]
    #: (the genuine file, an empty place) -> (where its mutant goes, what is opened); lays out what lies beside it.
    lays: Callable[[Path, Path], tuple[Path, Path]] = _alone


_CONTAINERS = (
    "zip",
    "legacy",
    "pickle",
    "safetensors",
    "numpy",
    "jsonl",
    "parquet",
    "msgpack",
    "log",
    "metrics",
    "curves",
)
TARGETS: dict[str, Target] = {
    **{container: Target(_dump) for container in _CONTAINERS},
    "native": Target(_dump, _in_a_dump), "folder": Target(_dump, _in_a_genuine_folder), "document": Target(_document),
    "page": Target(_document), "capsule": Target(_capsule), "names": Target(_names), "wire": Target(_wire),
    "config": Target(_config),
}  # fmt: skip


def corpus(target: str) -> list[Path]:
    if target == "folder":
        return sorted(file for folder in genuine_folders() for file in folder.rglob("*") if file.is_file())
    return sorted((CORPUS / target).iterdir())


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
    files = {target: corpus(target) for target in targets}
    kept_in = Path(tempfile.mkdtemp(prefix="rldbg-fuzz-"))
    with tempfile.TemporaryDirectory() as folder:
        for target in targets:  # what reading imports is imported before anybody watches
            for path in files[target]:
                _one(TARGETS[target], Path(folder), path, path.read_bytes(), Figures())
        sys.addaudithook(_WATCH)
        signal.signal(signal.SIGALRM, _hung)
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            target = targets[sum(one.tried for one in figures.values()) % len(targets)]
            path, one = chance.choice(files[target]), figures[target]
            data = _repacked(path, chance) if target == "capsule" else mutated(path.read_bytes(), chance)
            if what := _one(TARGETS[target], Path(folder), path, data, one):
                name = f"{target}-{one.tried}-{path.name}"
                (kept_in / name).write_bytes(data)
                one.kept.append(f"{kept_in / name}: {what}")
    return figures


def _repacked(path: Path, chance: random.Random) -> bytes:
    """A capsule one of whose entries is a mutant, packed anew lest it stop at its checksum; at times the zip."""
    if chance.random() < 0.2:
        return mutated(path.read_bytes(), chance)
    buffer, struck = io.BytesIO(), chance.choice(capsule.NAMES)
    with zipfile.ZipFile(path) as genuine, zipfile.ZipFile(buffer, "w") as packed:
        for entry in genuine.infolist():
            data = genuine.read(entry)
            packed.writestr(entry.filename, mutated(data, chance) if entry.filename == struck else data)
    return buffer.getvalue()


def _one(target: Target, folder: Path, source: Path, data: bytes, figures: Figures) -> str | None:
    """What is wrong with what came of a mutant."""
    place = Path(tempfile.mkdtemp(dir=folder))
    mutant, opened = target.lays(source, place)
    mutant.write_bytes(data)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    what = None
    signal.alarm(HUNG_S)
    _WATCH.heard.clear()
    _WATCH.is_on = True
    try:
        target.opens(opened)
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
    shutil.rmtree(place)
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
