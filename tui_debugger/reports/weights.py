"""A weights document as text: what the engine holds in place of what was sent, worst first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tui_debugger import format as words
from tui_debugger.reports.columns import columns

if TYPE_CHECKING:
    from replay_core.documents.weights import DestinationEntry, WeightsDocument, WeightsSide

#: Destinations listed; `--json` has them all.
_MOST = 20


def weights_report(doc: WeightsDocument) -> str:
    covered = doc["coverage"]
    lines = [f"{'ARRIVED' if doc['agrees'] else 'NOT ARRIVED'}  {doc['headline']}", ""]
    lines += [_side("trainer", doc["a"]), _side("engine", doc["b"])]
    if doc["before"]:
        lines.append(_side("before", doc["before"]))
    lines += [_side("older", one) for one in doc["older"]]
    wrong = [one for one in doc["destinations"] if one["arrival"] != "arrived"]
    if wrong:
        order = {word: at for at, word in enumerate(doc["counts"])}
        listed = sorted(wrong, key=lambda one: order[one["arrival"]])[:_MOST]
        rows = [row for one in listed for row in destination_rows(one)]
        lines += ["", *columns([["parameter of the engine", "holds", ""], *rows])]
        if len(wrong) > _MOST:
            lines.append(f"  … and {len(wrong) - _MOST} more; --json lists all")
    if doc["not_sent"]:
        more = f" … and {len(doc['not_sent']) - 5} more" if len(doc["not_sent"]) > 5 else ""
        lines += ["", f"without a destination: {', '.join(doc['not_sent'][:5])}{more}"]
    lines += ["", coverage_line(doc)]
    if covered["unmoved"]:
        same = "equal what was sent and what was there before: that the push wrote them is not shown"
        lines.append(f"note: {covered['unmoved']} {same}")
    lines += [f"note: {note}" for note in doc["notes"]]
    lines += [f"problem: {one['where']}: {one['what']}" for one in doc["problems"]]
    return "\n".join(lines)


def _side(word: str, side: WeightsSide) -> str:
    ranks = [rank for rank in side["ranks"] if rank is not None]
    of = f", ranks {', '.join(map(str, ranks))}" if len(ranks) > 1 else ""
    step = "" if side["step"] is None else f", step {side['step']}"
    return f"{word:<8} {side['path']}  {side['parameters']} parameters{step}{of}"


def destination_rows(one: DestinationEntry) -> list[list[str]]:
    rank = "" if one["rank"] is None else f" (rank {one['rank']})"
    name = f"{one['name']}{rank}"
    if not one["parts"]:
        return [[name, one["arrival"], one["what"]]]
    rows = []
    for part in one["parts"]:
        far = "" if part["rel_l2"] is None else f"  rel-L2 {words.number(part['rel_l2'])}"
        label = f"{part['part']}: " if part["part"] else ""
        rows.append([name, part["arrival"], f"{label}{part['what']}{far}"])
        name = ""
    return rows


def coverage_line(doc: WeightsDocument) -> str:
    covered = doc["coverage"]
    said = f"compared {covered['compared']} of {covered['destinations']} parameters of the engine"
    if covered["by_digest"]:
        said += f", {covered['by_digest']} by digest"
    beside = [
        f"{covered['engine_own']} that the engine makes itself" if covered["engine_own"] else "",
        f"{covered['padding_rows']} rows of vocabulary padding" if covered["padding_rows"] else "",
    ]
    left = " and ".join(one for one in beside if one)
    return f"{said}; not compared: {left}" if left else said
