"""Capture that keeps no tensor: a digest and statistics of each, over the tokens, as it passes.

A digest is over each sample's own tokens in the batch's order, without padding, so it does not depend on how the
samples were laid out: the same numbers padded, packed and row by row have the same digest. Nobody forges a replay of
their own: 128 bits of XXH3 tell tensors apart at memory speed, which SHA-256 is far from.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Container, Iterable
from typing import Any

import numpy as np
import torch
import xxhash
from msgspec import Struct, field

from replay_core.kernel import LEAST_SQUARES, ends_at
from replay_core.recorder.values import bytes_at
from replay_core.replay.capture import Capture
from replay_core.replay.frontier import Hashed
from replay_core.replay.packing import Arrangement, Forward
from replay_core.samples.layout import Ints


class _Seen(Struct):
    """What is known of one tensor of one forward: digests per sample, and sums over its tokens."""

    samples: dict[int, bytes]
    nbytes: int
    squares: float
    low: float
    high: float
    is_finite: bool


class Hashes(Struct):
    """Collects what every forward of a cell says, by name, in call order.

    left_out: names of tensors without a token axis, which say nothing that layouts have in common.
    """

    arrangement: Arrangement
    left_out: set[str] = field(default_factory=set)
    _seen: dict[str, list[_Seen]] = field(default_factory=dict)

    def tokens_of(self, number: int) -> list[tuple[int, Ints]]:
        """(sample, flat slots of its tokens within the forward of that number, in order), sample by sample."""
        axis, layout = self.arrangement.axis, self.arrangement.layout
        start = sum(one.input_ids.shape[axis] for one in self.arrangement.forwards[:number])
        end = start + self.arrangement.forwards[number].input_ids.shape[axis]
        part = slice(start, end) if axis == 0 else (slice(None), slice(start, end))
        sample, position = layout.sample_BS[part].reshape(-1), layout.position_BS[part].reshape(-1)
        found = []
        for one in np.unique(sample[sample >= 0]):
            slots = np.flatnonzero(sample == one)
            found.append((int(one), slots[np.argsort(position[slots], kind="stable")]))
        return found

    def add(self, name: str, seen: _Seen | None) -> None:
        if seen is None:
            self.left_out.add(name)
        else:
            self._seen.setdefault(name, []).append(seen)

    def told(self) -> list[Hashed]:
        """One entry per tensor that every forward had."""
        found = []
        for name, parts in self._seen.items():
            if len(parts) != len(self.arrangement.forwards):
                self.left_out.add(name)
                continue
            samples: dict[int, bytes] = {}
            for part in parts:
                samples |= part.samples
            whole = xxhash.xxh3_128_hexdigest(b"".join([samples[number] for number in sorted(samples)]))
            finite = all(part.is_finite for part in parts)
            found.append(
                Hashed(
                    name,
                    f"xxh3_128:{whole}",
                    sum(part.nbytes for part in parts),
                    math.sqrt(sum(part.squares for part in parts)) if finite else None,
                    min(part.low for part in parts) if finite else None,
                    max(part.high for part in parts) if finite else None,
                )
            )
        return found


class HashCapture(Capture):
    """The hooks of `Capture`, keeping digests only: memory does not grow with the number of modules."""

    def __init__(
        self,
        backbone: torch.nn.Module,
        modules: Iterable[str],
        forward: Forward,
        number: int,
        hashes: Hashes,
        by_head: Container[str] = (),
    ) -> None:
        super().__init__(backbone, modules, int(forward.input_ids.shape[1]), by_head)
        self._shape = tuple(forward.input_ids.shape)
        self._hashes = hashes
        self._tokens = [(sample, _lying(slots)) for sample, slots in hashes.tokens_of(number)]
        self._looked: dict[int, tuple[Any, int, _Seen | None]] = {}

    def _take(self, name: str, tensor: torch.Tensor) -> None:
        known = self._looked.get(id(tensor))
        if known is None or known[0]() is not tensor or known[1] != tensor._version:
            known = self._looked[id(tensor)] = (weakref.ref(tensor), tensor._version, self._look(tensor))
        self._hashes.add(name, known[2])

    def _look(self, tensor: torch.Tensor) -> _Seen | None:
        if tuple(tensor.shape[:2]) == self._shape:
            rows_ND = tensor.detach().flatten(0, 1)
        elif tensor.ndim and tensor.shape[0] == self._shape[0] * self._shape[1]:
            rows_ND = tensor.detach()
        else:
            return None
        size, dtype = tensor.element_size(), str(tensor.dtype).removeprefix("torch.")
        is_here = rows_ND.is_cpu and rows_ND.is_contiguous()
        begin, width = rows_ND.data_ptr(), tensor.numel() // max(rows_ND.shape[0], 1)
        squares, low, high, finite = 0.0, math.inf, -math.inf, True
        samples = {}
        # Here and not in a thread beside: torch's own wait for their next work on every core, which delays one by more
        # than a digest takes (measured: 1.33 times the time of a forward with digests beside it, 1.24 without).
        for number, slots in self._tokens:
            values_SD: torch.Tensor | None = None
            if is_here and isinstance(slots, slice):  # by their address: a view of a tensor costs as much as its digest
                address, count = begin + slots.start * width * size, (slots.stop - slots.start) * width
            else:
                values_SD = rows_ND[slots].to("cpu").contiguous()
                address, count = values_SD.data_ptr(), values_SD.numel()
            samples[number] = xxhash.xxh3_128_digest(bytes_at(address, count * size))
            smallest, largest, summed = ends_at(address, count, dtype) or _ends(
                rows_ND[slots].to("cpu") if values_SD is None else values_SD
            )
            finite = finite and summed is not None
            squares += summed or 0.0
            low, high = min(low, smallest), max(high, largest)
        return _Seen(samples, tensor.numel() * size, squares, low, high, finite)


def _ends(values: torch.Tensor) -> tuple[float, float, float | None]:
    """The least, the greatest, and the sum of squares where the compiled loop has none; None for that where an element
    is not finite.
    """
    values_N = _widened(values).reshape(-1)
    # A NaN passes through min and max: finite ends mean that everything between is finite. NumPy's are two passes, and
    # yet half the time of torch.aminmax.
    smallest, largest = float(values_N.numpy().min()), float(values_N.numpy().max())
    finite = math.isfinite(smallest) and math.isfinite(largest)
    return smallest, largest, _squares(values_N) if finite else None


def _widened(values: torch.Tensor) -> torch.Tensor:
    if values.dtype in (torch.float32, torch.float64):
        return values
    return values.float() if values.is_floating_point() else values.double()


def _squares(values_N: torch.Tensor) -> float:
    """The sum of the squares of finite values; what float32 cannot hold is squared in float64."""
    squares = float(torch.dot(values_N, values_N))
    if not LEAST_SQUARES < squares < math.inf:
        wide_N = values_N.double()
        squares = float(torch.dot(wide_N, wide_N))
    return squares


def _lying(slots: Ints) -> slice | torch.Tensor:
    """A sample's rows: a slice where they lie together, as they do but for holes in a mask."""
    first, last = int(slots[0]), int(slots[-1])
    return slice(first, last + 1) if last - first + 1 == slots.size else torch.from_numpy(slots)
