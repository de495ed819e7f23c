"""`rldbg cache`: what replays and comparisons left in the cache, and taking it away."""

from __future__ import annotations

import click

from replay_core.errors import ExitCode
from tui_debugger import paths
from tui_debugger.commands import say


@click.command("cache")
@click.option("--clear", is_flag=True, help="Remove every replay there that no running rldbg uses, and kept digests.")
def command(clear: bool) -> int:
    """Say what replays without a place of their own left in the cache; with --clear, remove it.

    The oldest go by themselves once they take more than 512 MiB together.
    """
    if clear:
        freed = paths.clear_cache()
        say(f"{freed / 2**20:,.0f} MiB freed in {paths.cache_dir()}")
        return ExitCode.AGREES
    replays = paths.cached_replays()
    lines = [f"{one.nbytes / 2**20:>8,.1f} MiB  {one.path}" + ("  in use" if one.is_used else "") for one in replays]
    total = sum(one.nbytes for one in replays)
    lines.append(f"{total / 2**20:>8,.1f} MiB  of {paths.CACHE_BYTES >> 20} in {paths.cache_dir()}")
    if kept := paths.digests_bytes():
        lines.append(f"{kept / 2**20:>8,.1f} MiB  of digests that compare --digests took, in {paths.digests_dir()}")
    say("\n".join(lines))
    return ExitCode.AGREES
