"""A small pickle virtual machine: one pass, no recursion, nothing called that is not ours.

Against the C unpickler it differs in what hostile or huge files can do to it: the memo is a dict, so a
giant index costs nothing; declared sizes are held against what is left of the file; bytes are pushed as
`Span`s and never copied; a global is a `Symbol`. It reads through a window, so a pickle of any size
holds one megabyte of its own bytes.

The loop knows the opcodes that files consist of; `RARE` has those they hold few of: framing, bytes, classes, instances
and protocol 0's text, each a function of the machine.
"""

from __future__ import annotations

import codecs
import pickle
import re
import struct
from collections.abc import Callable
from typing import Any

from replay_core.budget import spend_bytes, spend_values
from replay_core.dumps.containers.allowlist import TABLE, find_global
from replay_core.dumps.containers.loading import InertClass, Loading, ShortBytes, Span, Stranger, Symbol
from replay_core.dumps.containers.region import Region
from replay_core.dumps.containers.tensor_shortcut import Memo, match_entries
from replay_core.dumps.containers.torch_rebuild import place_text
from replay_core.errors import RldbgError, UnsafeFileError
from replay_core.records import TensorRef
from replay_core.regexes import regex

_WINDOW = 1 << 20
#: What an opcode (or a run of numbers) may look ahead without asking for the next window.
_MARGIN = 1 << 16
_MAX_STACK = 1 << 22
_MAX_MARKS = 1 << 16
#: Shorter bytes are read at once: they are scalars' and small arrays'.
_SHORT = 256
#: What an object of Python takes at least that a byte of a pickle makes.
_OBJECT = 256
#: A dictionary slows down quadratically on crafted keys, which text (its hash is random) cannot be.
_MAX_CRAFTABLE_KEYS = 10_000

#: Bulk decoding pays from a handful of numbers on; 4096 of 9 bytes stay inside the margin.
_NUMBERS = regex(rb"(?:K.|M..|J.{4}|G.{8}|[\x88\x89N]){8,4096}", re.DOTALL)

#: A line of text opcodes: a dotted name or a number. Python itself stops at 4300 digits.
_MAX_LINE = 1 << 12
_MAX_LONG_BYTES = 1 << 12

#: The allow-list as GLOBAL spells it: module and name, a line each.
_BY_LINES = {"\n".join(name.rpartition(".")[::2]).encode(): symbol for name, symbol in TABLE.items()}

_u4 = struct.Struct("<I").unpack_from
_i4 = struct.Struct("<i").unpack_from
_u2 = struct.Struct("<H").unpack_from
_f8 = struct.Struct(">d").unpack_from

_REBUILD_V2 = TABLE["torch._utils._rebuild_tensor_v2"]
_KEYS = frozenset({str})
_SIZED = frozenset({str, bytes, ShortBytes, list, tuple, dict, set, frozenset})
_SCALARS = frozenset({str, int, float, bool, type(None), bytes, ShortBytes, complex})


