"""Steps that a trainer prints as a panel: rooms on the left, their metrics between bars to the right of them.

╭──────────────────────────────── Metrics ────────────────────────────────╮
│  objective  verifiable_reward: 0.24 | kl2_avg: 0.00e+00 | kl3_avg:      │     open-instruct: a cell goes on in the
│             0.00e+00                                                    │     next line, between a name and its number
│  other      global_step: 192 | training_step: 1 | lr: 2.60e-06          │     what has no room
╰─────────────────────────────────────────────────────────────────────────╯

An evaluation has a panel of its own, which names no step: it is of the step before.
"""

from __future__ import annotations

from msgspec import Struct, field

from replay_core.regexes import regex

#: What a line of a panel begins with.
DRAWN = ("╭", "│", "╰")
_OPENS = regex(r"^╭─{2,400} Metrics ─{2,400}")
_ROOM = regex(r"^│  ([a-z][\w-]{0,40}) {2,40}(\S.*)$")
_GOES_ON = regex(r"^│ {4,60}(\S.*)$")
_PAIR = regex(
    r"(?:^|\| )\s{0,60}([A-Za-z][\w./@%-]{0,100}):\s{1,80}([-+]?(?:\d[\d,]*(?:\.\d*)?(?:[eE][-+]?\d+)?|nan|inf))"
    r"(?=\s|$)"
)
#: What has no room of its own, and what numbers the step.
_OTHER, _STEPS = "other", ("training_step", "iteration", "global_step")


class Panels(Struct):
    """The panels of one stream of lines, taken line by line."""

    rooms: dict[str, str] = field(default_factory=dict)
    room: str = ""
    is_open: bool = False
    step: int | None = None

    def take(self, line: str) -> tuple[int | None, dict[str, float]]:
        """The step and the metrics of the panel that this line ends; none at other lines."""
        if not self.is_open:
            self.is_open = _OPENS.match(line) is not None
            return None, {}
        if line.startswith("╰"):
            rooms, self.rooms, self.room, self.is_open = self.rooms, {}, "", False
            return self._told(rooms)
        text = line.rstrip(" │")
        if room := _ROOM.match(text):
            self.room = room[1]
            self.rooms[self.room] = room[2]
        elif self.room and (more := _GOES_ON.match(text)):
            self.rooms[self.room] += f" {more[1]}"
        else:
            self.rooms, self.room, self.is_open = {}, "", False
        return None, {}

    def _told(self, rooms: dict[str, str]) -> tuple[int | None, dict[str, float]]:
        values = {
            name if room == _OTHER else f"{room}/{name}": float(said.replace(",", ""))
            for room, text in rooms.items()
            for name, said in _PAIR.findall(text)
        }
        numbered = next((name for name in _STEPS if values.get(name, -1.0) == int(values.get(name, -1.0)) >= 0), None)
        if numbered is not None:
            self.step = int(values[numbered])
        values = {name: value for name, value in values.items() if name not in _STEPS}
        return self.step, values if self.step is not None else {}
