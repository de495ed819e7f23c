"""The tab line of a narrow screen and the key bar at the bottom. Both are made from the actions."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual import events
from textual.message import Message

from tui_debugger.actions import ACTIONS, PANE_TITLES, PANES, Action, for_bar
from tui_debugger.widgets.fixed import Fixed
from tui_debugger.widgets.paint import paint


class TabLine(Fixed):
    """`1 Steps  2 Tensors …`; only narrow screens show it."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"tabs--active"}

    class Pressed(Message):
        def __init__(self, pane: str) -> None:
            super().__init__()
            self.pane = pane

    def __init__(self) -> None:
        super().__init__(id="tab-line")
        self._spans: list[tuple[int, int, str]] = []

    def show(self, active: str) -> None:
        text = Text(no_wrap=True, end="")
        self._spans = []
        for i, pane in enumerate(PANES, 1):
            start = text.cell_len
            style = self.get_component_rich_style("tabs--active") if pane == active else paint(self, "muted")
            text.append(f" {i} {PANE_TITLES[pane]} ", style)
            self._spans.append((start, text.cell_len, pane))
        self.put(text)

    def on_click(self, event: events.Click) -> None:
        for start, end, pane in self._spans:
            if start <= event.x < end:
                self.post_message(self.Pressed(pane))


class KeyBar(Fixed):
    """The keys that matter where the focus is, as many as fit; help and quit always."""

    def __init__(self, actions: tuple[Action, ...] = ACTIONS) -> None:
        super().__init__(id="key-bar")
        self._actions = actions
        self._pane = "tensors"
        self._job_runs = False
        self._compared = False
        self._said: object = None

    def show(self, pane: str, running: bool, compared: bool = False) -> None:
        said = (pane, running, compared, self.app.theme)
        if said != self._said:
            self._said = said
            self._pane, self._job_runs, self._compared = pane, running, compared
            self._draw()

    def on_resize(self, _event: events.Resize) -> None:
        self._draw()

    def _draw(self) -> None:
        fitting = for_bar(self._pane, self._actions, compared=self._compared)
        listed = [(action.key_text, action.label, action.id) for action in fitting]
        if self._job_runs:
            idle = [item for item in listed if item[2] not in ("replay", "run_matrix")]
            listed = [("ctrl+c", "cancel", "cancel"), *idle]
        always = [item for item in listed if item[2] in ("help", "quit")]
        room = self.size.width - 1 - sum(len(k) + len(text) + 3 for k, text, _ in always)
        text = Text(" ", no_wrap=True, overflow="crop", end="")
        for key, label, name in listed:
            size = len(key) + len(label) + 3
            if name in ("help", "quit") or size > room:
                continue
            room -= size
            self._add(text, key, label)
        for key, label, _ in always:
            self._add(text, key, label)
        self.put(text)

    def _add(self, text: Text, key: str, label: str) -> None:
        text.append(key, paint(self, "key"))
        text.append(f" {label}  ")
