"""`rldbg upload`: a dump of this machine brought to an object store."""

from __future__ import annotations

import os
from pathlib import Path

import click

from replay_core.errors import ExitCode
from replay_core.jobs import Progress
from tui_debugger.aside import aside
from tui_debugger.commands import DumpPath, say
from tui_debugger.failing import fail
from tui_debugger.format import safe
from tui_debugger.progress_line import ProgressLine

_MOST_LEFT = 8


@click.command("upload")
@click.argument("dump", type=DumpPath())
@click.argument("url")
def command(dump: Path, url: str) -> int:
    """Bring the files of DUMP to URL (s3:// or gs://), those that are not there yet; its index comes last.

    Killed, the same command goes on where it was; of a dump that is still written it sends what has come. Every node
    of a job may upload its own folder to one URL. Wants the extra `remote`.
    """
    from replay_core.remote.upload import upload  # and a library of 16 MB

    progress = ProgressLine("uploaded")
    try:
        found = upload(dump, url, lambda done, of, name: progress(Progress(done, of, name)))
    except KeyboardInterrupt:
        progress.clear()
        fail("interrupted", "the same command goes on from here; until then who reads the URL is told so")
        # Threads wait for the bucket still. An object is there whole or not at all: they need not be waited for.
        os._exit(ExitCode.INTERRUPTED)
    progress.clear()
    for what in found.left[:_MOST_LEFT]:
        aside(f"note: left out: {safe(what)}\n")
    if len(found.left) > _MOST_LEFT:
        aside(f"note: and {len(found.left) - _MOST_LEFT:,} more left out\n")
    there = f", {found.there:,} were there" if found.there else ""
    say(f"{found.sent:,} objects sent ({found.nbytes:,} bytes){there}: {safe(found.url)}")
    return 0
