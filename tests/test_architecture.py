"""The floors of the house: which room may import which. A rule exists only because a test fails when it is broken."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.sources import statements

ROOT = Path(__file__).resolve().parents[1]

#: Rooms of `replay_core`, top floor first. An import only ever goes down; rooms of one floor do not know each other.
CORE_FLOORS: tuple[tuple[str, ...], ...] = (
    ("__main__",),  # the child process's loop
    ("desk",),  # a child's jobs, as calls of the workbench
    ("workbench",),  # the one façade
    ("inspection", "units"),  # one tensor under the glass, or two side by side; long jobs cut into files
    ("export",),  # documents that leave the machine
    ("executors",),  # jobs in child processes
    ("mismatch",),  # engine against trainer: which setting closes the gap
    ("parity", "referee", "weight_sync"),
    ("diagnose", "replay", "demo"),
    ("compare", "recorder", "rollouts", "telemetry"),
    ("dumps", "objectives"),
    ("samples",),  # which tokens of which samples
    ("measure", "decoding"),
    ("pages",),
    ("records", "naming", "jobs", "engine_names"),
    ("documents",),  # what leaves the machine, typed; the schema made of the types
    # bytes of a file without a SIGBUS; what a file may cost
    ("selection", "dtypes", "file_spans", "budget", "collecting", "read_ahead"),
    # the compiled loops: addresses, counts and descriptors; where a file's bytes land; digests of bytes
    ("kernel", "landing", "hashes"),
    ("remote",),  # objects behind a URL, as files that are filled while they are read
    ("mirrored",),  # which files these are
    ("errors", "regexes", "fold", "progress_bars"),  # fold: what a device makes of bytes before they are hashed
)

#: Rooms of `tui_debugger`, top floor first.
SCREEN_FLOORS: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("cli",),
    ("commands",),
    ("opening",),  # a dump brought onto it
    ("app",),  # the screen
    ("screens",),
    ("panes",),
    ("widgets", "session"),  # what is drawn, and who does what is asked for: neither knows the other
    ("flows",),  # what happens when a user acts, a file per thing one does
    ("filtering",),  # a long list between two keys
    ("handout",),  # an answer as a page, a comment or for CI, of its document alone
    ("reports",),  # the same answers as text
    ("engine", "snapshot", "messages", "keymap", "clipboard", "theming", "crash", "remembered", "peek", "together"),
    ("answer",),  # what the top of the screen says of the state
    ("state",),
    ("tensor_list",),
    ("tensor_rows", "parity_view", "tolerance", "health", "live", "trend_rows", "cells", "steps_compared"),
    ("terminal", "slow_link", "settings", "collecting"),
    ("failing", "progress_line"),  # what a command says beside its answer
    ("busy", "command_table"),  # a job that runs, for the screen and for the command line; which commands there are
    ("format", "paths", "actions", "token_colours", "sample_orders", "aside"),
)

#: What the front end may open of the core: a module, or only these names of it. And why.
DOORS: dict[str, tuple[tuple[str, ...] | None, str]] = {
    "replay_core": (("__version__",), "the number `--version` prints"),
    "replay_core.workbench": (None, "the façade: every headless command asks here"),
    "replay_core.jobs": (None, "what goes through the pipe to a child: Job, events, documents"),
    "replay_core.dtypes": (("aliases", "named"), "what people call dtypes: plain data"),
    "replay_core.budget": (("limit_process",), "memory of a process that reads untrusted files"),
    "replay_core.collecting": (("seldom",), "when a command that reads, answers and ends looks for garbage"),
    "replay_core.read_ahead": (("reading",), "files held together while a command is imported"),
    "replay_core.regexes": (("regex",), "expressions that are compiled when they are used"),
    "replay_core.errors": (None, "errors and the exit codes they mean"),
    "replay_core.records": (None, "RecordKey and Selection: what the user points at"),
    "replay_core.naming": (None, "canonical names, to find a tensor by any of its names"),
    "replay_core.dumps": (("open_run",), "names of a dump's records, by the standard library alone"),
    **{
        f"replay_core.documents.{kind}": (None, "the types of what is shown")
        for kind in (
            "parts",
            "kinds",
            "run",
            "record",
            "tensor",
            "difference",
            "comparison",
            "replay",
            "diagnosis",
            "parity",
            "info",
            "following",
            "explanation",
            "weights",
            "ruling",
            "samples",
            "mismatch",
            "gathering",
        )
    },
    "replay_core.documents.version": (None, "the version that every document carries"),
    "replay_core.documents.reopening": (("read_document",), "a saved document, by the schema that commands use"),
    "replay_core.documents.embedding": (None, "a document inside a page, and the beginning of one"),
    "replay_core.export.documents": (
        ("stamp", "check_place", "write_text"),
        "the documents that commands print and save",
    ),
    "replay_core.export.outcome": (("exit_code",), "what a document means to the shell"),
    "replay_core.export.written": (("pieces",), "a document as the text of its JSON, piece by piece"),
    "replay_core.export.scalars": (None, "what a document means to a dashboard: three numbers, no numpy"),
    "replay_core.export.dashboards": (("Dashboard", "dashboard"), "where `--scalars` puts them"),
    "replay_core.dumps.following": (("Follower",), "what has come to a run, for a command that waits for it"),
    "replay_core.executors": (("wire",), "the child's pipe"),
    "replay_core.executors.wire": (None, "the child's pipe"),
    "replay_core.executors.child": (None, "a child behind a command"),
    "replay_core.executors.async_child": (None, "a child behind the screen"),
    "replay_core.replay.flags": (None, "the choices of `--attention` and `--dtype`: plain data, no torch"),
    "replay_core.recorder.settings": (("Settings",), "what `record` is asked for, refused before the script begins"),
    "replay_core.remote.mirror": (("mirror",), "a URL as a folder of this machine"),
    "replay_core.remote.upload": (("upload",), "a folder of this machine brought to a URL"),
    "replay_core.mirrored": (
        ("as_addressed", "keep_under", "names_a_mirror", "stands_for"),
        "whose mirrors are filled: the user's own, no dump's; and which address each stands for",
    ),
    "replay_core.units.shard": (None, "which part of the units a worker takes: plain data"),
    "replay_core.units.folder": (("is_folder",), "a directory of units, by one small file"),
    "replay_core.replay.axes": (None, "the axes of a matrix: plain data, no torch"),
    "replay_core.replay.architectures": (("ARCHITECTURES",), "the random models that a question completes"),
    "replay_core.replay.frontier": (None, "which modules to look at after digests: plain data, no torch"),
    "replay_core.replay.forecast": (None, "what cannot run here, by the file system alone"),
    "replay_core.demo.faults": (("FAULTS",), "the choices of `demo --fault`: plain data, no torch"),
    "replay_core.replay.plan": (None, "what to replay: plain data, no torch"),
    "replay_core.telemetry.devices": (("gpus",), "the GPUs that `rldbg info` prints"),
}

#: Modules that may import torch or transformers at all, even inside a function; the rest of the core never does.
TORCH_ROOMS = ("replay", "recorder", "rollouts", "demo", "parity", "referee", "mismatch")
#: Below these floors nothing needs an array to be imported.
NUMPY_FREE = (
    "errors",
    "documents",
    "selection",
    "records",
    "dtypes",
    "naming",
    "engine_names",
    "jobs",
    "recorder",
    "export",
    "executors",
    "workbench",
)

NO_NOUNS = {"util", "utils", "helper", "helpers", "manager", "managers", "common", "misc"}


@dataclass(frozen=True)
class Import:
    """One imported module, and the names taken from it (none for `import x.y`)."""

    line: int
    module: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Module:
    """A source file of a package, by its dotted name."""

    name: str
    path: Path

    @property
    def room(self) -> str:
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else ""

    def imports(self) -> tuple[Import, ...]:
        package = self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]
        return _imports(self.path, self.path.stat().st_mtime_ns, package)

    def says(self, found: Import, what: str) -> str:
        return f"{self.name}:{found.line} imports {found.module}: {what}"


@cache
def _imports(path: Path, mtime_ns: int, package: str) -> tuple[Import, ...]:
    """What a file imports, read once for all who ask while it stands as it was written then."""
    found = []
    for node in statements(ast.parse(path.read_text(encoding="utf-8"), str(path)).body):
        if isinstance(node, ast.Import):
            found += [Import(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            found.append(Import(node.lineno, module, tuple(alias.name for alias in node.names)))
    return tuple(found)


def modules(root: Path, package: str) -> list[Module]:
    found = []
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found.append(Module(".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


def floor_violations(root: Path, package: str, floors: tuple[tuple[str, ...], ...]) -> list[str]:
    """Imports within one package that go up or sideways, and rooms without a floor."""
    level = {room: number for number, rooms in enumerate(floors) for room in rooms}
    wrong = []
    for module in modules(root, package):
        if module.room and module.room not in level:
            wrong.append(f"{module.name}: the room {module.room!r} has no floor; give it one in {Path(__file__).name}")
            continue
        for found in module.imports():
            for room in _rooms_of(found, package, level):
                if room == module.room:
                    continue
                if room == "__main__":
                    wrong.append(module.says(found, "nobody imports a __main__"))
                elif room not in level:
                    wrong.append(module.says(found, f"there is no floor for {room!r}"))
                elif module.room == "":
                    wrong.append(module.says(found, "the root of a package imports nothing"))
                elif level[room] < level[module.room]:
                    wrong.append(module.says(found, f"{room} is above {module.room}"))
                elif level[room] == level[module.room]:
                    wrong.append(module.says(found, f"{room} is beside {module.room}"))
    return wrong


def _rooms_of(found: Import, package: str, level: dict[str, int]) -> list[str]:
    parts = found.module.split(".")
    if parts[0] != package:
        return []
    if len(parts) > 1:
        return [parts[1]]
    # `from package import room`; what is no room is a name of the package's root.
    return [name for name in found.names if name in level or name == "__main__"]


def pairing_violations(root: Path) -> list[str]:
    """Imports of judging, or of what stands over both, by pairing: who faces whom is no question of verdicts."""
    below = "replay_core.compare.pairing"
    return [
        module.says(found, "pairing knows no verdicts")
        for module in modules(root, "replay_core")
        if module.name.startswith(below)
        for found in module.imports()
        if found.module.startswith("replay_core.compare") and not found.module.startswith(below)
    ]


def door_violations(root: Path) -> list[str]:
    """Imports of the core by the front end that go through no door, and of the front end by the core."""
    wrong = []
    for module in modules(root, "replay_core"):
        wrong += [
            module.says(found, "the core does not know its front end")
            for found in module.imports()
            if found.module.split(".")[0] == "tui_debugger"
        ]
    for module in modules(root, "tui_debugger"):
        for found in module.imports():
            if found.module.split(".")[0] == "replay_core":
                wrong += [module.says(found, what) for what in _shut_doors(found)]
    return wrong


def _shut_doors(found: Import) -> list[str]:
    if not found.names:
        # `import replay_core`: what is then reached through it must be a name of the root.
        return [] if found.module in DOORS else [f"{found.module} is no door of the core"]
    shut = []
    for name in found.names:
        inner = f"{found.module}.{name}"
        if inner in DOORS:
            continue
        allowed, _ = DOORS.get(found.module, ((), ""))
        if allowed is not None and name not in allowed:
            shut.append(f"{inner} is no door of the core")
    return shut


def library_violations(root: Path) -> list[str]:
    """torch or numpy where it must not be, be it inside a function."""
    wrong = []
    for module in [*modules(root, "replay_core"), *modules(root, "tui_debugger")]:
        screen = module.name.split(".")[0] == "tui_debugger"
        for found in module.imports():
            library = found.module.split(".")[0]
            if library in ("torch", "transformers") and (screen or module.room not in TORCH_ROOMS):
                wrong.append(module.says(found, f"{library} belongs to {', '.join(TORCH_ROOMS)}"))
            if library in ("numpy", "ml_dtypes", "scipy") and (screen or module.room in NUMPY_FREE):
                wrong.append(module.says(found, f"{module.room or module.name} is free of {library}"))
            if library in ("textual", "rich") and not screen:
                wrong.append(module.says(found, "the core draws nothing"))
    return wrong


def shape_violations(root: Path) -> list[str]:
    """Files named after no noun."""
    return [
        f"{path.relative_to(root)}: name it after a noun of the user's world"
        for folder in ("replay_core", "tui_debugger", "tests", "benchmarks")
        for path in sorted((root / folder).rglob("*.py"))
        if NO_NOUNS & {part.lower() for part in path.relative_to(root).with_suffix("").parts}
    ]


def violations(root: Path) -> list[str]:
    return [
        *floor_violations(root, "replay_core", CORE_FLOORS),
        *floor_violations(root, "tui_debugger", SCREEN_FLOORS),
        *pairing_violations(root),
        *door_violations(root),
        *library_violations(root),
        *shape_violations(root),
    ]


def test_the_house_stands_on_its_floors():
    assert not violations(ROOT), "\n" + "\n".join(violations(ROOT))


def test_the_table_describes_this_tree():
    assert len(modules(ROOT, "replay_core")) > 50
    assert len(modules(ROOT, "tui_debugger")) > 30


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("replay_core/dumps/planted.py", "from replay_core.compare import Comparison", "compare is above dumps"),
        ("replay_core/dumps/planted.py", "from replay_core import workbench", "workbench is above dumps"),
        ("replay_core/dumps/planted.py", "from replay_core.objectives import kl", "objectives is beside dumps"),
        ("replay_core/dumps/planted.py", "from ..compare import verdict", "compare is above dumps"),
        ("replay_core/dumps/planted.py", "def f():\n    import replay_core.replay.run", "replay is above dumps"),
        ("replay_core/records.py", "from replay_core.jobs import Job", "jobs is beside records"),
        ("replay_core/workbench.py", "import replay_core.__main__", "nobody imports a __main__"),
        ("replay_core/workbench.py", "from replay_core import __main__", "nobody imports a __main__"),
        (
            "replay_core/__init__.py",
            "from replay_core.errors import RldbgError",
            "the root of a package imports nothing",
        ),
        ("replay_core/newcomer.py", "", "has no floor"),
        ("replay_core/workbench.py", "import tui_debugger.paths", "the core does not know its front end"),
        ("replay_core/compare/planted.py", "import torch", "torch belongs to"),
        (
            "replay_core/compare/pairing/planted.py",
            "from replay_core.compare.judging.verdict import Verdict",
            "pairing knows no verdicts",
        ),
        ("replay_core/records.py", "import numpy as np", "records is free of numpy"),
        ("replay_core/measure/planted.py", "from rich.text import Text", "the core draws nothing"),
        ("tui_debugger/widgets/planted.py", "from tui_debugger.panes.log import LogPane", "panes is above widgets"),
        ("tui_debugger/session.py", "from tui_debugger.widgets.rows import Rows", "widgets is beside session"),
        ("tui_debugger/panes/planted.py", "def f():\n    import numpy", "is free of numpy"),
        ("tui_debugger/panes/planted.py", "from torch import nn", "torch belongs to"),
        ("tui_debugger/panes/planted.py", "from replay_core.compare import compare_runs", "is no door"),
        ("tui_debugger/panes/planted.py", "import replay_core.pages", "is no door"),
        ("tui_debugger/panes/planted.py", "from replay_core import pages", "is no door"),
        ("tui_debugger/panes/planted.py", "from replay_core.dumps import DIALECTS", "is no door"),
        ("replay_core/measure/utils.py", "", "a noun of the user's world"),
        ("replay_core/measure/helpers/planted.py", "", "a noun of the user's world"),
    ],
)
def test_a_planted_wrong_import_is_found(tmp_path: Path, file: str, text: str, complaint: str):
    planted = tmp_path / file
    planted.parent.mkdir(parents=True)
    planted.write_text(text)
    assert complaint in "\n".join(violations(tmp_path))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (
            "replay_core/compare/planted.py",
            "from replay_core import naming, pages\nfrom replay_core.dumps import open_run",
        ),
        ("replay_core/compare/planted.py", "from replay_core.compare.judging.verdict import Verdict"),
        ("replay_core/replay/planted.py", "import torch"),
        ("replay_core/__main__.py", "from replay_core.desk import perform"),
        ("tui_debugger/commands/planted.py", "from replay_core import workbench\nimport replay_core"),
        ("tui_debugger/panes/planted.py", "from replay_core.dumps import open_run\nfrom replay_core.jobs import Job"),
    ],
)
def test_an_import_that_goes_down_is_left_alone(tmp_path: Path, file: str, text: str):
    planted = tmp_path / file
    planted.parent.mkdir(parents=True)
    planted.write_text(text)
    assert not violations(tmp_path)
