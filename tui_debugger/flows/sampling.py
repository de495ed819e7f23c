"""The samples of a step, as they are looked through: a reader holds them, and gives what is asked for of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from replay_core.jobs import Job
from tui_debugger.flows.errands import Errands
from tui_debugger.flows.latest import Latest

if TYPE_CHECKING:
    from replay_core.documents.samples import SampleOrder, SamplesDocument


class Sampling:
    """Asks for samples. Of several asked for while one is taken, only the latest is."""

    #: Samples listed.
    MOST = 500

    def __init__(self, errands: Errands) -> None:
        self._errands, self.state = errands, errands.state
        self._latest = Latest()
        self.document: SamplesDocument | None = None

    async def read(self, step: int | None) -> SamplesDocument | None:
        """The samples as they lie there now, in the order recorded; None where there are none, which is said."""
        job = self._job(step, anew=True)
        self.document = await self._errands.guard(self._errands.run(job, "reading samples"))
        return self.document

    async def ask(
        self, step: int | None, by: SampleOrder, search: str | None, shown: Sequence[int], tokenizer: str | None
    ) -> bool:
        """The same samples in another order, or others of them in full; the document is changed where it succeeds.
        False where somebody asks already: who did is told when this answer, or a newer one, is there."""
        job = self._job(step, by=by, search=search, shown=list(shown), tokenizer=tokenizer)

        async def take() -> None:
            found = await self._errands.guard(self._errands.quietly(job))
            if found is not None and not self._latest.is_superseded:
                self.document = found

        return await self._latest.do(take)

    def _job(self, step: int | None, **options: Any) -> Job:
        opened = self.state.opened
        where = {"path": str(opened.a_path), "more": [str(one) for one in opened.more]}
        return Job("samples", {**where, "step": step, "most": self.MOST, **options})
