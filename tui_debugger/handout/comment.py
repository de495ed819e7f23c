"""A sheet as a comment for an issue: the answer, the rest folded, nothing that a forge would act on."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tui_debugger import format as words
from tui_debugger.handout.blocks import Bars, Block, Curve, Facts, Grid, Plain, Sayings, Section, Strip, Tokens
from tui_debugger.handout.kinds import sheet_of
from tui_debugger.handout.reproduce import command_of, made_with

if TYPE_CHECKING:
    from replay_core.documents.kinds import Document

#: Letters of a comment: GitHub takes 65,536.
LARGEST = 60_000
#: Rows of a table, letters of a text and of a report.
_ROWS, _LETTERS, _REPORT = 40, 300, 12_000
#: What Markdown, or a forge that shows it, makes something of: emphasis, links, tables, code, mentions, references.
_ACTED_ON = re.compile(r"[\\`*_\[\]#|~<>&@$]|:(?=//)|(?<=www)\.|^[-+=]|^\d+(?=[.)])", re.IGNORECASE)


def comment(document: Document, command: str | None = None) -> str:
    """Markdown of at most `LARGEST` letters; what was left out is said at its end.

    Args:
        command: what was typed to get the document; else the one that its own settings stand for.
    """
    sheet = sheet_of(document)
    answer = [f"### {_prose(sheet.word)}: {_prose(sheet.sentence, 1000)}", "", _facts(Facts(sheet.facts), 1000), ""]
    answer += _fenced(command or command_of(document), "sh")
    foot = f"<sub>{_prose(' · '.join(made_with(document)))}</sub>"
    said, cut, room = "\n".join(answer), list[str](), LARGEST - len(foot) - 3000
    for section in sheet.sections:
        text = _section(section)
        if len(said) + len(text) > room:
            cut.append(_prose(section.title, 80))
            continue
        said += f"\n{text}"
    left = f"\n\nLeft out, for a comment of {LARGEST:,} letters: {'; '.join(cut[:20])}." if cut else ""
    if len(cut) > 20:
        left += f" And {len(cut) - 20} parts more."
    return f"{said}{left}\n\n{foot}\n"


def _prose(value: object, most: int = _LETTERS) -> str:
    """A text of a file that stands for itself, whatever is in it."""
    whole = words.safe(value)
    cut = whole if len(whole) <= most else f"{whole[:most]}… ({len(whole):,} letters)"
    return _ACTED_ON.sub(_stood_for, cut)


def _stood_for(found: re.Match[str]) -> str:
    """A sign behind a backslash, or by its number where that is not enough. A forge looks for names and issues in what
    is shown: a joint of no width parts them.
    """
    sign = found.group()
    if sign in "*_[]~":
        return f"\\{sign}"
    return f"&#{ord(sign[0])};{sign[1:]}" + ("&#8203;" if sign in "@#" else "")


def _code(value: object) -> str:
    text = _prose(value)
    return f"<code>{text}</code>" if text else ""


def _fenced(text: str, language: str = "text") -> list[str]:
    """Text as it is, within a fence longer than any in it."""
    shown = words.safe(text, lines=True)
    longest = max((len(run) for run in re.findall(r"`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}{language}", shown, fence]


def _section(section: Section) -> str:
    parts = [text for block in section.blocks if (text := _block(block))]
    body = "\n\n".join(parts)
    return f"\n<details><summary>{_prose(section.title)}</summary>\n\n{body}\n\n</details>" if body else ""


def _block(block: Block) -> str:
    return _DRAW[type(block)](block)


def _facts(block: Facts, most: int = _LETTERS) -> str:
    rows = [f"| {_prose(name)} | {_prose(value, most)} |" for name, value in block.rows]
    return "\n".join(["| | |", "|---|---|", *rows]) if rows else ""


def _table(block: Grid) -> str:
    def row(cells: Sequence[str]) -> str:
        return f"| {' | '.join(map(_code, cells))} |"

    lines = ["---:" if place in block.right else "---" for place in range(len(block.head))]
    left = block.left_out + max(0, len(block.rows) - _ROWS)
    more = [f"\n… and {words.plural(left, 'row')} more; the document has all"] if left else []
    head = f"| {' | '.join(map(_prose, block.head))} |"
    return "\n".join([head, f"|{'|'.join(lines)}|", *map(row, block.rows[:_ROWS]), *more])


def _strip(block: Strip) -> str:
    """Runs of one word: `input_ids to layers.3: SAME`."""
    runs: list[list[Any]] = []
    for mark in block.marks:
        if runs and runs[-1][0] == mark.word:
            runs[-1][2] = mark.label
            runs[-1][3] += 1
        else:
            runs.append([mark.word, mark.label, mark.label, 1])
    lines = [
        f"- {_prose(word)}: {_code(begin)}" + (f" to {_code(end)} ({count})" if count > 1 else "")
        for word, begin, end, count in runs[:_ROWS]
    ]
    more = [f"- … and {len(runs) - _ROWS} runs more"] if len(runs) > _ROWS else []
    more += [f"- … and {block.left_out:,} more"] if block.left_out > 0 else []
    return "\n".join([*lines, *more])


def _bars(block: Bars) -> str:
    most = max((count for _, count in block.rows), default=0.0) or 1.0
    rows = [[name, words.number(count), "█" * round(20 * count / most)] for name, count in block.rows]
    return _table(Grid(["", block.unit, ""], rows, (), frozenset({1})))


def _curve(block: Curve) -> str:
    values = [value for value in block.values if value is not None]
    span = f"{words.number(min(values))} to {words.number(max(values))}" if values else "no finite value"
    steps = f"{_prose(block.steps[0])} to {_prose(block.steps[-1])}"
    return f"- {_code(block.name)}: {_prose(block.note)} (steps {steps}, {span})"


def _tokens(block: Tokens) -> str:
    worst = sorted(block.marks, key=lambda mark: -mark.level)[:10]
    lines = [f"- {_code(mark.text)} {_prose(mark.said)}" for mark in worst if mark.level > 0]
    return "\n".join([f"largest {_prose(block.colour)}:", *lines]) if lines else ""


def _sayings(block: Sayings) -> str:
    more = [f"- … and {len(block.lines) - _ROWS} more"] if len(block.lines) > _ROWS else []
    return "\n".join([*(f"- {_prose(line, 1000)}" for line in block.lines[:_ROWS]), *more])


def _plain(block: Plain) -> str:
    text = block.text if len(block.text) <= _REPORT else f"{block.text[:_REPORT]}\n… {len(block.text):,} letters in all"
    return "\n".join(_fenced(text))


_DRAW: dict[type, Callable[[Any], str]] = {
    Facts: _facts, Grid: _table, Strip: _strip, Bars: _bars, Curve: _curve, Tokens: _tokens, Sayings: _sayings,
    Plain: _plain,
}  # fmt: skip
