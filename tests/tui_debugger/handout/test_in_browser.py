"""Pages as a real browser shows them, from a file, scripts off: text, contrast, width; nothing asked for or run."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import browser
from tests.tui_debugger.handout.documents import NAMES, genuine, hostile_texts, spoilt
from tui_debugger.handout.html_page import page
from tui_debugger.handout.kinds import sheet_of

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(browser.FOUND is None, reason="no headless browser is installed"),
]

#: Of every element with text of its own: its contrast with what is behind it (WCAG 2), the least, and whose it is.
_CONTRAST = """
(() => {
  const light = c => { const [r, g, b] = c.map(v => { v /= 255; return v <= .03928 ? v / 12.92
    : Math.pow((v + .055) / 1.055, 2.4); }); return .2126 * r + .7152 * g + .0722 * b; };
  const parse = t => { const n = (t.match(/[\\d.]+/g) || []).map(Number);
    return [n.slice(0, 3), n.length > 3 ? n[3] : 1]; };
  const behind = e => { const layers = [];
    for (; e; e = e.parentElement) { const [c, a] = parse(getComputedStyle(e).backgroundColor);
      if (a > 0) { layers.push([c, a]); if (a === 1) break; } }
    let under = layers.length && layers[layers.length - 1][1] === 1 ? layers.pop()[0]
      : (matchMedia('(prefers-color-scheme: dark)').matches ? [20, 23, 27] : [255, 255, 255]);
    for (const [c, a] of layers.reverse()) under = under.map((v, i) => v * (1 - a) + c[i] * a);
    return under; };
  let least = [99, ''];
  for (const e of document.body.querySelectorAll('*')) {
    if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()) || e.closest('svg, template')) continue;
    const a = light(parse(getComputedStyle(e).color)[0]), b = light(behind(e));
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < least[0]) least = [ratio, e.className + ' ' + e.textContent.slice(0, 40)];
  }
  return least;
})()
"""
_WIDTH = "document.documentElement.scrollWidth"
_SHUT = "document.querySelectorAll('details').forEach(one => one.open = true)"
#: A sheet of A4 within its margins, at 96 pixels an inch.
_SHEET = 700
#: What scrolls on a screen and would be cut on paper.
_CUT = """[...document.querySelectorAll('pre, table, .wide, td')].filter(e => e.scrollWidth > e.clientWidth + 1)
.map(e => e.tagName + ' ' + e.className + ' ' + e.textContent.slice(0, 60))"""
#: A table that scrolls and does not show that it goes on.
_UNSAID = """[...document.querySelectorAll('.wide')].filter(e => e.scrollWidth > e.clientWidth + 1
&& getComputedStyle(e).backgroundImage === 'none').length"""
_TEXT = "document.body.innerText.replace(/\\s+/g, ' ')"
_OTHERS = "document.querySelectorAll('iframe,object,embed,link,form,a').length"
_ALIVE = f"[document.scripts.length, document.images.length, {_OTHERS}]"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    with browser.Browser(tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.mark.parametrize(
    "name",
    ["comparison", "matrix", "diagnosis", "diagnosis_log", "parity", "mismatch", "ruling", "weights", "samples",
     "gathering"],
)  # fmt: skip
def test_a_page_is_readable_on_a_phone_and_on_a_wide_screen_by_day_and_by_night(
    tab: browser.Browser, tmp_path: Path, name: str
) -> None:
    file = tmp_path / f"{name}.html"
    file.write_text(page(genuine()[name]), encoding="utf-8")
    sheet = sheet_of(genuine()[name])
    for width, dark in ((360, False), (1600, False), (360, True), (1600, True)):
        tab.open(file, width, dark=dark)
        tab.evaluate(_SHUT)
        text = tab.evaluate(_TEXT)
        for part in (sheet.word, sheet.sentence, *(section.title for section in sheet.sections)):
            assert " ".join(part.split()) in text, (part, width)
        assert tab.evaluate(_WIDTH) <= width, "the page is wider than the window"
        assert tab.evaluate(_UNSAID) == 0, "a table goes on beyond the edge and nothing says so"
        least, whose = tab.evaluate(_CONTRAST)
        assert least >= 4.5, (whose, least, width, dark)
        assert tab.asked_for == [file.as_uri()], "a page asks for itself alone"
        assert not [one for one in tab.heard if one.get("method") == "Log.entryAdded"], "the browser complains"


@pytest.mark.parametrize("name", NAMES)
def test_who_reads_at_night_prints_dark_letters_on_white_and_no_column_is_cut(
    tab: browser.Browser, tmp_path: Path, name: str
) -> None:
    file = tmp_path / f"{name}.html"
    file.write_text(page(genuine()[name]), encoding="utf-8")
    tab.open(file, _SHEET, dark=True, paper=True)
    tab.evaluate(_SHUT)
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    least, whose = tab.evaluate(_CONTRAST)
    assert least >= 4.5, (whose, least)
    assert tab.evaluate(_WIDTH) <= _SHEET, "a sheet cannot be scrolled"
    assert tab.evaluate(_CUT) == []


@pytest.mark.parametrize("text", [*hostile_texts(), "A" * 1_000_000], ids=lambda text: repr(text[:12]))
def test_hostile_texts_run_nothing_and_widen_nothing(tab: browser.Browser, tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.html"
    # A megabyte in each place of a document takes the browser seconds: one document stands for the others.
    for name in (
        ("comparison", "diagnosis_log", "parity", "samples", "mismatch") if len(text) < 10_000 else ("samples",)
    ):
        file.write_text(page(spoilt(genuine()[name], text)), encoding="utf-8")
        # Scripts on: it is the page that keeps them from running.
        tab.tell("Emulation.setScriptExecutionDisabled", value=False)
        try:
            tab.open(file, 360)
            assert tab.evaluate(_ALIVE) == [0, 0, 0]
            assert tab.evaluate("document.title") not in ("owned", "1")
        finally:
            tab.tell("Emulation.setScriptExecutionDisabled", value=True)
        assert tab.evaluate(_WIDTH) <= 360
        assert tab.asked_for == [file.as_uri()]


def test_turns_tools_and_tokens_that_a_model_wrote_stand_for_themselves(tab: browser.Browser, tmp_path: Path) -> None:
    document = genuine()["samples"]
    assert document["tokens"][0]["texts"], "turns of this sample are known"
    said = "".join(hostile_texts())
    hostile = copy.deepcopy(document)
    for entry in hostile["tokens"]:
        entry["texts"] = [{**entry["texts"][0], "role": role, "text": said} for role in ("user", said, "tool")]
        entry["pieces"] = [said] * len(entry["ids"])
    for one in hostile["samples"]:
        one["prompt"] = one["response"] = said
    file = tmp_path / "x.html"
    file.write_text(page(hostile), encoding="utf-8")
    for width, dark in ((360, True), (1600, False)):
        tab.open(file, width, dark=dark)
        tab.evaluate(_SHUT)
        assert tab.evaluate(_ALIVE) == [0, 0, 0]
        assert tab.evaluate(_WIDTH) <= width
        assert tab.asked_for == [file.as_uri()]
        text = tab.evaluate(_TEXT)
        assert "<svg onload=alert(1)>" in text, "it is read, not obeyed"
        assert "\u202e" not in text, "nothing turns the line round"
        assert "\x00" not in text


def test_a_report_is_not_cut_where_the_window_is_wide(tab: browser.Browser, tmp_path: Path) -> None:
    file = tmp_path / "x.html"
    file.write_text(page(genuine()["parity"]), encoding="utf-8")
    tab.open(file, 1600)
    cut = "[...document.querySelectorAll('details[open] pre')].filter(e => e.scrollWidth > e.clientWidth).length"
    assert tab.evaluate("document.querySelectorAll('details[open] pre').length") > 0
    assert tab.evaluate(cut) == 0


def test_the_browser_of_these_tests_sees_what_it_is_to_see(tab: browser.Browser, tmp_path: Path) -> None:
    file = tmp_path / "x.html"
    bad = "<!doctype html><title>x</title><body><p style='color:#999;background:#aaa;width:900px'>pale and wide</p>"
    file.write_text(f"{bad}<script>document.title='ran'</script><img src='file:///nowhere.png'>", encoding="utf-8")
    tab.open(file, 360)
    assert tab.evaluate("document.title") == "x", "scripts are off"
    assert tab.evaluate(_WIDTH) > 360
    assert tab.evaluate(_CONTRAST)[0] < 4.5
    assert len(tab.asked_for) == 2
