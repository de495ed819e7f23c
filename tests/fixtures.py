"""Where the genuine files of other frameworks lie, which are too large for the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FIXTURES = Path(os.environ.get("RLDBG_FIXTURES") or Path(__file__).resolve().parents[2] / "shared" / "fixtures")

needs_fixtures = pytest.mark.skipif(not FIXTURES.is_dir(), reason=f"no fixtures at {FIXTURES}; set RLDBG_FIXTURES")
