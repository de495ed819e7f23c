"""The engine's seam in tests: answers come from documents, errors and events from a script."""

from __future__ import annotations

import asyncio
import json
import marshal
from pathlib import Path
from typing import Any

from replay_core.errors import NotADumpError
from replay_core.jobs import Answer, Event, Job, LogLine, OnEvent, Partial, Progress, Sample, ignore
from replay_core.replay.flags import DEFAULTS

DOCUMENTS = Path(__file__).parent / "documents"


def document(name: str) -> Answer:
    found: Answer = json.loads((DOCUMENTS / f"{name}.json").read_text())
    return found


def streamed(diagnosis: Answer, on_event: OnEvent) -> Answer:
    """A diagnosis as a reader sends it: its series ahead of it, one by one."""
    for one in diagnosis["series"]:
        on_event(Partial({"series": [one]}))
    return {**diagnosis, "series": []}


def replayed(flags: dict[str, Any]) -> Answer:
    """A replay as the engine answers it: each row alone, the padded batch, and the setting that was asked for."""
    matrix = document("matrix")
    _, reference, control, _, packed, _, leaking, *_ = matrix["cells"]
    asked = {**DEFAULTS, **flags}
    apart = asked["packing"] and not asked["block_mask"]
    cell = leaking if apart else packed
    figures = document("cell_packed" if asked["packing"] else "cell_reference")
    told = {name: figures[name] for name in ("effective", "time", "memory", "dump", "notes")}
    alone = {name: document("cell_reference")[name] for name in ("effective", "time", "memory", "dump")}
    cells = [
        {**reference, **alone},
        {**control, "part": "control", "asked": False, "toggles": None},
        {**cell, **told, "flags": asked, "toggles": None},
    ]
    plan = {**matrix["plan"], "flags": asked}
    return {**matrix, "baseline": 0, "plan": plan, "cells": cells, "matrix": None, "notes": []}


class ScriptedEngine:
    """Answers every job from `documents/`. `answers` overrides a kind with a document, an error or a function."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.jobs: list[Job] = []
        self.gate: asyncio.Event | None = None
        """When set, replays wait for it."""
        self.stopped = False

    async def start(self) -> None:
        return

    async def stop(self) -> None:
        self.stopped = True

    def kinds(self) -> list[str]:
        return [job.kind for job in self.jobs]

    def last(self, kind: str) -> Job:
        asked = [job for job in self.jobs if job.kind == kind]
        assert asked, f"no job was a {kind}: {self.kinds()}"
        return asked[-1]

    async def run(self, job: Job, on_event: OnEvent = ignore) -> Answer:
        self.jobs.append(job)
        await asyncio.sleep(0)
        answer = self.answers.get(job.kind)
        if callable(answer):
            answer = answer(job)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            answer = await getattr(self, f"_{job.kind}")(job, on_event)
        return marshal.loads(marshal.dumps(answer))  # a copy, in a tenth of deepcopy's time

    async def _open(self, job: Job, _on_event: OnEvent) -> Answer:
        for name in ("run_a", "run_b", "run_log"):
            if document(name)["path"] == job.params["path"]:
                return document(name)
        raise NotADumpError(
            "no dialect recognises this as a dump", file=job.params["path"], expected="a dump", hint="rldbg info"
        )

    async def _record(self, job: Job, _on_event: OnEvent) -> Answer:
        return {**document("record"), "key": job.params["key"]}

    async def _inspect(self, job: Job, _on_event: OnEvent) -> Answer:
        answer = document("inspect_pair" if job.params.get("b") else "inspect_one")
        for side in ("a", "b"):
            if asked := job.params.get(side):
                answer[side] |= {"name": asked["name"], "canonical": asked["name"], "key": asked.get("key")}
        answer["verdict"] = None
        return answer

    async def _difference(self, job: Job, _on_event: OnEvent) -> Answer:
        return {**document("difference"), "axis": job.params["axis"]}

    async def _rejudge(self, job: Job, _on_event: OnEvent) -> Answer:
        """Lenient limits find nothing; the table and strict ones find what the comparison did."""
        if (job.params["atol"] or 0) >= 1:
            return {**document("comparison_same")}
        return document("comparison")

    async def _recorded_parity(self, job: Job, on_event: OnEvent) -> Answer:
        on_event(Progress(1, 3, "batches"))
        if self.gate is not None:
            await self.gate.wait()
        return document("parity")

    async def _parity(self, job: Job, on_event: OnEvent) -> Answer:
        on_event(Progress(0, 2, "critic A: deepspeed"))
        on_event(LogLine("deepspeed compiles"))
        if self.gate is not None:
            await self.gate.wait()
        return document("parity")

    async def _diagnose(self, job: Job, on_event: OnEvent) -> Answer:
        answer = document("diagnosis_log" if job.params["path"].endswith(".log") else "diagnosis")
        return streamed({**answer, "path": job.params["path"]}, on_event)

    async def _referee(self, _job: Job, _on_event: OnEvent) -> Answer:
        return document("ruling_lacking")

    async def _explain(self, job: Job, _on_event: OnEvent) -> Answer:
        return {
            "kind": "explanation",
            "id": job.params["id"],
            "text": f"{job.params['id']} looks at log-probabilities.",
        }

    async def _compare(self, job: Job, on_event: OnEvent) -> Answer:
        answer = document("comparison")
        on_event(Progress(12, 33, "tensors"))
        on_event(Partial({"first_divergence": answer["first_divergence"]}))
        if job.params["a"] == job.params["b"]:
            return document("comparison_same")
        return answer

    async def _compare_step(self, job: Job, _on_event: OnEvent) -> Answer:
        """As a comparison is answered, of which nobody sees the rows."""
        answer = self.answers.get("compare")
        answer = answer(job) if callable(answer) else answer or await self._rejudge(job, ignore)
        if isinstance(answer, Exception):
            raise answer
        return {**answer, "tensors": []}

    async def _replay(self, job: Job, on_event: OnEvent) -> Answer:
        answer = document("matrix") if job.params["matrix"] else replayed(job.params["plan"]["flags"])
        if not job.params["matrix"]:
            events: list[Event] = [LogLine("loading random:llama-tiny")]
            # What a phase took would be on the screen: told only where the replay is watched.
            events += [Progress(0, 4, "rows")] if self.gate is not None else []
            events += [Sample(0.25 * i, 700.0 + 40 * (i % 5), None, 98.0) for i in range(12)]
            for event in events:
                on_event(event)
            if self.gate is not None:
                await self.gate.wait()
        for cell in answer["cells"]:
            if cell["part"] != "recording":
                if job.params["matrix"]:
                    on_event(Progress(1, 3, "records written"))
                on_event(Partial({"cell": cell}))
            if self.gate is not None:
                await self.gate.wait()
        return answer
