"""What a dtype is: its size, what people call it, and how finely it tells numbers apart. Standard library only."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class Dtype(NamedTuple):
    """One dtype that numpy and ml_dtypes can hold.

    itemsize: bytes of an element. code: what safetensors calls it. aliases: what configurations call it.
    eps: distance from 1 to the next number. smallest_normal: below it, digits are lost. family: the row of the tables
    of tolerances, where it has one.
    """

    name: str
    itemsize: int
    code: str | None
    aliases: tuple[str, ...] = ()
    eps: float | None = None
    smallest_normal: float | None = None
    family: str | None = None


_ALL = (
    Dtype("bool", 1, "BOOL"),
    *(Dtype(f"{sign}int{bits}", bits // 8, f"{sign.upper() or 'I'}{bits}")
      for bits in (8, 16, 32, 64) for sign in ("", "u")),
    Dtype("float64", 8, "F64", ("fp64", "double"), 2.0**-52, 2.0**-1022, "float64"),
    Dtype("float32", 4, "F32", ("fp32", "float"), 2.0**-23, 2.0**-126, "float32"),
    Dtype("float16", 2, "F16", ("fp16", "half"), 2.0**-10, 2.0**-14, "float16"),
    Dtype("bfloat16", 2, "BF16", ("bf16",), 2.0**-7, 2.0**-126, "bfloat16"),
    Dtype("float8_e4m3fn", 1, "F8_E4M3", (), 2.0**-3, 2.0**-6, "float8"),
    Dtype("float8_e4m3fnuz", 1, "F8_E4M3FNUZ", (), 2.0**-3, 2.0**-7, "float8"),
    Dtype("float8_e5m2", 1, "F8_E5M2", (), 2.0**-2, 2.0**-14, "float8"),
    Dtype("float8_e5m2fnuz", 1, "F8_E5M2FNUZ", (), 2.0**-2, 2.0**-15, "float8"),
    Dtype("float8_e8m0fnu", 1, "F8_E8M0", family="float8"),
    Dtype("complex64", 8, "C64", (), 2.0**-23, 2.0**-126, "float32"),
    Dtype("complex128", 16, None, (), 2.0**-52, 2.0**-1022, "float64"),
)  # fmt: skip
DTYPES = {dtype.name: dtype for dtype in _ALL}

#: Bytes per element.
ITEMSIZE = {dtype.name: dtype.itemsize for dtype in _ALL}
_ALIASES = {alias: dtype.name for dtype in _ALL for alias in dtype.aliases}

#: Families from finest to coarsest: the coarser dtype of a pair sets its limits.
FAMILIES = ("float64", "float32", "float16", "bfloat16", "float8")
#: Per family, the eps of its coarsest dtype.
EPS = {name: max(dtype.eps or 0.0 for dtype in _ALL if dtype.family == name) for name in FAMILIES}


def named(word: str) -> str:
    """The dtype that a word of a configuration or of torch means: `bf16`, `torch.bfloat16`; others are left alone."""
    word = word.strip().removeprefix("torch.")
    return _ALIASES.get(word, word)


def aliases(*names: str) -> tuple[str, ...]:
    """What else dtypes are called."""
    return tuple(alias for alias, name in _ALIASES.items() if name in names)


@lru_cache(maxsize=256)
def family(dtype: str) -> str:
    """The row of the tables of tolerances that a dtype is judged by; what has none is held to the finest."""
    known = DTYPES.get(dtype)
    return dtype if dtype in FAMILIES else (known and known.family) or FAMILIES[0]


@lru_cache(maxsize=256)
def coarsest(*dtypes: str) -> str:
    """The coarsest family among dtypes: what a pair of them can be held to."""
    return max((family(dtype) for dtype in dtypes), key=FAMILIES.index)


@lru_cache(maxsize=256)
def finest(*dtypes: str) -> str:
    """The finest family among dtypes: what a baseline claims."""
    return min((family(dtype) for dtype in dtypes), key=FAMILIES.index)
