"""A rule: a small pure function with declared inputs. Registering it is all it takes to be run and documented.

    @rule("D18", "pad tokens are in the loss", link="masks", scope="batch",
          needs=("tokens", "mask"), explains=("D07", "D19"), source="...")
    def pads_in_loss(batch: StepBatch) -> Finding | None: ...

A rule returns its finding, or yields several; nothing where all is well. One that finds while looking that it cannot
judge raises `Skip`. One id may be told from a dump and from a log: both stand in one file of `rules/`, beside the
thresholds they share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from replay_core.diagnose.batch import WORDS
from replay_core.diagnose.finding import LINKS, Finding
from replay_core.diagnose.signal_names import SIGNALS
from replay_core.dumps.log_events import KINDS
from replay_core.naming import MEANINGS

#: What a rule is given: one step's samples (`StepBatch`), the series of one run (`RunLog`), or all there is (`Case`).
Scope = Literal["batch", "signals", "case"]

#: What `needs` may name, by scope. A log's warnings are events of their own kind.
KNOWN: dict[Scope, frozenset[str]] = {
    "batch": frozenset(WORDS) | frozenset(MEANINGS),
    "signals": frozenset(SIGNALS) | {f"event:{kind}" for kind in (*KINDS, "warning")},
    "case": frozenset(),
}

Check = Callable[[Any], Iterable[Finding] | Finding | None]
T = TypeVar("T")


class Skip(Exception):  # noqa: N818 - it is no error, it is an answer
    """The rule cannot judge this input; the message says why, and what it would need."""


class Rule(Struct, frozen=True):
    """One rule of the catalogue.

    `needs` are canonical names and words of a batch (scope batch) or signals and events (scope signals) without which
    the rule is skipped; an entry `a|b` is met by either. `explains` are ids further down the chain that this finding
    makes look broken. A mistake that `lasts` is one of a setting or a line of code, made in every step, whether or not
    a step shows it clearly. What `varies` is normal in single steps: it is told by the share of steps that show it.
    `explain` is the function's docstring: formula, threshold, what is normal.
    """

    id: str
    title: str
    link: str
    scope: Scope
    needs: tuple[str, ...]
    explains: tuple[str, ...]
    lasts: bool
    varies: bool
    source: str
    check: Check
    explain: str

    def findings(self, subject: Any) -> list[Finding]:
        """What the rule finds, under its id, link and source. A function of several rules names the id of each."""
        found = self.check(subject)
        return [
            replace(one, id=self.id, link=one.link or self.link, source=self.source)
            for one in ([found] if isinstance(found, Finding) else found or ())
            if one.id in ("", self.id)
        ]


#: Every rule by id and scope, in the order of registration.
RULES: dict[tuple[str, Scope], Rule] = {}


def rule(
    id: str, title: str, *, link: str, scope: Scope, source: str, needs: tuple[str, ...] = (),
    explains: tuple[str, ...] = (), lasts: bool = False, varies: bool = False,
) -> Callable[[Check], Check]:  # fmt: skip
    """Register a rule.

    Raises:
        ValueError: the id is taken in this scope, the scope, the link or a need is unknown, or the function has no
            docstring. The message names the rule, and what it may be.
    """

    def register(check: Check) -> Check:
        if scope not in KNOWN:
            raise ValueError(f"rule {id}: there is no scope {scope!r}; scopes are {', '.join(KNOWN)}")
        if (id, scope) in RULES:
            raise ValueError(f"rule {id}: ids are unique within a scope, and {scope} has one of that id")
        if link not in LINKS:
            raise ValueError(f"rule {id}: there is no link {link!r}; links are {', '.join(LINKS)}")
        for need in needs:
            for name in need.split("|"):
                if name not in KNOWN[scope]:
                    known = ", ".join(sorted(KNOWN[scope])) or "none at all"
                    raise ValueError(f"rule {id}: nothing of scope {scope} is called {name!r}; needs may be {known}")
        if not check.__doc__:
            raise ValueError(f"rule {id}: a rule explains itself, and {check.__name__} has no docstring")
        RULES[id, scope] = Rule(id, title, link, scope, needs, explains, lasts, varies, source, check, check.__doc__)
        return check

    return register


def skip_if(cannot: object, why: str) -> None:
    """Raise `Skip` where the rule cannot judge."""
    if cannot:
        raise Skip(why)


def given(value: T | None) -> T:
    """What the rule's `needs` promised."""
    assert value is not None
    return value
