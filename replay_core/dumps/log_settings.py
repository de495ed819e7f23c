"""Settings that a log prints of the run: JSON, a dictionary, a namespace, a table of dots, `name: value`."""

from __future__ import annotations

from typing import Any

from replay_core.regexes import regex

#: A name with its value, however the two are joined. A path of names counts by its last one, and by a critic's.
_SETTING = regex(
    r"""(?<![\w/.-])["']?(?P<path>(?:[a-z]\w{0,60}\.){0,6})(?P<name>[a-z]\w{1,60})["']?(?:\s{0,4}[:=]\s{0,4}|\s\.{2,80}\s{0,4})"""
    r"""(?P<value>"[^"\n]{0,80}"|'[^'\n]{0,80}'|[A-Za-z0-9_.+-]{1,60})(?=$|[\s,;)\]}])"""
)
#: What no configuration has more of; a log of prose ends the search.
_MOST = 4000
_CONSTANTS = {"true": True, "false": False, "none": None, "null": None}


#: How many responses verl samples of a prompt: of so short a name the table that it stands in tells what it is.
_RESPONSES = regex(r"['\"]rollout['\"]: ?\{(?:[^{}]{0,400}, ?)?['\"]n['\"]: ?(?P<n>\d{1,4})\b")


#: How an evaluation samples, which is not how the training does: a table that is left out, over several lines.
_OF_EVALUATION = regex(
    r"""["']?(?:val|eval|validation)_(?:kwargs|sampling_params|sampling|generation|config)["']?\s?[:=]\s?\{[^{}]{0,800}(?P<end>\}|$)"""
)
_ROLLOUT = regex(r"""["']rollout["']: ?\{""")
#: A critic's table, which has the names of the policy's own, and lines that it has at most.
_OF_CRITIC = regex(r"""["']critic["']\s?:\s?\{""")
_LONGEST_TABLE = 400
_N = regex(r"""(?:^|[{\s,])["']n["']: ?(?P<n>\d{1,4})\b""")


class LogSettings:
    """name -> value of the lines before the first metric; a name that has two values is left out of `facts`."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._twice: set[str] = set()
        #: Whether the lines stand in a table of verl's rollout, or of an evaluation, that was opened above.
        self._in_rollout = self._in_evaluation = False
        #: Braces of a critic's table that are open, and lines of it.
        self._of_critic = self._lines = 0

    def take(self, text: str) -> None:
        """The settings of one line."""
        if len(self._values) >= _MOST:
            return
        text, of_critic = self._parted(text)
        for match in _SETTING.finditer(of_critic):
            if (value := _value(match["value"])) is not _ROUNDED:
                self._add(f"critic.{match['name']}", value)
        if not ("=" in text or ":" in text or ".." in text):
            return
        if self._in_evaluation:
            self._in_evaluation = "}" not in text
            self._in_rollout = False
            return
        if (aside := _OF_EVALUATION.search(text)) is not None:
            self._in_evaluation = aside["end"] != "}"
            text = text[: aside.start()] + text[aside.end() :]
        told = [
            (f"critic.{match['name']}" if "critic" in match["path"].split(".") else match["name"],
             _value(match["value"]))
            for match in _SETTING.finditer(text)
        ]  # fmt: skip
        told += [("rollout_n", float(match["n"])) for match in _RESPONSES.finditer(text)]
        self._in_rollout = self._in_rollout or _ROLLOUT.search(text) is not None
        if self._in_rollout and not self._in_evaluation and (found := _N.search(text)) is not None:
            told.append(("rollout_n", float(found["n"])))
        self._in_rollout = self._in_rollout and "}" not in text
        for name, value in told:
            if value is not _ROUNDED:
                self._add(name, value)

    def _add(self, name: str, value: Any) -> None:
        if name in self._values and self._values[name] != value:
            self._twice.add(name)
        self._values.setdefault(name, value)

    def _parted(self, text: str) -> tuple[str, str]:
        """What a line says outside of a critic's table, and inside of it."""
        outside = inside = ""
        while text:
            if not self._of_critic:
                opened = _OF_CRITIC.search(text)
                if opened is None:
                    return outside + text, inside
                outside, text = outside + text[: opened.start()], text[opened.end() :]
                self._of_critic, self._lines = 1, 0
            end = len(text)
            for at, sign in enumerate(text):
                self._of_critic += (sign == "{") - (sign == "}")
                if not self._of_critic:
                    end = at + 1
                    break
            inside, text = inside + text[:end], text[end:]
        self._lines += 1
        # A table whose end is not printed holds no more than this.
        self._of_critic = 0 if self._lines >= _LONGEST_TABLE else self._of_critic
        return outside, inside

    def then(self, later: LogSettings) -> None:
        """What a later run prints of itself goes before what an earlier one did; what it does not print still holds."""
        self._twice = (self._twice - later._values.keys()) | later._twice
        self._values |= later._values

    @property
    def facts(self) -> dict[str, Any]:
        return {name: value for name, value in self._values.items() if name not in self._twice}


#: A 0 of two decimals and more is any number that is less than half its last place: `lr: 0.00` may be 1e-6.
_ROUNDED = object()
_ZERO = regex(r"-?0?\.00+")


def _value(text: str) -> Any:
    text = text.strip("\"'")
    if _ZERO.fullmatch(text):
        return _ROUNDED
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    try:
        return float(text)
    except ValueError:
        return text
