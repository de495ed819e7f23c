"""Metrics of a text that numbers no step: what people paste of a run. Read only where a text has no other metrics.

    loss: 0.6931                       wandb:   train/loss 0.6931
    reward: 0.0   reward_std: 0.0      | loss | 0.6931 |
    INFO - train - loss=nan, kl=0.2    or/pg_loss:0.0 - actor/grad_norm:nan      the end of a line, its beginning lost

A name that comes again begins a new step; one that is called a step numbers it, and so does what stands before all
else ([3/100]  loss: 0.1; [0003] rew=0.1), where that rises.
"""

from __future__ import annotations

from msgspec import Struct, field

from replay_core.dumps.console_lines import is_watched, pairs_in
from replay_core.regexes import regex

#: What stands before metrics: Weights & Biases' own mark, a quotation's, a list's, a table's edge.
_MARK = regex(r"^\s{0,40}(?:wandb:|>|[-*•·]\s|[|│┃])\s{0,40}")
_WRAPPED = regex(r"\b(?:(?:np|numpy|torch)\.)?(?:float\d\d|tensor|array)\(\s?([^\s(),\[\]]{1,40})[^)]{0,60}\)")
_QUOTES = regex(r"[\"'`{}\[\]]")
_CELLS = regex(r"\s{0,40}[|│┃\t]\s{0,40}")
_BLANKS = regex(r" {3,}")
#: Rooms that only trainers have their metrics in.
_ROOM = regex(r"^(?:train/)?(?:loss|losses|policy|objective|actor|critic|rewards|completions|rollout)/\w")
_WORD = regex(r"[A-Za-z]{2,}")
_STEPS = frozenset(("step", "global_step", "train/global_step", "iteration", "iter", "training_step", "_step"))
#: How a line says which step it is of before all else: [3/100], 3/100.
_LEADS = regex(r"^\s{0,8}[\[(]?(\d{1,9})\s?/\s?\d{1,9}[\])]?[\s:|,-]{1,4}\S")
#: The same without the last one: [0003], (3), #3, 3:, 3 |.
_BARE = regex(r"^\s{0,8}(?:\[\s?(\d{1,9})\s?\]|\((\d{1,9})\)|#\s?(\d{1,9})\b|(\d{1,9})\s?[:|)])[\s:|,-]{0,4}[A-Za-z]")
#: Words beside the pairs of a line: a logger's name and level. A sentence has more.
_BESIDE = 4
#: Lines of a block with no watched name that may still turn out to belong to one that has.
_MOST = 400


class Unnumbered(Struct):
    """The metrics of one stream of lines, taken line by line; `found` are those of blocks that tell of training."""

    found: list[tuple[int, int, dict[str, float]]] = field(default_factory=list)
    """(line, step, values)"""
    _step: int = 0
    _names: set[str] = field(default_factory=set)
    _block: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    _tells: bool = False
    _led: int | None = 0
    """What last stood before all else, while that only rises."""

    def take(self, number: int, line: str) -> None:
        """One line and its number in the file."""
        values = _pairs(line)
        if not values or len(self._block) >= _MOST:
            self.close()
        if not values:
            return
        again = not self._names.isdisjoint(values)
        if again:
            self.close()
            self._step, self._names = self._step + 1, set()
        # open-instruct's global_step counts episodes, and its training_step the steps.
        numbered = {name.lower(): value for name, value in values.items() if name.lower() in _STEPS}
        step = numbered.get("training_step", next(iter(numbered.values()), None))
        if step is None and (leads := _LEADS.match(line)) is not None:
            # Batches of an epoch are counted so, too, and begin anew with each.
            at = int(leads[1])
            self._led = None if self._led is None or at < self._led else at
            step = self._led
        elif step is None and (bare := _BARE.match(line)) is not None:
            # A rank or a process stands there, too: of several steps it is the same.
            at = int(next(filter(None, bare.groups())))
            self._led = None if self._led is None or at < self._led or (again and at == self._led) else at
            step = self._led
        if step is not None and 0 <= step < 1e12 and step == int(step):
            self._step = int(step)
        self._names.update(values)
        self._tells = self._tells or any(is_watched(name) or _ROOM.match(name) for name in values)
        self._block.append((number, values))

    def close(self) -> None:
        """The end of a block: it counts if one of its names is one that trainers watch."""
        if self._tells:
            for number, values in self._block:
                kept = {name: value for name, value in values.items() if name.lower() not in _STEPS}
                if kept:
                    self.found.append((number, self._step, kept))
        self._block, self._tells = [], False


#: A cheap look: most lines of a console are no pairs.
_MAY = regex(r"[A-Za-z)\"'\]][:=]?\s{0,40}[|│┃\t]?\s{0,40}[-+]?(?:\d|\.\d|[Nn]a[Nn]\b|[Ii]nf)")
_LONGEST = 4000


def _pairs(line: str) -> dict[str, float]:
    if len(line) > _LONGEST or not _MAY.search(line):
        return {}
    text = _WRAPPED.sub(r"\1", _MARK.sub("", line))
    text = _BLANKS.sub("  ", _QUOTES.sub(" ", text))
    cells = [cell for cell in _CELLS.split(text.strip().strip("|│┃")) if cell]
    if len(cells) == 2 and (both := dict(pairs_in(f"{cells[0]}: {cells[1]}"))):
        return both
    values = dict(pairs_in(text.strip(" |│┃")))
    finite = {name: value for name, value in values.items() if not name.lower().startswith(("http", "pid", "rank"))}
    beside = len(_WORD.findall(text)) - sum(len(_WORD.findall(name)) for name in finite)
    return finite if beside <= _BESIDE or len(finite) > 3 else {}
