"""What a command or an import pays for, looked up in `sys.modules` of a fresh process."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = {"torch", "transformers", "numpy", "scipy", "ml_dtypes"}

_REPORT = """
import json, runpy, sys
code = 0
try:
{body}
except SystemExit as leaving:
    code = leaving.code or 0
tops = sorted({{name.partition(".")[0] for name in sys.modules}})
print(json.dumps({{"code": code, "tops": tops, "names": sorted(sys.modules)}}), file=sys.stderr)
"""


def loaded(*lines: str, arguments: tuple[str, ...] = (), expect: int = 0) -> dict[str, list[str]]:
    """The modules a fresh Python holds after running the lines: `tops` their first words, `names` in full."""
    body = "\n".join(f"    {line}" for line in lines)
    answer = subprocess.run(
        [sys.executable, "-c", _REPORT.format(body=body), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert answer.stderr.strip(), answer
    report = json.loads(answer.stderr.splitlines()[-1])
    assert report["code"] == expect, answer.stderr
    return {"tops": report["tops"], "names": report["names"]}


def command(*words: str, expect: int = 0) -> dict[str, list[str]]:
    """The modules that `python -m tui_debugger WORDS` loads."""
    return loaded('runpy.run_module("tui_debugger", run_name="__main__")', arguments=words, expect=expect)


def document_types(loaded: dict[str, list[str]]) -> list[str]:
    """The types of documents among what was loaded: each of their fields is compiled, 25 ms that only mypy needs."""
    return [name for name in loaded["names"] if re.match(r"replay_core\.documents\.(?!version$)", name)]


@pytest.mark.long
def test_the_screen_imports_neither_torch_nor_numpy():
    every = (
        "import importlib, pkgutil, tui_debugger",
        'for found in pkgutil.walk_packages(tui_debugger.__path__, "tui_debugger."):',
        '    found.name.endswith("__main__") or importlib.import_module(found.name)',
    )
    screen = loaded(*every)
    assert "tui_debugger.screens.debugger" in screen["names"]
    assert not HEAVY & set(screen["tops"])


@pytest.mark.parametrize("package", ["replay_core", "tui_debugger"])
def test_the_root_of_a_package_imports_nothing(package: str):
    names = loaded(f"import {package}")["names"]
    assert [name for name in names if name.startswith(("replay_core", "tui_debugger"))] == [package]


def test_listing_imports_no_numpy_no_torch_and_no_screen(small_dump: Path):
    for words in (("--names-only",), ("--json",)):
        listed = command("ls", str(small_dump), *words)
        assert not (HEAVY | {"textual"}) & set(listed["tops"]), words
        assert not document_types(listed)


def test_opening_imports_no_numpy(small_dump: Path):
    opened = loaded("from replay_core.dumps import open_run", f"assert open_run({str(small_dump)!r}).records")
    assert not HEAVY & set(opened["tops"])


def test_showing_imports_no_torch_and_no_screen(small_dump: Path):
    shown = command("show", str(small_dump), "log_probs", "--step", "1", "--stage", "forward_data")
    assert not {"torch", "transformers", "scipy", "textual"} & set(shown["tops"])
    assert "numpy" in shown["tops"], "this test looks at a command that reads bytes"


def test_comparing_imports_no_torch_and_no_screen(small_dump: Path):
    compared = command("compare", str(small_dump), str(small_dump), "--json")
    assert not document_types(compared)
    assert not {"torch", "transformers", "scipy", "textual"} & set(compared["tops"])


@pytest.mark.parametrize("words", [("--help",), ("--version",), ("compare", "--help"), ("replay", "--help")])
def test_help_imports_no_library_it_does_not_print_with(words: tuple[str, ...]):
    assert not (HEAVY | {"textual"}) & set(command(*words)["tops"])


def test_the_replaying_command_itself_imports_no_torch(small_dump: Path):
    """The child does; the parent only waits for it."""
    answer = command("replay", str(small_dump), "--step", "9", "--model", "random:llama-tiny", expect=2)
    assert "torch" not in answer["tops"]


def test_importing_the_recorder_imports_the_standard_library_only():
    tops = loaded("import replay_core.recorder")["tops"]
    bare = loaded("pass")["tops"]
    assert set(tops) - set(bare) - set(sys.stdlib_module_names) == {"replay_core"}


_RECORD = """
import importlib.abc, sys

