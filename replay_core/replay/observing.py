"""The captured pass of a cell: its tensors or their digests, the operators that ran, and whether looking changed it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct

from replay_core.jobs import Progress
from replay_core.replay import compiling
from replay_core.replay.answer import observer_effect
from replay_core.replay.capture import Capture, Tensors, TraceableCapture, join, need_all
from replay_core.replay.effective import Operators, Profiled
from replay_core.replay.frontier import Hashed, module_of
from replay_core.replay.hashing import HashCapture, Hashes

if TYPE_CHECKING:
    from replay_core.replay.cell import BatchReplay

#: Name of the final hidden states where no module of the backbone puts them out.
UNOWNED_HIDDEN = "final_hidden.output"


class Observed(Struct, frozen=True):
    """tensors: what was kept in full. attention: the operators that ran. observer: how hooked stands to plain (None
    without hooks). hashes: the digests where they were taken in place of tensors."""

    tensors: Tensors
    attention: str
    observer: dict[str, Any] | None = None
    hashes: list[Hashed] | None = None


def observe(cell: BatchReplay, run: compiling.Call, final_hidden: str, hidden: torch.Tensor) -> Observed:
    """Run the cell's forwards once more and look inside; `hidden` is what the plain pass put out."""
    owner = module_of(final_hidden)
    compiled = cell.flags.compile != "off"
    level = cell.capture["level"]
    if level == "none" or (level == "hash" and compiled):
        # A compiled graph would hold every tensor before one of them could be hashed.
        return Observed({final_hidden: hidden.cpu()}, operators_alone(cell, run))
    hooked = [*cell.modules, *([owner] if final_hidden != UNOWNED_HIDDEN and owner not in cell.modules else [])]
    hashes = None
    if level == "hash":
        again, operators, hashes = _hashed_pass(cell, hooked)
        tensors = {final_hidden: again}
        ran = operators.attention() if operators else _higher_order(cell)
    elif compiled:
        tensors = _compiled_capture(cell, hooked, final_hidden)
        ran = operators_alone(cell, run)
    else:
        tensors, operators = _captured_pass(cell, hooked, final_hidden)
        ran = operators.attention() if operators else _higher_order(cell)
    observed = observer_effect(tensors[final_hidden], hidden.cpu())
    if not observed["bitwise"]:
        cell.notes.append("the hooked forward differs bitwise from the plain one, whose logprobs these are")
    if compiled or level == "hash":
        # The cell's own answer is the pass without hooks.
        tensors[final_hidden] = hidden.cpu()
    return Observed(tensors, ran, observed, hashes)


def _counting(cell: BatchReplay) -> Operators | None:
    # flex attention is a higher-order operator, which a dispatch mode would run uncompiled.
    return None if cell.flags.attention == "flex" else Operators()


def _captured_pass(cell: BatchReplay, hooked: list[str], final_hidden: str) -> tuple[Tensors, Operators | None]:
    operators = _counting(cell)
    parts: list[Tensors] = []
    ran: set[str] = set()
    forwards = cell.arrangement.forwards
    for done, forward in enumerate(forwards, start=1):
        width = int(forward.input_ids.shape[1])
        with (
            operators or contextlib.nullcontext(),
            Capture(cell.model.backbone, hooked, width, cell.by_head) as capture,
        ):
            hidden = cell.forward(compiling.plain, forward)
        _hold(capture.tensors, final_hidden, hidden)
        parts.append(capture.tensors)
        ran |= capture.ran
        cell.on_event(Progress(done, len(forwards), "captured forwards"))
    cell.notes += need_all(cell.modules, ran, cell.plan.capture)
    if capture.skipped:
        cell.notes.append("attention weights are not stored: only eager forms them, and they grow with T squared")
    return _joined(cell, parts), operators


def _hashed_pass(cell: BatchReplay, hooked: list[str]) -> tuple[torch.Tensor, Operators | None, list[Hashed]]:
    """(the final hidden states, the operators that ran, the digests)."""
    operators = _counting(cell)
    hashes = Hashes(cell.arrangement)
    hidden: list[torch.Tensor] = []
    ran: set[str] = set()
    forwards = cell.arrangement.forwards
    for number, forward in enumerate(forwards):
        capture = HashCapture(cell.model.backbone, hooked, forward, number, hashes, cell.by_head)
        with operators or contextlib.nullcontext(), capture:
            hidden.append(cell.forward(compiling.plain, forward).cpu())
        ran |= capture.ran
        cell.on_event(Progress(number + 1, len(forwards), "hashed forwards"))
    cell.notes += need_all(cell.modules, ran, cell.plan.capture)
    told = hashes.told()
    if hashes.left_out:
        names = ", ".join(sorted(hashes.left_out)[:3])
        cell.notes.append(f"{len(hashes.left_out)} captured tensors have no token axis and were not hashed: {names}")
    return torch.cat(hidden, dim=cell.arrangement.axis), operators, told


def _compiled_capture(cell: BatchReplay, hooked: list[str], final_hidden: str) -> Tensors:
    forwards = cell.arrangement.forwards
    widest = max(int(forward.input_ids.shape[1]) for forward in forwards)
    parts: list[Tensors] = []
    ran: set[str] = set()
    # The hooks' own store is part of the traced graph: each capture is a callable of its own.
    traced = TraceableCapture(cell.model.backbone, hooked, widest, cell.captured_names(), cell.by_head)
    run = cell.model.compiled.once(cell.flags)
    try:
        for done, forward in enumerate(forwards, start=1):
            hidden = cell.forward(run, forward)
            tensors, names = traced.take()
            _hold(tensors, final_hidden, hidden)
            parts.append(tensors)
            ran |= names
            cell.on_event(Progress(done, len(forwards), "captured forwards"))
    finally:
        traced.remove()
    cell.notes += need_all(cell.modules, ran, cell.plan.capture)
    return _joined(cell, parts)


def _hold(tensors: Tensors, final_hidden: str, hidden: torch.Tensor) -> None:
    """What a forward put out, where no module did under that name: none owns it, or one is called row by row and the
    model puts the rows together.
    """
    held = tensors.get(final_hidden)
    if held is None or held.shape != hidden.shape:
        tensors[final_hidden] = hidden.cpu()


def _joined(cell: BatchReplay, parts: list[Tensors]) -> Tensors:
    tensors, notes = join(parts, cell.arrangement)
    cell.notes += notes
    return tensors


def operators_alone(cell: BatchReplay, run: compiling.Call) -> str:
    """The attention operators of a pass of its own; remembered, since equal flags run equal kernels."""
    if cell.flags.attention == "flex":
        return _higher_order(cell)
    shapes = tuple(forward.input_ids.shape for forward in cell.arrangement.forwards)
    key = ("operators", tuple(cell.flags.to_mapping().items()), shapes)
    if key not in cell.model.known:
        with Profiled() if cell.flags.compile != "off" else Operators() as operators:
            cell.forward(run, cell.arrangement.forwards[0])
        cell.model.known[key] = operators.attention()
    return str(cell.model.known[key])


def _higher_order(cell: BatchReplay) -> str:
    return f"{cell.model.causal_lm.config._attn_implementation} (a higher-order operator)"
