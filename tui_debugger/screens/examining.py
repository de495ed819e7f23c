"""What is wrong, and going there: findings, their evidence, trends, a run that is followed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tui_debugger.answer import NO_DUMP
from tui_debugger.panes.steps import StepsPane
from tui_debugger.screens.requests import Requests
from tui_debugger.screens.stage import Stage
from tui_debugger.state import Part, Scope

if TYPE_CHECKING:
    from tui_debugger.panes.findings import FindingsPane


class Examining:
    """The actions of findings, trends and following."""

    def __init__(self, stage: Stage, requests: Requests) -> None:
        self._stage, self._session, self._state = stage, stage.session, stage.state
        self._requests = requests

    # ── findings ─────────────────────────────────────────────────────────────────────────────────

    def do_diagnose(self) -> None:
        if self._state.opened.a is None:
            self._stage.say(f"{NO_DUMP}: o opens one")
            return
        self._stage.work(self._session.diagnosing.diagnose(), "diagnose")

    def do_finding(self) -> None:
        pane = self._stage.panes.pane
        finding = cast("FindingsPane", pane).finding if pane is not None and pane.id == "findings" else None
        self.show_finding(finding or self._state.opened.health.worst)

    def show_finding(self, finding: Mapping[str, Any] | None) -> None:
        if finding is None:
            self._stage.say(self._state.opened.health.note() or "nothing diagnosed yet: o opens a dump or a log")
            return
        from tui_debugger.screens.evidence import EvidenceScreen  # nobody waits for it who finds nothing wrong

        self._stage.put_on_top(EvidenceScreen(self._stage, finding))

    def go_to_finding(self, finding: Mapping[str, Any]) -> None:
        """Go where the finding's evidence lies: a line of a log, a tensor, a step."""
        where = finding["where"]
        if where.get("line") is not None and where.get("path"):
            from tui_debugger.screens.logview import LogScreen

            self._stage.put_on_top(LogScreen(Path(where["path"]), line=int(where["line"])))
            return
        self._stage.come_to_front()
        self._stage.work(self._go_to(where, finding), "look")

    async def _go_to(self, where: Mapping[str, Any], finding: Mapping[str, Any]) -> None:
        steps = finding.get("steps") or []
        place = {**where, "step": where.get("step") if where.get("step") is not None else next(iter(steps), None)}
        if any(place.get(name) is not None for name in ("step", "path")) and await self._session.looking.show_place(
            place
        ):
            named = self._state.tensors.row is not None and place.get("tensor") is not None
            self._stage.panes.focus("inspect" if named and place.get("sample") is not None else "tensors")
            self._stage.redraw(Part.TENSORS, Part.RUNS)
        else:
            self.show_finding(finding)

    def go_to_problem(self, step: int | None, where: str) -> None:
        """Go to the record of the file that a problem names, or to the step it speaks of."""
        self._stage.panes.focus("steps")
        if not self._stage.screen.query_one(StepsPane).go_to(step, where):
            self._stage.say("it belongs to no record that is listed")

    def take_next_step(self, command: str) -> bool:
        """Do on the screen what a finding's next step says, where the screen can: replay or compare."""
        asked = parsed(command)
        state = self._state
        self._stage.come_to_front()
        if asked is None or state.opened.a is None:
            return False
        verb, words, options = asked
        if verb == "compare" and len(words) > 1:
            self._stage.work(self._session.comparing.compare_with(Path(words[1]).expanduser()), "job")
            return True
        if verb == "mismatch":
            self._mismatch(int(options["step"]) if options.get("step", "").isdecimal() else None, again=False)
            return True
        if verb != "replay":
            return False
        numbers = {name: int(options[name]) for name in ("step", "rank", "micro") if options.get(name, "").isdecimal()}
        index = self._session.looking.record_at(numbers) if numbers else None
        if index is not None:
            state.opened.scope = Scope.of(state.opened.a["records"][index]["key"])
        for name, value in flags_of(options).items():
            state.replay.flags[name] = value
        if "temperature" in options:
            state.replay.temperature = float(options["temperature"])
        model = options.get("model", "")
        if model and not model.isupper():
            state.replay.model = model
        self._stage.redraw(Part.FLAGS)
        if "matrix" in options:
            self._requests.do_matrix()
        elif state.replay.model is None and not state.opened.a.get("models"):
            self._requests.ask_model(self._replay_with)
        else:
            self._requests.do_replay()
        return True

    def _replay_with(self, model: str) -> None:
        self._state.replay.model = model
        self._requests.do_replay()

    # ── samples ──────────────────────────────────────────────────────────────────────────────────

    def do_samples(self) -> None:
        """The samples of the step that is looked at, as a person reads them."""
        if self._state.opened.a is None or self._state.opened.snapshot is not None:
            self._stage.say(f"{NO_DUMP}: o opens one")
        elif self._state.job.busy is not None:
            self._stage.say(f"{self._state.job.busy} · ctrl+c cancels")
        else:
            self._stage.work(self._show_samples(self._state.opened.scope.step), "job")

    async def _show_samples(self, step: int | None) -> None:
        if await self._session.sampling.read(step) is not None:
            from tui_debugger.screens.samples import SamplesScreen  # as late as the others

            self._stage.put_on_top(SamplesScreen(self._stage, step))

    # ── engine against trainer ───────────────────────────────────────────────────────────────────

    def do_mismatch(self) -> None:
        """Why engine and trainer disagree at the step that is looked at; it is asked once for each."""
        self._mismatch(self._state.opened.scope.step, again=False)

    def _mismatch(self, step: int | None, *, again: bool) -> None:
        mismatching = self._session.mismatching
        if self._state.opened.a is None:
            self._stage.say(f"{NO_DUMP}: o opens one")
        elif not again and mismatching.made(step) is not None:
            self._show_mismatch(step)
        elif self._state.job.busy is not None:
            self._stage.say(f"{self._state.job.busy} · ctrl+c cancels")
        else:
            self._stage.come_to_front()
            self._stage.work(self._explain_mismatch(step), "job")

    async def _explain_mismatch(self, step: int | None) -> None:
        if await self._session.mismatching.explain(step) is not None:
            self._show_mismatch(step)

    def _show_mismatch(self, step: int | None) -> None:
        from tui_debugger.screens.mismatch import MismatchScreen  # as late as the others

        made = self._session.mismatching.made(step)
        if made is not None:
            self._stage.put_on_top(MismatchScreen(self._stage, made, lambda: self._mismatch_with(step)))

    def _mismatch_with(self, step: int | None) -> None:
        """The same once more, with a model that is asked for."""

        def go(model: str) -> None:
            self._state.replay.model = model
            self._stage.redraw(Part.FLAGS)
            self._mismatch(step, again=True)

        self._requests.ask_model(go, "The trainer's model of this step")

    # ── trends ───────────────────────────────────────────────────────────────────────────────────

    def do_trends(self) -> None:
        from tui_debugger.screens.trends import TrendsScreen  # as late as the others

        if self._state.opened.a is None:
            self._stage.say("no run is open: o opens a dump or a log")
            return
        self._stage.put_on_top(TrendsScreen(self._stage))

    # ── following ────────────────────────────────────────────────────────────────────────────────

    def do_follow(self) -> None:
        state = self._state
        if state.opened.live_run is not None:
            self._stage.cancel("follow")
            self._stage.say("no longer followed")
        elif state.opened.a_path is None or state.opened.snapshot is not None:
            self._stage.say("no run is open that could grow: o opens one")
        elif state.opened.more:
            self._stage.say(
                f"a run in {1 + len(state.opened.more)} directories is not followed: rldbg --follow with one of them"
            )
        else:
            self.follow(state.opened.a_path)

    def follow(self, path: Path) -> None:
        self._stage.work(self._session.following.follow(path), "follow")


