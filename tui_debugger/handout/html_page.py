"""A sheet as one page: no script, nothing from anywhere, every text escaped, the document inside."""

from __future__ import annotations

import base64
import hashlib
import html
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay_core.documents.embedding import BEGINNING, embedded, kind_mark
from tui_debugger import format as words
from tui_debugger.handout.blocks import (
    Bars,
    Block,
    Curve,
    Facts,
    Grid,
    Handout,
    Plain,
    Sayings,
    Section,
    Strip,
    StripMark,
    Tokens,
)
from tui_debugger.handout.kinds import sheet_of
from tui_debugger.handout.reproduce import command_of, made_with

if TYPE_CHECKING:
    from replay_core.documents.kinds import Document

#: Bytes of a whole page, and of what is drawn in it: the document needs the rest.
LARGEST, DRAWN = 1_000_000, 600_000
#: (letters of a text, rows of a table, letters of a report) of a section, and less of each where it takes too much.
_LIMITS = ((400, 200, 40_000), (120, 40, 8_000), (60, 10, 2_000))
_SECTION = 200_000
#: More marks than these are squares without their names.
_NAMED = 36
#: Sentences of a list, tokens of a sample.
_LINES, _TOKENS = 200, 2000


def page(document: Document, command: str | None = None) -> str:
    """The page of a document, less than `LARGEST` bytes of UTF-8. What was left out of it is said in it.

    Args:
        command: what was typed to get the document; else the one that its own settings stand for.
    """
    sheet = sheet_of(document)
    drawn, cut = _drawn(sheet.sections)
    inside = embedded(document)
    body = f"{_answer(sheet, command or command_of(document))}{''.join(drawn)}"
    room = LARGEST - len(body.encode()) - 20_000
    if inside is None or len(inside) > room:
        size = "" if inside is None else f" ({len(inside):,} bytes, packed)"
        cut.append(f"the document itself{size}: --output FILE writes it, and rldbg FILE opens that")
        inside = ""
    left = f'<p class="dim">Left out, for a page of less than 1 MB: {"; ".join(map(_text, cut))}.</p>' if cut else ""
    open_again = "rldbg FILE.html opens the document that is inside this page." if inside else ""
    foot = f"<footer>{_text(' · '.join(made_with(document)))}<br>{open_again}{left}</footer>"
    title = words.end(f"{sheet.word} {words.safe(sheet.sentence)}", 120)
    head = (
        f"{BEGINNING}{kind_mark(document['kind'])}{_policy()}<title>{_text(title)}</title>\n<style>{_style()}</style>\n"
    )
    return f"{head}<body>\n{body}{foot}\n{inside}\n</body></html>\n"


@lru_cache(1)
def _style() -> str:
    return Path(__file__).with_name("page.css").read_text(encoding="utf-8")


