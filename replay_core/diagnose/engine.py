"""Runs the rules of `rules/`, and ranks what they find."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from replay_core.diagnose import rules as families
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Diagnosis, Finding, Skipped
from replay_core.diagnose.merging import Chain, merged, weighed
from replay_core.diagnose.rule import RULES, Rule, Skip
from replay_core.errors import RequestError, RldbgError
from replay_core.jobs import OnEvent, Progress, ignore


def rules() -> list[Rule]:
    """Every rule of the catalogue, in its order. A family of rules is a file of `rules/`.

    Raises:
        ValueError: a rule is not as it must be (`rule.rule`), or explains one that does not exist.
    """
    _registered()
    ids = {id for id, _ in RULES}
    for rule in RULES.values():
        if unknown := sorted({*rule.explains} - ids):
            raise ValueError(f"rule {rule.id}: it explains {unknown[0]}, which is no rule; rules are {sorted(ids)}")
    return [RULES[key] for key in sorted(RULES)]


@cache
def _registered() -> None:
    """Import every family, which registers its rules: a folder is looked through once, not three times a diagnosis."""
    for family in iter_modules(families.__path__):
        import_module(f"{families.__name__}.{family.name}")


def chain() -> Chain:
    """What the rules say of each other. Readings of one id, from a dump and from a log, speak as one."""
    explains: dict[str, list[str]] = {}
    for rule in rules():
        explains.setdefault(rule.id, []).extend(rule.explains)
    return Chain(explains, {rule.id for rule in rules() if rule.lasts})


class _Looking(Struct):
    """What the rules of one id met: how often they looked, and why they could not."""

    looked: int = 0
    steps: set[int | None] = field(default_factory=set)
    whys: dict[str, int] = field(default_factory=dict)

    def run(self, rule: Rule, subject: Any, has: Callable[[str], bool]) -> list[Finding]:
        missing = [need for need in rule.needs if not any(has(name) for name in need.split("|"))]
        try:
            if missing:
                raise Skip("needs " + ", ".join(map(in_words, missing)))
            found = rule.findings(subject)
        except Skip as skip:
            why = str(skip)
        except RldbgError as error:
            why = f"could not be read: {error.message}"
        except Exception as error:
            # One rule that trips over an odd file must not take the other forty with it; that it tripped is said.
            why = f"failed on this input: {type(error).__name__}: {error}"
        else:
            self.looked += 1
            return found
        self.whys[why] = self.whys.get(why, 0) + 1
        return []

    @property
    def why(self) -> str:
        """The two commonest reasons for not looking."""
        commonest = sorted(self.whys, key=lambda why: -self.whys[why])[:2]
        return "; ".join(commonest) or "the dump holds no batch of samples"


def diagnose(case: Case, only: Iterable[str] = (), on_event: OnEvent = ignore) -> Diagnosis:
    """Run the rules over a case.

    Args:
        only: ids of the rules to run; all where empty.

    Raises:
        RequestError: there is no rule of such an id.
        SelectionError: there is no such step.
    """
    chosen = chosen_rules(only)
    seen = {rule.id: _Looking() for rule in chosen}
    found: list[Finding] = []
    steps = len(case.steps())
    for done, batch in enumerate(case.batches()):
        on_event(Progress(min(done, steps), steps, f"diagnosing {batch.name}"))
        for rule in chosen:
            if rule.scope == "batch":
                looking, before = seen[rule.id], seen[rule.id].looked
                found += _at_step(looking.run(rule, batch, batch.has), batch)
                if looking.looked > before:
                    looking.steps.add(batch.step)
    for rule in chosen:
        looking = seen[rule.id]
        if rule.scope == "case":
            found += looking.run(rule, case, lambda _name: True)
        elif rule.scope == "signals" and case.signals is None:
            looking.whys["there is no log and no metrics"] = 1
        elif rule.scope == "signals":
            found += [one for log in case.signals.logs for one in looking.run(rule, log, log.has)]
    varying = {rule.id for rule in chosen if rule.varies}
    checked = tuple(id for id, looking in seen.items() if looking.looked)
    skipped = tuple(Skipped(id, looking.why) for id, looking in seen.items() if not looking.looked)
    rounded = [log.rounded for log in case.signals.logs if log.rounded] if case.signals else []
    notes = (*(f"not read: {what}" for what in case.unreadable), *case.repeated, *rounded, *case.run.notes)
    # What a log shows in steps of its own is no part of the steps whose samples were looked at.
    counted = {id: looking.steps for id, looking in seen.items()}
    told = [
        weighed(one, len(counted[one.id]) if counted[one.id].issuperset(one.steps) else 0, one.id in varying)
        for one in merged(found)
    ]
    return Diagnosis(tuple(chain().ranked(told)), checked, skipped, tuple(dict.fromkeys(notes)))


def _at_step(found: list[Finding], batch: StepBatch) -> list[Finding]:
    """The findings, each with the step of the batch that shows it."""
    return [one if one.steps or batch.step is None else replace(one, steps=(batch.step,)) for one in found]


def chosen_rules(only: Iterable[str] = ()) -> list[Rule]:
    """The rules of these ids; all of them where none is named.

    Raises:
        RequestError: there is no rule of such an id.
    """
    catalogue = rules()
    asked = [name.upper() for name in only]
    known = list(dict.fromkeys(rule.id for rule in catalogue))
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise RequestError(
            f"there is no rule {unknown[0]}", expected=", ".join(known), hint="rldbg diagnose --explain D01"
        )
    return [rule for rule in catalogue if not asked or rule.id in asked]


def in_words(need: str) -> str:
    """What a rule needs, for people: `event:` asks for lines of a log."""
    kinds = [name.removeprefix("event:").replace("_", " ") for name in need.split("|") if name.startswith("event:")]
    names = [name for name in need.split("|") if not name.startswith("event:")]
    return " or ".join([*names, *(["lines of a log that tell of " + " or ".join(kinds)] if kinds else [])])
