"""What a model reference means: a directory, a cached hub id, the dump's own, `random:` or `factory:`. No torch."""

from __future__ import annotations

import contextlib
import difflib
import re
from pathlib import Path

from replay_core.errors import ModelError
from replay_core.records import Run, weights_noted
from replay_core.regexes import regex
from replay_core.replay import architectures
from replay_core.replay.plan import FACTORY, ReplayPlan

RANDOM = "random:"
CHECKPOINT = "checkpoint"

_STEP = regex(r"(?:.*[_-])?(?:step|iter|checkpoint|ckpt)s?[_-]?0*(\d{1,18})")
#: Parts of a path, from its end, in which the step is looked for (global_step_100/actor/huggingface).
_DEPTH = 3


def step_of(reference: str) -> int | None:
    """The training step a directory of weights is named after (`global_step_100`), if any."""
    for part in reversed(Path(reference).parts[-_DEPTH:]):
        found = _STEP.fullmatch(part)
        if found:
            return int(found.group(1))
    return None


def resolve(plan: ReplayPlan, run: Run) -> tuple[str, list[str]]:
    """(a directory, `random:…` or `factory:…`, notes) of the plan's model reference.

    Raises:
        ModelError: the dump notes no weights, or names code to run, or the directory is not there.
    """
    reference, notes = plan.model, list[str]()
    base = Path()
    if reference == CHECKPOINT:
        reference, notes = _noted(plan, run)
        base = run.path if run.path.is_dir() else run.path.parent
        if reference.startswith(FACTORY):
            raise ModelError(
                "the dump names code to build its model with; code is only ever run when you name it",
                file=str(run.path), found=reference, hint=f"--model {reference}",
            )  # fmt: skip
    if reference.startswith((RANDOM, FACTORY)):
        return reference, notes
    directory = base / Path(reference).expanduser()
    if not directory.is_dir() and (fetched := cached(reference)) is not None:
        directory = fetched
    if directory.is_dir():
        found = step_of(str(directory.resolve()))
        if found is not None and found != plan.step and plan.model != CHECKPOINT:
            notes.append(f"weights of step {found}, batch of step {plan.step}: numbers will differ")
        return str(directory.resolve()), notes
    noted = plan.model == CHECKPOINT
    raise ModelError(
        "the weights the dump notes are not on this machine"
        if noted
        else "the model is not a directory on this machine",
        file=str(directory),
        expected=f"a Hugging Face directory, {CHECKPOINT}, or "
        + ", ".join(RANDOM + name for name in architectures.ARCHITECTURES),
        found="a file" if directory.is_file() else "nothing there",
        hint=_similar(directory)
        or (
            "were they moved? --model DIRECTORY names them" if noted else "nothing is downloaded: fetch the model first"
        )
        + ", or replay random:llama-tiny",
    )


def _noted(plan: ReplayPlan, run: Run) -> tuple[str, list[str]]:
    noted = weights_noted(run.models, plan.step)
    if noted is None:
        raise ModelError(
            "the dump notes no weights",
            file=str(run.path),
            expected="a checkpoint noted by Recorder.checkpoint or Recorder.note_model",
            found="a dump without any",
            hint="name a model: --model DIRECTORY, or --model random:llama-tiny",
        )
    step, reference = noted
    if step in (plan.step, None):
        return reference, []
    return reference, [
        f"weights of step {step}, batch of step {plan.step}: the dump has no weights of step {plan.step}: "
        f"those of step {step} are used, so numbers will differ"
    ]


def edition_of(reference: str, forward_path: str | None) -> tuple[object, ...]:
    """What changes when a resolved reference comes to mean other weights: the files of a directory, or its code."""
    if reference.startswith(RANDOM):
        return (reference,)
    if reference.startswith(FACTORY):
        from replay_core.replay import own_code  # imports torch

        return (reference, forward_path, own_code.edition(forward_path))
    files = sorted(file for file in Path(reference).iterdir() if file.is_file())
    return (reference, *((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files))


def cached(reference: str) -> Path | None:
    """The directory of a hub id that was fetched before; nothing is downloaded."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", reference):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(reference, local_files_only=True))
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None


def _similar(directory: Path) -> str | None:
    with contextlib.suppress(OSError):
        beside = [entry.name for entry in directory.parent.iterdir() if entry.is_dir()]
        near = difflib.get_close_matches(directory.name, beside, n=1)
        if near:
            return f"did you mean {directory.parent / near[0]}?"
    return None
