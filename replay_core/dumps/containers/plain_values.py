"""Values of Python's own library that stand in a record beside its tensors: dates, durations, exact numbers.

Each becomes its text. A file can give these functions any arguments: what is no such value raises ValueError or
TypeError, which the pickle machine reports.
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replay_core.dumps.containers.loading import Loading

#: Digits of one exact number: a crafted exponent must not be written out.
_MAX_DIGITS = 400


def _packed(value: Any) -> Any:
    """A date's own bytes, which protocols 0 to 2 spell as Latin-1 text."""
    return value.encode("latin-1") if type(value) is str else bytes(value) if isinstance(value, bytes) else value


def a_datetime(loading: Loading, args: tuple[Any, ...]) -> str:
    moment = datetime.datetime(_packed(args[0])).isoformat()  # type: ignore[call-arg]
    return f"{moment} {args[1]}" if len(args) > 1 else moment


def a_date(loading: Loading, args: tuple[Any, ...]) -> str:
    return datetime.date(_packed(args[0])).isoformat()  # type: ignore[call-arg]


def a_time(loading: Loading, args: tuple[Any, ...]) -> str:
    return datetime.time(_packed(args[0])).isoformat()


def a_duration(loading: Loading, args: tuple[Any, ...]) -> str:
    return str(datetime.timedelta(*args))


def a_timezone(loading: Loading, args: tuple[Any, ...]) -> str:
    return "UTC" if args[0] == "0:00:00" else f"UTC offset {args[0]}"


def a_decimal(loading: Loading, args: tuple[Any, ...]) -> str:
    import decimal  # with fractions 3 ms that no other file pays

    return str(decimal.Decimal(_short(args[0])))


def a_fraction(loading: Loading, args: tuple[Any, ...]) -> str:
    import fractions

    if any(type(part) is int and part.bit_length() > 4 * _MAX_DIGITS for part in args):
        raise ValueError("a fraction of very long numbers")
    return str(fractions.Fraction(*args)) if type(args[0]) is int else _short(args[0])


def a_range(loading: Loading, args: tuple[Any, ...]) -> str:
    return str(range(*args))


def _short(text: Any) -> str:
    if type(text) is not str or len(text) > _MAX_DIGITS:
        raise ValueError("not a number's text")
    return text
