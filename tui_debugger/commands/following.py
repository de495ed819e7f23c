"""A run that is diagnosed while its trainer writes it, without a screen: until Ctrl-C, or a kill."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from replay_core import workbench
from replay_core.dumps.following import Follower
from replay_core.errors import NotADumpError
from replay_core.export.scalars import WORST_FINDING, worst_finding
from replay_core.jobs import Progress
from replay_core.records import Selection
from tui_debugger.progress_line import ProgressLine

if TYPE_CHECKING:
    from replay_core.documents.diagnosis import DiagnosisDocument
    from replay_core.export.dashboards import Dashboard

#: Seconds between two looks; a step is whole when a newer one is there, or nothing has come for so long.
_AGAIN_S, _SETTLED_S = 1.0, 2.0
#: Diagnosing takes at most this share of the time.
_SHARE = 0.2


class FollowedDiagnosis:
    """The diagnosis of every step that is whole, made anew when one has come."""

    def __init__(
        self, paths: Sequence[Path], rules: Sequence[str], told: Dashboard | None, progress: ProgressLine
    ) -> None:
        self.document: DiagnosisDocument | None = None
        self._paths, self._rules, self._told = paths, rules, told
        self._follower: Follower | None = None
        self._looked: tuple[int, ...] = ()
        self._is_due, self._came_at, self._next_look = False, 0.0, 0.0
        self._said: set[str] = set()
        self._progress = progress

    def until_stopped(self) -> DiagnosisDocument | None:
        """The last diagnosis; None where nothing could be looked at yet."""
        with _stopped_in_order():
            try:
                while True:
                    self.look()
                    time.sleep(_AGAIN_S)
            except KeyboardInterrupt:
                self._progress.clear()
                return self.document

    def look(self) -> None:
        """Diagnose the run, if a step has become whole since the last time."""
        now = time.monotonic()
        if self._has_news():
            self._is_due, self._came_at = True, now
        if not self._is_due or self._follower is None or now < self._next_look:
            return
        steps = tuple(sorted({step for record in self._follower.run.records if (step := record.key.step) is not None}))
        is_settled = now - self._came_at > _SETTLED_S
        whole = steps if is_settled else steps[:-1]
        self._is_due = not is_settled
        if not is_settled and whole in (self._looked, ()):
            return
        self._diagnose(whole, is_whole=is_settled)
        self._next_look = now + (time.monotonic() - now) / _SHARE

    def _has_news(self) -> bool:
        try:
            if self._follower is not None:
                return bool(self._follower.poll())
            if all(path.exists() for path in self._paths):
                self._follower = Follower(*self._paths)
            return self._follower is not None
        except NotADumpError:
            return False  # nothing of it can be read yet

    def _diagnose(self, steps: tuple[int, ...], *, is_whole: bool) -> None:
        chosen = None if is_whole else Selection.parse(",".join(map(str, steps)))
        try:
            doc = workbench.diagnose(*self._paths, rules=self._rules, step=chosen)
        except NotADumpError:
            return  # what there is so far tells of no step
        self.document = doc
        new = set(steps) - set(self._looked)
        self._looked = steps
        self._progress(Progress(len(steps), None, f"steps looked at, the last {steps[-1]}" if steps else "looked at"))
        for one in doc["findings"]:
            if one["echo_of"] is None and one["id"] not in self._said:
                self._said.add(one["id"])
                self._progress.note(f"{one['severity']}: {one['id']} {one['claim']}")
        if self._told is not None and (values := worst_finding(doc, new)) and (new or not steps):
            self._told.take(steps[-1] if steps else 0, {WORST_FINDING: values[0]})


@contextmanager
def _stopped_in_order() -> Iterator[None]:
    """A kill ends it as Ctrl-C does: with the answer so far. A shell's job in the background hears no Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
