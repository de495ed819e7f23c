"""Draws the pictures of README.md from the real program: python docs/pictures.py

Runs the demo (a really trained policy, a really wrong pack), opens the screen on its two dumps, and saves
what it shows as SVG. Nothing in a picture is typed by hand.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tui_debugger.app import RldbgApp

IMAGES = Path(__file__).with_name("images")
SIZE = (140, 40)


def _demo(directory: Path) -> list[Path]:
    """The dumps of the demo's cells: each row alone first, the wrong pack last."""
    command = [sys.executable, "-m", "tui_debugger", "demo", "--json", "--dir", str(directory)]
    answer = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if answer.returncode != 1:
        raise SystemExit(f"the demo ended with {answer.returncode}, expected 1: a divergence")
    return [Path(cell["dump"]) for cell in json.loads(answer.stdout)["cells"]]


async def _draw(a: Path, b: Path, picture: Path) -> None:
    app = RldbgApp(a, b)
    async with app.run_test(size=SIZE) as pilot:
        while app.session.state.comparison is None or app.session.state.inspected is None:
            await pilot.pause(0.1)
        await pilot.pause(0.5)
        picture.write_text(app.export_screenshot(title="rldbg demo"))


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        cells = _demo(Path(scratch) / "demo")
        asyncio.run(_draw(cells[0], cells[-1], IMAGES / "demo.svg"))
    sys.stdout.write(f"wrote {IMAGES / 'demo.svg'}\n")


if __name__ == "__main__":
    main()
