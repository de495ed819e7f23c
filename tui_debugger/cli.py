"""The command `rldbg`. A run's directory alone goes straight to the screen; everything else is the command line's.

Standard output carries the answer and nothing else; progress, hints and errors go to standard error.
Exit codes are those of `replay_core.errors.ExitCode`.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from replay_core.budget import limit_process
from replay_core.collecting import seldom
from replay_core.errors import ExitCode, RldbgError, failing_disk, missing_library
from replay_core.mirrored import names_a_mirror
from tui_debugger.command_table import COMMANDS

try:
    from tui_debugger.failing import fail
    from tui_debugger.progress_line import clear_lines
except ModuleNotFoundError as error:  # installed for a recorder alone, with --no-deps
    lacking = missing_library(error, "the command line")
    if lacking is None:
        raise
    sys.stderr.write(f"error: {lacking}\n")
    raise SystemExit(int(lacking.exit_code)) from None

#: What reads, answers and ends.
_ONCE = ("ls", "show", "compare", "diagnose", "weights", "referee", "gather")
#: What runs a trainer or a model, in this process or in one that inherits its limits.
_UNLIMITED = ("record", "replay", "capsule", "demo", "parity", "mismatch")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code. Never shows a traceback."""
    _hold_standard_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] not in COMMANDS:
        gc.disable()  # the screen: what it imports is no garbage, and it collects by a rule of its own once it stands
    with seldom() if words and words[0] in _ONCE else nullcontext():
        code = run(words)
        # Nothing of it is garbage before all of it is: the interpreter's last look would take a tenth of the time.
        gc.freeze()
    sys.exit(code)


def _hold_standard_streams() -> None:
    """Give a stream that was closed (`<&-`) to nobody: else the next file that is opened gets its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def run(arguments: list[str]) -> int:
    """Run the command line and return its exit code."""
    if not arguments or arguments[0] not in _UNLIMITED:
        limit_process()
    try:
        try:
            return _answer(arguments)
        finally:
            clear_lines()  # an error is said on a line of its own
    except RldbgError as error:
        fail(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        fail("interrupted")
        return ExitCode.INTERRUPTED
    except MemoryError:
        hint = "a part of it may fit: show --slice, or compare --name, --step, --rank and --micro"
        fail("what was asked for needs more memory than a reader may have: half of the machine's", hint)
        return ExitCode.BAD_BYTES
    except Exception as error:
        if missing := missing_library(error, "the command"):
            fail(str(missing))
            return missing.exit_code
        if full := failing_disk(error, "the command"):
            fail(str(full))
            return full.exit_code
        from tui_debugger.crash import write_crash

        fail(f"internal error: {type(error).__name__}: {error}", f"the report is in {write_crash(error)}")
        return ExitCode.INTERNAL


def _answer(arguments: list[str]) -> int:
    if _is_run_alone(arguments):
        from tui_debugger.opening import open_screen

        return open_screen(Path(arguments[0]))
    from tui_debugger.commands.group import answer  # and click: 7 ms, which nobody who opens a run waits for

    return answer(arguments)


def _is_run_alone(arguments: list[str]) -> bool:
    """Whether the words are one directory, to be drawn as it is: neither units of a long job nor a URL's mirror."""
    if len(arguments) != 1 or "_RLDBG_COMPLETE" in os.environ:
        return False
    (word,) = arguments
    if word in COMMANDS or word.startswith("-") or names_a_mirror(word) or not os.path.isdir(word):
        return False
    from tui_debugger.opening import has_terminal

    return has_terminal() and not os.path.lexists(os.path.join(word, "plan.json"))


if __name__ == "__main__":
    main()
