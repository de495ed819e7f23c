"""Copying that works over SSH and in tmux: three roads at once, and the caller is told which were taken.

OSC 52 alone does nothing in tmux as it comes (`set-clipboard external`); `tmux load-buffer -w` always
fills tmux's own buffer and passes on to the terminal where it may. The file is there in any case.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from tui_debugger import paths


async def tmux_buffer(text: str) -> bool:
    """Put the text into tmux's paste buffer; False where there is no tmux or it refuses."""
    if not os.environ.get("TMUX"):
        return False
    try:
        tmux = await asyncio.create_subprocess_exec(
            "tmux", "load-buffer", "-w", "-",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        await asyncio.wait_for(tmux.communicate(text.encode()), timeout=2)
    except (OSError, asyncio.TimeoutError):
        return False
    return tmux.returncode == 0


def keep_copy(text: str) -> Path | None:
    """Write the text where the user can find it; None where even that fails."""
    try:
        path = paths.private_dir(paths.state_dir()) / "copied.txt"
        path.write_text(text + "\n", encoding="utf-8")
    except OSError:
        return None
    return path


def said(in_tmux: bool, file: Path | None) -> str:
    """What the toast tells: where the copied text now is."""
    roads = ["terminal clipboard (if it allows OSC 52)"]
    if in_tmux:
        roads.insert(0, "tmux buffer")
    if file:
        roads.append(str(file))
    return "copied to " + ", ".join(roads)
