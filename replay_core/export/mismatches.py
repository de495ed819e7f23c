"""The mismatch document, from what was tried."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from replay_core.documents.version import SCHEMA_VERSION
from replay_core.export.documents import stamp
from replay_core.export.numbers import clean
from replay_core.mismatch.candidate import PART, Candidate
from replay_core.mismatch.explanation import Mismatch
from replay_core.mismatch.figures import GapSize
from replay_core.mismatch.standing import NOISE

if TYPE_CHECKING:
    from replay_core.documents.mismatch import GapCause, GapEntry, MismatchDocument, MismatchFloor, SequenceEntry

#: Sequences listed, those furthest off first.
_MOST = 16
#: mean |d| and mean e^|d| that need no cause where no model tells the floor: those of the diagnosis (D09).
_MEAN, _MULTIPLIER, _K3 = 0.03, 1.05, 1e-3


def mismatch_document(found: Mismatch) -> MismatchDocument:
    """A mismatch document."""
    sides, gap = found.sides, found.gap
    doc: MismatchDocument = {
        "schema_version": SCHEMA_VERSION,
        "kind": "mismatch",
        **stamp(),
        "path": str(found.run.path),
        "step": found.step,
        "model": found.model,
        "rollout": "" if sides is None else sides.between.rollout.source,
        "trainer": "" if sides is None else sides.between.trainer.source,
        "samples": 0 if sides is None else len(sides.batch),
        "tried_on": len(found.tried_on),
        "gap": None if gap is None else _gap(gap),
        "correlation": None if sides is None else sides.between.correlation,
        "headline": _headline(found),
        "agrees": _agrees(found),
        "tokens": [
            {
                "what": one.what, "is_fault": one.is_fault, "samples": one.samples, "sample": one.sample,
                "position": one.position, "texts": None if one.texts is None else list(one.texts),
            }
            for one in found.faults
        ],
        "causes": [_cause(one) for one in sorted(found.candidates, key=lambda one: not one.named)],
        "explained": found.explained,
        "floor": _floor(found),
        "sequences": _sequences(found),
        "routing": None if found.rerouted is None else
        {"tokens": found.rerouted[1], "observed": found.rerouted[0], "expected": found.turned},
        "lacks": found.lacks,
        "next": _next(found),
        "notes": found.notes,
    }  # fmt: skip
    return clean(doc)


def _gap(size: GapSize) -> GapEntry:
    return {
        "tokens": size.tokens, "mean": size.mean, "p99": size.p99, "max": size.largest, "k3": size.k3,
        "multiplier": size.multiplier,
    }  # fmt: skip


def _cause(one: Candidate) -> GapCause:
    return {
        "name": one.name, "family": one.family, "side": one.side, "told_by": one.told_by,
        "left": None if one.left is None else _gap(one.left), "share": one.share, "tokens_explained": one.tokens,
        "named": one.named, "why_not": one.why_not,
    }  # fmt: skip


def _floor(found: Mismatch) -> MismatchFloor | None:
    floor, tried = found.floor, found.tried
    if floor is None or tried is None or found.left is None or floor.value <= 0:
        return None
    return {
        "floor": floor.value, "observed": tried.mean, "left": found.left, "ratio": found.left / floor.value,
        "dtype": f"engine {floor.engine}, trainer {floor.trainer}", "runs": floor.runs,
    }  # fmt: skip


def _agrees(found: Mismatch) -> bool | None:
    """Whether nothing is left to say; None where there was no answer."""
    if any(one.is_fault for one in found.faults):
        return False
    if found.lacks or found.gap is None:
        return None
    if found.named:
        return False
    floor = _floor(found)
    if floor is not None:
        return float(floor["ratio"]) <= NOISE
    gap = found.gap
    return gap.mean <= _MEAN and gap.multiplier <= _MULTIPLIER and gap.k3 <= _K3


def _headline(found: Mismatch) -> str:
    gap, floor = found.gap, _floor(found)
    fault = next((one for one in found.faults if one.is_fault), None)
    if found.lacks:
        said = f"the dump lacks {found.lacks[0]}"
        return said if fault is None else f"tokens: {fault.what}; of the gap nothing is known: {said}"
    assert gap is not None
    said = f"engine and trainer are {gap.mean:.3g} nats apart (mean |d|, {gap.tokens} tokens)"
    if fault is not None:
        said += f"; tokens: {fault.what}"
    if found.named:
        best = found.named[0]
        part = "" if best.share is None else f", which explains {best.share:.0%}"
        who = "" if best.side == "both" else f"{best.side}: "
        said += f"; {who}{best.name}{part}"
        if floor is not None:
            said += (
                f"; left {float(floor['left']):.3g}, floor {float(floor['floor']):.3g}: {float(floor['ratio']):.3g} x"
            )
        return said
    if floor is not None:
        ratio = float(floor["ratio"])
        said = f"observed {float(floor['observed']):.3g} nats, floor {float(floor['floor']):.3g}: {ratio:.3g} x"
        if ratio <= NOISE:
            normal = ""
            if found.floor is not None and found.floor.engine != found.floor.trainer:
                normal = f"normal for an engine in {found.floor.engine} beside a trainer in {found.floor.trainer}, "
            return f"{said}, {normal}nothing left to explain" + ("" if fault is None else f"; tokens: {fault.what}")
        known = [one for one in found.candidates if one.share is not None and one.told_by == "replay"]
        most = max(known, key=lambda one: one.share or 0.0, default=None)
        explained = 0.0 if most is None else most.share or 0.0
        said += f", and nothing that was tried {'closes it' if explained >= PART else 'explains half of it'}"
        if most is not None and explained > 0:
            left = f", leaves {most.left.mean:.3g} nats" if most.left is not None and explained >= PART else ""
            said += f"; most by {most.side}: {most.name} ({explained:.0%}{left})"
        return said + _whose(found)
    small = _agrees(found) or (fault is not None and gap.mean <= _MEAN)
    return said + ("; small, and no sign of a cause" if small else "; no sign of a cause in the numbers alone")


def _whose(found: Mismatch) -> str:
    """Which side's own numbers the model gives, where it gives one's alone."""
    if found.reproduced is None or found.floor is None:
        return ""
    given = [off <= NOISE * found.floor.value for off in found.reproduced]
    if given[0] == given[1]:
        return ""
    right, wrong = ("trainer", "engine") if given[0] else ("engine", "trainer")
    return f"; the model gives the {right}'s own numbers: look at the {wrong}"


def _sequences(found: Mismatch) -> list[SequenceEntry]:
    return [
        {
            "sample": one.sample,
            "tokens": one.tokens,
            "mean": one.mean,
            "share": one.share,
            "is_outlier": one.is_outlier,
            "versions": [{"weights": name, "begin": begin, "end": end} for name, begin, end in one.spans],
        }
        for one in found.sequences[:_MOST]
    ]


def _next(found: Mismatch) -> list[str]:
    """What to do: replay the candidates where none was, look whether weights arrived, look at the worst token."""
    path, step = shlex.quote(str(found.run.path)), "" if found.step is None else f" --step {found.step}"
    if found.sides is None:
        return [f"rldbg ls {path}"]
    steps = []
    if found.model is None:
        steps.append(f"rldbg mismatch {path}{step} --model HF_DIR")
    if found.model and not found.named and _agrees(found) is False:
        steps.append(f"rldbg mismatch {path}{step} --model {shlex.quote(found.model)} --older OTHER_WEIGHTS")
    if found.model and any(
        one.family in ("weights", "versions", "adapter", "quantised", "several") for one in found.named
    ):
        steps.append(f"rldbg weights {shlex.quote(found.model)} ENGINE_WEIGHTS")
    if not steps:
        steps.append(f"rldbg diagnose {path}{step}")
    return steps
