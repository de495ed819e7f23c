"""Tensors that are bfloat16 on the outside and float64 within.

A model's own code decides by dtypes what it casts and where. To run it in fp64 without changing a line of it, every
tensor keeps the dtype the code expects and carries its value in fp64. What an operation would have rounded to, in the
dtype it would have had, is then a choice: nothing is rounded (the truth), a random rounding error is added (Monte Carlo
arithmetic: Parker, "Monte Carlo arithmetic", 1997), or the operations of a recipe are rounded.

Where a random error of half precision is added, float32 carries the value as well as float64: its own error is 2^-13
and less of the one that is added. Such runs take half the time and memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

aten = torch.ops.aten

#: Bits of the significand, the hidden one included, and the exponent of the smallest normal number.
SIGNIFICAND = {torch.bfloat16: (8, -126), torch.float16: (11, -14), torch.float32: (24, -126)}

#: Operations that only move values or choose among them: whatever went in is representable, so nothing is rounded.
_MOVES = {
    "clone", "cat", "stack", "index", "gather", "index_select", "embedding", "copy_", "where", "masked_fill",
    "masked_fill_", "repeat", "neg", "abs", "maximum", "minimum", "amax", "amin", "max", "min", "relu", "clamp",
    "topk", "sort", "scatter", "scatter_", "slice_scatter", "select_scatter", "index_put_", "index_put", "fill_",
    "zero_", "zeros_like", "ones_like", "new_zeros", "new_ones", "zeros", "ones", "empty", "empty_like", "new_empty",
    "full", "full_like", "new_full", "triu", "tril", "roll", "flip", "constant_pad_nd", "detach", "alias", "lift_fresh",
    "_unsafe_view", "_reshape_copy", "expand_copy", "split_with_sizes", "arange", "scalar_tensor", "squeeze", "chunk",
}  # fmt: skip
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
#: Operations that add up a whole row of one sign, and the lanes in which a kernel does that.
_LONG_SUMS, _LANES = {"_softmax", "_log_softmax", "logsumexp"}, 8
#: Operations of one tensor whose results are small differences of numbers as large as what goes in.
_CANCELLING = {"gelu", "softplus", "mish", "_log_softmax", "logsumexp"}


class TrueTensor(torch.Tensor):  # type: ignore[misc]
    """A float tensor of one dtype whose value is `true`, in fp64 (or fp32, of half precision in a run with noise).

    source: the recorded tensor that it is; None where it was computed.
    """

    true: torch.Tensor
    source: str | None

    @staticmethod
    def __new__(cls, true: torch.Tensor, dtype: torch.dtype) -> TrueTensor:
        made: TrueTensor = torch.Tensor._make_wrapper_subclass(
            cls, true.shape, strides=true.stride(), dtype=dtype, device=true.device
        )
        made.true, made.source = true, None
        return made

    def __repr__(self) -> str:
        return f"TrueTensor({self.true}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Arithmetic().__torch_dispatch__(func, types, args, kwargs)


#: (what the operation is called, its number within the module that runs it, its value, the dtype it has outside) ->
#: the value it goes on with.
Rounding = Callable[[str, torch.Tensor, torch.dtype], torch.Tensor]


def exactly(_name: str, value: torch.Tensor, _dtype: torch.dtype) -> torch.Tensor:
    """Nothing is rounded."""
    return value


def nearest(_name: str, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Every operation's result rounded to the nearest number of its dtype: the code as it is written."""
    return value.to(dtype).double() if dtype in SIGNIFICAND else value


