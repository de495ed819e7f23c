"""What drives the screen in tests: a screen at rest is at rest on a busy machine, too."""

from __future__ import annotations

import time

from tests.tui_debugger.driving import A, opened, rest


async def test_what_is_handed_on_longer_than_a_pause_lasts_is_waited_for() -> None:
    left = 200
    async with opened(A) as (app, pilot):

        def hand_on() -> None:
            nonlocal left
            left -= 1
            time.sleep(0.01)  # as long as another process has the core
            if left:
                (app, app.debugger)[left % 2].call_later(hand_on)

        hand_on()
        await rest(app, pilot)
        assert left == 0
