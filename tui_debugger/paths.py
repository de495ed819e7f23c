"""Where rldbg keeps and finds its files. The only file that knows directories.

config   $XDG_CONFIG_HOME/rldbg   the user's own themes
state    $XDG_STATE_HOME/rldbg    crash reports, exports without a place, the last copied text
cache    $XDG_CACHE_HOME/rldbg    what replays from the screen write, what was read of remote dumps, kept digests
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import time
from pathlib import Path
from typing import NamedTuple

import platformdirs

from replay_core.errors import RequestError

#: What replays may take in the cache together; those that somebody uses and the newest stay.
CACHE_BYTES = 512 << 20
#: About what remote dumps may take there.
REMOTE_BYTES = 8 << 30
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
        _prune()
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


class CachedReplay(NamedTuple):
    """One folder of the cache. A replay that lives may still write it, or look at it."""

    path: Path
    changed: float
    nbytes: int
    is_used: bool


def cached_replays() -> list[CachedReplay]:
    """What lies in the cache, newest first."""
    found = []
    with contextlib.suppress(OSError):
        for path in (cache_dir() / "replays").iterdir():
            with contextlib.suppress(OSError):
                found.append(CachedReplay(path, path.lstat().st_mtime, _size(path), _is_used(path)))
    return sorted(found, key=lambda one: -one.changed)


def digests_dir() -> Path:
    """Where digests are kept of dumps that recorded none."""
    return cache_dir() / "digests"


def clear_cache() -> int:
    """Remove every replay that nobody uses, and kept digests. Returns the bytes that were freed."""
    digests = CachedReplay(digests_dir(), 0.0, digests_bytes(), is_used=False)
    return sum(map(_remove, [digests, *(one for one in cached_replays() if not one.is_used)]))


def digests_bytes() -> int:
    with contextlib.suppress(OSError):
        return _size(digests_dir())
    return 0


def _prune() -> None:
    kept_bytes = 0
    for number, one in enumerate(cached_replays()):
        kept_bytes += one.nbytes
        # Younger than a day may belong to somebody who still looks at it, as long as there is room.
        is_old = number >= _REPLAYS_KEPT and time.time() - one.changed > _DAY_S
        if not one.is_used and number > 0 and (is_old or kept_bytes > CACHE_BYTES):
            kept_bytes -= _remove(one)


def _remove(one: CachedReplay) -> int:
    # A link is taken away, never what it leads to.
    if one.path.is_symlink() or not one.path.is_dir():
        with contextlib.suppress(OSError):
            one.path.unlink()
    else:
        shutil.rmtree(one.path, ignore_errors=True)
    return 0 if one.path.exists() else one.nbytes


def _size(path: Path) -> int:
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def _is_used(path: Path) -> bool:
    """Whether the process that made it lives: its number is in the name."""
    made_by = re.fullmatch(r"\d{8}-\d{6}-.*-(\d+)-\d+", path.name)
    if made_by is None or int(made_by[1]) == os.getpid():
        return made_by is not None
    try:
        os.kill(int(made_by[1]), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


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
    replays = cached_replays()
    several = "s" * (len(replays) != 1)
    used = (
        f"{sum(one.nbytes for one in replays) / 2**20:,.0f} of {CACHE_BYTES >> 20} MiB, {len(replays)} replay{several}"
    )
    themes = {"replays": used, "themes": ", ".join(str(path) for path in theme_dirs()) or "none found"}
    return {name: str(path) for name, path in folders.items()} | themes
