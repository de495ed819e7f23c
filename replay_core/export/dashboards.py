"""Where the few scalars of a followed run go: TensorBoard event files or a run of wandb, written by their libraries."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from replay_core.errors import RequestError, UnavailableError, missing_library

#: What is asked for instead of a folder. A folder of this name is `./wandb`.
WANDB = "wandb"


class Dashboard(Protocol):
    """Takes the scalars of a step; steps come in order."""

    def take(self, step: int, scalars: Mapping[str, float]) -> None:
        """Keep them: who looks soon sees them."""

    def close(self) -> None:
        """No more will come."""


def dashboard(where: str) -> Dashboard:
    """The dashboard that `--scalars` names: `wandb`, or a folder for TensorBoard.

    Raises:
        UnavailableError: its library is not installed; the error names the extra.
        RequestError: the folder cannot be written, or wandb refuses (no login).
    """
    return _Wandb() if where == WANDB else _TensorBoard(Path(where))


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ModuleNotFoundError as error:
            raise (missing_library(error, f"--scalars {folder}") or error) from None
        try:
            # A thread of the library's writes: who looks sees a point a second later. Its `flush` waits for nothing.
            self._writer = SummaryWriter(str(folder), flush_secs=1)
        except OSError as error:
            raise RequestError(
                "event files cannot be written there", file=str(folder), expected="a folder, or a place for one",
                found=error.strerror, hint="--scalars DIR with another DIR",
            ) from None  # fmt: skip

    def take(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A run of its own, not the trainer's: wandb takes no step that is earlier than one it has. WANDB_PROJECT,
    WANDB_MODE and the others of wandb's own variables are followed."""

    def __init__(self) -> None:
        wandb = _wandb()
        # Three scalars, and nothing of the machine, its code or its packages.
        settings = wandb.Settings(
            silent=True, console="off", disable_code=True, disable_git=True, x_disable_stats=True, x_disable_meta=True,
            x_save_requirements=False,
        )  # fmt: skip
        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "rldbg"), job_type="rldbg", settings=settings
            )
        except (wandb.errors.Error, OSError) as error:
            raise RequestError(
                "wandb begins no run", expected="a login, or WANDB_MODE=offline",
                found=(str(error).strip().splitlines() or [type(error).__name__])[0][:200],
                hint="wandb login; or WANDB_MODE=offline, and wandb sync later",
            ) from None  # fmt: skip

    def take(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step, commit=True)

    def close(self) -> None:
        self._run.finish()


def _wandb() -> Any:
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise (missing_library(error, "--scalars wandb") or error) from None
    if not hasattr(wandb, "init"):
        # Beside a folder of offline runs, which has its name, Python finds that.
        raise UnavailableError("--scalars wandb needs wandb", file=str(next(iter(wandb.__path__))),
                               expected="the extra `wandb`", found="a folder of runs, and no library",
                               hint="pip install 'rldbg[wandb]'")  # fmt: skip
    return wandb
