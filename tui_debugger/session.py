"""What happens when a user acts: jobs are sent, answers change the state, the screen is told which part.

No textual here. Every coroutine ends normally on an RldbgError: it is shown, logged, and the session
goes on with what it had.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from replay_core.errors import JobCancelledError, ModelError, RldbgError
from replay_core.jobs import Document, Event, Job, LogLine, Partial, Progress, Sample
from replay_core.replay.flags import Flags
from tui_debugger import format as fmt
from tui_debugger import paths, snapshot
from tui_debugger.engine import Engine
from tui_debugger.state import Busy, Cell, Part, Scope, State, asked_flags, model_for, run_line

#: Values the inspector asks for around a place.
WINDOW = 32

_PROBLEMS_LOGGED = 50
_REFERENCE = "reference: each row alone"

T = TypeVar("T")


class Session:
    """The flows of one screen.

    Args:
        engine: runs the jobs.
        changed: called with the parts of the state that changed.
        tell: called with a message for the user and its severity (information, warning, error).
        log: called with a line for the log pane.
    """

    def __init__(
        self,
        engine: Engine,
        state: State,
        changed: Callable[..., None],
        tell: Callable[[str, str], None],
        log: Callable[[str], None],
    ) -> None:
        self.engine = engine
        self.state = state
        self._changed = changed
        self._tell = tell
        self._log = log
        self._references: dict[tuple[Any, ...], Document] = {}
        self._inspections = _Latest()
        self._records = _Latest()

    # ── opening ──────────────────────────────────────────────────────────────────────────────────

    async def open(self, a: Path | None, b: Path | None, scope: Scope | None = None) -> None:
        """Open one dump, or a pair and look for the first divergence."""
        state = self.state
        state.a_path, state.b_path = a, b
        if a is None:
            return
        state.a = await self._guard(self._open(a))
        if state.a is None:
            return
        self._take_settings(state.a)
        records = state.a.get("records") or []
        # A record that belongs to no step is rarely what a person came for.
        stepped = (i for i, record in enumerate(records) if record["key"].get("step") is not None)
        first = next(stepped, 0)
        state.scope = scope or (Scope.of(records[first]["key"]) if records else Scope())
        self._changed(Part.RUNS, Part.ANSWER, Part.FLAGS)
        if b is not None:
            await self.compare_with(b, scope)
        elif records:
            wanted = (i for i, record in enumerate(records) if scope is not None and _covers(scope, record["key"]))
            await self.show_record(next(wanted, first))

    async def _open(self, path: Path) -> Document:
        run = await self._run(Job("open", {"path": str(path)}), f"opening {path}")
        self._log(f"{path}: {run_line(run)}")
        problems = run.get("problems") or []
        for problem in problems[:_PROBLEMS_LOGGED]:
            self._log(f"problem: {problem.get('where')}: {problem.get('what')}")
        if len(problems) > _PROBLEMS_LOGGED:
            self._log(f"and {len(problems) - _PROBLEMS_LOGGED} problems more: rldbg ls {path}")
        for note in run.get("notes") or []:
            self._log(f"note: {note}")
        return run

    def _take_settings(self, run: Document) -> None:
        recorded = asked_flags(run)
        for name in self.state.flags:
            # A dump of rows replayed alone must not make every later replay one.
            if name in self.state.flags_given or name == "rows_per_forward":
                continue
            if recorded.get(name) is not None:
                self.state.flags[name] = recorded[name]

    # ── looking ──────────────────────────────────────────────────────────────────────────────────

    async def show_record(self, index: int) -> None:
        """Show a record's own tensors. While one is read, only the latest asked for waits."""
        await self._records.do(lambda: self._show_record(index))

    async def _show_record(self, index: int) -> None:
        state = self.state
        assert state.a is not None
        record = state.a["records"][index]
        job = Job("record", {"path": state.a["path"], "key": record["key"], "stats": False})
        state.scope = Scope.of(record["key"])
        document = await self._guard(self._run(job, f"reading {fmt.scope(record['key'])}"))
        if document is not None:
            state.show_record(document)
            self._changed(Part.TENSORS, Part.ANSWER, Part.RUNS)
            await self.inspect()

    async def inspect(self, at: list[int] | None = None) -> None:
        """Show statistics and values of the selected tensor. While one inspection runs, only the latest waits."""
        params = self._inspection_of_selected(at)
        if params is not None:
            await self._inspections.do(lambda: self._inspect(params))

    async def _inspect(self, params: dict[str, Any]) -> None:
        document = await self._guard(self.engine.run(Job("inspect", params), self._on_log))
        if document is not None and not self._inspections.is_superseded:
            self.state.inspected = document
            self._changed(Part.INSPECT)

    def _inspection_of_selected(self, at: list[int] | None) -> dict[str, Any] | None:
        state, row = self.state, self.state.row
        if row is None:
            state.inspected = None
            self._changed(Part.INSPECT)
            return None
        if state.shows_record:
            if state.record is None or row.entry.get("problem") or row.entry.get("value") is not None:
                state.inspected = {"kind": "note", "entry": dict(row.entry)}
                self._changed(Part.INSPECT)
                return None
            a = {"path": (state.a or {})["path"], "key": state.record["key"]}
            return {"a": {**a, "name": row.name}, "b": None, "at": at, "count": WINDOW}
        document = state.comparison or {}
        sides = {}
        for side in ("a", "b"):
            key = row.entry.get(f"{side}_key")
            if row.verdict == "MISSING" and key is None:
                continue
            sides[side] = {"path": document[side]["path"], "key": key, "name": row.name}
        if not sides:
            return None
        if len(sides) == 1:
            return {"a": next(iter(sides.values())), "b": None, "at": at, "count": WINDOW}
        if at is None and row.is_first:
            at = ((document.get("first_divergence") or {}).get("index") or {}).get("raw_a")
        return {**sides, "at": at, "count": WINDOW}

    # ── comparing ────────────────────────────────────────────────────────────────────────────────

    async def compare_with(self, b: Path, scope: Scope | None = None) -> None:
        """Open B; compare the scope asked for, or step after step until one diverges."""
        state = self.state
        if state.a is None:
            return
        run = await self._guard(self._open(b))
        if run is None:
            return
        state.b, state.b_path = run, b
        state.step_verdicts.clear()
        self._changed(Part.RUNS)
        if scope is not None and scope != Scope():
            await self.compare(scope)
            return
        theirs = run.get("steps") or []
        shared = [step for step in state.a.get("steps") or [] if step in theirs]
        for step in shared or [None]:
            document = await self.compare(Scope(step))
            if document is None or document.get("first_divergence"):
                break

    async def compare(self, scope: Scope) -> Document | None:
        """Compare one scope of the open pair and select its first divergence."""
        state = self.state
        if state.a is None or state.b is None:
            return None
        state.scope = scope
        params = {"a": state.a["path"], "b": state.b["path"], **scope.params()}
        document = await self._guard(self._run(Job("compare", params), f"comparing {scope}".rstrip()))
        if document is not None:
            self._verdict_of_step(scope.step, document)
            await self._show_comparison(document)
        return document

    def _verdict_of_step(self, step: int | None, document: Document) -> None:
        self.state.step_verdicts[step] = fmt.comparison_answer(document).word

    async def _show_comparison(self, document: Document) -> None:
        self.state.show_comparison(document)
        self._changed(Part.RUNS, Part.TENSORS, Part.ANSWER)
        answer = self.state.answer()
        self._log(answer.sentence if answer.token == "first" else f"{self.state.scope}: {answer.sentence}".lstrip(": "))
        await self.inspect()

    # ── replaying ────────────────────────────────────────────────────────────────────────────────

    async def replay(self) -> None:
        """Run the record each row alone (once) and as the flags say, then compare the two dumps."""
        state = self.state
        if state.a is None:
            self._fail(RldbgError("no dump is open: nothing to replay", hint="rldbg DIR"))
            return
        state.samples.clear()
        await self._guard(self._replay(state.a))
        self._changed(Part.ANSWER, Part.USAGE)

    async def _replay(self, run: Document) -> None:
        state = self.state
        target = self._replay_scope(run)
        model, remark = (state.model, None) if state.model else model_for(run, target.step)
        if model is None:
            raise ModelError(
                "no model to replay with: the dump names none", hint="press m and give a directory or random:llama-tiny"
            )
        if remark:
            self._tell(remark, "warning")
            self._log(remark)
        wanted = dict(state.flags)
        # The reference keeps the recorded attention, so that flipping attention shows what it does.
        recorded = asked_flags(run).get("attention") or Flags().attention
        alone = {**wanted, "attention": recorded, "packing": False, "block_mask": True, "rows_per_forward": 1}
        known = (run["path"], target, model, wanted.get("dtype"), wanted.get("device"), state.temperature, state.seed)
        reference = self._references.get(known)
        state.cells.clear()
        if reference is not None and Path(str(reference.get("dump"))).exists():
            state.cells.append(Cell(_REFERENCE, reference))
        else:
            reference = await self._cell(_REFERENCE, "reference", run, target, model, alone)
            self._references[known] = reference
        cell = await self._cell(Flags.from_mapping(wanted).label(), "cell", run, target, model, wanted)
        params = {"a": reference["dump"], "b": cell["dump"], "final_hidden": cell.get("final_hidden")}
        document = await self._run(Job("compare", params), "comparing with each row alone")
        cell["agreement"], cell["segments"] = _agreement(document), document.get("segments")
        state.step_verdicts.clear()
        self._verdict_of_step(target.step, document)
        await self._show_comparison(document)

    def _replay_scope(self, run: Document) -> Scope:
        """The one micro-batch a replay runs: what the scope leaves open is the first there is."""
        keys = [record["key"] for record in run.get("records") or []]
        fitting = [key for key in keys if _covers(self.state.scope, key)] or keys
        asked = self.state.scope
        if not fitting:
            return asked
        first = Scope.of(fitting[0])
        return Scope(
            first.step if asked.step is None else asked.step,
            first.rank if asked.rank is None else asked.rank,
            first.micro if asked.micro is None else asked.micro,
        )

    async def _cell(
        self, label: str, short: str, run: Document, target: Scope, model: str, flags: dict[str, Any]
    ) -> Document:
        state = self.state
        where = {name: value or 0 for name, value in target.params().items()}
        plan = {
            "dump": str(state.replay_dump or run["path"]), **where, "model": model, "flags": flags,
            "temperature": state.temperature, "seed": state.seed or 0, "out": str(paths.new_replay_dir(short)),
        }  # fmt: skip
        self._log(f"replay {label}")
        document = await self._run(Job("replay_cell", {"plan": plan}), f"replaying {label}", is_replay=True)
        state.plan = {name: value for name, value in plan.items() if name != "out"}
        state.cells.append(Cell(label, document))
        self._changed(Part.USAGE)
        for note in document.get("notes") or []:
            self._log(str(note))
        if document.get("outcome") != "ran":
            raise _cell_error(document, label)
        return document

    # ── exporting ────────────────────────────────────────────────────────────────────────────────

    def export(self, folder: Path) -> list[Path]:
        """Write what is shown, and the replay behind it, as JSON; nothing is overwritten."""
        return [snapshot.write_new(folder, document) for document in snapshot.documents(self.state)]

    # ── the seam to the engine ───────────────────────────────────────────────────────────────────

    async def _run(self, job: Job, what: str, *, is_replay: bool = False) -> Document:
        # A record looked at while a replay runs leaves the replay's progress on the screen.
        own = Busy(what, is_replay=is_replay)
        self.state.busy = self.state.busy or own
        self._changed(Part.ANSWER)
        try:
            return await self.engine.run(job, self._on_event if self.state.busy is own else self._on_log)
        finally:
            if self.state.busy is own:
                self.state.busy = self.state.early = None
            self._changed(Part.ANSWER)

    async def _guard(self, work: Awaitable[T]) -> T | None:
        """The answer, or None after showing the error."""
        try:
            answer = await work
        except JobCancelledError:
            self._cancelled()
            return None
        except asyncio.CancelledError:
            self._cancelled()
            raise
        except RldbgError as error:
            self._fail(error)
            return None
        self.state.trouble = None
        return answer

    def _cancelled(self) -> None:
        self._log("cancelled")
        self._changed(Part.ANSWER)

    def _fail(self, error: RldbgError) -> None:
        self.state.trouble = error.message
        for line in str(error).splitlines():
            self._log(line)
        self._tell(fmt.error_line(error), "error")
        self._changed(Part.ANSWER)

    def _on_log(self, event: Event) -> None:
        if isinstance(event, LogLine):
            self._log(event.text)

    def _on_event(self, event: Event) -> None:
        state = self.state
        if isinstance(event, Progress) and state.busy:
            state.busy.done, state.busy.total, state.busy.unit = event.done, event.total, event.what
            self._changed(Part.ANSWER)
        elif isinstance(event, LogLine):
            self._log(event.text)
        elif isinstance(event, Sample):
            state.samples.append(event)
            self._changed(Part.USAGE)
        elif isinstance(event, Partial) and event.document.get("first_divergence"):
            state.early = event.document["first_divergence"]
            self._changed(Part.ANSWER)


