"""What has come to a run that is followed; the screen asks."""

from __future__ import annotations

from typing import Literal

from replay_core.documents.parts import Count, Versioned
from replay_core.documents.run import RunDocument


class FollowingDocument(Versioned):
    """What has come to a run since somebody last looked."""

    kind: Literal["following"]
    path: str
    run: RunDocument | None
    """Null where nothing has changed; else the run, its records those that came, or all of them."""
    whole: bool
    """`run` lists all records there are: the asker held another number of them."""
    total: Count
    """Records of the run now."""
    last_step: int | None
    silent_s: float | None
    """Seconds since anything of the last steps was written."""
    pace_s: float | None
    """Seconds a step takes, by the times of the last files; null where they do not tell."""
