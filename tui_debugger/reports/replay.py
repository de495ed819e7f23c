"""A replay document as text: the answer, then each cell against the reference, sample by sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from replay_core.replay.flags import telling
from replay_core.replay.plan import ITSELF, beyond_capsule
from tui_debugger import format as words
from tui_debugger.cells import dump_beside, recording_parts, sentence
from tui_debugger.reports.columns import columns
from tui_debugger.reports.comparison import divergence

if TYPE_CHECKING:
    from replay_core.documents.comparison import SegmentEntry
    from replay_core.documents.replay import CauseEvidence, CellEntry, RankingEntry, RepeatEntry, ReplayDocument

#: Samples printed of each cell; what is left out is counted.
SEGMENTS = 16


def replay_report(doc: ReplayDocument) -> str:
    plan = doc["plan"]
    several = doc["matrix"] is not None
    lines = [
        *answer_lines(doc),
        *_capsule(doc),
        "",
        f"replay of {plan['dump']}  {words.scope(plan)}  model {plan['model']}",
        "",
    ]
    lines += matrix_table(doc) if several else _cells(doc)
    if doc["ranking"]:
        lines += ["", *_ranking(doc["ranking"])]
    lines += _recording(doc)
    for number, cell in enumerate(doc["cells"]):
        if cell["segments"] and (not several or cell["agreement"]["agrees"] is False):
            lines += ["", f"cell {number} against each row alone, sample by sample", *_segments(cell["segments"])]
        if cell["error"]:
            lines += ["", f"cell {number}: {cell['error']['message']}"]
            said: Mapping[str, object] = cell["error"]
            lines += [f"  {name}: {said[name]}" for name in ("file", "expected", "found", "hint") if said[name]]
            lines += [f"  log: {cell['log']}"] if cell["log"] else []
        lines += _compiler(number, cell)
        if by_digest := sentence(cell):
            lines += ["", f"cell {number}: {by_digest}"]
        lines += _visibility(number, cell)
        lines += _loss(number, cell)
    if doc["determinism"]:
        lines += ["", _determinism(doc["determinism"])]
    if doc["notes"]:
        lines += ["", *(f"note: {note}" for note in doc["notes"])]
    dumps = [(number, cell["dump"]) for number, cell in enumerate(doc["cells"]) if cell["dump"]]
    if len(dumps) > 1:
        lines += ["", *(f"cell {number} dump  {dump}" for number, dump in dumps)]
        # What is wrong with each row alone itself shows against none but another.
        others = [number for number, _ in dumps if number != doc["baseline"]]
        shown = next((number for number in others if doc["cells"][number]["agreement"]["agrees"] is False), others[-1])
        baseline, cell = doc["cells"][doc["baseline"]], doc["cells"][shown]
        lines += ["", f"hint: rldbg {dump_beside(baseline, cell) or dumps[0][1]} {cell['dump']}"]
        if cell["agreement"]["agrees"] is False and "capsule" not in doc and beyond_capsule(plan) is None:
            lines += [f"hint: rldbg capsule {cell['dump']} bug.capsule  (one file that shows it by itself)"]
    return "\n".join(lines)


def _capsule(doc: ReplayDocument) -> list[str]:
    """What the capsule that was made or opened holds, and whether it is here what it was there."""
    if "capsule" not in doc:
        return []
    held = doc["capsule"]
    tokens = " + ".join(map(str, held["tokens"][:4])) + (" ..." if len(held["tokens"]) > 4 else "")
    whose = "its own weights" if held["weights"] == "own" else "random weights: its own are too many"
    made = ", ".join(f"{name} {value}" for name, value in held["environment"].items() if value)
    lines = [
        "",
        f"capsule {held['file']}  {held['bytes'] / 1e6:.2f} MB",
        f"  there: {held['sentence']}",
        f"  {held['model']}, {held['layers']} of {held['of_layers']} layers, {held['words']} words, {whose}; "
        f"{held['rows']} row{'s' * (held['rows'] > 1)} of {tokens} tokens",
        f"  made with {made}",
    ]
    far = {side: "not known" if one is None else f"{words.number(one, 2)} off" for side, one in held["as_made"].items()}
    lines.append("  from what came out there: " + ", ".join(f"{side} {one}" for side, one in far.items()))
    if held["script"]:
        usage = "" if held["standalone"] else f" {held['file']}"
        lines.append(f"  script: python {held['script']}{usage}  (torch and transformers; exits 0 while it shows)")
    return lines


def _visibility(number: int, cell: CellEntry) -> list[str]:
    """Who moves whom: the evidence of a cause, a line per intervention that moved what it must not."""
    cause = cell["cause"]
    if cause is None:
        return []
    found = cause["evidence"]
    if found is None:
        return ["", f"cell {number} agrees: {cause['sentence']}"] if cause["is_noise"] else []
    told = [sight for sight in found["visibility"] if sight["moved"] or sight["deaf"]]
    if cause["is_noise"]:
        lines = ["", f"cell {number} agrees: {cause['sentence']}"]
        if found["visibility"] and not told:
            lines += [f"  {len(found['visibility'])} interventions: nobody moves whom it must not", *_part(found)]
        return lines
    lines = ["", f"cell {number}: who moves whom, in {found['arithmetic']} ({len(found['visibility'])} interventions)"]
    lines += _part(found)
    lines += [f"  {sight['by']}: {sight['sentence']}" for sight in told] or ["  nobody moves whom it must not"]
    for name, far in found["truth"].items():
        worst, typical = words.number(far["worst"], 3), words.number(far["typical"], 3)
        lines.append(f"  {name} is {worst} off the truth at its worst token, {typical} typically")
    return lines


def _part(found: CauseEvidence) -> list[str]:
    """What of a large batch was asked."""
    part = found.get("looked_at")
    if part is None:
        return []
    rows, counts = (", ".join(map(str, one)) for one in (part["rows"], part["tokens"]))
    here = "sample 0" if len(part["rows"]) == 1 else f"samples 0..{len(part['rows']) - 1}"
    return [f"  asked of a part of the batch: rows {rows}, here {here}; the first {counts} tokens of them"]


def _compiler(number: int, cell: CellEntry) -> list[str]:
    """Where the compiler fails, or what it could not take into one graph."""
    if "stages" in cell:
        found = cell["stages"]
        known = "" if found["as_cell"] is None else f" (as cell {found['as_cell']}, which fails alike and was tried)"
        how = "fails in" if cell["error"] else "is compiled wrong:"
        lines = ["", f"cell {number} {how} {found['sentence']}{known}"]
        tried = found["trials"] if found["as_cell"] is None else []
        lines += [f"  compile={one['compile']}: {one['message'] or one['outcome']}" for one in tried]
        if "blamed" in found:
            said = found["blamed"]
            of = "" if said["layers"] is None else f", the first {said['layers']} of {said['of_layers']} layers"
            lines.append(f"  torch's bisector: {said['sentence']} ({said['tries']} compilations{of})")
        return lines
    made = cell["compile"]
    if made is None or not made["graph_breaks"]:
        return []
    return [
        "",
        f"cell {number} is {made['graphs']} graphs: {made['graph_breaks']} graph breaks",
        *(f"  {reason}" for reason in made["graph_break_reasons"]),
    ]


def _cells(doc: ReplayDocument) -> list[str]:
    rows = [["cell", "setting", "outcome", "agrees", "time", "peak", "attention that ran"]]
    rows += [_row(number, cell, doc["baseline"]) for number, cell in enumerate(doc["cells"])]
    return columns(rows)


def answer_lines(doc: ReplayDocument) -> list[str]:
    """What the eye should meet first: who disagrees and where, else what was held to what."""
    baseline, lines = doc["cells"][doc["baseline"]], list[str]()
    cause, said = baseline["cause"], recording_parts(doc)
    # Without evidence of its own it is that of the recording, which no cell comes near.
    is_of_recording = cause is not None and cause["evidence"] is None and bool(said)
    if cause and not is_of_recording:
        lines += [f"DISAGREES  cell {doc['baseline']}, the reference", f"  {cause['sentence']}"]
    others = [(number, cell) for number, cell in enumerate(doc["cells"]) if number != doc["baseline"]]
    ran = [(number, cell) for number, cell in others if cell["part"] in ("cell", "control")]
    unanswered = list[str]()
    for number, cell in ran:
        name = words.flags(telling(cell["flags"]))
        if cell["agreement"]["agrees"] is False:
            lines.append(f"DISAGREES  cell {number} ({name}) with each row alone{_pattern(cell)}")
            if cell["cause"]:
                lines.append(f"  {cell['cause']['kind']}: {cell['cause']['sentence']}")
                lines += [f"  also {one['kind']}: {one['sentence']}" for one in cell["cause"].get("also", ())]
            if cell["agreement"]["first_divergence"]:
                lines.append(divergence(cell["agreement"]["first_divergence"]))
        elif cell["agreement"]["agrees"] is None:
            unanswered.append(f"{cell['outcome'].upper()}  cell {number} ({name})")
    # A cell that could not run is no answer: it never stands before one that is.
    lines += unanswered
    lines += _smallest(doc)
    if said:
        lines.append(f"RECORDING  {said}")
    if cause and is_of_recording:
        lines.append(f"  {cause['kind']}: {cause['sentence']}")
    agreeing = [cell for _, cell in ran if cell["agreement"]["agrees"]]
    if agreeing and len(agreeing) == len(ran):
        segments = [row for cell in agreeing for row in cell["segments"] or []]
        worst = max((float(row["worst_token"]["rel_l2"]) for row in segments if row["worst_token"]), default=0.0)
        logp = max((float(row["valid"]["logp_max"] or 0.0) for row in segments), default=0.0)
        plural = "s" if len(agreeing) > 1 else ""
        lines.append(
            f"AGREES  {len(agreeing)} cell{plural} with each row alone, in every sample: "
            f"worst token {words.number(worst, 3)}, logprobs within {words.number(logp, 3)} nats"
        )
    return lines


def _smallest(doc: ReplayDocument) -> list[str]:
    """The fewest toggles that break agreement, or that do not run."""
    matrix = doc["matrix"]
    sets = () if matrix is None else ((matrix["breaking"], "breaks agreement"), (matrix["failing"], "does not run"))
    return [
        f"  smallest set that {what}: {words.flags(toggles) or 'none, the baseline settings already do'}"
        for smallest, what in sets
        for toggles in smallest
    ]


def _ranking(ranking: RankingEntry) -> list[str]:
    rows = [["rank", "model", "mean |d|", "max |d|", "k3 (nats)"]]
    rows += [
        [
            str(place),
            one["model"],
            *(words.number(figure, 3) for figure in (one["mean_abs"], one["max_abs"], one["k3"])),
        ]
        for place, one in enumerate(ranking["models"], start=1)
    ]
    return [f"models by how well they explain {ranking['against']}: the first sampled these tokens", *columns(rows)]


def _recording(doc: ReplayDocument) -> list[str]:
    recording = doc["recording"]
    if recording is None or recording["nearest_cell"] is None:
        return []
    cell = doc["cells"][recording["nearest_cell"]]
    name = words.flags(telling(cell["flags"]))
    distance = words.number(recording["mean_abs"], 3)
    return [
        "",
        f"recorded {recording['judged_by']} against each cell",
        f"  nearest: cell {recording['nearest_cell']} ({name}), mean |d| {distance} nats",
    ]


def _loss(number: int, cell: CellEntry) -> list[str]:
    loss = cell["loss"]
    if loss is None:
        return []
    several = len({one["rank"] for one in loss["micros"]}) > 1
    each = ", ".join(
        (f"rank {one['rank']} " if several else "")
        + f"micro {one['micro']}"
        + ("" if one["loss"] is None else f" {words.number(one['loss'], 6)}")
        for one in loss["micros"][:SEGMENTS]
    )
    lines = ["", f"cell {number} {loss['stated']}", f"  {each}; gradient norm {words.number(loss['grad_norm'], 6)}"]
    held = cell["recorded_training"]
    if held:
        lines.append(f"  recording: {held['sentence']}")
    step = cell["optimizer"]
    if step:
        lines.append(f"cell {number} {step['stated']}")
        lines.append(f"  {step['parameters']} weights moved by {words.number(step['update_norm'], 6)} (L2)")
        after = cell["recorded_params"]
        said = after["sentence"] if after else "nothing recorded of the weights after it"
        lines.append(f"  recorded weights after the step: {said}")
    return lines


def _determinism(repeated: RepeatEntry) -> str:
    if repeated["equal"] is None:
        return f"run twice: the second run did not finish: {repeated['why']}"
    if repeated["equal"]:
        return f"run twice: bitwise equal in all {repeated['tensors']} tensors"
    return f"run twice: NOT equal, first at {repeated['first']}: {repeated['why']}"


def matrix_table(doc: ReplayDocument) -> list[str]:
    """A column per toggle, what each cell cost, and whether its answer is right."""
    lines = columns(matrix_rows(doc))
    if doc["is_warm"]:
        lines.append("one warm child ran all cells: times and memory depend on their order")
    return lines


def matrix_rows(doc: ReplayDocument) -> list[list[str]]:
    """The same table as its cells, titles first: one row per cell of the replay."""
    axes = doc["matrix"]["axes"] if doc["matrix"] else {}
    rows = [
        ["#", "configuration", *axes, "result", "agrees", "load", "compile", "steady", "peak", "attention that ran"]
    ]
    for number, cell in enumerate(doc["cells"]):
        rows.append([str(number), *_matrix_row(cell, axes, number == doc["baseline"])])
    return rows


def _matrix_row(cell: CellEntry, axes: dict[str, list[Any]], is_baseline: bool) -> list[str]:
    if cell["part"] == "recording":
        held = next(iter(cell["recorded"]), None)
        truth = {True: "yes", False: "NO", None: "nothing recorded" if not held else "-"}[cell["agreement"]["agrees"]]
        field = held["field"] if held else "-"
        return ["the recording", *("" for _ in axes), "recorded", truth, "-", "-", "-", "-", field]
    toggles = cell["toggles"] or {}
    name = "each row alone" if is_baseline else words.flags(toggles) or "default"
    if cell["forward"] == ITSELF:
        name = f"{name}, called whole"
    elif cell["forward"]:
        name = cell["forward"]
    truth = "reference" if is_baseline else {True: "yes", False: "NO", None: "-"}[cell["agreement"]["agrees"]]
    if cell["same_as"] is not None:
        truth += f" (same kernels as {cell['same_as']})"
    took, effective = cell["time"], cell["effective"] or {}
    seconds = (took["load_s"], took["compile_s"], took["steady_s"]) if took else (None, None, None)
    return [
        name,
        *(words.setting(cell["flags"][axis]) for axis in axes),
        cell["outcome"],
        truth,
        *map(words.seconds, seconds),
        words.mib(cell["memory"] and cell["memory"]["peak_mib"]),
        words.middle(_operators(effective.get("attention")), 48),
    ]


def _pattern(cell: CellEntry) -> str:
    """The signature of a leak, where the samples show it: the first exact, later ones off."""
    segments, off = cell["segments"] or [], cell["agreement"]["off"]
    if off and 0 in off:
        return f": {len(off)} of {len(segments)} samples off"
    if off and len(segments) > 1:
        span = f"{off[0]}..{off[-1]}" if len(off) > 1 else str(off[0])
        return f": sample 0 within noise, {span} off"
    return ""


def _row(number: int, cell: CellEntry, baseline: int) -> list[str]:
    agrees = "reference" if number == baseline else {True: "yes", False: "NO", None: "-"}[cell["agreement"]["agrees"]]
    effective = cell["effective"] or {}
    return [
        str(number),
        words.flags(telling(cell["flags"])),
        cell["outcome"],
        agrees,
        words.seconds(cell["time"] and cell["time"]["steady_s"]),
        words.mib(cell["memory"] and cell["memory"]["peak_mib"]),
        words.middle(_operators(effective.get("attention")), 60),
    ]


def _operators(attention: Any) -> str:
    if attention is None:
        return "-"
    return ", ".join(attention) if isinstance(attention, list) else str(attention)


def _segments(segments: list[SegmentEntry]) -> list[str]:
    rows = [["sample", "tokens", "worst token", "at position", "logp max (valid)", "logp max (response)"]]
    rows += [
        [
            str(row["sample"]),
            str(row["tokens"]),
            words.number(row["worst_token"] and row["worst_token"]["rel_l2"], 3),
            str(row["worst_token"]["position"] if row["worst_token"] else "-"),
            words.number(row["valid"]["logp_max"], 3),
            words.number(row["response"]["logp_max"], 3),
        ]
        for row in segments[:SEGMENTS]
    ]
    lines = ["  " + line for line in columns(rows, right=frozenset(range(6)))]
    if len(segments) > SEGMENTS:
        lines.append(f"  ... and {len(segments) - SEGMENTS} more samples (--json holds them all)")
    return lines