target, allowed = sys.argv[1], set(sys.argv[2].split(","))


class Refusal(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in allowed:
            raise ModuleNotFoundError(f"not in this environment: {name}", name=name)
        return None


sys.path.insert(0, target)
sys.meta_path.insert(0, Refusal())
import torch
from replay_core.recorder import Recorder
import replay_core

assert replay_core.__file__.startswith(target), replay_core.__file__
before = set(sys.modules)
model = torch.nn.Linear(3, 2)
recorder = Recorder(target + "/dump", flags={"packing": False}, config={"lr": 0.1})
with recorder.step(0) as record:
    record("forward_data", micro=0, hidden=model(torch.ones(4, 3)), ids=torch.arange(4), note="text")
from replay_core.recorder import BlackBox
for form in ("jsonl", "safetensors"):
    with Recorder(f"{target}/{form}", format=form, asynchronous=True, black_box=BlackBox()) as other:
        with other.step(0) as record, record.modules(torch.nn.Sequential(model), micro=0):
            record("loss", loss=torch.tensor(float("nan")))
        assert other.forecast(model).step_bytes
tops = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
ours = {"click", "textual", "rich", "msgspec", "xxhash", "isal", "ml_dtypes", "safetensors", "psutil", "platformdirs"}
ours |= {"scipy"}
assert not tops & ours, tops & ours
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "trainer",
    [
        pytest.param(("torch", "numpy"), id="torch and numpy"),
        pytest.param(("torch",), id="torch alone", marks=pytest.mark.slow),
    ],
)
def test_the_recorder_writes_where_only_the_trainers_libraries_are(
    trainer: tuple[str, ...], wheel: Path, tmp_path: Path
):
    """`pip install --no-deps rldbg` beside what the trainer has, every other package refused."""
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True, capture_output=True, timeout=120)
    libraries = set().union(*(_tops_of(name) for name in trainer))
    allowed = {*sys.stdlib_module_names, "replay_core", *libraries, *_editable_finders()}
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _RECORD, str(target), ",".join(sorted(allowed))],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert answer.returncode == 0, answer.stderr
    assert (target / "dump" / "forward_data" / "step_000000_rank0_micro0.pt").is_file()
    alone = "import sys; sys.path.insert(0, sys.argv[1]); import tui_debugger.cli"
    told = subprocess.run(
        [sys.executable, "-I", "-S", "-c", alone, str(target)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (told.returncode, "pip install rldbg, without --no-deps" in told.stderr) == (4, True), told.stderr
    assert "Traceback" not in told.stderr


def _tops_of(distribution: str) -> set[str]:
    """What can be imported of a distribution and of everything it requires."""
    seen: set[str] = set()
    waiting = [distribution]
    while waiting:
        name = _normal(waiting.pop())
        if name in seen:
            continue
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        seen.add(name)
        waiting += [re.split(r"[^A-Za-z0-9._-]", line)[0] for line in requires if "extra ==" not in line]
    by_top = importlib.metadata.packages_distributions()
    return {top for top, owners in by_top.items() if seen & {_normal(owner) for owner in owners}}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _editable_finders() -> set[str]:
    """Modules that .pth files of this environment import at start-up, before the refusal stands."""
    site = Path(sysconfig.get_path("purelib"))
    return {path.stem for path in site.glob("*.py")}


@pytest.mark.long
def test_diagnosing_imports_no_torch(small_dump: Path):
    used = command("diagnose", str(small_dump), "--fail-on", "never")
    assert not {"torch", "transformers", "scipy"} & set(used["tops"])
