"""Other people's comparers, the real ones, where they are installed: their own dumps written, their own commands run.

They pull a different torch, so they go into an environment beside this one, without their dependencies, and then the
few imports that are left (each run of the command names the next one):

    python -m venv peers
    ls -d $PWD/.venv/lib/python3.*/site-packages > $(ls -d peers/lib/python3.*)/site-packages/rldbg.pth
    peers/bin/pip install --no-deps sglang polygraphy mindstudio-probe
    peers/bin/pip install polars pyzmq orjson einops pandas openpyxl matplotlib pytz pybase64 tensorboard
    peers/bin/python -m benchmarks matrix differing

sglang's comparator imports the whole inference server for a helper of its dumper: three modules that comparing never
calls are replaced by empty ones, and its package's start-up is left out, which only makes it faster.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import importlib.metadata
import importlib.util
import io
import json
import re
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Fields = Mapping[str, Any]

_SGLANG = "sglang.srt.debug_utils.comparator"
#: Modules of the server that sglang's dumper imports and its comparator never uses.
_UNUSED = ("sglang.srt.managers", "sglang.srt.managers.io_struct", "sglang.srt.runtime_context", "sglang.srt.utils")


@dataclass(frozen=True)
class Tool:
    """One of them: how it is called, how it is packaged, and what loads it."""

    name: str
    package: str
    load: Callable[[], Any]

    def missing(self) -> str | None:
        """Why it cannot be run here; None where it can."""
        try:
            with _quietly():
                self.load()
        except Exception as error:  # whatever half an installation raises
            return f"{type(error).__name__}: {error}"
        return None

    def version(self) -> str:
        return f"{self.package} {importlib.metadata.version(self.package)}"


class _Empty(types.ModuleType):
    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def sglang_comparator() -> Any:
    """The module of sglang's comparator.

    Raises:
        ImportError: it is not installed, or something it imports is not.
    """
    if _SGLANG not in sys.modules:
        spec = importlib.util.find_spec("sglang")
        if spec is None:
            raise ImportError("sglang is not installed (pip install --no-deps sglang)")
        folders = list(spec.submodule_search_locations or ())
        for name, below in (("sglang", ""), ("sglang.srt", "/srt")):
            package = types.ModuleType(name)
            package.__path__ = [folder + below for folder in folders]
            sys.modules[name] = package
        for name in _UNUSED:
            sys.modules[name] = _Empty(name)
    return importlib.import_module(f"{_SGLANG}.entrypoint")


def msprobe_compare() -> Callable[..., Any]:
    """msprobe's own comparison of two PyTorch dumps.

    Raises:
        ImportError: it is not installed, or something it imports is not.
    """
    if importlib.util.find_spec("msprobe") is None:
        raise ImportError("msprobe is not installed (pip install --no-deps mindstudio-probe)")
    module = importlib.import_module("msprobe.pytorch.compare.pt_compare")
    compare: Callable[..., Any] = module.pt_compare
    return compare


def write_sglang(folder: Path, fields: Fields) -> Path:
    """A dump as sglang's dumper leaves it: a file per tensor, its tags in its name."""
    folder.mkdir(parents=True)
    for number, (name, value) in enumerate(fields.items(), 1):
        tags = {"step": 0, "rank": 0, "dump_index": number, "name": name}
        stem = "___".join(f"{tag}={one}" for tag, one in tags.items())
        torch.save({"value": value, "meta": tags}, folder / f"{stem}.pt")
    return folder


