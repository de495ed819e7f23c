"""`rldbg demo`: the whole road on real input, in under a minute.

Train a tiny policy with GRPO and record it; replay one micro-batch with each row alone, padded, and packed
without the mask between samples; open the screen where the wrong pack first parts.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from replay_core import workbench
from replay_core.demo.faults import FAULTS
from replay_core.errors import ExitCode
from replay_core.executors.child import ChildRunner
from replay_core.jobs import Event, Job, LogLine, Progress
from tui_debugger import format as words
from tui_debugger import paths
from tui_debugger.aside import aside
from tui_debugger.commands import document_output, finish
from tui_debugger.commands.parity import opens_screen, show
from tui_debugger.reports.diagnosis import diagnosis_report
from tui_debugger.reports.parity import parity_report
from tui_debugger.reports.replay import replay_report


@click.command("demo")
@click.option("--dir", "directory", type=click.Path(path_type=Path, file_okay=False), help="Where to record it.")
@click.option("--text", "as_text", is_flag=True, help="Print the story instead of opening the screen.")
@click.option(
    "--fault",
    type=click.Choice(tuple(FAULTS)),
    help="Train with this mistake really made, and diagnose what was recorded.",
)
@click.option(
    "--parity", "is_parity", is_flag=True, help="Two critics side by side instead: DeepSpeed's and Megatron's."
)
@document_output
def command(
    directory: Path | None, as_text: bool, fault: str | None, is_parity: bool, as_json: bool, output: Path | None
) -> int:
    """Train a tiny policy, pack a micro-batch wrongly, and see the first diverging tensor.

    With --fault the trainer makes a mistake, and `rldbg diagnose` names it. Exit 1 is success: the demo ends on a
    divergence, or on a finding. With --parity exit 0 is: the critics agree where it counts.
    """
    if is_parity:
        out = directory or paths.new_replay_dir("parity")
        if opens_screen(as_text or as_json or output is not None):
            return show({"out": str(out), "asked": {}})
        return _parity(out, as_json=as_json, output=output)
    began = time.monotonic()
    root = directory or paths.new_replay_dir("demo")
    if fault is not None:
        return _diagnosed(root / "run", fault, as_json=as_json, output=output)
    _say("1/2  training a tiny Qwen2-style policy with GRPO, recording every step")
    with ChildRunner(warm=True) as runner:
        trained = runner.run(Job("demo_train", {"directory": str(root / "run")}), _tell)
        _say(
            f"     mean reward {words.number(trained['reward_first'], 2)} -> {words.number(trained['reward_last'], 2)} "
            f"in {trained['steps']} steps"
        )
        _say("2/2  replaying one micro-batch: each row alone, padded, and packed without a block mask")
        doc = workbench.replay(trained["plan"], root / "replay", runner, _tell)
    _say(f"     {time.monotonic() - began:.0f} s in all; recorded in {root}")
    cells = doc["cells"]
    if not opens_screen(as_json or as_text or output is not None):
        return finish(doc, replay_report, as_json=as_json, output=output)
    from tui_debugger.app import run_ui  # textual: 170 ms that no other command pays

    recording = {"dump": trained["dump"], "model": "checkpoint", "flags": cells[-1]["flags"]}
    sides = [Path(cell["dump"]) if cell["dump"] else None for cell in (cells[0], cells[-1])]
    code = run_ui(*sides, replay=recording)
    return code or int(ExitCode.DIVERGES)


def _diagnosed(run: Path, fault: str, *, as_json: bool, output: Path | None) -> int:
    """Train with a fault, and say what the dump shows."""
    _say(f"training a tiny Qwen2-style policy with GRPO; the fault: {FAULTS[fault]}")
    with ChildRunner() as runner:
        trained = runner.run(Job("demo_train", {"directory": str(run), "fault": fault}), _tell)
    _say(f"recorded {trained['steps']} steps; rldbg diagnose {run}")
    return finish(workbench.diagnose(run), diagnosis_report, as_json=as_json, output=output)


def _parity(out: Path, *, as_json: bool, output: Path | None) -> int:
    """Both tiny critics on random, padded and stale rows, then five training steps each."""
    _say("1/2  a DeepSpeed critic and a Megatron critic with the same weights, each in a process of its own")
    began = time.monotonic()
    config_a, config_b = workbench.parity_examples()
    with ChildRunner() as runner:
        doc = workbench.parity(config_a, config_b, out, runner, _tell)
    _say(f"2/2  their values compared, with and without the padding; {time.monotonic() - began:.0f} s in all, in {out}")
    return finish(doc, parity_report, as_json=as_json, output=output)


def _say(text: str) -> None:
    aside(f"{text}\n")


def _tell(event: Event) -> None:
    if isinstance(event, LogLine):
        return
    if isinstance(event, Progress) and event.total and sys.stderr.isatty():
        aside(f"\r     {event.done}/{event.total} {event.what}".ljust(76)[:76] + "\r")
