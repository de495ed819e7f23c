"""`rldbg completion SHELL`: the script that lets a shell complete commands, options and paths."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def command(ctx: click.Context, shell: str) -> int:
    """Print the script that completes rldbg's words in a shell.

    \b
    bash   eval "$(rldbg completion bash)"            in ~/.bashrc
    zsh    eval "$(rldbg completion zsh)"             in ~/.zshrc
    fish   rldbg completion fish | source             in ~/.config/fish/config.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(ctx.find_root().command, {}, "rldbg", "_RLDBG_COMPLETE").source())
    return 0
