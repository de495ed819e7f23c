"""Draws the pictures of README.md and docs/ from the real program: python docs/pictures.py [NAME...]

The screen runs as it does in a terminal, without one. What answers it was recorded: the documents that the engine gave
for the demo (a really trained policy, a really wrong pack), a trainer's log and two critics. So the same commit draws
the same pictures on every machine, and tests/docs/test_pictures.py holds them to what the screen shows today.
`python docs/pictures.py --record` runs the demo and asks the engine again.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":  # started as a file, the packages lie one folder up
    sys.path.insert(0, str(ROOT))

from rich.color import Color  # noqa: E402
from rich.segment import Segment  # noqa: E402
from rich.style import Style  # noqa: E402

from replay_core.jobs import Answer, Job, OnEvent, ignore  # noqa: E402

IMAGES = ROOT / "docs" / "images"
ANSWERS = IMAGES / "answers"
#: Where the recorded demo is said to lie.
RUNS = "/runs"
A, B = Path(f"{RUNS}/replay/cell0"), Path(f"{RUNS}/replay/cell2")
LOG, CRITIC = Path("/runs/train.log"), Path("/runs/critic")
MATRIX = ANSWERS / "matrix.json"
AXES = "packing=off,on block_mask=on,off dtype=float32,bfloat16"

#: A cell in pixels, and the size of a letter in it.
CELL_W, CELL_H, FONT = 8.0, 17, 13.3
MARGIN, BAR = 12, 30
_FONTS = "'JetBrains Mono','Fira Code','SF Mono',Menlo,Consolas,'DejaVu Sans Mono',monospace"


@dataclass(frozen=True)
class Picture:
    """What is opened, and which keys are pressed before the picture is taken."""

    name: str
    title: str
    size: tuple[int, int]
    dumps: tuple[Path, ...]
    keys: tuple[str, ...] = ()


PICTURES = (
    Picture("divergence", "rldbg replay/cell0 replay/cell2", (120, 30), (A, B)),
    Picture("inspector", "rldbg replay/cell0 replay/cell2, key 3", (90, 36), (A, B), ("3", "right", "right")),
    Picture("matrix", "rldbg run, key m", (104, 19), (MATRIX,), ("j", "j", "j", "j", "j")),
    Picture("findings", "rldbg train.log", (96, 26), (LOG,)),
    Picture("parity", "rldbg parity --recorded critics", (150, 34), (CRITIC,), ("P",)),
)

_PAIR, _MATRIX, _LOG = (A, B), (MATRIX,), (LOG,)
#: Every screen and pane: what it is, what is opened, which keys lead there.
SCREENS = (
    ("start", "nothing is open", (), ()),
    ("tensors", "two dumps: where they first part", _PAIR, ()),
    ("steps", "1: the steps, each with its verdict", _PAIR, ("1",)),
    ("inspect", "3: a tensor, and how its difference is spread", _PAIR, ("3",)),
    ("log", "4: what jobs printed", _PAIR, ("4",)),
    ("flags", "5: what a replay runs with", _PAIR, ("5",)),
    ("findings", "7: what is wrong with A by itself", _PAIR, ("7",)),
    ("matrix", "m: combinations of flags", _MATRIX, ()),
    ("trends", "a log: what it says over the steps", _LOG, ()),
    ("evidence", "f: one finding in full", _LOG, ("f",)),
    ("parity", "P: two critics on the same tokens", (CRITIC,), ("P",)),
    ("help", "?: the keys of the screen that is open", _PAIR, ("question_mark",)),
)
SIZES = ((80, 24), (160, 48))
EVERY_SCREEN = tuple(
    Picture(f"screens/{name}-{width}x{height}", said, (width, height), dumps, keys)
    for name, said, dumps, keys in SCREENS
    for width, height in SIZES
)


def page() -> str:
    """docs/screens.md: every screen at both sizes."""
    parts = [
        "# The screens\n\nDrawn by `docs/pictures.py` from the program itself, at 80×24 and at 160×48: "
        "`python docs/pictures.py screens` draws them again.\n"
    ]
    for name, said, _, _ in SCREENS:
        links = "\n\n".join(f"![{said}](images/screens/{name}-{w}x{h}.svg)" for w, h in SIZES)
        parts.append(f"## {name}\n\n{said}\n\n{links}\n")
    return "\n".join(parts)


#: A line of the screen: its segments of text, each with its style.
Line = list[Segment]


async def shown(picture: Picture) -> list[Line]:
    """The screen's lines, once it rests, for a user who never opened anything: the start screen lists what was."""
    from unittest.mock import patch

    from tests.tui_debugger.driving import opened, press

    with (
        tempfile.TemporaryDirectory() as home,
        patch.dict(os.environ, {f"XDG_{kind}_HOME": home for kind in ("CONFIG", "STATE", "CACHE")}),
    ):
        async with opened(*picture.dumps, size=picture.size, engine=_answering()) as (app, pilot):
            await press(app, pilot, *picture.keys)
            app.clear_notifications()
            await press(app, pilot)
            return [list(strip) for strip in app.screen._compositor.render_strips()]


