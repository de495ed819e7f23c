"""Of several looks asked for while one is taken, only the newest is ever done."""

from __future__ import annotations

from collections.abc import Awaitable, Callable


class Latest:
    """Runs one piece of work at a time; of those asked for meanwhile only the newest is ever done."""

    def __init__(self) -> None:
        self._waiting: Callable[[], Awaitable[None]] | None = None
        self._runs = False

    @property
    def is_superseded(self) -> bool:
        return self._waiting is not None

    async def do(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Whether it is done; False: whoever runs another will do it, or a newer one in its place."""
        self._waiting = work
        if self._runs:
            return False
        self._runs = True
        try:
            while (now := self._waiting) is not None:
                self._waiting = None
                await now()
        finally:
            self._runs = False
        return True
