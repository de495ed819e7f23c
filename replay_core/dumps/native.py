"""rldbg's own dump (docs/dump-format.md): manifest, index per rank, one file per record."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from math import prod
from pathlib import Path
from stat import S_ISLNK
from typing import Any

from msgspec import Struct

from replay_core import naming
from replay_core.budget import reading, spend_bytes
from replay_core.dumps.containers.json_lines import NAMED_LINES, NoJsonError, decode, read_object
from replay_core.dumps.containers.torch_rebuild import geometry
from replay_core.dumps.dialect import Dialect, Index
from replay_core.dumps.dtensor import MAX_RANKS, PARTIAL, STRIDED, laid_together, order_of_cuts
from replay_core.dumps.fields import flatten, join, settled
from replay_core.dumps.native_files import read_tree
from replay_core.dumps.stated_texts import told_in_texts
from replay_core.errors import DumpError
from replay_core.file_spans import kept_while_unchanged, regular
from replay_core.records import ALIGNMENTS, STAGES, Inline, Problem, RecordKey, TensorRef, Unreadable
from replay_core.regexes import regex

#: A line lists the fields of one record.
MAX_LINE = 1 << 26
#: The newest layout this version reads.
FORMAT_VERSION = 1
#: The recorder keeps a few notes in it.
MAX_MANIFEST = 1 << 26

_FILE = regex(r"step_(\d{6,})(?:_rank(\d+))?(?:_micro(\d+))?\.(pt|safetensors|jsonl)$")
_INDEX = regex(r"index_rank(\d+)\.jsonl$")
#: How torch spells where a shard lies, in its short and its long words.
_PLACEMENT = regex(r"(?:S\(|Shard\(dim=)(\d+)\)")
_STRIDED = regex(r"(?:_S\(|_StridedShard\(dim=)(\d{1,9}), (?:sf=|split_factor=)?(\d{1,9})\)")
_PLACED = {"R": "Replicate", "Replicate()": "Replicate", "P": "Partial(sum)"}
_PLACED |= {f"P({how})": kind for kind, how in PARTIAL.items()}
#: Of a number of a step: more are no step, and Python makes no number of thousands.
_DIGITS = 18
#: What a parameter's name begins with, by the stage of the record that holds it.
_OF_PARAMETERS = {"gradient": "grad.", "param": "param."}
_KEY_FIELDS = ("step", "rank", "micro_idx", "epoch", "minibatch", "alignment")


def detect(path: Path) -> bool:
    manifest = path / "manifest.json"
    if not manifest.is_file():
        return False
    with regular(manifest) as file:
        return b'"rldbg-dump"' in file.read(4096)


def index(path: Path) -> Index:
    manifest = _manifest(path / "manifest.json")
    found = Index([], flags=manifest["flags"] or None)
    for step, reference in manifest["models"].items():
        if step != "*" and not (step.isdecimal() and len(step) <= _DIGITS):
            found.problems.append(
                Problem(str(path / "manifest.json"), f"{step[:40]!r} is no step; its model is ignored")
            )
            continue
        found.models[None if step == "*" else int(step)] = _model_path(path, str(reference))
    known = manifest.get("model_facts")
    name = known.get("name_or_path") if isinstance(known, dict) else None
    if not found.models and isinstance(name, str) and name:
        # What training began from: the weights of its first step, and near those of later ones.
        found.models[0] = name
    facts = manifest.get("facts")
    found.facts = dict(facts) if isinstance(facts, dict) else {}
    if told := told_in_texts(manifest["flags"], found.facts, manifest.get("command")):
        found.facts["told_in_texts"] = told
    switches = manifest.get("determinism")
    if isinstance(switches, dict) and "tf32_matmul" in switches:
        found.facts["tf32_matmul"] = switches["tf32_matmul"]
    started = manifest.get("environment")
    variables = started.get("variables") if isinstance(started, dict) else None
    if isinstance(variables, dict) and "WORLD_SIZE" in variables:
        found.facts["started_ranks"] = variables["WORLD_SIZE"]
    found.problems += [Problem(str(path / "manifest.json"), what) for what in _told(facts, "lost", "key", "why")]
    found.notes += _told(manifest, "incidents", "step", "what")
    keys, found.names, bare = _indexed(path, found.problems)
    found.files += bare
    for file in sorted(path.rglob("step_*")):
        match = _FILE.fullmatch(file.name)
        inside = file.relative_to(path).parts
        if match is None or "checkpoints" in inside:
            continue
        found.files.append((keys.pop(file) if file in keys else _key_of(inside, match), file))
    if keys:  # what was taken away on purpose (max_keep) since its index was read is listed there by now
        listed, *_ = _indexed(path, [])
        keys = {file: key for file, key in keys.items() if file in listed and not file.exists()}
    for missing, key in keys.items():
        what = "the index lists a record whose file is gone"
        found.problems.append(Problem(str(missing), what, key, is_lost=True))
    return found


def _manifest(file: Path) -> dict[str, Any]:
    manifest = read_object(file, "the manifest", MAX_MANIFEST)
    if not all(isinstance(manifest.get(part, {}), dict) for part in ("models", "flags")):
        raise DumpError("the manifest is none of rldbg's", file=str(file), expected="an object with models and flags")
    version = manifest.get("schema_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise DumpError(
            "the dump was written by a newer rldbg",
            file=str(file),
            expected=f"schema_version <= {FORMAT_VERSION}",
            found=str(version),
            hint="pip install --upgrade rldbg",
        )
    return {"models": {}, "flags": {}, **manifest}


def _told(facts: Any, part: str, which: str, why: str) -> list[str]:
    """What the recorder had to say: records it gave up (`lost`), what made its black box write (`incidents`)."""
    entries = facts.get(part) if isinstance(facts, dict) else None
    said = {"lost": "a record was lost: {}: {}", "incidents": "the black box wrote at step {}: {}"}[part]
    return [
        said.format(entry.get(which), entry.get(why))
        for entry in (entries if isinstance(entries, list) else ())
        if isinstance(entry, dict)
    ]


def _model_path(dump: Path, reference: str) -> str:
    """A relative reference is a directory inside the dump; a path that leads out of it stays a plain name."""
    # Of most references there is no such directory, and asking that is a tenth of finding out where it would lead.
    if os.path.isabs(reference) or "\0" in reference or not os.path.isdir(os.path.join(dump, reference)):
        return reference
    inside = (dump / reference).resolve()
    return str(inside) if inside.is_relative_to(dump.resolve()) else reference


def _indexed(
    path: Path, problems: list[Problem]
) -> tuple[dict[Path, RecordKey], dict[Path, tuple[str, ...]], list[tuple[RecordKey, Path]]]:
    """Keys and field names as the index files give them, and the records that are an index line and no file.

    A line cut short by a crash is a problem, not an end.
    """
    keys: dict[Path, RecordKey] = {}
    bare: list[tuple[RecordKey, Path]] = []
    names: dict[Path, tuple[str, ...]] = {}
    is_inside = _inside(path)
    for index_file in sorted(path.glob("index_rank*.jsonl")):
        wrong: Counter[str] = Counter()
        for number, line in _lines(index_file, problems):
            try:
                if not line.rstrip().endswith(b"}"):
                    raise NoJsonError("cut short")
                entry, _ = decode(line)
                if "removed" in entry:
                    # Taken away on purpose (max_keep).
                    keys.pop(path / entry["removed"], None)
                    continue
                key = RecordKey.from_mapping(entry["key"])
                if entry["file"] is None:
                    bare.append((key, index_file))
                    continue
                file = path / entry["file"]
                fields = tuple([naming.held_once(str(field["name"])) for field in entry["fields"]])
                what = None if is_inside(file) else "points outside the dump; ignored"
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                what = "unreadable index line; its file is read by name"
            if what is None:
                keys[file], names[file] = key, fields
                continue
            wrong[what] += 1
            if wrong[what] <= NAMED_LINES:
                problems.append(Problem(f"{index_file}:{number}", what))
        for what, count in wrong.items():
            if count > NAMED_LINES:
                problems.append(Problem(str(index_file), f"{count - NAMED_LINES:,} more lines: {what}"))
    return keys, names, bare


def _inside(dump: Path) -> Callable[[Path], bool]:
    """Whether a file is the dump's own, wherever links lead. A folder is asked once: an index has a line per record."""
    root = dump.resolve()
    known: dict[Path, bool] = {}

    def is_inside(file: Path) -> bool:
        folder = file.parent
        try:
            is_link = S_ISLNK(os.lstat(file).st_mode)
        except OSError:
            is_link = False
        if is_link or file.name == "..":
            return file.resolve().is_relative_to(root)
        if folder not in known:
            known[folder] = folder.resolve().is_relative_to(root)
        return known[folder]

    return is_inside


