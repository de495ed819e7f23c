"""What others do meanwhile: two screens on one dump, a reader beside a trainer that rotates, a folder that becomes
read-only, a recorder around a recorder, a cache that somebody spoiled, an install that its user may not write.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.dumps import open_run
from replay_core.errors import RldbgError
from replay_core.jobs import Job
from tests.builders import write_dump
from tests.tui_debugger.on_pty import OnPty

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="looks through /proc")]

ROOT = Path(__file__).parents[1]
#: Root may write everywhere; without these two rights it is held to a folder's mode like anybody else.
_LIKE_ANYBODY = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
if _LIKE_ANYBODY and shutil.which("setpriv") is None:
    pytest.skip("root may write everywhere", allow_module_level=True)

_ROTATING = """
import sys, torch
from replay_core.recorder import Recorder
recorder = Recorder(sys.argv[1], max_keep=4, asynchronous=sys.argv[2] == "async")
for step in range(int(sys.argv[3])):
    with recorder.step(step) as record:
        record("loss", values=torch.full((64, 64), float(step)), loss=step + .5)
recorder.close()
"""
_SPOILED = """
import os, sys, warnings
from pathlib import Path
import torch
from replay_core.errors import RldbgError
from replay_core.recorder import Recorder
warnings.simplefilter("always")
dump = Path(sys.argv[1])
recorder = Recorder(dump, on_error=sys.argv[2], asynchronous=sys.argv[3] == "async")
try:
    for step in range(30):
        if step == 10:
            for folder in [dump, *(path for path in dump.rglob("*") if path.is_dir())]:
                folder.chmod(0o555)
            for file in dump.glob("index_*"):
                file.chmod(0o444)
        with recorder.step(step) as record:
            record("loss", values=torch.full((300,), float(step)))
    recorder.close()
except RldbgError as error:
    print("raised:", error.message)
    sys.exit(7)
print("trained")
"""


_ON_FUSE = """
import sys, warnings
import torch
from replay_core.errors import RldbgError
from replay_core.recorder import Recorder
warnings.simplefilter("ignore")
try:
    recorder = Recorder(sys.argv[1], on_error=sys.argv[2], asynchronous=sys.argv[3] == "async", patience_s=1.0)
    for step in range(20):
        if step == 10:
            recorder.flush()
            print("half", flush=True)
            sys.stdin.readline()
        with recorder.step(step) as record:
            record("loss", values=torch.full((300,), float(step)))
    recorder.close()
    print("trained, lost", " ".join(one.key.split(",")[0] for one in recorder.lost), flush=True)
except RldbgError as error:
    print("raised:", error.message, flush=True)
"""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a command with a home of its own; what a test left read-only is made writable again."""
    home = tmp_path / "home"
    home.mkdir()
    yield {
        **os.environ, "HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        **{f"XDG_{kind}_HOME": str(home / kind.lower()) for kind in ("CACHE", "STATE", "DATA", "CONFIG")},
    }  # fmt: skip
    for path in [tmp_path, *tmp_path.rglob("*")]:
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)


