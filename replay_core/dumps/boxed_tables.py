"""Steps that a trainer prints as a table of two columns each, framed by lines: Stable-Baselines and those after it.

-----------------------------------
| rollout/           |            |      a room: the names below it, set in further, are in it
|    ep_rew_mean     | 0.41       |
| time/              |            |
|    iterations      | 3          |
-----------------------------------

The frame may be drawn of lines (AReaL), and the step be told by the line before:

Epoch 1/1 Step 3/28 Train step 3/28 done.
╭─────────────────────┬──────────────╮
│ ppo_actor/advantages/avg │ -4.1987e-03 │
╰─────────────────────┴──────────────╯

or be several such tables side by side: `│ a │ 1.0 │ b │ 2.0 │ c │ 3.0 │`, whose end a wide line may lack.
"""

from __future__ import annotations

from msgspec import Struct, field

from replay_core.regexes import regex

#: One row is enough to look for more: a name and a number between bars, and nothing else.
ROW = r"\|\s{1,40}[A-Za-z][\w./()%-]{0,60}\s{1,60}\|\s{1,4}[-+]?\d[\d.eE+-]{0,20}\s{0,40}\|"
#: What a line of such a table begins with.
BEGINS = ("|", "-", "+", "=", "│", "╭", "├", "╰", "┌", "└", "╒", "╞", "╘")
#: A table that is drawn opens, is divided, and closes.
_DRAWN = str.maketrans("│─┬┼┴═╤╪╧", "|--------")
_TOLD = regex(r"\bTrain step (\d{1,12})/\d{1,12} done\b")
_FRAME = regex(r"^[-+=]{8,}$")
_ROW = regex(
    r"^\|(\s{0,40})([A-Za-z][\w ./()%-]{0,60}?)\s{0,60}\|\s{0,40}"
    r"([-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf)|)\s{0,40}\|$"
)
_PAIR = regex(
    r"\|\s{0,40}([A-Za-z][\w ./()%-]{0,60}?)\s{0,60}\|\s{0,40}([-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan"
    r"|inf))\s{0,40}(?=\||$)"
)
#: Cells that are left empty beside the last name of a table of several pairs.
_EMPTY = regex(r"\|(?:\s{1,200}\|\s{1,200}\|)+$")
#: What numbers the table, the best first.
_STEPS = ("iterations", "iteration", "step", "global_step", "update", "n_updates", "total_timesteps")


class BoxedTables(Struct):
    """The tables of one stream of lines, taken line by line."""

    rows: dict[str, float] = field(default_factory=dict)
    room: str = ""
    indent: int = 0
    told: int | None = None

    def hear(self, line: str) -> None:
        """A line beside the tables: it may number the next one."""
        if match := _TOLD.search(line):
            self.told = int(match[1])

    def take(self, line: str) -> tuple[int | None, dict[str, float]]:
        """The step (None: the table names none) and metrics of the table that this line ends; none at other lines."""
        if line[0] in "├╞╭┌╒":
            self.rows = self.rows if line[0] in "├╞" else {}
            return None, {}
        line = _EMPTY.sub("|", line.rstrip().translate(_DRAWN))
        if _FRAME.match(line) or line[0] in "╰└╘":
            rows, self.rows, self.room = self.rows, {}, ""
            return self._step(rows), rows
        if (match := _ROW.match(line)) is None and len(pairs := _PAIR.findall(line)) > 1 and line[0] == "|":
            self.rows |= {name: float(said) for name, said in pairs}
            return None, {}
        if match is None:
            self.rows, self.room = {}, ""
            return None, {}
        indent, name, said = len(match[1]), match[2], match[3]
        if not said:
            self.room, self.indent = name.rstrip("/"), indent
        else:
            inside = self.room and indent > self.indent
            self.rows[f"{self.room}/{name}" if inside else name] = float(said)
        return None, {}

    def _step(self, rows: dict[str, float]) -> int | None:
        for wanted in _STEPS:
            for name in [name for name in rows if name.rpartition("/")[2] == wanted]:
                if rows[name] == int(rows[name]):
                    return int(rows.pop(name))
        told, self.told = self.told, None
        return told