def _key_of(inside: tuple[str, ...], match: re.Match[str]) -> RecordKey:
    """A record's key from its place alone: [<role>/]<stage>/step_..."""
    step, rank, micro, _ = match.groups()
    stage = inside[-2] if len(inside) > 1 else "tensors"
    role = inside[-3] if len(inside) > 2 else "actor"
    return RecordKey(
        step=int(step),
        micro=None if micro is None else int(micro),
        rank=None if rank is None else int(rank),
        role=role,
        stage=stage if stage in STAGES else "tensors",
    )


def read(key: RecordKey, path: Path) -> list[TensorRef]:
    if _INDEX.fullmatch(path.name):
        return _described(key, path)
    tree = read_tree(path)
    if not isinstance(tree, dict):
        raise DumpError("a record holds a dict of fields", file=str(path), expected="dict", found=type(tree).__name__)
    said = tree.get("alignment")
    alignment = {name: word for name, word in said.items() if word in ALIGNMENTS} if isinstance(said, dict) else {}
    fields = flatten({field: _rows(field, value) for field, value in tree.items() if field not in _KEY_FIELDS})
    for ref in fields:  # just made, and nobody else's
        ref.canonical = _canonical(ref.name, ref.dtype, len(ref.shape), key.stage)
        if alignment:
            ref.alignment = alignment.get(ref.name, ref.alignment)
    named = _with_rest(key, path, _of_forward(key, settled(fields)))
    return _whole(key, path, named) if key.rank is not None else named


