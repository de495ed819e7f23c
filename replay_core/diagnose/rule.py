"""A rule: a small pure function with declared inputs. Registering it is all it takes to be run and documented.

    @rule("D18", "pad tokens are in the loss", link="masks", scope="batch",
          needs=("input_ids", "response_mask", "pad_id"), source="...")
    def pads_in_loss(batch: Batch) -> Iterator[Finding]: ...

A rule yields findings, or nothing where all is well. One that finds while looking that it cannot judge raises `Skip`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from replay_core.diagnose.finding import LINKS, Finding
from replay_core.documents.diagnosis import Link

#: What a rule is given: one step's samples (`Batch`), the series over steps (`Signals`), or all there is (`Case`).
Scope = Literal["batch", "signals", "case"]


class Skip(Exception):  # noqa: N818 - it is no error, it is an answer
    """The rule cannot judge this input; the message says why, and what it would need."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of the catalogue.

    `needs` are canonical names (scope batch) or signal names (scope signals) without which the rule is skipped;
    an entry `a|b` is met by either. `explain` is the function's docstring: formula, threshold, what is normal.
    """

    id: str
    title: str
    link: Link
    scope: Scope
    needs: tuple[str, ...]
    source: str
    check: Callable[[Any], Iterable[Finding]]
    explain: str


#: Every rule by id and scope, in the order of registration: one id may be told from a dump and from a log.
RULES: dict[tuple[str, Scope], Rule] = {}


def rule(
    id: str, title: str, *, link: Link, scope: Scope, needs: tuple[str, ...] = (), source: str
) -> Callable[[Callable[[Any], Iterable[Finding]]], Callable[[Any], Iterable[Finding]]]:
    """Register a rule.

    Raises:
        ValueError: the id is taken in this scope, the link is unknown, or the function has no docstring.
    """

    def register(check: Callable[[Any], Iterable[Finding]]) -> Callable[[Any], Iterable[Finding]]:
        if (id, scope) in RULES or link not in LINKS or not check.__doc__:
            raise ValueError(
                f"rule {id}: ids are unique within a scope, links are of LINKS, and a rule explains itself"
            )
        RULES[id, scope] = Rule(id, title, link, scope, needs, source, check, check.__doc__)
        return check

    return register
