"""`rldbg record -- python train.py`: run a training script and record it, without an edit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

import replay_core
from replay_core.errors import ExitCode, RequestError
from replay_core.recorder.settings import Settings
from replay_core.records import Selection
from tui_debugger.aside import aside
from tui_debugger.failing import fail


@click.command("record", context_settings={"ignore_unknown_options": False})
@click.option("--dir", "directory", type=click.Path(path_type=Path, file_okay=False), default=Path("rldbg-dump"),
              show_default=True, help="Where the dump goes.")  # fmt: skip
@click.option("--every", type=click.IntRange(1), default=1, show_default=True, help="Record every so many steps.")
@click.option("--format", "form", type=click.Choice(["pt", "jsonl", "safetensors"]), default="pt", show_default=True)
@click.option("--level", type=click.Choice(["hash", "stats", "full"]), default=None,
              help="Whole values (full, the default), or figures and digests in the index alone.")  # fmt: skip
@click.option("--whole", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="COMPARISON",
              help="Whole values of what differs in this document of compare, figures of all else.")  # fmt: skip
@click.option("--ranks", metavar="0,7", help="Keep the records of these ranks alone: 0,7 or 0:8.")
@click.option(
    "--gradients",
    metavar="GLOB",
    help="Gradients of parameters whose names hold it (*o_proj*), as the backward left them; a clipping that is not "
    "torch's clip_grad_norm_ is not seen, and theirs are recorded clipped.",
)
@click.option("--params", metavar="GLOB", help="Parameters whose names hold it, before each update.")
@click.option("--checkpoints/--no-checkpoints", default=None,
              help="Keep each recorded step's weights, for replays (default: of models up to 64 MiB).")  # fmt: skip
@click.option("--outputs", is_flag=True, help="Outputs of the model however large they are.")
@click.option("--modules", metavar="GLOB", help="Outputs of the modules within it whose names hold it (*mlp*; '*').")
@click.option("--share", is_flag=True, help="Let other users read the dump, as the umask says.")
@click.argument("command_line", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND ...")
def command(
    directory: Path,
    every: int,
    form: str,
    level: str | None,
    whole: Path | None,
    ranks: str | None,
    gradients: str | None,
    params: str | None,
    checkpoints: bool | None,
    outputs: bool,
    modules: str | None,
    share: bool,
    command_line: tuple[str, ...],
) -> int:
    """Run a training script and record what torch's hooks can see of it; TRL's GRPOTrainer with its rollouts.

    Nothing of the script is changed. At its end it says on standard error what was recorded and what could not be
    seen. Exits as the script does; 3 when the script ended well and nothing was recorded.
    """
    manifest = directory / "manifest.json"
    if manifest.exists():
        raise RequestError(
            "the directory holds a recording already, and nothing recorded is ever overwritten",
            file=str(directory),
            hint="rldbg record --dir ANOTHER -- ...",
        )
    chosen = level or ("full" if whole is None else "stats")
    options: dict[str, Any] = {"dump_every_n_steps": every, "format": form, "level": chosen}
    if whole is not None:
        options["whole"] = str(whole.resolve())
    if ranks is not None:
        options["ranks"] = _numbers(ranks)
    Settings().with_(**options)  # what is wrong is said here, not by the script
    given: dict[str, Any] = {"gradients": gradients, "params": params, "checkpoints": checkpoints}
    given.update(outputs=outputs or None, modules=modules, share=share or None)
    options.update({name: value for name, value in given.items() if value is not None})
    try:
        status = _run(command_line, _environment(directory, options))
    except OSError as error:
        raise RequestError(
            f"the command cannot be started: {error.strerror}",
            found=" ".join(command_line),
            hint="rldbg record -- python train.py",
        ) from None
    if status < 0:
        aside(f"rldbg: {_ended_by(-status)}\n")
    if manifest.exists():
        aside(f"rldbg ls {directory}\n")
    elif status == 0:
        fail("the script ended and nothing was recorded", "does it run torch in this Python, or in another process?")
        return ExitCode.BAD_BYTES
    # A script that a signal ended is reported as shells do.
    return status if status >= 0 else 128 - status


#: A range of more has no end.
_MOST_RANKS = 1 << 20


def _numbers(ranks: str) -> list[int]:
    chosen = Selection.parse(ranks)
    if chosen.numbers is not None:
        return sorted(chosen.numbers)
    if chosen.span is not None and chosen.span[1] <= _MOST_RANKS:
        return list(range(*chosen.span))
    raise RequestError("--ranks names the ranks that are kept", expected="0,7 or 0:8", found=ranks)


def _run(command_line: tuple[str, ...], environment: dict[str, str]) -> int:
    """Run the script to its end, however long it takes to come to it: what it holds in memory is still to be written.

    Ctrl-C reaches it from the terminal, as it does this process; what else would end this process is handed on.
    """
    with subprocess.Popen(command_line, env=environment) as script:

        def hand_on(number: int, _frame: object) -> None:
            if number != signal.SIGINT:
                script.send_signal(number)

        before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            return script.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _ended_by(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if number in (signal.SIGTERM, signal.SIGINT):
        return f"{name} ended the script; what waited was written first"
    return f"{name} ended the script: what was in memory then is not in the record"


def _environment(directory: Path, options: dict[str, Any]) -> dict[str, str]:
    package = Path(str(replay_core.__file__)).resolve().parent
    injection = str(package / "recorder" / "injection")
    before = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([injection, *([before] if before else [])]),
        "RLDBG_RECORD": str(directory.resolve()),
        "RLDBG_RECORD_OPTIONS": json.dumps(options),
        # A script's own output and the recorder's words keep their order.
        "PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED", "1" if sys.stdout.isatty() else ""),
    }