def _policy() -> str:
    """Nothing is fetched, run or sent, whatever a text in the page would have a browser do."""
    digest = base64.b64encode(hashlib.sha256(_style().encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="referrer" content="no-referrer">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
    )


def _text(value: object, most: int = 2000) -> str:
    """A text of a file as a page may hold it, cut where it is longer than anybody reads."""
    whole = str(value)
    cut = whole if len(whole) <= most else f"{whole[:most]}… ({len(whole):,} letters)"
    return html.escape(words.safe(cut))


def _answer(sheet: Handout, command: str) -> str:
    facts = _facts(Facts(sheet.facts), 2000)
    return (
        f'<header><span class="word {sheet.tone}">{_text(sheet.word)}</span><h1>{_text(sheet.sentence)}</h1>{facts}'
        f'<p class="dim">The command that says so:</p><pre class="command">{_text(command)}</pre></header>\n'
    )


def _drawn(sections: Sequence[Section]) -> tuple[list[str], list[str]]:
    """The sections that fit, and the titles of those that do not."""
    drawn, cut, taken = [], list[str](), 0
    for section in sections:
        for limits in _LIMITS:
            text = _section(section, *limits)
            if len(text.encode()) <= _SECTION:
                break
        if taken + len(text.encode()) > DRAWN:
            cut.append(words.end(section.title, 120))
            continue
        taken += len(text.encode())
        drawn.append(text)
    return drawn, cut


def _section(section: Section, letters: int, rows: int, lines: int) -> str:
    dot = f'<span class="dot {section.tone}"></span>' if section.tone else ""
    parts = "".join(
        f'<div class="part{" half" if isinstance(block, Curve) else ""}">{_block(block, letters, rows, lines)}</div>'
        for block in section.blocks
    )
    shut = "" if section.folded else " open"
    return f"<details{shut}><summary>{dot}{_text(section.title, letters)}</summary>{parts}</details>\n"


def _block(block: Block, letters: int, rows: int, lines: int) -> str:
    if isinstance(block, Grid):
        return _table(block, letters, rows)
    if isinstance(block, Plain):
        return _plain(block, lines)
    return _DRAW[type(block)](block, letters)


def _facts(block: Facts, letters: int) -> str:
    pairs = "".join(f"<dt>{_text(name, letters)}</dt><dd>{_text(value, letters)}</dd>" for name, value in block.rows)
    return f"<dl>{pairs}</dl>" if pairs else ""


def _table(block: Grid, letters: int, most: int) -> str:
    def row(cells: Sequence[str], tag: str, tone: str = "") -> str:
        made = (
            f"<{tag}{' class=n' if place in block.right else ''}>{_text(cell, letters)}</{tag}>"
            for place, cell in enumerate(cells)
        )
        return f"<tr{f' class={tone}' if tone else ''}>{''.join(made)}</tr>"

    tones = block.tones or [""] * len(block.rows)
    body = "".join(row(cells, "td", tone) for cells, tone in zip(block.rows[:most], tones, strict=False))
    left = block.left_out + max(0, len(block.rows) - most)
    more = f'<p class="dim">… and {words.plural(left, "row")} more; the document has all</p>' if left else ""
    return f'<div class="wide"><table><thead>{row(block.head, "th")}</thead><tbody>{body}</tbody></table></div>{more}'


def _plain(block: Plain, letters: int) -> str:
    cut = f"\n… {len(block.text) - letters:,} letters more" if len(block.text) > letters else ""
    return f"<pre>{html.escape(words.safe(block.text[:letters], lines=True))}{cut}</pre>"


def _sayings(block: Sayings, letters: int) -> str:
    left = len(block.lines) - _LINES
    more = f'<p class="dim">… and {left:,} more; the document has all</p>' if left > 0 else ""
    return f"<ul>{''.join(f'<li>{_text(line, letters)}</li>' for line in block.lines[:_LINES])}</ul>{more}"


def _strip(block: Strip, letters: int) -> str:
    marks = block.marks
    words_of = {mark.word: mark.tone for mark in marks}
    counted = [f"{sum(mark.word == word for mark in marks)} {word}" for word in words_of]
    first = "" if block.first is None else f"; first {_text(marks[block.first].label, letters)}"
    more = f"; {block.left_out:,} more are not drawn" if block.left_out > 0 else ""
    told = f'<p class="dim">{_text(", ".join(counted))}{first}{more}</p>'
    if block.sizes:
        return _profile(block) + told
    cells = []
    for place, mark in enumerate(marks):
        here = f"{mark.tone} first" if place == block.first else mark.tone
        said = f"{_text(mark.label, letters)}: {_text(mark.word, letters)}"
        shown = said if len(marks) <= _NAMED else ""
        cells.append(f'<li class="{here}" title="{said}">{shown}</li>')
    return f'<ol class="{"chips" if len(marks) <= _NAMED else "cells"}">{"".join(cells)}</ol>{told}'


def _profile(block: Strip) -> str:
    """A bar per mark, by powers of ten; what is exactly zero is a stub."""
    sizes = [mark.size for mark in block.marks]
    logs = [math.log10(size) for size in sizes if size is not None and 0 < size < math.inf]
    low, high = (math.floor(min(logs)), math.ceil(max(logs))) if logs else (0, 1)
    high = max(high, low + 1)
    bars = [_bar(place, mark, low, high) for place, mark in enumerate(block.marks)]
    ends = f"bars: {block.sizes}, 1e{low} to 1e{high}, by powers of ten; a stub is 0"
    return (
        f'<svg viewBox="0 0 {len(block.marks) * 10} 100" preserveAspectRatio="none" role="img" '
        f'aria-label="{_text(block.sizes)}">{"".join(bars)}</svg><p class="dim">{_text(ends)}</p>'
    )


def _bar(place: int, mark: StripMark, low: int, high: int) -> str:
    size = mark.size
    if size is None or size == 0:
        height = 2.0
    else:
        share = (math.log10(size) - low) / (high - low) if 0 < size < math.inf else 1.0
        height = 6 + 92 * min(1.0, max(0.0, share))
    said = f"{_text(mark.label, 120)}: {_text(mark.word, 120)}" + ("" if size is None else f", {words.number(size)}")
    return (
        f'<rect class="{mark.tone}" x="{place * 10 + 1}" y="{100 - height:.1f}" width="8" height="{height:.1f}">'
        f"<title>{said}</title></rect>"
    )


def _bars(block: Bars, letters: int) -> str:
    most = max((count for _, count in block.rows), default=0.0) or 1.0
    bars = "".join(
        f'<rect class="bar" x="{place * 10 + 1}" y="{100 - 98 * count / most:.1f}" width="8" '
        f'height="{98 * count / most:.1f}"><title>{_text(name, letters)}: {words.number(count)}</title></rect>'
        for place, (name, count) in enumerate(block.rows)
    )
    names = [name for name, _ in block.rows]
    # One bar has one name: at both ends it would read as a range of two.
    ends = (names[0], block.unit, names[-1]) if len(names) > 1 else (*names, block.unit)
    spans = "".join(f"<span>{_text(one, letters)}</span>" for one in ends)
    return (
        f'<svg viewBox="0 0 {max(1, len(block.rows)) * 10} 100" preserveAspectRatio="none" role="img" '
        f'aria-label="{_text(block.unit)}">{bars}</svg><div class="ends">{spans}</div>'
    )


def _curve(block: Curve, letters: int) -> str:
    finite = [value for value in block.values if value is not None and math.isfinite(value)]
    name = f'<p class="dim"><b>{_text(block.name, letters)}</b> {_text(block.note, letters)}</p>'
    if not finite:
        return f"{name}<p>no finite value</p>"
    low, high = min(finite), max(finite)
    span = (high - low) or 1.0
    pieces: list[list[str]] = [[]]
    for place, value in enumerate(block.values):
        if value is None or not math.isfinite(value):
            pieces.append([])
        else:
            pieces[-1].append(f"{place * 10},{95 - 90 * (value - low) / span:.1f}")
    lines = "".join(f'<polyline class="line" points="{" ".join(one)}"/>' for one in pieces if one)
    width = max(1, len(block.values) - 1) * 10
    marks = "".join(
        f'<rect class="mark" x="{at * 10 - width / 400:.1f}" y="0" width="{width / 200:.1f}" height="100">'
        f"<title>step {_text(block.steps[at], letters)}</title></rect>"
        for at in block.marks
    )
    said = f"{words.number(low)} to {words.number(high)}"
    return (
        f'{name}<svg class="curve" viewBox="0 0 {width} 100" preserveAspectRatio="none" role="img" '
        f'aria-label="{_text(block.name, letters)}: {said}">{marks}{lines}</svg><div class="ends">'
        f"<span>step {_text(block.steps[0], letters)}</span><span>{said}</span>"
        f"<span>step {_text(block.steps[-1], letters)}</span></div>"
    )


def _tokens(block: Tokens, letters: int) -> str:
    spans = []
    for mark in block.marks[:_TOKENS]:
        level = min(4, math.ceil(4 * mark.level)) if mark.level > 0 else 0
        shades = " ".join(part for part in (f"l{level}" if level else "", "here" if mark.here else "") if part)
        spans.append(f'<span class="{shades}" title="{_text(mark.said, letters)}">{_text(mark.text, letters)}</span>')
    told = f'<p class="dim">the redder and the more underlined, the larger: {_text(block.colour, letters)}</p>'
    left = block.left_out + max(0, len(block.marks) - _TOKENS)
    more = f'<p class="dim">… and {words.plural(left, "token")} more; the document has all</p>' if left else ""
    return f'<p class="tokens">{"".join(spans)}</p>{more}{told}'


_DRAW: dict[type, Callable[[Any, int], str]] = {
    Facts: _facts, Sayings: _sayings, Strip: _strip, Bars: _bars, Curve: _curve, Tokens: _tokens,
}  # fmt: skip
