"""Where rldbg keeps and finds its files. The only file that knows directories.

config   $XDG_CONFIG_HOME/rldbg   the user's own themes
state    $XDG_STATE_HOME/rldbg    crash reports, exports without a place, the last copied text
cache    $XDG_CACHE_HOME/rldbg    what replays from the screen write
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path

import platformdirs

from replay_core.errors import RequestError

_REPLAYS_KEPT = 16
_DAY_S = 86_400


def config_dir() -> Path:
    return Path(platformdirs.user_config_dir("rldbg"))


def state_dir() -> Path:
    return Path(platformdirs.user_state_dir("rldbg"))


def cache_dir() -> Path:
    return Path(platformdirs.user_cache_dir("rldbg"))


def theme_dirs() -> list[Path]:
    """Folders that may hold themes, the later winning: inside the wheel, beside a checkout, the user's."""
    package = Path(__file__).resolve().parent
    return [path for path in (package / "themes", package.parent / "themes", config_dir() / "themes") if path.is_dir()]


def styles_dir() -> Path:
    return Path(__file__).resolve().parent / "styles"


def private_dir(path: Path) -> Path:
    """The folder, made if need be, readable by its owner only."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def new_replay_dir(label: str) -> Path:
    """A name for a replay's dump that nothing uses yet. Old replays beyond the newest few are removed.

    Raises:
        RequestError: nothing can be written into the cache.
    """
    folder = cache_dir() / "replays"
    try:
        replays = private_dir(folder)
        if not os.access(replays, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        _prune(replays)
    except OSError as error:
        raise RequestError(
            "the folder for replays cannot be written",
            file=str(folder),
            found=error.strerror,
            hint="XDG_CACHE_HOME=FOLDER names another one",
        ) from None
    stamp = time.strftime("%Y%m%d-%H%M%S")
    number = 0
    while (path := replays / f"{stamp}-{label}-{os.getpid()}-{number}").exists():
        number += 1
    return path


def _prune(replays: Path) -> None:
    # Younger than a day may belong to a session that is still looking at it.
    dated = []
    for path in replays.iterdir():
        try:
            dated.append((path.stat().st_mtime, path))
        except OSError:
            continue
    for changed, path in sorted(dated, reverse=True)[_REPLAYS_KEPT:]:
        if path.is_dir() and time.time() - changed > _DAY_S:
            shutil.rmtree(path, ignore_errors=True)


def here() -> Path:
    """The working directory; the state folder where that is gone."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return state_dir()


def writable_or_state(folder: Path) -> Path:
    """`folder` if files can be made in it, else the state folder."""
    return folder if os.access(folder, os.W_OK) else private_dir(state_dir())


def described() -> dict[str, str]:
    """Every directory by name, for `rldbg info`."""
    folders = {"config": config_dir(), "state": state_dir(), "cache": cache_dir()}
    themes = {"themes": ", ".join(str(path) for path in theme_dirs()) or "none found"}
    return {name: str(path) for name, path in folders.items()} | themes