class Machine:
    """One pickle stream of a `Loading`. `run(offset)` gives its value; `end` is where it stopped."""

    def __init__(self, loading: Loading, region: Region | None = None) -> None:
        self.loading = loading
        self.region = region or loading.region
        self.memo = Memo()
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.buf = b""
        self.base = 0
        self.pos = 0
        self.soft = 0
        self.end = 0
        self._craftable_keys = 0

    def refill(self) -> None:
        """Move the window to `pos`, and hold the stack against its bound."""
        at = self.base + self.pos
        left = self.region.end - at
        if left <= 0:
            raise self.region.truncated(at + 1)
        if len(self.stack) > _MAX_STACK or len(self.marks) > _MAX_MARKS:
            raise self.loading.malformed(
                "the pickle keeps too much in flight", expected=f"at most {_MAX_STACK} objects"
            )
        nbytes = min(left, _WINDOW)
        self.buf = self.region.read(at, nbytes)
        self.base = at
        self.pos = 0
        self.soft = nbytes if nbytes == left else nbytes - _MARGIN

    def take(self, nbytes: int) -> bytes:
        """The next `nbytes`, which may lie past the window."""
        start = self.pos
        self.pos += nbytes
        if 0 <= nbytes <= len(self.buf) - start:
            return self.buf[start : self.pos]
        return self.region.read(self.base + start, nbytes)

    def push_bytes(self, nbytes: int) -> None:
        """BINBYTES and its kin: a span, or short bytes."""
        span = Span(self.region, self.base + self.pos, nbytes)
        if nbytes < _SHORT:
            spend_bytes(2 * _OBJECT, "short texts of bytes")
            short = ShortBytes(self.take(nbytes))
            short.span = span
            self.stack.append(short)
            return
        if span.offset + nbytes > self.region.end:
            raise self.region.truncated(span.offset + nbytes)
        self.pos += nbytes
        self.stack.append(span)

    def push_text(self, nbytes: int) -> None:
        self.stack.append(self.text(self.take(nbytes)))

    def text(self, data: bytes) -> str:
        try:
            return data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise self.loading.malformed(f"a text that is not UTF-8: {error.reason}") from None

    def pop_mark(self) -> list[Any]:
        """What was pushed since the last mark."""
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def check_key(self, key: Any) -> None:
        """Hold a dictionary key (or a set's member) that is not text against what cannot hurt."""
        cls = type(key)
        if cls is int and -(1 << 32) < key < 1 << 32:
            return
        self._craftable_keys += 1
        if self._craftable_keys > _MAX_CRAFTABLE_KEYS:
            raise self.loading.malformed("too many keys that are neither text nor small numbers")
        if cls is tuple:
            spend_values(len(key), "keys that are tuples")
        if cls not in _SCALARS and not (cls is tuple and _SCALARS.issuperset(map(type, key))):
            raise self.loading.malformed(f"a dictionary key of type {cls.__name__}", expected="text or a number")

    def set_items(self, target: Any, items: list[Any]) -> None:
        if type(target) is not dict or len(items) % 2:
            raise self.loading.malformed("the pickle sets items of something that is not a dictionary")
        keys = items[::2]
        if set(map(type, keys)) != _KEYS:
            keys = [place_text(key) if type(key) is dict else key for key in keys]
            for key in keys:
                self.check_key(key)
        target.update(zip(keys, items[1::2], strict=True))

    def append_all(self, target: Any, items: list[Any]) -> None:
        if type(target) is not list:
            raise self.loading.malformed("the pickle appends to something that is not a list")
        target.extend(items)

    def reduce(self, function: Any, args: Any) -> Any:
        """REDUCE and NEWOBJ: call a symbol of ours."""
        if not isinstance(function, Symbol) or type(args) is not tuple:
            raise self.loading.malformed("the pickle calls something that is not a function")
        # What a call is given may stand in the memo and be given again by every call.
        given = sum([len(arg) for arg in args if type(arg) in _SIZED])
        if given > _SHORT:
            spend_values(given, f"what `{function.name}` is called with")
        try:
            return function.call(self.loading, args)
        except (ValueError, TypeError, IndexError, AttributeError, KeyError, OverflowError) as error:
            raise self.loading.malformed(f"`{function.name}` with the wrong arguments: {error}") from None

    def persistent(self, pid: Any) -> Any:
        """BINPERSID: what the container keeps under that id."""
        resolve = self.loading.persistent
        if resolve is None:
            raise self.loading.malformed("a persistent id in a file that has nothing it could name")
        return resolve(pid)

    def run(self, offset: int) -> Any:
        """Read the stream at `offset` up to its STOP.

        Raises:
            TruncatedError: the bytes end first.
            UnsafeFileError: it calls something that is not on the allow-list.
            DumpError: it is not a pickle any pickler writes.
        """
        self.base = offset
        try:
            value = self._loop()
        except RldbgError:
            raise
        except (IndexError, struct.error):
            at = self.base + self.pos
            if at + 16 >= self.region.end:
                raise self.region.truncated(self.region.end + 1) from None
            raise self.loading.malformed(f"the pickle pops from an empty stack before byte {at}") from None
        except (ValueError, TypeError, OverflowError, KeyError, AttributeError) as error:
            raise self.loading.malformed(f"a malformed pickle near byte {self.base + self.pos}: {error}") from None
        self.end = self.base + self.pos
        return value

    def _loop(self) -> Any:
        stack, memo, buf, pos, soft = self.stack, self.memo, self.buf, self.pos, self.soft
        after_tensor, usual = False, self.loading.zip_storage is not None
        while True:
            if pos >= soft:
                self.pos, self.stack = pos, stack
                self.refill()
                buf, pos, soft = self.buf, 0, self.soft
            op = buf[pos]
            pos += 1
            if op == 0x71:  # BINPUT
                memo[buf[pos]] = stack[-1]
                pos += 1
            elif op == 0x72:  # LONG_BINPUT
                memo[_u4(buf, pos)[0]] = stack[-1]
                pos += 4
            elif op == 0x94:  # MEMOIZE
                if memo.waiting:
                    memo.settle()
                memo[len(memo)] = stack[-1]
            elif op == 0x68 or op == 0x6A:  # BINGET, LONG_BINGET
                if op == 0x68:
                    index = buf[pos]
                    pos += 1
                else:
                    index = _u4(buf, pos)[0]
                    pos += 4
                if index not in memo and not (memo.settle() and index in memo):
                    self.pos = pos
                    raise self.loading.malformed(f"the pickle asks for memo {index}, which nothing was put in")
                value = memo[index]
                stack.append(value)
            elif op == 0x58 or op == 0x8C:  # BINUNICODE, SHORT_BINUNICODE
                if after_tensor:
                    after_tensor = False
                    entries, end = match_entries(self.loading, memo, buf, pos - 1, _REBUILD_V2)
                    usual = end >= pos - 1
                    if entries:
                        stack += entries
                        pos = end
                        continue
                if op == 0x58:
                    length = _u4(buf, pos)[0]
                    pos += 4
                else:
                    length = buf[pos]
                    pos += 1
                self.pos, self.stack = pos, stack
                if pos + length <= len(buf):
                    pos += length
                    stack.append(self.text(buf[pos - length : pos]))
                else:
                    self.push_text(length)
                    pos = self.pos
            elif op == 0x4B:  # BININT1
                stack.append(buf[pos])
                pos += 1
            elif op == 0x28:  # MARK
                self.marks.append(stack)
                stack = []
                run = _NUMBERS.match(buf, pos)
                while run is not None:
                    # Only number opcodes matched: these are the one thing that pickle itself may decode.
                    stack += pickle.loads(b"(" + run[0] + b"l.")
                    pos = run.end()
                    if pos >= soft:
                        break
                    run = _NUMBERS.match(buf, pos)
            elif op == 0x74:  # TUPLE
                items = tuple(stack)
                stack = self.marks.pop()
                stack.append(items)
            elif 0x85 <= op <= 0x87:  # TUPLE1..TUPLE3
                count = op - 0x84
                if len(stack) < count:
                    raise IndexError
                items = tuple(stack[-count:])
                del stack[-count:]
                stack.append(items)
            elif op == 0x52:  # REDUCE
                args = stack.pop()
                self.pos = pos
                function = stack[-1]
                stack[-1] = self.reduce(function, args)
                after_tensor = usual and function is _REBUILD_V2
            elif op == 0x63:  # GLOBAL
                self.pos = pos
                stack.append(_global_line(self))
                pos = self.pos
            elif op == 0x51:  # BINPERSID
                stack[-1] = self.persistent(stack[-1])
            elif op == 0x65:  # APPENDS
                appended = stack
                stack = self.marks.pop()
                self.append_all(stack[-1], appended)
            elif op == 0x75:  # SETITEMS
                pairs = stack
                stack = self.marks.pop()
                self.set_items(stack[-1], pairs)
            elif op == 0x61:  # APPEND
                item = stack.pop()
                self.append_all(stack[-1], [item])
            elif op == 0x73:  # SETITEM
                item = stack.pop()
                key = stack.pop()
                self.set_items(stack[-1], [key, item])
            elif op == 0x5D:  # EMPTY_LIST
                stack.append([])
            elif op == 0x7D:  # EMPTY_DICT
                stack.append({})
            elif op == 0x29:  # EMPTY_TUPLE
                stack.append(())
            elif op == 0x47:  # BINFLOAT
                stack.append(_f8(buf, pos)[0])
                pos += 8
            elif op == 0x4D:  # BININT2
                stack.append(_u2(buf, pos)[0])
                pos += 2
            elif op == 0x4A:  # BININT
                stack.append(_i4(buf, pos)[0])
                pos += 4
            elif op == 0x4E:  # NONE
                stack.append(None)
            elif op == 0x88:  # NEWTRUE
                stack.append(True)
            elif op == 0x89:  # NEWFALSE
                stack.append(False)
            elif op == 0x93:  # STACK_GLOBAL
                name = stack.pop()
                module = stack.pop()
                if type(name) is not str or type(module) is not str:
                    raise self.loading.malformed("a global whose name is not text")
                stack.append(find_global(self.loading, module, name))
            elif op == 0x2E:  # STOP
                self.pos = pos
                if self.marks or len(stack) != 1:
                    raise self.loading.malformed("the pickle stops with unfinished objects")
                return stack[0]
            else:
                self.pos, self.stack = pos, stack
                handler = RARE.get(op)
                if handler is None:
                    raise self.loading.malformed(f"byte {self.base + pos - 1} (0x{op:02x}) is not a pickle opcode")
                handler(self)
                stack, buf, pos, soft = self.stack, self.buf, self.pos, self.soft


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


