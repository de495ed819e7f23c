"""A small pickle virtual machine: one pass, no recursion, nothing called that is not ours.

Against the C unpickler it differs in what hostile or huge files can do to it: the memo is a dict, so a
giant index costs nothing; declared sizes are held against what is left of the file; bytes are pushed as
`Span`s and never copied; a global is a `Symbol`. It reads through a window, so a pickle of any size
holds one megabyte of its own bytes.

The loop below knows the opcodes that files consist of; `pickle_opcodes` has the rest.
"""

from __future__ import annotations

import pickle
import re
import struct
from typing import Any

from replay_core.dumps.containers.allowlist import TABLE, find_global
from replay_core.dumps.containers.loading import Loading, ShortBytes, Span
from replay_core.dumps.containers.pickle_opcodes import RARE
from replay_core.dumps.containers.region import Region
from replay_core.dumps.containers.symbols import Symbol
from replay_core.dumps.containers.tensor_shortcut import Memo, match_entries
from replay_core.errors import RldbgError

_WINDOW = 1 << 20
#: What an opcode (or a run of numbers) may look ahead without asking for the next window.
_MARGIN = 1 << 16
_MAX_STACK = 1 << 22
_MAX_MARKS = 1 << 16
#: Shorter bytes are read at once: they are scalars' and small arrays'.
_SHORT = 256
#: A dictionary slows down quadratically on crafted keys, which text (its hash is random) cannot be.
_MAX_CRAFTABLE_KEYS = 10_000

#: Bulk decoding pays from a handful of numbers on; 4096 of 9 bytes stay inside the margin.
_NUMBERS = re.compile(rb"(?:K.|M..|J.{4}|G.{8}|[\x88\x89N]){8,4096}", re.DOTALL)

_u4 = struct.Struct("<I").unpack_from
_i4 = struct.Struct("<i").unpack_from
_u2 = struct.Struct("<H").unpack_from
_f8 = struct.Struct(">d").unpack_from

_REBUILD_V2 = TABLE["torch._utils._rebuild_tensor_v2"]
_KEYS = frozenset({str})
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
        if cls not in _SCALARS and not (cls is tuple and _SCALARS.issuperset(map(type, key))):
            raise self.loading.malformed(f"a dictionary key of type {cls.__name__}", expected="text or a number")

    def set_items(self, target: Any, items: list[Any]) -> None:
        if type(target) is not dict or len(items) % 2:
            raise self.loading.malformed("the pickle sets items of something that is not a dictionary")
        keys = items[::2]
        if set(map(type, keys)) != _KEYS:
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
        try:
            return function.call(self.loading, args)
        except (ValueError, TypeError, IndexError, AttributeError, KeyError, OverflowError) as error:
            raise self.loading.malformed(f"`{function.name}` with the wrong arguments: {error}") from None

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
