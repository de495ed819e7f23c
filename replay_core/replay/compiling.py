"""torch.compile around the backbone: one callable per (flags, capture set), and what compiling cost.

Hooks that are set after a module was compiled capture nothing, silently; so each callable has a code object
of its own, which is all that Dynamo keys its cache by, and is only ever called with the hooks it was made for.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import tempfile
import types
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
from msgspec import Struct, field

from replay_core.errors import UnavailableError
from replay_core.replay.flags import FLAGS, Flags

#: (backbone, keyword arguments) -> final hidden states.
Call = Callable[[Any, dict[str, Any]], torch.Tensor]

_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_DYNAMIC = {"auto": None, "on": True, "off": False}
#: What torch calls a backend that it has another name for: `eager` is a kernel of attention here.
_BACKENDS = {"dynamo": "eager"}
_REASONS_KEPT = 4
_numbers = count()


def plain(backbone: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """The final hidden states [b, s, D], not compiled."""
    hidden: torch.Tensor = backbone(**inputs).last_hidden_state
    return hidden


def need(flags: Flags) -> None:
    """Refuse a backend that cannot generate code here, before anything is compiled.

    Raises:
        UnavailableError: no C++ compiler, no triton, or no torch.compile for this Python.
    """
    if flags.compile == "off":
        return
    reason = _why_not(flags)
    if reason:
        hint = "compile=aot_eager traces the same graph without generating code"
        raise UnavailableError(f"compile={flags.compile} on {flags.device}: {reason}", hint=hint)


def _why_not(flags: Flags) -> str | None:
    try:
        torch._dynamo.eval_frame.check_if_dynamo_supported()
    except RuntimeError as error:
        return str(error)
    if flags.compile != "inductor":
        return None
    if flags.device == "cuda":
        return None if importlib.util.find_spec("triton") else "the package triton is not installed"
    from torch._inductor import cpp_builder, exc

    try:
        compiler = cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, OSError):
        # OSError: CXX names something that cannot be started.
        return "there is no C++ compiler (g++ or clang++) on the PATH, nor in CXX"
    return None if shutil.which(compiler) else f"the C++ compiler {compiler!r} cannot be found"


class Compiled(Struct):
    """The compiled callables of one loaded model, by the flags that shape their graph. None of them has hooks."""

    _calls: dict[tuple[Any, ...], Call] = field(default_factory=dict)
    _seen: set[tuple[Any, ...]] = field(default_factory=set)

    def call(self, flags: Flags) -> Call:
        """The callable without hooks for these flags; made where it is new."""
        key = _key(flags)
        if key not in self._calls:
            self._calls[key] = self.once(flags)
        return self._calls[key]

    def once(self, flags: Flags) -> Call:
        """A new callable: for a forward with the hooks that are set now, kept by nobody else."""
        # A copied code object is a new one to Dynamo, whatever its text.
        _forget_graphs()
        code = plain.__code__.replace(co_name=f"replay_{next(_numbers)}")
        function = types.FunctionType(code, plain.__globals__, code.co_name)
        call: Call = torch.compile(
            function, backend=_BACKENDS.get(flags.compile, flags.compile), dynamic=_DYNAMIC[flags.dynamic]
        )
        return call

    def is_warm(self, flags: Flags, shapes: tuple[Any, ...]) -> bool:
        """Whether these flags compiled these shapes before, in this process; remembers that now they have."""
        key = (*_key(flags), shapes)
        warm = key in self._seen
        self._seen.add(key)
        return warm


def _forget_graphs() -> None:
    """No graph that an earlier process traced: the cache of these, on the disk, knows nothing of the backend that
    `sdpa_kernel` pins, and gives back another one's (torch 2.11 and 2.13). What inductor makes of a graph stays cached.
    """
    from torch._functorch import config

    if hasattr(config, "enable_autograd_cache"):
        config.enable_autograd_cache = False


def _key(flags: Flags) -> tuple[Any, ...]:
    return tuple(getattr(flags, name) for name, flag in FLAGS.items() if flag.recompiles)


class Counting:
    """Dynamo's and inductor's counters over a stretch of work."""

    def __init__(self) -> None:
        from torch._dynamo.utils import counters

        self._counters = counters
        self._before = _copied(counters)
        self._recompiled = len(_recompilations())

    def report(self) -> dict[str, Any]:
        """graphs, recompiles and why, graph_breaks and why, hits of inductor's cache of compiled graphs."""
        now = _copied(self._counters)
        breaks = _grown(now, self._before, "graph_break")
        inductor = _grown(now, self._before, "inductor")
        again = _recompilations()[self._recompiled :]
        return {
            "graphs": _grown(now, self._before, "stats").get("unique_graphs", 0),
            "recompiles": len(again),
            "recompile_reasons": [" ".join(reason.split())[:300] for reason in again[:_REASONS_KEPT]],
            "graph_breaks": sum(breaks.values()),
            "graph_break_reasons": [" ".join(str(reason).split())[:300] for reason in list(breaks)[:_REASONS_KEPT]],
            "cache_hits": inductor.get("fxgraph_cache_hit", 0),
        }


def _recompilations() -> list[str]:
    """Why frames were compiled again, in this process so far. torch keeps the latest 64 compilations."""
    from torch._dynamo.utils import get_compilation_metrics

    reasons = (getattr(metrics, "recompile_reason", None) for metrics in get_compilation_metrics())
    return [str(reason) for reason in reasons if reason]


def _copied(counters: Any) -> dict[str, dict[str, int]]:
    return {str(group): dict(values) for group, values in counters.items()}


def _grown(now: dict[str, dict[str, int]], before: dict[str, dict[str, int]], group: str) -> dict[str, int]:
    older = before.get(group, {})
    grown = {name: value - older.get(name, 0) for name, value in now.get(group, {}).items()}
    return {name: value for name, value in grown.items() if value}


@contextlib.contextmanager
def cache(*, cold: bool) -> Iterator[None]:
    """An empty inductor cache for a first compile that is one; the usual cache otherwise."""
    if not cold:
        yield
        return
    before = os.environ.get(_CACHE_VARIABLE)
    with tempfile.TemporaryDirectory(prefix="rldbg-inductor-", ignore_cleanup_errors=True) as folder:
        os.environ[_CACHE_VARIABLE] = folder
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(_CACHE_VARIABLE, None)
            else:
                os.environ[_CACHE_VARIABLE] = before
