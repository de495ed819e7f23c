"""Findings put together: one per rule and link, the cause told from what is downstream of it, worst first. No numpy."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from replay_core.diagnose.finding import LINKS, SEVERITIES, Diagnosis, Finding, Skipped
from replay_core.diagnose.log_steps import severity_of

#: Share of steps below which something is an odd step's.
RARE = 0.25
#: What a run comes to whatever is wrong with it: responses that are cut, degenerate or of another length, an entropy, a
#: ratio, a gradient, a KL or a reward that leaves its range.
SYMPTOMS = frozenset({"D20", "D24", "D25", "D26", "L02", "L08", "L09", "L10"})
#: Steps that are a habit of a run, where they are fewer than half.
HABIT = 4
#: How many times the steps of a symptom those of another finding are, before that is read first.
MORE_STEPS = 2
#: Of these, what a gradient comes to: what a run comes to before it may be behind it.
GRADIENTS = frozenset({"L02"})
#: What an info of explains away: a loss of 0 by construction.
NORMAL = frozenset({"D02"})
#: How the cause of an info ends that names what was recomputed, and agrees.
FINE = "nothing is wrong"
#: What costs time alone: read last of what is wrong.
SPEED = frozenset({"D32", "D33", "D37", "L05", "L100"})
#: Findings that a computation was made again and came out as one known mistake makes it, in most steps.
PROOFS = frozenset({"D04", "D08", "D28", "D50", "D52", "D59", "D92", "D93"})


class Chain(Struct, frozen=True):
    """What the rules say of each other: id -> ids that its finding makes look broken, and ids of mistakes that last."""

    explains: Mapping[str, Collection[str]]
    lasting: Collection[str]

    def _explained(self, cause: Finding, other: Finding) -> bool:
        """Whether a finding can be the cause of another: no later in the chain, no milder, and in one of its steps."""
        if other.id not in self.explains.get(cause.id, ()):
            return False
        # What a run comes to over its steps has no place in a step's chain: it may be behind any link of later steps.
        # A mistake that lasts and began in an earlier step may be, too: NaN weights write other tokens.
        earlier = cause.id in self.lasting and cause.steps and other.steps and cause.steps[0] < other.steps[0]
        if cause.link != "trend" and not earlier and LINKS.index(cause.link) > LINKS.index(other.link):
            return False
        # Of two things a run comes to, the one that begins first.
        both = other.link == "trend" or other.id in GRADIENTS
        if cause.link == "trend" and both and cause.steps and other.steps and cause.steps[0] > other.steps[0]:
            return False
        meet = not cause.steps or not other.steps or set(cause.steps) & set(other.steps) or cause.id in self.lasting
        # One rule may tell of a tensor and of the metric that follows from it.
        apart = cause.id != other.id or LINKS.index(cause.link) < LINKS.index(other.link)
        # One odd step of ten is no reason for what holds in eight; for what is told of that step alone it is.
        own = bool(other.steps) and set(other.steps) <= set(cause.steps)
        odd = cause.share < RARE and other.share >= 0.5 and not own
        return not odd and apart and bool(meet) and SEVERITIES.index(cause.severity) <= SEVERITIES.index(other.severity)

    def ranked(self, found: Iterable[Finding]) -> list[Finding]:
        """Every finding, those that another explains marked with its id: causes first, worse before milder, earlier
        links before later ones. An explanation is at least as bad as what it explains; of two that explain each other
        the one that comes first in the chain is the cause.
        """
        every = list(found)
        causes = sorted((one for one in every if one.severity != "info"), key=_along)
        out = []
        for one in every:
            cause = next((
                each for each in causes
                if self._explained(each, one) and not (self._explained(one, each) and _along(one) < _along(each))
            ), None)  # fmt: skip
            out.append(replace(one, downstream_of=None if cause is None else cause.id))
        return _worst_first(out)

    def updated(self, known: Diagnosis, fresh: Diagnosis) -> Diagnosis:
        """A diagnosis of a whole run with that of steps that came since."""
        checked = tuple(dict.fromkeys([*known.checked, *fresh.checked]))
        skipped = tuple(one for one in known.skipped if one.id not in checked)
        findings = self.ranked(merged([*known.findings, *fresh.findings]))
        return Diagnosis(tuple(findings), checked, skipped, tuple(dict.fromkeys([*known.notes, *fresh.notes])))


def _along(one: Finding) -> tuple[int, str]:
    return LINKS.index(one.link), one.id


def _worst_first(found: Iterable[Finding]) -> list[Finding]:
    """Causes before what they explain, worse before milder, earlier links before later ones.

    Of two that are as bad a symptom goes behind what began earlier and shows in twice as many steps.
    A mistake that was proved goes before symptoms, however grave: those say that something is wrong, and it says what.
    What costs time alone goes behind what is wrong.
    """
    every = list(found)
    is_proved = any(_is_proof(one) for one in every)
    # How fast a run is says nothing of what it learns.
    is_wrong = any(one.id not in SPEED and one.severity != "info" and one.downstream_of is None for one in every)

    def order(one: Finding) -> tuple[bool, float, bool, int, int, str]:
        often = 0 if one.share >= 0.5 else 1 if one.share >= RARE else 2
        grave = float(SEVERITIES.index(one.severity))
        if is_proved and one.id in SYMPTOMS:
            grave = max(grave, 0.5)
        if is_wrong and one.id in SPEED:
            grave = max(grave, 1.5)
        # What only says that a figure is as it is meant to be is read last.
        is_normal = one.severity == "info" and (one.id in NORMAL or one.cause.endswith(FINE))
        late = one.id in SYMPTOMS and any(_holds_longer(other, one) for other in every)
        return one.downstream_of is not None, grave + is_normal, late, often, *_along(one)

    return sorted(every, key=order)


def _holds_longer(other: Finding, symptom: Finding) -> bool:
    """Whether a finding of the same severity, no symptom itself, began earlier and shows in twice as many steps."""
    if other.severity != symptom.severity or other.id in SYMPTOMS | SPEED or other.downstream_of is not None:
        return False
    earlier = bool(other.steps) and bool(symptom.steps) and other.steps[0] <= symptom.steps[0]
    return earlier and len(other.steps) >= MORE_STEPS * len(symptom.steps)


def _is_proof(one: Finding) -> bool:
    return one.id in PROOFS and one.severity == "error" and one.share >= 0.5 and one.downstream_of is None


def merged(found: Iterable[Finding]) -> list[Finding]:
    """One finding per id and link: the worst one, with the steps that show it as badly. Of what only names a formula
    that agrees, that of most steps: another may agree in a few of them by chance.
    """
    kept: dict[tuple[str, str], Finding] = {}
    named: dict[tuple[str, str], dict[str, tuple[int, Finding]]] = {}
    for one in found:
        if one.severity == "info" and one.cause.endswith(FINE):
            each = named.setdefault((one.id, one.link), {})
            count, first = each.get(one.claim, (0, one))
            each[one.claim] = count + max(len(one.steps), 1), first
        before = kept.setdefault((one.id, one.link), one)
        worse = one if _is_worse(one, before) else before
        # An info of step 3 is no warning of step 3.
        steps = {step for each in (before, one) if each.severity == worse.severity for step in each.steps}
        looked = one.looked + before.looked if one is not before else one.looked
        # A log shows steps that no samples were looked at in: more than all there are is no count of them.
        looked = 0 if len(steps) > looked else looked
        kept[one.id, one.link] = replace(worse, steps=tuple(sorted(steps)), looked=looked)
    for key, claims in named.items():
        if kept[key].severity == "info" and kept[key].cause.endswith(FINE):
            most = max(claims.values(), key=lambda each: each[0])[1]
            kept[key] = replace(most, steps=kept[key].steps, looked=kept[key].looked)
    return list(kept.values())


def _is_worse(one: Finding, before: Finding) -> bool:
    """The worst step's evidence stands for all: the more severe, else the one further past what was expected."""
    if one.severity != before.severity:
        return SEVERITIES.index(one.severity) < SEVERITIES.index(before.severity)
    a, b = (each.evidence[0] if each.evidence else None for each in (one, before))
    if a is None or b is None or a.name != b.name or not (a.expected or "").startswith(("<", ">")):
        return False
    if not isinstance(a.value, (int, float)) or not isinstance(b.value, (int, float)):
        return False
    return a.value > b.value if (a.expected or "").startswith("<") else a.value < b.value