def _string(machine: Machine) -> None:
    data = _line(machine)
    if len(data) < 2 or data[:1] != data[-1:] or data[:1] not in (b"'", b'"'):
        raise machine.loading.malformed("a quoted text without its quotes")
    _old_text(machine, bytes(codecs.escape_decode(data[1:-1])[0]))


def _int(machine: Machine) -> None:
    data = _line(machine)
    machine.stack.append({b"00": False, b"01": True}[data] if data in (b"00", b"01") else int(data, 0))


def _long_of(width: int) -> Callable[[Machine], None]:
    def push(machine: Machine) -> None:
        size = _unsigned(machine, width)
        if size > _MAX_LONG_BYTES:
            machine.region.read(machine.base + machine.pos, size)  # a truncated file is said to be one
            raise machine.loading.malformed(f"a number of {size} bytes", expected=f"at most {_MAX_LONG_BYTES}")
        machine.stack.append(int.from_bytes(machine.take(size), "little", signed=True))

    return push


def _get(machine: Machine) -> None:
    machine.memo.settle()
    machine.stack.append(machine.memo[int(_line(machine))])


def _pop(machine: Machine) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.pop_mark()


def _dict(machine: Machine) -> None:
    items = machine.pop_mark()
    target: dict[Any, Any] = {}
    if items:
        machine.set_items(target, items)
    machine.stack.append(target)