def _of_forward(key: RecordKey, fields: list[TensorRef]) -> list[TensorRef]:
    """The fields of a record, a bare `logprobs` among them by its company: beside the old ones of a forward's record it
    is what that forward gave. Alone, and in what was rolled out, it is the engine's.
    """
    if key.stage != "forward_data":
        return fields
    bare = [ref for ref in fields if ref.name == "logprobs"]
    others = [ref for ref in fields if ref.name != "logprobs"]
    is_told = any(ref.canonical == "rollout_logprobs" for ref in others)
    has_old = any(ref.canonical == "old_logprobs" and ref.name.startswith("old") for ref in others)
    if bare and (is_told or has_old) and all(ref.canonical != "policy_logprobs" for ref in others):
        bare[0].canonical = "policy_logprobs"
    return fields


def _rows(field: str, value: Any) -> Any:
    """A list of vectors as one tensor of rows: a trainer's column with a tensor per sample (slime's, verl's jagged)."""
    is_vectors = isinstance(value, list) and all(isinstance(row, TensorRef) and len(row.shape) == 1 for row in value)
    if is_vectors and len({row.dtype for row in value}) == 1:
        joined = join(field, value)
        return value if joined is None else joined if joined.rows is None else joined.with_(alignment="packed")
    return value


def _described(key: RecordKey, index_file: Path) -> list[TensorRef]:
    """A record of level hash or stats: what the index says of each field. The values themselves were not kept."""
    fields = _bare_lines(index_file).get(key)
    if fields is None:
        raise DumpError("the index no longer lists this record", file=str(index_file), expected=str(key))
    try:
        return _of_forward(key, [_described_field(field, order, key.stage) for order, field in enumerate(fields)])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DumpError(
            "the index line of this record cannot be read", file=str(index_file), expected="name, dtype, shape of each"
        ) from None


@kept_while_unchanged(4)
def _bare_lines(index_file: Path) -> dict[RecordKey, list[dict[str, Any]]]:
    """The fields of every record that is an index line and no file. Read once: there may be a record per line."""
    found: dict[RecordKey, list[dict[str, Any]]] = {}
    for _, line in _lines(index_file, []):
        try:
            entry = json.loads(line)
            if entry.get("file", "") is None:
                found.setdefault(RecordKey.from_mapping(entry["key"]), entry["fields"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return found


def _lines(index_file: Path, problems: list[Problem]) -> Iterator[tuple[int, bytes]]:
    """Number and text of every line that is not blank. An index that is no file, or cannot be read, is a problem."""
    try:
        with reading(index_file), regular(index_file) as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE), b""), 1):
                spend_bytes(len(line), "the index")
                if line.strip():
                    yield number, line
    except DumpError as error:
        problems.append(Problem(str(index_file), error.in_one_line))


def _canonical(name: str, dtype: str, axes: int, stage: str) -> str:
    """Ids [sample, position, hidden] are what a stage of a pipeline is given in their place: hidden states. What a
    record of gradients or of weights holds under the bare names of a model's parameters, the stage says.
    """
    known = naming.canonical(name)
    prefix = _OF_PARAMETERS.get(stage)
    if prefix is not None and axes and naming.is_parameter(known):
        return prefix + known
    is_hidden = known == "input_ids" and axes > 2 and dtype.startswith(("float", "bfloat"))
    return "inputs_embeds" if is_hidden else known


