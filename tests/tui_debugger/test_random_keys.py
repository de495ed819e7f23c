"""Keys as a cat presses them: on real dumps at any size, nothing crashes, and escape leads back to the first screen."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fixtures import FIXTURES
from tests.tui_debugger.at_desk import DeskEngine
from tests.tui_debugger.driving import opened, rest, screen
from tui_debugger.actions import ACTIONS

SIZES = ((80, 24), (160, 48), (60, 20), (200, 60), (30, 8))
#: Leaving, the terminal's own mouse and what needs torch are tested elsewhere; nobody writes what could be followed.
_ELSEWHERE = {"ctrl+z", "q", "ctrl+q", "f3", "F", "r", "m", "J"}
_KEYS = [
    *sorted({key for action in ACTIONS for key in action.keys} - _ELSEWHERE),
    "home", "end", "pageup", "pagedown", "up", "down", "0", "9", "x", "delete", "backspace",
]  # fmt: skip
_TYPED = [*"0,4/a[(*:r", "enter", "escape", "tab", "ctrl+u", "minus", "backspace"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "dumps",
    [("nexrl/self_hosted_fp32", "nexrl/self_hosted_bf16"), ("grpo_notes/train_1da2900_normal.log",), ("slime",),
     ("faults/healthy/batch.pt", "faults/nan_inf/batch.pt")],
    ids="+".join,
)  # fmt: skip
@pytest.mark.parametrize("seed", range(2))
async def test_no_keys_crash_the_screen_and_escape_leads_back(dumps: tuple[str, ...], seed: int, in_tmp: Path) -> None:
    drawn = random.Random(seed)
    async with opened(*(FIXTURES / one for one in dumps), size=SIZES[seed], engine=DeskEngine()) as (app, pilot):
        for _ in range(300):
            if drawn.random() < 0.03:
                await pilot.resize_terminal(*drawn.choice(SIZES))
            keys = _TYPED if type(app.screen).__name__ == "AskScreen" else _KEYS
            await pilot.press(drawn.choice(keys))
            if drawn.random() < 0.3:
                await pilot.pause()
                assert screen(app).strip()
        await pilot.resize_terminal(160, 48)
        await pilot.press(*["escape"] * 8)
        await rest(app, pilot)
        assert app.screen is app.debugger
        assert "rldbg" in screen(app).splitlines()[0]
        assert "internal error" not in screen(app)
