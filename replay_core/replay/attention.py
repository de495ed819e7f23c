"""Attention settings: what each needs, whether it can run here, and the context that pins its kernel."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from msgspec.structs import replace

from replay_core.errors import CellError, RldbgError, UnavailableError
from replay_core.replay import faults, libraries
from replay_core.replay.flags import Flags
from replay_core.replay.packing import Forward

_IMPLEMENTATIONS = {
    "eager": "eager",
    "sdpa": "sdpa",
    "sdpa-math": "sdpa",
    "sdpa-flash": "sdpa",
    "sdpa-efficient": "sdpa",
    "sdpa-cudnn": "sdpa",
    "flex": "flex_attention",
    "fa2": "flash_attention_2",
    "fa3": "flash_attention_3",
    "fa4": "flash_attention_4",
    "own": None,
}
_BACKENDS = {
    "sdpa-math": "MATH",
    "sdpa-flash": "FLASH_ATTENTION",
    "sdpa-efficient": "EFFICIENT_ATTENTION",
    "sdpa-cudnn": "CUDNN_ATTENTION",
}
#: What torch calls a backend where it says why it does not use it.
_TOLD_AS = {
    "sdpa-flash": "Flash attention kernel",
    "sdpa-efficient": "Memory efficient kernel",
    "sdpa-cudnn": "cuDNN attention kernel",
}
#: Where torch's own source raised a warning: of no use to who reads why a kernel was not used.
_RAISED_AT = re.compile(r"\s*\(Triggered internally at [^)]*\)\.?")
_PACKAGES = {"fa2": "flash_attn", "fa3": "flash_attn_interface", "fa4": "flash_attn.cute"}
#: Kernels that compute in halves alone.
HALVES_ALONE = tuple(_PACKAGES)
#: Kernels that hold the scores of every token pair at once.
_QUADRATIC = ("eager", "sdpa-math")


def implementation(flags: Flags) -> str | None:
    """transformers' word for the attention asked for (`flash` must be resolved); None leaves the model's own."""
    return _IMPLEMENTATIONS[flags.attention]


def is_users_own(word: str | None) -> bool:
    """Whether attention of this name is none of the library's, whosever operators it computes with."""
    return word is not None and word.removeprefix("paged|") not in _IMPLEMENTATIONS.values()


def backend_of(flags: Flags) -> str | None:
    """torch's word for the one backend of its own attention that the flags pin."""
    return _BACKENDS.get(flags.attention)


def resolve(flags: Flags) -> tuple[Flags, list[str]]:
    """The flags with `flash` made the best flash attention that is really here, and what to say about it."""
    if flags.attention != "flash":
        return flags, []
    why = []
    for name in ("fa4", "fa3", "fa2"):
        candidate = replace(flags, attention=name)
        reasons = _flash_reasons(candidate)
        if not reasons:
            return candidate, [f"flash is {name} here"]
        why.append(f"{name}: {reasons[0]}")
    return replace(flags, attention="sdpa-flash"), [f"flash is torch's own flash kernel here ({'; '.join(why)})"]


def need(flags: Flags) -> None:
    """Refuse what cannot run on this machine, before a model is loaded.

    Raises:
        UnavailableError: every reason why.
    """
    reasons = []
    if flags.device == "cuda" and not torch.cuda.is_available():
        reasons.append("this machine has no CUDA device that torch can use")
    if flags.attention in ("sdpa-efficient", "sdpa-cudnn") and flags.device != "cuda":
        reasons.append("torch has this kernel for CUDA only; on CPU its attention is sdpa or sdpa-math")
    if flags.attention in _PACKAGES:
        reasons += _flash_reasons(flags)
    if reasons:
        raise UnavailableError(f"{flags.attention} on {flags.device}: " + "; ".join(reasons))


def _flash_reasons(flags: Flags) -> list[str]:
    reasons = []
    package = _PACKAGES[flags.attention]
    root = package.partition(".")[0]
    if root in libraries.BROKEN:
        reasons.append(f"the package {root} is installed but broken: {libraries.BROKEN[root]}")
    else:
        try:
            if importlib.util.find_spec(package) is None:
                reasons.append(f"the package {package} is not installed")
        except ModuleNotFoundError:
            reasons.append(f"the package {package} is not installed")
    if flags.device != "cuda":
        reasons.append("flash-attention runs on CUDA only")
    if flags.dtype in ("float32", "float64"):
        reasons.append("flash-attention computes in float16 and bfloat16 only")
    if flags.packing and (not flags.block_mask or flags.fault in ("foreign_key", "run_on")):
        reasons.append("flash-attention cuts samples at the position ids and has no mask to leave out or to spoil")
    if not reasons and flags.device == "cuda":
        reasons += _broken(package)
    return reasons


def _broken(package: str) -> list[str]:
    """An installed package may be built for another torch or CUDA: only importing it tells."""
    try:
        importlib.import_module(package)
    except Exception as error:
        return [f"the package {package} is installed but broken: {type(error).__name__}: {_first_line(error)}"]
    return []


