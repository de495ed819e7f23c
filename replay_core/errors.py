"""Every error rldbg raises on purpose, and the exit code each one means.

    RldbgError
    ├── RequestError                 exit 2   the request is wrong
    │   ├── SelectionError                    no such step, rank, micro-batch, stage
    │   ├── ModelError                        no such model, no weights, vocabulary too small
    │   └── RecordExistsError                 a record of that key is already on disk
    ├── DumpError                    exit 3   the bytes are wrong
    │   ├── TruncatedError                    the file ends before what it declares
    │   ├── UnsafeFileError                   the file asks to run code
    │   ├── BudgetError                       the file asks for more than it may cost
    │   ├── NotADumpError                     no dialect knows the directory
    │   └── NothingComparableError            not one tensor could be compared
    ├── CellError                    exit 4   a replay failed, crashed, or cannot run here
    │   ├── UnavailableError                  the setting needs what this machine lacks
    │   └── ChildDiedError                    the child process ended without an answer
    │       └── ChildHungError                it was ended at its time limit
    └── JobCancelledError            exit 130 the caller asked it to stop

An error names the file, the tensor, what was expected, what was found and the command that
helps; it crosses a process boundary as a plain mapping and comes out as the same class.
"""

from __future__ import annotations

import errno
import os
from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """What the process says to the shell. Precedence: 130 > 70 > 3 > 4 > 1 > 0."""

    AGREES = 0
    DIVERGES = 1
    BAD_REQUEST = 2
    BAD_BYTES = 3
    CELL_FAILED = 4
    INTERNAL = 70
    INTERRUPTED = 130


class RldbgError(Exception):
    """Something the user can act on. Never shown with a traceback."""

    exit_code = ExitCode.INTERNAL

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        tensor: str | None = None,
        expected: str | None = None,
        found: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.file = file
        self.tensor = tensor
        self.expected = expected
        self.found = found
        self.hint = hint

    def __str__(self) -> str:
        lines = [self.message]
        for label in ("file", "tensor", "expected", "found"):
            value = getattr(self, label)
            if value is not None:
                # A line break in a name is the file's own: it must not pass for a line of ours.
                lines.append(f"  {label + ':':<10}" + str(value).replace("\n", "\\n"))
        if self.hint:
            lines += ["", f"hint: {self.hint}"]
        return "\n".join(lines)

    @property
    def in_one_line(self) -> str:
        """What is wrong, expected and found: for a list of problems, which names the file beside it."""
        given = [(label, value) for label, value in (("expected", self.expected), ("found", self.found)) if value]
        return "; ".join([self.message, *(f"{label} {value}" for label, value in given)])

    def to_mapping(self) -> dict[str, Any]:
        """The error as JSON-able data, `type` naming the class."""
        fields = ("message", "file", "tensor", "expected", "found", "hint")
        return {"type": type(self).__name__, **{name: getattr(self, name) for name in fields}}


class RequestError(RldbgError):
    """The request is wrong: an unknown option, step, rank or model."""

    exit_code = ExitCode.BAD_REQUEST


class SelectionError(RequestError):
    """No record of the run has the step, rank, micro-batch or stage asked for."""


class ModelError(RequestError):
    """The model cannot be found, has no weights, or does not fit the batch."""


class RecordExistsError(RequestError):
    """A record of that key is already on disk; nothing recorded is ever overwritten."""


class DumpError(RldbgError):
    """The bytes on disk are not what they should be."""

    exit_code = ExitCode.BAD_BYTES


class TruncatedError(DumpError):
    """The file ends before the bytes it declares."""


class UnsafeFileError(DumpError):
    """Reading the file the usual way would run code that it carries."""


class BudgetError(DumpError):
    """The file asks for more bytes, values, depth or seconds than what is stored in it may cost."""


class NotADumpError(DumpError):
    """No dialect recognises the path as a dump."""


class NothingComparableError(DumpError):
    """Two dumps share no tensor that could be compared."""


class CellError(RldbgError):
    """A replay cell failed."""

    exit_code = ExitCode.CELL_FAILED