def _bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_two_screens_on_one_dump_do_not_know_each_other(tmp_path: Path, world: dict[str, str]) -> None:
    run = tmp_path / "run"
    write_dump(run, {"forward_data": {"log_probs": torch.zeros(2, 4), "entropy": torch.ones(2, 4)}})
    before = _bytes_of(run)
    own: dict[str, Any] = {name: text for name, text in world.items() if name not in ("PYTHONPATH", "TERM")}
    screens = [OnPty("-m tui_debugger", "ui", str(run), *more, **own) for more in ([], ["--follow"])]
    try:
        for one in screens:
            one.wait_for(b"entropy", 90)
        screens[0].send(b"q")
        assert screens[0].ended(30) == 0
        # The other still answers.
        screens[1].send(b"?")
        screens[1].wait_for(b"searches", 20)
        at = len(screens[1].output)
        screens[1].send(b"\x1b")
        # An escape with a letter behind it is another key: the help has to be gone first.
        screens[1].wait_for(b"entropy", 20, since=at)
        screens[1].send(b"q")
        assert screens[1].ended(30) == 0
    finally:
        for one in screens:
            one.close()
    assert _bytes_of(run) == before


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_run_is_read_while_its_recorder_writes_and_takes_away(tmp_path: Path, kind: str) -> None:
    """Whoever follows, opens, compares and diagnoses sees some steps of it, and never an error that is nobody's."""
    from replay_core import workbench
    from replay_core.desk import perform

    run = tmp_path / "run"
    trainer = subprocess.Popen([sys.executable, "-c", _ROTATING, str(run), kind, "1500"])
    looks = followed = 0
    seen: set[int] = set()
    said: list[str] = []
    try:
        while trainer.poll() is None:
            have = -1 if looks % 3 == 0 else followed
            try:
                answer = perform(Job("follow", {"path": str(run), "have": have}))
                if answer["run"] is not None:
                    followed = answer["total"]
                    seen |= {record["key"]["step"] for record in answer["run"]["records"]}
                workbench.diagnose(run)
                workbench.compare_dumps(run, run)
            except RldbgError as error:
                # A step that was there and went between a look and the next one is said so, by name.
                said.append(str(error))
            looks += 1
    finally:
        trainer.kill()
        trainer.wait()
    assert trainer.returncode == 0
    assert [one for one in said if str(run) not in one] == []
    assert looks > 3
    assert max(seen) > 100
    found = open_run(run)
    assert found.steps() == [1496, 1497, 1498, 1499]
    assert found.problems == []


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_folder_that_becomes_read_only_costs_records_and_no_trainer(
    tmp_path: Path, world: dict[str, str], on_error: str, kind: str
) -> None:
    dump = tmp_path / "dump"
    command = [*_LIKE_ANYBODY, sys.executable, "-c", _SPOILED, str(dump), on_error, kind]
    done = subprocess.run(command, env=world, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    if on_error == "warn":
        assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr[-2000:]
        assert "Permission denied" in done.stderr
    else:
        assert done.returncode == 7, done.stderr[-2000:]
        assert "Permission denied" in done.stdout
    run = open_run(dump)
    steps = [step for step in run.steps() if step is not None]
    # What waited in the queue is lost, whole, from the end.
    assert steps == list(range(10 if kind == "sync" else len(steps)))
    for record in run.records:
        assert [ref.shape for ref in record.tensors()] == [(300,)]


def test_a_recorder_around_a_recorder_runs_the_trainer_once(tmp_path: Path, world: dict[str, str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, sys\nfrom pathlib import Path\n"
        "Path(sys.argv[1]).open('a').write('ran\\n')\n"
        "torch.nn.Linear(2, 2)(torch.ones(1, 2))\nsys.exit(5)\n"
    )
    words = ["-m", "tui_debugger", "record"]
    done = subprocess.run(
        [sys.executable, *words, "--", sys.executable, *words, "--", sys.executable, str(script), "ran"],
        env=world, cwd=tmp_path, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert (tmp_path / "ran").read_text() == "ran\n", done.stderr[-2000:]
    assert done.returncode == 5, done.stderr[-2000:]
    assert "Traceback" not in done.stderr


def test_a_cache_that_somebody_spoiled_stops_nobody(tmp_path: Path, world: dict[str, str]) -> None:
    """Files of noise, folders where files should be, links and pipes, in every folder that rldbg keeps things in."""
    run = tmp_path / "run"
    write_dump(run, {"forward_data": {"log_probs": torch.zeros(2, 4), "entropy": torch.ones(2, 4)}})
    for kind in ("cache", "state", "config", "data"):
        own = Path(world["HOME"]) / kind / "rldbg"
        (own / "replays" / "20200101-000000-x-1-0").mkdir(parents=True)
        (own / "replays" / "20200101-000000-x-1-0" / "manifest.json").write_bytes(b"\0\xff{")
        (own / "replays" / "noise").write_bytes(os.urandom(5000))
        (own / "replays" / "loop").symlink_to(own / "replays")
        (own / "themes").mkdir()
        (own / "themes" / "x.toml").write_bytes(b"\xff\0[[")
        (own / "themes" / "deep.toml").write_text("a = " + "[" * 50_000)
        for name in ("settings.json", "settings.toml", "remembered.json", "state.json", "copied", "config.toml"):
            (own / name).write_bytes(b"{" * 50_000 + b"\0\xff")
        os.mkfifo(own / "replays" / "pipe")
    for words in (["ls", str(run)], ["compare", str(run), str(run)], ["diagnose", str(run)], ["cache"], ["info"]):
        command = [sys.executable, "-m", "tui_debugger", *words]
        done = subprocess.run(command, env=world, capture_output=True, text=True, timeout=60)
        assert done.returncode in (0, 2), (words, done.stderr[-2000:])
        assert "Traceback" not in done.stderr
    own_words: dict[str, Any] = {name: text for name, text in world.items() if name not in ("PYTHONPATH", "TERM")}
    screen = OnPty("-m tui_debugger", "ui", str(run), **own_words)
    try:
        screen.wait_for(b"entropy", 90)
        screen.send(b"q")
        assert screen.ended(30) == 0
    finally:
        screen.close()


def test_an_install_that_its_user_may_not_write_reads_and_writes_nothing_beside_itself(
    tmp_path: Path, world: dict[str, str]
) -> None:
    """The wheel, installed by somebody else, for a user whose home is not there."""
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check"]
    source = tmp_path / "source"
    kept = shutil.ignore_patterns(
        ".git", ".venv", "__pycache__", "tests", "*.egg-info", "build", ".mypy_cache", "shared"
    )
    shutil.copytree(ROOT, source, ignore=kept, symlinks=True)
    built = subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(source)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr[-2000:]
    wheel = next(wheels.glob("*.whl"))
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True, timeout=300,
                   capture_output=True)  # fmt: skip
    run = tmp_path / "run"
    write_dump(run, {"forward_data": {"log_probs": torch.zeros(2, 4), "entropy": torch.ones(2, 4)}})
    before = _bytes_of(site)
    for folder in [path for where in (site, run) for path in (where, *where.rglob("*")) if path.is_dir()]:
        folder.chmod(0o555)
    nobody = {
        name: text for name, text in world.items() if not name.startswith("XDG_") and name != "PYTHONDONTWRITEBYTECODE"
    } | {"HOME": "/nonexistent", "PYTHONPATH": str(site)}
    own = "import sys, tui_debugger.cli as c; assert c.__file__.startswith(sys.argv.pop(1)), c.__file__; c.main()"
    start = [*_LIKE_ANYBODY, sys.executable, "-c", own]
    for words, code in (
        (["ls", str(run)], 0),
        (["show", str(run), "log_probs"], 0),
        (["compare", str(run), str(run)], 0),
        (["diagnose", str(run)], 0),
        (["info"], 0),
        (["cache"], 0),
    ):
        done = subprocess.run(
            [*start, str(site), *words], env=nobody, cwd="/", capture_output=True, text=True, timeout=120
        )
        assert done.returncode == code, (words, done.stderr[-2000:])
        assert "Traceback" not in done.stderr
    for folder in [site, *(path for path in site.rglob("*") if path.is_dir())]:
        folder.chmod(0o755)
    assert _bytes_of(site) == before


@pytest.fixture
def mounted(tmp_path: Path, world: dict[str, str]) -> Iterator[tuple[Path, Path, subprocess.Popen[bytes]]]:
    """(A folder through a file system of its own, the folder behind it, the process that serves it.)

    `world` looks through what lies here once this is gone.
    """
    if shutil.which("bindfs") is None or not Path("/dev/fuse").exists():
        pytest.skip("bindfs is not installed")
    behind, seen = tmp_path / "behind", tmp_path / "seen"
    behind.mkdir()
    seen.mkdir()
    serving = subprocess.Popen(["bindfs", "-f", str(behind), str(seen)])
    while not seen.is_mount():
        assert serving.poll() is None, "bindfs cannot mount here"
        time.sleep(0.01)
    yield seen, behind, serving
    serving.kill()
    serving.wait()
    subprocess.run(["fusermount3", "-uz", str(seen)], check=False)


@pytest.mark.parametrize("how", ["dies", "hangs"])
@pytest.mark.parametrize("asynchronous", ["async", "sync"])
@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_trainer_outlives_a_file_system_that_dies_or_hangs(
    mounted: tuple[Path, Path, subprocess.Popen[bytes]],
    world: dict[str, str],
    how: str,
    asynchronous: str,
    on_error: str,
) -> None:
    seen, behind, serving = mounted
    words = [sys.executable, "-c", _ON_FUSE, str(seen / "dump"), on_error, asynchronous]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=world, text=True) as trainer:
        assert trainer.stdin is not None
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "half\n"
        serving.send_signal(signal.SIGKILL if how == "dies" else signal.SIGSTOP)
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        said = trainer.stdout.readline()  # a trainer that hangs at its end says nothing
        serving.kill()
    if on_error == "raise":
        assert "answer" in said or "not connected" in said
    else:
        lost = said.split("lost ")[1]
        kept = {str(record.key.step) for record in open_run(behind / "dump").records}
        assert {f"step {step}" for step in range(20)} <= {f"step {step}" for step in kept} | set(
            re.findall(r"step \d+", lost)
        )
    assert trainer.returncode == 0
    assert [record.key.step for record in open_run(behind / "dump").records][:10] == list(range(10))
