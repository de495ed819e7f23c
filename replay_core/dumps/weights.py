"""A model's weights in Hugging Face's layout: model.safetensors, pytorch_model.bin, or shards of either.

The directory is one record of stage `param`. The index says which file has which tensor; a file it names
that is not there is a problem, and its tensors are listed as unreadable. Without an index the shards' own
names say how many there are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from replay_core import naming
from replay_core.dumps.containers import read_container
from replay_core.dumps.containers.json_lines import read_object
from replay_core.dumps.dialect import Dialect, Index
from replay_core.dumps.fields import flatten
from replay_core.dumps.listing import Folder, is_file, listing
from replay_core.errors import DumpError, RldbgError
from replay_core.records import Fields, Problem, RecordKey, TensorRef, Unreadable
from replay_core.regexes import regex

_INDEX = regex(
    r"(?:model|pytorch_model|adapter_model|diffusion_pytorch_model)(?:\.\w+)?\.(?:safetensors|bin)\.index\.json"
)
_SINGLE = ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin")
#: Files that nothing but weights is called, with a config.json beside them or without.
_UNMISTAKABLE = ("adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin")
_SHARD = regex(
    r"((?:model|pytorch_model|adapter_model|diffusion_pytorch_model)(?:\.\w+)?)-(\d{1,6})-of-(\d{1,6})\.(safetensors|bin)"
)
_STEP = regex(r"(?:checkpoint|global_step|step|iter)[_-]?(\d{1,18})")
MAX_INDEX = 1 << 28
#: More shards than this are a name that lies.
MAX_SHARDS = 4096


def detect(path: Path) -> bool:
    if is_file(path):
        return _INDEX.fullmatch(path.name) is not None
    return any(_holder(folder) for folder in listing(path).folders)


def _holder(folder: Folder) -> str | None:
    """The file that stands for a folder's weights: the index where there is one."""
    if not {".json", ".safetensors", ".bin"} & set(folder.suffixes):
        return None
    index = next((entry for entry in folder.names if _INDEX.fullmatch(entry)), None)
    if index is not None:
        return index
    single = _SINGLE if "config.json" in folder.names else _UNMISTAKABLE
    return next((entry for entry in single if entry in folder.names), None) or _first_shard(folder)


def _first_shard(folder: Folder) -> str | None:
    """The first of a folder's shards, where no index speaks for them; safetensors before .bin, as their readers do."""
    if ".safetensors" not in folder.suffixes and ".bin" not in folder.suffixes:
        return None
    shards = [entry for entry in folder.names if _SHARD.fullmatch(entry)]
    return min(shards, key=lambda entry: (entry.endswith(".bin"), entry), default=None)


def index(path: Path) -> Index:
    found = Index([])
    for folder in listing(path).folders:
        holder = path.name if path.is_file() else _holder(folder)
        if holder is None:
            continue
        steps = [int(m.group(1)) for part in folder.path.split("/")[-3:] if (m := _STEP.fullmatch(part))]
        found.files.append((RecordKey(steps[-1] if steps else None, None, None, "actor", "param"), folder.file(holder)))
        of_the_index = _named_by(folder.file(holder), folder.names) if holder.endswith(".index.json") else set()
        found.beside += [
            folder.file(entry) for entry in folder.names if _SHARD.fullmatch(entry) or entry in of_the_index
        ]
    return found


def _named_by(path: Path, names: Iterable[str]) -> set[str]:
    """The files of a folder that its index names and that are not called as shards are: they are read through it."""
    others = {name for name in names if name.endswith((".safetensors", ".bin")) and not _SHARD.fullmatch(name)}
    try:
        return others & set(_weight_map(path).values()) if others else others
    except RldbgError:
        return set()


def read(key: RecordKey, path: Path) -> list[TensorRef]:
    of_a_set = _SHARD.fullmatch(path.name)
    if of_a_set is not None:
        return _shards(path, of_a_set)
    if not path.name.endswith(".index.json"):
        return _in_order(flatten(read_container(path).tree))
    places = _weight_map(path)
    fields: list[TensorRef] = []
    problems: list[Problem] = []
    shards: dict[str, list[str]] = {}
    #: What a file holds, by the file itself: names that are links to one of them are one file.
    read_of: dict[tuple[int, int], dict[str, TensorRef]] = {}
    for tensor, file in places.items():
        shards.setdefault(file, []).append(tensor)
    if len(shards) > MAX_SHARDS:
        raise DumpError(
            "the index names more files than any model has", file=str(path), expected=f"at most {MAX_SHARDS:,}",
            found=f"{len(shards):,}",
        )  # fmt: skip
    for shard, names in shards.items():
        held: dict[str, TensorRef] = {}
        why = "the index says it is here, the file does not have it"
        if "/" in shard or "\\" in shard or shard in ("", ".", ".."):
            why = "the index leads out of the directory"
            problems.append(Problem(str(path), f"{why}: {shard[:80]!r}"))
        else:
            try:
                file_id = _identity(path.parent / shard)
                if file_id not in read_of:
                    tree = read_container(path.parent / shard).tree
                    read_of[file_id] = {ref.name: ref for ref in flatten(tree)}
                held = read_of[file_id]
            except RldbgError as error:
                why = error.message
                problems.append(Problem(str(path.parent / shard), error.message))
        lost = sum(tensor not in held for tensor in names)
        if lost and held:
            problems.append(Problem(str(path.parent / shard), f"{lost} tensors of the index are not in the file"))
        fields += [held.get(tensor, TensorRef(tensor, "none", (), Unreadable(why))) for tensor in names]
    return Fields(_in_order(fields), problems)


def _shards(path: Path, shard: re.Match[str]) -> Fields:
    """The tensors of every shard of a set; one that cannot be read stands as an unreadable tensor of its name."""
    stem, number, total, suffix = shard.groups()
    fields: list[TensorRef] = []
    problems: list[Problem] = []
    seen: dict[tuple[int, int], str] = {}
    for at in range(1, min(int(total), MAX_SHARDS) + 1):
        file = path.with_name(f"{stem}-{at:0{len(number)}d}-of-{total}.{suffix}")
        if (first := seen.setdefault(_identity(file), file.name)) != file.name:
            problems.append(Problem(str(file), f"it is the same file as {first}, and was read once"))
            continue
        try:
            fields += flatten(read_container(file).tree)
        except RldbgError as error:
            problems.append(Problem(str(file), f"{error.message}; shard {at} of {int(total)}, which no index lists"))
            fields.append(TensorRef(file.name, "none", (), Unreadable(error.message)))
    return Fields(_in_order(fields), problems)


def _identity(file: Path) -> tuple[int, int]:
    """What a file is, whatever it is called; of one that cannot be looked at, something of its own."""
    try:
        stat = file.stat()
    except OSError:
        return 0, hash(file)
    return stat.st_dev, stat.st_ino


def _in_order(fields: list[TensorRef]) -> list[TensorRef]:
    """The tensors under their canonical names, as a forward comes to them: files and shards know no such order."""
    named = [ref.with_(canonical=naming.canonical(f"param.{ref.name}")) for ref in fields]
    named.sort(key=lambda ref: naming.called(ref.canonical or ref.name))
    return [ref.with_(order=order) for order, ref in enumerate(named)]


def _weight_map(path: Path) -> dict[str, str]:
    places = read_object(path, "the index of weights", MAX_INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise DumpError("the index of weights has no weight_map", file=str(path), expected="{tensor: file}")
    return places


DIALECT = Dialect("weights", "names", detect, index, read)
