"""The terminal UI's outer shell: themes, signals, crashes, children. What users see is `screens/debugger.py`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual.app import App, SystemCommand
from textual.binding import Binding
from textual.driver import Driver
from textual.events import Event, Key
from textual.screen import Screen
from textual.worker import WorkerFailed

from replay_core.errors import DumpError, ExitCode
from tui_debugger import collecting, keymap, paths, remembered, terminal, theming
from tui_debugger.actions import of_screen
from tui_debugger.crash import write_crash
from tui_debugger.engine import ChildEngine, Engine
from tui_debugger.failing import fail
from tui_debugger.screens.debugger import DebuggerScreen
from tui_debugger.session import Session
from tui_debugger.settings import UserSettings, read_settings
from tui_debugger.state import Part, Scope, State

if TYPE_CHECKING:
    from replay_core.documents.gathering import GatheringDocument
    from replay_core.documents.run import RunDocument

_FATAL_SIGNALS = (signal.SIGHUP, signal.SIGTERM)
#: What a saved document of numbers and places that nobody wrote ends in, wherever it is drawn.
_CONTENT = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
#: How often a changed place is written, in seconds.
_KEEP_S = 2.0


class RldbgApp(App[None]):
    """Opens A (and B) and hands the keys to the debugger screen.

    Args:
        a, b: the dumps.
        select: `step`, `rank`, `micro` to look at first.
        replay: settings of a replay (`model`, `flags`, `temperature`, `seed`); `dump` is the recording when it is
            not A; with `start` it begins at once.
        engine: who runs the jobs; the children of this process unless a test brings its own.
        listed: A's run document, when the caller has already listed its names.
        peeked: steps that A's file names speak of, shown until A is listed.
        parity: two critics to hold against each other at once, as `Parities.run` takes them.
        more: the other directories of A's run.
        follow: look at A again and again while it is written, from its newest step on.
        settings: the user's own; read from config.toml otherwise.
        units: looks at a directory of units, which are shown instead of a dump until one is chosen (`chosen_unit`).
        unit: the document of the unit that the cursor begins on.
    """

    TITLE = "rldbg"
    CSS_PATH = [paths.styles_dir() / "app.tcss"]
    ENABLE_COMMAND_PALETTE = True
    COMMAND_PALETTE_BINDING = "ctrl+p"
    #: Over whatever lies on top, a question too.
    BINDINGS = [Binding("ctrl+z", "suspend_process", show=False)]

    def __init__(
        self,
        a: Path | None = None,
        b: Path | None = None,
        *,
        select: dict[str, Any] | None = None,
        replay: dict[str, Any] | None = None,
        ascii: bool = False,
        theme: str | None = None,
        engine: Engine | None = None,
        listed: RunDocument | None = None,
        settings: UserSettings | None = None,
        peeked: Iterable[int] = (),
        parity: dict[str, Any] | None = None,
        follow: bool = False,
        more: Sequence[Path] = (),
        units: Callable[[], GatheringDocument] | None = None,
        unit: str | None = None,
    ) -> None:
        super().__init__()
        self._units, self._unit = units, unit
        self.chosen_unit: str | None = None
        self._styled_for: dict[str, str] = {}
        self._more = tuple(more)
        self._parity = parity
        self.animation_level = "none"
        self._settings = settings or read_settings()
        self._listed = listed
        self._follow = follow
        self._filters.append(terminal.ControlFilter())
        self._paths = (a, b)
        self._select = select or {}
        self._replay = replay or {}
        self._theme_asked = theme
        self.crash_report: Path | None = None
        if ascii:
            self._filters.append(terminal.AsciiFilter())
            self.add_class("-ascii")
        self.engine: Engine = engine or ChildEngine()
        state = State()
        state.replay.model = self._replay.get("model")
        state.replay.temperature = self._replay.get("temperature")
        state.replay.seed = self._replay.get("seed")
        state.replay.dump = self._replay.get("dump")
        given = {name: value for name, value in (self._replay.get("flags") or {}).items() if name in state.replay.flags}
        state.replay.flags.update(given)
        state.replay.flags_given = frozenset(given)
        self.session = Session(self.engine, state, self._changed, self._tell, self._log_line)
        self.actions, self._key_problems = keymap.remapped(self._settings.keys)
        # Before the first style is computed: a theme that comes later has every widget styled twice.
        self._theme_missed: str | None = None
        self._take_theme()
        self.debugger = DebuggerScreen(self.session, self.actions)
        self._kept: dict[str, Any] = {}
        self._collecting = collecting.Collecting()
        state.opened.a_path, state.opened.b_path, state.opened.peeked = a, b, list(peeked)

    def refresh_css(self, animate: bool = True) -> None:
        """Style everything anew. textual does so for the first theme, too, which the first paint was styled for."""
        if self.debugger.is_whole or self.get_css_variables() != self._styled_for:
            super().refresh_css(animate)

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return dict(theming.TOKENS)

    async def on_mount(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _FATAL_SIGNALS:
            # Without this a dropped SSH link kills the app on the spot: children orphaned, terminal raw.
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                loop.add_signal_handler(number, self._end, 128 + number)
        # textual resumes its driver after fg, and draws nothing.
        self.app_resume_signal.subscribe(self, lambda _app: self.refresh(layout=True))

    def get_driver_class(self) -> type[Driver]:
        chosen = super().get_driver_class()
        if chosen.__name__ != "LinuxDriver":
            return chosen  # a test's, or one that the environment names
        from tui_debugger.slow_link import AskingDriver  # of the module that textual has just imported

        return AskingDriver

    def get_default_screen(self) -> Screen[Any]:
        return self.debugger

    def on_ready(self) -> None:
        # Not sooner: while it starts, textual calls back before anything is painted.
        self.debugger.call_after_refresh(self._begin)

    def _leave_units(self, document: str | None) -> None:
        self.chosen_unit = document
        self.exit()

    def _end(self, code: int) -> None:
        self.exit(return_code=code)

    def _take_theme(self) -> None:
        """The theme of the first paint, from its own file. The others are read when it stands."""
        chosen = self._theme_asked or os.environ.get("RLDBG_THEME") or self._settings.theme
        asked = chosen or remembered.theme() or theming.DEFAULT
        theme = theming.find_theme(asked)
        if theme is not None:
            self.register_theme(theme)
        elif asked not in self.available_themes:
            self._load_themes()
            asked = asked if asked in self.available_themes else theming.DEFAULT
        self.theme = asked
        self._styled_for = self.get_css_variables()
        self.stylesheet.set_variables(self._styled_for)
        #: The theme that the user named, which may not be there; what was remembered is not missed.
        self._theme_missed = chosen if chosen not in (None, asked) else None

    def _load_themes(self) -> list[str]:
        """Register every theme; one sentence for each that could not be used."""
        themes, problems = theming.load_themes()
        for theme in themes:
            if theme.name != self.theme:
                self.register_theme(theme)
        if self._theme_missed:
            names = ", ".join(theme.name for theme in themes)
            problems.append(f"no theme {self._theme_missed}: using {self.theme} (there is {names})")
        return problems

    async def _begin(self) -> None:
        a, b = self._paths
        if problems := [*self._load_themes(), *self._settings.problems, *self._key_problems]:
            self.notify("\n".join(problems), title="settings", severity="warning", markup=False, timeout=15)
        if self._units is not None:
            from tui_debugger.screens.units import UnitsScreen  # no dump pays for it

            await self.push_screen(UnitsScreen(self._units, self._leave_units, self._unit))
            return
        await self.debugger.mount_rest()
        if not self.debugger.is_whole:
            return
        if not gc.isenabled():  # the command held it back
            collecting.begin()
            self.set_interval(collecting.LOOK_S, self._collect)
        self.set_interval(_KEEP_S, self._keep_place)
        self.debugger.run_worker(self._first_look(a, b), group="job")

    async def _first_look(self, a: Path | None, b: Path | None) -> None:
        chosen = {name: self._select[name] for name in ("step", "rank", "micro") if self._select.get(name) is not None}
        if self._follow and a is not None:
            if self._listed is None:
                self.debugger.examining.follow(a)  # nothing of it is written yet
                return
            steps = [step for step in self._listed["steps"] if step is not None]
            chosen = chosen or ({"step": max(steps)} if steps else {})
        await self.session.opening.open(a, b, Scope(**chosen) if chosen else None, self._listed, self._more)
        if self._parity is not None:
            await self.session.parities.run(self._parity)
        if self._follow and a is not None:
            self.debugger.examining.follow(a)
        if self.session.state.opened.is_log:
            self.debugger.examining.do_trends()
        if self._replay.get("start"):
            await self.session.replaying.replay()

    def _collect(self) -> None:
        self._collecting.collect_at_rest(is_busy=self.session.state.job.busy is not None)

    async def on_event(self, event: Event) -> None:
        if isinstance(event, Key):
            self._collecting.touched()
        await super().on_event(event)

    async def on_unmount(self) -> None:
        self._keep_place()
        await self.engine.stop()

    def _keep_place(self) -> None:
        """Write where the user is, when that changed: a dropped link takes this process with it."""
        state = self.session.state
        if state.opened.a_path is None or state.opened.a is None or state.job.busy is not None:
            return
        place = {
            **self.session.opening.place(),
            "pane": self.debugger.panes.active,
            "alone": self.debugger.panes.alone,
        }
        if place != self._kept:
            self._kept = place
            remembered.keep_place(state.opened.a_path, state.opened.b_path, place, state.opened.more)

    # ── what the session calls ───────────────────────────────────────────────────────────────────

    def _changed(self, *parts: Part) -> None:
        parity = self.session.state.parity
        if Part.PARITY in parts and parity.is_wanted:
            parity.is_wanted = False
            self.debugger.requests.show_parity()
        if Part.MATRIX in parts and self.session.state.replay.matrix.is_wanted:
            self.session.state.replay.matrix.is_wanted = False
            self.debugger.requests.do_matrix()
        self.debugger.redraw(*parts)

    def _tell(self, text: str, severity: Any) -> None:
        self.notify(text, severity=severity, markup=False, timeout=10)

    def notify(self, message: str, *, severity: Any = "information", **options: Any) -> None:
        """Say something in a corner. What was told for information only before gives its room: the screen is small."""
        for one in [one for one in self._notifications if one.severity == "information" or one.message == message]:
            self._unnotify(one, refresh=False)
        super().notify(message, severity=severity, **options)

    def _log_line(self, line: str) -> None:
        if self.debugger.is_mounted:
            self.debugger.log_line(line)

    # ── palette ──────────────────────────────────────────────────────────────────────────────────

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        for action in of_screen(getattr(screen, "KEYS_OF", "debugger"), self.actions):
            if action.group != "Move" and action.id != "palette":
                title = f"{action.label} ({action.key_text})" if action.keys else action.label
                yield SystemCommand(title, action.help, lambda call=action.call: self._act(call, screen))
        for name in sorted(self.available_themes):
            yield SystemCommand(
                f"theme {name}", "colours of the screen", lambda name=name: setattr(self, "theme", name)
            )

    async def _act(self, call: str, screen: Screen[Any]) -> None:
        await self.run_action(call, default_namespace=screen)

    # ── crashes ──────────────────────────────────────────────────────────────────────────────────

    def _handle_exception(self, error: Exception) -> None:
        """End with exit code 70 and a crash file. Textual's own report prints local variables."""
        if self._exception is None:
            self._exception = error
            self._exception_event.set()
            self.crash_report = None if self._is_saved_document_at_fault(error) else write_crash(error)
        self._return_code = int(ExitCode.INTERNAL)
        self._close_messages_no_wait()

    def _is_saved_document_at_fault(self, error: BaseException | None) -> bool:
        """Whether it is a saved document that cannot be drawn: it may say what its schema allows and nobody wrote."""
        if isinstance(error, WorkerFailed):
            error = error.error
        return self.session.state.opened.snapshot is not None and isinstance(error, _CONTENT)


