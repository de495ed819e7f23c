"""Every hostile file through every command that reads, in a process of its own under the limits that users have."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.builders import save_file
from tests.hostile import MAKERS

MOST_S, MOST_MIB = 2.0, 512
#: What `rldbg --version` and the libraries of a comparison hold before they read anything.
_ITS_OWN_MIB = 130
#: The high-water mark is asked of the memory itself: that of the process counts whoever started it.
_START = """
import sys
try:
    from tui_debugger.cli import main
    main(sys.argv[1:])
finally:
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM:"):
            sys.stderr.write("\\n" + line)
"""

#: A dump that shares nothing with any of them: whatever a file holds is on one side alone.
GENUINE = Path(__file__).parent / "data" / "native" / "ddp"

pytestmark = pytest.mark.slow


def ended(words: list[str], said: Path) -> tuple[int, float, float]:
    """Exit code, CPU seconds and MiB at most of a command; what it says goes to the file `said`."""
    command = [sys.executable, "-c", _START, *words]
    # An installation has its bytecode: compiling sixty modules anew is no part of what a file costs.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with said.open("wb") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, env=env)
        killer = threading.Timer(60, process.kill)
        killer.start()
        _, status, usage = os.wait4(process.pid, 0)
        killer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    held = re.search(r"VmHWM:\s+(\d+) kB\s*$", said.read_text())
    return process.returncode, usage.ru_utime + usage.ru_stime, int(held[1]) / 1024 if held else 0.0


@pytest.mark.parametrize("name", MAKERS)
def test_no_command_hangs_floods_or_fails_on_a_hostile_file(tmp_path: Path, name: str) -> None:
    if "parquet" in name:
        pytest.importorskip("pyarrow")
    folder, said = tmp_path / "dump", tmp_path / "said"
    folder.mkdir()
    path = str(MAKERS[name](folder))
    faults = []
    for words in (
        ["ls", path],
        ["show", path],
        ["show", path, "input_ids"],
        ["compare", path, path],
        ["compare", str(GENUINE), path],
        ["diagnose", path],
    ):
        code, cpu_s, mib = ended(words, said)
        if code not in range(5) or cpu_s > MOST_S or mib > MOST_MIB + _ITS_OWN_MIB:
            faults.append(f"{words[0]}: exit {code}, {cpu_s:.1f} s, {mib:.0f} MiB, {said.read_text()[-300:]}")
    assert not faults


@pytest.mark.parametrize("words", [["ls"], ["show"], ["show", "w"], ["compare"], ["diagnose"]], ids=" ".join)
def test_a_file_cut_and_grown_under_a_command_ends_in_an_answer_or_an_error(tmp_path: Path, words: list[str]) -> None:
    """Five hundred races of each command."""
    tensors = {"w": torch.arange(300_000.0), "v": torch.arange(40_000.0).reshape(200, 200).T}
    path, other = save_file(tmp_path / "x.pt", tensors), save_file(tmp_path / "y.pt", tensors)
    asked = [words[0], str(path), *([str(other)] if words == ["compare"] else words[1:])]
    code = (
        "import collections, contextlib, io, sys\n"
        "from tui_debugger.cli import run\n"
        "codes = collections.Counter()\n"
        "for _ in range(500):\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):\n"
        "        code = run(sys.argv[1:])\n"
        "    codes[code] += 1\n"
        "print(*codes)\n"
    )
    whole, stopped = path.read_bytes(), threading.Event()
    kept = len(whole) // 3

    def cut() -> None:
        while not stopped.is_set():
            os.truncate(path, kept)
            time.sleep(0.0005)
            # Grown by nothing first, then by what it held: a torch file ends in the list of what is in it.
            os.truncate(path, len(whole))
            with path.open("r+b") as file:
                file.seek(kept)
                file.write(whole[kept:])
            time.sleep(0.002)

    cutter = threading.Thread(target=cut)
    cutter.start()
    try:
        done = subprocess.run([sys.executable, "-c", code, *asked], capture_output=True, text=True, timeout=900)
    finally:
        stopped.set()
        cutter.join()
    assert done.returncode == 0, done.stderr[-1000:]
    codes = set(map(int, done.stdout.split()))
    assert codes <= set(range(5))
    assert len(codes) > 1  # some saw it whole, some cut
