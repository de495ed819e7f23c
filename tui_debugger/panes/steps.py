"""1 Steps: the records of A, by step, micro-batch and dump point. Children are added when a step opens."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.style import Style
from rich.text import Text
from textual.widgets import Tree
from textual.widgets.tree import TreeNode

from tui_debugger import format as fmt
from tui_debugger.actions import pane_title
from tui_debugger.messages import RecordHighlighted, RecordOpened
from tui_debugger.state import Scope, State
from tui_debugger.widgets.paint import TOKEN_CLASSES, paint, verdict_token

_EMPTY = ("The records of a dump", "stand here, by step:", "o opens one.")
_STEP = re.compile(r"\bstep (\d+)\b")


@dataclass(frozen=True, slots=True)
class Spot:
    """What a node stands for: a scope, and the one record when there is just one."""

    scope: Scope
    record: int | None = None
    records: tuple[int, ...] = ()

    @property
    def all(self) -> tuple[int, ...]:
        return self.records or (() if self.record is None else (self.record,))


class Problems:
    """How many problems a run has at which record and step: by the file they name, and by the step they speak of."""

    def __init__(self, problems: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]]) -> None:
        by_path = {str(record.get("path")): index for index, record in enumerate(records)}
        self._records: Counter[int] = Counter()
        self._steps: Counter[int | None] = Counter()
        for problem in problems:
            index = by_path.get(str(problem.get("where")))
            said = _STEP.search(f"{problem.get('what')}")
            if index is not None:
                self._records[index] += 1
            if index is not None or said:
                step = records[index]["key"].get("step") if index is not None else int(said.group(1)) if said else None
                self._steps[step] += 1

    def of_record(self, index: int) -> int:
        return self._records[index]

    def of_step(self, step: int | None) -> int:
        return self._steps[step]


def _matcher(text: str) -> Callable[[str], object] | None:
    if not text:
        return None
    try:
        return re.compile(text, re.IGNORECASE).search
    except re.error:
        return re.compile(re.escape(text), re.IGNORECASE).search


class StepsPane(Tree[Spot]):
    COMPONENT_CLASSES: ClassVar[set[str]] = set(TOKEN_CLASSES)
    BORDER_TITLE = pane_title("steps")
    ICON_NODE = "▸ "
    ICON_NODE_EXPANDED = "▾ "

    def __init__(self) -> None:
        super().__init__("records", id="steps")
        self.show_root = False
        self.guide_depth = 2
        self.auto_expand = False
        self._drawn: object = None
        self._records: list[Mapping[str, Any]] = []
        self._verdicts: dict[int | None, str] = {}
        self._stages: set[str | None] = set()
        self._silent = False
        self._filter = ""
        self._wrong = Problems([], [])
        self._marked: set[str] = set()

    def show(self, state: State) -> None:
        """Draw the run; keep the tree as it is while only verdicts change."""
        self._verdicts = dict(state.step_verdicts)
        self._marked = {mark.name for mark in state.marks if mark.kind == "record"}
        if state.a is None:
            self.border_subtitle, self._drawn = "", None
            if not self.root.children or self.root.children[0].data is not None:
                self.clear()
                self.root.expand()
                for line in _EMPTY:
                    self.root.add_leaf(Text(line, style=paint(self, "muted")))
            return
        if self._drawn is not state.a or self._filter != state.step_filter:
            self._drawn, self._filter = state.a, state.step_filter
            self._plant(state)
        shown = sum(len(node.data.records) or 1 for node in self.root.children if node.data)
        total = len(self._records)
        self.border_subtitle = f"{shown:,} of {total:,} records" if self._filter else f"{total:,} records"
        self._follow(state.scope)
        self._clear_line_cache()  # labels hold verdicts
        self.refresh()

    def _plant(self, state: State) -> None:
        assert state.a is not None
        self._records = list(state.a.get("records") or [])
        self._wrong = Problems(state.a.get("problems") or [], self._records)
        self._stages = {record["key"].get("stage") for record in self._records if record["key"].get("step") is not None}
        by_step: dict[int | None, list[int]] = {}
        wanted = _matcher(state.step_filter)
        for index, record in enumerate(self._records):
            if wanted is None or wanted(self._said(index)):
                by_step.setdefault(record["key"].get("step"), []).append(index)
        self.clear()
        for step, indexes in sorted(by_step.items(), key=lambda item: (item[0] is None, item[0] or 0)):
            name = "no step" if step is None else f"step {step}"
            node = self.root.add(name, Spot(Scope(step), indexes[0] if len(indexes) == 1 else None, tuple(indexes)))
            if len(indexes) == 1:
                node.allow_expand = False
            elif len(by_step) == 1 or step == state.scope.step:
                node.expand()
        self.root.expand()

    def _follow(self, scope: Scope) -> None:
        """Put the cursor on the step that is looked at, without telling anybody."""
        here = self.cursor_node
        if here is not None and here.data is not None and here.data.scope.step == scope.step:
            return
        for node in self.root.children:
            if node.data and node.data.scope.step == scope.step:
                self._silent = True
                self.move_cursor(node)
                self.call_after_refresh(setattr, self, "_silent", False)
                return

    def on_tree_node_expanded(self, event: Tree.NodeExpanded[Spot]) -> None:
        self._fill(event.node)

    def _fill(self, node: TreeNode[Spot]) -> None:
        spot = node.data
        if spot is None or node.children:
            return
        groups: dict[Scope, list[int]] = {}
        for index in spot.records:
            groups.setdefault(Scope.of(self._records[index]["key"]), []).append(index)
        if len(groups) == 1 and spot.scope in groups:
            self._add_stages(node, spot.scope, list(spot.records))
            return
        for scope, indexes in groups.items():
            label = " ".join(
                f"{name} {value}" for name, value in (("rank", scope.rank), ("micro", scope.micro)) if value is not None
            )
            if scope == spot.scope or not label:
                self._add_stages(node, scope, indexes)
            elif len(indexes) == 1:
                node.add_leaf(f"{label} {self._telling(indexes[0])}".rstrip(), Spot(scope, indexes[0]))
            else:
                node.add(label, Spot(scope, None, tuple(indexes)))

    def _add_stages(self, node: TreeNode[Spot], scope: Scope, indexes: list[int]) -> None:
        for index in indexes:
            node.add_leaf(self._stage(index), Spot(scope, index))

    def _said(self, index: int) -> str:
        """What the filter looks at: `step 3 rank 0 micro 1 modules PROBLEM DIFF`."""
        key = self._records[index]["key"]
        parts = [fmt.scope(key), str(key.get("role")), str(key.get("stage"))]
        if self._wrong.of_record(index) or self._wrong.of_step(key.get("step")):
            parts.append("PROBLEM")
        return " ".join([*parts, self._verdicts.get(key.get("step"), "")])

    def _stage(self, index: int) -> str:
        record = self._records[index]
        role = record["key"].get("role")
        fields = record.get("fields")
        count = f" ({len(fields)})" if fields else ""
        prefix = f"{role}/" if role not in (None, "actor") else ""
        return f"{prefix}{record['key'].get('stage')}{count}"

    def _telling(self, index: int) -> str:
        """What tells a lone record from the others: its role, and its stage where the dump has several."""
        if len(self._stages) > 1:
            return self._stage(index)
        role = self._records[index]["key"].get("role")
        return "" if role == "actor" else str(role or "")

    def process_label(self, label: Any) -> Text:
        # A name is data: never markup.
        return label if isinstance(label, Text) else Text(fmt.safe(label))

    def render_label(self, node: TreeNode[Spot], base_style: Style, style: Style) -> Text:
        text = super().render_label(node, base_style, style)
        spot = node.data
        if spot is None:
            return text
        at_step = node.parent is self.root
        if at_step and (word := self._verdicts.get(spot.scope.step)):
            text.append("  ")
            text.append(word, paint(self, verdict_token(word)))
        wrong = self._wrong.of_step(spot.scope.step) if at_step else sum(map(self._wrong.of_record, spot.all))
        if wrong:
            text.append(f"  !{wrong}", paint(self, "missing"))
        if str(spot.scope) in self._marked and (at_step or spot.scope.micro is not None):
            text.append("  +", paint(self, "key"))
        return text

    @property
    def here(self) -> Spot | None:
        """What the cursor is on."""
        return self.cursor_node.data if self.cursor_node is not None else None

    def go_to(self, step: int | None, path: str = "") -> bool:
        """Put the cursor on a step, or on the record of a file; False where there is none."""
        index = next((i for i, record in enumerate(self._records) if path and str(record.get("path")) == path), None)
        if index is not None:
            step = self._records[index]["key"].get("step")
        for node in self.root.children:
            if node.data and node.data.scope.step == step:
                self.move_cursor(node)
                if index is not None:
                    self.post_message(RecordOpened(index, Scope.of(self._records[index]["key"])))
                return True
        return False

    def on_tree_node_highlighted(self, event: Tree.NodeHighlighted[Spot]) -> None:
        event.stop()
        spot = event.node.data
        if spot is not None and self.has_focus and not self._silent:
            # Of a step or micro-batch of several records the first is looked at.
            self.post_message(RecordHighlighted(spot.records[0] if spot.records else spot.record, spot.scope))

    def on_tree_node_selected(self, event: Tree.NodeSelected[Spot]) -> None:
        event.stop()
        spot = event.node.data
        if spot is None:
            return
        if event.node.allow_expand and not event.node.is_expanded:
            event.node.expand()
        self.post_message(RecordOpened(spot.record, spot.scope))
