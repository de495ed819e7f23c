"""`index_rank%d.jsonl`: a line per record, and making it whole again after a crash.

A record is committed when its file has its final name. A kill between that and the index leaves the index
shorter than the files: whoever records as that rank next writes the missing lines.
"""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from replay_core.errors import RequestError
from replay_core.recorder.file_lock import FileLock
from replay_core.recorder.patience import disk_call
from replay_core.recorder.values import describe, leaves
from replay_core.recorder.writer import PRIVATE, append_line
from replay_core.regexes import regex

#: What identifies a record among those of one dump.
Identity = tuple[int, "int | None", str, str, "int | None"]

#: Fields of a record's file that repeat its key, and what says how its fields lie along the tokens.
KEY_FIELDS = ("step", "rank", "micro_idx", "epoch", "minibatch", "alignment")

_FILE = regex(r"step_(\d{6,})(?:_rank(\d+))?(?:_micro(\d+))?\.(pt|jsonl|safetensors)$")
_TEMPORARY = regex(r"\.(step_.+)\.[\d-]+\.tmp$")


def identity(key: dict[str, Any]) -> Identity:
    return (key["step"], key["rank"], key["role"], key["stage"], key["micro"])


def file_of(key: dict[str, Any], form: str) -> Path:
    """A record's file, relative to the dump."""
    rank = "" if key["rank"] is None else f"_rank{key['rank']}"
    micro = "" if key["micro"] is None else f"_micro{key['micro']}"
    role = Path() if key["role"] == "actor" else Path(key["role"])
    return role / str(key["stage"]) / f"step_{key['step']:06d}{rank}{micro}.{form}"


def content_of(
    key: dict[str, Any], fields: Mapping[str, Any], alignment: dict[str, str] | None = None
) -> dict[str, Any]:
    """What a record's file holds: its key, how fields lie along the tokens where that was said, then its fields."""
    content = {"step": key["step"], "rank": key["rank"], "micro_idx": key["micro"]}
    content.update({part: key[part] for part in ("epoch", "minibatch") if key[part] is not None})
    if alignment:
        content["alignment"] = dict(alignment)
    return {**content, **fields}


def line_of(
    key: dict[str, Any],
    file: Path | None,
    fields: Mapping[str, Any],
    whole: Mapping[str, Any],
    *,
    stats: bool,
    shards: dict[str, Any] | None = None,
    digests: dict[str, str] | None = None,
    alignment: dict[str, str] | None = None,
) -> bytes:
    """The index line of a record; `digests` are those already taken. Of a record with a file, a field that is not
    `whole` says so: the line is all there is of it.
    """
    described = []
    named = [(name, leaf, name_of in whole) for name_of in fields for name, leaf in leaves({name_of: fields[name_of]})]
    for order, (name, value, is_whole) in enumerate(named):
        known = (digests or {}).get(name)
        field = describe(name, value, order, stats=stats, bare=not is_whole, digest_known=known)
        said: dict[str, Any] = {"alignment": alignment[name]} if alignment and name in alignment else {}
        if file is not None and not is_whole:
            said["whole"] = False
        described.append({**field, **(shards or {}).get(name, {}), **said})
    return json.dumps({"key": key, "file": str(file) if file else None, "fields": described}).encode()


def removal_of(file: Path) -> bytes:
    """The line that says a record's file was taken away on purpose."""
    return json.dumps({"removed": str(file)}).encode()


class RankClaim:
    """One (role, rank) of a dump while it is being recorded: nobody else records as it, and its index is whole.

    Raises:
        RequestError: another live recorder holds it.
    """

    def __init__(self, directory: Path, role: str, rank: int | None, mode: int = PRIVATE) -> None:
        self._directory, self._mode = directory, mode
        self._role, self._rank = role, rank
        self.index = directory / f"index_rank{rank if rank is not None else 0}.jsonl"
        lock = FileLock(directory / f".{role}_rank{rank}.lock", mode)
        if not lock.take():
            raise RequestError(
                f"another recorder is writing rank {rank} of the {role} here",
                file=str(directory),
                expected="one recorder per directory, rank and role",
                hint="give each rank its own number (recorder.step(step, rank=...)), or each run its own directory",
            )
        # A recorder that is dropped without being closed lets go all the same.
        self.release = weakref.finalize(self, lock.release)
        try:
            self.known = self._complete()
        except BaseException:
            self.release()
            raise

    def _complete(self) -> set[Identity]:
        """Bring the index up to the files, sweep what a killed writer left, and say which keys are taken."""
        taken: set[Identity] = set()
        listed: set[str] = set()
        with disk_call():
            text = self.index.read_bytes() if self.index.exists() else b""
        if text:
            if not text.endswith(b"\n"):
                # A power cut tore the last line; the next one must not continue it.
                append_line(self.index, b"", mode=self._mode)
            for line in text.splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    entry = json.loads(line)
                    if "removed" in entry:
                        continue
                    listed.add(entry["file"])
                    if (entry["key"]["role"], entry["key"]["rank"]) == (self._role, self._rank):
                        taken.add(identity(entry["key"]))
        missing = [key_and_file for key_and_file in self._files() if str(key_and_file[1]) not in listed]
        for key, file in missing:
            taken.add(identity(key))
            fields = _read_back(self._directory / file)
            if fields is not None:
                key["epoch"], key["minibatch"] = fields.get("epoch"), fields.get("minibatch")
                kept = {name: value for name, value in fields.items() if name not in KEY_FIELDS}
                append_line(self.index, line_of(key, file, kept, kept, stats=False), mode=self._mode)
        return taken

    def _files(self) -> Iterable[tuple[dict[str, Any], Path]]:
        root = self._directory if self._role == "actor" else self._directory / self._role
        for folder in sorted(root.iterdir()) if root.is_dir() else []:
            if not folder.is_dir() or folder.name == "checkpoints":
                continue
            for file in sorted(folder.iterdir()):
                leftover = _TEMPORARY.fullmatch(file.name)
                match = _FILE.fullmatch(leftover[1] if leftover else file.name)
                if match is None or (None if match[2] is None else int(match[2])) != self._rank:
                    continue
                if leftover:
                    # This rank is ours alone, so its writer is gone.
                    file.unlink(missing_ok=True)
                    continue
                key = {
                    "step": int(match[1]),
                    "rank": self._rank,
                    "role": self._role,
                }
                key["micro"] = None if match[3] is None else int(match[3])
                yield {**key, "stage": folder.name, "epoch": None, "minibatch": None}, file.relative_to(self._directory)


def _read_back(path: Path) -> dict[str, Any] | None:
    """A committed file's tree, as far as this process can read it; None leaves the reader to go by its name."""
    try:
        if path.suffix == ".pt":
            import torch

            content = torch.load(path, map_location="cpu", weights_only=True)
        elif path.suffix == ".jsonl":
            content = json.loads(path.read_bytes())
            content.pop("__tensors__", None)
        else:
            with open(path, "rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            content = json.loads(header["__metadata__"]["rldbg"])
    except Exception:
        return None
    return content if isinstance(content, dict) else None
