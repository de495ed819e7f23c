"""A ruling document as text: the ruling, what was given differently, then each side with its coverage."""

from __future__ import annotations

from replay_core.documents.parts import Number
from replay_core.documents.ruling import GraftingPart, RuledTensor, RulingDocument, SideRuling
from tui_debugger import format as words

#: Names listed of one kind of gap; the document has all.
NAMES = 4


def headline(doc: RulingDocument) -> str:
    """The answer in one line."""
    return f"{doc['ruling'] or 'not ruled'}  {doc['sentence']}"


def ruling_report(doc: RulingDocument, *, show_all: bool = False) -> str:
    lines = [headline(doc)]
    lines += [f"differs: {one}" for one in doc["differences"]]
    if doc["graft"] is not None:
        lines += ["", *_grafts(doc["graft"], show_all)]
    for name, side in (("a", doc["a"]), ("b", doc["b"])):
        if side is not None:
            lines += ["", *_side(name, side, show_all)]
    return words.safe("\n".join(lines), lines=True)


def _grafts(graft: GraftingPart, show_all: bool) -> list[str]:
    told = [
        one for one in graft["grafts"] if show_all or not isinstance(one["comes"], float) or abs(one["comes"]) >= 0.01
    ]
    lines = [f"graft: {graft['sentence']}"]
    for one in told:
        goes = "" if one["goes"] is None else f", {_share(one['goes'])} goes with A's in B"
        lines.append(f"   {one['tensor']}: {_share(one['comes'])} comes with B's in A{goes}")
    return lines


def _share(value: Number) -> str:
    return value if isinstance(value, str) else f"{value:.1%}"


def _side(name: str, side: SideRuling, show_all: bool) -> list[str]:
    lines = [f"{name}  {side['ruling'] or 'not ruled'}  {side['path']}, {side['computation']}"]
    if side["why_not"] is not None:
        return [*lines, f"   {side['why_not']}"]
    lines.append(f"   weights {side['weights']}, computed in {side['dtype']}")
    told = [one for one in side["tensors"] if show_all or one["ruling"] != "NOISE" or one["recipe"]]
    lines += [_tensor(one) for one in told]
    for one in side["hypotheses"]:
        verdict = "explains it" if one["explains"] else "does not"
        lines.append(f"   {one['name']}: {verdict}: {_number(one['before'])} -> {_number(one['after'])} x noise")
    floor = side["floor"]
    if floor is not None:
        lines.append(
            f"   log-probabilities: off by {_number(floor['observed'])} nats, floor {_number(floor['floor'])}: "
            f"{_number(floor['ratio'])} x, {floor['tokens']} tokens"
        )
    lines += [
        f"   {one['name']} {_number(one['recorded'])}: {_number(one['ratio'])} x what the log-probabilities' floor "
        f"leaves of it ({_number(one['floor'])})" + ("" if one["ruling"] == "NOISE" else f": {one['ruling']}")
        for one in side["scalars"]
    ]
    covered = side["coverage"]
    if covered is not None:
        lines.append(
            f"   ruled {covered['ruled']} of {covered['recorded']} recorded tensors, the work of "
            f"{covered['modules_ruled']} of {covered['modules_of_model']} modules"
        )
        gaps = (
            ("not recorded", covered["not_recorded"]),
            ("nothing recorded leads to", covered["unrooted"]),
            ("of another shape than the model's", covered["misfit"]),
            ("not in the model's forward", covered["unreached"]),
            ("routed otherwise than the truth", covered["routed_otherwise"]),
        )
        lines += [f"   {what}: {_names(names)}" for what, names in gaps if names]
    return [*lines, *(f"   note: {note}" for note in side["notes"])]


def _tensor(one: RuledTensor) -> str:
    recipe = f"; {one['recipe']}" if one["recipe"] else ""
    return (
        f"   {one['ruling']:<7} {one['tensor']}  ({one['module']})  {_number(one['excess'])} x noise, "
        f"{_number(one['size'])} roundings, {_number(one['unequal'])} unequal: {one['what']}{recipe}"
    )


def _names(names: list[str]) -> str:
    more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
    return ", ".join(names[:NAMES]) + more


def _number(value: Number) -> str:
    return value if isinstance(value, str) else f"{value:.3g}"
