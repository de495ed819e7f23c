"""A replay document as text: the answer, then each cell against the reference, sample by sample."""

from __future__ import annotations

from typing import Any

from replay_core.jobs import Document
from replay_core.replay.flags import telling
from tui_debugger import format as words
from tui_debugger.cells import dump_beside, recording_parts, sentence
from tui_debugger.reports.columns import columns
from tui_debugger.reports.comparison import divergence

#: Samples printed of each cell; what is left out is counted.
SEGMENTS = 16


def replay_report(doc: Document) -> str:
    plan = doc["plan"]
    several = doc.get("matrix") is not None
    lines = [*_answer(doc), "", f"replay of {plan['dump']}  {words.scope(plan)}  model {plan['model']}", ""]
    lines += matrix_table(doc) if several else _cells(doc)
    if doc.get("ranking"):
        lines += ["", *_ranking(doc["ranking"])]
    if doc.get("recording") and doc["recording"]["nearest_cell"] is not None:
        lines += ["", *_recording(doc)]
    for number, cell in enumerate(doc["cells"]):
        if cell["segments"] and (not several or cell["agreement"]["agrees"] is False):
            lines += ["", f"cell {number} against each row alone, sample by sample", *_segments(cell["segments"])]
        if cell["error"]:
            lines += ["", f"cell {number}: {cell['error']['message']}"]
            parts = ("file", "expected", "found", "hint")
            lines += [f"  {name}: {cell['error'][name]}" for name in parts if cell["error"].get(name)]
            lines += [f"  log: {cell['log']}"] if cell.get("log") else []
        if by_digest := sentence(cell):
            lines += ["", f"cell {number}: {by_digest}"]
        if cell.get("loss"):
            lines += ["", *_loss(number, cell)]
    if doc.get("determinism"):
        lines += ["", _determinism(doc["determinism"])]
    if doc["notes"]:
        lines += ["", *(f"note: {note}" for note in doc["notes"])]
    dumps = [(number, cell["dump"]) for number, cell in enumerate(doc["cells"]) if cell["dump"]]
    if len(dumps) > 1:
        lines += ["", *(f"cell {number} dump  {dump}" for number, dump in dumps)]
        shown = next(
            (number for number, _ in dumps if doc["cells"][number]["agreement"]["agrees"] is False), dumps[-1][0]
        )
        baseline, cell = doc["cells"][doc["baseline"]], doc["cells"][shown]
        lines += ["", f"hint: rldbg {dump_beside(baseline, cell) or dumps[0][1]} {cell['dump']}"]
    return "\n".join(lines)


def _cells(doc: Document) -> list[str]:
    rows = [["cell", "setting", "outcome", "agrees", "time", "peak", "attention that ran"]]
    rows += [_row(number, cell, doc["baseline"]) for number, cell in enumerate(doc["cells"])]
    return columns(rows)


def _answer(doc: Document) -> list[str]:
    """What the eye should meet first: who disagrees and where, else what was held to what."""
    lines = []
    others = [(number, cell) for number, cell in enumerate(doc["cells"]) if number != doc["baseline"]]
    ran = [(number, cell) for number, cell in others if cell.get("part", "cell") in ("cell", "control")]
    for number, cell in ran:
        name = words.flags(telling(cell["flags"]))
        if cell["agreement"]["agrees"] is False:
            lines.append(f"DISAGREES  cell {number} ({name}) with each row alone{_pattern(cell)}")
            if cell.get("cause"):
                lines.append(f"  {cell['cause']['kind']}: {cell['cause']['sentence']}")
            if cell["agreement"]["first_divergence"]:
                lines.append(divergence(cell["agreement"]["first_divergence"]))
        elif cell["agreement"]["agrees"] is None:
            lines.append(f"{cell['outcome'].upper()}  cell {number} ({name})")
    lines += _smallest(doc)
    if said := recording_parts(doc):
        lines.append(f"RECORDING  {said}")
    agreeing = [cell for _, cell in ran if cell["agreement"]["agrees"]]
    if agreeing and len(agreeing) == len(ran):
        segments = [row for cell in agreeing for row in cell["segments"] or []]
        worst = max((float(row["worst_token"]["rel_l2"]) for row in segments if row["worst_token"]), default=0.0)
        logp = max(((row["valid"] or {}).get("logp_max") or 0.0 for row in segments), default=0.0)
        plural = "s" if len(agreeing) > 1 else ""
        lines.append(
            f"AGREES  {len(agreeing)} cell{plural} with each row alone, in every sample: "
            f"worst token {words.number(worst, 3)}, logprobs within {words.number(logp, 3)} nats"
        )
    return lines


def _smallest(doc: Document) -> list[str]:
    """The fewest toggles that break agreement, or that do not run."""
    matrix = doc.get("matrix") or {}
    return [
        f"  smallest set that {what}: {words.flags(toggles) or 'none, the baseline settings already do'}"
        for name, what in (("breaking", "breaks agreement"), ("failing", "does not run"))
        for toggles in matrix.get(name, [])
    ]


def _ranking(ranking: dict[str, Any]) -> list[str]:
    rows = [["rank", "model", "mean |d|", "max |d|", "k3 (nats)"]]
    rows += [
        [str(place), one["model"], *(words.number(one[name], 3) for name in ("mean_abs", "max_abs", "k3"))]
        for place, one in enumerate(ranking["models"], start=1)
    ]
    return [f"models by how well they explain {ranking['against']}: the first sampled these tokens", *columns(rows)]


