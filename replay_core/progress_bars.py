"""transformers' progress bars, hidden while we load or save."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def hidden(transformers: Any) -> Iterator[None]:
    """Progress is an event; a bar redrawn by carriage returns is noise in a log. As the user had them afterwards."""
    bars = transformers.utils.logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()
