"""Whom a token's work in one module hangs on: all tokens at once, by one backward pass.

A gradient proposes and an intervention decides: a rounding has none, a kernel may know none, and what is proposed is
changed to see (`interventions`). But no key of the past is left out because nobody thought of its place.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from msgspec import Struct, field

from replay_core.errors import CellError
from replay_core.replay import compiling
from replay_core.replay.capture import Capture
from replay_core.replay.interventions import Observer, TensorPlace, by_slot, evaluating
from replay_core.replay.packing import Forward

#: Share of the greatest from which on a token counts as one that work hangs on, and up to which as one it does not.
_HANGS, _FREE = 1e-7, 1e-13
#: Seconds for one module under one setting; what is left undone is said.
_SECONDS = 10.0


class Hanging(Struct, frozen=True):
    """[heads, queries, slots]: how much each query's work hangs on each slot of the batch, of its greatest; one head
    where they are not told apart. `asked` of `of` (query, head) pairs were.
    """

    shares: torch.Tensor
    asked: int
    of: int


class Proposed(Struct):
    """What to change, as the two settings' gradients have it: own tokens that are lost (by position), later tokens and
    samples that are seen though they may not be; and how much was asked."""

    lost: list[int] = field(default_factory=list)
    later: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    queries: int = 0
    keys: int = 0
    heads: int = 0

    def to_mapping(self) -> dict[str, int]:
        return {"queries": self.queries, "keys": self.keys, "heads": self.heads}


class _Kept(Capture):
    """Of all tensors the one that is asked for, with its history."""

    def __init__(self, backbone: torch.nn.Module, modules: Sequence[str], width: int, wanted: str) -> None:
        super().__init__(backbone, modules, width)
        self.wanted = wanted
        self.found: torch.Tensor | None = None

    def _take(self, name: str, tensor: torch.Tensor) -> None:
        if name == self.wanted and self.found is None:
            self.found = tensor


def hanging(observer: Observer, place: TensorPlace, queries: Sequence[int], heads: int = 1) -> Hanging | None:
    """How `place.tensor` of each of these tokens (by sample and position) hangs on what its module is given; None
    where no gradient comes through.
    """
    cell = observer.cell
    slots = observer.slots.numpy()[np.asarray(queries, dtype=np.int64)]
    shape = cell.arrangement.input_ids.shape
    whole = torch.zeros(heads, len(queries), *shape, dtype=torch.float64)
    axis, start, asked = cell.arrangement.axis, 0, 0
    until = time.monotonic() + _SECONDS
    rows, columns = np.unravel_index(slots, shape)
    for forward in cell.arrangement.forwards:
        size = forward.input_ids.shape[axis]
        along = rows if axis == 0 else columns
        mine = [number for number, at in enumerate(along) if start <= at < start + size]
        if mine:
            within = [(int(rows[one]) - start * (axis == 0), int(columns[one]) - start * (axis == 1)) for one in mine]
            try:
                shares = _of_one(observer, place, forward, within, heads, until)
            except (CellError, RuntimeError):
                return None
            if shares is None:
                return None
            done, found = shares
            asked += done
            part = whole[:, :, start : start + size] if axis == 0 else whole[:, :, :, start : start + size]
            part[:, mine] = found
        start += size
    greatest = whole.flatten(2).amax(-1)
    return Hanging(whole.flatten(2) / greatest.clamp(min=1e-300)[..., None], asked, heads * len(queries))


def _of_one(
    observer: Observer, place: TensorPlace, forward: Forward, queries: Sequence[tuple[int, int]], heads: int,
    until: float,
) -> tuple[int, torch.Tensor] | None:  # fmt: skip
    backbone = observer.cell.model.backbone
    rows, width = (int(one) for one in forward.input_ids.shape)
    leaves: list[torch.Tensor] = []

    def leaf(given: torch.Tensor) -> torch.Tensor:
        leaves.append(given.detach().clone().requires_grad_())
        return leaves[-1]

    def before(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given: Any = args[0] if args else kwargs.get("hidden_states")
        if not torch.is_tensor(given) or not given.is_floating_point() or _slots_of(given, rows, width) is None:
            return None
        return ((leaf(given), *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": leaf(given)})

    if place.module == "the model":
        embedding = observer.cell.model.causal_lm.get_input_embeddings()
        hook = embedding.register_forward_hook(lambda _module, _args, put: leaf(put))
    else:
        hook = backbone.get_submodule(place.module).register_forward_pre_hook(before, with_kwargs=True)
    try:
        with torch.enable_grad(), evaluating(observer.cell.model.causal_lm), _frozen(observer):
            kept = _Kept(backbone, observer.modules, width, place.tensor)
            with kept:
                observer.cell.forward(compiling.plain, forward)
            target = None if kept.found is None else by_slot(kept.found, rows, width)
            if target is None or not leaves or not target.requires_grad or target.shape[-1] % heads:
                return None
            return _gradients(target, leaves, queries, heads, until)
    finally:
        hook.remove()


def _gradients(
    target: torch.Tensor, leaves: list[torch.Tensor], queries: Sequence[tuple[int, int]], heads: int, until: float
) -> tuple[int, torch.Tensor]:
    """(how many backward passes there was time for, [heads, queries, b, s])."""
    rows, width = int(target.shape[0]), int(target.shape[1])
    found = torch.zeros(heads, len(queries), rows, width, dtype=torch.float64)
    parts = target.chunk(heads, -1)
    ways = torch.randn(parts[0].shape[-1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    done = 0
    for number, (row, column) in enumerate(queries):
        for head, part in enumerate(parts):
            if done and time.monotonic() > until:
                found[head, number] = torch.nan
                continue
            value = part[row, column] @ ways.to(part.device, part.dtype)
            for gradient in torch.autograd.grad(value, leaves, retain_graph=True, allow_unused=True):
                laid = None if gradient is None else _slots_of(gradient, rows, width)
                if laid is not None:
                    found[head, number] += laid.double().norm(dim=-1).cpu()
            done += 1
    return done, found


def proposed(
    cell: Observer, own: Observer, here: Hanging, there: Hanging, queries: Sequence[int]
) -> Proposed:  # fmt: skip
    """What two settings' gradients have different."""
    heads = int(here.shares.shape[0])
    told = Proposed(queries=len(queries), keys=int((cell.position_N[list(queries)] + 1).sum()), heads=heads)
    slots = cell.slots.numpy()
    sample_S = np.full(int(here.shares.shape[-1]), -1)
    sample_S[slots] = cell.sample_N
    for number, query in enumerate(queries):
        sample, position = int(cell.sample_N[query]), int(cell.position_N[query])
        for head in range(heads):
            mine, alone = here.shares[head, number], there.shares[head, number]
            if not bool(torch.isfinite(mine).all() and torch.isfinite(alone).all()) or not bool(mine.amax() > 0):
                continue
            here_N, there_N = mine[cell.slots].numpy(), alone[own.slots].numpy()
            is_own = cell.sample_N == sample
            past = is_own & (cell.position_N <= position)
            told.lost += cell.position_N[past & (there_N > _HANGS) & (here_N <= _FREE)].tolist()
            told.later += cell.position_N[is_own & ~past & (here_N > _HANGS) & (there_N <= _FREE)].tolist()
            seen_S = (mine.numpy() > _HANGS) & (sample_S != sample) & (sample_S >= 0)
            told.samples += np.unique(sample_S[seen_S]).tolist()
    for listed in (told.lost, told.later, told.samples):
        listed[:] = sorted(set(listed))
    return told


