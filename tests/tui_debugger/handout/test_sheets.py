"""Sheets: the answer of a document and its parts; what a part leaves out is counted in it."""

from __future__ import annotations

import copy
from typing import Any

from tests.tui_debugger.handout.documents import genuine
from tui_debugger.handout.blocks import Bars, Block, Grid, Sayings, Section, Tokens
from tui_debugger.handout.comment import comment
from tui_debugger.handout.html_page import page
from tui_debugger.handout.kinds import sheet_of


def section(document: Any, title: str) -> Section:
    return next(one for one in sheet_of(document).sections if one.title.startswith(title))


def block(document: Any, title: str, kind: type[Block]) -> Any:
    return next(one for one in section(document, title).blocks if isinstance(one, kind))


def test_the_page_of_a_matrix_leads_with_the_cell_that_disagrees_and_its_cause() -> None:
    sheet = sheet_of(genuine()["matrix"])
    assert sheet.word == "DISAGREES"
    assert sheet.tone == "bad"
    assert sheet.sentence.startswith("cell 6 ")
    facts = dict(sheet.facts)
    assert facts["cause"].startswith("other_samples: ")
    assert facts["first diverging tensor"] == "norm.output"


def test_a_distribution_reaches_as_far_as_the_tokens_that_count() -> None:
    document = genuine()["parity"]
    bars = block(document, "Batch padded", Bars)
    counted = document["batches"][0]["histogram"]["counted"]
    assert sum(count for _, count in bars.rows) == sum(counted)
    assert bars.rows[0][1] > 0
    assert bars.rows[-1][1] > 0
    assert len(bars.rows) < len(counted), "padding reaches further"


def test_an_index_without_a_token_is_written_once() -> None:
    table = block(genuine()["compared"], "The element and those beside it", Grid)
    assert list(table.head) == ["index", "a", "b", "|b - a|"]
    assert all(len(row) == 4 for row in table.rows)


def test_one_setting_is_alike_and_several_are() -> None:
    titles = [one.title for one in sheet_of(genuine()["compared"]).sections]
    assert "Settings of both sides: 1 is alike" in titles
    assert "Settings of both sides: 3 are alike" in [one.title for one in sheet_of(genuine()["comparison"]).sections]


def test_tokens_groups_sentences_and_units_that_are_left_out_are_counted() -> None:
    samples = copy.deepcopy(genuine()["samples"])
    entry = samples["tokens"][0]
    answered = len(entry["ids"]) - entry["begin"]
    more = 3000 - answered
    entry["ids"] += [7] * more
    entry["pieces"] = None
    for column in entry["columns"]:
        column["values"] += [0.5] * more
    first = samples["samples"][0]
    samples["samples"] = [{**first, "sample": place, "group": place // 2} for place in range(40)]
    assert block(samples, f"Sample {entry['sample']},", Tokens).left_out == 2000
    assert section(samples, "… and 8 groups more")
    drawn = page(samples)
    assert "… and 2,000 tokens more" in drawn
    assert "… and 8 groups more" in drawn

    listed = copy.deepcopy(genuine()["matrix"])
    listed["notes"] = [f"note {number}" for number in range(230)]
    assert len(block(listed, "Notes", Sayings).lines) == 230
    assert "… and 30 more; the document has all" in page(listed)

    gathering = copy.deepcopy(genuine()["gathering"])
    gathering["units"] = gathering["units"][:1] * 450
    assert "50 more are not drawn" in page(gathering)
    assert "… and 50 more" in comment(gathering)
