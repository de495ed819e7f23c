"""The sheets of the parity screen: measures, drift per step, expectation bands, what each critic really used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text
from textual.widget import Widget

from tui_debugger import format as fmt
from tui_debugger.parity_view import MEASURES, ParityView, regions
from tui_debugger.widgets.paint import paint

if TYPE_CHECKING:
    from replay_core.documents.parity import BandEntry, ParityDocument

_LABEL = 24
#: A correlation from here on is drawn as agreement.
_ALIKE = 0.9999


def measures(widget: Widget, view: ParityView, width: int) -> Text:
    """What counts beside what does not; eval and train side by side where both fit."""
    text = Text(no_wrap=True)
    batch = view.batch
    if batch is None:
        return text
    modes = ["eval", "train"] if regions(batch, "train") else ["eval"]
    count = sum(len(regions(batch, mode)) for mode in modes)
    if _LABEL + 11 * count > width:
        modes = [view.mode if view.mode in modes else "eval"]
    shown = [(mode, name, region) for mode in modes for name, region in regions(batch, mode)]
    size = max(9, min(13, (width - _LABEL) // max(1, len(shown))))
    muted, strong = paint(widget, "muted"), paint(widget, "strong")
    shape = fmt.shape(batch["shape"])
    text.append(f"{f'values {shape}':<{_LABEL}}", muted)
    for mode, name, _ in shown:
        text.append(f"{name if len(modes) == 1 else f'{mode[:1]}:{name}':>{size}}", strong)
    text.append(f"\n{'tokens':<{_LABEL}}", muted)
    for _, _, region in shown:
        text.append(f"{fmt.number(region['n']):>{size}}")
    for key, label, digits in MEASURES:
        label = (
            f"{label} <{view.document['threshold'] if view.document else 0:g}" if key == "nearly_identical" else label
        )
        text.append(f"\n{fmt.middle(label, _LABEL - 1):<{_LABEL}}", muted)
        for _, _, region in shown:
            value = region[key]
            text.append(f"{_figure(value, digits):>{size}}", _loudness(widget, key, value))
    for side in "ab":
        text.append(f"\n{f'range {side.upper()}':<{_LABEL}}", muted)
        for _, _, region in shown:
            pair = region[f"range_{side}"]
            said = "-" if pair is None else f"{fmt.number(pair[0], 2)}..{fmt.number(pair[1], 2)}"
            text.append(f"{fmt.middle(said, size - 1):>{size}}")
    for mode, name, region in shown:
        if region["undefined"]:
            text.append(f"\n{mode} {name}: no correlation, {fmt.safe(region['undefined'])}", paint(widget, "missing"))
    return text


def _loudness(widget: Widget, key: str, value: Any) -> Any:
    if key not in ("pearson", "spearman") or not isinstance(value, (int, float)):
        return ""
    return paint(widget, "same" if value >= _ALIKE else "missing" if value < 0.95 else "close")


def _figure(value: Any, digits: int) -> str:
    return "-" if value is None else fmt.number(value, digits)


_DRIFT = (
    ("pearson", "Pearson", 6, 10), ("max_abs", "max |d|", 3, 10), ("mean_signed", "mean d", 3, 11),
    ("drift_a", "A moved", 3, 10), ("drift_b", "B moved", 3, 10),
    ("loss_a", "loss A", 5, 10), ("loss_b", "loss B", 5, 10),
)  # fmt: skip


def drift(widget: Widget, batch: Mapping[str, Any], width: int) -> Text:
    """Per training step: how far the two are apart, and how far each moved, over the tokens that count."""
    text, muted = Text(no_wrap=True), paint(widget, "muted")
    if not batch["steps"]:
        return text.append("No training step: rldbg parity CONFIG_A CONFIG_B --steps 5 trains both.", muted)
    columns, room = [], width - 5
    for column in _DRIFT:
        if column[3] <= room:
            columns.append(column)
            room -= column[3]
    text.append("step " + "".join(f"{label:>{size}}" for _, label, _, size in columns), muted)
    steps = [{"step": 0, "masked": batch["eval"]["masked"]}, *batch["steps"]]
    for step in steps:
        text.append(f"\n{step['step']:>4} ", muted)
        for key, _, digits, size in columns:
            value = step["masked"].get(key, step.get(key))
            text.append(f"{_figure(value, digits):>{size}}", _loudness(widget, key, value))
    return text


def bands(widget: Widget, rows: Sequence[BandEntry], width: int) -> Text:
    """The published bands beside what is seen; the note where measurement contradicts them."""
    text, muted = Text(), paint(widget, "muted")
    if not rows:
        return text.append("No published band is about this data.", muted)
    text.append(f"{'':<19}{'expected':>10}{'seen':>8}{'with pad':>9}", muted)
    data: str | None = None
    for number, row in enumerate(rows):
        seen = row["masked"]
        inside = isinstance(seen, (int, float)) and float(row["low"]) <= seen <= float(row["high"])
        if row["data"] != data:
            data = row["data"]
            text.append(f"\n{data}", paint(widget, "strong"))
        text.append(f"\n  {str(row['measure']).replace('_', ' '):<17}")
        band = f"{row['low']:g}-{row['high']:g}"
        text.append(f"{band:>10}", muted)
        text.append(f"{_figure(seen, 4):>8}", paint(widget, "close" if inside else "strong"))
        text.append(f"{_figure(row['unmasked'], 4):>9}", paint(widget, "padding"))
        text.append("  inside" if inside else "  CONTRADICTED", paint(widget, "muted" if inside else "missing"))
        following = rows[number + 1]["note"] if number + 1 < len(rows) else None
        if row["note"] != following:
            for line in fmt.wrapped(fmt.safe(row["note"]), width - 4):
                text.append(f"\n    {line}", muted)
    return text


def controls(widget: Widget, document: ParityDocument, width: int) -> Text:
    """What ran each critic, what was read back from the built models, and what was assumed."""
    text, muted, strong = Text(), paint(widget, "muted"), paint(widget, "strong")
    for side, one in (("A", document["a"]), ("B", document["b"])):
        text.append(f"{side} ", paint(widget, "key"))
        text.append(f"{fmt.safe(one['backend'])} ", strong)
        ran = fmt.safe(f"{one['engine']} · {one['path']}")
        took = f" · {fmt.seconds(one['seconds'])}" if one["seconds"] is not None else ""
        text.append(f"{fmt.middle(ran, max(12, width - 24))}{took}\n", muted)
    rows = document["randomness"]
    size = max(8, (width - 28) // 2)
    text.append(f"{'read back':<21}{'A':<{size}}{'B':<{size}}equal\n", muted)
    for row in rows:
        word, token = {True: ("yes", "muted"), False: ("NO", "missing"), None: ("?", "muted")}[row["equal"]]
        text.append(f"{fmt.middle(str(row['component']), 20):<21}")
        for value in (row["a"], row["b"]):
            text.append(f"{fmt.middle(_text(value), size - 1):<{size}}")
        text.append(f"{word}\n", paint(widget, token))
    for note in document["notes"]:
        for line in fmt.wrapped(f"note: {fmt.safe(note)}", width):
            text.append(f"{line}\n", muted)
    return text


def _text(value: Any) -> str:
    if value is None:
        return "not known"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else fmt.safe(value)
