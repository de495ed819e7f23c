"""`rldbg help [TOPIC]`: a command, a rule of the diagnosis, or one of the things that all commands share."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

import click

from replay_core import workbench
from replay_core.errors import ExitCode, RequestError

_CODES = {
    ExitCode.AGREES: "everything asked for was compared or run, and is SAME, CLOSE or PADDING; no finding",
    ExitCode.DIVERGES: "a first divergence, something MISSING or skipped, a finding of --fail-on and above; demo",
    ExitCode.BAD_REQUEST: "the request is wrong: an unknown option, step, rank, model or path",
    ExitCode.BAD_BYTES: "the bytes are wrong, or nothing could be compared",
    ExitCode.CELL_FAILED: "a replay failed or crashed, or nothing asked for can run here",
    ExitCode.INTERNAL: "a fault of rldbg's own; the report's path is printed",
    ExitCode.INTERRUPTED: "interrupted, or the reader of a stream left",
}
_VERDICTS = {
    "SAME": "equal in every element; NaN at the same places of both are counted and said",
    "CLOSE": "within what the dtype and the kind of tensor allow",
    "DIFF": "further apart than that",
    "NAN": "NaN or infinity on one side only",
    "SHAPE": "the shapes cannot be laid over each other",
    "MISSING": "only one side has it",
    "PADDING": "differs only where the attention mask is 0",
}


def _listed(table: dict[str, str]) -> str:
    width = max(map(len, table)) + 2
    return "\n".join(
        textwrap.fill(f"{name:<{width}}{what}", 100, subsequent_indent=" " * width) for name, what in table.items()
    )


def _flags() -> str:
    from replay_core.replay.flags import FLAGS

    return _listed({flag.option or "--" + name.replace("_", "-"): flag.help for name, flag in FLAGS.items()})


def _files() -> str:
    names = ", ".join(workbench.dialects())
    said = (
        f"A dump is a directory that a framework wrote, or a file of it; several paths are one run. Read: {names}. "
        "Nothing is converted, and nothing that a file carries is executed."
    )
    return textwrap.fill(said, 100)


_SELECTION = """\
--step, --rank and --micro take a number (3), several (0,2), a span without its end (0:4), all, or none: what has no
number. What belongs to a whole step has no micro-batch (its gradients, its metrics) and goes with any --micro.
--stage and --role name a dump point and a model where several match; `rldbg ls DUMP` lists what is there."""

#: Topic -> its first line, and its text.
TOPICS: dict[str, tuple[str, Callable[[], str]]] = {
    "exit-codes": ("what the exit code says", lambda: _listed({str(int(code)): what for code, what in _CODES.items()})),
    "verdicts": ("what a pair of tensors is called", lambda: _listed(_VERDICTS)),
    "selection": ("steps, ranks and micro-batches", lambda: _SELECTION),
    "flags": ("the settings of a replay: options, and axes of --matrix", _flags),
    "files": ("what can be opened", _files),
}


@click.command("help")
@click.argument("topic", required=False)
@click.pass_context
def command(ctx: click.Context, topic: str | None) -> int:
    """Explain a command, a rule (D07) or a topic; without one, list them."""
    above = ctx.find_root()
    every = above.command
    assert isinstance(every, click.Group)
    if topic is None:
        click.echo(every.get_help(above))
        click.echo("\nTopics:\n" + textwrap.indent(_listed({name: first for name, (first, _) in TOPICS.items()}), "  "))
    elif topic in TOPICS:
        first, text = TOPICS[topic]
        click.echo(f"{topic}: {first}\n\n{text()}")
    elif (named := every.get_command(above, topic)) is not None:
        click.echo(named.get_help(click.Context(named, info_name=topic, parent=above)))
    elif topic[:1].upper() in "DL" and topic[1:].isdecimal():
        click.echo(workbench.explain_rule(topic))
    else:
        known = ", ".join([*every.list_commands(above), *TOPICS])
        raise RequestError("there is no such topic", expected=f"{known} or a rule like D07", found=topic)
    return 0
