"""What is told of a tensor where it lies on a device: what its digest and statistics are made of, in a few bytes.

All of it is launched on the trainer's own stream, before the trainer can change the tensor, and waits for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from replay_core import fold
from replay_core.hashes import digest_of

#: Device -> whether it folds known bytes to what the host folds them to.
_folds: dict[Any, bool] = {}
#: Elements looked at together, so that what is made of them stays small beside the trainer's memory: 128 MiB at most.
CHUNK = 1 << 24


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
    """Of a contiguous tensor, float64 on its device, a row of eight numbers per `CHUNK` values: how many are NaN, inf,
    -inf and zero; of the finite ones the least and the greatest; the mean and the variance of all, with 0 in place of
    what is not finite. `joined` makes figures of them. Of complex values the magnitudes.
    """
    flat = (dense.abs() if dense.is_complex() else dense).reshape(-1)
    rows = [_row(torch, flat[start : start + CHUNK]) for start in range(0, flat.numel(), CHUNK)]
    return rows[0] if len(rows) == 1 else torch.cat(rows) if rows else torch.zeros(0, dtype=torch.float64)


def _row(torch: Any, values: Any) -> Any:
    if not values.is_floating_point():
        # Bytes have an order, truth values have none to torch.
        values = values.byte() if values.dtype is torch.bool else values
        counts = torch.stack([(values == 0).sum()])
        counts = torch.nn.functional.pad(counts, (3, 0))
        low, high, clean = values.amin(), values.amax(), values
    else:
        values = values.float() if values.element_size() == 1 else values
        most = torch.finfo(values.dtype).max
        of = (values != values, values == math.inf, values == -math.inf, values == 0)
        counts = torch.stack([one.sum() for one in of])
        low, high = values.nan_to_num(most, most, most).amin(), values.nan_to_num(-most, -most, -most).amax()
        clean = values.nan_to_num(0, 0, 0)
    variance, mean = torch.var_mean(clean.double(), correction=0)
    return torch.cat([counts.double(), torch.stack([low, high]).double(), torch.stack([mean, variance])])


def joined(rows: Sequence[float], count: int) -> list[float]:
    """How many of `count` values are finite, NaN, inf, -inf and zero; of the finite ones the least, the greatest, the
    mean, the sum of squares around it, and the sum of squares: of what `moments` gave.
    """
    parts = [
        (min(CHUNK, count - number * CHUNK), rows[number * 8 : number * 8 + 8]) for number in range(len(rows) // 8)
    ]
    odd = [sum(part[1][place] for part in parts) for place in range(4)]
    finite = count - sum(odd[:3])
    if not finite:
        return [0.0, *odd, math.inf, -math.inf, math.nan, 0.0, 0.0]
    seen = [(size, part) for size, part in parts if sum(part[:3]) < size]
    mean = sum(size * part[6] for size, part in seen) / finite
    squares = sum(size * (part[7] + part[6] * part[6]) for size, part in seen)
    around = sum(
        size * (part[7] + (part[6] - mean) * (part[6] - mean)) - sum(part[:3]) * mean * mean for size, part in seen
    )
    return [finite, *odd, min(part[4] for _, part in seen), max(part[5] for _, part in seen), mean,
            max(around, 0.0), squares]  # fmt: skip
