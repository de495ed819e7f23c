"""The recipe of docs/ci.md, its commands run as they stand: it passes on what is healthy and fails on a fault."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINES = re.findall(r"^ +- run: (.*)$", (ROOT / "docs/ci.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_the_recipe_installs_records_twice_and_asks_three_questions():
    assert [line.split()[:2] for line in LINES] == [
        ["pip", "install"], ["python", "base/train_tiny.py"], ["python", "train_tiny.py"],
        ["rldbg", "compare"], ["rldbg", "diagnose"], ["rldbg", "referee"],
    ]  # fmt: skip


@pytest.mark.slow
def test_the_recipe_passes_on_what_is_healthy_and_fails_on_a_fault(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name, words in (("python", ""), ("rldbg", " -m tui_debugger")):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable}{words} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "base").mkdir()
    for place in (tmp_path, tmp_path / "base"):
        shutil.copy(ROOT / "docs/ci/train_tiny.py", place)

    def ran(line: str, **more: str) -> int:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
        environment |= {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"), "OMP_NUM_THREADS": "1", **more}
        line = f"set -o pipefail; {line}"
        return subprocess.run(["bash", "-e", "-c", line], cwd=tmp_path, env=environment, check=False).returncode

    assert [ran(line) for line in LINES[1:]] == [0, 0, 0, 0, 0]
    assert (tmp_path / "summary.md").read_text().count("### ") == 3
    assert {_failures(file) for file in tmp_path.glob("*.xml")} == {0}

    shutil.rmtree(tmp_path / "now")
    for file in (*tmp_path.glob("*.xml"), *tmp_path.glob("*.html")):
        file.unlink()
    assert ran(LINES[2], TEMPERATURE="0.9") == 0
    assert [ran(line) for line in LINES[3:]] == [1, 0, 1], "a log-probability alone: no rule of a diagnosis sees it"
    assert _failures(tmp_path / "compare.xml") > 0
    assert _failures(tmp_path / "floor.xml") > 0
    assert "temperature 0.9" in (tmp_path / "summary.md").read_text()


def _failures(file: Path) -> int:
    suite = ElementTree.parse(file).getroot().find("testsuite")
    assert suite is not None
    return int(suite.attrib["failures"]) + int(suite.attrib["errors"])