class _Latest:
    """Runs one piece of work at a time; of those asked for meanwhile only the newest is ever done."""

    def __init__(self) -> None:
        self._waiting: Callable[[], Awaitable[None]] | None = None
        self._runs = False

    @property
    def is_superseded(self) -> bool:
        return self._waiting is not None

    async def do(self, work: Callable[[], Awaitable[None]]) -> None:
        self._waiting = work
        if self._runs:
            return
        self._runs = True
        try:
            while (now := self._waiting) is not None:
                self._waiting = None
                await now()
        finally:
            self._runs = False


def _covers(scope: Scope, key: dict[str, Any]) -> bool:
    return all(
        wanted is None or key.get(name) is None or key.get(name) == wanted for name, wanted in scope.params().items()
    )


def _agreement(document: Document) -> Document:
    first = document.get("first_divergence")
    total = document.get("counts") or {}
    compared = sum(total.get(word, 0) for word in ("SAME", "CLOSE", "PADDING", "DIFF", "NAN", "SHAPE"))
    return {"agrees": None if not compared else first is None, "first_divergence": first}


def _cell_error(document: Document, label: str) -> RldbgError:
    error = document.get("error") or {}
    if isinstance(error, str):
        error = {"message": error}
    what = f"replay {label} {document.get('outcome')}: {error.get('message', 'no reason given')}"
    return RldbgError(what, hint=error.get("hint"), expected=error.get("expected"), found=error.get("found"))