def need_memory(flags: Flags, forwards: list[Forward], heads: int) -> None:
    """Refuse a forward whose attention scores would not fit in memory.

    Raises:
        UnavailableError: the forecast, and what is free.
    """
    if flags.attention not in _QUADRATIC:
        return
    rows, width = max((forward.input_ids.shape for forward in forwards), key=lambda shape: shape[0] * shape[1] ** 2)
    # Scores in the model's dtype, their softmax in float32, and one more copy on the way.
    forecast = rows * heads * width**2 * (8 + getattr(torch, flags.dtype).itemsize)
    free = torch.cuda.mem_get_info()[0] if flags.device == "cuda" else psutil.virtual_memory().available
    if forecast > free:
        raise UnavailableError(
            f"{flags.attention} holds the scores of all {width:,} x {width:,} token pairs of {heads} heads at once",
            expected=f"about {forecast / 2**30:.1f} GiB",
            found=f"{free / 2**30:.1f} GiB free",
            hint="attention=sdpa needs no such matrix; or rows_per_forward=1",
        )


@contextlib.contextmanager
def pinned(flags: Flags) -> Iterator[None]:
    """Run attention with the backend the flags name, and no other; name it when it cannot.

    Raises:
        UnavailableError: the kernel refused these inputs, with torch's reasons.
        CellError: the model failed, or memory ran out.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        try:
            with _backend(flags):
                faults.strike(flags)
                yield
        except RldbgError:
            raise
        except torch.OutOfMemoryError as error:
            raise CellError(
                "the GPU ran out of memory", found=_first_line(error), hint="rows_per_forward=1, or dtype=bfloat16"
            ) from error
        except Exception as error:
            traceback.print_exc()
            raise _named(flags, error, [str(warning.message) for warning in said]) from error
    for warning in said:
        # What a model says belongs in the log, whatever the filters of this process.
        sys.stderr.write(warnings.formatwarning(warning.message, warning.category, warning.filename, warning.lineno))


@contextlib.contextmanager
def _backend(flags: Flags) -> Iterator[None]:
    if flags.attention not in _BACKENDS:
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel([getattr(SDPBackend, _BACKENDS[flags.attention])]), _keys_repeated(flags):
        yield


@contextlib.contextmanager
def _keys_repeated(flags: Flags) -> Iterator[None]:
    """The library leaves grouped keys to the kernel where there is no mask; torch's efficient kernel takes none."""
    try:
        from transformers.integrations import sdpa_attention
    except ImportError:
        sdpa_attention = None
    if flags.attention != "sdpa-efficient" or not hasattr(sdpa_attention, "use_gqa_in_sdpa"):
        yield
        return
    before = sdpa_attention.use_gqa_in_sdpa
    sdpa_attention.use_gqa_in_sdpa = lambda *_args, **_kwargs: False
    try:
        yield
    finally:
        sdpa_attention.use_gqa_in_sdpa = before


def _named(flags: Flags, error: Exception, said: list[str]) -> CellError:
    text = str(error)
    if "No available kernel" in text or "No viable backend" in text:
        why = "; ".join(_why_unused(flags, said)) or _first_line(error)
        hint = None
        if flags.attention == "sdpa-flash" and "attn_mask" in why:
            hint = "rows_per_forward=1 needs no mask; or install flash-attn: fa2, fa3 and fa4 cut samples by position"
        return UnavailableError(f"{flags.attention} cannot compute this batch on {flags.device}: {why}", hint=hint)
    if "softcap" in text:
        return UnavailableError(f"{flags.attention} cannot compute this model: {_first_line(error)}")
    return CellError(
        f"the model failed: {type(error).__name__}: {_first_line(error)}",
        hint="the log holds the whole traceback",
    )


def _why_unused(flags: Flags, said: list[str]) -> list[str]:
    """Why torch did not use the pinned backend: what it said below that one's name, and not below another's."""
    reasons: list[str] = []
    told = ""
    for line in (_RAISED_AT.sub("", line).strip() for line in said):
        if line.endswith("kernel not used because:"):
            told = line
        elif told.startswith(_TOLD_AS.get(flags.attention, "")) and line not in reasons:
            reasons.append(line.rstrip("."))
    return reasons


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def masks_by_positions() -> bool:
    """Whether the installed transformers keeps packed samples apart by itself, from position ids that restart."""
    try:
        from transformers import masking_utils
    except ImportError:
        return False
    return hasattr(masking_utils, "find_packed_sequence_indices")


def additive_block_mask(position_ids_1T: Any, dtype: torch.dtype) -> torch.Tensor:
    """[1, 1, T, T]: 0 where a token may look (its own sample, not ahead), the dtype's minimum elsewhere.

    Additive and float, because a bool mask is right in sdpa and wrong in eager.
    """
    position_T = torch.as_tensor(position_ids_1T).reshape(-1)
    sample_T = (position_T == 0).cumsum(0)
    order_T = torch.arange(position_T.numel(), device=position_T.device)
    allowed_TT = (sample_T[:, None] == sample_T[None, :]) & (order_T[:, None] >= order_T[None, :])
    return additive_mask(allowed_TT, dtype, position_T.device)


def additive_mask(allowed_TT: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
    """[1, 1, T, T]: 0 where `allowed_TT`, the dtype's minimum elsewhere."""
    allowed = torch.as_tensor(allowed_TT, device=device)
    mask_TT = torch.zeros(allowed.shape, dtype=dtype, device=device)
    return mask_TT.masked_fill_(~allowed, torch.finfo(dtype).min)[None, None]
