"""The ruling document, from a Ruling; and its sentence, which the command and the screen say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

from replay_core.documents.ruling import (
    GraftEntry,
    GraftingPart,
    RuledTensor,
    RulingDocument,
    RulingWord,
    SideRuling,
)
from replay_core.documents.version import SCHEMA_VERSION
from replay_core.export.documents import stamp
from replay_core.export.numbers import clean

if TYPE_CHECKING:
    from replay_core.referee.ruled import Grafting, RuledClaim, RuledSide, Ruling

_ORDER = ("BUG", "SUSPECT", "NOISE")


def ruling_document(ruling: Ruling) -> RulingDocument:
    sides = {"a": ruling.a, "b": ruling.b}
    ruled = {name: side for name, side in sides.items() if side is not None}
    words = {name: side.ruling for name, side in ruled.items()}
    known = [word for word in words.values() if word is not None]
    word = cast("RulingWord | None", next((one for one in _ORDER if one in known), None))
    if word == "NOISE" and len(known) < len(ruled):
        word = None  # One side of two says nothing of the pair.
    guilty = [name for name, said in words.items() if said == word and word in ("BUG", "SUSPECT")]
    if len({ruled[name].first.claim.owner for name in guilty}) > 1:  # type: ignore[union-attr]
        # Two faults in two places: the headline is the larger one's, each side tells its own.
        guilty = [max(guilty, key=lambda name: ruled[name].first.figures.excess)]  # type: ignore[union-attr]
    first = ruled[guilty[0]].first if guilty else None
    best = next((name for name, explains, _, _ in ruled[guilty[0]].hypotheses if explains), None) if guilty else None
    side = cast(Literal["a", "b", "both"] | None, "both" if len(guilty) > 1 else next(iter(guilty), None))
    doc = RulingDocument(
        schema_version=SCHEMA_VERSION,
        kind="ruling",
        **stamp(),
        ruling=word,
        side=side,
        module=None if first is None else first.claim.owner,
        tensor=None if first is None else first.claim.name,
        what=None if first is None else first.what,
        hypothesis=best,
        sentence=_sentence(word, side, first, best, ruled),
        differences=ruling.differences,
        graft=None if ruling.grafting is None else _grafting(ruling.grafting),
        a=_side(ruling.a),
        b=None if ruling.b is None else _side(ruling.b),
    )
    return clean(doc)


def _sentence(
    word: str | None, side: str | None, first: RuledClaim | None, best: str | None, ruled: dict[str, RuledSide]
) -> str:
    if word is None:
        lacks = {name: one.why_not for name, one in ruled.items() if one.why_not is not None}
        if len(set(lacks.values())) == 1 and len(lacks) == len(ruled):
            return next(iter(lacks.values()))
        return "; ".join(f"side {name}: {said}" for name, said in lacks.items())
    counts = [one.coverage for one in ruled.values() if one.coverage is not None]
    covered = f"{sum(one['ruled'] for one in counts)} of {sum(one['recorded'] for one in counts)} tensors ruled"
    if first is None:
        sides = "both sides" if len(ruled) > 1 else "its side"
        return f"every module rounds right on {sides} ({covered})"
    where = {"a": "side a: ", "b": "side b: ", "both": "both sides: "}[side or "both"] if len(ruled) > 1 else ""
    handed = f", handed on as {first.claim.name}" if first.claim.handed else ""
    found = first.figures
    times = f"{found.excess:,.1f}" if found.excess < 1e4 else f"{found.excess:.1e}"  # more digits would be noise
    size = f"{times} x what rounding leaves, {found.relative:.1e} of its size"
    # The cause first: a narrow screen cuts the end.
    what = f"{best}; {first.what}" if best else first.what
    why = ""
    if side == "both":
        why = "; both sides part from the truth there: are these the weights and settings they ran with?"
    return f"{where}{first.claim.owner}{handed}: {what}, {size}{why} ({covered})"


def _grafting(found: Grafting) -> GraftingPart:
    grafts: list[GraftEntry] = [{"tensor": one.tensor, "comes": one.comes, "goes": one.goes} for one in found.grafts]
    return {"sentence": found.sentence, "module": found.module, "grafts": grafts}


def _side(side: RuledSide) -> SideRuling:
    return {
        "path": str(side.run.path),
        "computation": str(side.place),
        "weights": None if side.model is None else side.model.reference,
        "dtype": None if side.model is None else side.model.dtype,
        "ruling": cast("RulingWord | None", side.ruling),
        "why_not": side.why_not,
        "first": None if side.first is None else _tensor(side.first),
        "hypotheses": [
            {"name": name, "explains": explains, "before": before, "after": after}
            for name, explains, before, after in side.hypotheses
        ],
        "tensors": [_tensor(one) for one in side.claims],
        "floor": None
        if side.floor is None
        else {
            "observed": side.floor.observed,
            "floor": side.floor.floor,
            "ratio": side.floor.ratio,
            "tokens": side.floor.tokens,
            "past": side.floor.past,
        },
        "scalars": [
            {
                "name": one.name,
                "recorded": one.recorded,
                "truth": one.truth,
                "floor": one.floor,
                "ratio": abs(one.recorded - one.truth) / one.floor,
                "ruling": cast("RulingWord", one.ruling),
            }
            for one in side.scalars
        ],
        "coverage": cast(Any, side.coverage),
        "notes": side.notes,
    }


def _tensor(one: RuledClaim) -> RuledTensor:
    found = one.figures
    return {
        "tensor": one.claim.name,
        "module": one.claim.owner,
        "handed": one.claim.handed,
        "kind": one.claim.kind,
        "dtype": str(one.claim.dtype).removeprefix("torch."),
        "ruling": cast("RulingWord", one.ruling),
        "excess": found.excess,
        "size": found.size,
        "relative": found.relative,
        "unequal": found.unequal,
        "gain": found.gain,
        "what": one.what,
        "sample": None if one.row is None else one.row[0],
        "position": None if one.row is None else one.row[1],
        "channel": found.worst_channel,
        "recipe": one.recipe,
        "rounding": one.rounding,
        "statistics": [
            {"name": name, "value": value, "noise": noise, "excess": excess}
            for name, (value, noise, excess) in found.statistics.items()
        ],
    }
