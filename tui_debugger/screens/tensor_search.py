"""Finding a tensor and a place in it: the first divergence, the next one, a filter, an order, an index, a stretch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tui_debugger.answer import NEXT, NO_DUMP
from tui_debugger.filtering import shown
from tui_debugger.flows.ruling import grafted
from tui_debugger.panes.tensors import TensorsPane
from tui_debugger.screens.requests import Requests
from tui_debugger.screens.stage import Stage
from tui_debugger.state import Part, Scope
from tui_debugger.tensor_rows import SORTS, matching

if TYPE_CHECKING:
    from replay_core.documents.ruling import RulingDocument


class TensorSearch:
    """The actions that choose which tensor, or which of them, are looked at."""

    def __init__(self, stage: Stage, requests: Requests) -> None:
        self._stage, self._session, self._state = stage, stage.session, stage.state
        self._requests = requests

    def do_graft(self) -> None:
        """Which module alone explains what the two differ by at their end, in per cent."""
        if self._state.opened.b is None and self._state.tensors.comparison is None:
            self._stage.say("a graft is from one side into the other: c compares with another dump, r replays")
            return
        self._ruled(graft=True)

    def do_ruling(self) -> None:
        """What a referee that has the weights says of the two, or of the one that is open; it is asked once."""
        self._ruled(graft=False)

    def _ruled(self, *, graft: bool) -> None:
        state = self._state
        if state.opened.a is None and state.job.busy is None:
            self._stage.say(f"{NO_DUMP}: o opens one")
            return
        made = self._made(graft=graft)
        if made is None and state.job.busy is not None:
            self._stage.say(f"{state.job.busy} · ctrl+c cancels")
            return
        self._stage.come_to_front()
        if state.tensors.shows_record and state.tensors.comparison is not None:
            state.tensors.show_comparison(state.tensors.comparison, None)
            self._stage.redraw(Part.RUNS)
        if made is None and self._session.ruling.lacks_weights:
            of = "the model of both sides" if state.opened.b is not None else "the model of the dump"

            def rule_with(model: str) -> None:
                state.replay.model = model
                self._stage.redraw(Part.FLAGS)
                self._stage.work(self._rule(graft=graft), "job")

            self._requests.ask_model(rule_with, f"Weights to rule with: {of}")
            return
        self._stage.work(self._rule(graft=graft), "job")

    def _made(self, *, graft: bool) -> RulingDocument | None:
        made = self._session.ruling.made
        return None if made is not None and graft and made["graft"] is None else made

    async def _rule(self, *, graft: bool) -> None:
        ruled = self._made(graft=graft) or await self._session.ruling.rule(graft=graft)
        if ruled is None:
            return
        if graft and ruled["graft"] is not None:
            self._stage.say("\n".join([ruled["graft"]["sentence"], *grafted(ruled["graft"])]))
        else:
            self._stage.say(f"{ruled['ruling'] or 'not ruled'}: {ruled['sentence']}")
        state = self._state
        if ruled["tensor"] is None:
            return
        if state.tensors.select_named(ruled["tensor"]):
            self.select(state.tensors.selected)
        elif state.tensors.shows_record:
            await self._find(ruled["tensor"], state.opened.scope)

    async def _find(self, tensor: str, scope: Scope) -> None:
        """Go to the record of a computation that holds the tensor; where none does, stay."""
        state = self._state
        here, ruled = state.tensors.record, state.opened.ruled[scope]
        records = state.opened.a["records"] if state.opened.a is not None else []
        holding = [i for i, record in enumerate(records) if scope.covers(record["key"])]
        back = [i for i in holding if here is not None and records[i]["key"] == here["key"]]
        for index in [*holding, *back]:
            await self._session.looking.show_record(index, tensor)
            if state.tensors.select_named(tensor):
                state.opened.ruled[state.opened.scope] = ruled
                return

    def do_first(self) -> None:
        state = self._state
        if state.tensors.comparison is None:
            self._stage.say(NEXT)
            return
        self._stage.come_to_front()
        if state.tensors.shows_record:
            state.tensors.show_comparison(state.tensors.comparison, None)
            self._stage.redraw(Part.RUNS)
        index, apart = state.tensors.first(), [step for step in state.opened.steps.diverging if step is not None]
        if index is None and apart:
            self._requests.go_to_step(apart[0])
            self._stage.panes.focus("tensors")
            return
        if index is None:
            self._stage.say("nothing diverges")
            index = state.tensors.selected
        elif index not in state.tensors.shown:
            self.set_filter("")
        self.select(index)
        self._stage.panes.focus("tensors")

    def do_diverging(self, direction: str) -> None:
        index = self._state.tensors.diverging(self._state.tensors.selected, 1 if direction == "next" else -1)
        if index is None:
            compared = self._state.tensors.comparison is not None
            self._stage.say(f"no {direction} diverging tensor" if compared and not self._state.tensors.shows_record else
                     "these are one record's tensors: v goes back to the comparison" if compared else NEXT)  # fmt: skip
            return
        self.select(index)

    def select(self, index: int) -> None:
        self._state.tensors.selected = index
        self._stage.redraw(Part.TENSORS)
        self._stage.work(self._session.looking.inspect(), "inspect")

    def do_view(self) -> None:
        state = self._state
        if state.tensors.shows_record and state.tensors.comparison is not None:
            state.tensors.show_comparison(state.tensors.comparison)
        elif (
            not state.tensors.shows_record
            and state.tensors.record is not None
            and Scope.of(state.tensors.record["key"]) == state.opened.scope
        ):
            state.tensors.show_record(state.tensors.record)
        elif not state.tensors.shows_record and state.opened.a and state.opened.a.get("records"):
            keys = [record["key"] for record in state.opened.a["records"]]
            here = next((i for i, key in enumerate(keys) if key.get("step") == state.opened.scope.step), 0)
            self._stage.work(self._session.looking.show_record(here), "look")
            return
        else:
            self._stage.say(NEXT)
            return
        self._stage.redraw(Part.TENSORS, Part.ANSWER, Part.RUNS)
        self._stage.work(self._session.looking.inspect(), "inspect")

    def do_strip(self, direction: str) -> None:
        if not self._session.looking.closer.strip:
            self._stage.say("no strip: it stands under a pair that differs")
            return
        self._session.looking.closer.move(1 if direction == "right" else -1)

    def do_at(self) -> None:
        if self._state.inspection.document is None:
            self._stage.say("no tensor is selected: there are no values to go to")
            return

        def go(text: str) -> None:
            text = text.replace("[", "").replace("]", "").replace(" ", "")
            if self._state.inspection.sheet == "tokens" and ":" in text:
                self._stage.say("a slice is shown as values: i goes back to them; an index opens its sample", "error")
                return
            if ":" in text:
                self._stage.work(self._session.looking.inspect(part=text), "inspect")
                return
            try:
                at = [int(part) for part in text.split(",")]
            except ValueError:
                self._stage.say(f"not an index: {text} (expected e.g. 0,12 or 0:4,:8)", "error")
                return
            self._stage.work(self._session.looking.inspect(at), "inspect")

        self._stage.ask("Values from index", "one number per dimension (0,12), or a slice of any rank (0:4,:8)", go)

    def do_strip_axis(self) -> None:
        self._stage.work(self._session.looking.closer.turn(), "inspect")

    def do_sheet(self) -> None:
        self._state.inspection.sheet = "tokens" if self._state.inspection.sheet == "values" else "values"
        self._stage.work(self._session.looking.inspect(), "inspect")

    def do_sort(self, by: str = "") -> None:
        """The next order, or the one asked for; that again is the order of computation."""
        now = self._state.tensors.sort
        following = SORTS[(SORTS.index(now) + 1) % len(SORTS)]
        self._state.tensors.sort = following if not by else SORTS[0] if by == now else by
        self._stage.say(f"sorted: {self._state.tensors.sort}")
        self._state.tensors.filter_error = None
        self._stage.work(self._refilter(to_top=self._state.tensors.sort != SORTS[0]), "filter")

    def do_open(self) -> None:
        """Enter in the inspector: to the stretch under the strip's cursor."""
        if self._stage.panes.active != "inspect":
            return
        if self._session.looking.closer.place is None:
            self._stage.say("arrow left and right move along the strip; enter then goes to the stretch")
        self._stage.work(self._session.looking.open_strip(), "inspect")

    def do_filter(self) -> None:
        if self._stage.panes.active == "steps":
            hint = "a regular expression, e.g. PROBLEM, DIFF, rank 1, micro 3, modules; empty shows all"
            self._stage.ask("Filter the records", hint, self._filter_steps, self._state.opened.step_filter)
            return
        self._stage.panes.focus("tensors")
        self._stage.screen.query_one(TensorsPane).ask_filter(self._state.tensors.filter)

    def _filter_steps(self, text: str) -> None:
        self._state.opened.step_filter = text
        self._stage.redraw(Part.RUNS)

    def set_filter(self, text: str) -> None:
        self._state.tensors.filter = text
        self._stage.work(self._refilter(), "filter")

    async def _refilter(self, *, to_top: bool = False) -> None:
        """`to_top`: the first of the order is looked at, the worst where the worst comes first."""
        state, rows = self._state, self._state.tensors.rows
        wanted, looked_at = state.tensors.wanted(), len(rows)
        hits = await shown(rows, wanted if state.tensors.filter else None, state.tensors.sort)
        if rows is not state.tensors.rows:
            return  # another list came meanwhile, and was filtered as a whole
        state.tensors.shown = [*hits, *matching(rows, wanted, looked_at, len(rows))]  # with what was judged meanwhile
        hidden = state.tensors.row is not None and not state.tensors.row_is_shown()
        if state.tensors.shown and (to_top or hidden):
            self.select(state.tensors.shown[0])
        self._stage.redraw(Part.TENSORS)
