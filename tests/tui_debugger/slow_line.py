"""A slow line between a program and its terminal, as SSH makes one: `slow_line.py BYTES_PER_S DELAY_MS NOTE program …`.

What the program writes is taken at once (sshd and the kernels hold megabytes) and arrives at that rate, later by the
delay; keys go the other way with the same delay. Standard library only. NOTE holds how many bytes have arrived.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import sys
import termios
import time
import tty
from collections import deque
from pathlib import Path


def main(rate: float, delay_s: float, note: Path, command: list[str]) -> int:
    child, master = pty.fork()
    if child == 0:
        os.execvp(command[0], command)
    size = fcntl.ioctl(1, termios.TIOCGWINSZ, bytes(8))
    fcntl.ioctl(master, termios.TIOCSWINSZ, size)
    before = termios.tcgetattr(0)
    tty.setraw(0)
    keys: deque[tuple[float, bytes]] = deque()
    held: deque[tuple[float, bytes]] = deque()
    arrived, free_at = 0, time.monotonic()
    try:
        while True:
            now = time.monotonic()
            if held and held[0][0] <= now and free_at <= now:
                due, data = held.popleft()
                os.write(1, data[:64])
                arrived += len(data[:64])
                note.write_text(str(arrived))
                free_at = max(free_at, due, now - 0.05) + len(data[:64]) / rate
                if data[64:]:
                    held.appendleft((due, data[64:]))
                continue
            if keys and keys[0][0] <= now:
                os.write(master, keys.popleft()[1])
                continue
            waits = [free_at if held and held[0][0] <= now else held[0][0]] if held else []
            waits += [keys[0][0]] if keys else []
            ready, _, _ = select.select([0, master], [], [], max(0.0, min(waits) - now) if waits else None)
            if 0 in ready:
                keys.append((time.monotonic() + delay_s, os.read(0, 4096)))
            if master in ready:
                try:
                    data = os.read(master, 65536)
                except OSError:
                    data = b""
                if not data:
                    break
                held.append((time.monotonic() + delay_s, data))
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
    for _, data in held:
        os.write(1, data)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), float(sys.argv[2]) / 1000, Path(sys.argv[3]), sys.argv[4:]))
