"""What a trainer computed whose recorded log-probabilities no cell computes: known mistakes are made on purpose, one
after the other, until one gives what was recorded.

Nothing is read off the values: a mistake is named where making it takes (nearly) all of the distance away, and its kind
is what the interventions say of that very setting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from replay_core.errors import JobCancelledError, RldbgError
from replay_core.records import Run
from replay_core.replay.batch import MicroBatch
from replay_core.replay.causes import cause_of_factory, cause_of_recording
from replay_core.replay.flags import Flags
from replay_core.replay.kinds import KINDS
from replay_core.replay.matrix import Bench, CellResult
from replay_core.replay.misread import misreadings
from replay_core.replay.module_kinds import names_state
from replay_core.replay.plan import FACTORY
from replay_core.replay.recorded import replayed
from replay_core.replay.references import CHECKPOINT, RANDOM, resolve

#: Rows of the trainer's own forward that are asked by themselves: those that are furthest off.
_ROWS_ASKED = 2
#: What is left of the distance, on average and at its worst token, where a mistake is what the trainer made.
_LEFT, _LEFT_AT_MOST = 0.1, 0.5
#: And what stays of it where something has no part in it.
_STAYS = 0.5


class Mistake(Struct, frozen=True):
    """What the trainer may have done: its settings, and how a sentence says it. `step`: with the weights of that;
    `unlike`: with the config misread so. `kind`: what it is, where nobody needs to ask.
    """

    said: str
    name: str
    flags: Flags
    step: int | None = None
    unlike: str | None = None
    kind: str | None = None


def mistakes(flags: Flags, run: Run, batch: MicroBatch, step: int | None, *, was_packed: bool) -> Iterator[Mistake]:
    """Likeliest first. `flags`: of the padded batch as it is; `step`: whose weights the replay has."""
    packs = list(_packs(flags)) if batch.rows > 1 else []
    padded = [*_padded(flags), *_turned(flags, batch)] if not batch.valid_BS.all() else []
    padded += _counted(flags, batch)
    yield from (*packs, *padded) if was_packed else (*padded, *packs)
    for other in sorted(key for key in run.models if key is not None and key != step):
        if step is not None and abs(other - step) == 1:
            yield Mistake(f"each row under the weights of step {other}", f"step{other}", flags, other)


def _packs(flags: Flags) -> Iterator[Mistake]:
    pack = replace(flags, packing=True, positions="cumsum", padding="recorded")
    yield Mistake("a pack of these samples", "pack", pack)
    yield Mistake("a pack without the mask between samples", "no_mask", replace(pack, block_mask=False))
    for fault, said in (
        ("no_positions", "a pack without position ids"),
        ("early", "a pack whose boundaries are one token early"),
        ("boundary", "a pack whose boundaries are one token late"),
        ("run_on", "a pack whose positions count through it, its samples kept apart"),
        ("foreign_key", "a pack in which each sample sees one key of the sample before it"),
    ):
        yield Mistake(said, fault, replace(pack, fault=fault))


def _padded(flags: Flags) -> Iterator[Mistake]:
    yield Mistake("a padded batch whose positions count the padding", "slots", replace(flags, positions="arange"))
    full = replace(flags, fault="padded_mask")
    yield Mistake("a padded batch whose mask calls padding tokens", "full_mask", full)
    said = "a padded batch without a mask, its positions counting the padding"
    yield Mistake(said, "no_padding", replace(full, positions="arange"))
    said = "a padded batch whose mask calls padding tokens, at position 0"
    yield Mistake(said, "full_zeros", replace(flags, fault="padded_zeros"))
    yield Mistake("a padded batch whose positions count from one", "from_one", replace(flags, fault="from_one"))


def _counted(flags: Flags, batch: MicroBatch) -> Iterator[Mistake]:
    """Positions that count the response otherwise, and those that were recorded."""
    counted_BS = np.cumsum(batch.valid_BS, axis=1) - 1
    if batch.positions_BS is not None and (batch.positions_BS != counted_BS)[batch.valid_BS].any():
        yield Mistake(
            "a padded batch with the positions that were recorded", "recorded", replace(flags, positions="recorded")
        )
    if batch.response_BS is None or not (batch.response_BS & batch.valid_BS & (counted_BS > 0)).any():
        return
    anew = replace(flags, fault="response_anew")
    yield Mistake("a padded batch whose positions begin again at the response", "response_anew", anew)
    wide = "a padded batch in which the response's positions go on from the longest prompt's length"
    yield Mistake(wide, "response_wide", replace(flags, fault="response_wide"))


def halves(bench: Bench) -> Iterator[Mistake]:
    """What no trainer means to do that computes in float32."""
    flags = Flags.from_mapping(bench.baseline.cell["flags"])
    for fault, what in (("half_softmax", "its log-softmax"), ("half_head", "its head and log-softmax")):
        said = f"each row alone with {what} taken in bfloat16"
        yield Mistake(said, fault, replace(flags, fault=fault), kind="maths")


def _turned(flags: Flags, batch: MicroBatch) -> Iterator[Mistake]:
    """Rows that were moved to the other side of their padding, and a mask that was not."""
    side = "left" if not batch.valid_BS[:, 0].all() else "right"
    other = "right" if side == "left" else "left"
    if not np.array_equal(batch.valid_BS, batch.padded_on(side).valid_BS):
        return
    said = f"a batch padded on the {other} under the mask of one padded on the {side}"
    # A token that is let see nothing is something else in each kernel.
    for kernel in dict.fromkeys((flags.attention, "eager")):
        moved = replace(flags, padding=other, fault="other_side", attention=kernel)
        within = "" if kernel == flags.attention else f", in {kernel}"
        slots = replace(moved, positions="arange")
        yield Mistake(f"{said}, its positions counting slots{within}", f"moved_slots_{kernel}", slots)
        yield Mistake(f"{said}{within}", f"moved_{kernel}", moved)


def _misread(reference: Flags, folder: str, batch: MicroBatch) -> Iterator[Mistake]:
    for one in misreadings(Path(folder), int(batch.valid_BS.sum(axis=1).max(initial=0))):
        yield Mistake(one.said, one.name, reference, unlike=one.name, kind=one.kind)


def explain(
    bench: Bench,
    held: Mapping[str, Any],
    distance: Callable[[CellResult], tuple[float, float] | None],
    run: Run,
    batch: MicroBatch,
    *,
    was_packed: bool,
    is_rounded: bool = False,
    is_itself: bool = False,
) -> dict[str, Any]:
    """Why something that was computed elsewhere is what no cell computes.

    Args:
        held: how far it is from each row alone (`mean_abs`, `max_abs`), and what it is (`causes.cause_of_recording`).
        distance: how far a result is from it, on average and at its worst token; None where that is not known.
        batch: all that was recorded of the micro-batch.
        is_rounded: whether it was formed, or kept, in half precision.
        is_itself: it is what the model's own forward gives, called whole: a mistake made with that would give it again,
            so packs are tried, and none but those whose modules can be watched.
    """
    padded = replace(Flags.from_mapping(bench.baseline.cell["flags"]), rows_per_forward=None)
    if bench.plan.model.startswith(FACTORY) and not is_itself:
        made_otherwise = _by_library(bench, held, distance, run, batch)
        if made_otherwise is not None:
            return made_otherwise
    tried = []
    step = bench.plan.step if bench.plan.model == "checkpoint" else None
    known = list(mistakes(padded, run, batch, step, was_packed=was_packed))
    if is_itself:
        known = list(_packs(padded)) if batch.rows > 1 else []
    with suppress(RldbgError):
        # First: a setting with a mask of its own has no window of the config's either.
        reference = Flags.from_mapping(bench.baseline.cell["flags"])
        known = [*_misread(reference, resolve(bench.plan, run)[0], batch), *known] if not is_itself else known
    if not is_itself and not was_packed and not batch.valid_BS.all() and _has_state(bench.baseline):
        said = "a padded batch of which the modules that carry a state are handed no mask"
        known = [Mistake(said, "state_unmasked", replace(padded, fault="state_unmasked")), *known]
    if is_rounded and bench.baseline.cell["flags"]["dtype"] == "float32":
        known = [*halves(bench), *known]
    bench.expected += len(known)
    for mistake in known:
        try:
            changes: dict[str, Any] = {}
            if mistake.step is not None:
                changes["model"] = resolve(replace(bench.plan, step=mistake.step), run)[0]
            if mistake.unlike is not None:
                changes["unlike"] = mistake.unlike
            result = bench.beside(mistake.flags, mistake.name, **changes)
        except JobCancelledError:
            raise
        except RldbgError:
            continue
        found = None if result.run is None or (is_itself and result.cell.get("forward")) else distance(result)
        if found is None:
            continue
        mean, most = found
        if mean <= _LEFT * held["mean_abs"] and most <= _LEFT_AT_MOST * held["max_abs"]:
            if mistake.kind is not None:
                return cause_of_recording(held, mistake.said, mean, kind=mistake.kind)
            why = None if mistake.step is not None else bench.why_beside(result, mistake.flags, mistake.name)
            if why is None and mistake.step is None:
                continue  # nothing shows what it does, and it is not ruled out
            if why is None or not why["is_noise"]:
                return cause_of_recording(held, mistake.said, mean, why)
        # What is each row alone but for rounding is no mistake.
        tried.append(mistake.said)
    return cause_of_recording(held, tried=tried)


def _by_library(
    bench: Bench,
    held: Mapping[str, Any],
    distance: Callable[[CellResult], tuple[float, float] | None],
    run: Run,
    batch: MicroBatch,
) -> dict[str, Any] | None:
    """The cause where what was computed elsewhere is what the library's own model of the noted checkpoint gives: then
    it is the factory's that computes something else. None where it is not, or there is none.
    """
    try:
        library = resolve(replace(bench.plan, model=CHECKPOINT), run)[0]
        if library.startswith((FACTORY, RANDOM)):
            return None
        bench.expected += 2
        result = bench.beside(Flags.from_mapping(bench.baseline.cell["flags"]), "library", model=library)
    except JobCancelledError:
        raise
    except RldbgError:
        return None
    found = None if result.run is None or bench.baseline.run is None else distance(result)
    if found is None or found[0] > _LEFT * held["mean_abs"] or found[1] > _LEFT_AT_MOST * held["max_abs"]:
        return None
    assert result.run is not None
    assert bench.baseline.run is not None
    off_B = np.abs(replayed(bench.baseline.run, batch) - replayed(result.run, batch)).sum(1)
    # Module by module only where the two are of one width.
    is_alike = any(one["worst_token"] is not None for one in result.segments or ())
    parted = bench.beside_library(library, int(off_B.argmax())) if is_alike else None
    return cause_of_factory(held, found[0], parted or {})


def _has_state(baseline: CellResult) -> bool:
    records = [] if baseline.run is None else baseline.run.select(stage="modules")
    return names_state(ref.name for record in records for ref in record.tensors())


def by_rows_alone(
    bench: Bench, own: CellResult, cause: dict[str, Any], batch: MicroBatch, *, is_unseen: bool = False
) -> dict[str, Any]:
    """The cause of the trainer's own forward (`own`) that no known mistake explains, its worst rows asked alone:
    what is right alone and wrong beside the others sees them; what is wrong alone as well does not need them.

    is_unseen: other tokens in a row move no other row, so that it is how many or how long they are.
    """
    assert own.run is not None
    assert bench.baseline.run is not None
    own_BS, right_BS = replayed(own.run, batch), replayed(bench.baseline.run, batch)
    off_B = np.abs(own_BS - right_BS).sum(1) / np.maximum(batch.valid_BS.sum(1), 1)
    # Beside one that is wrong a row that is only rounded tells nothing.
    rows = [int(row) for row in np.argsort(-off_B)[:_ROWS_ASKED] if off_B[row] > _LEFT * off_B.max()]
    bench.expected += len(rows)
    left = []
    for row in rows:
        try:
            result = bench.own_row(own, row)
        except JobCancelledError:
            raise
        except RldbgError:
            return cause
        if result.run is None:
            return cause
        few = batch.take([row])
        left.append(float(np.abs(replayed(result.run, few) - right_BS[[row]]).sum() / max(1, few.valid_BS.sum())))
    if not rows:
        return cause
    asked = " and ".join(f"row {row} ({one:.2g} nats off on average, {off_B[row]:.2g} beside the others)"
                         for row, one in zip(rows, left, strict=True))  # fmt: skip
    if all(one <= _LEFT * off_B[row] for row, one in zip(rows, left, strict=True)):
        kind = "batch" if is_unseen else "other_samples"
        unseen = ", by their number or length: other tokens in them move nothing" if is_unseen else ""
        why = f"by itself it is right of {asked}: which rows stand beside it decides{unseen}"
        return {**cause, "kind": kind, "off": sorted(rows), "sentence": f"its forward: {KINDS[kind].said}: {why}"}
    if all(one >= _STAYS * off_B[row] for row, one in zip(rows, left, strict=True)):
        return {
            **cause,
            "sentence": f"{cause['sentence']}; by itself it is as far off of {asked}: no other row has a part in it",
        }
    return cause
