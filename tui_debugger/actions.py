"""Everything a user can do, once. Key bindings, key bar, help and palette are made from this list.

A behaviour that is not listed here does not exist; every action is a method `do_<id>` of an object that
the screen asks (`screens/keyed.py`; a test holds that).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from replay_core.replay.flags import FLAGS, IN_PANE


class Action(NamedTuple):
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
    argument: str | None = None
    screens: tuple[str, ...] = ("debugger",)
    """The screens that have it."""

    @property
    def name(self) -> str:
        """What the user's `[keys]` table calls it: `first`, `flag.attention`."""
        return f"{self.id}.{self.argument}" if self.argument is not None else self.id

    @property
    def key_text(self) -> str:
        return _KEY_NAMES.get(self.keys[0], self.keys[0]) if self.keys else ""

    @property
    def all_keys(self) -> str:
        return "  ".join(_KEY_NAMES.get(key, key) for key in self.keys)

    @property
    def call(self) -> str:
        """The action as textual runs it."""
        return f"do({self.id!r}, {self.argument!r})" if self.argument is not None else f"do({self.id!r})"


_KEY_NAMES = {
    "right_square_bracket": "]",
    "left_square_bracket": "[",
    "slash": "/",
    "question_mark": "?",
    "colon": ":",
    "at": "@",
    "equals_sign": "=",
    "escape": "esc",
    "right": "→",
    "left": "←",
}

#: Panes in the order of their numbers.
PANES = ("steps", "tensors", "inspect", "log", "flags", "telemetry", "findings")
PANE_TITLES = {
    "steps": "Steps",
    "tensors": "Tensors",
    "inspect": "Inspect",
    "log": "Log",
    "flags": "Flags",
    "telemetry": "Telemetry",
    "findings": "Findings",
    "matrix": "Matrix",
    "parity": "Parity",
    "trends": "Trends",
    "units": "Units",
}
NUMBERS = {name: number for number, name in enumerate(PANES, 1)}


def pane_title(name: str) -> str:
    """`2 Tensors`: the number is the key."""
    return f"{NUMBERS[name]} {PANE_TITLES[name]}"


FIND, WRONG, RUN = "Find the divergence", "What is wrong", "Replay and compare"
SETTINGS, MOVE, LOOK = "Flags", "Move", "Rest"
_BOTH = ("debugger", "matrix")
_ALL = (*_BOTH, "trends", "parity")
#: Where `l` is a log: over the trends it is a step on.
_LOGGED = (*_BOTH, "parity")
_MATRIX = ("matrix",)
_PARITY = ("parity",)
_TWO = ("debugger", "parity")

#: Parts of the parity screen in the order of their numbers.
PARITY_PARTS = {
    "measures": "Measures",
    "scatter": "Scatter",
    "differences": "Histogram",
    "drift": "Drift",
    "worst": "Worst",
    "bands": "Bands",
    "controls": "Controls",
}
_TRENDS = ("trends",)
_DIAG = ("debugger", "trends")