def _answering() -> Any:
    """An engine that answers as the recorded one did: what it was not asked then, the tests' own documents answer."""
    from tests.tui_debugger.scripted import ScriptedEngine, document

    saved = json.loads((ANSWERS / "demo.json").read_text(encoding="utf-8"))
    runs = {str(A): saved["open a"], str(B): saved["open b"], str(LOG): document("run_log"),
            str(CRITIC): {**document("run_a"), "path": str(CRITIC)}}  # fmt: skip

    def diagnose(job: Job) -> Answer | None:
        return saved["diagnose"] if job.params["path"] == str(A) else None

    return ScriptedEngine(
        open=lambda job: runs[job.params["path"]],
        compare=saved["compare"],
        inspect=saved["inspect"],
        difference=saved["difference"],
        diagnose=diagnose,
    )


class _Listening:
    """The real engine, and what it answered."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.answers: dict[str, Answer] = {}

    async def start(self) -> None:
        await self._engine.start()

    async def stop(self) -> None:
        await self._engine.stop()

    async def run(self, job: Job, on_event: OnEvent = ignore) -> Answer:
        # In one piece: what is streamed to the screen is not in the document.
        whole = Job(job.kind, {**job.params, "stream": False}) if "stream" in job.params else job
        answer: Answer = await self._engine.run(whole, on_event)
        known = job.kind if job.kind != "open" else f"open {'b' if 'open a' in self.answers else 'a'}"
        self.answers.setdefault(known, answer)
        return answer


def record() -> None:
    """Run the demo and a matrix, and keep what the engine says of them."""
    from tui_debugger.app import RldbgApp
    from tui_debugger.engine import ChildEngine

    async def listen(cells: Sequence[Path]) -> dict[str, Answer]:
        engine = _Listening(ChildEngine())
        async with RldbgApp(*cells, engine=engine).run_test(size=(120, 30)) as pilot:
            while not set(engine.answers) >= {"compare", "inspect", "difference", "diagnose"}:
                await pilot.pause(0.2)
            return engine.answers

    ANSWERS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve() / "demo"
        _rldbg("demo", "--json", "--dir", str(folder))
        matrix = folder / "matrix.json"
        _rldbg("replay", str(folder / "run"), "--step", "3", "--micro", "0", "--matrix", AXES, "--output", str(matrix),
               "--out", str(folder / "matrix"))  # fmt: skip
        answers = asyncio.run(listen([folder / "replay" / name for name in ("cell0", "cell2")]))
        for path, content in ((ANSWERS / "demo.json", answers), (MATRIX, json.loads(matrix.read_text()))):
            text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
            path.write_text(text.replace(str(folder), RUNS) + "\n", encoding="utf-8")


def _rldbg(*words: str) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "tui_debugger", *words], stdout=subprocess.PIPE, cwd=ROOT, check=False
    )
    if answer.returncode not in (0, 1):
        raise SystemExit(f"rldbg {' '.join(words)} ended with {answer.returncode}")


def text_of(lines: Sequence[Line]) -> list[str]:
    """What the lines say, without their colours."""
    return ["".join(segment.text for segment in line).rstrip() for line in lines]


def svg(lines: Sequence[Line], title: str, size: tuple[int, int]) -> str:
    """The lines in a window, as SVG: no font is embedded, and every run of letters is given the width it had."""
    width, height = size[0] * CELL_W + 2 * MARGIN, size[1] * CELL_H + BAR + MARGIN
    ground, ink = _ground(lines), "#d5dae6"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" width="{width:g}" height="{height}"'
        f' data-columns="{size[0]}" data-rows="{size[1]}" role="img" aria-label={quoteattr(title)}>',
        f"<title>{escape(title)}</title>",
        f'<rect width="100%" height="100%" rx="8" fill="{ground}" stroke="#3a4256"/>',
        *(f'<circle cx="{16 + i * 16}" cy="15" r="5" fill="{c}"/>' for i, c in enumerate(_BUTTONS)),
        f'<g font-family="{_FONTS}" font-size="{FONT}" fill="{ink}" xml:space="preserve">',
        f'<text class="title" x="{width / 2:g}" y="19" text-anchor="middle" opacity=".6">{escape(title)}</text>',
        f'<g transform="translate({MARGIN} {BAR})">',
    ]
    boxes: list[str] = []
    words: list[str] = []
    for y, line in enumerate(lines):
        x = 0
        for text, style in _runs(line):
            fore, back = _colours(style, ink, ground)
            if back != ground:
                boxes.append(
                    f'<rect x="{x * CELL_W:g}" y="{y * CELL_H}" width="{len(text) * CELL_W:g}" height="{CELL_H}"'
                    f' fill="{back}" shape-rendering="crispEdges"/>'
                )
            words += _words(text, x, y, fore if fore != ink else None, style)
            x += len(text)
    return "\n".join([*parts, *boxes, *words, "</g></g></svg>"]) + "\n"


#: Words with single blanks between them: a wider gap is a place of its own, whatever the font.
_PHRASE = re.compile(r"\S+(?: \S+)*")
_BUTTONS = ("#ff5f57", "#febc2e", "#28c840")


def _words(text: str, x: int, y: int, fore: str | None, style: Style) -> Iterator[str]:
    """The run's letters without the blanks around them, which some renderers drop."""
    look = (f' fill="{fore}"' if fore else "") + (' font-weight="bold"' if style.bold else "")
    for word in _PHRASE.finditer(text):
        yield (
            f'<text{look} x="{(x + word.start()) * CELL_W:g}" y="{y * CELL_H + 12.5:g}"'
            f' textLength="{len(word[0]) * CELL_W:g}">{escape(word[0])}</text>'
        )


