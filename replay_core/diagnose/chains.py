"""Of exceptions that belong together, the one that a run died of.

    ends = heads(told)

Python writes a chain from the inside out. Where one exception was the direct cause of the next, the first is why and
those that follow wrap it, unless they alone say something. Where one came while another was handled, the handling
failed: the last is what ended it, unless the project's own code raised it in so many words, which only names the
first. What was printed by a try that caught it is no end while another reached the top of a
program. Ray's driver names the class of what a task died of.
"""

from __future__ import annotations

from collections.abc import Callable

from replay_core.diagnose.raised import raised
from replay_core.diagnose.signals import Told
from replay_core.dumps.log_events import CAUSED, HANDLING
from replay_core.regexes import regex

#: How frames of a whole program or process begin; those of a `try` begin where it stands.
_TOP = regex(
    r"in (?:<module>|_run_module_as_main|_bootstrap\w*|_run_code|\w*_loop|worker\w*|_process_worker|run_engine_core"
    r"|\w*main\w*|run|run_\w+|wrapper|_wrap|actor_\w+|__call__)$|ray::|<frozen runpy"
)
_OF_TASK = regex(r"RayTaskError\((\w+)\)")


def joined(one: Told) -> str:
    """How it is joined to the exception before it: HANDLING, CAUSED, or not at all."""
    second = one.text.splitlines()[1:2]
    return second[0] if second and second[0] in (HANDLING, CAUSED) else ""


def heads(told: list[Told], weight: Callable[[Told], int]) -> list[Told]:
    """Those of a file's ends, in its order, that others do not explain."""
    return _of_the_task([_head(chain, weight) for chain in _uncaught(_chains(told), weight)], weight)


def earlier(one: Told, told: list[Told]) -> list[Told]:
    """The other exceptions of its chain, those before it first."""
    chain = next((chain for chain in _chains(told) if one in chain), [])
    return [other for other in chain if other is not one]


def _chains(told: list[Told]) -> list[list[Told]]:
    chains: list[list[Told]] = []
    open_: dict[tuple[str | None, int | None], list[Told]] = {}
    for one in told:
        key = one.point.path, one.point.rank
        if joined(one) and key in open_:
            open_[key].append(one)
            continue
        chains.append([one])
        if one.kind != "killed":
            open_[key] = chains[-1]
    return chains


_CLOSES = regex(r"in (?:__exit__|__aexit__|__del__|_?close\w*|_?shutdown\w*|_?clean_?up\w*|terminate)$")


def _closes(one: Told) -> bool:
    frames = [line for line in one.text.splitlines()[1:] if line.startswith("File ")]
    return any(_CLOSES.search(frame) for frame in frames[-2:])


def _is_own_word(one: Told) -> bool:
    """Whether code of the project itself, and of no library, raised it in so many words."""
    last = raised(one).last
    return last is not None and last.is_own and last.code.startswith("raise ")


def _head(chain: list[Told], weight: Callable[[Told], int]) -> Told:
    head = chain[0]
    for one in chain[1:]:
        # What only tells of another process's end explains nothing, wherever it stands.
        if weight(one) >= 2 > weight(head):
            continue
        # What closes a file or a client behind an exception fails because of it.
        if joined(one) == HANDLING and _closes(one) and weight(head) <= weight(one):
            continue
        # Who catches an exception and raises one of his own names it by another word: the first is why.
        if joined(one) == HANDLING and _is_own_word(one) and weight(head) <= weight(one):
            continue
        if joined(one) == HANDLING or weight(one) < weight(head):
            head = one
    return head


def _uncaught(chains: list[list[Told]], weight: Callable[[Told], int]) -> list[list[Told]]:
    """Without what was caught before an exception that reached the top of its program."""
    tops = [chain[-1] for chain in chains if _is_top(chain[-1]) is True and weight(_head(chain, weight)) < 2]
    last = max((one.point.line or 0 for one in tops if one.kind == "traceback"), default=0)
    return [
        chain for chain in chains
        if chain[0].kind != "traceback" or (chain[-1].point.line or 0) > last or _is_top(chain[-1]) is not False
    ]  # fmt: skip


def _is_top(one: Told) -> bool | None:
    """Whether its frames begin at the top of a program; None where it has none."""
    first = next((line for line in one.text.splitlines()[1:] if line.startswith("File ")), None)
    # A chain's later exception begins where all of the program does, too.
    return None if first is None or "RayTaskError" in one.text.splitlines()[0] else _TOP.search(first) is not None


def _of_the_task(told: list[Told], weight: Callable[[Told], int]) -> list[Told]:
    """Where a driver says of which class its task's exception was: those of that class, where one tells something."""
    named = [found[1] for one in told if (found := _OF_TASK.search(one.text.splitlines()[0]))]
    if not named:
        return told
    of_it = [
        one for one in told
        if one.text.split(":")[0].strip().rpartition(".")[2] == named[-1] and weight(one) < 2
    ]  # fmt: skip
    return [one for one in told if one.kind != "traceback" or one in of_it] if of_it else told
