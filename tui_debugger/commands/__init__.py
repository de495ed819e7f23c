"""One file per command, and what all of them share: options and output."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from replay_core.errors import ExitCode, RequestError, RldbgError
from replay_core.export.outcome import exit_code
from replay_core.export.written import pieces
from replay_core.mirrored import as_addressed, keep_under, names_a_mirror, stands_for
from tui_debugger.aside import aside
from tui_debugger.format import safe
from tui_debugger.paths import REMOTE_BYTES, cache_dir

D = TypeVar("D", bound="Document")

if TYPE_CHECKING:
    from replay_core.documents.kinds import Document
    from replay_core.records import Selection

#: Objects left out of a remote dump that are named, each on its line.
_MOST_LEFT = 5
Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def _mirrored(url: str) -> Path:
    """The folder of this machine that stands for a remote dump; what of it was left out is said."""
    from replay_core.remote.mirror import mirror  # and a library of 16 MB: only who gives a URL pays

    path, left = mirror(url, cache_dir(), REMOTE_BYTES)
    stands_for(path, url)
    for what in left[:_MOST_LEFT]:
        aside(f"note: {safe(what)}\n")
    if len(left) > _MOST_LEFT:
        aside(f"note: and {len(left) - _MOST_LEFT:,} more objects\n")
    return path


class DumpPath(click.Path):
    """A path or a URL, and never the working directory for an empty text: an unset variable of a script is no dump."""

    def __init__(self, *, remote: bool = False) -> None:
        super().__init__(path_type=Path)
        self._remote = remote

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the path is empty", param, ctx)
        if isinstance(value, str) and "://" in value:
            if not self._remote:
                what = "a dump behind a URL is read, not run: copy it to this machine first"
                self.fail(what, param, ctx)
            value = _mirrored(value)
        elif isinstance(value, str) and names_a_mirror(value):
            keep_under(cache_dir())  # its own are filled as they were; a mirror that lies elsewhere is refused
        return super().convert(value, param, ctx)


class _SelectionType(click.ParamType):  # type: ignore[type-arg]  # generic only in newer clicks
    name = "3|0,2|0:4|all|none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Selection:
        from replay_core.records import Selection  # what every command imports, the screen pays before its first paint

        return value if isinstance(value, Selection) else Selection.parse(value)


def selectors(command: Decorated) -> Decorated:
    """--step --rank --micro."""
    for name, what in (("micro", "micro-batch"), ("rank", "rank")):
        command = click.option(f"--{name}", type=_SelectionType(), help=f"Which {what}: 3, 0,2, 0:4, all or none.")(
            command
        )
    return step_selector(command)


def step_selector(command: Decorated) -> Decorated:
    """--step."""
    return click.option("--step", type=_SelectionType(), help="Which training step: 3, 0,2, 0:4, all or none.")(command)


def _free_place(ctx: click.Context, _: click.Parameter, path: Path | None) -> Path | None:
    if path is not None and not ctx.meta.get("force"):
        from replay_core.export.documents import check_place  # who writes nothing does not pay for it

        check_place(path)
    return path


def _forced(ctx: click.Context, _: click.Parameter, force: bool) -> None:
    ctx.meta["force"] = force


#: Standard output, where a file is asked for.
STDOUT = Path("-")
_HANDOUTS = ("html", "markdown", "junit")


def _handed_out(ctx: click.Context, option: click.Parameter, path: Path | None) -> None:
    """Keep where a handout goes, for `finish`: no command need know that there are any."""
    if path == STDOUT:
        _printed(ctx, option, True)
    elif path is not None:
        _free_place(ctx, option, path)
    ctx.meta[f"rldbg.{option.name}"] = path


def _printed(ctx: click.Context, option: click.Parameter, is_asked: bool) -> bool:
    """Refuse two forms of the answer on standard output before the work that the answer takes."""
    if is_asked:
        other = ctx.meta.setdefault("rldbg.printed", option.opts[0])
        if other != option.opts[0]:
            raise click.UsageError(f"{other} and {option.opts[0]} both want standard output: give one a FILE", ctx)
    return is_asked


def is_handed_out() -> bool:
    """Whether the answer is asked for as a page, a comment or for CI: then no screen opens in its place."""
    context = click.get_current_context(silent=True)
    return context is not None and any(context.meta.get(f"rldbg.{name}") for name in _HANDOUTS)


_FILE = click.Path(path_type=Path, dir_okay=False, allow_dash=True)


def document_output(command: Decorated) -> Decorated:
    """--json, --output, --html, --markdown, --junit and --force."""
    for option in (
        click.option(
            "--force", is_flag=True, is_eager=True, expose_value=False, callback=_forced,
            help="Write over a file, make its folder.",
        ),
        click.option(
            "--junit", type=_FILE, callback=_handed_out, expose_value=False, metavar="FILE",
            help="Write the answer as JUnit XML, for CI.",
        ),
        click.option(
            "--markdown", type=_FILE, is_flag=False, flag_value=str(STDOUT), callback=_handed_out, expose_value=False,
            metavar="[FILE]", help="Write the answer as a comment for an issue; without FILE, print it.",
        ),
        click.option(
            "--html", type=_FILE, callback=_handed_out, expose_value=False, metavar="FILE",
            help="Write the answer as one page; rldbg FILE opens it again.",
        ),
        click.option(
            "--output", type=click.Path(path_type=Path, dir_okay=False), callback=_free_place,
            help="Write the JSON document to a new file.",
        ),
        click.option(
            "--json", "as_json", is_flag=True, callback=_printed, help="Print the JSON document and nothing else."
        ),
    ):  # fmt: skip
        command = option(command)
    return command


def finish(
    doc: D,
    report: Callable[[D], str],
    *,
    as_json: bool,
    output: Path | None,
    allow_missing: bool = False,
    fail_on: str = "warning",
    fail_above: float | None = None,
) -> int:
    """Print the answer, write it where asked, and return the exit code it means. People are told the address of a
    remote dump; documents keep the path that it has here, by which they are opened again."""
    code = int(exit_code(doc, allow_missing=allow_missing, fail_on=fail_on, fail_above=fail_above))
    refused: list[RldbgError] = []
    printed = ""
    for path, made in _forms(doc, code, output):
        if path == STDOUT:
            printed += "".join(made())
            continue
        from replay_core.export.documents import write_text  # brings the recorder: 30 ms

        try:
            write_text(made(), path)
            aside(f"wrote {safe(path)}\n")
        except RldbgError as error:
            refused.append(error)  # after the answer: it took the time it took
    # A reader that leaves early (`| head`) does not change the answer, nor the code that stands for it.
    with contextlib.suppress(ReaderLeft):
        if as_json:
            say(pieces(doc))
        else:
            say(printed.rstrip("\n") or safe(report(as_addressed(doc)), lines=True))
    if refused:
        raise refused[0]
    return code


def _forms(doc: Document, code: int, output: Path | None) -> list[tuple[Path, Callable[[], Iterable[str]]]]:
    """The forms of the answer that were asked for beside the report, and where each of them goes."""
    context = click.get_current_context(silent=True)
    places = {name: context.meta.get(f"rldbg.{name}") if context else None for name in _HANDOUTS}
    forms: list[tuple[Path | None, Callable[[], Iterable[str]]]] = [(output, lambda: chain(pieces(doc), "\n"))]
    if any(places.values()):
        from tui_debugger.handout.comment import comment  # who hands nothing out does not pay for it
        from tui_debugger.handout.html_page import page
        from tui_debugger.handout.junit import junit

        typed = typed_command(context.meta.get("rldbg.arguments", ()) if context else ())
        told = as_addressed(doc)
        forms += [
            (places["html"], lambda: [page(doc, typed)]),
            (places["markdown"], lambda: [comment(told, typed)]),
            (places["junit"], lambda: [junit(told, code)]),
        ]
    return [(path, made) for path, made in forms if path is not None]


#: Options that say where the answer goes, and whether a word follows each: no part of what was asked.
_PLACES = {"--html": True, "--markdown": True, "--junit": True, "--output": True, "--json": False, "--force": False}


def typed_command(arguments: Sequence[str]) -> str:
    """The command as it was typed, for a shell, without where its answer was to go."""
    words, follows = [], False
    for place, word in enumerate(arguments):
        if follows and not (arguments[place - 1] == "--markdown" and word.startswith("-") and word != "-"):
            follows = False
            continue
        follows = _PLACES.get(word, False)
        if word.partition("=")[0] not in _PLACES:
            words.append(word)
    return shlex.join(["rldbg", *words])


class ReaderLeft(click.exceptions.Exit):
    """Nobody reads standard output any more (`| head`). Where the answer was still being found, nobody has the whole
    of it, and the exit code must not stand for one; click by itself would leave with 1."""

    def __init__(self) -> None:
        super().__init__(ExitCode.INTERRUPTED)


#: As much of an answer is held before it is said.
_SAID_AT_ONCE = 1 << 16


def say(text: str | Iterable[str]) -> None:
    """One piece of the answer on standard output; of pieces that are made while they are said, all of them as one.

    Raises:
        ReaderLeft: nobody reads any more; what is said later goes nowhere.
        RequestError: it cannot be written.
    """
    try:
        held: list[str] = []
        size = 0
        for piece in (text,) if isinstance(text, str) else text:
            held.append(piece)
            size += len(piece)
            if size > _SAID_AT_ONCE:
                click.echo("".join(held), nl=False)
                held, size = [], 0
        click.echo("".join(held))
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to flush at exit
        if error.errno == errno.EPIPE:
            raise ReaderLeft from None
        if error.errno != errno.ENOSPC:
            raise
        raise RequestError("standard output cannot be written", found=error.strerror) from None