class UnavailableError(CellError):
    """The asked-for setting cannot run on this machine."""


class OwnForwardError(CellError):
    """What a model computes comes of its own forward alone, called whole with all rows as they are."""


class ChildDiedError(CellError):
    """A child process ended without giving its answer."""


class ChildHungError(ChildDiedError):
    """A child process was ended because its job took longer than it may."""


class JobCancelledError(RldbgError):
    """The job was stopped because its caller asked for it."""

    exit_code = ExitCode.INTERRUPTED


def _tree(root: type[RldbgError]) -> dict[str, type[RldbgError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


def error_from_mapping(mapping: dict[str, Any]) -> RldbgError:
    """Rebuild the error that `RldbgError.to_mapping` described; an unknown type is the base class."""
    kind = _tree(RldbgError).get(str(mapping.get("type")), RldbgError)
    fields = {name: mapping.get(name) for name in ("file", "tensor", "expected", "found", "hint")}
    return kind(str(mapping.get("message", "unknown error")), **fields)


def stack_of(error: BaseException) -> list[str]:
    """Lines of a report: the stack and the type of an error and of what led to it, never their texts.

    A text may quote the file that was read, and with it tensors, prompts or a secret.
    """
    import traceback  # only who crashes pays

    lines = []
    before = error.__cause__ or error.__context__
    if before is not None and before is not error:
        lines += [*stack_of(before), "\nled to\n\n"]
    return [*lines, *traceback.format_tb(error.__traceback__), f"{type(error).__module__}.{type(error).__qualname__}\n"]


#: Libraries that the base installation does not bring, and the extra that does.
EXTRAS = {
    "torch": "replay", "transformers": "replay", "safetensors": "replay", "psutil": "replay",
    "pynvml": "replay", "scipy": "replay", "yaml": "parity", "deepspeed": "parity", "megatron": "parity",
    "omegaconf": "yaml", "pyarrow": "parquet", "ray": "ray", "obstore": "remote",
    "asyncssh": "remote", "tensorboardX": "tensorboard", "wandb": "wandb",
}  # fmt: skip


#: What a plain install brings; a recorder needs none of it.
_ALWAYS = frozenset({"click", "rich", "textual", "numpy", "ml_dtypes", "msgspec", "platformdirs", "tokenizers"})


def missing_library(error: BaseException, what: str) -> UnavailableError | None:
    """What to say where `what` ended because a library of an extra is not installed; None for any other error."""
    from importlib.util import find_spec

    library = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if library in _ALWAYS:
        return UnavailableError(f"{what} needs {library}", expected="what `pip install rldbg` brings along",
                                found="not installed", hint="pip install rldbg, without --no-deps")  # fmt: skip
    if library not in EXTRAS:
        return None
    if EXTRAS[library] == "replay" and find_spec("torch") is None:
        library = "torch"  # what it is about: the smaller one only happened to be asked for first
    return UnavailableError(
        f"{what} needs {library}",
        expected=f"the extra `{EXTRAS[library]}`",
        found="not installed",
        hint=f"pip install 'rldbg[{EXTRAS[library]}]'",
    )


#: What a disk says that has no room, no more files, or fails.
_OF_A_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ENFILE, errno.EMFILE}


def failing_disk(error: BaseException, what: str) -> DumpError | None:
    """What to say where `what` ended because the disk could not take it; None for any other error.

    A library written in Rust raises an error of its own (safetensors: `... No space left on device (os error 28)`).
    """
    file = None
    if isinstance(error, OSError):
        number, file = error.errno, error.filename
    else:
        told = str(error).rpartition("(os error ")[2].partition(")")
        number = int(told[0]) if told[1] and told[0].isascii() and told[0].isdigit() else None
    if number not in _OF_A_DISK:
        return None
    return DumpError(
        f"{what} could not go on: {os.strerror(number)}",
        file=None if file is None else str(file),
        expected="room on the disk, and permission to use it",
        hint="df -h; rldbg cache --clear frees what earlier replays left",
    )
