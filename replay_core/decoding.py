"""Token ids as text and back, where a tokenizer.json is named or lies beside the dump. Nothing is downloaded or run.

A tokenizer is a program's input that anybody may put beside a dump, and its library answers what it does not expect by
ending the process, or by writing text without end. So it decodes in a child with limits of its own.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from replay_core.errors import RequestError
from replay_core.file_spans import regular
from replay_core.mirrored import is_mirrored

FILE = "tokenizer.json"
#: The largest published ones are a tenth of this.
MAX_BYTES = 1 << 28
#: Folders above the dump in which a trainer leaves its tokenizer.
_PARENTS = 2
#: What a tokenizer's child may take: memory beside 32 times the file, CPU seconds beside one for a megabyte, text.
_MEMORY = 256 << 20
_MAX_LETTERS = 1 << 22
#: A child that answers nothing, on a machine that is busy.
_PATIENCE_S = 30.0
_CHILD = "import sys; sys.path[:] = {path!r}\nfrom replay_core.decoding import serve; serve()"


def find_tokenizer(path: Path, known: Iterable[str] = ()) -> Path | None:
    """The tokenizer.json of a dump: of the weights it names, inside it, or in the folders just above."""
    folders = [Path(one) for one in known]
    here = path if path.is_dir() else path.parent
    folders += [here, *here.absolute().parents[:_PARENTS]]
    for folder in folders:
        for candidate in (folder / FILE, folder / "tokenizer" / FILE):
            try:
                if candidate.is_file():
                    return candidate
            except (OSError, ValueError):
                continue
    return None


def texts_near(ids: Sequence[int | None], path: Path, known: Iterable[str] = ()) -> list[str | None] | None:
    """Each id as text by the tokenizer of a dump, None where there is no id; None where no tokenizer can be used."""
    found = find_tokenizer(path, known)
    if found is None:
        return None
    try:
        return [piece or None for piece in Decoder(found).pieces([-1 if one is None else one for one in ids])]
    except RequestError:
        return None


class Decoder:
    """A tokenizer in a child of its own."""

    def __init__(self, path: Path) -> None:
        """Raises:
        RequestError: there is no such file, or it is no tokenizer.
        """
        self.path = path / FILE if path.is_dir() else path
        try:
            size = self.path.stat().st_size
        except OSError as error:
            raise RequestError(f"there is no tokenizer: {error.strerror}", file=str(self.path)) from None
        if not self.path.is_file() or size > MAX_BYTES:
            raise RequestError("the tokenizer is no file, or too large", file=str(self.path), found=f"{size:,} bytes")
        if is_mirrored(self.path):
            # The child opens the file by itself, where what was not fetched reads as zeros.
            with regular(self.path) as file:
                file.read()
        root = str(Path(__file__).resolve().parents[1])
        path_of_modules = [str(Path(entry).resolve()) for entry in sys.path if entry]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD.format(path=[*path_of_modules, root]), str(self.path), str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1"},
        )
        weakref.finalize(self, _end, self._process)
        self._ask([])

    def text(self, ids: Sequence[int]) -> str:
        """The ids as one text, special tokens shown.

        Raises:
            RequestError: the tokenizer ended, or wrote more than any text.
        """
        return self.texts([ids])[0]

    def texts(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Each row of ids as one text.

        Raises:
            RequestError: as `text`.
        """
        return [str(text) for text in self._ask(list(rows))]

    def encoded(self, texts: Sequence[str]) -> list[list[int]]:
        """Each text as ids; what a text shows of special tokens is read as those, and none are added.

        Raises:
            RequestError: as `text`.
        """
        return [[int(one) for one in ids] for ids in self._ask(list(texts))]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Each id by itself.

        Raises:
            RequestError: as `text`.
        """
        return self.texts([[i] for i in ids])

    def _ask(self, rows: list[Any]) -> list[Any]:
        answer: Any = None
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(rows).encode() + b"\n")
            self._process.stdin.flush()
            answer = json.loads(self._line())
        except (OSError, ValueError):
            answer = None
        if isinstance(answer, list) and len(answer) == len(rows):
            return answer
        _end(self._process)
        found = (
            answer.get("error") if isinstance(answer, dict) else "its process was ended: too much memory, time or text"
        )
        raise RequestError("the file is no tokenizer that can be used", file=str(self.path), found=str(found)[:400])

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        parts: list[bytes] = []
        fd, deadline = self._process.stdout.fileno(), time.monotonic() + _PATIENCE_S
        while not parts or not parts[-1].endswith(b"\n"):
            ready = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]
            parts.append(os.read(fd, 1 << 16) if ready else b"")
            if not parts[-1]:
                raise ValueError("no answer")
        return b"".join(parts)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:
                continue
    process.wait()


def serve() -> None:
    """The child: a line of lists of ids in, a line of texts out, and of texts ids; until its input ends."""
    import resource

    path, size = sys.argv[1], int(sys.argv[2])
    seconds = 1 + (size >> 20)
    for limit, value in (
        (resource.RLIMIT_DATA, _MEMORY + 32 * size), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_CORE, 0),
    ):  # fmt: skip
        hard = resource.getrlimit(limit)[1]
        value = value if hard < 0 else min(value, hard)
        resource.setrlimit(limit, (value, value))
    answer: Any
    tokenizer: Any = None
    for line in sys.stdin:
        try:
            if tokenizer is None:
                from tokenizers import Tokenizer

                tokenizer = Tokenizer.from_file(path)
            answer, letters = [], 0
            for ids in json.loads(line):
                if isinstance(ids, str):
                    answer.append(tokenizer.encode(ids, add_special_tokens=False).ids)
                    continue
                text = tokenizer.decode([i for i in ids if 0 <= i < 2**32], skip_special_tokens=False)
                answer.append(text)
                letters += len(text)
                if letters > _MAX_LETTERS:
                    raise ValueError("its texts are longer than any sample")
        except BaseException as error:
            # The library reports every damage as a bare Exception, or as a panic that is none.
            answer = {"error": f"{error}"[:400]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
