"""A dump, or two, brought onto the screen: by `ui`, and at once where a directory is all that is said."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from replay_core.errors import NotADumpError, RequestError
from tui_debugger import snapshot
from tui_debugger.peek import steps_in
from tui_debugger.progress_line import ProgressLine

if TYPE_CHECKING:
    from replay_core.documents.run import RunDocument

#: Steps that are listed before the screen opens: what takes no longer than a blink.
LISTED_AT_ONCE = 100


def open_screen(
    a: Path | None,
    b: Path | None = None,
    *,
    ascii: bool = False,
    mouse: bool = True,
    theme: str | None = None,
    follow: bool = False,
) -> int:
    """Draw dump A, or the first divergence of A and B, until the user leaves.

    Raises:
        RldbgError: a path is no dump, or there is no terminal.
    """
    # One line from here until the screen is drawn: on a busy box both the listing and the import take a while.
    starting = ProgressLine("opening")
    peeked = steps_in(a) if a is not None and a.is_dir() else []
    listed = None
    if follow:
        listed = begun(a, starting)
    elif a is not None and not snapshot.is_document(a):
        # A long run is listed by the reader, while its steps already stand on the screen.
        listed = None if len(peeked) > LISTED_AT_ONCE and has_terminal() else listing(a, line=starting)
    if b is not None:
        listing(b, line=starting)
    require_terminal(a, b)
    # Next to nothing of what a start allocates is garbage: the first paint does not wait for the collector to see it.
    gc.disable()
    from tui_debugger.app import run_ui  # textual: 170 ms that no other command pays

    starting.clear()
    return run_ui(a, b, ascii=ascii, mouse=mouse, theme=theme, listed=listed, peeked=peeked, follow=follow)


def begun(path: Path | None, line: ProgressLine | None = None) -> RunDocument | None:
    """A run that is to be followed; None where it is not there yet, or is a folder with nothing to read in it.

    Raises:
        RequestError: there is no run to follow, or it is a saved document.
    """
    if path is None or snapshot.is_document(path):
        raise RequestError("nothing to follow", expected="the path of a run that is being written", found=str(path))
    if not path.exists():
        return None  # its trainer has not begun
    try:
        return listing(path, line=line)
    except NotADumpError:
        if path.is_dir() and not any(path.iterdir()):
            return None
        raise


def listing(path: Path, *more: Path, line: ProgressLine | None = None) -> RunDocument:
    """What is in a dump. `line` says how far it is, and goes on; without it one of its own does."""
    from replay_core import workbench  # every dialect comes with it: 40 ms, which a long run pays after its first paint

    progress = line or ProgressLine()
    try:
        return workbench.open_dump(path, *more, on_event=progress)
    finally:
        if line is None:
            progress.clear()


def has_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def require_terminal(a: Path | None, b: Path | None) -> None:
    """Refuse to draw where nobody sees it.

    Raises:
        RequestError: standard input or output is no terminal; names the headless command.
    """
    if has_terminal():
        return
    if a is not None and b is not None:
        hint = f"rldbg compare {a} {b}"
    else:
        hint = f"rldbg ls {a}" if a is not None else "rldbg --help"
    raise RequestError(
        "the screen needs a terminal", found="standard input or output that is a file, a pipe or closed", hint=hint
    )
