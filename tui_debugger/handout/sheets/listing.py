"""What lies there: a run and its records, a record and its fields, one tensor, this installation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tui_debugger import format as words
from tui_debugger.handout.blocks import Bars, Block, Facts, Grid, Handout, Sayings, Section, TokenMark, Tokens, Tone
from tui_debugger.handout.sheets.comparison import settings, shortened
from tui_debugger.reports.record import key_words, short

if TYPE_CHECKING:
    from replay_core.documents.info import InfoDocument
    from replay_core.documents.parts import ProblemEntry
    from replay_core.documents.record import RecordDocument
    from replay_core.documents.run import RunDocument
    from replay_core.documents.tensor import TensorDocument, TokensEntry

_READ: tuple[str, Tone] = ("READ", "same")
_PROBLEMS: tuple[str, Tone] = ("PROBLEMS", "warn")


def run_sheet(doc: RunDocument) -> Handout:
    steps = [step for step in doc["steps"] if step is not None]
    span = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}" if steps else "no step numbers"
    sentence = f"{doc['dialect']} dump, {span}, {words.plural(len(doc['records']), 'record')}"
    rows = [
        [*(_part(record["key"][name]) for name in ("step", "rank", "micro", "role", "stage")),
         ", ".join(record["fields"] or [])]
        for record in doc["records"]
    ]  # fmt: skip
    sections = _problems(doc["problems"])
    if rows:
        table = shortened(rows, ["step", "rank", "micro", "role", "stage", "fields"], frozenset({0, 1, 2}))
        sections.append(Section("Records", [table]))
    if doc["flags"]:
        sections += settings("Settings that the dump notes", doc["flags"], doc["flags"])
    if doc["notes"]:
        sections.append(Section("Notes", [Sayings(doc["notes"])]))
    word, tone = _READ if not doc["problems"] else _PROBLEMS
    facts = [("path", doc["path"]), ("looked at", doc["checked"])]
    facts += [("weights", f"{step}: {model}") for step, model in list(doc["models"].items())[:12]]
    return Handout(word, tone, sentence, facts, sections)


def _part(value: object) -> str:
    return words.NONE if value is None else str(value)


def _problems(problems: list[ProblemEntry]) -> list[Section]:
    rows = [[one["what"], one["where"]] for one in problems]
    return [Section("Problems", [shortened(rows, ["what", "where"])], tone="warn")] if rows else []


def record_sheet(doc: RecordDocument) -> Handout:
    rows, tones = [], list[Tone]()
    for field in doc["fields"]:
        stats: Mapping[str, Any] = field["stats"] or {}
        told = [words.number(stats[name]) if name in stats else "" for name in ("min", "max", "mean")]
        value = field["problem"] or ("" if field["value"] is None else short(field["value"], 200))
        shape = words.shape(field["shape"])
        called = field["canonical"] if field["canonical"] != field["name"] else ""
        rows.append([field["name"], called or "", field["dtype"], shape, *told, words.not_finite(stats), value])
        tones.append("bad" if field["problem"] or any(map(stats.get, ("nan", "pos_inf", "neg_inf"))) else "")
    head = ["field", "is", "dtype", "shape", "min", "max", "mean", "nan", "value"]
    table = Grid(head, rows[:200], tones[:200], frozenset({4, 5, 6, 7}), max(0, len(rows) - 200))
    sentence = f"{key_words(doc['key'])}: {words.plural(len(rows), 'field')}"
    word, tone = _READ if not doc["problems"] else _PROBLEMS
    sections = [*_problems(doc["problems"]), Section("Fields", [table])]
    return Handout(word, tone, sentence, [("path", doc["path"])], sections)


def tensor_sheet(doc: TensorDocument) -> Handout:
    side = doc["a"]
    sentence = f"{side['name']}  {side['dtype']} {words.shape(side['shape'])}  {key_words(side['key'])}"
    facts = [("path", side["path"])]
    facts += [(name, str(side[name])) for name in ("canonical", "alignment", "pad", "sentinel") if side[name]]
    if side["value"] is not None:
        facts.append(("value", short(side["value"], 2000)))
    if doc["detected"]:
        facts.append(("token axis", f"{doc['detected']['why']}, against {doc['detected']['against']}"))
    sections = []
    if side["stats"]:
        rows = [(name, words.number(value)) for name, value in side["stats"].items()]
        sections.append(Section("Statistics of every element", [Facts(rows)]))
    magnitudes = doc["histogram"]
    if magnitudes and magnitudes["bins"]:
        bars = [(f"2^{one['exponent']}", float(one["count"])) for one in magnitudes["bins"]]
        sections.append(Section("Magnitudes", [Bars(bars, "elements by power of two")]))
    window = doc["window"]["a"] or []
    if window:
        pieces = doc["text"]["pieces"] if doc["text"] else [""] * len(window)
        table = [
            [", ".join(map(str, index)), words.exact(value), piece]
            for index, value, piece in zip(doc["window"]["index"], window, pieces, strict=True)
        ]
        sections.append(Section("Values around the place asked for", [shortened(table, ["index", "value", "token"])]))
    if doc["text"]:
        samples = [f"{row}: {sample}" for row, sample in enumerate(doc["text"]["samples"])]
        sections.append(Section(f"As text ({doc['text']['tokenizer']})", [Sayings(samples)]))
    if doc["tokens"]:
        sections.append(tokens_section(doc["tokens"]))
    broken = bool(side["stats"] and (side["stats"]["nan"] or side["stats"]["pos_inf"] or side["stats"]["neg_inf"]))
    return Handout("NOT FINITE" if broken else "READ", "bad" if broken else "same", sentence, facts, sections)


def tokens_section(entry: TokensEntry) -> Section:
    """A sample token by token: coloured by its first column of numbers, all columns in the table."""
    texts = entry["pieces"] or [str(token) for token in entry["ids"]]
    blocks: list[Block] = []
    for column in entry["columns"]:
        numbers = [float(value) if isinstance(value, (int, float)) else None for value in column["values"]]
        most = max((abs(value) for value in numbers if value is not None), default=0.0)
        marks = [
            TokenMark(text, f"{place}: {words.number(value)}", abs(value or 0.0) / most if most else 0.0)
            for place, (text, value) in enumerate(zip(texts, numbers, strict=False))
        ]
        blocks.append(Tokens(marks, f"{column['name']} of {column['side']} ({column['stage']})"))
    return Section(f"Sample {entry['sample']} of {entry['samples']}, token by token", blocks)


def info_sheet(doc: InfoDocument) -> Handout:
    sections = [
        Section("Packages", [Facts([(name, version or words.NONE) for name, version in doc["packages"].items()])]),
        Section("Paths", [Facts(list(doc["paths"].items()))], folded=True),
        Section(
            "Terminal", [Facts([(name, words.setting(value)) for name, value in doc["terminal"].items()])], folded=True
        ),
    ]
    gpus = ", ".join(f"{gpu['name']}, {gpu['free_mib']} of {gpu['total_mib']} MiB free" for gpu in doc["gpus"])
    facts = [("platform", doc["platform"]), ("cpus", str(doc["cpu_count"])), ("gpus", gpus or "none")]
    return Handout("INFO", "muted", f"rldbg {doc['rldbg']}, Python {doc['python']}", facts, sections)
