"""Findings put together: one per rule and link, the cause told from what is downstream of it, worst first. No numpy."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from replay_core.diagnose.finding import LINKS, SEVERITIES, Diagnosis, Finding, Skipped


@dataclass(frozen=True, slots=True)
class Chain:
    """What the rules say of each other: id -> ids that its finding makes look broken, and ids of mistakes that last."""

    explains: Mapping[str, Collection[str]]
    lasting: Collection[str]

    def _explained(self, cause: Finding, other: Finding) -> bool:
        """Whether a finding can be the cause of another: no later in the chain, no milder, and in one of its steps."""
        if other.id not in self.explains.get(cause.id, ()) or LINKS.index(cause.link) > LINKS.index(other.link):
            return False
        meet = not cause.steps or not other.steps or set(cause.steps) & set(other.steps) or cause.id in self.lasting
        # One rule may tell of a tensor and of the metric that follows from it.
        apart = cause.id != other.id or LINKS.index(cause.link) < LINKS.index(other.link)
        return apart and bool(meet) and SEVERITIES.index(cause.severity) <= SEVERITIES.index(other.severity)

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
        return sorted(out, key=_order)

    def updated(self, known: Diagnosis, fresh: Diagnosis) -> Diagnosis:
        """A diagnosis of a whole run with that of steps that came since."""
        checked = tuple(dict.fromkeys([*known.checked, *fresh.checked]))
        skipped = tuple(one for one in known.skipped if one.id not in checked)
        findings = self.ranked(merged([*known.findings, *fresh.findings]))
        return Diagnosis(tuple(findings), checked, skipped, tuple(dict.fromkeys([*known.notes, *fresh.notes])))


def _along(one: Finding) -> tuple[int, str]:
    return LINKS.index(one.link), one.id


def _order(one: Finding) -> tuple[bool, int, int, str]:
    return one.downstream_of is not None, SEVERITIES.index(one.severity), *_along(one)


def merged(found: Iterable[Finding]) -> list[Finding]:
    """One finding per id and link: the worst one, with the steps that show it as badly."""
    kept: dict[tuple[str, str], Finding] = {}
    for one in found:
        before = kept.setdefault((one.id, one.link), one)
        worse = one if SEVERITIES.index(one.severity) < SEVERITIES.index(before.severity) else before
        # An info of step 3 is no warning of step 3.
        steps = {step for each in (before, one) if each.severity == worse.severity for step in each.steps}
        kept[one.id, one.link] = replace(worse, steps=tuple(sorted(steps)))
    return list(kept.values())


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
    return Diagnosis(tuple(sorted(findings, key=_order)), tuple(sorted(checked)), skipped, tuple(notes))
