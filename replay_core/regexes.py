"""Regular expressions that are compiled when they are first used.

A command starts with every dialect's expressions and matches with few of them: compiling all was a tenth of its start.
"""

from __future__ import annotations

import re
from typing import Any, AnyStr, cast

_METHODS = ("findall", "finditer", "flags", "fullmatch", "groupindex", "groups", "match", "search", "split", "sub")


def regex(text: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
    """What `re.compile` gives, at its first use.

    Raises (at its first use):
        re.error: it is no regular expression; a test compiles every one.
    """
    return cast("re.Pattern[AnyStr]", _Later(text, flags))


class _Later:
    def __init__(self, text: Any, flags: int) -> None:
        self.pattern, self._flags = text, flags

    def __getattr__(self, name: str) -> Any:
        # Only asked for what is not there: from now on the methods of the compiled one are.
        if name not in _METHODS:
            raise AttributeError(name)
        compiled = re.compile(self.pattern, self._flags)
        self.__dict__.update((method, getattr(compiled, method)) for method in _METHODS)
        return self.__dict__[name]
