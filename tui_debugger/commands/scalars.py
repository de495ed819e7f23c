"""--scalars beside --follow: at most three numbers to a dashboard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from replay_core.errors import RequestError
from tui_debugger.commands import Decorated

if TYPE_CHECKING:
    from replay_core.export.dashboards import Dashboard


def scalars_option(command: Decorated) -> Decorated:
    """--scalars."""
    return click.option(
        "--scalars", metavar="DIR|wandb",
        help="With --follow: its numbers per step as TensorBoard event files in DIR, or as a run of wandb.",
    )(command)  # fmt: skip


@contextmanager
def to_dashboard(where: str | None, *, follow: bool) -> Iterator[Dashboard | None]:
    """The dashboard that was asked for, closed at the end; None where none was.

    Raises:
        RequestError: nothing is followed, or it cannot be written.
        UnavailableError: its library is not installed.
    """
    if where is None:
        yield None
        return
    if not follow:
        raise RequestError(
            "--scalars are of what is followed", expected="--follow", found="an answer made once",
            hint="--output FILE has all its numbers",
        )  # fmt: skip
    from replay_core.export.dashboards import dashboard  # its library is imported for who asks

    opened = dashboard(where)
    try:
        yield opened
    finally:
        opened.close()
