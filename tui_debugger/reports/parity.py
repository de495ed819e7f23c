"""A parity document as text: the cause first, then what counts beside what does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from tui_debugger import format as words
from tui_debugger.reports.columns import columns

if TYPE_CHECKING:
    from replay_core.documents.parity import (
        BandEntry,
        BatchEntry,
        MeasuresEntry,
        ParityDocument,
        RandomSource,
        WorstValue,
    )
    from replay_core.documents.parts import Number

Figure = Literal[
    "pearson", "spearman", "nearly_identical", "max_abs", "mean_abs", "max_rel", "mean_rel", "slope", "offset",
    "residual_rms", "std_ratio",
]  # fmt: skip

#: Rows of the table: name in the document, how it is called, digits.
_MEASURES: tuple[tuple[Figure, str, int], ...] = (
    ("pearson", "Pearson", 6),
    ("spearman", "Spearman", 6),
    ("nearly_identical", "nearly identical %", 4),
    ("max_abs", "max |d|", 4),
    ("mean_abs", "mean |d|", 4),
    ("max_rel", "max |d| / |a|", 4),
    ("mean_rel", "mean |d| / |a|", 4),
    ("slope", "slope", 6),
    ("offset", "offset", 4),
    ("residual_rms", "left by the line", 4),
    ("std_ratio", "std B / std A", 5),
)
_WORST = 5


def parity_report(doc: ParityDocument) -> str:
    a, b = doc["a"], doc["b"]
    lines = [
        *answer_lines(doc),
        "",
        f"A  {a['backend']}  {a['engine']}  {a['path']}",
        f"B  {b['backend']}  {b['engine']}  {b['path']}",
    ]
    for batch in doc["batches"]:
        lines += ["", *batch_lines(batch, doc)]
    lines += ["", "randomness, read back from the built critics", *_randomness(doc["randomness"])]
    if doc["notes"]:
        lines += ["", *(f"note: {note}" for note in doc["notes"])]
    if a["dump"] != b["dump"]:
        lines += ["", f"hint: rldbg {a['dump']} {b['dump']}"]
    lines += [f"log: {side['log']}" for side in (a, b) if side["log"]]
    return "\n".join(lines)


def answer_lines(doc: ParityDocument) -> list[str]:
    cause = doc["cause"] or "not finite"
    word = "AGREES" if doc["agrees"] else "DISAGREES"
    lines = [f"{word}  cause: {cause}  (batch {doc['about']})", f"  {doc['why']}"]
    lines += [f"  also {one['kind']}: {one['why']}" for one in doc["also"]]
    first = doc["first_divergence"]
    if first is not None:
        origin = f", origin {first['origin']}" if first["origin"] else ""
        lines.append(f"  first diverging module tensor: {first['name']}{origin}: {first['why']}")
    elif doc["comparison"] is not None:
        modules = doc["comparison"]["module_tensors"]
        none = "no module tensor was recorded: where they part first cannot be said"
        found = f"{modules} module tensors compared, none diverges where tokens count"
        lines.append(f"  {found if modules else none}")
    return lines


def causes_of(batch: BatchEntry) -> str:
    """The causes of a batch in words; what has none has values that are not finite."""
    return ", ".join(one["kind"] or "not finite" for one in batch["causes"])


def batch_lines(batch: BatchEntry, doc: ParityDocument) -> list[str]:
    shape = " x ".join(map(str, batch["shape"]))
    lines = [f"{batch['name']}  values {shape}  {batch['counted']} tokens count  cause: {causes_of(batch)}"]
    lines += _table(batch, doc["threshold"])
    for name, region in _columns(batch):
        if region is not None and region["undefined"]:
            lines.append(f"  {name}: no correlation, {region['undefined']}")
    if batch["steps"]:
        lines += ["  drift per training step, over the tokens that count", *_indented(_steps(batch))]
    if batch["name"] == doc["about"] and batch["worst"]:
        lines += ["  worst tokens", *_indented(_worst(batch["worst"][:_WORST]))]
    if batch["expectations"]:
        lines += ["  against the published bands", *_indented(_bands(batch["expectations"]))]
    return lines


def _columns(batch: BatchEntry) -> list[tuple[str, MeasuresEntry | None]]:
    evaluated = batch["eval"]
    found: list[tuple[str, MeasuresEntry | None]] = [(batch["counted"], evaluated["masked"])]
    if batch["counted"] == "response":
        found.append(("valid", evaluated["valid"]))
    found.append(("unmasked", evaluated["unmasked"]))
    if batch["train"] is not None:
        found.append(("train mode", batch["train"]["masked"]))
    return found


def _table(batch: BatchEntry, threshold: Number) -> list[str]:
    shown = [(name, region) for name, region in _columns(batch) if region is not None]
    rows = [["measure", *(name for name, _ in shown)], ["tokens", *(str(region["n"]) for _, region in shown)]]
    for key, label, digits in _MEASURES:
        label = f"{label} (< {threshold:g})" if key == "nearly_identical" else label
        rows.append([label, *(_number(region[key], digits) for _, region in shown)])
    rows.append(["range A", *(_range(region["range_a"]) for _, region in shown)])
    rows.append(["range B", *(_range(region["range_b"]) for _, region in shown)])
    return _indented(columns(rows))


def _steps(batch: BatchEntry) -> list[str]:
    rows = [["step", "Pearson", "max |d|", "mean d", "A moved", "B moved", "loss A", "loss B"]]
    for step in batch["steps"]:
        counted = step["masked"]
        figures = (
            (counted["pearson"], 6), (counted["max_abs"], 3), (counted["mean_signed"], 3), (step["drift_a"], 3),
            (step["drift_b"], 3), (step["loss_a"], 5), (step["loss_b"], 5),
        )  # fmt: skip
        rows.append([str(step["step"]), *(_number(figure, digits) for figure, digits in figures)])
    return columns(rows)


def _worst(worst: list[WorstValue]) -> list[str]:
    rows = [["row", "position", "A", "B", "d", "token", "text"]]
    for one in worst:
        text = "" if one["text"] is None else words.safe(repr(one["text"]))
        token = "" if one["token"] is None else str(one["token"])
        figures = [_number(one["a"], 5), _number(one["b"], 5), _number(one["d"], 3)]
        rows.append([str(one["row"]), str(one["position"]), *figures, token, text])
    return columns(rows)


def _bands(bands: list[BandEntry]) -> list[str]:
    rows = [["data", "measure", "band", "counted", "all", "note"]]
    rows += [
        [
            one["data"], one["measure"].replace("_", " "), f"{one['low']:g}-{one['high']:g}", _number(one["masked"], 4),
            _number(one["unmasked"], 4), one["note"],
        ]
        for one in bands
    ]  # fmt: skip
    return columns(rows)


def _randomness(rows: list[RandomSource]) -> list[str]:
    table = [["source", "variable", "A", "B", "equal"]]
    for one in rows:
        equal = {True: "yes", False: "NO", None: "not known"}[one["equal"]]
        table.append([one["component"], one["environment_variable"] or "-", _text(one["a"]), _text(one["b"]), equal])
    return _indented(columns(table))


def _text(value: Any) -> str:
    if value is None:
        return "not known"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)[:48]


def _number(value: Any, digits: int) -> str:
    return "-" if value is None else words.number(value, digits)


def _range(pair: list[Any] | None) -> str:
    return "-" if pair is None else f"{_number(pair[0], 3)} .. {_number(pair[1], 3)}"


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
