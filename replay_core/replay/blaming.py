"""Which pass of torch.compile it is, asked of torch's own bisector (`torch._inductor.compiler_bisector`).

It compiles again and again with less: backends with more and more of the compiler until one fails, then that backend
without one subsystem after the other, then, of a subsystem that is applied many times, ever fewer times. Only a child
that has torch imports this.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
from msgspec.structs import replace

from replay_core.dtypes import DTYPES
from replay_core.dumps import open_run
from replay_core.jobs import OnEvent, Progress, ignore
from replay_core.replay import attention, settings
from replay_core.replay.batch import MicroBatch, resolve_temperature
from replay_core.replay.bench import ReplayBench
from replay_core.replay.causes import is_rounding
from replay_core.replay.depth import first_layers, layers_of
from replay_core.replay.flags import Flags
from replay_core.replay.held import HOLDER
from replay_core.replay.interventions import finest, in_dtype, relative
from replay_core.replay.plan import ReplayPlan
from replay_core.replay.reading import read_batch
from replay_core.replay.why import figures, is_mixture

#: No further compilation is begun after so many seconds.
LIMIT_S = 300.0
_OUT_OF_TIME = "which pass is not known: no time was left while"
#: What torch calls them -> what they add.
_STAGES = {
    "eager": "Dynamo", "aot_eager": "AOTAutograd", "aot_eager_decomp_partition": "decompositions",
    "aot_eager_decomp_partition_crossref": "decompositions, held to fake tensors",
}  # fmt: skip
_BISECTOR = "torch._inductor.compiler_bisector"


class _OutOfTimeError(Exception):
    pass


def blame(plan: ReplayPlan, on_event: OnEvent = ignore, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """What of the compiler makes the plan's cell fail, or compute more than rounding.

    Returns:
        backend (torch's name; None: not found), subsystem, number (how many times the subsystem had been applied) and
        applied (what it was applied to) as far as they were found, tries, layers (the model's first, of_layers of them
        all), and sentence.

    Raises:
        RldbgError: the model cannot be run.
    """
    nothing = {"backend": None, "subsystem": None, "number": None, "applied": None, "tries": 0, "layers": None,
               "of_layers": None}  # fmt: skip
    if importlib.util.find_spec(_BISECTOR) is None:
        return {**nothing, "sentence": f"which pass is not known: torch {torch.__version__} has no bisector"}
    flags, _ = attention.resolve(plan.flags)
    flags = replace(flags, routing="live")
    run = open_run(Path(plan.dump))
    recorded = read_batch(run, plan)
    temperature, _ = resolve_temperature(plan.temperature, recorded.batch.temperature)
    plan = replace(plan, flags=flags, capture=None)
    with settings.applied(flags, plan.seed), _uncached():
        model, _ = HOLDER.model(plan, run, recorded.batch)
        trial = _Trial(ReplayBench(plan, model, temperature), flags, recorded.batch, on_event, limit_s)
        layers = layers_of(model)
        fewest = of = None if layers is None else len(layers)
        try:
            if trial.runs():
                return {**nothing, "tries": 1, "sentence": "which pass is not known: compiled once more, it is right"}
            if layers is not None and of is not None:
                fewest = next((count for count in (1, 2) if count < of and trial.fails_with(count)), of)
                with first_layers(layers, fewest):
                    found = trial.bisected()
            else:
                found = trial.bisected()
        except _OutOfTimeError:
            found = {"sentence": f"{_OUT_OF_TIME} it was compiled"}
        finally:
            torch._dynamo.reset()
    return {**nothing, **found, "tries": trial.tries, "layers": fewest, "of_layers": of}


class _Trial:
    """The cell compiled anew, as often as it is asked for."""

    def __init__(self, bench: ReplayBench, flags: Flags, batch: MicroBatch, on_event: OnEvent, limit_s: float) -> None:
        self._bench, self._flags, self._batch, self._on_event = bench, flags, batch, on_event
        self._until = time.monotonic() + limit_s
        #: Of so many layers: the true final states, and how far the uncompiled ones are off.
        self._uncompiled: dict[int, tuple[torch.Tensor, dict[str, float]]] = {}
        self.tries = 0

    def runs(self) -> bool:
        """Whether it runs and is no further from the truth than it is uncompiled.

        Raises:
            _OutOfTimeError: nothing more may be begun.
        """
        if time.monotonic() > self._until:
            raise _OutOfTimeError
        self.tries += 1
        self._on_event(Progress(self.tries, None, "compilations with less of the compiler: which pass it is"))
        torch._dynamo.reset()
        model = self._bench.model
        truth_ND, alone = self._truth()
        observer = self._bench.observer(self._flags, self._batch)
        try:
            made_ND = observer.hidden(call=model.compiled.once(self._flags))
        except Exception:  # whatever a compiler, or what it made, raises
            return False
        epsilon = DTYPES[self._flags.dtype].eps or 0.0
        return is_rounding(alone, figures(relative(truth_ND, made_ND)), epsilon, is_mixture=is_mixture(model))

    def _truth(self) -> tuple[torch.Tensor, dict[str, float]]:
        layers = layers_of(self._bench.model)
        count = 0 if layers is None else len(layers)
        if count not in self._uncompiled:
            plain = replace(self._flags, compile="off")
            with in_dtype(self._bench.model, finest(self._bench.model)[0]):
                truth_ND = self._bench.hidden(plain, self._batch)
            far = figures(relative(truth_ND, self._bench.hidden(plain, self._batch)))
            self._uncompiled[count] = truth_ND, far
        return self._uncompiled[count]

    def fails_with(self, count: int) -> bool:
        """Whether the model's first layers alone show it: they compile faster."""
        layers = layers_of(self._bench.model)
        assert layers is not None
        with first_layers(layers, count):
            return not self.runs()

    def bisected(self) -> dict[str, Any]:
        from torch._inductor.compiler_bisector import CompilerBisector

        with tempfile.TemporaryDirectory(prefix="rldbg-bisect-", ignore_cleanup_errors=True) as folder:
            # Its own notes, and not those of a bisection that the user has begun.
            CompilerBisector.in_process_cache = folder
            with _silent():  # to its very end, when it clears its notes away
                try:
                    found = CompilerBisector.do_bisect(self.runs)
                except _OutOfTimeError:
                    where = [CompilerBisector.get_backend(), CompilerBisector.get_subsystem()]
                    names = " / ".join(name for name in where if name)
                    return {"sentence": f"{_OUT_OF_TIME} {names or 'it'} was looked at"}
                except RuntimeError as error:  # what failed once ran the next time
                    return {"sentence": f"which pass is not known: {error}"}
        if found is None:
            return {"sentence": "which pass is not known: compiled by the bisector, it is right"}
        return {
            "backend": found.backend, "subsystem": found.subsystem or None, "number": found.bisect_number,
            "applied": None if found.debug_info in (None, found.subsystem) else " ".join(found.debug_info.split()),
            "sentence": told(found.backend, found.subsystem, found.bisect_number, found.debug_info),
        }  # fmt: skip


def told(backend: str, subsystem: str | None, number: int | None, applied: str | None) -> str:
    """What the bisector found, as a sentence."""
    stage = _STAGES.get(backend, backend)
    if not subsystem:
        return f"{stage} as a whole: without any one of its passes it is as wrong"
    if not number and applied in (None, subsystem):
        return f"{stage}: with its setting {subsystem} changed it is right"
    named = f" ({applied})" if applied and applied != subsystem else ""
    return f"{stage}: {subsystem}, number {number}{named}: with one fewer it is right"


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """The bisector prints what it does; Progress says it here."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


@contextlib.contextmanager
def _uncached() -> Iterator[None]:
    """No graph of an earlier compilation. What a compiler of C++ made is kept: the same text is the same code."""
    inductor = torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False)
    functorch = torch._functorch.config.patch(enable_autograd_cache=False)
    with inductor, functorch:
        yield
