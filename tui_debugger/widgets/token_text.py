"""A sample's tokens as text: whose turn, and before each token a bar and a colour for how large its number is."""

from __future__ import annotations

from rich.cells import cell_len
from rich.style import Style
from rich.text import Text
from textual.widget import Widget

from replay_core.documents.samples import SampleTokens
from tui_debugger import format as fmt
from tui_debugger.token_colours import STRONGEST, levels
from tui_debugger.widgets.paint import paint

_BARS = "·▂▄▆█"
_TOKENS = ("muted", "", "close", "diff", "first")
#: Tokens of a prompt that are shown at its beginning and its end.
_EDGE = 60
#: Cells of one token: a tokenizer may have a word of a thousand letters.
_LONGEST = 40


def wrapped_lines(text: str, width: int) -> list[str]:
    """The lines of a text, those that are longer than `width` cells broken."""
    return [part for line in text.split("\n") for part in (fmt.wrapped(line, width) or [""])]


class TokenText:
    """The lines of one sample by one number, and the token the cursor is on.

    Args:
        name: the column that colours; None colours nothing. at: the token the cursor is on; else the response's first.
    """

    def __init__(self, widget: Widget, entry: SampleTokens, name: str | None, width: int, at: int | None) -> None:
        self._widget, self.entry, self.name, self._width = widget, entry, name, width
        column = next((one for one in entry["columns"] if one["name"] == name), None)
        self._levels: list[int | None] = [None] * len(entry["ids"])
        self.most = ""
        if column is not None:
            self._levels, self.most = levels(column)
        last = max(0, len(entry["ids"]) - 1)
        self.at = min(entry["begin"] if at is None else at, last)
        self._line_of: dict[int, int] = {}
        self._place_of: dict[int, tuple[int, int]] = {}
        self._room = 1
        self.lines = self._laid()

    def _laid(self) -> list[Text]:
        entry, lines = self.entry, list[Text]()
        if not entry["ids"] or entry["pieces"] is None:
            for said in entry["texts"]:
                lines.append(self._rule(said["role"], ""))
                lines += [Text(line) for line in wrapped_lines(fmt.safe(said["text"], lines=True), self._width)]
        for turn in entry["turns"]:
            counted = "" if turn["counted"] is None else f", {turn['counted']:,} count"
            lines.append(self._rule(turn["role"], f"tokens {turn['begin']:,} to {turn['end'] - 1:,}{counted}"))
            places = range(turn["begin"], turn["end"])
            skipped = range(0)
            if turn["end"] <= entry["begin"] and len(places) > 2 * _EDGE:
                skipped = places[_EDGE:-_EDGE]
            line, used = Text(no_wrap=True), 0
            for place in places:
                if place in skipped:
                    if place == skipped[0]:
                        lines += [
                            *([line] if used else []),
                            Text(f"… {len(skipped):,} tokens of it …", paint(self._widget, "muted")),
                        ]
                        line, used = Text(no_wrap=True), 0
                    continue
                drawn, breaks = self._said(place)
                if used and used + cell_len(drawn) > self._width:
                    lines.append(line)
                    line, used = Text(no_wrap=True), 0
                self._line_of[place] = len(lines)
                self._place_of[place] = (len(line), len(line) + len(drawn))
                line.append(drawn, paint(self._widget, _TOKENS[self._levels[place] or 0]))
                used += cell_len(drawn)
                if breaks:
                    lines.append(line)
                    line, used = Text(no_wrap=True), 0
            lines += [line] if used else []
        if entry["left_out"]:
            lines.append(Text(f"… {entry['left_out']:,} tokens more", paint(self._widget, "muted")))
        return lines

    def _rule(self, role: str, said: str) -> Text:
        line = Text(no_wrap=True)
        line.append(f"── {fmt.end(fmt.safe(role), 32)} ", paint(self._widget, "key"))
        line.append(said, paint(self._widget, "muted"))
        return line

    def _said(self, place: int) -> tuple[str, bool]:
        """A token as it stands in a line, its bar before it; whether the text breaks the line after it."""
        pieces, level = self.entry["pieces"], self._levels[place]
        bar = " " if level is None else _BARS[level]
        if pieces is None:
            return f"{bar}{self.entry['ids'][place]} ", False
        piece = pieces[place]
        return bar + fmt.end(fmt.safe(piece), _LONGEST), piece.endswith("\n")

    def legend(self, said: str) -> Text:
        """What colours and bars stand for."""
        bars = 2 * len(_BARS)
        text = Text(f"{fmt.end(said, max(20, self._width - bars - 2))}: ", paint(self._widget, "muted"), no_wrap=True)
        for bar, token in zip(_BARS, _TOKENS, strict=True):
            text.append(f"{bar} ", paint(self._widget, token))
        return text

    def told(self) -> list[str]:
        """Every number of the token under the cursor."""
        entry = self.entry
        if not entry["ids"]:
            return []
        piece = "" if entry["pieces"] is None else f" “{fmt.end(fmt.safe(entry['pieces'][self.at]), _LONGEST)}”"
        numbers = [f"{one['name']} {fmt.number(one['values'][self.at], 3)}" for one in entry["columns"]]
        said = " · ".join([f"token {self.at:,} id {entry['ids'][self.at]}{piece}", *numbers])
        return fmt.wrapped(said, self._width)

    # ── the cursor ───────────────────────────────────────────────────────────────────────────────

    def go(self, place: int) -> None:
        """To a token that is drawn."""
        drawn = self._line_of
        if drawn:
            self.at = place if place in drawn else min(drawn, key=lambda one: abs(one - place))

    def move(self, by: int) -> None:
        """On to the next token that is drawn, or the one before."""
        drawn = sorted(self._line_of)
        if self.at in self._line_of:
            self.at = drawn[min(max(0, drawn.index(self.at) + by), len(drawn) - 1)]
        else:
            self.go(self.at)

    def to_strong(self, way: int) -> bool:
        """To the next token of the strongest level."""
        strong = [place for place in self._line_of if self._levels[place] == STRONGEST and (place - self.at) * way > 0]
        if strong:
            self.at = min(strong, key=lambda place: abs(place - self.at))
        return bool(strong)

    def seen(self, top: int, room: int | None = None) -> int:
        """The first line to show, from `top` on, that the cursor is among those shown."""
        self._room = room or self._room
        line = self._line_of.get(self.at, 0)
        return line if line < top else max(top, line - self._room + 1)

    def window(self, room: int, top: int) -> tuple[list[Text], int]:
        """`room` lines from `top` on, the cursor marked, and where they really begin."""
        self._room = room
        top = min(top, max(0, len(self.lines) - room))
        shown = self.lines[top : top + room]
        line = self._line_of.get(self.at, -1) - top
        if 0 <= line < len(shown):
            shown[line] = shown[line].copy()
            shown[line].stylize(Style(reverse=True), *self._place_of[self.at])
        return shown, top
