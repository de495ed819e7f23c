"""Comparing what is open, and judging what was compared again: the reader keeps the figures, and reads nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from replay_core.errors import JobCancelledError, RequestError, RldbgError
from replay_core.jobs import DocumentPiece, Event, Job, Partial, Progress
from tui_debugger.answer import NEXT, NO_DUMP, answer_of
from tui_debugger.busy import Busy
from tui_debugger.cells import stated
from tui_debugger.filtering import AT_ONCE, listed
from tui_debugger.flows.errands import Errands
from tui_debugger.flows.latest import Latest
from tui_debugger.flows.listing import listed_run
from tui_debugger.flows.looking import Looking
from tui_debugger.state import Part, Scope
from tui_debugger.steps_compared import StepsCompared
from tui_debugger.together import sides
from tui_debugger.tolerance import Tolerance

if TYPE_CHECKING:
    from replay_core.documents.comparison import ComparisonDocument, PairEntry


class Comparing:
    """The comparison on the screen, under the tolerance in force."""

    def __init__(self, errands: Errands, looking: Looking) -> None:
        self._errands, self.state, self._looking = errands, errands.state, looking
        self._judgings = Latest()
        self.judging_by: Tolerance | None = None
        """Asked for, and not yet in force."""
        self.behind: Callable[[Coroutine[Any, Any, Any]], None] | None = None
        """Who runs what nobody waits for; the screen sets it."""

    async def compare_with(self, b: Path, scope: Scope | None = None) -> None:
        """Open B; compare the scope asked for, or step after step until one diverges, and the other steps behind the
        screen."""
        state = self.state
        if state.opened.a is None:
            self._errands.tell(f"{NO_DUMP}, nothing to compare with: o opens one", "warning")
            return
        run = await self._errands.guard(listed_run(self._errands, b))
        if run is None:
            return
        state.opened.b, state.opened.b_path = run, b
        state.opened.steps = StepsCompared.of_runs(state.opened.a["steps"], run["steps"])
        self._errands.changed(Part.RUNS)
        first = scope if scope is not None and scope != Scope() else None
        for asked in [first] if first else [Scope(step) for step in state.opened.steps.asked] or [Scope()]:
            document = await self.compare(asked)
            if document is None or document["first_divergence"]:
                break
        if not state.job.cancelled:
            self.compare_rest()

    def compare_rest(self) -> None:
        """Have the steps that nobody compared yet compared behind the screen."""
        if self.state.opened.steps.open and self.behind is not None:
            self.behind(self._compare_rest(self.state.opened.steps))

    async def _compare_rest(self, steps: StepsCompared) -> None:
        """Ends where the steps are those of another comparison."""
        state = self.state
        assert state.opened.a is not None
        assert state.opened.b is not None
        runs = sides(state.opened, state.opened.a["path"], state.opened.b["path"])
        limits = state.tolerance.params()
        try:
            for step in steps.open:
                if state.opened.steps is not steps:
                    return
                steps.doing = f"step {step}"
                self._errands.changed(Part.RUNS, Part.ANSWER)
                job = Job("compare_step", {**runs, **Scope(step).params(), **limits})
                try:
                    document = await self._errands.engine.run(job, partial(self._take_progress, steps, step))
                except RldbgError as error:
                    if isinstance(error, JobCancelledError):
                        raise
                    steps.take_failure(step, error.message)
                    self._errands.log(f"step {step} was not compared: {error.message}")
                else:
                    if step not in steps.found:
                        steps.take(step, document)
        except JobCancelledError:
            pass
        finally:
            steps.doing = ""
            self._errands.changed(Part.RUNS, Part.ANSWER)

    def _take_progress(self, steps: StepsCompared, step: int, event: Event) -> None:
        if isinstance(event, Progress):
            of = f" of {event.total:,}" if event.total else ""
            steps.doing = f"step {step} ({event.done:,}{of})"
            self._errands.changed(Part.ANSWER)
        else:
            self._errands.take_log(event)

    async def compare(self, scope: Scope) -> ComparisonDocument | None:
        """Compare one scope of the open pair and select its first divergence."""
        state = self.state
        if state.opened.a is None or state.opened.b is None:
            return None
        before, state.opened.scope = state.opened.scope, scope
        params = {**sides(state.opened, state.opened.a["path"], state.opened.b["path"]), **scope.params()}
        document = None
        try:
            document = await self._errands.guard(self.compared(params, f"comparing {scope}".rstrip()))
        finally:
            if document is None:
                state.opened.scope = before
        if document is not None:
            state.opened.judged(scope, document)
            await self.show(document)
        return document

    async def compare_scopes(self, one: Scope, other: Scope) -> None:
        """Compare one marked place of A with another: of B, where a second dump is open, else of A itself."""
        state = self.state
        if state.opened.a is None:
            return
        before, state.opened.scope = state.opened.scope, one
        b = state.opened.b or state.opened.a
        params = {**sides(state.opened, state.opened.a["path"], b["path"]), **one.params(), "scope_b": other.params()}
        document = None
        try:
            document = await self._errands.guard(self.compared(params, f"comparing {one} with {other}"))
        finally:
            if document is None:
                state.opened.scope = before
        if document is not None:
            state.opened.steps = StepsCompared()
            await self.show(document)

    async def compared(self, params: dict[str, Any], what: str) -> ComparisonDocument:
        """A comparison whose rows come as they are judged: a hundred thousand in one piece would stop the keys."""
        state = self.state
        final: list[PairEntry] = []
        before, compared, state.compared = replace(state.tensors), state.compared, None
        state.tensors.begin_live()
        self._errands.changed(Part.TENSORS)

        def take(part: DocumentPiece) -> None:
            if part.get("first_divergence"):
                self._errands.take(Partial(part))
            elif "rows" in part:
                state.tensors.add_live(part["rows"])
                self._errands.changed(Part.TENSORS)
            elif "tensors" in part:
                final.extend(part["tensors"])

        def ask(params: dict[str, Any]) -> Coroutine[Any, Any, ComparisonDocument]:
            job = Job("compare", {**params, **state.tolerance.compare_params(), "stream": True})
            return self._errands.run(job, what, on_part=take)

        try:
            try:
                document = await ask(params)
            except RequestError:  # the child that ran the replay is another by now
                if not params.pop("replayed", False):
                    raise
                document = await ask(params)
        except BaseException:
            # What was on the screen is there again: rows that are a part of a comparison are no answer.
            state.tensors.go_back_to(before)
            state.compared = compared
            self._errands.changed(Part.TENSORS, Part.ANSWER)
            raise
        state.compared = dict(params)
        if state.tolerance.exact:
            return await self._rejudged(params)
        return self._whole(document, final)

    def _whole(self, document: ComparisonDocument, tensors: list[PairEntry]) -> ComparisonDocument:
        """With the rows that came ahead of it. No tolerance makes up for what a cell kept as digests alone."""
        document["tensors"] = tensors or document["tensors"]
        return stated(document, self.state.cell)

    async def show(self, document: ComparisonDocument, *, keep_row: bool = False) -> None:
        state = self.state
        here = state.tensors.selected if keep_row and not state.tensors.shows_record else None
        entries = document["tensors"]
        own = Busy("listing what was compared", far=Progress(len(entries), None, "tensors"))
        if state.job.busy is None and len(entries) > AT_ONCE:
            state.job.busy = own  # nothing is answered yet: the answer says so
        try:
            found = await listed(state.tensors, document, partial(self._errands.changed, Part.ANSWER))
        finally:
            if state.job.busy is own:
                state.job.busy = None
        state.tensors.show_comparison(document, found)
        if here is not None and here < len(state.tensors.rows):
            self.state.tensors.selected = here
        self._errands.changed(Part.RUNS, Part.TENSORS, Part.ANSWER)
        answer = answer_of(self.state)
        self._errands.log(
            answer.sentence if answer.token == "first" else f"{self.state.opened.scope}: {answer.sentence}".lstrip(": ")
        )
        if not keep_row:
            await self._looking.inspect()

    # ── judging again ────────────────────────────────────────────────────────────────────────────

    async def judge_by(self, tolerance: Tolerance) -> None:
        """Judge the comparison on the screen again; while one judging runs, only the latest waits."""
        self._looking.closer.give_up()  # a judging does not wait for it
        self.judging_by = tolerance
        try:
            await self._judgings.do(lambda: self._judge_by(tolerance))
        except asyncio.CancelledError:
            self.judging_by = None
            raise
        if self.judging_by is None and self.state.tensors.comparison is not None:
            await self._looking.inspect()

    async def _judge_by(self, tolerance: Tolerance) -> None:
        """An error leaves the former tolerance in force."""
        state = self.state
        before = state.tolerance
        if state.tensors.comparison is None or state.compared is None:
            self.judging_by = None
            saved = state.tensors.comparison is not None and state.tensors.comparison is state.opened.saved
            self._errands.tell(
                "a saved comparison has no figures to judge again: open its two dumps" if saved else NEXT,
                "warning",
            )
            return
        if tolerance == before:
            self.judging_by = None
            return
        document, state.tolerance = None, tolerance
        try:
            document = await self._errands.guard(self._again(state.compared))
        finally:
            # What the screen says is in force is what its verdicts were judged by, whatever went wrong.
            if document is None:
                state.tolerance = before
            if self.judging_by is tolerance:
                self.judging_by = None
        if document is None:
            return
        # Other steps were judged by another tolerance: their verdicts would not be comparable.
        state.opened.steps = state.opened.steps.again()
        state.opened.judged(state.opened.scope, document)
        await self.show(document, keep_row=True)
        self.compare_rest()

    async def _again(self, compared: dict[str, Any]) -> ComparisonDocument:
        try:
            return await self._rejudged(compared)
        except RequestError as error:
            if "not compared last" not in error.message:
                raise
            # The reader was started anew, or compared something else since.
            self._errands.log("the figures are gone: comparing again")
            both = {name: value for name, value in compared.items() if name != "replayed"}
            return await self.compared(both, f"comparing by {self.state.tolerance}")

    async def _rejudged(self, compared: dict[str, Any]) -> ComparisonDocument:
        """The same comparison under the tolerance in force."""
        final: list[PairEntry] = []
        tolerance = self.state.tolerance

        def take(part: DocumentPiece) -> None:
            final.extend(part.get("tensors") or [])

        held: dict[str, Any] = {"a": compared["a"], "b": compared["b"], "replayed": compared.get("replayed", False)}
        params = {**held, **tolerance.params(), "stream": True}
        document = await self._errands.run(Job("rejudge", params), f"judging by {tolerance}", on_part=take)
        return self._whole(document, final)