def queries_of(observer: Observer, apart_N: torch.Tensor, least: float, most: int) -> list[int]:
    """Tokens that part: the furthest off, the first and the last of every sample, and some between."""
    off = np.flatnonzero(~(apart_N.numpy() <= least))
    if not off.size:
        return []
    chosen = [int(apart_N.argmax())]
    for sample in np.unique(observer.sample_N[off]).tolist():
        mine = off[observer.sample_N[off] == sample]
        chosen += [int(mine[0]), int(mine[-1])]
    chosen += [int(one) for one in off[np.linspace(0, off.size - 1, most).astype(int)]]
    return list(dict.fromkeys(chosen))[:most]


@contextlib.contextmanager
def _frozen(observer: Observer) -> Iterator[None]:
    """Weights without gradients: only what goes into the module has one."""
    held = [one for one in observer.cell.model.causal_lm.parameters() if one.requires_grad]
    try:
        for one in held:
            one.requires_grad_(False)
        yield
    finally:
        for one in held:
            one.requires_grad_(True)


def _slots_of(tensor: torch.Tensor, rows: int, width: int) -> torch.Tensor | None:
    if tensor.shape[:2] == (rows, width):
        return tensor.reshape(rows, width, -1)
    if tensor.shape[:1] == (rows * width,):
        return tensor.reshape(rows, width, -1)
    return None
