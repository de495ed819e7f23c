"""Keeps the newest steps of a dump and takes older ones away, as AReaL's `max_keep` and `pin_steps` ask."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from replay_core.recorder.index import removal_of
from replay_core.recorder.settings import Settings
from replay_core.recorder.writer import PRIVATE, SHARED, append_line
from replay_core.regexes import regex

_FILE = regex(r"step_(\d{6,})(?:_rank(\d+))?(?:_micro\d+)?\.(?:pt|jsonl|safetensors)$")


class Rotation:
    """Each rank takes away only what it wrote itself, its steps counted alone.

    A checkpoint goes once no step that is kept, of any rank, would be replayed from it.
    """

    def __init__(self, directory: Path, settings: Settings) -> None:
        self._directory = directory
        self._keep = settings.max_keep
        self._pinned = settings.pin_steps
        self._mode = SHARED if settings.share else PRIVATE

    def close(self, step: int, rank: int | None, role: str) -> None:
        """After a step was written: remove the steps that are now too old, and say so in the index."""
        if self._keep is None:
            return
        files: dict[int, list[Path]] = {}
        root = self._directory if role == "actor" else self._directory / role
        for path in root.glob("*/step_*"):
            match = _FILE.fullmatch(path.name)
            if match and path.parent.name != "checkpoints" and (int(match[2]) if match[2] else None) == rank:
                files.setdefault(int(match[1]), []).append(path)
        counted = sorted(number for number in files if number not in self._pinned)
        index = self._directory / f"index_rank{rank if rank is not None else 0}.jsonl"
        for old in counted[: -self._keep]:
            for path in sorted(files[old]):
                # The line first: a file that is listed as removed and still there is removed the next time.
                append_line(index, removal_of(path.relative_to(self._directory)), durable=False, mode=self._mode)
                path.unlink(missing_ok=True)

    def spare_checkpoints(self, models: Mapping[str, str]) -> dict[str, Path]:
        """Of the manifest's models the checkpoints that no kept step needs: step, as text -> directory."""
        kept = {
            int(match[1])
            for path in [*self._directory.glob("*/step_*"), *self._directory.glob("*/*/step_*")]
            if (match := _FILE.fullmatch(path.name))
        }
        models = {step: where for step, where in models.items() if step == "*" or step.isdecimal()}
        ours = {int(step): where for step, where in models.items() if where == f"checkpoints/step_{step:0>6}"}
        if self._keep is None or not kept:
            return {}
        noted = [int(step) for step in models if step != "*"]
        # A step is replayed from its own weights, or from the last before it.
        needed = {max((step for step in noted if step <= one), default=None) for one in kept}
        spare = [step for step in ours if step not in needed and step < max(kept)]
        return {str(step): self._directory / ours[step] for step in spare}
