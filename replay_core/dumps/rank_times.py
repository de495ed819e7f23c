"""Megatron's timers by rank, as it prints them below each iteration.

times across ranks (ms):                      (min, max) time across ranks (ms):
  forward-backward:                             forward-backward ......: (11259.75, 11763.84)
     rank  0: 11446.18                        max time across ranks (ms):
     rank  1: 11653.90                          forward-backward ......: 11763.84
"""

from __future__ import annotations

from replay_core.regexes import regex

_HEAD = regex(
    r"^\s{0,8}(?P<of>\(min, max\) time|(?:min|max|minmax|all)? ?times?) across ranks "
    r"\((?P<unit>ms|s|sec|seconds)\):\s*$"
)
_TIMER = regex(r"^\s{1,8}(?P<name>[A-Za-z][\w /-]{0,60}?)\s?\.{0,80}:\s*$")
_RANK = regex(r"^\s{1,16}rank\s{0,6}(?P<rank>\d{1,6}):\s{0,8}(?P<value>\d[\d.]{0,16})\s*$")
_ONE = regex(
    r"^\s{1,8}(?P<name>[A-Za-z][\w /-]{0,60}?)\s?\.{0,80}:\s{0,4}\(?(?P<value>\d[\d.]{0,16})"
    r"(?:,\s{0,4}(?P<most>\d[\d.]{0,16})\))?\s*$"
)
#: Ranks of which each has a series of its own.
_MOST = 256


class RankTimes:
    """Takes every line of one stream in order."""

    def __init__(self) -> None:
        self._of, self._unit, self._timer = "", 1.0, ""

    def take(self, text: str) -> dict[str, float] | None:
        """Seconds by name, of a line of such a table (none of its heads); None of any other line, which ends it."""
        if "across ranks" in text and (head := _HEAD.match(text)) is not None:
            self._of, self._timer = head["of"].strip(), ""
            self._unit = 1e-3 if head["unit"] == "ms" else 1.0
            return {}
        if not self._of:
            return None
        if self._timer and (rank := _RANK.match(text)) is not None:
            known = int(rank["rank"]) < _MOST
            return {f"{self._timer}/rank {int(rank['rank'])}": self._unit * _number(rank["value"])} if known else {}
        if (timer := _TIMER.match(text)) is not None:
            self._timer = timer["name"].strip()
            return {}
        if (one := _ONE.match(text)) is not None and one["name"] != "rank":
            name, value = one["name"].strip(), self._unit * _number(one["value"])
            if one["most"] is not None:
                return {f"{name}/least of ranks": value, f"{name}/most of ranks": self._unit * _number(one["most"])}
            return {f"{name}/{'least' if self._of.startswith('min') else 'most'} of ranks": value}
        self._of = ""
        return None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
