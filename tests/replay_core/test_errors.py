"""Errors that others raise, as ours."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

from replay_core.errors import failing_disk

_FULL = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
import numpy as np
from safetensors.numpy import save_file
from replay_core.errors import failing_disk
try:
    save_file({"x": np.zeros(10_000)}, "x.safetensors")
except Exception as error:
    assert not isinstance(error, OSError)
    print(failing_disk(error, "a capsule"))
"""


def test_a_disk_that_is_full_is_said_whoever_wrote(tmp_path: object) -> None:
    said = subprocess.run(
        [sys.executable, "-c", _FULL], capture_output=True, text=True, check=True, cwd=str(tmp_path),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert said.stdout.startswith("a capsule could not go on: File too large")
    full = failing_disk(OSError(errno.ENOSPC, "No space left on device", "/x"), "the demo")
    assert full is not None
    assert (full.message, full.file) == ("the demo could not go on: No space left on device", "/x")
    for other in (ValueError("8 (os error many)"), ValueError("(os error 2)"), OSError(errno.ENOENT, "no")):
        assert failing_disk(other, "it") is None
