"""Values as columns of text: a window of a pair, a slice of any rank, a sample token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text
from textual.widget import Widget

from tui_debugger import format as fmt
from tui_debugger.widgets.paint import paint

if TYPE_CHECKING:
    from replay_core.documents.tensor import CounterpartEntry, SliceEntry, TokenColumn, TokensEntry, ValuesWindow

#: Rows of a slice drawn; what is left out is counted.
_LINES = 200
_TOKEN_LINES = 512
#: Integers that a short number would round.
_LONG = 10**9
#: What ends a line of the other side's values in a slice.
_OTHER = "  b"


def window_table(
    widget: Widget,
    text: Text,
    window: ValuesWindow,
    here: Any,
    width: int,
    beside: CounterpartEntry | None = None,
) -> None:
    """Index, a, b and b - a; `here` is where they part; `beside` is a lone weight's gradient, or its weight."""
    index = window["index"]
    if not index:
        return
    a, b, d = window["a"] or [], window["b"], window["d"]
    labels = [",".join(map(str, place)) for place in index]
    wide = min(max(len(label) for label in labels) + 1, 16)
    columns = 3 if b is not None else 2 if beside else 1
    ids = any(type(value) is int and abs(value) >= _LONG for value in [*a, *(b or [])])
    size = max(8, min(21 if ids else 16, (width - wide - 1) // columns))
    heads = ("a", "b", "b - a") if b is not None else pair_heads(beside) if beside else ("value",)
    muted = paint(widget, "muted")
    text.append(f"\n{'index':<{wide}}" + "".join(f"{head:>{size}}" for head in heads) + "\n", muted)
    digits = 6 if size >= 13 else 4
    for i, label in enumerate(labels):
        differs = b is not None and i < len(b) and a[i] != b[i]
        is_here = here is not None and index[i] == here
        text.append(f"{label:<{wide}}", paint(widget, "first" if is_here else "muted"))
        text.append(f"{_value(a[i], digits, size):>{size}}")
        if b is not None and i < len(b):
            text.append(
                f"{_value(b[i], digits, size):>{size}}",
                paint(widget, "first" if is_here else "diff") if differs else "",
            )
            delta = fmt.number(d[i], 3) if d is not None and differs else "="
            text.append(f"{delta:>{size}}", paint(widget, "diff" if differs else "muted"))
        elif beside and i < len(beside["values"]):
            text.append(f"{fmt.number(beside['values'][i], digits):>{size}}")
        text.append("\n")
    text.append("@ shows another place, or a slice\n", muted)


def _value(value: object, digits: int, size: int) -> str:
    """A number; of an integer every digit where they fit, since an id that is rounded is another."""
    if type(value) is int and abs(value) >= _LONG and len(str(value)) < size:
        return str(value)
    return fmt.number(value, digits)


def pair_heads(beside: CounterpartEntry) -> tuple[str, str]:
    """The heads of a weight's and its gradient's columns, the one that is looked at first."""
    return ("parameter", "gradient") if beside["kind"] == "gradient" else ("gradient", "parameter")


def counterpart_lines(widget: Widget, text: Text, found: Sequence[CounterpartEntry]) -> None:
    """Which gradient or parameter stands beside, and how large the gradient is against the parameter: of a, of b."""
    if not found:
        return
    word = "gradient" if found[0]["kind"] == "gradient" else "parameter"
    text.append(f"\n{word} ", paint(widget, "muted"))
    text.append(f"{fmt.safe(found[0]['name'])} ", paint(widget, "strong"))
    text.append(f"· {fmt.scope(found[0]['key'])}\n", paint(widget, "muted"))
    ratios = [fmt.number(one["ratio"], 3) for one in found]
    text.append("|gradient| / |parameter| ", paint(widget, "muted"))
    text.append(" → ".join(ratios) + "\n")


def parts_table(widget: Widget, text: Text, part: SliceEntry, other: SliceEntry | None, width: int) -> None:
    """A slice: a line per row of its last axis, the other side's differing values below in colour."""
    muted = paint(widget, "muted")
    shape, values = part["shape"] or [1], part["values"]
    per_line = shape[-1]
    second = other["values"] if other else []
    # The other side's line ends in its letter.
    fits = max(1, (width - (len(_OTHER) if second else 0)) // 10)
    text.append(f"\nfrom {part['start']} · shape {fmt.shape(shape)}\n", muted)
    lines = 0
    for start in range(0, len(values), max(1, per_line)):
        row = values[start : start + per_line]
        theirs = second[start : start + per_line]
        for begin in range(0, len(row), fits):
            if lines >= _LINES:
                text.append(f"{len(values) - start - begin:,} more values: a smaller slice shows them\n", muted)
                return
            piece, piece_b = row[begin : begin + fits], theirs[begin : begin + fits]
            text.append("".join(f"{fmt.number(value):>10}" for value in piece) + "\n")
            lines += 1
            if piece_b and piece_b != piece:
                for value_a, value_b in zip(piece, piece_b, strict=False):
                    same = value_a == value_b
                    text.append(f"{'=' if same else fmt.number(value_b):>10}", muted if same else paint(widget, "diff"))
                text.append(f"{_OTHER}\n", muted)
                lines += 1
    if part["left_out"]:
        text.append(f"{part['left_out']:,} more values lie in the slice\n", muted)


def token_table(widget: Widget, text: Text, tokens: TokensEntry, width: int) -> None:
    """A sample token by token: position, id, its text, and what is recorded of it, rollout beside trainer."""
    muted = paint(widget, "muted")
    pieces = tokens["pieces"]
    columns = tokens["columns"]
    text.append(f"sample {tokens['sample']} of {tokens['samples']}", paint(widget, "strong"))
    text.append("" if pieces else " · no tokenizer.json beside the dump: ids only", muted)
    text.append("\n")
    piece_size = 12 if pieces else 0
    fits = max(0, (width - 14 - piece_size) // 11)
    shown, hidden = columns[:fits], columns[fits:]
    heads = "".join(f" {_head(column):>10}" for column in shown)
    text.append(f"{'pos':>5} {'id':>7} " + (f"{'text':<{piece_size}}" if pieces else "") + f"{heads}\n", muted)
    ids = tokens["ids"]
    first = tokens.get("first", 0)
    for position, token in enumerate(ids[:_TOKEN_LINES]):
        is_here = first + position == tokens.get("position")
        text.append(f"{first + position:>5} ", paint(widget, "first") if is_here else muted)
        text.append(f"{token:>7} ")
        if pieces:
            text.append(f"{fmt.middle(fmt.safe(pieces[position]), piece_size - 1):<{piece_size}}", paint(widget, "key"))
        for column in shown:
            value = column["values"][position] if position < len(column["values"]) else None
            text.append(f" {'' if value in (None, 'nan') else fmt.number(value, 4):>10}")
        text.append("\n")
    left_out = tokens["left_out"] + max(0, len(ids) - _TOKEN_LINES)
    if left_out:
        text.append(f"{left_out:,} more tokens\n", muted)
    if hidden:
        names = ", ".join(_head(column, 40) for column in hidden)
        text.append(f"too narrow for: {names} (z: the whole screen)\n", muted)


def _head(column: TokenColumn, size: int = 10) -> str:
    name = fmt.safe(column["name"]).replace("logprobs", "logp").replace("_mask", "_m")
    return fmt.middle(f"{name}·{column['side']}" if column["side"] == "b" else name, size)
