"""msprobe's precision dumps: [stage/]step{N}/rank{R}/dump.json, its tensors in dump_tensor_data/*.{pt,npy}.

`Module.layers.0.mlp.Mlp.forward.0` with its inputs and outputs becomes layers.0.mlp.inputs.0 and
layers.0.mlp.output; a backward's become grad_output and grad_input. A "statistics" dump has no tensors: its
figures are fields of their own.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from replay_core import naming
from replay_core.dumps.containers import read_container
from replay_core.dumps.containers.json_lines import read_object
from replay_core.dumps.dialect import Dialect, Index
from replay_core.dumps.listing import Folder, listing
from replay_core.errors import DumpError, RldbgError
from replay_core.file_spans import regular
from replay_core.records import Fields, Inline, Problem, RecordKey, TensorRef, Unreadable
from replay_core.regexes import regex

_STEP = regex(r"step_?(\d{1,18})")
_RANK = regex(r"rank_?(\d{1,18})")
#: A process that torch.distributed was not asked in: its id is new in every run.
_PROCESS = regex(r"proc_?(\d{1,18})")
#: `Module.<name>.<Class>.forward.<call>`; L1 dumps have `Functional.linear.3.forward` and `Tensor.add.0.backward`.
_MODULE = regex(r"(?:Module|Cell)\.(.+)\.([A-Za-z_]\w*)\.(forward|backward)\.(\d+)")
_PARAMETERS = regex(r"(?:Module|Cell)\.(.+)\.[A-Za-z_]\w*\.parameters_grad(?:\.\d+)?")
_CALL = regex(r"(\w+(?:\.\w+)*?)\.(\d+)\.(forward|backward)")
_FIGURES = ("Max", "Min", "Mean", "Norm")
#: verl's precision_debugger names the stage in the directory above the steps.
_ROLES = {"ref_compute_log_prob": "ref", "compute_values": "critic", "critic_update": "critic",
          "compute_rm_score": "reward"}  # fmt: skip
#: The forward before the update is the earlier of a role's two in a step.
_MICROS = {"actor_compute_log_prob": 0, "actor_update": 1, "compute_values": 0, "critic_update": 1}
MAX_JSON = 1 << 29


def detect(path: Path) -> bool:
    return any(_is_dump(file) for _, file in _files(path))


def _files(path: Path) -> Iterator[tuple[Folder, Path]]:
    for folder in listing(path).folders:
        if "dump.json" in folder.names:
            yield folder, folder.file("dump.json")


def _is_dump(file: Path) -> bool:
    try:
        with regular(file) as stream:
            head = stream.read(2048)
    except DumpError:
        return False
    return b'"data"' in head or (b'"task"' in head and b'"dump_data_dir"' in head)


def index(path: Path) -> Index:
    found = Index([])
    base = len(path.parts)
    stages: dict[str, set[int]] = defaultdict(set)
    processes: dict[str, set[int]] = defaultdict(set)
    for folder, _ in _files(path):
        if match := _PROCESS.fullmatch(Path(folder.path).name):
            processes[str(Path(folder.path).parent)].add(int(match.group(1)))
    for folder, file in _files(path):
        above = list(Path(folder.path).parts[max(base - 3, 0) :])
        step, rank = _last(_STEP, above), _last(_RANK, above)
        if rank is None and (process := _last(_PROCESS, above)) is not None:
            rank = sorted(processes[str(Path(folder.path).parent)]).index(process)
            found.notes.append("the directories name processes, not ranks: they are numbered from 0 in each step")
        role = next((_ROLES[part] for part in reversed(above) if part in _ROLES), "actor")
        micro = next((_MICROS[part] for part in reversed(above) if part in _MICROS), None)
        if micro is not None:
            stages[role].add(micro)
        found.files.append((RecordKey(step, micro, rank, role, "modules"), file))
    if any(len(micros) > 1 for micros in stages.values()):
        found.notes.append("micro 0 is the forward for log-probabilities or values, micro 1 the update")
    else:
        found.files = [(replace(key, micro=None), file) for key, file in found.files]
    dumps = {str(file.parent) for _, file in found.files}
    for folder in listing(path).folders:
        if folder.name == "dump_tensor_data" and str(Path(folder.path).parent) in dumps:
            found.beside += [folder.file(entry) for entry in folder.names]
    found.notes = list(dict.fromkeys(found.notes))
    return found


def _last(pattern: re.Pattern[str], parts: list[str]) -> int | None:
    return next((int(match.group(1)) for part in reversed(parts) if (match := pattern.fullmatch(part))), None)


def read(key: RecordKey, path: Path) -> list[TensorRef]:
    data = read_object(path, "dump.json", MAX_JSON).get("data")
    if not isinstance(data, dict):
        raise DumpError("dump.json has no data", file=str(path), expected="an object of calls")
    reading = _ProbeReading(path.parent)
    for call, entry in data.items():
        if isinstance(entry, dict):
            reading.call(str(call), entry)
    return Fields(reading.fields, reading.problems)


def _canonical(field: str) -> str:
    """The project's name; the wrappers of a module are dropped behind `grad_output.` too."""
    for prefix in ("grad_output.", "grad_input."):
        if field.startswith(prefix):
            return prefix + naming.canonical(f"param.{field[len(prefix) :]}").removeprefix("param.")
    return naming.canonical(field)


