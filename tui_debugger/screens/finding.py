"""Finding a tensor: the first divergence, the next one, a filter, an order, the other side of a record."""

from __future__ import annotations

from tui_debugger.answer import NEXT
from tui_debugger.filtering import shown
from tui_debugger.panes.tensors import TensorsPane
from tui_debugger.screens.asking import Asking
from tui_debugger.screens.moving import Moving
from tui_debugger.state import Part, Scope, State
from tui_debugger.tensor_rows import SORTS, matching


class Finding(Moving, Asking):
    """The actions that choose which tensor, or which of them, are looked at."""

    @property
    def state(self) -> State:
        return self.session.state

    def action_first(self) -> None:
        state = self.state
        if state.comparison is None:
            self.say(NEXT)
            return
        if state.shows_record:
            state.show_comparison(state.comparison, None)
        index = state.first()
        if index is None:
            self.say("nothing diverges")
            index = state.selected
        elif index not in state.shown:
            self._set_filter("")
        self._select(index)
        self._focus_pane("tensors")

    def action_diverging(self, direction: str) -> None:
        index = self.state.diverging(self.state.selected, 1 if direction == "next" else -1)
        if index is None:
            compared = self.state.comparison is not None
            self.say(f"no {direction} diverging tensor" if compared and not self.state.shows_record else
                     "these are one record's tensors: v goes back to the comparison" if compared else NEXT)  # fmt: skip
            return
        self._select(index)

    def _select(self, index: int) -> None:
        self.state.selected = index
        self.redraw(Part.TENSORS)
        self.work(self.session.looking.inspect(), "inspect")

    def action_view(self) -> None:
        state = self.state
        if state.shows_record and state.comparison is not None:
            state.show_comparison(state.comparison)
        elif not state.shows_record and state.record is not None and Scope.of(state.record["key"]) == state.scope:
            state.show_record(state.record)
        elif not state.shows_record and state.a and state.a.get("records"):
            keys = [record["key"] for record in state.a["records"]]
            here = next((i for i, key in enumerate(keys) if key.get("step") == state.scope.step), 0)
            self.work(self.session.looking.show_record(here), "look")
            return
        else:
            self.say(NEXT)
            return
        self.redraw(Part.TENSORS, Part.ANSWER)
        self.work(self.session.looking.inspect(), "inspect")

    def action_strip(self, direction: str) -> None:
        if not (self.state.closer or {}).get("strip"):
            self.say("no strip: it stands under a pair that differs")
            return
        self.session.looking.closer.move(1 if direction == "right" else -1)

    def action_strip_axis(self) -> None:
        self.work(self.session.looking.closer.turn(), "inspect")

    def action_sheet(self) -> None:
        self.state.sheet = "tokens" if self.state.sheet == "values" else "values"
        self.work(self.session.looking.inspect(), "inspect")

    def action_sort(self) -> None:
        self.state.sort = SORTS[(SORTS.index(self.state.sort) + 1) % len(SORTS)]
        self.say(f"sorted: {self.state.sort}")
        self._set_filter(self.state.filter)

    def action_filter(self) -> None:
        if self.active == "steps":
            hint = "a regular expression, e.g. PROBLEM, DIFF, rank 1, micro 3, modules; empty shows all"
            self._ask("Filter the records", hint, self._filter_steps, self.state.step_filter)
            return
        self._focus_pane("tensors")
        self.query_one(TensorsPane).ask_filter(self.state.filter)

    def _filter_steps(self, text: str) -> None:
        self.state.step_filter = text
        self.redraw(Part.RUNS)

    def _set_filter(self, text: str) -> None:
        self.state.filter = text
        self.run_worker(self._refilter(), group="filter", exclusive=True)

    async def _refilter(self) -> None:
        state, rows = self.state, self.state.rows
        wanted, looked_at = state.wanted(), len(rows)
        hits = await shown(rows, wanted if state.filter else None, state.sort)
        if rows is not state.rows:
            return  # another list came meanwhile, and was filtered as a whole
        state.shown = [*hits, *matching(rows, wanted, looked_at, len(rows))]  # with what was judged meanwhile
        if state.shown and state.row is not None and not state.row_is_shown():
            self._select(state.shown[0])
        self.redraw(Part.TENSORS)
