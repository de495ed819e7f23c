"""A samples document as text: a line per sample, then the tokens that were asked for, then the worst of the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tui_debugger import format as words
from tui_debugger.reports.columns import columns

if TYPE_CHECKING:
    from replay_core.documents.samples import SamplesDocument, SampleTokens

#: Cells of a text in the list, and of a turn; tokens listed of a sample.
_TEXT, _TURN, _TOKENS = 40, 400, 64
SAMPLE_HEAD = ("sample", "group", "tokens", "reward", "advantage", "|d logprob|", "clipped", "prompt", "response")


def headline(doc: SamplesDocument) -> str:
    """How many samples there are, and how they stand."""
    where = "" if doc["step"] is None else f"step {doc['step']}: "
    groups = "" if doc["groups"] is None else f" in {words.plural(doc['groups'], 'group')}"
    found = "" if doc["search"] is None else f", {len(doc['samples']) + doc['left_out']} hold {doc['search']!r}"
    return f"{where}{words.plural(doc['total'], 'sample')}{groups}{found}, by {doc['by']}"


def sample_rows(doc: SamplesDocument, width: int) -> list[list[str]]:
    """A row per sample; texts within `width` cells."""
    rows = []
    for one in doc["samples"]:
        figures = [words.number(one[name], 4) for name in ("reward", "advantage", "mismatch", "clipped")]
        texts = [words.end(words.safe(one[name] or ""), width) for name in ("prompt", "response")]
        group = words.NONE if one["group"] is None else str(one["group"])
        cut = " cut" if one["truncated"] else ""
        rows.append([str(one["sample"]), group, words.number(one["tokens"]) + cut, *figures, *texts])
    return rows


def samples_report(doc: SamplesDocument) -> str:
    lines = [headline(doc), words.safe(doc["path"]), ""]
    lines += columns([SAMPLE_HEAD, *sample_rows(doc, _TEXT)], right=frozenset(range(7)))
    if doc["left_out"]:
        lines.append(f"... and {doc['left_out']} more (--most lists more)")
    for entry in doc["tokens"]:
        lines += ["", *_tokens(entry)]
    if doc["worst"]:
        rows = [
            [str(one["sample"]), str(one["position"]), str(one["id"]), one["piece"] or "", words.number(one["value"])]
            for one in doc["worst"]
        ]
        head = ["sample", "position", "id", "token", str(doc["worst_by"])]
        lines += ["", f"the tokens of the step furthest off by {doc['worst_by']}"]
        lines += columns([head, *rows], right=frozenset({0, 1, 2, 4}))
    return "\n".join([*lines, *(f"note: {note}" for note in doc["notes"])])


def _tokens(entry: SampleTokens) -> list[str]:
    """Its turns, and the response token by token."""
    turns = [f"  {turn['role']}: {words.end(words.safe(turn['text']), _TURN)}" for turn in entry["texts"]]
    if not entry["ids"]:
        return [f"sample {entry['sample']}", *turns]
    spans = [f"{turn['role']} {turn['begin']} to {turn['end'] - 1}" for turn in entry["turns"]]
    head = ["position", "id", "token", *(column["name"] for column in entry["columns"])]
    places = range(entry["begin"], len(entry["ids"]))
    rows = [
        [
            str(place), str(entry["ids"][place]), entry["pieces"][place] if entry["pieces"] else "",
            *(words.number(column["values"][place], 3) for column in entry["columns"]),
        ]
        for place in places[:_TOKENS]
    ]  # fmt: skip
    lines = [f"sample {entry['sample']}, its response from position {entry['begin']}", *turns]
    lines += [f"tokens: {', '.join(map(words.safe, spans))}"] if len(spans) > 2 else []
    lines += columns([head, *rows], right=frozenset({0, 1, *range(3, len(head))}))
    return lines + ([f"... and {len(places) - _TOKENS} tokens more"] if len(places) > _TOKENS else [])
