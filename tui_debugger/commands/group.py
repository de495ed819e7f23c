"""The command line of many words: the first is a command if it is one, else a path to open on the screen."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

import replay_core
from replay_core.errors import ExitCode
from tui_debugger.command_table import COMMANDS, HIDDEN
from tui_debugger.failing import fail

if TYPE_CHECKING:
    from collections.abc import Sequence

    from click.shell_completion import CompletionItem


class _Commands(click.Group):
    """Commands loaded on demand; anything else is `ui`, the screen."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in COMMANDS if name not in HIDDEN]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = COMMANDS.get(cmd_name)
        command: click.Command | None = import_module(module).command if module else None
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # `rldbg --ascii RUN`: an option that is not the group's own is the screen's.
        own = {name for option in self.get_params(ctx) for name in (*option.opts, *option.secondary_opts)}
        if args and args[0].startswith("-") and args[0].partition("=")[0] not in own:
            args = ["ui", *args]
        ctx.meta["rldbg.arguments"] = tuple(args)
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        # The first word may be a path; beside one that is, bash would drop the commands.
        return super().shell_complete(ctx, incomplete) or [CompletionItem(incomplete, type="file")]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS:
            _refuse_misspelt(ctx, args[0])
            args = ["ui", *args]
        return super().resolve_command(ctx, args)


def _refuse_misspelt(ctx: click.Context, word: str) -> None:
    """Raise where a word that is no path nearly is a command's name."""
    import difflib  # only a word that is no command needs it

    near = difflib.get_close_matches(word, COMMANDS, 1, 0.7)
    if near and os.sep not in word and not os.path.lexists(word):
        raise click.UsageError(f"there is no command {word!r} and no such path; did you mean {near[0]}?", ctx)


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(replay_core.__version__, prog_name="rldbg")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Record, replay and compare what an RL trainer computed; see the first diverging tensor.

    \b
    rldbg RUN            open a dump on the screen
    rldbg RUN_A RUN_B    open two dumps on their first diverging tensor
    rldbg diagnose RUN   name what is wrong in the training maths, from a dump or a log
    rldbg demo           train a tiny policy, break its packing, see where it shows

    Topics: rldbg help exit-codes|verdicts|selection|flags|files; completion of a shell: rldbg completion --help.
    Options of the screen: --follow --one-run --compare --theme NAME --ascii --no-mouse (rldbg ui --help).
    """
    if ctx.invoked_subcommand is None:
        ctx.invoke(import_module(COMMANDS["ui"]).command)


def answer(arguments: Sequence[str]) -> int:
    """Do what the words ask for and return its exit code.

    Raises:
        RldbgError: it could not be done.
        KeyboardInterrupt: the user ended it.
    """
    try:
        result: Any = cli.main(args=list(arguments), prog_name="rldbg", standalone_mode=False)
        return int(result or 0)
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    except click.ClickException as error:
        where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "rldbg"
        fail(error.format_message(), f"{where} --help")
        return ExitCode.BAD_REQUEST
    except click.Abort:
        raise KeyboardInterrupt from None