def parsed(command: str) -> tuple[str, list[str], dict[str, str]] | None:
    """`rldbg VERB WORDS --option value` as (verb, words, options); None where it is no command of rldbg's."""
    try:
        parts = shlex.split(command, comments=True)
    except ValueError:
        return None
    if len(parts) < 2 or parts[0] != "rldbg":
        return None
    verb, rest = parts[1], parts[2:]
    words: list[str] = []
    options: dict[str, str] = {}
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            words.append(word)
            continue
        value = rest.pop(0) if rest and not rest[0].startswith("--") else ""
        options.setdefault(word[2:], value)
    return verb, words, options


def flags_of(options: Mapping[str, str]) -> dict[str, Any]:
    """The settings of a replay among a command's options."""
    flags: dict[str, Any] = {}
    if "packing" in options:
        flags["packing"] = options["packing"] != "off"
    if options.get("rows-per-forward", "").isdecimal():
        flags["rows_per_forward"] = int(options["rows-per-forward"])
    for name in ("logits", "attention", "compile", "dtype"):
        if options.get(name):
            flags[name] = options[name]
    return flags


def can_do(command: str) -> bool:
    """Whether `Examining.take_next_step` knows what to do with a command."""
    asked = parsed(command)
    return asked is not None and (
        (asked[0] == "compare" and len(asked[1]) > 1)
        or asked[0] == "mismatch"
        or (asked[0] == "replay" and "against" not in asked[2] and "backward" not in asked[2])
    )