ACTIONS: tuple[Action, ...] = (
    Action("first", ("d",), "first", "go to the first diverging tensor", FIND, 1, screens=_ALL),
    Action("ruling", ("J",), "ruling", "which of two is wrong, or if one is: the referee rules", FIND, screens=_ALL),
    Action("graft", ("A",), "graft", "which module alone carries the difference of two, in per cent", FIND),
    Action("diverging", ("right_square_bracket",), "next", "next diverging tensor", FIND, 2, argument="next"),
    Action("diverging", ("left_square_bracket",), "prev", "previous diverging tensor", FIND, argument="previous"),
    Action("filter", ("slash",), "filter", "filter tensors or steps by a regular expression", FIND, 6),
    Action("sort", ("S",), "sort", "sort: order of computation, worst first, name", FIND, 21, "tensors"),
    Action("at", ("at",), "index", "values from an index on (0,12), or a slice of any rank (0:4,:8)", FIND, 5),
    Action("strip", ("right",), "strip", "heat strip: next stretch; enter goes to it", FIND, 3, "inspect", "right"),
    Action("strip", ("left",), "strip back", "heat strip: the stretch before", FIND, 0, "inspect", "left"),
    Action("strip_axis", ("h",), "rows/channels", "heat strip: along rows (tokens), or channels", FIND, 4, "inspect"),
    Action("sheet", ("i",), "tokens", "inspector: values, or the sample token by token", FIND, 1, "inspect"),
    Action("samples", ("I",), "samples", "samples as a person reads them: turns, tokens, groups", FIND, screens=_DIAG),
    Action("view", ("v",), "view", "switch between the comparison and the record's own tensors", FIND),
    Action("step", ("s",), "step", "go to a step", FIND, 1, "steps"),
    Action("finding", ("f",), "evidence", "a finding: evidence, cause, next step", WRONG, 1, "findings"),
    Action("finding", ("f",), "evidence", "the worst finding in full", WRONG, 3, screens=_TRENDS),
    Action("finding", ("f",), "evidence", "the worst finding in full", WRONG, screens=("matrix", "parity")),
    Action("mismatch", ("W",), "engine", "why engine and trainer disagree, and what is left", WRONG, screens=_DIAG),
    Action("trends", ("C",), "trends", "what was logged, over the steps", WRONG, 7, screens=_DIAG),
    Action("diagnose", ("E",), "diagnose", "diagnose the whole run again", WRONG, screens=_DIAG),
    Action("follow", ("F",), "follow", "follow a run while it is written, or stop", WRONG, screens=_DIAG),
    Action("anomaly", ("right_square_bracket",), "next", "next value that stands out", WRONG, 2, None, "next", _TRENDS),
    Action("anomaly", ("left_square_bracket",), "prev", "previous one", WRONG, 0, None, "previous", _TRENDS),
    Action("point", ("l",), "later", "a step on (or the arrow)", WRONG, 0, None, "next", _TRENDS),
    Action("point", ("h",), "earlier", "a step back (or the arrow)", WRONG, 0, None, "previous", _TRENDS),
    Action("replay", ("r",), "replay", "run the record with the flags and compare with each row alone", RUN, 3),
    Action("matrix", ("m",), "matrix", "every combination of flags, each in a child of its own", RUN, 4),
    Action("capsule", ("B",), "capsule", "what a replay found as one file, and as a script", RUN, screens=_BOTH),
    Action("compare", ("c",), "compare", "compare with another dump", RUN, 7),
    Action("mark", ("space",), "mark", "mark a tensor, step or cell; flags: change; log: pause", RUN, 8, screens=_BOTH),
    Action("pair", ("equals_sign",), "compare marked", "compare the two marked things", RUN, screens=_BOTH),
    Action("tolerance", ("R",), "tolerance", "judge by another tolerance, reading nothing; esc: the table's", RUN, 9),
    Action("loosen", ("plus",), "looser", "ten times the tolerance given", RUN, argument="10"),
    Action("loosen", ("minus",), "tighter", "a tenth of the tolerance given", RUN, argument="0.1"),
    Action("parity", ("P",), "parity", "two critics' values side by side: of A and B, or of A alone", RUN),
    Action("batch", ("right_square_bracket",), "next batch", "the next batch", FIND, 2, None, "next", _PARITY),
    Action("batch", ("left_square_bracket",), "batch before", "the batch before", FIND, 0, None, "previous", _PARITY),
    Action("mode", ("t",), "eval/train", "the table of eval mode, or of train mode", FIND, 4, screens=_PARITY),
    Action("points", ("v",), "points", "scatter: every position, or those that count", FIND, 3, screens=_PARITY),
    Action("run_parity", ("r",), "run again", "run the parity again", RUN, 6, screens=_PARITY),
    Action("open_dump", ("o",), "open", "open a dump, or a saved document (.json)", RUN),
    Action("model", ("M",), "model", "choose the model a replay loads", RUN, 2, "flags"),
    Action("cancel", ("ctrl+c",), "cancel", "cancel the running job", RUN, screens=_ALL),
    Action("run_matrix", ("r",), "run", "run the matrix", RUN, 1, screens=_MATRIX),
    Action("axes", ("a",), "axes", "choose the axes of the matrix", RUN, 2, screens=_MATRIX),
    *(
        Action("flag", (flag.key,), flag.label, flag.told, SETTINGS, argument=name)
        for name, flag in ((name, FLAGS[name]) for name in IN_PANE)
    ),
    *(
        Action("pane", (str(i),), PANE_TITLES[name], f"go to {PANE_TITLES[name]}", MOVE, argument=name)
        for i, name in enumerate(PANES, 1)
    ),
    *(
        Action("part", (str(i),), title, f"go to {title}", MOVE, argument=name, screens=_PARITY)
        for i, (name, title) in enumerate(PARITY_PARTS.items(), 1)
    ),
    Action("next_pane", ("tab",), "next pane", "next pane", MOVE, argument="next", screens=_TWO),
    Action("next_pane", ("shift+tab",), "back", "previous pane", MOVE, argument="previous", screens=_TWO),
    Action("move", ("j",), "down", "one down (or the arrow)", MOVE, argument="down", screens=_ALL),
    Action("move", ("k",), "up", "one up (or the arrow)", MOVE, argument="up", screens=_ALL),
    Action("move", ("g",), "top", "to the top (or home)", MOVE, argument="top", screens=_ALL),
    Action("move", ("G",), "end", "to the end (or end)", MOVE, argument="end", screens=_ALL),
    Action("move", ("ctrl+d",), "page down", "half a page down", MOVE, argument="page_down", screens=_ALL),
    Action("move", ("ctrl+u",), "page up", "half a page up", MOVE, argument="page_up", screens=_ALL),
    Action("open", ("enter",), "open", "open what the cursor is on; finding, trend: go there", MOVE, screens=_ALL),
    Action("back", ("escape",), "back", "close, clear the filter, restore the layout", MOVE, screens=_ALL),
    Action("maximise", ("z",), "maximise", "give the pane the whole screen, and back", MOVE, 11, screens=_TWO),
    Action("export", ("e",), "export", "write what is shown: JSON, a page, a comment", LOOK, 10, screens=_ALL),
    Action("copy", ("y",), "copy", "copy the answer (or the inspected tensor)", LOOK, 12, screens=_ALL),
    Action("open_log", ("l",), "log", "the log of the last replay, or of the cell", LOOK, 9, screens=_LOGGED),
    Action("theme", ("f2",), "theme", "choose a theme, seeing it", LOOK, screens=_ALL),
    Action("mouse", ("f3",), "mouse", "leave the mouse to the terminal, to select; again: back", LOOK, screens=_ALL),
    Action("suspend", ("ctrl+z",), "suspend", "leave for the shell; fg comes back", LOOK, screens=_ALL),
    Action("palette", ("colon", "ctrl+p"), "palette", "all commands, by name", LOOK, 13, screens=_ALL),
    Action("help", ("question_mark", "f1"), "help", "this page", LOOK, 14, screens=_ALL),
    Action("quit", ("q",), "quit", "quit; asks once while a replay runs (ctrl+q never asks)", LOOK, 15, screens=_ALL),
)  # fmt: skip


