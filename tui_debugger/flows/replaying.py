"""What happens when a user replays: one setting, a whole matrix, or the demo from its training on.

The replay document says everything; nothing is judged here. The list of tensors is the comparison of the two dumps that
it names.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay_core.errors import ChildDiedError, ModelError, RldbgError
from replay_core.jobs import DocumentPiece, Job
from replay_core.replay.flags import Flags
from tui_debugger import format as fmt
from tui_debugger import paths, snapshot
from tui_debugger.answer import NO_DUMP, answer_of, said_of
from tui_debugger.cells import dump_beside, held_to_baseline, label, sentence
from tui_debugger.flows.comparing import Comparing
from tui_debugger.flows.errands import Errands
from tui_debugger.flows.opening import Opening
from tui_debugger.state import Matrix, Part
from tui_debugger.steps_compared import StepsCompared
from tui_debugger.together import folder_of

if TYPE_CHECKING:
    from replay_core.documents.replay import CellEntry, ReplayDocument


class Replaying:
    """Replays of the open run, each shown as a comparison with each row alone."""

    def __init__(self, errands: Errands, comparing: Comparing, opening: Opening) -> None:
        self._errands, self.state = errands, errands.state
        self._comparing, self._opening = comparing, opening

    async def replay(self) -> None:
        """Replay the record as the flags say, beside each row alone and the padded batch."""
        state = self.state
        if not self._can_replay():
            return
        state.replay.cells.clear()
        state.replay.document = None
        await self._errands.guard(self._replay())
        self._errands.changed(Part.ANSWER, Part.TELEMETRY, Part.FLAGS)

    def _can_replay(self) -> bool:
        if self.state.opened.a is None:
            self._errands.tell(f"{NO_DUMP}, nothing to replay: o opens one", "warning")
            return False
        self.state.job.samples.clear()
        return True

    async def _replay(self) -> None:
        state = self.state

        def take(cell: CellEntry) -> None:
            state.replay.cells.append(cell)
            self._errands.log(f"replayed {label(cell)}")
            self._errands.changed(Part.TELEMETRY, Part.FLAGS)

        document = await self._run("replay", f"replaying {Flags.from_mapping(state.replay.flags).label()}", take)
        state.replay.document, state.replay.cells[:] = document, document["cells"]
        baseline, cell = held_to_baseline(document)
        for one in (baseline, cell):
            if one["error"] is not None:
                raise _did_not_run(one)
        for said in filter(None, (sentence(cell), fmt.safe(said_of(cell)))):
            self._errands.log(said)
        if await self.compare_cells(baseline, cell):
            assert state.tensors.comparison is not None
            state.opened.steps.take(document["plan"]["step"], state.tensors.comparison, answer_of(state).word)
            self._errands.changed(Part.RUNS, Part.ANSWER)

    async def _run(
        self, name: str, what: str, take: Callable[[CellEntry], None], axes: str | None = None
    ) -> ReplayDocument:
        """One replay job to its end; `take` is given every cell as soon as it is judged.

        Raises:
            ModelError: no model is known.
        """
        state = self.state
        if state.replay.model is None and not (state.opened.a and state.opened.a["models"]):
            raise ModelError(
                "no model to replay with: the dump names none", hint="press M and give a directory or random:llama-tiny"
            )
        # Of several directories that are one run, a replay reads the one its record lies in.
        records = state.opened.a["records"] if state.opened.a else []
        held = (record["path"] for record in records if state.opened.scope.covers(record["key"]))
        home = folder_of(state.opened, held) if state.opened.more else None
        plan = {
            "dump": str(state.replay.dump or home or (state.opened.a and state.opened.a["path"])),
            **state.opened.scope.params(), "model": state.replay.model or "checkpoint",
            "flags": dict(state.replay.flags), "temperature": state.replay.temperature, "seed": state.replay.seed or 0,
        }  # fmt: skip

        def take_part(part: DocumentPiece) -> None:
            if "cell" in part:
                take(part["cell"])

        def job(**more: bool) -> Job:
            return Job("replay", {"plan": plan, "out": str(paths.new_replay_dir(name)), "matrix": axes, **more})

        try:
            document: ReplayDocument = await self._errands.run(job(), what, is_replay=True, on_part=take_part)
        except ChildDiedError as error:
            if axes is not None:  # its cells had children of their own: it is not one of them that died
                raise
            # Each in a child of its own, as the command has it: the one that takes its process along is an outcome.
            self._errands.log(f"{error.message}: once more, every setting in a child of its own")
            state.replay.cells.clear()
            document = await self._errands.run(job(is_apart=True), what, is_replay=True, on_part=take_part)
        for note in document["notes"]:
            self._errands.log(note)
            if note.startswith("weights of step"):
                self._errands.tell(note, "warning")
        return document

    async def run_matrix(self) -> None:
        """Run every cell of the axes, each in a child of its own; cells appear as they end."""
        state = self.state
        if not self._can_replay():
            return
        state.replay.matrix = Matrix(state.replay.matrix.axes, runs=True)
        self._errands.changed(Part.MATRIX)

        def take(cell: CellEntry) -> None:
            state.replay.matrix.cells.append(cell)
            self._errands.changed(Part.MATRIX)

        try:
            # The axes set what they vary; what they leave alone stays as the flags pane has it.
            document = await self._errands.guard(self._run("matrix", "matrix", take, state.replay.matrix.axes))
        finally:
            state.replay.matrix.runs = False
            self._errands.changed(Part.MATRIX, Part.ANSWER, Part.TELEMETRY)
        if document is not None:
            state.replay.matrix.document, state.replay.matrix.cells = document, list(document["cells"])
            state.replay.matrix.at += bool(state.replay.matrix.at)  # the recording has come before the cell looked at
            if document["matrix"]:
                state.replay.matrix.axes = snapshot.axes_text(document["matrix"]["axes"])

    async def compare_cells(self, a: CellEntry, b: CellEntry) -> bool:
        """Compare the dumps of two cells and show the divergence list; False where a cell left none."""
        sides = [dump_beside(one, other) for one, other in ((a, b), (b, a))]
        if not all(sides):
            self._errands.tell("a cell that did not run left nothing to compare: l shows its log", "warning")
            return False
        params: dict[str, Any] = {"a": sides[0], "b": sides[1]}
        if self.state.tolerance.is_table:
            params["replayed"] = True  # as its cell was judged: what is large is not compared twice
        document = await self._errands.guard(self._comparing.compared(params, "listing where they differ"))
        if document is None:
            return False
        if self.state.replay.document is None or a not in self.state.replay.cells:
            self.state.replay.cells = [a, b]
        self.state.opened.steps = StepsCompared()
        await self._comparing.show(document)
        return True

    async def capsule(self, dump: str, file: Path) -> None:
        """Write what shows by itself why the cell with this dump disagrees: a file, and a script beside it."""
        script = file.with_suffix(".py")
        params = {"replay": dump, "file": str(file), "script": str(script), "out": str(paths.new_replay_dir("capsule"))}
        asked = self._errands.run(Job("capsule", params), "capsule", is_replay=True, on_part=lambda _part: None)
        document: ReplayDocument | None = await self._errands.guard(asked)
        if document is None:
            return
        held = document["capsule"]
        rows = f"{held['rows']} row{'s' * (held['rows'] > 1)}"
        size = f"{rows}, {sum(held['tokens'])} tokens, layer{'s' * (held['layers'] > 1)} 1"
        size += f"..{held['layers']}" * (held["layers"] > 1)
        self._errands.tell(f"wrote {file} ({held['bytes'] / 1e6:.2f} MB: {size}) and {script}", "information")
        for path in (file, script):
            self._errands.log(f"wrote {path}")

    async def demo(self) -> None:
        """Train a tiny policy, pack one micro-batch without its block mask, and open the pair."""
        root = paths.new_replay_dir("demo")
        train = Job("demo_train", {"directory": str(root / "run")})
        trained = await self._errands.guard(self._errands.run(train, "training a tiny policy", is_replay=True))
        if trained is None:
            return
        job = Job("replay", {"plan": trained["plan"], "out": str(root / "replay")})
        document = await self._errands.guard(
            self._errands.run(job, "packing it wrongly", is_replay=True, on_part=lambda _part: None)
        )
        if document is None:
            return
        baseline, cell = held_to_baseline(document)
        self.state.replay.dump, self.state.replay.model = Path(trained["dump"]), "checkpoint"
        a, b = (Path(one["dump"]) if one["dump"] else None for one in (baseline, cell))
        await self._opening.open(a, b)


def _did_not_run(cell: CellEntry) -> RldbgError:
    what, error = f"replay {label(cell)} {cell['outcome']}", cell["error"]
    if error is None:
        return RldbgError(what)
    return RldbgError(
        f"{what}: {error['message']}", file=error["file"], tensor=error["tensor"], expected=error["expected"],
        found=error["found"], hint=error["hint"],
    )  # fmt: skip
