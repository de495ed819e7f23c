"""`rldbg skill`: where the page lies that teaches a coding agent to use rldbg."""

from __future__ import annotations

from pathlib import Path

import click

from replay_core.errors import ExitCode
from tui_debugger.commands import say

#: Beside the package, so that a wheel carries it.
SKILL = Path(__file__).parents[1] / "SKILL.md"


@click.command("skill")
def command() -> int:
    """Print the path of SKILL.md: commands, exit codes and JSON paths, for a coding agent.

    cp "$(rldbg skill)" .claude/skills/rldbg/SKILL.md, or wherever your agent looks.
    """
    say(str(SKILL))
    return ExitCode.AGREES
