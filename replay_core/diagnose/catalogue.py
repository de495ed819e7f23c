"""The catalogue as text: one rule explained, and all of them as a page."""

from __future__ import annotations

import sys
from inspect import cleandoc

from replay_core.diagnose.engine import chain, chosen_rules, rules
from replay_core.diagnose.finding import LINKS
from replay_core.diagnose.rule import Rule

#: What a rule is given, in words.
_SCOPES = {"batch": "every step's samples", "signals": "logs and metrics over steps", "case": "the whole run"}
_HEAD = """\
# Diagnostics

What `rldbg diagnose` looks at. This page is generated from the rules (`make docs`);
`rldbg diagnose --explain ID` prints one of them.

Rules follow a training step as a chain: {chain}. A broken link makes the later ones look broken: what an
earlier finding explains is downstream of it, and listed last. A rule without its inputs is skipped, and says what
it would need.

An `error` is wrong whatever the trainer is meant to do, a `warning` most likely is, an `info` is worth knowing and
often normal. Only findings of `warning` and above make the exit code 1 (`--fail-on`).
"""


def explained(id: str) -> str:
    """What a rule looks at, its threshold and where it comes from; every rule of that id.

    Raises:
        RequestError: there is no such rule.
    """
    return "\n\n".join(_entry(rule) for rule in chosen_rules([id]))


def _entry(rule: Rule) -> str:
    lines = [f"{rule.id}  {rule.title}", "", cleandoc(rule.explain), ""]
    lines += [f"looks at  {_SCOPES[rule.scope]}"]
    if rule.needs:
        lines.append("needs     " + ", ".join(need.replace("|", " or ") for need in rule.needs))
    lines += [f"link      {rule.link}", f"source    {rule.source}"]
    if explains := chain().explains[rule.id]:
        lines.append("explains  " + ", ".join(explains))
    return "\n".join(lines)


def page() -> str:
    """docs/diagnostics.md."""
    catalogue = rules()
    parts = [_HEAD.format(chain=" → ".join(LINKS)), "| rule | what | looks at |", "|---|---|---|"]
    parts += [f"| [{rule.id}](#{_anchor(rule)}) | {rule.title} | {_SCOPES[rule.scope]} |" for rule in catalogue]
    for rule in catalogue:
        parts += ["", f"## {_heading(rule)}", "", cleandoc(rule.explain), ""]
        needs = ", ".join(f"`{need}`" for need in rule.needs).replace("|", "` or `") or "nothing in particular"
        parts.append(f"Looks at {_SCOPES[rule.scope]}; needs {needs}. Link: {rule.link}. Source: {rule.source}.")
        if explains := chain().explains[rule.id]:
            parts.append(f"Explains {', '.join(explains)}.")
    return "\n".join(parts) + "\n"


def _heading(rule: Rule) -> str:
    return f"{rule.id} {rule.title}"


def _anchor(rule: Rule) -> str:
    kept = "".join(letter for letter in _heading(rule).lower() if letter.isalnum() or letter in " -_")
    return kept.replace(" ", "-")


if __name__ == "__main__":
    sys.stdout.write(page())
