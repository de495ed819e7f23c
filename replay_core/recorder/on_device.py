"""What is told of a tensor where it lies on a device: what its digest and statistics are made of, in a few bytes.

All of it is launched on the trainer's own stream, before the trainer can change the tensor, and waits for nothing.
"""

from __future__ import annotations

import math
from typing import Any

from replay_core import fold
from replay_core.hashes import digest_of

#: Device -> whether it folds known bytes to what the host folds them to.
_folds: dict[Any, bool] = {}
#: Elements looked at together, so that what is made of them stays small beside the trainer's memory.
_CHUNK = 2 << 20


def can_fold(torch: Any, device: Any) -> bool:
    """Whether a device's digests are those that a reader takes of the same bytes. The first time it is waited for."""
    if device not in _folds:
        try:
            fold.warm(torch, device)
            left = fold.left_on_device(torch, fold.known_bytes(torch, device)).cpu()
            _folds[device] = digest_of([bytes(left.tolist())], "xxh3").endswith(fold.KNOWN_DIGITS)
        except torch.cuda.OutOfMemoryError:
            return False  # there may be room another time
        except (RuntimeError, AttributeError):  # no such product on this device, or in this torch
            _folds[device] = False
    return _folds[device]


def moments(torch: Any, dense: Any) -> Any:
    """Of a contiguous tensor, in float64 on its device: how many values are finite, NaN, inf, -inf and zero; of the
    finite ones the least, the greatest, the mean, the sum of squares around it, and the sum of squares.

    Of complex values the magnitudes.
    """
    flat = (dense.abs() if dense.is_complex() else dense).reshape(-1)
    is_short = flat.element_size() <= (4 if flat.is_floating_point() else 2)
    wide = torch.float32 if is_short else torch.float64
    double: dict[str, Any] = {"dtype": torch.float64, "device": flat.device}
    counts, low, high = (
        torch.zeros(5, **double),
        torch.full((), math.inf, **double),
        torch.full((), -math.inf, **double),
    )
    total, squares, around = (torch.zeros((), **double) for _ in range(3))
    chunks = [flat[start : start + _CHUNK] for start in range(0, flat.numel(), _CHUNK)]
    for chunk in chunks:
        values = chunk.to(wide)
        finite = values.isfinite()
        counts += torch.stack(
            [finite.sum(), values.isnan().sum(), values.isposinf().sum(), values.isneginf().sum(), (values == 0).sum()]
        )
        low = torch.minimum(low, values.where(finite, math.inf).amin().double())
        high = torch.maximum(high, values.where(finite, -math.inf).amax().double())
        values = values.where(finite, 0)
        total += values.sum(dtype=torch.float64)
        squares += torch.linalg.vector_norm(values, dtype=torch.float64).square()
    mean = total / counts[0]
    for chunk in chunks:
        values = chunk.to(torch.float64)
        around += (values - mean).where(values.isfinite(), 0).square().sum()
    return torch.cat([counts, torch.stack([low, high, mean, around, squares])])
