"""A parity document as text: the cause first, then what counts beside what does not."""

from __future__ import annotations

from typing import Any

from replay_core.jobs import Document
from tui_debugger import format as words
from tui_debugger.reports.columns import columns

#: Rows of the table: name in the document, how it is called, digits.
_MEASURES = (
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


def parity_report(doc: Document) -> str:
    a, b = doc["a"], doc["b"]
    lines = [
        *_answer(doc),
        "",
        f"A  {a['backend']}  {a['engine']}  {a['path']}",
        f"B  {b['backend']}  {b['engine']}  {b['path']}",
    ]
    for batch in doc["batches"]:
        lines += ["", *_batch(batch, doc)]
    lines += ["", "randomness, read back from the built critics", *_randomness(doc["randomness"])]
    if doc["notes"]:
        lines += ["", *(f"note: {note}" for note in doc["notes"])]
    if a["dump"] != b["dump"]:
        lines += ["", f"hint: rldbg {a['dump']} {b['dump']}"]
    lines += [f"log: {side['log']}" for side in (a, b) if side["log"]]
    return "\n".join(lines)


def _answer(doc: Document) -> list[str]:
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


def _batch(batch: dict[str, Any], doc: Document) -> list[str]:
    shape = " x ".join(map(str, batch["shape"]))
    causes = ", ".join(str(one["kind"]) for one in batch["causes"])
    lines = [f"{batch['name']}  values {shape}  {batch['counted']} tokens count  cause: {causes}"]
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


def _columns(batch: dict[str, Any]) -> list[tuple[str, dict[str, Any] | None]]:
    evaluated = batch["eval"]
    found = [("response" if batch["counted"] == "response" else batch["counted"], evaluated["masked"])]
    if batch["counted"] == "response":
        found.append(("valid", evaluated["valid"]))
    found.append(("unmasked", evaluated["unmasked"]))
    if batch["train"] is not None:
        found.append(("train mode", batch["train"]["masked"]))
    return found


def _table(batch: dict[str, Any], threshold: float) -> list[str]:
    shown = [(name, region) for name, region in _columns(batch) if region is not None]
    rows = [["measure", *(name for name, _ in shown)], ["tokens", *(str(region["n"]) for _, region in shown)]]
    for key, label, digits in _MEASURES:
        label = f"{label} (< {threshold:g})" if key == "nearly_identical" else label
        rows.append([label, *(_number(region[key], digits) for _, region in shown)])
    rows += [[f"range {side.upper()}", *(_range(region[f"range_{side}"]) for _, region in shown)] for side in "ab"]
    return _indented(columns(rows))


def _steps(batch: dict[str, Any]) -> list[str]:
    names = (("drift_a", "A moved", 3), ("drift_b", "B moved", 3), ("loss_a", "loss A", 5), ("loss_b", "loss B", 5))
    measures = (("pearson", "Pearson", 6), ("max_abs", "max |d|", 3), ("mean_signed", "mean d", 3))
    rows = [["step", *(label for _, label, _ in (*measures, *names))]]
    for step in batch["steps"]:
        figures = [_number(step["masked"][key], digits) for key, _, digits in measures]
        rows.append([str(step["step"]), *figures, *(_number(step[key], digits) for key, _, digits in names)])
    return columns(rows)


def _worst(worst: list[dict[str, Any]]) -> list[str]:
    rows = [["row", "position", "A", "B", "d", "token", "text"]]
    for one in worst:
        text = "" if one["text"] is None else words.safe(repr(one["text"]))
        token = "" if one["token"] is None else str(one["token"])
        figures = [_number(one[key], digits) for key, digits in (("a", 5), ("b", 5), ("d", 3))]
        rows.append([str(one["row"]), str(one["position"]), *figures, token, text])
    return columns(rows)


def _bands(bands: list[dict[str, Any]]) -> list[str]:
    rows = [["data", "measure", "band", "counted", "all", "note"]]
    rows += [
        [
            one["data"], one["measure"].replace("_", " "), f"{one['low']:g}-{one['high']:g}", _number(one["masked"], 4),
            _number(one["unmasked"], 4), one["note"],
        ]
        for one in bands
    ]  # fmt: skip
    return columns(rows)


def _randomness(rows: list[dict[str, Any]]) -> list[str]:
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
