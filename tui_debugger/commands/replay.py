"""`rldbg replay`: re-execute a recorded micro-batch under other settings and hold it against each row alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import click

from replay_core import workbench
from replay_core.dumps import open_run
from replay_core.errors import RequestError, SelectionError
from replay_core.executors.child import ChildRunner
from replay_core.jobs import Event, Partial
from replay_core.records import MEAN_OVER_RANKS, RecordKey, Selection
from replay_core.replay.flags import DEFAULTS, FLAGS, MATRIX, Flags, settings_asked, telling
from replay_core.replay.plan import CAPTURE_LEVELS
from tui_debugger import format as words
from tui_debugger import paths
from tui_debugger.commands import DumpPath, document_output, finish, selectors
from tui_debugger.commands.sections import Sectioned
from tui_debugger.commands.sharding import in_units, ray_option, shard_option, typed
from tui_debugger.progress_line import ProgressLine
from tui_debugger.reports.replay import replay_report


def _flag_options(command: Callable[..., int]) -> Callable[..., int]:
    """The option of every flag. What is not given is None, so that what was asked for can be told."""
    for name, flag in reversed(FLAGS.items()):
        said, kind = f"{flag.help}.", dict[str, Any]()
        if flag.is_switch:
            kind = {"is_flag": True}
        elif flag.values:
            said += f"  [default: {DEFAULTS[name]}]"
            kind = {"type": click.Choice(flag.spellings)}
        else:
            kind = {"type": click.IntRange(min=1)}
        if flag.bare is not None:
            kind |= {"is_flag": False, "flag_value": flag.bare}
        option = flag.option or "--" + name.replace("_", "-")
        command = click.option(option, name, default=None, help=said, **kind)(command)
    return command


_SECTIONS = {
    "What is replayed": ("step", "rank", "micro", "role", "rows", "max_rows"),
    "With which weights": ("models", "base", "against", "seed", "forward", "temperature", "allow_pickled_weights"),
    "Under which settings": (*FLAGS, "flash_attn", "matrix"),
    "With gradients": ("backward", "loss", "optimizer"),
    "What is kept": ("capture", "capture_level", "capture_cap_mib", "logit_chunk", "out"),
    "How it runs": ("warm", "time_limit", "twice", "why", "share_gpu", "verbose", "shard", "ray"),
    "The answer": ("as_json", "output", "html", "markdown", "junit"),
}
_EXAMPLES = (
    "rldbg replay DUMP --step 3 --micro 0 --packing                     # does packing change the numbers?",
    "rldbg replay DUMP --step 3 --micro 0 --matrix                      # which setting, or which pair, does?",
    "rldbg replay DUMP --matrix packing=off,on dtype=fp32,bf16          # of these alone",
    "rldbg replay DUMP --model A --model B --against rollout_logprobs   # whose weights sampled these tokens?",
    "rldbg replay DUMP --packing --shard 1/4 --out UNITS                # every micro-batch, a quarter by this worker",
    "rldbg replay DUMP --step 3 --micro all --backward                  # loss and gradients as recorded?",
)


@click.command("replay", cls=Sectioned, sections=_SECTIONS, examples=_EXAMPLES)
@click.argument("path", type=DumpPath())
@click.argument("axes", nargs=-1, metavar="[AXIS=VALUE,VALUE ...]")
@selectors
@click.option("--role", help="actor, ref, critic ... where a micro-batch has several.")
@click.option(
    "--model",
    "models",
    multiple=True,
    default=("checkpoint",),
    show_default=True,
    help="HF directory, cached hub id, random:ARCH, factory:MODULE:FUNCTION, or the recorded one. Several are ranked.",
)
@click.option("--base-model", "base", metavar="DIRECTORY", help="Of an adapter whose config names none that is here.")
@_flag_options
@click.option("--flash-attn", is_flag=True, help="The best flash attention that is here.")
@click.option("--matrix", is_flag=False, flag_value="", metavar="[AXES]", help=f"All combinations; default '{MATRIX}'.")
@click.option("--warm", is_flag=True, help="One child for all cells: faster, times and memory depend on their order.")
@click.option("--time-limit", type=float, default=1800, show_default=True, help="Seconds a cell may take.")
@click.option(
    "--why", is_flag=True, help="Ask every cell who moves whom, also where it agrees (causes: docs/flags.md)."
)
@click.option("--twice", is_flag=True, help="Run the cell once more: does this machine repeat itself?")
@click.option(
    "--backward", is_flag=True, help="Also the loss and its gradients, of all micro-batches of the step or of --micro."
)
@click.option(
    "--optimizer-step", "optimizer", is_flag=False, flag_value="", metavar="[SPEC]",
    help="With --backward: one step as well; adamw,lr=1e-6,max_grad_norm=1 ...; else as recorded.",
)  # fmt: skip
@click.option("--loss", metavar="SPEC", help="grpo,kl=0.001,reduction=token_sum ...; else as recorded.")
@click.option("--forward", metavar="MODULE:FUNCTION", help="The trainer's own (model, batch) -> log-probabilities.")
@click.option("--against", metavar="NAME", help="Rank several --model by a recorded log-probability.")
@click.option("--share-gpu", is_flag=True, help="Run beside another process on the GPU.")
@click.option("--temperature", type=float, help="Of the rollout; else the record's, else 1.0 and said so.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of a random: model's weights.")
@click.option("--capture", metavar="REGEX", help="Modules whose tensors are kept (default: all; none: no one).")
@click.option(
    "--capture-level", type=click.Choice(CAPTURE_LEVELS), default="auto", show_default=True,
    help="full: whole tensors. hash: digests, then whole tensors around the first that differs. auto: full if it fits.",
)  # fmt: skip
@click.option(
    "--capture-cap", "capture_cap_mib", type=click.IntRange(min=1), default=4096, show_default=True,
    metavar="MIB", help="Tensors captured at once.",
)  # fmt: skip
@click.option("--rows", metavar="ROWS", help="Replay only these rows of the micro-batch: 3, 0,2, 0:4.")
@click.option("--max-rows", type=click.IntRange(min=1), help="Replay only the first rows.")
@click.option(
    "--logit-chunk", type=click.IntRange(min=1), default=512, show_default=True, help="Rows of logits at once."
)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Keep the cells' dumps here.")
@shard_option
@ray_option
@click.option("--allow-pickled-weights", is_flag=True, help="Load .bin weights, which can run code.")
@click.option("--verbose", is_flag=True, help="What the model prints, on standard error.")
@document_output
def command(
    path: Path,
    axes: tuple[str, ...],
    as_json: bool,
    output: Path | None,
    out: Path | None,
    verbose: bool,
    warm: bool,
    time_limit: float,
    matrix: str | None,
    models: tuple[str, ...],
    against: str | None,
    twice: bool,
    why: bool,
    shard: str | None,
    ray: str | None,
    **asked: Any,
) -> int:
    """Replay one recorded micro-batch: each row alone (the reference), padded as recorded, and packed if asked.

    Exit 0: every cell agrees with the reference. Exit 1: one does not. Exit 4: one failed or cannot run here.
    """
    if axes and matrix is None:
        raise RequestError(
            "axes belong to --matrix", found=" ".join(axes), hint=f"rldbg replay {path} --matrix {axes[0]}"
        )
    if shard is not None or ray is not None:
        select = typed(**{name: asked.pop(name) for name in ("step", "rank", "micro")}, role=asked["role"])
        if asked["backward"] or asked["optimizer"] is not None:
            raise click.UsageError("--backward puts micro-batches together: it has no parts to --shard")
        params = {
            "plan": _plan(path, model=models[0], step=None, rank=None, micro=None, **asked),
            "matrix": None if matrix is None else " ".join([matrix, *axes]).strip(), "against": against,
            "models": list(models) if len(models) > 1 or against else [], "twice": twice, "why": why, "is_warm": warm,
        }  # fmt: skip
        return in_units("replay", params, out, shard, ray, as_json=as_json, output=output, select=select,
                        time_limit_s=time_limit, verbose=verbose)  # fmt: skip
    plan = _plan(path, model=models[0], **asked)
    progress = ProgressLine(verbose=verbose)
    request: dict[str, Any] = {
        "matrix": None if matrix is None else " ".join([matrix, *axes]).strip(),
        "models": models if len(models) > 1 or against else (),
        "against": against,
        "twice": twice,
        "why": why,
        "is_warm": warm,
    }
    kept = out or paths.new_replay_dir("replay")
    cells = CellLines(progress, first=0 if matrix is None else 1)
    try:
        with ChildRunner(warm=warm, time_limit_s=time_limit) as runner:
            doc = workbench.replay(plan, kept, runner, cells, **request)
    except KeyboardInterrupt:
        if cells.ended:
            whose = (
                "1 cell had ended: its dump is"
                if cells.ended == 1
                else f"{cells.ended} cells had ended: their dumps are"
            )
            progress.note(f"{whose} in {kept}")
        for number, said in sorted(cells.known.items()):
            progress.note(f"known of cell {number}: {said}")
        raise
    progress.clear()
    return finish(doc, replay_report, as_json=as_json, output=output)


class CellLines:
    """Standard error's line of each cell as soon as it ends, beside what a progress line says.

    Args:
        first: the number of the first cell that runs; of a matrix 0 is the recording.
    """

    def __init__(self, progress: ProgressLine, first: int = 0) -> None:
        self._progress, self._count = progress, first
        #: How many have ended.
        self.ended = 0
        #: Why cells disagree, as far as that is known.
        self.known: dict[int, str] = {}
        progress.note("replay: each row alone first, the reference; then each cell, a line as it ends")

    def __call__(self, event: Event) -> None:
        if isinstance(event, Partial) and "cell" in event.document:
            cell = cast("dict[str, Any]", event.document)["cell"]
            held = "reference" if cell["part"] == "reference" else ""
            agrees = {True: "agrees", False: "DISAGREES", None: held}[cell["agreement"]["agrees"]]
            said = ", ".join(filter(None, (cell["outcome"], agrees)))
            self.ended += 1  # who reads the line may interrupt at once
            if cell["cause"] is not None:
                self.known[self._count] = cell["cause"]["sentence"]
            self._progress.note(f"cell {self._count}: {words.flags(telling(cell['flags']))}: {said}")
            self._count += 1
        elif isinstance(event, Partial) and "so_far" in event.document:
            found = cast("dict[str, Any]", event.document)
            number, said = found.get("number", self._count), str(found["so_far"])
            if said != self.known.get(number):  # asking on seldom changes it
                self._progress.note(f"cell {number}, so far: {said}")
            self.known[number] = said
        self._progress(event)


def _plan(
    path: Path,
    *,
    step: Selection | None,
    rank: Selection | None,
    micro: Selection | None,
    flash_attn: bool,
    backward: bool,
    **rest: Any,
) -> dict[str, Any]:
    given = {name: value for name in FLAGS if (value := rest.pop(name)) not in (None, False)}
    settings = ["attention=flash"] * flash_attn + ["packing=on"] * ("block_mask" in given)
    for name, value in given.items():
        other = "off" if DEFAULTS[name] else "on"
        settings.append(f"{name}={other if FLAGS[name].is_switch else value}")
    micros, ranks = _several(path, step, rank, micro, rest.get("role")) if backward else (None, None)
    return {
        "dump": str(path.resolve()),
        "step": _one("step", step),
        "rank": ranks[0] if ranks else _one("rank", rank),
        "micro": micros[0] if micros else _one("micro", micro),
        "micros": micros,
        "ranks": ranks,
        "flags": Flags.parse(settings).to_mapping(),
        "backward": backward,
        "whole_step": micro is not None and micro.text == "all" and not backward,
        **rest,
    }


def _several(
    path: Path, step: Selection | None, rank: Selection | None, micro: Selection | None, role: str | None
) -> tuple[list[int] | None, list[int] | None]:
    """(micro-batches, ranks) whose gradients a backward replay puts together: those asked for, else all that a backward
    began from before the step's first optimizer step, which are those that its weights computed; of every rank, where
    what they recorded is the mean over ranks.
    """
    run = open_run(path)
    first = next((record.key.step for record in run.records), None)
    records = run.select(step or Selection.parse(first or 0), rank, micro)
    known = [record for record in records if record.key.role == (role or "actor")] or records
    # An update's number is none of a micro-batch.
    keys = [record.key for record in known if record.key.stage not in ("gradient", "optimizer", "param")]
    ranks = sorted({key.rank for key in keys if key.rank is not None})
    every: list[int | None] = [*ranks] or [None]
    of_ranks = [_of_rank([key for key in keys if key.rank in (None, one)], micro) for one in every]
    is_mean = settings_asked(run.flags).get("gradients") == MEAN_OVER_RANKS
    together = is_mean and len(ranks) > 1 and all(one and one == of_ranks[0] for one in of_ranks)
    chosen = of_ranks[0]
    several = chosen if len(chosen) > 1 or (chosen and micro is None) or together else None
    return several, ranks if together else None


def _of_rank(keys: list[RecordKey], micro: Selection | None) -> list[int]:
    trained = {key.micro for key in keys if key.stage == "loss"} - {None}
    numbers = {key.micro for key in keys if key.micro is not None and (micro is None or micro.has(key.micro))}
    if micro is None:
        numbers -= {key.micro for key in keys if key.minibatch}
    return sorted(numbers & trained if trained and micro is None else numbers)


def _one(name: str, selection: Selection | None) -> int | None:
    """The single number asked for; a micro-batch is replayed one at a time. None, the first there is, for no number."""
    if selection is None or (name == "micro" and selection.text == "all"):
        return None
    if selection.numbers is None or len(selection.numbers) != 1:
        raise SelectionError(f"replay takes one {name}", expected=f"--{name} 0", found=str(selection))
    return next(iter(selection.numbers))
