"""Products of a layer's weight with what it reads: most of what a truth costs, and the same from run to run.

A weight is widened a piece at a time, never as a whole: a vocabulary's head alone would be gigabytes. Of a recorded
input the product is the same in every run, whatever is rounded behind it, and the sum of its squared terms, which says
how far its order may move it, is nearly the same of any input: both are kept, as far as there is room.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from replay_core.referee.arithmetic import Noise, Rounding, TrueTensor, exactly

#: Elements of a weight that are widened at a time.
_PIECE = 1 << 21
_HALVES = (torch.bfloat16, torch.float16)


class KeptProducts:
    """What is kept of products from run to run, `room` bytes of it at most.

    A key holds where a weight's values lie and how often they were written; the weight is kept with what was made of
    it, so that nothing else can come to lie there.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self._held: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def get(self, *key: Any) -> torch.Tensor | None:
        found = self._held.get(key)
        return None if found is None else found[1]

    def put(self, weight: torch.Tensor, made: torch.Tensor, *key: Any) -> None:
        size = made.numel() * made.element_size()
        if key not in self._held and size <= self.room:
            self.room -= size
            self._held[key] = (weight.detach(), made)


class Products(TorchFunctionMode):  # type: ignore[misc]
    """While it is open, `torch.nn.functional.linear` of tensors that are true within is computed here.

    is_narrow: in fp32 where the result is half precision.
    """

    def __init__(self, rounding: Rounding, kept: KeptProducts, *, is_narrow: bool) -> None:
        super().__init__()
        self.rounding, self.kept, self.is_narrow = rounding, kept, is_narrow
        self._calls: Counter[int] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear and 2 <= len(args) <= 3:
            x, weight = args[:2]
            bias = args[2] if len(args) == 3 else kwargs.get("bias")
            if _is_plain(x, weight, bias):
                with _disable_current_modes():
                    return self._linear(x, weight, bias)
        return func(*args, **kwargs)

    def _linear(self, x: TrueTensor, weight: torch.Tensor, bias: torch.Tensor | None) -> TrueTensor:
        dtype, noise = x.dtype, self.rounding if isinstance(self.rounding, Noise) else None
        wide = torch.float32 if self.is_narrow and dtype in _HALVES else torch.float64
        rows = x.true.reshape(-1, x.shape[-1])
        call = self._calls[weight.data_ptr()]
        self._calls[weight.data_ptr()] += 1
        at = (weight.data_ptr(), weight._version, tuple(weight.shape))
        from_record = ("product", x.source, *at, tuple(rows.shape))
        about = ("squares", call, *at, tuple(rows.shape))
        product = None if x.source is None else self.kept.get(*from_record)
        squares = self.kept.get(*about)
        # Of a recorded input both at once: reading the weight is most of the work of a large one.
        is_kept = x.source is not None and _is_owned(weight)
        needs_squares = squares is None and (noise is not None or (is_kept and product is None))
        if product is None or needs_squares:
            made, summed = _multiplied(rows, weight, wide, needs_product=product is None, needs_squares=needs_squares)
            if made is not None:
                product = made
                if is_kept:
                    # Of half precision fp32 is kept: 2^-13 of what any rounding leaves.
                    self.kept.put(weight, made.float() if dtype in _HALVES else made, *from_record)
            if summed is not None:
                squares = summed
                if _is_owned(weight):
                    self.kept.put(weight, summed.bfloat16(), *about)
        assert product is not None
        value = product.to(wide, copy=True)
        if bias is not None:
            value += bias.to(wide)
        if noise is not None and squares is not None:
            value = noise.of_product(value, squares, dtype)
        elif self.rounding is not exactly:
            value = self.rounding("addmm", value, dtype)
        return TrueTensor(value.reshape(*x.shape[:-1], weight.shape[0]), dtype)


def _is_plain(x: Any, weight: Any, bias: Any) -> bool:
    """Whether weights as they are stored, two axes, are multiplied with a tensor of their dtype that is true within."""
    stored = [weight] if bias is None else [weight, bias]
    return isinstance(x, TrueTensor) and all(
        isinstance(one, torch.Tensor) and not isinstance(one, TrueTensor) and one.dtype == x.dtype for one in stored
    ) and weight.ndim == 2  # fmt: skip


def _is_owned(weight: torch.Tensor) -> bool:
    """Whether it is the model's own, or a part of it, and no weight of a hypothesis."""
    whole = weight if weight._base is None else weight._base
    return isinstance(whole, torch.nn.Parameter)


def _multiplied(
    rows_NK: torch.Tensor, weight_CK: torch.Tensor, wide: torch.dtype, *, needs_product: bool, needs_squares: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The product [N, C] in `wide`, and the sums of its squared terms [N, C] in fp32."""
    given_NK = rows_NK.to(wide)
    count, inner = weight_CK.shape
    product = given_NK.new_empty((len(given_NK), count)) if needs_product else None
    squares = given_NK.new_empty((len(given_NK), count), dtype=torch.float32) if needs_squares else None
    # The squares in fp32, of rows whose largest is 1: squares of what bfloat16 holds would be infinite.
    largest_N1 = given_NK.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    squared_NK = (given_NK / largest_N1).square().float() if needs_squares else None
    step = max(1, _PIECE // max(1, inner))
    piece_CK = torch.empty((min(step, count), inner), dtype=wide)
    for start in range(0, count, step):
        part = weight_CK[start : start + step]
        wide_CK = piece_CK[: len(part)].copy_(part)
        if product is not None:
            torch.mm(given_NK, wide_CK.T, out=product[:, start : start + step])
        if squares is not None and squared_NK is not None:
            torch.mm(squared_NK, wide_CK.square_().float().T, out=squares[:, start : start + step])
    if squares is not None:
        squares *= largest_N1.float().square()
    return product, squares
