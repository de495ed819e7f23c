"""Damaged files by the thousand: an error of ours or an answer, in time, in bounds, and nothing run."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.replay_core.dumps.containers.fuzzing import CONTAINERS, is_harmless

#: The bounds that opening a damaged file keeps to.
SLOWEST_S = 2.0
GROWN_MIB = 512


def fuzzed(kinds: list[str], count: int, folder: Path) -> None:
    module = "tests.replay_core.dumps.containers.fuzzing"
    arguments = [sys.executable, "-m", module, ",".join(kinds), str(count), "20", str(folder)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    reports = json.loads(done.stdout)
    assert list(reports) == kinds
    for kind, report in reports.items():
        assert report["strange"] == [], kind
        assert report["forbidden"] == [], kind
        assert report["slowest_s"] < SLOWEST_S, kind
        assert report["grown_mib"] < GROWN_MIB, kind
        assert report["files"] == count, kind
        assert report["refused"] > 0, kind


@pytest.mark.long
def test_fifty_damaged_files_of_every_container(tmp_path: Path) -> None:
    fuzzed([kind for kind in CONTAINERS if kind != "parquet" or find_spec("pyarrow")], 50, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONTAINERS)
def test_two_thousand_damaged_files(tmp_path: Path, kind: str) -> None:
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    fuzzed([kind], 2_000, tmp_path)


def test_the_watcher_tells_a_files_code_from_an_import() -> None:
    assert not is_harmless("exec", (compile("1", "<pickle>", "exec"),))
    assert not is_harmless("compile", (b"1", "<string>"))
    assert not is_harmless("os.system", ("true",))
    assert is_harmless("exec", (compile("1", json.__file__, "exec"),))
