"""What one cell printed, on disk: its beginning and its end, and how much was left out between them."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from types import TracebackType
from typing import IO

from replay_core.errors import RequestError

#: Below the directory of a replay: where its cells' logs lie, and beside them its document.
LOGS, REPLAY_JSON = "logs", "replay.json"
#: Bytes kept of the beginning and of the end. A factory that prints 100 MB must not fill a disk, nor bury its error.
HEAD, TAIL = 4 << 20, 1 << 20


class CellLog:
    """Writes lines to `path` until HEAD bytes, then remembers only the last TAIL bytes, written on closing.

    Raises:
        RequestError: this user may not write there.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = open(path, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        except (PermissionError, NotADirectoryError, FileExistsError) as error:
            raise RequestError(f"the replay cannot be written there: {error.strerror}", file=str(error.filename),
                               expected="a directory that this user may write",
                               hint="--out DIR says where it goes") from None  # fmt: skip
        self.path = path
        self._written = 0
        self._tail: deque[str] = deque()
        self._held = 0
        self._dropped = 0

    def __enter__(self) -> CellLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._dropped:
            self._file.write(f"... {self._dropped / 2**20:,.1f} MiB of what was printed are left out here ...\n")
        self._file.writelines(self._tail)
        self._file.close()

    def line(self, text: str) -> None:
        """Keep one line; of a line longer than TAIL its end."""
        if len(text) > TAIL:
            text = f"[{(len(text) - TAIL) / 2**20:,.1f} MiB of this line are left out] {text[-TAIL:]}"
        if not self._tail and self._written + len(text) < HEAD:
            self._file.write(text + "\n")
            self._file.flush()
            self._written += len(text) + 1
            return
        self._tail.append(text + "\n")
        self._held += len(text) + 1
        while self._held > TAIL and len(self._tail) > 1:
            gone = len(self._tail.popleft())
            self._held -= gone
            self._dropped += gone
