"""A mismatch document as text: the answer, the tokens, the table of causes, what is left, the sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tui_debugger import format as words
from tui_debugger.reports.columns import columns

if TYPE_CHECKING:
    from replay_core.documents.mismatch import GapCause, MismatchDocument, SequenceEntry
    from replay_core.documents.parts import Number

#: Causes and sequences listed; `--json` and `--all` have every one.
_CAUSES, _SEQUENCES = 12, 6


def mismatch_report(doc: MismatchDocument, *, show_all: bool = False) -> str:
    word = {True: "AGREES", False: "MISMATCH", None: "NOT ANSWERED"}[doc["agrees"]]
    lines = [f"{word}  {doc['headline']}", ""]
    where = "" if doc["step"] is None else f", step {doc['step']}"
    lines.append(f"run      {doc['path']}{where}, {doc['samples']} samples")
    if doc["gap"] is not None:
        lines += [f"rollout  {doc['rollout']}", f"trainer  {doc['trainer']}"]
    if doc["model"] is not None:
        lines.append(f"model    {doc['model']}, candidates replayed on {doc['tried_on']} of {doc['samples']} samples")
    lines += [f"lacks    {one}" for one in doc["lacks"]]
    gap = doc["gap"]
    if gap is not None:
        lines += ["", "d = trainer - rollout: " + ", ".join([
            f"mean |d| {_n(gap['mean'])}", f"p99 {_n(gap['p99'])}", f"max {_n(gap['max'])}", f"k3 {_n(gap['k3'])}",
            f"mean e^|d| {_n(gap['multiplier'])}", f"correlation {_n(doc['correlation'])}", f"{gap['tokens']} tokens",
        ])]  # fmt: skip
    lines += ["", "tokens"] if doc["tokens"] else []
    for fault in doc["tokens"]:
        mark = "wrong" if fault["is_fault"] else "note "
        texts = "" if fault["texts"] is None else f": {fault['texts'][0]!r} against {fault['texts'][1]!r}"
        lines.append(f"  {mark}  {fault['what']}{texts}")
    lines += _causes(doc["causes"], show_all)
    floor = doc["floor"]
    if floor is not None:
        stand = f"observed {_n(floor['observed'])}, left {_n(floor['left'])}: {_n(floor['ratio'])} x the floor"
        lines += ["", f"floor    {_n(floor['floor'])} nats of rounding ({floor['dtype']}); {stand}"]
    if doc["routing"] is not None:
        made = f"{_share(doc['routing']['observed'])} of {doc['routing']['tokens']} choices of experts"
        expected = doc["routing"]["expected"]
        by_rounding = "" if expected is None else f"; rounding alone turns {_share(expected)}"
        lines.append(f"routing  {made} are not those of this model's live router{by_rounding}")
    lines += _sequences(doc["sequences"], show_all)
    lines += ["", *(f"note: {one}" for one in doc["notes"])] if doc["notes"] else []
    lines += ["", *(f"next: {one}" for one in doc["next"])]
    return words.safe("\n".join(lines), lines=True)


def _causes(causes: list[GapCause], show_all: bool) -> list[str]:
    tried = [one for one in causes if one["left"] is not None or one["named"]]
    listed = (
        tried
        if show_all
        else [one for one in tried if one["named"]] + [one for one in tried if not one["named"]][:_CAUSES]
    )
    if not listed:
        return []
    rows = [["", "explains", "tokens", "mean|d|", "max", "k3", "e^|d|", "side", "cause"]]
    for cause in listed:
        left = cause["left"]
        figures = [""] * 4
        if left is not None:
            figures = [_n(one) for one in (left["mean"], left["max"], left["k3"], left["multiplier"])]
        name = cause["name"] + ("" if cause["told_by"] == "replay" else " (recorded numbers)")
        shares = [_share(cause["share"]), _share(cause["tokens_explained"])]
        rows.append(["*" if cause["named"] else "", *shares, *figures, cause["side"], name])
    lines = ["", "what is left of the gap, were this the cause (* named)", *columns(rows)]
    if len(listed) < len(tried):
        lines.append(f"  … and {len(tried) - len(listed)} that explain less; --all lists them")
    if show_all:
        lines += [f"  not tried: {one['name']}: {one['why_not']}" for one in causes if one["why_not"]]
    return lines


def _sequences(listed: list[SequenceEntry], show_all: bool) -> list[str]:
    told = listed if show_all else [one for one in listed if one["is_outlier"] or one["versions"]][:_SEQUENCES]
    if not told:
        return []
    lines = ["", "sequences, furthest off first"]
    for one in told:
        mark = " (outlier)" if one["is_outlier"] else ""
        spans = "; ".join(f"tokens {span['begin']} to {span['end'] - 1}: {span['weights']}" for span in one["versions"])
        lines.append(f"  sample {one['sample']}: mean |d| {_n(one['mean'])} over {one['tokens']} tokens, "
                     f"{_share(one['share'])} of the gap{mark}{'; ' if spans else ''}{spans}")  # fmt: skip
    return lines


def _n(value: Number | None) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.3g}"


def _share(value: Number | None) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    return "more left" if value < 0 else f"{value:.0%}"
