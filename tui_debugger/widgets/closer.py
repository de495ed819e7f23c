"""How a pair's differences are spread, as text: a strip to walk along, quantiles, powers of two, ULP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text
from textual.widget import Widget

from tui_debugger import format as fmt
from tui_debugger.state import NoDifference
from tui_debugger.widgets.paint import paint
from tui_debugger.widgets.strips import heat, histogram

if TYPE_CHECKING:
    from replay_core.documents.difference import DifferenceDocument, StripCell, UlpEntry

_LABEL = 9


def strip_room(width: int) -> int:
    """Stretches a strip has room for."""
    return max(8, width - _LABEL - 8)


def closer_state(widget: Widget, text: Text, found: NoDifference) -> None:
    """What is said while there is no closer look yet, or where there cannot be one."""
    said = f"no closer look: {fmt.safe(found['message'])}"
    if found["kind"] == "reading":
        said = "looking closer: every element is read; the keys go on"
    text.append(f"\n{said}\n", paint(widget, "muted"))


def closer_look(widget: Widget, text: Text, document: DifferenceDocument, at: int | None, width: int) -> None:
    """The difference document. `at` is the strip's cell under the cursor."""
    muted = paint(widget, "muted")
    mismatched, compared = document["mismatched"], document["compared"]
    strip = document["strip"]
    unit = "token" if strip and strip[0]["token"] else document["axis"]
    how = "← → along it, enter goes there, h: the other axis" if width > 70 else "← → enter h"
    text.append(f"\nwhere: rel l2 per {unit} · {how}\n", muted)
    text.append(f"{unit:<{_LABEL}}", muted)
    _strip(widget, text, strip, at, strip_room(width))
    end = strip[-1]["end"] if strip else 0
    text.append(f" {end:,}\n", muted)
    if at is not None and at < len(strip):
        _cell(widget, text, strip[at], unit)
    share = 100 * mismatched / compared if compared else 0.0
    text.append(f"{'differ':<{_LABEL}}", muted)
    text.append(f"{mismatched:,} of {compared:,} elements ({share:.3g} %)", paint(widget, "strong"))
    pearson = document["pearson"]
    text.append(f" · Pearson {'not defined: a side is constant' if pearson is None else fmt.number(pearson, 6)}\n")
    text.append(f"{'|d| up to':<{_LABEL}}", muted)
    for one in document["quantiles"]:
        text.append(f" {100 * one['share']:g}% ", muted)
        text.append(fmt.number(one["abs"], 3))
    text.append(" max ", muted)
    text.append(f"{fmt.number(document['max_abs'], 3)}\n")
    found = document["log2_abs"]
    if found["bins"]:
        text.append(f"{'log2|d|':<{_LABEL}}", muted)
        text.append_text(histogram(widget, found, width - _LABEL))
        text.append("\n")
    if found["nonfinite"]:
        text.append(f"{'':<{_LABEL}}{found['nonfinite']:,} not finite\n", paint(widget, "nan"))
    if document["ulp"]:
        _ulp(widget, text, document["ulp"], width)


def _strip(widget: Widget, text: Text, strip: Sequence[StripCell], at: int | None, room: int) -> None:
    drawn = heat(widget, [cell["rel_l2"] for cell in strip], room)
    if at is not None and strip:
        place = at if len(strip) <= room else at * room // len(strip)
        drawn.stylize(paint(widget, "strong") + _reverse(), place, place + 1)
    text.append_text(drawn)


def _reverse() -> Any:
    from rich.style import Style

    return Style(reverse=True)


def _cell(widget: Widget, text: Text, cell: StripCell, unit: str) -> None:
    """The stretch under the cursor: where in it |d| is greatest."""
    where = cell["at"]["token"]
    alone = cell["end"] - cell["start"] == 1
    span = f"{unit} {cell['start']:,}" if alone else f"{cell['start']:,} to {cell['end'] - 1:,}"
    said = f" · sample {where['sample']} position {where['position']}" if where else ""
    text.append(f"{'':<{_LABEL}}› ", paint(widget, "key"))
    text.append(f"{span}{said}", paint(widget, "strong"))
    text.append(f" · rel l2 {fmt.number(cell['rel_l2'], 3)} · max |d| {fmt.number(cell['max_abs'], 3)}\n")


def _ulp(widget: Widget, text: Text, ulp: UlpEntry, width: int) -> None:
    """How many representable numbers lie between the two: the share of each bin that holds any."""
    muted = paint(widget, "muted")
    total = sum(one["count"] for one in ulp["bins"]) or 1
    text.append(f"{'ULP ' + fmt.short_dtype(ulp['dtype']):<{_LABEL}}", muted)
    used = _LABEL
    for one in ulp["bins"]:
        if not one["count"]:
            continue
        end = "beyond" if one["up_to"] is None else "0" if not one["up_to"] else f"<={one['up_to']}"
        share = f"{100 * one['count'] / total:.3g}%"
        if used + len(end) + len(share) + 3 > width:
            text.append(f"\n{'':<{_LABEL}}")
            used = _LABEL
        text.append(f" {end} ", muted)
        text.append(share, paint(widget, "key"))
        text.append(" ")
        used += len(end) + len(share) + 3
    text.append(f"\n{'':<{_LABEL}} max {fmt.number(ulp['max'])} representable numbers apart\n", muted)
