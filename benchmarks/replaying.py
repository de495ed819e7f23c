"""Replaying: what capture costs, a warm flip against one plain forward, the first flip against a fresh load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks.inputs import Inputs
from benchmarks.racing import Result, Side, race
from replay_core import workbench
from replay_core.compare import compare_runs
from replay_core.dumps import open_run
from replay_core.executors.in_process import InProcess
from replay_core.jobs import Job, OnEvent
from replay_core.recorder import Recorder
from replay_core.replay.capture import Capture, modules_matching
from replay_core.replay.cell import BatchReplay
from replay_core.replay.flags import Flags
from replay_core.replay.hashing import HashCapture, Hashes
from replay_core.replay.held import Holder
from replay_core.replay.model import prepare
from replay_core.replay.plan import ReplayPlan
from replay_core.replay.run import run_cell

#: Rows and width of the micro-batch at scale 1, and its vocabulary.
ROWS, WIDTH, VOCABULARY = 2, 512, 32_000
_MODEL = "random:llama-small"


def rows(inputs: Inputs) -> Iterator[Result]:
    bench = _Bench(inputs.folder / "replaying", inputs.scale)
    yield from bench.capture()
    for title, flips, bar in (
        ("flip attention", ("attention=eager", "attention=sdpa"), 1.2),
        ("flip use_cache", ("use_cache=on", "use_cache=off"), 1.2),
        ("flip packing", ("packing=on", "packing=off"), 2.2),
        ("flip a compile setting seen before", ("compile=aot_eager", "compile=off"), 1.2),
    ):
        yield bench.flip(title, flips, bar)
    yield bench.first()


class _Bench:
    """One recorded micro-batch, one held model, and the dump of each row alone."""

    def __init__(self, folder: Path, scale: float) -> None:
        self.folder = folder
        self.numbers = count()
        self.dump = folder / "dump"
        width = max(32, int(WIDTH * scale))
        ids_BS = torch.randint(0, VOCABULARY, (ROWS, width), generator=torch.Generator().manual_seed(0))
        mask_BS = torch.ones_like(ids_BS)
        mask_BS[0, : width // 8] = 0
        mask_BS[1, -width // 8 :] = 0
        response_BS = mask_BS.clone()
        response_BS[:, : width // 2] = 0
        with Recorder(self.dump).step(0) as record:
            record("forward_data", micro=0, input_ids=ids_BS, attention_mask=mask_BS, response_mask=response_BS)
        self.holder = Holder()
        self.reference = self.cell("rows_per_forward=1")

    def cell(self, flags: str, holder: Holder | None = None) -> dict[str, Any]:
        out = str(self.folder / f"cell{next(self.numbers)}")
        plan = ReplayPlan(str(self.dump), 0, 0, 0, _MODEL, out, Flags.parse(flags), capture="none", temperature=1.0)
        return run_cell(plan, holder=holder or self.holder)

    def flipped(self, flags: str) -> object:
        """What the screen asks for when a flag is flipped: the whole replay, its reference and padded batch held."""
        plan = {"dump": str(self.dump), "model": _MODEL, "capture": "none", "temperature": 1.0}
        out = self.folder / f"flip{next(self.numbers)}"
        return workbench.replay(
            {**plan, "flags": Flags.parse(flags).to_mapping()}, out, InProcess(self._perform), is_held=True
        )

    def _perform(self, job: Job, on_event: OnEvent) -> dict[str, Any]:
        return run_cell(ReplayPlan.from_mapping(job.params["plan"]), on_event, self.holder)

    def plain(self, flags: str) -> Callable[[], object]:
        """One forward of the held model with its log-probabilities, and the comparison of the answer on disk."""
        answered = self.cell(flags)
        cell = self._cell(flags)
        with torch.no_grad():
            head, _ = cell._probe()

        def run() -> object:
            with torch.no_grad():
                _, hidden = cell._timed_pass(lambda backbone, given: backbone(**given).last_hidden_state, "forwards")
                cell.logprobs(head, hidden)
            return compare_runs(open_run(Path(self.reference["dump"])), open_run(Path(answered["dump"])))

        return run

    def _cell(self, flags: str) -> BatchReplay:
        from replay_core.replay.reading import read_batch

        plan = ReplayPlan(str(self.dump), 0, 0, 0, _MODEL, str(self.folder), Flags.parse(flags), capture="none")
        run = open_run(self.dump)
        batch = read_batch(run, plan).batch
        model, _ = self.holder.model(plan, run, batch)
        return BatchReplay(plan, plan.flags, batch, model, 1.0, lambda _event: None)

    def capture(self) -> Iterator[Result]:
        cell = self._cell("")
        backbone, (forward,) = cell.model.backbone, cell.arrangement.forwards
        names, given = modules_matching(backbone, None), cell.inputs(forward)

        def hooked() -> None:
            with torch.no_grad(), Capture(backbone, names, forward.input_ids.shape[1]):
                backbone(**given)

        def plain() -> None:
            with torch.no_grad():
                backbone(**given)

        def hashed() -> None:
            hashes = Hashes(cell.arrangement)
            with torch.no_grad(), HashCapture(backbone, names, forward, 0, hashes):
                backbone(**given)
            hashes.told()

        for title, bar, side in (
            ("capture, full", 1 / 1.3, Side(f"{len(names)} modules hooked, each tensor copied once", hooked)),
            (
                "capture, hash+stats",
                1 / 1.15,
                Side(f"{len(names)} modules hooked, a digest and statistics of each", hashed),
            ),
        ):
            other = Side("the same forward without hooks", plain)
            yield race(f"{title}: every module's inputs and outputs", side, other, bar=bar, rounds=3)

    def flip(self, title: str, flips: tuple[str, str], bar: float) -> Result:
        theirs = self.plain(flips[0] if not flips[0].startswith("compile") else "")
        self.flipped(flips[0])  # what stands beside it is held from here on
        model = self._cell(flips[1]).model

        def ours() -> None:
            # Every run is a flip: the model stands at the other setting first.
            prepare(model, Flags.parse(flips[1]))
            self.flipped(flips[0])

        result = race(
            f"{title}, warm, capture off, baseline held",
            Side(f"replay {flips[0]} and compare it with each row alone", ours),
            Side("one plain forward with its log-probabilities, and that comparison", theirs),
            bar=1 / bar,
            rounds=3,
        )
        if flips[0].startswith("packing"):
            result.notes.append("the plain forward is the packed one")
        result.notes.append(f"bar: at most {bar:g} x the other side")
        return result

    def first(self) -> Result:
        result = race(
            "first flip",
            Side("replay with the model held", lambda: self.cell("attention=eager")),
            Side("replay that loads the model first", lambda: self.cell("attention=eager", Holder())),
            bar=None,
            rounds=3,
        )
        return result
