"""What happens when a user gives another tolerance: the reader judges the figures it kept, and reads nothing."""

from __future__ import annotations

import asyncio
from typing import Any

from replay_core.errors import RequestError
from replay_core.jobs import Document, Job
from tui_debugger import digests
from tui_debugger import format as fmt
from tui_debugger.answer import NEXT
from tui_debugger.errands import Latest
from tui_debugger.replaying import Replaying
from tui_debugger.tolerance import Tolerance


class Rejudging(Replaying):
    """A comparison under the tolerance in force."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._judgings = Latest()
        self.judging_by: Tolerance | None = None
        """Asked for, and not yet in force."""

    async def judge_by(self, tolerance: Tolerance) -> None:
        """Judge the comparison on the screen again; while one judging runs, only the latest waits."""
        self.judging_by = tolerance
        try:
            await self._judgings.do(lambda: self._judge_by(tolerance))
        except asyncio.CancelledError:
            self.judging_by = None
            raise

    async def _judge_by(self, tolerance: Tolerance) -> None:
        """An error leaves the former tolerance in force."""
        state = self.state
        before = state.tolerance
        if state.comparison is None or state.compared is None:
            self.judging_by = None
            saved = state.comparison is not None and state.comparison is state.saved
            self._tell(
                "a saved comparison has no figures to judge again: open its two dumps" if saved else NEXT,
                "warning",
            )
            return
        if tolerance == before:
            self.judging_by = None
            return
        document, state.tolerance = None, tolerance
        try:
            document = await self._guard(self._again(state.compared))
        finally:
            # What the screen says is in force is what its verdicts were judged by, whatever went wrong.
            if document is None:
                state.tolerance = before
            if self.judging_by is tolerance:
                self.judging_by = None
        if document is None:
            return
        # Other steps were judged by another tolerance: their verdicts would not be comparable.
        state.step_verdicts.clear()
        state.judged(state.scope, fmt.comparison_answer(document).word)
        await self._show_comparison(document, keep_row=True)

    async def _again(self, compared: dict[str, Any]) -> Document:
        try:
            document = await self._rejudged(compared)
        except RequestError as error:
            if "not compared last" not in error.message:
                raise
            # The reader was started anew, or compared something else since.
            self._log("the figures are gone: comparing again")
            document = await self._compared(compared, f"comparing by {self.state.tolerance}")
        # No tolerance makes up for what a replay's cell kept as digests alone.
        cell = next((one.document for one in self.state.cells if one.document.get("dump") == compared.get("b")), {})
        return digests.stated(document, cell)

    async def _rejudged(self, compared: dict[str, Any]) -> Document:
        """The same comparison under the tolerance in force."""
        final: list[Document] = []
        tolerance = self.state.tolerance

        def take(part: Document) -> None:
            final.extend(part.get("tensors") or [])

        params = {"a": compared["a"], "b": compared["b"], **tolerance.params(), "stream": True}
        document = await self._run(Job("rejudge", params), f"judging by {tolerance}", on_part=take)
        return {**document, "tensors": final or document.get("tensors") or []}
