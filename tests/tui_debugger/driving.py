"""Drives the app in tests: open it on scripted documents, wait until it rests, read the screen."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from textual._context import visible_screen_stack
from textual.pilot import Pilot

from tests.tui_debugger.scripted import ScriptedEngine
from tui_debugger.app import RldbgApp
from tui_debugger.engine import Engine

A, B = Path("/runs/demo/alone"), Path("/runs/demo/packed")


@asynccontextmanager
async def opened(
    *dumps: Path, size: tuple[int, int] = (160, 48), engine: Engine | None = None, **options: Any
) -> AsyncIterator[tuple[RldbgApp, Pilot[None]]]:
    """The app on its first screen, at rest."""
    app = RldbgApp(*dumps, engine=engine or ScriptedEngine(), **options)
    async with app.run_test(size=size) as pilot:
        await rest(app, pilot)
        yield app, pilot
        if app.is_running:
            screen(app)


async def rest(app: RldbgApp, pilot: Pilot[None]) -> None:
    """Until no worker runs and everything that changed is drawn."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        await pilot.pause(0.02)
        if _rests(app):
            await pilot.pause()
            if _rests(app):
                return
    raise AssertionError("the screen never came to rest")


def _rests(app: RldbgApp) -> bool:
    """Whether nothing is on its way: a key may be handed on from one to the next for longer than any pause lasts."""
    if not app.debugger.is_whole or app.debugger._redraw_due:
        return False
    if any(not worker.is_finished for worker in app.workers):
        return False
    pumps = [app, *(node for screen in app.screen_stack for node in screen.walk_children(with_self=True))]
    return not any(pump.message_queue_size or pump._next_callbacks for pump in pumps)


async def until(pilot: Pilot[None], holds: Callable[[], object], what: str = "", limit_s: float = 30) -> None:
    """Until something is so that a screen at rest would not show (a job still runs): waited for, not slept for."""
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, f"{what or 'it'} never came:\n{screen(pilot.app)}"  # type: ignore[arg-type]
        await pilot.pause(0.02)


async def press(app: RldbgApp, pilot: Pilot[None], *keys: str) -> None:
    """Press keys and wait until all is done; a person also waits for what `r` runs before the next key."""
    for key in keys:
        await pilot.press(key)
        if key == "r":
            await rest(app, pilot)
    await rest(app, pilot)


def screen(app: RldbgApp) -> str:
    """The screen as text, line by line."""
    visible_screen_stack.set(app._background_screens)
    strips = app.screen._compositor.render_strips()
    return "\n".join(strip.text.rstrip() for strip in strips) + "\n"


def toasts(app: RldbgApp) -> list[str]:
    return [notification.message for notification in app._notifications]
