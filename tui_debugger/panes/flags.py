"""5 Flags: what the next replay runs with; each flag with its key, and what the last replay really used."""

from __future__ import annotations

from rich.text import Text
from textual import on

from replay_core.records import weights_noted
from replay_core.replay.flags import DEFAULTS, FLAGS, IN_PANE, Flags, settings_known
from replay_core.replay.forecast import unavailable
from tui_debugger import format as fmt
from tui_debugger.actions import ACTIONS, Action, pane_title
from tui_debugger.messages import FlagPressed
from tui_debugger.state import State
from tui_debugger.widgets.paint import paint, write_border
from tui_debugger.widgets.rows import Rows


class FlagsPane(Rows):
    BORDER_TITLE = pane_title("flags")
    head_lines = 0

    def __init__(self, actions: tuple[Action, ...] = ACTIONS) -> None:
        super().__init__(id="flags")
        self._state = State()
        self._said: object = None
        self._keys = {action.argument: action.key_text for action in actions if action.id == "flag"}
        self._model_key = next((action.key_text for action in actions if action.id == "model"), "")

    def show(self, state: State) -> None:
        self._state = state
        said = (
            dict(state.replay.flags),
            state.replay.model,
            state.opened.scope.step,
            len(state.replay.cells),
            id(state.opened.a),
            self._effective(),
        )
        if said != self._said:
            self._said = said
            self.set_count(len(IN_PANE) + 1, self.cursor)
        write_border(self, subtitle="r replays" if state.opened.a else "")

    @property
    def _before(self) -> dict[str, object]:
        """What the flags stood at before a person changed them."""
        said = self._state.opened.a["flags"] if self._state.opened.a else None
        return {**DEFAULTS, **settings_known(said), "rows_per_forward": None}

    def _effective(self) -> dict[str, object]:
        cells = self._state.replay.cells
        return dict(cells[-1].get("effective") or {}) if len(cells) > 1 else {}

    def line(self, row: int, width: int) -> Text:
        text = Text(" ")
        if row == len(IN_PANE):
            text.append(f"{self._model_key} ", paint(self, "key"))
            text.append(f"{'model':<14}")
            model = fmt.safe(self._state.replay.model or self._recorded())
            text.append(fmt.middle(model, max(4, width - 18)), "" if self._state.replay.model else paint(self, "muted"))
            return text
        name, flag = IN_PANE[row], FLAGS[IN_PANE[row]]
        value = self._state.replay.flags.get(name)
        text.append(f"{self._keys.get(name) or ' '} ", paint(self, "key"))
        text.append(f"{flag.label:<14}")
        shown = flag.unset if value is None else fmt.setting(value)
        idle = Flags.from_mapping(self._state.replay.flags).idle(name)
        changed = value != self._before.get(name)
        text.append(shown, paint(self, "muted") if idle else paint(self, "strong") if changed else "")
        if changed and not idle:
            text.append(" *", paint(self, "key"))
        room = width - text.cell_len
        why, used = unavailable(name, value, self._state.replay.flags), self._effective().get(flag.effective or "")
        if why is not None:
            text.append("  n/a" if room < len(why) + 6 else f"  n/a: {why}", paint(self, "missing"))
        elif idle is not None and room > len(idle) + 3 and changed:
            text.append(f"   {idle}", paint(self, "muted"))
        elif name == "attention" and used is not None and room > 12:  # less would say nothing
            ran = str(used).replace("_scaled_dot_product_", "")
            text.append(f"  ran {fmt.end(ran, room - 6)}", paint(self, "muted"))
        elif used is not None and not fmt.setting(used).startswith(fmt.setting(value)):
            text.append(f"   ran {fmt.setting(used)}", paint(self, "missing"))
        return text

    def _recorded(self) -> str:
        noted = weights_noted(
            self._state.opened.a["models"] if self._state.opened.a else {}, self._state.opened.scope.step
        )
        return noted[1] if noted else f"none recorded: press {self._model_key}"

    @on(Rows.Chosen)
    def _chosen(self, event: Rows.Chosen) -> None:
        event.stop()
        self.do_open()

    def do_open(self) -> None:
        """Change the flag under the cursor."""
        name = "model" if self.cursor == len(IN_PANE) else IN_PANE[self.cursor]
        self.post_message(FlagPressed(name))

    do_mark = do_open
