"""The registry of dialects, and `open_run`. Adding a dialect is one file and its line in DIALECTS."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from errno import EACCES
from functools import partial
from pathlib import Path

from replay_core import budget
from replay_core.budget import reading
from replay_core.dumps import (
    areal,
    curves,
    debug_tree,
    distributed_checkpoint,
    grpo_events,
    listing,
    log_text,
    loose,
    loose_rows,
    metrics,
    msprobe,
    native,
    native_below,
    nexrl,
    open_instruct,
    openrlhf,
    peeking,
    prime_rl,
    roll,
    row_tables,
    sglang,
    shards,
    skyrl,
    slime,
    tensordict_folder,
    torchlens,
    trl_inputs,
    unchanged,
    unnamed,
    verl,
    weights,
)
from replay_core.dumps.completeness import being_written, holes
from replay_core.dumps.declared import payable
from replay_core.dumps.dialect import Dialect, Entry, Index, in_order
from replay_core.dumps.several import runs_inside, said_once
from replay_core.errors import DumpError, NotADumpError, RequestError
from replay_core.jobs import OnEvent, Progress, ignore
from replay_core.records import Fields, Problem, Record, RecordKey, Run, TensorRef

#: Every dialect. Which is asked first where two could take a file, the dialects themselves say (`Dialect.before`).
DIALECTS = in_order(
    [
        *(room.DIALECT for room in (
            native, native_below, nexrl, openrlhf, areal, verl, roll, slime, skyrl, sglang, msprobe, shards,
            open_instruct, trl_inputs, grpo_events, weights, prime_rl, distributed_checkpoint, tensordict_folder,
            debug_tree, torchlens,
        )),
        *row_tables.DIALECTS,
        *(room.DIALECT for room in (metrics, curves, log_text, loose_rows, loose)),
    ]
)  # fmt: skip
#: Records of a file of very many that are read together.
_AT_ONCE = 256
#: Endings of files that would have to be unpacked first.
COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".tgz", ".zip", ".tar")


def open_run(path: Path | str, *more: Path | str, on_event: OnEvent = ignore) -> Run:
    """Open a dump: a directory a framework wrote, or one of its files. Several paths are one run.

    `on_event` is told how many names were read, and which kind of dump is looked for among them.

    A directory may hold the files of several dialects (a trainer's tensors beside its metrics and its log):
    each file belongs to the first dialect that knows it.

    Raises:
        RequestError: a path does not exist.
        NotADumpError: no dialect knows it.
        DumpError: the dump's own index is unreadable.
    """
    listing.forget(on_event)
    peeking.forget()
    budget.forget()
    if not more and (known := unchanged.found(Path(path))) is not None:
        return known
    before = None if more else unchanged.stamp(Path(path))
    # Ten thousand records are no garbage: looking for some among them takes half the time, more beside a large heap.
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        parts = [part for one in dict.fromkeys([Path(path), *map(Path, more)]) for part in _parts(one, on_event)]
        run = parts[0] if len(parts) == 1 else _joined(Path(path), parts)
        if not more and (inside := runs_inside(run.path, run.records)):
            run.inside, run.problems = inside, said_once(run.path, inside, run.problems)
        if not more and run.dialect == native.DIALECT.name and run.path.is_dir():
            unchanged.keep(Path(path), run, listing.listing(run.path), before)
        return run
    finally:
        if was_collecting:
            gc.enable()


def _parts(path: Path, on_event: OnEvent) -> list[Run]:
    """The runs a path holds, one per dialect that knows files of it."""
    if not _is_there(path):
        raise RequestError(
            "there is no such file or directory", file=str(path), hint="check the path; rldbg --help lists the commands"
        )
    if not path.is_dir() and not path.is_file():
        found = "a device, pipe or socket"
        raise NotADumpError("the path is neither a directory nor a file", file=str(path), found=found)
    claimed = _Claims()
    parts: list[Run] = []

    def take(dialect: Dialect, index: Index) -> None:
        if index.files or not parts:
            claimed.add(index)
            parts.append(_run(dialect, path, index))

    try:
        for number, dialect in enumerate(DIALECTS):
            if on_event is not ignore:
                on_event(Progress(number, len(DIALECTS), f"kinds of dump looked for, now {dialect.name}"))
            if dialect.known_by == "rest" or not _detects(dialect, path):
                continue
            index = _indexed(dialect, path)
            index.files = claimed.free(index.files)
            take(dialect, index)
            if dialect.known_by == "index":
                break
        else:
            if path.is_dir() and not (parts and claimed.count >= listing.count(path)):
                for dialect, index in unnamed.found_inside(path, DIALECTS, claimed.is_free):
                    take(dialect, index)
            for dialect in DIALECTS:
                if dialect.known_by != "rest" or (parts and claimed.count >= listing.count(path)):
                    continue  # nothing is left to ask about
                if _detects(dialect, path):
                    index = _indexed(dialect, path)
                    index.files = claimed.free(index.files)
                    if dialect.numbered is not None and path.is_dir():
                        index.files = dialect.numbered(index.files)
                    take(dialect, index)
    except OSError as error:
        raise DumpError(f"cannot read the directory: {error.strerror}", file=str(error.filename or path)) from None
    if parts:
        _say_what_was_left(path, parts[0])
        return parts
    raise NotADumpError(
        "no dialect knows this path as a dump",
        file=str(path),
        expected="a directory or file of " + ", ".join(dict.fromkeys(dialect.name for dialect in DIALECTS)),
        found=listing.contents(path),
        hint=_what_helps(path),
    )


def _detects(dialect: Dialect, path: Path) -> bool:
    try:
        return dialect.detect(path)
    except _CONTENT as error:
        raise _unforeseen(dialect, path, error) from error


def _indexed(dialect: Dialect, path: Path) -> Index:
    try:
        return dialect.index(path)
    except _CONTENT as error:
        raise _unforeseen(dialect, path, error) from error


def _is_there(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a name with a NUL is no file's
        return False
    except OSError as error:
        hint = "whoever runs rldbg must be allowed to enter every folder above it"
        what = f"cannot look at the path: {error.strerror}"
        raise DumpError(what, file=str(path), hint=hint if error.errno == EACCES else None) from None
    return True


def _what_helps(path: Path) -> str:
    if _packed(path):
        return "compressed files are not read: unpack them first"
    if path.is_dir() and not any(path.iterdir()):
        return f"rldbg --follow {path} waits for a trainer that writes there; rldbg record -- COMMAND records one"
    return "name the directory your framework wrote, or one of its files"


def _say_what_was_left(path: Path, run: Run) -> None:
    """Add to the run what under its directory was not looked at, so that nothing is left out without a word."""
    if not path.is_dir():
        return
    found = listing.listing(path)
    run.problems += [Problem(where, what) for where, what in found.skipped]
    if found.linked:
        run.notes.append(f"linked folders are not followed: {_files(found.linked)}")
    if found.special:
        run.notes.append(f"pipes, sockets and devices are not opened: {_files(found.special)}")
    if packed := _packed(path):
        run.notes.append(f"compressed files are not read: {_files(packed)}")


def _files(paths: list[str]) -> str:
    return listing.few([os.path.basename(path) for path in paths], 4)


def _packed(path: Path) -> list[str]:
    return [
        f"{folder.path}/{name}"
        for folder in listing.listing(path).folders
        if not folder.suffixes.isdisjoint(COMPRESSED)
        for name in folder.names
        if name.endswith(COMPRESSED)
    ]


class _Claims:
    """Which files belong to a dialect already. Names are compared only once a second one asks: most dumps have one."""

    def __init__(self) -> None:
        self.count = 0
        self._names: set[str] = set()
        self._waiting: list[Path] = []

    def add(self, index: Index) -> None:
        files = [file for _, file in index.files] + index.beside
        # A file of many records is one file; dialects name it by one object.
        self.count += len(set(map(id, files)))
        self._waiting += files

    def is_free(self, file: Path) -> bool:
        return bool(self.free([(RecordKey(), file)]))

    def free(self, files: list[Entry]) -> list[Entry]:
        self._names.update(map(os.path.abspath, self._waiting))
        self._waiting = []
        return [entry for entry in files if os.path.abspath(entry[1]) not in self._names] if self._names else files


def _joined(path: Path, parts: list[Run]) -> Run:
    """Several runs as one: records sorted together, every problem and note kept once."""
    names = list(dict.fromkeys(part.dialect for part in parts))
    records = sorted((record for part in parts for record in part.records), key=lambda r: (r.key.order, str(r.path)))
    # A part finds its own duplicates; those between the parts show only here.
    problems = [problem for part in parts for problem in part.problems] + _duplicates(records)
    notes = [note for part in parts for note in part.notes]
    flags = [part.flags for part in parts if part.flags]
    models = {step: reference for part in parts for step, reference in part.models.items()}
    if any(known != flags[0] for known in flags):
        notes.append("the parts were computed with different flags; no flag is stated for the whole")
    return Run(
        path,
        " + ".join(names),
        records,
        list(dict.fromkeys(problems)),
        list(dict.fromkeys(notes)),
        flags[0] if flags and all(known == flags[0] for known in flags) else None,
        models,
        beside=[file for part in parts for file in part.beside],
    )


def _run(dialect: Dialect, path: Path, index: Index) -> Run:
    records = []
    shelves: dict[Path, _Shelf] = {}
    # Dialects list files by name; the sort keeps that order among records of one place in the step.
    for key, file in sorted(index.files, key=lambda entry: entry[0].order):
        names = index.names.get(file) if index.names else None
        if dialect.several is None:
            load = _loader(dialect, key, file)
        else:
            if file not in shelves:
                shelves[file] = _Shelf(dialect, file)
            load = shelves[file].loader(key)
        record = Record(key, file, load, names)
        if dialect.told is not None:
            record.told = partial(dialect.told, key, file)
        records.append(record)
    problems = index.problems + _duplicates(records)
    if path.is_dir():
        problems += holes((record.key for record in records), str(path))
        if dialect.is_container:
            problems += being_written([record.path for record in records])
    if not records:
        problems.append(Problem(str(path), "the dump holds no record"))
    return Run(
        path, dialect.name, records, problems, index.notes, index.flags, index.models, index.facts, beside=index.beside
    )


def _loader(dialect: Dialect, key: RecordKey, file: Path) -> Callable[[], Sequence[TensorRef]]:
    def load() -> Sequence[TensorRef]:
        try:
            with reading(file):
                fields = dialect.read(key, file)
            problems = [Problem(str(file), what) for what in peeking.said_of(file)]
            said = fields.problems if isinstance(fields, Fields) else ()
            return Fields(payable(fields), (*said, *problems)) if said or problems else payable(fields)
        except OSError as error:
            raise DumpError(f"cannot read the file: {error.strerror}", file=str(error.filename or file)) from None
        except _CONTENT as error:
            raise _unforeseen(dialect, file, error) from error

    return load


class _Shelf:
    """The records of a file of very many: when one is asked for, those that follow are read as well, and wait."""

    def __init__(self, dialect: Dialect, file: Path) -> None:
        assert dialect.several is not None
        self._dialect, self._file, self._several = dialect, file, dialect.several
        self._keys: list[RecordKey] = []
        self._waiting: dict[int, Sequence[TensorRef] | DumpError] = {}

    def loader(self, key: RecordKey) -> Callable[[], Sequence[TensorRef]]:
        number = len(self._keys)
        self._keys.append(key)
        return partial(self._load, number)

    def _load(self, number: int) -> Sequence[TensorRef]:
        waiting = self._waiting
        if number not in waiting:
            try:
                waiting = self._read(number, _AT_ONCE)
            except DumpError:
                # It may be another's fault: one that cannot be read costs none of the others.
                waiting = self._read(number, 1)
            self._waiting = waiting
        found = waiting.pop(number)
        if isinstance(found, DumpError):
            raise found
        return payable(found)

    def _read(self, number: int, count: int) -> dict[int, Sequence[TensorRef] | DumpError]:
        keys = self._keys[number : number + count]
        try:
            with reading(self._file, len(keys)):
                return dict(enumerate(self._several(keys, self._file), number))
        except OSError as error:
            raise DumpError(f"cannot read the file: {error.strerror}", file=str(error.filename or self._file)) from None
        except _CONTENT as error:
            raise _unforeseen(self._dialect, self._file, error) from error


#: What content that no check of a dialect foresaw ends in: it is still the file's fault.
_CONTENT = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)


def _unforeseen(dialect: Dialect, path: Path, error: BaseException) -> DumpError:
    text = f"{error}"
    what = f"the file is not as {dialect.name} writes it: {type(error).__name__}: {text[:200]}"
    return DumpError(what, file=str(path))


def _duplicates(records: list[Record]) -> list[Problem]:
    """Two records for one key; one problem for each pair of files that share keys."""
    seen: dict[RecordKey, Record] = {}
    twice: dict[tuple[Path, Path], list[RecordKey]] = {}
    for record in records:
        first = seen.setdefault(record.key, record)
        if first is not record:
            twice.setdefault((record.path, first.path), []).append(record.key)
    problems = []
    for (path, first_path), keys in twice.items():
        more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        beside = first_path.name if first_path.name != path.name else str(first_path)
        problems.append(Problem(str(path), f"a second record of {keys[0]}{more}, beside {beside}"))
    return problems