def of_screen(screen: str, actions: Iterable[Action] = ACTIONS) -> list[Action]:
    return [action for action in actions if screen in action.screens]


def for_bar(pane: str, actions: Sequence[Action] = ACTIONS, *, compared: bool = False) -> list[Action]:
    """What the key bar lists while `pane` has the focus; `start` is the screen with nothing open.

    `compared`: two things are compared on the screen. Where none are, comparing is what comes next.
    """
    if pane == "start":
        wanted = ("open", "open_dump", "theme", "palette", "help", "quit")
        return [action for action in of_screen("debugger", actions) if action.id in wanted]
    screen = pane if pane in ("matrix", "trends", "parity") else "debugger"
    fitting = [action for action in of_screen(screen, actions) if action.bar and action.pane in (None, pane)]
    fitting = [action for action in fitting if compared or action.id not in _OF_A_PAIR]
    named = [
        action._replace(label=_MARK[pane], bar=1) if action.id == "mark" and pane in _MARK
        else action._replace(bar=2) if action.id == "compare" and not compared
        else action
        for action in fitting
    ]  # fmt: skip
    return sorted(named, key=lambda action: action.bar)


#: Only of use where two things are compared: the key bar leaves them out elsewhere.
_OF_A_PAIR = frozenset({"first", "diverging", "strip", "strip_axis", "tolerance"})
#: What space does where it does not mark: the first thing one wants there.
_MARK = {"flags": "change", "log": "pause"}


def groups(actions: Iterable[Action] = ACTIONS) -> dict[str, list[Action]]:
    """The actions under their headings, for the help page."""
    table: dict[str, list[Action]] = {}
    for action in actions:
        table.setdefault(action.group, []).append(action)
    return table
