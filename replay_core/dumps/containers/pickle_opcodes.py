"""The opcodes that files hold few of: framing, bytes, classes, instances, and protocol 0's text.

Each is a function of the machine, found by its byte in `RARE`.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from replay_core.dumps.containers.allowlist import TABLE, find_global
from replay_core.dumps.containers.symbols import InertClass, Stranger, Symbol
from replay_core.errors import UnsafeFileError
from replay_core.records import TensorRef

if TYPE_CHECKING:
    from replay_core.dumps.containers.pickle_machine import Machine

#: A line of text opcodes: a dotted name or a number. Python itself stops at 4300 digits.
_MAX_LINE = 1 << 12
_MAX_LONG_BYTES = 1 << 12

#: The allow-list as GLOBAL spells it: module and name, a line each.
_BY_LINES = {"\n".join(name.rpartition(".")[::2]).encode(): symbol for name, symbol in TABLE.items()}


def _unsigned(machine: Machine, width: int) -> int:
    return int.from_bytes(machine.take(width), "little")


def _line(machine: Machine) -> bytes:
    buf, start = machine.buf, machine.pos
    end = buf.find(b"\n", start, start + _MAX_LINE)
    if end < 0:
        if len(buf) - start < _MAX_LINE:
            raise machine.region.truncated(machine.region.end + 1)
        raise machine.loading.malformed(f"a line of the pickle is longer than {_MAX_LINE} bytes")
    machine.pos = end + 1
    return buf[start:end]


def _proto(machine: Machine) -> None:
    version = machine.take(1)[0]
    if version > 5:
        raise machine.loading.malformed("a pickle of a protocol we do not know", expected="0 to 5", found=str(version))


def _frame(machine: Machine) -> None:
    at = machine.base + machine.pos + 8
    size = _unsigned(machine, 8)
    if at + size > machine.region.end:
        raise machine.region.truncated(at + size)


def _bytes_of(width: int) -> Callable[[Machine], None]:
    return lambda machine: machine.push_bytes(_unsigned(machine, width))


def _text8(machine: Machine) -> None:
    machine.push_text(_unsigned(machine, 8))


def _old_text(machine: Machine, data: bytes) -> None:
    try:
        machine.stack.append(data.decode("utf-8"))
    except UnicodeDecodeError:
        machine.stack.append(data)


def _binstring(machine: Machine) -> None:
    size = struct.unpack("<i", machine.take(4))[0]
    if size < 0:
        raise machine.loading.malformed("a text of negative length")
    _old_text(machine, machine.take(size))


def _short_binstring(machine: Machine) -> None:
    _old_text(machine, machine.take(_unsigned(machine, 1)))


def _string(machine: Machine) -> None:
    data = _line(machine)
    if len(data) < 2 or data[:1] != data[-1:] or data[:1] not in (b"'", b'"'):
        raise machine.loading.malformed("a quoted text without its quotes")
    _old_text(machine, bytes(codecs.escape_decode(data[1:-1])[0]))


def _unicode(machine: Machine) -> None:
    machine.stack.append(_line(machine).decode("raw-unicode-escape"))


def _int(machine: Machine) -> None:
    data = _line(machine)
    machine.stack.append({b"00": False, b"01": True}[data] if data in (b"00", b"01") else int(data, 0))


def _long(machine: Machine) -> None:
    machine.stack.append(int(_line(machine).removesuffix(b"L"), 0))


def _long_of(width: int) -> Callable[[Machine], None]:
    def push(machine: Machine) -> None:
        size = _unsigned(machine, width)
        if size > _MAX_LONG_BYTES:
            machine.region.read(machine.base + machine.pos, size)  # a truncated file is said to be one
            raise machine.loading.malformed(f"a number of {size} bytes", expected=f"at most {_MAX_LONG_BYTES}")
        machine.stack.append(int.from_bytes(machine.take(size), "little", signed=True))

    return push


def _float(machine: Machine) -> None:
    machine.stack.append(float(_line(machine)))


def _get(machine: Machine) -> None:
    machine.memo.settle()
    machine.stack.append(machine.memo[int(_line(machine))])


def _put(machine: Machine) -> None:
    machine.memo[int(_line(machine))] = machine.stack[-1]


def _pop(machine: Machine) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.pop_mark()


def _pop_mark(machine: Machine) -> None:
    machine.pop_mark()


def _dup(machine: Machine) -> None:
    machine.stack.append(machine.stack[-1])


def _dict(machine: Machine) -> None:
    items = machine.pop_mark()
    target: dict[Any, Any] = {}
    if items:
        machine.set_items(target, items)
    machine.stack.append(target)


def _list(machine: Machine) -> None:
    items = machine.pop_mark()
    machine.stack.append(items)


def _empty_set(machine: Machine) -> None:
    machine.stack.append(set())


def _add_items(machine: Machine) -> None:
    items = machine.pop_mark()
    target = machine.stack[-1]
    if type(target) is not set:
        raise machine.loading.malformed("the pickle adds members to something that is not a set")
    for item in items:
        machine.check_key(item)
    target.update(items)


def _frozenset(machine: Machine) -> None:
    items = machine.pop_mark()
    for item in items:
        machine.check_key(item)
    machine.stack.append(frozenset(items))


def _global_line(machine: Machine) -> Symbol:
    buf, start = machine.buf, machine.pos
    first = buf.find(b"\n", start, start + _MAX_LINE)
    end = buf.find(b"\n", first + 1, start + _MAX_LINE)
    if 0 < first < end:
        known = _BY_LINES.get(buf[start:end])
        if known is not None:
            machine.pos = end + 1
            return known
    module, name = _line(machine).decode("utf-8"), _line(machine).decode("utf-8")
    return find_global(machine.loading, module, name)


def _global(machine: Machine) -> None:
    machine.stack.append(_global_line(machine))


def _inst(machine: Machine) -> None:
    symbol = _global_line(machine)
    machine.stack.append(machine.reduce(symbol, tuple(machine.pop_mark())))


def _obj(machine: Machine) -> None:
    symbol, *args = machine.pop_mark()
    machine.stack.append(machine.reduce(symbol, tuple(args)))


def _newobj(machine: Machine) -> None:
    args = machine.stack.pop()
    machine.stack[-1] = machine.reduce(machine.stack[-1], args)


def _newobj_ex(machine: Machine) -> None:
    keywords = machine.stack.pop()
    args = machine.stack.pop()
    cls = machine.stack[-1]
    if isinstance(cls, Stranger) or (keywords and not isinstance(cls, InertClass)):
        raise machine.loading.malformed(f"`{cls!r:.80}` called with keywords")
    machine.stack[-1] = machine.reduce(cls, args)


def _build(machine: Machine) -> None:
    state = machine.stack.pop()
    target = machine.stack[-1]
    build = getattr(type(target), "build", None)
    if build is not None:
        build(target, machine.loading, state)
        return
    if type(target) is dict and "__class__" in target:
        target["state"] = state
    elif type(target) is dict or isinstance(target, TensorRef):
        # state_dict() keeps its `_metadata` this way; a parameter, its attributes.
        machine.loading.note("attributes set on a dictionary or a tensor are left out")
    elif isinstance(target, Stranger):
        raise target.refusal(str(machine.region.path))
    else:
        raise machine.loading.malformed(f"the pickle sets the state of a {type(target).__name__}")


def _persistent(machine: Machine) -> None:
    resolve = machine.loading.persistent
    if resolve is None:
        raise machine.loading.malformed("a persistent id in a file that has nothing it could name")
    machine.stack.append(resolve(machine.stack.pop()))


def _text_persistent(machine: Machine) -> None:
    machine.stack.append(_line(machine).decode("ascii"))
    _persistent(machine)


def _extension(machine: Machine) -> None:
    raise UnsafeFileError(
        "the file names a class by a number that only its writer knows",
        file=str(machine.region.path),
        found="a pickle extension code",
    )


def _out_of_band(machine: Machine) -> None:
    raise machine.loading.malformed("the pickle keeps its data in a second stream that is not in the file")


RARE: dict[int, Callable[[Machine], None]] = {
    0x80: _proto, 0x95: _frame, 0x43: _bytes_of(1), 0x42: _bytes_of(4), 0x8E: _bytes_of(8), 0x96: _bytes_of(8),
    0x8D: _text8, 0x54: _binstring, 0x55: _short_binstring, 0x53: _string, 0x56: _unicode, 0x49: _int, 0x4C: _long,
    0x8A: _long_of(1), 0x8B: _long_of(4), 0x46: _float, 0x67: _get, 0x70: _put, 0x30: _pop, 0x31: _pop_mark,
    0x32: _dup, 0x64: _dict, 0x6C: _list, 0x8F: _empty_set, 0x90: _add_items, 0x91: _frozenset, 0x63: _global,
    0x69: _inst, 0x6F: _obj, 0x81: _newobj, 0x92: _newobj_ex, 0x62: _build, 0x51: _persistent,
    0x50: _text_persistent, 0x82: _extension, 0x83: _extension, 0x84: _extension, 0x97: _out_of_band,
    0x98: _out_of_band,
}  # fmt: skip