def _list(machine: Machine) -> None:
    items = machine.pop_mark()
    machine.stack.append(items)


def _add_items(machine: Machine) -> None:
    items = machine.pop_mark()
    target = machine.stack[-1]
    if type(target) is not set:
        raise machine.loading.malformed("the pickle adds members to something that is not a set")
    for item in items:
        machine.check_key(item)
    target.update(items)


def _empty_set(machine: Machine) -> None:
    spend_bytes(_OBJECT, "sets")
    machine.stack.append(set())


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


def _text_persistent(machine: Machine) -> None:
    machine.stack.append(machine.persistent(_line(machine).decode("ascii")))


def _extension(machine: Machine) -> None:
    raise UnsafeFileError(
        "the file names a class by a number that only its writer knows",
        file=str(machine.region.path),
        found="a pickle extension code",
    )


def _out_of_band(machine: Machine) -> None:
    raise machine.loading.malformed("the pickle keeps its data in a second stream that is not in the file")


RARE: dict[int, Callable[[Machine], object]] = {
    0x80: _proto, 0x95: _frame, 0x43: _bytes_of(1), 0x42: _bytes_of(4), 0x8E: _bytes_of(8), 0x96: _bytes_of(8),
    0x8D: lambda machine: machine.push_text(_unsigned(machine, 8)),
    0x54: _binstring, 0x55: lambda machine: _old_text(machine, machine.take(_unsigned(machine, 1))), 0x53: _string,
    0x56: lambda machine: machine.stack.append(_line(machine).decode("raw-unicode-escape")),
    0x49: _int, 0x4C: lambda machine: machine.stack.append(int(_line(machine).removesuffix(b"L"), 0)),
    0x8A: _long_of(1), 0x8B: _long_of(4), 0x46: lambda machine: machine.stack.append(float(_line(machine))),
    0x67: _get, 0x70: lambda machine: machine.memo.update({int(_line(machine)): machine.stack[-1]}),
    0x30: _pop, 0x31: lambda machine: machine.pop_mark(), 0x32: lambda machine: machine.stack.append(machine.stack[-1]),
    0x64: _dict, 0x6C: _list, 0x8F: _empty_set, 0x90: _add_items, 0x91: _frozenset,
    0x69: _inst, 0x6F: _obj, 0x81: _newobj, 0x92: _newobj_ex, 0x62: _build, 0x50: _text_persistent,
    0x82: _extension, 0x83: _extension, 0x84: _extension, 0x97: _out_of_band, 0x98: _out_of_band,
}  # fmt: skip
