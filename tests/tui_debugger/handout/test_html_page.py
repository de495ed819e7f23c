"""A page: whole, inert whatever its texts are, small, and opened again as the document it was made of."""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from replay_core import budget, workbench
from replay_core.documents.embedding import BEGINNING, embedded, kind_mark
from replay_core.errors import BudgetError, DumpError
from tests.tui_debugger.handout.documents import HOSTILE, LONG, genuine, spoilt
from tui_debugger.handout.blocks import Bars
from tui_debugger.handout.html_page import _DRAW, LARGEST, page
from tui_debugger.handout.kinds import KINDS, sheet_of

#: Elements and attributes that a page is drawn with. None of them runs, fetches or sends anything.
_ELEMENTS = {
    "html", "meta", "title", "style", "body", "header", "footer", "h1", "p", "b", "br", "span", "div", "pre", "dl",
    "dt", "dd", "details", "summary", "table", "thead", "tbody", "tr", "th", "td", "ul", "ol", "li", "svg", "rect",
    "polyline", "template",
}  # fmt: skip
_ATTRIBUTES = {
    "lang", "charset", "name", "content", "http-equiv", "class", "open", "title", "role", "aria-label", "viewbox",
    "preserveaspectratio", "x", "y", "width", "height", "points", "id", "data-encoding",
}  # fmt: skip
_EMPTY = {"meta", "br"}


class Seen(HTMLParser):
    """The elements of a page, its text, and whether each element that opens is shut in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements, self.attributes, self.open, self.texts = set[str](), set[str](), list[str](), list[str]()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in _EMPTY and not (self.get_starttag_text() or "").endswith("/>"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "template"):
            self.texts.append(data)


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return {name: page(document) for name, document in genuine().items()}


def test_every_kind_that_a_command_answers_with_has_a_page():
    assert {document["kind"] for document in genuine().values()} >= set(KINDS) - {"info"}


def test_a_page_says_the_answer_first_and_every_part_of_its_sheet(pages: dict[str, str]) -> None:
    for name, text in pages.items():
        seen = Seen(text)
        said = " ".join("".join(seen.texts).split())
        sheet = sheet_of(genuine()[name])
        titles = [section.title for section in sheet.sections]
        where = [said.find(" ".join(part.split())) for part in (sheet.word, sheet.sentence, *titles)]
        assert -1 not in where, (name, where)
        assert seen.open == []


def test_both_values_and_the_place_of_the_first_divergence_stand_on_top(pages: dict[str, str]) -> None:
    top = pages["comparison"].partition("<details")[0]
    first = genuine()["comparison"]["first_divergence"]
    for part in (first["name"], "value in a", "value in b", "where", "why", "rldbg compare /"):
        assert part in top, part


def test_a_page_runs_nothing_and_asks_for_nothing(pages: dict[str, str]) -> None:
    for text in pages.values():
        seen = Seen(text)
        assert seen.elements <= _ELEMENTS
        assert seen.attributes <= _ATTRIBUTES
        assert "default-src 'none'" in text
        style = re.search("<style>(.*?)</style>", text, re.S)
        assert style is not None
        digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
        assert f"style-src 'sha256-{digest}'" in text
        assert not re.search(r"url\(|@import|https?:", style[1])


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:12]))
def test_hostile_texts_of_a_dump_do_nothing(text: str) -> None:
    for name in ("comparison", "diagnosis", "parity")[: 1 if len(text) > LONG else 3]:
        seen = Seen(made := page(spoilt(genuine()[name], text), command=f"rldbg compare {text}"))
        assert seen.elements <= _ELEMENTS
        assert seen.attributes <= _ATTRIBUTES
        assert seen.open == []
        assert len(made.encode()) < LARGEST
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\ud800-\udfff]", made)


def test_a_page_opens_again_as_the_document_it_was_made_of(pages: dict[str, str], tmp_path: Path) -> None:
    for name, text in pages.items():
        file = tmp_path / f"{name}.html"
        file.write_text(text, encoding="utf-8")
        assert workbench.is_document(file)
        assert workbench.reopen(file) == genuine()[name], name


def _of_many(count: int) -> Any:
    document = genuine()["comparison"]
    row = next(row for row in document["tensors"] if row["verdict"] == "DIFF")
    rows = [
        {**row, "name": f"layers.{hashlib.sha512(str(number).encode()).hexdigest()}.output"} for number in range(count)
    ]
    counts = dict.fromkeys(document["counts"], 0) | {"total": count, "DIFF": count}
    return {**document, "tensors": rows, "counts": counts}


@pytest.mark.long
def test_a_page_of_very_many_tensors_stays_small_and_says_what_it_left_out(tmp_path: Path) -> None:
    some = page(_of_many(4000))
    assert len(some.encode()) < LARGEST
    assert "and 3,800 rows more; the document has all" in some
    (tmp_path / "some.html").write_text(some, encoding="utf-8")
    assert len(workbench.reopen(tmp_path / "some.html")["tensors"]) == 4000  # type: ignore[typeddict-item]
    many = page(_of_many(20_000))
    assert len(many.encode()) < LARGEST
    assert "Left out, for a page of less than 1 MB: the document itself" in many
    (tmp_path / "many.html").write_text(many, encoding="utf-8")
    with pytest.raises(DumpError, match="holds no document"):
        workbench.reopen(tmp_path / "many.html")


def test_a_page_that_was_damaged_or_blown_up_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replay_core.documents.embedding.MAX_DOCUMENT", 1 << 20)
    whole = embedded(genuine()["record"])
    assert whole is not None
    packed = re.sub("<.*?>", "", whole)
    bomb = base64.b64encode(zlib.compress(b" " * (1 << 22), 9)).decode()
    frame = (
        f'{BEGINNING}{kind_mark("record")}<template id="rldbg-document" data-encoding="deflate base64">%s</template>'
    )
    for inside, said in ((packed[: len(packed) // 2 // 4 * 4], "cut off"), ("AAAA", "damaged"), (bomb, "too large")):
        file = tmp_path / "x.html"
        file.write_text(frame % inside, encoding="utf-8")
        with pytest.raises(DumpError, match=said):
            workbench.reopen(file)
    file.write_text(frame % base64.b64encode(zlib.compress(b'{"schema_version": 1, "kind": "record"}')).decode())
    with pytest.raises(DumpError, match="damaged"):
        workbench.reopen(file)


def test_a_small_page_of_a_huge_document_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "FLOOR_BYTES", 1 << 16)
    budget.forget()
    text = b'{"schema_version": 1, "kind": "comparison", "a": [' + b"[]," * 300_000 + b"1]}"
    path = tmp_path / "x.html"
    packed = base64.b64encode(zlib.compress(text)).decode()
    element = f'<template id="rldbg-document" data-encoding="deflate base64">{packed}</template>'
    path.write_text(BEGINNING + kind_mark("comparison") + element)
    with pytest.raises(BudgetError, match="more than what is stored"):
        workbench.reopen(path)


def test_a_single_bar_is_named_once():
    drawn = _DRAW[Bars](Bars([("0.03 to 0.08", 9.0)], "tokens, by b - a"), 100)
    assert drawn.count("<span>0.03 to 0.08</span>") == 1
    several = _DRAW[Bars](Bars([("0 to 1", 9.0), ("1 to 2", 3.0)], "tokens, by b - a"), 100)
    assert several.index("<span>0 to 1</span>") < several.index("<span>1 to 2</span>")