def _recording(doc: Document) -> list[str]:
    recording = doc["recording"]
    cell = doc["cells"][recording["nearest_cell"]]
    name = words.flags(telling(cell["flags"]))
    distance = words.number(recording["mean_abs"], 3)
    return [
        f"recorded {recording['judged_by']} against each cell",
        f"  nearest: cell {recording['nearest_cell']} ({name}), mean |d| {distance} nats",
    ]


def _loss(number: int, cell: dict[str, Any]) -> list[str]:
    loss = cell["loss"]
    each = ", ".join(f"micro {one['micro']} {words.number(one['loss'], 6)}" for one in loss["micros"][:SEGMENTS])
    lines = [f"cell {number} {loss['stated']}", f"  {each}; gradient norm {words.number(loss['grad_norm'], 6)}"]
    held = cell.get("recorded_training")
    if held:
        lines.append(f"  recording: {held['sentence']}")
    if cell.get("optimizer"):
        step = cell["optimizer"]
        lines.append(f"cell {number} {step['stated']}")
        lines.append(f"  {step['parameters']} weights moved by {words.number(step['update_norm'], 6)} (L2)")
        after = cell.get("recorded_params")
        said = after["sentence"] if after else "nothing recorded of the weights after it"
        lines.append(f"  recorded weights after the step: {said}")
    return lines


def _determinism(repeated: dict[str, Any]) -> str:
    if repeated["equal"] is None:
        return f"run twice: the second run did not finish: {repeated['why']}"
    if repeated["equal"]:
        return f"run twice: bitwise equal in all {repeated['tensors']} tensors"
    return f"run twice: NOT equal, first at {repeated['first']}: {repeated['why']}"


def matrix_table(doc: Document) -> list[str]:
    """A column per toggle, what each cell cost, and whether its answer is right."""
    axes = doc["matrix"]["axes"]
    rows = [
        ["#", "configuration", *axes, "result", "agrees", "load", "compile", "steady", "peak", "attention that ran"]
    ]
    for number, cell in enumerate(doc["cells"]):
        rows.append([str(number), *_matrix_row(cell, axes, number == doc["baseline"])])
    lines = columns(rows)
    if doc.get("is_warm"):
        lines.append("one warm child ran all cells: times and memory depend on their order")
    return lines


def _matrix_row(cell: dict[str, Any], axes: dict[str, list[Any]], is_baseline: bool) -> list[str]:
    if cell["part"] == "recording":
        held = (cell.get("recorded") or [{}])[0]
        truth = {True: "yes", False: "NO", None: "nothing recorded" if not held else "-"}[cell["agreement"]["agrees"]]
        return ["the recording", *("" for _ in axes), "recorded", truth, "-", "-", "-", "-", held.get("field", "-")]
    toggles = cell.get("toggles") or {}
    name = "each row alone" if is_baseline else words.flags(toggles) or "default"
    if cell.get("forward"):
        name = cell["forward"]
    truth = "reference" if is_baseline else {True: "yes", False: "NO", None: "-"}[cell["agreement"]["agrees"]]
    if cell.get("same_as") is not None:
        truth += f" (same kernels as {cell['same_as']})"
    took, effective = cell["time"] or {}, cell["effective"] or {}
    return [
        name,
        *(words.setting(cell["flags"][axis]) for axis in axes),
        cell["outcome"],
        truth,
        *(words.seconds(took.get(part)) for part in ("load_s", "compile_s", "steady_s")),
        words.mib((cell["memory"] or {}).get("peak_mib")),
        words.middle(_operators(effective.get("attention")), 48),
    ]


def _pattern(cell: dict[str, Any]) -> str:
    """The signature of a leak, where the samples show it: the first exact, later ones off."""
    segments, off = cell["segments"] or [], cell["agreement"].get("off") or []
    if off and 0 in off:
        return f": {len(off)} of {len(segments)} samples off"
    if off and len(segments) > 1:
        span = f"{off[0]}..{off[-1]}" if len(off) > 1 else str(off[0])
        return f": sample 0 within noise, {span} off"
    return ""


def _row(number: int, cell: dict[str, Any], baseline: int) -> list[str]:
    agrees = "reference" if number == baseline else {True: "yes", False: "NO", None: "-"}[cell["agreement"]["agrees"]]
    effective = cell["effective"] or {}
    return [
        str(number),
        words.flags(telling(cell["flags"])),
        cell["outcome"],
        agrees,
        words.seconds((cell["time"] or {}).get("steady_s")),
        words.mib((cell["memory"] or {}).get("peak_mib")),
        words.middle(_operators(effective.get("attention")), 60),
    ]


def _operators(attention: Any) -> str:
    if attention is None:
        return "-"
    return ", ".join(attention) if isinstance(attention, list) else str(attention)


def _segments(segments: list[dict[str, Any]]) -> list[str]:
    rows = [["sample", "tokens", "worst token", "at position", "logp max (valid)", "logp max (response)"]]
    rows += [
        [
            str(row["sample"]),
            str(row["tokens"]),
            words.number((row["worst_token"] or {}).get("rel_l2"), 3),
            str((row["worst_token"] or {}).get("position", "-")),
            words.number((row["valid"] or {}).get("logp_max"), 3),
            words.number((row["response"] or {}).get("logp_max"), 3),
        ]
        for row in segments[:SEGMENTS]
    ]
    lines = ["  " + line for line in columns(rows, right=frozenset(range(6)))]
    if len(segments) > SEGMENTS:
        lines.append(f"  ... and {len(segments) - SEGMENTS} more samples (--json holds them all)")
    return lines
