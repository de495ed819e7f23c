"""3 Inspect: one tensor: its verdict's sentence, where it differs, statistics of both sides, values around a place."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from rich.text import Text
from textual import events

from tui_debugger import format as fmt
from tui_debugger.actions import pane_title
from tui_debugger.state import FieldNote, State
from tui_debugger.widgets.closer import closer_look, closer_state, strip_room
from tui_debugger.widgets.paint import paint, verdict_token, write_border
from tui_debugger.widgets.sheet import TextSheet
from tui_debugger.widgets.strips import heat, histogram
from tui_debugger.widgets.tables import counterpart_lines, pair_heads, parts_table, token_table, window_table

if TYPE_CHECKING:
    from replay_core.documents.tensor import (
        AxisStrip,
        CounterpartEntry,
        DifferenceStrips,
        TensorDocument,
        TensorSide,
        TokensEntry,
    )

_EMPTY = (
    "Nothing selected. Choose a tensor in 2 Tensors: its statistics and values stand here, and where A and B differ."
)
_NOT_READ = "Not read yet: its statistics and values will stand here, and where A and B differ."
_STATS = (
    ("numel", "elements"), ("nan", "nan"), ("pos_inf", "+inf"), ("neg_inf", "-inf"), ("zeros", "zeros"),
    ("min", "min"), ("max", "max"), ("mean", "mean"), ("std", "std"), ("l2", "l2"),
)  # fmt: skip
_METRICS = (
    ("mismatched", "mismatched"), ("max_abs", "max |d|"), ("max_rel", "max rel"), ("rel_l2", "rel l2"),
    ("one_minus_cosine", "1-cosine"), ("mean_signed", "mean d"), ("gain", "gain"),
)  # fmt: skip


class InspectPane(TextSheet):
    #: Left and right are the strip's, and come from the actions.
    BORDER_TITLE = pane_title("inspect")

    def __init__(self) -> None:
        super().__init__(_EMPTY, id="inspect")
        self._state = State()
        self._shown: Mapping[str, Any] | None = None

    def show(self, state: State) -> None:
        moved = state.inspection.document is not self._shown
        self._state, self._shown = state, state.inspection.document
        other = "i: values" if state.inspection.sheet == "tokens" else "i: tokens"
        write_border(self, subtitle=other if state.inspection.document is not None else "")
        self._draw()
        if moved:
            self.scroll_to(y=self._line_of_token(), animate=False)

    def _line_of_token(self) -> int:
        """How far down the token lies that is looked at, a few of those before it kept in view."""
        document = self._state.inspection.document
        tokens = document["tokens"] if document is not None and document["kind"] == "tensor" else None
        if tokens is None or self._state.inspection.sheet != "tokens" or tokens.get("position") is None:
            return 0
        return max(0, int(tokens["position"] or 0) - tokens.get("first", 0) - 2)

    def on_resize(self, event: events.Resize) -> None:
        super().on_resize(event)
        self._draw()

    def _draw(self) -> None:
        document = self._state.inspection.document
        width = max(24, self.size.width - 3)
        # A narrow screen gives the pane its whole width once it is looked at.
        self._state.inspection.strip_cells = strip_room(width if self.size.width else self.screen.size.width - 7)
        sheet = self._without(width) if document is None else self.sheet(document, width)
        self.put(sheet)

    def _without(self, width: int) -> Text:
        """What stands there before anything was read: of a row that is selected, its name."""
        if (row := self._state.tensors.row) is None:
            return Text(_EMPTY, style=paint(self, "muted"))
        name = Text(f"{fmt.middle(fmt.safe(row.name), width)}\n", style=paint(self, "strong"))
        return name.append(_NOT_READ, paint(self, "muted"))

    @property
    def text(self) -> str:
        """The sheet as plain text, for copying."""
        return self.sheet(self._state.inspection.document, 100).plain if self._state.inspection.document else ""

    def sheet(self, document: TensorDocument | FieldNote, width: int) -> Text:
        text = Text(no_wrap=True, overflow="ellipsis")
        if document["kind"] == "note":
            self._note(text, document["entry"])
            return text
        a, b = document["a"], document["b"]
        names = [fmt.safe(side["canonical"] or side["name"]) for side in (a, b) if side]
        for name in dict.fromkeys(names):
            text.append(f"{fmt.middle(name, width)}\n", paint(self, "strong"))
        tokens = document["tokens"]
        if self._state.inspection.sheet == "tokens":
            self._tokens(text, tokens, width)
            return text
        verdict = document["verdict"] or self._entry(document)
        if self._state.inspection.place_asked:
            self._facts(text, a, b)
            self._values(text, document, width)
        if verdict:
            self._verdict(text, verdict, width)
        elif b:
            text.append("no verdict: a comparison does not pair these two\n", paint(self, "missing"))
        if not self._state.inspection.place_asked:
            self._facts(text, a, b)
        closer = self._state.inspection.closer
        if closer is not None and closer["kind"] == "difference":
            closer_look(self, text, closer, self._state.inspection.strip_at, width)
        else:
            self._difference(text, document["difference"], width)
            if closer is not None:
                closer_state(self, text, closer)
        if not self._state.inspection.place_asked:
            self._values(text, document, width)
        self._stats(text, a, b, width)
        counterpart_lines(self, text, [one for side in (a, b) if side and (one := side.get("counterpart"))])
        return text

    def _values(self, text: Text, document: TensorDocument, width: int) -> None:
        if document["part"]:
            parts_table(self, text, document["part"], document["part_b"], width)
        else:
            row = self._state.tensors.row
            raw = (row.entry.get("index") or {}).get("raw_a") if row is not None else None
            raw = self._state.inspection.here or raw
            window_table(self, text, document["window"], raw, width, _beside(document["a"], document["b"]))

    def _entry(self, document: TensorDocument) -> Mapping[str, Any] | None:
        """The line's own verdict, where the sheet is about that line."""
        row = self._state.tensors.row
        if row is None or self._state.tensors.shows_record:
            return None
        names, sides = row.entry.get("names") or [row.name, row.name], (document["a"], document["b"])
        ends = ((name or row.name, row.entry.get(f"{letter}_key")) for name, letter in zip(names, "ab", strict=True))
        about = [(side["name"], side["key"]) for side in sides if side]
        return row.entry if about == [end for end in ends if end[1] is not None] else None

    def _note(self, text: Text, entry: Mapping[str, Any]) -> None:
        text.append(f"{fmt.safe(entry.get('name'))}\n", paint(self, "strong"))
        if entry.get("problem"):
            text.append("BAD ", paint(self, "missing"))
            text.append(f"{fmt.safe(entry['problem'])}\n")
        elif entry.get("value") is not None:
            text.append(f"{entry.get('dtype')}\n", paint(self, "muted"))
            value = entry["value"]
            lines = value if isinstance(value, list) else [value]
            for number, line in enumerate(lines):
                text.append(f"{number} " if len(lines) > 1 else "", paint(self, "muted"))
                text.append(f"{fmt.safe(fmt.exact(line), lines=True)}\n")
        elif entry.get("reason"):
            text.append(f"{entry.get('verdict')} ", paint(self, verdict_token(str(entry.get("verdict")))))
            text.append(f"{fmt.safe(entry['reason'])}\n")
        text.no_wrap = False

    def _tokens(self, text: Text, tokens: TokensEntry | None, width: int) -> None:
        if tokens is None:
            text.append("No token ids are recorded beside this tensor: nothing to lay out token by token.\n")
            text.no_wrap = False
            return
        token_table(self, text, tokens, width)

    def _verdict(self, text: Text, verdict: Mapping[str, Any], width: int) -> None:
        word = str(verdict.get("verdict", ""))
        text.append(word, paint(self, verdict_token(word)))
        if verdict.get("suspect"):
            text.append(" suspect", paint(self, "missing"))
        reason = fmt.safe(verdict.get("reason") or "")
        for i, line in enumerate(fmt.wrapped(reason, width, len(word) + 2)):
            text.append(f"  {line}" if not i else f"\n{line}")
        text.append("\n")
        row = self._state.tensors.row
        first = self._state.tensors.comparison["first_divergence"] if self._state.tensors.comparison else None
        origin = fmt.origin(first) if first else ""
        if row is not None and row.is_first and not self._state.tensors.shows_record and origin:
            text.append("origin ", paint(self, "muted"))
            text.append("\n".join(fmt.wrapped(fmt.safe(origin), width, 7)) + "\n")
        places = [(fmt.shown_as(verdict), verdict), ("greatest", verdict.get("greatest") or {})]
        for said, element in places if word != "SAME" else ():
            raw = (element.get("index") or {}).get("raw_a")
            if raw is not None and element.get("a") is not None:
                text.append(f"{said} {fmt.element_at(element)} " if raw else "at the scalar ", paint(self, "muted"))
                a, b = fmt.exact_pair(element["a"], element.get("b"))
                text.append(f"a={a} b={b}\n", paint(self, "strong"))
        metrics = {} if word == "SAME" else verdict.get("metrics") or {}
        parts = [(label, fmt.number(metrics[key])) for key, label in _METRICS if metrics.get(key) is not None]
        worst = metrics.get("worst_token") or {}
        if worst:
            parts.append(
                (
                    "worst token",
                    f"s{worst.get('sample')} p{worst.get('position')} rel l2 {fmt.number(worst.get('rel_l2'), 3)}",
                )
            )
        unmasked = (verdict.get("unmasked") or {}) if word != "SAME" else {}
        if unmasked.get("rel_l2") is not None:
            parts.append(("unmasked rel l2", fmt.number(unmasked["rel_l2"], 3)))
        self._pairs(text, parts, width)

    def _pairs(self, text: Text, parts: list[tuple[str, str]], width: int) -> None:
        used = 0
        for label, value in parts:
            size = len(label) + len(value) + 1
            if used and used + size + 3 > width:
                text.append("\n")
                used = 0
            if used:
                text.append("   ")
                used += 3
            text.append(f"{label} ", paint(self, "muted"))
            text.append(value)
            used += size
        if parts:
            text.append("\n")

    def _facts(self, text: Text, a: TensorSide, b: TensorSide | None) -> None:
        text.append("shape ", paint(self, "muted"))
        text.append(f"{fmt.pair([a['shape'], b['shape']], fmt.shape) if b else fmt.shape(a['shape'])}  ")
        text.append("dtype ", paint(self, "muted"))
        text.append(f"{fmt.pair([a['dtype'], b['dtype']]) if b else a['dtype']}  ")
        if a["alignment"]:
            text.append("tokens ", paint(self, "muted"))
            text.append(a["alignment"])
        text.append("\n")

    def _difference(self, text: Text, difference: DifferenceStrips | None, width: int) -> None:
        """A strip per axis: where the pair differs; then how large the differences are."""
        if not difference:
            return
        axes = difference["axes"]
        differs = any(value for axis in axes for value in axis["rel_l2"] if value)
        if not differs:
            return
        text.append("\nwhere (rel l2 per stretch, 1e-8 … 1)\n", paint(self, "muted"))
        for axis in axes:
            text.append(f"{_axis_name(axis['axis'], len(axes), axes):<9}", paint(self, "muted"))
            strip = heat(self, axis["rel_l2"], width - 9 - 8)
            text.append_text(strip)
            text.append(f" {axis['size']:,}\n", paint(self, "muted"))
        bins = difference["histogram"]
        if bins["bins"]:
            text.append(f"{'log2|d|':<9}", paint(self, "muted"))
            text.append_text(histogram(self, bins, width - 9))
            text.append("\n")
            equal = [f"{fmt.number(bins['zeros'])} equal"]
            if bins["nonfinite"]:
                equal.append(f"{fmt.number(bins['nonfinite'])} not finite")
            text.append(
                f"{'':<9}{', '.join(equal)} of {fmt.number(difference['looked_at'])} looked at\n",
                paint(self, "muted"),
            )

    def _stats(self, text: Text, a: TensorSide, b: TensorSide | None, width: int) -> None:
        of_a: Mapping[str, object] = a["stats"] or {}
        of_b: Mapping[str, object] = (b["stats"] if b else None) or {}
        if not of_a and not of_b:
            return
        size = min(16, max(10, (width - 10) // 2))
        heads: tuple[str, ...] = ("a", "b") if b else ()
        if b is None and (beside := _beside(a, b)):
            # A weight and its gradient are two columns, as two sides of a pair are.
            of_b, heads = beside["stats"], pair_heads(beside)
        text.append(
            f"\n{'':<9}" + "".join(f"{head:>{size}}" for head in heads) + "\n" if heads else "\n", paint(self, "muted")
        )
        for key, label in _STATS:
            if key in ("nan", "pos_inf", "neg_inf") and not of_a.get(key) and not of_b.get(key):
                continue
            values = [fmt.number(of_a.get(key))] + ([fmt.number(of_b.get(key))] if heads else [])
            text.append(f"{label:<9}", paint(self, "muted"))
            loud = key in ("nan", "pos_inf", "neg_inf")
            for value in values:
                text.append(f"{value:>{size}}", paint(self, "nan") if loud and value != "0" else "")
            text.append("\n")
        if a["sampled"]:
            text.append(f"sampled: {a['sampled']:,} of {prod(a['shape']):,} elements\n", paint(self, "missing"))


def _beside(a: TensorSide, b: TensorSide | None) -> CounterpartEntry | None:
    """The gradient of a lone parameter, or the parameter of a lone gradient: its values stand beside the tensor's."""
    return None if b else a.get("counterpart")


def _axis_name(axis: int, count: int, axes: list[AxisStrip]) -> str:
    """What an axis usually is: the last of several holds channels, the first samples."""
    if count == 1:
        return "element"
    last = axes[-1]["axis"]
    if axis == last:
        return "channel" if last >= 2 else "token"
    return "token" if axis == last - 1 and last >= 2 else "row" if axis == 0 else f"axis {axis}"