def _runs(line: Line) -> Iterator[tuple[str, Style]]:
    """The line's texts, neighbours of one style joined."""
    text, style = "", Style.null()
    for segment in line:
        if segment.control:
            continue
        own = segment.style or Style.null()
        if text and own == style:
            text += segment.text
            continue
        if text:
            yield text, style
        text, style = segment.text, own
    if text:
        yield text, style


def _colours(style: Style, ink: str, ground: str) -> tuple[str, str]:
    fore, back = _hex(style.color, ink), _hex(style.bgcolor, ground)
    return (back, fore) if style.reverse else (fore, back)


def _hex(color: Color | None, default: str) -> str:
    return default if color is None or color.is_default else color.get_truecolor().hex


def _ground(lines: Sequence[Line]) -> str:
    """The colour behind most of the screen."""
    count: dict[str, int] = {}
    for line in lines:
        for text, style in _runs(line):
            back = _hex(style.bgcolor, "#000000")
            count[back] = count.get(back, 0) + len(text)
    return max(count, key=lambda back: count[back])


def main(names: Sequence[str]) -> None:
    if "--record" in names:
        record()
        names = [name for name in names if name != "--record"]
    (IMAGES / "screens").mkdir(exist_ok=True, parents=True)
    (ROOT / "docs" / "screens.md").write_text(page(), encoding="utf-8")
    if "screens" in names:
        names = [*(name for name in names if name != "screens"), *(picture.name for picture in EVERY_SCREEN)]
    unknown = set(names) - {picture.name for picture in (*PICTURES, *EVERY_SCREEN)}
    if unknown:
        known = ", ".join(picture.name for picture in PICTURES)
        raise SystemExit(f"there is no picture {', '.join(sorted(unknown))}: {known}")
    for picture in (*PICTURES, *EVERY_SCREEN):
        if names and picture.name not in names:
            continue
        path = IMAGES / f"{picture.name}.svg"
        path.write_text(svg(asyncio.run(shown(picture)), picture.title, picture.size), encoding="utf-8")
        sys.stdout.write(f"wrote {path} ({path.stat().st_size // 1024} KiB)\n")


if __name__ == "__main__":
    main(sys.argv[1:])
