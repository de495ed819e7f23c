"""The command `rldbg`: the first word is a command if it is one, else a path to open on the screen.

Standard output carries the answer and nothing else; progress, hints and errors go to standard error.
Exit codes are those of `replay_core.errors.ExitCode`.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

import replay_core
from replay_core.budget import limit_process
from replay_core.collecting import seldom
from replay_core.errors import ExitCode, RldbgError, failing_disk, missing_library

try:
    import click

    from tui_debugger.commands import fail
except ModuleNotFoundError as error:  # installed for a recorder alone, with --no-deps
    lacking = missing_library(error, "the command line")
    if lacking is None:
        raise
    sys.stderr.write(f"error: {lacking}\n")
    raise SystemExit(int(lacking.exit_code)) from None

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

#: Command -> the module that holds it. Imported when asked for: `ls` never pays for the screen.
COMMANDS = {
    "ui": "tui_debugger.commands.ui",
    "demo": "tui_debugger.commands.demo",
    "record": "tui_debugger.commands.record",
    "ls": "tui_debugger.commands.ls",
    "show": "tui_debugger.commands.show",
    "samples": "tui_debugger.commands.samples",
    "compare": "tui_debugger.commands.compare",
    "replay": "tui_debugger.commands.replay",
    "capsule": "tui_debugger.commands.capsule",
    "referee": "tui_debugger.commands.referee",
    "mismatch": "tui_debugger.commands.mismatch",
    "diagnose": "tui_debugger.commands.diagnose",
    "parity": "tui_debugger.commands.parity",
    "weights": "tui_debugger.commands.weights",
    "gather": "tui_debugger.commands.gather",
    "upload": "tui_debugger.commands.upload",
    "info": "tui_debugger.commands.info",
    "cache": "tui_debugger.commands.cache",
    "help": "tui_debugger.commands.help",
    "completion": "tui_debugger.commands.completion",
    "skill": "tui_debugger.commands.skill",
}

HIDDEN = ("ui",)
#: What reads, answers and ends.
_ONCE = ("ls", "show", "compare", "diagnose", "weights", "referee", "gather")
#: What runs a trainer or a model, in this process or in one that inherits its limits.
_UNLIMITED = ("record", "replay", "capsule", "demo", "parity", "mismatch")


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
        result: Any = cli.main(args=arguments, prog_name="rldbg", standalone_mode=False)
        return int(result or 0)
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    except click.ClickException as error:
        where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "rldbg"
        fail(error.format_message(), f"{where} --help")
        return ExitCode.BAD_REQUEST
    except RldbgError as error:
        fail(str(error))
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
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


if __name__ == "__main__":
    main()
