"""Asking for work: which dump, model, step or tolerance, a replay, a matrix, two critics; and calling it off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from replay_core.errors import RldbgError
from replay_core.replay.flags import FLAGS
from tui_debugger import format as fmt
from tui_debugger.answer import NEXT, NO_DUMP
from tui_debugger.cells import is_replays
from tui_debugger.screens.stage import Stage
from tui_debugger.state import Part, Scope
from tui_debugger.tolerance import Tolerance

if TYPE_CHECKING:
    from replay_core.documents.replay import CellEntry


class Requests:
    """The actions that open, compare, replay and judge, and their settings."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self._session, self._state = stage, stage.session, stage.state

    def do_compare(self) -> None:
        if self._state.opened.a is None and self._state.job.busy is None:
            self._stage.say(f"{NO_DUMP}: o opens one, c then compares it")
            return

        def go(text: str) -> None:
            self._stage.work(self._session.comparing.compare_with(Path(text).expanduser()), "job")

        value = str(self._state.opened.b_path or "")
        self._stage.ask("Compare with", "a dump: directory or file", go, value, path=True)

    def do_open_dump(self) -> None:
        def go(text: str) -> None:
            self._stage.work(self._session.opening.open_another(Path(text).expanduser()), "job")

        self._stage.ask("Open", "a dump (directory or file), or a saved document (.json)", go, path=True)

    def do_model(self) -> None:
        def go(text: str) -> None:
            self._state.replay.model = text
            self._state.job.trouble = None  # it was the lack of one, or of another
            self._stage.redraw(Part.FLAGS, Part.ANSWER)

        self.ask_model(go)

    def ask_model(self, then: Callable[[str], None], question: str = "Model to replay with") -> None:
        """Ask which model a replay, or a ruling, loads: what the dump names, and the random ones, can be completed."""
        from replay_core.replay.architectures import ARCHITECTURES  # as late as the question

        run = self._state.opened.a
        recorded = run["models"].values() if run is not None else ()
        known = [
            *dict.fromkeys(["checkpoint", *recorded] if recorded else []),
            *(f"random:{name}" for name in ARCHITECTURES),
        ]
        hint = "a directory, a cached hub id, or random:llama-tiny"
        self._stage.ask(question, hint, then, self._state.replay.model or "", path=True, known=known)

    def do_capsule(self) -> None:
        """One file, and a script, of the replayed cell that is compared with each row alone on the screen."""
        dump = self._state.opened.b_path
        if self._state.cell is None and dump is not None and is_replays(dump):
            self._ask_capsule(str(dump))
        else:
            self.ask_capsule(self._state.cell)

    def ask_capsule(self, cell: CellEntry | None) -> None:
        """Ask where the capsule of a cell goes, and make it."""
        if cell is None or cell["dump"] is None or cell["agreement"]["agrees"] is not False:
            said = "no replayed cell is compared here" if cell is None else "this cell does not disagree"
            self._stage.say(f"{said}: a capsule shows one that disagrees with each row alone (r, or m and enter)")
            return
        self._ask_capsule(cell["dump"])

    def _ask_capsule(self, dump: str) -> None:
        if self._state.job.busy is not None:
            self._stage.say(f"{self._state.job.busy} · ctrl+c cancels")
            return

        def go(text: str) -> None:
            file = Path(text).expanduser()
            named = file if file.suffix not in ("", ".py") else file.with_suffix(".capsule")
            self._stage.work(self._session.replaying.capsule(dump, named), "job")

        hint = "the smallest case: model slice, inputs, both outputs; a script of the same name (.py) without rldbg"
        self._stage.ask("Write the capsule to", hint, go, "bug.capsule", path=True)

    def do_tolerance(self) -> None:
        session = self._session
        if session.state.tensors.comparison is None and session.state.job.busy is None:
            self._stage.say(NEXT if session.state.opened.a is not None else f"{NO_DUMP}: o opens one")
            return

        def go(text: str) -> None:
            try:
                tolerance = Tolerance.parse(text)
            except RldbgError as error:
                self._stage.say(fmt.error_line(error), "error")
                return
            self.judge_by(tolerance)

        hint = "1e-3 (atol), 1e-3 1e-2 (atol rtol), rtol=1e-2, exact, table, or a file of rules (.toml). Reads nothing."
        self._stage.ask("Judge by", hint, go, session.state.tolerance.typed, path=True)

    def do_loosen(self, factor: str) -> None:
        tolerance = (self._session.comparing.judging_by or self._state.tolerance).scaled(float(factor))
        if tolerance is None:
            self._stage.say("R sets a tolerance first: + and - then make it ten times looser or tighter")
            return
        self.judge_by(tolerance)

    def judge_by(self, tolerance: Tolerance) -> None:
        busy = self._state.job.busy
        if busy is not None and self._session.comparing.judging_by is None:
            self._stage.say(f"{busy} · ctrl+c cancels")
            return
        # Now, not once the worker begins: of keys that are read together each goes on from the one before.
        self._session.comparing.judging_by = tolerance
        self._stage.work(self._session.comparing.judge_by(tolerance), "judge")

    def do_parity(self) -> None:
        state = self._state
        if state.parity.document is None and not state.parity.runs:
            if state.opened.a_path is None or state.opened.snapshot is not None:
                self._stage.say("open the dumps of two critics first: o, then c")
                return
            b = state.opened.b_path or state.opened.a_path
            request = {"recorded": True, "a": str(state.opened.a_path), "b": str(b)}
            self._stage.work(self._session.parities.run(request), "job")
            return
        self.show_parity()

    def show_parity(self) -> None:
        from tui_debugger.screens.parity import ParityScreen  # nobody waits for it who never opens it

        if not isinstance(self._stage.screen.app.screen, ParityScreen):
            self._stage.put_on_top(ParityScreen(self._stage))

    def do_step(self) -> None:
        state = self._state
        steps = state.opened.a["steps"] if state.opened.a else []
        if not steps:
            self._stage.say("the run has no steps" if state.opened.a else f"{NO_DUMP}: o opens one")
            return

        def go(text: str) -> None:
            if not text.isdecimal() or int(text) not in steps:
                self._stage.say(f"there is no step {text}: {steps[0]} to {steps[-1]}", "error")
                return
            self.go_to_step(int(text))

        self._stage.ask("Go to step", f"{steps[0]} to {steps[-1]}, {len(steps):,} of them", go)

    def go_to_step(self, step: int) -> bool:
        """Compare a step of a pair, or show the first record of a run's; False where there is none."""
        state = self._state
        records = state.opened.a["records"] if state.opened.a else []
        index = next((i for i, record in enumerate(records) if record["key"]["step"] == step), None)
        if index is None:
            return False
        if state.opened.b is not None:
            self._stage.work(self._session.comparing.compare(Scope(step)), "compare")
        else:
            self._stage.work(self._session.looking.show_record(index), "look")
        return True

    def do_replay(self) -> None:
        if self._state.job.busy is not None:
            self._stage.say(f"{self._state.job.busy} · ctrl+c cancels")
            return
        self._stage.work(self._session.replaying.replay(), "job")

    def do_matrix(self) -> None:
        from tui_debugger.screens.matrix import MatrixScreen  # 5 ms that nobody waits for who never opens it

        self._stage.put_on_top(MatrixScreen(self._stage))

    def do_flag(self, name: str) -> None:
        flag, value = FLAGS[name], self._state.replay.flags.get(name)
        settings = flag.turns or flag.values
        at = settings.index(value) if value in settings else -1
        now = self._state.replay.flags[name] = settings[(at + 1) % len(settings)]
        self._stage.redraw(Part.FLAGS)
        from replay_core.replay.forecast import unavailable  # comes with the flags pane, after the first paint

        why = unavailable(name, now, self._state.replay.flags)
        if why is not None:
            self._stage.say(f"{flag.label} {now} cannot run here: {why}", "warning", 3)
        elif self._stage.panes.active != "flags" and not self._stage.screen.query_one("#flags").region:
            self._stage.say(f"{flag.label}: {flag.unset if now is None else now}", seconds=2)

    def do_cancel(self) -> None:
        if self._state.job.busy is None and self._state.opened.steps.doing:
            self._stage.cancel("steps")
            self._stage.say(f"cancelled: {fmt.plural(len(self._state.opened.steps.open), 'step')} not compared")
            return
        if self._state.job.busy is None and self._state.opened.health.doing:
            self._stage.cancel("diagnose")
            return
        if self._state.job.busy is None:
            self._stage.say("nothing runs; q quits")
        self._stage.cancel("job", "compare", "judge")
        self._session.comparing.judging_by = None  # of a judging that had not begun nobody else would say so
