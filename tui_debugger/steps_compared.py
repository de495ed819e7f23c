"""What is known of every step of a pair: what its comparison came to, or that it was not compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from tui_debugger import format as fmt

if TYPE_CHECKING:
    from replay_core.documents.comparison import ComparisonDocument, StepEntry

NOT_COMPARED = "not compared"
#: Why a step that one run alone has cannot be compared.
ALONE = {"a": "only in a", "b": "only in b"}


class StepsCompared(Struct, eq=False):
    """The steps of two runs. A comparison that was begun anew, or is judged by another tolerance, begins another."""

    asked: tuple[int, ...] = ()
    """The steps both runs have, where they are compared one by one; empty where there is one comparison."""
    alone: dict[int, str] = field(default_factory=dict)
    """Step -> why it cannot be compared: `only in a`, `only in b`."""
    found: dict[int | None, StepEntry] = field(default_factory=dict)
    doing: str = ""
    """What is compared behind the screen now: `step 3`, and how far."""

    @classmethod
    def of_runs(cls, a: Sequence[int | None], b: Sequence[int | None]) -> StepsCompared:
        """Of two runs by their steps; there is nothing to compare one by one where they share no number."""
        mine, theirs = ([step for step in steps if step is not None] for steps in (a, b))
        shared = tuple(step for step in mine if step in set(theirs))
        if not shared:
            return cls()
        alone = {step: ALONE["a"] for step in mine if step not in shared}
        return cls(shared, alone | {step: ALONE["b"] for step in theirs if step not in shared})

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> StepsCompared:
        """As a saved comparison has them."""
        known = {one["step"]: one for one in document.get("steps") or []}
        alone = {step: one["why"] for step, one in known.items() if one["why"] in ALONE.values()}
        asked = tuple(step for step in known if step not in alone)
        return cls(asked, alone, {step: known[step] for step in asked if known[step]["verdict"] or known[step]["why"]})

    def again(self) -> StepsCompared:
        """The same steps, none of them compared."""
        return StepsCompared(self.asked, self.alone)

    def take(self, step: int | None, document: ComparisonDocument, word: str | None = None) -> None:
        """Keep what the comparison of a step came to. `word`: what it comes to, where more than its tensors says so."""
        first = document["first_divergence"]
        self.found[step] = {
            "step": step,
            "verdict": word or fmt.comparison_answer(document).word,
            "counts": document["counts"],
            "first": first and first["name"],
            "why": None,
        }

    def take_failure(self, step: int | None, why: str) -> None:
        self.found[step] = _unknown(step, why)

    def said(self, step: int | None) -> str:
        """What a line says of the step: `DIFF`, `not compared`, `only in a`; empty where nobody asked for it."""
        if (entry := self.found.get(step)) is not None:
            return entry["verdict"] or NOT_COMPARED
        if step is not None and step in self.alone:
            return self.alone[step]
        return NOT_COMPARED if self.asked else ""

    @property
    def verdicts(self) -> dict[int | None, str]:
        return {step: entry["verdict"] for step, entry in self.found.items() if entry["verdict"]}

    @property
    def open(self) -> list[int]:
        """Steps nobody has compared yet."""
        return [step for step in self.asked if step not in self.found]

    @property
    def diverging(self) -> list[int | None]:
        return sorted(
            (s for s, word in self.verdicts.items() if word in fmt.DIVERGING), key=lambda s: (s is None, s or 0)
        )

    def progress(self) -> str:
        """How far, and what came of it, in one phrase; empty where there is one step or none."""
        count = len(self.asked)
        if count + len(self.alone) < 2:
            return ""
        done, apart = sum(step in self.verdicts for step in self.asked), len(self.diverging)
        if done < count:
            now = f", now {self.doing}" if self.doing else ""
            return f"{done} of {count} steps compared{now}"
        rest = f" · {len(self.alone)} on one side only" if self.alone else ""
        if not apart:
            return f"{fmt.plural(count, 'step')} compared: none diverges{rest}"
        if apart == count:
            return f"all {count} steps diverge{rest}" if count > 1 else f"1 step diverges{rest}"
        return f"{apart} of {count} steps diverge{'s' * (apart == 1)}{rest}"

    def entries(self) -> list[StepEntry]:
        """Every step of the two, as a document has them; empty where they were not compared step by step."""
        steps = sorted((*self.asked, *self.alone))
        return [self.found.get(step) or _unknown(step, self.alone.get(step)) for step in steps]


def _unknown(step: int | None, why: str | None) -> StepEntry:
    return {"step": step, "verdict": None, "counts": None, "first": None, "why": why}