def run_ui(
    a: Path | None,
    b: Path | None = None,
    *,
    select: dict[str, Any] | None = None,
    replay: dict[str, Any] | None = None,
    ascii: bool = False,
    mouse: bool = True,
    theme: str | None = None,
    listed: RunDocument | None = None,
    peeked: Iterable[int] = (),
    parity: dict[str, Any] | None = None,
    follow: bool = False,
    more: Sequence[Path] = (),
) -> int:
    """Run the screen until the user leaves. The caller has checked that there is a terminal.

    Returns:
        0; 3 of a saved document that cannot be drawn; 70 after a crash; 128 + number after a signal; of a parity what
        its document means (1: they disagree).
    """
    terminal.survive_broken_input()
    terminal.end_when_the_terminal_is_gone()
    settings = read_settings()
    ascii = ascii or settings.ascii or not terminal.speaks_utf8()
    app = RldbgApp(
        a, b, select=select, replay=replay, ascii=ascii, theme=theme, listed=listed, settings=settings, peeked=peeked,
        parity=parity, follow=follow, more=more,
    )  # fmt: skip
    app.run(mouse=mouse and settings.mouse)
    return _code(app, parity)


def run_units(
    look: Callable[[], GatheringDocument],
    reopen: Callable[[Path], int],
    *,
    ascii: bool = False,
    mouse: bool = True,
    theme: str | None = None,
) -> int:
    """Show the units of a directory; one that is chosen is opened by `reopen`, and leaving it leads back here.

    Returns:
        0, or as of `run_ui` what ended the screen.
    """
    terminal.survive_broken_input()
    terminal.end_when_the_terminal_is_gone()
    settings = read_settings()
    ascii = ascii or settings.ascii or not terminal.speaks_utf8()
    chosen = None
    while True:
        app = RldbgApp(ascii=ascii, theme=theme, settings=settings, units=look, unit=chosen)
        app.run(mouse=mouse and settings.mouse)
        chosen = app.chosen_unit
        if chosen is None or app._exception is not None:
            return _code(app)
        code = reopen(Path(chosen))
        if code >= int(ExitCode.INTERNAL):
            return code


def _code(app: RldbgApp, parity: dict[str, Any] | None = None) -> int:
    """What a screen that has ended means to the shell; a crash is said."""
    code = app.return_code
    error = app._exception
    if error is not None and app.crash_report is None and app._is_saved_document_at_fault(error):
        said = DumpError(
            "the saved document cannot be drawn", file=str(app.session.state.opened.snapshot),
            expected="numbers and places as rldbg writes them", found=f"{type(error).__name__}: {str(error)[:200]}",
            hint="write it again from its dumps; rldbg compare prints a saved comparison",
        )  # fmt: skip
        fail(str(said))
        return int(said.exit_code)
    if error is not None:
        fail(f"internal error: {type(error).__name__}: {error}", f"the report is in {app.crash_report}")
        return int(ExitCode.INTERNAL)
    if parity is not None:
        return code or app.session.state.parity.exit_code
    return code or 0