def ulp(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The spacing of a dtype's numbers at each value, fp64 or fp32 as the values are. Zeros have that of the smallest
    normal number.
    """
    bits, smallest = SIGNIFICAND[dtype]
    # The power of two below a value is what the bits of its exponent say alone; of what is infinite, the largest.
    whole, exponent, largest = _EXPONENT[value.dtype]
    power = (value.view(whole) & exponent).view(value.dtype)
    return power.clamp_(min=2.0**smallest, max=largest).mul_(2.0 ** (1 - bits))


_EXPONENT = {
    torch.float64: (torch.int64, 0x7FF0000000000000, 2.0**1023),
    torch.float32: (torch.int32, 0x7F800000, 2.0**127),
}


def rounded_to(dtype: torch.dtype, value: torch.Tensor) -> TrueTensor:
    """A tensor as one of another dtype, rounded to it."""
    with _disable_current_modes():
        true = value.true if isinstance(value, TrueTensor) else value.double()
        return TrueTensor(true.to(dtype).double(), dtype)


class Noise:
    """Adds what rounding would: uniform within half a unit of the last place, independent for every element.

    accumulation: c of acc^2 = (2^-24)^2/3 * c * sum (w x)^2, the error of a sum in float32 (`limits.ACCUMULATION`).
    within: operations in float32 round to this dtype instead.
    """

    def __init__(self, seed: int, accumulation: float, within: torch.dtype | None = None) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.accumulation, self.within = accumulation, within

    def __call__(self, _name: str, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in SIGNIFICAND:
            return value
        drawn = torch.rand(value.shape, dtype=value.dtype, generator=self._generator).sub_(0.5)
        return drawn.mul_(ulp(value, self.within or dtype)).add_(value)

    def of_sum(self, squares: torch.Tensor) -> torch.Tensor:
        """The error of float32 sums whose squared terms add up to `squares`."""
        scale = 2.0**-24 * (self.accumulation / 3) ** 0.5
        drawn = torch.randn(squares.shape, dtype=squares.dtype, generator=self._generator)
        return drawn.mul_(scale).mul_(squares.clamp(min=0).sqrt_())

    def of_product(self, value: torch.Tensor, squares: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A product [N, C] with what its sum and its rounding leave, `squares` as in `of_sum`; one draw for both where
        the sum's part is small, as it is of half precision."""
        if dtype not in SIGNIFICAND or value.dtype == torch.float64:
            return self("addmm", value + self.of_sum(squares.to(value.dtype)), dtype)
        width = ulp(value, self.within or dtype)
        width = width.square_().add_(squares, alpha=2.0**-46 * self.accumulation).sqrt_()
        drawn = torch.rand(value.shape, dtype=value.dtype, generator=self._generator).sub_(0.5)
        return drawn.mul_(width).add_(value)

    def of_long_sum(self, like: torch.Tensor, count: int) -> torch.Tensor:
        """The error, as a part of it, of a float32 sum of `count` terms of one sign, as a softmax's are.

        A kernel adds them one after the other in 8 lanes (torch's own on a CPU): sqrt(count / 8) roundings of the sum,
        most of them to one side in all rows that are alike. Half of it is every row's own.
        """
        drawn = torch.randn(like.shape, dtype=like.dtype, generator=self._generator)
        common = torch.randn((), dtype=like.dtype, generator=self._generator)
        return drawn.add_(common).mul_(2.0**-24 * (count / _LANES / 2) ** 0.5)


class Arithmetic(TorchDispatchMode):  # type: ignore[misc]
    """While it is open, floating-point operations run in fp64 behind their own dtypes.

    is_narrow: results of half precision in fp32; by itself where noise is added to them.
    """

    def __init__(self, rounding: Rounding = exactly, *, is_narrow: bool | None = None) -> None:
        super().__init__()
        self.rounding = rounding
        self.is_narrow = isinstance(rounding, Noise) if is_narrow is None else is_narrow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if name == "_to_copy" and _is_stored(args[0]) and kwargs.get("dtype") in SIGNIFICAND:
            # A weight that is cast: the same of it is rounded every time.
            return rounded_to(kwargs["dtype"], args[0])
        if name == "embedding" and _is_stored(args[0]):
            # Rows of a table: only these are widened.
            rows = func(*args, **kwargs)
            return TrueTensor(rows.double(), rows.dtype)
        if func.is_view and _is_stored(args[0]):
            return func(*args, **kwargs)
        is_in_place = name.endswith("_") and not name.startswith("_") and bool(args)
        native = None if is_in_place else _native_dtypes(func, args, kwargs)
        is_written = is_in_place and isinstance(args[0], TrueTensor)
        wide = args[0].true.dtype if is_written else self._carrier(native)
        true_args = _each(lambda value: _true(value, wide), args)
        true_kwargs = {
            key: _wide(key, _each(lambda one: _true(one, wide), value), wide) for key, value in kwargs.items()
        }
        if name == "_softmax" or name == "_log_softmax":
            true_args = (*true_args[:2], False)
        out = func(*true_args, **true_kwargs)
        if is_written:
            args[0].source = None
            if name not in _MOVES and self.rounding is not exactly:
                args[0].true.copy_(self.rounding(name, args[0].true, args[0].dtype))
            return args[0]
        if is_in_place and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
            args[0].copy_(true_args[0])
            return args[0]
        if not any(isinstance(one, torch.Tensor) and one.dtype == wide for one in _flat(out)):
            return out
        dtypes = _asked(args, kwargs, out) if native is None else native
        if len(dtypes) != len(_flat(out)):
            # Pieces of one tensor: how many depends on its size.
            dtypes = dtypes[:1] * len(_flat(out))
        if isinstance(self.rounding, Noise):
            out = self._of_sums(func, name, true_args, out, dtypes)
        is_free = name in _MOVES or func.is_view or self.rounding is exactly or _is_widening(name, args, dtypes)
        if not is_free and name in _PRODUCTS and isinstance(self.rounding, Noise):
            out = out + self.rounding.of_sum(_squares(name, true_args))
        elif (
            not is_free and name in _CANCELLING and isinstance(self.rounding, Noise) and out.shape == true_args[0].shape
        ):
            out = out + self.rounding.of_sum(true_args[0].square())
        made = []
        for one, dtype in zip(_flat(out), dtypes, strict=True):
            if isinstance(one, torch.Tensor) and one.dtype == wide and dtype is not None:
                value = one if is_free else self.rounding(name, one, dtype)
                made.append(TrueTensor(value, dtype))
            else:
                made.append(one)
        if isinstance(out, (tuple, list)):
            return type(out)(made) if type(out) in (tuple, list) else tuple(made)
        return made[0]

    def _carrier(self, native: list[torch.dtype | None] | None) -> torch.dtype:
        """The dtype that carries the values of an operation whose results are `native`."""
        floats = [dtype for dtype in native or () if dtype is not None and dtype.is_floating_point]
        return torch.float32 if self.is_narrow and floats and all(one in _HALVES for one in floats) else torch.float64

    def _of_sums(
        self, func: Any, name: str, true_args: Any, out: Any, dtypes: list[torch.dtype | None]
    ) -> torch.Tensor | tuple[Any, ...]:
        """What an operation that adds up rows gives with the errors of these sums."""
        noise = self.rounding
        assert isinstance(noise, Noise)
        if name == "native_layer_norm":
            return (self._layer_norm(*true_args), *out[1:])
        if name == "_softmax" and noise.within is not None and dtypes[0] is not None:
            # In the coarse dtype the sum is rounded, too: an error that all of a row have in common.
            out = out * (noise("", sums := torch.ones_like(out[..., :1]) * 1.5, dtypes[0]) / sums)
        if name in _LONG_SUMS:
            axes = true_args[1] if isinstance(true_args[1], (tuple, list)) else [true_args[1]]
            rows = out if name == "logsumexp" else out.narrow(axes[0], 0, 1)
            error = noise.of_long_sum(rows, math.prod(true_args[0].shape[axis] for axis in axes))
            out = out * (1 + error) if name == "_softmax" else out + error
        found: torch.Tensor | tuple[Any, ...] = out
        return found

    def _layer_norm(self, x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> torch.Tensor:
        """The normalisation in float32 steps, each with its own error: x / deviation and mean / deviation cancel, and
        weight and bias may."""
        axes, noise = tuple(range(-len(shape), 0)), self.rounding
        assert isinstance(noise, Noise)

        def step(value: torch.Tensor) -> torch.Tensor:
            return noise("", value, torch.float32)

        def mean(value: torch.Tensor) -> torch.Tensor:
            count = value.numel() / value.sum(axes).numel()
            return step(value.mean(axes, keepdim=True)) + noise.of_sum(value.square().sum(axes, keepdim=True)) / count

        middle = mean(x)
        deviation = step((mean((x - middle).square()) + eps).rsqrt())
        scaled = step(step(x * deviation) - step(middle * deviation))
        scaled = scaled if weight is None else step(scaled * weight)
        return scaled if bias is None else scaled + bias


def _each(change: Callable[[Any], Any], tree: Any) -> Any:
    """Arguments with each leaf changed; torch's own walk over them takes as long as the operation."""
    if isinstance(tree, tuple):
        return tuple(_each(change, one) for one in tree)
    if isinstance(tree, list):
        return [_each(change, one) for one in tree]
    if isinstance(tree, dict):
        return {key: _each(change, one) for key, one in tree.items()}
    return change(tree)


def _is_stored(value: Any) -> bool:
    return isinstance(value, torch.nn.Parameter) and value.is_floating_point()


def _true(value: Any, wide: torch.dtype) -> Any:
    if isinstance(value, TrueTensor):
        return value.true.to(wide)
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(wide)
    return value


def _wide(key: str, value: Any, wide: torch.dtype) -> Any:
    is_float = key == "dtype" and isinstance(value, torch.dtype) and value.is_floating_point
    return wide if is_float else value


def _flat(out: Any) -> list[Any]:
    return list(out) if isinstance(out, (tuple, list)) else [out]


_HALVES = (torch.bfloat16, torch.float16)
_DTYPES: dict[str, list[torch.dtype | None]] = {}


def _native_dtypes(func: Any, args: Any, kwargs: Any) -> list[torch.dtype | None] | None:
    """The dtypes that the operation would have given its results, told by running it on tensors without values; None
    where its shapes depend on values."""
    key = str((func, _each(_kind, args), kwargs.get("dtype")))
    if key in _DTYPES:
        return _DTYPES[key]
    try:
        meta_args = _each(_meta, args)
        meta_kwargs = {k: (torch.device("meta") if k == "device" else v) for k, v in _each(_meta, kwargs).items()}
        if not any(isinstance(one, torch.Tensor) for one in _leaves(args)):
            meta_kwargs["device"] = torch.device("meta")
        found = [one.dtype if isinstance(one, torch.Tensor) else None for one in _flat(func(*meta_args, **meta_kwargs))]
    except Exception:
        return None
    _DTYPES[key] = found
    return found


def _asked(args: Any, kwargs: Any, out: Any) -> list[torch.dtype | None]:
    """The dtypes of results whose shapes depend on values: such operations choose, and keep their first operand's."""
    floats = (one for one in _leaves(args) if isinstance(one, torch.Tensor) and one.is_floating_point())
    asked = kwargs.get("dtype") or next((one.dtype for one in floats), torch.float32)
    return [asked if isinstance(one, torch.Tensor) and one.is_floating_point() else None for one in _flat(out)]


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, (tuple, list)):
        return [leaf for one in tree for leaf in _leaves(one)]
    return [tree]


def _kind(value: Any) -> Any:
    """What of an argument decides a result's dtype: a tensor's own, and whether it is a number of no dimension."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), value.ndim == 0)
    return str(value) if isinstance(value, torch.dtype) else type(value).__name__


def _meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


def _is_widening(name: str, args: Any, dtypes: list[torch.dtype | None]) -> bool:
    if name not in ("_to_copy", "to"):
        return False
    before, after = args[0].dtype, dtypes[0]
    if not before.is_floating_point or before not in SIGNIFICAND or after not in SIGNIFICAND:
        return not before.is_floating_point
    return SIGNIFICAND[after][0] >= SIGNIFICAND[before][0]


def _squares(name: str, args: Any) -> torch.Tensor:
    pair = args[1:3] if name in ("addmm", "baddbmm") else args[:2]
    product = torch.bmm if name in ("bmm", "baddbmm") else torch.mm
    return product(pair[0].square(), pair[1].square())
