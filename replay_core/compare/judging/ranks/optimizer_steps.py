"""The optimizer's steps between two recordings of the weights: what they did otherwise on some ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from replay_core.compare.judging import contributions, flat_slices, steps_of_weights
from replay_core.compare.judging.faults import Fault, is_open
from replay_core.compare.judging.ranks.row import RowOfRanks, say_first
from replay_core.records import TensorRef

if TYPE_CHECKING:
    from replay_core.compare.judging.tensors import TensorVerdict

MovedOfRole = Sequence[tuple["TensorVerdict", flat_slices.Moved]]


class OptimizerSteps:
    """The weights and the gradients of the step before, which this one's were made of."""

    def __init__(self) -> None:
        #: By role and name, weights of the step before this one.
        self._weights: dict[tuple[str | None, str], steps_of_weights.Before] = {}
        #: By step, role and weight: whether its gradient was off, and how much noise was in it.
        self._gradients_off: dict[tuple[int | None, str | None, str], bool] = {}
        self._noises: dict[tuple[int | None, str | None, str], float] = {}
        #: By role and name, weights that were off where they are first recorded, and their rows.
        self._off_at_first: dict[tuple[str | None, str], tuple[TensorVerdict, steps_of_weights.Before]] = {}
        #: Of this step, by role: its weights with those of the step before, and their rows.
        self._moved: dict[str | None, list[tuple[TensorVerdict, flat_slices.Moved]]] = defaultdict(list)
        #: By role and name, gradients of the step before this one: whose step it was, and the ranks' own.
        self._gradients: dict[tuple[str | None, str], tuple[int, TensorRef]] = {}

    def note_gradient(self, of: RowOfRanks) -> None:
        """Keep whether a gradient is off, which its weight's step takes over."""
        row = of.row
        called = row.key.step, row.key.role, row.name.removeprefix("grad.")
        self._gradients_off[called] = row.verdict.diverges or self._gradients_off.get(called, False)
        if row.figures is not None:
            self._noises[called] = max(row.figures.total.rel_l2, self._noises.get(called, 0.0))

    def keep_gradient(self, of: RowOfRanks) -> None:
        """Keep a gradient itself, to which that of the next step may have been added."""
        if of.is_gradient and of.step is not None:
            self._gradients[of.row.key.role, of.name] = of.step, of.laid

    def of_last_gradient(self, of: RowOfRanks, fault: Fault | None) -> Fault | None:
        """Whether a gradient has that of the step before in it."""
        before = self._gradients.get((of.row.key.role, of.name))
        if before is not None and before[0] < (of.step or 0) and is_open(fault):
            own, every = of.held.ranks, of.together.ranks
            fault = contributions.with_the_last(of.name, of.whole, of.laid, before[1], own, every) or fault
        return fault

    def explain(self, of: RowOfRanks) -> None:
        """What the optimizer's step before a weight that is off did otherwise."""
        row, whole, held = of.row, of.whole, of.held
        place, step = (row.key.role, row.name), row.key.step
        before = self._weights.get(place)
        if step is None or row.ranks is None:
            return
        self._explain_frozen(of)
        if before is None or before.step != step:
            if row.verdict.diverges:
                if before is None:
                    self._off_at_first.setdefault(place, (row, steps_of_weights.Before(step, whole, held, None)))
                self._weights.pop(place, None)
            else:
                self._weights[place] = steps_of_weights.Before(step, whole, held, None)
        if before is not None and before.step == step - 1:
            moved = flat_slices.Moved(row.name.removeprefix("param."), whole, before.whole, held, before.held)
            self._moved[row.key.role].append((row, moved))
        if before is None or before.step >= step or not row.verdict.diverges:
            return
        name = row.name.removeprefix("param.")
        called = before.step, row.key.role, name
        before = replace(
            before, gradient_is_off=self._gradients_off.get(called), gradient_noise=self._noises.get(called, 0.0)
        )  # fmt: skip
        if not is_open(row.ranks.fault):
            return
        parted = row.ranks.parted or held.ranks
        fault = steps_of_weights.of_the_step(name, step, whole, held, parted, before, of.together.ranks)
        if fault is not None:
            say_first(row, fault)

    def _explain_frozen(self, of: RowOfRanks) -> None:
        """Whether a weight that was off from the first on has not moved since either."""
        place, step = (of.row.key.role, of.row.name), of.step or 0
        known = self._off_at_first.get(place)
        if known is None or known[1].step >= step:
            return
        first, before = self._off_at_first.pop(place)
        is_of_gradient = self._gradients_off.get((before.step, place[0], place[1].removeprefix("param.")))
        if first.ranks is None or is_of_gradient or not is_open(first.ranks.fault):
            return
        name = place[1].removeprefix("param.")
        fault = steps_of_weights.frozen(name, step, of.whole, of.held, first.ranks.parted, before)
        if fault is not None:
            say_first(first, fault)

    def taken(self) -> Sequence[tuple[TensorVerdict, MovedOfRole]]:
        """Of every role with a weight that is off, the first such row and all weights that moved: told once."""
        found: list[tuple[TensorVerdict, MovedOfRole]] = [
            (first, of_role) for of_role in self._moved.values()
            if (first := next((row for row, _ in of_role if row.verdict.diverges), None)) is not None
        ]  # fmt: skip
        self._moved.clear()
        return found

    def explain_slices(self, first: TensorVerdict, of_role: MovedOfRole) -> None:
        """Whether the optimizer keeps slices of all weights laid end to end, and which of them went wrong: what is said
        of each weight by itself follows from that.
        """
        step = first.key.step
        assert step is not None
        if any(self._gradients_off.get((step - 1, first.key.role, one.name)) for _, one in of_role):
            return
        ranks = of_role[0][1].held.ranks
        fault = flat_slices.of_the_step([one for _, one in of_role], step - 1, step, ranks)
        if fault is None:
            return
        for row, _ in of_role:
            if row.ranks is not None and row.ranks.fault is not None:
                row.ranks.fault = None
        say_first(first, fault)