def _described_field(field: dict[str, Any], order: int, stage: str) -> TensorRef:
    # The same few names in every rank.
    title, dtype = naming.held_once(str(field["name"])), sys.intern(str(field["dtype"]))
    shape = geometry(tuple(field.get("shape") or ()), None).shape
    if "value" in field and field.get("shape") is None:
        value = field["value"]
        # JSON has no word for NaN and the infinities.
        inline = flatten({title: float(value) if dtype == "float" and isinstance(value, str) else value})
        if inline and isinstance(inline[0].source, Inline):
            return inline[0].with_(canonical=naming.canonical(title), order=order)
    stats, digest = field.get("stats"), field.get("digest")
    level = "statistics" if stats is not None else "digest" if digest is not None else "name"
    return TensorRef(
        title,
        dtype,
        shape,
        Unreadable(f"recorded as its {level} alone", stats if isinstance(stats, dict) else None),
        canonical=_canonical(title, dtype, len(shape), stage),
        order=order,
        digest=digest if isinstance(digest, str) else None,
    )


def told(key: RecordKey, path: Path) -> list[TensorRef] | None:
    """The fields of a record's file as its rank's index has them; None of one that holds shards, whose digests are of
    the parts, and where no index lists it."""
    own = f"index_rank{key.rank or 0}.jsonl"
    root = next((folder for folder in list(path.parents)[1:3] if (folder / own).is_file()), None)
    fields = None if root is None else _fields_of_files(root / own).get(str(path.relative_to(root)))
    if fields is None or any("global_shape" in field for field in fields):
        return None
    try:
        return _of_forward(key, [_described_field(field, order, key.stage) for order, field in enumerate(fields)])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _with_rest(key: RecordKey, path: Path, named: list[TensorRef]) -> list[TensorRef]:
    """The fields of a file with those whose figures alone were recorded: the index has them."""
    rest = None
    # By names alone: thousands of records are listed, and few dumps have any such.
    folder, inside = os.path.split(path)
    for _ in range(2):
        folder, name = os.path.split(folder)
        inside = f"{name}/{inside}"
        with contextlib.suppress(DumpError):
            rest = _rest(Path(folder, f"index_rank{key.rank or 0}.jsonl")).get(inside)
            break
    if not rest:
        return named
    held = {ref.name: ref for ref in named}
    try:
        every = [_described_field(field, order, key.stage) for order, field in enumerate(rest)]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DumpError(
            "the index line of this record cannot be read", file=str(path), expected="name, dtype, shape of each"
        ) from None
    return [held.pop(ref.name, ref) for ref in every] + list(held.values())


@kept_while_unchanged(64)
def _rest(index_file: Path) -> dict[str, list[dict[str, Any]]]:
    """File -> every field, of the records of which the file holds some."""
    return _fields_in(line for _, line in _lines(index_file, []) if b'"whole": false' in line)


@kept_while_unchanged(4)
def _fields_of_files(index_file: Path) -> dict[str, list[dict[str, Any]]]:
    """File -> what the index says of each field of it."""
    return _fields_in(line for _, line in _lines(index_file, []))


def _fields_in(lines: Iterable[bytes]) -> dict[str, list[dict[str, Any]]]:
    """The last line that names a file counts."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        try:
            entry = json.loads(line)
            if isinstance(entry.get("file"), str) and all(isinstance(one, dict) for one in entry["fields"]):
                found[entry["file"]] = entry["fields"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return found


class _Shard(Struct, frozen=True):
    """What a rank's record holds of a tensor: its place in the mesh, and what the whole looks like."""

    shape: tuple[int, ...]
    placements: tuple[tuple[str, int], ...]
    mesh: tuple[int, ...]
    coordinate: tuple[int, ...]
    #: Of the mesh's axes, in which they cut the tensor; None where that is not known.
    order: tuple[int, ...] | None


def _whole(key: RecordKey, path: Path, fields: list[TensorRef]) -> list[TensorRef]:
    """The fields, those of which the rank holds a shard laid together with the other ranks'."""
    own = f"index_rank{key.rank}.jsonl"
    root = next((folder for folder in list(path.parents)[1:3] if (folder / own).is_file()), None)
    mine = {} if root is None else _shards(root / own).get(str(path.relative_to(root)), {})
    if root is None or not mine:
        return fields
    every: dict[str, list[tuple[int, tuple[int, ...], TensorRef]]] = {name: [] for name in mine}
    indices = (found for one in root.glob("index_rank*.jsonl") if (found := _INDEX.fullmatch(one.name)))
    for rank in sorted((one[1] for one in indices), key=lambda digits: (len(digits), digits)):
        file = path.with_name(path.name.replace(f"_rank{key.rank}", f"_rank{rank}"))
        theirs = _shards(root / f"index_rank{rank}.jsonl").get(str(file.relative_to(root)), {})
        held = fields if file == path else flatten(read_tree(file)) if theirs and file.exists() else []
        for ref in held:
            if ref.name in theirs and ref.name in every:
                every[ref.name].append((int(rank), theirs[ref.name].coordinate, ref))
    return [_joined(ref, mine.get(ref.name), key.rank or 0, every) for ref in fields]