class _ProbeReading:
    """The fields of one dump.json, in the order of its calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fields: list[TensorRef] = []
        self.problems: list[Problem] = []
        self._seen: dict[str, int] = {}

    def call(self, call: str, entry: dict[str, Any]) -> None:
        match = _MODULE.fullmatch(call)
        if match is None:
            parameters = _PARAMETERS.fullmatch(call)
            if parameters is not None:
                for parameter, value in entry.items():
                    for item in value if isinstance(value, list) else [value]:
                        self._tensor(f"grad.{parameters.group(1)}.{parameter}", item)
                return
            other = _CALL.fullmatch(call)
            module, direction, number = (
                (other.group(1), other.group(3), int(other.group(2))) if other else (call, "", 0)
            )
        else:
            module, direction, number = match.group(1), match.group(3), int(match.group(4))
        repeated = f"#{number + 1}" if number else ""
        if direction == "backward":
            self._tree(f"grad_output.{module}{repeated}", entry.get("input", entry.get("grad_output")))
            self._tree(f"grad_input.{module}{repeated}", entry.get("output", entry.get("grad_input")))
            return
        self._tree(f"{module}{repeated}.inputs", entry.get("input_args", entry.get("input")), always_numbered=True)
        self._tree(f"{module}{repeated}.inputs", entry.get("input_kwargs"))
        self._tree(f"{module}{repeated}.output", entry.get("output"))
        self._tree(f"param.{module}", entry.get("parameters"))

    def _tree(self, field: str, value: Any, always_numbered: bool = False, depth: int = 0) -> None:
        if depth > 16 or value is None:
            return
        if isinstance(value, list):
            for number, item in enumerate(value):
                alone = len(value) == 1 and not always_numbered
                self._tree(field if alone else f"{field}.{number}", item, depth=depth + 1)
        elif isinstance(value, dict) and "type" in value and not isinstance(value["type"], dict):
            self._tensor(field, value)
        elif isinstance(value, dict):
            for part, item in value.items():
                self._tree(f"{field}.{part}", item, depth=depth + 1)

    def _tensor(self, field: str, said: Any) -> None:
        if not isinstance(said, dict):
            return
        count = self._seen[field] = self._seen.get(field, 0) + 1
        unique = _canonical(field if count == 1 else f"{field}#{count}")
        if said.get("type") == "NoneType" or ("value" in said and said["value"] is None):
            return
        dtype = str(said.get("dtype", "none")).rpartition(".")[2].lower()
        shape = said.get("shape")
        size = (
            tuple(shape) if isinstance(shape, list) and all(type(n) is int and 0 <= n < 1 << 40 for n in shape) else ()
        )
        stored = said.get("data_name")
        if isinstance(stored, str) and stored not in ("", "-1"):
            self.fields.append(self._stored(unique, stored, dtype, size))
        elif "value" in said:
            plain = said["value"]
            kind = {bool: "bool", int: "int64", float: "float64"}.get(type(plain))
            value = plain if kind else str(plain)
            self.fields.append(TensorRef(unique, kind or "text", (), Inline(value), order=len(self.fields)))
        elif isinstance(shape, list) or "dtype" in said:
            why = "only its statistics were dumped (task: statistics)"
            self.fields.append(TensorRef(unique, dtype, size, Unreadable(why), unique, order=len(self.fields)))
            self._figures(unique, said)
        else:
            # A process group, a generator: what msprobe says of it, as it says it.
            text = json.dumps(said, default=str)
            self.fields.append(TensorRef(unique, "text", (), Inline(text), order=len(self.fields)))
        if self.fields[-1].canonical is None:
            self.fields[-1] = self.fields[-1].with_(canonical=unique)

    def _figures(self, field: str, said: dict[str, Any]) -> None:
        for figure in _FIGURES:
            value = said.get(figure)
            if value in ("nan", "inf", "-inf", "NaN", "Infinity", "-Infinity"):
                value = float(value)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                name = f"metrics.{field}.{figure.lower()}"
                self.fields.append(
                    TensorRef(name, "float64", (), Inline(float(value)), canonical=name, order=len(self.fields))
                )

    def _stored(self, field: str, stored: str, dtype: str, size: tuple[int, ...]) -> TensorRef:
        """The tensor in its own file, which must be one beside dump.json: a name with a path in it leads nowhere."""
        order = len(self.fields)
        missing = TensorRef(field, dtype, size, Unreadable(""), canonical=field, order=order)
        if "/" in stored or "\\" in stored or stored.startswith("."):
            return missing.with_(source=Unreadable("its data_name leads out of the dump"))
        file = self.folder / "dump_tensor_data" / stored
        try:
            tree = read_container(file).tree
        except RldbgError as error:
            self.problems.append(Problem(str(file), error.message))
            return missing.with_(source=Unreadable(error.message))
        if not isinstance(tree, TensorRef):
            return missing.with_(source=Unreadable("its file holds no tensor"))
        return tree.with_(name=field, canonical=field, order=order)


DIALECT = Dialect("msprobe", "names", detect, index, read)
