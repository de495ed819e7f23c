"""3 Inspect: one tensor: its verdict's sentence, statistics of both sides, and values where A and B differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Static

from tui_debugger import format as fmt
from tui_debugger.state import State
from tui_debugger.widgets.paint import TOKEN_CLASSES, paint, verdict_token

_EMPTY = (
    "Nothing selected. Choose a tensor in 2 Tensors: its statistics and values stand here, and where A and B differ."
)
_STATS = (
    ("numel", "elements"), ("nan", "nan"), ("pos_inf", "+inf"), ("neg_inf", "-inf"), ("zeros", "zeros"),
    ("min", "min"), ("max", "max"), ("mean", "mean"), ("std", "std"), ("l2", "l2"),
)  # fmt: skip
_METRICS = (
    ("mismatched", "mismatched"), ("max_abs", "max |d|"), ("max_rel", "max rel"), ("rel_l2", "rel l2"),
    ("one_minus_cosine", "1-cosine"), ("mean_signed", "mean d"), ("gain", "gain"),
)  # fmt: skip


class InspectPane(VerticalScroll, can_focus=True):
    BORDER_TITLE = "3 Inspect"
    COMPONENT_CLASSES: ClassVar[set[str]] = set(TOKEN_CLASSES)

    def __init__(self) -> None:
        super().__init__(id="inspect")
        self._state = State()

    def compose(self) -> ComposeResult:
        yield Static(_EMPTY, markup=False, id="inspect-sheet")

    def show(self, state: State) -> None:
        self._state = state
        self._draw()
        self.scroll_home(animate=False)

    def on_resize(self, _event: events.Resize) -> None:
        self._draw()

    def _draw(self) -> None:
        document = self._state.inspected
        width = max(24, self.scrollable_content_region.width)
        self.query_one("#inspect-sheet", Static).update(
            Text(_EMPTY, style=paint(self, "muted")) if document is None else self.sheet(document, width)
        )

    @property
    def text(self) -> str:
        """The sheet as plain text, for copying."""
        return self.sheet(self._state.inspected, 100).plain if self._state.inspected else ""

    def sheet(self, document: Mapping[str, Any], width: int) -> Text:
        text = Text(no_wrap=True, overflow="ellipsis")
        if document.get("kind") == "note":
            self._note(text, document["entry"])
            return text
        a, b = document["a"], document.get("b")
        text.append(fmt.middle(str(a.get("canonical") or a["name"]), width), paint(self, "strong"))
        text.append("\n")
        verdict = document.get("verdict") or self._entry()
        if verdict:
            self._verdict(text, verdict, width)
        self._facts(text, a, b)
        self._stats(text, a.get("stats") or {}, (b or {}).get("stats") if b else None, width)
        self._window(text, document.get("window") or {}, width)
        return text

    def _entry(self) -> Mapping[str, Any] | None:
        row = self._state.row
        return row.entry if row is not None and not self._state.shows_record else None

    def _note(self, text: Text, entry: Mapping[str, Any]) -> None:
        text.append(f"{entry.get('name')}\n", paint(self, "strong"))
        if entry.get("problem"):
            text.append("BAD ", paint(self, "missing"))
            text.append(f"{entry['problem']}\n")
        elif entry.get("value") is not None:
            text.append(f"{entry.get('dtype')}\n", paint(self, "muted"))
            text.append(f"{fmt.exact(entry['value'])}\n")
        text.no_wrap = False

    def _verdict(self, text: Text, verdict: Mapping[str, Any], width: int) -> None:
        word = str(verdict.get("verdict", ""))
        text.append(word, paint(self, verdict_token(word)))
        if verdict.get("suspect"):
            text.append(" suspect", paint(self, "missing"))
        reason = verdict.get("reason")
        if reason:
            text.append(f"  {reason}")
        text.append("\n")
        row = self._state.row
        first = (self._state.comparison or {}).get("first_divergence") or {}
        if row is not None and row.is_first and not self._state.shows_record and first.get("origin"):
            text.append("origin ", paint(self, "muted"))
            text.append(f"{first['origin']}\n")
        raw = (verdict.get("index") or {}).get("raw_a")
        if raw is not None and verdict.get("a") is not None and word != "SAME":
            text.append(f"at {','.join(map(str, raw)) or 'the scalar'} ", paint(self, "muted"))
            text.append(f"a={fmt.exact(verdict['a'])} b={fmt.exact(verdict.get('b'))}\n", paint(self, "strong"))
        metrics = {} if word == "SAME" else verdict.get("metrics") or {}
        parts = [(label, fmt.number(metrics[key])) for key, label in _METRICS if metrics.get(key) is not None]
        worst = metrics.get("worst_token") or {}
        if worst:
            parts.append(
                ("worst token", f"s{worst.get('sample')} p{worst.get('position')} {fmt.number(worst.get('rel_l2'), 3)}")
            )
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

    def _facts(self, text: Text, a: Mapping[str, Any], b: Mapping[str, Any] | None) -> None:
        for label, show in (("shape", fmt.shape), ("dtype", str)):
            values = [a.get(label), b.get(label)] if b else a.get(label)
            text.append(f"{label} ", paint(self, "muted"))
            text.append(f"{fmt.pair(values, show) if b else show(values)}   ")
        if a.get("alignment"):
            text.append("tokens ", paint(self, "muted"))
            text.append(str(a["alignment"]))
        text.append("\n")

    def _stats(self, text: Text, a: Mapping[str, Any], b: Mapping[str, Any] | None, width: int) -> None:
        size = min(16, max(10, (width - 10) // 2))
        heading = f"\n{'':<9}{'a' if b else '':>{size}}{'b' if b else '':>{size}}\n"
        text.append(heading if b else "\n", paint(self, "muted"))
        for key, label in _STATS:
            if key in ("nan", "pos_inf", "neg_inf") and not a.get(key) and not (b or {}).get(key):
                continue
            values = [fmt.number(a.get(key))] + ([fmt.number(b.get(key))] if b else [])
            text.append(f"{label:<9}", paint(self, "muted"))
            loud = key in ("nan", "pos_inf", "neg_inf")
            for value in values:
                text.append(f"{value:>{size}}", paint(self, "nan") if loud and value != "0" else "")
            text.append("\n")

    def _window(self, text: Text, window: Mapping[str, Any], width: int) -> None:
        index = window.get("index") or []
        if not index:
            return
        a, b, d = window.get("a") or [], window.get("b"), window.get("d")
        labels = [",".join(str(part) for part in (place if isinstance(place, list) else [place])) for place in index]
        wide = min(max(len(label) for label in labels) + 1, 16)
        columns = 3 if b is not None else 1
        size = max(8, min(16, (width - wide - 1) // columns))
        heads = ("a", "b", "b - a") if b is not None else ("value",)
        text.append(f"\n{'index':<{wide}}" + "".join(f"{head:>{size}}" for head in heads) + "\n", paint(self, "muted"))
        digits = 6 if size >= 13 else 4
        row = self._state.row
        raw = (row.entry.get("index") or {}).get("raw_a") if row is not None else None
        for i, label in enumerate(labels):
            differs = b is not None and a[i] != b[i]
            here = raw is not None and index[i] == raw
            text.append(f"{label:<{wide}}", paint(self, "first" if here else "muted"))
            text.append(f"{fmt.number(a[i], digits):>{size}}")
            if b is not None:
                text.append(
                    f"{fmt.number(b[i], digits):>{size}}", paint(self, "first" if here else "diff") if differs else ""
                )
                delta = fmt.number(d[i], 3) if d is not None and differs else "="
                text.append(f"{delta:>{size}}", paint(self, "diff" if differs else "muted"))
            text.append("\n")
        text.append("@ shows another place", paint(self, "muted"))