def _joined(
    ref: TensorRef, shard: _Shard | None, rank: int, every: dict[str, list[tuple[int, tuple[int, ...], TensorRef]]]
) -> TensorRef:
    if shard is None or not every[ref.name]:
        return ref
    at = _of_own_mesh(every[ref.name], rank, shard)
    whole = laid_together(at, shard.mesh, shard.placements, shard.shape, shard.order)
    return whole.with_(name=ref.name, canonical=ref.canonical, alignment=ref.alignment, order=ref.order)


def _of_own_mesh(
    held: list[tuple[int, tuple[int, ...], TensorRef]], rank: int, shard: _Shard
) -> dict[tuple[int, ...], TensorRef]:
    """By place, the shards of the mesh that a rank is in, which may be one of several (the tensor parallel groups of
    several replicas): meshes are numbered in one order, so that the n-th of the ranks at each place is of the n-th
    mesh. Of what is replicated along an axis, the rank's own copy.

    held: of each rank, in their order, its place and its shard.
    """
    by_place: dict[tuple[int, ...], list[tuple[int, TensorRef]]] = {}
    for other, place, ref in held:
        by_place.setdefault(place, []).append((other, ref))
    own = [other for other, _ in by_place.get(shard.coordinate, [])]
    if rank in own and {len(members) for members in by_place.values()} == {len(own)}:
        at = {place: members[own.index(rank)][1] for place, members in by_place.items()}
    else:
        at = {place: next((ref for other, ref in members if other == rank), members[-1][1])
              for place, members in by_place.items()}  # fmt: skip
    copies = [number for number, (kind, _) in enumerate(shard.placements) if kind == "Replicate"]
    if len(shard.coordinate) != len(shard.placements) or any(len(place) != len(shard.placements) for place in at):
        return at
    mine = {place: ref for place, ref in at.items() if all(place[n] == shard.coordinate[n] for n in copies)}
    firsts = {tuple(0 if n in copies else at_n for n, at_n in enumerate(place)): ref for place, ref in mine.items()}
    wanted = prod(size for n, size in enumerate(shard.mesh) if n not in copies)
    return firsts if len(firsts) == wanted else at


@kept_while_unchanged(64)
def _shards(index_file: Path) -> dict[str, dict[str, _Shard]]:
    """File -> field -> shard, of a rank's records that hold shards."""
    found: dict[str, dict[str, _Shard]] = {}
    for _, line in _lines(index_file, []):
        if b'"global_shape"' not in line:
            continue
        try:
            entry = json.loads(line)
            shards = {str(field["name"]): _shard(field) for field in entry["fields"] if "mesh" in field}
            found[str(entry["file"])] = shards
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return found


def _shard(field: dict[str, Any]) -> _Shard:
    shape, mesh, coordinate = (tuple(int(n) for n in field[part]) for part in ("global_shape", "mesh", "coordinate"))
    if min((*shape, *mesh, *coordinate), default=0) < 0 or prod(mesh) > MAX_RANKS or max(shape, default=0) >= 1 << 40:
        raise ValueError("no shape, or no mesh")
    placements: list[tuple[str, int]] = []
    factors: list[int | None] = []
    for said in field["placements"]:
        match, strided = _PLACEMENT.fullmatch(str(said)), _STRIDED.fullmatch(str(said))
        factors.append(int(strided.group(2)) if strided else None)
        if strided or match:
            dim = (strided or match).group(1)  # type: ignore[union-attr]
            placements.append((STRIDED if strided else "Shard", int(dim)))
        else:
            placements.append((_PLACED.get(str(said), str(said)), 0))
    order = order_of_cuts(factors, shape, placements, mesh) if len(placements) == len(mesh) else None
    placements = [("Shard" if kind == STRIDED else kind, dim) for kind, dim in placements]
    return _Shard(shape, tuple(placements), mesh, coordinate, None if order is None else tuple(order))


DIALECT = Dialect("native", "index", detect, index, read, told=told, grows=_INDEX.pattern)
