"""A notebook shows a run twice: as a table of steps and losses, and as the rows that the trainer prints, which number
no step. Where there are as many rows as the table has steps, the table says which step each row is of.

    Step    Training Loss                {'loss': 0.1, 'grad_norm': 0.4, 'reward': 0.2}
    10      0.1                          {'loss': 0.2, 'grad_norm': 0.5, 'reward': 0.3}
    20      0.2

The table is drawn anew as the run goes on: its rows come again.
"""

from __future__ import annotations

from msgspec import Struct, field

from replay_core.dumps.metric_lines import is_aside

_Values = dict[str, float]


class NotebookSteps(Struct):
    """Takes every line of metrics in order."""

    _table: dict[int, tuple[_Values, int]] = field(default_factory=dict)
    _rows: list[tuple[_Values, int]] = field(default_factory=list)
    _after: list[tuple[int, _Values, int]] = field(default_factory=list)
    """What belongs to the row before: its place, values and line."""

    def take(self, line: int, step: int, values: _Values, in_table: bool, is_counted: bool) -> bool:
        """One line of metrics; whether it is one of the two."""
        if in_table:
            self._table.setdefault(step, (values, line))
        elif not is_counted:
            return False
        elif is_aside(values):
            self._after.append((max(len(self._rows) - 1, 0), values, line))
        else:
            self._rows.append((values, line))
        return True

    def placed(self) -> list[tuple[int, _Values, int]]:
        """Every line's step, values and number, where table and rows are of the same steps; else nothing."""
        if len(self._rows) < 2 or len(self._rows) != len(self._table):
            return []
        steps = sorted(self._table)
        rows = [(steps[at], values, line) for at, (values, line) in enumerate(self._rows)]
        after = [(steps[at], values, line) for at, values, line in self._after]
        table = [(step, *self._table[step]) for step in steps]
        return [*rows, *after, *table]
