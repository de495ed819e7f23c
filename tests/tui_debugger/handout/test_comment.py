"""A comment: Markdown that stands for what it says, whatever is in it, within what a forge takes."""

from __future__ import annotations

import re
from typing import Any

import pytest
from markdown_it import MarkdownIt

from tests.tui_debugger.handout.documents import HOSTILE, LONG, genuine, spoilt
from tui_debugger.handout.comment import LARGEST, comment
from tui_debugger.handout.kinds import sheet_of

#: Raw HTML that a comment is made with.
_OWN = re.compile(r"</?(?:details|summary|code|sub)>")
_KINDS_OF_TOKENS = {"link_open", "image", "em_open", "strong_open", "s_open", "code_inline"}


def _tokens(text: str) -> list[Any]:
    found = []
    for token in MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text):
        found += [token, *(token.children or [])]
    return found


def test_a_comment_says_the_answer_the_rest_folded_versions_and_the_command():
    text = comment(genuine()["comparison"])
    lines = text.splitlines()
    first = genuine()["comparison"]["first_divergence"]
    assert lines[0].startswith("### DIFF: first diverging tensor:")
    assert first["name"] in lines[0].replace("\\", "")
    assert "| value in a |" in text.partition("<details>")[0]
    assert "```sh\nrldbg compare /" in text.partition("<details>")[0]
    assert text.count("<details>") == text.count("</details>") > 3
    assert re.search(r"<sub>rldbg \S+, 2026-\S+ · here: Python 3[.]\d", text)


@pytest.mark.long
def test_every_document_becomes_a_comment_with_its_tables_whole():
    for name, document in genuine().items():
        text = comment(document)
        assert len(text) <= LARGEST
        raw = [one.content for one in _tokens(text) if one.type in ("html_block", "html_inline")]
        assert all(not re.search("<[^>]*>", _OWN.sub("", one)) for one in raw), name
        grids = [one for one in _tokens(text) if one.type == "table_open"]
        assert len(grids) >= 1, name


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:12]))
def test_hostile_texts_of_a_dump_stand_for_themselves(text: str) -> None:
    for name in ("comparison", "diagnosis", "matrix")[: 1 if len(text) > LONG else 3]:
        made = comment(spoilt(genuine()[name], text), command="rldbg compare A B")
        assert len(made) <= LARGEST
        tokens = _tokens(made)
        raw = [one.content for one in tokens if one.type in ("html_block", "html_inline")]
        assert all(not re.search("<[^>]*>", _OWN.sub("", one)) for one in raw), name
        assert not {one.type for one in tokens} & _KINDS_OF_TOKENS, name
        headings = [one for one in tokens if one.type == "heading_open"]
        assert len(headings) == 1, name
        shown = "".join(one.content for one in tokens if one.type == "text")
        # A forge looks in what is shown, not in code: nobody is called, no issue is named, no address is linked.
        assert not re.search(r"@\w|#\d", shown), name
        assert "://" not in re.sub("```.*?```", "", made, flags=re.S)
        assert made.count("<details>") == made.count("</details>")


def test_what_does_not_fit_is_named():
    document = genuine()["diagnosis_log"]
    finding = next(one for one in document["findings"] if one["severity"] != "info")
    many = {**document, "findings": [{**finding, "cause": "because " * 100, "id": f"D{n}"} for n in range(200)]}
    text = comment(many)
    assert len(text) <= LARGEST
    assert "Left out, for a comment of 60,000 letters: " in text
    assert sheet_of(many).sections[39].title.partition("[")[0].strip()[:20] in text.replace("\\", "")
