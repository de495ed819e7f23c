"""What happens when a user replays: one setting, a whole matrix, or the demo from its training on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from replay_core.errors import JobCancelledError, ModelError, RldbgError
from replay_core.jobs import Document, Job
from replay_core.replay.flags import Flags
from tui_debugger import digests, paths, snapshot
from tui_debugger import format as fmt
from tui_debugger.answer import NO_DUMP
from tui_debugger.flag_choices import asked_flags
from tui_debugger.flows.comparing import Comparing
from tui_debugger.flows.errands import Errands
from tui_debugger.flows.opening import Opening
from tui_debugger.state import Cell, Matrix, Part, Scope, model_for
from tui_debugger.together import folder_of

_REFERENCE = "reference: each row alone"


class Replaying:
    """Replays of the open run, each shown as a comparison with each row alone."""

    def __init__(self, errands: Errands, comparing: Comparing, opening: Opening) -> None:
        self._errands, self.state = errands, errands.state
        self._comparing, self._opening = comparing, opening
        self._references: dict[tuple[Any, ...], Document] = {}

    async def replay(self) -> None:
        """Run the record each row alone (once) and as the flags say, then compare the two dumps."""
        state = self.state
        if state.a is None:
            self._errands.tell(f"{NO_DUMP}, nothing to replay: o opens one", "warning")
            return
        state.samples.clear()
        await self._errands.guard(self._replay(state.a))
        self._errands.changed(Part.ANSWER, Part.TELEMETRY, Part.FLAGS)

    async def _replay(self, run: Document) -> None:
        state = self.state
        target, model = self._target(run)
        wanted = dict(state.flags)
        # The reference keeps the recorded attention, so that flipping attention shows what it does.
        recorded = asked_flags(run).get("attention") or Flags().attention
        alone = Flags.from_mapping({**wanted, "attention": recorded}).reference().to_mapping()
        same = ("dtype", "device", "mode", "deterministic", "gradient_checkpointing")
        known = (run["path"], target, model, *(wanted.get(name) for name in same), state.temperature, state.seed)
        reference = self._references.get(known)
        state.cells.clear()
        if reference is not None and Path(str(reference.get("dump"))).exists():
            state.cells.append(Cell(_REFERENCE, reference))
        else:
            reference = await self._cell(_REFERENCE, "reference", run, target, model, alone)
            self._references[known] = reference
        cell = await self._cell(Flags.from_mapping(wanted).label(), "cell", run, target, model, wanted)
        sides = {"reference": (_REFERENCE, reference, alone), "cell": (state.cells[-1].label, cell, wanted)}
        document = await self._held(reference, cell)
        if (cell.get("capture") or {}).get("level") == "hash":
            document = await self._look_closer(document, run, target, model, sides)
        shown = state.cells[-1].document
        shown["agreement"], shown["segments"] = agreement(document), document.get("segments")
        state.step_verdicts.clear()
        state.step_verdicts[target.step] = fmt.comparison_answer(document).word
        await self._comparing.show(document)

    async def _held(self, reference: Document, cell: Document) -> Document:
        params = {"a": reference["dump"], "b": cell["dump"], "final_hidden": cell.get("final_hidden")}
        return await self._comparing.compared(params, "comparing with each row alone")

    async def _look_closer(
        self,
        document: Document,
        run: Document,
        target: Scope,
        model: str,
        sides: dict[str, tuple[str, Document, dict[str, Any]]],
    ) -> Document:
        """After digests of everything: both sides once more with the modules from the first differing one on in full.

        A window at a time, as much as there is room for, until the divergence is among them.
        """
        from replay_core.replay import frontier  # rarely needed: not before the first paint

        (label, reference, alone), (_, cell, _) = sides.values()
        if not reference.get("hashes"):
            # It was captured whole, while there was room.
            again = await self._cell(label, "reference_hashed", run, target, model, alone, capture_level="hash")
            reference["hashes"] = again["hashes"]
            document = await self._held(again, cell)
        hashes = [frontier.from_mappings(one.get("hashes")) for one in (reference, cell)]
        parting = frontier.part(hashes[0] or [], hashes[1])
        told = cell["capture"]["hashes"] = parting.to_mapping()
        looked: list[str] = []
        if parting.start is not None:
            room = int(cell["capture"]["room_mib"] * frontier.WINDOW * 2**20)
            for modules in frontier.windows(parting.order, parting.start, room):
                near = {"capture": frontier.exactly(modules), "capture_level": "full"}
                try:
                    closer = [
                        await self._cell(label, f"{short}_window", run, target, model, flags, **near)
                        for short, (label, _, flags) in sides.items()
                    ]
                except JobCancelledError:
                    raise
                except RldbgError as error:
                    self._errands.tell(
                        f"not compared in full from {parting.start} on: {fmt.error_line(error)}", "warning"
                    )
                    break
                document = await self._held(*closer)
                looked += modules
                told |= {"windows": told["windows"] + 1, "baseline_dump": closer[0]["dump"]}
                cell["dump"], cell["capture"]["mib"] = closer[1]["dump"], closer[1]["capture"]["mib"]
                first = document.get("first_divergence")
                if first is None or frontier.module_of(first["name"]) in looked:
                    break
        told |= parting.seen_in_full(looked)
        # The digests themselves, a line per tensor, are nothing for the screen.
        self.state.cells[:] = [
            Cell(label, {name: value for name, value in one.items() if name != "hashes"})
            for label, one, _ in sides.values()
        ]
        self._errands.log(digests.sentence(cell))
        return digests.stated(document, cell)

    def _target(self, run: Document) -> tuple[Scope, str]:
        """The micro-batch to replay, and the model.

        Raises:
            ModelError: none is known.
        """
        target = self._replay_scope(run)
        model, remark = (self.state.model, None) if self.state.model else model_for(run, target.step)
        if model is None:
            raise ModelError(
                "no model to replay with: the dump names none", hint="press M and give a directory or random:llama-tiny"
            )
        if remark:
            self._errands.tell(remark, "warning")
            self._errands.log(remark)
        return target, model

    def _replay_scope(self, run: Document) -> Scope:
        """The one micro-batch a replay runs: what the scope leaves open is the first there is."""
        asked = self.state.scope
        keys = [record["key"] for record in run.get("records") or []]
        fitting = [key for key in keys if asked.covers(key)] or keys
        if not fitting:
            return asked
        first = Scope.of(fitting[0])
        return Scope(
            first.step if asked.step is None else asked.step,
            first.rank if asked.rank is None else asked.rank,
            first.micro if asked.micro is None else asked.micro,
        )

    def _plan(self, run: Document, target: Scope, model: str, flags: dict[str, Any], out: Path) -> dict[str, Any]:
        state = self.state
        where = {name: value or 0 for name, value in target.params().items()}
        # Of several directories that are one run, a replay reads the one its record lies in.
        held = (record["path"] for record in run.get("records") or [] if target.covers(record["key"]))
        home = folder_of(state, held) if state.more and run is state.a else None
        return {
            "dump": str(state.replay_dump or home or run["path"]), **where, "model": model, "flags": flags,
            "temperature": state.temperature, "seed": state.seed or 0, "out": str(out),
        }  # fmt: skip

    async def _cell(
        self, label: str, short: str, run: Document, target: Scope, model: str, flags: dict[str, Any], **capture: str
    ) -> Document:
        """Run one cell. `capture`: which modules to keep, and how, where that is not the plan's own."""
        state = self.state
        plan = {**self._plan(run, target, model, flags, paths.new_replay_dir(short)), **capture}
        self._errands.log(f"replay {label}")
        document = await self._errands.run(Job("replay_cell", {"plan": plan}), f"replaying {label}", is_replay=True)
        state.plan = {name: value for name, value in plan.items() if name != "out" and name not in capture}
        state.cells.append(Cell(label, document))
        self._errands.changed(Part.TELEMETRY, Part.FLAGS)
        for note in document.get("notes") or []:
            self._errands.log(str(note))
        if document.get("outcome") != "ran":
            raise _cell_error(document, label)
        return document

    # ── the matrix ───────────────────────────────────────────────────────────────────────────────

    async def run_matrix(self) -> None:
        """Run every cell of the axes, each in a child of its own; cells appear as they end."""
        state = self.state
        if state.a is None:
            self._errands.tell(f"{NO_DUMP}, nothing to replay: o opens one", "warning")
            return
        state.samples.clear()
        state.matrix = Matrix(state.matrix.axes, runs=True)
        self._errands.changed(Part.MATRIX)
        try:
            document = await self._errands.guard(self._matrix(state.a))
        finally:
            state.matrix.runs = False
            self._errands.changed(Part.MATRIX, Part.ANSWER, Part.TELEMETRY)
        if document is not None:
            state.matrix.document, state.matrix.cells = document, list(document["cells"])
            state.matrix.axes = snapshot.axes_text(document["matrix"]["axes"])
            for note in document.get("notes") or []:
                self._errands.log(str(note))

    async def _matrix(self, run: Document) -> Document:
        target, model = self._target(run)
        # The axes set what they vary; what they leave alone stays as the flags pane has it.
        out = paths.new_replay_dir("matrix")
        plan = self._plan(run, target, model, dict(self.state.flags), out)
        job = Job("replay", {"plan": plan, "out": str(out), "matrix": self.state.matrix.axes})
        return await self._errands.run(job, "matrix", is_replay=True, on_part=self._take_cell)

    def _take_cell(self, part: Document) -> None:
        if "cell" in part:
            cell = {**part["cell"], "part": part.get("part"), "agreement": {"agrees": part.get("agrees")}}
            self.state.matrix.cells.append(cell)
            self._errands.changed(Part.MATRIX)

    async def compare_cells(self, a: Document, b: Document) -> bool:
        """Compare the dumps of two cells and show the divergence list; False where a cell left none."""
        sides = [digests.dump_beside(one, other) for one, other in ((a, b), (b, a))]
        if not all(sides):
            self._errands.tell("a cell that did not run left nothing to compare: l shows its log", "warning")
            return False
        params = {"a": sides[0], "b": sides[1], "final_hidden": b.get("final_hidden")}
        document = await self._errands.guard(self._comparing.compared(params, "comparing two cells"))
        if document is None:
            return False
        self.state.cells = [Cell(_cell_label(cell), cell) for cell in (a, b)]
        self.state.step_verdicts.clear()
        if a.get("part") == "reference":
            document = digests.stated(document, b)
        await self._comparing.show(document)
        return True

    # ── the demo ─────────────────────────────────────────────────────────────────────────────────

    async def demo(self) -> None:
        """Train a tiny policy, pack one micro-batch without its block mask, and open the pair."""
        root = paths.new_replay_dir("demo")
        train = Job("demo_train", {"directory": str(root / "run")})
        trained = await self._errands.guard(self._errands.run(train, "training a tiny policy", is_replay=True))
        if trained is None:
            return
        flags = {**Flags().to_mapping(), "packing": True, "block_mask": False}
        where = {"step": trained["step"], "rank": 0, "micro": trained["micro"]}
        plan = {"dump": trained["dump"], **where, "model": "checkpoint", "flags": flags, "out": str(root / "replay")}
        job = Job("replay", {"plan": plan, "out": str(root / "replay"), "matrix": None})
        document = await self._errands.guard(
            self._errands.run(job, "packing it wrongly", is_replay=True, on_part=lambda _part: None)
        )
        if document is None:
            return
        cells = document["cells"]
        self.state.replay_dump, self.state.model = Path(trained["dump"]), "checkpoint"
        await self._opening.open(Path(cells[document["baseline"]]["dump"]), Path(cells[-1]["dump"]))


def _cell_label(cell: Document) -> str:
    return "the recording" if cell.get("part") == "recording" else Flags.from_mapping(cell["flags"]).label()


def agreement(document: Document) -> Document:
    first = document.get("first_divergence")
    total = document.get("counts") or {}
    apart = first is not None or any(total.get(word) for word in fmt.DIVERGING)
    agreeing = sum(total.get(word, 0) for word in ("SAME", "CLOSE", "PADDING"))
    # What was skipped or could not be read is no agreement.
    lacking = total.get("skipped", 0) + (document.get("coverage") or {}).get("records_unreadable", 0)
    agrees = False if apart else True if agreeing and not lacking else None
    return {"agrees": agrees, "first_divergence": first, "counts": document.get("counts"), "off": []}


def _cell_error(document: Document, label: str) -> RldbgError:
    error = document.get("error") or {}
    if isinstance(error, str):
        error = {"message": error}
    what = f"replay {label} {document.get('outcome')}: {error.get('message', 'no reason given')}"
    return RldbgError(what, hint=error.get("hint"), expected=error.get("expected"), found=error.get("found"))
