"""A skip for an unnamed reason, a misspelt marker and an empty list of parameters fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def test_it(): pytest.skip('not today')", "does not name: Skipped: not today"),
        ("pytest.importorskip('no_such_module')", "does not name: Skipped: could not import 'no_such_module'"),
        ("@pytest.mark.parametrize('n', [])\ndef test_it(n): pass", "does not name: Skipped: got empty parameter set"),
        ("@pytest.mark.sloow\ndef test_it(): pass", "'sloow' not found in `markers`"),
        ("def test_it(): pytest.skip('no CUDA device')", "1 skipped"),
    ],
)
def test_what_is_not_named_fails(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "test_planted.py").write_text(f"import pytest\n{text}\n")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "tests.skips", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
    )
    assert said in ran.stdout, ran.stdout
    assert (ran.returncode == 0) is (said == "1 skipped")
