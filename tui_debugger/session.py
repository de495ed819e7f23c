"""One screen's flows over one state: what a user can have done, and who does it. No textual here."""

from __future__ import annotations

from collections.abc import Callable

from tui_debugger.engine import Engine
from tui_debugger.flows.closer import Closer
from tui_debugger.flows.comparing import Comparing
from tui_debugger.flows.diagnosing import Diagnosing
from tui_debugger.flows.errands import Errands
from tui_debugger.flows.following import Following
from tui_debugger.flows.looking import Looking
from tui_debugger.flows.mismatching import Mismatching
from tui_debugger.flows.opening import Opening
from tui_debugger.flows.parities import Parities
from tui_debugger.flows.replaying import Replaying
from tui_debugger.flows.ruling import Refereeing
from tui_debugger.flows.sampling import Sampling
from tui_debugger.state import State


class Session:
    """The flows of one screen. Arguments as of `Errands`."""

    def __init__(
        self,
        engine: Engine,
        state: State,
        changed: Callable[..., None],
        tell: Callable[[str, str], None],
        log: Callable[[str], None],
    ) -> None:
        self.state = state
        self.errands = Errands(engine, state, changed, tell, log)
        self.looking = Looking(self.errands, Closer(self.errands))
        self.comparing = Comparing(self.errands, self.looking)
        self.diagnosing = Diagnosing(self.errands)
        self.opening = Opening(self.errands, self.comparing, self.looking, self.diagnosing)
        self.parities = Parities(self.errands, self.opening, self.looking)
        self.replaying = Replaying(self.errands, self.comparing, self.opening)
        self.ruling = Refereeing(self.errands)
        self.mismatching = Mismatching(self.errands)
        self.sampling = Sampling(self.errands)
        self.following = Following(self.errands, self.looking, self.diagnosing)
