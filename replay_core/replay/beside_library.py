"""A factory's model beside the library's own of the same checkpoint, each row alone: where its code first computes
something else. Asked where the recording is what the library's gives, and not the factory's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from replay_core.dumps import open_run
from replay_core.jobs import LogLine, OnEvent, ignore
from replay_core.replay import attention, settings
from replay_core.replay.asking import Asking
from replay_core.replay.batch import resolve_temperature
from replay_core.replay.bench import ReplayBench, worst
from replay_core.replay.held import HOLDER, Holder
from replay_core.replay.interventions import first_apart, in_dtype, relative
from replay_core.replay.plan import ReplayPlan
from replay_core.replay.reading import read_batch

#: Relative difference from which on the two part, in float32.
_APART = 1e-4


def ask(plan: ReplayPlan, library: str, row: int, on_event: OnEvent = ignore) -> dict[str, Any]:
    """Where the plan's model and that of the directory `library` part, as `interventions.TensorPlace` (first, or None),
    and whether they are one where nothing is rotated by its position (unturned_agrees).

    Raises:
        RldbgError: one of them cannot be run.
    """
    flags, _ = attention.resolve(plan.flags)
    plan = replace(plan, flags=flags, capture=None)
    run = open_run(Path(plan.dump))
    recorded = read_batch(run, plan)
    temperature, _ = resolve_temperature(plan.temperature, recorded.batch.temperature)
    batch = recorded.batch.take([row])
    on_event(LogLine(f"its model beside the library's own, of row {row} alone"))
    traces, unturned = [], []
    with settings.applied(flags, plan.seed), torch.no_grad():
        for holder, asked in ((HOLDER, plan), (Holder(), replace(plan, model=library))):
            model, _ = holder.model(asked, run, recorded.batch)
            bench = ReplayBench(asked, model, temperature, asking=Asking(on_event=on_event))
            with in_dtype(model, torch.float32):
                observer = bench.observer(flags, batch)
                traces.append(observer.trace())
                with observer.at_one_position():
                    unturned.append(observer.hidden())
        # The library's own is the last: its modules are what transformers calls them.
        parted = first_apart(observer, traces[0], traces[1], _APART)
    return {
        "first": None if parted is None else parted.to_mapping(),
        "unturned_agrees": worst(relative(*unturned)) <= _APART,
    }