def weighed(one: Finding, looked: int, varies: bool) -> Finding:
    """A merged finding with how many of the steps looked at show it. One that varies from step to step is as bad as it
    says in half of them, milder in a quarter (4 and more), else worth knowing.
    """
    if looked < 2 or not one.steps:
        return one
    bad = len(one.steps)
    severity = one.severity
    if varies:
        often = severity_of(bad, looked)
        if often == "warning" and bad < HABIT:
            often = "info"  # chance has a few odd steps in every run
        milder = SEVERITIES.index(severity) + SEVERITIES.index(often)
        severity = SEVERITIES[min(milder, len(SEVERITIES) - 1)]
    return replace(one, severity=severity, looked=looked)


def together(named: Sequence[tuple[str, Diagnosis]]) -> Diagnosis:
    """Runs of one folder, diagnosed apart, as one diagnosis: what is said of each carries its name, and a rule is
    skipped if no run let it look.
    """
    findings = [replace(one, claim=f"{name}: {one.claim}") for name, each in named for one in each.findings]
    checked = {id for _, each in named for id in each.checked}
    whys: dict[str, dict[str, None]] = {}
    for _, each in named:
        for one in each.skipped:
            if one.id not in checked:
                whys.setdefault(one.id, {})[one.why] = None
    notes = [f"{len(named)} runs of this folder were diagnosed apart: {', '.join(name for name, _ in named)}"]
    notes += [f"{name}: {note}" for name, each in named for note in each.notes]
    skipped = tuple(Skipped(id, "; ".join(why)) for id, why in whys.items())
    return Diagnosis(tuple(_worst_first(findings)), tuple(sorted(checked)), skipped, tuple(notes))
