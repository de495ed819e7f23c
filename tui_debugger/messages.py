"""What panes tell the screen. Panes never act; the screen does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from textual.message import Message

from tui_debugger.state import Scope


class TensorHighlighted(Message):
    """The cursor of the tensor list stands on another row."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def can_replace(self, message: Message) -> bool:
        # Holding a key down must not queue an inspection for every row passed.
        return isinstance(message, TensorHighlighted)


class TensorOpened(Message):
    """Enter on a row of the tensor list."""


class SortAsked(Message):
    """A column's head was pressed twice: the order it asks for."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by = by


class RecordHighlighted(Message):
    """The cursor of the step browser stands on another record."""

    def __init__(self, index: int | None, scope: Scope) -> None:
        super().__init__()
        self.index = index
        """Which of the run's records; None on a step or a micro-batch of several records."""
        self.scope = scope

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, RecordHighlighted)


class RecordOpened(Message):
    """Enter on a row of the step browser."""

    def __init__(self, index: int | None, scope: Scope) -> None:
        super().__init__()
        self.index = index
        self.scope = scope


class FlagPressed(Message):
    """Enter or space on a flag."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class FilterChanged(Message):
    """The filter's text changed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


class FilterClosed(Message):
    """Enter or escape in the filter."""

    def __init__(self, keep: bool) -> None:
        super().__init__()
        self.keep = keep


class FindingOpened(Message):
    """Enter on a finding of the diagnosis."""

    def __init__(self, finding: Mapping[str, Any]) -> None:
        super().__init__()
        self.finding = finding


class ProblemOpened(Message):
    """Enter on a problem met while reading: the file it names, and the step it speaks of."""

    def __init__(self, where: str, step: int | None) -> None:
        super().__init__()
        self.where = where
        self.step = step


class StartChosen(Message):
    """Enter on a line of the start list: paths to open, or the demo where there are none."""

    def __init__(self, paths: tuple[str, ...]) -> None:
        super().__init__()
        self.paths = paths
