"""What a diagnosis says, as the screen shows it: lines of the findings pane, a mark per step, the answer. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct, field

from replay_core.regexes import regex
from tui_debugger import format as fmt

if TYPE_CHECKING:
    from replay_core.documents.diagnosis import DiagnosisDocument, FindingEntry, SeriesEntry

#: Worst first.
SEVERITIES = ("error", "warning", "info")
#: The word a severity is shown by, and its colour's name.
WORDS = {"error": ("ERROR", "first"), "warning": ("WARN", "missing"), "info": ("INFO", "muted")}
#: The mark of a step: a shape and a letter, since not everybody sees the colour.
MARKS = {"error": ("✗E", "first"), "warning": ("▲W", "missing"), "": ("✓", "muted")}

_STEP = regex(r"\bstep (\d+)\b")


class Health(Struct, eq=False):
    """The diagnosis of the open run: what is known of it so far."""

    document: DiagnosisDocument | None = None
    doing: str = ""
    """What runs now: `step 3 (2 of 9)`; empty while nothing does."""
    trouble: str = ""
    """Why there is no diagnosis, where it failed."""
    took_s: float = 0.0
    behind: list[int | None] = field(default_factory=list)
    """Steps diagnosed one by one as they came: rules over several steps have not seen them."""

    @property
    def findings(self) -> list[FindingEntry]:
        return self.document["findings"] if self.document else []

    @property
    def series(self) -> list[SeriesEntry]:
        return self.document["series"] if self.document else []

    @property
    def worst(self) -> FindingEntry | None:
        """The first finding that is worth a warning."""
        return next((one for one in causes(self.findings) if one["severity"] != "info"), None)

    def answer(self) -> fmt.Answer | None:
        """What the top of the screen says of it; None where nothing is worth a warning."""
        one = self.worst
        if one is None:
            return None
        word, token = WORDS[one["severity"]]
        facts = [said for said in (in_steps(one["steps"]), _others(self.findings)) if said]
        return fmt.Answer(word, token, f"{one['id']} {one['claim']}", facts, [f"cause: {one['cause']}"], is_claim=True)

    def clean(self) -> fmt.Answer | None:
        """What the top of the screen says where rules looked and found nothing; None where none did."""
        if self.document is None or not self.document["checked"]:
            return None
        told = next((f"{one['id']} {one['claim']}" for one in causes(self.findings)), "")
        notes = [f"worth knowing: {told}"] if told else []
        return fmt.Answer("CLEAN", "same", self.note(), [], notes, is_claim=True)

    def note(self) -> str:
        """One line of how it stands, where nothing is wrong or nothing is known yet."""
        if self.doing and self.document is None:
            return f"diagnosing: {self.doing}"
        if self.trouble:
            return f"not diagnosed: {self.trouble}"
        if self.document is None:
            return ""
        looked, skipped = len(self.document["checked"]), len(self.document["skipped"])
        if not looked:
            return f"nothing could be diagnosed: {skipped} rules skipped (7 says why)"
        return f"no warning and no error in {looked} rules, {skipped} skipped (7)"

    def at_steps(self) -> dict[int | None, tuple[str, int]]:
        """Severity and number of warnings and errors of every step that was looked at; none of them is ""."""
        if self.document is None or not self.document["checked"]:
            return {}
        found: dict[int | None, tuple[str, int]] = dict.fromkeys(self.document["steps"], ("", 0))
        for one in causes(self.findings):
            if one["severity"] == "info":
                continue
            steps: list[int | None] = [*one["steps"]] or [one["where"]["step"]]
            for step in steps:
                severity, count = found.get(step, ("", 0))
                found[step] = (worse(severity, one["severity"]), count + 1)
        return found


def worse(one: str, other: str) -> str:
    """The worse of two severities; "" is better than any."""
    return min(one, other, key=lambda each: SEVERITIES.index(each) if each else len(SEVERITIES))


def causes(findings: Sequence[FindingEntry]) -> list[FindingEntry]:
    """The findings that no other explains, worst first."""
    alone = (one for one in findings if one["echo_of"] is None)
    return sorted(alone, key=lambda one: SEVERITIES.index(one["severity"]))


def in_steps(steps: Sequence[int]) -> str:
    """`step 3`, `steps 0-3`, `9 steps from 2 on`."""
    if not steps:
        return ""
    if len(steps) == 1:
        return f"step {steps[0]}"
    if list(steps) == list(range(steps[0], steps[-1] + 1)):
        return f"steps {steps[0]}-{steps[-1]}"
    return "steps " + ", ".join(map(str, steps)) if len(steps) < 5 else f"{len(steps)} steps from {steps[0]} on"


def _others(findings: Sequence[FindingEntry]) -> str:
    """`and 2 more warnings (7)`"""
    counts = Counter(one["severity"] for one in causes(findings)[1:])
    parts = [f"{counts[level]} {level}{'s' * (counts[level] > 1)}" for level in ("error", "warning") if counts[level]]
    return f"and {' and '.join(parts)} more (7)" if parts else ""


# ── lines of the findings pane ───────────────────────────────────────────────────────────────────


class Line(NamedTuple):
    """A line of the findings pane. `kind`: finding, problem, downstream, skipped, why, clean, note."""

    kind: str
    text: str
    severity: str = "info"
    where: str = ""
    depth: int = 0
    finding: FindingEntry | None = None
    fold: str = ""
    """Name of what it folds, or lies folded under."""


def lines(
    health: Health, problems: Sequence[Mapping[str, Any]], opened: Collection[str] = (), *, beside: str = ""
) -> list[Line]:
    """What is wrong, worst first: findings with what is downstream folded under them, problems met while reading,
    and what could not be looked at. `opened` are the folds that are open. `beside`: two are compared, of which this
    alone is diagnosed.
    """
    downstream: dict[str, list[FindingEntry]] = {}
    for one in health.findings:
        if one["echo_of"] is not None:
            downstream.setdefault(str(one["echo_of"]), []).append(one)
    by_level: dict[str, list[Line]] = {level: [] for level in SEVERITIES}
    for one in causes(health.findings):
        listed = by_level[one["severity"]]
        listed.append(_of_finding(one))
        under = downstream.pop(one["id"], [])
        if under:
            names = ", ".join(dict.fromkeys(str(each["id"]) for each in under))
            listed.append(Line("downstream", f"{len(under)} downstream of it: {names}", depth=1, fold=one["id"]))
            if one["id"] in opened:
                listed += [_of_finding(each, depth=2, fold=one["id"]) for each in under]
    for problem in problems:
        severity = str(problem.get("severity") or "warning")
        by_level[severity].append(Line("problem", str(problem.get("claim")), severity, str(problem.get("where") or "")))
    found = [line for level in SEVERITIES for line in by_level[level]]
    return [*_state(health, by_level, beside), *found, *_skipped(health, opened)]


def _state(health: Health, by_level: Mapping[str, Sequence[Line]], beside: str) -> list[Line]:
    if (health.doing and health.document is None) or health.trouble:
        return [Line("note", health.note(), "warning" if health.trouble else "info")]
    document = health.document
    if document is None:
        return []
    if not document["checked"]:
        return [Line("note", health.note(), "warning")]
    if by_level["error"] or by_level["warning"]:
        return []
    if beside:
        # Clean is what it is called by whom nobody asked about the other.
        return [Line("note", f"{beside} by itself: no warning and no error in {len(document['checked'])} rules")]
    return [Line("clean", f"no warning and no error in {len(document['checked'])} rules")]


def _skipped(health: Health, opened: Collection[str]) -> list[Line]:
    document = health.document
    if document is None:
        return []
    listed = []
    if health.behind:
        text = f"{_count(health.behind, 'step', 'steps')} looked at one by one as they came: E diagnoses the whole run"
        listed.append(Line("note", text))
    skipped = document["skipped"]
    if skipped:
        text = f"{_count(skipped, 'rule', 'rules')} skipped, {len(document['checked'])} looked"
        listed.append(Line("skipped", text, fold="skipped"))
    if "skipped" in opened:
        by_reason: dict[str, list[str]] = {}
        for one in skipped:
            by_reason.setdefault(str(one["why"]), []).append(str(one["id"]))
        listed += [Line("why", f"{' '.join(ids)}: {why}", depth=1, fold="skipped") for why, ids in by_reason.items()]
    return listed


def _of_finding(one: FindingEntry, depth: int = 0, fold: str = "") -> Line:
    where = one["where"]
    place = in_steps(one["steps"]) or fmt.scope(where)
    tensor = where.get("tensor") or ""
    if where.get("line") is not None:
        place, tensor = f"line {where['line']}", ""
    return Line(
        "finding", f"{one['id']} {one['claim']}", one["severity"], " · ".join(part for part in (place, tensor) if part),
        depth, one, fold,
    )  # fmt: skip


def _count(things: Sequence[Any], one: str, many: str) -> str:
    return f"{len(things)} {one if len(things) == 1 else many}"


def problem_step(claim: str) -> int | None:
    """The step that a problem's sentence speaks of."""
    said = _STEP.search(claim)
    return int(said.group(1)) if said else None
