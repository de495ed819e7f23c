"""The registry of dialects, and `open_run`. Adding a dialect is one file and one line in DIALECTS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from replay_core.dumps import loose, native, nexrl, openrlhf
from replay_core.dumps.dialect import Dialect
from replay_core.errors import DumpError, NotADumpError, RequestError
from replay_core.records import Problem, Record, RecordKey, Run, TensorRef

#: Tried in this order; the last one takes any single file that holds a dict of arrays.
DIALECTS: tuple[Dialect, ...] = (native, nexrl, openrlhf, loose)


def open_run(path: Path | str) -> Run:
    """Open a dump: a directory a framework wrote, or one of its files.

    Raises:
        RequestError: the path does not exist.
        NotADumpError: no dialect knows it.
        DumpError: the dump's own index is unreadable.
    """
    path = Path(path)
    if not path.exists():
        raise RequestError(
            "there is no such file or directory", file=str(path), hint="check the path; rldbg --help lists the commands"
        )
    try:
        for dialect in DIALECTS:
            if dialect.detect(path):
                return _run(dialect, path)
    except OSError as error:
        raise DumpError(f"cannot read the directory: {error.strerror}", file=str(error.filename or path)) from None
    raise NotADumpError(
        "no dialect knows this path as a dump",
        file=str(path),
        expected="a directory or file of " + ", ".join(dialect.name for dialect in DIALECTS),
        found=_contents(path),
        hint="name the directory your framework wrote, or one of its files",
    )


def _run(dialect: Dialect, path: Path) -> Run:
    index = dialect.index(path)
    records = []
    for key, file in sorted(index.files, key=lambda entry: (entry[0].order, entry[1].name)):
        records.append(Record(key, file, _loader(dialect, key, file), index.names.get(file)))
    problems = index.problems + _duplicates(records)
    if not records:
        problems.append(Problem(str(path), "the dump holds no record"))
    return Run(path, dialect.name, records, problems, index.notes, index.flags, index.models)


def _loader(dialect: Dialect, key: RecordKey, file: Path) -> Callable[[], Sequence[TensorRef]]:
    return lambda: dialect.read(key, file)


def _duplicates(records: list[Record]) -> list[Problem]:
    seen: dict[RecordKey, Path] = {}
    problems = []
    for record in records:
        if record.key in seen:
            problems.append(
                Problem(str(record.path), f"a second record of {record.key}, beside {seen[record.key].name}")
            )
        seen.setdefault(record.key, record.path)
    return problems


def _contents(path: Path) -> str:
    if path.is_file():
        with open(path, "rb") as file:
            head = file.read(8)
        return f"a file of {path.stat().st_size:,} bytes that begins {head!r}"
    if not path.is_dir():
        return "neither a file nor a directory"
    names = sorted(entry.name for entry in path.iterdir())
    if not names:
        return "an empty directory"
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
