"""Proof by transplant: what one side put out of a module, in the other's forward; how much of the end difference comes.

The forward is the model's own code in fp64 on the recorded tokens, and nothing else is in its place. share is
<end with the graft - end without, d> / <d, d>, d what the two recordings differ by at their end: 1 where the module's
output brings all of it, 0 where none. What comes before the fault brings nothing, everything that follows brings it
too: the first module that brings most is where it arises, if it brings it at once. Rounding comes in everywhere, a
little more with every block. Inputs of modules need not be recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from replay_core.errors import UnavailableError
from replay_core.jobs import OnEvent, Progress, ignore
from replay_core.records import Record
from replay_core.referee.arithmetic import TrueTensor, exactly
from replay_core.referee.recorded import Recorded
from replay_core.referee.ruled import Graft, Grafting, RuledSide
from replay_core.referee.shadow import Shadow

#: A module brings the difference where it brings so much of it.
_MOST = 0.5
#: And at once: so much more than what comes before it. Rounding of half precision in a deep model brings less.
_AT_ONCE = 0.25
#: Shares that are one.
_SAME = 0.005
#: Modules that are all grafted; of more, the blocks are bisected and those within the one that is found.
_EVERY = 48


def grafted(
    a: RuledSide, records_a: Sequence[Record], b: RuledSide, records_b: Sequence[Record], on_event: OnEvent = ignore
) -> Grafting:
    """B's module outputs in A's forward, one at a time; and A's in B's, where B's forward makes the difference itself.

    Raises:
        UnavailableError: a side could not be ruled, no log-probabilities are recorded, or the tokens are others.
    """
    sides = [_Forward(side, records) for side, records in ((a, records_a), (b, records_b))]
    rows = _same_rows(sides[0].recorded, sides[1].recorded)
    ours, theirs = sides
    theirs.rows, ours.rows = rows, np.argsort(rows)
    end = (theirs.end()[rows] - ours.end()) * (ours.shadow.logprob_mask & theirs.shadow.logprob_mask[rows])
    power = float(end.square().sum())
    if not power:
        return Grafting("the log-probabilities are equal: there is nothing to graft", None, [])
    # Whether B's model makes of itself what B recorded more of: its weights or settings are other ones.
    own = float(((theirs.truth()[rows] - ours.truth()) * end).sum()) / power
    names = [name for name in ours.outputs() if name in theirs.outputs()]
    found: dict[str, Graft] = {}

    def share(name: str) -> float:
        if name not in found:
            on_event(Progress(len(found), _expected(names), f"graft {name}"))
            comes = float((ours.with_output(name, theirs) * end).sum()) / power
            goes = None
            if own > _MOST:
                goes = -float((theirs.with_output(name, ours)[rows] * end).sum()) / power
            found[name] = Graft(name, comes, goes)
        return found[name].comes

    for name in _chosen(names, share):
        share(name)
    table = [found[name] for name in names if name in found]
    said, module = told(table)
    if module is None and all(side.floor is not None and side.floor.ratio <= 1 for side in (a, b)):
        said += "; neither side's log-probabilities are off by more than rounding leaves"
    return Grafting(said, module, table)


def told(table: Sequence[Graft]) -> tuple[str, str | None]:
    """What transplants in order of computation show, as a sentence, and the module at which the difference arises; None
    where none brings most of it, or where it comes in little by little.
    """
    first = next((one for one in table if one.comes >= _MOST), None)
    if first is None:
        return "no module's output brings half of what the log-probabilities differ by", None
    # What of one block brings a part (queries, then keys) are no steps on the way: it is held to the blocks before.
    block = next((one for one in _blocks([one.tensor for one in table]) if _is_in(first.tensor, [one])), None)
    earlier = [one for one in table[: table.index(first)] if block is None or not _is_in(one.tensor, [block])]
    before = max(earlier, key=lambda one: one.comes, default=None)
    if before is not None and first.comes - before.comes < _AT_ONCE:
        said = (
            "no module alone carries what the log-probabilities differ by: it comes in little by little, as rounding "
            f"does, {before.comes:.1%} with {_module(before.tensor)}, {first.comes:.1%} with {_module(first.tensor)}"
        )
        return said, None
    carries = f"{_where(first, table)} carries {first.comes:.1%} of what the log-probabilities differ by"
    return carries, _module(first.tensor)


def _chosen(names: list[str], share: Any) -> list[str]:
    """Every module; of many, the blocks that a bisection asks for and what lies in the one that it ends at."""
    if len(names) <= _EVERY:
        return names
    blocks = _blocks(names)
    low, high = 0, len(blocks) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if share(blocks[middle]) >= _MOST else (middle + 1, high)
    inside = f"{_module(blocks[low])}." if blocks else ""
    return [name for name in names if name.startswith(inside) or not _is_in(name, blocks)]


def _blocks(names: Sequence[str]) -> list[str]:
    """The outermost numbered modules: the layers, and not the experts within them."""
    numbered = [name for name in names if _module(name).rpartition(".")[2].isdecimal()]
    return [name for name in numbered if not _is_in(name, [one for one in numbered if one != name])]


def _is_in(name: str, blocks: Sequence[str]) -> bool:
    return any(name.startswith(f"{_module(one)}.") for one in blocks)


def _expected(names: Sequence[str]) -> int:
    """About how many grafts there will be."""
    blocks = _blocks(names)
    if len(names) <= _EVERY or not blocks:
        return len(names)
    outside = sum(not _is_in(name, blocks) for name in names)
    return outside + len(blocks).bit_length() + -(-(len(names) - outside) // len(blocks))


def _where(first: Graft, table: Sequence[Graft]) -> str:
    """The module at which the difference arises. What a part is given by the module that it is in has no output of its
    own (the kernel before an output projection): where the whole brings as much, it is within that, from the part on.
    """
    module = _module(first.tensor)
    parent, _, part = module.rpartition(".")
    whole = next((one for one in table if _module(one.tensor) == parent), None)
    if whole is None or parent.rpartition(".")[2].isdecimal() or abs(whole.comes - first.comes) > _SAME:
        return module
    return f"{parent}, from its {part} on,"


def _module(name: str) -> str:
    return name.partition(".output")[0]


def _same_rows(a: Recorded, b: Recorded) -> np.ndarray[Any, np.dtype[np.int64]]:
    """For every sample of A the sample of B that has its tokens."""
    keys = []
    for side in (a, b):
        ids = side.ids_BL
        if ids is None:
            raise UnavailableError("a graft runs the model on recorded tokens", expected="input_ids on both sides")
        keys.append([tuple(row[:size].tolist()) for row, size in zip(ids, side.sizes, strict=True)])
    if sorted(keys[0]) != sorted(keys[1]):
        raise UnavailableError("the two sides hold other tokens: what one put out has no place in the other")
    orders = [sorted(range(len(each)), key=each.__getitem__) for each in keys]
    rows = np.zeros(len(orders[0]), np.int64)
    rows[orders[0]] = orders[1]
    return rows


class _Forward:
    """A side's model on its tokens, and what the side recorded."""

    def __init__(self, side: RuledSide, records: Sequence[Record]) -> None:
        if side.model is None or side.place is None:
            raise UnavailableError(f"{side.run.path}: {side.why_not}")
        self.recorded = Recorded(side.run, side.place, records)
        said = self.recorded.logprobs()
        if said is None:
            raise UnavailableError("a graft is followed to the log-probabilities", expected="recorded on both sides")
        self.shadow = Shadow(side.model, self.recorded, side.temperature, is_forced=False)
        self.shadow.needs_logits = True
        self._order: list[str] = []
        with self._in_order():
            self.shadow.judge()
        self.claim = self.shadow.claims[said[0]]
        #: This side's samples in the other's order.
        self.rows = np.zeros(0, np.int64)

    def outputs(self) -> list[str]:
        """Recorded outputs of the model's modules, in order of computation."""
        names = [name for name, ref in self.recorded.modules.items()
                 if ".output" in name and ref.dtype.startswith(("float", "bfloat")) and "[" not in name]  # fmt: skip
        place = {name: at for at, name in enumerate(self._order)}
        alone = [name for name in names if name.endswith((".output", ".output.0")) and _module(name) in place]
        return sorted(alone, key=lambda name: place[_module(name)])

    @contextmanager
    def _in_order(self) -> Iterator[None]:
        """While it is open, modules are noted as they return."""
        handles = [module.register_forward_hook(lambda *_, names=names: self._order.extend(names))
                   for module, names in self.shadow.modules]  # fmt: skip
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def end(self) -> torch.Tensor:
        return self._grid(self.claim.recorded)

    def truth(self) -> torch.Tensor:
        return self._grid(self.claim.truth)

    def with_output(self, name: str, other: _Forward) -> torch.Tensor:
        """How far the log-probabilities move with the other side's recorded output of a module, [B, L-1]."""
        with self._replacing(name, other):
            return self._grid(self.shadow.perturb(exactly)[self.claim.name])

    def _grid(self, values: torch.Tensor) -> torch.Tensor:
        grid = torch.zeros(self.shadow.logprob_mask.shape, dtype=torch.float64)
        grid[self.shadow.logprob_mask] = values[:, 0]
        return grid

    @contextmanager
    def _replacing(self, name: str, other: _Forward) -> Iterator[None]:
        def put(_module: Any, _args: Any, output: Any) -> Any:
            first = output[0] if isinstance(output, (tuple, list)) else output
            shape = (*other.recorded.grid_shape, *first.shape[2:]) if first.ndim > 2 else tuple(first.shape)
            grid = other.recorded.grid_of(name, shape)
            if grid is None:
                return output
            values = grid.reshape(*other.recorded.grid_shape, -1)[other.rows].astype(np.float64)
            made = TrueTensor(torch.from_numpy(values).reshape(first.shape), first.dtype)
            return (made, *output[1:]) if isinstance(output, (tuple, list)) else made

        handle = self.shadow.module(_module(name)).register_forward_hook(put)
        try:
            yield
        finally:
            handle.remove()