def write_msprobe(folder: Path, fields: Fields) -> Path:
    """A dump as msprobe's debugger leaves it at level L0: every tensor the output of a module of its own.

    Its verdict asks whether good input became bad output: every module has one input, the same on both sides.
    """
    held = folder / "step0" / "proc0" / "dump_tensor_data"
    held.mkdir(parents=True)
    data: dict[str, Any] = {}
    given = torch.ones(1)
    torch.save(given, held / "given.pt")
    for name, value in fields.items():
        call = f"Module.{re.sub(r'[^A-Za-z0-9_.]', '_', name)}.Linear.forward.0"
        file = f"{call}.output.0.pt"
        torch.save(value, held / file)
        inputs = [_described(given, "given.pt")]
        data[call] = {"input_args": inputs, "input_kwargs": {}, "output": [_described(value, file)], "parameters": {}}
    said = {"task": "tensor", "level": "L0", "framework": "pytorch", "dump_data_dir": str(held), "data": data}
    beside = {"dump": said, "construct": dict.fromkeys(data), "stack": {"0": [list(data), []]}}
    for name, content in beside.items():
        (held.parent / f"{name}.json").write_text(json.dumps(content))
    return held.parent


def _described(value: torch.Tensor, file: str) -> dict[str, Any]:
    numbers = value.double() if value.dtype != torch.bool else value.float()
    figures = (numbers.max(), numbers.min(), numbers.mean(), numbers.norm()) if value.numel() else [None] * 4
    named = zip(("Max", "Min", "Mean", "Norm"), figures, strict=True)
    return {
        "type": "torch.Tensor", "dtype": str(value.dtype), "shape": list(value.shape),
        **{name: None if figure is None else figure.item() for name, figure in named},
        "requires_grad": False, "data_name": file,
    }  # fmt: skip


def run_sglang(a: Path, b: Path) -> int:
    """Its exit code for two dumps: 0 where nothing failed."""
    module = sglang_comparator()
    words = ["--baseline-path", str(a), "--target-path", str(b), "--report-path", "", "--verbosity", "minimal"]
    code: int = module.run(module.parse_args(words))
    return code


def run_msprobe(a: Path, b: Path, out: Path) -> list[dict[str, str]]:
    """The rows of its table for two dumps: `msprobe compare -tp B -gp A -o OUT` of one rank."""
    compare = msprobe_compare()
    out.mkdir(parents=True, exist_ok=True)
    before = {*out.glob("*.csv")}  # a round before this one's
    asked = {"npu_path": str(b / "dump.json"), "bench_path": str(a / "dump.json"), "is_print_compare_log": True}
    switches = dict.fromkeys(("fuzzy_match", "diff_analyze", "xlsx", "consistent_check"), False)
    compare(asked, str(out), **switches, **dict.fromkeys(("cell_mapping", "layer_mapping", "data_mapping", "backend")))
    (table,) = {*out.glob("*.csv")} - before
    with open(table, newline="") as file:
        return list(csv.DictReader(file))


def sglang_says(a: Fields, b: Fields) -> bool:
    """Whether sglang's comparator leaves with 0."""
    with tempfile.TemporaryDirectory(prefix="rldbg-sglang-") as folder, _quietly():
        sides = [write_sglang(Path(folder) / which, fields) for which, fields in (("a", a), ("b", b))]
        return run_sglang(*sides) == 0


def msprobe_says(a: Fields, b: Fields) -> bool:
    """Whether msprobe's table has no row but `pass`."""
    with tempfile.TemporaryDirectory(prefix="rldbg-msprobe-") as folder, _quietly():
        sides = [write_msprobe(Path(folder) / which, fields) for which, fields in (("a", a), ("b", b))]
        return all(row["Result"] == "pass" for row in run_msprobe(*sides, Path(folder) / "out"))


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


SGLANG = Tool("sglang", "sglang", sglang_comparator)
MSPROBE = Tool("msprobe", "mindstudio-probe", msprobe_compare)


def main() -> None:
    """`python -m benchmarks.installed sglang|msprobe A B [OUT]`: one comparison, as a whole command."""
    tool, a, b, *out = sys.argv[1:]
    if tool == "sglang":
        run_sglang(Path(a), Path(b))
    else:
        run_msprobe(Path(a), Path(b), Path(out[0]))


if __name__ == "__main__":
    main()
