"""A skip for an unnamed reason, a misspelt marker and an empty list of parameters fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


#: What a test file holds -> how it ends, and the words that say why.
PLANTED = {
    "test_reason.py": ("def test_it(): pytest.skip('not today')", "FAILED", "does not name: Skipped: not today"),
    "test_module.py": (
        "pytest.importorskip('no_such_module')",
        "ERROR",
        "does not name: Skipped: could not import 'no_such_module'",
    ),
    "test_empty.py": (
        "@pytest.mark.parametrize('n', [])\ndef test_it(n): pass",
        "ERROR",
        "does not name: Skipped: got empty parameter set",
    ),
    "test_marker.py": ("@pytest.mark.sloow\ndef test_it(): pass", "ERROR", "'sloow' not found in `markers`"),
    "test_named.py": ("def test_it(): pytest.skip('no CUDA device')", "SKIPPED", "no CUDA device"),
}


@pytest.mark.long
def test_what_is_not_named_fails(tmp_path: Path) -> None:
    """One run for all: a start of pytest takes a second or two."""
    for name, (text, _, _) in PLANTED.items():
        (tmp_path / name).write_text(f"import pytest\n{text}\n")
    asked = ["-c", str(ROOT / "pyproject.toml"), "-p", "tests.skips", "-rA", "--continue-on-collection-errors"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *asked, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "", "COLUMNS": "400"},
    )
    _, _, summary = ran.stdout.partition("short test summary info")
    for name, (_, ended, said) in PLANTED.items():
        lines = [line for line in summary.splitlines() if name in line]
        assert [line.split()[0] for line in lines] == [ended], (name, ran.stdout)
        assert said in lines[0], (name, ran.stdout)
    assert ran.returncode == 1
