"""Everything a user can do, once. Key bindings, key bar, help and palette are made from this list.

A behaviour that is not listed here does not exist; every action is a method `action_<id>` of the
debugger screen (a test holds that).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Action:
    id: str
    keys: tuple[str, ...]
    label: str
    """One or two words for the key bar."""
    help: str
    group: str
    bar: int = 0
    """Place in the key bar, smallest first; 0 keeps it out of the bar."""
    pane: str | None = None
    """The pane that must have the focus, None for any."""
    shown_key: str | None = None
    argument: str | None = None

    @property
    def key_text(self) -> str:
        return self.shown_key or _KEY_NAMES.get(self.keys[0], self.keys[0])

    @property
    def call(self) -> str:
        return f"{self.id}({self.argument!r})" if self.argument is not None else self.id


_KEY_NAMES = {
    "right_square_bracket": "]",
    "left_square_bracket": "[",
    "slash": "/",
    "question_mark": "?",
    "colon": ":",
    "at": "@",
    "escape": "esc",
}

#: Panes in the order of their numbers.
PANES = ("steps", "tensors", "inspect", "log", "flags", "usage")
PANE_TITLES = {
    "steps": "Steps",
    "tensors": "Tensors",
    "inspect": "Inspect",
    "log": "Log",
    "flags": "Flags",
    "usage": "Usage",
}

FIND, RUN, MOVE, LOOK = "Find the divergence", "Replay and compare", "Move", "Rest"

ACTIONS: tuple[Action, ...] = (
    Action("first", ("d",), "first", "go to the first diverging tensor", FIND, 3),
    Action(
        "diverging", ("right_square_bracket",), "next", "next diverging tensor", FIND, 4, shown_key="]", argument="next"
    ),
    Action("diverging", ("left_square_bracket",), "prev", "previous diverging tensor", FIND, 0, argument="previous"),
    Action("filter", ("slash",), "filter", "filter tensors: a regular expression on verdict and name", FIND, 7),
    Action("at", ("at",), "index", "show the values from an index on, e.g. 0,12", FIND, 5, "inspect"),
    Action("view", ("v",), "view", "switch between the comparison and the record's own tensors", FIND),
    Action("replay", ("r",), "replay", "run the record with the flags and compare with each row alone", RUN, 1),
    Action("compare", ("c",), "compare", "compare with another dump", RUN, 6),
    Action("model", ("m",), "model", "choose the model a replay loads", RUN, 3, "flags"),
    Action("flag", ("a",), "attention", "next attention implementation", RUN, argument="attention"),
    Action("flag", ("p",), "packing", "packing on or off", RUN, argument="packing"),
    Action("flag", ("t",), "dtype", "next dtype", RUN, argument="dtype"),
    Action("flag", ("b",), "block mask", "block mask on, or off: packed rows then leak", RUN, argument="block_mask"),
    Action("flag", ("w",), "rows", "all rows in one forward, or one by one", RUN, argument="rows_per_forward"),
    Action("change", ("space",), "change", "change the flag under the cursor; pause the log", RUN, 2, "flags"),
    Action("cancel", ("ctrl+c",), "cancel", "cancel the running job", RUN),
    *(
        Action("pane", (str(i),), PANE_TITLES[name], f"go to {PANE_TITLES[name]}", MOVE, argument=name)
        for i, name in enumerate(PANES, 1)
    ),
    Action("next_pane", ("tab",), "next pane", "next pane (shift+tab: back)", MOVE, argument="next"),
    Action("next_pane", ("shift+tab",), "back", "previous pane", MOVE, argument="previous"),
    Action("move", ("j",), "down", "one down (or the arrow)", MOVE, argument="down"),
    Action("move", ("k",), "up", "one up (or the arrow)", MOVE, argument="up"),
    Action("move", ("g",), "top", "to the top (or home)", MOVE, argument="top"),
    Action("move", ("G",), "end", "to the end (or end)", MOVE, argument="end"),
    Action("move", ("ctrl+d",), "page down", "half a page down", MOVE, argument="page_down"),
    Action("move", ("ctrl+u",), "page up", "half a page up", MOVE, argument="page_up"),
    Action("open", ("enter",), "open", "open what the cursor is on", MOVE),
    Action("back", ("escape",), "back", "close, clear the filter, restore the layout, go back", MOVE, shown_key="esc"),
    Action("maximise", ("z",), "maximise", "give the pane the whole screen, and back", MOVE, 9),
    Action("export", ("e",), "export", "write what is shown as JSON", LOOK, 8),
    Action("copy", ("y",), "copy", "copy the answer (or the inspected tensor)", LOOK, 10),
    Action("palette", ("colon", "ctrl+p"), "palette", "all commands and themes, by name", LOOK, 11),
    Action("help", ("question_mark", "f1"), "help", "this page", LOOK, 12),
    Action("quit", ("q",), "quit", "quit; asks once while a replay runs (ctrl+q never asks)", LOOK, 13),
)


def for_bar(pane: str) -> list[Action]:
    """What the key bar lists while `pane` has the focus."""
    fitting = [action for action in ACTIONS if action.bar and action.pane in (None, pane)]
    return sorted(fitting, key=lambda action: (action.pane != pane, action.bar))


def groups() -> dict[str, list[Action]]:
    """The actions under their headings, for the help page."""
    table: dict[str, list[Action]] = {}
    for action in ACTIONS:
        table.setdefault(action.group, []).append(action)
    return table
