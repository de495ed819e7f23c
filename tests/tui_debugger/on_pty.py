"""A Python program on a real pseudo-terminal, and what it wrote there."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
import time


class OnPty:
    """A Python program on a pseudo-terminal."""

    def __init__(self, code: str, *arguments: str, size: tuple[int, int] = (100, 30), **environment: str) -> None:
        """`code` runs with -c; of a module `-m name` with its arguments."""
        self.master, slave = pty.openpty()
        self.resize(*size)
        path = os.pathsep.join(p for p in sys.path if p)
        environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": path, **environment}
        start = code.split(" ") if code.startswith("-m ") else ["-c", code]
        self.process = subprocess.Popen(
            [sys.executable, *start, *arguments],
            stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.output = b""
        self._drain = threading.Thread(target=self._read, daemon=True)
        self._drain.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self.master, 65536)
            except OSError:
                return
            if not data:
                return
            self.output += data

    def wait_for(self, text: bytes, timeout: float = 20, since: int = 0) -> None:
        """Until it was written, behind the first `since` bytes of what was."""
        end = time.monotonic() + timeout
        while text not in self.output[since:]:
            assert time.monotonic() < end, f"{text!r} never came: {self.output[-2000:]!r}"
            assert self.process.poll() is None, self.output[-2000:].decode(errors="replace")
            time.sleep(0.02)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def send(self, data: bytes) -> None:
        os.write(self.master, data)

    def ended(self, timeout: float = 15) -> int:
        code = self.process.wait(timeout)
        self._drain.join(2)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)
