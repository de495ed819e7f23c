"""Golden screens: what a user sees at 80x24 and 160x48, as text.

`RLDBG_GOLDEN=write pytest tests/tui_debugger/test_screens.py` writes them; review the difference.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.tui_debugger.driving import A, B, opened, press, screen
from tests.tui_debugger.scripted import ScriptedEngine, document

GOLDEN = Path(__file__).parent / "golden"
SIZES = ((80, 24), (160, 48))

LOG = Path("/runs/train.log")
#: Scenes of a run whose diagnosis finds something.
SHIFTED = ("shifted", "shifted-findings", "shifted-open", "evidence", "trends")

SCENES: dict[str, tuple[tuple[Path, ...], tuple[str, ...]]] = {
    "empty": ((), ()),
    "record": ((A,), ()),
    "divergence": ((A, B), ()),
    "inspect": ((A, B), ("enter",)),
    "replayed": ((A,), ("p", "b", "r")),
    "telemetry": ((A,), ("p", "b", "r", "6")),
    "findings": ((A,), ("7",)),
    "matrix-empty": ((A,), ("m",)),
    "matrix": ((A,), ("m", "r", "j", "j", "j")),
    "theme": ((A, B), ("f2",)),
    "log": ((A, B), ("l",)),
    "sorted": ((A, B), ("S",)),
    "marked": ((A, B), ("space", "j", "space")),
    "flags": ((A,), ("5", "p")),
    "shifted": ((A,), ()),
    "shifted-findings": ((A,), ("7",)),
    "shifted-open": ((A,), ("7", "G", "enter")),
    "evidence": ((A,), ("7", "f")),
    "trends": ((A,), ("C", "j")),
    "log-trends": ((LOG,), ()),
    "log-evidence": ((LOG,), ("f",)),
    "help": ((A, B), ("question_mark",)),
    "filter": ((A, B), ("slash", *"DIFF.*mlp")),
    "strip": ((A, B), ("enter", "right", "right")),
    "tolerance": ((A, B), ("R", *"2 1e-3", "enter")),
    "parity": ((A, B), ("P",)),
    "parity-scatter": ((A, B), ("P", "2")),
    "parity-histogram": ((A, B), ("P", "3")),
    "parity-worst": ((A, B), ("P", "5", "j")),
    "parity-bands": ((A, B), ("P", "6")),
}


def _scenes() -> list[Any]:
    """Every scene at every size; of the wide ones a few are drawn after each change, the others by `make check`."""
    wide = ("divergence", "empty", "inspect", "log-trends", "matrix", "parity", "shifted", "trends")
    return [
        pytest.param(scene, size, id=f"{scene}-{size[0]}x{size[1]}",
                     marks=() if size == SIZES[0] or scene in wide else pytest.mark.long)
        for scene in SCENES for size in SIZES
    ]  # fmt: skip


@pytest.mark.parametrize(("scene", "size"), _scenes())
async def test_screen_is_the_golden_one(scene: str, size: tuple[int, int]) -> None:
    dumps, keys = SCENES[scene]

    engine = ScriptedEngine(diagnose=document("diagnosis_shifted")) if scene in SHIFTED else ScriptedEngine()
    async with opened(*dumps, size=size, engine=engine) as (app, pilot):
        await press(app, pilot, *keys)
        is_golden(f"{scene}-{size[0]}x{size[1]}", screen(app))


async def test_everything_same_is_said_first() -> None:
    engine = ScriptedEngine(compare=document("comparison_same"))
    async with opened(A, B, size=(80, 24), engine=engine) as (app, _):
        is_golden("same-80x24", screen(app))


def is_golden(name: str, shown: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("RLDBG_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text(encoding="utf-8"), f"the screen {name} changed; see this file's first lines"


@pytest.mark.long
@pytest.mark.parametrize("size", [(80, 24), (100, 30), (120, 40), (200, 60), (40, 12)])
async def test_no_line_is_wider_than_the_terminal(size: tuple[int, int]) -> None:
    async with opened(A, B, size=size) as (app, pilot):
        for key in "1234567":
            await press(app, pilot, key)
            lines = screen(app).splitlines()
            assert len(lines) <= size[1]
            assert "DIFF" in lines[1]


@pytest.mark.long
async def test_resizing_keeps_the_answer_and_the_selection() -> None:
    async with opened(A, B) as (app, pilot):
        for size in ((80, 24), (200, 60), (60, 15), (160, 48)):
            await pilot.resize_terminal(*size)
            await press(app, pilot)
            assert "o_proj.inputs.0" in screen(app)
            assert app.session.state.tensors.row is not None
            assert app.session.state.tensors.row.is_first


async def test_ascii_mode_draws_nothing_else() -> None:
    async with opened(A, B, ascii=True) as (app, _):
        shown = screen(app)
    assert shown.isascii()
    assert "layers.0.self_attn.o_proj.inputs.0" in shown
