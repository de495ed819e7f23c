"""Runs the rules, ranks what they find, and tells a cause from its echoes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from replay_core.diagnose.batch import Batch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import LINKS, SEVERITIES, Diagnosis, Finding, Skipped
from replay_core.diagnose.rule import RULES, Rule, Skip
from replay_core.errors import RequestError, RldbgError
from replay_core.jobs import OnEvent, Progress, ignore

#: The families of rules, by module: importing one registers its rules.
FAMILIES: tuple[str, ...] = (
    "completeness",
    "numerics",
    "tokens",
    "rewards",
    "groups",
    "masks",
    "packing",
    "logprobs",
    "routing",
    "staleness",
    "kl",
    "ratio",
    "loss",
    "gradient",
    "memory",
    "pairs",
    "log_groups",
    "log_masks",
    "log_loss",
    "log_numerics",
    "log_policy",
    "log_mismatch",
    "log_compile",
    "log_memory",
    "log_time",
)

#: What a finding makes look broken further down the chain: no second opinion, only its echo.
EXPLAINS: dict[str, tuple[str, ...]] = {
    "D21": ("D04", "D06", "D09", "D14", "D24", "D28", "D23", "D25", "D26", "D21", "L02"),
    "D26": ("D18", "D19", "D20"),
    "D20": ("D01", "D02", "D03", "D07", "D23", "L01"),
    "D01": ("D02", "D03", "D04", "D23", "D28", "L01"),
    "D03": ("D01", "D02", "D04", "D23", "L01"),
    "D05": ("D01", "D03", "D04", "D24"),
    "D06": ("D04", "D05", "D21", "D23", "D28"),
    "D04": ("D02", "D23", "D28"),
    "D07": ("D01", "D02", "D03", "D19", "D23", "D28", "L01"),
    "D18": ("D07", "D09", "D17", "D19", "D28"),
    "D19": ("D20", "D07"),
    "D17": ("D16", "D09", "D14", "D24"),
    "D08": ("D09", "D12", "D14", "D15", "D24", "D29", "D35"),
    "D10": ("D09", "D11", "D12", "D14", "D15", "D24", "D25"),
    "D11": ("D09", "D12", "D14", "D24"),
    "D12": ("D09", "D13", "D14", "D24", "D31"),
    "D16": ("D09", "D12", "D13", "D14", "D15", "D24"),
    "D30": ("D09", "D14"),
    "D14": ("D24",),
    "D09": ("D24",),
    "D23": ("L01",),
    "L03": ("D21", "D22"),
}

#: Mistakes of a setting or a line of code, made in every step, whether or not a step shows them clearly.
LASTING = frozenset({"D05", "D08", "D10", "D11", "D12", "D16", "D17", "D18", "D19"})


def rules() -> list[Rule]:
    """Every rule of the catalogue, in its order."""
    for family in FAMILIES:
        import_module(f"replay_core.diagnose.{family}")
    return [RULES[key] for key in sorted(RULES)]


@dataclass(slots=True)
class _Seen:
    """What one rule met: how often it looked, and why it could not."""

    looked: int = 0
    whys: dict[str, int] = field(default_factory=dict)


def diagnose(case: Case, only: Iterable[str] = (), on_event: OnEvent = ignore) -> Diagnosis:
    """Run the rules over a case.

    Args:
        only: ids of the rules to run; all where empty.

    Raises:
        RequestError: there is no rule of such an id.
        SelectionError: there is no such step.
    """
    chosen = chosen_rules(only)
    seen: dict[str, _Seen] = {rule.id: _Seen() for rule in chosen}
    found: list[Finding] = []
    steps = len(case.steps())
    for done, batch in enumerate(case.batches()):
        on_event(Progress(min(done, steps), steps, f"diagnosing {batch.name}"))
        for rule in chosen:
            if rule.scope == "batch":
                found += _run(rule, batch, batch.has, seen[rule.id])
    for rule in chosen:
        if rule.scope == "signals":
            if case.signals is None:
                seen[rule.id].whys["there is no log and no metrics"] = 1
            else:
                found += _run(rule, case.signals, case.signals.has, seen[rule.id])
        elif rule.scope == "case":
            found += _run(rule, case, lambda _name: True, seen[rule.id])
    checked = tuple(dict.fromkeys(rule.id for rule in chosen if seen[rule.id].looked))
    skipped = tuple(Skipped(id, _why(met)) for id, met in seen.items() if not met.looked)
    notes = (*(f"not read: {what}" for what in case.unreadable), *case.repeated, *case.run.notes)
    return Diagnosis(tuple(ranked(merged(found))), checked, skipped, tuple(dict.fromkeys(notes)))


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


def _run(rule: Rule, subject: Any, has: Callable[[str], bool], seen: _Seen) -> list[Finding]:
    missing = [need for need in rule.needs if not any(has(name) for name in need.split("|"))]
    if missing:
        why = "needs " + ", ".join(map(in_words, missing))
        seen.whys[why] = seen.whys.get(why, 0) + 1
        return []
    try:
        found = list(rule.check(subject))
    except Skip as skip:
        seen.whys[str(skip)] = seen.whys.get(str(skip), 0) + 1
        return []
    except RldbgError as error:
        why = f"could not be read: {error.message}"
        seen.whys[why] = seen.whys.get(why, 0) + 1
        return []
    except Exception as error:
        # One rule that trips over an odd file must not take the other forty with it; that it tripped is said.
        why = f"failed on this input: {type(error).__name__}: {error}"
        seen.whys[why] = seen.whys.get(why, 0) + 1
        return []
    seen.looked += 1
    step = subject.step if isinstance(subject, Batch) else None
    return [one if one.steps or step is None else replace(one, steps=(step,)) for one in found]


def in_words(need: str) -> str:
    """What a rule needs, for people: `event:` asks for lines of a log."""
    parts = [
        "lines of a log that tell of " + " or ".join(part.removeprefix("event:").replace("_", " ").split(","))
        if part.startswith("event:")
        else part
        for part in need.split("|")
    ]
    return " or ".join(parts)


def _why(seen: _Seen) -> str:
    if seen.whys:
        return "; ".join(sorted(seen.whys, key=lambda why: -seen.whys[why])[:2])
    return "the dump holds no batch of samples"


def merged(found: Iterable[Finding]) -> list[Finding]:
    """One finding per id and link: the worst one, with the steps of all."""
    kept: dict[tuple[str, str], Finding] = {}
    for one in found:
        key = (one.id, one.link)
        before = kept.get(key)
        if before is None:
            kept[key] = one
            continue
        worse = one if SEVERITIES.index(one.severity) < SEVERITIES.index(before.severity) else before
        # The steps are those that show it as badly: an info of step 3 is no warning of step 3.
        same = [each for each in (before, one) if each.severity == worse.severity]
        steps = tuple(sorted({step for each in same for step in each.steps}))
        kept[key] = replace(worse, steps=steps)
    return list(kept.values())


def ranked(found: list[Finding]) -> list[Finding]:
    """Causes before echoes, worse before milder, earlier links before later ones."""
    marked = _echoes(found)
    return sorted(
        marked,
        key=lambda one: (
            one.echo_of is not None,
            SEVERITIES.index(one.severity),
            LINKS.index(one.link),
            one.id,
        ),
    )


def _echoes(found: list[Finding]) -> list[Finding]:
    """Findings that another explains carry its id. An explanation is at least as bad as what it explains."""
    causes = sorted((one for one in found if one.severity != "info"), key=lambda one: (LINKS.index(one.link), one.id))
    out = []
    for one in found:
        cause = next((each for each in causes if _explains(each, one) and not _is_mutual(each, one)), None)
        out.append(one if cause is None else replace(one, echo_of=cause.id))
    return out


def _explains(cause: Finding, echo: Finding) -> bool:
    """Whether a finding can be the cause of another: no later in the chain, no milder, and in one of its steps."""
    if echo.id not in EXPLAINS.get(cause.id, ()) or LINKS.index(cause.link) > LINKS.index(echo.link):
        return False
    meet = not cause.steps or not echo.steps or bool(set(cause.steps) & set(echo.steps)) or cause.id in LASTING
    # One rule may tell of a tensor and of the metric that follows from it.
    other = cause.id != echo.id or LINKS.index(cause.link) < LINKS.index(echo.link)
    return other and meet and SEVERITIES.index(cause.severity) <= SEVERITIES.index(echo.severity)


def _is_mutual(cause: Finding, echo: Finding) -> bool:
    """Two that explain each other: the one that comes first stays the cause."""
    return _explains(echo, cause) and (LINKS.index(echo.link), echo.id) < (LINKS.index(cause.link), cause.id)
