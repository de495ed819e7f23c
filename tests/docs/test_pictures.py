"""The pictures in docs/images show what the screen shows today."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_pictures", ROOT / "docs" / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


pictures = _load()


def _read(path: Path) -> list[str]:
    """The screen a picture shows, put together again from where its words stand; fonts and colours do not matter."""
    root = ElementTree.parse(path).getroot()
    rows = [[" "] * int(root.attrib["data-columns"]) for _ in range(int(root.attrib["data-rows"]))]
    for word in root.iter("{http://www.w3.org/2000/svg}text"):
        if word.get("class") == "title":
            continue
        x, y = float(word.attrib["x"]) / pictures.CELL_W, float(word.attrib["y"]) // pictures.CELL_H
        for i, letter in enumerate(word.text or ""):
            rows[int(y)][round(x) + i] = letter
    return ["".join(row).rstrip() for row in rows]


_EVERY = [*pictures.PICTURES, *(pytest.param(one, marks=pytest.mark.slow) for one in pictures.EVERY_SCREEN)]


def test_no_picture_tells_of_the_machine_it_was_drawn_on() -> None:
    """The start screen lists what its user opened last."""
    for file in sorted(pictures.IMAGES.rglob("*.svg")):
        assert "docs/images/answers" not in file.read_text(encoding="utf-8"), file.name


@pytest.mark.long
@pytest.mark.parametrize("picture", _EVERY, ids=lambda picture: picture.name)
async def test_a_picture_says_what_the_screen_says(picture: object) -> None:
    name = picture.name  # type: ignore[attr-defined]
    shown = pictures.text_of(await pictures.shown(picture))
    drawn = _read(pictures.IMAGES / f"{name}.svg")
    assert drawn == shown, f"draw it again and look at it: python docs/pictures.py {name}"


def test_every_picture_in_the_texts_is_drawn_and_every_drawn_one_is_in_a_text() -> None:
    texts = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    wanted = {
        found.partition("images/")[2]
        for text in texts
        for found in re.findall(r"\]\(([^)]*\.svg)\)", text.read_text("utf-8"))
    }
    assert wanted == {f"{picture.name}.svg" for picture in (*pictures.PICTURES, *pictures.EVERY_SCREEN)}
    assert wanted == {str(path.relative_to(pictures.IMAGES)) for path in pictures.IMAGES.rglob("*.svg")}


def test_the_page_of_the_screens_is_the_generated_one() -> None:
    assert (ROOT / "docs" / "screens.md").read_text("utf-8") == pictures.page()


@pytest.mark.parametrize("picture", pictures.PICTURES, ids=lambda picture: picture.name)
def test_a_picture_is_small(picture: object) -> None:
    name = picture.name  # type: ignore[attr-defined]
    assert (pictures.IMAGES / f"{name}.svg").stat().st_size < 64 * 1024
